"""Query gradient, p = 2: the gradient to each query through the state that it reads, or to each key through the state.

    dx_t = c_t  sum over i of  (xt_t[i] scaled_v_t) S_i^T  +  2 weight_t Z x_t,    gate_term_t = x_t . dx_t / 2

S_i [D, D] holds the state's rows for the products of entry i with all entries; the table `where` finds them. c_t brings
the sum into units of one. The part through S is the gradient to reflected rows, and is reflected back (mirror.py). The
gradient to log_g needs gate_term_t.

    query_gradient_kernel: BM rows

             D                    D
      BM | v x_i    |  D | S_i^T |      v = scaled_v, summed over i, 4 at a time --> dx [BM, D]

At D = 128 in half precision, products cost more than the work on their results, and half of them suffice. The state
has S_ab once for (a, b) and (b, a), and w_ab = S_ab . scaled_v_t is multiplied by x_t[b] for dx_t[a] and by x_t[a] for
dx_t[b].

    query_gradient_of_pairs_kernel: BM rows, for each tile of the state (layout.py)

             D            64
      BM |   v    |  D | S^T | --> w [BM, 64]: times scalars, added to the sums of the part's slices [BM, 64]; and
                                   times slices, summed over the 16 of a slot, the sums of the tile's scalars [BM, 4]
      after each part both are added to dx [BM, D] by products with zeros and ones

    name        shape                                     dtype      units
    prepared    see prepare.py                                       read: xt, scaled_v, units, weight
    states.S    [B * Hkv, chunks, F]                      float16    states.unit, see discumsum.py    read
    states.Z    [B * Hkv, chunks, D * D]                  float32    one
    out         [B, T, H, D]                              q's        one: dx is added to it
    gate_terms  [B * H, TP]                               float32    one        (float16: float32 where q, k and v are)

Cost: 2 D^3 FLOP a row for the full square. The pairs at D = 128 take 0.56 of that, and 4 FLOP more for each feature.
Operands are made in registers: the waits for products and the loads of scalars are the limit (79% of the
matrix unit's rate).
"""

import torch
import triton
import triton.language as tl

from ..common import (
    INTERPRETED,
    PRECISION,
    VALUES_DOWN_2,
    add_to_rows,
    diagonal,
    empty,
    exact_product,
    first_8_bits,
    load_rows,
    rows_of,
    wait_for_products,
)
from ..configs import choose
from .prepare import as_it_came
from .sizes import at_index, padded_tokens, square_of, tile_of


@triton.jit
def _arrays_of_rows(prepared, states, bh, state, row, TP, tiles, D: tl.constexpr):
    """Return pointers to the xt of a head and the S of a state, and scaled_v [BM, D] of rows."""
    v = tl.load(tile_of(prepared.scaled_v, tl.cast(bh, tl.int64) * TP + row, D, tl.arange(0, D)))
    return at_index(prepared.xt, bh, D * TP), at_index(states.S, state, tiles * (64 * D)), v


@triton.jit
def _one_entry(v, x, S, WHERE, acc, D: tl.constexpr):
    """Return acc + (v x) S_i^T, for one entry x [BM] of each row and the state's rows S_i for its products."""
    where = tl.load(WHERE)
    s = tl.load(tile_of(S, where, D, tl.arange(0, D)))
    return tl.dot(v * x[:, None], tl.trans(s), acc, input_precision=PRECISION)


