"""One token of generation in six kernels a layer: each reads a weight, or what is kept of the past, once.

    linear       normalise, multiply, bias, gelu, add: qkv, the projection, both halves of the MLP, the head
    clock        the gates and the rotation counter, in float32, beside qkv
    attend       rotate q and k, keep k and v, read the state and what is kept behind it

`fold` puts what is kept into the state once so many tokens have gathered. decoder.py has the buffers these work on, and
the CUDA graph. Sums are in float32 whatever the weights, the rotation counter and the gates' sums in float64.
"""

import functools
from itertools import combinations_with_replacement

import torch
import triton
import triton.language as tl

from attention.embedding import _make_sqrt_multiplicity

ROWS = 16  # the least that the matrix unit takes: from 2 sequences on they are rows of one product


@functools.cache
def features(D, p, device):
    """(indices [p, Dphi] int32, coefficients [Dphi] float32) of phi, in the order of `symmetric_power_embedding`."""
    indices = torch.tensor(list(combinations_with_replacement(range(D), p)), dtype=torch.int32)
    return indices.t().contiguous().to(device), _make_sqrt_multiplicity(D, p).float().to(device)


@triton.jit
def _layer_norm(x, LN_W, LN_B, k, K):
    """layer_norm of one row x at columns k, all there are; zeros beyond."""
    x = tl.where(k < K, x - tl.sum(x, 0) / K, 0.0)
    x = x / tl.sqrt(tl.sum(x * x, 0) / K + 1e-5) * tl.load(LN_W + k, mask=k < K, other=0.0)
    if LN_B is not None:
        x += tl.load(LN_B + k, mask=k < K, other=0.0)
    return x


