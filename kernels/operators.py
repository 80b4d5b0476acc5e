"""The kernels as torch operators: the door to this package.

    y = quadratic_attention(q, k, v, log_g, p=4)                    # differentiable in q, k, v and log_g
    num, den = quadratic_sums(q, k, v, log_g, p=4, scale=0.125)     # not divided, so other sums can be added
    y, S, z = chunked_attention(q, k, v, log_g, S0, z0, p=2, chunk=1024, final=True)       # states in and out
    S, z = chunked_state(k, v, log_g, S0, z0, p=2, chunk=1024)                             # the same state alone

and, from steps.py, the chunked form's steps one by one: update_state, discumsum, query_state, create_inputs.

Each is one operator forward and one backward, opaque to torch.compile: there is no graph break, and meta tensors give
the shapes. They can be differentiated once. Here and in steps.py every operator is written in the same order: the
public function, the operator and its fake, the backward operator and its fake, what is saved, how the gradient is
computed.
"""

import torch
from torch import Tensor

from . import chunked, quadratic
from .layout import symmetric_power_dim
from .steps import create_inputs, discumsum, empty_like, query_state, register_gradient, update_state

__all__ = [
    "quadratic_attention", "quadratic_sums", "chunked_attention", "chunked_state", "update_state", "discumsum",
    "query_state", "create_inputs",
]  # fmt: skip


# ---- quadratic form


def quadratic_attention(q, k, v, log_g=None, *, p):
    """Return power attention y [B, n, H, D] in q's dtype, computed in the quadratic form.

    q [B, n, H, D], of the last n of T tokens, k, v [B, T, Hkv, D], bfloat16, float16 or float32, log_g [B, T, Hkv]
    float32 or None, any strides, on one GPU. See `attention.power.power_attention` for their meaning.
    """
    q, extra = pad_queries(q, k)
    return _quadratic(q, k, v, log_g, p, 1.0, True)[0][:, extra:]


def quadratic_sums(q, k, v, log_g=None, *, p, scale):
    """Return the numerators sum_j w_ij v_j [B, n, H, D] and the denominators sum_j w_ij [B, H, n], both float32.

    w_ij = decay_ij (scale q_i . k_j)^p; the arguments are those of `quadratic_attention`.
    """
    q, extra = pad_queries(q, k)
    num, den = _quadratic(q, k, v, log_g, p, scale, False)
    return num[:, extra:], den[..., extra : q.shape[1]]


def pad_queries(q, k):
    """Return (q with rows of zeros in front, so that it begins at a multiple of 128 tokens; how many rows these are).

    Tiles of queries then begin where tiles of keys do. A row of zeros has no weight and gets no gradient.
    """
    if q.shape[1] == k.shape[1]:
        return q, 0
    extra = (k.shape[1] - q.shape[1]) % 128
    return torch.nn.functional.pad(q, (0, 0, 0, 0, extra, 0)), extra


@torch.library.custom_op("sympow::quadratic", mutates_args=())
def _quadratic(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, p: int, scale: float, normalize: bool
) -> tuple[Tensor, Tensor]:
    return quadratic.forward(q, k, v, log_g, p=p, scale=scale, normalize=normalize)


@_quadratic.register_fake
def _(q, k, v, log_g, p, scale, normalize):
    B, n, H, _ = q.shape
    return empty_like(q, None if normalize else torch.float32), _empty(q, B, H, quadratic.padded(n))


