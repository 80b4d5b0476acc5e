"""The operators of the fused kernels: steps of training that are one pass over memory."""

from .cross_entropy import cross_entropy_
from .rotary import RotateHeads

__all__ = ["RotateHeads", "cross_entropy_"]
