"""Discumsum: the discounted cumulative sum over chunks, which turns the sum over each chunk into the state before it.

    s_0 = initial state or 0,   s_{i+1} = G_i s_i + u_i / unit_x_i,   G_i = the decay through chunk i

in float32. unit_i s_i, the state before chunk i, overwrites X[i] = u_i. With REVERSE, for the gradient, the sum runs
from the last chunk to the first and s_i is the state after chunk i. unit_i is the power of two that brings a bound of
the state's largest entry,

    bound_{i+1} = G_i bound_i + bound of u_i / unit_x_i,

into [2^14, 2^15). Kernels that read a state divide by unit_i. For p = 4, entries are also multiplied by the number of
orders of their products, over 32, so that readers need not do it.

    one program: N entries of the states of one sequence and head, one chunk after the other

      entry ->   ....|  N  |....      chunk 0    u_0 --> unit_0 s_0
                 ....|  N  |....      chunk 1    u_1 --> unit_1 s_1      s stays in registers while STAGES
                                  ....|  N  |....      chunk 2    u_2 --> unit_2 s_2      chunks are loaded from memory

    name        shape                       dtype      units
    X, in       [B * Hkv, chunks, F]        float16    unit_x 2^15 / bound (`update_state`), or float32 in units of one
    X, out      the same                    the same   unit, for p = 4 times orders / 32; or float32 in units of one
    unit        [B * Hkv, chunks]           float32    a power of two, for p = 4 over 32
    final       [B * Hkv, F]                float32    one: the state after all chunks
    dlog_decay  [B * Hkv, chunks, blocks]   float32    sums over N entries of G_i s_i FORWARD_STATES_i, for the gradient
                                                       to the gates (s_i are then gradients)

Cost: every state is read once and written once (with FORWARD_STATES: read twice), a few FLOP an entry. The limit is
the memory's bandwidth (94% of it is reached).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..common import ORDERS, STATE_EXPONENT, SUM_TOP, TO_TOP, empty, multiple_of, unit_scale
from .sizes import States, at_index

# entries per program, warps, chunks in flight: for Z, and for S; the same for every GPU, so not in configs.py's table
DISCUMSUM = ((128, 1, 8), (1024, 2, 3))


class Scale(NamedTuple):
    """The units of S; all None for Z, which is float32 in units of one."""

    unit_x: Tensor = None  # [B * Hkv, chunks]: of the sums that are read
    unit: Tensor = None  # [B * Hkv, chunks]: of the states that are written; the kernel writes it too
    bound: Tensor = None  # [B * Hkv]: the largest entry of each initial state
    orders: Tensor = None  # the number of orders of the product of each row of S, then of each entry of Z


@triton.jit
def _load_orders(scale, entry, inside, FS, P: tl.constexpr, D: tl.constexpr):
    """Return the orders of entries of a state, for p = 4 over 32."""
    orders = tl.load(scale.orders + tl.where(entry < FS, entry // D, FS // D + entry - FS), mask=inside, other=0.0)
    return orders if P == 2 else orders * (1 / ORDERS)


@triton.jit
def _store_state(to, inside, state, bound, orders, UNIT, first, P: tl.constexpr):
    """Write a state in the unit that fits its bound, for p = 4 times its orders; write the unit if `first`."""
    unit = unit_scale(bound, STATE_EXPONENT) * TO_TOP
    state *= unit
    if P > 2:
        state *= orders
        unit *= 1 / ORDERS
    tl.store(to, state, inside)
    tl.store(UNIT, unit, first)


@triton.jit(do_not_specialize=["n", "F", "FS"])
def discumsum_kernel(
    X,  # the sums, replaced by the states
    scale,  # a Scale; without units X is float32 in units of one
    CHUNK_DECAY,  # G, or None
    INITIAL,  # the state before all, or None
    FINAL,  # the state after all, or None
    FORWARD_STATES,  # the forward pass's states, for DLOG_DECAY, or None
    FORWARD_UNIT,  # their units, or None
    DLOG_DECAY,
    up,  # bound_x / 2^15
    bound_x,  # a bound of an entry of a sum, in units of unit_x
    n,  # chunks
    F,
    FS,  # the number of entries of S; the entries of Z follow them
    P: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Replace N entries of one sequence and head of X by states, chunk by chunk; write unit, FINAL and DLOG_DECAY."""
    SCALED: tl.constexpr = scale.unit is not None
    F = multiple_of(F, 64)
    blocks = tl.cdiv(F, N)
    bh, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    begin = bh * n
    entry = block * N + tl.arange(0, N)
    inside = entry < F
    state = tl.zeros([N], tl.float32)
    bound = 0.0
    if INITIAL is not None:
        state = tl.load(at_index(INITIAL, bh, F) + entry, mask=inside, other=0.0)
        if SCALED:
            bound = tl.load(scale.bound + bh)
    if SCALED:
        orders = _load_orders(scale, entry, inside, FS, P, D)
    i_next = begin + (n - 1 if REVERSE else 0)
    chunk_decay_next, unit_next = 1.0, 1.0
    if CHUNK_DECAY is not None:
        chunk_decay_next = tl.load(CHUNK_DECAY + i_next)
    if SCALED:
        unit_next = tl.load(scale.unit_x + i_next)
    for step in tl.range(n, num_stages=STAGES):
        i = begin + (n - 1 - step if REVERSE else step)
        to = at_index(X, i, F) + entry
        x = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        i_next = tl.maximum(i - 1, begin) if REVERSE else tl.minimum(i + 1, begin + n - 1)
        chunk_decay, unit_x = chunk_decay_next, unit_next  # loaded for the next chunk
        if CHUNK_DECAY is not None:
            chunk_decay_next = tl.load(CHUNK_DECAY + i_next)
        if SCALED:
            unit_next = tl.load(scale.unit_x + i_next)
            _store_state(to, inside, state, bound, orders, scale.unit + i, block == 0, P)
            bound = chunk_decay * bound + bound_x * (1 / unit_x)
            x *= up * (1 / unit_x)
        else:
            tl.store(to, state, inside)
        if FORWARD_STATES is not None:
            product = state * tl.load(at_index(FORWARD_STATES, i, F) + entry, mask=inside, other=0.0).to(tl.float32)
            if SCALED and P == 2:
                product *= orders
            product = tl.sum(product, 0) * chunk_decay
            if SCALED:
                product /= tl.load(FORWARD_UNIT + i)
            tl.store(at_index(DLOG_DECAY, i, blocks) + block, product)
        state = chunk_decay * state + x
    if FINAL is not None:
        tl.store(at_index(FINAL, bh, F) + entry, state, inside)