@torch.library.custom_op("sympow::quadratic_backward", mutates_args=())
def _quadratic_backward(
    dy: Tensor, dl: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, y: Tensor | None,
    l: Tensor | None, p: int, scale: float, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dl = None if dl is None else dl.contiguous()
    grads = quadratic.backward(dy, dl, q, k, v, log_g, y, l, p=p, scale=scale, normalize=normalize)
    return *grads[:3], _empty(q, 0) if log_g is None else grads[3]


@_quadratic_backward.register_fake
def _(dy, dl, q, k, v, log_g, y, l, p, scale, normalize):
    return *map(empty_like, (q, k, v)), _empty(q, 0) if log_g is None else empty_like(log_g, torch.float32)


def _save_quadratic(ctx, inputs, output):
    q, k, v, log_g, ctx.p, ctx.scale, ctx.normalize = inputs
    y, l = output
    ctx.set_materialize_grads(False)  # otherwise an output without a gradient costs 4 bytes of zeros per row
    if ctx.normalize:
        ctx.mark_non_differentiable(l)
        ctx.save_for_backward(q, k, v, log_g, y, l)
    else:
        ctx.save_for_backward(q, k, v, log_g, None, None)


def _differentiate_quadratic(ctx, dy, dl):
    q, k, v, log_g, y, l = ctx.saved_tensors
    if not ctx.normalize:
        B, n, H, _ = q.shape
        dy = q.new_zeros(()).expand(q.shape) if dy is None else dy
        dl = q.new_zeros(B, H, quadratic.padded(n), dtype=torch.float32) if dl is None else dl
    *grads, dlog_g = _quadratic_backward(dy, dl, q, k, v, log_g, y, l, ctx.p, ctx.scale, ctx.normalize)
    return *grads, None if log_g is None else dlog_g, None, None, None


register_gradient(_quadratic, _save_quadratic, _differentiate_quadratic, _quadratic_backward)


# ---- chunked form


def chunked_state(k, v, log_g=None, S=None, z=None, *, p, chunk):
    """Return (S [B, Hkv, Dphi, D], z [B, Hkv, Dphi]) float32, the state after the last token, without any query.

    The arguments are those of `chunked_attention`. Differentiable in every tensor.
    """
    sums, chunks = update_state(k, v, log_g, p=p, chunk=chunk), None
    if log_g is not None:
        n = log_g.shape[1]
        chunks = torch.nn.functional.pad(log_g, (0, 0, 0, -n % chunk)).unflatten(1, (-1, chunk))
        chunks = chunks.sum(2, dtype=torch.float64).float()
    return discumsum(*sums, chunks, S, z)[2:]


def chunked_attention(q, k, v, log_g=None, S=None, z=None, *, p, chunk, final=False, first_chunks=None):
    """Return power attention in the chunked form, (y, S, z), differentiable in every tensor.

    q [B, T, H, D], k, v [B, T, Hkv, D] bfloat16, float16 or float32, log_g [B, T, Hkv] float32 or None, any strides, on
    one GPU; (D, p) is one of kernels.CHUNKED_SIZES. S [B, Hkv, Dphi, D] and z [B, Hkv, Dphi] float32: the state before
    the first token, or None. chunk: tokens, a multiple of 128. The S and z returned are the state after the last token,
    empty unless `final`.

    first_chunks [N + 1] int32, on the same GPU: B is 1, and the tokens are those of N packed sequences. Sequence i has
    the chunks first_chunks[i] up to first_chunks[i + 1], at least one; what pads its last chunk is zero in q, k, v and
    log_g. States are those of N sequences. Without S and z, the log_g of each sequence's first token should be -inf.
    """
    y, S, z, _ = _chunked(q, k, v, log_g, S, z, first_chunks, p, chunk, final)
    return y, S, z


@torch.library.custom_op("sympow::chunked", mutates_args=())
def _chunked(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, S0: Tensor | None, z0: Tensor | None,
    first_chunks: Tensor | None, p: int, chunk: int, final: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    initial = None if S0 is None else chunked.from_canonical(S0, z0, p)
    y, saved, last = chunked.forward(q, k, v, log_g, initial, p=p, chunk=chunk, final=final, first_chunks=first_chunks)
    B, D = _states(q, first_chunks), q.shape[3]
    S, z = chunked.to_canonical(*last, B, D, p) if final else (_empty(q, 0), _empty(q, 0))
    return y, S, z, [_empty(q, 0) if x is None else x for x in saved]


@_chunked.register_fake
def _(q, k, v, log_g, S0, z0, first_chunks, p, chunk, final):
    (B, T, H, D), HKV = q.shape, k.shape[2]
    heads, n, half = B * HKV, -(-T // chunk), chunked.HALF[q.dtype]
    rows = quadratic.padded(T, 256)
    saved = [  # l, S, its units, Z, and of keys and values: rows, values, unit_x, factor, unit_v
        _empty(q, B, H, quadratic.padded(T)), _empty(q, heads, n, chunked.state_size(D, p), dtype=half),
        _empty(q, heads, n), _empty(q, heads, n, D * D) if p == 2 else _empty(q, 0),
        _empty(q, heads, D, rows, dtype=half), _empty(q, heads * rows, D, dtype=half), _empty(q, heads, rows),
        _empty(q, heads, rows), _empty(q, heads, n),
    ]  # fmt: skip
    return empty_like(q), *_empty_state(q, HKV, p, first_chunks, final), saved


@torch.library.custom_op("sympow::chunked_backward", mutates_args=())
def _chunked_backward(
    dy: Tensor, dS: Tensor | None, dz: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, y: Tensor,
    saved: list[Tensor], first_chunks: Tensor | None, p: int, chunk: int, initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    final = None if dS is None else chunked.from_canonical(dS, dz, p)
    sizes = dict(p=p, chunk=chunk, first_chunks=first_chunks)
    *grads, dlog_g, before = chunked.backward(dy, q, k, v, log_g, y, saved, final, initial, **sizes)
    B, D = _states(q, first_chunks), q.shape[3]
    state = chunked.to_canonical(*before, B, D, p) if initial else (_empty(q, 0), _empty(q, 0))
    return *grads, _empty(q, 0) if dlog_g is None else dlog_g, *state


@_chunked_backward.register_fake
def _(dy, dS, dz, q, k, v, log_g, y, saved, first_chunks, p, chunk, initial):
    dlog_g = _empty(q, 0) if log_g is None else empty_like(log_g, torch.float32)
    return *map(empty_like, (q, k, v)), dlog_g, *_empty_state(q, k.shape[2], p, first_chunks, initial)


def _save_chunked(ctx, inputs, output):
    q, k, v, log_g, S0, _, first_chunks, ctx.p, ctx.chunk, ctx.final = inputs
    y, _, _, saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.initial = S0 is not None
    ctx.save_for_backward(q, k, v, log_g, y, first_chunks, *saved)


def _differentiate_chunked(ctx, dy, dS, dz, _):
    q, k, v, log_g, y, first_chunks, *saved = ctx.saved_tensors
    dy = q.new_zeros(()).expand(q.shape) if dy is None else dy
    if not ctx.final:
        dS = dz = None
    elif dS is not None or dz is not None:
        like_S, like_z = _empty_state(q, k.shape[2], ctx.p, first_chunks)
        dS, dz = like_S.zero_() if dS is None else dS, like_z.zero_() if dz is None else dz
    sizes = first_chunks, ctx.p, ctx.chunk, ctx.initial
    *grads, dlog_g, dS0, dz0 = _chunked_backward(dy, dS, dz, q, k, v, log_g, y, saved, *sizes)
    state = (dS0, dz0) if ctx.initial else (None, None)
    return *grads, None if log_g is None else dlog_g, *state, None, None, None, None


register_gradient(_chunked, _save_chunked, _differentiate_chunked, _chunked_backward)


def _empty(like, *shape, dtype=torch.float32):
    return like.new_empty(shape, dtype=dtype)


def _states(q, first_chunks):
    """Return how many sequences have a state: those of the batch, or those that are packed into it."""
    return q.shape[0] if first_chunks is None else first_chunks.shape[0] - 1


def _empty_state(q, HKV, p, first_chunks, wanted=True):
    """Return empty S [B, Hkv, Dphi, D] and z, or two tensors without entries: operators must return tensors."""
    B, D = _states(q, first_chunks), q.shape[3]
    Dphi = symmetric_power_dim(D, p)
    return (_empty(q, B, HKV, Dphi, D), _empty(q, B, HKV, Dphi)) if wanted else (_empty(q, 0), _empty(q, 0))
