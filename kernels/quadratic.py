"""The quadratic form of power attention in Triton: forward, and backward in two passes without atomics.

    w_ij = decay_ij s_ij^p,   s_ij = q_i . k_j,   decay_ij = exp(sum of log_g over j+1..i),   j <= i
    l_i  = sum_j w_ij         y_i = sum_j w_ij v_j / l_i

with dP_ij = dy_i . v_j and delta_i = dy_i . y_i, all sums over the causal pairs:

    ds_ij = p s_ij^(p-1) decay_ij (dP_ij - delta_i) / l_i
    dq_i = sum_j ds_ij k_j      dk_j = sum_i ds_ij q_i      dv_j = sum_i w_ij / l_i dy_i

    forward_kernel, dq_kernel: one program BM queries       dkdv_kernel: one program BN keys

      queries           keys ->                               keys              queries ->
        BM | BN | BN | BN | diagonal                            BN | diagonal | BM | BM | BM

Tiles off the diagonal need no mask, and their decay is the product of a factor of the row and one of the column, so exp
costs nothing there. Tiles on the diagonal have a mask and an exp for each element.

    name        shape                          dtype      what
    l           [B, H, n padded to 128]        float32    of scaled q and k, saved for the backward pass
    key_scale   [B * Hkv, T padded to 128]     float32    p = 6, 8: a power of two for each row, see Range
    pair        [B, H, n padded to 128, 2]     float32    dq to dkdv: g and g delta; with gates g times the root of the
                                                          decay from the first of the R rows around it, and delta
    g           [B, H, n padded to 128]        float32    dq to dkdv, with gates; g = (scale of q and k)^(p/2) / sqrt(l)
    row         [B, H, T padded to 128]        float32    sums of ds_ij s_ij / p over j; dkdv subtracts those over i;
                                                          P = 0: [B, H, n padded to 128], each head's gradient to p_i
    error       [B, H, T padded to 128]        float32    the sum of w_ij (dP_ij - delta_i) / l_i over j, which is
                                                          q_i . dq_i / p and would be zero, where delta may be inexact;
                                                          without gates [B, H, 128]
    powers      [B, n padded to 128, 2]        float32    P = 0: p_i, and p_i - 1
    gates       six arrays                                see gates.py

The n queries are those of the last n of T tokens; T - n is a multiple of 128, so that tiles of queries begin where
tiles of keys do (`operators.quadratic_attention` pads q).

Cost. With N = T^2 D / 2 multiplications a head and product: forward 2 N, dq 3 N, dk and dv 4 N (s and dP are computed
twice, so that every sum has one owner and two runs give the same bits). Bytes are those of the tensors, a few percent
of the time from T = 1024 on. The matrix unit is the limit, then the multiplications between products (docs/kernels.md).

Range. There is no logarithm and no running maximum. Powers of two, which cancel, bring the largest entry of each row of
q to 1 to 2 and, for p = 6 and 8, that of the keys up to the row in its document. So no row depends on later keys. For
p = 2 and 4 keys are taken as they are: float32 is wide enough for |q . k| from 1e-8 to 1e8 and entries of k from 1e-8
to 1e8 (p = 2: 1e-15 to 1e15), and beyond there are zeros or NaN; the backward pass of p = 6 and 8 has the range of
p = 4. l is the sum of the weights as they are rounded for the second product. The backward pass spreads 1 / l
over two factors of its square root: w_ij / l_i = (s_ij^(p/2) g_i)^2. NaN and infinity in q, k or log_g give NaN in the
rows that see them and leave the bits of earlier rows; in v they also reach the earlier rows of the same tile.

Gates. log_g is summed in float64 and only differences become float32. log_g = -inf begins a document: its tokens see
nothing before. The gradient is dlog_g_m = sum over i >= m of (row_i - col_i), where row and col are the sums of
ds_ij s_ij / p over j and over i. Both are sums of the same float32 numbers, so that what does not straddle m cancels
to float32's rounding.

A power for each row. With P = 0, w_ij = |s_ij|^p_i, p_i >= 1 any float, of which a token's heads share one. That takes
one logarithm and one exponential for each pair and pass, both of base 2, of which a multiprocessor does 16 a cycle:

    forward    w_ij = exp2(p_i x_ij + p_i log2 f_i)          x_ij = log2 |s_ij|, f_i: the row's power of two (see Range)
    backward   t_ij = exp2((p_i - 1) x_ij + c_i) sign s_ij   c_i = p_i log2 f_i - log2 l_i: t_ij s_ij = w_ij / l_i
               ds_ij = p_i t_ij (dP_ij - delta_i),           dp_i = sum_j t_ij s_ij (dP_ij - delta_i) (x_ij - x) ln 2

where any x gives the same dp_i but for rounding, and one near the row's mean of x_ij, the least. At s = 0 the exponent
is -inf, and the weight and its derivatives are 0. log_g may hold 0 and -inf alone, so that decays are 0 or 1; pair
holds c_i (with gates -inf in rows that see nothing before the R rows around them) and p_i delta_i, g holds c_i. Keys
are scaled as for p = 6 and 8.

float16. s is a product of float16, but s^p is beyond it: w and ds are bfloat16, and so are their other operands (v, dy,
and q and k a second time), which the launchers convert. dP is of the same v and dy, so that it cancels against delta.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from .common import (
    INTERPRETED,
    LEAST_WEIGHT,
    PRECISION,
    ROW_EXPONENT,
    add,
    at_head,
    block_and_head,
    device_guard,
    empty,
    int_power,
    inverse,
    load_rows,
    maximum,
    multiple_of,
    padded,
    unit_scale,
)
from .configs import choose, reads_by_descriptor
from .gates import dlog_g, gates_of_head, log_gates, tile_gates

L2_TOKENS = 65536  # tokens whose keys and values stay in the L2 cache while programs work on several heads
TILES = 8  # of a program of the second pass over dq
# A tile on the diagonal through which less than exp(-WEAK) is forgotten has decays that are products of two factors
WEAK = tl.constexpr(10.0)
STRONG = tl.constexpr(2.0)  # if a tile forgets more than exp(-STRONG) a token, one token dominates most of its rows
STATE_GONE = tl.constexpr(16.0)  # a state that has decayed by exp(-STATE_GONE) counts for nothing

# ---- pieces


@triton.jit
def _queries(T, OFFSET):
    """Return how many rows of queries there are: those of the tokens from OFFSET on."""
    return T if OFFSET is None else T - OFFSET


@triton.jit
def _token(row, OFFSET):
    """Return the token of row `row` of the queries. OFFSET is a multiple of 128, so that tiles stay aligned."""
    return row if OFFSET is None else row + multiple_of(OFFSET, 128)


@triton.jit
def _row(token, OFFSET):
    """Return the row of the queries that belongs to a token."""
    return token if OFFSET is None else token - multiple_of(OFFSET, 128)


@triton.jit
def _queries_of_program(n, H, HKV, BH, HEADS, BM: tl.constexpr):
    """Return (sequence and head, sequence, head, head of keys, first row) of this program's BM of n queries.

    The queries with the most keys before them come first.
    """
    blocks = tl.cdiv(n, BM)
    block, bh = block_and_head(blocks, BH, HEADS)
    lo = (blocks - 1 - block) * BM
    b, h = bh // H, bh % H
    return bh, b, h, h // (H // HKV), lo


@triton.jit
def _tile(X, strides, b, start, h, T, N: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr):
    """Load [N, D]: rows start, start+1, ... of head h of sequence b, with MASK zeros from row T on.

    X is a pointer, or if strides is None a tensor descriptor, whose tiles the copy engine fetches.
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
def _row_offsets(b, start, h, T, H, N: tl.constexpr, D: tl.constexpr):
    """Return the offsets [N, D] of rows start, start+1, ... of head h of sequence b in any array [B, T, H, D]."""
    first = ((tl.cast(b, tl.int64) * T + start) * H + h) * D
    return first + tl.arange(0, N)[:, None] * (H * D) + tl.arange(0, D)[None, :]


