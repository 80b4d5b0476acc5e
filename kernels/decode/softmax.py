"""Softmax attention of the newest token, from a KV cache: what decode.attend is for the power variants.

    y = sum over cached t of exp(q . k_t / sqrt(D)) v_t / sum of exp(q . k_t / sqrt(D)),  t since the last reset

    programs  for each sequence and query head: parts of the cached tokens; the last part to end adds all
    reads     keys and values, 2 D sizeof(weight) bytes for each cached token and KV head

Each part has its weights relative to a maximum of its own, which it writes beside its sums: the parts are brought to
the largest maximum when they are added. Inside a part each of the BT rows of a tile has its own running maximum, so
that no tile waits for a reduction. With many cached tokens the limit is the bandwidth.

Buffers are those of decode.py, and

    sums: num                       [parts, B, H, D]    float32   the sums of each part
          den, maxima               [parts, B, H]       float32
          arrived                   [B, H]              int32     parts that have finished; zero before and after
"""

import math

import triton
import triton.language as tl

from ..common import EMPTY
from ..configs import early_launch
from .linear import let_next_start, wait_for_previous
from .power import load_rotated


@triton.jit
def _load_cache(KEYS, VALUES, RESETS, first, start, end, HKV, D: tl.constexpr, BT: tl.constexpr):
    """Load (keys, values [BT, D], resets [BT]) of the cached tokens from `start`, zeros from `end` on."""
    t, d = start + tl.arange(0, BT), tl.arange(0, D)
    at, inside = first + t * HKV, t < end
    at_d = at[:, None] * D + d[None, :]
    k = tl.load(KEYS + at_d, mask=inside[:, None], other=0.0)
    v = tl.load(VALUES + at_d, mask=inside[:, None], other=0.0)
    return k, v, tl.load(RESETS + at, mask=inside, other=-1) if RESETS is not None else t


@triton.jit
def _add_parts(NUM, DEN, MAXIMA, ARRIVED, OUT, bh, b, h, B, H, parts, D: tl.constexpr, PARTS: tl.constexpr):
    """Divide the sums of all parts and write them to OUT, always added in the same order."""
    part, d = tl.arange(0, PARTS), tl.arange(0, D)
    place, inside = (part * B + b) * H + h, part < parts
    place_d = place[:, None] * D + d[None, :]
    top = tl.load(MAXIMA + place, mask=inside, other=EMPTY, cache_modifier=".cg")
    weight = tl.exp2(top - tl.max(top, 0))
    num = tl.load(NUM + place_d, mask=inside[:, None], other=0.0, cache_modifier=".cg")
    den = tl.load(DEN + place, mask=inside, other=0.0, cache_modifier=".cg")
    tl.store(OUT + bh * D + d, tl.sum(num * weight[:, None], 0) / tl.sum(den * weight, 0))
    tl.store(ARRIVED + bh, 0)


@triton.jit
def softmax_kernel(
    QKV, ROTATION, KEYS, VALUES, RESETS, COUNT, NUM, DEN, MAXIMA, ARRIVED, OUT, B, C, H, HKV, parts, scale,
    D: tl.constexpr, BT: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute one part of one query head's sums over the cache; the last part to finish writes OUT [B, H, D].

    The parts share the COUNT cached tokens and the newest one, whose key and value one of them writes to entry COUNT of
    the cache. RESETS is None if no token forgets what is before it; scale is log2(e) / sqrt(D). PARTS is a power of
    two, at least `parts`.
    """
    let_next_start(PDL)
    bh, part = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    group = H // HKV
    hkv = h // group
    t, d = tl.arange(0, BT), tl.arange(0, D)
    row, rotation = QKV + b * ((H + 2 * HKV) * D), ROTATION + 2 * b * D
    count = tl.load(COUNT)
    first = (tl.cast(b, tl.int64) * C) * HKV + hkv  # of token 0 in the cache
    size = tl.cdiv(tl.cdiv(count + 1, parts), BT) * BT
    begin = part * size
    end = tl.minimum(begin + size, count)
    k, v, reset = _load_cache(KEYS, VALUES, RESETS, first, begin, end, HKV, D, BT)
    wait_for_previous(PDL)
    q = load_rotated(row + h * D, rotation, D) * scale
    resets = tl.load(RESETS + first + count * HKV) if RESETS is not None else 0
    nums, dens, tops = tl.zeros([BT, D], tl.float32), tl.zeros([BT], tl.float32), tl.full([BT], EMPTY, tl.float32)
    for start in range(begin, end, BT):
        seen = start + t < end
        if RESETS is not None:
            seen = seen & (reset == resets)
        s = tl.where(seen, tl.sum(k.to(tl.float32) * q[None, :], 1), EMPTY)
        top = tl.maximum(tops, s)
        w, keep = tl.where(seen, tl.exp2(s - top), 0.0), tl.exp2(tops - top)
        nums = nums * keep[:, None] + w[:, None] * v.to(tl.float32)
        dens = dens * keep + w
        tops = top
        k, v, reset = _load_cache(KEYS, VALUES, RESETS, first, start + BT, end, HKV, D, BT)
    top = tl.max(tops, 0)
    w = tl.exp2(tops - top)
    num, den = tl.sum(nums * w[:, None], 0), tl.sum(dens * w, 0)
    if (begin <= count) & (count < begin + size):
        new_k = load_rotated(row + (H + hkv) * D, rotation, D).to(KEYS.dtype.element_ty)
        new_v = tl.load(row + (H + HKV + hkv) * D + d).to(VALUES.dtype.element_ty)
        s = tl.sum(new_k.to(tl.float32) * q, 0)
        before, top = top, tl.maximum(top, s)
        keep, new_w = tl.exp2(before - top), tl.exp2(s - top)
        num, den = num * keep + new_w * new_v.to(tl.float32), den * keep + new_w
        if h % group == 0:
            new = (first + count * HKV) * D + d
            tl.store(KEYS + new, new_k)
            tl.store(VALUES + new, new_v)
    place = (part * B + b) * H + h
    tl.store(NUM + place * D + d, num)
    tl.store(DEN + place, den)
    tl.store(MAXIMA + place, top)
    tl.debug_barrier()
    if tl.atomic_add(ARRIVED + bh, 1, sem="acq_rel") == parts - 1:
        _add_parts(NUM, DEN, MAXIMA, ARRIVED, OUT, bh, b, h, B, H, parts, D, PARTS)


def attend_softmax(qkv, rotation, cache, count, sums, out, resets):
    """Write the softmax attention of the newest token to out [B, H D], and its key and value to entry `count` of the
    cache.

    cache: (keys, values, gate_sums, resets) as in decode.py; sums: (num, den, arrived, maxima), whose number of parts
    is decode.parts_of_cache. resets: False if no token of the cache resets.
    """
    keys, values, _, counted = cache
    num, den, arrived, maxima = sums
    (B, C, HKV, D), (parts, _, H) = keys.shape, den.shape
    softmax_kernel[(B * H, parts)](
        qkv, rotation, keys, values, counted if resets else None, count, num, den, maxima, arrived, out, B, C, H, HKV,
        parts, math.log2(math.e) / math.sqrt(D), D=D, BT=min(64, 4096 // D), PARTS=triton.next_power_of_2(parts),
        **early_launch(qkv),
    )  # fmt: skip
