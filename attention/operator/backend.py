"""The door to the GPU kernels: the one file of attention/ that knows where they are.

Nothing here imports Triton before a kernel is wanted, so that attention/ works on machines without it.
"""

from ...kernels import cost
from ...kernels.support import source_hash, why_not, width
from ...kernels.configs import cache_folder, table_name
from ...kernels.layout import make_sqrt_multiplicity, symmetric_power_dim, tails_of
from ...kernels.registry import register, registered
from ...kernels.transforms import transforms_active

__all__ = [
    "cache_folder",
    "cost",
    "make_sqrt_multiplicity",
    "register",
    "registered",
    "source_hash",
    "symmetric_power_dim",
    "table_name",
    "tails_of",
    "transforms_active",
    "why_not",
    "width",
]


# Functions, because these modules import Triton. torch.compile follows import statements, but not importlib.


def operators():
    """Return the module kernels.operators: power attention in its quadratic and its chunked form."""
    from ...kernels import operators

    return operators


def heinsen_operator():
    """Return the module kernels.heinsen_operator: Heinsen's log attention."""
    from ...kernels.heinsen import operator as heinsen_operator

    return heinsen_operator


def cross_entropy():
    """Return the module kernels.cross_entropy: losses and their gradients in one pass over the logits."""
    from ...kernels import cross_entropy

    return cross_entropy


def rotary():
    """Return the module kernels.decode.rotary: rotated queries and keys in one pass."""
    from ...kernels.decode import rotary

    return rotary


def convolution():
    """Return the module kernels.convolution: the convolution over tokens in one pass."""
    from ...kernels import convolution

    return convolution


def prompt():
    """Return the module kernels.decode.prompt: the gate on the output in one pass."""
    from ...kernels.decode import prompt

    return prompt


def precompile(launch):
    """Compile the kernels that launch() launches, in threads: see kernels/precompile.py."""
    from ...kernels import precompile

    precompile.precompile(launch)
