"""Query state: what rows read from a state."""

import torch
import triton
import triton.language as tl

from .common import diagonal, empty, padded, rows_of, wait_for_products
from .configs import choose


@triton.jit
def _row_features(x, s, N: tl.constexpr, TILES: tl.constexpr):
    """x [N, 64], s [4 TILES, N] -> [N, 64 TILES]: each 16 columns times a scalar of the row."""
    if TILES == 1:
        return (x.reshape([N, 4, 16]) * tl.trans(s)[:, :, None]).reshape([N, 64])
    else:
        return (x.reshape([N, 1, 4, 16]) * tl.trans(s).reshape([N, TILES, 4, 1])).reshape([N, 64 * TILES])


@triton.jit
def _square_block(zx, XT, Z, m, n, row, TP, M: tl.constexpr, PRECISION: tl.constexpr):
    """zx plus what entries n to n + 63 of each row's x contribute to entries m to m + 63 of Z x"""
    entry, other = m + tl.arange(0, 64)[None, :], n + tl.arange(0, 64)[:, None]
    z = tl.load(Z + other * M + entry, mask=(other < M) & (entry < M), other=0.0)
    x = tl.load(XT + other * TP + row[None, :], mask=other < M, other=0.0)
    return tl.dot(tl.trans(x), z, zx, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "tiles", "parts", "skip", "F"])
def query_state_kernel(
    XT, S, UNIT_S, FACTOR, PARTS, OUT, DEN, T, TP, CHUNK, H, HKV, tiles, parts, skip, F,
    P: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr, SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BM rows of phi(x) S, for the state S before (or after) their chunk. With SUMS the numerators, in OUT, of queries
    that are scaled to [1, 2), and for p = 4 the denominators, in DEN; else added to what OUT has."""
    TP, F = TP // 256 * 256, F // 64 * 64
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0), T, CHUNK, H, HKV, BM)
    row = lo + tl.arange(0, BM)
    XT += tl.cast(bh, tl.int64) * (P // 2 * M) * TP
    entry = tl.arange(0, 64)
    acc = tl.zeros([BM, E], tl.float32)
    factor = tl.load(FACTOR + tl.cast(bh, tl.int64) * TP + row) / tl.load(UNIT_S + state)
    S += tl.cast(state, tl.int64) * F
    inside, done = tl.arange(0, 64 * TILES)[:, None] * E + tl.arange(0, E)[None, :], 0
    for number in range(parts if chunk != skip else 0):
        part = PARTS + number * 16
        slices = tl.load(part + entry // 16) + entry % 16
        scalars = tl.load(part + 4 + tl.arange(0, 4 * TILES) % 4) + tl.arange(0, 4 * TILES) // 4
        orders = tl.load(part + 8 + entry // 16)
        count = tl.load(part + 12)
        x = tl.trans(tl.load(XT + slices[:, None] * TP + row[None, :]))
        x = tl.dot(x, diagonal(orders, 64).to(x.dtype), input_precision=PRECISION).to(x.dtype)
        for i in range(0, count, TILES):
            s = tl.load(S + (done + i) * (64 * E) + inside)
            by = tl.load(XT + (scalars + i)[:, None] * TP + row[None, :])
            acc = tl.dot(_row_features(x, by, BM, TILES), s, acc, input_precision=PRECISION)
            wait_for_products(i)
        done += count
    acc *= factor[:, None]
    column = tl.arange(0, E)
    to = (tl.cast(b, tl.int64) * T + lo) * H + h
    to = OUT + to * E + tl.arange(0, BM)[:, None] * (H * E) + column[None, :]
    mask = row[:, None] < T
    if SUMS:
        tl.store(to, acc, mask)
        if P > 2:
            den = tl.zeros([BM], tl.float32)
            z = S + tiles * (64 * E)
            for m in range(0, M if chunk != skip else 0, 64):
                zx = tl.zeros([BM, 64], tl.float32)
                for n in tl.range(m + 64, M, 64, num_stages=2):  # Z is symmetric
                    zx = _square_block(zx, XT, z, m, n, row, TP, M, PRECISION)
                zx = _square_block(2 * zx, XT, z, m, m, row, TP, M, PRECISION)
                at_m = m + tl.arange(0, 64)[:, None]
                x = tl.load(XT + at_m * TP + row[None, :], mask=at_m < M, other=0.0)
                den += tl.sum(zx * tl.trans(x), 1)
            den *= factor
            tl.store(DEN + tl.cast(bh, tl.int64) * (tl.cdiv(T, 128) * 128) + row, den, row < T)
    else:
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, acc.to(OUT.dtype.element_ty), mask)


def query_state(s, prepared, S, unit_s, skip, out=None, config=None):
    """phi(x) S for every row: (num [B, T, H, E], den [B, H, T padded]) float32, for p = 2 den as `prepare` made it; or
    added to `out`."""
    sums = out is None
    rows = prepared["xt"].shape[0] // s.B
    den = prepared.get("den")
    if sums:
        out = empty(S, s.B, s.T, rows, s.D)
        if s.p == 4:
            den = torch.zeros(s.B, rows, padded(s.T), dtype=torch.float32, device=S.device)
    c = config or choose("query_state", s.q, s.p)
    query_state_kernel[(triton.cdiv(s.T, c.BM) * s.B * rows,)](
        prepared["xt"], S, unit_s, prepared["factor"], s.layout.parts, out, den, s.T, s.TP,
        s.chunk, rows, s.HKV, s.layout.tiles, len(s.layout.parts), skip, s.F, P=s.p, E=s.D, M=s.layout.M, BM=c.BM,
        TILES=c.BN // 64, SUMS=sums, PRECISION=s.precision, **c.launch(),
    )  # fmt: skip
    return out, den
