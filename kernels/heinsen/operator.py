"""Heinsen's log attention as a torch operator: the kernels of passes.py, one operator forward and one backward.

    y, m, S, z = heinsen_attention(q, k, v, documents, m, S, z, final=True)      # states in and out

It is written in the order that operators.py describes, and can be differentiated once.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common import empty
from ..transforms import differentiable, differentiable_once, empty_like
from ..widths import to_width
from . import passes

NO_FEATURE = -1e30  # an entry of q and k that has no weight beside any other


def heinsen_attention(q, k, v, documents=None, m=None, S=None, z=None, *, final=False):
    """Return causal log attention (y, m, S, z), differentiable in q, k, v, S and z (Heinsen, arXiv:2404.05843).

        w_ij = sum_d exp(q_id + k_jd),   y_i = sum_j w_ij v_j / sum_j w_ij          over j <= i of the same document

    q [B, T, H, D], k [B, T, Hkv, D] bfloat16 or float32, v [B, T, Hkv, E] in q's dtype or float32, any
    strides, on one GPU; query head h reads head h // (H / Hkv) of keys. D and E are at most 128. y [B, T, H, E] has v's
    dtype. documents [B, T] int32, non-decreasing, or None: tokens see earlier ones with the same number.
    m [B, Hkv, D], S [B, Hkv, D, E], z [B, Hkv, D] float32: the state before the first token, which tokens with the
    number 0 see, or None. Its sums are exp(m_d) S_d and exp(m_d) z_d; an empty state has m = -1e30. The m, S and z
    returned are the state after the last token, of that token's document, without sequences unless `final`. m is a
    constant to autograd: the gradients to and from S and z are taken at fixed m, which cancels when a state is read.
    """
    D, E = q.shape[3], v.shape[3]
    v, _ = to_width("heinsen", v, k)
    q, k, _ = to_width("heinsen", q, k, v, fill=NO_FEATURE)
    W = q.shape[3]
    if m is not None:  # features that no query reads
        m, z, S = F.pad(m, (0, W - D), value=NO_FEATURE), F.pad(z, (0, W - D)), F.pad(S, (0, W - E, 0, W - D))
    y, m, S, z, _ = _heinsen(q, k, v, documents, m, S, z, final)
    return y[..., :E], m[..., :D], S[..., :D, :E], z[..., :D]


@torch.library.custom_op("sympow::heinsen", mutates_args=())
def _heinsen_operator(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, m0: Tensor | None, S0: Tensor | None, z0: Tensor | None,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    initial = None if m0 is None else (m0, S0, z0)
    y, L, last = passes.forward(q, k, v, documents, initial, final=final)
    return y, *(last or _new_states(k, False)), L


@_heinsen_operator.register_fake
def _(q, k, v, documents, m0, S0, z0, final):
    B, T, H, _ = q.shape
    return empty_like(q, v.dtype), *_new_states(k, final), empty(q, B, H, T)


@torch.library.custom_op("sympow::heinsen_backward", mutates_args=())
def _heinsen_backward_operator(
    dy: Tensor, dS: Tensor | None, dz: Tensor | None, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
    m0: Tensor | None, S0: Tensor | None, z0: Tensor | None, m: Tensor, L: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    initial = None if m0 is None else (m0, S0, z0)
    final = None if dS is None else (m, dS, dz)
    *grads, state = passes.backward(dy, q, k, v, documents, L, initial, final)
    return *grads, *(state or _new_states(k, False)[1:])


@_heinsen_backward_operator.register_fake
def _(dy, dS, dz, q, k, v, documents, m0, S0, z0, m, L):
    return *map(empty_like, (q, k, v)), *_new_states(k, m0 is not None)[1:]


def _save(ctx, inputs, output):
    *tensors, ctx.final = inputs
    _, m, _, _, L = output
    ctx.mark_non_differentiable(m, L)
    ctx.save_for_backward(*tensors, m, L)


def _differentiate(ctx, dy, dm, dS, dz, dL):
    tensors = ctx.saved_tensors
    final = (dS, dz) if ctx.final else (None, None)
    *grads, dS0, dz0 = _heinsen_backward(dy, *final, *tensors)
    state = (None, None) if tensors[4] is None else (dS0, dz0)
    return *grads, None, None, *state, None


_heinsen_backward = differentiable_once(_heinsen_backward_operator)
_heinsen = differentiable(_heinsen_operator, _save, _differentiate)


def _new_states(k, one_each):
    """Return uninitialised m [B, Hkv, D], S [B, Hkv, D, D] and z, one for each sequence, or of no sequence."""
    return passes.new_state(k, k.shape[0] if one_each else 0, k.shape[2])
