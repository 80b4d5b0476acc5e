"""The quadratic form with a power for each row as a torch operator.

    y = adaptive_attention(q, k, v, powers, log_g)          # differentiable in q, k, v and powers

The kernels are those of quadratic.py with P = 0. As in operators.py there is one operator forward and one backward,
opaque to torch.compile; they can be differentiated once.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from . import quadratic
from .operators import pad_queries
from .steps import empty_like, register_gradient


def adaptive_attention(q, k, v, powers, log_g=None):
    """Return y [B, n, H, D] in q's dtype: y_i = sum_j w_ij v_j / sum_j w_ij, w_ij = |q_i . k_j|^p_i, j <= i.

    q [B, n, H, D], of the last n of T tokens, k, v [B, T, Hkv, D] bfloat16, float16 or float32, any strides; powers [B,
    n] float32, at least 1; log_g [B, T, Hkv] float32 of 0 and -inf (which begins a document) or None, all on one GPU.
    """
    q, extra = pad_queries(q, k)
    powers = F.pad(powers, (extra, 0), value=2.0) if extra else powers
    return _adaptive(q, k, v, powers, log_g)[0][:, extra:]


@torch.library.custom_op("sympow::adaptive", mutates_args=())
def _adaptive(q: Tensor, k: Tensor, v: Tensor, powers: Tensor, log_g: Tensor | None) -> tuple[Tensor, Tensor]:
    return quadratic.forward(q, k, v, log_g, p=0, powers=powers)


@_adaptive.register_fake
def _(q, k, v, powers, log_g):
    B, n, H, _ = q.shape
    return empty_like(q), q.new_empty(B, H, quadratic.padded(n), dtype=torch.float32)


@torch.library.custom_op("sympow::adaptive_backward", mutates_args=())
def _adaptive_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, powers: Tensor, log_g: Tensor | None, y: Tensor, l: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return quadratic.backward(dy, None, q, k, v, log_g, y, l, p=0, powers=powers)


@_adaptive_backward.register_fake
def _(dy, q, k, v, powers, log_g, y, l):
    return *map(empty_like, (q, k, v)), q.new_empty(powers.shape, dtype=torch.float32)


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx, dy, _):
    q, k, v, powers, log_g, y, l = ctx.saved_tensors
    return *_adaptive_backward(dy, q, k, v, powers, log_g, y, l), None


register_gradient(_adaptive, _save, _differentiate, _adaptive_backward)
