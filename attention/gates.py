"""Scalar gates: at each token a key/value head keeps a fraction gamma of its state.

    learned   gamma_t = sigmoid(W_gamma x_t + b), b starting at `gate_bias`       ("Conformal Transformations", 3.1)
    fixed     gamma = exp(-m), one m = 2^(-8 h / Hkv) a head                      (which is ALiBi, appendix A.1)

A weight w_ij is multiplied by the gates of the tokens j+1 .. i. Everything is in float32, outside autocast.
"""

import torch
from torch import nn
from torch.nn import functional as F


class LearnedGate(nn.Module):
    def __init__(self, n_embd, n_kv_head, bias):
        super().__init__()
        self.W_gamma = nn.Parameter(torch.zeros(n_kv_head, n_embd))  # a fresh gate is sigmoid(bias) at every token
        self.b = nn.Parameter(torch.full((n_kv_head,), float(bias)))

    def forward(self, x):
        """x [B, T, C] -> log gamma [B, T, Hkv], float32 or wider, <= 0."""
        return F.logsigmoid(linear_fp32(x, self.W_gamma, self.b))


class FixedGate(nn.Module):
    def __init__(self, n_kv_head):
        super().__init__()
        self.register_buffer("log_g", -alibi_slopes(n_kv_head), persistent=False)

    def forward(self, x):
        return self.log_g.expand(*x.shape[:2], -1)


def alibi_slopes(heads):
    """m_h = 2^(-8 h / heads) for h = 1..heads, float32 (Press et al., 2021)."""
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))


def make_gate(kind, config):
    if kind == "learned":
        return LearnedGate(config.n_embd, config.n_kv_head, config.gate_bias)
    return FixedGate(config.n_kv_head)


def linear_fp32(x, weight, bias=None):
    """x W^T + b in float32 (float64 for float64 weights), whatever autocast and the precision of matrix products say:
    a sum of products, row by row of W, never becomes bf16 or tf32. x [..., C], weight [n, C] -> [..., n]."""
    with torch.autocast(x.device.type, enabled=False):
        y = torch.stack([(x.to(w.dtype) * w).sum(-1) for w in weight], dim=-1)
        return y if bias is None else y + bias


def forget_at(resets, log_g, k):
    """log_g with -inf where resets [B, T] is true: those tokens see nothing before them. log_g None means 0."""
    if resets is None:
        return log_g
    if log_g is None:
        log_g = torch.zeros(
            k.shape[:3], dtype=torch.float64 if k.dtype == torch.float64 else torch.float32, device=k.device
        )
    return log_g.masked_fill(resets.unsqueeze(-1), float("-inf"))
