"""One token of generation on a GPU: five kernels per layer, which read the weights, the state and the KV cache once.

    x = layer_norm(wte[id])                                         embed
    for every layer
        q, k, v = W layer_norm(x) + b;  position, gates             qkv       1
        x += W attend(R q, R k, v)                                  attend    2, linear    3
        x += W gelu(W layer_norm(x) + b) + b                        linear    4, linear    5
    logits = wte layer_norm(x)                                      linear, then sampling.py

    attend:  y = num / den,  num = decay phi(q) S + sum over cached t of decay_t (q . k_t)^p v_t,  den: z for S, 1 for v

    kernel     1 qkv             2 attend                         3, 4, 5 linear
              +----------------+ +------------------------------+ +-----------------------------+
    programs  | columns of W   | | for each sequence and head:  | | columns of W: projection,   |
              | gates of each  | | parts of the state, then     | | up to 4 n_embd, back again  |
              | sequence, head | | parts of the cached tokens   | |                             |
              +----------------+ +------------------------------+ +-----------------------------+
    reads       W, x               S, z; keys, values, gate_sums    W, what the kernel before wrote
                                   the last part to end adds all

`flush` moves the cached tokens into the state when enough of them have gathered. Softmax layers have decode_softmax.py
in place of `attend`; Heinsen's have `linear` in place of `qkv`, and decode_heinsen.py. decoder.py has the buffers, and
captures a token as a CUDA graph.

Cost, in bytes read for a token and layer: 12 n_embd^2 weights, once for all sequences; for each sequence and KV head
Dphi (4 + D sizeof(S)) of the state and 12 + 2 D sizeof(weight) for each cached token. A flush reads and writes the
state once. With one sequence the limit is latency, since every kernel waits for the one before (`early_launch` hides
part of that); with many it is the bandwidth, of the state more than of the weights.

Sums are float32 whatever the weights' dtype is; positions and the gates' sums are float64. q is divided by its largest
entry and keys are taken as they are, so (q . k)^p and the state must be in float32's range: for p = 8 keys from 1e-4 to
1e4, for p = 4 from 1e-8 to 1e8. Buffers, for B sequences and
at most C cached tokens:

    name              shape                          dtype     contents
    ------------------------------------------------------------------------------------------------------------------
    x                 [B, n_embd]                    float32   the residual stream
    qkv               [B, (H + 2 Hkv) D]             float32   q, k, v of the token, not rotated
    position          [B]                            float64   the newest token's position; learned: the sum of 1 + tanh
    rotation          [B, 2, D]                      float32   factors that rotate q and k: cos cos.. and -sin sin..
    cache: keys       [B, C, Hkv, D]                 weights'  rotated
           values     [B, C, Hkv, D]                 weights'
           gate_sums  [B, C, Hkv]                    float64   sum of log_g since the last flush, without -inf
           resets     [B, C, Hkv]                    int32     how many log_g were -inf
    count             [1]                            int32     cached tokens, the newest not among them
    state: S          [B, Hkv, Dphi, D]              any float see `features` for the order of Dphi
           z          [B, Hkv, Dphi]                 float32
    sums: num               [parts, B, H, D]               float32   the sums of each part of attend
          den         [parts, B, H]                  float32
          arrived     [B, H]                         int32     parts that have finished; zero before and after attend
"""

import functools
from itertools import combinations_with_replacement

import torch
import triton
import triton.language as tl

from ..common import exact_product, log1p
from ..configs import early_launch
from ..layout import make_sqrt_multiplicity
from .linear import (
    embed,
    let_next_start,
    linear,
    linear_tile,
    load_norm,
    normalize,
    tile_sizes,
    wait_for_previous,
)  # fmt: skip

__all__ = ["embed", "linear", "qkv", "attend", "flush", "features", "parts_of_state", "parts_of_cache"]

# Programs of `attend`: three fit on each processor of an H200 at once; up to eight per processor run in turn.
RESIDENT_PROGRAMS, MAX_PROGRAMS = 396, 1056


