"""The activations of the MLP, by their names in ACTIVATIONS: one of your own is a line there, and its name stands in
GATED if it makes one number of two. The decoder's kernels know GELU and SwiGLU; with another activation a GPU generates
with GPT.step.

Compiled for a GPU, the exact GELU takes fewer instructions than erf does.
"""

import math
from functools import partial

import torch
from torch.nn import functional as F

# For z >= 0 Phi(-z) = phi(z) t P(t), t = 1 / (1 + RATE z), for the normal distribution. P is fitted so that the largest
# relative error up to z = 14 is smallest: it is 6e-7, where rounding to bfloat16 has 2e-3.
RATE = 0.265
P = (
    0.2646995280691198,
    0.2703067671814464,
    0.20791604175325099,
    0.35717840783815474,
    -0.16634797088072936,
    0.4894776413974523,
    -0.16991705835424148,
)


class Gelu(torch.autograd.Function):
    """Compute x Phi(x) from one exp2 and one rsqrt, which are one instruction each where 1 / x and erf are not."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        z = x.float()
        return (z.relu() - z.abs() * _tail(z)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        z = x.float()
        tail, density = _tail(z)
        return (dy.float() * (tail.where(z < 0, 1 - tail) + z * density)).to(x.dtype)


def _tail(z):
    """Return Phi(-|z|) and phi(z) of z, float32."""
    density = (z * z * (-0.5 / math.log(2))).exp2() * (1 / math.sqrt(2 * math.pi))
    root = (1 + RATE * z.abs()).rsqrt()
    t = root * root
    p = P[-1]
    for coefficient in P[-2::-1]:
        p = p * t + coefficient
    return p * t * density, density


def gelu(x):
    """Return F.gelu(x); compiled for a GPU, bfloat16 and float16 in a form that memory limits.

    Uncompiled, each step of that form would be a pass over memory.
    """
    short = x.dtype in (torch.bfloat16, torch.float16)
    if short and x.is_cuda and torch.compiler.is_compiling():
        return Gelu.apply(x)
    return F.gelu(x)


def swiglu(x):
    """Return silu(gate) * up [..., W] for x [..., 2 W], gate and up side by side."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


ACTIVATIONS = {"gelu": gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "swiglu": swiglu}  # gelu_tanh is GPT-2's
GATED = {"swiglu"}


def mlp_widths(config):
    """Return how many numbers the MLP of a GPTConfig has before its activation, and after it."""
    width = config.mlp_width or 4 * config.n_embd
    return width * (1 + (config.activation in GATED)), width
