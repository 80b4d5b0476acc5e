"""Adaptive power attention as a torch operator: a power for each token in the quadratic form.

    y = adaptive_attention(q, k, v, powers, log_g)          # differentiable in q, k, v and powers

As in operators.py there is one operator forward and one backward, opaque to torch.compile; they can be differentiated
once.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..arguments import check, check_device, check_qkv, to_width
from ..common import padded
from ..operators import pad_queries
from ..transforms import asked, empty_like, keep, transformable, transformable_once
from . import passes


def adaptive_attention(q, k, v, powers, log_g=None):
    """Return y [B, n, H, E] in q's dtype: y_i = sum_j w_ij v_j / sum_j w_ij, w_ij = |q_i . k_j|^p_i, j <= i.

    q [B, n, H, D], of the last n of T tokens, k [B, T, Hkv, D], v [B, T, Hkv, E] bfloat16 or float32, any strides, D
    and E at most 256 (in float32 128); powers [B, n] float32, at least 1; log_g [B, T, Hkv] float32 of 0 and -inf
    (which begins a document) or None, all on one GPU. Raises ValueError for arguments that do not fit.
    """
    check_qkv("adaptive", q, k, v)
    check("powers", powers, q.shape[:2])
    check("log_g", log_g, k.shape[:3])
    check_device(q, k=k, v=v, powers=powers, log_g=log_g)
    (q, extra), E = pad_queries(q, k), v.shape[3]
    powers = F.pad(powers, (extra, 0), value=2.0) if extra else powers
    return _adaptive(*to_width("adaptive", q, k, v), powers, log_g)[0][:, extra:, :, :E]


@torch.library.custom_op("sympow::adaptive", mutates_args=())
def _adaptive_operator(q: Tensor, k: Tensor, v: Tensor, powers: Tensor, log_g: Tensor | None) -> tuple[Tensor, Tensor]:
    return passes.forward(q, k, v, powers, log_g)


@_adaptive_operator.register_fake
def _(q, k, v, powers, log_g):
    B, n, H, _ = q.shape
    return empty_like(q), q.new_empty(B, H, padded(n), dtype=torch.float32)


@torch.library.custom_op("sympow::adaptive_backward", mutates_args=())
def _adaptive_backward_operator(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, powers: Tensor, log_g: Tensor | None, y: Tensor, c: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return asked(passes.backward(dy, q, k, v, powers, log_g, y, c), needs)


@_adaptive_backward_operator.register_fake
def _(dy, q, k, v, powers, log_g, y, c, needs):
    return asked([*map(empty_like, (q, k, v, powers))], needs)


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx, dy, _):
    needs = [*ctx.needs_input_grad[:4]]
    return *keep(_adaptive_backward(dy, *ctx.saved_tensors, needs), needs), None


_adaptive_backward = transformable_once(_adaptive_backward_operator)
_adaptive = transformable(_adaptive_operator, _save, _differentiate)
