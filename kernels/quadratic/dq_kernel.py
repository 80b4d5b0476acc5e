"""The quadratic form's first backward kernel: a program computes dq of BM queries.

    dq_i = sum_j ds_ij k_j,   ds_ij = p s_ij^(p-1) decay_ij (dP_ij - delta_i) / l_i,   s_ij = q_i . k_j
    dP_ij = dy_i . v_j,       delta_i = dy_i . y_i = sum_j w_ij dP_ij / l_i

      queries           keys ->
        BM | BN | BN | BN | diagonal

Tiles and decays are as in forward_kernel.py. Where one token dominates a row, dP_ij - delta_i is as small as the
rounding of y in delta_i. There a program first sums w_ij (dP_ij - delta_i) / l_i over the keys, which should be zero,
and adds the sum to delta_i. Cost: three products of D multiplications for each pair, five in those
tiles. The limit is the matrix unit. passes.py has the names and shapes of arrays.
"""

import triton
import triton.language as tl

from ..common import PRECISION, at_head, int_power, inverse, row_pointers, store_rows
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
    delta_may_be_inexact,
    first_key_of,
    gates_of_rows,
    load_key_decay,
    load_tile,
    load_vector,
    may_read_state,
    queries_of_program,
    row_scale,
    sum_before,
    times_power,
    token_of,
)

# which sums a loop adds to
DQ_ALONE = tl.constexpr(0)
ROW_ALONE = tl.constexpr(1)
DQ_AND_ROW = tl.constexpr(2)


