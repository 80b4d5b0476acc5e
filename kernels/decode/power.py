"""One token of generation on a GPU: five kernels per layer, which read the weights, the state and the KV cache once.

    x = norm(wte[id])                                               embed
    for every layer
        q, k, v = W norm(x) + b;  position, gates                   qkv       1
        x += W gate(attend(R q, R k, v))                            attend    2, linear    3
        x += W gelu(W norm(x) + b) + b                              linear    4, linear    5
    logits = wte norm(x)                                            linear, then sampling.py

    attend:  y = num / den,  num = decay phi(q) S + sum over cached t of decay_t (q . k_t)^p v_t,  den: z for S, 1 for v

    kernel     1 qkv             2 attend                         3, 4, 5 linear
              +----------------+ +------------------------------+ +-----------------------------+
    programs  | columns of W   | | for each sequence and head:  | | columns of W: projection,   |
              | gates of each  | | parts of the state, then     | | up to 4 n_embd, back again  |
              | sequence, head | | parts of the cached tokens   | |                             |
              +----------------+ +------------------------------+ +-----------------------------+
    reads       W, x               S, z; keys, values, gate_sums    W, what the kernel before wrote
                                   the last part to end adds all

The convolution is in 1, the output gate in 2. `flush` moves the cached tokens into the state when enough of them have
gathered. Softmax layers have softmax.py in place of `attend`; Heinsen's have `linear` in place
of `qkv`, and heinsen.py. generation/layers.py has the buffers, and generation/decoder.py captures a token as a CUDA
graph.

Cost, in bytes read for a token and layer: 12 n_embd^2 weights, once for all sequences; for each sequence and KV head
Dphi (4 + D sizeof(S)) of the state and 12 + 2 D sizeof(weight) for each cached token. A flush reads and writes the
state once. With one sequence the limit is latency, since every kernel waits for the one before (`early_launch` hides
part of that); with many it is the bandwidth, of the state more than of the weights.

Sums are float32 whatever the weights' dtype is; positions and the gates' sums are float64. q is divided by its largest
entry and keys are taken as they are, so (q . k)^p and the state must be in float32's range: for p = 8 keys from 1e-4 to
1e4, for p = 4 from 1e-8 to 1e8. Buffers, beside the ones in cache.py:

    name              shape                          dtype     contents
    ------------------------------------------------------------------------------------------------------------------
    x                 [B, n_embd]                    float32   the residual stream
    state: S          [B, Hkv, Dphi, D]              any float see `features` for the order of Dphi
           z          [B, Hkv, Dphi]                 float32
"""

import functools
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common import exact_product
from ..configs import early_launch
from ..layout import make_sqrt_multiplicity, symmetric_power_dim
from .cache import MAX_PROGRAMS, add_part, append_newest, find_token, load_newest, load_rotated, load_tokens
from .linear import let_next_start, wait_for_previous

RESIDENT_PROGRAMS = 396  # of `attend`, that run at once: three for each processor of an H200


class State(NamedTuple):
    """A layer's state: tensors, or pointers in a kernel; shapes are in this file's table."""

    S: Any = None
    z: Any = None


class Features(NamedTuple):
    """The order of phi's features: tensors, or pointers in a kernel."""

    indices: Any = None  # [Dphi]
    coefficients: Any = None  # [Dphi] float32


@functools.cache
def features(D, p, device):
    """Return the Features of phi, in lexicographic order of the non-decreasing multi-indices.

    A multi-index is one number, int32 up to p = 4 and else int64, with a byte for each of its p indices. A coefficient
    is the square root of the number of orders of a multi-index, p! / (c_1! ... c_D!), float32. Raises ValueError if a
    head's state has more numbers than 32 bits can count.
    """
    size = symmetric_power_dim(D, p) * D
    if size >= 2**31:
        raise ValueError(
            f"a state of p={p} and head dimension {D} has {size:,} numbers a head, the kernels take 2^31: choose a "
            "smaller p or head dimension, or generate with a KV cache"
        )
    dtype = torch.int32 if p <= 4 else torch.int64
    indices = torch.tensor(list(combinations_with_replacement(range(D), p)), dtype=dtype)
    packed = sum(indices[:, i] << 8 * i for i in range(p))
    return Features(packed.to(device), make_sqrt_multiplicity(D, p).float().to(device))


# ---- attention


