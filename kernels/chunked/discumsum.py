"""Discumsum: the discounted cumulative sum over chunks, which turns the sum over each chunk into the state before it.

    s_0 = initial state or 0,   s_{i+1} = G_i s_i + u_i / unit_x_i,   G_i = the decay through chunk i

in float32; X[i] = u_i is overwritten by unit_i s_i, the state before chunk i (with REVERSE: after, from the last chunk
to the first, for the gradient). unit_i is a power of two such that a bound of the state's largest entry,

    bound_{i+1} = G_i bound_i + bound of u_i / unit_x_i,

is brought into [2^14, 2^15); kernels that read a state divide by unit_i. For p = 4, entries are also multiplied by the
number of orders of their products, over 32, so that readers need not multiply by it. If the chunks are those of several
packed sequences, FIRST_CHUNK says at which chunk each begins, and each has its own sum, initial and final state.

    one program: N entries of the states of one sequence and head, one chunk after the other

      entry ->   ....|  N  |....      chunk 0    u_0 --> unit_0 s_0
                 ....|  N  |....      chunk 1    u_1 --> unit_1 s_1      s stays in registers while STAGES
                                  ....|  N  |....      chunk 2    u_2 --> unit_2 s_2      chunks are loaded from memory

    name      shape                       dtype      units
    X, in     [B * Hkv, chunks, F]        float16    unit_x 2^15 / bound (`update_state`), or float32 in units of one
    X, out    the same                    the same   unit, for p = 4 times orders / 32; or float32 in units of one
    unit      [B * Hkv, chunks]           float32    a power of two, for p = 4 over 32
    final     [B * Hkv, F]                float32    one: the state after all chunks; packed: B is their number
    carried   [B * Hkv, chunks, blocks]   float32    sums over N entries of G_i s_i OTHER_i, for the gates' gradient

Cost: every state is read once and written once (with OTHER: read twice), a few FLOP an entry. The limit is the
memory's bandwidth, of which 94% is reached.
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
    unit: Tensor = None  # [B * Hkv, chunks]: of the states that are written, itself written
    bound: Tensor = None  # [B * Hkv]: the largest entry of each initial state
    orders: Tensor = None  # the number of orders of the product of each row of S, then of each entry of Z


@triton.jit
def _chunks_of(FIRST_CHUNK, n, HKV, bh):
    """Return (the first chunk in an array [B * Hkv, n] of sequence and head bh, the number of its chunks)."""
    if FIRST_CHUNK is None:
        return bh * n, n
    else:
        first = tl.load(FIRST_CHUNK + bh // HKV)
        return bh % HKV * n + first, tl.load(FIRST_CHUNK + bh // HKV + 1) - first


@triton.jit
def _load_orders(scale, entry, inside, FS, P: tl.constexpr, D: tl.constexpr):
    """Return the orders of entries of a state, for p = 4 over 32."""
    orders = tl.load(scale.orders + tl.where(entry < FS, entry // D, FS // D + entry - FS), mask=inside, other=0.0)
    return orders if P == 2 else orders * (1 / ORDERS)


@triton.jit
def _store_state(to, inside, state, bound, orders, UNIT, first, P: tl.constexpr):
    """Write a state in the unit that its bound asks for, for p = 4 times its orders; write the unit if `first`."""
    unit = unit_scale(bound, STATE_EXPONENT) * TO_TOP
    state *= unit
    if P > 2:
        state *= orders
        unit *= 1 / ORDERS
    tl.store(to, state.to(to.dtype.element_ty), inside)
    tl.store(UNIT, unit, first)


@triton.jit(do_not_specialize=["n", "HKV", "F", "FS"])
def discumsum_kernel(
    X,  # sums, and then states
    scale,  # without units X is float32 in units of one
    WHOLE,  # G, or None
    INITIAL,  # the state before all, or None
    FINAL,  # the state after all, or None
    OTHER,  # the states to multiply with for CARRIED, or None
    UNIT_OTHER,  # their units, or None
    CARRIED,
    FIRST_CHUNK,  # packed sequences: the first chunk of each, and behind them where the last one ends; or None
    up,  # bound_x / 2^15
    bound_x,  # a bound of an entry of a sum, in units of unit_x
    n,  # chunks
    HKV,
    F,
    FS,  # the entries of S; those of Z are behind them
    P: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Replace N entries of one sequence and head of X by states, chunk by chunk; write unit, FINAL and CARRIED."""
    SCALED: tl.constexpr = scale.unit is not None
    F = multiple_of(F, 64)
    blocks = tl.cdiv(F, N)
    bh, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    begin, n = _chunks_of(FIRST_CHUNK, n, HKV, bh)
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
    whole_next, unit_next = 1.0, 1.0
    if WHOLE is not None:
        whole_next = tl.load(WHOLE + i_next)
    if SCALED:
        unit_next = tl.load(scale.unit_x + i_next)
    for step in tl.range(n, num_stages=STAGES):
        i = begin + (n - 1 - step if REVERSE else step)
        to = at_index(X, i, F) + entry
        x = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        i_next = tl.maximum(i - 1, begin) if REVERSE else tl.minimum(i + 1, begin + n - 1)
        whole, unit_x = whole_next, unit_next  # loaded for the next chunk
        if WHOLE is not None:
            whole_next = tl.load(WHOLE + i_next)
        if SCALED:
            unit_next = tl.load(scale.unit_x + i_next)
            _store_state(to, inside, state, bound, orders, scale.unit + i, block == 0, P)
            bound = whole * bound + bound_x * (1 / unit_x)
            x *= up * (1 / unit_x)
        else:
            tl.store(to, state, inside)
        if OTHER is not None:
            product = state * tl.load(at_index(OTHER, i, F) + entry, mask=inside, other=0.0).to(tl.float32)
            if SCALED and P == 2:
                product *= orders
            product = tl.sum(product, 0) * whole
            if SCALED:
                product /= tl.load(UNIT_OTHER + i)
            tl.store(at_index(CARRIED, i, blocks) + block, product)
        state = whole * state + x
    if FINAL is not None:
        tl.store(at_index(FINAL, bh, F) + entry, state, inside)


