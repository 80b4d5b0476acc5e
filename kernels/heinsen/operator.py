"""Heinsen's log attention as a torch operator: the kernels of heinsen.py, one operator forward and one backward.

    y, m, S, z = heinsen_attention(q, k, v, documents, m, S, z, final=True)      # states in and out

It is written in the order that operators.py describes, and can be differentiated once.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..arguments import check, check_device, check_qkv, described, to_width
from ..transforms import asked, empty_like, keep, transformable, transformable_once
from . import passes as heinsen

NO_FEATURE = -1e30  # an entry of q and k whose weight is zero beside any other


def heinsen_attention(q, k, v, documents=None, m=None, S=None, z=None, *, final=False):
    """Return causal log attention (y, m, S, z), differentiable in q, k, v, S and z (Heinsen, arXiv:2404.05843).

        w_ij = sum_d exp(q_id + k_jd),   y_i = sum_j w_ij v_j / sum_j w_ij          over j <= i of the same document

    q [B, T, H, D], k [B, T, Hkv, D] bfloat16 or float32, v [B, T, Hkv, E] in q's dtype or float32, any
    strides, on one GPU; query head h reads head h // (H / Hkv) of keys. D and E are at most 128. y [B, T, H, E] has v's
    dtype. documents [B, T] int32, non-decreasing, or None: tokens see earlier ones with the same number.
    m [B, Hkv, D], S [B, Hkv, D, E], z [B, Hkv, D] float32: the state before the first token, which tokens with the
    number 0 see, or None. Its sums are exp(m_d) S_d and exp(m_d) z_d; an empty state has m = -1e30. The m, S and z
    returned are the state after the last token, of that token's document, empty tensors unless `final`. m is a constant
    to autograd: the gradients to and from S and z are taken at fixed m, which cancels in whatever a state is read for.
    Raises ValueError for arguments that do not fit.
    """
    _check(q, k, v, documents, m, S, z)
    D, E = q.shape[3], v.shape[3]
    (v,) = to_width("heinsen", v, k)[:1]
    q, k = to_width("heinsen", q, k, v, fill=NO_FEATURE)[:2]
    W = q.shape[3]
    if m is not None and (D, E) != (W, W):  # features that no query reads
        m, z, S = F.pad(m, (0, W - D), value=NO_FEATURE), F.pad(z, (0, W - D)), F.pad(S, (0, W - E, 0, W - D))
    y, m, S, z, _ = _heinsen(q, k, v, documents, m, S, z, final)
    return y[..., :E], *((m[..., :D], S[..., :D, :E], z[..., :D]) if final else (m, S, z))


def _check(q, k, v, documents, m, S, z):
    """Raise ValueError for arguments that do not fit."""
    check_qkv("heinsen", q, k, v, n_is_T=True, v_dtypes=(torch.float32,), may_be_empty=True)
    (B, T, HKV, D), E = k.shape, v.shape[3]
    check("documents", documents, (B, T), torch.int32)
    if len({x is None for x in (m, S, z)}) > 1:
        got = ", ".join(f"{name} {'None' if x is None else described(x)}" for name, x in zip("mSz", (m, S, z)))
        raise ValueError(f"m, S and z must all be given or all be None, got {got}")
    check("m", m, (B, HKV, D))
    check("S", S, (B, HKV, D, E))
    check("z", z, (B, HKV, D))
    check_device(q, k=k, v=v, documents=documents, m=m, S=S, z=z)


@torch.library.custom_op("sympow::heinsen", mutates_args=())
def _heinsen_operator(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, m0: Tensor | None, S0: Tensor | None, z0: Tensor | None,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    initial = None if m0 is None else (m0, S0, z0)
    y, L, last = heinsen.forward(q, k, v, documents, initial, final=final)
    return y, *(last or _empty_state(k, False)), L


@_heinsen_operator.register_fake
def _(q, k, v, documents, m0, S0, z0, final):
    B, T, H, _ = q.shape
    return empty_like(q, v.dtype), *_empty_state(k, final), _empty(q, B, H, T)


@torch.library.custom_op("sympow::heinsen_backward", mutates_args=())
def _heinsen_backward_operator(
    dy: Tensor, dS: Tensor | None, dz: Tensor | None, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
    m0: Tensor | None, S0: Tensor | None, z0: Tensor | None, m: Tensor, L: Tensor, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    initial = None if m0 is None else (m0, S0, z0)
    final = None if dS is None else (m, dS, dz)
    *grads, state = heinsen.backward(dy, q, k, v, documents, L, initial, final, only_q=not any(needs[1:]))
    return asked((*grads, *(state or (None, None))), needs)


@_heinsen_backward_operator.register_fake
def _(dy, dS, dz, q, k, v, documents, m0, S0, z0, m, L, needs):
    return asked((*map(empty_like, (q, k, v)), *_empty_state(k, m0 is not None)[1:]), needs)


def _save(ctx, inputs, output):
    q, k, v, documents, m0, S0, z0, ctx.final = inputs
    _, m, _, _, L = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(m, L)
    ctx.save_for_backward(q, k, v, documents, m0, S0, z0, m, L)


def _differentiate(ctx, dy, dm, dS, dz, dL):
    q, k, v, documents, m0, S0, z0, m, L = ctx.saved_tensors
    dy = v.new_zeros(()).expand(q.shape) if dy is None else dy
    if not ctx.final:
        dS = dz = None
    elif dS is not None or dz is not None:
        _, like_S, like_z = _empty_state(k, True)
        dS, dz = like_S.zero_() if dS is None else dS, like_z.zero_() if dz is None else dz
    needs = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[5:7]]
    grads = keep(_heinsen_backward(dy, dS, dz, q, k, v, documents, m0, S0, z0, m, L, needs), needs)
    return *grads[:3], None, None, *grads[3:], None


_heinsen_backward = transformable_once(_heinsen_backward_operator)
_heinsen = transformable(_heinsen_operator, _save, _differentiate)


def _empty(like, *shape):
    return like.new_empty(shape, dtype=torch.float32)


def _empty_state(k, wanted):
    """Return empty m [B, Hkv, D], S [B, Hkv, D, D] and z, or three tensors without entries."""
    B, _, HKV, D = k.shape
    shapes = ((B, HKV, D), (B, HKV, D, D), (B, HKV, D)) if wanted else ((0,),) * 3
    return tuple(_empty(k, *shape) for shape in shapes)
