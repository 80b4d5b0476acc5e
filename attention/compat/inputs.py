"""Random inputs of both libraries' entry points."""

import torch
from torch.nn.functional import logsigmoid

from ..operator import forms


class RandomInputs:
    """Makes random tensors of b sequences and h heads of d entries; torch's own generator is left as it is.

    device "cuda" is the CPU on a machine without a GPU.
    """

    def __init__(self, b, h, d, dtype, device, seed):
        device = torch.device(device)
        if device.type == "cuda" and not torch.cuda.is_available():
            device = torch.device("cpu")
        self.sizes, self.dtype, self.device = (b, h, d), dtype, device
        self.generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def tensors(self, tq, tk, qhead_ratio, gate_mean, state_deg, requires_grad):
        """Return the tensors of an entry point by name; with requires_grad they require gradients.

        There are no keys if tk is 0. Gates are sigmoids of normal numbers with the mean gate_mean; without it there are
        none. The state of power state_deg holds 8 random tokens; without a power there is none.
        """
        b, h, _ = self.sizes
        Q, K, V, log_G, S, s = self.rows(tq, qhead_ratio), None, None, None, None, None
        if tk:
            K, V = self.rows(tk), self.rows(tk)
        if tk and gate_mean is not None:
            log_G = logsigmoid(gate_mean + self.normal(b, tk, h, dtype=torch.float32))
        if state_deg:
            S, s = forms.flush(self.rows(8), self.rows(8), None, None, p=state_deg)
        tensors = dict(Q=Q, K=K, V=V, log_G=log_G, initial_state=S, sum_of_keys=s)
        return {name: x if x is None else x.detach().requires_grad_(requires_grad) for name, x in tensors.items()}

    def rows(self, t, ratio=1):
        """Return [b, t, h * ratio, d], the queries, keys or values of t tokens."""
        b, h, d = self.sizes
        return self.normal(b, t, h * ratio, d, dtype=self.dtype) / d**0.5

    def normal(self, *shape, dtype):
        return torch.randn(shape, dtype=dtype, device=self.device, generator=self.generator)
