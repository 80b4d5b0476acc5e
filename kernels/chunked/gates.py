"""Decays of the chunked form, computed from log_g, and the gradient to log_g.

    c_i = log_g_1 + .. + log_g_i in float64, where -inf (a reset: the first token of a document) counts as 0
    decay_ij = exp(c_i - c_j), and 0 across a reset: only differences of sums become float32, and only small ones

    name              shape                dtype      what
    DECAY_FROM_START  [B * Hkv, TP]        float32    decay from the state before the chunk to each token; TP: T padded
                                                      to 256
    DECAY_TO_END      the same             float32    decay from each token to the last of the chunk
    CHUNK_DECAY       [B * Hkv, chunks]    float32    decay through the whole chunk
    OVERLAP           the same             int32      tokens before the chunk that its first 128 rows attend to: 0 or
                                                      128
    ENTERING          the same             float64    sum of ds_ij s_ij / p over queries i in the chunk and keys j
                                                      before it, where OVERLAP is 128

The gradient to log_g, 0 at a reset, is

    dlog_g_m = sum over i >= m of (row_i - col_i + query_term_i) + sum over j < m of key_term_j
             + dlog_decay + ENTERING of the next chunk

with i and j in the chunk of m. row_i and col_j are the sums of ds_ij s_ij / p over j and over i. query_term is
q . dq / p and key_term is k . dk / p, with the parts of dq and dk that come through states. dlog_decay is the gradient
to the logarithm of CHUNK_DECAY.

Where gates forget within a few tokens, a chunk's first rows see few keys, and these lie in the previous chunk. The
scores of a row nearly orthogonal to them are below the rounding errors of features. So if the decay through the 128
tokens before a chunk is below 2^-20, or there is a reset among them, OVERLAP is 128: the chunk's first 128 rows attend
to these tokens directly and read no state (DECAY_FROM_START is 0).

Cost: a program has one chunk of one head, and 8 bytes a token and head of keys are written. Latency is the limit
(0.013 ms for 65,536 tokens).
"""

import torch
import triton
import triton.language as tl

from ..common import add, at_head, chunk_of, empty, log_gates, sum_between
from .sizes import at_index, padded_tokens

OVERLAP_TOKENS = tl.constexpr(128)
# natural logarithm of 2^-20: rows see no token before the last OVERLAP_TOKENS if the decay through these is smaller
OVERLAP_DECAY = tl.constexpr(-20 * 0.6931471805599453)
TOKENS = 1024  # the most tokens of a chunk that a kernel works on at a time, see `_block`


@triton.jit
def _load_gates(LOG_G, g_t, token, T):
    """Return (log_g of the tokens in float64, 0 for a reset; 1 for a reset, else 0)."""
    log_g, reset = log_gates(LOG_G, g_t, token, T)
    return log_g, reset.to(tl.int32)


