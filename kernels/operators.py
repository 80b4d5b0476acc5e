"""The kernels as torch operators: the door to this package.

    y = quadratic_attention(q, k, v, log_g, p=4)                    # differentiable in q, k, v and log_g
    num, den = quadratic_sums(q, k, v, log_g, p=4, scale=0.125)     # not divided, so other sums can be added
    y, S, z = chunked_attention(q, k, v, log_g, S0, z0, p=2, chunk=1024, final=True)       # states in and out
    S, z = chunked_state(k, v, log_g, S0, z0, p=2, chunk=1024)                             # the same state alone
    y = chunked_attention_of_piece(q, k, v, log_g, decay, ranks, p=2, chunk=1024)          # of a sequence over ranks

and, from steps.py, the chunked form's steps one by one: update_state, discumsum, query_state, create_inputs.

Each is one operator forward and one backward, opaque to torch.compile: there is no graph break, and meta tensors give
the shapes. They can be differentiated once, also by torch.func, and take only the gradients that are asked for. The
public functions check their arguments (arguments.py) and take rows of any width up to the kernels' largest. Here and in
steps.py every operator is written in the same order: the public function, the operator and its fake, the backward
operator and its fake, what is saved, how the gradient is computed.
"""

import math

import torch
from torch import Tensor

from .arguments import (
    check,
    check_chunks,
    check_device,
    check_first_chunks,
    check_power,
    check_qkv,
    check_state,
    narrow_state,
    to_width,
    widen_state,
)
from .chunked import passes as chunked
from .layout import symmetric_power_dim
from .quadratic import passes as quadratic
from .registry import registered
from .steps import create_inputs, discumsum, query_state, update_state
from .transforms import asked, empty_like, keep, refuse_second_derivative, transformable, transformable_once

__all__ = [
    "quadratic_attention", "quadratic_sums", "chunked_attention", "chunked_attention_of_piece", "chunked_state",
    "update_state", "discumsum", "query_state", "create_inputs",
]  # fmt: skip


# ---- quadratic form


def quadratic_attention(q, k, v, log_g=None, *, p):
    """Return power attention y [B, n, H, E] in q's dtype, computed in the quadratic form.

    q [B, n, H, D], of the last n of T tokens, k [B, T, Hkv, D], v [B, T, Hkv, E], bfloat16, float16 or float32, log_g
    [B, T, Hkv] float32 or None, any strides, on one GPU; D and E are at most 256 (in float32 128), p is one of
    kernels.POWERS. See `attention.power.power_attention` for their meaning. Raises ValueError for arguments that do not
    fit.
    """
    _check_quadratic(q, k, v, log_g, p)
    (q, extra), E = pad_queries(q, k), v.shape[3]
    return _quadratic(*to_width("quadratic", q, k, v), log_g, p, 1.0, True)[0][:, extra:, :, :E]


def quadratic_sums(q, k, v, log_g=None, *, p, scale):
    """Return the numerators sum_j w_ij v_j [B, n, H, E] and the denominators sum_j w_ij [B, H, n], both float32.

    w_ij = decay_ij (scale q_i . k_j)^p; the arguments are those of `quadratic_attention`, and scale, a number.
    """
    _check_quadratic(q, k, v, log_g, p)
    if not 0 < abs(scale) < math.inf:
        raise ValueError(f"scale must be finite and not zero, got {scale!r}")
    (q, extra), E = pad_queries(q, k), v.shape[3]
    num, den = _quadratic(*to_width("quadratic", q, k, v), log_g, p, scale, False)
    return num[:, extra:, :, :E], den[..., extra : q.shape[1]]


def _check_quadratic(q, k, v, log_g, p):
    check_qkv("quadratic", q, k, v)
    check_power(p)
    check("log_g", log_g, k.shape[:3])
    check_device(q, k=k, v=v, log_g=log_g)


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
    return quadratic.forward(q, k, v, log_g, p=p, scale=scale, normalize=normalize)


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
    return asked(quadratic.backward(dy, dl, q, k, v, log_g, y, l, **options), needs)


