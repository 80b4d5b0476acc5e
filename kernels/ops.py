"""The kernels as torch operators.

    y = quadratic_attention(q, k, v, log_g, p=4)                    # differentiable in q, k, v and log_g
    num, den = quadratic_sums(q, k, v, log_g, p=4, scale=0.125)     # not divided, for other sums to be added
    y, S, z = chunked_attention(q, k, v, log_g, S0, z0, p=2, chunk=1024, final=True)       # states in and out

One operator forward and one backward, each opaque to torch.compile: no graph break, and meta tensors know the shapes.
"""

import torch

from . import chunked, quadratic
from .layout import symmetric_power_dim


def quadratic_attention(q, k, v, log_g=None, *, p):
    """y [B, T, H, D] in q's dtype, of q [B, T, H, D], k, v [B, T, Hkv, D] and log_g [B, T, Hkv] float32 or None, with
    any strides: power attention in the quadratic form, `attention.power.power_attention` says which. On one GPU."""
    return _quadratic(q, k, v, log_g, p, 1.0, True)[0]


def quadratic_sums(q, k, v, log_g=None, *, p, scale):
    """The numerators sum_j w_ij v_j [B, T, H, D] and denominators sum_j w_ij [B, H, T], both float32, with
    w_ij = decay_ij (scale q_i . k_j)^p."""
    num, den = _quadratic(q, k, v, log_g, p, scale, False)
    return num, den[..., : q.shape[1]]


@torch.library.custom_op("sympow::quadratic", mutates_args=())
def _quadratic(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_g: torch.Tensor | None, p: int, scale: float, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return quadratic.forward(q, k, v, log_g, p=p, scale=scale, normalize=normalize)


@_quadratic.register_fake
def _(q, k, v, log_g, p, scale, normalize):
    B, T, H, _ = q.shape
    y = torch.empty(q.shape, dtype=q.dtype if normalize else torch.float32, device=q.device)
    return y, q.new_empty(B, H, quadratic.padded(T), dtype=torch.float32)


@torch.library.custom_op("sympow::quadratic_backward", mutates_args=())
def _quadratic_backward(
    dy: torch.Tensor, dl: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    log_g: torch.Tensor | None, y: torch.Tensor | None, l: torch.Tensor | None, p: int, scale: float, normalize: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dl = None if dl is None else dl.contiguous()
    grads = quadratic.backward(dy, dl, q, k, v, log_g, y, l, p=p, scale=scale, normalize=normalize)
    return *grads[:3], q.new_empty(0, dtype=torch.float32) if log_g is None else grads[3]


@_quadratic_backward.register_fake
def _(dy, dl, q, k, v, log_g, y, l, p, scale, normalize):
    dlog_g = q.new_empty(0 if log_g is None else log_g.shape, dtype=torch.float32)
    return *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)), dlog_g


def _save(ctx, inputs, output):
    q, k, v, log_g, ctx.p, ctx.scale, ctx.normalize = inputs
    y, l = output
    ctx.set_materialize_grads(False)  # of an output that is not used
    if ctx.normalize:
        ctx.mark_non_differentiable(l)
        ctx.save_for_backward(q, k, v, log_g, y, l)
    else:
        ctx.save_for_backward(q, k, v, log_g, None, None)


def _differentiate(ctx, dy, dl):
    q, k, v, log_g, y, l = ctx.saved_tensors
    if not ctx.normalize:
        dy = q.new_zeros(()).expand(q.shape) if dy is None else dy
        B, T, H, _ = q.shape
        dl = q.new_zeros(B, H, quadratic.padded(T), dtype=torch.float32) if dl is None else dl
    *grads, dlog_g = _quadratic_backward(dy, dl, q, k, v, log_g, y, l, ctx.p, ctx.scale, ctx.normalize)
    return *grads, None if log_g is None else dlog_g, None, None, None


def _refuse_second_derivative(ctx, *grads):
    raise NotImplementedError(
        "the power attention kernels have no second derivative: compute it on float64 tensors or on the CPU, where "
        "power_attention is plain PyTorch"
    )


_quadratic.register_autograd(_differentiate, setup_context=_save)
_quadratic_backward.register_autograd(_refuse_second_derivative)


def chunked_attention(q, k, v, log_g=None, S=None, z=None, *, p, chunk, final=False):
    """Power attention in the chunked form, p = 2 or 4: (y, S, z), differentiable in every tensor.

    q [B, T, H, D], k, v [B, T, Hkv, D], log_g [B, T, Hkv] float32 or None, any strides; S [B, Hkv, Dphi, D] and
    z [B, Hkv, Dphi] float32: the state before the first token, or None. chunk: tokens, a multiple of 128. S and z
    returned: the state after the last token, empty unless `final`.
    """
    y, S, z, _ = _chunked(q, k, v, log_g, S, z, p, chunk, final)
    return y, S, z


