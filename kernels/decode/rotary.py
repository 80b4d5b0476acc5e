"""Rotate queries and keys in one pass, where torch.compile is not there to make one: prompts and evaluation.

    y_d = cos_d x_d + sin_d x_{d^1},    d^1 the other entry of d's pair, sin negative for the first of a pair

and backward dx is the same of dy with -sin. A program has TOKENS tokens and goes through their heads, so that cos and
sin are read once for all of them. Cost: 2 bytes an entry read and 2 written in bfloat16; an entry's partner comes from
the cache. The limit is bandwidth.
"""

import torch
import triton
import triton.language as tl

from ..common import as_rows, device_guard

TOKENS, WARPS = 4, 1  # of a program: 8 entries a thread at head dimension 64


@triton.jit(do_not_specialize=["rows", "T", "H"])
def rotary_kernel(X, Y, COS, SIN, stride, rows, T, H, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr):
    """Write BT rows of Y [rows, H, D], contiguous: the tokens X [rows, H, D] of all sequences, rotated.

    Rows of X are `stride` apart. COS and SIN are [T, D] float32, for T rows after T rows. W is D or the next power of
    two.
    """
    row, d = tl.program_id(0) * BT + tl.arange(0, BT)[:, None], tl.arange(0, W)[None, :]
    factor, row, mask = (row % T).to(tl.int64) * D + d, row.to(tl.int64), (row < rows) & (d < D)
    cos, sin = tl.load(COS + factor, mask, 0.0), tl.load(SIN + factor, mask, 0.0)
    for h in range(H):
        head = X + row * stride + h * D
        turned = cos * tl.load(head + d, mask, 0.0) + sin * tl.load(head + (d ^ 1), mask, 0.0)
        tl.store(Y + (row * H + h) * D + d, turned, mask)


class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return Rotation.apply(dy, cos, -sin), None, None


def rotate(x, cos, sin):
    """Return cos x + sin (x with the entries of each pair exchanged) [B, T, H, D], contiguous, in x's dtype.

    x [B, T, H, D], bfloat16 or float32, any strides; cos, sin [T, D] or [B, T, D] float32.
    """
    y, H, D = x.new_empty(x.shape), *x.shape[2:]
    x, cos, sin = as_rows(x, H * D), cos.contiguous(), sin.contiguous()
    with device_guard(x.device):
        rotary_kernel[(triton.cdiv(len(x), TOKENS),)](
            x, y, cos, sin, x.stride(0), len(x), cos.numel() // D, H,
            D=D, W=triton.next_power_of_2(D), BT=TOKENS, num_warps=WARPS,
        )  # fmt: skip
    return y
