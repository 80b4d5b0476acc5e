"""Adaptive power attention's forward kernel: a program computes y of BM queries.

    w_ij = exp2(p_i log2 |q_i . k_j| + p_i log2 f_i),   y_i = sum_j w_ij v_j / sum_j w_ij,   j <= i in i's document

      queries           keys ->
        BM | BN | BN | BN | diagonal

Tiles have a mask only on the diagonal and where a document begins inside. A pair takes two products of D
multiplications, a logarithm and an exponential; the last two are the limit. passes.py has the names and shapes of the
arrays, and the launcher.
"""

import triton
import triton.language as tl

from ..common import INTERPRETED, LEAST_WEIGHT, PRECISION, at_head, inverse, row_pointers
from ..quadratic.tiles import count_queries, load_tile, load_vector, queries_of_program, row_scale, token_of


@triton.jit
def log2(x):
    """Return log2 |x|, -inf for 0."""
    if INTERPRETED:
        return tl.log2(tl.abs(x))
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [tl.abs(x)], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def exp2(x):
    """Return 2^x, 0 for -inf."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def tiles_of_rows(FIRST, T, bh, lo, BM: tl.constexpr, BN: tl.constexpr):
    """Return how BM rows from token lo on read keys: (the first token of each row's document, tiles).

    tiles: (where tiles without a mask begin, where those on the diagonal begin, where the loop over tiles with a mask
    begins, the tile in which row lo's document begins). If that tile is off the diagonal and holds tokens of an
    earlier document, it needs a mask too, and the loop begins one tile before the diagonal in its place. bh: the
    sequence and head of keys.
    """
    diagonal = lo // BN * BN
    if FIRST is None:
        return 0, (0, diagonal, diagonal, 0)
    else:
        FIRST = at_head(FIRST, T, bh)
        first = tl.load(FIRST + lo)
        begin = tl.minimum(tl.cdiv(first, BN) * BN, diagonal)
        masked = tl.where(first < begin, diagonal - BN, diagonal)
        return load_vector(FIRST, lo, BM), (begin, diagonal, masked, first // BN * BN)


@triton.jit
def _add_keys(acc, l, q, keys, rows, tiles, end, BN: tl.constexpr, MASKED: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Return (acc, l) with the keys of some tiles added: up to token `end`, those with or those without a mask.

    keys: (K, strides, V, strides, sequence, head, T); rows: (their tokens, p, p log2 f, the first tokens of their
    documents); tiles: of `tiles_of_rows`.
    """
    K, k_strides, V, v_strides, b, hkv, T = keys
    row, p, offset, first = rows
    begin, diagonal, masked, opened = tiles
    D: tl.constexpr = q.shape[1]
    ones = tl.full([BN, 8], 1.0, q.dtype)
    for start in tl.range(masked if MASKED else begin, end, BN, num_stages=1 if MASKED else None):
        if MASKED and DOCUMENTS:
            start = tl.where(start < diagonal, opened, start)
        k = load_tile(K, k_strides, b, start, hkv, T, BN, D, MASKED)
        x = log2(tl.dot(q, tl.trans(k), input_precision=PRECISION))
        w = exp2(p[:, None] * x + offset[:, None])
        if MASKED:
            column = start + tl.arange(0, BN)
            seen = row[:, None] >= column[None, :]
            if DOCUMENTS:
                seen = seen & (column[None, :] >= first[:, None])
            w = tl.where(seen, w, 0.0)
        v = load_tile(V, v_strides, b, start, hkv, T, BN, D, MASKED)
        w = w.to(v.dtype)
        l = tl.dot(w, ones, l, input_precision=PRECISION)
        acc = tl.dot(w, v, acc, input_precision=PRECISION)
    return acc, l


@triton.jit(do_not_specialize=["T", "OFFSET", "H", "HKV", "BH", "HEADS"])
def forward_kernel(
    Q, K, V,  # pointers or tensor descriptors
    Y, C,  # what is written
    KEY_SCALE, POWERS, FIRST,  # FIRST: None without documents
    strides,  # of Q, K and V; None: a tensor descriptor
    T, OFFSET,  # tokens; those before the first query, a multiple of 128, or None
    H, HKV, BH, HEADS,  # BH: B * H; HEADS: side by side
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write BM rows of y and c."""
    DOCUMENTS: tl.constexpr = FIRST is not None
    q_strides, k_strides, v_strides = strides
    n = count_queries(T, OFFSET)
    bh, b, h, hkv, start = queries_of_program(n, H, HKV, BH, HEADS, BM)
    lo = token_of(start, OFFSET)
    row = lo + tl.arange(0, BM)

    q = load_tile(Q, q_strides, b, start, h, n, BM, D, True)
    scale = row_scale(q.to(tl.float32), KEY_SCALE, T, b * HKV + hkv, lo)
    exponent = ((scale.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32) + scale * 0.0  # NaN stays NaN
    p = load_vector(at_head(POWERS, n, b), start, BM)
    offset = p * exponent
    first, tiles = tiles_of_rows(FIRST, T, b * HKV + hkv, lo, BM, BN)

    acc = tl.zeros([BM, D], tl.float32)
    l = tl.zeros([BM, 8], tl.float32)  # the same sum eight times, because no product is narrower
    keys, rows = (K, k_strides, V, v_strides, b, hkv, T), (row, p, offset, first)
    acc, l = _add_keys(acc, l, q, keys, rows, tiles, tiles[1], BN, False, DOCUMENTS)
    if DOCUMENTS:  # rows of documents that begin here see none of these keys
        seen = first[:, None] < lo
        acc, l = tl.where(seen, acc, 0.0), tl.where(seen, l, 0.0)
    acc, l = _add_keys(acc, l, q, keys, rows, tiles, tl.minimum(lo + BM, T), BN, True, DOCUMENTS)

    l = tl.max(l, 1)
    acc *= inverse(l)[:, None]
    tl.store(row_pointers(Y, b, start, h, n, H, BM, D), acc.to(Y.dtype.element_ty), row[:, None] < T)
    c = tl.where(l <= LEAST_WEIGHT, float("-inf"), offset - tl.log2(l))
    tl.store(at_head(C, n, bh) + (start + tl.arange(0, BM)), c)