# ---- launchers


def carry_states(s, sums, unit_x, chunk_decay, initial=None, forward_states=None, reverse=False, final=False):
    """Replace sums over chunks by the states before each (after each, with reverse), in place.

    sums: (S, Z), the S of `update_state` and for p = 2 the z of `prepare`; unit_x: the unit of S; chunk_decay: by
    `chunk_gates`; initial: (S, Z) as one state, or None; forward_states: the `States` of the forward pass if
    `dlog_decay` is needed, or None.

    Returns (States, last, dlog_decay): last (S, Z) if `final`, dlog_decay of S and of Z if `forward_states`.
    """
    S, Z = sums
    options = dict(reverse=reverse, final=final)
    S0, Z0 = initial or (None, None)
    forward_S, forward_unit, forward_Z = forward_states or (None, None, None)
    unit = empty(S, *S.shape[:2])
    scale = Scale(unit_x, unit, None if S0 is None else S0.abs().amax(1), s.layout.orders)
    S_last, dlog_decay = discumsum(S, chunk_decay, S0, forward_S, forward_unit, scale, s, **options)
    Z_last = dlog_decay_z = None
    if s.p == 2:
        Z_last, dlog_decay_z = discumsum(Z, chunk_decay, Z0, forward_Z, **options)
    return States(S, unit, Z), (S_last, Z_last), (dlog_decay, dlog_decay_z)


def discumsum(
    X, chunk_decay, initial=None, forward_states=None, forward_unit=None, scale=Scale(), s=None, reverse=False,
    final=False,
):  # fmt: skip
    """Replace X [B * Hkv, chunks, F] by states, in place, and return (final, dlog_decay), each None if not requested.

    F must be a multiple of 64. scale: a Scale and s: `Sizes`, for S only.
    """
    BH, n, F = X.shape
    N, warps, stages = DISCUMSUM[s is not None]
    N = min(N, triton.next_power_of_2(F))
    blocks = triton.cdiv(F, N)
    last = empty(X, BH, F) if final else None
    dlog_decay = None if forward_states is None else empty(X, BH, n, blocks)
    bound, FS, p, D = (s.bound, s.FS, s.p, s.D) if s else (1.0, F, 2, 64)
    discumsum_kernel[(BH * blocks,)](
        X, scale, chunk_decay, initial, last, forward_states, forward_unit, dlog_decay,
        bound / SUM_TOP, bound, n, F, FS, P=p, D=D, N=N, REVERSE=reverse, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return last, dlog_decay
