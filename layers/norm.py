"""LayerNorm and the products behind it, for torch.compile on a GPU with fewer bytes than they take apart.

norm(x) W^T is x' (W diag(w))^T, where x' is x normalised without the gain w. So x' is all that must be written, in the
dtype of the product, and the backward pass reads it too instead of a float32 copy; w is multiplied where W is cast, and
its gradient follows from that of W diag(w), without another sum over tokens. W is that of the next linear layer, of
gates, or of the head.
"""

import torch
from torch import nn
from torch.nn import functional as F

from sympow.attention.gates import linear_fp32


HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"  # of an nn.Module


class Normalize(torch.autograd.Function):
    """Compute (x - mean) / sqrt(variance + eps) over the last dimension, rounded to `dtype`, which alone is saved."""

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


class Stored(torch.autograd.Function):
    """Return x, as a view that torch.compile makes of a tensor in memory alone."""

    @staticmethod
    def forward(ctx, x):
        return x.as_strided(x.shape, x.stride())

    @staticmethod
    def backward(ctx, dx):
        return dx


def stored(x):
    """Return x, the residual stream between two parts of a layer, which torch.compile on a GPU then writes.

    By itself it writes every fourth sum of the stream and computes those between again from up to four tensors:
    LayerNorms then move 24 bytes an entry and layer, where 22 do if every second sum is written. (In a layer of one
    part every sum is, which costs what every fourth does.)
    """
    return Stored.apply(x) if torch.compiler.is_compiling() and x.is_cuda else x


def norm_linear(norm, linear, x, weight=None):
    """Return (norm(x), linear(norm(x))) of an nn.LayerNorm, an nn.Linear and x [..., C]; the first is
    linear_fp32(norm(x), weight) [..., n] if there is a weight [n, C]."""
    if folds(x, norm, linear):
        return folded(norm, linear, x, weight, torch.get_autocast_dtype(x.device.type))
    x = norm(x)
    return x if weight is None else linear_fp32(x, weight), linear(x)


def norm_weight(norm, weight, x):
    """Return (rows, W) whose product is that of norm(x) [..., C] and weight [V, C]."""
    if folds(x, norm) and weight.dtype == torch.float32:
        return Normalize.apply(x, norm.eps, torch.get_autocast_dtype(x.device.type)), weight * norm.weight
    return norm(x), weight


def folds(x, norm, *linear):
    """Return whether the gain becomes a part of the weights: compiled, on a GPU, under autocast.

    Uncompiled, each step of the form above would be a pass over memory, and on a CPU autocast gains nothing. Other
    layers that somebody has put in the place of these (LoRA, quantised weights) compute what they do.
    """
    return torch.compiler.is_compiling() and x.is_cuda and torch.is_autocast_enabled("cuda") and plain(norm, *linear)


def plain(norm, *linear):
    """Return whether they compute what their weights say, a gain without a bias in float32, and nobody listens."""
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
