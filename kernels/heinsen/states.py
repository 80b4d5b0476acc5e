"""The states of Heinsen's log attention before each chunk of keys: the sums of each chunk, and what is carried on.

    m_d = max_j k_jd,   S_d = sum_j exp(k_jd - m_d) v_j,   z_d = sum_j exp(k_jd - m_d)      over the keys of a document

    tokens     |  chunk 0    |  chunk 1    |  chunk 2    |
    sums         own S, z      own S, z      own S, z          chunk_sums_kernel: one program a chunk and head
    carry      0 ----------> 1 ----------> 2 ----------> final carry_states_kernel: one program a feature and head

Backward, the same kernels make the states of queries after each chunk, from the other end. With e_id = q_id - L_i:

    N_d = max_i e_id,   dS_d = sum_i exp(e_id - N_d) dy_i,   dz_d = - sum_i exp(e_id - N_d) delta_i

Two states are added relative to the larger reference m' = max(m, m_2): exp(m - m') S + exp(m_2 - m') S_2.

Cost of a token and head: 1 exp a feature, 2 D^2 FLOP in a product, and 12 D^2 / CHUNK bytes of states, which are
written, read and written again. chunk_sums_kernel is limited by memory. carry_states_kernel walks from chunk to chunk
and is limited by latency, for which 8 chunks are loaded ahead.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import EMPTY, chunk_of, load_rows
from .tokens import document_of, documents_of_rows, entries_of_rows, load_exponents, product

BLOCK = tl.constexpr(32)  # tokens that are added at a time to a chunk's own sums
STAGES = tl.constexpr(8)  # chunks that are loaded ahead


class State(NamedTuple):
    """A state, or pointers to arrays of states: the reference m (or N) [.., D], the sums S [.., D, D] and z [.., D]."""

    m: Any
    S: Any
    z: Any


@triton.jit
def state_at(STATES, index, d, D: tl.constexpr):
    """Return pointers to features d [N] of entry `index` of arrays of states: m [N], S [N, D] and z [N]."""
    first = tl.cast(index, tl.int64) * D
    entry = d[:, None] * D + tl.arange(0, D)[None, :]
    return State(STATES.m + first + d, STATES.S + first * D + entry, STATES.z + first + d)


@triton.jit
def load_state(pointers):
    """Load the state (m, S, z) from pointers."""
    return tl.load(pointers.m), tl.load(pointers.S), tl.load(pointers.z)


@triton.jit
def store_state(pointers, m, S, z):
    """Store the state (m, S, z)."""
    tl.store(pointers.m, m)
    tl.store(pointers.S, S)
    tl.store(pointers.z, z)


@triton.jit
def keep_state(m, S, z, keep):
    """Return the state (m, S, z) if `keep`, or the empty one."""
    return tl.where(keep, m, EMPTY), tl.where(keep, S, 0.0), tl.where(keep, z, 0.0)


@triton.jit
def add_rows(m, S, z, x, y, inside, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr = False, delta=None):
    """Return the state (m, S, z) after the rows of x and y [N, D] that are `inside` [N].

    x are keys and y values, or x are exponents of queries and y is dy, with their delta [N], else None. TRANSPOSED: S
    is S^T.
    """
    new = tl.maximum(m, tl.max(tl.where(inside[:, None], x, EMPTY), 0))
    factor, w = tl.exp(m - new), tl.where(inside[:, None], tl.exp(x - new[None, :]), 0.0)
    y = tl.where(inside[:, None], y, 0.0)  # it may be NaN
    if TRANSPOSED:
        S = product(tl.trans(y), w, PRECISION, S * factor[None, :])
    else:
        S = product(tl.trans(w), y, PRECISION, S * factor[:, None])
    if delta is not None:
        w *= -delta[:, None]
    return new, S, z * factor + tl.sum(w, 0)


@triton.jit(do_not_specialize=["T", "H", "HKV", "CHUNK"])
def chunk_sums_kernel(X, Y, L, DELTA, DOCUMENTS, STATES, T, H, HKV, CHUNK, D: tl.constexpr, PRECISION: tl.constexpr):
    """Write the sums of one chunk to STATES: over its keys, or over the queries of all heads of a group.

    X and Y are Rows of keys and values, L and DELTA None; or of queries and dy, with L and DELTA. H is the
    number of heads of X. Only the document of the chunk's last token is summed (of queries: of its first token).
    """
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    b, hkv, group = bh // HKV, bh % HKV, H // HKV
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
    document = document_of(DOCUMENTS, b, end - 1 if L is None else begin, T)
    m = tl.full([D], EMPTY, tl.float32)
    for h in range(hkv * group, hkv * group + group):
        for start in range(begin, end, BLOCK):
            x = load_exponents(X, L, b, h, start, T, H, BLOCK, D)
            inside = documents_of_rows(DOCUMENTS, b, start, T, BLOCK) == document
            m = tl.maximum(m, tl.max(tl.where(inside[:, None], x, EMPTY), 0))
    sums, z = tl.zeros([D, D], tl.float32), tl.zeros([D], tl.float32)
    for h in range(hkv * group, hkv * group + group):
        for start in range(begin, end, BLOCK):
            x = load_exponents(X, L, b, h, start, T, H, BLOCK, D)
            y = load_rows(Y.data, Y.strides, b, start, h, T, BLOCK, D)
            inside = documents_of_rows(DOCUMENTS, b, start, T, BLOCK) == document
            w = tl.where(inside[:, None], tl.exp(x - m[None, :]), 0.0)
            sums = product(tl.trans(w), tl.where(inside[:, None], y, 0.0), PRECISION, sums)
            if DELTA is not None:
                w *= -tl.load(entries_of_rows(DELTA, b * H + h, start, T, BLOCK), mask=inside, other=0.0)[:, None]
            z += tl.sum(w, 0)
    store_state(state_at(STATES, tl.program_id(0), tl.arange(0, D), D), m, sums, z)


@triton.jit(do_not_specialize=["T", "HKV", "CHUNK"])
def carry_states_kernel(STATES, FIRST, LAST, DOCUMENTS, T, HKV, CHUNK, D: tl.constexpr, REVERSE: tl.constexpr):
    """Replace the sums over each chunk by the state before it (with REVERSE: after it), for one feature of one head.

    FIRST is the state before all tokens (with REVERSE: after all), LAST is written at the other end; both may be None.
    Entries have one dimension more than they need, because only loads of blocks are made ahead.
    """
    chunks = tl.cdiv(T, CHUNK)
    bh = tl.program_id(0) // D
    d = tl.program_id(0) % D + tl.arange(0, 1)
    b = bh // HKV
    m, z = tl.full([1], EMPTY, tl.float32), tl.zeros([1], tl.float32)
    s = tl.zeros([1, D], tl.float32)
    if FIRST is not None:
        m, s, z = load_state(state_at(FIRST, bh, d, D))
    document = document_of(DOCUMENTS, b, T - 1 if REVERSE else -1, T)
    for step in tl.range(chunks, num_stages=STAGES):
        chunk = chunks - 1 - step if REVERSE else step
        at_chunk = state_at(STATES, tl.cast(bh, tl.int64) * chunks + chunk, d, D)
        m_chunk, s_chunk, z_chunk = load_state(at_chunk)
        store_state(at_chunk, m, s, z)
        previous = document
        document = document_of(DOCUMENTS, b, chunk * CHUNK if REVERSE else tl.minimum(chunk * CHUNK + CHUNK, T) - 1, T)
        m, s, z = keep_state(m, s, z, previous == document)
        new = tl.maximum(m, m_chunk)
        old, added = tl.exp(m - new), tl.exp(m_chunk - new)
        s = s * old[:, None] + s_chunk * added[:, None]
        z = z * old + z_chunk * added
        m = new
    if LAST is not None:
        if REVERSE:  # tokens of document 0 alone see the state before all
            m, s, z = keep_state(m, s, z, document == 0)
        store_state(state_at(LAST, bh, d, D), m, s, z)
