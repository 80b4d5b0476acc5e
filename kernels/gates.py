"""Gates: the decays that tiles and chunks need, computed from log_g, and the gradient to log_g.

    c_i = log_g_1 + .. + log_g_i in float64, where -inf (a reset: the first token of a document) counts as 0
    decay_ij = exp(c_i - c_j), and 0 across a reset: only differences of sums become float32, and only small ones
        dlog_g_m = sum over i >= m of (row_i - col_i), 0 at a reset; row_i, col_j sum ds_ij s_ij / p over j, over i

For the quadratic form (`tile_gates`) a decay between tiles is a product of three factors: of the row, of the key inside
its tile (KEY_DECAY), and of the sums between (C_START, C_END). For the chunked form
(`chunk_gates`) there are the decays from the chunk's beginning to a token (INTO), from a token to the chunk's end (OUT)
and through the whole chunk (WHOLE), and

    dlog_g_m = sum over i >= m of (row_i - col_i + what query i read from the state)
             + sum over j < m of what key j gave to the state + what WHOLE carried from state to state + ENTERING

with i and j in the chunk of m. Where gates forget within a few tokens, a chunk's first rows see few keys, all of the
chunk before. If a row is nearly orthogonal to these, its scores are below the rounding errors of the features that
states are made of. So if the decay through the 128 tokens before a chunk is below 2^-20, or there is a reset among
them, NEAR is 128: the chunk's first 128 rows attend to these tokens as they do to those of their own chunk, and read no
state (INTO is 0). ENTERING, here that of the next chunk, counts the pairs of keys in this chunk with queries in that.

    tokens ->  | 0 .. 31 | 32 .. 63 | 64 .. 95 | 96 .. 127 | ..      one program: 1024 tokens, or one chunk, of one head
    C          the sum within these 128 ------------------->|
    C_START    ^           ^          ^          ^            the sum up to the first of 32
    C_END             ^          ^          ^           ^     the sum up to the last of 32

    name         shape                                  dtype      what
    C            [B * Hkv, T padded to 128]             float32    the sum since the first token of the 128 around it
    FIRST        the same                               int8       the document's first token, counted from there; -1:
                                                                   before (BEFORE: or there is a state before all)
    KEY_DECAY    the same                               float32    decay^POWER from the token to the last of the R
                                                                   around it, 0 if that is another document's; first
                                                                   those of the R's tokens 0, 1, 8, 9, 16, .., then 2,
                                                                   3, 10, ..: what a thread needs, in wide loads
    C_START      [B * Hkv, T padded to 128 / 32]        float64    c of the first of 32 tokens
    C_END        the same                               float64    c of the last
    OPENED       the same                               int32      the first token of the last's document
    INTO, OUT    [B * Hkv, TP]                          float32    TP: T padded to 256
    WHOLE        [B * Hkv, chunks]                      float32
    NEAR         [B * Hkv, chunks]                      int32      tokens before the chunk that its first 128 rows
                                                                   attend to: 0 or 128
    ENTERING     [B * Hkv, chunks]                      float64    the sum of ds_ij s_ij / p over keys j before and
                                                                   queries i in the chunk, where NEAR is 128

Cost: 9.6 bytes a token and head of keys are written for the quadratic form, 8 for the chunked one. Latency is the limit
(0.013 ms each for 65,536 tokens).
"""

import torch
import triton
import triton.language as tl

from .common import add, at_head, chunk_of, empty, maximum, padded

NEAR_TOKENS = tl.constexpr(128)
# natural logarithm of 2^-20, the decay through NEAR_TOKENS below which rows see no token before these
NEAR_DECAY = tl.constexpr(-20 * 0.6931471805599453)
TOKENS = 1024  # of a program; within chunks the largest power of two that divides them, at most this


# ---- pieces


@triton.jit
def log_gates(LOG_G, g_t, at, T):
    """Return (log_g of the tokens `at` in float64, 0 for -inf and from T on; True where it is -inf)."""
    log_g = tl.load(LOG_G + at.to(tl.int64) * g_t, mask=at < T, other=0.0).to(tl.float64)
    reset = log_g == float("-inf")
    return tl.where(reset, 0.0, log_g), reset


