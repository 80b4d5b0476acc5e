"""Decays of the chunked form, computed from log_g, and the gradient to log_g.

    c_i = log_g_1 + .. + log_g_i in float64, where -inf (a reset: the first token of a document) counts as 0
    decay_ij = exp(c_i - c_j), and 0 across a reset: only differences of sums become float32, and only small ones

There are the decays from the chunk's beginning to a token (INTO), from a token to the chunk's end (OUT) and through the
whole chunk (WHOLE), and

    dlog_g_m = sum over i >= m of (row_i - col_i + what query i read from the state)
             + sum over j < m of what key j gave to the state + what WHOLE carried from state to state + ENTERING

with i and j in the chunk of m, and 0 at a reset; row_i, col_j sum ds_ij s_ij / p over j, over i. Where gates forget
within a few tokens, a chunk's first rows see few keys, all of the chunk before. If a row is nearly orthogonal to these,
its scores are below the rounding errors of the features that states are made of. So if the decay through the 128 tokens
before a chunk is below 2^-20, or there is a reset among them, NEAR is 128: the chunk's first 128 rows attend to these
tokens as they do to those of their own chunk, and read no state (INTO is 0). ENTERING, here that of the next chunk,
counts the pairs of keys in this chunk with queries in that.

    name         shape                                  dtype      what
    INTO, OUT    [B * Hkv, TP]                          float32    TP: T padded to 256
    WHOLE        [B * Hkv, chunks]                      float32
    NEAR         [B * Hkv, chunks]                      int32      tokens before the chunk that its first 128 rows
                                                                   attend to: 0 or 128
    ENTERING     [B * Hkv, chunks]                      float64    the sum of ds_ij s_ij / p over keys j before and
                                                                   queries i in the chunk, where NEAR is 128

Cost: a program has one chunk of one head, and 8 bytes a token and head of keys are written. Latency is the limit
(0.013 ms for 65,536 tokens).
"""

import torch
import triton
import triton.language as tl

from ..common import add, at_head, chunk_of, empty, log_gates, sum_between

NEAR_TOKENS = tl.constexpr(128)
# natural logarithm of 2^-20, the decay through NEAR_TOKENS below which rows see no token before these
NEAR_DECAY = tl.constexpr(-20 * 0.6931471805599453)
TOKENS = 1024  # that a kernel works on at a time: the largest power of two that divides a chunk, at most this


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
                entering -= sum_between(INSIDE, (chunk - 1) * CHUNK, chunk * CHUNK, N)
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
    everything = sum_between(CARRIED + tl.cast(tl.program_id(0), tl.int64) * blocks, 0, blocks, N)
    if CARRIED_Z is not None:
        everything += sum_between(CARRIED_Z + tl.cast(tl.program_id(0), tl.int64) * blocks_z, 0, blocks_z, N)
    everything += sum_between(GIVEN, begin, end, N)
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
