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
from .sizes import at_index, padded_tokens

NEAR_TOKENS = tl.constexpr(128)
# natural logarithm of 2^-20, the decay through NEAR_TOKENS below which rows see no token before these
NEAR_DECAY = tl.constexpr(-20 * 0.6931471805599453)
TOKENS = 1024  # that a kernel works on at a time: the largest power of two that divides a chunk, at most this


@triton.jit
def _load_gates(LOG_G, g_t, token, T):
    """Return (log_g of the tokens in float64, 0 for a reset; 1 for a reset, else 0)."""
    log_g, reset = log_gates(LOG_G, g_t, token, T)
    return log_g, reset.to(tl.int32)


@triton.jit
def _tokens_near(LOG_G, g_t, STARTS, begin, chunk, T):
    """Return how many tokens before a chunk its first rows attend to, NEAR_TOKENS if these forget, or 0."""
    log_g, reset = _load_gates(LOG_G, g_t, tl.maximum(begin - NEAR_TOKENS, 0) + tl.arange(0, NEAR_TOKENS), T)
    forgotten = (tl.sum(log_g, 0) < NEAR_DECAY) | (tl.sum(reset, 0) > 0)
    if STARTS is not None:
        forgotten = forgotten & (tl.load(STARTS + chunk) == 0)
    return tl.where((chunk > 0) & forgotten, NEAR_TOKENS, 0)


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "CHUNK", "HKV"])
def chunk_gates_kernel(
    LOG_G,
    STARTS,  # int8: 1 for a chunk with which a packed sequence begins, or None
    INTO,  # this and the next three are written
    OUT,
    WHOLE,
    NEAR,
    g_b,  # the strides of LOG_G [B, T, Hkv]; in a tuple Triton would specialise them, and compile for a new T
    g_t,
    g_h,
    T,
    CHUNK,
    HKV,
    N: tl.constexpr,
):
    """Write INTO, OUT, WHOLE and NEAR of one chunk of one sequence and head.

    They are the decays from before the chunk to each token, from each token to the last one, and through the whole
    chunk, zero across a reset; and how many tokens before the chunk its first rows attend to.
    """
    TP = padded_tokens(T)
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    LOG_G += tl.cast(bh // HKV, tl.int64) * g_b + tl.cast(bh % HKV, tl.int64) * g_h
    INTO, OUT = at_index(INTO, bh, TP), at_index(OUT, bh, TP)
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP)
    near = _tokens_near(LOG_G, g_t, STARTS, begin, chunk, T)
    tl.store(NEAR + tl.program_id(0), near)
    total, resets = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for start in range(begin, end, N):
        token = start + tl.arange(0, N)
        log_g, reset = _load_gates(LOG_G, g_t, token, T)
        into = tl.exp((total + tl.associative_scan(log_g, 0, add)).to(tl.float32))
        into = tl.where(resets + tl.associative_scan(reset, 0, add) == 0, into, 0.0)
        tl.store(INTO + token, tl.where(token - begin >= near, into, 0.0), token < end)
        total += tl.sum(log_g, 0)
        resets += tl.sum(reset, 0)
    total_so_far, resets_so_far = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for start in range(begin, end, N):
        token = start + tl.arange(0, N)
        log_g, reset = _load_gates(LOG_G, g_t, token, T)
        out = tl.exp((total - total_so_far - tl.associative_scan(log_g, 0, add)).to(tl.float32))
        out = tl.where(resets_so_far + tl.associative_scan(reset, 0, add) == resets, out, 0.0)
        tl.store(OUT + token, out, token < end)
        total_so_far += tl.sum(log_g, 0)
        resets_so_far += tl.sum(reset, 0)
    tl.store(WHOLE + tl.program_id(0), tl.where(resets == 0, tl.exp(total.to(tl.float32)), 0.0))


