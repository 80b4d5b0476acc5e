"""The kernels as torch operators: the door to this package.

    y = quadratic_attention(q, k, v, log_g, p=4)                    # differentiable in q, k, v and log_g
    num, den = quadratic_sums(q, k, v, log_g, p=4, scale=0.125)     # not divided, so other sums can be added
    y, S, z = chunked_attention(q, k, v, log_g, S0, z0, p=2, chunk=1024, final=True)       # states in and out
    S, z = chunked_state(k, v, log_g, S0, z0, p=2, chunk=1024)                             # the same state alone
    y = chunked_attention_of_piece(q, k, v, log_g, decay, ranks, p=2, chunk=1024)          # of a sequence over ranks

The quadratic and the chunked form are one operator forward and one backward each, opaque to torch.compile: there is no
graph break, and meta tensors give the shapes. They can be differentiated once, and compute only the gradients that
are needed. The public functions take rows of any width up to the kernels' largest; attention/ has checked their
arguments. Every operator is written in the same order: the public functions, the operator and its fake, the backward
operator and its fake, what is saved, how the gradient is computed.
"""

from functools import partial

import torch
from torch import Tensor

from .chunked import passes as chunked
from .layout import symmetric_power_dim
from .precompile import compile_and_call
from .quadratic import passes as quadratic
from .registry import registered
from .transforms import differentiable, differentiable_once, drop_unneeded, empty_like, fill_unneeded
from .widths import narrow_state, to_width, widen_state

# ---- quadratic form


def quadratic_attention(q, k, v, log_g=None, *, p):
    """Return power attention y [B, n, H, E] in q's dtype, computed in the quadratic form.

    q [B, n, H, D], of the last n of T tokens, k [B, T, Hkv, D], v [B, T, Hkv, E], bfloat16 or float32, log_g
    [B, T, Hkv] float32 or None, any strides, on one GPU; D and E are at most 256 (in float32 128), p is one of
    support.POWERS. See `attention.power.power_attention` for their meaning.
    """
    (q, extra), E = pad_queries(q, k), v.shape[3]
    return _quadratic(*to_width("quadratic", q, k, v), log_g, p, 1.0, True)[0][:, extra:, :, :E]


def quadratic_sums(q, k, v, log_g=None, *, p, scale):
    """Return the numerators sum_j w_ij v_j [B, n, H, E] and the denominators sum_j w_ij [B, H, n], both float32.

    w_ij = decay_ij (scale q_i . k_j)^p; the arguments are as for `quadratic_attention`; scale is a number.
    """
    (q, extra), E = pad_queries(q, k), v.shape[3]
    num, den = _quadratic(*to_width("quadratic", q, k, v), log_g, p, scale, False)
    return num[:, extra:, :, :E], den[..., extra : q.shape[1]]


def pad_queries(q, k):
    """Return (q with rows of zeros in front, so that it begins at a multiple of 128 tokens; how many rows these are).

    Tiles of queries then begin where tiles of keys do. A row of zeros has no weight and gets no gradient.
    """
    if q.shape[1] == k.shape[1]:
        return q, 0
    extra = (k.shape[1] - q.shape[1]) % 128
    return torch.nn.functional.pad(q, (0, 0, 0, 0, extra, 0)), extra


@torch.library.custom_op("sympow::quadratic", mutates_args=())
def _quadratic_operator(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, p: int, scale: float, normalize: bool
) -> tuple[Tensor, Tensor]:
    kind, options = (p, normalize, log_g is None), dict(p=p, scale=scale, normalize=normalize)
    return compile_and_call(quadratic.forward, kind, q, k, v, log_g, **options)


@_quadratic_operator.register_fake
def _(q, k, v, log_g, p, scale, normalize):
    B, n, H, _ = q.shape
    return empty_like(q, None if normalize else torch.float32), _empty(q, B, H, quadratic.padded(n))


