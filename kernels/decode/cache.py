"""The KV cache of a layer: what the kernels of `power` and `softmax` share when they read it in parts.

    out = sum over parts of num / sum over parts of den

    programs   for each sequence and query head: parts, which share the cached tokens; the last part to end adds all
    reads      12 + 2 D sizeof(weight) bytes for each cached token and KV head

Sums are always added in the same order. With one sequence the limit is latency, and with many cached tokens the
bandwidth. Buffers, for B sequences and at most C cached tokens:

    name              shape                          dtype     contents
    ------------------------------------------------------------------------------------------------------------------
    rotation          [B, 2, D]                      float32   factors that rotate q and k: cos cos.. and -sin sin..
    cache: k          [B, C, Hkv, D]                 weights'  rotated
           v          [B, C, Hkv, D]                 weights'
           gate_sums  [B, C, Hkv]                    float64   sum of log_g since the last flush, without -inf
           resets     [B, C, Hkv]                    int32     how many log_g were -inf
           count      [1]                            int32     cached tokens, the newest not among them
    sums:  num        [parts, B, H, D]               float32   the sums of each part
           den        [parts, B, H]                  float32
           arrived    [B, H]                         int32     parts that have finished; zero before and after
           maxima     [parts, B, H]                  float32   softmax: the maximum to which a part's sums are relative
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import EMPTY, gate_heads

MAX_PROGRAMS = 1056  # of a kernel: eight for each processor of an H200, which run in turn


class Cache(NamedTuple):
    """The buffers of a KV cache: tensors, or pointers in a kernel; shapes are in this file's table."""

    k: Any
    v: Any  # not "values": a tuple in a kernel has an attribute of this name
    gate_sums: Any
    resets: Any  # None if no token resets
    count: Any


class Heads(NamedTuple):
    """What c_attn has computed of the newest tokens: tensors, or pointers in a kernel."""

    heads: Any  # [B, N] float32: q, k and v, not rotated, and the output gate behind them
    stride: Any  # N
    rotation: Any = None  # see the table
    gate_weight: Any = None  # [D] float32: w of the output gate (layers/output_gate.py), None without one


class Sums(NamedTuple):
    """The buffers for the sums of all parts: tensors, or pointers in a kernel; shapes are in this file's table."""

    num: Any
    den: Any
    arrived: Any
    maxima: Any = None


class Token(NamedTuple):
    """The newest token of one sequence, as one query head of a kernel reads it."""

    q: Any  # pointer to the head's row, not rotated
    k: Any  # pointer to the KV head's row, not rotated
    v: Any  # pointers [D] to the KV head's row
    gate: Any  # pointers [D] to the row of the query head's output gate
    rotation: Any  # pointer to its factors, [2, D]
    kv_head: Any
    is_first: Any  # of the query heads that share the KV head
    first: Any  # index of the sequence's token 0 in an array [B, C, Hkv]
    count: Any  # cached tokens
    index: Any  # of this token in that array


