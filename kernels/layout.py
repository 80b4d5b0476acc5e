"""How the kernels lay a state out: the features of (q . k)^p in tiles of 64, made of slots of 16.

A row of q or k is first written as a vector x of M entries: for p = 2 the row itself, for p = 4 the products x_a x_b,
a <= b, of two of its entries. A feature is the product of an entry of x, the scalar, with one of the 16 entries of a
slice of x. p = 2 needs every unordered pair of slices. p = 4 needs (a, b) times (c, d) for a <= b <= c <= d: x is in
order of a, so that the pairs (c, d) of a slice have nearly the same c, and their scalars, all pairs with b <= c, are a
run of a list in order of b. Features: 2560 for D = 64 and p = 2, where the full square has 4096 and the symmetric power
2080; for p = 4 and D = 16 5376 (3876), D = 32 57,600 (52,360).

A tile has 4 slots, each a slice times a scalar of its own. Which slices stays the same for a run of tiles, a part; only
the scalars advance, by one entry a tile. So the kernels keep 64 entries of x in registers and multiply them by 4
numbers, tile after tile.

A state's rows are plain sums over the tokens, sum_t x_i x_j v_t. Whoever reads a state multiplies by the number of
orders a product can be written in; for p = 4 `discumsum` has done that, and 0 stands where b > c.
"""

import functools
import math
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
import torch

SLOTS, SLICE, TILE = 4, 16, 64
BLOCK, STEP = 32, 8  # of the gradient to x, p = 4: so many entries at a time, in steps of so many scalars
SPREAD_ROWS = {16: 448, 32: 3968, 64: 50448}  # of `where`, p = 4


class Layout(NamedTuple):
    D: int
    p: int
    M: int  # entries of x
    tiles: int
    parts: torch.Tensor  # [parts, 16] int32: of 4 slots the slices' first entries, the first scalars and by what
    # query_state multiplies the slices; the number of tiles and the first tile
    groups: torch.Tensor  # [tiles / 4, 2] int32: of every 4 tiles, the part and the first tile's place in it
    orders: torch.Tensor  # [tiles * 64] float32: in how many a row's product can be written; 0 of those not needed. For
    # p = 4 [M * M] more: of the products of two entries of x
    where: torch.Tensor  # p = 2: [M, M] int32, the state's row for the product of two entries of x; p = 4, for the
    # gradient to x: [n, 32], the rows for the products of a scalar and 32 entries, or of an entry and 32 scalars
    lists: torch.Tensor  # p = 4: [2 * ceil(M / 32), 4] int32, of 32 entries the first (below 0, there is nothing), the
    # range of their scalars, where in `where` it begins; then of 32 scalars the first, the range of their entries, ...
    factors: torch.Tensor  # p = 4: [2, 2 M] int32: of which entries of the row entries of x, then scalars, are products
    weights: torch.Tensor  # [M] float32: in how many orders that can be written
    rows: torch.Tensor  # [Dphi] int64: for each canonical feature, a row of the state
    canonical: torch.Tensor  # [tiles * 64] int64: for each row of the state, the canonical feature
    square: torch.Tensor  # [M * M] int64: the canonical feature of the product of two entries of x
    places: torch.Tensor  # [Dphi] int64: for each canonical feature, one place in `square`
    root: torch.Tensor  # [Dphi] float32: the square root of each canonical feature's multiplicity


def symmetric_power_dim(D, p):
    """Return the number of features of the symmetric power, C(D + p - 1, p)."""
    features = 1
    for i in range(p):  # math.comb would break torch.compile's graph
        features = features * (D + i) // (i + 1)
    return features


