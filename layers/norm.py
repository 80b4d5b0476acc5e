"""Fold LayerNorm's gain into the next linear's weight, so that torch.compile on a GPU writes one tensor less.

norm(x) W^T is x' (W diag(w))^T, where x' is x normalised without the gain w. So x' is all that must be written, in the
dtype of the product, and the backward pass reads it too instead of a float32 copy. w is multiplied where W is cast, and
its gradient follows from the gradient of W diag(w), without another sum over tokens. W belongs to the next linear
layer, to gates, or to the head.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..attention.gates import linear_fp32

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"  # of an nn.Module


class Normalize(torch.autograd.Function):
    """Compute (x - mean) / sqrt(variance + eps) over the last dimension, rounded to `dtype`; save only that."""

    @staticmethod
    def forward(ctx, x, eps, dtype):
        z = x.to(torch.promote_types(x.dtype, torch.float32))
        z = z - z.mean(-1, keepdim=True)
        scale = (z.square().mean(-1, keepdim=True) + eps).rsqrt()
        y = (z * scale).to(dtype)
        ctx.save_for_backward(y, scale)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        y, scale = ctx.saved_tensors
        y, dy = y.to(scale.dtype), dy.to(scale.dtype)
        dx = scale * (dy - dy.mean(-1, keepdim=True) - y * (dy * y).mean(-1, keepdim=True))
        return dx.to(ctx.dtype), None, None


def norm_linear(norm, linear, x, weight=None):
    """Return (norm(x), linear(norm(x))) of an nn.LayerNorm, an nn.Linear and x [..., C].

    With a weight [n, C], linear_fp32(norm(x), weight) [..., n] comes in the place of norm(x).
    """
    if folds(x, norm, linear):
        return folded(norm, linear, x, weight, torch.get_autocast_dtype(x.device.type))
    x = norm(x)
    return x if weight is None else linear_fp32(x, weight), linear(x)


def norm_weight(norm, weight, x):
    """Return (rows, W) with the same product as norm(x) [..., C] and weight [V, C]."""
    if folds(x, norm) and weight.dtype == torch.float32:
        return Normalize.apply(x, norm.eps, torch.get_autocast_dtype(x.device.type)), weight * norm.weight
    return norm(x), weight


def folds(x, norm, *linear):
    """Return True if the gain becomes a part of the weights: compiled, on a GPU, under autocast.

    Uncompiled, each step of the form above would be a pass over memory, and on a CPU autocast gains nothing. Other
    layers that somebody has put in the place of these (LoRA, quantised weights) are left as they are.
    """
    return torch.compiler.is_compiling() and x.is_cuda and torch.is_autocast_enabled("cuda") and plain(norm, *linear)


def plain(norm, *linear):
    """Return True if these are plain layers without hooks, in float32, and the norm has no bias."""
    layers = norm, *linear
    if type(norm) is not nn.LayerNorm or any(type(layer) is not nn.Linear for layer in linear):
        return False
    if any(getattr(layer, name) for layer in layers for name in HOOKS) or any("forward" in vars(x) for x in layers):
        return False
    return norm.bias is None and all(layer.weight.dtype == torch.float32 for layer in layers)


def folded(norm, linear, x, weight, dtype):
    """Return what `norm_linear` does, with the gain as a part of the weights."""
    x = Normalize.apply(x, norm.eps, dtype)
    first = x * norm.weight if weight is None else linear_fp32(x, weight * norm.weight)
    return first, F.linear(x, linear.weight * norm.weight, linear.bias)