@_quadratic_backward_operator.register_fake
def _(dy, dl, q, k, v, log_g, y, l, p, scale, normalize, needs):
    grads = *map(empty_like, (q, k, v)), log_g if log_g is None else empty_like(log_g, torch.float32)
    return asked(grads, needs)


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
    return *keep(grads, needs), None, None, None


_quadratic_backward = transformable_once(_quadratic_backward_operator)
_quadratic = transformable(_quadratic_operator, _save_quadratic, _differentiate_quadratic)


# ---- chunked form


def chunked_state(k, v, log_g=None, S=None, z=None, *, p, chunk):
    """Return (S [B, Hkv, Dphi, E], z [B, Hkv, Dphi]) float32, the state after the last token, without any query.

    The arguments are those of `chunked_attention`. Differentiable in every tensor.
    """
    if k.ndim == v.ndim == 4:  # `update_state` refuses others
        check_state(S, z, k.shape[0], k.shape[2], k.shape[3], v.shape[3], p)
    sums, chunks = update_state(k, v, log_g, p=p, chunk=chunk), None
    if log_g is not None:
        n = log_g.shape[1]
        chunks = torch.nn.functional.pad(log_g, (0, 0, 0, -n % chunk)).unflatten(1, (-1, chunk))
        chunks = chunks.sum(2, dtype=torch.float64).float()
    return discumsum(*sums, chunks, S, z)[2:]


def chunked_attention(q, k, v, log_g=None, S=None, z=None, *, p, chunk, final=False, first_chunks=None):
    """Return power attention in the chunked form, (y, S, z), differentiable in every tensor.

    q [B, T, H, D], k [B, T, Hkv, D], v [B, T, Hkv, E] bfloat16, float16 or float32, log_g [B, T, Hkv] float32 or None,
    any strides, on one GPU. D and E are at most 128 (p = 2) or 64 (p = 4): the kernels' width, the smallest that holds
    both, and p are one of kernels.CHUNKED_SIZES. S [B, Hkv, Dphi, E] and z [B, Hkv, Dphi] float32: the state before the
    first token, or None. chunk: tokens, a multiple of 128. The S and z returned are the state after the last token,
    empty unless `final`. Raises ValueError for arguments that do not fit.

    first_chunks [N + 1] int32, on the same GPU: B is 1, and the tokens are those of N packed sequences. Sequence i has
    the chunks first_chunks[i] up to first_chunks[i + 1], at least one; what pads its last chunk is zero in q, k, v and
    log_g. States are those of N sequences. Without S and z, the log_g of each sequence's first token should be -inf.
    """
    check_qkv("chunked", q, k, v, n_is_T=True)
    D, E = q.shape[3], v.shape[3]
    check_chunks(q.dtype, D, E, p, chunk)
    check("log_g", log_g, k.shape[:3])
    check_first_chunks(first_chunks, q.shape[0])
    check_state(S, z, _states(q, first_chunks), k.shape[2], D, E, p)
    check_device(q, k=k, v=v, log_g=log_g, S=S, z=z, first_chunks=first_chunks)
    q, k, v = to_width("chunked", q, k, v)
    if S is not None:
        S, z = widen_state(S, z, D, q.shape[3], p)
    y, S, z, *_ = _chunked(q, k, v, log_g, S, z, first_chunks, p, chunk, final)
    return y[..., :E], *(narrow_state(S, z, D, E, p) if final else (S, z))


@torch.library.custom_op(
    "sympow::chunked",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? log_g, Tensor? S0, Tensor? z0, Tensor? first_chunks, int p, "
    "int chunk, bool final) -> (" + ", ".join(["Tensor"] * 13) + ")",
)  # fmt: skip
def _chunked_operator(q, k, v, log_g, S0, z0, first_chunks, p, chunk, final):
    """Return y, S, z, and ten tensors that `chunked.backward` needs."""
    initial = None if S0 is None else chunked.from_canonical(S0, z0, p)
    y, saved, last = chunked.forward(q, k, v, log_g, initial, p=p, chunk=chunk, final=final, first_chunks=first_chunks)
    B, D = _states(q, first_chunks), q.shape[3]
    S, z = chunked.to_canonical(*last, B, D, p) if final else (_empty(q, 0), _empty(q, 0))
    return y, S, z, *(_empty(q, 0) if x is None else x for x in saved)


