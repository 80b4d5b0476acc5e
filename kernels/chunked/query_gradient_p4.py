"""Query gradient, p = 4: the gradient to each query through the state that it reads, or to each key through the state.

The gradient to xt (products of two entries, products.py) comes first, and the gradient to the row follows from it:

    dxt_t = c_t  sum over scalars i of (xt_t[i] scaled_v_t) S_i^T  +  2 weight_t Z xt_t
    dx_t[a] = sum over b of dxt_t[ab] x_t[b],    gate_term_t = x_t . dx_t / 4

S_i holds the state's rows for the products of scalar i with entries. c_t brings sums into units of one. dx_t is the
gradient to reflected rows, and is reflected back (mirror.py). The gradient to log_g needs gate_term_t.
`spread_kernel` copies these rows of the state into lists: 32 entries for each of their scalars, then 32 scalars for
each of their entries (layout.py). `square_times_kernel` makes Z xt.

    query_gradient_of_products_kernel: BM rows, for each of 2 ceil(M / 32) steps

          N scalars x D               32
      BM | scaled_v x_i, x_i+1.. | N D | S_i^T, .. |  --> dxt [BM, 32]
      then two products with zeros and ones         --> dx [BM, D]

    name        shape                                     dtype      units
    prepared    see prepare.py                                       read: xt, scaled, scaled_v, units, weight
    states.S    [B * Hkv, chunks, F]                      float16    states.unit, see discumsum.py    read
    spread.S    [heads * chunks * n * D, 32]              float16    states.unit, n = len(layout.where)
    spread.zx   [heads * rows, M, TP]                     float16    zx_unit: Z xt
    zx_unit     [heads * rows, ceil(M / 64), TP]          float32    the inverse of a power of two, for 64 entries of zx
    out         [B, T, H, D]                              q's        one: dx is added to it
    gate_terms  [B * H, TP]                               float32    one        (float16: float32 where q, k and v are)

Cost: each block multiplies as many rows as the longest list in it has, 2.4 (D = 32) to 3.7 (D = 16) times the number
of features. Operands are made in registers: the waits for products and the loads of scalars are the limit. The buffers
take at most SPREAD bytes, or as many as one head needs, so the heads are worked on in groups.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import layout
from ..common import (
    PRECISION,
    STATE_EXPONENT,
    TO_GRADIENT_TOP,
    TO_TOP,
    VALUES_DOWN_4,
    add_to_rows,
    diagonal,
    empty,
    load_rows,
    rows_of,
    unit_scale,
    wait_for_products,
)
from ..configs import choose
from .prepare import as_it_came
from .sizes import entries_of_state, padded_tokens

SPREAD = 2**30  # the most bytes of a `Spread`, unless one head needs more
BLOCK = tl.constexpr(layout.BLOCK)  # entries of a step


class Spread(NamedTuple):
    """Buffers between the kernels, for the states and the rows of some heads; see the table above."""

    S: torch.Tensor
    zx: torch.Tensor
    zx_unit: torch.Tensor


@triton.jit(do_not_specialize=["tiles", "n"])
def spread_kernel(S, OUT, WHERE, tiles, n, M: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    """Write N of the n blocks [D, BLOCK] of a state's rows, in the order in which the gradient to x reads them."""
    state, first = tl.program_id(0) // (n // N), tl.program_id(0) % (n // N) * N
    d, m = tl.arange(0, D), tl.arange(0, BLOCK)
    S += tl.cast(state, tl.int64) * entries_of_state(tiles, 4, M, D)
    OUT += (tl.cast(state, tl.int64) * n + first) * (D * BLOCK)
    for i in range(N):
        rows = tl.load(WHERE + (first + i) * BLOCK + m)
        s = tl.load(S + rows[:, None] * D + d[None, :])
        tl.store(OUT + (i * D + d)[:, None] * BLOCK + m[None, :], tl.trans(s))


