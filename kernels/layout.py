"""The layout of a state in the chunked kernels: which features of (q . k)^p it has, and in which order.

The smallest state would have one feature for each non-decreasing multi-index: C(D + p - 1, p), `symmetric_power_dim`,
in the order of `attention.embedding.symmetric_power_embedding` ("canonical" here). The matrix unit needs blocks, so the
kernels store somewhat more features, in an order of their own, made of slices and scalars:

    x        a row of q or k written as M entries: for p = 2 the row itself, for p = 4 all products x_a x_b, a <= b
    slice    16 neighbouring entries of x
    feature  an entry of a slice times one more entry of x, the scalar
    slot     16 features: a slice times one scalar
    tile     64 features: 4 slots, each with a slice and a scalar of its own
    part     a run of tiles with the same 4 slices; from tile to tile every scalar moves on by one entry

So a kernel holds 64 entries of x in registers and multiplies them by 4 numbers, tile after tile. For p = 2 and D = 32,
with slices X0 = x_0..x_15 and X1 = x_16..x_31, the unordered pairs of slices are X0 X1, X0 X0 and X1 X1:

                       slot 0      slot 1      slot 2      slot 3
    part 0  tile  0    X0 x_16     X0 x_0      X0 x_24     X0 x_8
            tile  1    X0 x_17     X0 x_1      X0 x_25     X0 x_9
            ...
            tile  7    X0 x_23     X0 x_7      X0 x_31     X0 x_15
    part 1  tile  8    X1 x_16     X1 x_20     X1 x_24     X1 x_28
            ...
            tile 11    X1 x_19     X1 x_23     X1 x_27     X1 x_31

p = 4 needs the products (a, b) times (c, d) with a <= b <= c <= d. Entries are in order of a, so that the pairs (c, d)
of a slice have nearly the same c, and the scalars that they need, all pairs with b <= c, begin a list in order of b.

    rows of a state        the square of x    kernels    smallest
    p = 2, D = 64                    4,096      2,560       2,080
    p = 4, D = 16                   20,736      5,376       3,876
    p = 4, D = 32                  278,784     57,600      52,360

A state's row is a plain sum over tokens of (feature times v). A kernel that reads a state multiplies by the number of
orders of the feature's product; for p = 4 `discumsum` has done that, and has written 0 where b > c.
"""

import functools
import math
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
import torch

SLOTS, SLICE, TILE = 4, 16, 64
BLOCK, STEP = 32, 8  # p = 4: the gradient to x is computed for 32 entries at a time, in steps of 8 scalars
SPREAD_ROWS = {16: 448, 32: 3968, 64: 50448}  # len(Layout.where) for each D, p = 4


class Layout(NamedTuple):
    """The tables that the kernels read; all are tensors on the GPU except the two numbers."""

    M: int  # number of entries of x
    tiles: int  # number of tiles: a state has 64 times as many rows
    # [parts, 16] int32, for each part: the first entry of each slot's slice, each slot's first scalar, each slot's
    # number of orders (p = 2), then the number of its tiles, its first tile, 0, 0
    parts: torch.Tensor
    # [tiles / 4, 2] int32, for every 4 tiles: their part, and the place of the first of them in the part
    groups: torch.Tensor
    # [tiles * 64] float32: the number of orders of each row of the state, 0 for a row that is not needed; for p = 4
    # then M * M for Z: the number of orders of the product of two entries of x
    orders: torch.Tensor
    # p = 2: [M, M] int32, the state's row that holds the product of two entries of x. p = 4: [n, 32] int32, the lists
    # of the gradient one behind another: the state's rows for a scalar and 32 entries, or for an entry and 32 scalars
    where: torch.Tensor
    # p = 2, read at D = 128: [parts, 2, 64, M] bfloat16, 1 where a column of `columns`, an entry of a part's
    # slices, goes to an entry of x; then the same for a part's scalars, but not where a slice is times itself
    to_x: torch.Tensor | None
    # p = 4: [2 * ceil(M / 32), 4] int32, for every 32 entries the first of them (below 0: there is none), the range of
    # scalars that they need, and where in `where` their list begins; then the same for every 32 scalars and entries
    lists: torch.Tensor | None
    # p = 4: [2, 2 M] int32: each entry of x, then each scalar, is the product of these two entries of the row
    factors: torch.Tensor | None
    rows: torch.Tensor  # [Dphi] int64: a row of the state for each canonical feature
    canonical: torch.Tensor  # [tiles * 64] int64: the canonical feature of each row of the state
    square: torch.Tensor  # [M * M] int64: the canonical feature of the product of any two entries of x
    places: torch.Tensor  # [Dphi] int64: a place in `square` for each canonical feature
    root: torch.Tensor  # [Dphi] float32: the square root of each canonical feature's number of orders