@triton.jit
def _find_overlap(LOG_G, g_t, begin, chunk, T):
    """Return OVERLAP of a chunk: OVERLAP_TOKENS if the gates of the tokens before it forget, else 0."""
    log_g, reset = _load_gates(LOG_G, g_t, tl.maximum(begin - OVERLAP_TOKENS, 0) + tl.arange(0, OVERLAP_TOKENS), T)
    forgotten = (tl.sum(log_g, 0) < OVERLAP_DECAY) | (tl.sum(reset, 0) > 0)
    return tl.where((chunk > 0) & forgotten, OVERLAP_TOKENS, 0)


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "CHUNK", "HKV"])
def chunk_gates_kernel(
    LOG_G,
    DECAY_FROM_START,  # this and the next three are the results
    DECAY_TO_END,
    CHUNK_DECAY,
    OVERLAP,
    g_b,  # the strides of LOG_G [B, T, Hkv]; in a tuple Triton would specialise them and compile again for a new T
    g_t,
    g_h,
    T,
    CHUNK,
    HKV,
    N: tl.constexpr,
):
    """Write DECAY_FROM_START, DECAY_TO_END, CHUNK_DECAY and OVERLAP of one chunk of one sequence and head."""
    TP = padded_tokens(T)
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    LOG_G += tl.cast(bh // HKV, tl.int64) * g_b + tl.cast(bh % HKV, tl.int64) * g_h
    DECAY_FROM_START, DECAY_TO_END = at_index(DECAY_FROM_START, bh, TP), at_index(DECAY_TO_END, bh, TP)
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP)
    overlap = _find_overlap(LOG_G, g_t, begin, chunk, T)
    tl.store(OVERLAP + tl.program_id(0), overlap)
    total, resets = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for start in range(begin, end, N):
        token = start + tl.arange(0, N)
        log_g, reset = _load_gates(LOG_G, g_t, token, T)
        decay_from_start = tl.exp((total + tl.associative_scan(log_g, 0, add)).to(tl.float32))
        decay_from_start = tl.where(resets + tl.associative_scan(reset, 0, add) == 0, decay_from_start, 0.0)
        tl.store(DECAY_FROM_START + token, tl.where(token - begin >= overlap, decay_from_start, 0.0), token < end)
        total += tl.sum(log_g, 0)
        resets += tl.sum(reset, 0)
    total_so_far, resets_so_far = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for start in range(begin, end, N):
        token = start + tl.arange(0, N)
        log_g, reset = _load_gates(LOG_G, g_t, token, T)
        decay_to_end = tl.exp((total - total_so_far - tl.associative_scan(log_g, 0, add)).to(tl.float32))
        decay_to_end = tl.where(resets_so_far + tl.associative_scan(reset, 0, add) == resets, decay_to_end, 0.0)
        tl.store(DECAY_TO_END + token, decay_to_end, token < end)
        total_so_far += tl.sum(log_g, 0)
        resets_so_far += tl.sum(reset, 0)
    tl.store(CHUNK_DECAY + tl.program_id(0), tl.where(resets == 0, tl.exp(total.to(tl.float32)), 0.0))


