"""LayerNorm before a layer whose first step is a linear one."""

import torch
from torch import nn

from .dispatch import uses_fused
from .fused import FusedLayerNorm


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm; on the fused kernel its output has autocast's dtype, to which a linear layer rounds it anyway.

    torch's own is float32 under autocast. (Where it is read as float32, as the residual stream is, use torch's own.)
    """

    def forward(self, x):
        """Return [..., C] for x [..., C]."""
        if not uses_fused("layer_norm", x):
            return super().forward(x)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return FusedLayerNorm.apply(x, self.weight, self.bias, self.eps, dtype)
