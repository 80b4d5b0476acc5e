"""Heinsen's log attention in Triton, forward and backward: cost linear in the context, exponents never above zero.

    w_ij = sum over d of exp(q_id + k_jd),   y_i = sum_j w_ij v_j / sum_j w_ij,   j <= i

The sums over earlier tokens are a state, relative to a reference for each feature of the keys:

    m_d = max_j k_jd,   S_d = sum_j exp(k_jd - m_d) v_j,   z_d = sum_j exp(k_jd - m_d)

    tokens     |  chunk 0    |  chunk 1    |  chunk 2    |
    sums         own S, z      own S, z      own S, z          chunk_sums_kernel: one program a chunk and head
    carry      0 ----------> 1 ----------> 2 ----------> final carry_states_kernel: one program ROWS features of a head
    read         16 16 16 ..   16 16 16 ..   16 16 16 ..       forward_kernel, dq_kernel: one program a chunk and head

A program of forward_kernel walks through its chunk in blocks of SUB = 16 tokens. It begins with the state before the
chunk, and each block's rows read the state before the block as a matrix product. Pairs inside a block are computed one
by one, which needs no bound on how fast keys grow. Then the block's keys are added to the state.

    c_i = max over d of q_id + (largest k_jd that row i sees)       so exponents are relative to the row's own maximum
    num_i = exp(q_i + m - c_i) @ S + sum_j w_ij v_j,   den_i = exp(q_i + m - c_i) . z + sum_j w_ij
    L_i = c_i + log den_i

Backward, with e_id = q_id - L_i, every exp(e_id + k_jd) is a share of its row, at most 1:

    dP_ij = dy_i . v_j,   A_id = sum_j exp(e_id + k_jd) dP_ij,   P_id = sum_j exp(e_id + k_jd)
    delta_i = sum_d A_id / sum_d P_id,   dq_id = A_id - delta_i P_id

in dq_kernel, the same walk. Keys read a state of the queries after them, N_d = max_i e_id, dS_d = sum_i exp(e_id - N_d)
dy_i, dz_d = - sum_i exp(e_id - N_d) delta_i, which chunk_sums_kernel and carry_states_kernel make from the other end:

    dk_jd = exp(k_jd + N_d) (dS_d . v_j + dz_d),   dv_j = exp(k_j + N) @ dS          and the pairs inside a block

in dkdv_kernel, which walks backward. The gradient to a final state is the first such state, with N = -m. Query heads
that share a head of keys share it too. delta is made of the sums that dq is made of, so that dq sums to zero over d.

    name            shape                        dtype      what
    M, Z            [B * Hkv, chunks, D]         float32    m or N, and z or dz, before each chunk (backward: after it)
    S               [B * Hkv, chunks, D, D]      float32    S or dS; 4 D^2 / CHUNK bytes a token and head
    L               [B, H, T]                    float32    log of a row's sum, saved for the backward pass
    delta           the same                     float32    dq_kernel to dkdv_kernel
    documents       [B, T]                       int32      read; non-decreasing

Only L is saved: the backward pass makes the states again, so that a model does not hold those of all its layers.

Cost, a token and head. Forward: 16 D exp inside blocks and 3 D for states; 6 D^2 FLOP in products. Backward: 32 D exp
inside blocks and 6 D for states, 14 D^2 FLOP. Bytes: q, k, v and y, keys and values a second time, and 16 D^2 / CHUNK
of states; backward q, k, v, dy and three gradients, all but the gradients a second time, and 32 D^2 / CHUNK.

Floors of 65,536 tokens, 12 heads of 64 in bfloat16 on an H200 (3.6e12 exp/s, 4.3 TB/s), with CHUNK = 256: forward 0.27
ms of exp and 0.19 ms of memory, backward 0.53 and 0.35 ms. The products, 0.02 and 0.05 TFLOP, are 0.09 and 0.21 ms as
three bfloat16 products at 701 TFLOP/s. The limit is exp, and the latency of a walk from block to block.

Heads of 128 need more registers for the state than there are and spill some, on an A100 in all walks, with 16 warps or
without unrolling too. In float32 products do without the matrix unit, and at 128 are slow for the same reason. That
size is there to be right.

Range. No exponent that is used is above zero, so that q and k may be of any size at which q + k is exact enough: at 80
float32 keeps 1e-5 of a weight. A row does not depend on later keys, in any bit. NaN comes out in the rows that see it.

Documents. Rows see the tokens of their own document alone, and those of document 0 also the initial state. A state is
that of the document of the last token before it (backward: the first after it); other rows do not read it.
"""

