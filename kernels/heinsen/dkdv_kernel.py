"""Heinsen's log attention, backward: dk and dv of a chunk, from the state of the queries after it.

With e_id = q_id - L_i and the state N, dS, dz of later queries (states.py):

    dk_jd = exp(k_jd + N_d) (dS_d . v_j + dz_d) + sum_i exp(e_id + k_jd) (dy_i . v_j - delta_i)
    dv_j  = exp(k_j + N) @ dS                   + sum_i sum_d exp(e_id + k_jd) dy_i       over i >= j of the same block

    chunk      .. | 16 | 16 | 16 |  blocks of SUB tokens, from the last to the first; one program a chunk and KV head
    block      read the state of the queries after it: two matrix products
               for each query head of the group: add pairs in the block, query by query; add queries to the state

Cost of a token and query head: 16 D exp inside blocks and 2 D for states, 6 D^2 FLOP in products. The limit is exp, and
registers: dk, dv and the state.
"""

import triton
import triton.language as tl

from ..common import chunk_of, store_rows
from .states import add_rows, keep_state, load_state, state_at
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
def dkdv_kernel(
    Q, K, V, DY, L, DELTA, DOCUMENTS, STATES, DK, DV, T, H, HKV, CHUNK, D: tl.constexpr, PRECISION: tl.constexpr
):
    """Write DK, DV [B, T, Hkv, D] of one chunk of one head of keys, from STATES of queries after each chunk."""
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    b, hkv, group = bh // HKV, bh % HKV, H // HKV
    row = tl.arange(0, SUB)
    m, s, z = load_state(state_at(STATES, tl.program_id(0), tl.arange(0, D), D))
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
    for back in range(begin, end, SUB):
        start = begin + (end - 1) // SUB * SUB - back
        k = load_block(K, b, start, hkv, T, D)
        v = load_block(V, b, start, hkv, T, D)
        following = document_of(DOCUMENTS, b, tl.minimum(start + SUB, T - 1), T)
        first = document_of(DOCUMENTS, b, start, T)
        documents = documents_of_rows(DOCUMENTS, b, start, T, SUB)
        reads = documents == following
        w = tl.exp(k + m[None, :])
        dk = tl.where(reads[:, None], w * (product(v, tl.trans(s), PRECISION) + z[None, :]), 0.0)
        dv = tl.where(reads[:, None], product(w, s, PRECISION), 0.0)
        m, s, z = keep_state(m, s, z, following == first)
        for h in range(hkv * group, hkv * group + group):
            q_row, dy_row = row_of(Q, b, start, h, D), row_of(DY, b, start, h, D)
            entry = tl.cast(b * H + h, tl.int64) * T + start
            for i in tl.range(0, tl.minimum(SUB, T - start), loop_unroll_factor=UNROLL):
                p = tl.exp(k + (tl.load(q_row + i * Q.strides[1]).to(tl.float32) - tl.load(L + entry + i)))
                dy = tl.load(dy_row + i * DY.strides[1]).to(tl.float32)
                ds = tl.sum(v * dy, 1) - tl.load(DELTA + entry + i)
                sees = row <= i
                if DOCUMENTS is not None:
                    sees &= documents == document_of(DOCUMENTS, b, start + i, T)
                dk = tl.where(sees[:, None], dk + p * ds[:, None], dk)
                dv = tl.where(sees[:, None], dv + tl.sum(p, 1)[:, None] * dy, dv)
            e = load_exponents(Q, L, b, h, start, T, H, SUB, D)
            dy = load_block(DY, b, start, h, T, D)
            inside = documents == first
            delta = tl.load(entries_of_rows(DELTA, b * H + h, start, T, SUB), mask=inside, other=0.0)
            m, s, z = add_rows(m, s, z, e, dy, inside, PRECISION, delta=delta)
        store_rows(DK, dk, b, start, hkv, T, HKV)
        store_rows(DV, dv, b, start, hkv, T, HKV)
