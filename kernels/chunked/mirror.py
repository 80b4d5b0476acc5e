"""Mirror: the reflection of queries and keys that keeps a common mean of the keys from spoiling features.

The keys of a head may share a mean m that is large beside their deviations. Products of a few of its entries then make
up most of every feature, and the score (q . k)^p of a query nearly orthogonal to m drowns in the rounding errors of the
features. So every x_t, of queries and of keys, is first reflected at the plane orthogonal to u:

    x_t - 2 (u . x_t) u,   u ~ m / |m| + sign(m_0) e_0,   for which m becomes the first coordinate and q . k stays

                    . m           |  u is normal to the plane that swaps m and the first axis,
                  .               |  so that only one entry of a reflected key is large
                .-------> e_0

Rounding, relative to each feature, is then as fine as without a mean. u is made of the first chunk's keys: the rows of
that chunk read no state, so no row depends on later keys. u is 0, and x_t stays as it came, unless |m|^2 is above the
sum of the variances. There is no mirror if a state goes into or out of a call (these are not reflected), and in
float32.

    name      shape            dtype
    mirror    [B * Hkv, D]     float32    u, a unit vector or 0

Cost: one program a head reads at most MIRROR_TOKENS keys. Its latency is the limit.
"""

import torch
import triton
import triton.language as tl

from ..common import HALF, empty, load_rows

MIRROR_TOKENS = 256  # the most keys that u is made of


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
    u += tl.where(d == 0, tl.where(u < 0, -1.0, 1.0), 0.0)  # with m_0's sign, so that nothing cancels
    u /= tl.sqrt(tl.sum(u * u, 0))
    large = size > tl.sum(squares, 0) / T - size  # False if a key is not finite
    tl.store(MIRROR + bh * D + d, tl.where(large, u, 0.0))


@triton.jit
def load_mirror(MIRROR, head, D: tl.constexpr):
    """Return (u [D], whether it is not zero) of a head of keys, or two zeros without MIRROR."""
    if MIRROR is None:
        return 0.0, False
    else:
        u = MIRROR + head * D
        return tl.load(u + tl.arange(0, D)), tl.load(u) != 0  # u[0] is zero only if u is


@triton.jit
def reflected(x, u):
    """Return x [N, D] float32 with each row reflected at the plane to which the unit vector u [D] is normal."""
    return x - 2 * tl.sum(x * u[None, :], 1)[:, None] * u[None, :]


# ---- launcher


def reflects(dtype, states):
    """Return True if `passes.forward` reflects rows; states: True if a state goes into or out of the call."""
    return HALF[dtype] == torch.float16 and not states


def key_mirror(s, k):
    """Return mirror [B * Hkv, D] for keys k [B, T, Hkv, D], any strides."""
    mirror = empty(k, s.B * s.HKV, s.D)
    tokens = min(s.T, s.chunk, MIRROR_TOKENS)
    mirror_kernel[(s.B * s.HKV,)](k, mirror, k.stride(), tokens, s.HKV, D=s.D, N=128)
    return mirror
