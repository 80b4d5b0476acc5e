"""How the kernels lay a state out: the features of (q . k)^p in tiles of 64, made of slices of 16.

A row of q or k is first written as a vector x of M entries, cut into slices of 16: for p = 2 the row itself, for p = 4
the products of two of its entries, one slice for every two blocks of 4 dimensions. A feature is the product of an entry
of one slice with an entry of another. p = 2 needs every unordered pair of slices, p = 4 those whose four blocks are in
order: 2560 features for D = 64 and p = 2, where the full square has 4096 and the symmetric power 2080.

A tile of 64 features has 4 slots, each the 16 entries of a slice times one scalar, an entry of another slice. What
multiplies what stays the same for a run of tiles, a part; only the scalars advance, by one entry a tile. So the kernels
keep 64 entries of x in registers and multiply them by 4 numbers, tile after tile.

A state's rows are plain sums over the tokens, sum_t x_i x_j v_t. Whoever reads a state multiplies by the number of
orders that a pair of slices stands for.
"""

import functools
import math
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
import torch

SLOTS, SLICE, TILE = 4, 16, 64


class Layout(NamedTuple):
    D: int
    p: int
    M: int  # entries of x
    tiles: int
    parts: torch.Tensor  # [parts, 16] int32: of 4 slots the slices' first entries, the first scalars, the numbers of
    # orders; the number of tiles and the first tile
    groups: torch.Tensor  # [tiles / 4, 2] int32: of every 4 tiles, the part and the first tile's place in it
    orders: torch.Tensor  # [tiles, 4] float32: of each slot
    where: torch.Tensor  # [M, M] int32: the state's row for the product of two entries of x
    factors: torch.Tensor  # [2, M] int32: the entries of the row whose product an entry of x is (twice the same, p = 2)
    weights: torch.Tensor  # [M] float32: the number of orders of the blocks in an entry of x
    rows: torch.Tensor  # [Dphi] int64: for each canonical feature, a row of the state
    canonical: torch.Tensor  # [tiles * 64] int64: for each row of the state, the canonical feature
    root: torch.Tensor  # [Dphi] float32: the square root of each canonical feature's multiplicity


def features(D, p):
    """Rows of a state."""
    return 256 * (math.comb(D // 16 + 1, 2) if p == 2 else math.comb(D // 4 + 3, 4))


@functools.cache
def layout(D, p, device):
    """The Layout for heads of D, a multiple of 16, and p = 2 or 4."""
    half, block = p // 2, 16 if p == 2 else 4
    slices = list(combinations_with_replacement(range(D // block), half))  # the blocks of each
    number = {blocks: i for i, blocks in enumerate(slices)}
    pairs = [(s, g) for s in range(len(slices)) for g in range(s, len(slices)) if slices[s][-1] <= slices[g][0]]
    pairs.sort(key=lambda pair: -_orders(slices[pair[0]] + slices[pair[1]]))
    # the indices into the row of each entry of x, [M, p / 2]
    index = np.array(
        [[block * b + i // block**n % block for n, b in zip(reversed(range(half)), blocks)] for blocks in slices for i in range(SLICE)]
    )  # fmt: skip

    parts, tile, done = [], 0, pairs
    first_row = np.zeros((len(slices), len(slices), SLICE), dtype=np.int64)  # of a slice, another and its scalar
    while pairs:
        size = next(n for n in (4, 2, 1) if n <= len(pairs))
        chosen, pairs = pairs[:size], pairs[size:]
        tiles = SLICE * size // SLOTS
        slots = [(*chosen[slot % size], slot // size * tiles) for slot in range(SLOTS)]
        for slot, (s, g, first) in enumerate(slots):
            first_row[s, g, first : first + tiles] = (tile + np.arange(tiles)) * TILE + slot * SLICE
        several = [_orders(slices[s] + slices[g]) for s, g, _ in slots]
        parts.append(
            [SLICE * s for s, _, _ in slots] + [SLICE * g + i for _, g, i in slots] + several + [tiles, tile, 0, 0]
        )
        tile += tiles

    def row(indices):
        """[..., p] indices into a row of q or k -> the state's row for their product."""
        by_block = np.take_along_axis(indices, np.argsort(indices // block, axis=-1, kind="stable"), axis=-1)
        blocks, inside = by_block // block, by_block % block
        slice_of = np.zeros((D // block,) * half, dtype=np.int64)
        for blocks_of, n in number.items():
            slice_of[blocks_of] = n
        entry = lambda i: np.ravel_multi_index([inside[..., n] for n in i], (block,) * half)
        s, g = (slice_of[tuple(blocks[..., n] for n in i)] for i in (range(half), range(half, p)))
        return first_row[s, g, entry(range(half, p))] + entry(range(half))

    M = len(index)
    where = row(np.concatenate(np.broadcast_arrays(index[:, None], index[None, :]), axis=-1))
    canon = np.array(list(combinations_with_replacement(range(D), p)))
    rows = row(canon)
    # each row of the state once more, from its slices: sorted indices are those of its canonical feature
    of_row = np.zeros((TILE * tile, p), dtype=np.int64)
    for s, g in done:
        for i in range(SLICE):
            at = first_row[s, g, i]
            of_row[at : at + SLICE] = np.concatenate(
                np.broadcast_arrays(index[SLICE * s : SLICE * s + SLICE], index[SLICE * g + i]), axis=-1
            )
    key = lambda indices: np.ravel_multi_index(tuple(indices.T), (D,) * p)
    canonical = np.searchsorted(key(canon), key(np.sort(of_row, axis=-1)))
    orders = np.concatenate([np.tile(part[8:12], (part[12], 1)) for part in parts])
    multiplicity = np.bincount(canonical, weights=np.repeat(orders.flatten(), SLICE))  # all of a feature's rows read

    make = lambda x, dtype: torch.as_tensor(np.ascontiguousarray(x), dtype=dtype, device=device)
    return Layout(
        D, p, M, tile,
        parts=make(parts, torch.int32),
        groups=make([(n, i) for n, part in enumerate(parts) for i in range(0, part[12], 4)], torch.int32),
        orders=make(orders, torch.float32),
        where=make(where, torch.int32),
        factors=make(index.T[[0, -1]], torch.int32),
        weights=make([_orders(tuple(e // block)) for e in index], torch.float32),
        rows=make(rows, torch.int64),
        canonical=make(canonical, torch.int64),
        root=make(np.sqrt(multiplicity), torch.float32),
    )  # fmt: skip


def _orders(blocks):
    """In how many orders these can be written."""
    return math.factorial(len(blocks)) // math.prod(math.factorial(blocks.count(b)) for b in set(blocks))
