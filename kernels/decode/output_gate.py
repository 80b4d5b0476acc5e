"""The gate on the newest token's output (layers/output_gate.py), in place.

    g = W norm(x) + b,    y = w y / sqrt(mean(y^2) + 1e-5) silu(g)      y and g: a head's D numbers

    programs  one for each head of each sequence, after linear.py's kernel for g
    reads     2 D numbers, and writes D

The limit is latency: w is loaded before the wait for the kernel before.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..configs import early_launch
from .linear import Linear, let_next_start, linear, wait_for_previous


class OutputGate(NamedTuple):
    """The weights of a layer's gate."""

    linear: Linear  # of g, with the norm before it
    weight: Any  # w [D] float32


@triton.jit
def output_gate_kernel(Y, GATE, WEIGHT, D, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """Gate one head of one sequence; BLOCK is a power of two, at least D."""
    let_next_start(PDL)
    d = tl.arange(0, BLOCK)
    inside, head = d < D, tl.program_id(0) * D + d
    weight = tl.load(WEIGHT + d, mask=inside, other=0.0)
    wait_for_previous(PDL)
    y, gate = tl.load(Y + head, mask=inside, other=0.0), tl.load(GATE + head, mask=inside, other=0.0)
    y *= weight / tl.sqrt(tl.sum(y * y, 0) / D + 1e-5)
    tl.store(Y + head, y * gate * tl.sigmoid(gate), mask=inside)


def gate_output(layer, y, gate, x):
    """Overwrite the output y [B, H D] of attention with its gated one, and gate [B, H D] with g; both are float32.

    layer: an OutputGate; x [B, n_embd] float32: the input of the layer before its norm.
    """
    linear(layer.linear, gate, x)
    D = len(layer.weight)
    grid = (y.numel() // D,)
    output_gate_kernel[grid](y, gate, layer.weight, D, BLOCK=triton.next_power_of_2(D), **early_launch(y))
