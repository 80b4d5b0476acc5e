"""The chunked form of power attention in Triton: cost linear in the context."""

import math

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import quadratic
from kernels.configs import choose
from kernels.layout import BLOCK, SPREAD_ROWS, STEP, TILE, entries, features, layout
from kernels.quadratic import PRECISION, _add, _empty, _inverse, _log_gates, _on, _to_unit

HALF = {torch.bfloat16: torch.float16, torch.float32: torch.float32}  # of features, values and states between kernels
LIFT = {2: 6, 4: 1}  # the largest entry of a row of q or k is brought into [2^n, 2^(n+1))
TOP = 14  # that of a chunk's values and the bound of a state into [2^14, 2^15)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# ---- pieces


@triton.jit
def _rows(X, strides, b, start, h, T, N: tl.constexpr, D: tl.constexpr):
    """[N, D]: rows start, start+1, ... of head h of sequence b, zeros from row T on."""
    row, column = start + tl.arange(0, N), tl.arange(0, D)
    X += tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[2]
    X += tl.cast(start, tl.int64) * strides[1]
    at = tl.arange(0, N)[:, None] * strides[1] + column[None, :] * strides[3]
    return tl.load(X + at, mask=row[:, None] < T, other=0.0)


@triton.jit
def _unit(largest):
    """The power of two that brings `largest` into [1, 2), at most 2^100 or its inverse; 1 for zero."""
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 27), 227)
    return tl.where(largest > 0, ((254 - exponent) << 23).to(tl.float32, bitcast=True), 1.0)


@triton.jit
def _power(x, P: tl.constexpr):
    return x * x if P == 2 else (x * x) * (x * x)


@triton.jit
def _first_8_bits(x):
    """x cut off after 8 bits, exact in bfloat16. (Rounding, and reading the result as float32 again, is slow.)"""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _times(x, y, acc, PRECISION: tl.constexpr):
    """acc + x @ y for float32 y, as exact as float32: in bfloat16, y is split in three."""
    if x.dtype == tl.float32:
        return tl.dot(x, y, acc, input_precision=PRECISION)
    else:
        high = _first_8_bits(y)
        middle = _first_8_bits(y - high)
        acc = tl.dot(x, (y - high - middle).to(tl.bfloat16), acc)
        acc = tl.dot(x, middle.to(tl.bfloat16), acc)
        return tl.dot(x, high.to(tl.bfloat16), acc)


@triton.jit
def _diagonal(d, N: tl.constexpr):
    """The matrix with d on its diagonal. A product with it leaves columns where the next product wants them: Triton
    keeps the layout of a product's result and would else go through shared memory."""
    at = tl.arange(0, N)
    return tl.where(at[:, None] == at[None, :], d[None, :], 0.0)


@triton.jit
def _products_done(i):
    """Where a turn of a loop ends whose products take features from registers: on Hopper, waits for them. Triton 3.6 to
    3.8 let the next turn write to these registers while the matrix unit may still read them (triton issue 9433)."""
    if not INTERPRETED and cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0):
        wait: tl.constexpr = "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;"
        tl.inline_asm_elementwise(wait, "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1)


# ---- gates


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "TP", "CHUNK", "HKV"])
def chunk_gates_kernel(LOG_G, INTO, OUT, WHOLE, g_b, g_t, g_h, T, TP, CHUNK, HKV, N: tl.constexpr):
    """One chunk of one sequence and head: the decay from before the chunk into each token, from each token to the last
    and through the whole chunk, zero across log_g = -inf."""
    chunks = tl.cdiv(T, CHUNK)
    bh, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    LOG_G += tl.cast(bh // HKV, tl.int64) * g_b + tl.cast(bh % HKV, tl.int64) * g_h
    INTO += tl.cast(bh, tl.int64) * TP
    OUT += tl.cast(bh, tl.int64) * TP
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP)
    total, resets = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for start in range(begin, end, N):
        at = start + tl.arange(0, N)
        log_g, reset = _log_gates(LOG_G, g_t, at, T)
        reset = reset.to(tl.int32)
        into = tl.exp((total + tl.associative_scan(log_g, 0, _add)).to(tl.float32))
        tl.store(INTO + at, tl.where(resets + tl.associative_scan(reset, 0, _add) == 0, into, 0.0), at < end)
        total += tl.sum(log_g, 0)
        resets += tl.sum(reset, 0)
    before, seen = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for start in range(begin, end, N):
        at = start + tl.arange(0, N)
        log_g, reset = _log_gates(LOG_G, g_t, at, T)
        reset = reset.to(tl.int32)
        out = tl.exp((total - before - tl.associative_scan(log_g, 0, _add)).to(tl.float32))
        tl.store(OUT + at, tl.where(seen + tl.associative_scan(reset, 0, _add) == resets, out, 0.0), at < end)
        before += tl.sum(log_g, 0)
        seen += tl.sum(reset, 0)
    tl.store(WHOLE + tl.program_id(0), tl.where(resets == 0, tl.exp(total.to(tl.float32)), 0.0))