@triton.jit
def _add_gradient(acc, prepared, states, X, x_strides, OUT, GATE_TERMS, sizes, SCALE: tl.constexpr):
    """Add the gradient to OUT and write GATE_TERMS, from the sums acc [BM, D] over pairs of entries.

    sizes: (T, CHUNK, H, HKV); SCALE: a factor of the sums, besides the units of values and states.
    """
    T, CHUNK, H, HKV = sizes
    BM: tl.constexpr = acc.shape[0]
    D: tl.constexpr = acc.shape[1]
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0), T, CHUNK, H, HKV, BM)
    row = tl.cast(bh, tl.int64) * padded_tokens(T) + lo + tl.arange(0, BM)
    acc = as_it_came(acc, prepared, states, row, state, b * HKV + h // (H // HKV), SCALE)
    x = load_rows(X, x_strides, b, lo, h, T, BM, D)
    zx = exact_product(x, tl.load(square_of(states.Z, state, D)), tl.zeros([BM, D], tl.float32))
    if prepared.weight is not None:
        zx *= tl.load(prepared.weight + row)[:, None]
    acc += 2 * zx
    if GATE_TERMS is not None:
        tl.store(GATE_TERMS + row, 0.5 * tl.sum(acc * x.to(tl.float32), 1))
    add_to_rows(OUT, acc, b, lo, h, T, H)


@triton.jit(do_not_specialize=["T", "CHUNK", "H", "HKV", "tiles", "skip"])
def query_gradient_kernel(
    prepared,  # a weight of None stands for 1
    states,
    WHERE,  # the layout's table: the state's row for the product of two entries
    X,  # the rows
    OUT,  # the gradient is added to it
    GATE_TERMS,  # the result for log_g's gradient, or None
    x_strides,
    T,
    CHUNK,
    H,
    HKV,
    tiles,
    skip,  # the chunk with a zero state, which is not read, or -1
    D: tl.constexpr,
    BM: tl.constexpr,
):
    """Add BM rows of the gradient to OUT, and write GATE_TERMS."""
    TP = padded_tokens(T)
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0), T, CHUNK, H, HKV, BM)
    row = lo + tl.arange(0, BM)
    XT, S, v = _arrays_of_rows(prepared, states, bh, state, row, TP, tiles, D)
    down = diagonal(tl.full([D], 1 / VALUES_DOWN_2, tl.float32), D)
    v = tl.dot(v, down.to(v.dtype), input_precision=PRECISION).to(v.dtype)
    acc = tl.zeros([BM, D], tl.float32)
    where = WHERE + tl.arange(0, D)
    for i in range(0, D if chunk != skip else 0, 4):
        x = tl.trans(tl.load(tile_of(XT, i + tl.arange(0, 4), TP, row))).reshape([BM, 2, 2])
        even, odd = tl.split(x)
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        acc = _one_entry(v, x0, S, where + i * D, acc, D)
        acc = _one_entry(v, x1, S, where + i * D + D, acc, D)
        acc = _one_entry(v, x2, S, where + i * D + 2 * D, acc, D)
        acc = _one_entry(v, x3, S, where + i * D + 3 * D, acc, D)
        wait_for_products(i)
    # twice, since an entry is on both sides of a product
    _add_gradient(acc, prepared, states, X, x_strides, OUT, GATE_TERMS, (T, CHUNK, H, HKV), 2 * VALUES_DOWN_2)


# ---- D = 128


@triton.jit
def _entries(x, BM: tl.constexpr):
    """Return the 16 entries [BM, 4] of the slots of x [BM, 64], with columns in the order of `layout.columns`."""
    halves = (x.reshape([BM, 2, 2, 2, 4, 2]).permute([0, 4, 1, 2, 3, 5]),)
    for i in tl.static_range(4):
        parts = ()
        for j in tl.static_range(2**i):
            parts = parts + tl.split(halves[j])
        halves = parts
    return halves


@triton.jit
def _one_tile(to_slices, v, S, x, x_scalars, BM: tl.constexpr):
    """Return (to_slices [BM, 8, 4, 2] with a tile added, the tile's gradient to its scalars [BM, 4]).

    S: pointers [64, D] to the tile's rows; x: the slices as `_entries` returns them; x_scalars [BM, 4]: the scalars.
    """
    w = tl.dot(v, tl.trans(tl.load(S)), input_precision=PRECISION)
    entries, to_scalars = _entries(w, BM), tl.zeros([BM, 4], tl.float32)
    for i in tl.static_range(16):
        to_scalars = entries[i] * x[i] + to_scalars
    return to_slices + w.reshape([BM, 8, 4, 2]) * x_scalars[:, None, :, None], to_scalars


@triton.jit
def _add_to_columns(acc, x, places):
    """Return acc [BM, D] + x @ places, exact to 16 bits, for float32 x [BM, 64] and `places` [64, D] of zeros and ones.

    x is split into two pieces.
    """
    if INTERPRETED:
        return tl.dot(x, places.to(tl.float32), acc, input_precision="ieee")
    else:
        high = first_8_bits(x)
        acc = tl.dot((x - high).to(places.dtype), places, acc)
        return tl.dot(high.to(places.dtype), places, acc)