@torch.library.custom_op("sympow::chunked", mutates_args=())
def _chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_g: torch.Tensor | None, S0: torch.Tensor | None,
    z0: torch.Tensor | None, p: int, chunk: int, final: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    initial = None if S0 is None else chunked.from_canonical(S0, z0, p)
    y, saved, last = chunked.forward(q, k, v, log_g, initial, p=p, chunk=chunk, final=final)
    empty = lambda: q.new_empty(0, dtype=torch.float32)
    S, z = chunked.to_canonical(*last, q.shape[0], q.shape[3], p) if final else (empty(), empty())
    return y, S, z, [empty() if x is None else x for x in saved]


@_chunked.register_fake
def _(q, k, v, log_g, S0, z0, p, chunk, final):
    (B, T, H, D), HKV = q.shape, k.shape[2]
    new = lambda *shape, dtype=torch.float32: q.new_empty(shape, dtype=dtype)
    n, Dphi, half = -(-T // chunk), symmetric_power_dim(D, p), chunked.HALF[q.dtype]
    S, z = (new(B, HKV, Dphi, D), new(B, HKV, Dphi)) if final else (new(0), new(0))
    y, TP = torch.empty(q.shape, dtype=q.dtype, device=q.device), -(-T // 256) * 256
    saved = [
        new(B, H, quadratic.padded(T)), new(B * HKV, n, chunked.state_size(D, p), dtype=half), new(B * HKV, n),
        new(B * HKV, n, D * D) if p == 2 else new(0), new(B * HKV, D, TP, dtype=half), new(B * HKV * TP, D, dtype=half),
        new(B * HKV, TP), new(B * HKV, TP), new(B * HKV, n),
    ]  # fmt: skip
    return y, S, z, saved


@torch.library.custom_op("sympow::chunked_backward", mutates_args=())
def _chunked_backward(
    dy: torch.Tensor, dS: torch.Tensor | None, dz: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, log_g: torch.Tensor | None, y: torch.Tensor, saved: list[torch.Tensor], p: int, chunk: int,
    initial: bool,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    final = None if dS is None else chunked.from_canonical(dS, dz, p)
    *grads, dlog_g, first = chunked.backward(dy, q, k, v, log_g, y, saved, final, initial, p=p, chunk=chunk)
    empty = lambda: q.new_empty(0, dtype=torch.float32)
    states = chunked.to_canonical(*first, q.shape[0], q.shape[3], p) if initial else (empty(), empty())
    return *grads, empty() if dlog_g is None else dlog_g, *states


@_chunked_backward.register_fake
def _(dy, dS, dz, q, k, v, log_g, y, saved, p, chunk, initial):
    B, HKV, D = q.shape[0], k.shape[2], q.shape[3]
    Dphi = symmetric_power_dim(D, p)
    new = lambda *shape: q.new_empty(shape, dtype=torch.float32)
    states = (new(B, HKV, Dphi, D), new(B, HKV, Dphi)) if initial else (new(0), new(0))
    grads = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return *grads, new(0) if log_g is None else new(*log_g.shape), *states


def _save_chunked(ctx, inputs, output):
    q, k, v, log_g, S0, _, ctx.p, ctx.chunk, ctx.final = inputs
    y, _, _, saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.initial = S0 is not None
    ctx.save_for_backward(q, k, v, log_g, y, *saved)


def _differentiate_chunked(ctx, dy, dS, dz, _):
    q, k, v, log_g, y, *saved = ctx.saved_tensors
    dy = q.new_zeros(()).expand(q.shape) if dy is None else dy
    if not ctx.final:
        dS = dz = None
    elif dS is not None or dz is not None:
        B, HKV, D = q.shape[0], k.shape[2], q.shape[3]
        Dphi = symmetric_power_dim(D, ctx.p)
        dS = q.new_zeros(B, HKV, Dphi, D, dtype=torch.float32) if dS is None else dS
        dz = q.new_zeros(B, HKV, Dphi, dtype=torch.float32) if dz is None else dz
    tensors = dy, dS, dz, q, k, v, log_g, y, saved
    dq, dk, dv, dlog_g, dS0, dz0 = _chunked_backward(*tensors, ctx.p, ctx.chunk, ctx.initial)
    states = (dS0, dz0) if ctx.initial else (None, None)
    return dq, dk, dv, None if log_g is None else dlog_g, *states, None, None, None


_chunked.register_autograd(_differentiate_chunked, setup_context=_save_chunked)
_chunked_backward.register_autograd(_refuse_second_derivative)
