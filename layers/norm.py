"""The norms of a model, and how their gain becomes a part of the next linear's weight, so that torch.compile on a GPU
writes one tensor less.

For LayerNorm and RMSNorm norm(x) W^T is x' (W diag(w))^T, where x' is x normalised without the gain w. So x' is all
that must be written, in the dtype of the product, and the backward pass reads it too instead of a float32 copy. w is
multiplied where W is cast, and its gradient follows from the gradient of W diag(w), without another sum over tokens. W
belongs to the next linear layer, to gates, or to the head.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..attention.gates import linear_fp32

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"  # of an nn.Module


NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}


def make_norm(config):
    """Return the norm that a GPTConfig names, of rows [..., n_embd]."""
    kind = NORMS[config.norm]
    options = {"bias": config.bias} if kind is nn.LayerNorm else {}
    return kind(config.n_embd, eps=config.norm_eps, **options)


class HeadNorm(nn.Module):
    """Compute w x / sqrt(mean(x^2) + eps) of the numbers of each head, with D weights w, the same for all heads."""

    def __init__(self, head_dim, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(head_dim)), eps

    def forward(self, x):
        """Return it for x [B, T, H, D] in float32, or x's dtype if wider."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight


class Normalize(torch.autograd.Function):
    """Compute (x - mean) / sqrt(variance + eps) over the last dimension, rounded to `dtype`; save only that.

    Without `center` it is RMSNorm: nothing is subtracted.
    """

    @staticmethod
    def forward(ctx, x, eps, dtype, center=True):
        z = x.to(torch.promote_types(x.dtype, torch.float32))
        z = z - z.mean(-1, keepdim=True) if center else z
        scale = (z.square().mean(-1, keepdim=True) + eps).rsqrt()
        y = (z * scale).to(dtype)
        ctx.save_for_backward(y, scale)
        ctx.dtype, ctx.center = x.dtype, center
        return y

    @staticmethod
    def backward(ctx, dy):
        y, scale = ctx.saved_tensors
        y, dy = y.to(scale.dtype), dy.to(scale.dtype)
        centered = dy - dy.mean(-1, keepdim=True) if ctx.center else dy
        dx = scale * (centered - y * (dy * y).mean(-1, keepdim=True))
        return dx.to(ctx.dtype), None, None, None


def norm_linear(norm, linear, x, weight=None):
    """Return (norm(x), linear(norm(x))) of a norm, an nn.Linear and x [..., C].

    With a weight [n, C], linear_fp32(norm(x), weight) [..., n] comes in the place of norm(x).
    """
    if folds(x, norm, linear):
        return folded(norm, linear, x, weight, torch.get_autocast_dtype(x.device.type))
    x = norm(x)
    return x if weight is None else linear_fp32(x, weight), linear(x)


def norm_weight(norm, weight, x):
    """Return (rows, W) with the same product as norm(x) [..., C] and weight [V, C]."""
    if folds(x, norm) and weight.dtype == torch.float32:
        return normalized(norm, x, torch.get_autocast_dtype(x.device.type)), weight * norm.weight
    return norm(x), weight


def folds(x, norm, *linear):
    """Return True if the gain becomes a part of the weights: compiled, on a GPU, under autocast.

    Uncompiled, each step of the form above would be a pass over memory, and on a CPU autocast gains nothing. Other
    layers that somebody has put in the place of these (LoRA, quantised weights) are left as they are.
    """
    return torch.compiler.is_compiling() and x.is_cuda and torch.is_autocast_enabled("cuda") and plain(norm, *linear)


def plain(norm, *linear):
    """Return True if these are plain layers without hooks, in float32, and the norm has a gain and no bias."""
    layers = norm, *linear
    if type(norm) not in NORMS.values() or any(type(layer) is not nn.Linear for layer in linear):
        return False
    if any(getattr(layer, name) for layer in layers for name in HOOKS) or any("forward" in vars(x) for x in layers):
        return False
    return getattr(norm, "bias", None) is None and all(layer.weight.dtype == torch.float32 for layer in layers)


def normalized(norm, x, dtype):
    """Return norm(x) without its gain."""
    return Normalize.apply(x, norm.eps, dtype, type(norm) is nn.LayerNorm)


def folded(norm, linear, x, weight, dtype):
    """Return what `norm_linear` does, with the gain as a part of the weights."""
    x = normalized(norm, x, dtype)
    first = x * norm.weight if weight is None else linear_fp32(x, weight * norm.weight)
    return first, F.linear(x, linear.weight * norm.weight, linear.bias)