def parts_of_cache(heads, C):
    """Return how many programs read one head's cache of at most C tokens, for `heads` = B H query heads."""
    return max(1, min(-(-MAX_PROGRAMS // heads), -(-C // 64), 128))


@triton.jit
def load_rotated(X, ROTATION, D: tl.constexpr):
    """Load a row [D] of q or k and rotate it, in float32."""
    d = tl.arange(0, D)
    return tl.load(X + d) * tl.load(ROTATION + d) + tl.load(X + (d ^ 1)) * tl.load(ROTATION + D + d)


@triton.jit
def load_tokens(cache, first, start, end, HKV, D: tl.constexpr, BT: tl.constexpr):
    """Load (keys, values [BT, D]) of the cached tokens from `start`, zeros from `end` on.

    `first` is the index of token 0 in an array [B, C, Hkv]. Returns (keys, values, the tokens' indices there, a mask
    of the tokens before `end`).
    """
    t, d = start + tl.arange(0, BT), tl.arange(0, D)
    index, inside = first + t * HKV, t < end
    entries = index[:, None] * D + d[None, :]
    k = tl.load(cache.k + entries, mask=inside[:, None], other=0.0)
    v = tl.load(cache.v + entries, mask=inside[:, None], other=0.0)
    return k, v, index, inside


@triton.jit
def find_token(qkv, cache, C, H, HKV, D: tl.constexpr):
    """Return the Token of this program; qkv: Heads. Its first id counts the query heads of all sequences."""
    bh = tl.program_id(0)
    b, h = bh // H, bh % H
    group = H // HKV
    hkv, d = h // group, tl.arange(0, D)
    row, rotation = qkv.heads + b * qkv.stride, qkv.rotation + 2 * b * D
    first = (tl.cast(b, tl.int64) * C) * HKV + hkv
    count = tl.load(cache.count)
    k, v, gate = row + (H + hkv) * D, row + (H + HKV + hkv) * D + d, row + (H + 2 * HKV + h) * D + d
    return Token(row + h * D, k, v, gate, rotation, hkv, h % group == 0, first, count, first + count * HKV)


@triton.jit
def load_newest(cache, token, D: tl.constexpr):
    """Load the newest token's key, rotated, and its value [D], in the dtype of the cache."""
    k = load_rotated(token.k, token.rotation, D).to(cache.k.dtype.element_ty)
    return k, tl.load(token.v).to(cache.v.dtype.element_ty)


@triton.jit
def append_newest(cache, token, k, v, D: tl.constexpr):
    """Write the newest token's key and value [D] to the cache, once for the heads that share them."""
    if token.is_first:
        entry = token.index * D + tl.arange(0, D)
        tl.store(cache.k + entry, k)
        tl.store(cache.v + entry, v)


@triton.jit
def gate_output(y, gate, weight, D: tl.constexpr):
    """Return `gate_heads` of a head's output y [D], or y if the layer has no output gate.

    gate: pointers [D] to g; weight: a pointer to w [D], or None without a gate.
    """
    if weight is not None:
        y = gate_heads(y, tl.load(gate), tl.load(weight + tl.arange(0, D)), D, 1e-5)
    return y


@triton.jit
def add_part(num, den, maximum, qkv, token, sums, OUT, heads, parts, D: tl.constexpr, PARTS: tl.constexpr):
    """Write the sums of this program's part; the last part of a head to finish writes their quotient, gated, to OUT.

    The program's ids are the head, of `heads` = B H, and the part. PARTS is a power of two, at least `parts`.
    """
    head, part, d = tl.program_id(0), tl.arange(0, PARTS), tl.arange(0, D)
    index = tl.program_id(1) * heads + head
    tl.store(sums.num + index * D + d, num)
    tl.store(sums.den + index, den)
    if sums.maxima is not None:
        tl.store(sums.maxima + index, maximum)
    tl.debug_barrier()
    if tl.atomic_add(sums.arrived + head, 1, sem="acq_rel") == parts - 1:
        indices, inside = part * heads + head, part < parts
        entries = indices[:, None] * D + d[None, :]
        nums = tl.load(sums.num + entries, mask=inside[:, None], other=0.0, cache_modifier=".cg")
        dens = tl.load(sums.den + indices, mask=inside, other=0.0, cache_modifier=".cg")
        if sums.maxima is not None:
            maxima = tl.load(sums.maxima + indices, mask=inside, other=EMPTY, cache_modifier=".cg")
            weight = tl.exp2(maxima - tl.max(maxima, 0))
            nums, dens = nums * weight[:, None], dens * weight
        total = tl.sum(dens, 0)
        y = tl.where(total <= 0, 0.0, tl.sum(nums, 0) / total)
        tl.store(OUT + head * D + d, gate_output(y, token.gate, qkv.gate_weight, D))
        tl.store(sums.arrived + head, 0)
