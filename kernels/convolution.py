"""The convolution over tokens of layers/convolution.py, and its gradients, in one pass each.

    y_t = x_t + sum_{j<n} w_{n-1-j} x_{t-j}
    dx_t = dy_t + sum_{j<n} w_{n-1-j} dy_{t+j}        dw_{n-1-j} = sum_t dy_{t+j} x_t

    y = convolve(x, weight, resets, recent)           # not differentiable, for prompts and evaluation
    y = differentiable_convolve(x, weight, resets)    # a torch operator, once differentiable in x and weight

dx is the same sum as y, over later tokens. A program has BT tokens of BC numbers; the n - 1 tokens beside them come
from the cache. It sums dw over its tokens, and torch sums these parts, always in the same order. Cost: in bfloat16 2
bytes a number read and 2 written, and for dw 2 more read. The limit is bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import as_rows, device_guard, empty
from .transforms import differentiable, differentiable_once, empty_like

EARLIER, LATER = -1, 1  # STEP
TILES = {EARLIER: dict(BT=16, BC=128, num_warps=4), LATER: dict(BT=128, BC=32, num_warps=4)}


@triton.jit(do_not_specialize=["T", "rows"])
def convolution_kernel(
    X, RECENT, RESETS, WEIGHT, Y, INPUTS, SUMS, x_row, w_row, inputs_row, rows, T, C,
    N: tl.constexpr, STEP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write BT tokens and BC numbers of Y [rows, C]: sums over N tokens of X, to earlier ones or with STEP 1 to later.

    Rows are the tokens of all sequences of T tokens. In X they are x_row apart, in WEIGHT [N, C] w_row. RECENT
    [sequences, N - 1, C] and RESETS [rows]: as in `convolve`. With INPUTS, rows inputs_row apart, X is dy, and this
    program's part of dw goes to SUMS [programs, N, C] float32.
    """
    program = tl.program_id(0)
    row = program * BT + tl.arange(0, BT)[:, None]
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    t, b, row = row % T, (row // T).to(tl.int64), row.to(tl.int64)  # 32 bits divide faster
    seen, columns, total = row < rows, c < C, tl.zeros([BT, BC], tl.float32)
    if INPUTS is not None:
        inputs = tl.load(INPUTS + row * inputs_row + c, seen & columns, 0.0).to(tl.float32)
    for j in tl.range(N, loop_unroll_factor=4):  # all of 64 would take Triton 20 s
        s = t + STEP * j
        x = tl.load(X + (row + STEP * j) * x_row + c, seen & (s >= 0) & (s < T) & columns, 0.0).to(tl.float32)
        if RECENT is not None:
            x += tl.load(RECENT + ((b + 1) * (N - 1) + s) * C + c, seen & (s < 0) & columns, 0.0)
        w = tl.load(WEIGHT + (N - 1 - j) * w_row + c, columns, 0.0).to(tl.float32)
        total += x * (w + (j == 0))
        if INPUTS is not None:
            to = SUMS + ((program.to(tl.int64) + 1) * N - 1 - j) * C + c
            tl.store(to, tl.sum(x * inputs, 0, keep_dims=True), columns)
        if RESETS is not None:  # one hides what is before it: from itself on, to itself from the next token on
            s += STEP > 0
            seen &= tl.load(RESETS + row + (s - t), seen & (s >= 0) & (s < T), 0) == 0
    tl.store(Y + row * C + c, total, (row < rows) & columns)


def convolve(x, weight, resets=None, recent=None):
    """Return y [B, T, H, D], contiguous, in the dtype of x [B, T, H, D], bfloat16 or float32.

    weight [n, H D]. recent [B, n - 1, H, D]: the tokens before x, zeros for None. resets [B, T] bool or None: a token
    where it is true sees nothing before it.
    """
    return _launch(EARLIER, x, weight, resets, recent)[0]


def _launch(step, x, weight, resets, recent=None, inputs=None):
    """Return (y like x, the parts of dweight [programs, n, H D] float32 for `inputs`, or None without them)."""
    (n, C), T, y, tile = weight.shape, x.shape[1], empty_like(x), TILES[step]
    x, weight, inputs = (z if z is None else as_rows(z, C) for z in (x, weight, inputs))
    recent, resets = (z if z is None else z.contiguous() for z in (recent, resets))
    grid = triton.cdiv(len(x), tile["BT"]), triton.cdiv(C, tile["BC"])
    sums, inputs_row = (None, 0) if inputs is None else (empty(x, grid[0], n, C), inputs.stride(0))
    with device_guard(x.device):
        convolution_kernel[grid](
            x, recent, resets, weight, y, inputs, sums, x.stride(0), weight.stride(0), inputs_row, len(x), T, C,
            N=n, STEP=step, **tile,
        )  # fmt: skip
    return y, sums


# ---- the operator


@torch.library.custom_op("sympow::convolve", mutates_args=())
def _operator(x: Tensor, weight: Tensor, resets: Tensor | None) -> Tensor:
    return convolve(x, weight, resets)


@_operator.register_fake
def _(x, weight, resets):
    return empty_like(x)


@torch.library.custom_op("sympow::convolve_backward", mutates_args=())
def _backward_operator(dy: Tensor, x: Tensor | None, weight: Tensor, resets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return dx and dweight, which is empty without x."""
    dx, sums = _launch(LATER, dy, weight, resets, inputs=x)
    return dx, dy.new_empty(0) if sums is None else sums.sum(0).to(weight.dtype)


@_backward_operator.register_fake
def _(dy, x, weight, resets):
    return empty_like(dy), dy.new_empty(0) if x is None else empty_like(weight)


def _save(ctx, inputs, output):
    x, weight, resets = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, resets)


def _differentiate(ctx, dy):
    return *_backward(dy, *ctx.saved_tensors), None


_backward = differentiable_once(_backward_operator)
differentiable_convolve = differentiable(_operator, _save, _differentiate)