@triton.jit
def _vector(base, start, N: tl.constexpr):
    """Load [N]: entries start, start+1, ... of an array padded to a multiple of 128; start is a multiple of N."""
    return tl.load(base + tl.multiple_of(start, N) + tl.arange(0, N))


@triton.jit
def _first_key(NEAR, lo, bh, T, CHUNK):
    """Return the first key that the rows of a tile from `lo` on attend to: their chunk's, or NEAR tokens before it."""
    begin = lo // CHUNK * CHUNK
    if NEAR is not None:
        near = tl.load(NEAR + bh * tl.cdiv(T, CHUNK) + lo // CHUNK)
        begin -= tl.where(lo - begin < 128, near, 0)
    return begin


@triton.jit
def _last_query(NEAR, lo, bh, T, CHUNK):
    """Return where the queries end that attend to the keys of a tile from `lo` on: with their chunk, or NEAR later."""
    end = lo // CHUNK * CHUNK + CHUNK
    if NEAR is not None:
        near = tl.load(NEAR + bh * tl.cdiv(T, CHUNK) + end // CHUNK, mask=end < T, other=0)
        end += tl.where(end - lo <= 128, near, 0)
    return tl.minimum(end, T)


@triton.jit
def _times_power(x, s, P: tl.constexpr):
    """Return x s^(P/2 - 1)."""
    if P == 2:
        return x
    else:
        return x * int_power(s, P // 2 - 1)


@triton.jit
def _row_scale(q, KEY_SCALE, T, bh, lo):
    """Return [N], the scale of the rows q [N, D] float32 from token `lo` on, for the keys of sequence and head `bh`."""
    scale = unit_scale(tl.max(tl.abs(q), 1), ROW_EXPONENT)
    return scale if KEY_SCALE is None else scale * _vector(at_head(KEY_SCALE, T, bh), lo, q.shape[0])


@triton.jit
def _log2(x):
    """Return log2 |x|, -inf for 0."""
    if INTERPRETED or not is_cuda():
        return tl.log2(tl.abs(x))
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [tl.abs(x)], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _exp2(x):
    """Return 2^x, 0 for -inf."""
    if INTERPRETED or not is_cuda():
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _with_sign(x, s):
    """Return x >= 0 with the sign of s."""
    return (x.to(tl.int32, bitcast=True) | (s.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _row_power(POWERS, q, KEY_SCALE, T, n, b, bh, lo, first):
    """Return (p, p - 1, p log2 of the row's scale), [N] each, for the rows q [N, D] float32 from `first` on, which is
    token `lo`, and the keys of sequence and head `bh`."""
    scale = _row_scale(q, KEY_SCALE, T, bh, lo)
    exponent = ((scale.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32) + scale * 0.0  # NaN stays NaN
    at = first + tl.arange(0, q.shape[0])[:, None]
    p, less = tl.split(tl.load(at_head(POWERS, n, 2 * b) + at * 2 + tl.arange(0, 2)[None, :]))
    return p, less, p * exponent


@triton.jit
def _normalized_row_power(POWERS, q, KEY_SCALE, l, T, n, b, bh, lo, first):
    """Return (p, p - 1, c, x) of "A power for each row" above; the arguments are those of `_row_power`."""
    p, less, offset = _row_power(POWERS, q, KEY_SCALE, T, n, b, bh, lo, first)
    empty = l <= LEAST_WEIGHT
    c = tl.where(empty, float("-inf"), offset - tl.log2(l))
    # the mean of |s|^p; that of x with weights |s|^p is 0.5 to 0.6 above its logarithm for normal s and p from 2 to 8
    mean = -(c + tl.log2((lo + 1 + tl.arange(0, q.shape[0])).to(tl.float32))) / p
    return p, less, c, tl.where(empty, 0.0, mean + 0.57)


@triton.jit
def _decay(c_row, c_column, seen, POWER: tl.constexpr):
    """Return exp(POWER (c_row - c_column)) for each pair, zero where the row does not see the column."""
    return tl.exp2(tl.where(seen, (c_row - c_column) * (POWER * 1.4426950408889634), float("-inf")))  # log2(e)


@triton.jit
def _column_decay(c_from, c_to, POWER: tl.constexpr):
    """Return exp(POWER (c_from - c_to))."""
    return tl.exp2((c_from - c_to) * (POWER * 1.4426950408889634))  # log2(e)


@triton.jit
def _forgets_little(C, FIRST, last, key):
    """Return True if the 128 tokens around `last` have forgotten less than WEAK at it, and if its document begins
    before `key`, the first key of the tiles on the diagonal, or at 0. NaN counts as little, so that rows
    before it keep their bits where gates are weak."""
    first, c = last // 128 * 128 + tl.load(FIRST + last).to(tl.int32), tl.load(C + last)
    return ((c > -WEAK) | (c != c)) & (first < tl.maximum(key, 1))


@triton.jit
def _delta_may_be_inexact(gates, T, bh, lo, BM: tl.constexpr, BEFORE: tl.constexpr):
    """Return True if one token may dominate some of the BM rows from lo on.

    Then dP_ij - delta_i is as small as the rounding of y in delta_i. These are the first rows of all or of a document,
    and those with strong gates.
    """
    if gates is None:
        return (lo == 0) & (not BEFORE)
    else:
        C, FIRST, last = at_head(gates[0], T, bh), at_head(gates[1], T, bh), lo + BM - 1
        opens = lo // 128 * 128 + tl.load(FIRST + last).to(tl.int32) >= lo
        return opens | (tl.load(C + lo) - tl.load(C + last) > STRONG * BM)


@triton.jit
def _may_read_state(gates, T, bh, lo, begin, BM: tl.constexpr, BEFORE: tl.constexpr):
    """Return [BM]: whether a state from before `begin`, their first key, counts in the rows from lo on."""
    C, FIRST, C_START = at_head(gates[0], T, bh), at_head(gates[1], T, bh), at_head(gates[3], T, bh, 32)
    forgotten = (tl.load(C_START + begin // 32) - tl.load(C_START + lo // 32)).to(tl.float32)
    forgotten += tl.load(C + lo) - _vector(C, lo, BM)
    opens = lo // 128 * 128 + _vector(FIRST, lo, BM).to(tl.int32) >= lo
    return (forgotten < STATE_GONE) & (opens == 0) & ((begin > 0) | BEFORE)


@triton.jit
def _ahead(C_END, c_lo, begin, end, BN: tl.constexpr, POWER: tl.constexpr):
    """Return (decay^POWER from the last key of the first tile to the rows, gate sum at the last key of the second).

    The sum of the next tile is loaded while this tile is computed, and becomes a factor one tile before its use.
    """
    x = tl.exp(POWER * (c_lo - tl.load(C_END + (begin + BN) // 32)).to(tl.float32))
    return x, tl.load(C_END + (tl.minimum(begin + BN, end) + BN) // 32)


@triton.jit
def _before_rows(gates, lo, begin, end, BN: tl.constexpr):
    """Return (gate sum up to row lo, float64; where the keys that rows from lo on see begin, between begin and end)."""
    _, FIRST, _, C_START, _, OPENED = gates
    first = tl.load(FIRST + lo).to(tl.int32)  # of its document; below 0 that is the previous token's
    opened = tl.where(first < 0, tl.load(OPENED + tl.maximum(lo // 32 - 1, 0)), lo // 128 * 128 + first) // BN * BN
    return tl.load(C_START + lo // 32), tl.minimum(tl.maximum(begin, opened), end)


@triton.jit
def _gates_of_rows(gates, lo, end, BM: tl.constexpr):
    """Return (gate sum of each row since the first of its 128, that of the first row, the first row of each row's
    document, `_forgets_little`) for BM rows from lo on, whose tiles on the diagonal begin at `end`."""
    C, FIRST, _, _, _, _ = gates
    c_row, first_row = _vector(C, lo, BM), lo // 128 * 128 + _vector(FIRST, lo, BM).to(tl.int32)
    return c_row, tl.load(C + lo), first_row, _forgets_little(C, FIRST, lo + BM - 1, end)


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


# ---- forward


@triton.jit
def _forward_tiles_of_one_power(
    acc, l, q,
    keys, rows, gates,  # (K, strides, V, strides, b, hkv), (row, c_lo, c_row, c_first, first_row, key_scale), at this
    begin, end, T,  # head or None
    P: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Return (acc, l) with the keys from begin to end added, BN at a time; DIAGONAL: some keys come after some rows.

    Decays are those to the first row, to be multiplied by that from there to each row, but if DIAGONAL and not FACTORS.
    """
    GATED: tl.constexpr = gates is not None
    K, k_strides, V, v_strides, b, hkv = keys
    row, c_lo, c_row, c_first, first_row, key_scale = rows
    if GATED:
        C, _, KEY_DECAY, _, C_END, _ = gates
    ones = tl.full([BN, 8], 1.0, tl.bfloat16 if q.dtype == tl.float16 else q.dtype)
    if GATED and not DIAGONAL:
        x, c_next = _ahead(C_END - 1, c_lo, begin, end, BN, 0.5)
        key_decay = _vector(KEY_DECAY, begin, BN)
    for start in range(begin, end, BN):
        k = _tile(K, k_strides, b, start, hkv, T, BN, D, DIAGONAL)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if P > 4 and q.dtype == tl.float16:
            s *= key_scale[:, None]
        a = int_power(s, P // 2)
        if DIAGONAL:
            at = start + tl.arange(0, BN)
            seen = row[:, None] >= at[None, :]
            if GATED and FACTORS:
                a *= _column_decay(c_first, _vector(C, start, BN), 0.5)[None, :]
            elif GATED:
                seen = seen & (at[None, :] >= first_row[:, None])
                a *= _decay(c_row[:, None], _vector(C, start, BN)[None, :], seen, 0.5)
            a = tl.where(seen, a, 0.0)
        elif GATED:
            a *= (key_decay * x)[None, :]
            key_decay = _vector(KEY_DECAY, tl.minimum(start + BN, end), BN)
            x = tl.exp(0.5 * (c_lo - c_next).to(tl.float32))
            c_next = tl.load(C_END - 1 + tl.minimum(start + 3 * BN, end) // 32)
        v = _tile(V, v_strides, b, start, hkv, T, BN, D, DIAGONAL)
        w = (a * a).to(v.dtype)
        l = tl.dot(w, ones, l, input_precision=PRECISION)
        acc = tl.dot(w, v, acc, input_precision=PRECISION)
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
    ones = tl.full([BN, 8], 1.0, tl.bfloat16 if q.dtype == tl.float16 else q.dtype)
    for start in range(begin, end, BN):
        k = _tile(K, k_strides, b, start, hkv, T, BN, D, DIAGONAL)
        x = _log2(tl.dot(q, tl.trans(k), input_precision=PRECISION))
        w = _exp2(p[:, None] * x + offset[:, None])
        if DIAGONAL:
            at = start + tl.arange(0, BN)
            seen = row[:, None] >= at[None, :]
            if gates is not None:
                seen = seen & (at[None, :] >= first_row[:, None])
            w = tl.where(seen, w, 0.0)
        elif gates is not None:
            w *= _vector(gates[2], start, BN)[None, :]  # KEY_DECAY
        v = _tile(V, v_strides, b, start, hkv, T, BN, D, DIAGONAL)
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
    """Return (acc, l) with the keys from begin on added for the rows from lo on; `factors` is of `_gates_of_rows`."""
    end = tl.minimum(lo + q.shape[0], T)
    if gates is None:
        return _forward_tiles(acc, l, q, keys, rows, gates, begin, end, T, P, D, BN, True)
    elif P == 0:  # whose gates are resets
        seen = rows[1][:, None] < lo
        acc, l = tl.where(seen, acc, 0.0), tl.where(seen, l, 0.0)
        return _forward_tiles(acc, l, q, keys, rows, gates, begin, end, T, P, D, BN, True)
    else:
        _, _, c_row, c_first, first_row, _ = rows
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
    n = _queries(T, OFFSET)
    bh, b, h, hkv, first = _queries_of_program(n, H, HKV, BH, HEADS, BM)
    lo = _token(first, OFFSET)
    row = lo + tl.arange(0, BM)

    q = _tile(Q, q_strides, b, first, h, n, BM, D, True)
    q32 = q.to(tl.float32)
    key_scale = 0.0
    if P > 4 and q.dtype == tl.float16:  # which would not hold a row that is scaled for the keys too: the scores are
        key_scale = _vector(at_head(KEY_SCALE, T, b * HKV + hkv), lo, BM) if NORMALIZE else tl.full([BM], 1, tl.float32)
    if P == 0:
        p, _, offset = _row_power(POWERS, q32, KEY_SCALE, T, n, b, b * HKV + hkv, lo, first)
    elif NORMALIZE:
        scale = _row_scale(q32, KEY_SCALE, T, b * HKV + hkv, lo)
        if P > 4 and q.dtype == tl.float16:
            q = (q32 * (scale / key_scale)[:, None]).to(q.dtype)
        else:
            q = (q32 * scale[:, None]).to(q.dtype)
    else:
        q = (q32 * scale).to(q.dtype)

    acc = tl.zeros([BM, D], tl.float32)
    l = tl.zeros([BM, 8], tl.float32)  # the same sum eight times, because no product is narrower
    begin, end = _first_key(NEAR, lo, b * HKV + hkv, T, CHUNK), lo // BN * BN
    c_lo, c_row, c_first, first_row, factors = 0.0, 0.0, 0.0, 0, False
    if GATED:
        gates = gates_of_head(gates, T, b * HKV + hkv)
        c_lo, begin = _before_rows(gates, lo, begin, end, BN)
        c_row, c_first, first_row, factors = _gates_of_rows(gates, lo, end, BM)
    keys = (K, k_strides, V, v_strides, b, hkv)
    rows = (row, first_row, p, offset) if P == 0 else (row, c_lo, c_row, c_first, first_row, key_scale)
    acc, l = _forward_tiles(acc, l, q, keys, rows, gates, begin, end, T, P, D, BN, False)
    acc, l = _forward_diagonal(acc, l, q, keys, rows, gates, end, lo, factors, T, P, D, BN)

    l = tl.max(l, 1)
    out = ((tl.cast(b, tl.int64) * n + first) * H + h) * D  # [B, n, H, D]
    out += tl.arange(0, BM)[:, None] * (H * D) + tl.arange(0, D)[None, :]
    if NUM is not None:
        acc += tl.load(NUM + out, mask=row[:, None] < T, other=0.0)
        l += _vector(at_head(DEN, n, bh), first, BM)
    if NORMALIZE:
        acc *= inverse(l)[:, None]
    else:
        acc *= rest
        l *= rest
    tl.store(Y + out, acc.to(Y.dtype.element_ty), row[:, None] < T)
    tl.store(at_head(L, n, bh) + (first + tl.arange(0, BM)), l)


# ---- backward


@triton.jit
def _dq_tiles_of_one_power(
    acc, r, q, dy, delta,
    keys, rows, gates,  # as in `_forward_tiles`, with (K2, strides) behind the keys
    begin, end, T,
    P: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr, FACTORS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return (acc, r), the sums for dq and row, with the keys from begin to end added, BN at a time.

    Decays are those of `_forward_tiles_of_one_power`.
    """
    GATED: tl.constexpr = gates is not None
    K, k_strides, V, v_strides, b, hkv, K2, k2_strides = keys
    row, c_lo, c_row, c_first, first_row, key_scale = rows
    if GATED:
        C, _, KEY_DECAY, _, C_END, _ = gates
    if GATED and not DIAGONAL:
        x, c_next = _ahead(C_END - 1, c_lo, begin, end, BN, 1.0)
        key_decay = _vector(KEY_DECAY, begin, BN)
    for start in range(begin, end, BN):
        k = _tile(K, k_strides, b, start, hkv, T, BN, D, DIAGONAL)
        v = _tile(V, v_strides, b, start, hkv, T, BN, D, DIAGONAL)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if P > 4 and q.dtype == tl.float16:
            s *= key_scale[:, None]
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        ds = _times_power(int_power(s, P // 2), s, P) * (dp - delta[:, None])
        if DIAGONAL:
            at = start + tl.arange(0, BN)
            seen = row[:, None] >= at[None, :]
            if GATED and FACTORS:
                ds *= _column_decay(c_first, _vector(C, start, BN), 1.0)[None, :]
            elif GATED:
                seen = seen & (at[None, :] >= first_row[:, None])
                ds *= _decay(c_row[:, None], _vector(C, start, BN)[None, :], seen, 1.0)
            ds = tl.where(seen, ds, 0.0)
        elif GATED:
            ds *= (key_decay * x)[None, :]
            key_decay = _vector(KEY_DECAY, tl.minimum(start + BN, end), BN)
            x = tl.exp((c_lo - c_next).to(tl.float32))
            c_next = tl.load(C_END - 1 + tl.minimum(start + 3 * BN, end) // 32)
        if ROWS:
            r += tl.sum(ds * s, 1)
        if K2 is not None:
            k = _tile(K2, k2_strides, b, start, hkv, T, BN, D, DIAGONAL)
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc, r


@triton.jit
def _dq_tiles_of_powers(
    acc, r, q, dy, delta,
    keys, rows, gates,  # (K, strides, V, strides, b, hkv, K2, strides), (row, first_row, p - 1, c, x) or None
    begin, end, T,
    D: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Return (acc, r), the sums for dq and dp, as `_dq_tiles_of_one_power` does, with a power for each row."""
    K, k_strides, V, v_strides, b, hkv, K2, k2_strides = keys
    row, first_row, less, c, middle = rows
    for start in range(begin, end, BN):
        k = _tile(K, k_strides, b, start, hkv, T, BN, D, DIAGONAL)
        v = _tile(V, v_strides, b, start, hkv, T, BN, D, DIAGONAL)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        x = tl.maximum(_log2(s), -1e30)  # finite, because it is multiplied by a weight that may be zero
        ds = _with_sign(_exp2(less[:, None] * x + c[:, None]), s) * (dp - delta[:, None])
        if DIAGONAL:
            at = start + tl.arange(0, BN)
            seen = row[:, None] >= at[None, :]
            if gates is not None:
                seen = seen & (at[None, :] >= first_row[:, None])
            ds = tl.where(seen, ds, 0.0)
        elif gates is not None:
            ds *= _vector(gates[2], start, BN)[None, :]  # KEY_DECAY
        r += tl.sum(ds * s * (x - middle[:, None]), 1)
        if K2 is not None:
            k = _tile(K2, k2_strides, b, start, hkv, T, BN, D, DIAGONAL)
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
            acc, r, q, dy, delta, keys, rows, gates, begin, end, T, P, D, BN, DIAGONAL, FACTORS, SUMS == 2
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
        _, _, c_row, c_first, first_row, _ = rows
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
def _dq_rows(
    arrays, strides, scale, rest, T, OFFSET, CHUNK, H, HKV, bh, b, h, hkv, first,
    P: tl.constexpr, D: tl.constexpr, NORMALIZE: tl.constexpr, BEFORE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Compute `dq_kernel` for the rows from `first` on of a sequence and head."""
    Q, K, V, DY, K2, Y, L, DL, KEY_SCALE, POWERS, gates, NEAR, DQ, PAIR, G, ROW, ERROR = arrays
    q_strides, k_strides, v_strides, k2_strides, dy_strides = strides
    GATED: tl.constexpr = gates is not None
    n, lo = _queries(T, OFFSET), _token(first, OFFSET)
    row = lo + tl.arange(0, BM)
    out = _row_offsets(b, first, h, n, H, BM, D)

    q = _tile(Q, q_strides, b, first, h, n, BM, D, True)
    dy = _tile(DY, dy_strides, b, first, h, n, BM, D, True)
    dy = dy.to(q.dtype) if dy.dtype == tl.float32 else dy
    q32 = q.to(tl.float32)
    key_scale = 0.0
    if P > 4 and q.dtype == tl.float16:  # which would not hold a row that is scaled for the keys too: the scores are
        key_scale = _vector(at_head(KEY_SCALE, T, b * HKV + hkv), lo, BM) if NORMALIZE else tl.full([BM], 1, tl.float32)
    if NORMALIZE:
        y = tl.load(Y + out, mask=row[:, None] < T, other=0.0)
        delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
        if AGAIN:  # the sum of w_ij (dP_ij - delta_i) / l_i over j would be zero
            error = _vector(at_head(ERROR, T if GATED else 128, bh), lo, BM)
            if GATED:
                first_key = _first_key(NEAR, lo, b * HKV + hkv, T, CHUNK)
                reads = _may_read_state(gates, T, b * HKV + hkv, lo, first_key, BM, BEFORE)
                error = tl.where(reads, 0.0, error)
            delta += error
        l = _vector(at_head(L, n, bh), first, BM)
        over_l = inverse(l)
        if P > 0:
            factor = _row_scale(q32, KEY_SCALE, T, b * HKV + hkv, lo)
    else:
        delta = -_vector(at_head(DL, n, bh), first, BM)
        over_l = tl.zeros([BM], tl.float32) + rest
        factor = tl.zeros([BM], tl.float32) + scale
    if P == 0:
        p, less, g, x = _normalized_row_power(POWERS, q32, KEY_SCALE, l, T, n, b, b * HKV + hkv, lo, first)
        factor, over_l = p, 1.0
    else:
        g = int_power(factor, P // 2) * tl.sqrt(over_l)
    if P > 4 and q.dtype == tl.float16:
        q = (q32 * (factor / key_scale)[:, None]).to(q.dtype)
    elif P > 4:
        q = (q32 * factor[:, None]).to(q.dtype)
    elif P > 0:  # s^3 stays in range without it, and the product is faster if q does not pass through registers
        over_l, factor = g * g, 1.0
    acc = tl.zeros([BM, D], tl.float32)
    r = tl.zeros([BM], tl.float32)
    begin, end = _first_key(NEAR, lo, b * HKV + hkv, T, CHUNK), lo // BN * BN
    c_lo, c_row, c_first, first_row, factors = 0.0, 0.0, 0.0, -1 if BEFORE else 0, False
    if GATED:
        gates = gates_of_head(gates, T, b * HKV + hkv)
        c_lo, begin = _before_rows(gates, lo, begin, end, BN)
        c_row, c_first, first_row, factors = _gates_of_rows(gates, lo, end, BM)
    _store_pair(PAIR, G, gates, n, bh, first, row, first_row, c_row, g, p * delta if P == 0 else delta, P, R)
    keys = (K, k_strides, V, v_strides, b, hkv, K2, k2_strides)
    rows = (row, first_row, less, g, x) if P == 0 else (row, c_lo, c_row, c_first, first_row, key_scale)
    SUMS: tl.constexpr = 2 if ROWS else 0 if DQ is None and ROW is None and ERROR is None else 1
    acc, r = _dq_tiles(acc, r, q, dy, delta, keys, rows, gates, begin, end, T, P, D, BN, False, SUMS)
    acc, r = _dq_diagonal(acc, r, q, dy, delta, keys, rows, gates, end, lo, factors, T, P, D, BN, SUMS)

    if NORMALIZE:  # in a row that sees itself alone, y_i is v_i for any q_i
        over_l = tl.where(row > first_row, over_l, 0.0)
    acc *= ((1 if P == 0 else P) * factor * over_l)[:, None]
    if DQ is not None:
        tl.store(DQ + out, acc.to(DQ.dtype.element_ty), row[:, None] < T)
    if ROWS:
        tl.store(at_head(ROW, T, bh) + row, r * over_l)
    elif P == 0 and ROW is not None:
        tl.store(at_head(ROW, n, bh) + (first + tl.arange(0, BM)), r * over_l * 0.6931471805599453)  # ln 2
    if ERROR is not None and not AGAIN:
        if _delta_may_be_inexact(gates, T, 0, lo, BM, BEFORE):  # gates are at this head
            q32 = _tile(Q, q_strides, b, first, h, n, BM, D, True).to(tl.float32)
            tl.store(at_head(ERROR, T if GATED else 128, bh) + row, tl.sum(acc * q32, 1) / P)


@triton.jit(do_not_specialize=["T", "OFFSET", "CHUNK", "H", "HKV", "BH", "HEADS"])
def dq_kernel(
    Q, K, V, DY, K2,  # if Q and K are float16, V and DY are bfloat16 and K2 is K in bfloat16; else it is None
    Y, L, DL,  # written by the forward pass, or without NORMALIZE the gradient to its L
    KEY_SCALE, POWERS, gates, NEAR,  # see the table above and gates.py, or None
    DQ, PAIR, G, ROW, ERROR,  # what is written, or None; G with gates only
    q_strides, k_strides, v_strides, k2_strides, dy_strides,  # None: a tensor descriptor
    scale, rest,
    T, OFFSET, CHUNK, H, HKV, BH, HEADS,
    P: tl.constexpr, D: tl.constexpr, NORMALIZE: tl.constexpr,
    BEFORE: tl.constexpr,  # there is a state before the first token, so no row sees itself alone
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, AGAIN: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Write BM rows of dq, and PAIR, G and ROW of the table above, which the other pass needs.

    With AGAIN, a program looks at TILES times BM rows, and computes those again whose delta may have been inexact, less
    its ERROR.
    """
    arrays = (Q, K, V, DY, K2, Y, L, DL, KEY_SCALE, POWERS, gates, NEAR, DQ, PAIR, G, ROW, ERROR)
    strides = (q_strides, k_strides, v_strides, k2_strides, dy_strides)
    n = _queries(T, OFFSET)
    if not AGAIN:
        bh, b, h, hkv, first = _queries_of_program(n, H, HKV, BH, HEADS, BM)
        _dq_rows(
            arrays, strides, scale, rest, T, OFFSET, CHUNK, H, HKV, bh, b, h, hkv, first,
            P, D, NORMALIZE, BEFORE, BM, BN, R, ROWS, False,
        )  # fmt: skip
    else:
        tiles = 1 if gates is None else tl.cdiv(n, BM)
        these = tl.minimum(tl.program_id(0) * TILES + tl.arange(0, TILES), BH * tiles - 1)
        of_keys = these // tiles // H * HKV + these // tiles % H // (H // HKV)
        inexact = _delta_may_be_inexact(gates, T, of_keys, _token(these % tiles * BM, OFFSET), BM, BEFORE)
        for i in range(tl.program_id(0) * TILES, tl.minimum(tl.program_id(0) * TILES + TILES, BH * tiles)):
            bh, first = i // tiles, i % tiles * BM
            b, h = bh // H, bh % H
            hkv = h // (H // HKV)
            if tl.sum(tl.where(these == i, inexact.to(tl.int32), 0), 0) > 0:
                _dq_rows(
                    arrays, strides, scale, rest, T, OFFSET, CHUNK, H, HKV, bh, b, h, hkv, first,
                    P, D, NORMALIZE, BEFORE, BM, BN, R, ROWS, True,
                )  # fmt: skip


@triton.jit
def _dkdv_tiles_of_one_power(
    dk, dv, col, k, v,
    queries, b, h, H,  # (Q, strides, DY, strides, Q2, strides, PAIR, G)
    columns, gates,  # (column, c_hi, c_col, c_last, first_row), (C, FIRST, C_START) at this head of keys or None
    begin, end, T, OFFSET,
    P: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    NORMALIZE: tl.constexpr, BEFORE: tl.constexpr, ROWS: tl.constexpr, DIAGONAL: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Return (dk, dv, col) with the queries from begin to end of one head added, BM at a time."""
    GATED: tl.constexpr = gates is not None
    Q, q_strides, DY, dy_strides, Q2, q2_strides, PAIR, G = queries
    column, c_hi, c_col, c_last, first_row = columns
    n = _queries(T, OFFSET)
    PAIR = at_head(PAIR, n, 2 * (b * H + h))
    if GATED:
        C, FIRST, C_START = gates
        G = at_head(G, n, b * H + h)
    if GATED and not DIAGONAL:
        x = tl.exp(0.5 * (tl.load(C_START + tl.minimum(begin, T - 1) // 32) - c_hi).to(tl.float32))
        c_next = tl.load(C_START + tl.minimum(begin + BM, T - 1) // 32)
    for start in range(begin, end, BM):
        row = _row(start, OFFSET)
        q = _tile(Q, q_strides, b, row, h, n, BM, D, True)
        dy = _tile(DY, dy_strides, b, row, h, n, BM, D, True).to(v.dtype)
        pair = tl.multiple_of(row, BM) * 2 + tl.arange(0, BM)[:, None] * 2 + tl.arange(0, 2)[None, :]
        g, gdelta = tl.split(tl.load(PAIR + pair))
        at = start + tl.arange(0, BM)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BN, BM]
        dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
        if GATED:
            if DIAGONAL:
                g = _vector(G, row, BM)
                if FACTORS:
                    g *= _column_decay(_vector(C, start, BM), c_last, 0.5)
            else:
                g *= x
                x = tl.exp(0.5 * (c_next - c_hi).to(tl.float32))
                c_next = tl.load(C_START + tl.minimum(start + 2 * BM, T - 1) // 32)
            gdelta *= g
        a = int_power(s, P // 2) * g[None, :]
        first = -1 if BEFORE else 0
        if DIAGONAL:
            seen = at[None, :] >= column[:, None]
            if GATED and FACTORS:
                first = first_row
            elif GATED:
                first = start // 128 * 128 + _vector(FIRST, start, BM).to(tl.int32)
                seen = seen & (column[:, None] >= first[None, :])
                decay = _decay(_vector(C, start, BM)[None, :], c_col[:, None], seen, 0.5)
                a *= decay
            a = tl.where(seen, a, 0.0)
        dv = tl.dot((a * a).to(dy.dtype), dy, dv, input_precision=PRECISION)
        ds = _times_power(a, s, P) * (dp * g[None, :] - gdelta[None, :])
        if DIAGONAL and GATED and not FACTORS:
            ds *= decay
        if DIAGONAL and NORMALIZE:
            ds = tl.where((at > first)[None, :], ds, 0.0)
        if ROWS:
            col += tl.sum(ds * s, 1)
        if Q2 is not None:
            q = _tile(Q2, q2_strides, b, row, h, n, BM, D, True)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv, col


@triton.jit
def _dkdv_tiles_of_powers(
    dk, dv, k, v,
    queries, POWERS, b, h, H,  # (Q, strides, DY, strides, Q2, strides, PAIR, G)
    columns, gates,  # (column, ...), (C, FIRST, C_START) at this head of keys or None
    begin, end, T, OFFSET,
    D: tl.constexpr, BM: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Return (dk, dv) as `_dkdv_tiles_of_one_power` does, with a power for each query."""
    Q, q_strides, DY, dy_strides, Q2, q2_strides, PAIR, G = queries
    n, column = _queries(T, OFFSET), columns[0]
    PAIR, POWERS = at_head(PAIR, n, 2 * (b * H + h)), at_head(POWERS, n, 2 * b)
    for start in range(begin, end, BM):
        row = _row(start, OFFSET)
        q = _tile(Q, q_strides, b, row, h, n, BM, D, True)
        dy = _tile(DY, dy_strides, b, row, h, n, BM, D, True).to(v.dtype)
        pair = tl.multiple_of(row, BM) * 2 + tl.arange(0, BM)[:, None] * 2 + tl.arange(0, 2)[None, :]
        c, pdelta = tl.split(tl.load(PAIR + pair))
        p, less = tl.split(tl.load(POWERS + pair))
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BN, BM]
        dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
        if DIAGONAL and gates is not None:
            c = _vector(at_head(G, n, b * H + h), row, BM)
        t = _with_sign(_exp2(less[None, :] * _log2(s) + c[None, :]), s)
        if DIAGONAL:
            at = start + tl.arange(0, BM)
            seen, first = at[None, :] >= column[:, None], 0
            if gates is not None:
                first = start // 128 * 128 + _vector(gates[1], start, BM).to(tl.int32)
                seen = seen & (column[:, None] >= first[None, :])
            t = tl.where(seen, t, 0.0)
        dv = tl.dot((t * s).to(dy.dtype), dy, dv, input_precision=PRECISION)
        ds = t * (dp * p[None, :] - pdelta[None, :])
        if DIAGONAL:  # in a row that sees itself alone, y_i is v_i for any q_i
            ds = tl.where((at > first)[None, :], ds, 0.0)
        if Q2 is not None:
            q = _tile(Q2, q2_strides, b, row, h, n, BM, D, True)
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
    Q, K, V, DY, Q2,  # if Q and K are float16, V and DY are bfloat16 and Q2 is Q in bfloat16; else it is None
    POWERS, gates, NEAR,  # or None
    PAIR, G, ROW,  # written by `dq_kernel`
    DK, DV,  # what is written
    q_strides, k_strides, v_strides, dy_strides, q2_strides,  # None: a tensor descriptor
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

    k = _tile(K, k_strides, b, lo, hkv, T, BN, D, True)
    v = _tile(V, v_strides, b, lo, hkv, T, BN, D, True)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    col = tl.zeros([BN], tl.float32)
    begin, end = lo + BN, _last_query(NEAR, lo, bh, T, CHUNK)  # the queries that see all of these keys
    c_hi, c_col, c_last, first_row, factors = 0.0, 0.0, 0.0, 0, False
    if GATED:
        C, FIRST, _, C_START, C_END, OPENED = gates
        C, FIRST, C_START = at_head(C, T, bh), at_head(FIRST, T, bh), at_head(C_START, T, bh, 32)
        gates = (C, FIRST, C_START)
        hi = tl.minimum(begin, T) - 1
        c_hi = tl.load(at_head(C_END, T, bh, 32) + hi // 32)
        end = _last_reader(at_head(OPENED, T, bh, 32), FIRST, hi, end, T)
        c_col, c_last, factors = _vector(C, lo, BN), tl.load(C + hi), _forgets_little(C, FIRST, hi, lo)
        first_row = lo // 128 * 128 + tl.load(FIRST + hi).to(tl.int32)
    queries = (Q, q_strides, DY, dy_strides, Q2, q2_strides, PAIR, G)
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

    out = _row_offsets(b, lo, hkv, T, HKV, BN, D)
    if P > 0:
        dk *= P
    tl.store(DK + out, dk.to(DK.dtype.element_ty), column[:, None] < T)
    tl.store(DV + out, dv.to(DV.dtype.element_ty), column[:, None] < T)
    if ROWS:
        row = tl.zeros([BN], tl.float32) - col
        for i in range(group):
            row += _vector(at_head(ROW, T, b * H + hkv * group + i), lo, BN)
        tl.store(at_head(ROW, T, b * H + hkv * group) + column, row)


# ---- launchers


def forward(
    q, k, v, log_g=None, *, p, powers=None, scale=1.0, normalize=True, chunk=None, near=None, num=None, den=None,
    config=None,
):  # fmt: skip
    """Return y [B, n, H, D] in q's dtype and l [B, H, n padded to a multiple of 128], float32, for `backward`.

    q [B, n, H, D], k, v [B, T, Hkv, D], bfloat16, float16 or float32, any strides; log_g [B, T, Hkv] float32 or None; D
    and p: those of `kernels.HEAD_DIMS` and `kernels.POWERS`, or p = 0 with powers [B, n] float32 and a log_g of 0 and
    -inf. The queries belong to the last n tokens; T - n is a multiple of 128. chunk: tokens see nothing before their
    chunk, a multiple of 128, but for what `near` says (NEAR in gates.py). num [B, n, H, D], den [B, H, n padded],
    float32: added to the sums before dividing. `scale` cancels.

    With normalize False: num_i = sum_j w_ij v_j, float32, and l_i = sum_j w_ij, both with
    w_ij = decay_ij (scale q_i . k_j)^p, to which other parts of the sums may be added.
    """
    (B, n, H, _), (T, HKV) = q.shape, k.shape[1:3]
    y = torch.empty(q.shape, dtype=q.dtype if normalize else torch.float32, device=q.device)
    l = torch.zeros(B, H, padded(n), dtype=torch.float32, device=q.device)
    scale, rest = _powers_of_two(scale, p, q.dtype)
    c = config or choose("forward", q, p, log_g is not None, chunk is not None)
    with device_guard(q.device):
        v = v if (wide := _wide(v)) is None else wide
        key_scale, gates = _key_scales(k, log_g, p, normalize), tile_gates(log_g, c.BN, 0.5)
        tiles, strides = _tiles((q, c.BM), (k, c.BN), (v, c.BN))
        forward_kernel[(triton.cdiv(n, c.BM) * B * H,)](
            *tiles, y, l, num, den, key_scale, _row_powers(powers), gates, near, *strides, scale, rest,
            T, _offset(n, T), chunk or T, H, HKV, B * H, _heads_together(chunk or T, B * H),
            **_options(c, q, p, normalize),
        )  # fmt: skip
    return y, l


def backward(
    dy, dl, q, k, v, log_g, y, l, *, p, powers=None, scale=1.0, normalize=True, chunk=None, near=None, before=False,
    needs=(True, True, True), configs=(None, None),
):  # fmt: skip
    """Return dq, dk, dv in the inputs' dtypes and dlog_g [B, T, Hkv] float32, or None without gates; with powers their
    gradient [B, n] float32 in place of dlog_g.

    With normalize, y and l are those of forward and dl is not read; else y and l are not read, and dl has l's shape.
    With `chunk`, row of the table above is returned in place of dlog_g, for `gates.chunk_dlog_g`. before: True if there
    is a state before the first token. needs: whether dq, either of dk and dv, and the last are wanted; the others are
    None. Raises ValueError for configurations that do not fit each other.
    """
    (B, n, H, _), (T, HKV) = q.shape, k.shape[1:3]
    needs_q, needs_kv, needs_last = needs
    rows = needs_last and log_g is not None and powers is None
    again = normalize and powers is None and (log_g is not None or n == T)
    needs_kv = needs_kv or rows  # dkdv_kernel ends dlog_g
    like = lambda x, wanted: torch.empty(x.shape, dtype=x.dtype, device=x.device) if wanted else None
    dq, dk, dv = like(q, needs_q), like(k, needs_kv), like(v, needs_kv)
    pair, g, row = empty(q, B, H, padded(n), 2), None, None
    error = empty(q, B, H, 128 if log_g is None else padded(T)) if again else None
    if log_g is not None:
        g = empty(q, B, H, padded(n))
        if rows:  # there are no queries of the tokens before
            row = (empty if n == T else _zeros)(q, B, H, padded(T))
    if powers is not None:
        row, powers = empty(q, B, H, padded(n)) if needs_last else None, _row_powers(powers)
    scale, rest = _powers_of_two(scale, p, q.dtype)
    c_dq = configs[0] or choose("dq", q, p, log_g is not None, chunk is not None)
    c_dkdv = configs[1] or choose("dkdv", q, p, log_g is not None, chunk is not None)
    if c_dq.BM < c_dkdv.BM or c_dkdv.BN % c_dkdv.BM:
        raise ValueError(f"dkdv's BM must divide its BN and be at most dq's BM, got {c_dq} for dq, {c_dkdv} for dkdv")
    with device_guard(q.device):
        q2, k2 = _wide(q), _wide(k)
        if k2 is not None:  # v as the forward pass had it: delta_i is a mean of dP_ij only of the same values
            dy, v = dy.bfloat16(), v.bfloat16()
        key_scale, gates = _key_scales(k, log_g, p, normalize), tile_gates(log_g, c_dq.BN, 1.0, before)
        (k_tiles, v_tiles, k2), kv_strides = _tiles((k, c_dq.BN), (v, c_dq.BN), (k2, c_dq.BN))
        tiles = triton.cdiv(n, c_dq.BM) * B * H
        looks_at = 1 if log_g is None else TILES  # without gates the first rows of all
        passes = [(tiles, False)]  # programs, AGAIN
        if again:
            passes.append((B * H if log_g is None else triton.cdiv(tiles, looks_at), True))
        for programs, second in passes:
            dq_kernel[(programs,)](
                q, k_tiles, v_tiles, dy, k2, y, l, dl, key_scale, powers, gates, near, dq, pair, g, row, error,
                q.stride(), *kv_strides, dy.stride(), scale, rest,
                T, _offset(n, T), chunk or T, H, HKV, B * H, _heads_together(chunk or T, B * H),
                R=c_dkdv.BM, ROWS=rows, BEFORE=before, AGAIN=second, TILES=looks_at,
                **_options(c_dq._replace(maxnreg=0) if second else c_dq, q, p, normalize),
            )  # fmt: skip
        if needs_kv:
            (q, dy, q2), (q_strides, *dy_strides) = _tiles(*((x, c_dkdv.BM) for x in (q, dy, q2)))
            dkdv_kernel[(triton.cdiv(T, c_dkdv.BN) * B * HKV,)](
                q, k, v, dy, q2, powers, gates, near, pair, g, row, dk, dv,
                q_strides, k.stride(), v.stride(), *dy_strides,
                T, _offset(n, T), chunk or T, H, HKV, B * HKV, _heads_together(chunk or T, B * HKV),
                ROWS=rows, BEFORE=before, **_options(c_dkdv, k, p, normalize),
            )  # fmt: skip
        if not needs_last or (log_g is None and powers is None):
            return dq, dk, dv, None
        if powers is not None:
            return dq, dk, dv, row[..., :n].sum(1)
        return dq, dk, dv, row if chunk else dlog_g(row, log_g, H)


def _row_powers(powers):
    """Return POWERS of the table above for powers [B, n], or None for None.

    p - 1 is at least 1e-20, so that times log2 0 it is -inf for p = 1 too.
    """
    if powers is None:
        return None
    p = torch.nn.functional.pad(powers, (0, padded(powers.shape[1]) - powers.shape[1]), value=2.0)
    return torch.stack((p, (p - 1).clamp(min=1e-20)), dim=-1)


def _zeros(like, *shape):
    return empty(like, *shape).zero_()


def _offset(n, T):
    """Return OFFSET for n queries of T tokens; None, for as many as there are, is a constant to the compiler."""
    return None if n == T else T - n


def _wide(x):
    """Return x in bfloat16 if it is float16, else None.

    s^p is beyond float16, so that weights are bfloat16, and a product has two operands of one type.
    """
    return x.bfloat16() if x.dtype == torch.float16 else None


def _key_scales(k, log_g, p, normalize):
    """Return KEY_SCALE of the table above, or None if keys are taken as they are."""
    if 0 < p <= 4 or not normalize:
        return None
    B, T, HKV, D = k.shape
    scales = empty(k, B * HKV, padded(T))
    strides = (0, 0, 0) if log_g is None else log_g.stride()
    key_scale_kernel[(B * HKV,)](k, log_g, scales, k.stride(), strides, T, HKV, D=D, N=128)
    return scales


def _tiles(*tensors_and_rows):
    """Return (tensors, strides) for a kernel that fetches tiles of so many rows.

    The tensors are descriptors, and strides is None, if there is a copy engine that can fetch them: every row must
    begin at a multiple of 16 bytes. A tensor may be None.
    """
    tensors = [x for x, _ in tensors_and_rows]
    if not all(x is None or reads_by_descriptor(x) and aligned(x) for x in tensors):
        return tensors, [None if x is None else x.stride() for x in tensors]
    tile = lambda x, n: TensorDescriptor(x, x.shape, x.stride(), [1, n, 1, x.shape[3]])
    return [None if x is None else tile(x, n) for x, n in tensors_and_rows], [None] * len(tensors)


def aligned(x):
    """Return True if every row of x [B, T, H, D] is contiguous and begins at a multiple of 16 bytes."""
    strides = all(n and n * x.element_size() % 16 == 0 for n in x.stride()[:3])
    return x.stride(3) == 1 and strides and x.data_ptr() != 0 and x.data_ptr() % 16 == 0


def _powers_of_two(scale, p, dtype):
    """Return (a power of two near scale, by which bfloat16 is multiplied exactly; the rest of scale^p).

    float16 is not multiplied: it has few exponents.
    """
    power = 1.0 if dtype == torch.float16 else 2.0 ** round(math.log2(abs(scale)))
    return power, (scale / power) ** p


def _heads_together(T, heads):
    """Return how many heads programs work on side by side.

    One head after the other, keys stay in the L2 cache; side by side, the longest blocks come first and the last
    programs to run are short.
    """
    return max(1, min(heads, L2_TOKENS // T))


def _options(c, q, p, normalize):
    """Return the constants and options of a launch with Config c."""
    return dict(P=p, D=q.shape[-1], NORMALIZE=normalize, BM=c.BM, BN=c.BN, **c.launch())
