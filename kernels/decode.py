"""One token of generation in five kernels a layer: each reads a weight, or what is kept of the past, once.

    linear       normalise, multiply, bias, gelu, add: the projection, both halves of the MLP, the head
    qkv          the same for q, k and v; and beside it, in float32, the gates and the rotation counter
    attend       rotate q and k, keep k and v, read the state and what is kept behind it
    draw         the next token from its logits: temperature, top-k, top-p

`fold` puts what is kept into the state once so many tokens have gathered. decoder.py has the buffers these work on, and
the CUDA graph. Sums are in float32 whatever the weights, the rotation counter and the gates' sums in float64.

From Hopper on a kernel is launched while the one before it runs (programmatic dependent launch, `PDL`): it loads its
weights, which nothing changes, and waits for the other's end only then.
"""

import functools
from itertools import combinations_with_replacement

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attention.embedding import _make_sqrt_multiplicity
from .common import first_8_bits as _first_8_bits

DRAW = 8192  # logits that `draw` reads at a time: padded to a multiple of it, with -inf, it takes them as they are
AT_ONCE, PROGRAMS = 396, 1056  # programs of attend: three on each processor of an H200, and eight, in turn
ROWS = 16  # the least that the matrix unit takes: from 2 sequences on they are rows of one product


@functools.cache
def features(D, p, device):
    """(indices, coefficients) [Dphi] of phi, in the order of `symmetric_power_embedding`: p indices, a byte each of one
    number, and float32."""
    dtype = torch.int32 if p <= 4 else torch.int64
    indices = torch.tensor(list(combinations_with_replacement(range(D), p)), dtype=dtype)
    packed = sum(indices[:, i] << 8 * i for i in range(p))
    return packed.to(device), _make_sqrt_multiplicity(D, p).float().to(device)


@triton.jit
def _begin(PDL: tl.constexpr):
    """Lets the next kernel start; what it does before `_wait` must not depend on this one."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def _wait(PDL: tl.constexpr):
    """Until the kernel before has ended, and all before that."""
    if PDL:
        gdc_wait()


@triton.jit
def _norm(LN_W, LN_B, k, K):
    """A LayerNorm's weight and bias at columns k, zeros beyond K."""
    weight = tl.load(LN_W + k, mask=k < K, other=0.0)
    return weight, tl.load(LN_B + k, mask=k < K, other=0.0) if LN_B is not None else tl.zeros_like(weight)


