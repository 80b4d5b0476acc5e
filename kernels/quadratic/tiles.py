"""Pieces of the quadratic form's kernels: where tiles lie, how rows are scaled, and decays between tiles.

passes.py has the names and shapes of arrays, gates.py those for gates.
"""

import triton
import triton.language as tl

from ..common import (
    ROW_EXPONENT,
    at_head,
    block_and_head,
    int_power,
    multiple_of,
    unit_scale,
)

# if the decay through a tile on the diagonal is above exp(-WEAK), decays in it are products of two factors
WEAK = tl.constexpr(10.0)
STRONG = tl.constexpr(2.0)  # if a tile forgets more than exp(-STRONG) a token, one token dominates most of its rows
STATE_GONE = tl.constexpr(16.0)  # a state that has decayed by exp(-STATE_GONE) counts for nothing
# the tiles of a loop: off the diagonal, without a mask; or on the diagonal, where decays are a factor of the row times
# one of the key, or are computed for each pair
OFF_DIAGONAL = tl.constexpr(0)
DIAGONAL_BY_FACTORS = tl.constexpr(1)
DIAGONAL_BY_PAIRS = tl.constexpr(2)


@triton.jit
def count_queries(T, OFFSET):
    """Return how many queries there are: one for each token from OFFSET on."""
    return T if OFFSET is None else T - OFFSET


@triton.jit
def token_of(row, OFFSET):
    """Return the token of row `row` of the queries. OFFSET is a multiple of 128, so that tiles stay aligned."""
    return row if OFFSET is None else row + multiple_of(OFFSET, 128)


@triton.jit
def row_of(token, OFFSET):
    """Return the row of the queries that belongs to a token."""
    return token if OFFSET is None else token - multiple_of(OFFSET, 128)


@triton.jit
def queries_of_program(n, H, HKV, BH, HEADS, BM: tl.constexpr):
    """Return (sequence and head, sequence, head, head of keys, first row) of this program's BM of n queries.

    The queries with the most keys before them come first.
    """
    blocks = tl.cdiv(n, BM)
    block, bh = block_and_head(blocks, BH, HEADS)
    lo = (blocks - 1 - block) * BM
    b, h = bh // H, bh % H
    return bh, b, h, h // (H // HKV), lo


@triton.jit
def load_tile(X, strides, b, start, h, T, N: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr):
    """Load [N, D]: rows start, start+1, ... of head h of sequence b, with MASK zeros from row T on.

    X is a pointer, or if strides is None a tensor descriptor: the copy engine fetches its tiles.
    """
    if strides is None:
        return X.load([b, start, h, 0]).reshape([N, D])
    else:
        rows = tl.arange(0, N)
        base = X + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[2]
        tile = base + tl.cast(start, tl.int64) * strides[1] + rows[:, None] * strides[1]
        tile += tl.arange(0, D)[None, :] * strides[3]
        return tl.load(tile, mask=(start + rows)[:, None] < T, other=0.0) if MASK else tl.load(tile)


@triton.jit
def load_vector(base, start, N: tl.constexpr):
    """Load [N]: entries start, start+1, ... of an array padded to a multiple of 128; start is a multiple of N."""
    return tl.load(base + multiple_of(start, N) + tl.arange(0, N))


