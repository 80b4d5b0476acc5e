"""What is made of rows before states are summed or read."""

import torch
import triton
import triton.language as tl

from .common import LIFT, ROW_EXPONENT, STATE_EXPONENT, exact_product, int_power, inverse, load_rows, padded, unit_scale

SUMS = ((64, 4, 3), (32, 8, 2))  # rows at a time, warps, stages; up to D = 64 and beyond

PREPARE = (64, 4)  # rows at a time, warps

PREPARE_Z = ((128, 8), (64, 8))  # the same with denominators, up to D = 64 and beyond


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
            factor *= inverse(l)
    else:
        factor *= int_power(1 / unit, P)
    return tl.where(at < T, factor, 0.0)


@triton.jit
def _raised(x, LIFT: tl.constexpr):
    """[N]: the power of two that brings the largest entry of each row into [2^LIFT, 2^(LIFT+1))"""
    return unit_scale(tl.max(tl.abs(x), 1), ROW_EXPONENT) * (2.0**LIFT)


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
            x = load_rows(X, x_s, b, start, h, T, N, D)
            unit = _raised(x.to(tl.float32), LIFT)
            factor = _factors(L, DECAY, unit, at, b, h, T, TP, H, HKV, P, LIFT, QUERY, GATED)
            v = load_rows(V, v_s, b, start, h, T, N, E).to(tl.float32)
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
                weight *= int_power(unit, P)  # of the row as it came
                if WEIGHT is not None:
                    tl.store(WEIGHT + head * TP + at, weight)
                if WEIGHT is not None or GATED:
                    acc = exact_product(tl.trans(x), x.to(tl.float32) * weight[:, None], acc)
                else:
                    acc = tl.dot(tl.trans(x), x, acc, input_precision=PRECISION)
            most = tl.maximum(most, largest * factor)
    tl.store(UNIT_V + tl.program_id(0), unit_scale(tl.max(most, 0), STATE_EXPONENT) * (2.0**14))
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
    rows = load_rows(X, x_s, b, start, h, T, N, D)
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
        zx = exact_product(rows, z, tl.zeros([N, D], tl.float32))
        den = tl.sum(zx * x, 1) * int_power(unit, P) * factor
        padded = tl.cdiv(T, 128) * 128
        tl.store(DEN + tl.cast(bh, tl.int64) * padded + at, den, at < padded)
    if V is not None:
        chunks = tl.cdiv(T, CHUNK)
        unit_v = tl.load(UNIT_V + bh // (H // HKV) * chunks + tl.minimum(start // CHUNK, chunks - 1))
        tl.store(UNIT_X + at_head + at, unit)
        v = load_rows(V, v_s, b, start, h, T, N, E).to(tl.float32) * (factor * unit_v)[:, None]
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
        out["den"] = new(s.B, rows, padded(s.T))
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
