"""The quadratic form's second backward kernel: a program computes dk and dv of BN keys.

    dk_j = sum_i ds_ij q_i,   dv_j = sum_i w_ij / l_i dy_i,   i >= j, over the query heads of the group
    ds_ij = p s_ij^(p-1) decay_ij (dP_ij - delta_i) / l_i,    w_ij / l_i = (s_ij^(p/2) g_i)^2

       keys              queries ->
        BN | diagonal | BM | BM | BM

dq_kernel.py wrote delta and g. Tiles off the diagonal need no mask and no exp, as in forward_kernel.py.
Cost: four products of D multiplications for each pair, since s and dP are computed again, so that every sum has one
owner. The limit is the matrix unit, then registers. passes.py has the names and shapes of arrays.
"""

import triton
import triton.language as tl

from ..common import PRECISION, at_head, block_and_head, int_power, multiple_of, store_rows
from .gates import gates_of_head
from .tiles import (
    DIAGONAL_BY_FACTORS,
    DIAGONAL_BY_PAIRS,
    OFF_DIAGONAL,
    column_decay,
    count_queries,
    decay_of,
    forgets_little,
    last_query,
    load_tile,
    load_vector,
    row_of,
    times_power,
)


@triton.jit
def _add_queries(
    sums, columns, queries, heads, span,
    P: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, ALONE: tl.constexpr, COL: tl.constexpr,
):  # fmt: skip
    """Return (dk, dv, col) with the queries of a span added, of all heads of the group, BM at a time.

    columns: (k, v, column, c_hi, c_col, c_last, first_row); queries: (Q, DY, their strides, PAIR, G, gates, T, OFFSET);
    heads: (sequence, first head, heads of queries, heads of the group).
    """
    DIAGONAL: tl.constexpr = PART != OFF_DIAGONAL
    BM: tl.constexpr = TILE[0]
    D: tl.constexpr = TILE[2]
    dk, dv, col = sums
    k, v, column, c_hi, c_col, c_last, first_row = columns
    Q, DY, strides, PAIR, G, gates, T, OFFSET = queries
    b, first_head, H, group = heads
    begin, end = span
    GATED: tl.constexpr = gates is not None
    ONE_STAGE: tl.constexpr = DIAGONAL and GATED and P == 2
    n = count_queries(T, OFFSET)
    for i in range(group):
        h = first_head + i
        pairs = at_head(PAIR, n, 2 * (b * H + h))
        if GATED and DIAGONAL:
            factors = at_head(G, n, b * H + h)
        if GATED and not DIAGONAL:
            x = column_decay(tl.load(gates.C_START + (tl.minimum(begin, T - 1) >> 5)), c_hi, 0.5)
            c_next = tl.load(gates.C_START + (tl.minimum(begin + BM, T - 1) >> 5))
        for start in tl.range(begin, end, BM, num_stages=1 if ONE_STAGE else None):
            row = row_of(start, OFFSET)
            q = load_tile(Q, strides[0], b, row, h, n, BM, D, True)
            dy = load_tile(DY, strides[1], b, row, h, n, BM, D, True).to(v.dtype)
            pair = tl.multiple_of(row, BM) * 2 + tl.arange(0, BM)[:, None] * 2 + tl.arange(0, 2)[None, :]
            g, gdelta = tl.split(tl.load(pairs + pair))
            query = start + tl.arange(0, BM)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BN, BM]
            dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
            if GATED:
                if DIAGONAL:
                    g = load_vector(factors, row, BM)
                    if PART == DIAGONAL_BY_FACTORS:
                        g *= column_decay(load_vector(gates.C, start, BM), c_last, 0.5)
                else:
                    g *= x
                    x = column_decay(c_next, c_hi, 0.5)
                    c_next = tl.load(gates.C_START + (tl.minimum(start + 2 * BM, T - 1) >> 5))
                gdelta *= g
            a = int_power(s, P // 2) * g[None, :]
            first = 0
            if DIAGONAL:
                seen = query[None, :] >= column[:, None]
                if GATED and PART == DIAGONAL_BY_FACTORS:
                    first = first_row
                elif GATED:
                    first = start // 128 * 128 + load_vector(gates.FIRST, start, BM).to(tl.int32)
                    seen = seen & (column[:, None] >= first[None, :])
                    decay = decay_of(load_vector(gates.C, start, BM)[None, :], c_col[:, None], seen, 0.5)
                    a *= decay
                a = tl.where(seen, a, 0.0)
            dv = tl.dot((a * a).to(dy.dtype), dy, dv, input_precision=PRECISION)
            ds = times_power(a, s, P) * (dp * g[None, :] - gdelta[None, :])
            if GATED and PART == DIAGONAL_BY_PAIRS:
                ds *= decay
            if DIAGONAL and ALONE:
                ds = tl.where((query > first)[None, :], ds, 0.0)
            if COL:
                col += tl.sum(ds * s, 1)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv, col


@triton.jit
def _add_diagonal(
    sums, columns, queries, heads, span, factors,
    P: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr, COL: tl.constexpr,
):  # fmt: skip
    """Return (dk, dv, col) with the queries of a span, on the diagonal, added.

    The sums so far have decays from the last of these keys. If `factors`, so have the queries that are added.
    """
    if queries[5] is None:
        return _add_queries(sums, columns, queries, heads, span, P, TILE, DIAGONAL_BY_PAIRS, ALONE, COL)
    else:
        dk, dv, col = sums
        _, _, column, _, c_col, c_last, first_row = columns
        decay = tl.exp(c_last - c_col)
        if factors:
            dk, dv, col = _add_queries(
                (dk, dv, col), columns, queries, heads, span, P, TILE, DIAGONAL_BY_FACTORS, ALONE, COL
            )
            dk, dv, col = dk * decay[:, None], dv * decay[:, None], col * decay
        else:
            decay = tl.where(column >= first_row, decay, 0.0)
            dk, dv, col = dk * decay[:, None], dv * decay[:, None], col * decay
            dk, dv, col = _add_queries(
                (dk, dv, col), columns, queries, heads, span, P, TILE, DIAGONAL_BY_PAIRS, ALONE, COL
            )
        return dk, dv, col


@triton.jit
def _last_reader(OPENED, FIRST, hi, end, T):
    """Return the end of the queries that may see key hi, at most `end`.

    It is hi + 1 if a document begins there, else the end of the first 32 tokens that reach into a later document.
    Doubling steps and then bisection find these.
    """
    below, above, last, step = hi // 32, hi // 32, tl.cdiv(T, 32) - 1, 1
    if tl.load(OPENED + last) > hi:
        while tl.load(OPENED + above) <= hi:
            below, above, step = above + 1, tl.minimum(above + step, last), step * 2
        while above > below:
            middle = (below + above) // 2
            later = tl.load(OPENED + middle) > hi
            above = tl.where(later, middle, above)
            below = tl.where(later, below, middle + 1)
        end = tl.minimum(above * 32 + 32, end)
    token = hi + 1
    opens = token // 128 * 128 + tl.load(FIRST + token, mask=token < T, other=-1).to(tl.int32) == token
    return tl.where(opens, token, end)


@triton.jit(do_not_specialize=["T", "OFFSET", "CHUNK", "H", "HKV", "HEADS"])
def dkdv_kernel(
    Q, K, V, DY, strides,  # of the four, each None for a tensor descriptor
    gates, OVERLAP,  # see gates.py and chunked/gates.py, or None
    rows,  # (PAIR, G, ROW) of `dq_kernel`
    DK, DV,  # what is written
    T, OFFSET, CHUNK, H, HKV, HEADS,  # as in `forward_kernel`
    P: tl.constexpr,
    ALONE: tl.constexpr,  # a row that sees itself alone has no gradient: y_i is v_i for any q_i
    TILE: tl.constexpr,  # (BM, BN, head dimension)
):  # fmt: skip
    """Write BN rows of dk and dv, summed over the query heads of the group.

    With gates, ROW of the group's first head becomes the sum of row over the group, minus col.
    """
    BN: tl.constexpr = TILE[1]
    D: tl.constexpr = TILE[2]
    q_strides, k_strides, v_strides, dy_strides = strides
    PAIR, G, ROW = rows
    COL: tl.constexpr = ROW is not None
    blocks = tl.cdiv(T, BN)
    block, bh = block_and_head(blocks, tl.num_programs(0) // blocks, HEADS)
    lo = block * BN  # the programs with the most work first
    b, hkv = bh // HKV, bh % HKV
    group = H // HKV
    column = lo + tl.arange(0, BN)

    k = load_tile(K, k_strides, b, lo, hkv, T, BN, D, True)
    v = load_tile(V, v_strides, b, lo, hkv, T, BN, D, True)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    col = tl.zeros([BN], tl.float32)
    begin, end = lo + BN, last_query(OVERLAP, lo, bh, T, CHUNK)  # the queries that see all of these keys
    c_hi, c_col, c_last, first_row, factors = 0.0, 0.0, 0.0, 0, False
    if gates is not None:
        gates = gates_of_head(gates, T, bh)
        hi = tl.minimum(begin, T) - 1
        c_hi = tl.load(gates.C_END + hi // 32)
        end = _last_reader(gates.OPENED, gates.FIRST, hi, end, T)
        c_col, c_last = load_vector(gates.C, lo, BN), tl.load(gates.C + hi)
        factors = forgets_little(gates.C, gates.FIRST, hi, lo)
        first_row = lo // 128 * 128 + tl.load(gates.FIRST + hi).to(tl.int32)
    lo_row = lo
    if OFFSET is not None:  # keys before it are read by the queries alone
        begin, lo_row = tl.maximum(begin, multiple_of(OFFSET, 128)), tl.maximum(lo, multiple_of(OFFSET, 128))
    columns = (k, v, column, c_hi, c_col, c_last, first_row)
    queries = (Q, DY, (q_strides, dy_strides), PAIR, G, gates, T, OFFSET)
    heads = (b, hkv * group, H, group)
    sums = _add_queries((dk, dv, col), columns, queries, heads, (begin, end), P, TILE, OFF_DIAGONAL, ALONE, COL)
    span = (lo_row, tl.minimum(lo + BN, T))
    dk, dv, col = _add_diagonal(sums, columns, queries, heads, span, factors, P, TILE, ALONE, COL)

    store_rows(DK, dk * P, b, lo, hkv, T, HKV)
    store_rows(DV, dv, b, lo, hkv, T, HKV)
    if COL:
        row = tl.zeros([BN], tl.float32) - col
        for i in range(group):
            row += load_vector(at_head(ROW, T, b * H + hkv * group + i), lo, BN)
        tl.store(at_head(ROW, T, b * H + hkv * group) + column, row)
