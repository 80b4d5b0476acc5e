"""The gate on the output of attention in one pass, for prompts and evaluation: nothing is kept for a gradient.

    z = w y / sqrt(mean(y^2) + eps) silu(g)             as layers/output_gate.py

A program has heads with ENTRIES numbers. Cost: in bfloat16 4 bytes a number read and 2 written. The limit is bandwidth.
"""

import triton
import triton.language as tl

from ..common import as_rows, device_guard, gate_heads

ENTRIES = 2048  # of a program


@triton.jit
def gate_kernel(Y, GATE, WEIGHT, Z, stride, rows, H, eps, D: tl.constexpr, W: tl.constexpr, BR: tl.constexpr):
    """Write BR rows of Z [rows, D] for the heads Y [rows, D], H of each token, and GATE, with tokens `stride` apart.

    W is D or the next power of two.
    """
    row, d = tl.program_id(0) * BR + tl.arange(0, BR)[:, None], tl.arange(0, W)[None, :]
    place, inside = row.to(tl.int64) * D + d, (row < rows) & (d < D)
    gate = GATE + (row // H).to(tl.int64) * stride + row % H * D + d
    y, g = tl.load(Y + place, inside, 0.0).to(tl.float32), tl.load(gate, inside, 0.0).to(tl.float32)
    tl.store(Z + place, gate_heads(y, g, tl.load(WEIGHT + d, d < D, 0.0), D, eps), inside)


def gate(y, gate, weight, eps):
    """Return z in y's dtype for y and gate [B, T, H, D], bfloat16 or float32, and weight [D]."""
    *_, H, D = y.shape
    y, gate = y.contiguous(), as_rows(gate, H * D)
    z, rows, W = y.new_empty(y.shape), len(gate) * H, triton.next_power_of_2(D)
    BR = max(1, ENTRIES // W)
    with device_guard(y.device):
        gate_kernel[(triton.cdiv(rows, BR),)](y, gate, weight, z, gate.stride(0), rows, H, eps, D=D, W=W, BR=BR)
    return z
