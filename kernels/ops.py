"""The kernels as torch operators.

    y = quadratic_attention(q, k, v, log_g, p=4)                    # differentiable in q, k, v and log_g
    num, den = quadratic_sums(q, k, v, log_g, p=4, scale=0.125)     # not divided, for the chunked form to add to

One operator forward and one backward, each opaque to torch.compile: no graph break, and meta tensors know the shapes.
"""

import torch

from kernels import quadratic


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