@triton.jit
def load_key_decay(KEY_DECAY, start, N: tl.constexpr):
    """Load [N] of KEY_DECAY at a head of keys: N (R in gates.py) tokens from `start` on, a multiple of N."""
    x = tl.reshape(load_vector(KEY_DECAY, start, N), [4, N // 8, 2])
    return tl.reshape(tl.permute(x, [1, 0, 2]), [N])


@triton.jit
def first_key_of(OVERLAP, lo, bh, T, CHUNK):
    """Return the first key that the rows of a tile from `lo` on attend to: their chunk's, or OVERLAP before it."""
    begin = lo // CHUNK * CHUNK
    if OVERLAP is not None:
        tokens = tl.load(OVERLAP + bh * tl.cdiv(T, CHUNK) + lo // CHUNK)
        begin -= tl.where(lo - begin < 128, tokens, 0)
    return begin


@triton.jit
def last_query(OVERLAP, lo, bh, T, CHUNK):
    """Return the end of the queries that attend to the keys of a tile from `lo` on: their chunk's, or OVERLAP later."""
    end = lo // CHUNK * CHUNK + CHUNK
    if OVERLAP is not None:
        tokens = tl.load(OVERLAP + bh * tl.cdiv(T, CHUNK) + end // CHUNK, mask=end < T, other=0)
        end += tl.where(end - lo <= 128, tokens, 0)
    return tl.minimum(end, T)


@triton.jit
def times_power(x, s, P: tl.constexpr):
    """Return x s^(P/2 - 1)."""
    if P == 2:
        return x
    else:
        return x * int_power(s, P // 2 - 1)


@triton.jit
def row_scale(q, KEY_SCALE, T, bh, lo):
    """Return [N], the scale of the rows q [N, D] float32 from token `lo` on, for the keys of sequence and head `bh`."""
    scale = unit_scale(tl.max(tl.abs(q), 1), ROW_EXPONENT)
    return scale if KEY_SCALE is None else scale * load_vector(at_head(KEY_SCALE, T, bh), lo, q.shape[0])


@triton.jit
def decay_of(c_row, c_column, seen, POWER: tl.constexpr):
    """Return exp(POWER (c_row - c_column)) for each pair, zero where the row does not see the column."""
    return tl.exp2(tl.where(seen, (c_row - c_column) * (POWER * 1.4426950408889634), float("-inf")))  # log2(e)


@triton.jit
def column_decay(c_from, c_to, POWER: tl.constexpr):
    """Return exp(POWER (c_from - c_to))."""
    return tl.exp2((c_from - c_to).to(tl.float32) * (POWER * 1.4426950408889634))  # log2(e)


@triton.jit
def forgets_little(C, FIRST, last, key):
    """Return True if `last` sees the keys of the tiles on the diagonal with little decay.

    The decay from the first of the 128 tokens around `last` must be above exp(-WEAK), and its document must begin
    before `key`, the first key there, or at 0. NaN counts as little decay, so that rows before it keep their bits
    where gates are weak.
    """
    first, c = last // 128 * 128 + tl.load(FIRST + last).to(tl.int32), tl.load(C + last)
    return ((c > -WEAK) | (c != c)) & (first < tl.maximum(key, 1))


@triton.jit
def delta_may_be_inexact(gates, lo, BM: tl.constexpr, HAS_INITIAL_STATE: tl.constexpr):
    """Return True if one token may dominate some of the BM rows from lo on.

    Then dP_ij - delta_i is as small as the rounding of y in delta_i. These are the first rows of a sequence or of a
    document, and rows with strong gates.
    """
    if gates is None:
        return (lo == 0) & (not HAS_INITIAL_STATE)
    else:
        C, last = gates.C, lo + BM - 1
        opens = lo // 128 * 128 + tl.load(gates.FIRST + last).to(tl.int32) >= lo
        return opens | (tl.load(C + lo) - tl.load(C + last) > STRONG * BM)


@triton.jit
def may_read_state(gates, lo, begin, BM: tl.constexpr, HAS_INITIAL_STATE: tl.constexpr):
    """Return [BM]: True if a state before `begin`, the first key, counts in the rows from lo on."""
    forgotten = (tl.load(gates.C_START + begin // 32) - tl.load(gates.C_START + lo // 32)).to(tl.float32)
    forgotten += tl.load(gates.C + lo) - load_vector(gates.C, lo, BM)
    opens = lo // 128 * 128 + load_vector(gates.FIRST, lo, BM).to(tl.int32) >= lo
    return (forgotten < STATE_GONE) & (opens == 0) & ((begin > 0) | HAS_INITIAL_STATE)


@triton.jit
def sum_before(C_END, token):
    """Return the gate sum of the token before `token`, a multiple of 32."""
    return tl.load(C_END - 1 + (token >> 5))


@triton.jit
def ahead(C_END, c_lo, begin, end, BN: tl.constexpr, POWER: tl.constexpr):
    """Return (decay^POWER from the last key of the first tile to the rows, gate sum at the last key of the second).

    The sum of the next tile is loaded while this tile is computed, and becomes a factor one tile before its use.
    """
    x = column_decay(c_lo, sum_before(C_END, begin + BN), POWER)
    return x, sum_before(C_END, tl.minimum(begin + BN, end) + BN)


@triton.jit
def before_rows(gates, lo, begin, end, BN: tl.constexpr):
    """Return (gate sum up to row lo, float64; start of the first tile that rows from lo on see, in [begin, end])."""
    first = tl.load(gates.FIRST + lo).to(tl.int32)  # of its document; below 0 that is the previous token's
    opened = (
        tl.where(first < 0, tl.load(gates.OPENED + tl.maximum(lo // 32 - 1, 0)), lo // 128 * 128 + first) // BN * BN
    )
    return tl.load(gates.C_START + lo // 32), tl.minimum(tl.maximum(begin, opened), end)


@triton.jit
def gates_of_rows(gates, lo, end, BM: tl.constexpr):
    """Return (c_row, c_first, first_row, `forgets_little`) for BM rows from lo on.

    c_row is the gate sum of each row since the first of its 128, c_first the sum of the first row, first_row the first
    row of each row's document. The tiles on the diagonal begin at `end`.
    """
    c_row, first_row = load_vector(gates.C, lo, BM), lo // 128 * 128 + load_vector(gates.FIRST, lo, BM).to(tl.int32)
    return c_row, tl.load(gates.C + lo), first_row, forgets_little(gates.C, gates.FIRST, lo + BM - 1, end)
