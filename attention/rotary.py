"""Rotary position encoding, with fixed or learned speed.

Pair i = 1..d/2 of a query or key, the entries (2i-1, 2i), turns by u * theta_i with theta_i = 2 pi / N^(2(i-1)/d).
u counts tokens: u_t = t for the fixed rotation, u_t = sum of beta up to t for the learned one (conformal paper,
Kumar et al. 2025, sections 2.2 and 3.2). N is `rope_base`, the longest document of the data set. So a token turns the
first pair by a whole turn, `rope_unit`; in other models, such as Llama, by a radian: theta_i = 1 / N^(2(i-1)/d).

Angles are formed as turns: u in float64, times N^(-2(i-1)/d). Only the fractional part of a turn becomes float32.
An angle accumulated in float32 is off by 2.8 rad after 64k tokens; this one is off by 4e-7.
"""

import math

import torch

from .operator import backend
from .operator.dispatch import why_not
from .operator.forms import accumulation_dtype


TURNS = {"turn": 1.0, "radian": 1 / (2 * math.pi)}  # of the first pair by a token, for each value of rope_unit


def rotation_rates(d, base, device=None):
    """Return the turns per unit of u for each pair, [d/2] float64: theta_i / (2 pi) = base^(-2(i-1)/d)."""
    return float(base) ** (-torch.arange(0, d, 2, dtype=torch.float64, device=device) / d)


def rotation(u, d, base, dtype):
    """Return the factors of x and of each entry's partner in its pair, for u [..., T] float64.

    Both are [..., T, d] in dtype: (cos, cos) and (-sin, sin) of each pair's angle.
    """
    turns = u.unsqueeze(-1) * rotation_rates(d, base, u.device)  # [..., T, d / 2]
    angle = (2 * math.pi) * turns.frac().to(dtype)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((cos, cos), dim=-1).flatten(-2), torch.stack((-sin, sin), dim=-1).flatten(-2)


# torch.compile would write these float64 powers into every kernel that turns a query or key. As an operator they are
# computed once for all layers.
@torch.library.custom_op("sympow::rotation", mutates_args=())
def _rotation(u: torch.Tensor, d: int, base: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return rotation(u, d, base, dtype)


@_rotation.register_fake
def _(u, d, base, dtype):
    return tuple(u.new_empty(*u.shape, d, dtype=dtype) for _ in range(2))


def rotary(x, u, base):
    """Return R(u theta) x: x rotated by the positions u.

    x [B, T, H, D], D even; u [B, T] or [T] float64, on the CPU where x's device has none. Returns [B, T, H, D] in x's
    dtype (computed in float32, or in float64 when x is), differentiable in x and u.
    """
    return rotate(x, *rotation_of(x, u, base))


def rotation_of(x, u, base, unit="turn"):
    """Return the factors (cos, sin) by which `rotate` turns x, and others of its D, dtype and device, by u.

    unit: how far the first pair turns while u grows by 1, a name in TURNS.
    """
    if unit != "turn":
        u = u * TURNS[unit]
    compute = _rotation if torch.compiler.is_compiling() and not u.requires_grad else rotation
    return tuple(r.to(x.device) for r in compute(u, x.shape[-1], float(base), accumulation_dtype(x)))


def rotate(x, cos, sin):
    """Return x [B, T, H, D] turned by the factors that `rotation_of` computed, in x's dtype."""
    # torch.compile makes one pass of it
    if torch.compiler.is_compiling() or cos.requires_grad or why_not("rotary", x.device, x.dtype):
        return turn(x.to(accumulation_dtype(x)), cos, sin).to(x.dtype)
    return backend.rotary().Rotation.apply(x, cos, sin)


def turn(x, cos, sin):
    """Return what `rotate` does, in plain PyTorch and in the dtype of its arguments."""
    return x * cos.unsqueeze(-2) + x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin.unsqueeze(-2)
