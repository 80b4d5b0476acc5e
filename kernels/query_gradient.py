"""Query gradient: the gradient to rows of what they read from a state."""

import torch
import triton
import triton.language as tl

from .common import STATE_EXPONENT, diagonal, empty, exact_product, load_rows, rows_of, unit_scale, wait_for_products
from .configs import choose
from .layout import BLOCK, SPREAD_ROWS, STEP, entries

SPREAD = 2**30  # bytes of what `query_gradient` makes at once, p = 4, of all heads or of one at least


@triton.jit
def _one_gradient(v, x, S, WHERE, acc, E: tl.constexpr, PRECISION: tl.constexpr):
    """acc + (v x) S_i^T, for the rows S_i of the state that hold the products of one entry, x, with others"""
    where = tl.load(WHERE)
    s = tl.load(S + where[:, None] * E + tl.arange(0, E)[None, :])
    return tl.dot(v * x[:, None], tl.trans(s), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "tiles", "skip"])
def query_gradient_kernel(
    XT, VALUES, S, UNIT_S, UNIT_V, UNIT_X, WHERE, OUT, X, Z, WEIGHT, READ, x_s, T, TP, CHUNK, H, HKV, tiles, skip,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, WEIGHTED: tl.constexpr, GATED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BM rows of the gradient of phi(x) S VALUES^T + w x^T Z x to x, p = 2, added to what OUT has; with gates also x
    times that gradient over p, what the row read from (gave to) the state, in READ."""
    TP = TP // 256 * 256
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0), T, CHUNK, H, HKV, BM)
    row = lo + tl.arange(0, BM)
    e, d = tl.arange(0, E), tl.arange(0, D)
    at = tl.cast(bh, tl.int64) * TP + row
    XT += tl.cast(bh, tl.int64) * D * TP
    S += tl.cast(state, tl.int64) * tiles * (64 * E)
    v = tl.load(VALUES + at[:, None] * E + e[None, :])
    # VALUES times an entry of x must stay within float16
    v = tl.dot(v, diagonal(tl.full([E], 1 / 256, tl.float32), E).to(v.dtype), input_precision=PRECISION).to(v.dtype)
    acc = tl.zeros([BM, D], tl.float32)
    where = WHERE + d
    for i in range(0, D if chunk != skip else 0, 4):
        x = tl.trans(tl.load(XT + (i + tl.arange(0, 4))[:, None] * TP + row[None, :])).reshape([BM, 2, 2])
        even, odd = tl.split(x)
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        acc = _one_gradient(v, x0, S, where + i * D, acc, E, PRECISION)
        acc = _one_gradient(v, x1, S, where + i * D + D, acc, E, PRECISION)
        acc = _one_gradient(v, x2, S, where + i * D + 2 * D, acc, E, PRECISION)
        acc = _one_gradient(v, x3, S, where + i * D + 3 * D, acc, E, PRECISION)
        wait_for_products(i)
    acc *= (512 * tl.load(UNIT_X + at) / (tl.load(UNIT_S + state) * tl.load(UNIT_V + state)))[:, None]
    x = load_rows(X, x_s, b, lo, h, T, BM, D)
    z = tl.load(Z + tl.cast(state, tl.int64) * (D * D) + d[:, None] * D + d[None, :])
    zx = exact_product(x, z, tl.zeros([BM, D], tl.float32))
    if WEIGHTED:
        zx *= tl.load(WEIGHT + at)[:, None]
    acc += 2 * zx
    if GATED:
        tl.store(READ + at, 0.5 * tl.sum(acc * x.to(tl.float32), 1))
    to = (tl.cast(b, tl.int64) * T + lo) * H + h
    to = OUT + to * D + tl.arange(0, BM)[:, None] * (H * D) + d[None, :]
    mask = row[:, None] < T
    acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, acc.to(OUT.dtype.element_ty), mask)


@triton.jit
def _added_up(x, at, D: tl.constexpr, PRECISION: tl.constexpr):
    """[BM, D]: the sums of the columns of x [BM, N] with the same number in `at` [N]; D is none."""
    places = (at[:, None] == tl.arange(0, D)[None, :]).to(x.dtype)
    return tl.dot(x, places, input_precision=PRECISION)


@triton.jit(do_not_specialize=["F", "n"])
def spread_kernel(S, OUT, WHERE, F, n, E: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """One state as the gradient to x needs it, p = 4: for every scalar in each list of the layout E rows with what its
    products with BLOCK entries hold, and the same of every entry for BLOCK scalars."""
    F = F // 64 * 64
    state, first = tl.program_id(0) // (n // N), tl.program_id(0) % (n // N) * N
    e, m = tl.arange(0, E), tl.arange(0, BLOCK)
    S += tl.cast(state, tl.int64) * F
    OUT += (tl.cast(state, tl.int64) * n + first) * (E * BLOCK)
    for i in range(N):
        rows = tl.load(WHERE + (first + i) * BLOCK + m)
        s = tl.load(S + rows[:, None] * E + e[None, :])
        tl.store(OUT + (i * E + e)[:, None] * BLOCK + m[None, :], tl.trans(s))


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "F", "skip", "first"])
def square_times_kernel(
    XT, SQUARE, OUT, T, TP, CHUNK, H, HKV, F, skip, first, M: tl.constexpr, N: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """2^-12 Z x for BM rows, p = 4: N of its M entries, stored as x is, transposed. For heads from `first` on. Entries
    of Z are below 2^12 and those of x below 2^4: within float16, with 2080 of them at D = 64 too."""
    TP, F = TP // 256 * 256, F // 64 * 64
    parts: tl.constexpr = (M + N - 1) // N
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0) // parts, T, CHUNK, H, HKV, BM, first)
    if chunk != skip:
        row, m = lo + tl.arange(0, BM)[None, :], tl.program_id(0) % parts * N + tl.arange(0, N)
        x_of, z_of = XT + tl.cast(bh, tl.int64) * (2 * M) * TP, SQUARE + tl.cast(state, tl.int64) * F
        zx = tl.zeros([N, BM], tl.float32)
        for i in range(0, M, 64):
            n = i + tl.arange(0, 64)
            z = tl.load(z_of + m[:, None] * M + n[None, :], mask=(m[:, None] < M) & (n[None, :] < M), other=0.0)
            x = tl.load(x_of + n[:, None] * TP + row, mask=n[:, None] < M, other=0.0)
            zx = tl.dot(z, x, zx, input_precision=PRECISION)
        to = OUT + (tl.cast(bh - first, tl.int64) * M + m[:, None]) * TP + row
        tl.store(to, (zx * 2.0**-12).to(OUT.dtype.element_ty), m[:, None] < M)


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "skip", "n", "first"])
def query_gradient_of_products_kernel(
    XT, ROWS, VALUES, S, ZX, UNIT_S, UNIT_V, UNIT_X, WEIGHT, LISTS, FACTORS, OUT, X, READ, x_s, T, TP, CHUNK, H, HKV,
    skip, n, first, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for p = 4, of phi(x) S VALUES^T + WEIGHT x^T Z x for the products x of the row's entries: to BLOCK of
    them at a time, and from there to the row. A feature is an entry times a scalar: first to entries, then to scalars,
    N others a step. For heads from `first` on, S as `spread_kernel` has it and ZX by `square_times_kernel`."""
    TP = TP // 256 * 256
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0), T, CHUNK, H, HKV, BM, first)
    row = lo + tl.arange(0, BM)
    at = tl.cast(bh, tl.int64) * TP + row
    XT += tl.cast(bh, tl.int64) * (2 * M) * TP
    ROWS += tl.cast(bh, tl.int64) * D * TP
    v = tl.load(VALUES + at[:, None] * E + tl.arange(0, E)[None, :])
    v = tl.dot(v, diagonal(tl.full([E], 1 / 32, tl.float32), E).to(v.dtype), input_precision=PRECISION).to(v.dtype)
    # twice, as x is on both sides of Z; 2^12 as in ZX, 1/32 as in v
    weight = tl.load(WEIGHT + at) * (tl.load(UNIT_V + state) * (2 * 2.0**12 / 32))
    blocks: tl.constexpr = (M + BLOCK - 1) // BLOCK
    acc = tl.zeros([BM, D], tl.float32)
    in_step = tl.arange(0, N * E)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    before = (state - first // (H // HKV) * tl.cdiv(T, CHUNK)) * n
    for step in range(2 * blocks if chunk != skip else 0):
        these = step // blocks * M  # places of entries, then of scalars
        others = M - these
        m = tl.load(LISTS + 4 * step) + tl.arange(0, BLOCK)
        begin, end = tl.load(LISTS + 4 * step + 1), tl.load(LISTS + 4 * step + 2)
        place = before + tl.load(LISTS + 4 * step + 3) - begin
        dx = tl.zeros([BM, BLOCK], tl.float32)
        for i in range(begin, end, N):
            s = tl.load(S + tl.cast(place + i, tl.int64) * (E * BLOCK) + in_step)
            by = tl.load(XT + (others + i + tl.arange(0, N))[:, None] * TP + row[None, :])
            vx = (v.reshape([BM, 1, E]) * tl.trans(by).reshape([BM, N, 1])).reshape([BM, N * E])
            dx = tl.dot(vx, s, dx, input_precision=PRECISION)
            wait_for_products(i)
        inside = (m >= 0) & (m < M)
        m = tl.where(inside, m, 0)
        if step < blocks:
            zx = tl.load(ZX + (tl.cast(bh - first, tl.int64) * M + m[:, None]) * TP + row[None, :])
            dx += tl.where(inside[None, :], tl.trans(zx).to(tl.float32) * weight[:, None], 0.0)
        m += these
        one, two = tl.load(FACTORS + m), tl.load(FACTORS + 2 * M + m)
        unit = unit_scale(tl.max(tl.abs(dx), 1), STATE_EXPONENT) * (2.0**10)
        dx = (dx * unit[:, None]).to(v.dtype)
        x = tl.trans(tl.load(ROWS + two[:, None] * TP + row[None, :]))
        d = _added_up(dx * x, tl.where(inside, one, D), D, PRECISION)
        x = tl.trans(tl.load(ROWS + one[:, None] * TP + row[None, :]))
        acc += (d + _added_up(dx * x, tl.where(inside, two, D), D, PRECISION)) / unit[:, None]
    acc *= (32 * tl.load(UNIT_X + at) / (tl.load(UNIT_S + state) * tl.load(UNIT_V + state)))[:, None]
    if GATED:
        x = load_rows(X, x_s, b, lo, h, T, BM, D)
        tl.store(READ + at, 0.25 * tl.sum(acc * x.to(tl.float32), 1))
    to = (tl.cast(b, tl.int64) * T + lo) * H + h
    to = OUT + to * D + tl.arange(0, BM)[:, None] * (H * D) + tl.arange(0, D)[None, :]
    mask = row[:, None] < T
    acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, acc.to(OUT.dtype.element_ty), mask)


