"""Random inputs of both libraries' entry points."""

import torch
from torch.nn.functional import logsigmoid

from ..operator import forms


class RandomInputs:
    """Makes random tensors of b sequences and h heads of d entries; torch's own generator is left as it is.

    device "cuda" is the CPU on a machine without a GPU.
    """

    def __init__(self, b, h, d, dtype, device, seed):
        self.sizes, self.dtype, self.device = (b, h, d), dtype, place(device)
        self.generator = None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(seed)

    def rows(self, t, ratio=1):
        """Return [b, t, h * ratio, d], the queries, keys or values of t tokens."""
        b, h, d = self.sizes
        return self._normal(b, t, h * ratio, d, dtype=self.dtype) / d**0.5

    def gates(self, t, mean):
        """Return log_G [b, t, h] float32 of gates that are sigmoids of normal numbers with this mean."""
        b, h, _ = self.sizes
        return logsigmoid(mean + self._normal(b, t, h, dtype=torch.float32))

    def state(self, deg):
        """Return (S [b, h, D, d], s [b, h, D]), the state after 8 random tokens."""
        return forms.flush(self.rows(8), self.rows(8), None, None, p=deg)

    def _normal(self, *shape, dtype):
        return torch.randn(shape, dtype=dtype, device=self.device, generator=self.generator)


def place(device):
    """Return a torch.device, the CPU in place of "cuda" on a machine without a GPU."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device


def as_leaves(requires_grad, **tensors):
    """Return the dictionary of tensors and None; with requires_grad the tensors require gradients."""
    return {name: x if x is None else x.detach().requires_grad_(requires_grad) for name, x in tensors.items()}
