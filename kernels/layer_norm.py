"""The gradients of LayerNorm in one pass over its input.

    h = (x - mean) r,  g = dy * weight:    dx = r (g - mean(g) - h mean(g * h)),  dweight = sum over rows of dy * h

A program has every PROGRAMS-th tile of BM rows and sums its own part of dweight and dbias, in registers; torch adds the
parts, always in the same order. Cost: x and dy are read once and dx is written once. The limit is bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import NAMESPACE
from .common import device_guard

PROGRAMS = 1024  # at most: each writes a row of 4 C bytes
ROWS = 4  # of a tile


@triton.jit(do_not_specialize=["N"])
def layer_norm_backward_kernel(
    DY, X, WEIGHT, MEAN, RSTD, DX, DWEIGHT, DBIAS, N, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Write DX [N, C] of contiguous X, DY, and this program's row of DWEIGHT and DBIAS [programs, C] float32."""
    c = tl.arange(0, BC)
    weight = tl.load(WEIGHT + c, c < C, 0.0).to(tl.float32)
    dweight, dbias = tl.zeros([BM, BC], tl.float32), tl.zeros([BM, BC], tl.float32)
    for first in range(tl.program_id(0) * BM, N, tl.num_programs(0) * BM):
        row = first + tl.arange(0, BM)
        at = tl.cast(row, tl.int64)[:, None] * C + c[None, :]
        mask = (row < N)[:, None] & (c < C)[None, :]
        x, dy = tl.load(X + at, mask, 0.0).to(tl.float32), tl.load(DY + at, mask, 0.0).to(tl.float32)
        mean, rstd = tl.load(MEAN + row, row < N, 0.0), tl.load(RSTD + row, row < N, 0.0)
        h = tl.where(mask, (x - mean[:, None]) * rstd[:, None], 0.0)
        g = dy * weight[None, :]
        of_h = tl.sum(g * h, 1) / C
        dx = rstd[:, None] * (g - (tl.sum(g, 1) / C)[:, None] - h * of_h[:, None])
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask)
        dweight += dy * h
        if BIAS:
            dbias += dy
    to = tl.program_id(0) * C + c
    tl.store(DWEIGHT + to, tl.sum(dweight, 0), c < C)
    if BIAS:
        tl.store(DBIAS + to, tl.sum(dbias, 0), c < C)


@torch.library.custom_op(f"{NAMESPACE}::layer_norm_backward", mutates_args=())
def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx [..., C] in x's dtype, dweight [C], dbias [C] or, without a bias, []) in the weight's dtype.

    dy and x [..., C]; mean and rstd float32, one for each row.
    """
    C, shape = x.shape[-1], x.shape
    dy, x = (a.contiguous().view(-1, C) for a in (dy, x))
    dx, programs = torch.empty_like(x), min(PROGRAMS, triton.cdiv(len(x), ROWS))
    dweight = torch.empty(programs, C, dtype=torch.float32, device=x.device)
    dbias = torch.empty(programs if bias else 0, C, dtype=torch.float32, device=x.device)
    BC = triton.next_power_of_2(C)
    with device_guard(x.device):
        layer_norm_backward_kernel[(programs,)](
            dy, x, weight, mean.flatten(), rstd.flatten(), dx, dweight, dbias, len(x), C=C, BM=ROWS, BC=BC, BIAS=bias,
            num_warps=max(4, min(16, BC * ROWS // 512)),
        )  # fmt: skip
    dbias = dbias.sum(0) if bias else dbias.flatten()
    return dx.view(shape), dweight.sum(0).to(weight.dtype), dbias.to(weight.dtype)


@layer_norm_backward.register_fake
def _(dy, x, weight, mean, rstd, bias):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, torch.empty_like(weight), weight.new_empty(len(weight) if bias else 0)