@triton.jit(do_not_specialize=["T", "CHUNK", "H", "HKV", "tiles", "parts", "skip"])
def query_gradient_of_pairs_kernel(
    prepared,  # a weight of None stands for 1
    states,
    PARTS,  # the layout's table of parts
    TO_X,  # the layout's table: the entry of x for each column of a part
    X,  # the rows
    OUT,  # the gradient is added to it
    GATE_TERMS,  # the result for log_g's gradient, or None
    x_strides,
    T,
    CHUNK,
    H,
    HKV,
    tiles,
    parts,
    skip,  # the chunk with a zero state, which is not read, or -1
    D: tl.constexpr,
    BM: tl.constexpr,
):
    """Do the work of `query_gradient_kernel` with one product for each pair of entries in place of two."""
    TP = padded_tokens(T)
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0), T, CHUNK, H, HKV, BM)
    row, d = lo + tl.arange(0, BM), tl.arange(0, D)
    XT, S, v = _arrays_of_rows(prepared, states, bh, state, row, TP, tiles, D)
    acc = tl.zeros([BM, D], tl.float32)
    column = tl.arange(0, 64)
    slot, entry = column // 2 % 4, column // 8 * 2 + column % 2  # as in `layout.columns`
    tile, quarter = tile_of(S, slot * 16 + entry, D, d), tl.arange(0, 16)
    for number in range(parts if chunk != skip else 0):
        part = PARTS + number * 16
        slices, count = tl.load(part + slot) + entry, tl.load(part + 12)
        x = _entries(tl.trans(tl.load(tile_of(XT, slices, TP, row))).to(tl.float32), BM)
        scalars = tl.load(part + 4 + quarter // 4) + quarter % 4  # of four tiles
        to_slices, to_scalars = tl.zeros([BM, 8, 4, 2], tl.float32), tl.zeros([BM, 8, 4, 2], tl.float32)
        scalars = tile_of(XT, scalars, TP, row)
        next_scalars = tl.load(scalars)
        for i in range(0, count, 4):
            x_scalars = tl.trans(next_scalars).to(tl.float32)
            next_scalars = tl.load(scalars + tl.minimum(i + 4, count - 4) * TP)
            even, odd = tl.split(x_scalars.reshape([BM, 4, 2, 2]))
            scalars0, scalars2 = tl.split(even)
            scalars1, scalars3 = tl.split(odd)
            to_slices, part0 = _one_tile(to_slices, v, tile + i * (64 * D), x, scalars0, BM)
            to_slices, part1 = _one_tile(to_slices, v, tile + (i + 1) * (64 * D), x, scalars1, BM)
            to_slices, part2 = _one_tile(to_slices, v, tile + (i + 2) * (64 * D), x, scalars2, BM)
            to_slices, part3 = _one_tile(to_slices, v, tile + (i + 3) * (64 * D), x, scalars3, BM)
            four = tl.join(tl.join(part0, part2), tl.join(part1, part3))  # [BM, 4, 2, 2]
            # one copy for each place of four tiles; a broadcast would need another layout
            four = tl.join(tl.join(four, four), tl.join(four, four)).permute([0, 4, 5, 2, 1, 3]).reshape([BM, 8, 4, 2])
            to_scalars = tl.where((tl.arange(0, 8) // 2 == i // 4)[None, :, None, None], four, to_scalars)
        tile += count * (64 * D)
        to_x = tile_of(TO_X + number * (2 * 64 * D), column, D, d)
        acc = _add_to_columns(acc, to_slices.reshape([BM, 64]), tl.load(to_x))
        acc = _add_to_columns(acc, to_scalars.reshape([BM, 64]), tl.load(to_x + 64 * D))
    # twice, since an entry is on both sides of a product
    _add_gradient(acc, prepared, states, X, x_strides, OUT, GATE_TERMS, (T, CHUNK, H, HKV), 2)


# ---- launcher


def query_gradient(s, prepared, states, skip, out, x, gated, config=None):
    """Add to `out` the gradient to each row of x, and return gate_terms, or None without gates.

    x, out [B, T, H, D]; prepared: the result of `prepare` for x, with values; a weight of None stands for 1; states:
    `States`; skip: the number of the chunk with a zero state, or -1. D and p are as in `Sizes`.
    """
    heads, config = x.shape[2], config or choose("query_gradient", s.q, s.p)
    gate_terms = empty(x, s.B * heads, s.TP) if gated else None
    arrays, sizes = (x, out, gate_terms, x.stride()), (s.T, s.chunk, heads, s.HKV, s.layout.tiles)
    grid, options = (triton.cdiv(s.T, config.BM) * s.B * heads,), dict(D=s.D, BM=config.BM, **config.launch())
    if s.D == 128 and s.half == torch.float16:
        parts, to_x = s.layout.parts, s.layout.to_x
        query_gradient_of_pairs_kernel[grid](
            prepared, states, parts, to_x, *arrays, *sizes, len(parts), skip, **options
        )
    else:
        query_gradient_kernel[grid](prepared, states, s.layout.where, *arrays, *sizes, skip, **options)
    return gate_terms
