"""The operators of the fused kernels: steps of training that are one pass over memory, or part of attention's."""

from .cross_entropy import cross_entropy_
from .rotary import RotateHeads
from .rotated import rotated_attention

__all__ = ["RotateHeads", "cross_entropy_", "rotated_attention"]