@triton.jit
def _load_query(token, cache, D: tl.constexpr):
    """Load (q [D], the gate sum, the resets) of the newest token.

    q is rotated and divided by its largest entry, which cancels in y and avoids overflow of the power.
    """
    q = load_rotated(token.q, token.rotation, D)
    largest = tl.max(tl.abs(q), 0)
    q = tl.where(largest == 0, 0.0, q / largest)
    return q, tl.load(cache.gate_sums + token.index), tl.load(cache.resets + token.index)


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
def _load_state(state, features, start, end, D: tl.constexpr, BF: tl.constexpr):
    """Load (S [BF, D], z, indices, coefficients [BF]) of the features from `start`, zeros from `end` on."""
    f, d = start + tl.arange(0, BF), tl.arange(0, D)
    inside = f < end
    s = tl.load(state.S + f[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    z = tl.load(state.z + f, mask=inside, other=0.0)
    indices = tl.load(features.indices + f, mask=inside, other=0)
    return s, z, indices, tl.load(features.coefficients + f, mask=inside, other=0.0)


@triton.jit
def _load_cache(cache, first, start, end, HKV, D: tl.constexpr, BT: tl.constexpr):
    """Load (keys, values [BT, D], gate sums, resets [BT]) of the cached tokens from `start`, zeros from `end` on."""
    k, v, index, inside = load_tokens(cache, first, start, end, HKV, D, BT)
    gate_sums = tl.load(cache.gate_sums + index, mask=inside, other=0.0)
    return k, v, gate_sums, tl.load(cache.resets + index, mask=inside, other=-1)


@triton.jit
def _attend_to_state(
    token, cache, state, features, begin, end, P: tl.constexpr, D: tl.constexpr, BF: tl.constexpr, PDL: tl.constexpr
):
    """Return (num [D], den) of the newest token's query for the features [begin, end) of its head's state."""
    s, z, indices, phi = _load_state(state, features, begin, end, D, BF)
    wait_for_previous(PDL)
    q, gate_sum, resets = _load_query(token, cache, D)
    nums, dens = tl.zeros([BF, D], tl.float32), tl.zeros([BF], tl.float32)
    for start in range(begin, end, BF):
        for i in tl.static_range(P):
            phi *= tl.gather(q, (indices >> 8 * i) & 255, 0)
        nums += phi[:, None] * s.to(tl.float32)
        dens += phi * z
        s, z, indices, phi = _load_state(state, features, start + BF, end, D, BF)
    decay = tl.where(resets == 0, tl.exp(gate_sum.to(tl.float32)), 0.0)
    return tl.sum(nums, 0) * decay, tl.sum(dens, 0) * decay


@triton.jit
def _attend_to_cache(
    token, cache, begin, end, HKV, P: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr
):
    """Return (num [D], den) of the newest token's query for the cached tokens [begin, end), and the query as loaded."""
    k, v, gate_sums, reset = _load_cache(cache, token.first, begin, end, HKV, D, BT)
    wait_for_previous(PDL)
    q, gate_sum, resets = _load_query(token, cache, D)
    nums, dens = tl.zeros([BT, D], tl.float32), tl.zeros([BT], tl.float32)
    for start in range(begin, end, BT):
        w = _even_power(tl.sum(k.to(tl.float32) * q[None, :], 1), P)
        w = tl.where(reset == resets, w * tl.exp((gate_sum - gate_sums).to(tl.float32)), 0.0)
        nums += w[:, None] * v.to(tl.float32)
        dens += w
        k, v, gate_sums, reset = _load_cache(cache, token.first, start + BT, end, HKV, D, BT)
    return tl.sum(nums, 0), tl.sum(dens, 0), q


@triton.jit
def attend_kernel(
    qkv, cache, state, features, sums, OUT, B, C, H, HKV, F, parts, state_parts, P: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute one part of one query head's sums over state or cache; the last part to finish writes OUT [B, H, D].

    The first `state_parts` parts share the F features of the state equally, the others share the cached tokens and the
    newest one. One of them writes its key and value to entry `count` of the cache. PARTS is a power of two, at least
    `parts`.
    """
    let_next_start(PDL)
    part, token = tl.program_id(1), find_token(qkv, cache, C, H, HKV, D)
    count = token.count
    num, den = tl.zeros([D], tl.float32), 0.0
    if part < state_parts:
        if state.S is not None:
            size = tl.cdiv(tl.cdiv(F, state_parts), BF) * BF
            begin = part * size
            end = tl.minimum(begin + size, F)
            offset = tl.cast(tl.program_id(0) // H * HKV + token.kv_head, tl.int64) * F
            head_state = State(state.S + offset * D, state.z + offset)
            num, den = _attend_to_state(token, cache, head_state, features, begin, end, P, D, BF, PDL)
    else:
        size = tl.cdiv(tl.cdiv(count + 1, parts - state_parts), BT) * BT
        begin = (part - state_parts) * size
        end = tl.minimum(begin + size, count)
        num, den, q = _attend_to_cache(token, cache, begin, end, HKV, P, D, BT, PDL)
        if (begin <= count) & (count < begin + size):
            k, v = load_newest(cache, token, D)
            w = _even_power(tl.sum(k.to(tl.float32) * q, 0), P)
            num += w * v.to(tl.float32)
            den += w
            append_newest(cache, token, k, v, D)
    add_part(num, den, 0.0, qkv, token, sums, OUT, B * H, parts, D, PARTS)


def attend(qkv, cache, state, sums, out, p):
    """Write the attention of the newest token to out [B, H D], and its key and value to entry `count` of the cache.

    qkv: Heads; cache: a Cache; state: a State or None; sums: Sums with `parts_of_state` (with a state) plus
    `parts_of_cache` parts.
    """
    (B, C, HKV, D), (parts, _, H), F, state_parts = cache.k.shape, sums.den.shape, 0, 0
    if state:
        F = state.z.shape[2]
        state_parts = parts_of_state(B * H, F, D)
    order = features(D, p, cache.k.device) if state else Features()
    attend_kernel[(B * H, parts)](
        qkv, cache, state or State(), order, sums, out, B, C, H, HKV, F, parts, state_parts, P=p, D=D, BT=64,
        BF=4096 // D, PARTS=triton.next_power_of_2(parts), **early_launch(out),
    )  # fmt: skip


def parts_of_state(heads, F, D):
    """Return how many programs read one head's state of F features, for `heads` = B H query heads.

    With few heads these are as many as can run at once, since the last one waits for all; with many heads, more.
    """
    tiles = -(-F * D // 4096)
    limit = RESIDENT_PROGRAMS // heads - 1 if 4 * heads <= RESIDENT_PROGRAMS else -(-MAX_PROGRAMS // heads)
    return -(-tiles // -(-tiles // limit))


# ---- flushing the cache into the state


@triton.jit
def flush_kernel(
    cache, state, features, n, C, HKV, F, P: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr
):
    """Update BF features of one sequence and KV head: decay the state by the n tokens' gates and add the tokens."""
    blocks = tl.cdiv(F, BF)
    bh, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, hkv = bh // HKV, bh % HKV
    f, d = block * BF + tl.arange(0, BF), tl.arange(0, D)
    inside = f < F
    first = (tl.cast(b, tl.int64) * C) * HKV + hkv  # of token 0 in the cache
    last = first + (n - 1) * HKV
    gate_sum, last_resets = tl.load(cache.gate_sums + last), tl.load(cache.resets + last)
    decay = tl.where(last_resets == 0, tl.exp(gate_sum.to(tl.float32)), 0.0)
    row = tl.cast(bh, tl.int64) * F + f
    S, z_pointers = state.S + row[:, None] * D + d[None, :], state.z + row
    s = tl.load(S, mask=inside[:, None], other=0.0).to(tl.float32) * decay
    z = tl.load(z_pointers, mask=inside, other=0.0) * decay
    indices = tl.load(features.indices + f, mask=inside, other=0)
    coefficient = tl.load(features.coefficients + f, mask=inside, other=0.0)
    for start in range(0, n, BT):
        keys, values, index, cached = load_tokens(cache, first, start, n, HKV, D, BT)
        token_decay = tl.exp((gate_sum - tl.load(cache.gate_sums + index, mask=cached, other=0.0)).to(tl.float32))
        resets = tl.load(cache.resets + index, mask=cached, other=0)
        token_decay = tl.where(cached & (resets == last_resets), token_decay, 0.0)
        phi = coefficient[:, None] * token_decay[None, :]
        k = tl.trans(keys.to(tl.float32))
        for i in tl.static_range(P):
            phi *= tl.gather(k, tl.broadcast_to(((indices >> 8 * i) & 255)[:, None], [BF, BT]), 0)
        s = exact_product(phi, values, s)
        z += tl.sum(phi, 1)
    tl.store(S, s, inside[:, None])
    tl.store(z_pointers, z, inside)


def flush(cache, n, state, p):
    """Add the first n tokens of a Cache to a State, in place."""
    (B, C, HKV, D), F, BF = cache.k.shape, state.z.shape[2], 64
    order = features(D, p, cache.k.device)
    grid = (B * HKV * triton.cdiv(F, BF),)
    flush_kernel[grid](cache, state, order, n, C, HKV, F, P=p, D=D, BT=16, BF=BF)