@triton.jit(do_not_specialize=["T", "CHUNK", "H", "HKV", "tiles", "skip", "first"])
def square_times_kernel(
    XT,
    S,  # Z is behind the tiles of each state
    spread,  # zx and zx_unit are written
    T,
    CHUNK,
    H,
    HKV,
    tiles,
    skip,
    first,  # the first head of rows in `spread`
    M: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
):
    """Write N of the M entries of Z x for BM rows, transposed as x is, and their unit for each row.

    The largest of the N decides their unit: where keys share a mean, entries of Z x differ by more than float16's
    range. The N entries begin where a step of the next kernel begins; its first step may have fewer than BLOCK entries.
    """
    TP = padded_tokens(T)
    parts: tl.constexpr = (M + N - 1) // N
    blocks: tl.constexpr = (M + BLOCK - 1) // BLOCK
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0) // parts, T, CHUNK, H, HKV, BM, first)
    if chunk != skip:
        part, row = tl.program_id(0) % parts, lo + tl.arange(0, BM)[None, :]
        m = part * N + tl.arange(0, N) - (blocks * BLOCK - M)
        inside = (m[:, None] >= 0) & (m[:, None] < M)
        x_of_head = XT + tl.cast(bh, tl.int64) * (2 * M) * TP
        z_of_state = S + tl.cast(state, tl.int64) * entries_of_state(tiles, 4, M, D) + tiles * (64 * D)
        zx = tl.zeros([N, BM], tl.float32)
        for i in range(0, M, 64):
            n = i + tl.arange(0, 64)
            z = tl.load(z_of_state + m[:, None] * M + n[None, :], mask=inside & (n[None, :] < M), other=0.0)
            x = tl.load(x_of_head + n[:, None] * TP + row, mask=n[:, None] < M, other=0.0)
            zx = tl.dot(z, x, zx, input_precision=PRECISION)
        unit = unit_scale(tl.max(tl.abs(zx), 0), STATE_EXPONENT) * TO_TOP
        to = spread.zx + (tl.cast(bh - first, tl.int64) * M + m[:, None]) * TP + row
        tl.store(to, zx * unit[None, :], inside)
        unit_of_part = spread.zx_unit + (tl.cast(bh - first, tl.int64) * parts + part) * TP
        tl.store(unit_of_part + lo + tl.arange(0, BM), 1 / unit)


@triton.jit
def _sum_over_list(v, XT, S, row, TP, begin, end, D: tl.constexpr, N: tl.constexpr):
    """Return the gradient [BM, BLOCK] to a block of x: the sum over x_i from begin to end of (v x_i) S_i^T.

    S and XT point to S_0 and to x_0.
    """
    BM: tl.constexpr = v.shape[0]
    in_step = tl.arange(0, N * D)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    dx = tl.zeros([BM, BLOCK], tl.float32)
    for i in range(begin, end, N):
        s = tl.load(S + tl.cast(i, tl.int64) * (D * BLOCK) + in_step)
        x = tl.load(XT + (i + tl.arange(0, N))[:, None] * TP + row[None, :])
        vx = (v.reshape([BM, 1, D]) * tl.trans(x).reshape([BM, N, 1])).reshape([BM, N * D])
        dx = tl.dot(vx, s, dx, input_precision=PRECISION)
        wait_for_products(i)
    return dx


