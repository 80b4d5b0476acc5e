"""LayerNorm whose backward pass is one kernel: what the kernel computes from, and what autograd does with it.

The forward pass is PyTorch's, so that torch.compile makes one kernel of it and the sum before it.
"""

import torch

from .backend import layer_norm_backward
from .forms import without_autocast


class FusedLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, dtype):
        """Return layer_norm(x) [..., C] in `dtype`, computed in float32; bias [C] may be None."""
        with without_autocast(x.device):
            wide = weight.float(), None if bias is None else bias.float()
            y, mean, rstd = torch.native_layer_norm(x.float(), x.shape[-1:], *wide, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias = bias is not None
        return y.to(dtype)

    @staticmethod
    def backward(ctx, dy):
        dx, dweight, dbias = layer_norm_backward(dy, *ctx.saved_tensors, ctx.bias)
        return dx, dweight, dbias if ctx.bias else None, None, None
