"""Compute in float64 for tensors of any device: on the CPU for those of mps, which has no float64.

Positions, sums of gates and the sampling of tokens are too long for float32. They are small; what is large comes back
to the device in float32.
"""

import torch

WITHOUT_FLOAT64 = ("mps",)  # types of devices


def device_of_doubles(device):
    """Return the device on which float64 tensors for this one are kept, a torch.device."""
    device = torch.device(device)
    return torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device


def double(x):
    """Return x in float64, on its device or, if that has none, on the CPU. Differentiable."""
    return x.to(device_of_doubles(x.device)).to(torch.float64)  # one call would convert on the device


def differences(a, b, device, dtype):
    """Return a_i - b_j [..., n, m] in dtype on `device`, for float64 a [..., n] and b [..., m] from `double`.

    Without float64 on the device each becomes the sum of two float32 numbers there, of which the differences are about
    as exact, and only n + m numbers are copied.
    """
    if a.device.type == torch.device(device).type:
        return (a.unsqueeze(-1) - b.unsqueeze(-2)).to(dtype)
    high, low = [], []
    for x in (a.unsqueeze(-1), b.unsqueeze(-2)):
        high.append(x.float())
        low.append((x - high[-1].double()).float())
    (high_a, high_b), (low_a, low_b) = ([x.to(device) for x in pair] for pair in (high, low))
    return ((high_a - high_b) + (low_a - low_b)).to(dtype)