@triton.jit
def _ends(x, R: tl.constexpr):
    """Return, for each entry of x [N], which is monotonic, the first and the last of the R entries around it."""
    N: tl.constexpr = x.shape[0]
    x = tl.reshape(x, [N // R, R])
    at = tl.arange(0, R)[None, :]
    first = tl.sum(tl.where(at == 0, x, 0), 1)[:, None]
    last = tl.sum(tl.where(at == R - 1, x, 0), 1)[:, None]
    first, last = tl.broadcast_to(first, [N // R, R]), tl.broadcast_to(last, [N // R, R])
    return tl.reshape(first, [N]).to(x.dtype), tl.reshape(last, [N]).to(x.dtype)


@triton.jit
def _sum(X, begin, end, N: tl.constexpr):
    """Return the sum of X[begin:end] in float64."""
    total = tl.zeros([], tl.float64)
    for start in range(begin, end, N):
        at = start + tl.arange(0, N)
        total += tl.sum(tl.load(X + at, mask=at < end, other=0.0).to(tl.float64), 0)
    return total


@triton.jit
def gates_of_head(gates, T, bh):
    """Return the six arrays that `tile_gates` made, at a sequence and head of keys."""
    C, FIRST, KEY_DECAY, C_START, C_END, OPENED = gates
    C, FIRST, KEY_DECAY = at_head(C, T, bh), at_head(FIRST, T, bh), at_head(KEY_DECAY, T, bh)
    C_END, OPENED, C_START = at_head(C_END, T, bh, 32), at_head(OPENED, T, bh, 32), at_head(C_START, T, bh, 32)
    return C, FIRST, KEY_DECAY, C_START, C_END, OPENED


# ---- the quadratic form


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "HKV"])
def gates_kernel(
    LOG_G,
    C, FIRST, KEY_DECAY, C_START, C_END, OPENED,  # what is written
    g_b, g_t, g_h,  # strides of LOG_G [B, T, Hkv]
    T, HKV,
    R: tl.constexpr, POWER: tl.constexpr, BEFORE: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Write the six arrays for N tokens of one sequence and head.

    C_START, C_END and OPENED count from the first of the N tokens; `gates_before_kernel` adds the earlier tokens.
    """
    pieces = tl.cdiv(T, N)
    bh = tl.program_id(0) // pieces
    at = tl.program_id(0) % pieces * N + tl.arange(0, N)
    LOG_G += tl.cast(bh // HKV, tl.int64) * g_b + tl.cast(bh % HKV, tl.int64) * g_h
    C, FIRST, KEY_DECAY = at_head(C, T, bh), at_head(FIRST, T, bh), at_head(KEY_DECAY, T, bh)
    C_START, C_END, OPENED = at_head(C_START, T, bh, 32), at_head(C_END, T, bh, 32), at_head(OPENED, T, bh, 32)
    written = at < tl.cdiv(T, 128) * 128

    log_g, reset = log_gates(LOG_G, g_t, at, T)
    c = tl.associative_scan(log_g, 0, add)
    first = tl.associative_scan(tl.where(reset if BEFORE else reset | (at == 0), at, -1), 0, maximum)
    tl.store(C + at, (c - _ends(c, 128)[0]).to(tl.float32), written)
    tl.store(FIRST + at, tl.maximum(first - at // 128 * 128, -1).to(tl.int8), written)
    to_end = tl.exp(POWER * (_ends(c, R)[1] - c).to(tl.float32))
    of_lanes = at // R * R + at % 8 // 2 * (R // 4) + at % R // 8 * 2 + at % 2
    tl.store(KEY_DECAY + of_lanes, tl.where(_ends(first, R)[1] <= at, to_end, 0.0), written)
    tl.store(C_START + at // 32, c, written & (at % 32 == 0))
    tl.store(C_END + at // 32, c, written & (at % 32 == 31))
    tl.store(OPENED + at // 32, tl.maximum(first, 0), written & (at % 32 == 31))


@triton.jit(do_not_specialize=["T"])
def gates_before_kernel(C_START, C_END, OPENED, T, N: tl.constexpr):
    """Add to C_START, C_END and OPENED of one sequence and head the sums over the tokens before each N tokens."""
    bh = tl.program_id(0)
    C_START, C_END, OPENED = at_head(C_START, T, bh, 32), at_head(C_END, T, bh, 32), at_head(OPENED, T, bh, 32)
    blocks = tl.cdiv(T, 128) * 4
    before = tl.zeros([], tl.float64)
    opened = tl.zeros([], tl.int32)
    for start in range(0, blocks, 1024):
        at = start + tl.arange(0, 1024)
        c_start = tl.load(C_START + at, mask=at < blocks, other=0.0)
        c_end = tl.load(C_END + at, mask=at < blocks, other=0.0)
        total = tl.where(at % (N // 32) == N // 32 - 1, c_end, 0.0)
        c = before + tl.associative_scan(total, 0, add) - total
        tl.store(C_START + at, c + c_start, at < blocks)
        tl.store(C_END + at, c + c_end, at < blocks)
        first = tl.load(OPENED + at, mask=at < blocks, other=0)
        first = tl.maximum(tl.associative_scan(first, 0, maximum), opened)
        tl.store(OPENED + at, first, at < blocks)
        before += tl.sum(total, 0)
        opened = tl.max(first, 0)


@triton.jit(do_not_specialize=["T", "H", "HKV"])
def row_totals_kernel(ROW, TOTALS, T, H, HKV, N: tl.constexpr):
    """Write the sum over N tokens of ROW, of one sequence and head of keys, in float64."""
    pieces = tl.cdiv(T, N)
    bh, start = tl.program_id(0) // pieces, tl.program_id(0) % pieces * N
    ROW = at_head(ROW, T, tl.cast(bh // HKV, tl.int64) * H + bh % HKV * (H // HKV))
    tl.store(TOTALS + tl.program_id(0), _sum(ROW, start, tl.minimum(start + N, T), N))


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "H", "HKV"])
def dlog_g_kernel(
    ROW, LOG_G,  # row_i - col_i, in the first head of each group; LOG_G is read for its resets only
    TOTALS,  # by `row_totals_kernel`, or None if there are at most N tokens
    DLOG_G,  # what is written
    g_b, g_t, g_h,  # strides of LOG_G [B, T, Hkv]
    T, H, HKV,
    N: tl.constexpr,
):  # fmt: skip
    """Write dlog_g of N tokens of one sequence and head, sums in float64."""
    pieces = tl.cdiv(T, N)
    bh, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    b, hkv = tl.cast(bh // HKV, tl.int64), bh % HKV
    after = tl.zeros([], tl.float64)
    if TOTALS is not None:
        after = _sum(TOTALS + tl.cast(bh, tl.int64) * pieces, piece + 1, pieces, 128)
    at = piece * N + tl.arange(0, N)
    x = tl.load(at_head(ROW, T, b * H + hkv * (H // HKV)) + at, mask=at < T, other=0.0).to(tl.float64)
    LOG_G += b * g_b + tl.cast(hkv, tl.int64) * g_h
    log_g = tl.load(LOG_G + at.to(tl.int64) * g_t, mask=at < T, other=0.0)
    d = tl.where(log_g == float("-inf"), 0.0, after + tl.associative_scan(x, 0, add, reverse=True))
    tl.store(DLOG_G + b * T * HKV + hkv + at.to(tl.int64) * HKV, d.to(tl.float32), at < T)


# ---- the chunked form


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "TP", "CHUNK", "HKV"])
def chunk_gates_kernel(
    LOG_G,
    STARTS,  # int8: 1 for a chunk with which a packed sequence begins, or None
    INTO, OUT, WHOLE, NEAR,  # what is written; NEAR may be None
    g_b, g_t, g_h,  # strides of LOG_G [B, T, Hkv]
    T, TP, CHUNK, HKV,
    N: tl.constexpr,
):  # fmt: skip
    """Write INTO, OUT, WHOLE and NEAR of one chunk of one sequence and head.

    They are the decays from before the chunk to each token, from each token to the last one, and through the whole
    chunk, zero across a reset; and how many tokens before the chunk its first rows attend to.
    """
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    LOG_G += tl.cast(bh // HKV, tl.int64) * g_b + tl.cast(bh % HKV, tl.int64) * g_h
    INTO += tl.cast(bh, tl.int64) * TP
    OUT += tl.cast(bh, tl.int64) * TP
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP)
    near = 0
    if NEAR is not None:
        gate, zero = log_gates(LOG_G, g_t, tl.maximum(begin - NEAR_TOKENS, 0) + tl.arange(0, NEAR_TOKENS), T)
        forgotten = (tl.sum(gate, 0) < NEAR_DECAY) | (tl.sum(zero.to(tl.int32), 0) > 0)
        if STARTS is not None:
            forgotten = forgotten & (tl.load(STARTS + chunk) == 0)
        near = tl.where((chunk > 0) & forgotten, NEAR_TOKENS, 0)
        tl.store(NEAR + tl.program_id(0), near)
    total, resets = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for start in range(begin, end, N):
        at = start + tl.arange(0, N)
        log_g, reset = log_gates(LOG_G, g_t, at, T)
        reset = reset.to(tl.int32)
        into = tl.exp((total + tl.associative_scan(log_g, 0, add)).to(tl.float32))
        into = tl.where(resets + tl.associative_scan(reset, 0, add) == 0, into, 0.0)
        if NEAR is not None:
            into = tl.where(at - begin >= near, into, 0.0)
        tl.store(INTO + at, into, at < end)
        total += tl.sum(log_g, 0)
        resets += tl.sum(reset, 0)
    before, seen = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for start in range(begin, end, N):
        at = start + tl.arange(0, N)
        log_g, reset = log_gates(LOG_G, g_t, at, T)
        reset = reset.to(tl.int32)
        out = tl.exp((total - before - tl.associative_scan(log_g, 0, add)).to(tl.float32))
        tl.store(OUT + at, tl.where(seen + tl.associative_scan(reset, 0, add) == resets, out, 0.0), at < end)
        before += tl.sum(log_g, 0)
        seen += tl.sum(reset, 0)
    tl.store(WHOLE + tl.program_id(0), tl.where(resets == 0, tl.exp(total.to(tl.float32)), 0.0))


@triton.jit(do_not_specialize=["T", "CHUNK", "H", "HKV"])
def entering_kernel(
    INSIDE, NEAR,
    ENTERING,  # what is written, where NEAR is not 0
    T, CHUNK, H, HKV,
    N: tl.constexpr,
):  # fmt: skip
    """Write ENTERING of one sequence and head of keys: the sum of ds_ij s_ij / p over j in the chunk before that of i.

    The sum of row_i - col_i over a chunk is what crosses into it minus what crosses out of it.
    """
    bh, chunks = tl.program_id(0), tl.cdiv(T, CHUNK)
    INSIDE = at_head(INSIDE, T, tl.cast(bh // HKV, tl.int64) * H + bh % HKV * (H // HKV))
    NEAR += bh * chunks
    ENTERING += bh * chunks
    most = 0
    for first in range(0, chunks, 128):
        at = first + tl.arange(0, 128)
        most = tl.maximum(most, tl.max(tl.load(NEAR + at, mask=at < chunks, other=0), 0))
    if most > 0:
        entering = tl.zeros([], tl.float64)
        for chunk in range(1, chunks):
            if tl.load(NEAR + chunk) > 0:
                entering -= _sum(INSIDE, (chunk - 1) * CHUNK, chunk * CHUNK, N)
                tl.store(ENTERING + chunk, entering)
            else:
                entering = tl.zeros([], tl.float64)


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "TP", "CHUNK", "H", "HKV", "blocks", "blocks_z"])
def chunk_dlog_g_kernel(
    INSIDE,  # row_i - col_i inside chunks, in the first head of each group
    READ, GIVEN,  # x . dx / p of queries and of keys, with dx the gradient through states
    CARRIED, CARRIED_Z,  # [.., blocks], [.., blocks_z]: the gradient to WHOLE through S and through Z (None for p = 4)
    NEAR, ENTERING,  # or None
    LOG_G,  # read for its resets only
    DLOG_G,  # what is written
    g_b, g_t, g_h,  # strides of LOG_G [B, T, Hkv]
    T, TP, CHUNK, H, HKV, blocks, blocks_z,
    N: tl.constexpr,
):  # fmt: skip
    """Write dlog_g of one chunk of one sequence and head, from its end, N tokens at a time."""
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    b, hkv = tl.cast(bh // HKV, tl.int64), bh % HKV
    group = H // HKV
    first = b * H + hkv * group
    INSIDE = at_head(INSIDE, T, first)
    GIVEN += tl.cast(bh, tl.int64) * TP
    LOG_G += b * g_b + tl.cast(hkv, tl.int64) * g_h
    DLOG_G += b * T * HKV + hkv
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
    everything = _sum(CARRIED + tl.cast(tl.program_id(0), tl.int64) * blocks, 0, blocks, N)
    if CARRIED_Z is not None:
        everything += _sum(CARRIED_Z + tl.cast(tl.program_id(0), tl.int64) * blocks_z, 0, blocks_z, N)
    everything += _sum(GIVEN, begin, end, N)
    if NEAR is not None and end < T:
        if tl.load(NEAR + tl.program_id(0) + 1) > 0:
            everything += tl.load(ENTERING + tl.program_id(0) + 1)
    for back in range(begin, end, N):
        at = begin + (end - 1 - begin) // N * N - (back - begin) + tl.arange(0, N)
        x = tl.load(INSIDE + at, mask=at < end, other=0.0).to(tl.float64)
        x -= tl.load(GIVEN + at, mask=at < end, other=0.0)
        for i in range(group):
            x += tl.load(READ + (first + i) * TP + at, mask=at < end, other=0.0)
        log_g = tl.load(LOG_G + at.to(tl.int64) * g_t, mask=at < end, other=0.0)
        d = everything + tl.associative_scan(x, 0, add, reverse=True)
        tl.store(DLOG_G + at.to(tl.int64) * HKV, tl.where(log_g == float("-inf"), 0.0, d).to(tl.float32), at < end)
        everything += tl.sum(x, 0)


# ---- launchers


def tile_gates(log_g, R, power, before=False):
    """Launch gates_kernel; return (C, FIRST, KEY_DECAY, C_START, C_END, OPENED), see the table above, or None.

    log_g [B, T, Hkv] float32, any strides, or None; R: keys a tile; before: there is a state before the first token.
    Allocates 9.6 bytes per token and head of keys.
    """
    if log_g is None:
        return None
    B, T, HKV = log_g.shape
    tokens, blocks = (B * HKV, padded(T)), (B * HKV, padded(T) // 32)
    gates = [empty(log_g, *tokens), empty(log_g, *tokens, dtype=torch.int8), empty(log_g, *tokens)]
    gates += [empty(log_g, *blocks, dtype=dtype) for dtype in (torch.float64, torch.float64, torch.int32)]
    gates_kernel[(triton.cdiv(T, TOKENS) * B * HKV,)](
        log_g, *gates, *log_g.stride(), T, HKV, R=R, POWER=power, BEFORE=before, N=TOKENS
    )
    if T > TOKENS:
        gates_before_kernel[(B * HKV,)](*gates[3:], T, N=TOKENS)
    return tuple(gates)


def dlog_g(row, log_g, H):
    """Return dlog_g [B, T, Hkv] float32 of the quadratic form; row [B, H, T padded to 128]: by dkdv_kernel."""
    (B, T, HKV), result, totals = log_g.shape, empty(log_g, *log_g.shape), None
    programs = triton.cdiv(T, TOKENS) * B * HKV
    if T > TOKENS:
        totals = empty(log_g, programs, dtype=torch.float64)
        row_totals_kernel[(programs,)](row, totals, T, H, HKV, N=TOKENS)
    dlog_g_kernel[(programs,)](row, log_g, totals, result, *log_g.stride(), T, H, HKV, N=TOKENS)
    return result


def chunk_gates(log_g, s, near=False, first_chunks=None):
    """Launch chunk_gates_kernel; return (INTO, OUT, WHOLE, NEAR), see the table above, or four None without log_g.

    log_g [B, T, Hkv] float32, any strides, or None; s: `chunked.Sizes`; near: True if the quadratic kernels
    attend to the tokens that NEAR says. If not, NEAR is None and every row reads the state: single steps have states of
    their own before a chunk. first_chunks: as for `operators.chunked_attention`.
    """
    if log_g is None:
        return None, None, None, None
    into, out = (empty(log_g, s.B * s.HKV, s.TP) for _ in range(2))
    whole = empty(log_g, s.B * s.HKV, s.chunks)
    near, starts = empty(log_g, s.B * s.HKV, s.chunks, dtype=torch.int32) if near else None, None
    if first_chunks is not None:
        starts = empty(log_g, s.chunks + 1, dtype=torch.int8).zero_().index_fill_(0, first_chunks.long(), 1)
    chunk_gates_kernel[(s.B * s.HKV * s.chunks,)](
        log_g, starts, into, out, whole, near, *log_g.stride(), s.T, s.TP, s.chunk, s.HKV, N=_tokens(s.chunk)
    )
    return into, out, whole, near


def chunk_dlog_g(log_g, s, inside, near, read, given, carried, carried_z):
    """Return dlog_g [B, T, Hkv] float32 of the chunked form.

    inside [B, H, T padded to 128]: row of the quadratic form's backward; near: by `chunk_gates`; read, given
    [B * heads, TP]: see query_gradient.py; carried, carried_z [B * Hkv, chunks, ..]: see discumsum.py; carried_z is
    None for p = 4.
    """
    result = empty(log_g, *log_g.shape)
    entering = None if near is None else empty(log_g, *near.shape, dtype=torch.float64)
    if near is not None:
        entering_kernel[(s.B * s.HKV,)](inside, near, entering, s.T, s.chunk, s.H, s.HKV, N=_tokens(s.chunk))
    chunk_dlog_g_kernel[(s.B * s.HKV * s.chunks,)](
        inside, read, given, carried, carried_z, near, entering, log_g, result, *log_g.stride(),
        s.T, s.TP, s.chunk, s.H, s.HKV, carried.shape[2], 0 if carried_z is None else carried_z.shape[2],
        N=_tokens(s.chunk),
    )  # fmt: skip
    return result


def _tokens(chunk):
    """Return how many tokens of a chunk a kernel works on at a time: the largest power of two in it, at most TOKENS."""
    return min(TOKENS, chunk & -chunk)