def entries(D, p):
    """M, a multiple of 16: for p = 4 and D = 16 the first entries stand for nothing."""
    return D if p == 2 else -(-D * (D + 1) // 2 // SLICE) * SLICE


def features(D, p):
    """Rows of a state."""
    return 256 * (math.comb(D // 16 + 1, 2) if p == 2 else -(-sum(_quads(int(D))) // SLOTS))


@functools.cache
def _quads(D):
    """p = 4: for each slice, how many fours of scalars it needs."""
    largest = [c for c in range(D) for _ in range(c, D)][::-1][::SLICE][::-1]
    return [-(-(c + 1) * (c + 2) // 2 // 4) for c in largest]


@functools.cache
def layout(D, p, device):
    """The Layout for heads of D, a multiple of 16, and p = 2 or 4."""
    return Layout(D, p, *(x.to(device) if isinstance(x, torch.Tensor) else x for x in (_two if p == 2 else _four)(D)))


def _two(D):
    pairs = sorted(combinations_with_replacement(range(D // SLICE), 2), key=lambda pair: pair[0] == pair[1])
    slots = []  # of each part: (slice, first scalar) and the number of tiles
    while pairs:
        size = next(n for n in (4, 2, 1) if n <= len(pairs))
        chosen, pairs = pairs[:size], pairs[size:]
        tiles = SLICE * size // SLOTS
        of_slot = [(*chosen[slot % size], slot // size * tiles) for slot in range(SLOTS)]
        slots.append(([(s, SLICE * g + first, 1 + (s != g)) for s, g, first in of_slot], tiles))
    parts, index = _parts(slots)  # index: [rows, 2] entries of x
    where = np.zeros((D, D), dtype=np.int64)
    where[index[:, 1], index[:, 0]] = where[index[:, 0], index[:, 1]] = np.arange(len(index))
    orders = np.repeat(np.repeat(parts[:, 8:12], parts[:, 12], axis=0).flatten(), SLICE)
    line = np.arange(D)[:, None]
    return _tensors(D, 2, D, parts, orders, where, np.zeros((0, 4)), line, line, np.ones(D), index)


def _four(D):
    M = entries(D, 4)
    x = [(c, d) for c in range(D) for d in range(c, D)]
    empty = M - len(x)
    x = np.array([(0, 0)] * empty + x)
    real = np.arange(M) >= empty
    scalars = np.lexsort((x[:, 0], x[:, 1], ~real))  # in order of b; the empty ones last
    slots, left = [], []
    for s, quads in enumerate(_quads(D)):
        whole = quads // SLOTS * SLOTS  # tiles of a part with nothing but this slice
        if whole:
            slots.append(([(s, slot * whole, 1) for slot in range(SLOTS)], whole))
        left += [(s, 4 * n, 1) for n in range(whole, quads)]
    left += [left[-1]] * (-len(left) % SLOTS)  # once more, of no weight
    slots += [(left[i : i + SLOTS], 4) for i in range(0, len(left), SLOTS)]
    parts, index = _parts(slots)
    first, second = scalars[index[:, 1]], index[:, 0]
    needed = real[first] & real[second] & (x[first, 1] <= x[second, 0])
    none = np.flatnonzero(~needed)[0]
    where = np.full((M, M), none)  # [scalar, entry]
    where[index[needed, 1], second[needed]] = np.flatnonzero(needed)
    needed &= np.isin(np.arange(len(index)), where)  # one of two that are the same
    of_row = np.concatenate((x[first], x[second]), axis=1)
    orders = np.where(needed, _orders(of_row), 0)
    blocks = -(-M // BLOCK)
    lists, spread = [], []
    of_entries = [(M + i * BLOCK, where) for i in range(-blocks, 0)]  # end with a whole block
    of_scalars = [(i * BLOCK, where.T) for i in range(blocks)]  # begin with one
    for at, others in of_entries + of_scalars:
        block = np.arange(at, at + BLOCK)
        rows = np.where((block >= 0) & (block < M), others[:, block.clip(0, M - 1)], none)
        used = np.flatnonzero((rows != none).any(1))
        begin, end = used[0] // STEP * STEP, -(-(used[-1] + 1) // STEP) * STEP
        lists.append((at, begin, end, sum(map(len, spread))))
        spread.append(rows[begin:end])
    weights = np.where(real, 1 + (x[:, 0] != x[:, 1]), 0)
    parts[:, 4:8] += M  # scalars come behind entries
    return _tensors(D, 4, M, parts, orders, np.concatenate(spread), lists, x, x[scalars], weights, of_row)


def _parts(slots):
    """The table of parts, and [rows, 2] of the slice's entry and the scalar."""
    parts, index, tile = [], [], 0
    for of_slot, tiles in slots:
        row = [SLICE * s for s, _, _ in of_slot] + [first for _, first, _ in of_slot]
        parts.append([*row, *(orders for _, _, orders in of_slot), tiles, tile, 0, 0])
        entry = np.concatenate([SLICE * s + np.arange(SLICE) for s, _, _ in of_slot])
        scalar = np.repeat([first for _, first, _ in of_slot], SLICE)
        index += [np.stack((entry, scalar + i), axis=1) for i in range(tiles)]
        tile += tiles
    return np.array(parts), np.concatenate(index)


def _tensors(D, p, M, parts, orders, where, lists, entries, scalars, weights, index):
    """entries, scalars [M, p / 2], index [rows, p]: of which entries of a row of q or k each is the product, and each
    row of the state."""
    canon = np.array(list(combinations_with_replacement(range(D), p)))
    key = lambda indices: np.ravel_multi_index(tuple(np.sort(indices, axis=-1).T), (D,) * p)
    find = lambda indices: np.searchsorted(key(canon), key(indices))
    canonical = find(index)
    multiplicity = np.bincount(canonical, weights=orders)  # all of a feature's rows read
    rows, places = np.zeros((2, len(canon)), dtype=np.int64)
    rows[canonical[orders > 0]] = np.flatnonzero(orders > 0)
    factors = np.concatenate((entries, scalars)).T
    pair = np.broadcast_arrays(entries[:, None], entries[None, :])
    square = find(np.concatenate(pair, axis=-1).reshape(M * M, p))
    places[square] = np.arange(M * M)
    orders = orders if p == 2 else np.concatenate((orders, np.outer(weights, weights).flatten()))
    make = lambda x, dtype: torch.as_tensor(np.ascontiguousarray(x), dtype=dtype)
    groups = [(n, i) for n, part in enumerate(parts) for i in range(0, part[12], 4)]
    return (
        M, int(parts[:, 12].sum()), make(parts, torch.int32), make(groups, torch.int32), make(orders, torch.float32),
        make(where, torch.int32), make(lists, torch.int32), make(factors, torch.int32),
        make(weights, torch.float32), make(rows, torch.int64), make(canonical, torch.int64), make(square, torch.int64),
        make(places, torch.int64), make(np.sqrt(multiplicity), torch.float32),
    )  # fmt: skip


def _orders(indices):
    """[rows, 4] -> in how many orders each can be written."""
    same = np.sort(indices, axis=1)
    a, b, c = (same[:, i] == same[:, i + 1] for i in range(3))
    return np.select(
        [a & b & c, (a & b) | (b & c), a & c, a | b | c], [1, 4, 6, 12], default=24
    )  # fmt: skip
