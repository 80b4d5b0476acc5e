"""A gate on the output of attention: every head's output is normalised, and multiplied by a gate of its token.

    z = w y / sqrt(mean(y^2) + 1e-5) silu(g)      y, g: the D numbers of a head; w: D weights, the same for all heads

g is a product of the layer's input, as q, k and v are: c_attn has H more heads. "Retentive Network" (Sun et al., 2023)
has such a gate, "Gated Delta Networks" (Yang, Kautz, Hatamizadeh, 2024) this one.
"""

from torch.nn import functional as F

from ..attention.operator.dispatch import prompt_kernels
from .norm import HeadNorm


class OutputGate(HeadNorm):
    def forward(self, y, gate):
        """Return z in y's dtype for y and gate [B, T, H, D]; it is computed in float32, or y's dtype if wider."""
        if kernels := prompt_kernels(y):
            return kernels.gate(y, gate, self.weight, self.eps)
        normalised = super().forward(y)
        return (normalised * F.silu(gate.to(normalised.dtype))).to(y.dtype)
