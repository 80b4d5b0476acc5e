"""Rotary position encoding, with fixed or learned speed.

Pair i = 1..d/2 of a query or key, the entries (2i-1, 2i), turns by u * theta_i with theta_i = 2 pi / N^(2(i-1)/d).
u counts tokens: u_t = t for the fixed rotation, u_t = sum of beta up to t for the learned one (conformal paper,
Kumar et al. 2025, sections 2.2 and 3.2). N is `rope_base`, the longest document of the data set.

Angles are formed as turns: u in float64, times N^(-2(i-1)/d), of which only the fractional part becomes float32.
An angle accumulated in float32 is off by 2.8 rad after 64k tokens; this one is off by 4e-7.
"""

import math

import torch


def rotation_rates(d, base, device=None):
    """Turns per unit of u for each pair, [d/2] float64: theta_i / (2 pi) = base^(-2(i-1)/d)."""
    return float(base) ** (-torch.arange(0, d, 2, dtype=torch.float64, device=device) / d)


def rotary(x, u, base):
    """R(u theta) x.

    x [B, T, H, D], D even; u [B, T] or [T] float64. Returns [B, T, H, D] in x's dtype (computed in float32, or in
    float64 when x is), differentiable in x and u.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    turns = u.unsqueeze(-1) * rotation_rates(x.shape[-1], base, x.device)  # [B, T, D/2]
    angle = (2 * math.pi) * (turns - turns.detach().floor()).to(dtype)
    cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)  # [B, T, 1, D/2]
    a, b = x.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)