import torch
import triton
import triton.language as tl

from ..common import EMPTY, INTERPRETED, chunk_of, device_guard, empty, load_rows, maximum, row_pointers

CHUNK = 256  # tokens between two states in memory, a multiple of BLOCK
SUB = 16  # tokens of a block inside a chunk: the smallest number of rows of the matrix unit
UNROLL = 2  # pairs of a row inside a block that are computed at a time
BLOCK = 32  # tokens that are added at a time to a chunk's own sums
# kernel -> head dimension -> warps
WARPS = {
    "chunk_sums": {16: 1, 32: 2, 64: 4, 128: 8},
    "forward": {16: 1, 32: 2, 64: 4, 128: 8},
    "dq": {16: 1, 32: 2, 64: 4, 128: 8},
    "dkdv": {16: 1, 32: 2, 64: 4, 128: 8},
}
CARRY = (1, 1, 8)  # carry_states_kernel: features of a program (ROWS), warps, chunks in flight
# dtype of q and k -> how products of float32 are computed. tf32 has too few bits for values that share a large mean: dq
# then is a small difference of large sums (with a mean of ten standard deviations tf32 was 2.5e-2 off).
PRECISION = {torch.bfloat16: "bf16x3", torch.float32: "ieee"}


# ---- documents


@triton.jit
def document_of(DOCUMENTS, b, at, T):
    """Return the number of the document of token `at`, 0 before the first token and without documents."""
    if DOCUMENTS is None:
        return 0
    else:
        return tl.load(DOCUMENTS + tl.cast(b, tl.int64) * T + at, mask=at >= 0, other=0)


@triton.jit
def documents_of_rows(DOCUMENTS, b, start, T, N: tl.constexpr):
    """Return the numbers of the documents of tokens start, start+1, ..., [N] int32, and -1 from token T on."""
    at = start + tl.arange(0, N)
    if DOCUMENTS is None:
        return tl.where(at < T, 0, -1)
    else:
        return tl.load(DOCUMENTS + tl.cast(b, tl.int64) * T + at, mask=at < T, other=-1)


@triton.jit
def maximum_of_document(document_a, a, document_b, b):
    """Return (document_b, the larger of a and b, or b if a is of another document), for tl.associative_scan."""
    return document_b, tl.where(document_a == document_b, tl.maximum(a, b), b)


# ---- rows


@triton.jit
def entries_of_rows(X, bh, start, T, N: tl.constexpr):
    """Return pointers [N] to tokens start, start+1, ... of one sequence and head of X [B * H, T]."""
    return X + tl.cast(bh, tl.int64) * T + start + tl.arange(0, N)


@triton.jit
def load_exponents(X, L, strides, b, h, start, T, H, N: tl.constexpr, D: tl.constexpr):
    """Load rows of X [B, T, H, D] as float32 [N, D], k, or e = q - L if L is not None, EMPTY from token T on."""
    x = load_rows(X, strides, b, start, h, T, N, D).to(tl.float32)
    if L is not None:
        mask = start + tl.arange(0, N) < T
        x -= tl.load(entries_of_rows(L, b * H + h, start, T, N), mask=mask, other=-EMPTY)[:, None]
    return x


@triton.jit
def row_of(X, strides, b, start, h, D: tl.constexpr):
    """Return pointers [1, D] to row `start` of head h of sequence b of X [B, T, H, D]."""
    X += tl.cast(b, tl.int64) * strides[0] + tl.cast(start, tl.int64) * strides[1]
    return X + tl.cast(h, tl.int64) * strides[2] + tl.arange(0, D)[None, :] * strides[3]


# ---- products


@triton.jit
def product(x, y, PRECISION: tl.constexpr, acc=None):
    """Return x @ y, added to acc if there is one, in float32."""
    precision: tl.constexpr = "ieee" if INTERPRETED else PRECISION
    return tl.dot(x.to(tl.float32), y.to(tl.float32), acc, input_precision=precision)


