"""The position embeddings that come before the first layer: GPT-2's table, and the recurrence of Heinsen's models.

LearnedPosition
    What it computes  x_t = token_t + wpe[t],  t = 0, 1, ..., counted anew where everything is forgotten
    The state         t, the number of tokens since then
    A model has `n_positions` such vectors and reads no longer text. "Language Models are Unsupervised Multitask
    Learners" (Radford et al., 2019).

LogPosition
    What it computes  log x_t = logaddexp(log x_{t-1} + log_coeff_t, logit_t),  x_0 = 1, for each of the C features;
                      the output is tokens + log x.  [log_coeff, logit] = [logsigmoid(a), b],  [a, b] = tokens W + bias
    As a sum          log x_t = log sum_{s<=t} exp(logit_s + sum of log_coeff after s)
    The state         log x, [B, C], for the whole model
    From the source code of "Softmax Attention with Constant Cost per Token" (Heinsen, 2024). There, log x is computed
    from a cumulative sum over the whole text, which reaches -45,000 after 65,536 tokens, where float32 has steps of
    0.004. Here tokens are combined in blocks, and log x is carried from block to block.

Attention then does not rotate queries and keys. Exponential features are not relative under rotations.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .operator.backend import transforms_active
from .operator.forms import accumulation_dtype, without_autocast
from .state import State

# For each value of the setting positions, True if q and k are rotated. With none, order comes from gates and the
# convolution.
POSITIONS = {"rotary": True, "none": False, "learned": False}

# ---- a learned table


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
        index = torch.arange(x.shape[1], device=x.device)
        position = index if state is None else index + state.position.unsqueeze(1)  # [T] or [B, T]
        if resets is not None:
            start = torch.where(resets, index, -1).cummax(1).values  # the last reset up to each token, [B, T]
            position = torch.where(start >= 0, index - start, position)
        x = x + F.embedding(position, self.weight).to(x.dtype)
        return x, None if state is None else CountState(position[:, -1] + 1)


class TooLong(ValueError):
    """Raised for a text that is longer than the model's table of positions."""


def most_tokens(config):
    """Return the most tokens that a model of this GPTConfig can read, inf if there is no limit."""
    return config.n_positions if config.positions == "learned" else math.inf


def check_length(config, tokens, text="a text"):
    """Raise TooLong if a model of this GPTConfig cannot read so many tokens; `text` names what has them."""
    if tokens > most_tokens(config):
        raise TooLong(f"the model has {config.n_positions:,} learned positions, {text} has {tokens:,} tokens")


# ---- a recurrence


BLOCK = 16  # tokens that are combined one after the other


@dataclass
class PositionState(State):
    log_x: torch.Tensor  # [B, C] float32 (float64 for a float64 model)


class LogPosition(nn.Module):
    decodes_on_kernels = "heinsen"  # see attention/variant.py

    def __init__(self, n_embd):
        super().__init__()
        self.dense = nn.Linear(n_embd, 2 * n_embd)

    def empty_state(self, batch, device):
        """Return the PositionState before any token: x_0 = 1."""
        weight = self.dense.weight
        return PositionState(torch.zeros(batch, weight.shape[1], dtype=accumulation_dtype(weight), device=device))

    def forward(self, x, resets=None, state=None):
        """Return (x + log x_t [B, T, C] in x's dtype, the PositionState after these tokens, or None without `state`).

        x [B, T, C]; resets [B, T] bool or None: where it is true, x begins again at 1 before the token. log x is
        computed in float32 (float64 for float64 weights) whatever autocast says.
        """
        dtype = accumulation_dtype(self.dense.weight)
        with without_autocast(x.device):
            bias = self.dense.bias.to(dtype)
            log_coeff, logit = F.linear(x.to(dtype), self.dense.weight.to(dtype), bias).chunk(2, dim=-1)
            first = torch.zeros_like(logit[:, 0]) if state is None else state.log_x
            log_x = log_recurrence(F.logsigmoid(log_coeff), logit, first, resets)
        return x + log_x.to(x.dtype), None if state is None else PositionState(log_x[:, -1])


