"""Query state: the sums that each row reads from the state before (or after) its chunk.

    num_t = factor_t / unit  phi(xt_t) S         den_t = factor_t / unit  xt_t^T Z xt_t   (p = 4; p = 2: prepare.py)

A feature is an entry of a slice of xt times a scalar, another entry of xt (layout.py), times the number of orders of
their product. For p = 4 the state already has that number in it. The features of a part share their slices: these stay
in registers, and only the scalars change from tile to tile.

    one program: BM rows of one head

           64 slice entries        D                                  xt [M, BM]
      BM  | x s(tile 0) |  64 | S tile 0 |                       64 x 64 blocks of Z on and above the
      BM  | x s(tile 1) |  64 | S tile 1 |  --> num [BM, D]      diagonal, twice those above  --> den [BM]
            ...                 ...

    name             shape                     dtype      units
    xt, factor       see prepare.py                       read
    S                [B * Hkv, chunks, F]      float16    unit, see discumsum.py    read (float32 where q, k and v are)
    num              [B, T, H, D]              float32    of queries scaled to [1, 2)
    den              [B, H, T padded to 128]   float32    the same
    or out           [B, T, H, D]              q's        one: num is added to it (dv)

Cost: 2 * 64 tiles D FLOP a row and head; a state is read by each BM rows of its chunk, from the L2 cache. The matrix
unit takes its first operand, a product, from registers. That and the waits for it are the limit (80% of the matrix
unit's rate for p = 2). For p = 4, D = 32, denominators take 23% of the time.
"""

import triton
import triton.language as tl

from ..common import (
    PRECISION,
    add_to_rows,
    at_head,
    diagonal,
    empty,
    padded,
    row_pointers,
    rows_of,
    wait_for_products,
)
from ..configs import choose
from .sizes import at_index, entries_of_state, padded_tokens, tile_of


@triton.jit
def _row_features(x, s, N: tl.constexpr, TILES: tl.constexpr):
    """Return [N, 64 TILES]: for each tile, each 16 columns of x [N, 64] times a scalar of the row, s [4 TILES, N]."""
    if TILES == 1:
        return (x.reshape([N, 4, 16]) * tl.trans(s)[:, :, None]).reshape([N, 64])
    else:
        return (x.reshape([N, 1, 4, 16]) * tl.trans(s).reshape([N, TILES, 4, 1])).reshape([N, 64 * TILES])


@triton.jit
def _square_block(zx, XT, Z, m, n, row, TP, M: tl.constexpr):
    """Return zx plus what entries n to n + 63 of each row's x contribute to entries m to m + 63 of Z x."""
    entry, second = m + tl.arange(0, 64), n + tl.arange(0, 64)
    inside = second[:, None] < M
    z = tl.load(tile_of(Z, second, M, entry), mask=inside & (entry[None, :] < M), other=0.0)
    x = tl.load(tile_of(XT, second, TP, row), mask=inside, other=0.0)
    return tl.dot(tl.trans(x), z, zx, input_precision=PRECISION)


@triton.jit
def _denominators(XT, Z, row, end, TP, BM: tl.constexpr, M: tl.constexpr):
    """Return x^T Z x [BM] of rows `row`. end: M, or 0 if Z is zero and is not read."""
    den = tl.zeros([BM], tl.float32)
    for m in range(0, end, 64):
        zx = tl.zeros([BM, 64], tl.float32)
        for n in tl.range(m + 64, M, 64, num_stages=2):  # Z is symmetric
            zx = _square_block(zx, XT, Z, m, n, row, TP, M)
        zx = _square_block(2 * zx, XT, Z, m, m, row, TP, M)
        entry = m + tl.arange(0, 64)
        x = tl.load(tile_of(XT, entry, TP, row), mask=entry[:, None] < M, other=0.0)
        den += tl.sum(zx * tl.trans(x), 1)
    return den