# ---- states


@triton.jit
def load_state(M, S, Z, at, D: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """Load (m [D], S [D, D], z [D]), with TRANSPOSED S^T, of entry `at` of arrays [.., D], [.., D, D], [.., D]."""
    d = tl.arange(0, D)
    at = tl.cast(at, tl.int64) * D
    to = d[None, :] * D + d[:, None] if TRANSPOSED else d[:, None] * D + d[None, :]
    return tl.load(M + at + d), tl.load(S + at * D + to), tl.load(Z + at + d)


@triton.jit
def keep_state(m, S, z, keep):
    """Return the state (m, S, z) if `keep`, or the empty one."""
    return tl.where(keep, m, EMPTY), tl.where(keep, S, 0.0), tl.where(keep, z, 0.0)


@triton.jit
def new_reference(m, x, inside):
    """Return (the larger of m and the rows of x that are `inside`, the factor of the state, the weights of the rows).

    m [D], x [N, D], inside [N]; the factor exp(m - new) is [D], the weights exp(x - new) are [N, D] and zero in rows
    that are not inside.
    """
    new = tl.maximum(m, tl.max(tl.where(inside[:, None], x, EMPTY), 0))
    return new, tl.exp(m - new), tl.where(inside[:, None], tl.exp(x - new[None, :]), 0.0)


@triton.jit(do_not_specialize=["T", "H", "HKV", "CHUNK"])
def chunk_sums_kernel(
    X, Y,  # keys and values, or queries and dy
    L, DELTA,  # None, or those of the queries
    DOCUMENTS,
    M, S, Z,  # what is written
    x_strides, y_strides, T, H, HKV, CHUNK,  # H: heads of X
    D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the sums (m, S, z) over one chunk's keys, or (N, dS, dz) over the queries of all heads of a group.

    They are of the document of the chunk's last token; queries': of its first.
    """
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    b, hkv, group = bh // HKV, bh % HKV, H // HKV
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
    document = document_of(DOCUMENTS, b, end - 1 if L is None else begin, T)
    m = tl.full([D], EMPTY, tl.float32)
    for h in range(hkv * group, hkv * group + group):
        for start in range(begin, end, BLOCK):
            x = load_exponents(X, L, x_strides, b, h, start, T, H, BLOCK, D)
            inside = documents_of_rows(DOCUMENTS, b, start, T, BLOCK) == document
            m = tl.maximum(m, tl.max(tl.where(inside[:, None], x, EMPTY), 0))
    sums, z = tl.zeros([D, D], tl.float32), tl.zeros([D], tl.float32)
    for h in range(hkv * group, hkv * group + group):
        for start in range(begin, end, BLOCK):
            x = load_exponents(X, L, x_strides, b, h, start, T, H, BLOCK, D)
            y = load_rows(Y, y_strides, b, start, h, T, BLOCK, D)
            inside = documents_of_rows(DOCUMENTS, b, start, T, BLOCK) == document
            w = tl.where(inside[:, None], tl.exp(x - m[None, :]), 0.0)
            sums = product(tl.trans(w), tl.where(inside[:, None], y, 0.0), PRECISION, sums)
            if DELTA is not None:
                w *= -tl.load(entries_of_rows(DELTA, b * H + h, start, T, BLOCK), mask=inside, other=0.0)[:, None]
            z += tl.sum(w, 0)
    d = tl.arange(0, D)
    at = tl.cast(tl.program_id(0), tl.int64) * D
    tl.store(M + at + d, m)
    tl.store(S + at * D + d[:, None] * D + d[None, :], sums)
    tl.store(Z + at + d, z)


@triton.jit(do_not_specialize=["T", "HKV", "CHUNK"])
def carry_states_kernel(
    M, S, Z,
    M_FIRST, S_FIRST, Z_FIRST,  # the state before all tokens (with REVERSE: after all), or None
    M_LAST, S_LAST, Z_LAST,  # the state at the other end, or None
    DOCUMENTS, T, HKV, CHUNK,
    D: tl.constexpr, ROWS: tl.constexpr, REVERSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Replace the sums over each chunk by the state before it (with REVERSE: after it), ROWS features of one head."""
    chunks, blocks = tl.cdiv(T, CHUNK), D // ROWS
    bh, e = tl.program_id(0) // blocks, tl.arange(0, D)
    d = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    b = bh // HKV
    m, z = tl.full([ROWS], EMPTY, tl.float32), tl.zeros([ROWS], tl.float32)
    s = tl.zeros([ROWS, D], tl.float32)
    if M_FIRST is not None:
        at = tl.cast(bh, tl.int64) * D + d
        m, z, s = tl.load(M_FIRST + at), tl.load(Z_FIRST + at), tl.load(S_FIRST + at[:, None] * D + e[None, :])
    document = document_of(DOCUMENTS, b, T - 1 if REVERSE else -1, T)
    for step in tl.range(chunks, num_stages=STAGES):
        chunk = chunks - 1 - step if REVERSE else step
        at = (tl.cast(bh, tl.int64) * chunks + chunk) * D + d
        to = S + at[:, None] * D + e[None, :]
        m_chunk, z_chunk, s_chunk = tl.load(M + at), tl.load(Z + at), tl.load(to)
        tl.store(M + at, m)
        tl.store(Z + at, z)
        tl.store(to, s)
        if DOCUMENTS is not None:
            before = document
            document = document_of(
                DOCUMENTS, b, chunk * CHUNK if REVERSE else tl.minimum(chunk * CHUNK + CHUNK, T) - 1, T
            )
            m, s, z = keep_state(m, s, z, before == document)
        new = tl.maximum(m, m_chunk)
        old, added = tl.exp(m - new), tl.exp(m_chunk - new)
        s = s * old[:, None] + s_chunk * added[:, None]
        z = z * old + z_chunk * added
        m = new
    if M_LAST is not None:
        at = tl.cast(bh, tl.int64) * D + d
        tl.store(M_LAST + at, m)
        tl.store(Z_LAST + at, z)
        tl.store(S_LAST + at[:, None] * D + e[None, :], s)


# ---- blocks


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
def forward_kernel(
    Q, K, V, DOCUMENTS, M, S, Z,
    Y, L,  # what is written
    q_strides, k_strides, v_strides, T, H, HKV, CHUNK,
    D: tl.constexpr, SUB: tl.constexpr, UNROLL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write Y [B, T, H, D] and L of one chunk of one head, from the state before it."""
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    b, h = bh // H, bh % H
    hkv = h // (H // HKV)
    row = tl.arange(0, SUB)
    m, s, z = load_state(M, S, Z, (b * HKV + hkv) * tl.cdiv(T, CHUNK) + chunk, D)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T), SUB):
        q = load_rows(Q, q_strides, b, start, h, T, SUB, D).to(tl.float32)
        k = load_rows(K, k_strides, b, start, hkv, T, SUB, D).to(tl.float32)
        documents = documents_of_rows(DOCUMENTS, b, start, T, SUB)
        before = document_of(DOCUMENTS, b, start - 1, T)
        reads = documents == before
        c = row_reference(q, k, m, documents, reads, DOCUMENTS is not None)
        e = q - c[:, None]
        a = tl.where(reads[:, None], tl.exp(e + m[None, :]), 0.0)
        num = product(a, s, PRECISION)
        den = tl.sum(a * z[None, :], 1)
        if DOCUMENTS is not None:
            num, den = tl.where(reads[:, None], num, 0.0), tl.where(reads, den, 0.0)  # the state may be NaN
        k_row, v_row = row_of(K, k_strides, b, start, hkv, D), row_of(V, v_strides, b, start, hkv, D)
        for j in tl.range(0, tl.minimum(SUB, T - start), loop_unroll_factor=UNROLL):
            w = tl.sum(tl.exp(e + tl.load(k_row + j * k_strides[1]).to(tl.float32)), 1)
            v = tl.load(v_row + j * v_strides[1]).to(tl.float32)
            sees = row >= j
            if DOCUMENTS is not None:
                sees &= documents == document_of(DOCUMENTS, b, start + j, T)
            num = tl.where(sees[:, None], num + w[:, None] * v, num)
            den = tl.where(sees, den + w, den)
        inside = start + row < T
        y = num / den[:, None]
        tl.store(row_pointers(Y, b, start, h, T, H, SUB, D), y.to(Y.dtype.element_ty), inside[:, None])
        tl.store(entries_of_rows(L, bh, start, T, SUB), c + tl.log(den), inside)
        v = load_rows(V, v_strides, b, start, hkv, T, SUB, D)
        if DOCUMENTS is not None:
            last = document_of(DOCUMENTS, b, tl.minimum(start + SUB, T) - 1, T)
            m, s, z = keep_state(m, s, z, before == last)
            inside = documents == last
            v = tl.where(inside[:, None], v, 0.0)
        m, factor, w = new_reference(m, k, inside)
        s = product(tl.trans(w), v, PRECISION, s * factor[:, None])
        z = z * factor + tl.sum(w, 0)


@triton.jit(do_not_specialize=["T", "H", "HKV", "CHUNK"])
def dq_kernel(
    Q, K, V, DY, L, DOCUMENTS, M, S, Z,
    DQ, DELTA,  # what is written
    q_strides, k_strides, v_strides, dy_strides, T, H, HKV, CHUNK,
    D: tl.constexpr, SUB: tl.constexpr, UNROLL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write DQ [B, T, H, D] and DELTA of one chunk of one head, from the state before it, which is kept transposed."""
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    b, h = bh // H, bh % H
    hkv = h // (H // HKV)
    row = tl.arange(0, SUB)
    m, s, z = load_state(M, S, Z, (b * HKV + hkv) * tl.cdiv(T, CHUNK) + chunk, D, True)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T), SUB):
        e = load_exponents(Q, L, q_strides, b, h, start, T, H, SUB, D)
        dy = load_rows(DY, dy_strides, b, start, h, T, SUB, D).to(tl.float32)
        documents = documents_of_rows(DOCUMENTS, b, start, T, SUB)
        before = document_of(DOCUMENTS, b, start - 1, T)
        reads = documents == before
        share = tl.where(reads[:, None], tl.exp(e + m[None, :]), 0.0)
        given = share * product(dy, s, PRECISION)
        share *= z[None, :]
        if DOCUMENTS is not None:
            given, share = tl.where(reads[:, None], given, 0.0), tl.where(reads[:, None], share, 0.0)
        k_row, v_row = row_of(K, k_strides, b, start, hkv, D), row_of(V, v_strides, b, start, hkv, D)
        for j in tl.range(0, tl.minimum(SUB, T - start), loop_unroll_factor=UNROLL):
            p = tl.exp(e + tl.load(k_row + j * k_strides[1]).to(tl.float32))
            dp = tl.sum(dy * tl.load(v_row + j * v_strides[1]).to(tl.float32), 1)
            sees = row >= j
            if DOCUMENTS is not None:
                sees &= documents == document_of(DOCUMENTS, b, start + j, T)
            given = tl.where(sees[:, None], given + p * dp[:, None], given)
            share = tl.where(sees[:, None], share + p, share)
        inside = start + row < T
        delta = tl.sum(given, 1) / tl.sum(share, 1)
        dq = given - delta[:, None] * share
        tl.store(row_pointers(DQ, b, start, h, T, H, SUB, D), dq.to(DQ.dtype.element_ty), inside[:, None])
        tl.store(entries_of_rows(DELTA, bh, start, T, SUB), delta, inside)
        k = load_rows(K, k_strides, b, start, hkv, T, SUB, D).to(tl.float32)
        v = load_rows(V, v_strides, b, start, hkv, T, SUB, D)
        if DOCUMENTS is not None:
            last = document_of(DOCUMENTS, b, tl.minimum(start + SUB, T) - 1, T)
            m, s, z = keep_state(m, s, z, before == last)
            inside = documents == last
            v = tl.where(inside[:, None], v, 0.0)
        m, factor, w = new_reference(m, k, inside)
        s = product(tl.trans(v), w, PRECISION, s * factor[None, :])
        z = z * factor + tl.sum(w, 0)


@triton.jit(do_not_specialize=["T", "H", "HKV", "CHUNK"])
def dkdv_kernel(
    Q, K, V, DY, L, DELTA, DOCUMENTS, M, S, Z,
    DK, DV,  # what is written
    q_strides, k_strides, v_strides, dy_strides, T, H, HKV, CHUNK,
    D: tl.constexpr, SUB: tl.constexpr, UNROLL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write DK, DV [B, T, Hkv, D] of one chunk of one head of keys, walking backward from the state after it."""
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    b, hkv, group = bh // HKV, bh % HKV, H // HKV
    row = tl.arange(0, SUB)
    m, s, z = load_state(M, S, Z, tl.program_id(0), D)
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
    for back in range(begin, end, SUB):
        start = begin + (end - 1 - begin) // SUB * SUB - (back - begin)
        k = load_rows(K, k_strides, b, start, hkv, T, SUB, D).to(tl.float32)
        v = load_rows(V, v_strides, b, start, hkv, T, SUB, D).to(tl.float32)
        after = document_of(DOCUMENTS, b, tl.minimum(start + SUB, T - 1), T)
        first = document_of(DOCUMENTS, b, start, T)
        documents = documents_of_rows(DOCUMENTS, b, start, T, SUB)
        reads = documents == after
        w = tl.where(reads[:, None], tl.exp(k + m[None, :]), 0.0)
        dk = w * (product(v, tl.trans(s), PRECISION) + z[None, :])
        dv = product(w, s, PRECISION)
        if DOCUMENTS is not None:
            dk, dv = tl.where(reads[:, None], dk, 0.0), tl.where(reads[:, None], dv, 0.0)
            m, s, z = keep_state(m, s, z, after == first)
        for h in range(hkv * group, hkv * group + group):
            q_row, dy_row = row_of(Q, q_strides, b, start, h, D), row_of(DY, dy_strides, b, start, h, D)
            entry = tl.cast(b * H + h, tl.int64) * T + start
            for i in tl.range(0, tl.minimum(SUB, T - start), loop_unroll_factor=UNROLL):
                p = tl.exp(k + (tl.load(q_row + i * q_strides[1]).to(tl.float32) - tl.load(L + entry + i)))
                dy = tl.load(dy_row + i * dy_strides[1]).to(tl.float32)
                ds = tl.sum(v * dy, 1) - tl.load(DELTA + entry + i)
                sees = row <= i
                if DOCUMENTS is not None:
                    sees &= documents == document_of(DOCUMENTS, b, start + i, T)
                dk = tl.where(sees[:, None], dk + p * ds[:, None], dk)
                dv = tl.where(sees[:, None], dv + tl.sum(p, 1)[:, None] * dy, dv)
            e = load_exponents(Q, L, q_strides, b, h, start, T, H, SUB, D)
            dy = load_rows(DY, dy_strides, b, start, h, T, SUB, D).to(tl.float32)
            inside = documents == first
            delta = tl.load(entries_of_rows(DELTA, b * H + h, start, T, SUB), mask=inside, other=0.0)
            if DOCUMENTS is not None:
                dy = tl.where(inside[:, None], dy, 0.0)
            m, factor, w = new_reference(m, e, inside)
            s = product(tl.trans(w), dy, PRECISION, s * factor[:, None])
            z = z * factor - tl.sum(w * delta[:, None], 0)
        inside = (start + row < T)[:, None]
        tl.store(row_pointers(DK, b, start, hkv, T, HKV, SUB, D), dk.to(DK.dtype.element_ty), inside)
        tl.store(row_pointers(DV, b, start, hkv, T, HKV, SUB, D), dv.to(DV.dtype.element_ty), inside)


# ---- launchers


def chunk_states(x, y, documents, first=None, L=None, delta=None, HKV=None, last=False):
    """Return the states (M, S, Z) before each chunk of keys x and values y, and the one after all of them or None.

    With L and delta, x are queries and y is dy, [B, T, H, D], any strides: the states are those after each chunk, the
    other is that before all, and heads are summed to HKV. first: the state (m, S, z), float32 and contiguous [B, Hkv,
    D], [B, Hkv, D, D], [B, Hkv, D], that all begins with, or None; last: whether the other state is wanted.
    """
    B, T, H, D = x.shape
    HKV = HKV or H
    chunks = triton.cdiv(T, CHUNK)
    states = [empty(x, B * HKV, chunks, *shape) for shape in ((D,), (D, D), (D,))]
    chunk_sums_kernel[(B * HKV * chunks,)](
        x, y, L, delta, documents, *states, x.stride(), y.stride(), T, H, HKV, CHUNK, D=D, BLOCK=BLOCK,
        PRECISION=PRECISION[x.dtype], num_warps=_warps("chunk_sums", x), num_stages=1,
    )  # fmt: skip
    found = [empty(x, B, HKV, *shape) for shape in ((D,), (D, D), (D,))] if last else (None, None, None)
    rows, warps, stages = CARRY
    carry_states_kernel[(B * HKV * D // rows,)](
        *states, *(first or (None, None, None)), *found, documents, T, HKV, CHUNK, D=D, ROWS=rows,
        REVERSE=L is not None, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return states, found if last else None


def forward(q, k, v, documents=None, initial=None, *, final=False):
    """Return y [B, T, H, D], L [B, H, T] float32 and the state (m, S, z) after the last token, None unless `final`.

    q [B, T, H, D], k [B, T, Hkv, D] bfloat16 or float32, v [B, T, Hkv, D] in the same dtype or float32, which
    is that of y; any strides. documents [B, T] int32 or None; initial: (m [B, Hkv, D], S [B, Hkv, D, D], z [B, Hkv, D])
    float32 or None.
    """
    (B, T, H, D), HKV = q.shape, k.shape[2]
    y, L = empty(q, B, T, H, D, dtype=v.dtype), empty(q, B, H, T)
    documents, initial = _contiguous(documents), initial and [x.contiguous() for x in initial]
    strides = [x.stride() for x in (q, k, v)]
    with device_guard(q.device):
        states, last = chunk_states(k, v, documents, initial, last=final)
        forward_kernel[(B * H * triton.cdiv(T, CHUNK),)](
            q, k, v, documents, *states, y, L, *strides, T, H, HKV, CHUNK, **_options("forward", q)
        )
    return y, L, last


def backward(dy, q, k, v, documents, L, initial=None, final=None, only_q=False):
    """Return dq, dk, dv and the gradient (dS, dz) to the initial state, or None; with only_q dk and dv are None too.

    final: (m, dS, dz) of the last state: its reference and the gradient to it, or None. The others are as in `forward`.
    """
    (B, T, H, _), HKV = q.shape, k.shape[2]
    dq, dk, dv = (empty(q, *x.shape, dtype=x.dtype) for x in (q, k, v))
    delta = torch.empty_like(L)
    documents, initial = _contiguous(documents), initial and [x.contiguous() for x in initial]
    final = final and [-final[0], final[1].contiguous(), final[2].contiguous()]
    strides = [x.stride() for x in (q, k, v, dy)]
    with device_guard(q.device):
        states, _ = chunk_states(k, v, documents, initial)
        dq_kernel[(B * H * triton.cdiv(T, CHUNK),)](
            q, k, v, dy, L, documents, *states, dq, delta, *strides, T, H, HKV, CHUNK, **_options("dq", q)
        )
        del states
        if only_q:
            return dq, None, None, None
        states, first = chunk_states(q, dy, documents, final, L, delta, HKV, last=initial is not None)
        dkdv_kernel[(B * HKV * triton.cdiv(T, CHUNK),)](
            q, k, v, dy, L, delta, documents, *states, dk, dv, *strides, T, H, HKV, CHUNK, **_options("dkdv", q)
        )
    if initial is None:
        return dq, dk, dv, None
    factor = torch.exp(initial[0] + first[0])
    if documents is not None:
        factor = torch.where((documents[:, :1] == 0).all(1)[:, None, None], factor, 0.0)  # also without tokens
    return dq, dk, dv, (factor[..., None] * first[1], factor * first[2])


def _contiguous(x):
    return None if x is None else x.contiguous()


def _options(kernel, q):
    """Return the sizes and options of a launch of forward_kernel, dq_kernel or dkdv_kernel."""
    sizes = dict(D=q.shape[3], SUB=SUB, UNROLL=UNROLL, PRECISION=PRECISION[q.dtype])
    return sizes | dict(num_warps=_warps(kernel, q), num_stages=1)


def _warps(kernel, q):
    """Return the warps of a launch: twice as many without the matrix unit, whose operands take fewer registers."""
    return min(16, WARPS[kernel][q.shape[3]] * (2 if PRECISION[q.dtype] == "ieee" else 1))
