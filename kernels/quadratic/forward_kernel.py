"""The quadratic form's forward kernel: a program computes y of BM queries.

    y_i = sum_j w_ij v_j / l_i,   l_i = sum_j w_ij,   w_ij = decay_ij (q_i . k_j)^p,   j <= i

      queries           keys ->
        BM | BN | BN | BN | diagonal

A tile off the diagonal needs no mask, and its decay is a factor of the row, one of the tile and one of the key, so that
it takes no exp for each pair. Tiles on the diagonal have a mask, and an exp for each pair where gates forget much.
Cost: two products of D multiplications for each pair. The limit is the matrix unit, then the multiplications between
the products. passes.py has the names and shapes of arrays, and how rows are scaled; gates.py has the gates' arrays.
"""

import triton
import triton.language as tl

from ..common import PRECISION, at_head, int_power, inverse, row_pointers
from .gates import gates_of_head
from .tiles import (
    DIAGONAL_BY_FACTORS,
    DIAGONAL_BY_PAIRS,
    OFF_DIAGONAL,
    ahead,
    before_rows,
    column_decay,
    count_queries,
    decay_of,
    first_key_of,
    gates_of_rows,
    load_key_decay,
    load_tile,
    load_vector,
    queries_of_program,
    row_scale,
    sum_before,
    token_of,
)


