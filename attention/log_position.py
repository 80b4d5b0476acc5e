"""The position embedding of Heinsen's models: a running sum of exponentials that forgets, added to the tokens.

What it computes      log x_t = logaddexp(log x_{t-1} + log_coeff_t, logit_t),  x_0 = 1, for each of the C features;
                      the output is tokens + log x.  [log_coeff, logit] = [logsigmoid(a), b],  [a, b] = tokens W + bias
As a sum              log x_t = log sum_{s<=t} exp(logit_s + sum of log_coeff after s)
The state             log x, [B, C], for the whole model: it is applied once, before the first layer

Exponential features are not relative under rotations, so this takes the place of rotary positions. From the source code
of "Softmax Attention with Constant Cost per Token" (Heinsen, 2024). There, log x is computed from a cumulative sum over
the whole text, which reaches -45,000 after 65,536 tokens, where float32 has steps of 0.004. Here tokens are combined in
blocks, and log x is carried from block to block.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .operator.forms import without_autocast
from .state import State

BLOCK = 16  # tokens that are combined one after the other
ENTRIES_AT_ONCE = 2**25  # sequences are computed in groups of so many numbers, 128 MB in float32


@dataclass
class PositionState(State):
    log_x: torch.Tensor  # [B, C] float32 (float64 for a float64 model)


class LogPosition(nn.Module):
    decodes_on_kernels = "heinsen"  # see attention/variant.py

    def __init__(self, n_embd):
        super().__init__()
        self.dense = nn.Linear(n_embd, 2 * n_embd, bias=True)

    def empty_state(self, batch, device):
        """Return the PositionState before any token: x_0 = 1."""
        weight = self.dense.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return PositionState(torch.zeros(batch, weight.shape[1], dtype=dtype, device=device))

    def forward(self, x, resets=None, state=None):
        """Return (x + log x_t [B, T, C] in x's dtype, the PositionState after these tokens, or None without `state`).

        x [B, T, C]; resets [B, T] bool or None: where it is true, x begins again at 1 before the token. log x is
        computed in float32 (float64 for float64 weights) whatever autocast says.
        """
        dtype = torch.promote_types(self.dense.weight.dtype, torch.float32)
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
    needed = torch.is_grad_enabled() or torch.compiler.is_compiling()
    return (_log_recurrence if needed else _compute_log_x)(log_coeff, logit, first)


# Operators, so that torch.compile does not unroll their loops.


@torch.library.custom_op("sympow::log_recurrence", mutates_args=())
def _log_recurrence(a: torch.Tensor, b: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return _compute_log_x(a, b, first)


def _compute_log_x(a, b, first):
    log_x = torch.empty_like(b, memory_format=torch.contiguous_format)
    apply = lambda a, x, b: torch.logaddexp(x + a, b)
    for out, *args in _groups(log_x, a, b, first):
        _scan(out, *args, torch.add, apply)
    return log_x


@_log_recurrence.register_fake
def _(a, b, first):
    return torch.empty_like(b, memory_format=torch.contiguous_format)


@torch.library.custom_op("sympow::log_recurrence_backward", mutates_args=())
def _log_recurrence_backward(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: torch.Tensor, log_x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With g the gradient to log x through all later ones and kept_t = exp(log x_{t-1} + a_t - log x_t), g_t = d_t +
    kept_{t+1} g_{t+1}, da_t = kept_t g_t and db_t = exp(b_t - log x_t) g_t."""
    da, db, dfirst = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (a, b, first))
    apply = lambda a, x, b: torch.addcmul(b, a, x)
    for da_, db_, dfirst_, d_, a_, b_, first_, log_x_ in _groups(da, db, dfirst, d, a, b, first, log_x):
        kept = torch.cat((first_.unsqueeze(1), log_x_[:, :-1]), dim=1).add_(a_).sub_(log_x_).exp_()
        # from the last token to the first
        later = F.pad(kept[:, 1:], (0, 0, 0, 1)).flip(1)
        _scan(da_, later, d_.flip(1), torch.zeros_like(first_), torch.mul, apply)
        g = da_.flip(1)
        torch.mul(kept, g, out=da_)
        torch.mul(torch.sub(b_, log_x_).exp_(), g, out=db_)
        dfirst_.copy_(da_[:, 0])
    return da, db, dfirst


@_log_recurrence_backward.register_fake
def _(d, a, b, first, log_x):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (a, b, first))


_log_recurrence.register_autograd(
    lambda ctx, d: _log_recurrence_backward(d, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


def _groups(*tensors):
    """Split tensors [B, ...] into groups of sequences; the first has T * C numbers a sequence."""
    size = max(1, ENTRIES_AT_ONCE // max(1, tensors[0][:1].numel()))
    return zip(*(x.split(size) for x in tensors))


def _scan(out, a, b, first, compose, apply):
    """Write y_t = apply(a_t, y_{t-1}, b_t), y_0 = first [B, C], to out [B, T, C]; apply(compose(a, a'), y, apply(a', b,
    b')) must be applying (a, b) and then (a', b').

    The tokens of a block are combined one after the other, all blocks at once; then the blocks, in the same way.
    """
    T, y, start = a.shape[1], first, 0
    if T > BLOCK:
        start = T // BLOCK * BLOCK
        a_, b_, inside = (x[:, :start].unflatten(1, (-1, BLOCK)) for x in (a, b, out))  # [B, n, BLOCK, C]
        total = torch.empty_like(a_)
        total[:, :, 0], inside[:, :, 0] = a_[:, :, 0], b_[:, :, 0]
        for t in range(1, BLOCK):
            total[:, :, t] = compose(total[:, :, t - 1], a_[:, :, t])
            inside[:, :, t] = apply(a_[:, :, t], inside[:, :, t - 1], b_[:, :, t])
        before = torch.empty_like(total[:, :, 0])  # y before each block
        before[:, 0] = first
        _scan(before[:, 1:], total[:, :-1, -1], inside[:, :-1, -1], first, compose, apply)
        inside.copy_(apply(total, before.unsqueeze(2), inside))
        y = out[:, start - 1]
    for t in range(start, T):
        y = out[:, t] = apply(a[:, t], y, b[:, t])
