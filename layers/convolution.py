"""A convolution over the last few tokens, for each number of q, k and v by itself, before attention.

    y_t = x_t + sum_{i=0}^{n-1} w_i x_{t-n+1+i}      w_i has a weight for each number, w_{n-1} for x_t itself

By it a key holds what stands before its token. "Hungry Hungry Hippos" (Fu et al., 2023) has such a shift before linear
attention, "Gated Delta Networks" (Yang, Kautz, Hatamizadeh, 2024) a convolution of four tokens.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..attention.operator.dispatch import convolution_kernels, is_recorded


class Convolution(nn.Module):
    def __init__(self, heads, head_dim, n):
        """heads: how many heads q, k and v have, and behind them what is not convolved; head_dim: numbers of a head;
        n: how many tokens each number is a sum over, itself among them."""
        super().__init__()
        self.heads, self.convolved = heads, sum(heads[:3])
        self.weight = nn.Parameter(torch.empty(n, self.convolved * head_dim).uniform_(-(n**-0.5), n**-0.5))

    def forward(self, x, resets=None, recent=None):
        """Return q, k and v of x [B, T, sum(heads), D], convolved, and behind them what is not convolved, as views.

        resets [B, T] bool or None: a token where it is true sees nothing before it. recent [B, n - 1, H + 2 Hkv, D]:
        the inputs before x, as `last_inputs` returned them, or None before the first token.
        """
        kernels, recorded = convolution_kernels(x), is_recorded()
        parts, sizes = x.split(self.heads, dim=2), self.heads[:3]
        if kernels and recorded and recent is None:  # each for itself: autograd then joins the gradients of x only once
            weights = self.weight.split([H * x.shape[3] for H in sizes], dim=1)
            return *[kernels.differentiable_convolve(*part, resets) for part in zip(parts, weights)], *parts[3:]
        x = x[:, :, : self.convolved]
        if kernels and not recorded:
            y = kernels.convolve(x, self.weight, resets, recent)
        else:
            y = _sum(self._prepend(recent, x), self.weight, self._documents(resets))
        return *y.split(sizes, dim=2), *parts[3:]

    def last_inputs(self, x, resets, recent):
        """Return the last n - 1 inputs [B, n - 1, H + 2 Hkv, D] after x, 0 where later tokens do not see them."""
        begin = 1 - len(self.weight)
        last = self._prepend(recent, x[:, begin:, : self.convolved])[:, begin:]
        if resets is None:
            return last.clone()
        documents = self._documents(resets[:, begin:])
        return _mask(last, documents[:, begin:] == documents[:, -1:])

    def _prepend(self, recent, x):
        if recent is None:
            return F.pad(x, (0, 0, 0, 0, len(self.weight) - 1, 0))
        return torch.cat((recent.to(x.dtype), x), dim=1)

    def _documents(self, resets):
        """Return the number of the document of each token and of the n - 1 before them, [B, n - 1 + T], or None."""
        return None if resets is None else F.pad(resets, (len(self.weight) - 1, 0)).cumsum(1)


def _sum(inputs, weight, documents):
    """Return the sum above, [B, T, H, D], for inputs and documents of n - 1 more tokens, before the others."""
    n = len(weight)
    y = inputs[:, n - 1 :]
    _, T, H, D = y.shape
    w = weight.to(y.dtype).view(n, H, D)
    for i in range(n):
        term = inputs[:, i : i + T] * w[i]
        y = y + (term if documents is None else _mask(term, documents[:, i : i + T] == documents[:, n - 1 :]))
    return y


def _mask(x, visible):
    """Return x [B, T, H, D] where visible [B, T], and 0 elsewhere."""
    return torch.where(visible[..., None, None], x, 0)