def log_recurrence(log_coeff, logit, first, resets=None):
    """Return log x [B, T, C] with log x_t = logaddexp(log x_{t-1} + log_coeff_t, logit_t).

    log_coeff, logit [B, T, C] float32 or float64; first [B, C] is log x_0. resets [B, T] bool or None: where it is
    true, log x is 0 before the token. Differentiable in all three, once.
    """
    if resets is not None:  # exp(-inf) = 0 of what was before, and the 1 that x begins with is part of the token
        resets = resets.unsqueeze(-1)
        logit = torch.where(resets, torch.logaddexp(log_coeff, logit), logit)
        log_coeff = log_coeff.masked_fill(resets, -torch.inf)
    # An operator's first call imports torch._dynamo, which takes 2 s that generation need not wait.
    # It has no rules for transforms: tangents would be zeros.
    needed = (torch.is_grad_enabled() or torch.compiler.is_compiling()) and not transforms_active()
    return (_log_recurrence if needed else _compute_log_x)(log_coeff, logit, first)


def _compute_log_x(a, b, first):
    return _scan(a, b, first, torch.add, lambda a, x, b: torch.logaddexp(x + a, b))


# Operators, so that torch.compile does not unroll their loops.


@torch.library.custom_op("sympow::log_recurrence", mutates_args=())
def _log_recurrence(a: torch.Tensor, b: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return _compute_log_x(a, b, first)


@_log_recurrence.register_fake
def _(a, b, first):
    return b.new_empty(b.shape)


@torch.library.custom_op("sympow::log_recurrence_backward", mutates_args=())
def _log_recurrence_backward(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: torch.Tensor, log_x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients to a, b and first.

    g_t = d_t + kept_{t+1} g_{t+1} is the gradient to log x_t through all later ones, where kept_t = exp(log x_{t-1} +
    a_t - log x_t). Then da_t = kept_t g_t, db_t = exp(b_t - log x_t) g_t and dfirst = da_1.
    """
    decay = torch.cat((first.unsqueeze(1), log_x[:, :-1]), dim=1).add_(a).sub_(log_x).exp_()
    later = F.pad(decay[:, 1:], (0, 0, 0, 1)).flip(1)  # from the last token to the first
    g = _scan(later, d.flip(1), torch.zeros_like(first), torch.mul, lambda a, x, b: torch.addcmul(b, a, x)).flip(1)
    da, db = decay.mul_(g), (b - log_x).exp_().mul_(g)
    return da, db.contiguous(), da[:, 0].clone()


@_log_recurrence_backward.register_fake
def _(d, a, b, first, log_x):
    return tuple(x.new_empty(x.shape) for x in (a, b, first))


_log_recurrence.register_autograd(
    lambda ctx, d: _log_recurrence_backward(d, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


def _scan(a, b, first, compose, apply):
    """Return y [B, T, C] with y_t = apply(a_t, y_{t-1}, b_t) and y_0 = first [B, C].

    apply(compose(a, a'), y, apply(a', b, b')) must be the same as applying (a, b) and then (a', b'). The tokens of a
    block are combined one after the other, all blocks at once; then the blocks, in the same way.
    """
    y, last, start = b.new_empty(b.shape), first, 0
    if a.shape[1] > BLOCK and not transforms_active():  # which do not take what is written over
        start = a.shape[1] // BLOCK * BLOCK
        a_blocks, b_blocks, inside = (x[:, :start].unflatten(1, (-1, BLOCK)) for x in (a, b, y))  # [B, n, BLOCK, C]
        total = torch.empty_like(a_blocks)
        total[:, :, 0], inside[:, :, 0] = a_blocks[:, :, 0], b_blocks[:, :, 0]
        for t in range(1, BLOCK):
            total[:, :, t] = compose(total[:, :, t - 1], a_blocks[:, :, t])
            inside[:, :, t] = apply(a_blocks[:, :, t], inside[:, :, t - 1], b_blocks[:, :, t])
        ends = _scan(total[:, :-1, -1], inside[:, :-1, -1], first, compose, apply)
        starts = torch.cat((first.unsqueeze(1), ends), dim=1)  # y before each block
        inside.copy_(apply(total, starts.unsqueeze(2), inside))
        last = y[:, start - 1]
    for t in range(start, a.shape[1]):
        last = y[:, t] = apply(a[:, t], last, b[:, t])
    return y