@triton.jit(do_not_specialize=["T", "CHUNK", "H", "HKV"])
def entering_kernel(ROW, OVERLAP, ENTERING, T, CHUNK, H, HKV, N: tl.constexpr):
    """Write ENTERING of one sequence and head of keys, where OVERLAP is not 0.

    The sum of row_i - col_i over a chunk is its own ENTERING minus the next chunk's, so ENTERING is a running sum.
    """
    bh, chunks = tl.program_id(0), tl.cdiv(T, CHUNK)
    ROW = at_head(ROW, T, tl.cast(bh // HKV, tl.int64) * H + bh % HKV * (H // HKV))
    OVERLAP += bh * chunks
    ENTERING += bh * chunks
    largest = 0
    for first in range(0, chunks, 128):
        chunk = first + tl.arange(0, 128)
        largest = tl.maximum(largest, tl.max(tl.load(OVERLAP + chunk, mask=chunk < chunks, other=0), 0))
    if largest > 0:
        entering = tl.zeros([], tl.float64)
        for i in range(1, chunks):
            if tl.load(OVERLAP + i) > 0:
                entering -= sum_between(ROW, (i - 1) * CHUNK, i * CHUNK, N)
                tl.store(ENTERING + i, entering)
            else:
                entering = tl.zeros([], tl.float64)


@triton.jit
def _sum_of_blocks(DLOG_DECAY, blocks, N: tl.constexpr):
    """Return the sum over the blocks of DLOG_DECAY [.., blocks] of this program, 0 if it is None."""
    if DLOG_DECAY is None:
        return tl.zeros([], tl.float64)
    else:
        return sum_between(at_index(DLOG_DECAY, tl.program_id(0), blocks), 0, blocks, N)


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "CHUNK", "H", "HKV", "blocks", "blocks_z"])
def chunk_dlog_g_kernel(
    ROW,  # row_i - col_i of the quadratic form, in the first head of each group
    QUERY_TERMS,  # q . dq / p, with dq the gradient through states
    KEY_TERMS,  # the same for keys
    DLOG_DECAY,  # [.., blocks]: the gradient to log CHUNK_DECAY through S
    DLOG_DECAY_Z,  # [.., blocks_z]: the same through Z, None for p = 4
    OVERLAP,
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
    ROW = at_head(ROW, T, head)
    KEY_TERMS = at_index(KEY_TERMS, bh, TP)
    LOG_G += b * g_b + tl.cast(hkv, tl.int64) * g_h
    DLOG_G += b * T * HKV + hkv
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
    total = _sum_of_blocks(DLOG_DECAY, blocks, N)
    total += _sum_of_blocks(DLOG_DECAY_Z, blocks_z, N)
    total += sum_between(KEY_TERMS, begin, end, N)
    if end < T:
        if tl.load(OVERLAP + tl.program_id(0) + 1) > 0:
            total += tl.load(ENTERING + tl.program_id(0) + 1)
    for back in range(begin, end, N):
        token = begin + (end - 1 - begin) // N * N - (back - begin) + tl.arange(0, N)
        x = tl.load(ROW + token, mask=token < end, other=0.0).to(tl.float64)
        x -= tl.load(KEY_TERMS + token, mask=token < end, other=0.0)
        for i in range(group):
            x += tl.load(QUERY_TERMS + (head + i) * TP + token, mask=token < end, other=0.0)
        log_g = tl.load(LOG_G + token.to(tl.int64) * g_t, mask=token < end, other=0.0)
        d = tl.where(log_g == float("-inf"), 0.0, total + tl.associative_scan(x, 0, add, reverse=True))
        tl.store(DLOG_G + token.to(tl.int64) * HKV, d.to(tl.float32), token < end)
        total += tl.sum(x, 0)


# ---- launchers


def chunk_gates(log_g, s):
    """Return (DECAY_FROM_START, DECAY_TO_END, CHUNK_DECAY, OVERLAP) of the table above, or four None without log_g.

    log_g [B, T, Hkv] float32, any strides, or None; s: `Sizes`.
    """
    if log_g is None:
        return None, None, None, None
    heads = s.B * s.HKV
    decay_from_start, decay_to_end, chunk_decay = (
        empty(log_g, heads, s.TP),
        empty(log_g, heads, s.TP),
        empty(log_g, heads, s.chunks),
    )
    overlap = empty(log_g, heads, s.chunks, dtype=torch.int32)
    chunk_gates_kernel[(heads * s.chunks,)](
        log_g, decay_from_start, decay_to_end, chunk_decay, overlap, *log_g.stride(),
        s.T, s.chunk, s.HKV, N=_block(s.chunk),
    )  # fmt: skip
    return decay_from_start, decay_to_end, chunk_decay, overlap


def chunk_dlog_g(log_g, s, row, overlap, query_terms, key_terms, dlog_decay, dlog_decay_z):
    """Return dlog_g [B, T, Hkv] float32 of the chunked form.

    row [B, H, T padded to 128] comes from the quadratic form's backward pass, overlap from `chunk_gates`, query_terms
    and key_terms [B * heads, TP] from `query_gradient`, dlog_decay and dlog_decay_z [B * Hkv, chunks, ..] from
    `carry_states`. dlog_decay_z is None for p = 4.
    """
    dlog_g, entering, N = empty(log_g, *log_g.shape), empty(log_g, *overlap.shape, dtype=torch.float64), _block(s.chunk)
    entering_kernel[(s.B * s.HKV,)](row, overlap, entering, s.T, s.chunk, s.H, s.HKV, N=N)
    blocks, blocks_z = (0 if x is None else x.shape[2] for x in (dlog_decay, dlog_decay_z))
    chunk_dlog_g_kernel[(s.B * s.HKV * s.chunks,)](
        row, query_terms, key_terms, dlog_decay, dlog_decay_z, overlap, entering, log_g, dlog_g, *log_g.stride(),
        s.T, s.chunk, s.H, s.HKV, blocks, blocks_z, N=N,
    )  # fmt: skip
    return dlog_g


def _block(chunk):
    """Return how many tokens of a chunk a kernel works on at a time: its largest factor of two, at most TOKENS."""
    return min(TOKENS, chunk & -chunk)