@triton.jit
def _load_square(spread, weight, head, m, inside, step, row, TP, M: tl.constexpr):
    """Return weight Z x [BM, BLOCK] for the entries m, from `square_times_kernel`, zeros where not `inside`."""
    zx = tl.load(spread.zx + (tl.cast(head, tl.int64) * M + m[:, None]) * TP + row[None, :])
    part = tl.cast(head, tl.int64) * ((M + 63) // 64) + step * BLOCK // 64
    unit = tl.load(spread.zx_unit + part * TP + row)
    return tl.where(inside[None, :], tl.trans(zx).to(tl.float32) * (weight * unit)[:, None], 0.0)


@triton.jit
def _add_columns(x, column, D: tl.constexpr):
    """Return [BM, D]: column n of x [BM, N] is added to column `column[n]`, or left out if that is D."""
    places = (column[:, None] == tl.arange(0, D)[None, :]).to(x.dtype)
    return tl.dot(x, places, input_precision=PRECISION)


@triton.jit
def _to_rows(dx, scaled, row, TP, one, two, inside, D: tl.constexpr):
    """Return the gradient [BM, D] to rows from dx [BM, BLOCK] float32, the gradient to products of two entries.

    scaled: pointer to the rows of a head; one, two [BLOCK]: the entries; inside [BLOCK]: False for empty products.
    """
    unit = unit_scale(tl.max(tl.abs(dx), 1), STATE_EXPONENT) * TO_GRADIENT_TOP
    dx = (dx * unit[:, None]).to(scaled.dtype.element_ty)
    x = tl.trans(tl.load(scaled + two[:, None] * TP + row[None, :]))
    to_rows = _add_columns(dx * x, tl.where(inside, one, D), D)
    x = tl.trans(tl.load(scaled + one[:, None] * TP + row[None, :]))
    return (to_rows + _add_columns(dx * x, tl.where(inside, two, D), D)) / unit[:, None]


@triton.jit(do_not_specialize=["T", "CHUNK", "H", "HKV", "skip", "n", "first"])
def query_gradient_of_products_kernel(
    prepared, states, spread,  # spread: for heads from `first` on
    LISTS, FACTORS,  # tables of the layout: the steps; the two entries of the row in each product
    X,  # the rows
    OUT,  # the gradient is added to it
    GATE_TERMS,  # the result for log_g's gradient, or None
    x_strides,
    T, CHUNK, H, HKV,
    skip,  # the chunk with a zero state, which is not read, or -1
    n, first,
    D: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add BM rows of the gradient to OUT, and write GATE_TERMS.

    Each step computes the gradient to BLOCK numbers of x, N terms of their sums at a time. These numbers are entries
    in the first half of the steps, with sums over their scalars, and scalars in the second, with sums over entries.
    """
    TP = padded_tokens(T)
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0), T, CHUNK, H, HKV, BM, first)
    row = lo + tl.arange(0, BM)
    place = tl.cast(bh, tl.int64) * TP + row
    XT = prepared.xt + tl.cast(bh, tl.int64) * (2 * M) * TP
    scaled = prepared.scaled + tl.cast(bh, tl.int64) * D * TP
    v = tl.load(prepared.scaled_v + place[:, None] * D + tl.arange(0, D)[None, :])
    down = diagonal(tl.full([D], 1 / VALUES_DOWN_4, tl.float32), D)
    v = tl.dot(v, down.to(v.dtype), input_precision=PRECISION).to(v.dtype)
    # twice, since x is on both sides of Z; in the unit of v
    weight = tl.load(prepared.weight + place) * (tl.load(prepared.unit_v + state) * (2 / VALUES_DOWN_4))
    blocks: tl.constexpr = (M + BLOCK - 1) // BLOCK
    acc = tl.zeros([BM, D], tl.float32)
    first_list = (state - first // (H // HKV) * tl.cdiv(T, CHUNK)) * n
    for step in range(2 * blocks if chunk != skip else 0):
        side = step // blocks * M  # where entries begin in x, then where scalars begin
        m = tl.load(LISTS + 4 * step) + tl.arange(0, BLOCK)
        begin, end = tl.load(LISTS + 4 * step + 1), tl.load(LISTS + 4 * step + 2)
        S = spread.S + tl.cast(first_list + tl.load(LISTS + 4 * step + 3) - begin, tl.int64) * (D * BLOCK)
        dx = _sum_over_list(v, XT + (M - side) * TP, S, row, TP, begin, end, D, N)
        inside = (m >= 0) & (m < M)
        m = tl.where(inside, m, 0)
        if step < blocks:
            dx += _load_square(spread, weight, bh - first, m, inside, step, row, TP, M)
        one, two = tl.load(FACTORS + side + m), tl.load(FACTORS + 2 * M + side + m)
        acc += _to_rows(dx, scaled, row, TP, one, two, inside, D)
    acc = as_it_came(acc, prepared, states, place, state, b * HKV + h // (H // HKV), VALUES_DOWN_4)
    if GATE_TERMS is not None:
        x = load_rows(X, x_strides, b, lo, h, T, BM, D)
        tl.store(GATE_TERMS + place, 0.25 * tl.sum(acc * x.to(tl.float32), 1))
    add_to_rows(OUT, acc, b, lo, h, T, H)


# ---- launchers


def spread_bytes(D, chunks, rows, size):
    """Return the bytes of `Spread` for one head of keys, its chunks and its rows of queries; size: of an entry of S."""
    M = layout.entries(D, 4)
    states = chunks * layout.SPREAD_ROWS[D] * D * layout.BLOCK
    return (states + rows * M) * size + rows * triton.cdiv(M, 64) * 4


def query_gradient(s, prepared, states, skip, out, x, gated, config=None):
    """Add to `out` the gradient to each row of x, and return gate_terms, or None without gates.

    x, out [B, T, H, D]; prepared: the result of `prepare` for x, with values and weight; states: `States`; skip: the
    number of the chunk with a zero state, or -1. D and p are as in `Sizes`.
    """
    heads, config = x.shape[2], config or choose("query_gradient", s.q, s.p)
    gate_terms = empty(x, s.B * heads, s.TP) if gated else None
    group, key_heads = heads // s.HKV, s.B * s.HKV
    size = spread_bytes(s.D, s.chunks, group * s.TP, states.S.element_size())
    at_once = max(1, min(key_heads, SPREAD // size))
    spread = _empty_spread(s, x, at_once, group)
    for first in range(0, key_heads, at_once):
        _spread_states(s, states.S[first : first + at_once], spread)
        rows = min(at_once, key_heads - first) * group * triton.cdiv(s.T, config.BM)
        shared, place = (s.T, s.chunk, heads, s.HKV), first * group
        square_times_kernel[(rows * triton.cdiv(s.layout.M, 64),)](
            prepared.xt, states.S, spread, *shared, s.layout.tiles, skip, place,
            M=s.layout.M, D=s.D, N=64, BM=config.BM, num_warps=config.warps, num_stages=min(3, config.stages),
        )  # fmt: skip
        query_gradient_of_products_kernel[(rows,)](
            prepared, states, spread, s.layout.lists, s.layout.factors, x, out, gate_terms, x.stride(),
            *shared, skip, len(s.layout.where), place,
            D=s.D, M=s.layout.M, BM=config.BM, N=min(config.BN // s.D, layout.STEP), **config.launch(),
        )  # fmt: skip
    return gate_terms


def _empty_spread(s, like, key_heads, group):
    """Return an uninitialised `Spread` for some heads of keys, each with a group of heads of rows."""
    M, heads = s.layout.M, key_heads * group
    return Spread(
        S=empty(like, key_heads * s.chunks * len(s.layout.where) * s.D, layout.BLOCK, dtype=s.half),
        zx=empty(like, heads, M, s.TP, dtype=s.half),
        zx_unit=empty(like, heads, triton.cdiv(M, 64), s.TP),
    )


def _spread_states(s, S, spread):
    """Write spread.S of the states S [heads of keys, chunks, F]."""
    n = len(s.layout.where)
    spread_kernel[(len(S) * s.chunks * n // layout.STEP,)](
        S, spread.S, s.layout.where, s.layout.tiles, n, M=s.layout.M, D=s.D, N=layout.STEP
    )
