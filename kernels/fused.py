"""The operators of the fused kernels: the steps of training outside of attention that are one pass over memory."""

from .cross_entropy import cross_entropy_
from .layer_norm import layer_norm_backward
from .rotary import RotateHeads

__all__ = ["RotateHeads", "cross_entropy_", "layer_norm_backward"]
