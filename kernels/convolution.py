"""The convolution over tokens in one pass, of layers/convolution.py: nothing is kept for a gradient.

    y_t = x_t + sum_{j<n} w_{n-1-j} x_{t-j}

A program has TOKENS tokens of CHANNELS numbers. Cost: in bfloat16 2 bytes a number read and 2 written; a program's
earlier tokens come from the cache. The limit is bandwidth.
"""

import triton
import triton.language as tl

from .common import as_rows, device_guard

TOKENS, CHANNELS = 16, 256


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
