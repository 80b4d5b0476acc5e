"""Query gradient: the gradient to each query through the state that it reads, or to each key through the state.

    p = 2:  dx_t = c_t  sum over i of  (xt_t[i] values_t) S_i^T  +  2 weight_t Z x_t
    p = 4:  the gradient to xt (products of two entries) is made the same way, and from there goes to the row:
            dxt_t = sum over scalars i of (xt_t[i] values_t) S_i^T + 2 weight_t Z xt_t,   dx_t[a] = sum dxt_t[ab] x_t[b]
    both:   read_t = x_t . dx_t / p,  which log_g's gradient needs

where what comes through S (p = 4: and Z) is the gradient to reflected rows and is reflected back (see prepare.py).

S_i holds the rows of the state for the products of entry i with the others, [entries, D]. For p = 2 these are in
a table (`where`). At D = 128, where products cost more than what is done with them, half of them will do: the state
has S_ab once for (a, b) and (b, a), and w_ab = S_ab . values_t is multiplied by x_t[b] for dx_t[a] and by x_t[a] for
dx_t[b]. For p = 4 `spread_kernel` writes them once more, one list behind another: 32 entries for each of
their scalars, then 32 scalars for each of their entries (layout.py), and `square_times_kernel` makes Z xt.

    query_gradient_kernel, p = 2: BM rows             query_gradient_of_products_kernel, p = 4: BM rows, for each of
                                                      2 ceil(M / 32) steps
             D                    D                           N scalars x D               32
      BM | values x_i |  D | S_i^T |                  BM | values x_i, x_i+1.. | N D | S_i^T, .. |  --> dxt [BM, 32]
      summed over i, 4 at a time --> dx [BM, D]       then two products with zeros and ones     --> dx [BM, D]

    query_gradient_of_pairs_kernel, p = 2, D = 128, half precision: BM rows, for each tile of the state (layout.py)

             D            64
      BM | values |  D | S^T | --> w [BM, 64]: times scalars, added to those of the part's slices [BM, 64]; and
                                   times slices, summed over the 16 of a slot, those of the tile's scalars [BM, 4]
      after each part both are added to dx [BM, D] by products with zeros and ones

    name      shape                                     dtype      units
    xt, rows, values, unit_x, unit_v, weight   see prepare.py      read
    S         [B * Hkv, chunks, F]                      float16    unit, see discumsum.py    read
    Z         [B * Hkv, chunks, D * D]                  float32    one, p = 2                read
    states    [heads * chunks * n * D, 32]              float16    unit: S as `spread_kernel` writes it, n = len(where)
    zx        [heads * rows, M, TP]                     float16    unit zx_unit: Z xt
    zx_unit   [heads * rows, ceil(M / 64), TP]          float32    the inverse of a power of two, for 64 entries of zx
    out       [B, T, H, D]                              q's        one: dx is added to it
    read      [B * H, TP]                               float32    one           (float16: float32 where q, k and v are)

Cost: p = 2 multiplies the full square, 2 D^3 FLOP per row, or of pairs as many as there are features, 0.56 of it (D =
128), and those have 4 FLOP more for each feature; p = 4 multiplies as many rows as the longest list in a block
has, 2.4 (D = 32) to 3.7 (D = 16) times the number of features. Operands are made in registers: the waits for products
and the loads of scalars are the limit (79% of the matrix unit's rate for p = 2). p = 4 takes SPREAD bytes, or one
head's if that is more, and works on some heads after the others.
"""

import torch
import triton
import triton.language as tl

from ..common import (
    INTERPRETED,
    PRECISION,
    STATE_EXPONENT,
    TO_GRADIENT_TOP,
    TO_TOP,
    VALUES_DOWN_2,
    VALUES_DOWN_4,
    add_to_rows,
    diagonal,
    empty,
    exact_product,
    first_8_bits,
    load_mirror,
    load_rows,
    multiple_of,
    reflected,
    rows_of,
    unit_scale,
    wait_for_products,
)
from ..configs import choose
from ..layout import BLOCK, SPREAD_ROWS, STEP, entries

SPREAD = 2**30  # p = 4: the most bytes of states and zx at a time, unless one head needs more


# ---- p = 2


