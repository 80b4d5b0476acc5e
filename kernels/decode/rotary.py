"""Rotate queries and keys in one pass, where torch.compile is not there to make one: prompts and evaluation.

    y_d = cos_d x_d + sin_d x_{d^1},    d^1 the other entry of d's pair, sin negative for the first of a pair

and backward dx is the same of dy with -sin. A program has TOKENS tokens and goes through their heads, so that cos and
sin are read once for all of them. Cost: 2 bytes an entry read and 2 written in bfloat16; an entry's partner comes from
the cache. The limit is bandwidth.
"""

import torch
import triton
import triton.language as tl

from ..common import device_guard

TOKENS, WARPS = 4, 1  # of a program: 8 entries a thread at head dimension 64


@triton.jit(do_not_specialize=["batch_stride", "table_stride", "T", "H"])
def rotary_kernel(
    X, Y, COS, SIN, batch_stride, strides, table_stride, T, H, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr
):
    """Write BT tokens of Y [B, T, H, D], contiguous: X [B, T, H, D] rotated.

    strides: of a token and a head of X; batch_stride: of a sequence. COS and SIN are [T, D] float32, of each sequence
    table_stride further. W is D or the next power of two.
    """
    b = tl.cast(tl.program_id(1), tl.int64)
    token = tl.cast(tl.program_id(0) * BT + tl.arange(0, BT), tl.int64)
    d = tl.arange(0, W)
    mask = (token < T)[:, None] & (d < D)[None, :]
    factors = b * table_stride + (token * D)[:, None] + d[None, :]
    cos, sin = tl.load(COS + factors, mask, 0.0), tl.load(SIN + factors, mask, 0.0)
    rows = X + (b * batch_stride + token * strides[0])[:, None]
    rotated_rows = Y + ((b * T + token) * H * D)[:, None]
    for h in range(H):
        x = tl.load(rows + h * strides[1] + d[None, :], mask, 0.0).to(tl.float32)
        partner = tl.load(rows + h * strides[1] + (d ^ 1)[None, :], mask, 0.0).to(tl.float32)
        tl.store(rotated_rows + h * D + d[None, :], (cos * x + sin * partner).to(Y.dtype.element_ty), mask)


class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return rotate(dy, cos, -sin), None, None


def rotate(x, cos, sin):
    """Return cos x + sin (x with the entries of each pair exchanged) [B, T, H, D], contiguous, in x's dtype.

    x [B, T, H, D], bfloat16 or float32, any strides; cos, sin [T, D] or [B, T, D] float32.
    """
    (B, T, H, D), cos, sin = x.shape, cos.contiguous(), sin.contiguous()
    x = x if x.stride(3) == 1 else x.contiguous()
    y = x.new_empty(B, T, H, D)
    with device_guard(x.device):
        rotary_kernel[(triton.cdiv(T, TOKENS), B)](
            x, y, cos, sin, x.stride(0), x.stride()[1:3], T * D if cos.ndim == 3 else 0, T, H,
            D=D, W=triton.next_power_of_2(D), BT=TOKENS, num_warps=WARPS,
        )  # fmt: skip
    return y
