"""Heinsen's log attention, forward: y and L of a chunk, from the state before it.

    c_i = max over d of q_id + (largest k_jd that row i sees)       so exponents are relative to the row's own maximum
    num_i = exp(q_i + m - c_i) @ S + sum_j w_ij v_j,   den_i = exp(q_i + m - c_i) . z + sum_j w_ij
    y_i = num_i / den_i,   L_i = c_i + log den_i                    w_ij = sum_d exp(q_id + k_jd - c_i)

    chunk      | 16 | 16 | 16 | ..  blocks of SUB tokens, one after the other; one program a chunk and head
    block      read the state before it: one matrix product
               add its own pairs, key by key: no bound on how fast keys grow
               add its keys to the state

Cost of a token and head: 16 D exp inside blocks and 2 D for states, 4 D^2 FLOP in products. The limit is exp, and the
latency of the walk from block to block.
"""

import triton
import triton.language as tl

from ..common import EMPTY, chunk_of, maximum, store_rows
from .states import add_rows, keep_state, load_state, state_at
from .tokens import SUB, UNROLL, document_of, documents_of_rows, entries_of_rows, load_block, product, row_of


@triton.jit
def maximum_of_document(document_a, a, document_b, b):
    """Return (document_b, the larger of a and b, or b if a is of another document), for tl.associative_scan."""
    return document_b, tl.where(document_a == document_b, tl.maximum(a, b), b)


@triton.jit
def row_reference(q, k, m, documents, reads, SEVERAL: tl.constexpr):
    """Return c_i, the largest q_id + k_jd of the keys that each row of a block sees, [SUB], in the state and the block.

    q, k [SUB, D] float32: the block's rows; m [D]: the state's reference; documents [SUB]; reads [SUB]: the rows that
    read the state; SEVERAL: whether there may be several documents.
    """
    if SEVERAL:
        documents = tl.broadcast_to(documents[:, None], k.shape)
        _, largest = tl.associative_scan((documents, k), 0, maximum_of_document)
        largest = tl.maximum(largest, tl.where(reads[:, None], m[None, :], EMPTY))
    else:
        largest = tl.maximum(tl.associative_scan(k, 0, maximum), m[None, :])
    return tl.max(q + largest, 1)


@triton.jit(do_not_specialize=["T", "H", "HKV", "CHUNK"])
def forward_kernel(Q, K, V, DOCUMENTS, STATES, Y, L, T, H, HKV, CHUNK, D: tl.constexpr, PRECISION: tl.constexpr):
    """Write Y [B, T, H, D] and L [B, H, T] of one chunk of one head, from STATES before each chunk."""
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    b, h = bh // H, bh % H
    hkv = h // (H // HKV)
    row = tl.arange(0, SUB)
    m, s, z = load_state(state_at(STATES, (b * HKV + hkv) * tl.cdiv(T, CHUNK) + chunk, tl.arange(0, D), D))
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T), SUB):
        q = load_block(Q, b, start, h, T, D)
        k = load_block(K, b, start, hkv, T, D)
        documents = documents_of_rows(DOCUMENTS, b, start, T, SUB)
        previous = document_of(DOCUMENTS, b, start - 1, T)
        reads = documents == previous
        c = row_reference(q, k, m, documents, reads, DOCUMENTS is not None)
        e = q - c[:, None]
        a = tl.exp(e + m[None, :])
        num = tl.where(reads[:, None], product(a, s, PRECISION), 0.0)
        den = tl.where(reads, tl.sum(a * z[None, :], 1), 0.0)
        k_row, v_row = row_of(K, b, start, hkv, D), row_of(V, b, start, hkv, D)
        for j in tl.range(0, tl.minimum(SUB, T - start), loop_unroll_factor=UNROLL):
            w = tl.sum(tl.exp(e + tl.load(k_row + j * K.strides[1]).to(tl.float32)), 1)
            v = tl.load(v_row + j * V.strides[1]).to(tl.float32)
            sees = row >= j
            if DOCUMENTS is not None:
                sees &= documents == document_of(DOCUMENTS, b, start + j, T)
            num = tl.where(sees[:, None], num + w[:, None] * v, num)
            den = tl.where(sees, den + w, den)
        store_rows(Y, num / den[:, None], b, start, h, T, H)
        tl.store(entries_of_rows(L, bh, start, T, SUB), c + tl.log(den), start + row < T)
        v = load_block(V, b, start, hkv, T, D)
        last = document_of(DOCUMENTS, b, tl.minimum(start + SUB, T) - 1, T)
        m, s, z = keep_state(m, s, z, previous == last)
        m, s, z = add_rows(m, s, z, k, v, documents == last, PRECISION)
