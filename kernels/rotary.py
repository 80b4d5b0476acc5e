"""Rotate queries and keys by their positions in one pass over the tensor that has them beside the values.

    (y_{2i-1}, y_{2i}) = (c x_{2i-1} - s x_{2i}, s x_{2i-1} + c x_{2i}),    c = cos a_i, s = sin a_i for pair i

and backward dx is the same of dy with -s. The gradient to the angle a_i of a token is the sum over all heads of q and k
of dx_{2i} x_{2i-1} - dx_{2i-1} x_{2i}.

A program has BT tokens and goes through their heads, so that cos and sin are read once for all of them, and the sums
over heads need no other program. Forward q and k are read and written, and v stays where it is. Backward the gradients
of q, k and v are written side by side, so that no other pass has to join them. Cost: 4 bytes an entry of q and k
forward, and of q, k and v backward, in bfloat16; cos and sin add 2 / (H + Hkv) of that, the gradient to the angles half
as much and q and k once more. The limit is bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import device_guard

TOKENS, WARPS = 4, 1  # of a program: 8 entries a thread at head dimension 64
STAGES = tl.constexpr(3)  # heads on their way: one is turned while the next two are loaded


@triton.jit
def _load_factors(COS, SIN, table_stride, b, token, T, D: tl.constexpr, W: tl.constexpr):
    """Return cos and sin, [BT, W / 2] each, of tokens [BT] of sequence b; zeros beyond T tokens and D / 2 pairs."""
    pair = tl.arange(0, W // 2)
    mask = (token < T)[:, None] & (pair < D // 2)[None, :]
    offset = (tl.cast(b, tl.int64) * table_stride + tl.cast(token, tl.int64) * (D // 2))[:, None] + pair[None, :]
    return tl.load(COS + offset, mask, 0.0), tl.load(SIN + offset, mask, 0.0)


@triton.jit
def _turn_heads(
    IN, OUT, X, cos, sin, dangle, in_strides, x_strides, row, b, token, T, H, D: tl.constexpr, W: tl.constexpr,
    ANGLES: tl.constexpr,
):  # fmt: skip
    """Turn all H heads of tokens [BT] of IN [B, T, H, D] into OUT, where a token has `row` entries. Return dangle
    [BT, W / 2] with what these heads give to it, if ANGLES: then IN is the gradient of X [B, T, H, D], turned back.

    W is D or the next power of two.
    """
    d = tl.arange(0, W)
    mask = (token < T)[:, None] & (d < D)[None, :]
    offset = tl.cast(b, tl.int64) * in_strides[0] + tl.cast(token, tl.int64) * in_strides[1]
    x_at = tl.cast(b, tl.int64) * x_strides[0] + tl.cast(token, tl.int64) * x_strides[1]
    to = (tl.cast(b, tl.int64) * T + token) * row
    for h in tl.range(0, H, num_stages=STAGES):
        # strides of features are 1
        x = tl.load(IN + (offset + h * in_strides[2])[:, None] + d[None, :], mask, 0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (x.shape[0], W // 2, 2)))
        y_1, y_2 = cos * first - sin * second, sin * first + cos * second
        if ANGLES:
            x = tl.load(X + (x_at + h * x_strides[2])[:, None] + d[None, :], mask, 0.0).to(tl.float32)
            x_1, x_2 = tl.split(tl.reshape(x, (x.shape[0], W // 2, 2)))
            dangle += y_2 * x_1 - y_1 * x_2
        y = tl.reshape(tl.join(y_1, y_2), (x.shape[0], W))
        tl.store(OUT + (to + h * D)[:, None] + d[None, :], y.to(OUT.dtype.element_ty), mask)
    return dangle


@triton.jit
def _copy_heads(IN, OUT, strides, row, b, token, T, H, D: tl.constexpr, W: tl.constexpr):
    """Copy all H heads of tokens [BT] of IN [B, T, H, D] into OUT, where a token has `row` entries."""
    d = tl.arange(0, W)
    mask = (token < T)[:, None] & (d < D)[None, :]
    offset = tl.cast(b, tl.int64) * strides[0] + tl.cast(token, tl.int64) * strides[1]
    to = (tl.cast(b, tl.int64) * T + token) * row
    for h in tl.range(0, H, num_stages=STAGES):
        x = tl.load(IN + (offset + h * strides[2])[:, None] + d[None, :], mask, 0.0)
        tl.store(OUT + (to + h * D)[:, None] + d[None, :], x.to(OUT.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["table_stride", "T", "H", "HKV"])
def rotate_kernel(
    QKV, COS, SIN, Q, K, strides, table_stride, T, H, HKV, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr
):
    """Write BT tokens of Q [B, T, H, D] and K [B, T, HKV, D], contiguous.

    They are the first heads of QKV [B, T, H + 2 HKV, D], rotated. COS and SIN are [T, D / 2] float32, of each sequence
    `table_stride` further.
    """
    blocks = tl.cdiv(T, BT)
    b, token = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BT + tl.arange(0, BT)
    cos, sin = _load_factors(COS, SIN, table_stride, b, token, T, D, W)
    KV = QKV + H * strides[2]
    _turn_heads(QKV, Q, QKV, cos, sin, cos, strides, strides, H * D, b, token, T, H, D, W, False)
    _turn_heads(KV, K, KV, cos, sin, cos, strides, strides, HKV * D, b, token, T, HKV, D, W, False)


@triton.jit(do_not_specialize=["table_stride", "T", "H", "HKV"])
def rotate_backward_kernel(
    DQ, DK, DV, QKV, COS, SIN, DQKV, DANGLE, dq_strides, dk_strides, dv_strides, strides, table_stride, T, H, HKV,
    D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """Write BT tokens of DQKV [B, T, H + 2 HKV, D], contiguous: DQ and DK rotated back, and DV as it is. With ANGLES,
    for which alone QKV is read, write the gradient to each angle too, [B * T, D / 2] float32.

    COS and SIN are as in `rotate_kernel`.
    """
    blocks = tl.cdiv(T, BT)
    b, token = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BT + tl.arange(0, BT)
    cos, sin = _load_factors(COS, SIN, table_stride, b, token, T, D, W)
    sin, row, dangle = -sin, (H + 2 * HKV) * D, tl.zeros([BT, W // 2], tl.float32)
    DKV, KV = DQKV + H * D, QKV + H * strides[2]
    dangle = _turn_heads(DQ, DQKV, QKV, cos, sin, dangle, dq_strides, strides, row, b, token, T, H, D, W, ANGLES)
    dangle = _turn_heads(DK, DKV, KV, cos, sin, dangle, dk_strides, strides, row, b, token, T, HKV, D, W, ANGLES)
    _copy_heads(DV, DKV + HKV * D, dv_strides, row, b, token, T, HKV, D, W)
    if ANGLES:
        pair = tl.arange(0, W // 2)
        offset = (tl.cast(b, tl.int64) * T + token) * (D // 2)
        tl.store(DANGLE + offset[:, None] + pair[None, :], dangle, (token < T)[:, None] & (pair < D // 2)[None, :])


@torch.library.custom_op("sympow::rotate", mutates_args=())
def rotate(qkv: Tensor, H: int, Hkv: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q [B, T, H, D] and k [B, T, Hkv, D] of qkv [B, T, H + 2 Hkv, D], rotated, contiguous.

    qkv may have any strides; cos, sin [T, D / 2] or [B, T, D / 2] are float32, contiguous.
    """
    qkv, (B, T, _, D) = _with_unit_stride(qkv), qkv.shape
    q, k = qkv.new_empty(B, T, H, D), qkv.new_empty(B, T, Hkv, D)
    with device_guard(qkv.device):
        rotate_kernel[(B * triton.cdiv(T, TOKENS),)](
            qkv, cos, sin, q, k, qkv.stride()[:3], table_stride(cos), T, H, Hkv, D=D, W=triton.next_power_of_2(D),
            BT=TOKENS, num_warps=WARPS,
        )  # fmt: skip
    return q, k