def spread_bytes(D, chunks, rows, size):
    """What `query_gradient` allocates for a head of keys of so many chunks and its rows of queries, p = 4."""
    return (chunks * SPREAD_ROWS[D] * D * BLOCK + rows * entries(D, 4)) * size


def query_gradient(s, prepared, S, unit_s, skip, out, x, Z, weight, gated, config=None):
    """Adds to `out` the gradient to each row of what it reads from (gives to) a state; returns READ, or None."""
    rows = x.shape[2]
    read = empty(S, s.B * rows, s.TP) if gated else None
    c = config or choose("query_gradient", s.q, s.p)
    if s.p == 4:
        n, M, group = len(s.layout.where), s.layout.M, rows // s.HKV
        each = spread_bytes(s.D, s.chunks, group * s.TP, S.element_size())
        at_once = max(1, min(s.B * s.HKV, SPREAD // each))  # heads of keys
        states = torch.empty(at_once * s.chunks * n * s.D, BLOCK, dtype=s.half, device=S.device)
        zx = torch.empty(at_once * group, M, s.TP, dtype=s.half, device=S.device)
        N = min(c.BN // s.D, STEP)
        for first in range(0, s.B * s.HKV, at_once):
            heads = min(at_once, s.B * s.HKV - first)
            blocks = heads * group * triton.cdiv(s.T, c.BM)
            shared = s.T, s.TP, s.chunk, rows, s.HKV
            spread_kernel[(heads * s.chunks * n // STEP,)](
                S[first:], states, s.layout.where, s.F, n, E=s.D, N=STEP, BLOCK=BLOCK
            )
            square_times_kernel[(blocks * triton.cdiv(M, 64),)](
                prepared["xt"], S[..., s.FS :], zx, *shared, s.F, skip, first * group, M=M, N=64, BM=c.BM,
                PRECISION=s.precision, num_warps=c.warps, num_stages=min(3, c.stages),
            )  # fmt: skip
            query_gradient_of_products_kernel[(blocks,)](
                prepared["xt"], prepared["rows"], prepared["values"], states, zx, unit_s, prepared["unit_v"],
                prepared["unit_x"], prepared["weight"], s.layout.lists, s.layout.factors, out, x, read, x.stride(),
                *shared, skip, n, first * group, D=s.D, E=s.D, M=M, BM=c.BM, N=N, BLOCK=BLOCK, GATED=gated,
                PRECISION=s.precision, **c.launch(),
            )  # fmt: skip
        return read
    query_gradient_kernel[(triton.cdiv(s.T, c.BM) * s.B * rows,)](
        prepared["xt"], prepared["values"], S, unit_s, prepared["unit_v"], prepared["unit_x"], s.layout.where, out, x,
        Z, weight, read, x.stride(), s.T, s.TP, s.chunk, rows, s.HKV, s.layout.tiles, skip, D=s.D, E=s.D,
        BM=c.BM, WEIGHTED=weight is not None, GATED=gated, PRECISION=s.precision, **c.launch(),
    )  # fmt: skip
    return read