@torch.library.custom_op("sympow::quadratic_backward", mutates_args=())
def _quadratic_backward_operator(
    dy: Tensor, dl: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, y: Tensor | None,
    l: Tensor | None, p: int, scale: float, normalize: bool, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dl = None if dl is None else dl.contiguous()
    needs_q, needs_k, needs_v, needs_g = needs
    options = dict(p=p, scale=scale, normalize=normalize, needs=(needs_q, needs_k or needs_v, needs_g))
    kind = p, normalize, log_g is None, *needs
    grads = compile_and_call(quadratic.backward, kind, dy, dl, q, k, v, log_g, y, l, **options)
    return fill_unneeded(grads, needs)


@_quadratic_backward_operator.register_fake
def _(dy, dl, q, k, v, log_g, y, l, p, scale, normalize, needs):
    return fill_unneeded(_empty_grads(q, k, v, log_g), needs)


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
    needs = [*ctx.needs_input_grad[:4]]
    grads = _quadratic_backward(dy, dl, q, k, v, log_g, y, l, ctx.p, ctx.scale, ctx.normalize, needs)
    return *drop_unneeded(grads, needs), None, None, None


_quadratic_backward = differentiable_once(_quadratic_backward_operator)
_quadratic = differentiable(_quadratic_operator, _save_quadratic, _differentiate_quadratic)


# ---- chunked form


def chunked_state(k, v, log_g=None, S=None, z=None, *, p, chunk):
    """Return (S [B, Hkv, Dphi, E], z [B, Hkv, Dphi]) float32, the state after the last token.

    The arguments are as for `chunked_attention`. Differentiable in every tensor.
    """
    return chunked_attention(k.detach(), k, v, log_g, S, z, p=p, chunk=chunk, final=True)[1:]


def chunked_attention(q, k, v, log_g=None, S=None, z=None, *, p, chunk, final=False):
    """Return power attention in the chunked form, (y, S, z), differentiable in every tensor.

    q [B, T, H, D], k [B, T, Hkv, D], v [B, T, Hkv, E] bfloat16 or float32, log_g [B, T, Hkv] float32 or None, any
    strides, on one GPU. D and E are at most 128 (p = 2) or 64 (p = 4): the kernels' width, the smallest that holds
    both, and p are one of kernels.CHUNKED_SIZES. S [B, Hkv, Dphi, E] and z [B, Hkv, Dphi] float32: the state before the
    first token, or None. chunk: tokens, a multiple of 128. The S and z returned are the state after the last token,
    empty unless `final`. Raises ValueError for too many tokens.
    """
    D, E = q.shape[3], v.shape[3]
    q, k, v = to_width("chunked", q, k, v)
    if S is not None:
        S, z = widen_state(S, z, D, q.shape[3], p)
    y, S, z, _ = _chunked(q, k, v, log_g, S, z, None, p, chunk, final, None)
    return y[..., :E], *(narrow_state(S, z, D, E, p) if final else (S, z))


def chunked_attention_of_piece(q, k, v, log_g, decay, ranks, *, p, chunk):
    """Return y of `chunked_attention` for a piece of each sequence; other ranks hold the other pieces.

    decay [B, Hkv] float32 or None: the product of the piece's gates. ranks: the number that `registry.register` gave
    an object with a method scan_states(S, z, decay, reverse). Its arguments are the state that these tokens give from
    zero, S [B, Hkv, Dphi, W] and z [B, Hkv, Dphi], for rows of the kernels' width W. It begins to compute the state
    before these tokens, and returns a function that returns it. With `reverse` its arguments are the gradient that
    these tokens give to the state before them, and it computes the gradient to the state after them. It is called once
    in each pass. The other arguments are as for `chunked_attention`. Differentiable once in q, k, v and log_g;
    gradients are exact for the whole sequence.
    """
    E = v.shape[3]
    return _chunked(*to_width("chunked", q, k, v), log_g, None, None, decay, p, chunk, False, ranks)[0][..., :E]


@torch.library.custom_op("sympow::chunked", mutates_args=())
def _chunked_operator(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, S0: Tensor | None, z0: Tensor | None, decay: Tensor | None,
    p: int, chunk: int, final: bool, ranks: int | None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Return y, S, z, and the tensors that `chunked.backward` needs."""
    initial = None if S0 is None else chunked.from_canonical(S0, z0, p)
    y, saved, last = _launch_chunked(chunked.forward, (p, log_g is None, S0 is None, final), ranks)(
        q, k, v, log_g, initial, p=p, chunk=chunk, final=final, exchange=_exchange(ranks, decay, False, q, p)
    )
    S, z = chunked.to_canonical(*last, q.shape[0], q.shape[3], p) if final else (_empty(q, 0), _empty(q, 0))
    return y, S, z, [_empty(q, 0) if x is None else x for x in saved]


@_chunked_operator.register_fake
def _(q, k, v, log_g, S0, z0, decay, p, chunk, final, ranks):
    saved = _empty_saved(q, k, p, chunk, chunked.reflects(q.dtype, S0 is not None or final or ranks is not None))
    return empty_like(q), *_empty_state(q, k.shape[2], p, final), saved


def _empty_saved(q, k, p, chunk, mirrored):
    """Return empty tensors like those that `chunked.forward` saves."""
    (B, T, H, D), heads = q.shape, k.shape[0] * k.shape[2]
    n, half, rows = -(-T // chunk), chunked.HALF[q.dtype], quadratic.padded(T, 256)
    return [
        _empty(q, B, H, quadratic.padded(T)),  # l
        _empty(q, heads, n, chunked.state_size(D, p), dtype=half),  # S
        _empty(q, heads, n),  # unit_s
        _empty(q, heads, n, D * D) if p == 2 else _empty(q, 0),  # Z
        _empty(q, heads, D) if mirrored else _empty(q, 0),  # mirror
        _empty(q, heads, D, rows, dtype=half),  # rows
        _empty(q, heads * rows, D, dtype=half),  # values
        _empty(q, heads, rows),  # unit_x
        _empty(q, heads, rows),  # factor
        _empty(q, heads, n),  # unit_v
    ]


@torch.library.custom_op("sympow::chunked_backward", mutates_args=())
def _chunked_backward_operator(
    dy: Tensor, dS: Tensor | None, dz: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, y: Tensor,
    decay: Tensor | None, saved: list[Tensor], p: int, chunk: int, ranks: int | None, initial: bool, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    final = None if dS is None else chunked.from_canonical(dS, dz, p)
    needs_state = needs[4] or needs[5]
    kind = p, log_g is None, final is None, initial, *needs
    *grads, first = _launch_chunked(chunked.backward, kind, ranks)(
        dy, q, k, v, log_g, y, saved, final, initial or ranks is not None, p=p, chunk=chunk,
        needs=(*needs[:4], needs_state), exchange=_exchange(ranks, decay, True, q, p),
    )  # fmt: skip
    grads += chunked.to_canonical(*first, q.shape[0], q.shape[3], p) if needs_state else (None, None)
    return fill_unneeded(grads, needs)


@_chunked_backward_operator.register_fake
def _(dy, dS, dz, q, k, v, log_g, y, decay, saved, p, chunk, ranks, initial, needs):
    return fill_unneeded((*_empty_grads(q, k, v, log_g), *_empty_state(q, k.shape[2], p, initial)), needs)


def _save_chunked(ctx, inputs, output):
    *tensors, ctx.p, ctx.chunk, ctx.final, ctx.ranks = inputs
    q, k, v, log_g, S0, _, decay = tensors
    y, _, _, saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.initial = S0 is not None
    ctx.save_for_backward(q, k, v, log_g, y, decay, *saved)


def _differentiate_chunked(ctx, dy, dS, dz, _):
    q, k, v, log_g, y, decay, *saved = ctx.saved_tensors  # once: checkpointing refuses a second read
    dy = q.new_zeros(()).expand(q.shape) if dy is None else dy
    if not ctx.final:
        dS = dz = None
    elif dS is not None or dz is not None:
        zero_S, zero_z = _empty_state(q, k.shape[2], ctx.p)
        dS, dz = zero_S.zero_() if dS is None else dS, zero_z.zero_() if dz is None else dz
    needs, sizes = [*ctx.needs_input_grad[:6]], (ctx.p, ctx.chunk, ctx.ranks, ctx.initial)
    grads = _chunked_backward(dy, dS, dz, q, k, v, log_g, y, decay, saved, *sizes, needs)
    return *drop_unneeded(grads, needs), *[None] * 5


_chunked_backward = differentiable_once(_chunked_backward_operator)
_chunked = differentiable(_chunked_operator, _save_chunked, _differentiate_chunked)


def _launch_chunked(function, kind, ranks):
    """Return a function that calls `function`. If other ranks do not wait for it, it compiles its kernels at once."""
    return partial(compile_and_call, function, kind) if ranks is None else function


def _exchange(ranks, decay, reverse, q, p):
    """Return the scan of `ranks` as a function of states in the kernels' layout, or None for None."""
    if ranks is None:
        return None
    B, D = q.shape[0], q.shape[3]

    def begin(S, Z):
        finish = registered(ranks).scan_states(*chunked.to_canonical(S, Z, B, D, p), decay, reverse)
        return lambda: chunked.from_canonical(*finish(), p)

    return begin


# ---- empty tensors: operators must return tensors, and meta tensors give their shapes


def _empty(like, *shape, dtype=torch.float32):
    return like.new_empty(shape, dtype=dtype)


def _empty_grads(q, k, v, log_g):
    return *map(empty_like, (q, k, v)), None if log_g is None else empty_like(log_g, torch.float32)


def _empty_state(q, HKV, p, exists=True):
    """Return empty S [B, Hkv, Dphi, D] and z, or two tensors without entries."""
    if not exists:
        return _empty(q, 0), _empty(q, 0)
    shape = q.shape[0], HKV, symmetric_power_dim(q.shape[3], p)
    return _empty(q, *shape, q.shape[3]), _empty(q, *shape)