@rotate.register_fake
def _(qkv, H, Hkv, cos, sin):
    B, T, _, D = qkv.shape
    return qkv.new_empty(B, T, H, D), qkv.new_empty(B, T, Hkv, D)


@torch.library.custom_op("sympow::rotate_backward", mutates_args=())
def rotate_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients to qkv [B, T, H + 2 Hkv, D], contiguous, and to the angles [B, T, D / 2] float32, which is
    empty without qkv. dq, dk and dv may have any strides."""
    dq, dk, dv = map(_with_unit_stride, (dq, dk, dv))
    (B, T, H, D), Hkv, angles = dq.shape, dk.shape[2], qkv is not None
    dqkv, dangle = dq.new_empty(B, T, H + 2 * Hkv, D), cos.new_empty((B, T, D // 2) if angles else 0)
    x = _with_unit_stride(qkv) if angles else dqkv  # not read
    with device_guard(dq.device):
        rotate_backward_kernel[(B * triton.cdiv(T, TOKENS),)](
            dq, dk, dv, x, cos, sin, dqkv, dangle, *(t.stride()[:3] for t in (dq, dk, dv, x)), table_stride(cos), T, H,
            Hkv, D=D, W=triton.next_power_of_2(D), BT=TOKENS, ANGLES=angles, num_warps=WARPS,
        )  # fmt: skip
    return dqkv, dangle


@rotate_backward.register_fake
def _(dq, dk, dv, qkv, cos, sin):
    (B, T, H, D), Hkv = dq.shape, dk.shape[2]
    return dq.new_empty(B, T, H + 2 * Hkv, D), cos.new_empty((B, T, D // 2) if qkv is not None else 0)


def _with_unit_stride(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def table_stride(cos):
    """Return how many entries later the table of the next sequence begins."""
    return cos.stride(0) if cos.dim() == 3 else 0


class RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, H, Hkv, cos, sin, angle):
        """Return q and k rotated as `rotate` does, and v, a view of qkv. angle has the shape of cos and sin, its cosine
        and sine, and is not read; None where the angles need no gradient."""
        q, k = rotate(qkv, H, Hkv, cos, sin)
        ctx.of_sequences = cos.dim() == 3
        ctx.save_for_backward(None if angle is None else qkv, cos, sin)
        return q, k, qkv[:, :, H + Hkv :]

    @staticmethod
    def backward(ctx, dq, dk, dv):
        qkv, cos, sin = ctx.saved_tensors
        dqkv, dangle = rotate_backward(dq, dk, dv, qkv, cos, sin)
        if qkv is None:
            dangle = None
        elif not ctx.of_sequences:
            dangle = dangle.sum(0)
        return dqkv, None, None, None, None, dangle