@triton.jit
def _add_keys(
    sums, queries, keys, gates, begin, end,
    P: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Return (acc, r), the sums for dq and row, with the keys from begin to end added, BN at a time.

    queries: (q, dy, delta, row, c_lo, c_row, c_first, first_row); keys: (K, strides, V, strides, sequence, head, T).
    Decays are as in the forward kernel.
    """
    GATED: tl.constexpr = gates is not None
    DIAGONAL: tl.constexpr = PART != OFF_DIAGONAL
    ONE_STAGE: tl.constexpr = DIAGONAL and GATED or SUMS == ROW_ALONE
    BN: tl.constexpr = TILE[1]
    D: tl.constexpr = TILE[2]
    acc, r = sums
    q, dy, delta, row, c_lo, c_row, c_first, first_row = queries
    K, k_strides, V, v_strides, b, hkv, T = keys
    if GATED and not DIAGONAL:
        x, c_next = ahead(gates.C_END, c_lo, begin, end, BN, 1.0)
        key_decay = load_key_decay(gates.KEY_DECAY, begin, BN)
    for start in tl.range(begin, end, BN, num_stages=1 if ONE_STAGE else None):
        k = load_tile(K, k_strides, b, start, hkv, T, BN, D, DIAGONAL)
        v = load_tile(V, v_strides, b, start, hkv, T, BN, D, DIAGONAL)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        a = times_power(int_power(s, P // 2), s, P)
        ds = a * (dp * x - (delta * x)[:, None] if GATED and not DIAGONAL else dp - delta[:, None])
        if DIAGONAL:
            key = start + tl.arange(0, BN)
            seen = row[:, None] >= key[None, :]
            if GATED and PART == DIAGONAL_BY_FACTORS:
                ds *= column_decay(c_first, load_vector(gates.C, start, BN), 1.0)[None, :]
            elif GATED:
                seen = seen & (key[None, :] >= first_row[:, None])
                ds *= decay_of(c_row[:, None], load_vector(gates.C, start, BN)[None, :], seen, 1.0)
            ds = tl.where(seen, ds, 0.0)
        elif GATED:
            ds *= key_decay[None, :]
            key_decay = load_key_decay(gates.KEY_DECAY, tl.minimum(start + BN, end), BN)
            x = column_decay(c_lo, c_next, 1.0)
            c_next = sum_before(gates.C_END, tl.minimum(start + 3 * BN, end))
        if SUMS != DQ_ALONE:
            r += tl.sum(ds * s, 1)
        if SUMS != ROW_ALONE:
            acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc, r


@triton.jit
def _add_diagonal(
    sums, queries, keys, gates, begin, lo, factors, P: tl.constexpr, TILE: tl.constexpr, SUMS: tl.constexpr
):
    """Return (acc, r) with the keys from begin on added for the rows from lo on; `factors`: by `gates_of_rows`."""
    end = tl.minimum(lo + TILE[0], keys[6])
    if gates is None:
        return _add_keys(sums, queries, keys, gates, begin, end, P, TILE, DIAGONAL_BY_PAIRS, SUMS)
    else:
        acc, r = sums
        _, _, _, _, _, c_row, c_first, first_row = queries
        decay = tl.exp(c_row - c_first)  # since the first row
        if factors:
            acc, r = _add_keys((acc, r), queries, keys, gates, begin, end, P, TILE, DIAGONAL_BY_FACTORS, SUMS)
            acc, r = acc * decay[:, None], r * decay
        else:
            decay = tl.where(first_row < lo, decay, 0.0)
            acc, r = acc * decay[:, None], r * decay
            acc, r = _add_keys((acc, r), queries, keys, gates, begin, end, P, TILE, DIAGONAL_BY_PAIRS, SUMS)
        return acc, r


@triton.jit
def _store_pair(PAIR, G, gates, n, head, first, rows, factors, R: tl.constexpr):
    """Write PAIR, and with gates G, of the rows from `first` on of n queries.

    rows: (row, first_row, c_row); factors: (g, delta).
    """
    row, first_row, c_row = rows
    g, delta = factors
    index = first + tl.arange(0, row.shape[0])
    pair = at_head(PAIR, n, 2 * head) + index[:, None] * 2 + tl.arange(0, 2)[None, :]
    if gates is None:
        tl.store(pair, tl.join(g, g * delta))
    else:
        start = row // R * R
        f = tl.where(first_row < start, tl.exp(0.5 * (c_row - tl.load(gates.C + start))), 0.0)
        tl.store(at_head(G, n, head) + index, g)
        tl.store(pair, tl.join(g * f, delta))


@triton.jit(do_not_specialize=["T", "OFFSET", "CHUNK", "H", "HKV", "HEADS"])
def dq_kernel(
    Q, K, V, DY, strides,  # of the four, each None for a tensor descriptor
    results,  # (y, l) of the forward kernel, or None if sums were not divided
    undivided,  # (scale, rest, the gradient to l) if they were not: see `forward_kernel`; or None
    KEY_SCALE, gates, OVERLAP,  # see passes.py, gates.py and chunked/gates.py, or None
    outputs,  # (DQ, PAIR, G, ROW), the results; DQ and ROW may be None, G is None without gates
    T, OFFSET, CHUNK, H, HKV, HEADS,  # as in `forward_kernel`
    P: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,  # there is a state before the first token, so no row sees itself alone
    TILE: tl.constexpr,  # (BM, BN, head dimension, R: rows of the other pass's tiles)
):  # fmt: skip
    """Write BM rows of dq, and PAIR, G and ROW, which the other pass needs."""
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    D: tl.constexpr = TILE[2]
    q_strides, k_strides, v_strides, dy_strides = strides
    DQ, PAIR, G, ROW = outputs
    GATED: tl.constexpr = gates is not None
    n = count_queries(T, OFFSET)
    bh, b, h, hkv, first = queries_of_program(n, H, HKV, tl.num_programs(0) // tl.cdiv(n, BM), HEADS, BM)
    lo = token_of(first, OFFSET)
    row = lo + tl.arange(0, BM)

    q = load_tile(Q, q_strides, b, first, h, n, BM, D, True)
    dy = load_tile(DY, dy_strides, b, first, h, n, BM, D, True)
    dy = dy.to(q.dtype) if dy.dtype == tl.float32 else dy
    q32 = q.to(tl.float32)
    if results is not None:
        Y, L = results
        y = tl.load(row_pointers(Y, b, first, h, n, H, BM, D), mask=row[:, None] < T, other=0.0)
        delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
        over_l = inverse(load_vector(at_head(L, n, bh), first, BM))
        factor = row_scale(q32, KEY_SCALE, T, b * HKV + hkv, lo)
    else:
        scale, rest, DL = undivided
        delta = -load_vector(at_head(DL, n, bh), first, BM)
        over_l = tl.zeros([BM], tl.float32) + rest
        factor = tl.zeros([BM], tl.float32) + scale
    g = int_power(factor, P // 2) * tl.sqrt(over_l)
    if P > 4:
        q = (q32 * factor[:, None]).to(q.dtype)
    else:  # s^3 stays in range without it, and the product is faster if q does not pass through registers
        over_l, factor = g * g, 1.0
    first_key, end = first_key_of(OVERLAP, lo, b * HKV + hkv, T, CHUNK), lo // BN * BN
    begin = first_key
    c_lo, c_row, c_first, first_row, factors = 0.0, 0.0, 0.0, -1 if HAS_INITIAL_STATE else 0, False
    if GATED:
        gates = gates_of_head(gates, T, b * HKV + hkv)
        c_lo, begin = before_rows(gates, lo, begin, end, BN)
        c_row, c_first, first_row, factors = gates_of_rows(gates, lo, end, BM)
    keys = (K, k_strides, V, v_strides, b, hkv, T)

    acc = tl.zeros([BM, D], tl.float32)
    r = tl.zeros([BM], tl.float32)
    if results is not None:
        if delta_may_be_inexact(gates, lo, BM, HAS_INITIAL_STATE):
            queries = (q, dy, delta, row, c_lo, c_row, c_first, first_row)
            error = tl.zeros([BM], tl.float32)
            if GATED:  # without gates these are the first rows, which have no keys before them
                _, error = _add_keys((acc, error), queries, keys, gates, begin, end, P, TILE, OFF_DIAGONAL, ROW_ALONE)
            _, error = _add_diagonal((acc, error), queries, keys, gates, end, lo, False, P, TILE, ROW_ALONE)
            error *= over_l
            if GATED:
                error = tl.where(may_read_state(gates, lo, first_key, BM, HAS_INITIAL_STATE), 0.0, error)
            delta += tl.where(row > first_row, error, 0.0)
    _store_pair(PAIR, G, gates, n, bh, first, (row, first_row, c_row), (g, delta), TILE[3])
    if DQ is not None or ROW is not None:
        SUMS: tl.constexpr = DQ_ALONE if ROW is None else DQ_AND_ROW
        queries = (q, dy, delta, row, c_lo, c_row, c_first, first_row)
        acc, r = _add_keys((acc, r), queries, keys, gates, begin, end, P, TILE, OFF_DIAGONAL, SUMS)
        acc, r = _add_diagonal((acc, r), queries, keys, gates, end, lo, factors, P, TILE, SUMS)

    if results is not None:  # in a row that sees itself alone, y_i is v_i for any q_i
        over_l = tl.where(row > first_row, over_l, 0.0)
    if DQ is not None:
        acc *= (P * factor * over_l)[:, None]
        store_rows(DQ, acc, b, first, h, n, H)
    if ROW is not None:
        tl.store(at_head(ROW, T, bh) + row, r * over_l)