@triton.jit
def _add_keys(acc, l, queries, keys, gates, begin, end, P: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr):
    """Return (acc, l) with the keys from begin to end added, BN at a time.

    queries: (q, row, c_lo, c_row, c_first, first_row); keys: (K, strides, V, strides, sequence, head, T). Decays
    go from a key to the first row, and the caller multiplies by the decay from there to each row. If PART is
    DIAGONAL_BY_PAIRS, they go to each row.
    """
    GATED: tl.constexpr = gates is not None
    DIAGONAL: tl.constexpr = PART != OFF_DIAGONAL
    BN: tl.constexpr = TILE[1]
    D: tl.constexpr = TILE[2]
    q, row, c_lo, c_row, c_first, first_row = queries
    K, k_strides, V, v_strides, b, hkv, T = keys
    ones = tl.full([BN, 8], 1.0, q.dtype)
    if GATED and not DIAGONAL:
        x, c_next = ahead(gates.C_END, c_lo, begin, end, BN, 0.5)
        decay = load_key_decay(gates.KEY_DECAY, begin, BN) * x
    for start in tl.range(begin, end, BN, num_stages=1 if DIAGONAL and GATED else None):
        k = load_tile(K, k_strides, b, start, hkv, T, BN, D, DIAGONAL)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        a = int_power(s, P // 2)
        if DIAGONAL:
            key = start + tl.arange(0, BN)
            seen = row[:, None] >= key[None, :]
            if GATED and PART == DIAGONAL_BY_FACTORS:
                a *= column_decay(c_first, load_vector(gates.C, start, BN), 0.5)[None, :]
            elif GATED:
                seen = seen & (key[None, :] >= first_row[:, None])
                a *= decay_of(c_row[:, None], load_vector(gates.C, start, BN)[None, :], seen, 0.5)
            a = tl.where(seen, a, 0.0)
        elif GATED:
            a *= decay[None, :]
            decay = load_key_decay(gates.KEY_DECAY, tl.minimum(start + BN, end), BN)
            x = column_decay(c_lo, c_next, 0.5)
            c_next = sum_before(gates.C_END, tl.minimum(start + 3 * BN, end))
        v = load_tile(V, v_strides, b, start, hkv, T, BN, D, DIAGONAL)
        w = (a * a).to(v.dtype)
        acc = tl.dot(w, v, acc, input_precision=PRECISION)  # before l, or Triton 3.9's code waits for each product
        l = tl.dot(w, ones, l, input_precision=PRECISION)
        if GATED and not DIAGONAL:
            decay *= x
    return acc, l


@triton.jit
def _add_diagonal(acc, l, queries, keys, gates, begin, lo, factors, P: tl.constexpr, TILE: tl.constexpr):
    """Return (acc, l) with the keys from begin on added for the rows from lo on; `factors`: by `gates_of_rows`."""
    end = tl.minimum(lo + TILE[0], keys[6])
    if gates is None:
        return _add_keys(acc, l, queries, keys, gates, begin, end, P, TILE, DIAGONAL_BY_PAIRS)
    else:
        _, _, _, c_row, c_first, first_row = queries
        decay = tl.exp(c_row - c_first)[:, None]  # since the first row
        if factors:
            acc, l = _add_keys(acc, l, queries, keys, gates, begin, end, P, TILE, DIAGONAL_BY_FACTORS)
            acc, l = acc * decay, l * decay
        else:
            decay = tl.where(first_row[:, None] < lo, decay, 0.0)
            acc, l = acc * decay, l * decay
            acc, l = _add_keys(acc, l, queries, keys, gates, begin, end, P, TILE, DIAGONAL_BY_PAIRS)
        return acc, l


@triton.jit(do_not_specialize=["T", "OFFSET", "CHUNK", "H", "HKV", "HEADS"])
def forward_kernel(
    Q, K, V, strides,  # of Q, K and V, each None for a tensor descriptor
    Y, L,  # what is written
    sums,  # (num, den), added to the sums before dividing, or None
    undivided,  # (a power of two to multiply q by, the remaining factor of the sums) if they are not divided, or None
    KEY_SCALE, gates, OVERLAP,  # see passes.py, gates.py and chunked/gates.py, or None
    T, OFFSET,  # tokens; those before the first query, a multiple of 128, or None
    CHUNK, H, HKV, HEADS,  # CHUNK: tokens see nothing before their chunk; HEADS: of so many, programs run side by side
    P: tl.constexpr, TILE: tl.constexpr,  # TILE: (BM, BN, head dimension)
):  # fmt: skip
    """Write BM rows of y and l, or of sum_j w_ij v_j and sum_j w_ij if they are not divided."""
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    D: tl.constexpr = TILE[2]
    q_strides, k_strides, v_strides = strides
    n = count_queries(T, OFFSET)
    bh, b, h, hkv, first = queries_of_program(n, H, HKV, tl.num_programs(0) // tl.cdiv(n, BM), HEADS, BM)
    lo = token_of(first, OFFSET)
    row = lo + tl.arange(0, BM)

    q = load_tile(Q, q_strides, b, first, h, n, BM, D, True)
    q32 = q.to(tl.float32)
    if undivided is None:
        q = (q32 * row_scale(q32, KEY_SCALE, T, b * HKV + hkv, lo)[:, None]).to(q.dtype)
    else:
        q = (q32 * undivided[0]).to(q.dtype)

    acc = tl.zeros([BM, D], tl.float32)
    l = tl.zeros([BM, 8], tl.float32)  # the same sum eight times, because no product is narrower
    begin, end = first_key_of(OVERLAP, lo, b * HKV + hkv, T, CHUNK), lo // BN * BN
    c_lo, c_row, c_first, first_row, factors = 0.0, 0.0, 0.0, 0, False
    if gates is not None:
        gates = gates_of_head(gates, T, b * HKV + hkv)
        c_lo, begin = before_rows(gates, lo, begin, end, BN)
        c_row, c_first, first_row, factors = gates_of_rows(gates, lo, end, BM)
    queries = (q, row, c_lo, c_row, c_first, first_row)
    keys = (K, k_strides, V, v_strides, b, hkv, T)
    acc, l = _add_keys(acc, l, queries, keys, gates, begin, end, P, TILE, OFF_DIAGONAL)
    acc, l = _add_diagonal(acc, l, queries, keys, gates, end, lo, factors, P, TILE)

    l = tl.max(l, 1)
    mask = row[:, None] < T
    if sums is not None:
        num, den = sums
        acc += tl.load(row_pointers(num, b, first, h, n, H, BM, D), mask=mask, other=0.0)
        l += load_vector(at_head(den, n, bh), first, BM)
    if undivided is None:
        acc *= inverse(l)[:, None]
    else:
        acc *= undivided[1]
        l *= undivided[1]
    tl.store(row_pointers(Y, b, first, h, n, H, BM, D), acc, mask)
    tl.store(at_head(L, n, bh) + (first + tl.arange(0, BM)), l)