# ---- launchers


def carry_states(s, sums, unit_x, whole, initial=None, others=None, reverse=False, final=False, first_chunks=None):
    """Replace sums over chunks by the states before each (after each, with reverse), in place.

    sums: (S, Z), the S of `update_state` and for p = 2 the z of `prepare`; unit_x: the unit of S; initial: (S, Z) as
    one state, or None; others: `States` to multiply with, or None. first_chunks [N + 1] int32: B is 1, and the chunks
    are those of N packed sequences; sequence i has the chunks first_chunks[i] up to first_chunks[i + 1], at least one.
    Then initial and final states are those of N sequences, and chunks behind them all stay as they are.

    Returns (States, last, carried): last (S, Z) if `final`, carried of S and of Z with `others`, see the table above.
    """
    S, Z = sums
    options = dict(reverse=reverse, final=final, first_chunks=first_chunks)
    S0, Z0 = initial or (None, None)
    other, unit_other, other_z = others or (None, None, None)
    unit = empty(S, *S.shape[:2])
    if first_chunks is not None:
        unit.fill_(1)
    scale = Scale(unit_x, unit, None if S0 is None else S0.abs().amax(1), s.layout.orders)
    S_last, carried = discumsum(S, whole, S0, other, unit_other, scale, s, **options)
    Z_last = carried_z = None
    if s.p == 2:
        Z_last, carried_z = discumsum(Z, whole, Z0, other_z, **options)
    return States(S, unit, Z), (S_last, Z_last), (carried, carried_z)


def discumsum(
    X, whole, initial=None, other=None, unit_other=None, scale=Scale(), s=None, reverse=False, final=False,
    first_chunks=None,
):  # fmt: skip
    """Replace X [B * Hkv, chunks, F] by states, in place, and return (final, carried), None where not asked for.

    F must be a multiple of 64. scale, s: `Sizes`: of S only.
    """
    BH, n, F = X.shape
    N, warps, stages = DISCUMSUM[s is not None]
    N = min(N, triton.next_power_of_2(F))
    blocks = triton.cdiv(F, N)
    sequences = BH if first_chunks is None else (first_chunks.shape[0] - 1) * BH
    last = empty(X, sequences, F) if final else None
    carried = None if other is None else empty(X, BH, n, blocks)
    bound, FS, p, D = (s.bound, s.FS, s.p, s.D) if s else (1.0, F, 2, 64)
    discumsum_kernel[(sequences * blocks,)](
        X, scale, whole, initial, last, other, unit_other, carried, first_chunks, bound / SUM_TOP, bound,
        n, BH, F, FS, P=p, D=D, N=N, REVERSE=reverse, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return last, carried
