"""How the kernels lay a state out: the features of (q . k)^p in tiles of 64, made of slots of 16.

A row of q or k is first written as a vector x of M entries: for p = 2 the row itself, for p = 4 the products x_a x_b,
a <= b, of two of its entries. A feature is the product of an entry of x, the scalar, with one of the 16 entries of a
slice of x. p = 2 needs every unordered pair of slices. p = 4 needs (a, b) times (c, d) for a <= b <= c <= d: x is in
order of a, so that the pairs (c, d) of a slice have nearly the same c, and their scalars, all pairs with b <= c, are a
run of a list in order of b. Features: 2560 for D = 64 and p = 2, where the full square has 4096 and the symmetric power
2080; for p = 4 and D = 16 5376 (3876), D = 32 57,600 (52,360).

A tile has 4 slots, each a slice times a scalar of its own, and row r of a tile belongs to slot r // 2 % 4: the threads
of the matrix unit hold columns 2 n and 2 n + 1 of every 8, so that each has to do with one slot only. Which slices
stays the same for a run of tiles, a part; only the scalars advance, by one entry a tile. So the kernels keep 64 entries
of x in registers and multiply them by 4 numbers, tile after tile.

x is kept in order of b, so that scalars are read one after the other; slices are in order of a, through a table.

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
TILES = (1, 2, 4, 8, 16)  # of a program of update_state


class Layout(NamedTuple):
    D: int
    p: int
    M: int  # entries of x
    tiles: int
    common: int  # so many parts, the first ones, have the same scalar in all slots
    parts: torch.Tensor  # [parts, 16] int32: of 4 slots the slices' first entries, the first scalars and by what
    # query_state multiplies the slices; the number of tiles and the first tile
    groups: dict  # tiles a program -> [programs, 2] int32: the part and the first tile's place in it
    orders: torch.Tensor  # [tiles * 64] float32: in how many a row's product can be written; 0 of those not needed. For
    # p = 4 [M * M] more: of the products of two entries of x
    slices: torch.Tensor  # [M] int32: the entries of x as they follow in slices
    factors: torch.Tensor  # [2, M] int32: the entries of the row whose product an entry of x is
    rows: torch.Tensor  # [Dphi] int64: for each canonical feature, a row of the state
    canonical: torch.Tensor  # [tiles * 64] int64: for each row of the state, the canonical feature
    square: torch.Tensor  # [M * M] int64: the canonical feature of the product of two entries of x
    places: torch.Tensor  # [Dphi] int64: for each canonical feature, one place in `square`
    root: torch.Tensor  # [Dphi] float32: the square root of each canonical feature's multiplicity


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
    def move(x):
        return {n: move(y) for n, y in x.items()} if isinstance(x, dict) else x.to(device) if torch.is_tensor(x) else x

    return Layout(D, p, *map(move, (_two if p == 2 else _four)(D)))


def _two(D):
    pairs = sorted(combinations_with_replacement(range(D // SLICE), 2), key=lambda pair: pair[0] == pair[1])
    slots = []  # of each part: (slice, first scalar, orders) and the number of tiles
    while pairs:
        size = next(n for n in (4, 2, 1) if n <= len(pairs))
        chosen, pairs = pairs[:size], pairs[size:]
        tiles = SLICE * size // SLOTS
        of_slot = [(*chosen[slot % size], slot // size * tiles) for slot in range(SLOTS)]
        slots.append(([(s, SLICE * g + first, 1 + (s != g)) for s, g, first in of_slot], tiles))
    parts, index = _parts(slots)
    orders = np.where(index[:, 0] // SLICE != index[:, 1] // SLICE, 2, 1)
    line = np.arange(D)
    return _tensors(D, 2, 0, parts, orders, line, [line, line], np.ones(D), index)


def _four(D):
    M = entries(D, 4)
    x = np.array([(a, b) for b in range(D) for a in range(b + 1)])
    empty = M - len(x)
    x = np.concatenate((x, np.zeros((empty, 2), dtype=int)))  # the empty ones last, in slices first
    real = np.arange(M) < M - empty
    slices = np.lexsort((x[:, 1], x[:, 0], real))
    quads, common, left = _quads(D), [], []
    alone = len(quads) % SLOTS
    for s in range(alone, len(quads), SLOTS):  # neighbours share the scalars that the first of them needs
        common.append(([(s + slot, 0, 1) for slot in range(SLOTS)], 4 * quads[s]))
    slots = common.copy()
    for s, n in enumerate(quads):
        first = quads[(s - alone) // SLOTS * SLOTS + alone] if s >= alone else 0
        whole = (n - first) // SLOTS * SLOTS  # tiles of a part with nothing but this slice
        if whole:
            slots.append(([(s, 4 * first + slot * whole, 1) for slot in range(SLOTS)], whole))
        left += [(s, 4 * quad, 1) for quad in range(first + whole, n)]
    left += [left[-1]] * (-len(left) % SLOTS)  # once more, of no weight
    slots += [(left[i : i + SLOTS], 4) for i in range(0, len(left), SLOTS)]
    parts, index = _parts(slots)
    second, first = slices[index[:, 0]], index[:, 1]
    index = np.concatenate((x[first], x[second]), axis=1)
    needed = real[first] & real[second] & (x[first, 1] <= x[second, 0])
    product = np.where(needed, first * M + second, -1)
    needed[np.setdiff1d(np.arange(len(index)), np.unique(product, return_index=True)[1])] = False  # one of the same
    weights = np.where(real, 1 + (x[:, 0] != x[:, 1]), 0)
    return _tensors(D, 4, len(common), parts, np.where(needed, _orders(index), 0), slices, x.T, weights, index)


def _parts(slots):
    """The table of parts, and [rows, 2] of the slice's entry and the scalar."""
    parts, index, tile = [], [], 0
    slot, entry = np.arange(TILE) // 2 % SLOTS, np.arange(TILE) // 8 * 2 + np.arange(TILE) % 2
    for of_slot, tiles in slots:
        s, scalar, orders = np.array(of_slot).T
        parts.append([*(SLICE * s), *scalar, *orders, tiles, tile, 0, 0])
        index += [np.stack((SLICE * s[slot] + entry, scalar[slot] + i), axis=1) for i in range(tiles)]
        tile += tiles
    return np.array(parts), np.concatenate(index)


