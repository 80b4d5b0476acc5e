"""Heinsen's log attention in Triton, forward and backward: cost linear in the context, exponents never above zero.

    w_ij = sum over d of exp(q_id + k_jd),   y_i = sum_j w_ij v_j / sum_j w_ij,   j <= i

    forward    chunk sums of keys, carried on     forward_kernel: y, L       walks through each chunk
    backward   the same states again              dq_kernel: dq, delta       the same walk
               chunk sums of queries, carried     dkdv_kernel: dk, dv        walks through each chunk from its end

The sums over earlier tokens are a state, relative to a reference for each feature of the keys (states.py). A walk goes
through a chunk in blocks of 16 tokens: a block reads the state in one matrix product, computes its own pairs one by
one, and is added to the state. Query heads that share a head of keys share its state. The gradient to a final state is
the first state of the queries, with N = -m.

    name            shape                        dtype      meaning
    m, z            [B * Hkv, chunks, D]         float32    m or N, and z or dz, before each chunk (backward: after it)
    S               [B * Hkv, chunks, D, D]      float32    S or dS; 4 D^2 / CHUNK bytes a token and head
    L               [B, H, T]                    float32    log of a row's sum, saved for the backward pass
    delta           the same                     float32    dq_kernel to dkdv_kernel
    documents       [B, T]                       int32      read; non-decreasing

Only L is saved: the backward pass makes the states again, so that a model holds the states of one layer at a time.

Cost, a token and head. Forward: 16 D exp inside blocks and 3 D for states; 6 D^2 FLOP in products. Backward: 32 D exp
inside blocks and 6 D for states, 14 D^2 FLOP. Bytes: q, k, v and y, keys and values a second time, and 16 D^2 / CHUNK
of states; backward q, k, v, dy and three gradients, all but the gradients a second time, and 32 D^2 / CHUNK.

Floors of 65,536 tokens, 12 heads of 64 in bfloat16 on an H200 (3.6e12 exp/s, 4.3 TB/s), with CHUNK = 256: forward 0.27
ms of exp and 0.19 ms of memory, backward 0.53 and 0.35 ms. The products, 0.02 and 0.05 TFLOP, are 0.09 and 0.21 ms as
three bfloat16 products at 701 TFLOP/s. The limit is exp, and the latency of a walk from block to block.

Heads of 128 need more registers for the state than there are and spill some, on an A100 in all walks, with 16 warps or
without unrolling too. In float32 products do without the matrix unit, and at 128 are slow for the same reason. That
size is there to be right.

Range. No exponent that is used is above zero, so that q and k may be of any size at which q + k is exact enough: at 80
float32 keeps 1e-5 of a weight. A row does not depend on later keys, in any bit. NaN comes out in the rows that see it.

Documents. Rows see the tokens of their own document alone, and rows of document 0 also the initial state. A state
belongs to the document of the last token before it (backward: the first after it); other rows do not read it.
"""

import torch
import triton

from ..common import device_guard, empty
from ..transforms import empty_like
from .dkdv_kernel import dkdv_kernel
from .dq_kernel import dq_kernel
from .forward_kernel import forward_kernel
from .states import State, carry_states_kernel, chunk_sums_kernel
from .tokens import rows

CHUNK = 256  # tokens between two states in memory, a multiple of states.BLOCK
# dtype of q and k -> how products of float32 are computed. tf32 has too few bits for values that share a large mean: dq
# then is a small difference of large sums (with a mean of ten standard deviations tf32 was 2.5e-2 off).
PRECISION = {torch.bfloat16: "bf16x3", torch.float32: "ieee"}


