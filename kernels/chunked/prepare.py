"""Prepare: the arrays that are made from rows of q or k before states are summed or read.

    x_t      = a row of q or k, reflected if the keys have a large common mean (mirror.py)
    scaled_t = 2^n x_t, with n such that 2^LIFT <= max |scaled_t| < 2^(LIFT+1)
    xt_t     = scaled_t; p = 4: the products of two of its entries (products.py)
    factor_t = decay_t 2^(-n p) for keys, decay_t 2^((m - n - LIFT) p) / l_t for queries (1 / l_t in the backward pass
               only), where 2^m is the 2^n of the row before it was reflected
    scaled_v_t = v_t factor_t unit_v,  unit_v of the chunk such that its largest value is in [2^14, 2^15)
    weight_t = one_t factor_t (p = 2: times 2^(m p)),  where one_t is 1 for keys, -delta_t = -dy_t . y_t for queries
    z        = sum over the chunk of weight_t x_t x_t^T, p = 2 (p = 4: `update_square_kernel`)
    den_t    = xt_t^T Z xt_t factor_t, p = 2, for queries and the Z of the state before their chunk

With them phi(xt) scaled_v^T, summed over a chunk, is the chunk's part of the state in units of unit_v, and phi(xt) S
factor is what a row reads. decay_t goes from a key to the end of its chunk, or from the chunk's beginning to a query.

    sums_kernel        one program a chunk and head of keys       prepare_kernel    one program N rows of a head

      rows t ->   N | N | N | N  of query head 0                    x [N, D] --> scaled [D, N] (transposed)
                  N | N | N | N  of query head 1                    v [N, D] --> scaled_v [N, D]
                  --> unit_v, weight, z [D, D]                      Z [D, D] --> den [N]

Made here, for B * H rows of heads (of k: Hkv), TP = T padded to 256:

    name             shape                      dtype            units
    scaled           [B * H, D, TP]             float16 *        a row times unit_x
    xt               p = 2: scaled; p = 4: [B * H, 2 M, TP]      M entries, then the same in the order of scalars
                                                float16 *        (layout.py)
    scaled_v         [B * H * TP, D]            float16 *        unit_v
    unit_x           [B * H, TP]                float32          2^n
    factor           [B * H, TP]                float32
    unit_v           [B * Hkv, chunks]          float32          a power of two
    weight           [B * H, TP]                float32          p = 2: of the row as it came, p = 4: of xt
    z                [B * Hkv, chunks, D * D]   float32          of x as it came
    den              [B, H, T padded to 128]    float32          of queries scaled to [1, 2)
                                                                 * float32 where q, k and v are

Cost. `sums` and `prepare` read x and v (dy and y too) once each and write D (M) and D entries of 2 bytes a row. z and
den take 3 products in bfloat16 each, in place of one in float32: 6 D^2 FLOP a row. The memory's bandwidth is the limit
(`sums` reaches 49 to 53% of it with 235 registers a thread), for den the splitting of Z into three.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    load_rows,
    padded,
    row_pointers,
    unit_scale,
)
from .mirror import load_mirror, reflected
from .products import products
from .sizes import at_index, padded_tokens, square_of, tile_of

# the same for every GPU, so not in the table of configs.py; for D up to 64, for larger D, and in float32
SUMS = ((64, 4, 3), (32, 8, 2), (32, 8, 2))  # rows at a time, warps, stages
PREPARE = (64, 4)  # rows at a time, warps
PREPARE_Z = ((128, 8), (64, 8), (32, 8))  # the same with denominators


class Prepared(NamedTuple):
    """The arrays of the table above for rows of queries or of keys, and the mirror of the rows; None if not made."""

    scaled: Tensor
    xt: Tensor = None
    scaled_v: Tensor = None
    unit_x: Tensor = None
    factor: Tensor = None
    unit_v: Tensor = None
    weight: Tensor = None
    z: Tensor = None
    den: Tensor = None
    mirror: Tensor = None


@triton.jit
def _row_unit(x, LIFT: tl.constexpr):
    """Return [N]: the power of two that brings the largest entry of each row into [2^LIFT, 2^(LIFT+1))."""
    return unit_scale(tl.max(tl.abs(x), 1), ROW_EXPONENT) * (2.0**LIFT)


@triton.jit
def _reflected_rows(x, MIRROR, u, mirrored, LIFT: tl.constexpr):
    """Return (x [N, D] float32, reflected with u if `mirrored`; its 2^n [N]; its 2^m [N]).

    u and mirrored come from `load_mirror`.
    """
    raw_unit = _row_unit(x, LIFT)
    unit = raw_unit
    if MIRROR is not None:
        if mirrored:
            x = reflected(x, u)
            unit = _row_unit(x, LIFT)
    return x, unit, raw_unit


@triton.jit
def _load_decay(DECAY, key_head, token, T):
    """Return the decay of the tokens [N] of a sequence and head of keys, 1 without gates."""
    if DECAY is None:
        return tl.full(token.shape, 1.0, tl.float32)
    else:
        return tl.load(at_index(DECAY, key_head, padded_tokens(T)) + token)


@triton.jit
def _factors(decay, L, head, token, unit, raw_unit, T, P: tl.constexpr, LIFT: tl.constexpr, QUERY: tl.constexpr):
    """Return factor [N] (see above) of tokens of a sequence and head, from their decay, 2^n and 2^m."""
    factor = decay
    if QUERY:
        factor *= 2.0 ** (-LIFT * P) * int_power(raw_unit / unit, P)
        if L is not None:
            factor *= inverse(tl.load(at_head(L, T, head) + token, mask=token < T, other=0.0))
    else:
        factor *= int_power(1 / unit, P)
    return tl.where(token < T, factor, 0.0)


@triton.jit(do_not_specialize=["T", "CHUNK", "H", "HKV"])
def sums_kernel(
    X,
    V,
    Y,  # y of queries; None for keys
    L,  # the rows' sums of weights, for queries
    DECAY,  # a decay for each token, or None
    prepared,  # unit_v, weight and z are written, the last two unless None
    x_strides,
    v_strides,
    T,
    CHUNK,
    H,
    HKV,
    P: tl.constexpr,
    D: tl.constexpr,
    LIFT: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write unit_v, weight and for p = 2 z of one chunk of one sequence and head of keys, from all its rows."""
    bh, chunk = chunk_of(tl.program_id(0), T, CHUNK)
    b, group, TP = bh // HKV, H // HKV, padded_tokens(T)
    largest, z = tl.zeros([N], tl.float32), tl.zeros([D, D], tl.float32)
    u, mirrored = load_mirror(prepared.mirror, bh, D)
    for i in range(group):
        h = bh % HKV * group + i
        head = tl.cast(b, tl.int64) * H + h
        for start in tl.range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP), N, num_stages=STAGES):
            token = start + tl.arange(0, N)
            x = load_rows(X, x_strides, b, start, h, T, N, D)
            _, unit, raw_unit = _reflected_rows(x.to(tl.float32), prepared.mirror, u, mirrored, LIFT)
            decay = _load_decay(DECAY, bh, token, T)
            factor = _factors(decay, L, head, token, unit, raw_unit, T, P, LIFT, Y is not None)
            v = load_rows(V, v_strides, b, start, h, T, N, D).to(tl.float32)
            largest_of_row = tl.max(tl.abs(v), 1)
            one = tl.full([N], 1.0, tl.float32)
            if Y is not None:
                y = tl.load(row_pointers(Y, b, start, h, T, H, N, D), mask=token[:, None] < T, other=0.0)
                one = -tl.sum(v * y.to(tl.float32), 1)
            weight = one * factor
            if P == 2:
                weight *= int_power(unit, P)  # of the row as it came
            if prepared.weight is not None:
                tl.store(prepared.weight + head * TP + token, weight)
            if P > 2:
                largest_of_row = tl.maximum(largest_of_row, tl.abs(one))
            else:
                if Y is not None or DECAY is not None:
                    z = exact_product(tl.trans(x), x.to(tl.float32) * weight[:, None], z)
                else:
                    z = tl.dot(tl.trans(x), x, z, input_precision=PRECISION)
            largest = tl.maximum(largest, largest_of_row * factor)
    largest = tl.max(largest, 0)
    largest = tl.where(largest == 0, 2.0**-STATE_EXPONENT, largest)  # zeros must not widen the bound of a small state
    tl.store(prepared.unit_v + tl.program_id(0), unit_scale(largest, STATE_EXPONENT) * TO_TOP)
    if P == 2:
        tl.store(square_of(prepared.z, tl.program_id(0), D), z)