@triton.jit(do_not_specialize=["T", "CHUNK", "H", "HKV"])
def entering_kernel(INSIDE, NEAR, ENTERING, T, CHUNK, H, HKV, N: tl.constexpr):
    """Write ENTERING of one sequence and head of keys, where NEAR is not 0.

    It is the sum of ds_ij s_ij / p over j in the chunk before that of i. The sum of row_i - col_i over a chunk is what
    crosses into it minus what crosses out of it.
    """
    bh, chunks = tl.program_id(0), tl.cdiv(T, CHUNK)
    INSIDE = at_head(INSIDE, T, tl.cast(bh // HKV, tl.int64) * H + bh % HKV * (H // HKV))
    NEAR += bh * chunks
    ENTERING += bh * chunks
    largest = 0
    for first in range(0, chunks, 128):
        chunk = first + tl.arange(0, 128)
        largest = tl.maximum(largest, tl.max(tl.load(NEAR + chunk, mask=chunk < chunks, other=0), 0))
    if largest > 0:
        entering = tl.zeros([], tl.float64)
        for i in range(1, chunks):
            if tl.load(NEAR + i) > 0:
                entering -= sum_between(INSIDE, (i - 1) * CHUNK, i * CHUNK, N)
                tl.store(ENTERING + i, entering)
            else:
                entering = tl.zeros([], tl.float64)


@triton.jit
def _sum_of_blocks(CARRIED, blocks, N: tl.constexpr):
    """Return the sum over the blocks of CARRIED [.., blocks] of this program, 0 without CARRIED."""
    if CARRIED is None:
        return tl.zeros([], tl.float64)
    else:
        return sum_between(at_index(CARRIED, tl.program_id(0), blocks), 0, blocks, N)


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "CHUNK", "H", "HKV", "blocks", "blocks_z"])
def chunk_dlog_g_kernel(
    INSIDE,  # row_i - col_i inside chunks, in the first head of each group
    READ,  # x . dx / p of queries, with dx the gradient through states
    GIVEN,  # the same of keys
    CARRIED,  # [.., blocks]: the gradient to WHOLE through S
    CARRIED_Z,  # [.., blocks_z]: the gradient to WHOLE through Z, None for p = 4
    NEAR,
    ENTERING,
    LOG_G,  # read for its resets only
    DLOG_G,  # what is written
    g_b,  # the strides of LOG_G [B, T, Hkv]
    g_t,
    g_h,
    T,
    CHUNK,
    H,
    HKV,
    blocks,
    blocks_z,
    N: tl.constexpr,
):
    """Write dlog_g of one chunk of one sequence and head, from its end, N tokens at a time."""
    TP = padded_tokens(T)
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    b, hkv = tl.cast(bh // HKV, tl.int64), bh % HKV
    group = H // HKV
    head = b * H + hkv * group  # the first of the group
    INSIDE = at_head(INSIDE, T, head)
    GIVEN = at_index(GIVEN, bh, TP)
    LOG_G += b * g_b + tl.cast(hkv, tl.int64) * g_h
    DLOG_G += b * T * HKV + hkv
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
    total = _sum_of_blocks(CARRIED, blocks, N)
    total += _sum_of_blocks(CARRIED_Z, blocks_z, N)
    total += sum_between(GIVEN, begin, end, N)
    if end < T:
        if tl.load(NEAR + tl.program_id(0) + 1) > 0:
            total += tl.load(ENTERING + tl.program_id(0) + 1)
    for back in range(begin, end, N):
        token = begin + (end - 1 - begin) // N * N - (back - begin) + tl.arange(0, N)
        x = tl.load(INSIDE + token, mask=token < end, other=0.0).to(tl.float64)
        x -= tl.load(GIVEN + token, mask=token < end, other=0.0)
        for i in range(group):
            x += tl.load(READ + (head + i) * TP + token, mask=token < end, other=0.0)
        log_g = tl.load(LOG_G + token.to(tl.int64) * g_t, mask=token < end, other=0.0)
        d = tl.where(log_g == float("-inf"), 0.0, total + tl.associative_scan(x, 0, add, reverse=True))
        tl.store(DLOG_G + token.to(tl.int64) * HKV, d.to(tl.float32), token < end)
        total += tl.sum(x, 0)


# ---- launchers


def chunk_gates(log_g, s, first_chunks=None):
    """Return (INTO, OUT, WHOLE, NEAR), see the table above, or four None without log_g.

    log_g [B, T, Hkv] float32, any strides, or None; s: `Sizes`; first_chunks: as for `operators.chunked_attention`.
    """
    if log_g is None:
        return None, None, None, None
    heads, starts = s.B * s.HKV, None
    into, out, whole = empty(log_g, heads, s.TP), empty(log_g, heads, s.TP), empty(log_g, heads, s.chunks)
    near = empty(log_g, heads, s.chunks, dtype=torch.int32)
    if first_chunks is not None:
        starts = empty(log_g, s.chunks + 1, dtype=torch.int8).zero_().index_fill_(0, first_chunks.long(), 1)
    chunk_gates_kernel[(heads * s.chunks,)](
        log_g, starts, into, out, whole, near, *log_g.stride(), s.T, s.chunk, s.HKV, N=_tokens(s.chunk)
    )
    return into, out, whole, near


def chunk_dlog_g(log_g, s, inside, near, read, given, carried, carried_z):
    """Return dlog_g [B, T, Hkv] float32 of the chunked form.

    inside [B, H, T padded to 128]: row of the quadratic form's backward; near: by `chunk_gates`; read, given
    [B * heads, TP]: by `query_gradient`; carried, carried_z [B * Hkv, chunks, ..]: by `carry_states`; carried_z is None
    for p = 4.
    """
    dlog_g, entering, N = empty(log_g, *log_g.shape), empty(log_g, *near.shape, dtype=torch.float64), _tokens(s.chunk)
    entering_kernel[(s.B * s.HKV,)](inside, near, entering, s.T, s.chunk, s.H, s.HKV, N=N)
    blocks, blocks_z = (0 if x is None else x.shape[2] for x in (carried, carried_z))
    chunk_dlog_g_kernel[(s.B * s.HKV * s.chunks,)](
        inside, read, given, carried, carried_z, near, entering, log_g, dlog_g, *log_g.stride(),
        s.T, s.chunk, s.H, s.HKV, blocks, blocks_z, N=N,
    )  # fmt: skip
    return dlog_g


def _tokens(chunk):
    """Return how many tokens of a chunk a kernel works on at a time: the largest power of two in it, at most TOKENS."""
    return min(TOKENS, chunk & -chunk)
