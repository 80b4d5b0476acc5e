"""Softmax that forgets: "Forgetting Transformer" (Lin et al., 2025), to compare with power attention with such gates.

    pip install flash-linear-attention      # for its kernels, on a GPU
    python -m experiments.train --attention=forgetting --n_layer=6 ...

What it computes      y_i = sum_{j<=i} A_ij v_j,  A_ij proportional to b_ij exp(q_i . k_j / sqrt(D))
The quadratic form    b_ij = product of gamma_m over m = j+1..i,  gamma_m = sigmoid(W_gamma x_m + b) per key/value head
The state             every key, value and gate

By the gates it does without positions.
"""

import torch

from sympow.attention.gates import make_gate
from sympow.attention.operator.forms import accumulation_dtype
from sympow.attention.variant import KVCacheVariant


class Forgetting(KVCacheVariant):
    gates = ("learned",)

    @classmethod
    def check(cls, config):
        if config.reset_token >= 0:
            raise ValueError("forgetting does not reset between packed documents: train it without pack")

    def __init__(self, config):
        super().__init__(config)
        self.gate = make_gate(config)

    def input_weight(self):
        return self.gate.input_weight()

    def forward(self, x, qkv, resets=None, state=None):
        positions = self.positions(x, state)
        q, k, v = self.rotate(qkv, positions)
        log_g = self.gate(x)
        if state is not None:
            state = state.append(k, v, log_g, positions)
            k, v, log_g = state.k, state.v, state.log_g
        on_kernels = q.is_cuda and q.shape[1] == k.shape[1] and q.dtype != torch.float64
        return (fla_attention if on_kernels else forgetting_attention)(q, k, v, log_g), state

    def statistics(self, x, q):
        return {"gate": self.gate(x).exp().mean().item()}


def forgetting_attention(q, k, v, log_g):
    """Compute softmax attention with gates in plain PyTorch.

    q [B, n, H, D] belong to the last n of the T tokens of k and v [B, T, Hkv, D] and log_g [B, T, Hkv], the natural log
    of the gate in front of each token. Returns [B, n, H, D] in q's dtype, computed in float32, or float64 for float64.
    """
    n, T, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    dtype = accumulation_dtype(q)
    k, v, log_g = (x.to(dtype).repeat_interleave(groups, dim=2).transpose(1, 2) for x in (k, v, log_g))
    sums = log_g.cumsum(2)  # [B, H, T]
    scores = q.to(dtype).transpose(1, 2) @ k.mT / q.shape[3] ** 0.5 + sums[:, :, T - n :, None] - sums[:, :, None]
    tokens = torch.arange(T, device=q.device)
    weights = scores.masked_fill(tokens > tokens[T - n :, None], float("-inf")).softmax(-1)  # [B, H, n, T]
    return (weights @ v).transpose(1, 2).to(q.dtype)


@torch.compiler.disable
def fla_attention(q, k, v, log_g):
    """Compute what `forgetting_attention` does, for n = T, on the Triton kernels of flash-linear-attention."""
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    return parallel_forgetting_attn(q, k, v, log_g.repeat_interleave(q.shape[2] // k.shape[2], dim=2))