@triton.jit(do_not_specialize=["T", "CHUNK", "H", "HKV"])
def prepare_kernel(
    X,
    V,  # or None: scaled_v and unit_x are not written
    L,  # the rows' sums of weights, for queries in the backward pass
    DECAY,  # a decay for each token, or None
    Z,  # the states' z for den, or None
    prepared,  # scaled, scaled_v, unit_x, factor and den are written, unit_v is read
    x_strides,
    v_strides,
    T,
    CHUNK,
    H,
    HKV,
    P: tl.constexpr,
    D: tl.constexpr,
    LIFT: tl.constexpr,
    QUERY: tl.constexpr,
    N: tl.constexpr,
):
    """Write scaled, scaled_v, unit_x, factor and den of N rows of one sequence and head, of keys or of queries."""
    TP = padded_tokens(T)
    bh, start = tl.program_id(0) // (TP // N), tl.program_id(0) % (TP // N) * N
    b, h = bh // H, bh % H
    token, d = start + tl.arange(0, N), tl.arange(0, D)
    rows = load_rows(X, x_strides, b, start, h, T, N, D)
    x = rows.to(tl.float32)
    key_head = b * HKV + h // (H // HKV)
    u, mirrored = load_mirror(prepared.mirror, key_head, D)
    xt, unit, raw_unit = _reflected_rows(x, prepared.mirror, u, mirrored, LIFT)
    first = tl.cast(bh, tl.int64) * TP
    xt = (xt * unit[:, None]).to(prepared.scaled.dtype.element_ty)
    tl.store(prepared.scaled + first * D + d[None, :] * TP + token[:, None], xt)
    factor = _factors(_load_decay(DECAY, key_head, token, T), L, bh, token, unit, raw_unit, T, P, LIFT, QUERY)
    tl.store(prepared.factor + first + token, factor)
    chunks = tl.cdiv(T, CHUNK)
    state = key_head * chunks + tl.minimum(start // CHUNK, chunks - 1)  # rows are padded beyond the last chunk
    if Z is not None:
        zx = exact_product(rows, tl.load(square_of(Z, state, D)), tl.zeros([N, D], tl.float32))
        den = tl.sum(zx * x, 1) * int_power(unit, P) * factor
        tl.store(at_head(prepared.den, T, bh) + token, den, token < tl.cdiv(T, 128) * 128)
    if V is not None:
        tl.store(prepared.unit_x + first + token, unit)
        v = load_rows(V, v_strides, b, start, h, T, N, D).to(tl.float32)
        v *= (factor * tl.load(prepared.unit_v + state))[:, None]
        tl.store(tile_of(prepared.scaled_v, first + token, D, d), v)


@triton.jit
def as_it_came(dx, prepared, states, row, state, key_head, SCALE: tl.constexpr):
    """Return the gradient [N, D] to rows of x as they came, in units of one, without the part through p = 2's Z.

    dx [N, D] float32: the gradient to scaled rows as sums over products of scaled_v and states; SCALE: a factor of
    these sums; row [N]: the index of each row in arrays [B * H, TP]; state: the index of their state.
    """
    unit = tl.load(states.unit + state) * tl.load(prepared.unit_v + state)
    dx *= (tl.load(prepared.unit_x + row) * SCALE / unit)[:, None]
    if prepared.mirror is not None:
        u, mirrored = load_mirror(prepared.mirror, key_head, dx.shape[1])
        if mirrored:
            dx = reflected(dx, u)
    return dx


# ---- launcher


def prepare(s, x, v=None, y=None, l=None, decay=None, Z=None, mirror=None):
    """Return `Prepared` of keys (x, v), or of queries (x; or x, dy, y, l); x [B, T, H, D], any strides.

    decay [B * Hkv, TP]: see `gates.chunk_gates`; Z [B * Hkv, chunks, D * D]: for den; mirror: by `key_mirror`, or None
    for rows as they came. D and p are as in `Sizes`.
    """
    heads, query = s.B * x.shape[2], v is None or y is not None
    size = 2 if x.dtype == torch.float32 else int(s.D > 64)
    sizes = dict(P=s.p, D=s.D, LIFT=LIFT[s.p])
    shared = x.stride(), None if v is None else v.stride(), s.T, s.chunk, x.shape[2], s.HKV
    prepared = Prepared(
        scaled=empty(x, heads, s.D, s.TP, dtype=s.half),
        factor=empty(x, heads, s.TP),
        den=None if Z is None else empty(x, s.B, x.shape[2], padded(s.T)),
        mirror=mirror,
    )
    if v is not None:
        prepared = prepared._replace(
            scaled_v=empty(x, heads * s.TP, s.D, dtype=s.half),
            unit_x=empty(x, heads, s.TP),
            unit_v=empty(x, s.B * s.HKV, s.chunks),
            weight=empty(x, heads, s.TP) if s.p == 4 or query else None,
            z=empty(x, s.B * s.HKV, s.chunks, s.D * s.D) if s.p == 2 else None,
        )
        N, warps, stages = SUMS[size]
        sums_kernel[(s.B * s.HKV * s.chunks,)](
            x, v, y, l, decay, prepared, *shared, **sizes, N=N, STAGES=stages, num_warps=warps
        )
    N, warps = PREPARE if Z is None else PREPARE_Z[size]
    prepare_kernel[(heads * s.TP // N,)](
        x, v, l, decay, Z, prepared, *shared, **sizes, QUERY=query, N=N, num_warps=warps
    )
    return prepared._replace(xt=products(s, prepared.scaled) if s.p == 4 else prepared.scaled)
