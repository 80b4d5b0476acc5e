"""Rotations and the quadratic form as one torch operator: its backward pass turns gradients where they are computed.

    y = rotated_attention(qkv, cos, sin, log_g, H=12, p=2)      # quadratic_attention of what rotary.rotate returns

Two operators would write dq, dk and dv, read them, turn them back and write them again, side by side: 6 bytes an entry
of q, k and v in bfloat16 where this one writes 2, and rounds once. It can be differentiated once, in qkv and log_g.
"""

import torch
from torch import Tensor

from .quadratic import passes as quadratic
from .rotary import rotate
from .transforms import empty_like
from .transforms import refuse_second_derivative


def rotated_attention(qkv, cos, sin, log_g=None, *, H, p):
    """Return y [B, T, H, D] of `operators.quadratic_attention` for the heads of q, k and v in qkv [B, T, H + 2 Hkv, D],
    of which q and k are first rotated by the angles whose cos and sin [T, D / 2] or [B, T, D / 2] float32 are given.
    D is a width of the kernels, log_g [B, T, Hkv] float32 or None."""
    return _rotated(qkv, cos, sin, log_g, H, p)[0]


@torch.library.custom_op("sympow::rotated", mutates_args=())
def _rotated(
    qkv: Tensor, cos: Tensor, sin: Tensor, log_g: Tensor | None, H: int, p: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, and l, q and k, which the backward pass needs."""
    Hkv = (qkv.shape[2] - H) // 2
    q, k = rotate(qkv, H, Hkv, cos, sin)
    y, l = quadratic.forward(q, k, qkv[:, :, H + Hkv :], log_g, p=p)
    return y, l, q, k


@_rotated.register_fake
def _(qkv, cos, sin, log_g, H, p):
    B, T, heads, D = qkv.shape
    y, q, k = (qkv.new_empty(B, T, n, D) for n in (H, H, (heads - H) // 2))
    return y, qkv.new_empty(B, H, quadratic.padded(T), dtype=torch.float32), q, k


@torch.library.custom_op("sympow::rotated_backward", mutates_args=())
def _rotated_backward(
    dy: Tensor, q: Tensor, k: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, log_g: Tensor | None, y: Tensor, l: Tensor,
    p: int, needs_g: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    v = qkv[:, :, q.shape[2] + k.shape[2] :]
    sizes = dict(p=p, turn=(cos, sin), needs=(True, True, needs_g))
    dqkv, dlog_g = quadratic.backward(dy, None, q, k, v, log_g, y, l, **sizes)
    return dqkv, dqkv.new_empty(0) if dlog_g is None else dlog_g


@_rotated_backward.register_fake
def _(dy, q, k, qkv, cos, sin, log_g, y, l, p, needs_g):
    return empty_like(qkv), empty_like(log_g, torch.float32) if needs_g else qkv.new_empty(0)


def _save(ctx, inputs, output):
    qkv, cos, sin, log_g, _, ctx.p = inputs
    y, l, q, k = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(l, q, k)
    ctx.save_for_backward(q, k, qkv, cos, sin, log_g, y, l)


def _differentiate(ctx, dy, *_):
    saved = ctx.saved_tensors
    if dy is None:
        return None, None, None, None, None, None
    needs_g = ctx.needs_input_grad[3]
    dqkv, dlog_g = _rotated_backward(dy, *saved, ctx.p, needs_g)
    return dqkv, None, None, dlog_g if needs_g else None, None, None


_rotated_backward.register_autograd(refuse_second_derivative)
_rotated.register_autograd(_differentiate, setup_context=_save)
