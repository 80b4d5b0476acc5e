"""The quadratic form's backward kernels: dq of BM queries a program, and dk and dv of BN keys.

What is computed, and the names and shapes of arrays: quadratic.py.
"""

import triton
import triton.language as tl

from ..common import PRECISION, at_head, block_and_head, int_power, inverse, multiple_of
from .gates import gates_of_head
from .tiles import (
    ahead,
    before_rows,
    column_decay,
    count_queries,
    decay_of,
    delta_may_be_inexact,
    exp2,
    first_key_of,
    forgets_little,
    gates_of_rows,
    last_query,
    load_key_decay,
    load_tile,
    load_vector,
    log2,
    may_read_state,
    normalized_row_power,
    queries_of_program,
    row_of,
    row_offsets,
    row_scale,
    sum_before,
    times_power,
    token_of,
    with_sign,
)


@triton.jit
def _dq_tiles_of_one_power(
    acc, r, q, dy, delta,
    keys, rows, gates,  # as in `_forward_tiles`
    begin, end, T,
    P: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr, FACTORS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Return (acc, r), the sums for dq and row, with the keys from begin to end added, BN at a time.

    Decays are those of `_forward_tiles_of_one_power`.
    """
    GATED: tl.constexpr = gates is not None
    K, k_strides, V, v_strides, b, hkv = keys
    row, c_lo, c_row, c_first, first_row = rows
    if GATED:
        C, _, KEY_DECAY, _, C_END, _ = gates
    if GATED and not DIAGONAL:
        x, c_next = ahead(C_END, c_lo, begin, end, BN, 1.0)
        key_decay = load_key_decay(KEY_DECAY, begin, BN)
    for start in tl.range(begin, end, BN, num_stages=1 if DIAGONAL and GATED or not COLS else None):
        k = load_tile(K, k_strides, b, start, hkv, T, BN, D, DIAGONAL)
        v = load_tile(V, v_strides, b, start, hkv, T, BN, D, DIAGONAL)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        a = times_power(int_power(s, P // 2), s, P)
        ds = a * (dp * x - (delta * x)[:, None] if GATED and not DIAGONAL else dp - delta[:, None])
        if DIAGONAL:
            at = start + tl.arange(0, BN)
            seen = row[:, None] >= at[None, :]
            if GATED and FACTORS:
                ds *= column_decay(c_first, load_vector(C, start, BN), 1.0)[None, :]
            elif GATED:
                seen = seen & (at[None, :] >= first_row[:, None])
                ds *= decay_of(c_row[:, None], load_vector(C, start, BN)[None, :], seen, 1.0)
            ds = tl.where(seen, ds, 0.0)
        elif GATED:
            ds *= key_decay[None, :]
            key_decay = load_key_decay(KEY_DECAY, tl.minimum(start + BN, end), BN)
            x = column_decay(c_lo, c_next, 1.0)
            c_next = sum_before(C_END, tl.minimum(start + 3 * BN, end))
        if ROWS:
            r += tl.sum(ds * s, 1)
        if COLS:
            acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc, r


@triton.jit
def _dq_tiles_of_powers(
    acc, r, q, dy, delta,
    keys, rows, gates,  # (K, strides, V, strides, b, hkv), (row, first_row, p - 1, c, x) or None
    begin, end, T,
    D: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Return (acc, r), the sums for dq and dp, as `_dq_tiles_of_one_power` does, with a power for each row."""
    K, k_strides, V, v_strides, b, hkv = keys
    row, first_row, less, c, middle = rows
    for start in range(begin, end, BN):
        k = load_tile(K, k_strides, b, start, hkv, T, BN, D, DIAGONAL)
        v = load_tile(V, v_strides, b, start, hkv, T, BN, D, DIAGONAL)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        x = tl.maximum(log2(s), -1e30)  # finite, because it is multiplied by a weight that may be zero
        ds = with_sign(exp2(less[:, None] * x + c[:, None]), s) * (dp - delta[:, None])
        if DIAGONAL:
            at = start + tl.arange(0, BN)
            seen = row[:, None] >= at[None, :]
            if gates is not None:
                seen = seen & (at[None, :] >= first_row[:, None])
            ds = tl.where(seen, ds, 0.0)
        elif gates is not None:
            ds *= load_key_decay(gates[2], start, BN)[None, :]
        r += tl.sum(ds * s * (x - middle[:, None]), 1)
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc, r


@triton.jit
def _dq_tiles(
    acc, r, q, dy, delta, keys, rows, gates, begin, end, T,
    P: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr, SUMS: tl.constexpr,
    FACTORS: tl.constexpr = False,
):  # fmt: skip
    """Return (acc, r) as the functions above do; SUMS: 0 as they are, 1 acc, 2 both with the keys added."""
    if SUMS == 0:
        return acc, r
    elif P == 0:
        return _dq_tiles_of_powers(acc, r, q, dy, delta, keys, rows, gates, begin, end, T, D, BN, DIAGONAL)
    else:
        return _dq_tiles_of_one_power(
            acc, r, q, dy, delta, keys, rows, gates, begin, end, T, P, D, BN, DIAGONAL, FACTORS, SUMS > 1, SUMS < 3
        )


@triton.jit
def _store_pair(PAIR, G, gates, n, bh, first, row, first_row, c_row, g, delta, P: tl.constexpr, R: tl.constexpr):
    """Write PAIR, and with gates G, of the table above; P = 0: g is c_i, delta is p_i delta_i."""
    pair = at_head(PAIR, n, 2 * bh) + (first + tl.arange(0, row.shape[0]))[:, None] * 2 + tl.arange(0, 2)[None, :]
    if gates is None:
        tl.store(pair, tl.join(g, delta if P == 0 else g * delta))
    else:
        start = row // R * R
        if P > 0:
            f = tl.where(first_row < start, tl.exp(0.5 * (c_row - tl.load(gates[0] + start))), 0.0)
        tl.store(at_head(G, n, bh) + (first + tl.arange(0, row.shape[0])), g)
        before = tl.where(first_row < start, g, float("-inf")) if P == 0 else g * f
        tl.store(pair, tl.join(before, delta))


@triton.jit
def _dq_diagonal(
    acc, r, q, dy, delta, keys, rows, gates, begin, lo, factors, T,
    P: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Return (acc, r) with the keys from begin on added for the rows from lo on, as `_forward_diagonal` does."""
    end = tl.minimum(lo + q.shape[0], T)
    if gates is None:
        return _dq_tiles(acc, r, q, dy, delta, keys, rows, gates, begin, end, T, P, D, BN, True, SUMS)
    elif P == 0:
        seen = rows[1] < lo
        acc, r = tl.where(seen[:, None], acc, 0.0), tl.where(seen, r, 0.0)
        return _dq_tiles(acc, r, q, dy, delta, keys, rows, gates, begin, end, T, P, D, BN, True, SUMS)
    else:
        _, _, c_row, c_first, first_row = rows
        decay = tl.exp(c_row - c_first)  # since the first row
        if factors:
            acc, r = _dq_tiles(acc, r, q, dy, delta, keys, rows, gates, begin, end, T, P, D, BN, True, SUMS, True)
            acc, r = acc * decay[:, None], r * decay
        else:
            decay = tl.where(first_row < lo, decay, 0.0)
            acc, r = acc * decay[:, None], r * decay
            acc, r = _dq_tiles(acc, r, q, dy, delta, keys, rows, gates, begin, end, T, P, D, BN, True, SUMS)
        return acc, r


@triton.jit
def _store_gradient(OUT, x, b, start, h, n, heads):
    """Write x [N, D] float32 as rows start, start + 1, ... of head h of sequence b in OUT [B, n, heads, D]."""
    out = row_offsets(b, start, h, n, heads, x.shape[0], x.shape[1])
    row = start + tl.arange(0, x.shape[0])
    tl.store(OUT + out, x.to(OUT.dtype.element_ty), row[:, None] < n)


@triton.jit(do_not_specialize=["T", "OFFSET", "CHUNK", "H", "HKV", "BH", "HEADS"])
def dq_kernel(
    Q, K, V, DY,
    Y, L, DL,  # written by the forward pass, or without NORMALIZE the gradient to its L
    KEY_SCALE, POWERS, gates, NEAR,  # see the table above and gates.py, or None
    DQ, PAIR, G, ROW,  # what is written, or None; G with gates only
    q_strides, k_strides, v_strides, dy_strides,  # None: a tensor descriptor
    scale, rest,
    T, OFFSET, CHUNK, H, HKV, BH, HEADS,
    P: tl.constexpr, D: tl.constexpr, NORMALIZE: tl.constexpr,
    BEFORE: tl.constexpr,  # there is a state before the first token, so no row sees itself alone
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write BM rows of dq, and PAIR, G and ROW of the table above, which the other pass needs."""
    GATED: tl.constexpr = gates is not None
    n = count_queries(T, OFFSET)
    bh, b, h, hkv, first = queries_of_program(n, H, HKV, BH, HEADS, BM)
    lo = token_of(first, OFFSET)
    row = lo + tl.arange(0, BM)
    out = row_offsets(b, first, h, n, H, BM, D)

    q = load_tile(Q, q_strides, b, first, h, n, BM, D, True)
    dy = load_tile(DY, dy_strides, b, first, h, n, BM, D, True)
    dy = dy.to(q.dtype) if dy.dtype == tl.float32 else dy
    q32 = q.to(tl.float32)
    begin, end = first_key_of(NEAR, lo, b * HKV + hkv, T, CHUNK), lo // BN * BN
    c_lo, c_row, c_first, first_row, factors = 0.0, 0.0, 0.0, -1 if BEFORE else 0, False
    if GATED:
        gates = gates_of_head(gates, T, b * HKV + hkv)
    if NORMALIZE:
        y = tl.load(Y + out, mask=row[:, None] < T, other=0.0)
        delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
        l = load_vector(at_head(L, n, bh), first, BM)
        over_l = inverse(l)
        if P > 0:
            factor = row_scale(q32, KEY_SCALE, T, b * HKV + hkv, lo)
    else:
        delta = -load_vector(at_head(DL, n, bh), first, BM)
        over_l = tl.zeros([BM], tl.float32) + rest
        factor = tl.zeros([BM], tl.float32) + scale
    if P == 0:
        p, less, g, x = normalized_row_power(POWERS, q32, KEY_SCALE, l, T, n, b, b * HKV + hkv, lo, first)
        factor, over_l = p, 1.0
    else:
        g = int_power(factor, P // 2) * tl.sqrt(over_l)
    if P > 4:
        q = (q32 * factor[:, None]).to(q.dtype)
    elif P > 0:  # s^3 stays in range without it, and the product is faster if q does not pass through registers
        over_l, factor = g * g, 1.0
    first_key = begin
    if GATED:
        c_lo, begin = before_rows(gates, lo, begin, end, BN)
        c_row, c_first, first_row, factors = gates_of_rows(gates, lo, end, BM)
    keys = (K, k_strides, V, v_strides, b, hkv)
    rows = (row, first_row, less, g, x) if P == 0 else (row, c_lo, c_row, c_first, first_row)
    SUMS: tl.constexpr = 2 if ROWS else 0 if DQ is None and ROW is None and not NORMALIZE else 1
    acc = tl.zeros([BM, D], tl.float32)
    r = tl.zeros([BM], tl.float32)
    if NORMALIZE and P > 0:
        if delta_may_be_inexact(gates, lo, BM, BEFORE):  # the sum of w_ij (dP_ij - delta_i) / l_i over j would be zero
            e = tl.zeros([BM], tl.float32)
            if GATED:
                _, e = _dq_tiles(acc, e, q, dy, delta, keys, rows, gates, begin, end, T, P, D, BN, False, 3)
            _, e = _dq_diagonal(acc, e, q, dy, delta, keys, rows, gates, end, lo, False, T, P, D, BN, 3)
            e *= over_l
            if GATED:
                e = tl.where(may_read_state(gates, lo, first_key, BM, BEFORE), 0.0, e)
            delta += tl.where(row > first_row, e, 0.0)
    _store_pair(PAIR, G, gates, n, bh, first, row, first_row, c_row, g, p * delta if P == 0 else delta, P, R)
    acc, r = _dq_tiles(acc, r, q, dy, delta, keys, rows, gates, begin, end, T, P, D, BN, False, SUMS)
    acc, r = _dq_diagonal(acc, r, q, dy, delta, keys, rows, gates, end, lo, factors, T, P, D, BN, SUMS)

    if NORMALIZE:  # in a row that sees itself alone, y_i is v_i for any q_i
        over_l = tl.where(row > first_row, over_l, 0.0)
    acc *= ((1 if P == 0 else P) * factor * over_l)[:, None]
    if DQ is not None:
        _store_gradient(DQ, acc, b, first, h, n, H)
    if ROWS:
        tl.store(at_head(ROW, T, bh) + row, r * over_l)
    elif P == 0 and ROW is not None:
        tl.store(at_head(ROW, n, bh) + (first + tl.arange(0, BM)), r * over_l * 0.6931471805599453)  # ln 2


@triton.jit
def _dkdv_tiles_of_one_power(
    dk, dv, col, k, v,
    queries, b, h, H,  # (Q, strides, DY, strides, PAIR, G)
    columns, gates,  # (column, c_hi, c_col, c_last, first_row), (C, FIRST, C_START) at this head of keys or None
    begin, end, T, OFFSET,
    P: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    NORMALIZE: tl.constexpr, BEFORE: tl.constexpr, ROWS: tl.constexpr, DIAGONAL: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Return (dk, dv, col) with the queries from begin to end of one head added, BM at a time."""
    GATED: tl.constexpr = gates is not None
    Q, q_strides, DY, dy_strides, PAIR, G = queries
    column, c_hi, c_col, c_last, first_row = columns
    n = count_queries(T, OFFSET)
    PAIR = at_head(PAIR, n, 2 * (b * H + h))
    if GATED:
        C, FIRST, C_START = gates
        G = at_head(G, n, b * H + h)
    if GATED and not DIAGONAL:
        x = column_decay(tl.load(C_START + (tl.minimum(begin, T - 1) >> 5)), c_hi, 0.5)
        c_next = tl.load(C_START + (tl.minimum(begin + BM, T - 1) >> 5))
    for start in tl.range(begin, end, BM, num_stages=1 if DIAGONAL and GATED and P == 2 else None):
        row = row_of(start, OFFSET)
        q = load_tile(Q, q_strides, b, row, h, n, BM, D, True)
        dy = load_tile(DY, dy_strides, b, row, h, n, BM, D, True).to(v.dtype)
        pair = tl.multiple_of(row, BM) * 2 + tl.arange(0, BM)[:, None] * 2 + tl.arange(0, 2)[None, :]
        g, gdelta = tl.split(tl.load(PAIR + pair))
        at = start + tl.arange(0, BM)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BN, BM]
        dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
        if GATED:
            if DIAGONAL:
                g = load_vector(G, row, BM)
                if FACTORS:
                    g *= column_decay(load_vector(C, start, BM), c_last, 0.5)
            else:
                g *= x
                x = column_decay(c_next, c_hi, 0.5)
                c_next = tl.load(C_START + (tl.minimum(start + 2 * BM, T - 1) >> 5))
            gdelta *= g
        a = int_power(s, P // 2) * g[None, :]
        first = -1 if BEFORE else 0
        if DIAGONAL:
            seen = at[None, :] >= column[:, None]
            if GATED and FACTORS:
                first = first_row
            elif GATED:
                first = start // 128 * 128 + load_vector(FIRST, start, BM).to(tl.int32)
                seen = seen & (column[:, None] >= first[None, :])
                decay = decay_of(load_vector(C, start, BM)[None, :], c_col[:, None], seen, 0.5)
                a *= decay
            a = tl.where(seen, a, 0.0)
        dv = tl.dot((a * a).to(dy.dtype), dy, dv, input_precision=PRECISION)
        ds = times_power(a, s, P) * (dp * g[None, :] - gdelta[None, :])
        if DIAGONAL and GATED and not FACTORS:
            ds *= decay
        if DIAGONAL and NORMALIZE:
            ds = tl.where((at > first)[None, :], ds, 0.0)
        if ROWS:
            col += tl.sum(ds * s, 1)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv, col


@triton.jit
def _dkdv_tiles_of_powers(
    dk, dv, k, v,
    queries, POWERS, b, h, H,  # (Q, strides, DY, strides, PAIR, G)
    columns, gates,  # (column, ...), (C, FIRST, C_START) at this head of keys or None
    begin, end, T, OFFSET,
    D: tl.constexpr, BM: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Return (dk, dv) as `_dkdv_tiles_of_one_power` does, with a power for each query."""
    Q, q_strides, DY, dy_strides, PAIR, G = queries
    n, column = count_queries(T, OFFSET), columns[0]
    PAIR, POWERS = at_head(PAIR, n, 2 * (b * H + h)), at_head(POWERS, n, 2 * b)
    for start in range(begin, end, BM):
        row = row_of(start, OFFSET)
        q = load_tile(Q, q_strides, b, row, h, n, BM, D, True)
        dy = load_tile(DY, dy_strides, b, row, h, n, BM, D, True).to(v.dtype)
        pair = tl.multiple_of(row, BM) * 2 + tl.arange(0, BM)[:, None] * 2 + tl.arange(0, 2)[None, :]
        c, pdelta = tl.split(tl.load(PAIR + pair))
        p, less = tl.split(tl.load(POWERS + pair))
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BN, BM]
        dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
        if DIAGONAL and gates is not None:
            c = load_vector(at_head(G, n, b * H + h), row, BM)
        t = with_sign(exp2(less[None, :] * log2(s) + c[None, :]), s)
        if DIAGONAL:
            at = start + tl.arange(0, BM)
            seen, first = at[None, :] >= column[:, None], 0
            if gates is not None:
                first = start // 128 * 128 + load_vector(gates[1], start, BM).to(tl.int32)
                seen = seen & (column[:, None] >= first[None, :])
            t = tl.where(seen, t, 0.0)
        dv = tl.dot((t * s).to(dy.dtype), dy, dv, input_precision=PRECISION)
        ds = t * (dp * p[None, :] - pdelta[None, :])
        if DIAGONAL:  # in a row that sees itself alone, y_i is v_i for any q_i
            ds = tl.where((at > first)[None, :], ds, 0.0)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _dkdv_tiles(
    dk, dv, col, k, v, queries, POWERS, b, h, H, columns, gates, begin, end, T, OFFSET,
    P: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    NORMALIZE: tl.constexpr, BEFORE: tl.constexpr, ROWS: tl.constexpr, DIAGONAL: tl.constexpr,
    FACTORS: tl.constexpr = False,
):  # fmt: skip
    if P == 0:
        dk, dv = _dkdv_tiles_of_powers(
            dk, dv, k, v, queries, POWERS, b, h, H, columns, gates, begin, end, T, OFFSET, D, BM, DIAGONAL
        )
        return dk, dv, col
    else:
        return _dkdv_tiles_of_one_power(
            dk, dv, col, k, v, queries, b, h, H, columns, gates, begin, end, T, OFFSET,
            P, D, BM, NORMALIZE, BEFORE, ROWS, DIAGONAL, FACTORS,
        )  # fmt: skip


@triton.jit
def _dkdv_diagonal(
    dk, dv, col, k, v, queries, POWERS, b, hkv, group, H, columns, gates, begin, end, T, OFFSET, factors,
    P: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    NORMALIZE: tl.constexpr, BEFORE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return (dk, dv, col) with the queries from begin to end of the group's heads added, among these keys.

    Decays up to here are those to the last of these keys. If `factors`, so are those that are added.
    """
    column, _, c_col, c_last, first_row = columns
    if gates is not None:
        decay = tl.exp(c_last - c_col)
        if P == 0 or not factors:
            decay = tl.where(column >= first_row, decay, 0.0)
            dk, dv, col = dk * decay[:, None], dv * decay[:, None], col * decay
    if gates is None or P == 0:
        for i in range(group):
            dk, dv, col = _dkdv_tiles(
                dk, dv, col, k, v, queries, POWERS, b, hkv * group + i, H, columns, gates, begin, end, T, OFFSET,
                P, D, BM, NORMALIZE, BEFORE, ROWS, True,
            )  # fmt: skip
    elif factors:
        for i in range(group):
            dk, dv, col = _dkdv_tiles(
                dk, dv, col, k, v, queries, POWERS, b, hkv * group + i, H, columns, gates, begin, end, T, OFFSET,
                P, D, BM, NORMALIZE, BEFORE, ROWS, True, True,
            )  # fmt: skip
        dk, dv, col = dk * decay[:, None], dv * decay[:, None], col * decay
    else:
        for i in range(group):
            dk, dv, col = _dkdv_tiles(
                dk, dv, col, k, v, queries, POWERS, b, hkv * group + i, H, columns, gates, begin, end, T, OFFSET,
                P, D, BM, NORMALIZE, BEFORE, ROWS, True,
            )  # fmt: skip
    return dk, dv, col


@triton.jit
def _last_reader(OPENED, FIRST, hi, end, T):
    """Return where the queries that may see key hi end, at most `end`.

    That is after hi if a document begins there, or the end of the first 32 tokens one of which belongs to a document
    after hi, found by steps that double, and then by bisection.
    """
    below, above, last, step = hi // 32, hi // 32, tl.cdiv(T, 32) - 1, 1
    if tl.load(OPENED + last) > hi:
        while tl.load(OPENED + above) <= hi:
            below, above, step = above + 1, tl.minimum(above + step, last), step * 2
        while above > below:
            middle = (below + above) // 2
            after = tl.load(OPENED + middle) > hi
            above = tl.where(after, middle, above)
            below = tl.where(after, below, middle + 1)
        end = tl.minimum(above * 32 + 32, end)
    after = hi + 1
    opens = after // 128 * 128 + tl.load(FIRST + after, mask=after < T, other=-1).to(tl.int32) == after
    return tl.where(opens, after, end)


@triton.jit(do_not_specialize=["T", "OFFSET", "CHUNK", "H", "HKV", "BHKV", "HEADS"])
def dkdv_kernel(
    Q, K, V, DY,
    POWERS, gates, NEAR,  # or None
    PAIR, G, ROW,  # written by `dq_kernel`
    DK, DV,  # what is written
    q_strides, k_strides, v_strides, dy_strides,  # None: a tensor descriptor
    T, OFFSET, CHUNK, H, HKV, BHKV, HEADS,  # BHKV: B * HKV
    P: tl.constexpr, D: tl.constexpr, NORMALIZE: tl.constexpr, BEFORE: tl.constexpr, ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write BN rows of dk and dv, summed over the query heads of the group.

    With gates, ROW of the group's first head becomes the sum of row over the group, minus col.
    """
    GATED: tl.constexpr = gates is not None
    block, bh = block_and_head(tl.cdiv(T, BN), BHKV, HEADS)
    lo = block * BN  # the programs with the most work first
    b, hkv = bh // HKV, bh % HKV
    group = H // HKV
    column = lo + tl.arange(0, BN)

    k = load_tile(K, k_strides, b, lo, hkv, T, BN, D, True)
    v = load_tile(V, v_strides, b, lo, hkv, T, BN, D, True)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    col = tl.zeros([BN], tl.float32)
    begin, end = lo + BN, last_query(NEAR, lo, bh, T, CHUNK)  # the queries that see all of these keys
    c_hi, c_col, c_last, first_row, factors = 0.0, 0.0, 0.0, 0, False
    if GATED:
        C, FIRST, _, C_START, C_END, OPENED = gates
        C, FIRST, C_START = at_head(C, T, bh), at_head(FIRST, T, bh), at_head(C_START, T, bh, 32)
        gates = (C, FIRST, C_START)
        hi = tl.minimum(begin, T) - 1
        c_hi = tl.load(at_head(C_END, T, bh, 32) + hi // 32)
        end = _last_reader(at_head(OPENED, T, bh, 32), FIRST, hi, end, T)
        c_col, c_last, factors = load_vector(C, lo, BN), tl.load(C + hi), forgets_little(C, FIRST, hi, lo)
        first_row = lo // 128 * 128 + tl.load(FIRST + hi).to(tl.int32)
    queries = (Q, q_strides, DY, dy_strides, PAIR, G)
    columns, lo_row = (column, c_hi, c_col, c_last, first_row), lo
    if OFFSET is not None:  # keys before it are read by the queries alone
        begin, lo_row = tl.maximum(begin, multiple_of(OFFSET, 128)), tl.maximum(lo, multiple_of(OFFSET, 128))
    for i in range(group):
        dk, dv, col = _dkdv_tiles(
            dk, dv, col, k, v, queries, POWERS, b, hkv * group + i, H, columns, gates, begin, end, T, OFFSET,
            P, D, BM, NORMALIZE, BEFORE, ROWS, False,
        )  # fmt: skip
    dk, dv, col = _dkdv_diagonal(
        dk, dv, col, k, v, queries, POWERS, b, hkv, group, H, columns, gates, lo_row, tl.minimum(lo + BN, T), T, OFFSET,
        factors, P, D, BM, NORMALIZE, BEFORE, ROWS,
    )  # fmt: skip

    if P > 0:
        dk *= P
    _store_gradient(DK, dk, b, lo, hkv, T, HKV)
    _store_gradient(DV, dv, b, lo, hkv, T, HKV)
    if ROWS:
        row = tl.zeros([BN], tl.float32) - col
        for i in range(group):
            row += load_vector(at_head(ROW, T, b * H + hkv * group + i), lo, BN)
        tl.store(at_head(ROW, T, b * H + hkv * group) + column, row)