def chunk_states(x, y, documents, first=None, L=None, delta=None, HKV=None, last=False):
    """Return the State before each chunk of keys x and values y, and the one after all of them or None.

    With L and delta, x are queries and y is dy, [B, T, H, D], any strides. Then there is a state after each chunk, the
    other State is the one before all tokens, and heads are summed to HKV. first: the State to begin with, float32 and
    contiguous [B, Hkv, D], [B, Hkv, D, D], [B, Hkv, D], or None; last: True to return the other State.
    """
    B, T, H, D = x.shape
    HKV = HKV or H
    chunks = triton.cdiv(T, CHUNK)
    states, final = new_state(x, B * HKV, chunks), new_state(x, B, HKV) if last else None
    chunk_sums_kernel[(B * HKV * chunks,)](
        rows(x), rows(y), L, delta, documents, states, T, H, HKV, CHUNK, **_options(x)
    )
    carry_states_kernel[(B * HKV * D,)](
        states, first, final, documents, T, HKV, CHUNK, D=D, REVERSE=L is not None, num_warps=1
    )
    return states, final


def forward(q, k, v, documents=None, initial=None, *, final=False):
    """Return y [B, T, H, D], L [B, H, T] float32 and the State after the last token, None unless `final`.

    q [B, T, H, D], k [B, T, Hkv, D] bfloat16 or float32, v [B, T, Hkv, D] in the same dtype or float32, any strides.
    y has v's dtype. documents [B, T] int32 or None; initial: (m [B, Hkv, D], S [B, Hkv, D, D], z [B, Hkv, D]) float32
    or None.
    """
    (B, T, H, D), HKV = q.shape, k.shape[2]
    y, L = empty(q, B, T, H, D, dtype=v.dtype), empty(q, B, H, T)
    documents, initial = _contiguous(documents, initial)
    with device_guard(q.device):
        states, last = chunk_states(k, v, documents, initial, last=final)
        forward_kernel[(B * H * triton.cdiv(T, CHUNK),)](
            rows(q), rows(k), rows(v), documents, states, y, L, T, H, HKV, CHUNK, **_options(q)
        )
    return y, L, last


def backward(dy, q, k, v, documents, L, initial=None, final=None):
    """Return dq, dk, dv and the gradient (dS, dz) to the initial state, or None.

    final: (m, dS, dz) of the last state: its reference and the gradient to it, or None. The others are as in `forward`.
    """
    (B, T, H, _), HKV = q.shape, k.shape[2]
    dq, dk, dv = map(empty_like, (q, k, v))
    delta = torch.empty_like(L)
    documents, initial = _contiguous(documents, initial)
    inputs = [rows(x) for x in (q, k, v, dy)]
    with device_guard(q.device):
        states, _ = chunk_states(k, v, documents, initial)
        dq_kernel[(B * H * triton.cdiv(T, CHUNK),)](
            *inputs, L, documents, states, dq, delta, T, H, HKV, CHUNK, **_options(q)
        )
        del states
        final = final and State(-final[0], final[1].contiguous(), final[2].contiguous())
        states, first = chunk_states(q, dy, documents, final, L, delta, HKV, last=initial is not None)
        dkdv_kernel[(B * HKV * triton.cdiv(T, CHUNK),)](
            *inputs, L, delta, documents, states, dk, dv, T, H, HKV, CHUNK, **_options(q)
        )
    if initial is None:
        return dq, dk, dv, None
    factor = torch.exp(initial.m + first.m)
    return dq, dk, dv, (factor[..., None] * first.S, factor * first.z)


def _contiguous(documents, initial):
    """Return documents and the initial State, contiguous; each may be None."""
    documents = None if documents is None else documents.contiguous()
    return documents, initial and State(*(x.contiguous() for x in initial))


def new_state(x, *shape):
    """Return uninitialised States, arrays of this shape."""
    D = x.shape[3]
    return State(empty(x, *shape, D), empty(x, *shape, D, D), empty(x, *shape, D))


def _options(x):
    """Return the sizes and options of a launch of any kernel but carry_states_kernel, for rows like x.

    There are twice as many warps without the matrix unit, since its operands take fewer registers.
    """
    D, precision = x.shape[3], PRECISION[x.dtype]
    warps = D // 8 if precision == "ieee" else D // 16
    return dict(D=D, PRECISION=precision, num_warps=min(16, warps), num_stages=1)
