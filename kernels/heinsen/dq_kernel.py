"""Heinsen's log attention, backward: dq and delta of a chunk, from the state before it.

With e_id = q_id - L_i every exp(e_id + k_jd) is a share of its row, at most 1:

    dP_ij = dy_i . v_j,   A_id = sum_j exp(e_id + k_jd) dP_ij,   P_id = sum_j exp(e_id + k_jd)
    delta_i = sum_d A_id / sum_d P_id,   dq_id = A_id - delta_i P_id

    chunk      | 16 | 16 | 16 | ..  the walk of forward_kernel, with the state transposed: A reads dy @ S^T

delta is made of the sums that dq is made of, so that dq sums to zero over d.

Cost of a token and head: 16 D exp inside blocks and 2 D for states, 4 D^2 FLOP in products. The limit is exp, and
registers: A and P have D entries a row.
"""

import triton
import triton.language as tl

from ..common import chunk_of, store_rows
from .states import State, add_rows, keep_state, load_state, state_at
from .tokens import (
    SUB,
    UNROLL,
    document_of,
    documents_of_rows,
    entries_of_rows,
    load_block,
    load_exponents,
    product,
    row_of,
)


@triton.jit(do_not_specialize=["T", "H", "HKV", "CHUNK"])
def dq_kernel(Q, K, V, DY, L, DOCUMENTS, STATES, DQ, DELTA, T, H, HKV, CHUNK, D: tl.constexpr, PRECISION: tl.constexpr):
    """Write DQ [B, T, H, D] and DELTA [B, H, T] of one chunk of one head, from STATES before each chunk."""
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    b, h = bh // H, bh % H
    hkv = h // (H // HKV)
    row = tl.arange(0, SUB)
    pointers = state_at(STATES, (b * HKV + hkv) * tl.cdiv(T, CHUNK) + chunk, tl.arange(0, D), D)
    m, s, z = load_state(State(pointers.m, tl.trans(pointers.S), pointers.z))
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T), SUB):
        e = load_exponents(Q, L, b, h, start, T, H, SUB, D)
        dy = load_block(DY, b, start, h, T, D)
        documents = documents_of_rows(DOCUMENTS, b, start, T, SUB)
        previous = document_of(DOCUMENTS, b, start - 1, T)
        reads = documents == previous
        a = tl.exp(e + m[None, :])
        weighted = tl.where(reads[:, None], a * product(dy, s, PRECISION), 0.0)
        share = tl.where(reads[:, None], a * z[None, :], 0.0)
        k_row, v_row = row_of(K, b, start, hkv, D), row_of(V, b, start, hkv, D)
        for j in tl.range(0, tl.minimum(SUB, T - start), loop_unroll_factor=UNROLL):
            p = tl.exp(e + tl.load(k_row + j * K.strides[1]).to(tl.float32))
            dp = tl.sum(dy * tl.load(v_row + j * V.strides[1]).to(tl.float32), 1)
            sees = row >= j
            if DOCUMENTS is not None:
                sees &= documents == document_of(DOCUMENTS, b, start + j, T)
            weighted = tl.where(sees[:, None], weighted + p * dp[:, None], weighted)
            share = tl.where(sees[:, None], share + p, share)
        delta = tl.sum(weighted, 1) / tl.sum(share, 1)
        store_rows(DQ, weighted - delta[:, None] * share, b, start, h, T, H)
        tl.store(entries_of_rows(DELTA, bh, start, T, SUB), delta, start + row < T)
        k = load_block(K, b, start, hkv, T, D)
        v = load_block(V, b, start, hkv, T, D)
        last = document_of(DOCUMENTS, b, tl.minimum(start + SUB, T) - 1, T)
        m, s, z = keep_state(m, s, z, previous == last)
        m, s, z = add_rows(m, s, z, k, v, documents == last, PRECISION, True)
