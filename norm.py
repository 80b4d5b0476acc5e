"""LayerNorm and the linear layer behind it, for torch.compile on a GPU with fewer bytes than the two take apart.

norm(x) W^T is x' (W diag(w))^T, where x' is x normalised without the gain w. So x' is all that must be written, in the
dtype of the product, and the backward pass reads it too instead of a float32 copy; w is multiplied where W is cast, and
its gradient follows from that of W diag(w), without another sum over tokens.
"""

import torch
from torch import nn
from torch.nn import functional as F


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


def norm_linear(norm, linear, x):
    """Return (norm(x), linear(norm(x))) of an nn.LayerNorm, an nn.Linear and x [..., C].

    Uncompiled, each step of the form above would be a pass over memory, and on a CPU autocast gains nothing. Other
    layers that somebody has put in the place of these two (LoRA, quantised weights) compute what they do.
    """
    kind = x.device.type
    if torch.compiler.is_compiling() and x.is_cuda and torch.is_autocast_enabled(kind) and plain(norm, linear):
        return folded(norm, linear, x, torch.get_autocast_dtype(kind))
    x = norm(x)
    return x, linear(x)


def plain(norm, linear):
    """Return whether the two compute what their weights say, a gain without a bias in float32, and nobody listens."""
    kinds = type(norm) is nn.LayerNorm and type(linear) is nn.Linear
    hooks = any(layer._forward_hooks or layer._forward_pre_hooks for layer in (norm, linear))
    return kinds and not hooks and norm.bias is None and linear.weight.dtype == norm.weight.dtype == torch.float32


def folded(norm, linear, x, dtype):
    """Return what `norm_linear` does, with the gain as a part of the linear layer."""
    x = Normalize.apply(x, norm.eps, dtype)
    return x * norm.weight, F.linear(x, linear.weight * norm.weight, linear.bias)
