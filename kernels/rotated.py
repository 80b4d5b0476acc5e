"""Rotations and attention as one torch operator: its backward pass turns gradients where they are computed.

    y = rotated_attention(qkv, cos, sin, log_g, H=12, p=2)      # quadratic_attention of what rotary.rotate returns
    y = rotated_attention(qkv, cos, sin, log_g, H=12, p=2, chunk=1024)                  # chunked_attention of it

Two operators would write dq, dk and dv, read them, turn them back and write them again, side by side; this one writes
them turned back, 4 bytes an entry of q, k and v less in bfloat16, and rounds once less. It can be differentiated once,
in qkv and log_g.
"""

import torch
from torch import Tensor

from . import NAMESPACE, chunked, quadratic
from .operators import like_saved
from .rotary import rotate
from .steps import empty_like
from .transforms import refuse_second_derivative

SAVED = 10  # tensors that the chunked form's backward pass needs; of the quadratic form's the first alone has entries


def rotated_attention(qkv, cos, sin, log_g=None, *, H, p, chunk=None):
    """Return y [B, T, H, D] of `operators.quadratic_attention`, or with `chunk` of `operators.chunked_attention`, for
    the heads of q, k and v in qkv [B, T, H + 2 Hkv, D], of which q and k are first rotated by the angles whose cos and
    sin [T, D / 2] or [B, T, D / 2] float32 are given. D is a width of the form's kernels, log_g [B, T, Hkv] float32 or
    None."""
    return _rotated(qkv, cos, sin, log_g, H, p, chunk or 0)[0]


@torch.library.custom_op(
    f"{NAMESPACE}::rotated",
    mutates_args=(),
    schema="(Tensor qkv, Tensor cos, Tensor sin, Tensor? log_g, int H, int p, int chunk) -> ("
    + ", ".join(["Tensor"] * (3 + SAVED)) + ")",
)  # fmt: skip
def _rotated(qkv, cos, sin, log_g, H, p, chunk):
    """Return y, q and k, and SAVED tensors that the backward pass needs."""
    Hkv = (qkv.shape[2] - H) // 2
    (q, k), v = rotate(qkv, H, Hkv, cos, sin), qkv[:, :, H + Hkv :]
    if chunk:
        y, saved, _ = chunked.forward(q, k, v, log_g, p=p, chunk=chunk)
    else:
        y, *saved = quadratic.forward(q, k, v, log_g, p=p)
        saved += [None] * (SAVED - 1)
    return y, q, k, *(qkv.new_empty(0) if x is None else x for x in saved)


@_rotated.register_fake
def _(qkv, cos, sin, log_g, H, p, chunk):
    B, T, heads, D = qkv.shape
    y, q, k = (qkv.new_empty(B, T, n, D) for n in (H, H, (heads - H) // 2))
    if chunk:
        return y, q, k, *like_saved(q, k, p, chunk)
    l = qkv.new_empty(B, H, quadratic.padded(T), dtype=torch.float32)
    return y, q, k, l, *(qkv.new_empty(0) for _ in range(SAVED - 1))


@torch.library.custom_op(f"{NAMESPACE}::rotated_backward", mutates_args=())
def _rotated_backward(
    dy: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, log_g: Tensor | None, y: Tensor, q: Tensor, k: Tensor,
    saved: list[Tensor], p: int, chunk: int, needs_g: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    v, turn = qkv[:, :, q.shape[2] + k.shape[2] :], (cos, sin)
    if chunk:
        needs = (True, True, True, needs_g, False)
        dqkv, dlog_g, _ = chunked.backward(dy, q, k, v, log_g, y, saved, p=p, chunk=chunk, turn=turn, needs=needs)
    else:
        needs = (True, True, needs_g)
        dqkv, dlog_g = quadratic.backward(dy, None, q, k, v, log_g, y, saved[0], p=p, turn=turn, needs=needs)
    return dqkv, dqkv.new_empty(0) if dlog_g is None else dlog_g


@_rotated_backward.register_fake
def _(dy, qkv, cos, sin, log_g, y, q, k, saved, p, chunk, needs_g):
    return empty_like(qkv), empty_like(log_g, torch.float32) if needs_g else qkv.new_empty(0)


def _save(ctx, inputs, output):
    *tensors, _, ctx.p, ctx.chunk = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, dy, *_):
    qkv, cos, sin, log_g, y, q, k, *saved = ctx.saved_tensors
    if dy is None:
        return (None,) * 7
    needs_g = ctx.needs_input_grad[3]
    dqkv, dlog_g = _rotated_backward(dy, qkv, cos, sin, log_g, y, q, k, saved, ctx.p, ctx.chunk, needs_g)
    return dqkv, None, None, dlog_g if needs_g else None, None, None, None


_rotated_backward.register_autograd(refuse_second_derivative)
_rotated.register_autograd(_differentiate, setup_context=_save)