@triton.jit
def _layer_norm(x, weight, bias, k, K):
    """layer_norm of one row x at columns k, all there are; zeros beyond."""
    x = tl.where(k < K, x - tl.sum(x, 0) / K, 0.0)
    return x / tl.sqrt(tl.sum(x * x, 0) / K + 1e-5) * weight + bias


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
def embed_kernel(IDS, WTE, LN_W, LN_B, OUT, K, BK: tl.constexpr, PDL: tl.constexpr = False):
    """One sequence: layer_norm(wte[id]) in float32."""
    _begin(PDL)
    b, k = tl.program_id(0), tl.arange(0, BK)
    weight, bias = _norm(LN_W, LN_B, k, K)
    _wait(PDL)
    x = tl.load(WTE + tl.load(IDS + b) * K + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(OUT + b * K + k, _layer_norm(x, weight, bias, k, K), k < K)


@triton.jit
def _gelu(x):
    return x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _vector(
    X, LN_W, LN_B, W, BIAS, OUT, N, K, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, GELU: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`linear_kernel` for one sequence: BN columns, all of x at once."""
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    inside = k < K
    w = tl.load(W + tl.cast(n, tl.int64)[:, None] * K + k[None, :], mask=(n < N)[:, None] & inside[None, :], other=0.0)
    more = tl.load(BIAS + n, mask=n < N, other=0.0) if BIAS is not None else tl.zeros([BN], tl.float32)
    if NORM:
        weight, bias = _norm(LN_W, LN_B, k, K)
    _wait(PDL)
    x = tl.load(X + k, mask=inside, other=0.0)
    old = tl.load(OUT + n, mask=n < N, other=0.0) if ADD else tl.zeros([BN], tl.float32)
    if NORM:
        x = _layer_norm(x, weight, bias, k, K)
    y = tl.sum(w.to(tl.float32) * x.to(w.dtype).to(tl.float32)[None, :], 1) + more
    tl.store(OUT + n, old + (_gelu(y) if GELU else y), n < N)


@triton.jit
def _matrix(
    X, LN_W, LN_B, W, BIAS, OUT, B, N, K, stride, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`linear_kernel` for BM sequences and BN columns."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    _wait(PDL)
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
            weight, bias = _norm(LN_W, LN_B, k, K)
            x = (x - mean[:, None]) * scale[:, None] * weight[None, :] + bias[None, :]
        acc = tl.dot(x.to(w.dtype), tl.trans(w), acc, input_precision="ieee")
    to, mask = OUT + row[:, None] * stride + n[None, :], (row[:, None] < B) & (n[None, :] < N)
    if BIAS is not None:
        acc += tl.load(BIAS + n, mask=n < N, other=0.0)[None, :]
    if GELU:
        acc = _gelu(acc)
    if ADD:
        acc += tl.load(to, mask=mask, other=0.0)
    tl.store(to, acc, mask)


@triton.jit
def _product(
    X, LN_W, LN_B, W, BIAS, OUT, B, N, K, stride, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if BM == 1:
        _vector(X, LN_W, LN_B, W, BIAS, OUT, N, K, BN, BK, NORM, GELU, ADD, PDL)
    else:
        _matrix(X, LN_W, LN_B, W, BIAS, OUT, B, N, K, stride, BM, BN, BK, NORM, GELU, ADD, PDL)


@triton.jit
def linear_kernel(
    X, LN_W, LN_B, W, BIAS, OUT, B, N, K, stride, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """OUT [B, N] float32, its rows `stride` apart (plus what it had, with ADD) = f(x) W^T + bias, of BN columns and BM
    rows, for W [N, K] and x [B, K] float32, with NORM normalised, rounded to W's dtype. Biases and weights of LayerNorm
    are float32."""
    _begin(PDL)
    _product(X, LN_W, LN_B, W, BIAS, OUT, B, N, K, stride, BM, BN, BK, NORM, GELU, ADD, PDL)


@triton.jit
def _turn(u, RATES, D: tl.constexpr):
    """(cos, sin) [D] of R(u theta) as `_rotated` takes them, float32."""
    d = tl.arange(0, D)
    turns = u * tl.load(RATES + d // 2)
    angle = (turns - tl.floor(turns)).to(tl.float32) * 6.283185307179586
    return tl.cos(angle), tl.sin(angle) * tl.where(d % 2 == 0, -1.0, 1.0)


@triton.jit
def _clock(
    b, h, X, LN_W, LN_B, IDS, WG, BG, WB, SLOPES, U, RATES, TURN, TOTAL, RESETS, COUNT, reset_token, K, HKV, C,
    D: tl.constexpr, BK: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one sequence. The first moves U, the rotation counter, on by 1, or with WB [1, K] by 1 + tanh(WB x),
    and TURN [B, 2, D] gets what q and k are rotated by. Entry COUNT of what is kept gets the sum of log_g since the
    state, finite parts in TOTAL [B, C, Hkv] float64 and their -inf counted in RESETS. log_g is that of learned gates,
    WG [Hkv, K] and BG, or of fixed ones, SLOPES, or 0."""
    k, d = tl.arange(0, BK), tl.arange(0, D)
    inside = k < K
    u, count = tl.load(U + b) + 1, tl.load(COUNT)
    at = (tl.cast(b, tl.int64) * C + count) * HKV + h
    total = tl.load(TOTAL + at - HKV, mask=count > 0, other=0.0)
    resets = tl.load(RESETS + at - HKV, mask=count > 0, other=0)
    reset = tl.load(IDS + b) == reset_token
    log_g = -tl.load(SLOPES + h) if SLOPES is not None else 0.0
    if WG is not None or WB is not None:
        weight, bias = _norm(LN_W, LN_B, k, K)
    if WG is not None:
        wg, bg = tl.load(WG + h * K + k, mask=inside, other=0.0), tl.load(BG + h)
    if WB is not None:
        wb = tl.load(WB + k, mask=inside, other=0.0)
    else:
        cos, sin = _turn(u, RATES, D)
    _wait(PDL)
    if WG is not None or WB is not None:
        x = tl.load(X + b * K + k, mask=inside, other=0.0)
        x = _layer_norm(x, weight, bias, k, K).to(ROUND).to(tl.float32)
    if WB is not None:
        u += 1 - 2 / (1 + tl.exp(2 * tl.sum(wb * x, 0)))  # tanh
        cos, sin = _turn(u, RATES, D)
    if WG is not None:
        gate = tl.sum(wg * x, 0) + bg
        e = tl.exp(-tl.abs(gate))
        log_g = tl.minimum(gate, 0.0) - tl.where(1 + e == 1, e, tl.log(1 + e) * (e / ((1 + e) - 1)))  # log1p(e)
    if h == 0:
        tl.store(U + b, u)
        tl.store(TURN + 2 * b * D + d, cos)
        tl.store(TURN + (2 * b + 1) * D + d, sin)
    tl.store(TOTAL + at, total + tl.where(reset, 0.0, log_g).to(tl.float64))
    tl.store(RESETS + at, resets + reset.to(tl.int32))


@triton.jit
def qkv_kernel(
    X, LN_W, LN_B, W, BIAS, OUT, B, N, K, IDS, WG, BG, WB, SLOPES, U, RATES, TURN, TOTAL, RESETS, COUNT, reset_token,
    HKV, C, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ALL: tl.constexpr,
    ROUND: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """`linear_kernel` of normalised x, and in further programs `_clock`; ALL: a power of two, at least K."""
    _begin(PDL)
    program = tl.program_id(0) - tl.cdiv(N, BN)
    if program >= 0:
        if tl.program_id(1) == 0:
            _clock(
                program // HKV, program % HKV, X, LN_W, LN_B, IDS, WG, BG, WB, SLOPES, U, RATES, TURN, TOTAL, RESETS,
                COUNT, reset_token, K, HKV, C, D, ALL, ROUND, PDL,
            )  # fmt: skip
    else:
        _product(X, LN_W, LN_B, W, BIAS, OUT, B, N, K, N, BM, BN, BK, True, False, False, PDL)


@triton.jit
def _rotated(X, TURN, D: tl.constexpr):
    """[D]: a row X, turned, float32."""
    d = tl.arange(0, D)
    return tl.load(X + d) * tl.load(TURN + d) + tl.load(X + (d ^ 1)) * tl.load(TURN + D + d)


@triton.jit
def _query(Q, TURN, TOTAL, RESETS, at, D: tl.constexpr):
    """q [D], rotated, its largest number 1: it cancels, and the power stays in range; the gates' sum and resets."""
    q = _rotated(Q, TURN, D)
    largest = tl.max(tl.abs(q), 0)
    return tl.where(largest > 0, q / largest, 0.0), tl.load(TOTAL + at), tl.load(RESETS + at)


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
def _features(S, Z, INDICES, COEFFICIENTS, start, end, D: tl.constexpr, BF: tl.constexpr):
    """(S [BF, D], z, indices, coefficients [BF]) of features from start, zeros from end."""
    f, d = start + tl.arange(0, BF), tl.arange(0, D)
    inside = f < end
    s = tl.load(S + f[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    z = tl.load(Z + f, mask=inside, other=0.0)
    indices = tl.load(INDICES + f, mask=inside, other=0)
    return s, z, indices, tl.load(COEFFICIENTS + f, mask=inside, other=0.0)


@triton.jit
def _kept(KEYS, VALUES, TOTAL, RESETS, kept, start, end, HKV, D: tl.constexpr, BT: tl.constexpr):
    """(keys, values [BT, D], the sums of their gates, resets [BT]) of the kept tokens from start, zeros from end."""
    t, d = start + tl.arange(0, BT), tl.arange(0, D)
    at, inside = kept + t * HKV, t < end
    at_d = at[:, None] * D + d[None, :]
    k = tl.load(KEYS + at_d, mask=inside[:, None], other=0.0)
    v = tl.load(VALUES + at_d, mask=inside[:, None], other=0.0)
    total = tl.load(TOTAL + at, mask=inside, other=0.0)
    return k, v, total, tl.load(RESETS + at, mask=inside, other=-1)


@triton.jit
def attend_kernel(
    QKV, TURN, KEYS, VALUES, TOTAL, RESETS, COUNT, S, Z, INDICES, COEFFICIENTS, NUM, DEN, ARRIVED, OUT, B, C, H,
    HKV, F, parts, of_state, P: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One part of what one query head of one sequence reads: the first `of_state` parts are of the state S [B, Hkv, F,
    D], Z [B, Hkv, F], the others of the COUNT tokens kept behind it and of the token itself, whose key and value one
    of them keeps as entry COUNT of KEYS and VALUES [B, C, Hkv, D]. The last to arrive adds all parts up, always in the
    same order, and writes OUT [B, H, D]. ARRIVED [B, H]: zeros before and after."""
    _begin(PDL)
    bh, part = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    group = H // HKV
    hkv = h // group
    d = tl.arange(0, D)
    row, turn = QKV + b * ((H + 2 * HKV) * D), TURN + 2 * b * D
    count = tl.load(COUNT)
    kept = (tl.cast(b, tl.int64) * C) * HKV + hkv
    num, den = tl.zeros([D], tl.float32), 0.0
    if part < of_state:
        if S is not None:
            size = tl.cdiv(tl.cdiv(F, of_state), BF) * BF
            begin, state = part * size, tl.cast(b * HKV + hkv, tl.int64) * F
            end = tl.minimum(begin + size, F)
            s, z, indices, phi = _features(S + state * D, Z + state, INDICES, COEFFICIENTS, begin, end, D, BF)
            _wait(PDL)
            q, total, resets = _query(row + h * D, turn, TOTAL, RESETS, kept + count * HKV, D)
            nums, dens = tl.zeros([BF, D], tl.float32), tl.zeros([BF], tl.float32)
            for start in range(begin, end, BF):
                for i in tl.static_range(P):
                    phi *= tl.gather(q, (indices >> 8 * i) & 255, 0)
                nums += phi[:, None] * s.to(tl.float32)
                dens += phi * z
                s, z, indices, phi = _features(
                    S + state * D, Z + state, INDICES, COEFFICIENTS, start + BF, end, D, BF
                )  # fmt: skip
            left = tl.where(resets == 0, tl.exp(total.to(tl.float32)), 0.0)
            num, den = tl.sum(nums, 0) * left, tl.sum(dens, 0) * left
    else:
        size_kept = tl.cdiv(tl.cdiv(count + 1, parts - of_state), BT) * BT
        first = (part - of_state) * size_kept
        last = tl.minimum(first + size_kept, count)
        k, v, totals, reset = _kept(KEYS, VALUES, TOTAL, RESETS, kept, first, last, HKV, D, BT)
        _wait(PDL)
        q, total, resets = _query(row + h * D, turn, TOTAL, RESETS, kept + count * HKV, D)
        acc, ws = tl.zeros([BT, D], tl.float32), tl.zeros([BT], tl.float32)
        for start in range(first, last, BT):
            w = _raise(tl.sum(k.to(tl.float32) * q[None, :], 1), P)
            w = tl.where(reset == resets, w * tl.exp((total - totals).to(tl.float32)), 0.0)
            acc += w[:, None] * v.to(tl.float32)
            ws += w
            k, v, totals, reset = _kept(KEYS, VALUES, TOTAL, RESETS, kept, start + BT, last, HKV, D, BT)
        num, den = tl.sum(acc, 0), tl.sum(ws, 0)
        if (first <= count) & (count < first + size_kept):
            new_k = _rotated(row + (H + hkv) * D, turn, D).to(KEYS.dtype.element_ty)
            new_v = tl.load(row + (H + HKV + hkv) * D + d).to(VALUES.dtype.element_ty)
            new_w = _raise(tl.sum(new_k.to(tl.float32) * q, 0), P)
            num += new_w * new_v.to(tl.float32)
            den += new_w
            if h % group == 0:
                new = (kept + count * HKV) * D + d
                tl.store(KEYS + new, new_k)
                tl.store(VALUES + new, new_v)
    mine = (part * B + b) * H + h
    tl.store(NUM + mine * D + d, num)
    tl.store(DEN + mine, den)
    tl.debug_barrier()
    if tl.atomic_add(ARRIVED + bh, 1, sem="acq_rel") == parts - 1:
        every = tl.arange(0, PARTS)
        place, inside = (every * B + b) * H + h, every < parts
        place_d = place[:, None] * D + d[None, :]
        parts_num = tl.load(NUM + place_d, mask=inside[:, None], other=0.0, cache_modifier=".cg")
        whole = tl.sum(tl.load(DEN + place, mask=inside, other=0.0, cache_modifier=".cg"), 0)
        tl.store(OUT + bh * D + d, tl.where(whole > 0, tl.sum(parts_num, 0) / tl.where(whole > 0, whole, 1.0), 0.0))
        tl.store(ARRIVED + bh, 0)


@triton.jit
def _exact_product(x, y, acc):
    """acc + x @ y for float32 x, as exact as float32: for bfloat16 y, x is split in three."""
    if y.dtype == tl.float32:
        return tl.dot(x, y, acc, input_precision="ieee")
    else:
        high = _first_8_bits(x)
        middle = _first_8_bits(x - high)
        acc = tl.dot((x - high - middle).to(y.dtype), y, acc)
        acc = tl.dot(middle.to(y.dtype), y, acc)
        return tl.dot(high.to(y.dtype), y, acc)


@triton.jit
def fold_kernel(
    KEYS, VALUES, TOTAL, RESETS, S, Z, INDICES, COEFFICIENTS, n, C, HKV, F, P: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """BF features of one sequence and head: the state, decayed by the gates of the n tokens kept, plus these tokens."""
    blocks = tl.cdiv(F, BF)
    bh, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, hkv = bh // HKV, bh % HKV
    f, d = block * BF + tl.arange(0, BF), tl.arange(0, D)
    inside = f < F
    kept = (tl.cast(b, tl.int64) * C) * HKV + hkv
    total, resets = tl.load(TOTAL + kept + (n - 1) * HKV), tl.load(RESETS + kept + (n - 1) * HKV)
    left = tl.where(resets == 0, tl.exp(total.to(tl.float32)), 0.0)
    state = tl.cast(bh, tl.int64) * F + f
    s = tl.load(S + state[:, None] * D + d[None, :], mask=inside[:, None], other=0.0).to(tl.float32) * left
    z = tl.load(Z + state, mask=inside, other=0.0) * left
    indices, coefficient = tl.load(INDICES + f, mask=inside, other=0), tl.load(COEFFICIENTS + f, mask=inside, other=0.0)
    for start in range(0, n, BT):
        t = start + tl.arange(0, BT)
        at = kept + t * HKV
        decay = tl.exp((total - tl.load(TOTAL + at, mask=t < n, other=0.0)).to(tl.float32))
        decay = tl.where((t < n) & (tl.load(RESETS + at, mask=t < n, other=0) == resets), decay, 0.0)
        phi = coefficient[:, None] * decay[None, :]
        at_d = at[:, None] * D + d[None, :]
        k = tl.trans(tl.load(KEYS + at_d, mask=t[:, None] < n, other=0.0).to(tl.float32))
        for i in tl.static_range(P):
            phi *= tl.gather(k, tl.broadcast_to(((indices >> 8 * i) & 255)[:, None], [BF, BT]), 0)
        s = _exact_product(phi, tl.load(VALUES + at_d, mask=t[:, None] < n, other=0.0), s)
        z += tl.sum(phi, 1)
    tl.store(S + state[:, None] * D + d[None, :], s, inside[:, None])
    tl.store(Z + state, z, inside)


@triton.jit
def _above(X, low, high, need, scale, largest, V, MASS: tl.constexpr, BV: tl.constexpr):
    """The largest number in [low, high) that at least `need` of the V numbers X are above; with MASS, above which
    exp(scale (x - largest)) sums to `need`. Whatever is above low counts, nothing above high: found by quartering."""
    found, second = need + 1.0, low + (high - low) / 2
    while (low < second) & (second < high) & (found != need):
        first, third = low + (second - low) / 2, second + (high - second) / 2
        above_1, above_2, above_3 = tl.zeros([BV], tl.float32), tl.zeros([BV], tl.float32), tl.zeros([BV], tl.float32)
        for start in range(0, V, BV):
            x = tl.load(X + start + tl.arange(0, BV))
            weight = tl.exp(scale * (x - largest)) if MASS else 1.0
            above_1 += tl.where(x > first, weight, 0.0)
            above_2 += tl.where(x > second, weight, 0.0)
            above_3 += tl.where(x > third, weight, 0.0)
        n_1, n_2, n_3 = tl.sum(above_1, 0), tl.sum(above_2, 0), tl.sum(above_3, 0)
        if n_3 >= need:
            low, found = third, n_3
        elif n_2 >= need:
            low, high, found = second, third, n_2
        elif n_1 >= need:
            low, high, found = first, second, n_1
        else:
            high = first
        second = low + (high - low) / 2
    return low


@triton.jit
def _mass(X, low, scale, largest, start, BV: tl.constexpr):
    """exp(scale (x - largest)) [BV] of those of X from start that are above low, 0 for the others."""
    x = tl.load(X + start + tl.arange(0, BV))
    return tl.where(x > low, tl.exp(scale * (x - largest)), 0.0)


@triton.jit
def draw_kernel(
    LOGITS, NUMBERS, AT, IDS, V, length, temperature, top_k, top_p, BV: tl.constexpr, PDL: tl.constexpr = False
):
    """One row of LOGITS [B, V] float32, V a multiple of BV: an id by number AT of its row of NUMBERS [B, length]
    float64, as `draw` has it."""
    _begin(PDL)
    b = tl.program_id(0)
    X, scale = LOGITS + tl.cast(b, tl.int64) * V, 1 / temperature
    number = tl.load(NUMBERS + b * length + tl.load(AT))
    _wait(PDL)
    most, least = tl.full([BV], float("-inf"), tl.float32), tl.full([BV], float("inf"), tl.float32)
    for start in range(0, V, BV):
        x = tl.load(X + start + tl.arange(0, BV))
        most, least = tl.maximum(most, x), tl.minimum(least, x)
    largest = tl.max(most, 0)
    nothing = tl.maximum(120 * temperature, 1e-6 * tl.abs(largest))  # so far below exp is zero
    low = tl.maximum(tl.min(least, 0) - 1, largest - nothing)
    if top_k > 0:
        low = _above(X, low, largest, top_k, scale, largest, V, False, BV)
    if top_p < 1:
        total = tl.zeros([BV], tl.float32)
        for start in range(0, V, BV):
            total += _mass(X, low, scale, largest, start, BV)
        low = _above(X, low, largest, top_p * tl.sum(total, 0), scale, largest, V, True, BV)
    whole = tl.zeros([1], tl.float64)
    for start in range(0, V, BV):
        whole += tl.sum(_mass(X, low, scale, largest, start, BV), 0).to(tl.float64)
    target = number * tl.sum(whole, 0)
    first, before, sums = 0, 0 * target, 0 * target  # the block where the sum passes the target
    for start in range(0, V, BV):
        more = tl.sum(_mass(X, low, scale, largest, start, BV), 0).to(tl.float64)
        here = (sums <= target) & (more > 0)
        first, before = tl.where(here, start, first), tl.where(here, sums, before)
        sums += more
    mass, v = _mass(X, low, scale, largest, first, BV), first + tl.arange(0, BV)
    passed = (mass > 0) & (before + tl.cumsum(mass.to(tl.float64), 0) > target)
    drawn, last = tl.min(tl.where(passed, v, V), 0), tl.max(tl.where(mass > 0, v, 0), 0)
    tl.store(IDS + b, tl.where(drawn < V, drawn, last).to(tl.int64))


# ---- launchers


def _dependent(x):
    """Options of a launch that may begin while the kernel before it runs."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0):
        return dict(PDL=True, launch_pdl=True)
    return {}


def embed(ids, wte, norm, out):
    """out [B, K] float32 = layer_norm(wte[ids]); norm: (weight, bias or None) float32."""
    K = wte.shape[1]
    embed_kernel[(len(ids),)](ids, wte, *norm, out, K, BK=triton.next_power_of_2(K), **_dependent(out))


def _tiles(B, N, K):
    """(programs over columns, programs over sequences) of a product, and its tile sizes."""
    if B == 1:
        BK = triton.next_power_of_2(K)
        BM, BN = 1, max(1, 4096 // BK)
    else:
        BM, BN, BK = min(64, max(ROWS, triton.next_power_of_2(B))), 32, 64
    return (triton.cdiv(N, BN), triton.cdiv(B, BM)), dict(BM=BM, BN=BN, BK=BK, num_stages=4)


def linear(w, out, x, *, norm=None, bias=None, gelu=False, add=False):
    """out [B, N] float32 = f(x) w^T + bias, see `linear_kernel`; w [N, K], x [B, K] float32, norm (weight, bias) of the
    LayerNorm before."""
    (N, K), B = w.shape, len(out)
    grid, tiles = _tiles(B, N, K)
    linear_kernel[grid](
        x, *(norm or (None, None)), w, bias, out, B, N, K, out.stride(0), **tiles, NORM=norm is not None, GELU=gelu,
        ADD=add, **_dependent(x),
    )  # fmt: skip


def qkv(w, out, x, *, norm, bias, ids, gate, beta, slopes, u, rates, turn, kept, count, reset_token, rounding):
    """See `qkv_kernel`; w, out, x, norm, bias as in `linear`, gate: (W [Hkv, K], b [Hkv]) or None, beta: W [1, K] or
    None, slopes [Hkv] or None, turn [B, 2, D], kept: (keys, values, total, resets), rounding: the dtype that linear
    layers' inputs have."""
    (N, K), B, (C, HKV) = w.shape, len(out), kept[0].shape[1:3]
    (columns, rows), tiles = _tiles(B, N, K)
    qkv_kernel[(columns + B * HKV, rows)](
        x, *norm, w, bias, out, B, N, K, ids, *(gate or (None, None)), beta, slopes, u, rates, turn, *kept[2:], count,
        reset_token, HKV, C, D=turn.shape[2], **tiles, ALL=triton.next_power_of_2(K), **_dependent(x),
        ROUND=tl.bfloat16 if rounding == torch.bfloat16 else tl.float32,
    )  # fmt: skip


def attend(qkv, turn, kept, count, state, sums, out, p):
    """See `attend_kernel`; kept: (keys, values, total, resets), state: (S, z) or None, sums: (num [parts, B, H, D], den
    [parts, B, H], arrived [B, H]), out [B, H D]."""
    keys = kept[0]
    (B, C, HKV, D), (parts, _, H) = keys.shape, sums[1].shape
    S, z = state or (None, None)
    indices, coefficients = features(D, p, keys.device) if state else (None, None)
    attend_kernel[(B * H, parts)](
        qkv, turn, *kept, count, S, z, indices, coefficients, *sums, out, B, C, H, HKV, z.shape[2] if state else 0,
        parts, parts_of_state(B * H, z.shape[2], D) if state else 0, P=p, D=D, BT=64, BF=4096 // D,
        PARTS=triton.next_power_of_2(parts), **_dependent(qkv),
    )  # fmt: skip


def draw(logits, ids, numbers, at, *, temperature, top_k, top_p):
    """ids [B] int64 from logits [B, V] float32, by numbers[:, at], float64 in [0, 1): of exp(logits / temperature) of
    the top_k largest (0: all), and of the fewest of these that have top_p of their sum. Ties with the last are in."""
    (B, V), BV = logits.shape, DRAW
    if V % BV:
        BV = min(BV, triton.next_power_of_2(V))
        logits = pad(logits, (0, -V % BV), value=float("-inf"))
    draw_kernel[(B,)](
        logits.contiguous(), numbers, at, ids, logits.shape[1], numbers.shape[1], temperature, float(top_k), top_p,
        BV=BV, num_warps=max(1, BV // 256), **_dependent(logits),
    )  # fmt: skip


def fold(kept, n, state, p):
    """The n tokens kept become part of the state, S [B, Hkv, Dphi, D], z [B, Hkv, Dphi] float32, in place."""
    (B, C, HKV, D), F = kept[0].shape, state[1].shape[2]
    BF = 64
    fold_kernel[(B * HKV * triton.cdiv(F, BF),)](
        *kept, *state, *features(D, p, kept[0].device), n, C, HKV, F, P=p, D=D, BT=16, BF=BF
    )


def parts_of_state(heads, F, D):
    """How many programs read one head's state: with few heads all run at once, then each waits for the others less."""
    tiles = -(-F * D // 4096)
    most = AT_ONCE // heads - 1 if 4 * heads <= AT_ONCE else -(-PROGRAMS // heads)
    return -(-tiles // -(-tiles // most))


def parts_of_kept(heads, C):
    """How many read what is kept behind it."""
    return max(1, min(-(-PROGRAMS // heads), -(-C // 64), 128))