@triton.jit
def _moments(X, row, K, B, BM: tl.constexpr, BK: tl.constexpr):
    """(mean, 1 / standard deviation) of each row, as torch.nn.LayerNorm has them."""
    total = tl.zeros([BM, BK], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        total += tl.load(X + row[:, None] * K + k[None, :], mask=(row[:, None] < B) & (k[None, :] < K), other=0.0)
    mean = tl.sum(total, 1) / K
    total = tl.zeros([BM, BK], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        mask = (row[:, None] < B) & (k[None, :] < K)
        x = tl.load(X + row[:, None] * K + k[None, :], mask=mask, other=0.0) - mean[:, None]
        total += tl.where(mask, x * x, 0.0)
    return mean, 1 / tl.sqrt(tl.sum(total, 1) / K + 1e-5)


@triton.jit
def embed_kernel(IDS, WTE, LN_W, LN_B, OUT, K, BK: tl.constexpr):
    """One sequence: layer_norm(wte[id]) in float32."""
    b = tl.program_id(0)
    k = tl.arange(0, BK)
    inside = k < K
    x = tl.load(WTE + tl.load(IDS + b) * K + k, mask=inside, other=0.0).to(tl.float32)
    x = _layer_norm(x, LN_W, LN_B, k, K)
    tl.store(OUT + b * K + k, x, inside)


@triton.jit
def _finish(acc, OUT, to, mask, BIAS, n, N, GELU: tl.constexpr, ADD: tl.constexpr):
    """Bias, gelu and what OUT had, for columns n of a product."""
    if BIAS is not None:
        acc += tl.load(BIAS + n, mask=n < N, other=0.0)
    if GELU:
        acc *= 0.5 * (1 + tl.erf(acc * 0.7071067811865476))
    if ADD:
        acc += tl.load(OUT + to, mask=mask, other=0.0)
    tl.store(OUT + to, acc, mask)


@triton.jit
def vector_kernel(
    X, LN_W, LN_B, W, BIAS, OUT, N, K, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, GELU: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """`linear_kernel` for one sequence: BN columns, all of x at once."""
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    inside = k < K
    w = tl.load(W + tl.cast(n, tl.int64)[:, None] * K + k[None, :], mask=(n < N)[:, None] & inside[None, :], other=0.0)
    x = tl.load(X + k, mask=inside, other=0.0)
    if NORM:
        x = _layer_norm(x, LN_W, LN_B, k, K)
    acc = tl.sum(w.to(tl.float32) * x.to(w.dtype).to(tl.float32)[None, :], 1)
    _finish(acc, OUT, n, n < N, BIAS, n, N, GELU, ADD)


@triton.jit
def linear_kernel(
    X, LN_W, LN_B, W, BIAS, OUT, B, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
    GELU: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """OUT [B, N] float32 (plus what it had, with ADD) = f(x) W^T + bias, of BN columns and BM rows, for W [N, K] and x
    [B, K] float32, with NORM normalised, rounded to W's dtype. Biases and weights of LayerNorm are float32."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    if NORM:
        mean, scale = _moments(X, row, K, B, BM, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        w = tl.load(
            W + tl.cast(n, tl.int64)[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0
        )
        mask = (row[:, None] < B) & (k[None, :] < K)
        x = tl.load(X + row[:, None] * K + k[None, :], mask=mask, other=0.0)
        if NORM:
            x = (x - mean[:, None]) * scale[:, None] * tl.load(LN_W + k, mask=k < K, other=0.0)[None, :]
            if LN_B is not None:
                x += tl.load(LN_B + k, mask=k < K, other=0.0)[None, :]
            x = tl.where(mask, x, 0.0)
        acc = tl.dot(x.to(w.dtype), tl.trans(w), acc, input_precision="ieee")
    mask = (row[:, None] < B) & (n[None, :] < N)
    _finish(acc, OUT, row[:, None] * N + n[None, :], mask, BIAS, n[None, :], N, GELU, ADD)


@triton.jit
def clock_kernel(
    X, LN_W, LN_B, IDS, WG, BG, WB, SLOPES, U, TOTAL, RESETS, COUNT, reset_token, K, HKV, C, BH: tl.constexpr,
    BK: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One sequence: U, its rotation counter, moves on by 1, or with WB [1, K] by 1 + tanh(WB x); and entry COUNT of
    what is kept gets the sum of log_g since the state, finite parts in TOTAL [B, C, Hkv] float64 and their -inf counted
    in RESETS. log_g is that of learned gates, WG [Hkv, K] and BG, or of fixed ones, SLOPES, or 0."""
    b, h, k = tl.program_id(0), tl.arange(0, BH), tl.arange(0, BK)
    step, log_g = 1.0, tl.zeros([BH], tl.float32)
    if WG is not None or WB is not None:
        x = tl.load(X + b * K + k, mask=k < K, other=0.0)
        x = _layer_norm(x, LN_W, LN_B, k, K).to(ROUND).to(tl.float32)
    if WB is not None:
        beta = tl.sum(tl.load(WB + k, mask=k < K, other=0.0) * x, 0)
        step = 1 + (1 - 2 / (1 + tl.exp(2 * beta)))  # 1 + tanh
    if WG is not None:
        w = tl.load(WG + h[:, None] * K + k[None, :], mask=(h[:, None] < HKV) & (k[None, :] < K), other=0.0)
        gate = tl.sum(w * x[None, :], 1) + tl.load(BG + h, mask=h < HKV, other=0.0)
        e = tl.exp(-tl.abs(gate))
        log_g = tl.minimum(gate, 0.0) - tl.where(1 + e == 1, e, tl.log(1 + e) * (e / ((1 + e) - 1)))  # log1p(e)
    elif SLOPES is not None:
        log_g = -tl.load(SLOPES + h, mask=h < HKV, other=0.0)
    tl.store(U + b, tl.load(U + b) + step)
    count = tl.load(COUNT)
    at = (tl.cast(b, tl.int64) * C + count) * HKV + h
    before = (tl.cast(b, tl.int64) * C + tl.maximum(count - 1, 0)) * HKV + h
    reset = tl.load(IDS + b) == reset_token
    total = tl.where(count > 0, tl.load(TOTAL + before, mask=h < HKV, other=0.0), 0.0)
    tl.store(TOTAL + at, total + tl.where(reset, 0.0, log_g.to(tl.float64)), h < HKV)
    resets = tl.where(count > 0, tl.load(RESETS + before, mask=h < HKV, other=0), 0)
    tl.store(RESETS + at, resets + reset.to(tl.int32), h < HKV)


@triton.jit
def _rotated(X, u, RATES, D: tl.constexpr):
    """[D]: R(u theta) x of a row X, float32."""
    d = tl.arange(0, D)
    turns = u * tl.load(RATES + d // 2)
    angle = (turns - tl.floor(turns)).to(tl.float32) * 6.283185307179586
    other = tl.load(X + (d ^ 1)) * tl.where(d % 2 == 0, -1.0, 1.0)
    return tl.load(X + d) * tl.cos(angle) + other * tl.sin(angle)


@triton.jit
def _raise(x, P: tl.constexpr):
    y = x * x
    if P == 4:
        y = y * y
    elif P == 6:
        y = y * y * y
    elif P == 8:
        y = (y * y) * (y * y)
    return y


@triton.jit
def _read_state(
    q, S, Z, INDICES, COEFFICIENTS, begin, end, F, P: tl.constexpr, D: tl.constexpr, BF: tl.constexpr
):  # fmt: skip
    """phi(q) S [D] and phi(q) z of features begin to end."""
    d = tl.arange(0, D)
    acc, dens = tl.zeros([BF, D], tl.float32), tl.zeros([BF], tl.float32)
    for start in range(begin, end, BF):
        f = start + tl.arange(0, BF)
        inside = f < end
        phi = tl.load(COEFFICIENTS + f, mask=inside, other=0.0)
        for i in tl.static_range(P):
            phi *= tl.gather(q, tl.load(INDICES + i * F + f, mask=inside, other=0), 0)
        acc += phi[:, None] * tl.load(S + f[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        dens += phi * tl.load(Z + f, mask=inside, other=0.0)
    return tl.sum(acc, 0), tl.sum(dens, 0)


@triton.jit
def _read_kept(
    q, KEYS, VALUES, TOTAL, RESETS, total, resets, kept, begin, end, HKV, P: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """The sums of w v [D] and of w over the kept tokens begin to end, w = decay (q . k)^P."""
    d = tl.arange(0, D)
    acc, dens = tl.zeros([BT, D], tl.float32), tl.zeros([BT], tl.float32)
    for start in range(begin, end, BT):
        t = start + tl.arange(0, BT)
        at, inside = kept + t * HKV, t < end
        at_d = at[:, None] * D + d[None, :]
        k = tl.load(KEYS + at_d, mask=inside[:, None], other=0.0).to(tl.float32)
        decay = tl.exp((total - tl.load(TOTAL + at, mask=inside, other=0.0)).to(tl.float32))
        seen = inside & (tl.load(RESETS + at, mask=inside, other=0) == resets)
        w = tl.where(seen, _raise(tl.sum(k * q[None, :], 1), P) * decay, 0.0)
        acc += w[:, None] * tl.load(VALUES + at_d, mask=inside[:, None], other=0.0).to(tl.float32)
        dens += w
    return tl.sum(acc, 0), tl.sum(dens, 0)


@triton.jit
def attend_kernel(
    QKV, KEYS, VALUES, TOTAL, RESETS, COUNT, U, RATES, S, Z, INDICES, COEFFICIENTS, NUM, DEN, ARRIVED, OUT, B, C, H,
    HKV, F, parts, of_state, P: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One part of what one query head of one sequence reads: the first `of_state` parts are of the state S [B, Hkv, F,
    D], Z [B, Hkv, F], the others of the COUNT tokens kept behind it and of the token itself, whose key and value one
    of them keeps as entry COUNT of KEYS and VALUES [B, C, Hkv, D]. The last to arrive adds all parts up, always in the
    same order, and writes OUT [B, H, D]. ARRIVED [B, H]: zeros before and after."""
    bh, part = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    group = H // HKV
    hkv = h // group
    d = tl.arange(0, D)
    row = QKV + b * ((H + 2 * HKV) * D)
    u, count = tl.load(U + b), tl.load(COUNT)
    q = _rotated(row + h * D, u, RATES, D)
    largest = tl.max(tl.abs(q), 0)
    q = tl.where(largest > 0, q / largest, 0.0)  # it cancels, and the power stays in range
    kept = (tl.cast(b, tl.int64) * C) * HKV + hkv
    total, resets = tl.load(TOTAL + kept + count * HKV), tl.load(RESETS + kept + count * HKV)
    num, den = tl.zeros([D], tl.float32), 0.0
    if S is not None:
        left = tl.where(resets == 0, tl.exp(total.to(tl.float32)), 0.0)
        size = tl.cdiv(tl.cdiv(F, of_state), BF) * BF
        begin, state = part * size, tl.cast(b * HKV + hkv, tl.int64) * F
        end = tl.minimum(begin + size, F) if part < of_state else begin
        num, den = _read_state(q, S + state * D, Z + state, INDICES, COEFFICIENTS, begin, end, F, P, D, BF)
        num *= left
        den *= left
    if part >= of_state:
        size_kept = tl.cdiv(tl.cdiv(count + 1, parts - of_state), BT) * BT
        first = (part - of_state) * size_kept
        last = tl.minimum(first + size_kept, count)
        num, den = _read_kept(q, KEYS, VALUES, TOTAL, RESETS, total, resets, kept, first, last, HKV, P, D, BT)
        if (first <= count) & (count < first + size_kept):
            k = _rotated(row + (H + hkv) * D, u, RATES, D).to(KEYS.dtype.element_ty)
            v = tl.load(row + (H + HKV + hkv) * D + d).to(VALUES.dtype.element_ty)
            w = _raise(tl.sum(k.to(tl.float32) * q, 0), P)
            num += w * v.to(tl.float32)
            den += w
            if h % group == 0:
                new = (kept + count * HKV) * D + d
                tl.store(KEYS + new, k)
                tl.store(VALUES + new, v)
    mine = (part * B + b) * H + h
    tl.store(NUM + mine * D + d, num)
    tl.store(DEN + mine, den)
    tl.debug_barrier()
    if tl.atomic_add(ARRIVED + bh, 1, sem="acq_rel") == parts - 1:
        every = tl.arange(0, PARTS)
        place, inside = (every * B + b) * H + h, every < parts
        place_d = place[:, None] * D + d[None, :]
        nums = tl.load(NUM + place_d, mask=inside[:, None], other=0.0, cache_modifier=".cg")
        den = tl.sum(tl.load(DEN + place, mask=inside, other=0.0, cache_modifier=".cg"), 0)
        tl.store(OUT + bh * D + d, tl.where(den > 0, tl.sum(nums, 0) / tl.where(den > 0, den, 1.0), 0.0))
        tl.store(ARRIVED + bh, 0)


@triton.jit
def fold_kernel(
    KEYS, VALUES, TOTAL, RESETS, S, Z, INDICES, COEFFICIENTS, n, C, HKV, F, P: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """BF features of one sequence and head: the state, decayed by the gates of the n tokens kept, plus these tokens."""
    bh = tl.program_id(0)
    b, hkv = bh // HKV, bh % HKV
    f, d = tl.program_id(1) * BF + tl.arange(0, BF), tl.arange(0, D)
    inside = f < F
    kept = (tl.cast(b, tl.int64) * C) * HKV + hkv
    total, resets = tl.load(TOTAL + kept + (n - 1) * HKV), tl.load(RESETS + kept + (n - 1) * HKV)
    left = tl.where(resets == 0, tl.exp(total.to(tl.float32)), 0.0)
    state = tl.cast(bh, tl.int64) * F + f
    s = tl.load(S + state[:, None] * D + d[None, :], mask=inside[:, None], other=0.0) * left
    z = tl.load(Z + state, mask=inside, other=0.0) * left
    coefficient = tl.load(COEFFICIENTS + f, mask=inside, other=0.0)
    for start in range(0, n, BT):
        t = start + tl.arange(0, BT)
        at = kept + t * HKV
        decay = tl.exp((total - tl.load(TOTAL + at, mask=t < n, other=0.0)).to(tl.float32))
        decay = tl.where((t < n) & (tl.load(RESETS + at, mask=t < n, other=0) == resets), decay, 0.0)
        phi = coefficient[:, None] * decay[None, :]
        for i in tl.static_range(P):
            index = tl.load(INDICES + i * F + f, mask=inside, other=0)
            k = tl.load(KEYS + at[None, :] * D + index[:, None], mask=t[None, :] < n, other=0.0)
            phi *= k.to(tl.float32)
        v = tl.load(VALUES + at[:, None] * D + d[None, :], mask=t[:, None] < n, other=0.0).to(tl.float32)
        s = tl.dot(phi, v, s, input_precision="ieee")
        z += tl.sum(phi, 1)
    tl.store(S + state[:, None] * D + d[None, :], s, inside[:, None])
    tl.store(Z + state, z, inside)


# ---- launchers


def embed(ids, wte, norm, out):
    """out [B, K] float32 = layer_norm(wte[ids]); norm: (weight, bias or None) float32."""
    K = wte.shape[1]
    embed_kernel[(len(ids),)](ids, wte, *norm, out, K, BK=triton.next_power_of_2(K))


def linear(w, out, x, *, norm=None, bias=None, gelu=False, add=False):
    """out [B, N] float32 = f(x) w^T + bias, see `linear_kernel`; w [N, K], x [B, K] float32, norm (weight, bias) of the
    LayerNorm before."""
    (N, K), B = w.shape, len(out)
    options = dict(NORM=norm is not None, GELU=gelu, ADD=add)
    if B == 1:
        BK = triton.next_power_of_2(K)
        BN = max(1, 4096 // BK)
        vector_kernel[(triton.cdiv(N, BN),)](x, *(norm or (None, None)), w, bias, out, N, K, BN=BN, BK=BK, **options)
        return
    BM = min(64, max(ROWS, triton.next_power_of_2(B)))
    linear_kernel[(triton.cdiv(N, 32), triton.cdiv(B, BM))](
        x, *(norm or (None, None)), w, bias, out, B, N, K, BM=BM, BN=32, BK=64, **options
    )


def clock(x, norm, ids, gate, beta, slopes, u, kept, count, reset_token, rounding):
    """See `clock_kernel`; gate: (W [Hkv, K], b [Hkv]) or None, beta: W [1, K] or None, slopes [Hkv] or None, kept:
    (keys, values, total, resets), rounding: the dtype that linear layers' inputs have."""
    C, HKV = kept[0].shape[1:3]
    clock_kernel[(len(ids),)](
        x, *norm, ids, *(gate or (None, None)), beta, slopes, u, *kept[2:], count, reset_token, x.shape[1], HKV, C,
        BH=triton.next_power_of_2(HKV), BK=triton.next_power_of_2(x.shape[1]), num_warps=8,
        ROUND=tl.bfloat16 if rounding == torch.bfloat16 else tl.float32,
    )  # fmt: skip


def attend(qkv, kept, count, u, rates, state, sums, out, p):
    """See `attend_kernel`; kept: (keys, values, total, resets), state: (S, z) or None, sums: (num [parts, B, H, D], den
    [parts, B, H], arrived [B, H]), out [B, H D]."""
    keys = kept[0]
    (B, C, HKV, D), (parts, _, H) = keys.shape, sums[1].shape
    S, z = state or (None, None)
    indices, coefficients = features(D, p, keys.device) if state else (None, None)
    attend_kernel[(B * H, parts)](
        qkv, *kept, count, u, rates, S, z, indices, coefficients, *sums, out, B, C, H, HKV, z.shape[2] if state else 0,
        parts, parts_of_state(B * H, z.shape[2], D) if state else 0, P=p, D=D, BT=64, BF=4096 // D,
        PARTS=triton.next_power_of_2(parts),
    )  # fmt: skip


def fold(kept, n, state, p):
    """The n tokens kept become part of the state (S [B, Hkv, Dphi, D], z [B, Hkv, Dphi]) float32, in place."""
    (B, C, HKV, D), F = kept[0].shape, state[1].shape[2]
    BF = 64
    fold_kernel[(B * HKV, triton.cdiv(F, BF))](
        *kept, *state, *features(D, p, kept[0].device), n, C, HKV, F, P=p, D=D, BT=16, BF=BF
    )


PROGRAMS = 2112  # of attend: four at a time on each processor of an H200, and four times as many


def parts_of_state(heads, F, D):
    """How many programs read one head's state."""
    return max(1, min(-(-PROGRAMS // heads), -(-F * D // 4096)))


def parts_of_kept(heads, C):
    """How many read what is kept behind it."""
    return max(1, min(-(-PROGRAMS // heads), -(-C // 64)))
