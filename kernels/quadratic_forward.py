"""The quadratic form's forward kernel, and the one that scales keys: a program computes y of BM queries.

What is computed, and the names and shapes of arrays: quadratic.py.
"""

import triton
import triton.language as tl

from .common import PRECISION, ROW_EXPONENT, add, at_head, int_power, inverse, load_rows, maximum
from .gates import gates_of_head, log_gates
from .quadratic_tiles import (
    ahead,
    before_rows,
    column_decay,
    count_queries,
    decay_of,
    exp2,
    gates_of_rows,
    key_factors,
    keys_of_rows,
    load_key_decay,
    load_tile,
    load_vector,
    log2,
    queries_of_program,
    row_power,
    row_scale,
    since_first_row,
    sum_of_tile,
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
    keys, rows, gates,  # (K, strides, V, strides, b, hkv), (row, diagonal, c_lo, c_row, first_row, key_scale), at this
    begin, end, T,  # head or None
    P: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return (acc, l) with the keys from begin to end added, BN at a time.

    Decays are those to the first row, to be multiplied by that from there to each row. EXACT: all tiles are on the
    diagonal, and the decay of each pair is computed.
    """
    GATED: tl.constexpr = gates is not None
    K, k_strides, V, v_strides, b, hkv = keys
    row, diagonal, c_lo, c_row, first_row, key_scale = rows
    ones = tl.full([BN, 8], 1.0, tl.bfloat16 if q.dtype == tl.float16 else q.dtype)
    if GATED and not EXACT:
        x, c_next = ahead(gates, c_lo, begin, end, diagonal, BN, 0.5)
        decay = key_factors(gates, begin, diagonal, BN) * x
    for start in tl.range(begin, end, BN, num_stages=1 if EXACT else None):
        k = load_tile(K, k_strides, b, start, hkv, T, BN, D, True)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if P > 4 and q.dtype == tl.float16:
            s *= key_scale[:, None]
        a = int_power(s, P // 2)
        at = start + tl.arange(0, BN)
        if EXACT:
            seen = (row[:, None] >= at[None, :]) & (at[None, :] >= first_row[:, None])
            a *= decay_of(c_row[:, None], load_vector(gates[0], start, BN)[None, :], seen, 0.5)
            a = tl.where(seen, a, 0.0)
        else:
            if GATED:
                a *= decay[None, :]
            if start >= diagonal:
                a = tl.where(row[:, None] >= at[None, :], a, 0.0)
        if GATED and not EXACT:
            decay = key_factors(gates, tl.minimum(start + BN, end - BN), diagonal, BN)
            x = column_decay(c_lo, c_next, 0.5)
            c_next = sum_of_tile(gates, tl.minimum(start + 2 * BN, end - BN), diagonal, BN)
        v = load_tile(V, v_strides, b, start, hkv, T, BN, D, True)
        w = (a * a).to(v.dtype)
        l = tl.dot(w, ones, l, input_precision=PRECISION)
        acc = tl.dot(w, v, acc, input_precision=PRECISION)
        if GATED and not EXACT:
            decay *= x
    return acc, l


@triton.jit
def _forward_tiles_of_powers(
    acc, l, q,
    keys, rows, gates,  # (K, strides, V, strides, b, hkv), (row, diagonal, first_row, p, p log2 of the scale), or None
    begin, end, T,
    D: tl.constexpr, BN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Do the same as `_forward_tiles_of_one_power` with a power for each row."""
    K, k_strides, V, v_strides, b, hkv = keys
    row, diagonal, first_row, p, offset = rows
    ones = tl.full([BN, 8], 1.0, tl.bfloat16 if q.dtype == tl.float16 else q.dtype)
    for start in range(begin, end, BN):
        k = load_tile(K, k_strides, b, start, hkv, T, BN, D, True)
        x = log2(tl.dot(q, tl.trans(k), input_precision=PRECISION))
        w = exp2(p[:, None] * x + offset[:, None])
        at = start + tl.arange(0, BN)
        if EXACT:
            w = tl.where((row[:, None] >= at[None, :]) & (at[None, :] >= first_row[:, None]), w, 0.0)
        elif gates is not None:
            w *= load_key_decay(gates[2], start, BN)[None, :]
        elif start >= diagonal:
            w = tl.where(row[:, None] >= at[None, :], w, 0.0)
        v = load_tile(V, v_strides, b, start, hkv, T, BN, D, True)
        w = w.to(v.dtype)
        l = tl.dot(w, ones, l, input_precision=PRECISION)
        acc = tl.dot(w, v, acc, input_precision=PRECISION)
    return acc, l


@triton.jit
def _forward_tiles(
    acc, l, q, keys, rows, gates, begin, end, T,
    P: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    if P == 0:
        return _forward_tiles_of_powers(acc, l, q, keys, rows, gates, begin, end, T, D, BN, EXACT)
    else:
        return _forward_tiles_of_one_power(acc, l, q, keys, rows, gates, begin, end, T, P, D, BN, EXACT)


@triton.jit(do_not_specialize=["T", "OFFSET", "CHUNK", "H", "HKV", "BH", "HEADS"])
def forward_kernel(
    Q, K, V,  # V: bfloat16 if Q and K are float16
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

    # these loads come first, so that the program waits once
    begin, diagonal, end = keys_of_rows(NEAR, lo, b * HKV + hkv, T, CHUNK, BM, BN)
    c_lo, c_row, c_first, first_row, factors = 0.0, 0.0, 0.0, 0, True
    if GATED:
        gates = gates_of_head(gates, T, b * HKV + hkv)
        c_lo, begin = before_rows(gates, lo, begin, diagonal, BN)
        c_row, c_first, first_row, factors = gates_of_rows(gates, lo, diagonal, BM, P)
    q = load_tile(Q, q_strides, b, first, h, n, BM, D, True)
    q32 = q.to(tl.float32)
    key_scale = 0.0
    if P > 4 and q.dtype == tl.float16:  # which would not hold a row that is scaled for the keys too: the scores are
        key_scale = (
            load_vector(at_head(KEY_SCALE, T, b * HKV + hkv), lo, BM) if NORMALIZE else tl.full([BM], 1, tl.float32)
        )
    if P == 0:
        p, _, offset = row_power(POWERS, q32, KEY_SCALE, T, n, b, b * HKV + hkv, lo, first)
    elif NORMALIZE:
        scale = row_scale(q32, KEY_SCALE, T, b * HKV + hkv, lo)
        if P > 4 and q.dtype == tl.float16:
            q = (q32 * (scale / key_scale)[:, None]).to(q.dtype)
        else:
            q = (q32 * scale[:, None]).to(q.dtype)
    else:
        q = (q32 * scale).to(q.dtype)

    acc = tl.zeros([BM, D], tl.float32)
    l = tl.zeros([BM, 8], tl.float32)  # the same sum eight times, because no product is narrower
    keys = (K, k_strides, V, v_strides, b, hkv)
    rows = (row, diagonal, first_row, p, offset) if P == 0 else (row, diagonal, c_lo, c_row, first_row, key_scale)
    middle = end if factors else diagonal
    acc, l = _forward_tiles(acc, l, q, keys, rows, gates, begin, middle, T, P, D, BN, False)
    if GATED:
        decay = since_first_row(c_row, c_first, first_row, lo, factors)[:, None]
        acc, l = acc * decay, l * decay
        if not factors:
            acc, l = _forward_tiles(acc, l, q, keys, rows, gates, diagonal, end, T, P, D, BN, True)

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
