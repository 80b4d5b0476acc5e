"""Adaptive power attention's backward kernels: dq and dp of BM queries a program, and dk and dv of BN keys.

    t_ij = exp2((p_i - 1) log2 |s_ij| + c_i) sign s_ij,   ds_ij = p_i t_ij (dP_ij - delta_i)
    dq_i = sum_j ds_ij k_j,   dk_j = sum_i ds_ij q_i,   dv_j = sum_i t_ij s_ij dy_i

      queries           keys ->                               keys              queries ->
        BM | BN | BN | BN | diagonal                            BN | diagonal | BM | BM | BM

A pair takes a logarithm and an exponential in each kernel, and three products in dq_kernel, four in dkdv_kernel.
passes.py has the gradient to p_i, the names and shapes of the arrays, and the launchers.
"""

import triton
import triton.language as tl

from ..common import PRECISION, at_head, block_and_head, multiple_of, row_pointers
from ..quadratic.tiles import count_queries, load_tile, load_vector, queries_of_program, row_of, token_of
from .forward_kernel import exp2, log2, tiles_of_rows

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _with_sign(x, s):
    """Return x >= 0 with the sign of s."""
    return (x.to(tl.int32, bitcast=True) | (s.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _exponent(p):
    """Return p - 1, but at least 1e-20: multiplied by log2 0 it is -inf for p = 1 too."""
    return tl.maximum(p - 1, 1e-20)


@triton.jit
def _store_rows(OUT, x, b, start, h, T, H):
    """Write x [N, D] float32 as rows start, start+1, ... of head h of sequence b of OUT [B, T, H, D]."""
    N: tl.constexpr = x.shape[0]
    mask = (start + tl.arange(0, N))[:, None] < T
    tl.store(row_pointers(OUT, b, start, h, T, H, N, x.shape[1]), x.to(OUT.dtype.element_ty), mask)


@triton.jit
def _add_keys(dq, dp, queries, keys, rows, tiles, end, BN: tl.constexpr, MASKED: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Return (dq, dp), the sums of both, with the keys of the tiles added that `_add_keys` of the forward kernel adds.

    queries: (q, dy, delta); keys, tiles: as there; rows: (their tokens, p - 1, c, the middle of their logarithms, the
    first tokens of their documents).
    """
    q, dy, delta = queries
    K, k_strides, V, v_strides, b, hkv, T = keys
    row, exponent, c, middle, first = rows
    begin, diagonal, masked, opened = tiles
    D: tl.constexpr = q.shape[1]
    for start in tl.range(masked if MASKED else begin, end, BN, num_stages=1 if MASKED else None):
        if MASKED and DOCUMENTS:
            start = tl.where(start < diagonal, opened, start)
        k = load_tile(K, k_strides, b, start, hkv, T, BN, D, MASKED)
        v = load_tile(V, v_strides, b, start, hkv, T, BN, D, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dweight = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        x = tl.maximum(log2(s), -1e30)  # finite, because it is multiplied by a weight that may be zero
        ds = _with_sign(exp2(exponent[:, None] * x + c[:, None]), s) * (dweight - delta[:, None])
        if MASKED:
            column = start + tl.arange(0, BN)
            seen = row[:, None] >= column[None, :]
            if DOCUMENTS:
                seen = seen & (column[None, :] >= first[:, None])
            ds = tl.where(seen, ds, 0.0)
        dp += tl.sum(ds * s * (x - middle[:, None]), 1)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, dp


@triton.jit(do_not_specialize=["T", "OFFSET", "H", "HKV", "BH", "HEADS"])
def dq_kernel(
    Q, K, V, DY,  # pointers or tensor descriptors
    saved,  # (Y, C), written by the forward pass
    POWERS, FIRST,  # FIRST: None without documents
    DQ, DELTA, DP,  # what is written
    strides,  # of Q, K, V and DY; None: a tensor descriptor
    T, OFFSET, H, HKV, BH, HEADS,  # as in the forward kernel
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write BM rows of dq and dp, and of delta, which the other pass needs."""
    DOCUMENTS: tl.constexpr = FIRST is not None
    Y, C = saved
    q_strides, k_strides, v_strides, dy_strides = strides
    n = count_queries(T, OFFSET)
    bh, b, h, hkv, start = queries_of_program(n, H, HKV, BH, HEADS, BM)
    lo = token_of(start, OFFSET)
    row = lo + tl.arange(0, BM)

    q = load_tile(Q, q_strides, b, start, h, n, BM, D, True)
    dy = load_tile(DY, dy_strides, b, start, h, n, BM, D, True)
    y = tl.load(row_pointers(Y, b, start, h, n, H, BM, D), mask=row[:, None] < T, other=0.0)
    delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    p = load_vector(at_head(POWERS, n, b), start, BM)
    c = load_vector(at_head(C, n, bh), start, BM)
    tl.store(at_head(DELTA, n, bh) + (start + tl.arange(0, BM)), p * delta)
    # the mean of |s|^p; x weighted by |s|^p has a mean 0.5 to 0.6 above its logarithm for normal s and p from 2 to 8
    mean = -(c + tl.log2((lo + 1 + tl.arange(0, BM)).to(tl.float32))) / p
    middle = tl.where(c == float("-inf"), 0.0, mean + 0.57)
    first, tiles = tiles_of_rows(FIRST, T, b * HKV + hkv, lo, BM, BN)

    dq = tl.zeros([BM, D], tl.float32)
    dp = tl.zeros([BM], tl.float32)
    queries, keys = (q, dy, delta), (K, k_strides, V, v_strides, b, hkv, T)
    rows = (row, _exponent(p), c, middle, first)
    dq, dp = _add_keys(dq, dp, queries, keys, rows, tiles, tiles[1], BN, False, DOCUMENTS)
    if DOCUMENTS:  # rows of documents that begin here see none of these keys
        seen = first < lo
        dq, dp = tl.where(seen[:, None], dq, 0.0), tl.where(seen, dp, 0.0)
    dq, dp = _add_keys(dq, dp, queries, keys, rows, tiles, tl.minimum(lo + BM, T), BN, True, DOCUMENTS)

    several = tl.where(row > first, 1.0, 0.0)  # in a row that sees itself alone, y_i is v_i for any q_i
    _store_rows(DQ, dq * (p * several)[:, None], b, start, h, n, H)
    tl.store(at_head(DP, n, bh) + (start + tl.arange(0, BM)), dp * several * LN_2)


@triton.jit
def _add_queries(dk, dv, keys, queries, head, column, begin, end, BM: tl.constexpr, last=None):
    """Return (dk, dv) with the queries of one head from token begin to token end added, BM at a time.

    keys: (k, v); queries: (Q, strides, DY, strides, C, DELTA, POWERS, FIRST); head: (sequence, head, sequence and head,
    sequence and head of keys, T, OFFSET); column: tokens of the keys; last: None, or for tiles with a mask the tile
    that takes the place of a tile after the keys.
    """
    k, v = keys
    Q, q_strides, DY, dy_strides, C, DELTA, POWERS, FIRST = queries
    b, h, bh, bh_of_keys, T, OFFSET = head
    D: tl.constexpr = k.shape[1]
    n = count_queries(T, OFFSET)
    C, DELTA, POWERS = at_head(C, n, bh), at_head(DELTA, n, bh), at_head(POWERS, n, b)
    for start in range(begin, end, BM):
        if last is not None and FIRST is not None:
            start = tl.where(start < tl.max(column) + 1, start, last)
        row = row_of(start, OFFSET)
        q = load_tile(Q, q_strides, b, row, h, n, BM, D, True)
        dy = load_tile(DY, dy_strides, b, row, h, n, BM, D, True)
        c, delta, p = load_vector(C, row, BM), load_vector(DELTA, row, BM), load_vector(POWERS, row, BM)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BN, BM]
        dweight = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
        t = _with_sign(exp2(_exponent(p)[None, :] * log2(s) + c[None, :]), s)
        if last is not None:
            token = start + tl.arange(0, BM)
            seen, first = token[None, :] >= column[:, None], 0
            if FIRST is not None:
                first = load_vector(at_head(FIRST, T, bh_of_keys), start, BM)
                seen = seen & (column[:, None] >= first[None, :])
            t = tl.where(seen, t, 0.0)
        dv = tl.dot((t * s).to(dy.dtype), dy, dv, input_precision=PRECISION)
        ds = t * (dweight * p[None, :] - delta[None, :])
        if last is not None:  # in a row that sees itself alone, y_i is v_i for any q_i
            ds = tl.where((token > first)[None, :], ds, 0.0)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["T", "OFFSET", "H", "HKV", "BHKV", "HEADS"])
def dkdv_kernel(
    Q, K, V, DY,  # pointers or tensor descriptors
    C, DELTA,  # written by the forward pass and by `dq_kernel`
    POWERS, documents,  # (FIRST, END), None each without documents
    DK, DV,  # what is written
    strides,  # of Q, K, V and DY; None: a tensor descriptor
    T, OFFSET, H, HKV, BHKV, HEADS,  # BHKV: B * HKV; the others as in the forward kernel
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write BN rows of dk and dv, summed over the query heads of the group."""
    FIRST, END = documents
    q_strides, k_strides, v_strides, dy_strides = strides
    block, bh = block_and_head(tl.cdiv(T, BN), BHKV, HEADS)
    lo = block * BN  # the programs with the most work first
    b, hkv, group = bh // HKV, bh % HKV, H // HKV
    column = lo + tl.arange(0, BN)

    k = load_tile(K, k_strides, b, lo, hkv, T, BN, D, True)
    v = load_tile(V, v_strides, b, lo, hkv, T, BN, D, True)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    begin, end, masked, masked_end = lo + BN, T, lo, tl.minimum(lo + BN, T)
    if OFFSET is not None:  # keys before it are read by the queries alone
        offset = multiple_of(OFFSET, 128)
        begin, masked = tl.maximum(begin, offset), tl.minimum(tl.maximum(lo, offset), lo + BN)
    if FIRST is not None:  # a tile of queries in which the last key's document ends needs a mask
        last = tl.minimum(lo + BN, T) - 1
        document_end = tl.load(at_head(END, T, bh) + last)
        end = tl.maximum(begin, document_end // BM * BM)
        masked_end = tl.where(end < document_end, lo + BN + BM, masked_end)
    keys, queries = (k, v), (Q, q_strides, DY, dy_strides, C, DELTA, POWERS, FIRST)
    for i in range(group):
        h = hkv * group + i
        head = b, h, b * H + h, bh, T, OFFSET
        dk, dv = _add_queries(dk, dv, keys, queries, head, column, begin, end, BM)
    if FIRST is not None:  # those queries see none of the documents that end here
        seen = (column >= tl.load(at_head(FIRST, T, bh) + last))[:, None]
        dk, dv = tl.where(seen, dk, 0.0), tl.where(seen, dv, 0.0)
    for i in range(group):
        h = hkv * group + i
        head = b, h, b * H + h, bh, T, OFFSET
        dk, dv = _add_queries(dk, dv, keys, queries, head, column, masked, masked_end, BM, end)

    _store_rows(DK, dk, b, lo, hkv, T, HKV)
    _store_rows(DV, dv, b, lo, hkv, T, HKV)
