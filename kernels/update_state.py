"""Update state: sums over a chunk."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .common import wait_for_products
from .configs import choose


@triton.jit
def _column_features(x, s, K: tl.constexpr):
    """x [64, K], s [4, K] -> [64, K]: each 16 rows times a scalar of the token."""
    return (x.reshape([4, 16, K]) * s[:, None, :]).reshape([64, K])


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "tiles", "F"])
def update_state_kernel(
    XT, VALUES, U, PARTS, GROUPS, down, T, TP, CHUNK, H, HKV, tiles, F,
    P: tl.constexpr, M: tl.constexpr, E: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Four tiles of one chunk's state: the sum over its tokens of phi(x) VALUES, times `down`."""
    TP = TP // 256 * 256
    groups = tiles // 4
    chunks = tl.cdiv(T, CHUNK)
    at = tl.program_id(0) // groups
    bh, chunk = at // chunks, at % chunks
    heads = H // HKV
    number = tl.program_id(0) % groups
    part = PARTS + tl.load(GROUPS + number * 2) * 16
    i = tl.load(GROUPS + number * 2 + 1)
    entry = tl.arange(0, 64)
    slices = tl.load(part + entry // 16) + entry % 16
    scalars = tl.load(part + 4 + tl.arange(0, 4)) + i
    scalars1, scalars2, scalars3 = scalars + 1, scalars + 2, scalars + 3

    acc0 = tl.zeros([64, E], tl.float32)
    acc1 = tl.zeros([64, E], tl.float32)
    acc2 = tl.zeros([64, E], tl.float32)
    acc3 = tl.zeros([64, E], tl.float32)
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP)
    for head in range(heads):
        row = bh // HKV * H + bh % HKV * heads + head
        x_of = XT + tl.cast(row, tl.int64) * (P // 2 * M) * TP
        for start in range(begin, end, K):
            t = (start // K * K + tl.arange(0, K))[None, :]
            v = VALUES.load([row * TP + start, 0])
            x = tl.load(x_of + slices[:, None] * TP + t)
            s0 = tl.load(x_of + scalars[:, None] * TP + t)
            acc0 = tl.dot(_column_features(x, s0, K), v, acc0, input_precision=PRECISION)
            s1 = tl.load(x_of + scalars1[:, None] * TP + t)
            acc1 = tl.dot(_column_features(x, s1, K), v, acc1, input_precision=PRECISION)
            s2 = tl.load(x_of + scalars2[:, None] * TP + t)
            acc2 = tl.dot(_column_features(x, s2, K), v, acc2, input_precision=PRECISION)
            s3 = tl.load(x_of + scalars3[:, None] * TP + t)
            acc3 = tl.dot(_column_features(x, s3, K), v, acc3, input_precision=PRECISION)
            wait_for_products(start)
    U += tl.cast(at, tl.int64) * F + number * (256 * E)
    to = U + tl.arange(0, 64)[:, None] * E + tl.arange(0, E)[None, :]
    tl.store(to, (acc0 * down).to(U.dtype.element_ty))
    tl.store(to + 64 * E, (acc1 * down).to(U.dtype.element_ty))
    tl.store(to + 128 * E, (acc2 * down).to(U.dtype.element_ty))
    tl.store(to + 192 * E, (acc3 * down).to(U.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "F", "first"])
def update_square_kernel(
    XT, WEIGHT, UNIT_V, U, down, T, TP, CHUNK, H, HKV, F, first, M: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """p = 4: 64 x 64 entries of one chunk's sum of w x x^T, and their mirror image, times `down`."""
    TP = TP // 256 * 256
    blocks: tl.constexpr = (M + 63) // 64
    chunks = tl.cdiv(T, CHUNK)
    at = tl.program_id(0) // (blocks * blocks)
    i, j = tl.program_id(0) // blocks % blocks * 64, tl.program_id(0) % blocks * 64
    if i <= j:
        bh, chunk = at // chunks, at % chunks
        heads, unit = H // HKV, tl.load(UNIT_V + at) * (1 / 16)
        m, n = i + tl.arange(0, 64), j + tl.arange(0, 64)
        acc = tl.zeros([64, 64], tl.float32)
        for head in range(heads):
            row = bh // HKV * H + bh % HKV * heads + head
            x_of = XT + tl.cast(row, tl.int64) * (2 * M) * TP
            for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP), K):
                t = (start // K * K + tl.arange(0, K))[None, :]
                w = tl.load(WEIGHT + tl.cast(row, tl.int64) * TP + t) * unit
                x = tl.load(x_of + m[:, None] * TP + t, mask=m[:, None] < M, other=0.0)
                y = tl.load(x_of + n[:, None] * TP + t, mask=n[:, None] < M, other=0.0)
                x = (x * w.to(x.dtype)).to(x.dtype)  # below 2^15
                acc = tl.dot(x, tl.trans(y), acc, input_precision=PRECISION)
        U += tl.cast(at, tl.int64) * F + first
        out = (acc * down * 16).to(U.dtype.element_ty)
        inside = (m[:, None] < M) & (n[None, :] < M)
        tl.store(U + m[:, None] * M + n[None, :], out, inside)
        tl.store(U + n[None, :] * M + m[:, None], out, inside)


def update_state(s, rows, prepared, config=None):
    """The sums of each chunk, [B * Hkv, chunks, F], for `discumsum` to make states of."""
    U = torch.empty(s.B * s.HKV, s.chunks, s.F, dtype=s.half, device=prepared["xt"].device)
    c = config or choose("update_state", s.q, s.p)
    tiles, M, down = s.layout.tiles, s.layout.M, 2.0**15 / s.most
    values = TensorDescriptor.from_tensor(prepared["values"], [c.BN, s.D])
    update_state_kernel[(s.B * s.HKV * s.chunks * tiles // 4,)](
        prepared["xt"], values, U, s.layout.parts, s.layout.groups, down, s.T, s.TP, s.chunk, rows,
        s.HKV, tiles, s.F, P=s.p, M=M, E=s.D, K=c.BN, PRECISION=s.precision, **c.launch(),
    )  # fmt: skip
    if s.p == 4:
        update_square_kernel[(s.B * s.HKV * s.chunks * triton.cdiv(M, 64) ** 2,)](
            prepared["xt"], prepared["weight"], prepared["unit_v"], U, down, s.T, s.TP, s.chunk, rows, s.HKV, s.F, s.FS,
            M=M, K=c.BN, PRECISION=s.precision, num_warps=4, num_stages=c.stages,
        )  # fmt: skip
    return U
