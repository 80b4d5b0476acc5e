"""Discumsum: the discounted cumulative sum over chunks, which turns the sum over each chunk into the state before it.

    s_0 = initial state or 0,   s_{i+1} = G_i s_i + u_i / unit_x_i,   G_i = the decay through chunk i

in float32; X[i] = u_i is overwritten by unit_i s_i, the state before chunk i (with REVERSE: after, from the last chunk
to the first, for the gradient). unit_i is a power of two such that a bound of the state's largest entry,

    bound_{i+1} = G_i bound_i + most / unit_x_i,

is brought into [2^14, 2^15); kernels that read a state divide by unit_i. For p = 4, entries are also multiplied by the
number of orders of their products, over 32, so that readers need not multiply by it. If the chunks are those of several
packed sequences, FIRST_CHUNK says at which chunk each begins, and each has its own sum, initial and final state.

    one program: N entries of the states of one sequence and head, one chunk after the other

      entry ->   ....|  N  |....      chunk 0    u_0 --> unit_0 s_0
                 ....|  N  |....      chunk 1    u_1 --> unit_1 s_1      s stays in registers while STAGES
                                  ....|  N  |....      chunk 2    u_2 --> unit_2 s_2      chunks are loaded from memory

    name      shape                       dtype      units
    X, in     [B * Hkv, chunks, F]        float16    unit_x 2^15 / most (`update_state`), or float32 in units of one
    X, out    the same                    the same   unit, for p = 4 times orders / 32; or float32 in units of one
    unit      [B * Hkv, chunks]           float32    a power of two, for p = 4 over 32
    final     [B * Hkv, F]                float32    one: the state after all chunks; packed: B is their number
    carried   [B * Hkv, chunks, blocks]   float32    sums over N entries of G_i s_i OTHER_i, for the gates' gradient

Cost: every state is read once and written once (with OTHER: read twice), a few FLOP an entry. The limit is the
memory's bandwidth, of which 94% is reached.
"""

import triton
import triton.language as tl

from ..common import ORDERS, STATE_EXPONENT, SUM_TOP, TO_TOP, empty, multiple_of, unit_scale

DISCUMSUM = ((128, 1, 8), (1024, 2, 3))  # entries per program, warps, chunks in flight: for Z, and for S


@triton.jit(do_not_specialize=["n", "HKV", "F", "FS"])
def discumsum_kernel(
    X, UNIT_X, UNIT, WHOLE,  # states; units of what came, or None: float32 in units of one; units written; G, or None
    INITIAL, BOUND, FINAL,  # the state before all and its largest entry, or None; the state after all, or None
    OTHER, UNIT_OTHER,  # the states to multiply with for CARRIED, and their units, or None
    ORDERS_OF,  # [rows] the number of orders of the product of each row of S, then of each entry of Z
    CARRIED,
    FIRST_CHUNK,  # packed sequences: the first chunk of each, and behind them where the last one ends; or None
    up, most, n, HKV, F, FS,  # up: most / 2^15; n chunks; F entries, FS of S and behind them those of Z
    P: tl.constexpr, D: tl.constexpr,
    N: tl.constexpr, REVERSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Replace N entries of one sequence and head of X by states, chunk by chunk; write UNIT, FINAL and CARRIED."""
    SCALED: tl.constexpr = UNIT_X is not None
    F = multiple_of(F, 64)
    blocks = tl.cdiv(F, N)
    bh, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    begin = bh * n
    if FIRST_CHUNK is not None:
        first = tl.load(FIRST_CHUNK + bh // HKV)
        begin = bh % HKV * n + first
        n = tl.load(FIRST_CHUNK + bh // HKV + 1) - first
    at = block * N + tl.arange(0, N)
    inside = at < F
    state = tl.zeros([N], tl.float32)
    bound = 0.0
    if INITIAL is not None:
        state = tl.load(INITIAL + tl.cast(bh, tl.int64) * F + at, mask=inside, other=0.0)
        if SCALED:
            bound = tl.load(BOUND + bh)
    if SCALED:
        orders = tl.load(ORDERS_OF + tl.where(at < FS, at // D, FS // D + at - FS), mask=inside, other=0.0)
        if P > 2:
            orders *= 1 / ORDERS
    at_next = begin + (n - 1 if REVERSE else 0)
    whole_next, unit_next = 1.0, 1.0
    if WHOLE is not None:
        whole_next = tl.load(WHOLE + at_next)
    if SCALED:
        unit_next = tl.load(UNIT_X + at_next)
    for step in tl.range(n, num_stages=STAGES):
        i = begin + (n - 1 - step if REVERSE else step)
        to = X + tl.cast(i, tl.int64) * F + at
        x = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        at_next = tl.maximum(i - 1, begin) if REVERSE else tl.minimum(i + 1, begin + n - 1)
        whole, unit_x = whole_next, unit_next  # loaded for the next chunk
        if WHOLE is not None:
            whole_next = tl.load(WHOLE + at_next)
        if SCALED:
            unit_next = tl.load(UNIT_X + at_next)
        if SCALED:
            unit = unit_scale(bound, STATE_EXPONENT) * TO_TOP
            if P == 2:
                tl.store(to, (state * unit).to(X.dtype.element_ty), inside)
                tl.store(UNIT + i, unit, block == 0)
            else:
                tl.store(to, (state * unit * orders).to(X.dtype.element_ty), inside)
                tl.store(UNIT + i, unit * (1 / ORDERS), block == 0)
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


# ---- launcher


def discumsum(
    s, X, unit_x, whole, initial=None, other=None, unit_other=None, reverse=False, final=False, first_chunks=None
):
    """Replace X [B * Hkv, chunks, F] by the states before each chunk (after, with reverse), in place.

    F must be a multiple of 64. With unit_x None, X is float32 in units of one, and s may be None. first_chunks [N + 1]
    int32: B is 1, and the chunks are those of N packed sequences; sequence i has the chunks first_chunks[i] up to
    first_chunks[i + 1], at least one. Then `initial` and `final` are states of N sequences, and chunks behind them all
    stay as they are.

    Returns (unit [B * Hkv, chunks], final [B * Hkv, F], carried [B * Hkv, chunks, blocks]), see the table above: None
    without unit_x, unless `final`, and without `other`.
    """
    BH, n, F = X.shape
    scaled = unit_x is not None
    N, warps, stages = DISCUMSUM[scaled]
    N = min(N, triton.next_power_of_2(F))
    blocks = triton.cdiv(F, N)
    sequences = BH if first_chunks is None else (first_chunks.shape[0] - 1) * BH
    unit = empty(X, BH, n) if scaled else None
    if scaled and first_chunks is not None:
        unit.fill_(1)
    last = empty(X, sequences, F) if final else None
    carried = None if other is None else empty(X, BH, n, blocks)
    most, FS, p, D = (s.most, s.FS, s.p, s.D) if scaled else (1.0, F, 2, 64)
    bound = None if initial is None or not scaled else initial.abs().amax(1)
    discumsum_kernel[(sequences * blocks,)](
        X, unit_x, unit, whole, initial, bound, last, other, unit_other, s.layout.orders if scaled else None, carried,
        first_chunks, most / SUM_TOP, most, n, BH, F, FS,
        P=p, D=D, N=N, REVERSE=reverse, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return unit, last, carried
