"""The quadratic form's forward kernel, and the one that scales keys: a program computes y of BM queries.

What is computed, and the names and shapes of arrays: quadratic.py.
"""

import triton
import triton.language as tl

from ..common import PRECISION, ROW_EXPONENT, add, at_head, int_power, inverse, load_rows, log_gates, maximum
from .gates import gates_of_head
from .tiles import (
    ahead,
    before_rows,
    column_decay,
    count_queries,
    decay_of,
    exp2,
    first_key_of,
    gates_of_rows,
    load_key_decay,
    load_tile,
    load_vector,
    log2,
    queries_of_program,
    row_power,
    row_scale,
    sum_before,
    token_of,
)


@triton.jit(do_not_specialize=["T", "HKV"])
def key_scale_kernel(K, LOG_G, KEY_SCALE, k_strides, g_strides, T, HKV, D: tl.constexpr, N: tl.constexpr):
    """Write for each row of a sequence and head of keys the power of two that brings the largest key up to it in its
    document into [1, 2); it is between 2^-ROW_EXPONENT and 2^ROW_EXPONENT."""
    b, h = tl.program_id(0) // HKV, tl.program_id(0) % HKV
    documents, most = 0, 0
    for start in range(0, T, N):
        at = start + tl.arange(0, N)
        k = load_rows(K, k_strides, b, start, h, T, N, D).to(tl.float32).to(tl.int32, bitcast=True)
        exponent = tl.max((k >> 23) & 255, 1)
        if LOG_G is not None:  # a document's exponents are above all those of the documents before
            log_g = LOG_G + tl.cast(b, tl.int64) * g_strides[0] + tl.cast(h, tl.int64) * g_strides[2]
            reset = log_gates(log_g, g_strides[1], at, T)[1].to(tl.int32)
            exponent += (documents + tl.associative_scan(reset, 0, add)) * 256
            documents += tl.sum(reset, 0)
        exponent = tl.maximum(tl.associative_scan(exponent, 0, maximum), most)
        most = tl.max(exponent, 0)
        exponent = tl.minimum(tl.maximum(exponent % 256, 127 - ROW_EXPONENT), 127 + ROW_EXPONENT)
        tl.store(at_head(KEY_SCALE, T, tl.program_id(0)) + at, ((254 - exponent) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _forward_tiles_of_one_power(
    acc, l, q,
    keys, rows, gates,  # (K, strides, V, strides, b, hkv), (row, c_lo, c_row, c_first, first_row), at this
    begin, end, T,  # head or None
    P: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Return (acc, l) with the keys from begin to end added, BN at a time; DIAGONAL: some keys come after some rows.

    Decays are those to the first row, to be multiplied by that from there to each row, but if DIAGONAL and not FACTORS.
    """
    GATED: tl.constexpr = gates is not None
    K, k_strides, V, v_strides, b, hkv = keys
    row, c_lo, c_row, c_first, first_row = rows
    if GATED:
        C, _, KEY_DECAY, _, C_END, _ = gates
    ones = tl.full([BN, 8], 1.0, q.dtype)
    if GATED and not DIAGONAL:
        x, c_next = ahead(C_END, c_lo, begin, end, BN, 0.5)
        decay = load_key_decay(KEY_DECAY, begin, BN) * x
    for start in tl.range(begin, end, BN, num_stages=1 if DIAGONAL and GATED else None):
        k = load_tile(K, k_strides, b, start, hkv, T, BN, D, DIAGONAL)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        a = int_power(s, P // 2)
        if DIAGONAL:
            at = start + tl.arange(0, BN)
            seen = row[:, None] >= at[None, :]
            if GATED and FACTORS:
                a *= column_decay(c_first, load_vector(C, start, BN), 0.5)[None, :]
            elif GATED:
                seen = seen & (at[None, :] >= first_row[:, None])
                a *= decay_of(c_row[:, None], load_vector(C, start, BN)[None, :], seen, 0.5)
            a = tl.where(seen, a, 0.0)
        elif GATED:
            a *= decay[None, :]
            decay = load_key_decay(KEY_DECAY, tl.minimum(start + BN, end), BN)
            x = column_decay(c_lo, c_next, 0.5)
            c_next = sum_before(C_END, tl.minimum(start + 3 * BN, end))
        v = load_tile(V, v_strides, b, start, hkv, T, BN, D, DIAGONAL)
        w = (a * a).to(v.dtype)
        l = tl.dot(w, ones, l, input_precision=PRECISION)
        acc = tl.dot(w, v, acc, input_precision=PRECISION)
        if GATED and not DIAGONAL:
            decay *= x
    return acc, l


@triton.jit
def _forward_tiles_of_powers(
    acc, l, q,
    keys, rows, gates,  # (K, strides, V, strides, b, hkv), (row, first_row, p, p log2 of the scale), or None
    begin, end, T,
    D: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Do the same as `_forward_tiles_of_one_power` with a power for each row."""
    K, k_strides, V, v_strides, b, hkv = keys
    row, first_row, p, offset = rows
    ones = tl.full([BN, 8], 1.0, q.dtype)
    for start in range(begin, end, BN):
        k = load_tile(K, k_strides, b, start, hkv, T, BN, D, DIAGONAL)
        x = log2(tl.dot(q, tl.trans(k), input_precision=PRECISION))
        w = exp2(p[:, None] * x + offset[:, None])
        if DIAGONAL:
            at = start + tl.arange(0, BN)
            seen = row[:, None] >= at[None, :]
            if gates is not None:
                seen = seen & (at[None, :] >= first_row[:, None])
            w = tl.where(seen, w, 0.0)
        elif gates is not None:
            w *= load_key_decay(gates[2], start, BN)[None, :]
        v = load_tile(V, v_strides, b, start, hkv, T, BN, D, DIAGONAL)
        w = w.to(v.dtype)
        l = tl.dot(w, ones, l, input_precision=PRECISION)
        acc = tl.dot(w, v, acc, input_precision=PRECISION)
    return acc, l


@triton.jit
def _forward_tiles(
    acc, l, q, keys, rows, gates, begin, end, T,
    P: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr, FACTORS: tl.constexpr = False,
):  # fmt: skip
    if P == 0:
        return _forward_tiles_of_powers(acc, l, q, keys, rows, gates, begin, end, T, D, BN, DIAGONAL)
    else:
        return _forward_tiles_of_one_power(acc, l, q, keys, rows, gates, begin, end, T, P, D, BN, DIAGONAL, FACTORS)


@triton.jit
def _forward_diagonal(
    acc, l, q, keys, rows, gates, begin, lo, factors, T, P: tl.constexpr, D: tl.constexpr, BN: tl.constexpr
):
    """Return (acc, l) with the keys from begin on added for the rows from lo on; `factors` is of `gates_of_rows`."""
    end = tl.minimum(lo + q.shape[0], T)
    if gates is None:
        return _forward_tiles(acc, l, q, keys, rows, gates, begin, end, T, P, D, BN, True)
    elif P == 0:  # whose gates are resets
        seen = rows[1][:, None] < lo
        acc, l = tl.where(seen, acc, 0.0), tl.where(seen, l, 0.0)
        return _forward_tiles(acc, l, q, keys, rows, gates, begin, end, T, P, D, BN, True)
    else:
        _, _, c_row, c_first, first_row = rows
        decay = tl.exp(c_row - c_first)[:, None]  # since the first row
        if factors:
            acc, l = _forward_tiles(acc, l, q, keys, rows, gates, begin, end, T, P, D, BN, True, True)
            acc, l = acc * decay, l * decay
        else:
            decay = tl.where(first_row[:, None] < lo, decay, 0.0)
            acc, l = acc * decay, l * decay
            acc, l = _forward_tiles(acc, l, q, keys, rows, gates, begin, end, T, P, D, BN, True)
        return acc, l


@triton.jit(do_not_specialize=["T", "OFFSET", "CHUNK", "H", "HKV", "BH", "HEADS"])
def forward_kernel(
    Q, K, V,
    Y, L,  # what is written
    NUM, DEN,  # what is added to the sums before dividing, or None
    KEY_SCALE, POWERS, gates, NEAR,  # see the table above and gates.py, or None
    q_strides, k_strides, v_strides,  # None: a tensor descriptor
    scale, rest,  # without NORMALIZE: the power of two that q is multiplied by, and the remaining factor of the sums
    T, OFFSET,  # tokens; those before the first query, a multiple of 128, or None
    CHUNK, H, HKV, BH, HEADS,  # CHUNK: tokens see nothing before their chunk; BH: B * H; HEADS: side by side
    P: tl.constexpr, D: tl.constexpr, NORMALIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write BM rows of y and l, or with NORMALIZE false of sum_j w_ij v_j and sum_j w_ij."""
    GATED: tl.constexpr = gates is not None
    n = count_queries(T, OFFSET)
    bh, b, h, hkv, first = queries_of_program(n, H, HKV, BH, HEADS, BM)
    lo = token_of(first, OFFSET)
    row = lo + tl.arange(0, BM)

    q = load_tile(Q, q_strides, b, first, h, n, BM, D, True)
    q32 = q.to(tl.float32)
    if P == 0:
        p, _, offset = row_power(POWERS, q32, KEY_SCALE, T, n, b, b * HKV + hkv, lo, first)
    elif NORMALIZE:
        scale = row_scale(q32, KEY_SCALE, T, b * HKV + hkv, lo)
        q = (q32 * scale[:, None]).to(q.dtype)
    else:
        q = (q32 * scale).to(q.dtype)

    acc = tl.zeros([BM, D], tl.float32)
    l = tl.zeros([BM, 8], tl.float32)  # the same sum eight times, because no product is narrower
    begin, end = first_key_of(NEAR, lo, b * HKV + hkv, T, CHUNK), lo // BN * BN
    c_lo, c_row, c_first, first_row, factors = 0.0, 0.0, 0.0, 0, False
    if GATED:
        gates = gates_of_head(gates, T, b * HKV + hkv)
        c_lo, begin = before_rows(gates, lo, begin, end, BN)
        c_row, c_first, first_row, factors = gates_of_rows(gates, lo, end, BM)
    keys = (K, k_strides, V, v_strides, b, hkv)
    rows = (row, first_row, p, offset) if P == 0 else (row, c_lo, c_row, c_first, first_row)
    acc, l = _forward_tiles(acc, l, q, keys, rows, gates, begin, end, T, P, D, BN, False)
    acc, l = _forward_diagonal(acc, l, q, keys, rows, gates, end, lo, factors, T, P, D, BN)

    l = tl.max(l, 1)
    out = ((tl.cast(b, tl.int64) * n + first) * H + h) * D  # [B, n, H, D]
    out += tl.arange(0, BM)[:, None] * (H * D) + tl.arange(0, D)[None, :]
    if NUM is not None:
        acc += tl.load(NUM + out, mask=row[:, None] < T, other=0.0)
        l += load_vector(at_head(DEN, n, bh), first, BM)
    if NORMALIZE:
        acc *= inverse(l)[:, None]
    else:
        acc *= rest
        l *= rest
    tl.store(Y + out, acc.to(Y.dtype.element_ty), row[:, None] < T)
    tl.store(at_head(L, n, bh) + (first + tl.arange(0, BM)), l)