def symmetric_power_dim(D, p):
    """Return the number of features of the symmetric power, C(D + p - 1, p)."""
    features = 1
    for i in range(p):  # torch.compile's graph would break at math.comb
        features = features * (D + i) // (i + 1)
    return features


def tails_of(d, r):
    """Return, for each i, where the multi-indices of degree r with a first index of at least i begin."""
    return [symmetric_power_dim(d, r) - symmetric_power_dim(d - i, r) for i in range(d)]


def positions_of_narrower(d, D, p):
    """Return the place of each multi-index of d entries among the multi-indices of D >= d entries.

    The result is [C(d+p-1, p)] int64. Both are in lexicographic order. It is built degree by degree like the features:
    after a first index i come the multi-indices of one degree less that begin with at least i.
    """
    positions = np.arange(d)
    for r in range(1, p):
        narrow, wide, starts = tails_of(d, r), tails_of(D, r), tails_of(D, r + 1)
        positions = np.concatenate([starts[i] + positions[narrow[i] :] - wide[i] for i in range(d)])
    return positions


def make_sqrt_multiplicity(d, p):
    """Return sqrt(p! / (c_1! ... c_d!)) for each multi-index, [C(d+p-1, p)].

    It is built degree by degree like the features.
    """
    count = torch.ones(d, dtype=torch.float64)  # permutations of each multi-index so far
    run = torch.ones(d, dtype=torch.float64)  # how often its first index is repeated at its start
    for r in range(1, p):
        tails = tails_of(d, r) + [len(count)]
        counts, runs = [], []
        for i in range(d):
            # i is put in front of a tail; where the tail starts with i itself, its run gets longer
            longer = torch.ones(len(count) - tails[i], dtype=torch.float64)
            longer[: tails[i + 1] - tails[i]] += run[tails[i] : tails[i + 1]]
            runs.append(longer)
            counts.append(count[tails[i] :] * (r + 1) / longer)
        count, run = torch.cat(counts), torch.cat(runs)
    return count.sqrt()