def _tensors(D, p, common, parts, orders, slices, factors, weights, index):
    """index: [rows, p], of which entries of a row of q or k each row of the state is the product; weights: in how many
    orders an entry of x can be written."""
    canon = np.array(list(combinations_with_replacement(range(D), p)))
    key = lambda indices: np.ravel_multi_index(tuple(np.sort(indices, axis=-1).T), (D,) * p)
    find = lambda indices: np.searchsorted(key(canon), key(indices))
    canonical = find(index)
    multiplicity = np.bincount(canonical, weights=orders)  # all of a feature's rows read
    rows, places = np.zeros((2, len(canon)), dtype=np.int64)
    rows[canonical[orders > 0]] = np.flatnonzero(orders > 0)
    factors, M = np.array(factors), len(slices)
    vector = factors[:1].T if p == 2 else factors.T
    pair = np.broadcast_arrays(vector[:, None], vector[None, :])
    square = find(np.concatenate(pair, axis=-1).reshape(M * M, p))
    places[square] = np.arange(M * M)
    orders = orders if p == 2 else np.concatenate((orders, np.outer(weights, weights).flatten()))
    make = lambda x, dtype: torch.as_tensor(np.ascontiguousarray(x), dtype=dtype)
    groups = {size: [(n, i) for n, part in enumerate(parts) for i in range(0, part[12], size)] for size in TILES}
    return (
        M, int(parts[:, 12].sum()), common, make(parts, torch.int32), {size: make(group, torch.int32) for size, group in groups.items()},
        make(orders, torch.float32), make(slices, torch.int32), make(factors, torch.int32), make(rows, torch.int64),
        make(canonical, torch.int64), make(square, torch.int64), make(places, torch.int64),
        make(np.sqrt(multiplicity), torch.float32),
    )  # fmt: skip


def _orders(indices):
    """[rows, 4] -> in how many orders each can be written."""
    same = np.sort(indices, axis=1)
    a, b, c = (same[:, i] == same[:, i + 1] for i in range(3))
    return np.select(
        [a & b & c, (a & b) | (b & c), a & c, a | b | c], [1, 4, 6, 12], default=24
    )  # fmt: skip