@triton.jit
def _total(X, begin, end, N: tl.constexpr):
    """The sum of X[begin:end] in float64."""
    total = tl.zeros([], tl.float64)
    for start in range(begin, end, N):
        at = start + tl.arange(0, N)
        total += tl.sum(tl.load(X + at, mask=at < end, other=0.0).to(tl.float64), 0)
    return total


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "TP", "CHUNK", "H", "HKV", "blocks", "blocks_z"])
def chunk_dlog_g_kernel(
    INSIDE, READ, GIVEN, CARRIED, CARRIED_Z, LOG_G, DLOG_G, g_b, g_t, g_h, T, TP, CHUNK, H, HKV, blocks, blocks_z,
    N: tl.constexpr,
):  # fmt: skip
    """One chunk of one sequence and head: d log_g_m is the sum over i >= m of what query i read, from the chunk and
    from the state, less what its key gave inside the chunk; plus the sum over j < m of what key j gave to the state;
    plus what the chunk's whole gate carried from state to state. Nothing crosses a chunk."""
    chunks = tl.cdiv(T, CHUNK)
    bh, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    b, hkv = tl.cast(bh // HKV, tl.int64), bh % HKV
    group = H // HKV
    first = b * H + hkv * group
    INSIDE += first * (tl.cdiv(T, 128) * 128)
    GIVEN += tl.cast(bh, tl.int64) * TP
    LOG_G += b * g_b + tl.cast(hkv, tl.int64) * g_h
    DLOG_G += b * T * HKV + hkv
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
    everything = _total(CARRIED + tl.cast(tl.program_id(0), tl.int64) * blocks, 0, blocks, N)
    if CARRIED_Z is not None:
        everything += _total(CARRIED_Z + tl.cast(tl.program_id(0), tl.int64) * blocks_z, 0, blocks_z, N)
    everything += _total(GIVEN, begin, end, N)
    for back in range(begin, end, N):
        at = begin + (end - 1 - begin) // N * N - (back - begin) + tl.arange(0, N)
        x = tl.load(INSIDE + at, mask=at < end, other=0.0).to(tl.float64)
        x -= tl.load(GIVEN + at, mask=at < end, other=0.0)
        for i in range(group):
            x += tl.load(READ + (first + i) * TP + at, mask=at < end, other=0.0)
        log_g = tl.load(LOG_G + at.to(tl.int64) * g_t, mask=at < end, other=0.0)
        d = everything + tl.associative_scan(x, 0, _add, reverse=True)
        tl.store(DLOG_G + at.to(tl.int64) * HKV, tl.where(log_g == float("-inf"), 0.0, d).to(tl.float32), at < end)
        everything += tl.sum(x, 0)


# ---- rows of q or k, and what they are weighted with


@triton.jit
def _factors(
    L, DECAY, unit, at, b, h, T, TP, H, HKV, P: tl.constexpr, LIFT: tl.constexpr, QUERY: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """What phi(x_t) v_t is multiplied with (of queries: phi(x_t) dy_t), for rows `at` of X times `unit`."""
    factor = tl.full(unit.shape, 1.0, tl.float32)
    if GATED:
        factor = tl.load(DECAY + (tl.cast(b, tl.int64) * HKV + h // (H // HKV)) * TP + at)
    if QUERY:
        factor *= 2.0 ** (-LIFT * P)
        if L is not None:
            l = tl.load(L + (tl.cast(b, tl.int64) * H + h) * (tl.cdiv(T, 128) * 128) + at, mask=at < T, other=0.0)
            factor *= _inverse(l)
    else:
        factor *= _power(1 / unit, P)
    return tl.where(at < T, factor, 0.0)


@triton.jit
def _raised(x, LIFT: tl.constexpr):
    """[N]: the power of two that brings the largest entry of each row into [2^LIFT, 2^(LIFT+1))"""
    return _to_unit(tl.max(tl.abs(x), 1)) * (2.0**LIFT)


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV"])
def sums_kernel(
    X, V, Y, L, ONE, DECAY, WEIGHT, UNIT_V, Z, x_s, v_s, T, TP, CHUNK, H, HKV, P: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, LIFT: tl.constexpr, N: tl.constexpr, QUERY: tl.constexpr, GATED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What needs all rows of a chunk, of one sequence and head of keys:

    UNIT_V   what VALUES of `prepare_kernel` are multiplied by, so that their largest is in [2^14, 2^15)
    WEIGHT   what x^T Z x is multiplied with, as phi(x) S with v: 1, -delta_t or ONE, with the factors of the row
    Z        for p = 2 the sum of WEIGHT x x^T, float32 [D, D]
    """
    TP = TP // 256 * 256
    chunks = tl.cdiv(T, CHUNK)
    bh, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    b, group = bh // HKV, H // HKV
    most, acc = tl.zeros([N], tl.float32), tl.zeros([D, D], tl.float32)
    for i in range(group):
        h = bh % HKV * group + i
        head = tl.cast(b, tl.int64) * H + h
        for start in tl.range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP), N, num_stages=STAGES):
            at = start + tl.arange(0, N)
            x = _rows(X, x_s, b, start, h, T, N, D)
            unit = _raised(x.to(tl.float32), LIFT)
            factor = _factors(L, DECAY, unit, at, b, h, T, TP, H, HKV, P, LIFT, QUERY, GATED)
            v = _rows(V, v_s, b, start, h, T, N, E).to(tl.float32)
            largest = tl.max(tl.abs(v), 1)
            one = tl.full([N], 1.0, tl.float32)
            if ONE is not None:
                one = tl.load(ONE + head * T + at, mask=at < T, other=0.0)
            elif QUERY:
                y = Y + ((tl.cast(b, tl.int64) * T + start) * H + h) * E + tl.arange(0, N)[:, None] * (H * E)
                y = tl.load(y + tl.arange(0, E)[None, :], mask=at[:, None] < T, other=0.0).to(tl.float32)
                one = -tl.sum(v * y, 1)
            weight = one * factor
            if P > 2:
                largest = tl.maximum(largest, tl.abs(one))
                tl.store(WEIGHT + head * TP + at, weight)
            else:
                weight *= _power(unit, P)  # of the row as it came
                if WEIGHT is not None:
                    tl.store(WEIGHT + head * TP + at, weight)
                if WEIGHT is not None or GATED:
                    acc = _times(tl.trans(x), x.to(tl.float32) * weight[:, None], acc, PRECISION)
                else:
                    acc = tl.dot(tl.trans(x), x, acc, input_precision=PRECISION)
            most = tl.maximum(most, largest * factor)
    tl.store(UNIT_V + tl.program_id(0), _unit(tl.max(most, 0)) * (2.0**14))
    if P == 2:
        d = tl.arange(0, D)
        tl.store(Z + tl.cast(tl.program_id(0), tl.int64) * (D * D) + d[:, None] * D + d[None, :], acc)


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV"])
def prepare_kernel(
    X, V, L, DECAY, UNIT_V, Z, XT, VALUES, UNIT_X, FACTOR, DEN, x_s, v_s, T, TP, CHUNK, H, HKV,
    P: tl.constexpr, D: tl.constexpr, E: tl.constexpr, LIFT: tl.constexpr, N: tl.constexpr, QUERY: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """N rows of one sequence and head, of keys or of queries:

    XT       the rows, transposed, each brought to one magnitude
    VALUES   v times the decay to the chunk's end, or dy / l times that from its beginning, so that the sum of
             phi(row) VALUES is the chunk's state, times UNIT_V
    UNIT_X, FACTOR     by what rows were multiplied, what rows of results need to be multiplied by
    DEN      with Z, p = 2: each row's x^T Z x with the decay, for x scaled to [1, 2)
    """
    TP = TP // 256 * 256
    bh, start = tl.program_id(0) // (TP // N), tl.program_id(0) % (TP // N) * N
    b, h = bh // H, bh % H
    at = start + tl.arange(0, N)
    rows = _rows(X, x_s, b, start, h, T, N, D)
    x = rows.to(tl.float32)
    unit = _raised(x, LIFT)
    at_head = tl.cast(bh, tl.int64) * TP
    to = XT + at_head * D + tl.arange(0, D)[None, :] * TP + at[:, None]
    tl.store(to, (x * unit[:, None]).to(XT.dtype.element_ty))
    factor = _factors(L, DECAY, unit, at, b, h, T, TP, H, HKV, P, LIFT, QUERY, GATED)
    tl.store(FACTOR + at_head + at, factor)
    if Z is not None:
        d = tl.arange(0, D)
        chunks = tl.cdiv(T, CHUNK)
        state = (b * HKV + h // (H // HKV)) * chunks + tl.minimum(start // CHUNK, chunks - 1)
        z = tl.load(Z + tl.cast(state, tl.int64) * (D * D) + d[:, None] * D + d[None, :])
        zx = _times(rows, z, tl.zeros([N, D], tl.float32), PRECISION)
        den = tl.sum(zx * x, 1) * _power(unit, P) * factor
        padded = tl.cdiv(T, 128) * 128
        tl.store(DEN + tl.cast(bh, tl.int64) * padded + at, den, at < padded)
    if V is not None:
        chunks = tl.cdiv(T, CHUNK)
        unit_v = tl.load(UNIT_V + bh // (H // HKV) * chunks + tl.minimum(start // CHUNK, chunks - 1))
        tl.store(UNIT_X + at_head + at, unit)
        v = _rows(V, v_s, b, start, h, T, N, E).to(tl.float32) * (factor * unit_v)[:, None]
        tl.store(VALUES + (at_head + at)[:, None] * E + tl.arange(0, E)[None, :], v.to(VALUES.dtype.element_ty))


@triton.jit(do_not_specialize=["TP"])
def products_kernel(XT, OUT, FACTORS, TP, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """256 tokens of one sequence and head: N products of two entries at a time, M in all, for p = 4."""
    TP = TP // 256 * 256
    bh, block = tl.program_id(0) // (TP // 256), tl.program_id(0) % (TP // 256)
    t = block * 256 + tl.arange(0, 256)[None, :]
    XT += tl.cast(bh, tl.int64) * D * TP
    OUT += tl.cast(bh, tl.int64) * M * TP
    for m in range(0, M, N):
        entry = m + tl.arange(0, N)
        first, second = tl.load(FACTORS + entry), tl.load(FACTORS + M + entry)
        x = tl.load(XT + first[:, None] * TP + t) * tl.load(XT + second[:, None] * TP + t)
        tl.store(OUT + entry[:, None].to(tl.int64) * TP + t, x)


# ---- update state: sums over a chunk


@triton.jit
def _column_features(x, s, K: tl.constexpr):
    """x [64, K], s [4, K] -> [64, K]: each 16 rows times a scalar of the token."""
    return (x.reshape([4, 16, K]) * s[:, None, :]).reshape([64, K])


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "tiles", "F"])
def update_state_kernel(
    XT, VALUES, U, PARTS, GROUPS, down, T, TP, CHUNK, H, HKV, tiles, F,
    P: tl.constexpr, M: tl.constexpr, E: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Four tiles of one chunk's state: the sum over its tokens of phi(x) VALUES, times `down`."""
    TP = TP // 256 * 256
    groups = tiles // 4
    chunks = tl.cdiv(T, CHUNK)
    at = tl.program_id(0) // groups
    bh, chunk = at // chunks, at % chunks
    heads = H // HKV
    number = tl.program_id(0) % groups
    part = PARTS + tl.load(GROUPS + number * 2) * 16
    i = tl.load(GROUPS + number * 2 + 1)
    entry = tl.arange(0, 64)
    slices = tl.load(part + entry // 16) + entry % 16
    scalars = tl.load(part + 4 + tl.arange(0, 4)) + i
    scalars1, scalars2, scalars3 = scalars + 1, scalars + 2, scalars + 3

    acc0 = tl.zeros([64, E], tl.float32)
    acc1 = tl.zeros([64, E], tl.float32)
    acc2 = tl.zeros([64, E], tl.float32)
    acc3 = tl.zeros([64, E], tl.float32)
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP)
    for head in range(heads):
        row = bh // HKV * H + bh % HKV * heads + head
        x_of = XT + tl.cast(row, tl.int64) * (P // 2 * M) * TP
        for start in range(begin, end, K):
            t = (start // K * K + tl.arange(0, K))[None, :]
            v = VALUES.load([row * TP + start, 0])
            x = tl.load(x_of + slices[:, None] * TP + t)
            s0 = tl.load(x_of + scalars[:, None] * TP + t)
            acc0 = tl.dot(_column_features(x, s0, K), v, acc0, input_precision=PRECISION)
            s1 = tl.load(x_of + scalars1[:, None] * TP + t)
            acc1 = tl.dot(_column_features(x, s1, K), v, acc1, input_precision=PRECISION)
            s2 = tl.load(x_of + scalars2[:, None] * TP + t)
            acc2 = tl.dot(_column_features(x, s2, K), v, acc2, input_precision=PRECISION)
            s3 = tl.load(x_of + scalars3[:, None] * TP + t)
            acc3 = tl.dot(_column_features(x, s3, K), v, acc3, input_precision=PRECISION)
            _products_done(start)
    U += tl.cast(at, tl.int64) * F + number * (256 * E)
    to = U + tl.arange(0, 64)[:, None] * E + tl.arange(0, E)[None, :]
    tl.store(to, (acc0 * down).to(U.dtype.element_ty))
    tl.store(to + 64 * E, (acc1 * down).to(U.dtype.element_ty))
    tl.store(to + 128 * E, (acc2 * down).to(U.dtype.element_ty))
    tl.store(to + 192 * E, (acc3 * down).to(U.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "F", "first"])
def update_square_kernel(
    XT, WEIGHT, UNIT_V, U, down, T, TP, CHUNK, H, HKV, F, first, M: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """p = 4: 64 x 64 entries of one chunk's sum of w x x^T, and their mirror image, times `down`."""
    TP = TP // 256 * 256
    blocks: tl.constexpr = (M + 63) // 64
    chunks = tl.cdiv(T, CHUNK)
    at = tl.program_id(0) // (blocks * blocks)
    i, j = tl.program_id(0) // blocks % blocks * 64, tl.program_id(0) % blocks * 64
    if i <= j:
        bh, chunk = at // chunks, at % chunks
        heads, unit = H // HKV, tl.load(UNIT_V + at) * (1 / 16)
        m, n = i + tl.arange(0, 64), j + tl.arange(0, 64)
        acc = tl.zeros([64, 64], tl.float32)
        for head in range(heads):
            row = bh // HKV * H + bh % HKV * heads + head
            x_of = XT + tl.cast(row, tl.int64) * (2 * M) * TP
            for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP), K):
                t = (start // K * K + tl.arange(0, K))[None, :]
                w = tl.load(WEIGHT + tl.cast(row, tl.int64) * TP + t) * unit
                x = tl.load(x_of + m[:, None] * TP + t, mask=m[:, None] < M, other=0.0)
                y = tl.load(x_of + n[:, None] * TP + t, mask=n[:, None] < M, other=0.0)
                x = (x * w.to(x.dtype)).to(x.dtype)  # below 2^15
                acc = tl.dot(x, tl.trans(y), acc, input_precision=PRECISION)
        U += tl.cast(at, tl.int64) * F + first
        out = (acc * down * 16).to(U.dtype.element_ty)
        inside = (m[:, None] < M) & (n[None, :] < M)
        tl.store(U + m[:, None] * M + n[None, :], out, inside)
        tl.store(U + n[None, :] * M + m[:, None], out, inside)


# ---- discumsum: from sums over chunks to states between them


@triton.jit(do_not_specialize=["n", "F", "FS"])
def discumsum_kernel(
    X, UNIT_X, UNIT, WHOLE, INITIAL, BOUND, FINAL, OTHER, UNIT_OTHER, ORDERS, CARRIED, up, most, n, F, FS,
    P: tl.constexpr, E: tl.constexpr, N: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """N entries of the states of one sequence and head, in place: what a chunk gave becomes the state that precedes it,
    or with REVERSE the gradient of the state that follows it. Carried in float32.

    CARRIED  the sum over these entries of state times OTHER times the chunk's gate, for the gate's gradient
    """
    F = F // 64 * 64  # it is; without, loads are of one entry
    blocks = tl.cdiv(F, N)
    bh, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    at = block * N + tl.arange(0, N)
    inside = at < F
    state = tl.zeros([N], tl.float32)
    bound = 0.0
    if INITIAL is not None:
        state = tl.load(INITIAL + tl.cast(bh, tl.int64) * F + at, mask=inside, other=0.0)
        if SCALED:
            bound = tl.load(BOUND + bh)
    if SCALED:  # p = 4: they become part of the states, at most 24 / 32
        orders = tl.load(ORDERS + tl.where(at < FS, at // E, FS // E + at - FS), mask=inside, other=0.0)
        if P > 2:
            orders *= 1 / 32
    at_next = bh * n + (n - 1 if REVERSE else 0)
    whole_next, unit_next = 1.0, 1.0
    if GATED:
        whole_next = tl.load(WHOLE + at_next)
    if SCALED:
        unit_next = tl.load(UNIT_X + at_next)
    for step in tl.range(n, num_stages=STAGES):
        i = bh * n + (n - 1 - step if REVERSE else step)
        to = X + tl.cast(i, tl.int64) * F + at
        x = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        at_next = tl.maximum(i - 1, bh * n) if REVERSE else tl.minimum(i + 1, bh * n + n - 1)
        whole, unit_x = whole_next, unit_next  # what is needed next is on its way
        if GATED:
            whole_next = tl.load(WHOLE + at_next)
        if SCALED:
            unit_next = tl.load(UNIT_X + at_next)
        if SCALED:
            unit = _unit(bound) * (2.0**14)
            if P == 2:
                tl.store(to, (state * unit).to(X.dtype.element_ty), inside)
                tl.store(UNIT + i, unit, block == 0)
            else:
                tl.store(to, (state * unit * orders).to(X.dtype.element_ty), inside)
                tl.store(UNIT + i, unit * (1 / 32), block == 0)
            scale = 1 / unit_x
            bound = whole * bound + most * scale
            x *= up * scale
        else:
            tl.store(to, state, inside)
        if OTHER is not None:
            other = tl.load(OTHER + tl.cast(i, tl.int64) * F + at, mask=inside, other=0.0).to(tl.float32)
            product = state * other
            if SCALED and P == 2:
                product *= orders
            product = tl.sum(product, 0) * whole
            if SCALED:
                product /= tl.load(UNIT_OTHER + i)
            tl.store(CARRIED + tl.cast(i, tl.int64) * blocks + block, product)
        state = whole * state + x
    if FINAL is not None:
        tl.store(FINAL + tl.cast(bh, tl.int64) * F + at, state, inside)


# ---- query state


@triton.jit
def _rows_of_program(T, CHUNK, H, HKV, BM: tl.constexpr, program, first=0):
    """(sequence and head, sequence, head, the first of BM rows, their chunk, the number of its state); heads count
    from `first`"""
    blocks = tl.cdiv(T, BM)
    bh, lo = first + program // blocks, program % blocks * BM
    b, h, chunk = bh // H, bh % H, lo // CHUNK
    return bh, b, h, lo, chunk, (b * HKV + h // (H // HKV)) * tl.cdiv(T, CHUNK) + chunk


@triton.jit
def _row_features(x, s, N: tl.constexpr, TILES: tl.constexpr):
    """x [N, 64], s [4 TILES, N] -> [N, 64 TILES]: each 16 columns times a scalar of the row."""
    if TILES == 1:
        return (x.reshape([N, 4, 16]) * tl.trans(s)[:, :, None]).reshape([N, 64])
    else:
        return (x.reshape([N, 1, 4, 16]) * tl.trans(s).reshape([N, TILES, 4, 1])).reshape([N, 64 * TILES])


@triton.jit
def _square_block(zx, XT, Z, m, n, row, TP, M: tl.constexpr, PRECISION: tl.constexpr):
    """zx plus what entries n to n + 63 of each row's x contribute to entries m to m + 63 of Z x"""
    entry, other = m + tl.arange(0, 64)[None, :], n + tl.arange(0, 64)[:, None]
    z = tl.load(Z + other * M + entry, mask=(other < M) & (entry < M), other=0.0)
    x = tl.load(XT + other * TP + row[None, :], mask=other < M, other=0.0)
    return tl.dot(tl.trans(x), z, zx, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "tiles", "parts", "skip", "F"])
def query_state_kernel(
    XT, S, UNIT_S, FACTOR, PARTS, OUT, DEN, T, TP, CHUNK, H, HKV, tiles, parts, skip, F,
    P: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr, SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BM rows of phi(x) S, for the state S before (or after) their chunk. With SUMS the numerators, in OUT, of queries
    that are scaled to [1, 2), and for p = 4 the denominators, in DEN; else added to what OUT has."""
    TP, F = TP // 256 * 256, F // 64 * 64
    bh, b, h, lo, chunk, state = _rows_of_program(T, CHUNK, H, HKV, BM, tl.program_id(0))
    row = lo + tl.arange(0, BM)
    XT += tl.cast(bh, tl.int64) * (P // 2 * M) * TP
    entry = tl.arange(0, 64)
    acc = tl.zeros([BM, E], tl.float32)
    factor = tl.load(FACTOR + tl.cast(bh, tl.int64) * TP + row) / tl.load(UNIT_S + state)
    S += tl.cast(state, tl.int64) * F
    inside, done = tl.arange(0, 64 * TILES)[:, None] * E + tl.arange(0, E)[None, :], 0
    for number in range(parts if chunk != skip else 0):
        part = PARTS + number * 16
        slices = tl.load(part + entry // 16) + entry % 16
        scalars = tl.load(part + 4 + tl.arange(0, 4 * TILES) % 4) + tl.arange(0, 4 * TILES) // 4
        orders = tl.load(part + 8 + entry // 16)
        count = tl.load(part + 12)
        x = tl.trans(tl.load(XT + slices[:, None] * TP + row[None, :]))
        x = tl.dot(x, _diagonal(orders, 64).to(x.dtype), input_precision=PRECISION).to(x.dtype)
        for i in range(0, count, TILES):
            s = tl.load(S + (done + i) * (64 * E) + inside)
            by = tl.load(XT + (scalars + i)[:, None] * TP + row[None, :])
            acc = tl.dot(_row_features(x, by, BM, TILES), s, acc, input_precision=PRECISION)
            _products_done(i)
        done += count
    acc *= factor[:, None]
    column = tl.arange(0, E)
    to = (tl.cast(b, tl.int64) * T + lo) * H + h
    to = OUT + to * E + tl.arange(0, BM)[:, None] * (H * E) + column[None, :]
    mask = row[:, None] < T
    if SUMS:
        tl.store(to, acc, mask)
        if P > 2:
            den = tl.zeros([BM], tl.float32)
            z = S + tiles * (64 * E)
            for m in range(0, M if chunk != skip else 0, 64):
                zx = tl.zeros([BM, 64], tl.float32)
                for n in tl.range(m + 64, M, 64, num_stages=2):  # Z is symmetric
                    zx = _square_block(zx, XT, z, m, n, row, TP, M, PRECISION)
                zx = _square_block(2 * zx, XT, z, m, m, row, TP, M, PRECISION)
                at_m = m + tl.arange(0, 64)[:, None]
                x = tl.load(XT + at_m * TP + row[None, :], mask=at_m < M, other=0.0)
                den += tl.sum(zx * tl.trans(x), 1)
            den *= factor
            tl.store(DEN + tl.cast(bh, tl.int64) * (tl.cdiv(T, 128) * 128) + row, den, row < T)
    else:
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, acc.to(OUT.dtype.element_ty), mask)


@triton.jit
def _one_gradient(v, x, S, WHERE, acc, E: tl.constexpr, PRECISION: tl.constexpr):
    """acc + (v x) S_i^T, for the rows S_i of the state that hold the products of one entry, x, with others"""
    where = tl.load(WHERE)
    s = tl.load(S + where[:, None] * E + tl.arange(0, E)[None, :])
    return tl.dot(v * x[:, None], tl.trans(s), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "tiles", "skip"])
def query_gradient_kernel(
    XT, VALUES, S, UNIT_S, UNIT_V, UNIT_X, WHERE, OUT, X, Z, WEIGHT, READ, x_s, T, TP, CHUNK, H, HKV, tiles, skip,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, WEIGHTED: tl.constexpr, GATED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BM rows of the gradient of phi(x) S VALUES^T + w x^T Z x to x, p = 2, added to what OUT has; with gates also x
    times that gradient over p, what the row read from (gave to) the state, in READ."""
    TP = TP // 256 * 256
    bh, b, h, lo, chunk, state = _rows_of_program(T, CHUNK, H, HKV, BM, tl.program_id(0))
    row = lo + tl.arange(0, BM)
    e, d = tl.arange(0, E), tl.arange(0, D)
    at = tl.cast(bh, tl.int64) * TP + row
    XT += tl.cast(bh, tl.int64) * D * TP
    S += tl.cast(state, tl.int64) * tiles * (64 * E)
    v = tl.load(VALUES + at[:, None] * E + e[None, :])
    # VALUES times an entry of x must stay within float16
    v = tl.dot(v, _diagonal(tl.full([E], 1 / 256, tl.float32), E).to(v.dtype), input_precision=PRECISION).to(v.dtype)
    acc = tl.zeros([BM, D], tl.float32)
    where = WHERE + d
    for i in range(0, D if chunk != skip else 0, 4):
        x = tl.trans(tl.load(XT + (i + tl.arange(0, 4))[:, None] * TP + row[None, :])).reshape([BM, 2, 2])
        even, odd = tl.split(x)
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        acc = _one_gradient(v, x0, S, where + i * D, acc, E, PRECISION)
        acc = _one_gradient(v, x1, S, where + i * D + D, acc, E, PRECISION)
        acc = _one_gradient(v, x2, S, where + i * D + 2 * D, acc, E, PRECISION)
        acc = _one_gradient(v, x3, S, where + i * D + 3 * D, acc, E, PRECISION)
        _products_done(i)
    acc *= (512 * tl.load(UNIT_X + at) / (tl.load(UNIT_S + state) * tl.load(UNIT_V + state)))[:, None]
    x = _rows(X, x_s, b, lo, h, T, BM, D)
    z = tl.load(Z + tl.cast(state, tl.int64) * (D * D) + d[:, None] * D + d[None, :])
    zx = _times(x, z, tl.zeros([BM, D], tl.float32), PRECISION)
    if WEIGHTED:
        zx *= tl.load(WEIGHT + at)[:, None]
    acc += 2 * zx
    if GATED:
        tl.store(READ + at, 0.5 * tl.sum(acc * x.to(tl.float32), 1))
    to = (tl.cast(b, tl.int64) * T + lo) * H + h
    to = OUT + to * D + tl.arange(0, BM)[:, None] * (H * D) + d[None, :]
    mask = row[:, None] < T
    acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, acc.to(OUT.dtype.element_ty), mask)


@triton.jit
def _added_up(x, at, D: tl.constexpr, PRECISION: tl.constexpr):
    """[BM, D]: the sums of the columns of x [BM, N] with the same number in `at` [N]; D is none."""
    places = (at[:, None] == tl.arange(0, D)[None, :]).to(x.dtype)
    return tl.dot(x, places, input_precision=PRECISION)


@triton.jit(do_not_specialize=["F", "n"])
def spread_kernel(S, OUT, WHERE, F, n, E: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """One state as the gradient to x needs it, p = 4: for every scalar in each list of the layout E rows with what its
    products with BLOCK entries hold, and the same of every entry for BLOCK scalars."""
    F = F // 64 * 64
    state, first = tl.program_id(0) // (n // N), tl.program_id(0) % (n // N) * N
    e, m = tl.arange(0, E), tl.arange(0, BLOCK)
    S += tl.cast(state, tl.int64) * F
    OUT += (tl.cast(state, tl.int64) * n + first) * (E * BLOCK)
    for i in range(N):
        rows = tl.load(WHERE + (first + i) * BLOCK + m)
        s = tl.load(S + rows[:, None] * E + e[None, :])
        tl.store(OUT + (i * E + e)[:, None] * BLOCK + m[None, :], tl.trans(s))


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "F", "skip", "first"])
def square_times_kernel(
    XT, SQUARE, OUT, T, TP, CHUNK, H, HKV, F, skip, first, M: tl.constexpr, N: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """2^-12 Z x for BM rows, p = 4: N of its M entries, stored as x is, transposed. For heads from `first` on. Entries
    of Z are below 2^12 and those of x below 2^4: within float16, with 2080 of them at D = 64 too."""
    TP, F = TP // 256 * 256, F // 64 * 64
    parts: tl.constexpr = (M + N - 1) // N
    bh, b, h, lo, chunk, state = _rows_of_program(T, CHUNK, H, HKV, BM, tl.program_id(0) // parts, first)
    if chunk != skip:
        row, m = lo + tl.arange(0, BM)[None, :], tl.program_id(0) % parts * N + tl.arange(0, N)
        x_of, z_of = XT + tl.cast(bh, tl.int64) * (2 * M) * TP, SQUARE + tl.cast(state, tl.int64) * F
        zx = tl.zeros([N, BM], tl.float32)
        for i in range(0, M, 64):
            n = i + tl.arange(0, 64)
            z = tl.load(z_of + m[:, None] * M + n[None, :], mask=(m[:, None] < M) & (n[None, :] < M), other=0.0)
            x = tl.load(x_of + n[:, None] * TP + row, mask=n[:, None] < M, other=0.0)
            zx = tl.dot(z, x, zx, input_precision=PRECISION)
        to = OUT + (tl.cast(bh - first, tl.int64) * M + m[:, None]) * TP + row
        tl.store(to, (zx * 2.0**-12).to(OUT.dtype.element_ty), m[:, None] < M)


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "skip", "n", "first"])
def query_gradient_of_products_kernel(
    XT, ROWS, VALUES, S, ZX, UNIT_S, UNIT_V, UNIT_X, WEIGHT, LISTS, FACTORS, OUT, X, READ, x_s, T, TP, CHUNK, H, HKV,
    skip, n, first, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for p = 4, of phi(x) S VALUES^T + WEIGHT x^T Z x for the products x of the row's entries: to BLOCK of
    them at a time, and from there to the row. A feature is an entry times a scalar: first to entries, then to scalars,
    N others a step. For heads from `first` on, S as `spread_kernel` has it and ZX by `square_times_kernel`."""
    TP = TP // 256 * 256
    bh, b, h, lo, chunk, state = _rows_of_program(T, CHUNK, H, HKV, BM, tl.program_id(0), first)
    row = lo + tl.arange(0, BM)
    at = tl.cast(bh, tl.int64) * TP + row
    XT += tl.cast(bh, tl.int64) * (2 * M) * TP
    ROWS += tl.cast(bh, tl.int64) * D * TP
    v = tl.load(VALUES + at[:, None] * E + tl.arange(0, E)[None, :])
    v = tl.dot(v, _diagonal(tl.full([E], 1 / 32, tl.float32), E).to(v.dtype), input_precision=PRECISION).to(v.dtype)
    # twice, as x is on both sides of Z; 2^12 as in ZX, 1/32 as in v
    weight = tl.load(WEIGHT + at) * (tl.load(UNIT_V + state) * (2 * 2.0**12 / 32))
    blocks: tl.constexpr = (M + BLOCK - 1) // BLOCK
    acc = tl.zeros([BM, D], tl.float32)
    in_step = tl.arange(0, N * E)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    before = (state - first // (H // HKV) * tl.cdiv(T, CHUNK)) * n
    for step in range(2 * blocks if chunk != skip else 0):
        these = step // blocks * M  # places of entries, then of scalars
        others = M - these
        m = tl.load(LISTS + 4 * step) + tl.arange(0, BLOCK)
        begin, end = tl.load(LISTS + 4 * step + 1), tl.load(LISTS + 4 * step + 2)
        place = before + tl.load(LISTS + 4 * step + 3) - begin
        dx = tl.zeros([BM, BLOCK], tl.float32)
        for i in range(begin, end, N):
            s = tl.load(S + tl.cast(place + i, tl.int64) * (E * BLOCK) + in_step)
            by = tl.load(XT + (others + i + tl.arange(0, N))[:, None] * TP + row[None, :])
            vx = (v.reshape([BM, 1, E]) * tl.trans(by).reshape([BM, N, 1])).reshape([BM, N * E])
            dx = tl.dot(vx, s, dx, input_precision=PRECISION)
            _products_done(i)
        inside = (m >= 0) & (m < M)
        m = tl.where(inside, m, 0)
        if step < blocks:
            zx = tl.load(ZX + (tl.cast(bh - first, tl.int64) * M + m[:, None]) * TP + row[None, :])
            dx += tl.where(inside[None, :], tl.trans(zx).to(tl.float32) * weight[:, None], 0.0)
        m += these
        one, two = tl.load(FACTORS + m), tl.load(FACTORS + 2 * M + m)
        unit = _unit(tl.max(tl.abs(dx), 1)) * (2.0**10)
        dx = (dx * unit[:, None]).to(v.dtype)
        x = tl.trans(tl.load(ROWS + two[:, None] * TP + row[None, :]))
        d = _added_up(dx * x, tl.where(inside, one, D), D, PRECISION)
        x = tl.trans(tl.load(ROWS + one[:, None] * TP + row[None, :]))
        acc += (d + _added_up(dx * x, tl.where(inside, two, D), D, PRECISION)) / unit[:, None]
    acc *= (32 * tl.load(UNIT_X + at) / (tl.load(UNIT_S + state) * tl.load(UNIT_V + state)))[:, None]
    if GATED:
        x = _rows(X, x_s, b, lo, h, T, BM, D)
        tl.store(READ + at, 0.25 * tl.sum(acc * x.to(tl.float32), 1))
    to = (tl.cast(b, tl.int64) * T + lo) * H + h
    to = OUT + to * D + tl.arange(0, BM)[:, None] * (H * D) + tl.arange(0, D)[None, :]
    mask = row[:, None] < T
    acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, acc.to(OUT.dtype.element_ty), mask)


# ---- launchers


def state_size(D, p):
    """Entries of a state: S, and for p = 4 Z = sum x x^T behind it."""
    return features(D, p) * D + (0 if p == 2 else entries(D, p) ** 2)


def bytes_needed(q, k, p, chunk, backward=True):
    """Bytes that `forward`, and with it `backward`, allocate beyond y and the gradients: states, what is made of keys
    and values and kept, what is made of queries and dy, and for p = 4 what `query_gradient` makes of both."""
    (B, T, H, D), HKV, size = q.shape, k.shape[2], HALF[q.dtype].itemsize
    states = B * HKV * -(-T // chunk) * (state_size(D, p) * size + 4 * D * D * (p == 2))
    row, products = 2 * D * size + 8, 2 * entries(D, p) * size if p == 4 else 0
    rows = B * T * (HKV * row + H * (row + products))
    if p == 4 and backward:
        each = _spread_bytes(D, -(-T // chunk), H // HKV * T, size)
        rows += each * max(1, min(B * HKV, SPREAD // each))
    return states * (2 if backward else 1) + rows + 4 * B * H * T * D * (not backward)


def _spread_bytes(D, chunks, rows, size):
    """What `query_gradient` allocates for a head of keys of so many chunks and its rows of queries, p = 4."""
    return (chunks * SPREAD_ROWS[D] * D * BLOCK + rows * entries(D, 4)) * size


class Sizes:
    """What the launchers of one call share."""

    def __init__(self, q, k, p, chunk):
        (B, T, H, D), HKV = q.shape, k.shape[2]
        self.B, self.T, self.H, self.HKV, self.D, self.p, self.q = B, T, H, HKV, D, p, q
        self.chunk, self.chunks = chunk, triton.cdiv(T, chunk)
        self.TP = triton.cdiv(T, 256) * 256
        of_row = entries(D, p) * p // 2
        if of_row * self.TP >= 2**31:  # places in XT are 32 bits
            most = (2**31 - 1) // of_row // 256 * 256
            raise ValueError(
                f"a sequence of p={p} and head dimension {D} may have at most {most:,} tokens at once, got {T:,}: cut "
                "it into pieces, each with the state of those before"
            )
        self.layout = layout(D, p, q.device)
        self.FS = self.layout.tiles * TILE * D
        self.F = state_size(D, p)
        self.half = HALF[q.dtype]
        self.precision = PRECISION[q.dtype]
        most = chunk * H // HKV * 2 ** (TOP + 1 + p * (LIFT[p] + 1))
        self.most = 2.0 ** math.ceil(math.log2(most))  # an entry of a chunk's sum, in VALUES' units


def chunk_gates(log_g, s):
    """INTO, OUT [B * Hkv, TP] and WHOLE [B * Hkv, chunks]; None without gates."""
    if log_g is None:
        return None, None, None
    into, out = (_empty(log_g, s.B * s.HKV, s.TP) for _ in range(2))
    whole = _empty(log_g, s.B * s.HKV, s.chunks)
    chunk_gates_kernel[(s.B * s.HKV * s.chunks,)](
        log_g, into, out, whole, *log_g.stride(), s.T, s.TP, s.chunk, s.HKV, N=min(1024, s.chunk & -s.chunk)
    )
    return into, out, whole


def prepare(s, x, v=None, y=None, l=None, decay=None, one=None, Z=None):
    """For keys (x, v), queries (x; x, dy, y, l) or any rows (x, v, one [B, H, T]): {"rows", "xt", "values", "unit_x",
    "factor"}, see `prepare_kernel`, and {"unit_v", "weight", "z" [B * Hkv, chunks, D * D]}, see `sums_kernel`; xt is
    rows, or for p = 4 their products. With Z "den" too."""
    rows, (N, warps) = x.shape[2], PREPARE if Z is None else PREPARE_Z[s.D > 64]
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=x.device)
    query = v is None or y is not None
    out = dict.fromkeys(("values", "unit_x", "weight", "unit_v", "z", "den"))
    out["rows"], out["factor"] = new(s.B * rows, s.D, s.TP, dtype=s.half), new(s.B * rows, s.TP)
    if Z is not None:
        out["den"] = new(s.B, rows, quadratic.padded(s.T))
    sizes = dict(P=s.p, D=s.D, E=s.D, LIFT=LIFT[s.p], QUERY=query, GATED=decay is not None, PRECISION=s.precision)
    strides = x.stride(), None if v is None else v.stride()
    if v is not None:
        out["values"], out["unit_x"] = new(s.B * rows * s.TP, s.D, dtype=s.half), new(s.B * rows, s.TP)
        out["unit_v"] = new(s.B * s.HKV, s.chunks)
        if s.p > 2 or query or one is not None:
            out["weight"] = new(s.B * rows, s.TP)
        if s.p == 2:
            out["z"] = new(s.B * s.HKV, s.chunks, s.D * s.D)
        per_step, sum_warps, stages = SUMS[s.D > 64]
        sums_kernel[(s.B * s.HKV * s.chunks,)](
            x, v, y, l, one, decay, out["weight"], out["unit_v"], out["z"], *strides, s.T, s.TP, s.chunk, rows, s.HKV,
            N=per_step, STAGES=stages, num_warps=sum_warps, **sizes,
        )  # fmt: skip
    prepare_kernel[(s.B * rows * s.TP // N,)](
        x, v, l, decay, out["unit_v"], Z, out["rows"], out["values"], out["unit_x"], out["factor"], out["den"],
        *strides, s.T, s.TP, s.chunk, rows, s.HKV, N=N, num_warps=warps, **sizes,
    )  # fmt: skip
    out["xt"] = products(s, out["rows"])
    return out


def products(s, rows):
    """For p = 4 the products of two entries of each row, [B * H, 2 M, TP]; for p = 2 the rows."""
    if s.p == 2:
        return rows
    M = 2 * s.layout.M  # as entries and, in another order, as scalars
    out = torch.empty(len(rows), M, s.TP, dtype=s.half, device=rows.device)
    grid = (len(rows) * s.TP // 256,)
    products_kernel[grid](rows, out, s.layout.factors, s.TP, D=s.D, M=M, N=16)
    return out


def update_state(s, rows, prepared, config=None):
    """The sums of each chunk, [B * Hkv, chunks, F], for `discumsum` to make states of."""
    U = torch.empty(s.B * s.HKV, s.chunks, s.F, dtype=s.half, device=prepared["xt"].device)
    c = config or choose("update_state", s.q, s.p)
    tiles, M, down = s.layout.tiles, s.layout.M, 2.0**15 / s.most
    values = TensorDescriptor.from_tensor(prepared["values"], [c.BN, s.D])
    update_state_kernel[(s.B * s.HKV * s.chunks * tiles // 4,)](
        prepared["xt"], values, U, s.layout.parts, s.layout.groups, down, s.T, s.TP, s.chunk, rows,
        s.HKV, tiles, s.F, P=s.p, M=M, E=s.D, K=c.BN, PRECISION=s.precision, **c.launch(),
    )  # fmt: skip
    if s.p == 4:
        update_square_kernel[(s.B * s.HKV * s.chunks * triton.cdiv(M, 64) ** 2,)](
            prepared["xt"], prepared["weight"], prepared["unit_v"], U, down, s.T, s.TP, s.chunk, rows, s.HKV, s.F, s.FS,
            M=M, K=c.BN, PRECISION=s.precision, num_warps=4, num_stages=c.stages,
        )  # fmt: skip
    return U


def discumsum(s, X, unit_x, whole, initial=None, other=None, unit_other=None, reverse=False, final=False):
    """X [B * Hkv, chunks, F] becomes, in place, the states before each chunk (after, with reverse). Without unit_x it
    is float32, in units of one, and s need not be given.

    Returns (unit, final, carried): by what the states are multiplied [B * Hkv, chunks], the state after all, float32
    [B * Hkv, F] if wanted, and if there is an `other` the sums for the gates' gradient [B * Hkv, chunks, blocks].
    """
    BH, n, F = X.shape
    scaled = unit_x is not None
    N, warps, stages = DISCUMSUM[scaled]
    N = min(N, triton.next_power_of_2(F))
    blocks = triton.cdiv(F, N)
    unit = _empty(X, BH, n) if scaled else None
    last = _empty(X, BH, F) if final else None
    carried = None if other is None else _empty(X, BH, n, blocks)
    most, FS, p, E = (s.most, s.FS, s.p, s.D) if scaled else (1.0, F, 2, 64)
    bound = None if initial is None or not scaled else initial.abs().amax(1)
    discumsum_kernel[(BH * blocks,)](
        X, unit_x, unit, whole, initial, bound, last, other, unit_other, s.layout.orders if scaled else None, carried,
        most / 2.0**15, most, n, F, FS, P=p, E=E, N=N, SCALED=scaled, GATED=whole is not None,
        REVERSE=reverse, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return unit, last, carried


def query_state(s, prepared, S, unit_s, skip, out=None, config=None):
    """phi(x) S for every row: (num [B, T, H, E], den [B, H, T padded]) float32, for p = 2 den as `prepare` made it; or
    added to `out`."""
    sums = out is None
    rows = prepared["xt"].shape[0] // s.B
    den = prepared.get("den")
    if sums:
        out = _empty(S, s.B, s.T, rows, s.D)
        if s.p == 4:
            den = torch.zeros(s.B, rows, quadratic.padded(s.T), dtype=torch.float32, device=S.device)
    c = config or choose("query_state", s.q, s.p)
    query_state_kernel[(triton.cdiv(s.T, c.BM) * s.B * rows,)](
        prepared["xt"], S, unit_s, prepared["factor"], s.layout.parts, out, den, s.T, s.TP,
        s.chunk, rows, s.HKV, s.layout.tiles, len(s.layout.parts), skip, s.F, P=s.p, E=s.D, M=s.layout.M, BM=c.BM,
        TILES=c.BN // 64, SUMS=sums, PRECISION=s.precision, **c.launch(),
    )  # fmt: skip
    return out, den


def query_gradient(s, prepared, S, unit_s, skip, out, x, Z, weight, gated, config=None):
    """Adds to `out` the gradient to each row of what it reads from (gives to) a state; returns READ, or None."""
    rows = x.shape[2]
    read = _empty(S, s.B * rows, s.TP) if gated else None
    c = config or choose("query_gradient", s.q, s.p)
    if s.p == 4:
        n, M, group = len(s.layout.where), s.layout.M, rows // s.HKV
        each = _spread_bytes(s.D, s.chunks, group * s.TP, S.element_size())
        at_once = max(1, min(s.B * s.HKV, SPREAD // each))  # heads of keys
        states = torch.empty(at_once * s.chunks * n * s.D, BLOCK, dtype=s.half, device=S.device)
        zx = torch.empty(at_once * group, M, s.TP, dtype=s.half, device=S.device)
        N = min(c.BN // s.D, STEP)
        for first in range(0, s.B * s.HKV, at_once):
            heads = min(at_once, s.B * s.HKV - first)
            blocks = heads * group * triton.cdiv(s.T, c.BM)
            shared = s.T, s.TP, s.chunk, rows, s.HKV
            spread_kernel[(heads * s.chunks * n // STEP,)](
                S[first:], states, s.layout.where, s.F, n, E=s.D, N=STEP, BLOCK=BLOCK
            )
            square_times_kernel[(blocks * triton.cdiv(M, 64),)](
                prepared["xt"], S[..., s.FS :], zx, *shared, s.F, skip, first * group, M=M, N=64, BM=c.BM,
                PRECISION=s.precision, num_warps=c.warps, num_stages=min(3, c.stages),
            )  # fmt: skip
            query_gradient_of_products_kernel[(blocks,)](
                prepared["xt"], prepared["rows"], prepared["values"], states, zx, unit_s, prepared["unit_v"],
                prepared["unit_x"], prepared["weight"], s.layout.lists, s.layout.factors, out, x, read, x.stride(),
                *shared, skip, n, first * group, D=s.D, E=s.D, M=M, BM=c.BM, N=N, BLOCK=BLOCK, GATED=gated,
                PRECISION=s.precision, **c.launch(),
            )  # fmt: skip
        return read
    query_gradient_kernel[(triton.cdiv(s.T, c.BM) * s.B * rows,)](
        prepared["xt"], prepared["values"], S, unit_s, prepared["unit_v"], prepared["unit_x"], s.layout.where, out, x,
        Z, weight, read, x.stride(), s.T, s.TP, s.chunk, rows, s.HKV, s.layout.tiles, skip, D=s.D, E=s.D,
        BM=c.BM, WEIGHTED=weight is not None, GATED=gated, PRECISION=s.precision, **c.launch(),
    )  # fmt: skip
    return read


SPREAD = 2**30  # bytes of what `query_gradient` makes at once, p = 4, of all heads or of one at least
DISCUMSUM = ((128, 1, 8), (1024, 2, 3))  # entries of a program, warps, chunks in flight; of Z, and of S
SUMS = ((64, 4, 3), (32, 8, 2))  # rows at a time, warps, stages; up to D = 64 and beyond
PREPARE = (64, 4)  # rows at a time, warps
PREPARE_Z = ((128, 8), (64, 8))  # the same with denominators, up to D = 64 and beyond
KEPT = ("rows", "values", "unit_x", "factor", "unit_v")  # of keys and values, for the backward pass


def forward(q, k, v, log_g=None, initial=None, *, p, chunk, final=False):
    """q [B, T, H, D], k, v [B, T, Hkv, D], log_g [B, T, Hkv] float32 or None; initial: (S, Z) float32 [B * Hkv, F] and
    [B * Hkv, D * D] in this file's layout, or None. chunk: tokens, a multiple of 128.

    Returns y, what `backward` needs (l, S, its units, Z, and what `prepare` made of keys and values, see KEPT), and the
    last state (S, Z) if `final`.
    """
    s = Sizes(q, k, p, chunk)
    with _on(q.device):
        into, out, whole = chunk_gates(log_g, s)
        keys = prepare(s, k, v, decay=out)
        S = update_state(s, s.HKV, keys)
        S0, Z0 = initial or (None, None)
        unit_s, S_last, _ = discumsum(s, S, keys["unit_v"], whole, S0, final=final)
        Z = Z_last = None
        if p == 2:
            Z = keys["z"]
            _, Z_last, _ = discumsum(None, Z, None, whole, Z0, final=final)
        kept = [keys[name] for name in KEPT]
        del keys
        queries = prepare(s, q, decay=into, Z=Z)
        skip = 0 if initial is None else -1
        num, den = query_state(s, queries, S, unit_s, skip)
        del queries
        y, l = quadratic.forward(q, k, v, log_g, p=p, chunk=chunk, num=num, den=den)
    return y, (l, S, unit_s, Z, *kept), (S_last, Z_last)


def backward(dy, q, k, v, log_g, y, saved, final=None, initial=False, *, p, chunk):
    """dq, dk, dv, dlog_g (None without gates) and d initial state (S, Z), or (None, None); final: (dS, dZ) or None."""
    l, S, unit_s, Z, *kept = saved
    s = Sizes(q, k, p, chunk)
    with _on(q.device):
        dq, dk, dv, inside = quadratic.backward(dy, None, q, k, v, log_g, y, l, p=p, chunk=chunk, before=initial)
        into, out, whole = chunk_gates(log_g, s)
        queries = prepare(s, q, dy, y, l, decay=into)
        dS = update_state(s, s.H, queries)
        dS_last, dZ_last = final or (None, None)
        unit_d, dS0, carried = discumsum(
            s, dS, queries["unit_v"], whole, dS_last, *((None, None) if log_g is None else (S, unit_s)), True, initial
        )
        dZ = dZ0 = carried_z = None
        if p == 2:
            dZ = queries["z"]
            _, dZ0, carried_z = discumsum(
                None, dZ, None, whole, dZ_last, None if log_g is None else Z, None, True, initial
            )
        gated = log_g is not None
        skip = -1 if initial else 0
        read = query_gradient(s, queries, S, unit_s, skip, dq, q, Z, queries["weight"], gated)
        del queries
        keys = dict(zip(KEPT, kept, strict=True))
        keys |= {"xt": products(s, keys["rows"]), "weight": keys["factor"]}
        skip = s.chunks - 1 if final is None else -1
        given = query_gradient(s, keys, dS, unit_d, skip, dk, k, dZ, out, gated)
        query_state(s, keys, dS, unit_d, skip, out=dv)
        dlog_g = None
        if gated:
            dlog_g = _empty(q, s.B, s.T, s.HKV)
            chunk_dlog_g_kernel[(s.B * s.HKV * s.chunks,)](
                inside, read, given, carried, carried_z, log_g, dlog_g, *log_g.stride(), s.T, s.TP, chunk, s.H, s.HKV,
                carried.shape[2], 0 if carried_z is None else carried_z.shape[2], N=min(1024, chunk & -chunk),
            )  # fmt: skip
    return dq, dk, dv, dlog_g, (dS0, dZ0)


def from_canonical(S, z, p):
    """(S [B, Hkv, Dphi, D], z [B, Hkv, Dphi]) in the order of `symmetric_power_embedding` -> the kernels' layout,
    float32: for p = 2 [B * Hkv, F] and Z [B * Hkv, D * D], for p = 4 [B * Hkv, F], Z in it, and None. Of a gradient
    too: the two maps are each other's adjoint."""
    x = layout(S.shape[3], p, S.device)
    S = (S / x.root[:, None]).flatten(0, 1)[:, x.canonical].flatten(1)
    Z = (z / x.root).flatten(0, 1)[:, x.square]
    return (S.contiguous(), Z.contiguous()) if p == 2 else (torch.cat((S, Z), 1), None)


def to_canonical(S, Z, B, D, p):
    """The inverse of `from_canonical`, for B sequences."""
    HKV = S.shape[0] // B
    x = layout(D, p, S.device)
    if p == 4:
        S, Z = S.split((x.tiles * TILE * D, x.M**2), 1)
    S = S.reshape(B, HKV, -1, D)[:, :, x.rows] * x.root[:, None]
    return S, Z.reshape(B, HKV, -1)[:, :, x.places] * x.root
