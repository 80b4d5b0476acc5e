"""A convolution over the last few tokens, for each number of q, k and v by itself, before attention.

    y_t = x_t + sum_{i=0}^{n-1} w_i x_{t-n+1+i}                  w has n weights for each number, w_{n-1} for x_t itself

By it a key holds what stands before its token. "Hungry Hungry Hippos" (Fu et al., 2023) has such a shift before linear
attention, "Gated Delta Networks" (Yang, Kautz, Hatamizadeh, 2024) a convolution of four tokens.
"""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F


class Convolution(nn.Module):
    def __init__(self, channels, n):
        """channels: how many numbers a token has; n: how many tokens each is a sum over, itself among them."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, n).uniform_(-(n**-0.5), n**-0.5))

    def forward(self, x, resets=None, recent=None):
        """Return (y [B, T, H, D], the last n - 1 inputs [B, n - 1, H, D]) for x [B, T, H, D].

        resets [B, T] bool or None: a token where it is true sees nothing before it. recent: the inputs before x, as
        they were returned, or None before the first token.
        """
        (B, T, H, D), n = x.shape, self.weight.shape[1]
        previous = x.new_zeros(B, n - 1, H, D) if recent is None else recent.to(x.dtype)
        inputs, weight = torch.cat((previous, x), dim=1), self.weight.to(x.dtype).view(H, D, n)
        documents = None if resets is None else F.pad(resets.cumsum(1), (n - 1, 0))  # [B, n - 1 + T]
        y = x
        for i in range(n):
            term = inputs[:, i : i + T] * weight[..., i]
            y = y + (term if resets is None else _where(documents[:, i : i + T] == documents[:, n - 1 :], term))
        recent = inputs[:, T:]  # copied below, so that the other inputs are freed
        return y, recent.clone() if resets is None else _where(documents[:, T:] == documents[:, -1:], recent)


def _where(visible, x):
    """Return x [B, T, H, D] where visible [B, T], and 0 elsewhere."""
    return torch.where(visible[..., None, None], x, 0)


def convolve_and_mix(conv, mix, x, qkv, resets, state):
    """Run `mix`, a Variant, on the convolution of qkv, and return (y, the state after).

    conv: a Convolution, or None to leave qkv as it is. x, qkv, resets, state: as for Variant.forward.
    """
    if conv is None:
        return mix(x, qkv, resets, state)
    qkv, inputs = conv(qkv, resets, state and state.conv_inputs)
    y, state = mix(x, qkv, resets, state)
    return y, state and replace(state, conv_inputs=inputs)