def entries(D, p):
    """Return M, a multiple of 16; for p = 4 the first entries may be empty (8 of 144 for D = 16)."""
    return D if p == 2 else -(-D * (D + 1) // 2 // SLICE) * SLICE


def features(D, p):
    """Return the number of rows of a state."""
    return 256 * (math.comb(D // 16 + 1, 2) if p == 2 else -(-sum(_fours_of_scalars(int(D))) // SLOTS))


@functools.cache
def layout(D, p, device):
    """Return the Layout for head dimension D, a multiple of 16, and p = 2 or 4, with its tensors on `device`."""
    tables = layout_p2(D) if p == 2 else layout_p4(D)
    return Layout(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in tables))


# ---- p = 2


def layout_p2(D):
    """Return the Layout for p = 2, on the CPU: every unordered pair of slices, up to 4 of them in a part."""
    pairs = sorted(combinations_with_replacement(range(D // SLICE), 2), key=lambda pair: pair[0] == pair[1])
    parts = []  # (slice, first scalar, orders) of each slot, and the number of tiles
    while pairs:
        size = next(n for n in (4, 2, 1) if n <= len(pairs))
        chosen, pairs = pairs[:size], pairs[size:]
        tiles = SLICE * size // SLOTS
        slots = [(*chosen[slot % size], slot // size * tiles) for slot in range(SLOTS)]
        parts.append(([(s, SLICE * g + first, 1 + (s != g)) for s, g, first in slots], tiles))
    parts, index = _table_of_parts(parts)  # index: [rows, 2] entries of x
    where = np.zeros((D, D), dtype=np.int64)
    where[index[:, 1], index[:, 0]] = where[index[:, 0], index[:, 1]] = np.arange(len(index))
    orders = np.repeat(np.repeat(parts[:, 8:12], parts[:, 12], axis=0).flatten(), SLICE)
    tables, _ = _canonical_tables(D, index, np.arange(D)[:, None], np.arange(len(index)))
    return Layout(
        M=D,
        **_tables_of_tiles(parts),
        orders=_tensor(orders, torch.float32),
        where=_tensor(where),
        to_x=_tensor(_to_x(parts, D), torch.bfloat16),
        lists=None,
        factors=None,
        **tables,
    )


def columns():
    """Return (slot, entry) [64] of the columns of a tile.

    In this order a thread has all 16 entries of a slot in a row of the matrix unit's sums.
    """
    column = np.arange(TILE)
    return column // 2 % SLOTS, column // 8 * 2 + column % 2


def _to_x(parts, D):
    """Return Layout.to_x from Layout.parts."""
    (slot, entry), column, to_x = columns(), np.arange(TILE), np.zeros((len(parts), 2, TILE, D))
    for part, (from_slices, from_scalars) in zip(parts, to_x, strict=True):
        from_slices[column, part[slot] + entry] = 1
        counts = (part[8 + slot] > 1) & (entry < part[12])
        from_scalars[column[counts], (part[4 + slot] + entry)[counts]] = 1
    return to_x


# ---- p = 4


@functools.cache
def _fours_of_scalars(D):
    """Return how many fours of scalars each slice needs for p = 4: all (a, b) with b <= c, for its largest c."""
    largest = [c for c in range(D) for _ in range(c, D)][::-1][::SLICE][::-1]
    return [-(-(c + 1) * (c + 2) // 2 // 4) for c in largest]


def layout_p4(D):
    """Return the Layout for p = 4, on the CPU: each slice with the scalars that it needs."""
    M = entries(D, 4)
    x = [(c, d) for c in range(D) for d in range(c, D)]
    empty = M - len(x)
    x = np.array([(0, 0)] * empty + x)
    real = np.arange(M) >= empty
    scalars = np.lexsort((x[:, 0], x[:, 1], ~real))  # in order of b; the empty ones last
    parts, index = _table_of_parts(_parts_of_slices(D))
    first, second = scalars[index[:, 1]], index[:, 0]
    needed = real[first] & real[second] & (x[first, 1] <= x[second, 0])
    unused = np.flatnonzero(~needed)[0]
    row = np.full((M, M), unused)  # of each scalar and entry
    row[index[needed, 1], second[needed]] = np.flatnonzero(needed)
    needed &= np.isin(np.arange(len(index)), row)  # one of two equal rows
    index = np.concatenate((x[first], x[second]), axis=1)
    tables, multiplicity = _canonical_tables(D, index, x, np.flatnonzero(needed))
    orders = np.where(needed, multiplicity, 0)
    where, lists = _gradient_lists(row, unused)
    weights = np.where(real, 1 + (x[:, 0] != x[:, 1]), 0)
    parts[:, 4:8] += M  # the kernels read scalars behind the entries
    return Layout(
        M=M,
        **_tables_of_tiles(parts),
        orders=_tensor(np.concatenate((orders, np.outer(weights, weights).flatten())), torch.float32),
        where=_tensor(where),
        to_x=None,
        lists=_tensor(lists),
        factors=_tensor(np.concatenate((x, x[scalars])).T),
        **tables,
    )


def _parts_of_slices(D):
    """Return the parts of p = 4: tiles with one slice each, then tiles for the rest of the slices."""
    parts, left = [], []
    for s, fours in enumerate(_fours_of_scalars(D)):
        full = fours // SLOTS * SLOTS
        if full:
            parts.append(([(s, slot * full, 1) for slot in range(SLOTS)], full))
        left += [(s, 4 * n, 1) for n in range(full, fours)]
    left += [left[-1]] * (-len(left) % SLOTS)  # repeated with weight 0
    return parts + [(left[i : i + SLOTS], 4) for i in range(0, len(left), SLOTS)]


def _gradient_lists(row, unused):
    """Return Layout.where and Layout.lists from row [M, M], the state's row for each scalar and entry, p = 4.

    A block of 32 entries (or scalars) has a list from the first scalar (entry) that any of them needs to the last.
    """
    M = len(row)
    blocks = -(-M // BLOCK)
    lists, where = [], []
    entry_blocks = [(M + i * BLOCK, row) for i in range(-blocks, 0)]  # the last block is full
    scalar_blocks = [(i * BLOCK, row.T) for i in range(blocks)]  # the first block is full
    for start, table in entry_blocks + scalar_blocks:
        block = np.arange(start, start + BLOCK)
        rows = np.where((block >= 0) & (block < M), table[:, block.clip(0, M - 1)], unused)
        used = np.flatnonzero((rows != unused).any(1))
        begin, end = used[0] // STEP * STEP, -(-(used[-1] + 1) // STEP) * STEP
        lists.append((start, begin, end, sum(map(len, where))))
        where.append(rows[begin:end])
    return np.concatenate(where), lists


# ---- both powers


def _table_of_parts(parts):
    """Return Layout.parts and, for each row of the state, [rows, 2]: the entry of its slice and its scalar."""
    table, index, tile = [], [], 0
    for slots, tiles in parts:
        row = [SLICE * s for s, _, _ in slots] + [first for _, first, _ in slots]
        table.append([*row, *(orders for _, _, orders in slots), tiles, tile, 0, 0])
        entry = np.concatenate([SLICE * s + np.arange(SLICE) for s, _, _ in slots])
        scalar = np.repeat([first for _, first, _ in slots], SLICE)
        index += [np.stack((entry, scalar + i), axis=1) for i in range(tiles)]
        tile += tiles
    return np.array(table), np.concatenate(index)


def _tables_of_tiles(parts):
    """Return the fields of a Layout that follow from its table of parts."""
    groups = [(n, i) for n, part in enumerate(parts) for i in range(0, part[12], 4)]
    return dict(tiles=int(parts[:, 12].sum()), parts=_tensor(parts), groups=_tensor(groups))


def _canonical_tables(D, index, x, needed):
    """Return (the fields of a Layout that have the canonical order, each row's number of orders [rows]).

    index [rows, p], x [M, p / 2]: each row of the state, and each entry of x, is the product of these entries of a row
    of q or k. needed: the numbers of the rows that are not empty.
    """
    p = index.shape[1]
    multi_indices = np.array(list(combinations_with_replacement(range(D), p)))

    def rank(indices):
        return np.ravel_multi_index(tuple(np.sort(indices, axis=-1).T), (D,) * p)

    def find(indices):
        return np.searchsorted(rank(multi_indices), rank(indices))

    canonical = find(index)
    root = make_sqrt_multiplicity(D, p)
    rows, places = np.zeros((2, len(multi_indices)), dtype=np.int64)
    rows[canonical[needed]] = needed
    square = find(np.concatenate(np.broadcast_arrays(x[:, None], x[None, :]), axis=-1).reshape(-1, p))
    places[square] = np.arange(len(square))
    tables = dict(rows=rows, canonical=canonical, square=square, places=places)
    tables = {name: _tensor(table, torch.int64) for name, table in tables.items()}
    return dict(root=root.float(), **tables), root.square().round().numpy()[canonical]


def _tensor(table, dtype=torch.int32):
    return torch.as_tensor(np.ascontiguousarray(table), dtype=dtype)