@triton.jit
def _of_rows(XT, VALUES, S, bh, state, row, TP, tiles, D: tl.constexpr):
    """Return, for rows of a head, the places of their numbers [BM], XT and S where theirs begin, and their values."""
    at = tl.cast(bh, tl.int64) * TP + row
    XT += tl.cast(bh, tl.int64) * D * TP
    S += tl.cast(state, tl.int64) * tiles * (64 * D)
    return at, XT, S, tl.load(VALUES + at[:, None] * D + tl.arange(0, D)[None, :])


@triton.jit
def _one_entry(v, x, S, WHERE, acc, D: tl.constexpr):
    """Return acc + (v x) S_i^T, for the rows S_i of the state that hold the products of one entry, x, with others."""
    where = tl.load(WHERE)
    s = tl.load(S + where[:, None] * D + tl.arange(0, D)[None, :])
    return tl.dot(v * x[:, None], tl.trans(s), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "tiles", "skip"])
def query_gradient_kernel(
    XT, VALUES, S, UNIT_S, UNIT_V, UNIT_X,
    WHERE,  # the layout's table of the state's row for the product of two entries
    OUT,  # the gradient is added to it
    X, Z, WEIGHT, MIRROR,  # the rows; WEIGHT None: 1; MIRROR None: no row was reflected
    READ,  # what is written, with gates
    x_strides,
    T, TP, CHUNK, H, HKV, tiles, skip,  # skip: a chunk whose state is zero and is not read, or -1
    D: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Add BM rows of the gradient to OUT, for p = 2, and write READ."""
    TP = multiple_of(TP, 256)
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0), T, CHUNK, H, HKV, BM)
    row, d = lo + tl.arange(0, BM), tl.arange(0, D)
    at, XT, S, v = _of_rows(XT, VALUES, S, bh, state, row, TP, tiles, D)
    down = diagonal(tl.full([D], 1 / VALUES_DOWN_2, tl.float32), D)
    v = tl.dot(v, down.to(v.dtype), input_precision=PRECISION).to(v.dtype)
    acc = tl.zeros([BM, D], tl.float32)
    where = WHERE + d
    for i in range(0, D if chunk != skip else 0, 4):
        x = tl.trans(tl.load(XT + (i + tl.arange(0, 4))[:, None] * TP + row[None, :])).reshape([BM, 2, 2])
        even, odd = tl.split(x)
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        acc = _one_entry(v, x0, S, where + i * D, acc, D)
        acc = _one_entry(v, x1, S, where + i * D + D, acc, D)
        acc = _one_entry(v, x2, S, where + i * D + 2 * D, acc, D)
        acc = _one_entry(v, x3, S, where + i * D + 3 * D, acc, D)
        wait_for_products(i)
    acc *= VALUES_DOWN_2
    _add_gradient(
        acc, UNIT_S, UNIT_V, UNIT_X, OUT, X, Z, WEIGHT, MIRROR, READ, x_strides, bh, b, h, lo, state, at, T, H, HKV, D,
    )  # fmt: skip


@triton.jit
def _add_gradient(
    acc, UNIT_S, UNIT_V, UNIT_X, OUT, X, Z, WEIGHT, MIRROR, READ, x_strides, bh, b, h, lo, state, at, T, H, HKV,
    D: tl.constexpr,
):  # fmt: skip
    """Add the gradient of p = 2 to OUT and write READ, from its sums [BM, D] over pairs of entries, as they are."""
    # twice, since an entry is on both sides of a product
    acc *= (tl.load(UNIT_X + at) * 2 / (tl.load(UNIT_S + state) * tl.load(UNIT_V + state)))[:, None]
    if MIRROR is not None:
        u, mirrored = load_mirror(MIRROR, b * HKV + h // (H // HKV), D)
        if mirrored:
            acc = reflected(acc, u)
    x = load_rows(X, x_strides, b, lo, h, T, acc.shape[0], D)
    d = tl.arange(0, D)
    z = tl.load(Z + tl.cast(state, tl.int64) * (D * D) + d[:, None] * D + d[None, :])
    zx = exact_product(x, z, tl.zeros([acc.shape[0], D], tl.float32))
    if WEIGHT is not None:
        zx *= tl.load(WEIGHT + at)[:, None]
    acc += 2 * zx
    if READ is not None:
        tl.store(READ + at, 0.5 * tl.sum(acc * x.to(tl.float32), 1))
    add_to_rows(OUT, acc, b, lo, h, T, H)


@triton.jit
def _entries(x, BM: tl.constexpr):
    """Return the 16 entries [BM, 4] of the slots of x [BM, 64], whose columns are in the order of `layout.columns`."""
    halves = (x.reshape([BM, 2, 2, 2, 4, 2]).permute([0, 4, 1, 2, 3, 5]),)
    for i in tl.static_range(4):
        parts = ()
        for j in tl.static_range(2**i):
            parts = parts + tl.split(halves[j])
        halves = parts
    return halves


@triton.jit
def _one_tile(to_slices, v, S, x, by, BM: tl.constexpr):
    """Return (to_slices [BM, 8, 4, 2] with a tile added, the tile's gradient to its scalars [BM, 4]).

    S: pointers [64, D] to the tile's rows; x: the slices as `_entries` returns them; by [BM, 4]: the scalars.
    """
    w = tl.dot(v, tl.trans(tl.load(S)), input_precision=PRECISION)
    entries, to_scalars = _entries(w, BM), tl.zeros([BM, 4], tl.float32)
    for i in tl.static_range(16):
        to_scalars = entries[i] * x[i] + to_scalars
    return to_slices + w.reshape([BM, 8, 4, 2]) * by[:, None, :, None], to_scalars


@triton.jit
def _add_to_columns(acc, x, places):
    """Return acc [BM, D] + x @ places, for float32 x [BM, 64] in two pieces, exact to 16 bits, and `places` [64, D] of
    zeros and ones."""
    if INTERPRETED:
        return tl.dot(x, places.to(tl.float32), acc, input_precision="ieee")
    else:
        high = first_8_bits(x)
        acc = tl.dot((x - high).to(places.dtype), places, acc)
        return tl.dot(high.to(places.dtype), places, acc)


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "tiles", "parts", "skip"])
def query_gradient_of_pairs_kernel(
    XT, VALUES, S, UNIT_S, UNIT_V, UNIT_X,
    PARTS, TO_X,  # the layout's tables of each part, and of where its columns go
    OUT,  # the gradient is added to it
    X, Z, WEIGHT, MIRROR,  # the rows; WEIGHT None: 1; MIRROR None: no row was reflected
    READ,  # what is written, with gates
    x_strides,
    T, TP, CHUNK, H, HKV, tiles, parts, skip,  # skip: a chunk whose state is zero and is not read, or -1
    D: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Do what `query_gradient_kernel` does, with a product for each pair of entries in place of two."""
    TP = multiple_of(TP, 256)
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0), T, CHUNK, H, HKV, BM)
    row, d = lo + tl.arange(0, BM), tl.arange(0, D)
    at, XT, S, v = _of_rows(XT, VALUES, S, bh, state, row, TP, tiles, D)
    acc = tl.zeros([BM, D], tl.float32)
    column = tl.arange(0, 64)
    slot, entry = column // 2 % 4, column // 8 * 2 + column % 2  # as in `layout.columns`
    tile, of_four = S + (slot * 16 + entry)[:, None] * D + d[None, :], tl.arange(0, 16)
    for number in range(parts if chunk != skip else 0):
        part = PARTS + number * 16
        slices, count = tl.load(part + slot) + entry, tl.load(part + 12)
        x = _entries(tl.trans(tl.load(XT + slices[:, None] * TP + row[None, :])).to(tl.float32), BM)
        scalars = tl.load(part + 4 + of_four // 4) + of_four % 4  # of four tiles
        to_slices, to_scalars = tl.zeros([BM, 8, 4, 2], tl.float32), tl.zeros([BM, 8, 4, 2], tl.float32)
        scalars = XT + scalars[:, None] * TP + row[None, :]
        following = tl.load(scalars)
        for i in range(0, count, 4):
            by = tl.trans(following).to(tl.float32)
            following = tl.load(scalars + tl.minimum(i + 4, count - 4) * TP)
            even, odd = tl.split(by.reshape([BM, 4, 2, 2]))
            by0, by2 = tl.split(even)
            by1, by3 = tl.split(odd)
            to_slices, of0 = _one_tile(to_slices, v, tile + i * (64 * D), x, by0, BM)
            to_slices, of1 = _one_tile(to_slices, v, tile + (i + 1) * (64 * D), x, by1, BM)
            to_slices, of2 = _one_tile(to_slices, v, tile + (i + 2) * (64 * D), x, by2, BM)
            to_slices, of3 = _one_tile(to_slices, v, tile + (i + 3) * (64 * D), x, by3, BM)
            four = tl.join(tl.join(of0, of2), tl.join(of1, of3))  # [BM, 4, 2, 2]
            # for each place of four tiles; broadcast it would need another layout
            four = tl.join(tl.join(four, four), tl.join(four, four)).permute([0, 4, 5, 2, 1, 3]).reshape([BM, 8, 4, 2])
            to_scalars = tl.where((tl.arange(0, 8) // 2 == i // 4)[None, :, None, None], four, to_scalars)
        tile += count * (64 * D)
        to_x = TO_X + number * (2 * 64 * D) + column[:, None] * D + d[None, :]
        acc = _add_to_columns(acc, to_slices.reshape([BM, 64]), tl.load(to_x))
        acc = _add_to_columns(acc, to_scalars.reshape([BM, 64]), tl.load(to_x + 64 * D))
    _add_gradient(
        acc, UNIT_S, UNIT_V, UNIT_X, OUT, X, Z, WEIGHT, MIRROR, READ, x_strides, bh, b, h, lo, state, at, T, H, HKV, D,
    )  # fmt: skip


# ---- p = 4


@triton.jit(do_not_specialize=["F", "n"])
def spread_kernel(S, OUT, WHERE, F, n, D: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Write a state's rows in the order in which the gradient to x reads them: N of the n D rows of BLOCK entries."""
    F = multiple_of(F, 64)
    state, first = tl.program_id(0) // (n // N), tl.program_id(0) % (n // N) * N
    d, m = tl.arange(0, D), tl.arange(0, BLOCK)
    S += tl.cast(state, tl.int64) * F
    OUT += (tl.cast(state, tl.int64) * n + first) * (D * BLOCK)
    for i in range(N):
        rows = tl.load(WHERE + (first + i) * BLOCK + m)
        s = tl.load(S + rows[:, None] * D + d[None, :])
        tl.store(OUT + (i * D + d)[:, None] * BLOCK + m[None, :], tl.trans(s))


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "F", "skip", "first"])
def square_times_kernel(
    XT, SQUARE, OUT, UNIT,
    T, TP, CHUNK, H, HKV, F, skip, first,  # heads of rows from `first` on
    M: tl.constexpr,
    N: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write N of the M entries of Z x for BM rows, transposed as x is, and their unit for each row.

    The largest of the N has the unit: where keys share a mean, entries of Z x differ by more than float16's range. The
    last N of a row are whole, as are the BLOCK entries of a step of the next kernel.
    """
    TP, F = multiple_of(TP, 256), multiple_of(F, 64)
    parts: tl.constexpr = (M + N - 1) // N
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0) // parts, T, CHUNK, H, HKV, BM, first)
    if chunk != skip:
        part, row = tl.program_id(0) % parts, lo + tl.arange(0, BM)[None, :]
        m = part * N + tl.arange(0, N) - (BLOCK - M % BLOCK) % BLOCK
        inside = (m[:, None] >= 0) & (m[:, None] < M)
        x_of, z_of = XT + tl.cast(bh, tl.int64) * (2 * M) * TP, SQUARE + tl.cast(state, tl.int64) * F
        zx = tl.zeros([N, BM], tl.float32)
        for i in range(0, M, 64):
            n = i + tl.arange(0, 64)
            z = tl.load(z_of + m[:, None] * M + n[None, :], mask=inside & (n[None, :] < M), other=0.0)
            x = tl.load(x_of + n[:, None] * TP + row, mask=n[:, None] < M, other=0.0)
            zx = tl.dot(z, x, zx, input_precision=PRECISION)
        unit = unit_scale(tl.max(tl.abs(zx), 0), STATE_EXPONENT) * TO_TOP
        to = OUT + (tl.cast(bh - first, tl.int64) * M + m[:, None]) * TP + row
        tl.store(to, (zx * unit[None, :]).to(OUT.dtype.element_ty), inside)
        tl.store(UNIT + (tl.cast(bh - first, tl.int64) * parts + part) * TP + lo + tl.arange(0, BM), 1 / unit)


@triton.jit
def _add_columns(x, at, D: tl.constexpr):
    """Return [BM, D]: the sums of the columns of x [BM, N] with the same number in `at` [N], but for D."""
    places = (at[:, None] == tl.arange(0, D)[None, :]).to(x.dtype)
    return tl.dot(x, places, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "skip", "n", "first"])
def query_gradient_of_products_kernel(
    XT, ROWS, VALUES, S,  # S: by `spread_kernel`, for heads from `first` on
    ZX, ZX_UNIT,  # by `square_times_kernel`, for the same heads
    UNIT_S, UNIT_V, UNIT_X, WEIGHT,
    LISTS, FACTORS,  # tables of the layout: the steps; the entries of the row whose products x holds
    OUT,  # the gradient is added to it
    X, MIRROR,  # the rows; None: no row was reflected
    READ,  # what is written, with gates
    x_strides,
    T, TP, CHUNK, H, HKV, skip, n, first,
    D: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add BM rows of the gradient to OUT, for p = 4, and write READ.

    Each step computes the gradient to BLOCK entries of x, first as entries from their scalars, then as scalars from
    their entries, N of the latter at a time.
    """
    TP = multiple_of(TP, 256)
    bh, b, h, lo, chunk, state = rows_of(tl.program_id(0), T, CHUNK, H, HKV, BM, first)
    row = lo + tl.arange(0, BM)
    at = tl.cast(bh, tl.int64) * TP + row
    XT += tl.cast(bh, tl.int64) * (2 * M) * TP
    ROWS += tl.cast(bh, tl.int64) * D * TP
    v = tl.load(VALUES + at[:, None] * D + tl.arange(0, D)[None, :])
    down = diagonal(tl.full([D], 1 / VALUES_DOWN_4, tl.float32), D)
    v = tl.dot(v, down.to(v.dtype), input_precision=PRECISION).to(v.dtype)
    # twice, since x is on both sides of Z; in the unit of v
    weight = tl.load(WEIGHT + at) * (tl.load(UNIT_V + state) * (2 / VALUES_DOWN_4))
    blocks: tl.constexpr = (M + BLOCK - 1) // BLOCK
    acc = tl.zeros([BM, D], tl.float32)
    in_step = tl.arange(0, N * D)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    before = (state - first // (H // HKV) * tl.cdiv(T, CHUNK)) * n
    for step in range(2 * blocks if chunk != skip else 0):
        these = step // blocks * M  # places of entries, then of scalars
        others = M - these
        m = tl.load(LISTS + 4 * step) + tl.arange(0, BLOCK)
        begin, end = tl.load(LISTS + 4 * step + 1), tl.load(LISTS + 4 * step + 2)
        place = before + tl.load(LISTS + 4 * step + 3) - begin
        dx = tl.zeros([BM, BLOCK], tl.float32)
        for i in range(begin, end, N):
            s = tl.load(S + tl.cast(place + i, tl.int64) * (D * BLOCK) + in_step)
            by = tl.load(XT + (others + i + tl.arange(0, N))[:, None] * TP + row[None, :])
            vx = (v.reshape([BM, 1, D]) * tl.trans(by).reshape([BM, N, 1])).reshape([BM, N * D])
            dx = tl.dot(vx, s, dx, input_precision=PRECISION)
            wait_for_products(i)
        inside = (m >= 0) & (m < M)
        m = tl.where(inside, m, 0)
        if step < blocks:
            zx = tl.load(ZX + (tl.cast(bh - first, tl.int64) * M + m[:, None]) * TP + row[None, :])
            part = tl.cast(bh - first, tl.int64) * ((M + 63) // 64) + step * BLOCK // 64
            unit = tl.load(ZX_UNIT + part * TP + row)
            dx += tl.where(inside[None, :], tl.trans(zx).to(tl.float32) * (weight * unit)[:, None], 0.0)
        m += these
        one, two = tl.load(FACTORS + m), tl.load(FACTORS + 2 * M + m)
        unit = unit_scale(tl.max(tl.abs(dx), 1), STATE_EXPONENT) * TO_GRADIENT_TOP
        dx = (dx * unit[:, None]).to(v.dtype)
        x = tl.trans(tl.load(ROWS + two[:, None] * TP + row[None, :]))
        to_rows = _add_columns(dx * x, tl.where(inside, one, D), D)
        x = tl.trans(tl.load(ROWS + one[:, None] * TP + row[None, :]))
        acc += (to_rows + _add_columns(dx * x, tl.where(inside, two, D), D)) / unit[:, None]
    acc *= (tl.load(UNIT_X + at) * VALUES_DOWN_4 / (tl.load(UNIT_S + state) * tl.load(UNIT_V + state)))[:, None]
    if MIRROR is not None:
        u, mirrored = load_mirror(MIRROR, b * HKV + h // (H // HKV), D)
        if mirrored:
            acc = reflected(acc, u)
    if READ is not None:
        x = load_rows(X, x_strides, b, lo, h, T, BM, D)
        tl.store(READ + at, 0.25 * tl.sum(acc * x.to(tl.float32), 1))
    add_to_rows(OUT, acc, b, lo, h, T, H)


# ---- launchers


def spread_bytes(D, chunks, rows, size):
    """Return the bytes of states and zx for one head of keys, its chunks and its rows of queries, for p = 4."""
    M = entries(D, 4)
    return (chunks * SPREAD_ROWS[D] * D * BLOCK + rows * M) * size + rows * triton.cdiv(M, 64) * 4


def query_gradient(s, prepared, S, unit_s, skip, out, x, Z, weight, gated, mirror=None, config=None):
    """Add to `out` the gradient to each row of x, and return read, or None without gates.

    x, out [B, T, H, D]; prepared: the result of `prepare` for x, with values; skip: the number of a chunk whose state
    is zero, or -1; weight [B * H, TP] or None for 1, p = 2 (p = 4: that of `prepared`); mirror: as `prepare` had
    it. Takes what `chunked.Sizes` takes.
    """
    rows = x.shape[2]
    read = empty(S, s.B * rows, s.TP) if gated else None
    c = config or choose("query_gradient", s.q, s.p)
    if s.p == 4:
        _query_gradient_of_products(s, prepared, S, unit_s, skip, out, x, read, mirror, c)
        return read
    arrays = prepared["xt"], prepared["values"], S, unit_s, prepared["unit_v"], prepared["unit_x"]
    results, sizes = (out, x, Z, weight, mirror, read, x.stride()), (s.T, s.TP, s.chunk, rows, s.HKV, s.layout.tiles)
    grid, options = (triton.cdiv(s.T, c.BM) * s.B * rows,), dict(D=s.D, BM=c.BM, **c.launch())
    if s.D == 128 and s.half == torch.float16:
        tables = s.layout.parts, s.layout.to_x
        query_gradient_of_pairs_kernel[grid](*arrays, *tables, *results, *sizes, len(tables[0]), skip, **options)
    else:
        query_gradient_kernel[grid](*arrays, s.layout.where, *results, *sizes, skip, **options)
    return read


def _query_gradient_of_products(s, prepared, S, unit_s, skip, out, x, read, mirror, c):
    """Launch the kernels for p = 4, for as many heads of keys at a time as SPREAD allows."""
    rows, n, M = x.shape[2], len(s.layout.where), s.layout.M
    group = rows // s.HKV
    each = spread_bytes(s.D, s.chunks, group * s.TP, S.element_size())
    at_once = max(1, min(s.B * s.HKV, SPREAD // each))
    states = torch.empty(at_once * s.chunks * n * s.D, BLOCK, dtype=s.half, device=S.device)
    zx = torch.empty(at_once * group, M, s.TP, dtype=s.half, device=S.device)
    zx_unit = empty(S, at_once * group, triton.cdiv(M, 64), s.TP)
    shared = s.T, s.TP, s.chunk, rows, s.HKV
    for first in range(0, s.B * s.HKV, at_once):
        heads = min(at_once, s.B * s.HKV - first)
        blocks = heads * group * triton.cdiv(s.T, c.BM)
        spread_kernel[(heads * s.chunks * n // STEP,)](
            S[first:], states, s.layout.where, s.F, n, D=s.D, N=STEP, BLOCK=BLOCK
        )
        square_times_kernel[(blocks * triton.cdiv(M, 64),)](
            prepared["xt"], S[..., s.FS :], zx, zx_unit,
            *shared, s.F, skip, first * group, M=M, N=64, BM=c.BM, BLOCK=BLOCK,
            num_warps=c.warps, num_stages=min(3, c.stages),
        )  # fmt: skip
        query_gradient_of_products_kernel[(blocks,)](
            prepared["xt"], prepared["rows"], prepared["values"], states, zx, zx_unit,
            unit_s, prepared["unit_v"], prepared["unit_x"], prepared["weight"], s.layout.lists, s.layout.factors,
            out, x, mirror, read, x.stride(),
            *shared, skip, n, first * group, D=s.D, M=M, BM=c.BM, N=min(c.BN // s.D, STEP), BLOCK=BLOCK, **c.launch(),
        )  # fmt: skip
