"""Sample the next token of each sequence from its logits: temperature, top-k and top-p in one kernel, without sorting.

    w_v = exp((x_v - max x) / temperature)                 for logits x
    t: the largest threshold with as many as top_k tokens above it, then the largest one above which
       the w_v sum to top_p of their sum
    id: the first token at which the running sum of the w_v above t passes number * (their whole sum)

One program has one sequence. Thresholds are found by quartering an interval: each pass over the logits counts those
above three points of it, about 12 passes in all. The limit is the L2 cache, from which every pass reads the logits (201
KB for GPT-2's vocabulary). Running sums of whole blocks are float64, so that every token is reachable.
"""

import triton
import triton.language as tl
from torch.nn.functional import pad

from ..common import device_guard
from ..configs import early_launch
from .linear import let_next_start, wait_for_previous

# logits that the kernel reads at a time; rows that are padded with -inf to a multiple of it are not copied
SAMPLE_BLOCK = 8192


@triton.jit
def _threshold(X, low, high, need, scale, largest, V, MASS: tl.constexpr, BV: tl.constexpr):
    """Return the largest number in [low, high) above which there are at least `need` of the V numbers X.

    With MASS, a number x counts as exp(scale (x - largest)). Numbers up to `low` do not count, and none may
    be above `high`.
    """
    count, second = need + 1.0, low + (high - low) / 2
    while (low < second) & (second < high) & (count != need):
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
            low, count = third, n_3
        elif n_2 >= need:
            low, high, count = second, third, n_2
        elif n_1 >= need:
            low, high, count = first, second, n_1
        else:
            high = first
        second = low + (high - low) / 2
    return low


@triton.jit
def _weights(X, low, scale, largest, start, BV: tl.constexpr):
    """Return exp(scale (x - largest)) [BV] of the logits from `start` that are above low, 0 for the others."""
    x = tl.load(X + start + tl.arange(0, BV))
    return tl.where(x > low, tl.exp(scale * (x - largest)), 0.0)


@triton.jit
def sample_next_token_kernel(
    LOGITS, NUMBERS, INDEX, IDS, V, length, temperature, top_k, top_p, BV: tl.constexpr, PDL: tl.constexpr = False
):
    """Write the id of one row of LOGITS [B, V] float32, V a multiple of BV, by number INDEX of its row of
    NUMBERS [B, length] float64."""
    let_next_start(PDL)
    b = tl.program_id(0)
    X, scale = LOGITS + tl.cast(b, tl.int64) * V, 1 / temperature
    number = tl.load(NUMBERS + b * length + tl.load(INDEX))
    wait_for_previous(PDL)
    maxima, minima = tl.full([BV], float("-inf"), tl.float32), tl.full([BV], float("inf"), tl.float32)
    for start in range(0, V, BV):
        x = tl.load(X + start + tl.arange(0, BV))
        maxima, minima = tl.maximum(maxima, x), tl.minimum(minima, x)
    largest = tl.max(maxima, 0)
    negligible = tl.maximum(120 * temperature, 1e-6 * tl.abs(largest))  # exp is zero so far below the largest
    low = tl.maximum(tl.min(minima, 0) - 1, largest - negligible)
    if top_k > 0:
        low = _threshold(X, low, largest, top_k, scale, largest, V, False, BV)
    if top_p < 1:
        total = tl.zeros([BV], tl.float32)
        for start in range(0, V, BV):
            total += _weights(X, low, scale, largest, start, BV)
        low = _threshold(X, low, largest, top_p * tl.sum(total, 0), scale, largest, V, True, BV)
    mass = tl.zeros([1], tl.float64)
    for start in range(0, V, BV):
        mass += tl.sum(_weights(X, low, scale, largest, start, BV), 0).to(tl.float64)
    target = number * tl.sum(mass, 0)
    first, first_sum, sums = (
        0,
        0 * target,
        0 * target,
    )  # the block in which the sum passes the target, and the sum up to it
    for start in range(0, V, BV):
        block_mass = tl.sum(_weights(X, low, scale, largest, start, BV), 0).to(tl.float64)
        inside = (sums <= target) & (block_mass > 0)
        first, first_sum = tl.where(inside, start, first), tl.where(inside, sums, first_sum)
        sums += block_mass
    weights, v = _weights(X, low, scale, largest, first, BV), first + tl.arange(0, BV)
    passed = (weights > 0) & (first_sum + tl.cumsum(weights.to(tl.float64), 0) > target)
    token, last = tl.min(tl.where(passed, v, V), 0), tl.max(tl.where(weights > 0, v, 0), 0)
    tl.store(IDS + b, tl.where(token < V, token, last).to(tl.int64))  # rounding may leave the sum short of the target


def sample_next_token(logits, ids, numbers, index, *, temperature, top_k, top_p):
    """Write to ids [B] int64 one token for each row of logits [B, V] float32.

    numbers [B, n] float64 in [0, 1), index [1] int64: row b is sampled by numbers[b, index]. Probabilities are
    proportional to exp(logits / temperature), temperature > 0, of the top_k largest logits (0: all), and of the fewest
    of these that have top_p of their sum. Tokens as likely as the last one taken are taken too.
    """
    (B, V), BV = logits.shape, SAMPLE_BLOCK
    if V % BV:
        BV = min(BV, triton.next_power_of_2(V))
        logits = pad(logits, (0, -V % BV), value=float("-inf"))
    with device_guard(logits.device):
        sample_next_token_kernel[(B,)](
            logits.contiguous(), numbers, index, ids, logits.shape[1], numbers.shape[1], temperature, float(top_k),
            top_p, BV=BV, num_warps=max(1, BV // 256), **early_launch(logits),
        )  # fmt: skip
