"""Discumsum: from sums over chunks to states between them."""

import triton
import triton.language as tl

from .common import STATE_EXPONENT, empty, unit_scale

DISCUMSUM = ((128, 1, 8), (1024, 2, 3))  # entries of a program, warps, chunks in flight; of Z, and of S


@triton.jit(do_not_specialize=["n", "F", "FS"])
def discumsum_kernel(
    X, UNIT_X, UNIT, WHOLE, INITIAL, BOUND, FINAL, OTHER, UNIT_OTHER, ORDERS, CARRIED, up, most, n, F, FS,
    P: tl.constexpr, E: tl.constexpr, N: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """N entries of the states of one sequence and head, in place: what a chunk gave becomes the state that precedes it,
    or with REVERSE the gradient of the state that follows it. Carried in float32.

    CARRIED  the sum over these entries of state times OTHER times the chunk's gate, for the gate's gradient
    """
    F = F // 64 * 64  # it is; without, loads are of one entry
    blocks = tl.cdiv(F, N)
    bh, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    at = block * N + tl.arange(0, N)
    inside = at < F
    state = tl.zeros([N], tl.float32)
    bound = 0.0
    if INITIAL is not None:
        state = tl.load(INITIAL + tl.cast(bh, tl.int64) * F + at, mask=inside, other=0.0)
        if SCALED:
            bound = tl.load(BOUND + bh)
    if SCALED:  # p = 4: they become part of the states, at most 24 / 32
        orders = tl.load(ORDERS + tl.where(at < FS, at // E, FS // E + at - FS), mask=inside, other=0.0)
        if P > 2:
            orders *= 1 / 32
    at_next = bh * n + (n - 1 if REVERSE else 0)
    whole_next, unit_next = 1.0, 1.0
    if GATED:
        whole_next = tl.load(WHOLE + at_next)
    if SCALED:
        unit_next = tl.load(UNIT_X + at_next)
    for step in tl.range(n, num_stages=STAGES):
        i = bh * n + (n - 1 - step if REVERSE else step)
        to = X + tl.cast(i, tl.int64) * F + at
        x = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        at_next = tl.maximum(i - 1, bh * n) if REVERSE else tl.minimum(i + 1, bh * n + n - 1)
        whole, unit_x = whole_next, unit_next  # what is needed next is on its way
        if GATED:
            whole_next = tl.load(WHOLE + at_next)
        if SCALED:
            unit_next = tl.load(UNIT_X + at_next)
        if SCALED:
            unit = unit_scale(bound, STATE_EXPONENT) * (2.0**14)
            if P == 2:
                tl.store(to, (state * unit).to(X.dtype.element_ty), inside)
                tl.store(UNIT + i, unit, block == 0)
            else:
                tl.store(to, (state * unit * orders).to(X.dtype.element_ty), inside)
                tl.store(UNIT + i, unit * (1 / 32), block == 0)
            scale = 1 / unit_x
            bound = whole * bound + most * scale
            x *= up * scale
        else:
            tl.store(to, state, inside)
        if OTHER is not None:
            other = tl.load(OTHER + tl.cast(i, tl.int64) * F + at, mask=inside, other=0.0).to(tl.float32)
            product = state * other
            if SCALED and P == 2:
                product *= orders
            product = tl.sum(product, 0) * whole
            if SCALED:
                product /= tl.load(UNIT_OTHER + i)
            tl.store(CARRIED + tl.cast(i, tl.int64) * blocks + block, product)
        state = whole * state + x
    if FINAL is not None:
        tl.store(FINAL + tl.cast(bh, tl.int64) * F + at, state, inside)


def discumsum(s, X, unit_x, whole, initial=None, other=None, unit_other=None, reverse=False, final=False):
    """X [B * Hkv, chunks, F] becomes, in place, the states before each chunk (after, with reverse). Without unit_x it
    is float32, in units of one, and s need not be given.

    Returns (unit, final, carried): by what the states are multiplied [B * Hkv, chunks], the state after all, float32
    [B * Hkv, F] if wanted, and if there is an `other` the sums for the gates' gradient [B * Hkv, chunks, blocks].
    """
    BH, n, F = X.shape
    scaled = unit_x is not None
    N, warps, stages = DISCUMSUM[scaled]
    N = min(N, triton.next_power_of_2(F))
    blocks = triton.cdiv(F, N)
    unit = empty(X, BH, n) if scaled else None
    last = empty(X, BH, F) if final else None
    carried = None if other is None else empty(X, BH, n, blocks)
    most, FS, p, E = (s.most, s.FS, s.p, s.D) if scaled else (1.0, F, 2, 64)
    bound = None if initial is None or not scaled else initial.abs().amax(1)
    discumsum_kernel[(BH * blocks,)](
        X, unit_x, unit, whole, initial, bound, last, other, unit_other, s.layout.orders if scaled else None, carried,
        most / 2.0**15, most, n, F, FS, P=p, E=E, N=N, SCALED=scaled, GATED=whole is not None,
        REVERSE=reverse, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return unit, last, carried