@functools.cache
def features(D, p, device):
    """Return (indices, coefficients) [Dphi] of phi, in lexicographic order of the non-decreasing multi-indices.

    A multi-index is one number, int32 up to p = 4 and else int64, with a byte for each of its p indices. A coefficient
    is the square root of the number of orders of a multi-index, p! / (c_1! ... c_D!), float32.
    """
    dtype = torch.int32 if p <= 4 else torch.int64
    indices = torch.tensor(list(combinations_with_replacement(range(D), p)), dtype=dtype)
    packed = sum(indices[:, i] << 8 * i for i in range(p))
    return packed.to(device), make_sqrt_multiplicity(D, p).float().to(device)


# ---- q, k, v; position and gates


@triton.jit
def _rotation(position, RATES, D: tl.constexpr):
    """Return the two factors [D] float32 that `load_rotated` multiplies with: cos and, with signs, sin."""
    d = tl.arange(0, D)
    turns = position * tl.load(RATES + d // 2)
    angle = (turns - tl.floor(turns)).to(tl.float32) * 6.283185307179586
    return tl.cos(angle), tl.sin(angle) * tl.where(d % 2 == 0, -1.0, 1.0)


@triton.jit
def _advance_position_and_gates(
    b, h, X, LN_W, LN_B, IDS, W_GATE, B_GATE, W_BETA, SLOPES, POSITION, RATES, ROTATION, GATE_SUMS, RESETS, COUNT,
    reset_token, K, HKV, C, D: tl.constexpr, BK: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the new token's gate sum and resets, of one KV head of one sequence, to entry COUNT of the cache.

    log_g is logsigmoid(W_GATE x + B_GATE) with W_GATE [Hkv, K], or -SLOPES [Hkv], or 0. The first head's program also
    moves the position on, by 1 or with W_BETA [1, K] by 1 + tanh(W_BETA x), and writes the rotation.
    """
    k, d = tl.arange(0, BK), tl.arange(0, D)
    inside = k < K
    position, count = tl.load(POSITION + b) + 1, tl.load(COUNT)
    at = (tl.cast(b, tl.int64) * C + count) * HKV + h
    gate_sum = tl.load(GATE_SUMS + at - HKV, mask=count > 0, other=0.0)
    resets = tl.load(RESETS + at - HKV, mask=count > 0, other=0)
    reset = tl.load(IDS + b) == reset_token
    log_g = -tl.load(SLOPES + h) if SLOPES is not None else 0.0
    if W_GATE is not None or W_BETA is not None:
        weight, bias = load_norm(LN_W, LN_B, k, K)
    if W_GATE is not None:
        w_gate, b_gate = tl.load(W_GATE + h * K + k, mask=inside, other=0.0), tl.load(B_GATE + h)
    if W_BETA is not None:
        w_beta = tl.load(W_BETA + k, mask=inside, other=0.0)
    else:
        cos, sin = _rotation(position, RATES, D)
    wait_for_previous(PDL)
    if W_GATE is not None or W_BETA is not None:
        x = tl.load(X + b * K + k, mask=inside, other=0.0)
        x = normalize(x, weight, bias, k, K).to(ROUND).to(tl.float32)
    if W_BETA is not None:
        position += 1 - 2 / (1 + tl.exp(2 * tl.sum(w_beta * x, 0)))  # tanh
        cos, sin = _rotation(position, RATES, D)
    if W_GATE is not None:
        gate = tl.sum(w_gate * x, 0) + b_gate
        e = tl.exp(-tl.abs(gate))
        log_g = tl.minimum(gate, 0.0) - log1p(e)
    if h == 0:
        tl.store(POSITION + b, position)
        tl.store(ROTATION + 2 * b * D + d, cos)
        tl.store(ROTATION + (2 * b + 1) * D + d, sin)
    tl.store(GATE_SUMS + at, gate_sum + tl.where(reset, 0.0, log_g).to(tl.float64))
    tl.store(RESETS + at, resets + reset.to(tl.int32))


@triton.jit
def qkv_kernel(
    X, LN_W, LN_B, W, BIAS, OUT, B, N, K, IDS, W_GATE, B_GATE, W_BETA, SLOPES, POSITION, RATES, ROTATION, GATE_SUMS,
    RESETS, COUNT, reset_token, HKV, C, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WHOLE_ROW: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute W layer_norm(x) + b in the first programs; B Hkv more call `_advance_position_and_gates`.

    WHOLE_ROW is a power of two, at least K. ROUND is the dtype to which a linear layer's input is rounded.
    """
    let_next_start(PDL)
    program = tl.program_id(0) - tl.cdiv(N, BN)
    if program >= 0:
        if tl.program_id(1) == 0:
            _advance_position_and_gates(
                program // HKV, program % HKV, X, LN_W, LN_B, IDS, W_GATE, B_GATE, W_BETA, SLOPES, POSITION, RATES,
                ROTATION, GATE_SUMS, RESETS, COUNT, reset_token, K, HKV, C, D, WHOLE_ROW, ROUND, PDL,
            )  # fmt: skip
    else:
        linear_tile(X, LN_W, LN_B, W, BIAS, OUT, B, N, K, N, BM, BN, BK, True, False, False, PDL)


def qkv(
    w, out, x, *, norm, bias, ids, gate, beta, slopes, position, rates, rotation, cache, count, reset_token, rounding
):
    """Write q, k, v of the newest token to out [B, (H + 2 Hkv) D], and its position, rotation, gate sum and resets.

    w, out, x, norm, bias as in `linear`. ids [B] int64: the tokens; reset_token forgets what is before it (-1: none).
    gate: (W [Hkv, n_embd], b [Hkv]) or None, slopes [Hkv] of fixed gates or None, beta: W [1, n_embd] of learned
    positions or None. rates [D / 2] float64: turns per unit of position. rounding: the dtype of linear layers' inputs.
    position, rotation, cache (keys, values, gate_sums, resets) and count are as in the file's table. position, rotation
    and entry `count` of gate_sums and resets are written.
    """
    (N, K), B, (C, HKV) = w.shape, len(out), cache[0].shape[1:3]
    (columns, rows), tiles = tile_sizes(B, N, K)
    qkv_kernel[(columns + B * HKV, rows)](
        x, *norm, w, bias, out, B, N, K, ids, *(gate or (None, None)), beta, slopes, position, rates, rotation,
        *cache[2:], count, reset_token, HKV, C, D=rotation.shape[2], **tiles, WHOLE_ROW=triton.next_power_of_2(K),
        **early_launch(x), ROUND=tl.bfloat16 if rounding == torch.bfloat16 else tl.float32,
    )  # fmt: skip


# ---- attention


@triton.jit
def load_rotated(X, ROTATION, D: tl.constexpr):
    """Load a row [D] of q or k and rotate it, in float32."""
    d = tl.arange(0, D)
    return tl.load(X + d) * tl.load(ROTATION + d) + tl.load(X + (d ^ 1)) * tl.load(ROTATION + D + d)


@triton.jit
def _load_query(Q, ROTATION, GATE_SUMS, RESETS, at, D: tl.constexpr):
    """Load (q [D], the gate sum, the resets) of the newest token.

    q is rotated and divided by its largest entry, which cancels in y and avoids overflow of the power.
    """
    q = load_rotated(Q, ROTATION, D)
    largest = tl.max(tl.abs(q), 0)
    return tl.where(largest == 0, 0.0, q / largest), tl.load(GATE_SUMS + at), tl.load(RESETS + at)


@triton.jit
def _even_power(x, P: tl.constexpr):
    """Return x^P for P = 2, 4, 6, 8."""
    y = x * x
    if P == 4:
        y = y * y
    elif P == 6:
        y = y * y * y
    elif P == 8:
        y = (y * y) * (y * y)
    return y


@triton.jit
def _load_state(S, Z, INDICES, COEFFICIENTS, start, end, D: tl.constexpr, BF: tl.constexpr):
    """Load (S [BF, D], z, indices, coefficients [BF]) of the features from `start`, zeros from `end` on."""
    f, d = start + tl.arange(0, BF), tl.arange(0, D)
    inside = f < end
    s = tl.load(S + f[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    z = tl.load(Z + f, mask=inside, other=0.0)
    indices = tl.load(INDICES + f, mask=inside, other=0)
    return s, z, indices, tl.load(COEFFICIENTS + f, mask=inside, other=0.0)


@triton.jit
def _load_cache(KEYS, VALUES, GATE_SUMS, RESETS, first, start, end, HKV, D: tl.constexpr, BT: tl.constexpr):
    """Load (keys, values [BT, D], gate sums, resets [BT]) of the cached tokens from `start`, zeros from `end` on.

    `first` is the index of token 0 in an array [B, C, Hkv].
    """
    t, d = start + tl.arange(0, BT), tl.arange(0, D)
    at, inside = first + t * HKV, t < end
    at_d = at[:, None] * D + d[None, :]
    k = tl.load(KEYS + at_d, mask=inside[:, None], other=0.0)
    v = tl.load(VALUES + at_d, mask=inside[:, None], other=0.0)
    gate_sums = tl.load(GATE_SUMS + at, mask=inside, other=0.0)
    return k, v, gate_sums, tl.load(RESETS + at, mask=inside, other=-1)


@triton.jit
def _attend_to_state(
    QKV, ROTATION, GATE_SUMS, RESETS, S, Z, INDICES, COEFFICIENTS, h, first, count, HKV, state, begin, end,
    P: tl.constexpr, D: tl.constexpr, BF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return (num [D], den) of query head h for the features [begin, end) of the state at index `state`."""
    s, z, indices, phi = _load_state(S + state * D, Z + state, INDICES, COEFFICIENTS, begin, end, D, BF)
    wait_for_previous(PDL)
    q, gate_sum, resets = _load_query(QKV + h * D, ROTATION, GATE_SUMS, RESETS, first + count * HKV, D)
    nums, dens = tl.zeros([BF, D], tl.float32), tl.zeros([BF], tl.float32)
    for start in range(begin, end, BF):
        for i in tl.static_range(P):
            phi *= tl.gather(q, (indices >> 8 * i) & 255, 0)
        nums += phi[:, None] * s.to(tl.float32)
        dens += phi * z
        s, z, indices, phi = _load_state(S + state * D, Z + state, INDICES, COEFFICIENTS, start + BF, end, D, BF)
    decay = tl.where(resets == 0, tl.exp(gate_sum.to(tl.float32)), 0.0)
    return tl.sum(nums, 0) * decay, tl.sum(dens, 0) * decay


@triton.jit
def _attend_to_cache(
    QKV, ROTATION, KEYS, VALUES, GATE_SUMS, RESETS, h, first, count, HKV, begin, end, P: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return (num [D], den) of query head h for the cached tokens [begin, end), and the query as it was loaded."""
    k, v, gate_sums, reset = _load_cache(KEYS, VALUES, GATE_SUMS, RESETS, first, begin, end, HKV, D, BT)
    wait_for_previous(PDL)
    q, gate_sum, resets = _load_query(QKV + h * D, ROTATION, GATE_SUMS, RESETS, first + count * HKV, D)
    nums, dens = tl.zeros([BT, D], tl.float32), tl.zeros([BT], tl.float32)
    for start in range(begin, end, BT):
        w = _even_power(tl.sum(k.to(tl.float32) * q[None, :], 1), P)
        w = tl.where(reset == resets, w * tl.exp((gate_sum - gate_sums).to(tl.float32)), 0.0)
        nums += w[:, None] * v.to(tl.float32)
        dens += w
        k, v, gate_sums, reset = _load_cache(KEYS, VALUES, GATE_SUMS, RESETS, first, start + BT, end, HKV, D, BT)
    return tl.sum(nums, 0), tl.sum(dens, 0), q


@triton.jit
def _add_parts(NUM, DEN, ARRIVED, OUT, bh, b, h, B, H, parts, D: tl.constexpr, PARTS: tl.constexpr):
    """Divide the sums of all parts' num and den and write them to OUT, always added in the same order."""
    part, d = tl.arange(0, PARTS), tl.arange(0, D)
    place, inside = (part * B + b) * H + h, part < parts
    place_d = place[:, None] * D + d[None, :]
    num = tl.load(NUM + place_d, mask=inside[:, None], other=0.0, cache_modifier=".cg")
    den = tl.sum(tl.load(DEN + place, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    tl.store(OUT + bh * D + d, tl.where(den <= 0, 0.0, tl.sum(num, 0) / den))
    tl.store(ARRIVED + bh, 0)


@triton.jit
def attend_kernel(
    QKV, ROTATION, KEYS, VALUES, GATE_SUMS, RESETS, COUNT, S, Z, INDICES, COEFFICIENTS, NUM, DEN, ARRIVED, OUT, B, C, H,
    HKV, F, parts, state_parts, P: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute one part of one query head's sums over state or cache; the last part to finish writes OUT [B, H, D].

    The first `state_parts` parts share the F features of the state equally, the others share the COUNT cached tokens
    and the newest one, whose key and value one of them writes to entry COUNT of the cache. PARTS is a
    power of two, at least `parts`.
    """
    let_next_start(PDL)
    bh, part = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    group = H // HKV
    hkv = h // group
    d = tl.arange(0, D)
    row, rotation = QKV + b * ((H + 2 * HKV) * D), ROTATION + 2 * b * D
    count = tl.load(COUNT)
    first = (tl.cast(b, tl.int64) * C) * HKV + hkv  # of token 0 in the cache
    num, den = tl.zeros([D], tl.float32), 0.0
    if part < state_parts:
        if S is not None:
            size = tl.cdiv(tl.cdiv(F, state_parts), BF) * BF
            begin, state = part * size, tl.cast(b * HKV + hkv, tl.int64) * F
            end = tl.minimum(begin + size, F)
            num, den = _attend_to_state(
                row, rotation, GATE_SUMS, RESETS, S, Z, INDICES, COEFFICIENTS, h, first, count, HKV, state, begin, end,
                P, D, BF, PDL,
            )  # fmt: skip
    else:
        size = tl.cdiv(tl.cdiv(count + 1, parts - state_parts), BT) * BT
        begin = (part - state_parts) * size
        end = tl.minimum(begin + size, count)
        num, den, q = _attend_to_cache(
            row, rotation, KEYS, VALUES, GATE_SUMS, RESETS, h, first, count, HKV, begin, end, P, D, BT, PDL
        )
        if (begin <= count) & (count < begin + size):
            new_k = load_rotated(row + (H + hkv) * D, rotation, D).to(KEYS.dtype.element_ty)
            new_v = tl.load(row + (H + HKV + hkv) * D + d).to(VALUES.dtype.element_ty)
            new_w = _even_power(tl.sum(new_k.to(tl.float32) * q, 0), P)
            num += new_w * new_v.to(tl.float32)
            den += new_w
            if h % group == 0:
                new = (first + count * HKV) * D + d
                tl.store(KEYS + new, new_k)
                tl.store(VALUES + new, new_v)
    place = (part * B + b) * H + h
    tl.store(NUM + place * D + d, num)
    tl.store(DEN + place, den)
    tl.debug_barrier()
    if tl.atomic_add(ARRIVED + bh, 1, sem="acq_rel") == parts - 1:
        _add_parts(NUM, DEN, ARRIVED, OUT, bh, b, h, B, H, parts, D, PARTS)


def attend(qkv, rotation, cache, count, state, sums, out, p):
    """Write the attention of the newest token to out [B, H D], and its key and value to entry `count` of the cache.

    state: (S, z) or None; sums: (num, den, arrived), whose number of parts is `parts_of_state` (with a state) plus
    `parts_of_cache`. Shapes are in this file's table.
    """
    keys = cache[0]
    (B, C, HKV, D), (parts, _, H) = keys.shape, sums[1].shape
    S, z = state or (None, None)
    indices, coefficients = features(D, p, keys.device) if state else (None, None)
    attend_kernel[(B * H, parts)](
        qkv, rotation, *cache, count, S, z, indices, coefficients, *sums, out, B, C, H, HKV, z.shape[2] if state else 0,
        parts, parts_of_state(B * H, z.shape[2], D) if state else 0, P=p, D=D, BT=64, BF=4096 // D,
        PARTS=triton.next_power_of_2(parts), **early_launch(qkv),
    )  # fmt: skip


def parts_of_state(heads, F, D):
    """Return how many programs read one head's state of F features, for `heads` = B H query heads.

    With few heads these are as many as can run at once, since the last one waits for all; with many heads, more.
    """
    tiles = -(-F * D // 4096)
    most = RESIDENT_PROGRAMS // heads - 1 if 4 * heads <= RESIDENT_PROGRAMS else -(-MAX_PROGRAMS // heads)
    return -(-tiles // -(-tiles // most))


def parts_of_cache(heads, C):
    """Return how many programs read one head's cache of at most C tokens, for `heads` = B H query heads."""
    return max(1, min(-(-MAX_PROGRAMS // heads), -(-C // 64), 128))


# ---- flushing the cache into the state


@triton.jit
def flush_kernel(
    KEYS, VALUES, GATE_SUMS, RESETS, S, Z, INDICES, COEFFICIENTS, n, C, HKV, F, P: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Update BF features of one sequence and KV head: decay the state by the n tokens' gates and add the tokens."""
    blocks = tl.cdiv(F, BF)
    bh, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, hkv = bh // HKV, bh % HKV
    f, d = block * BF + tl.arange(0, BF), tl.arange(0, D)
    inside = f < F
    first = (tl.cast(b, tl.int64) * C) * HKV + hkv  # of token 0 in the cache
    gate_sum, resets = tl.load(GATE_SUMS + first + (n - 1) * HKV), tl.load(RESETS + first + (n - 1) * HKV)
    whole = tl.where(resets == 0, tl.exp(gate_sum.to(tl.float32)), 0.0)
    state = tl.cast(bh, tl.int64) * F + f
    s = tl.load(S + state[:, None] * D + d[None, :], mask=inside[:, None], other=0.0).to(tl.float32) * whole
    z = tl.load(Z + state, mask=inside, other=0.0) * whole
    indices, coefficient = tl.load(INDICES + f, mask=inside, other=0), tl.load(COEFFICIENTS + f, mask=inside, other=0.0)
    for start in range(0, n, BT):
        t = start + tl.arange(0, BT)
        at = first + t * HKV
        decay = tl.exp((gate_sum - tl.load(GATE_SUMS + at, mask=t < n, other=0.0)).to(tl.float32))
        decay = tl.where((t < n) & (tl.load(RESETS + at, mask=t < n, other=0) == resets), decay, 0.0)
        phi = coefficient[:, None] * decay[None, :]
        at_d = at[:, None] * D + d[None, :]
        k = tl.trans(tl.load(KEYS + at_d, mask=t[:, None] < n, other=0.0).to(tl.float32))
        for i in tl.static_range(P):
            phi *= tl.gather(k, tl.broadcast_to(((indices >> 8 * i) & 255)[:, None], [BF, BT]), 0)
        s = exact_product(phi, tl.load(VALUES + at_d, mask=t[:, None] < n, other=0.0), s)
        z += tl.sum(phi, 1)
    tl.store(S + state[:, None] * D + d[None, :], s, inside[:, None])
    tl.store(Z + state, z, inside)


def flush(cache, n, state, p):
    """Add the first n cached tokens to the state (S, z), in place; shapes are in this file's table."""
    (B, C, HKV, D), F = cache[0].shape, state[1].shape[2]
    BF = 64
    flush_kernel[(B * HKV * triton.cdiv(F, BF),)](
        *cache, *state, *features(D, p, cache[0].device), n, C, HKV, F, P=p, D=D, BT=16, BF=BF
    )
