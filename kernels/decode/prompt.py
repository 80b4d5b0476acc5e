"""The convolution and the output gate in one pass each, for prompts and evaluation: nothing is kept for a gradient.

    y_t = x_t + sum_{j<n} w_{n-1-j} x_{t-j}             convolve, as layers/convolution.py
    z = w y / sqrt(mean(y^2) + eps) silu(g)             gate, as layers/output_gate.py

A program has TOKENS tokens of CHANNELS numbers, or heads with ENTRIES numbers. Cost: in bfloat16 2 bytes a number read
and 2 written, for the gate 2 more read; a program's earlier tokens come from the cache. The limit is bandwidth.
"""

import triton
import triton.language as tl

from ..common import as_rows, device_guard, gate_heads

TOKENS, CHANNELS, ENTRIES = 16, 256, 2048


@triton.jit(do_not_specialize=["T", "rows"])
def convolution_kernel(
    X, RECENT, RESETS, WEIGHT, Y, stride, rows, T, C, N: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):
    """Write BT tokens and BC numbers of Y [rows, C]: sums over N tokens of X, with rows `stride` apart.

    Rows are the tokens of all sequences of T tokens. RECENT [sequences, N - 1, C] and RESETS [rows]: as in `convolve`.
    """
    row = tl.program_id(0) * BT + tl.arange(0, BT)[:, None]
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    t, b, row = row % T, (row // T).to(tl.int64), row.to(tl.int64)  # 32 bits divide faster
    seen, columns, total = row < rows, c < C, tl.zeros([BT, BC], tl.float32)
    for j in tl.range(N, loop_unroll_factor=4):  # all of 64 would take Triton 20 s
        x = tl.load(X + (row - j) * stride + c, seen & (t >= j) & columns, 0.0)
        if RECENT is not None:
            x += tl.load(RECENT + ((b + 1) * (N - 1) + t - j) * C + c, seen & (t < j) & columns, 0.0)
        w = tl.load(WEIGHT + (N - 1 - j) * C + c, columns, 0.0).to(tl.float32)
        total += x * (w + (j == 0))
        if RESETS is not None:  # a token sees nothing before the newest reset
            seen &= tl.load(RESETS + row - j, seen & (t >= j), 0) == 0
    tl.store(Y + row * C + c, total, (row < rows) & columns)


def convolve(x, weight, resets=None, recent=None):
    """Return y [B, T, H, D], contiguous, in the dtype of x [B, T, H, D], bfloat16 or float32.

    weight [n, H D]. recent [B, n - 1, H, D]: the tokens before x, zeros for None. resets [B, T] bool or None: a token
    where it is true sees nothing before it.
    """
    (n, C), T, y = weight.shape, x.shape[1], x.new_empty(x.shape)
    x = as_rows(x, C)
    recent, resets = (z if z is None else z.contiguous() for z in (recent, resets))
    with device_guard(x.device):
        convolution_kernel[(triton.cdiv(len(x), TOKENS), triton.cdiv(C, CHANNELS))](
            x, recent, resets, weight, y, x.stride(0), len(x), T, C, N=n, BT=TOKENS, BC=CHANNELS
        )
    return y


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
