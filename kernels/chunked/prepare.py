"""Prepare: the arrays that are made from rows of q or k before states are summed or read.

    xt_t     = 2^n x_t, with n such that 2^LIFT <= max |xt_t| < 2^(LIFT+1); p = 4: also the products of two entries
    factor_t = decay_t 2^(-n p) of keys, decay_t 2^((m - n - LIFT) p) / l_t of queries (1 / l_t for the backward pass
               only), where 2^m is the 2^n of x_t as it came, before it was reflected
    values_t = v_t factor_t unit_v,  unit_v of the chunk such that its largest value is in [2^14, 2^15)
    weight_t = one_t factor_t,  where one_t is 1 of keys, -delta_t = -dy_t . y_t of queries, or given by the caller
    z        = sum over the chunk of weight_t x_t x_t^T, p = 2 (p = 4: `update_square_kernel`)
    den_t    = xt_t^T Z xt_t factor_t, p = 2, for queries and the Z of the state before their chunk

If the keys of a head share a mean m that is large beside their deviations, a few of its entries' products make up most
of every feature, and a score (q . k)^p of a query nearly orthogonal to m drowns in the features' rounding errors. So
x_t is first reflected at the plane orthogonal to u, the same for queries and keys:

    x_t - 2 (u . x_t) u,   u ~ m / |m| + sign(m_0) e_0,   for which m becomes the first coordinate and q . k stays

and rounding, relative to each feature, is then as fine as without a mean. u is made of the first chunk's keys, whose
rows read no state, so that no row depends on later keys, and is 0 (x_t as it came) unless |m|^2 is above the sum of the
variances. States in and out of a call are not reflected, so a call that has one does without, as do packed
sequences and float32.

With them phi(xt) values^T, summed over a chunk, is the chunk's part of the state in units of unit_v, and phi(xt) S
factor is what a row reads. decay_t is that from a key to the end of its chunk, or from the chunk's beginning to a
query.

    sums_kernel        one program a chunk and head of keys       prepare_kernel    one program N rows of a head

      rows t ->   N | N | N | N  of query head 0                    x [N, D] --> xt [D, N] (transposed)
                  N | N | N | N  of query head 1                    v [N, D] --> values [N, D]
                  --> unit_v, weight, z [D, D]                      Z [D, D] --> den [N]

Made here, for B * H rows of heads (of k: Hkv), TP = T padded to 256:

    name             shape                      dtype            units
    rows             [B * H, D, TP]             float16 *        a row times unit_x
    xt               p = 2: rows; p = 4: [B * H, 2 M, TP]        products of two entries of rows: M in order of the
                                                float16 *        first entry, then the same as scalars (layout.py)
    values           [B * H * TP, D]            float16 *        unit_v
    unit_x           [B * H, TP]                float32          2^n
    factor           [B * H, TP]                float32
    unit_v           [B * Hkv, chunks]          float32          a power of two
    weight           [B * H, TP]                float32          p = 2: of the row x, p = 4: of xt
    z                [B * Hkv, chunks, D * D]   float32          of x as it came
    den              [B, H, T padded to 128]    float32          of queries scaled to [1, 2)
    mirror           [B * Hkv, D]               float32          u, a unit vector or 0
                                                                 * float32 where q, k and v are

Cost. `sums` and `prepare` read x and v (dy and y too) once each and write D (M) and D entries of 2 bytes a row. z and
den are 3 products of bfloat16 in place of one of float32: 6 D^2 FLOP a row each. The limit is the memory's
bandwidth (49 to 53% of it in `sums`, which takes 235 registers per thread), for den the splitting of Z in three.
"""

import torch
import triton
import triton.language as tl

from ..common import (
    LIFT,
    PRECISION,
    ROW_EXPONENT,
    STATE_EXPONENT,
    TO_TOP,
    at_head,
    chunk_of,
    empty,
    exact_product,
    int_power,
    inverse,
    load_mirror,
    load_rows,
    multiple_of,
    padded,
    reflected,
    row_pointers,
    unit_scale,
)

SUMS = ((64, 4, 3), (32, 8, 2), (32, 8, 2))  # rows at a time, warps, stages; up to D = 64, beyond, and in float32
PREPARE = (64, 4)  # rows at a time, warps
PREPARE_Z = ((128, 8), (64, 8), (32, 8))  # the same with denominators, up to D = 64, beyond, and in float32
PRODUCTS = 16  # products at a time
MIRROR_TOKENS = 256  # the most keys that u is made of