@triton.jit(do_not_specialize=["T", "CHUNK", "H", "HKV", "tiles", "parts", "skip"])
def query_state_kernel(
    prepared,
    states,
    PARTS,  # the layout's table of each part's slices, first scalars, orders and number of tiles
    OUT,  # the result num; with ADD, num is added to it
    DEN,  # the result den for p = 4
    T,
    CHUNK,
    H,
    HKV,
    tiles,
    parts,
    skip,  # the chunk with a zero state, which is not read, or -1
    P: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    ADD: tl.constexpr,
    BM: tl.constexpr,
    TILES: tl.constexpr,
):
    """Write BM rows of num to OUT, and for p = 4 of den to DEN; with ADD add BM rows of num to OUT.

    TILES tiles of the state are read at a time.
    """
    TP = padded_tokens(T)
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0), T, CHUNK, H, HKV, BM)
    row = lo + tl.arange(0, BM)
    XT = at_index(prepared.xt, bh, P // 2 * M * TP)
    entry = tl.arange(0, 64)
    acc = tl.zeros([BM, D], tl.float32)
    factor = tl.load(at_index(prepared.factor, bh, TP) + row) / tl.load(states.unit + state)
    S = at_index(states.S, state, entries_of_state(tiles, P, M, D))
    inside, done = tile_of(0, tl.arange(0, 64 * TILES), D, tl.arange(0, D)), 0
    for number in range(parts if chunk != skip else 0):
        part = PARTS + number * 16
        slices = tl.load(part + entry // 16) + entry % 16
        scalars = tl.load(part + 4 + tl.arange(0, 4 * TILES) % 4) + tl.arange(0, 4 * TILES) // 4
        orders = tl.load(part + 8 + entry // 16)
        count = tl.load(part + 12)
        x = tl.trans(tl.load(tile_of(XT, slices, TP, row)))
        x = tl.dot(x, diagonal(orders, 64).to(x.dtype), input_precision=PRECISION).to(x.dtype)
        for i in range(0, count, TILES):
            s = tl.load(S + (done + i) * (64 * D) + inside)
            x_scalars = tl.load(tile_of(XT, scalars + i, TP, row))
            acc = tl.dot(_row_features(x, x_scalars, BM, TILES), s, acc, input_precision=PRECISION)
            wait_for_products(i)
        done += count
    acc *= factor[:, None]
    if ADD:
        add_to_rows(OUT, acc, b, lo, h, T, H)
    else:
        tl.store(row_pointers(OUT, b, lo, h, T, H, BM, D), acc, row[:, None] < T)
        if P > 2:
            den = _denominators(XT, S + tiles * (64 * D), row, M if chunk != skip else 0, TP, BM, M) * factor
            tl.store(at_head(DEN, T, bh) + row, den, row < T)


# ---- launcher


def query_state(s, prepared, states, skip, out=None, config=None):
    """Return (num, den) of the table above for every row of `prepared`; for p = 2 `prepare` made den.

    With `out` [B, T, H, D], num is added to it and den is not computed. states: `States`; skip: the number of the chunk
    with a zero state, or -1. D and p are as in `Sizes`.
    """
    add = out is not None
    heads, den = prepared.xt.shape[0] // s.B, prepared.den
    if not add:
        out = empty(states.S, s.B, s.T, heads, s.D)
        if s.p == 4:
            den = empty(states.S, s.B, heads, padded(s.T)).zero_()
    config = config or choose("query_state", s.q, s.p)
    query_state_kernel[(triton.cdiv(s.T, config.BM) * s.B * heads,)](
        prepared, states, s.layout.parts, out, den,
        s.T, s.chunk, heads, s.HKV, s.layout.tiles, len(s.layout.parts), skip,
        P=s.p, M=s.layout.M, D=s.D, ADD=add, BM=config.BM, TILES=config.BN // 64, **config.launch(),
    )  # fmt: skip
    return out, den
