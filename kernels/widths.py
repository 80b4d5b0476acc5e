"""Bring rows to a width that the kernels have.

The kernels take rows of 16, 32, 64 or 128 entries, the quadratic form 256 too, but not in float32. Narrower rows of q,
k and v get zeros behind them: q . k stays the same, and y is cut.
"""

from operator import index

import torch
from torch.nn.functional import pad

from .support import width
from .layout import positions_of_narrower, symmetric_power_dim


def to_width(form, *tensors, fill=0.0):
    """Return the tensors [..., D] with `fill` behind their rows up to the kernels' width for the widest of them.

    A tensor of that width is returned as it is.
    """
    W = width(form, tensors[0].dtype, *(index(x.shape[-1]) for x in tensors))
    return tuple(x if x.shape[-1] == W else pad(x, (0, W - x.shape[-1]), value=fill) for x in tensors)


def widen_state(S, z, D, W, p):
    """Return S [..., Dphi(D), E] and z [..., Dphi(D)] as the state of rows of W entries, S [..., Dphi(W), W]."""
    S = S if S.shape[-1] == W else pad(S, (0, W - S.shape[-1]))
    if D == W:
        return S, z
    D, W = index(D), index(W)
    places, Dphi = positions_on_device(D, W, p, S.device), symmetric_power_dim(W, p)
    S = S.new_zeros(*S.shape[:-2], Dphi, W).index_copy(S.ndim - 2, places, S)
    return S, z.new_zeros(*z.shape[:-1], Dphi).index_copy(z.ndim - 1, places, z)


def narrow_state(S, z, D, E, p):
    """Return S [..., Dphi(W), W] and z [..., Dphi(W)] as the state of rows of D entries and values of E."""
    W, S = S.shape[-1], S[..., :E]
    if D == W:
        return S, z
    D, W = index(D), index(W)
    places = positions_on_device(D, W, p, S.device)
    return S.index_select(S.ndim - 2, places), z.index_select(z.ndim - 1, places)


def positions_on_device(D, W, p, device):
    """Return `layout.positions_of_narrower` as a tensor on a device; torch.compile takes it as a constant."""
    key = D, W, p, device
    if key not in _positions:
        _positions[key] = torch.as_tensor(positions_of_narrower(D, W, p), device=device)
    return _positions[key]


positions_on_device._dynamo_marked_constant = True
_positions = {}