@triton.jit
def _row_unit(x, LIFT: tl.constexpr):
    """Return [N]: the power of two that brings the largest entry of each row into [2^LIFT, 2^(LIFT+1))."""
    return unit_scale(tl.max(tl.abs(x), 1), ROW_EXPONENT) * (2.0**LIFT)


@triton.jit
def _reflected_rows(x, MIRROR, u, mirrored, LIFT: tl.constexpr):
    """Return (x [N, D] float32 reflected with u, or as it is unless `mirrored`; 2^n of these rows [N]; 2^n of the rows
    as they came); u, mirrored: by `load_mirror`."""
    came = _row_unit(x, LIFT)
    unit = came
    if MIRROR is not None:
        if mirrored:
            x = reflected(x, u)
            unit = _row_unit(x, LIFT)
    return x, unit, came


@triton.jit
def _factors(L, DECAY, unit, came, at, b, h, T, TP, H, HKV, P: tl.constexpr, LIFT: tl.constexpr, QUERY: tl.constexpr):
    """Return factor [N] (see above) of rows `at`, which are scaled by `unit`, and by `came` if not reflected."""
    factor = tl.full(unit.shape, 1.0, tl.float32)
    if DECAY is not None:
        factor = tl.load(DECAY + (tl.cast(b, tl.int64) * HKV + h // (H // HKV)) * TP + at)
    if QUERY:
        factor *= 2.0 ** (-LIFT * P) * int_power(came / unit, P)
        if L is not None:
            l = tl.load(at_head(L, T, tl.cast(b, tl.int64) * H + h) + at, mask=at < T, other=0.0)
            factor *= inverse(l)
    else:
        factor *= int_power(1 / unit, P)
    return tl.where(at < T, factor, 0.0)


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV"])
def sums_kernel(
    X, V, Y, L, ONE, DECAY,  # the rows; y and l of queries; one_t, or None for 1 or -delta; a decay for each token
    MIRROR,  # or None
    WEIGHT, UNIT_V, Z,  # what is written
    x_strides, v_strides,
    T, TP, CHUNK, H, HKV,
    P: tl.constexpr, D: tl.constexpr, LIFT: tl.constexpr, QUERY: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write UNIT_V, WEIGHT and for p = 2 Z of one chunk of one sequence and head of keys, from all its rows."""
    TP = multiple_of(TP, 256)
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    b, group = bh // HKV, H // HKV
    most, acc = tl.zeros([N], tl.float32), tl.zeros([D, D], tl.float32)
    u, mirrored = load_mirror(MIRROR, bh, D)
    for i in range(group):
        h = bh % HKV * group + i
        head = tl.cast(b, tl.int64) * H + h
        for start in tl.range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP), N, num_stages=STAGES):
            at = start + tl.arange(0, N)
            x = load_rows(X, x_strides, b, start, h, T, N, D)
            _, unit, came = _reflected_rows(x.to(tl.float32), MIRROR, u, mirrored, LIFT)
            factor = _factors(L, DECAY, unit, came, at, b, h, T, TP, H, HKV, P, LIFT, QUERY)
            v = load_rows(V, v_strides, b, start, h, T, N, D).to(tl.float32)
            largest = tl.max(tl.abs(v), 1)
            one = tl.full([N], 1.0, tl.float32)
            if ONE is not None:
                one = tl.load(ONE + head * T + at, mask=at < T, other=0.0)
            elif QUERY:
                y = tl.load(row_pointers(Y, b, start, h, T, H, N, D), mask=at[:, None] < T, other=0.0)
                one = -tl.sum(v * y.to(tl.float32), 1)
            weight = one * factor
            if P > 2:
                largest = tl.maximum(largest, tl.abs(one))
                tl.store(WEIGHT + head * TP + at, weight)
            else:
                weight *= int_power(unit, P)  # of the row as it came
                if WEIGHT is not None:
                    tl.store(WEIGHT + head * TP + at, weight)
                if WEIGHT is not None or DECAY is not None:
                    acc = exact_product(tl.trans(x), x.to(tl.float32) * weight[:, None], acc)
                else:
                    acc = tl.dot(tl.trans(x), x, acc, input_precision=PRECISION)
            most = tl.maximum(most, largest * factor)
    tl.store(UNIT_V + tl.program_id(0), unit_scale(tl.max(most, 0), STATE_EXPONENT) * TO_TOP)
    if P == 2:
        d = tl.arange(0, D)
        tl.store(Z + tl.cast(tl.program_id(0), tl.int64) * (D * D) + d[:, None] * D + d[None, :], acc)


@triton.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV"])
def prepare_kernel(
    X, V, L, DECAY, UNIT_V, Z,  # the rows; l of queries; a decay for each token; the result of `sums_kernel`
    MIRROR,  # or None
    XT, VALUES, UNIT_X, FACTOR, DEN,  # what is written: no VALUES and UNIT_X without V, no DEN without Z
    x_strides, v_strides,
    T, TP, CHUNK, H, HKV,
    P: tl.constexpr, D: tl.constexpr, LIFT: tl.constexpr, QUERY: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Write XT, VALUES, UNIT_X, FACTOR and DEN of N rows of one sequence and head, of keys or of queries."""
    TP = multiple_of(TP, 256)
    bh, start = tl.program_id(0) // (TP // N), tl.program_id(0) % (TP // N) * N
    b, h = bh // H, bh % H
    at, d = start + tl.arange(0, N), tl.arange(0, D)
    rows = load_rows(X, x_strides, b, start, h, T, N, D)
    x = rows.to(tl.float32)
    head = b * HKV + h // (H // HKV)
    u, mirrored = load_mirror(MIRROR, head, D)
    xt, unit, came = _reflected_rows(x, MIRROR, u, mirrored, LIFT)
    first = tl.cast(bh, tl.int64) * TP
    tl.store(XT + first * D + d[None, :] * TP + at[:, None], (xt * unit[:, None]).to(XT.dtype.element_ty))
    factor = _factors(L, DECAY, unit, came, at, b, h, T, TP, H, HKV, P, LIFT, QUERY)
    tl.store(FACTOR + first + at, factor)
    chunks = tl.cdiv(T, CHUNK)
    if Z is not None:  # rows are padded to 256, beyond the last chunk
        state = head * chunks + tl.minimum(start // CHUNK, chunks - 1)
        z = tl.load(Z + tl.cast(state, tl.int64) * (D * D) + d[:, None] * D + d[None, :])
        zx = exact_product(rows, z, tl.zeros([N, D], tl.float32))
        den = tl.sum(zx * x, 1) * int_power(unit, P) * factor
        tl.store(at_head(DEN, T, bh) + at, den, at < tl.cdiv(T, 128) * 128)
    if V is not None:
        unit_v = tl.load(UNIT_V + head * chunks + tl.minimum(start // CHUNK, chunks - 1))
        tl.store(UNIT_X + first + at, unit)
        v = load_rows(V, v_strides, b, start, h, T, N, D).to(tl.float32) * (factor * unit_v)[:, None]
        tl.store(VALUES + (first + at)[:, None] * D + d[None, :], v.to(VALUES.dtype.element_ty))


@triton.jit(do_not_specialize=["TP"])
def products_kernel(XT, OUT, FACTORS, TP, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Write M products of two entries of 256 rows of one sequence and head, N at a time, for p = 4."""
    TP = multiple_of(TP, 256)
    bh, block = tl.program_id(0) // (TP // 256), tl.program_id(0) % (TP // 256)
    t = block * 256 + tl.arange(0, 256)[None, :]
    XT += tl.cast(bh, tl.int64) * D * TP
    OUT += tl.cast(bh, tl.int64) * M * TP
    for m in range(0, M, N):
        entry = m + tl.arange(0, N)
        first, second = tl.load(FACTORS + entry), tl.load(FACTORS + M + entry)
        x = tl.load(XT + first[:, None] * TP + t) * tl.load(XT + second[:, None] * TP + t)
        tl.store(OUT + entry[:, None].to(tl.int64) * TP + t, x)


@triton.jit(do_not_specialize=["T", "HKV"])
def mirror_kernel(K, MIRROR, k_strides, T, HKV, D: tl.constexpr, N: tl.constexpr):
    """Write u of one sequence and head of keys, from the first T keys."""
    bh = tl.program_id(0)
    total, squares = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    for start in range(0, T, N):
        k = load_rows(K, k_strides, bh // HKV, start, bh % HKV, T, N, D).to(tl.float32)
        total += tl.sum(k, 0)
        squares += tl.sum(k * k, 0)
    m, d = total / T, tl.arange(0, D)
    size = tl.sum(m * m, 0)
    u = m / tl.sqrt(size)
    u += tl.where(d == 0, tl.where(u < 0, -1.0, 1.0), 0.0)  # of m_0's sign, so that nothing cancels
    u /= tl.sqrt(tl.sum(u * u, 0))
    large = size > tl.sum(squares, 0) / T - size  # False if a key is not finite
    tl.store(MIRROR + bh * D + d, tl.where(large, u, 0.0))


# ---- launchers


def key_mirror(s, k):
    """Return mirror [B * Hkv, D] of the table above for keys k [B, T, Hkv, D], any strides."""
    mirror = empty(k, s.B * s.HKV, s.D)
    tokens = min(s.T, s.chunk, MIRROR_TOKENS)
    mirror_kernel[(s.B * s.HKV,)](k, mirror, k.stride(), tokens, s.HKV, D=s.D, N=128)
    return mirror


def prepare(s, x, v=None, y=None, l=None, decay=None, one=None, Z=None, mirror=None):
    """Prepare keys (x, v), queries (x; or x, dy, y, l) or any rows (x, v, one [B, H, T]); x [B, T, H, D], any strides.

    decay [B * Hkv, TP]: see `gates.chunk_gates`; Z [B * Hkv, chunks, D * D]: for den; mirror: by `key_mirror`, or None
    for rows as they came. Takes what `chunked.Sizes` takes.
    Returns a dictionary with the names of the table above; those that were not asked for are None.
    """
    rows, query = x.shape[2], v is None or y is not None
    size = 2 if x.dtype == torch.float32 else int(s.D > 64)
    out = dict.fromkeys(("values", "unit_x", "weight", "unit_v", "z", "den"))
    out["rows"], out["factor"] = empty(x, s.B * rows, s.D, s.TP, dtype=s.half), empty(x, s.B * rows, s.TP)
    shared = s.T, s.TP, s.chunk, rows, s.HKV
    sizes = dict(P=s.p, D=s.D, LIFT=LIFT[s.p], QUERY=query)
    strides = x.stride(), None if v is None else v.stride()
    if Z is not None:
        out["den"] = empty(x, s.B, rows, padded(s.T))
    if v is not None:
        out["values"], out["unit_x"] = empty(x, s.B * rows * s.TP, s.D, dtype=s.half), empty(x, s.B * rows, s.TP)
        out["unit_v"] = empty(x, s.B * s.HKV, s.chunks)
        if s.p == 4 or query or one is not None:
            out["weight"] = empty(x, s.B * rows, s.TP)
        if s.p == 2:
            out["z"] = empty(x, s.B * s.HKV, s.chunks, s.D * s.D)
        N, warps, stages = SUMS[size]
        sums_kernel[(s.B * s.HKV * s.chunks,)](
            x, v, y, l, one, decay, mirror,
            out["weight"], out["unit_v"], out["z"],
            *strides, *shared, **sizes, N=N, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    N, warps = PREPARE if Z is None else PREPARE_Z[size]
    prepare_kernel[(s.B * rows * s.TP // N,)](
        x, v, l, decay, out["unit_v"], Z, mirror,
        out["rows"], out["values"], out["unit_x"], out["factor"], out["den"],
        *strides, *shared, **sizes, N=N, num_warps=warps,
    )  # fmt: skip
    out["xt"] = products(s, out["rows"])
    return out


def products(s, rows):
    """Return xt of the table above: for p = 4 the products of two entries of each row, for p = 2 the rows."""
    if s.p == 2:
        return rows
    M = 2 * s.layout.M  # as entries and, in another order, as scalars
    out = torch.empty(len(rows), M, s.TP, dtype=s.half, device=rows.device)
    products_kernel[(len(rows) * s.TP // 256,)](
        rows, out, s.layout.factors, s.TP, D=s.D, M=M, N=PRODUCTS
    )  # fmt: skip
    return out
