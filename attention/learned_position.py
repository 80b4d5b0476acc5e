"""GPT-2's position embedding: a vector for each position of a text, learned and added to the token's.

What it computes      x_t = token_t + wpe[t],  t = 0, 1, ..., counted anew where everything is forgotten
The state             t, the number of tokens since then

Attention then does not rotate queries and keys. A model has `n_positions` such vectors and reads no longer text.

"Language Models are Unsupervised Multitask Learners" (Radford et al., 2019).
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .state import State


@dataclass
class CountState(State):
    fixed_size = True
    position: torch.Tensor  # [B] int64, of the next token: the tokens since everything was forgotten


class LearnedPosition(nn.Embedding):
    """The parameter is `weight` [n_positions, n_embd], as in GPT-2."""

    decodes_on_kernels = "learned"  # see attention/variant.py

    def empty_state(self, batch, device):
        """Return the CountState before any token."""
        return CountState(torch.zeros(batch, dtype=torch.int64, device=device))

    def forward(self, x, resets=None, state=None):
        """Return (x + the vectors of the tokens' positions, the CountState after these tokens, None without `state`).

        x [B, T, C]; resets [B, T] bool or None: a token where it is true has position 0. A position beyond the table is
        an index error: GPT refuses longer texts before.
        """
        at = torch.arange(x.shape[1], device=x.device)
        position = at if state is None else at + state.position.unsqueeze(1)  # [T] or [B, T]
        if resets is not None:
            start = torch.where(resets, at, -1).cummax(1).values  # the last reset up to each token, [B, T]
            position = torch.where(start >= 0, at - start, position)
        x = x + F.embedding(position, self.weight).to(x.dtype)
        return x, None if state is None else CountState(position[:, -1] + 1)


class TooLong(ValueError):
    """Raised for a text that is longer than the model's table of positions."""


def most_tokens(config):
    """Return the most tokens that a model of this GPTConfig can read, inf if there is no limit."""
    return config.n_positions if config.positions == "learned" else math.inf


def check_length(config, tokens, what="a text"):
    """Raise TooLong if a model of this GPTConfig cannot read so many tokens; `what` has them."""
    if tokens > most_tokens(config):
        raise TooLong(f"the model has {config.n_positions:,} learned positions, {what} has {tokens:,} tokens")
