"""Rotate queries and keys by their positions in one pass.

    (y_{2i-1}, y_{2i}) = (c x_{2i-1} - s x_{2i}, s x_{2i-1} + c x_{2i}),    c = cos a_i, s = sin a_i for pair i

and backward the same with -s. The gradient to the angle a_i of a token is the sum over all heads of q and k of
dy_{2i} y_{2i-1} - dy_{2i-1} y_{2i}.

A program has BT tokens and goes through their heads, so that cos and sin are read once for all of them, and the sums
over heads need no other program. Cost: q and k are read and written once each way, 4 bytes an entry in bfloat16; cos
and sin add 2 / (H + Hkv) of that, the gradient to the angles half as much. The limit is bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import NAMESPACE
from .common import device_guard

TOKENS = 32  # of a program; 16 entries a thread at head dimension 64


@triton.jit
def _turn_heads(
    X, OUT, DY, cos, sin, dangle, strides, d_strides, b, token, T, H, D: tl.constexpr, W: tl.constexpr,
    BACKWARD: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """Turn all H heads of tokens [BT] of X [B, T, H, D] into OUT, contiguous; or DY's by the negative angles. Return
    dangle [BT, W / 2] with what these heads give to it, if ANGLES.

    W is D or the next power of two.
    """
    d, inside = tl.arange(0, W), token < T
    mask = inside[:, None] & (d < D)[None, :]
    at = tl.cast(b, tl.int64) * strides[0] + tl.cast(token, tl.int64) * strides[1]
    d_at = tl.cast(b, tl.int64) * d_strides[0] + tl.cast(token, tl.int64) * d_strides[1]
    to = (tl.cast(b, tl.int64) * T + token) * (H * D)
    for h in range(H):
        # strides of features are 1
        if BACKWARD:
            x = tl.load(DY + (d_at + h * d_strides[2])[:, None] + d[None, :], mask, 0.0).to(tl.float32)
        else:
            x = tl.load(X + (at + h * strides[2])[:, None] + d[None, :], mask, 0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (x.shape[0], W // 2, 2)))
        if BACKWARD:
            y = tl.join(cos * first + sin * second, cos * second - sin * first)
        else:
            y = tl.join(cos * first - sin * second, sin * first + cos * second)
        if ANGLES:
            x = tl.load(X + (at + h * strides[2])[:, None] + d[None, :], mask, 0.0).to(tl.float32)
            x_1, x_2 = tl.split(tl.reshape(x, (x.shape[0], W // 2, 2)))
            dangle += second * (cos * x_1 - sin * x_2) - first * (sin * x_1 + cos * x_2)
        tl.store(
            OUT + (to + h * D)[:, None] + d[None, :], tl.reshape(y, (x.shape[0], W)).to(OUT.dtype.element_ty), mask
        )
    return dangle


@triton.jit(do_not_specialize=["table_stride", "T", "H", "HKV"])
def rotate_kernel(
    Q, K, COS, SIN, DQ, DK, Q_OUT, K_OUT, DANGLE, q_strides, k_strides, dq_strides, dk_strides, table_stride, T, H, HKV,
    D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BACKWARD: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """Write BT tokens of q and k, rotated, or of their gradients DQ and DK, rotated back, and with ANGLES the gradient
    to each angle, [B * T, D / 2] float32.

    COS and SIN are [T, D / 2] float32, of each sequence `table_stride` further.
    """
    blocks = tl.cdiv(T, BT)
    b, token = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BT + tl.arange(0, BT)
    pair = tl.arange(0, W // 2)
    mask = (token < T)[:, None] & (pair < D // 2)[None, :]
    at = tl.cast(b, tl.int64) * table_stride + tl.cast(token, tl.int64) * (D // 2)
    cos = tl.load(COS + at[:, None] + pair[None, :], mask, 0.0)
    sin = tl.load(SIN + at[:, None] + pair[None, :], mask, 0.0)
    dangle = tl.zeros([BT, W // 2], tl.float32)
    dangle = _turn_heads(Q, Q_OUT, DQ, cos, sin, dangle, q_strides, dq_strides, b, token, T, H, D, W, BACKWARD, ANGLES)
    dangle = _turn_heads(
        K, K_OUT, DK, cos, sin, dangle, k_strides, dk_strides, b, token, T, HKV, D, W, BACKWARD, ANGLES
    )
    if ANGLES:
        at = (tl.cast(b, tl.int64) * T + token) * (D // 2)
        tl.store(DANGLE + at[:, None] + pair[None, :], dangle, mask)


def launch(q, k, cos, sin, dq=None, dk=None, angles=False):
    """Return q and k rotated, contiguous; or, with dq and dk, those rotated back, and the gradient to the angles
    [B, T, D / 2] float32 (empty without `angles`).

    q [B, T, H, D], k [B, T, Hkv, D] of any strides but 1 for features; cos, sin [T, D / 2] or [B, T, D / 2] float32.
    """
    (B, T, H, D), backward = q.shape, dq is not None
    outputs = [x.new_empty(x.shape) for x in (q, k)]
    dangle = cos.new_empty((B, T, D // 2) if angles else 0)
    grads = [_with_unit_stride(x) for x in ((dq, dk) if backward else (q, k))]
    table_stride = T * (D // 2) if cos.dim() == 3 else 0
    with device_guard(q.device):
        rotate_kernel[(B * triton.cdiv(T, TOKENS),)](
            q, k, cos, sin, *grads, *outputs, dangle, *(x.stride()[:3] for x in (q, k, *grads)), table_stride, T, H,
            k.shape[2], D=D, W=triton.next_power_of_2(D), BT=TOKENS, BACKWARD=backward, ANGLES=angles,
        )  # fmt: skip
    return *outputs, dangle


@torch.library.custom_op(f"{NAMESPACE}::rotate", mutates_args=())
def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, angle: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return q and k rotated, contiguous; see `launch`.

    Differentiable in q, k and angle, which has the shape of cos and sin, its cosine and sine, and is not read.
    """
    return launch(*map(_with_unit_stride, (q, k)), cos, sin)[:2]


@rotate.register_fake
def _(q, k, cos, sin, angle):
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.custom_op(f"{NAMESPACE}::rotate_backward", mutates_args=())
def _backward(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, angles: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return launch(*map(_with_unit_stride, (q, k)), cos, sin, dq, dk, angles)


@_backward.register_fake
def _(dq, dk, q, k, cos, sin, angles):
    dangle = cos.new_empty((*q.shape[:2], q.shape[3] // 2) if angles else 0)
    return q.new_empty(q.shape), k.new_empty(k.shape), dangle


def _with_unit_stride(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def _save(ctx, inputs, output):
    *tensors, angle = inputs
    ctx.of_sequences = angle is not None and angle.dim() == 3
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, dq, dk):
    angles = ctx.needs_input_grad[4]
    dq, dk, dangle = _backward(dq, dk, *ctx.saved_tensors, angles)
    if angles and not ctx.of_sequences:
        dangle = dangle.sum(0)
    return dq, dk, None, None, dangle if angles else None


rotate.register_autograd(_differentiate, setup_context=_save)
