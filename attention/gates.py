"""Scalar gates: at each token a key/value head keeps a fraction gamma of its state.

    learned   gamma_t = sigmoid(W_gamma x_t + b), b starting at `gate_bias`       ("Conformal Transformations", 3.1)
    fixed     gamma = exp(-m), m = 2^(-8 h / Hkv) for head h                      (which is ALiBi, appendix A.1)

A weight w_ij is multiplied by the gates of the tokens j+1 .. i. Everything is computed in float32, outside autocast.
"""

import torch
from torch import nn
from torch.nn import functional as F

from .operator.backend import transforms_active
from .operator.forms import accumulation_dtype


class LearnedGate(nn.Module):
    def __init__(self, n_embd, n_kv_head, bias):
        super().__init__()
        self.W_gamma = nn.Parameter(torch.zeros(n_kv_head, n_embd))  # a fresh gate is sigmoid(bias) at every token
        self.b = nn.Parameter(torch.full((n_kv_head,), float(bias)))

    def input_weight(self):
        return self.W_gamma

    def forward(self, x):
        """Return log gamma [B, T, Hkv] <= 0 for the products x [B, T, Hkv] of W_gamma and a layer's input."""
        return F.logsigmoid(x + self.b)

    def decoder_weights(self):
        return {"gate": (self.W_gamma, self.b)}


class FixedGate(nn.Module):
    def __init__(self, n_kv_head):
        super().__init__()
        self.register_buffer("log_g", torch.empty(n_kv_head), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        """Fill the gates, which no checkpoint has, of a module that was made without memory."""
        self.log_g.copy_(-alibi_slopes(len(self.log_g)))

    def input_weight(self):
        return None

    def forward(self, x):
        """Return log gamma [B, T, Hkv], the same at every token, for x [B, T, any]."""
        return self.log_g.expand(*x.shape[:2], -1)

    def decoder_weights(self):
        return {"slopes": -self.log_g}


def alibi_slopes(heads, device=None):
    """Return m_h = 2^(-8 h / heads) for h = 1..heads, float32 (Press et al., 2021)."""
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, device=device))


def make_gate(config):
    """Return the gate that config.gate, "learned" or "fixed", asks for."""
    gates = {
        "learned": lambda: LearnedGate(config.n_embd, config.n_kv_head, config.gate_bias),
        "fixed": lambda: FixedGate(config.n_kv_head),
    }
    return gates[config.gate]()


def linear_fp32(x, weight, bias=None):
    """Return x W^T + b [..., n] for x [..., C] and weight [n, C], in float32 (float64 for float64 weights).

    That holds whatever the precision of matrix products is: a sum of products, row by row of W, never becomes bf16 or
    tf32.

    On a GPU under autocast to bfloat16, x is rounded as for every other linear layer, and the product and the gradient
    to W run on the matrix unit as exactly as in float32; the gradient to x is autocast's. (Row by row the product took
    8 of 200 ms a step.)
    """
    fast = runs_on_matrix_unit(x, weight)
    with torch.autocast(x.device.type, enabled=False):
        if fast:
            padded = F.pad(weight, (0, 0, 0, -len(weight) % 16))  # to rows of sizes that fast kernels take
            y = Product.apply(x.to(torch.bfloat16).flatten(0, -2), padded)[:, : len(weight)].unflatten(0, x.shape[:-1])
        else:
            x = x.to(accumulation_dtype(weight))
            y = torch.stack([(x * w).sum(-1) for w in weight], dim=-1)
        return y if bias is None else y + bias


def runs_on_matrix_unit(x, weight):
    """Return whether `linear_fp32` is a `Product`, which PyTorch's transforms do not take."""
    kind = x.device.type
    bfloat16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
    return kind == "cuda" and bfloat16 and weight.dtype == torch.float32 and not transforms_active()


class Product(torch.autograd.Function):
    """Multiply x [N, C] bfloat16 by weight [n, C] float32 as exactly as in float32, in products of bfloat16 numbers.

    So is the gradient to weight. It sums the gradients of gates or positions, each a sum over all later tokens that
    largely cancels.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return multiply(x, pieces(weight, 0).t()).unflatten(1, (3, -1)).sum(1)

    @staticmethod
    def backward(ctx, d):
        x, weight = ctx.saved_tensors
        dw = multiply(pieces(d, 1).t(), x).unflatten(0, (3, -1)).sum(0)
        return d.to(torch.bfloat16) @ weight.to(torch.bfloat16), dw


def pieces(x, dim):
    """Return three tensors that add up to x, float32, in one bfloat16 tensor along `dim`: each has 8 of its 24 bits.

    They are cut off as bits, because torch.compile leaves out casts to bfloat16 and back where it fuses them.
    """
    parts = []
    for _ in range(2):
        parts.append((x.view(torch.int32) & -65536).view(torch.float32))
        x = x - parts[-1]
    return torch.cat((*parts, x), dim).to(torch.bfloat16)


def multiply(a, b):
    """Return the product of a [N, C] and b [C, M], bfloat16, in float32; see embedding.py about operators."""
    return (mm_fp32 if torch.compiler.is_compiling() else _mm_fp32)(a, b)


def _mm_fp32(a, b):
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


@torch.library.custom_op("sympow::mm_fp32", mutates_args=())
def mm_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _mm_fp32(a, b)


@mm_fp32.register_fake
def _(a, b):
    return a.new_empty(len(a), b.shape[1], dtype=torch.float32)


def reset_gates(resets, log_g, k):
    """Return log_g [B, T, Hkv] with -inf where resets [B, T] is true: those tokens see nothing before them.

    log_g None means no gates; without resets it is returned as it is. k gives the shape, dtype and device.
    """
    if resets is None:
        return log_g
    log_g = gates_of_one(k) if log_g is None else log_g
    return log_g.masked_fill(resets.unsqueeze(-1), float("-inf"))


def join_gates(*pieces):
    """Return log_g of pieces (k, log_g) that follow each other; None if all are None. One that is None is of zeros."""
    if all(log_g is None for _, log_g in pieces):
        return None
    return torch.cat([gates_of_one(k) if log_g is None else log_g for k, log_g in pieces], dim=1)


def gates_of_one(k):
    """Return log_g [B, T, Hkv] of zeros for keys k [B, T, Hkv, D]."""
    return torch.zeros(k.shape[:3], dtype=accumulation_dtype(k), device=k.device)