@_chunked_operator.register_fake
def _(q, k, v, log_g, S0, z0, first_chunks, p, chunk, final):
    saved = _like_saved(q, k, p, chunk, S0 is not None or final, first_chunks is not None)
    return empty_like(q), *_empty_state(q, k.shape[2], p, first_chunks, final), *saved


def _like_saved(q, k, p, chunk, states, packed):
    """Return empty tensors like the ten that `chunked.forward` saves; states: it has one before it or gives one."""
    (B, T, H, D), heads = q.shape, k.shape[0] * k.shape[2]
    n, half, rows = -(-T // chunk), chunked.HALF[q.dtype], quadratic.padded(T, 256)
    mirrored = chunked.reflects(q.dtype, states, packed)
    return [  # l, S, its units, Z, mirror, and of keys and values: rows, values, unit_x, factor, unit_v
        _empty(q, B, H, quadratic.padded(T)), _empty(q, heads, n, chunked.state_size(D, p), dtype=half),
        _empty(q, heads, n), _empty(q, heads, n, D * D) if p == 2 else _empty(q, 0),
        _empty(q, heads, D) if mirrored else _empty(q, 0),
        _empty(q, heads, D, rows, dtype=half), _empty(q, heads * rows, D, dtype=half), _empty(q, heads, rows),
        _empty(q, heads, rows), _empty(q, heads, n),
    ]  # fmt: skip


@torch.library.custom_op("sympow::chunked_backward", mutates_args=())
def _chunked_backward_operator(
    dy: Tensor, dS: Tensor | None, dz: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, y: Tensor,
    saved: list[Tensor], first_chunks: Tensor | None, p: int, chunk: int, initial: bool, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    final = None if dS is None else chunked.from_canonical(dS, dz, p)
    of_state = needs[4] or needs[5]
    *grads, first = chunked.backward(
        dy, q, k, v, log_g, y, saved, final, initial, p=p, chunk=chunk, first_chunks=first_chunks,
        needs=(*needs[:4], of_state),
    )  # fmt: skip
    B, D = _states(q, first_chunks), q.shape[3]
    grads += chunked.to_canonical(*first, B, D, p) if of_state else (None, None)
    return asked(grads, needs)


@_chunked_backward_operator.register_fake
def _(dy, dS, dz, q, k, v, log_g, y, saved, first_chunks, p, chunk, initial, needs):
    grads = *map(empty_like, (q, k, v)), log_g if log_g is None else empty_like(log_g, torch.float32)
    grads += _empty_state(q, k.shape[2], p, first_chunks, initial)
    return asked(grads, needs)


def _save_chunked(ctx, inputs, output):
    q, k, v, log_g, S0, _, first_chunks, ctx.p, ctx.chunk, ctx.final = inputs
    y, _, _, *saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.initial = S0 is not None
    ctx.save_for_backward(q, k, v, log_g, y, first_chunks, *saved)


def _differentiate_chunked(ctx, dy, dS, dz, *_):
    q, k, v, log_g, y, first_chunks, *saved = ctx.saved_tensors
    dy = q.new_zeros(()).expand(q.shape) if dy is None else dy
    if not ctx.final:
        dS = dz = None
    elif dS is not None or dz is not None:
        like_S, like_z = _empty_state(q, k.shape[2], ctx.p, first_chunks)
        dS, dz = like_S.zero_() if dS is None else dS, like_z.zero_() if dz is None else dz
    needs, sizes = [*ctx.needs_input_grad[:6]], (first_chunks, ctx.p, ctx.chunk, ctx.initial)
    grads = _chunked_backward(dy, dS, dz, q, k, v, log_g, y, saved, *sizes, needs)
    return *keep(grads, needs), None, None, None, None


_chunked_backward = transformable_once(_chunked_backward_operator)
_chunked = transformable(_chunked_operator, _save_chunked, _differentiate_chunked)


def chunked_attention_of_piece(q, k, v, log_g, decay, ranks, *, p, chunk):
    """Return y of `chunked_attention` for a piece of each sequence, other pieces of which are on other ranks.

    decay [B, Hkv] float32 or None: the product of the piece's gates. ranks: the number that `registry.register` gave
    an object with a method scan_states(S, z, decay, reverse): given the state that these tokens give from zero, S
    [B, Hkv, Dphi, E] and z [B, Hkv, Dphi], it begins to find the state before them, and returns a function that returns
    it; with `reverse`, given the gradient that these tokens give to the state before them, the gradient to the state
    after them. It is called once in each pass. The other arguments are those of `chunked_attention`. Differentiable
    once in q, k, v and log_g, whose gradients are those of the whole sequence: nothing else is computed twice.
    """
    check_qkv("chunked", q, k, v, n_is_T=True)
    check_chunks(q.dtype, q.shape[3], v.shape[3], p, chunk)
    check("log_g", log_g, k.shape[:3])
    check_device(q, k=k, v=v, log_g=log_g, decay=decay)
    (D, E), of = (q.shape[3], v.shape[3]), to_width("chunked", q, k, v)
    return _piece(*of, log_g, decay, ranks, p, chunk, D, E)[0][..., :E]


@torch.library.custom_op("sympow::chunked_piece", mutates_args=())
def _piece(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, decay: Tensor | None, ranks: int, p: int, chunk: int, D: int,
    E: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return y and ten tensors that `chunked.backward` needs."""
    before = _exchange_canonical(ranks, decay, False, q, D, E, p)
    y, saved, _ = chunked.forward(q, k, v, log_g, p=p, chunk=chunk, exchange=before)
    return y, *(_empty(q, 0) if x is None else x for x in saved)


@_piece.register_fake
def _(q, k, v, log_g, decay, ranks, p, chunk, D, E):
    return empty_like(q), *_like_saved(q, k, p, chunk, True, False)


@torch.library.custom_op("sympow::chunked_piece_backward", mutates_args=())
def _piece_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, y: Tensor, saved: list[Tensor],
    decay: Tensor | None, ranks: int, p: int, chunk: int, D: int, E: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    needs, after = (True, True, True, log_g is not None), _exchange_canonical(ranks, decay, True, q, D, E, p)
    *grads, _ = chunked.backward(
        dy, q, k, v, log_g, y, saved, initial=True, p=p, chunk=chunk, needs=(*needs, False), exchange=after
    )
    return asked(grads, needs)


@_piece_backward.register_fake
def _(dy, q, k, v, log_g, y, saved, decay, ranks, p, chunk, D, E):
    grads = *map(empty_like, (q, k, v)), log_g if log_g is None else empty_like(log_g, torch.float32)
    return asked(grads, [x is not None for x in grads])


def _save_piece(ctx, inputs, output):
    q, k, v, log_g, decay, *ctx.sizes = inputs
    y, *saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(decay, q, k, v, log_g, y, *saved)


def _differentiate_piece(ctx, dy, *_):
    decay, q, k, v, log_g, y, *saved = ctx.saved_tensors  # once: activation checkpointing refuses a second read
    dy = q.new_zeros(()).expand(q.shape) if dy is None else dy
    grads = _piece_backward(dy, q, k, v, log_g, y, saved, decay, *ctx.sizes)
    return *keep(grads, ctx.needs_input_grad[:4]), *[None] * 6


_piece_backward.register_autograd(refuse_second_derivative)
_piece.register_autograd(_differentiate_piece, setup_context=_save_piece)


def _exchange_canonical(ranks, decay, reverse, q, D, E, p):
    """Return the scan of `ranks` as a function of states in the kernels' layout and q's width."""
    B, W = q.shape[0], q.shape[3]

    def begin(S, Z):
        canonical = narrow_state(*chunked.to_canonical(S, Z, B, W, p), D, E, p)
        finish = registered(ranks).scan_states(*canonical, decay, reverse)
        return lambda: chunked.from_canonical(*widen_state(*finish(), D, W, p), p)

    return begin


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
