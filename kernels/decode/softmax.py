"""Softmax attention of the newest token over a KV cache, as power.attend is for the power variants.

    y = sum over cached t of exp(q . k_t / sqrt(D)) v_t / sum of exp(q . k_t / sqrt(D))

t goes over the tokens since the last reset, with a window over the last `window` of them, the newest included.

    programs  for each sequence and query head: parts of these tokens; the last part to end adds all
    reads     keys and values, 2 D sizeof(weight) bytes for each of these tokens and KV head

Each part has its weights relative to a maximum of its own, which it writes beside its sums: the parts are brought to
the largest maximum when they are added. Inside a part each of the BT rows of a tile has its own running maximum, so
that no tile waits for a reduction. With many cached tokens the limit is the bandwidth.

cache.py has the buffers.
"""

import math

import triton
import triton.language as tl

from ..common import EMPTY
from ..configs import early_launch
from .cache import add_part, append_newest, find_token, load_newest, load_rotated, load_tokens
from .linear import let_next_start, wait_for_previous

NO_WINDOW = 2**30  # tokens, more than any cache holds


@triton.jit
def _load_cache(cache, first, start, end, HKV, D: tl.constexpr, BT: tl.constexpr):
    """Load (keys, values [BT, D], resets [BT]) of the cached tokens from `start`, zeros from `end` on."""
    k, v, index, inside = load_tokens(cache, first, start, end, HKV, D, BT)
    return k, v, tl.load(cache.resets + index, mask=inside, other=-1) if cache.resets is not None else inside


@triton.jit
def softmax_kernel(
    qkv, cache, sums, OUT, B, C, H, HKV, parts, window, scale, D: tl.constexpr, BT: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute one part of one query head's sums over the cache; the last part to finish writes OUT [B, H, D].

    The parts share the last `window` tokens, the newest and cached ones. One part writes the newest token's key and
    value to entry `count` of the cache. cache.resets is None if no token forgets what is before it; scale is
    log2(e) / sqrt(D). PARTS is a power of two, at least `parts`.
    """
    let_next_start(PDL)
    part, t = tl.program_id(1), tl.arange(0, BT)
    token = find_token(qkv, cache, C, H, HKV, D)
    count = token.count
    oldest = tl.maximum(count + 1 - window, 0)
    size = tl.cdiv(tl.cdiv(count + 1 - oldest, parts), BT) * BT
    begin = oldest + part * size
    end = tl.minimum(begin + size, count)
    k, v, reset = _load_cache(cache, token.first, begin, end, HKV, D, BT)
    wait_for_previous(PDL)
    q = load_rotated(token.q, token.rotation, D) * scale
    resets = tl.load(cache.resets + token.index) if cache.resets is not None else 0
    nums, dens, tops = tl.zeros([BT, D], tl.float32), tl.zeros([BT], tl.float32), tl.full([BT], EMPTY, tl.float32)
    for start in range(begin, end, BT):
        seen = start + t < end
        if cache.resets is not None:
            seen = seen & (reset == resets)
        s = tl.where(seen, tl.sum(k.to(tl.float32) * q[None, :], 1), EMPTY)
        top = tl.maximum(tops, s)
        w, decay = tl.where(seen, tl.exp2(s - top), 0.0), tl.exp2(tops - top)
        nums = nums * decay[:, None] + w[:, None] * v.to(tl.float32)
        dens = dens * decay + w
        tops = top
        k, v, reset = _load_cache(cache, token.first, start + BT, end, HKV, D, BT)
    top = tl.max(tops, 0)
    w = tl.exp2(tops - top)
    num, den = tl.sum(nums * w[:, None], 0), tl.sum(dens * w, 0)
    if (begin <= count) & (count < begin + size):
        new_k, new_v = load_newest(cache, token, D)
        s = tl.sum(new_k.to(tl.float32) * q, 0)
        new_top = tl.maximum(top, s)
        decay, new_w = tl.exp2(top - new_top), tl.exp2(s - new_top)
        num, den = num * decay + new_w * new_v.to(tl.float32), den * decay + new_w
        top = new_top
        append_newest(cache, token, new_k, new_v, D)
    add_part(num, den, top, qkv, token, sums, OUT, B * H, parts, D, PARTS)


def attend_softmax(qkv, cache, sums, out, window=NO_WINDOW):
    """Write the attention of the newest token to out [B, H D], and its key and value to entry `count` of the cache.

    qkv: Heads; cache: a Cache; sums: Sums with maxima and `parts_of_cache` parts; window: how many tokens it sees,
    itself included.
    """
    (B, C, HKV, D), (parts, _, H) = cache.k.shape, sums.den.shape
    softmax_kernel[(B * H, parts)](
        qkv, cache, sums, out, B, C, H, HKV, parts, window, math.log2(math.e) / math.sqrt(D), D=D,
        BT=min(64, 4096 // D), PARTS=triton.next_power_of_2(parts), **early_launch(out),
    )  # fmt: skip
