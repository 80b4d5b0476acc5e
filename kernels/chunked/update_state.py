"""Update state: the sum over each chunk's tokens of phi(x_t) values_t^T, which is added to the state.

    U[f, e] = 2^15 / most  sum over t of  x_t[slice(f)] x_t[scalar(f)] values_t[e]
    p = 4, behind it:  Z[m, n] = 2^15 / most  sum over t of  unit_v weight_t x_t[m] x_t[n]

in units of unit_v. `most` bounds an entry, so that all fit float16. x are rows for p = 2, products of two entries for
p = 4 (layout.py): a tile has 64 features, 4 slots of a slice of 16 entries of x times one scalar each.

    update_state_kernel: one program: 4 tiles of a chunk's state

                        K tokens ->                      D
      slot 0  16 entries | x s0 |                K  | values |        64 x D sums in registers, four:
      slot 1  16 entries | x s1 |      times        |        |   -->  x stays, s is of tile 0, 1, 2, 3
      slot 2  16 entries | x s2 |                   |        |
      slot 3  16 entries | x s3 |  made in registers

    update_square_kernel (p = 4): one program: 64 x 64 entries of Z = sum w x x^T, on or above the diagonal, and
    their mirror image.

    name      shape                        dtype      units
    xt, values, weight, unit_v   see prepare.py       read
    U         [B * Hkv, chunks, F]         float16    unit_v 2^15 / most; F = 64 tiles D, for p = 4 and M^2 more
                                                      (float32 where q, k and v are)

Cost: 2 * 64 tiles D FLOP a token and head. U is written once (328 KB a chunk for D = 64, p = 2); each program reads 64
to 80 rows of xt and all values of its chunk, from the L2 cache. The matrix unit waits for operands from registers:
latency is the limit, at two programs an SM (70% of the matrix unit's rate for p = 2).
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common import PRECISION, SQUARE_DOWN, SUM_TOP, chunk_of, multiple_of, wait_for_products
from ..configs import choose, reads_by_descriptor


@triton.jit
def _column_features(x, s, K: tl.constexpr):
    """Return [64, K]: each 16 rows of x [64, K] times a scalar of the token, s [4, K]."""
    return (x.reshape([4, 16, K]) * s[:, None, :]).reshape([64, K])


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "tiles", "F"])
def update_state_kernel(
    XT, VALUES,  # VALUES: with DESCRIPTOR a tensor descriptor of tiles [K, D]
    U,  # what is written
    PARTS, GROUPS,  # tables of the layout: a part's slices and first scalars, a group's part and first tile there
    down,  # 2^15 / most
    T, TP, CHUNK, H, HKV, tiles, F,
    P: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    K: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Write four tiles of one chunk's U, summed over the query heads of a group (one head of keys if H = HKV)."""
    TP = multiple_of(TP, 256)
    groups = tiles // 4
    at = tl.program_id(0) // groups
    bh, chunk = chunk_of(at, T, CHUNK)
    heads = H // HKV
    number = tl.program_id(0) % groups
    part = PARTS + tl.load(GROUPS + number * 2) * 16
    i = tl.load(GROUPS + number * 2 + 1)
    entry = tl.arange(0, 64)
    slices = tl.load(part + entry // 16) + entry % 16
    scalars = tl.load(part + 4 + tl.arange(0, 4)) + i
    scalars1, scalars2, scalars3 = scalars + 1, scalars + 2, scalars + 3

    acc0 = tl.zeros([64, D], tl.float32)
    acc1 = tl.zeros([64, D], tl.float32)
    acc2 = tl.zeros([64, D], tl.float32)
    acc3 = tl.zeros([64, D], tl.float32)
    if not DESCRIPTOR:
        values_of = VALUES + tl.arange(0, K)[:, None] * D + tl.arange(0, D)[None, :]
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP)
    for head in range(heads):
        row = bh // HKV * H + bh % HKV * heads + head
        x_of = XT + tl.cast(row, tl.int64) * (P // 2 * M) * TP
        for start in range(begin, end, K):
            t = (start // K * K + tl.arange(0, K))[None, :]
            if DESCRIPTOR:
                v = VALUES.load([row * TP + start, 0])
            else:
                v = tl.load(values_of + (tl.cast(row, tl.int64) * TP + start) * D)
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
    U += tl.cast(at, tl.int64) * F + number * (256 * D)
    to = U + tl.arange(0, 64)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(to, (acc0 * down).to(U.dtype.element_ty))
    tl.store(to + 64 * D, (acc1 * down).to(U.dtype.element_ty))
    tl.store(to + 128 * D, (acc2 * down).to(U.dtype.element_ty))
    tl.store(to + 192 * D, (acc3 * down).to(U.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "F", "first"])
def update_square_kernel(
    XT, WEIGHT, UNIT_V,
    U,  # what is written, from entry `first` of each chunk's F on
    down,  # 2^15 / most
    T, TP, CHUNK, H, HKV, F, first,
    M: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Write 64 x 64 entries of one chunk's Z, and their mirror image, for p = 4."""
    TP = multiple_of(TP, 256)
    blocks: tl.constexpr = (M + 63) // 64
    at = tl.program_id(0) // (blocks * blocks)
    bh, chunk = chunk_of(at, T, CHUNK)
    i, j = tl.program_id(0) // blocks % blocks * 64, tl.program_id(0) % blocks * 64
    if i <= j:
        heads, unit = H // HKV, tl.load(UNIT_V + at) * (1 / SQUARE_DOWN)
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
        out = (acc * down * SQUARE_DOWN).to(U.dtype.element_ty)
        inside = (m[:, None] < M) & (n[None, :] < M)
        tl.store(U + m[:, None] * M + n[None, :], out, inside)
        tl.store(U + n[None, :] * M + m[:, None], out, inside)


# ---- launcher


def update_state(s, rows, prepared, config=None):
    """Return U [B * Hkv, chunks, F], from which `discumsum` makes states; rows: the heads in `prepared`.

    Takes what `chunked.Sizes` takes: D = 16 to 128 for p = 2, to 64 for p = 4.
    """
    U = torch.empty(s.B * s.HKV, s.chunks, s.F, dtype=s.half, device=prepared["xt"].device)
    tiles, M, down = s.layout.tiles, s.layout.M, SUM_TOP / s.most
    c = config or choose("update_state", s.q, s.p)
    shared = s.T, s.TP, s.chunk, rows, s.HKV
    values, descriptor = prepared["values"], reads_by_descriptor(s.q)
    if descriptor:
        values = TensorDescriptor.from_tensor(values, [c.BN, s.D])
    update_state_kernel[(s.B * s.HKV * s.chunks * tiles // 4,)](
        prepared["xt"], values, U, s.layout.parts, s.layout.groups, down,
        *shared, tiles, s.F, P=s.p, M=M, D=s.D, K=c.BN, DESCRIPTOR=descriptor, **c.launch(),
    )  # fmt: skip
    if s.p == 4:
        update_square_kernel[(s.B * s.HKV * s.chunks * triton.cdiv(M, 64) ** 2,)](
            prepared["xt"], prepared["weight"], prepared["unit_v"], U, down,
            *shared, s.F, s.FS, M=M, K=c.BN, num_warps=4, num_stages=c.stages,
        )  # fmt: skip
    return U
