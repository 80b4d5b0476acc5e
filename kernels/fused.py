"""The operators of the fused kernels: the steps of training outside of attention that are one pass over memory."""

from .cross_entropy import cross_entropy_
from .rotary import rotate

__all__ = ["cross_entropy_", "rotate"]
