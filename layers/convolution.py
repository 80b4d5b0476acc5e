"""A convolution over the last few tokens, for each number of q, k and v by itself, before attention.

    y_t = x_t + sum_{i=0}^{n-1} w_i x_{t-n+1+i}      w_i has a weight for each number, w_{n-1} for x_t itself

By it a key holds what stands before its token. "Hungry Hungry Hippos" (Fu et al., 2023) has such a shift before linear
attention, "Gated Delta Networks" (Yang, Kautz, Hatamizadeh, 2024) a convolution of four tokens.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..attention.operator import backend
from ..attention.operator.dispatch import prompt_kernels


class Convolution(nn.Module):
    def __init__(self, channels, n):
        """channels: how many numbers a token has; n: how many tokens each is a sum over, itself among them."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, channels).uniform_(-(n**-0.5), n**-0.5))

    def forward(self, x, resets=None, recent=None):
        """Return y for x, both [B, T, H, D].

        resets [B, T] bool or None: a token where it is true sees nothing before it. recent [B, n - 1, H, D]: the inputs
        before x, as `last_inputs` returned them, or None before the first token.
        """
        if prompt_kernels(x):
            return backend.convolution().convolve(x, self.weight, resets, recent)
        documents = self._documents(resets)
        if recent is None and not backend.transforms_active():
            return ShiftedSum.apply(x, self.weight, documents)
        return _sum(self._prepend(recent, x), self.weight, documents)

    def last_inputs(self, x, resets, recent):
        """Return the last n - 1 inputs [B, n - 1, H, D] once x is read, 0 where a later token does not see them."""
        begin = 1 - len(self.weight)
        last = self._prepend(recent, x[:, begin:])[:, begin:]
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


class ShiftedSum(torch.autograd.Function):
    """`_sum` of x [B, T, H, D] with zeros before it. Its derivative is written out, so that torch.compile reads x and
    dy twice: both passes take 0.77 ms for 65,536 tokens of 2,304 numbers in bfloat16 on an H200, and with the
    derivative that PyTorch finds 1.09 ms.
    """

    @staticmethod
    def forward(x, weight, documents):
        return _sum(F.pad(x, (0, 0, 0, 0, len(weight) - 1, 0)), weight, documents)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, documents = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, documents)

    @staticmethod
    def backward(ctx, dy):
        x, weight, documents = ctx.saved_tensors
        (_, T, H, D), n = dy.shape, len(weight)
        w, dx, dweight = weight.to(dy.dtype).view(n, H, D), dy, []
        later = F.pad(dy, (0, 0, 0, 0, 0, n - 1))
        if documents is not None:
            documents = documents[:, n - 1 :]
            later_documents = F.pad(documents, (0, n - 1), value=-1)
        for i in range(n):
            piece = slice(n - 1 - i, n - 1 - i + T)  # the outputs to which the inputs contribute by w_i
            term = later[:, piece]
            if documents is not None:
                term = _mask(term, later_documents[:, piece] == documents)
            dx = dx + term * w[i]
            if x is not None:
                dweight.append((term * x).sum((0, 1), dtype=weight.dtype))
        return dx, torch.stack(dweight).view(weight.shape) if dweight else None, None


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
