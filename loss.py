"""The head and its cross entropy, for a vocabulary so large that the logits of all tokens would not fit into memory."""

import torch
from torch.nn import functional as F

from attention.backend import cross_entropy_
from attention.dispatch import uses_fused

LOSS_TOKENS = 16384  # logits of at most this many tokens exist at any time: 3.3 GB of float32 for GPT-2


def compute_losses(logits, targets, vocab_size, differentiate):
    """Return the losses [N] of logits [N, V] and their gradient [N, V] in the logits' dtype, or None if it is not asked
    for; targets [N] of -1 have neither. The logits may be overwritten."""
    if uses_fused("cross_entropy", logits):
        losses = cross_entropy_(logits, targets, vocab_size, differentiate)
        return losses, logits if differentiate else None
    column, dtype = torch.arange(logits.shape[1], device=logits.device), logits.dtype
    counts, target = (targets != -1).unsqueeze(1), targets.clamp(min=0).unsqueeze(1)
    logits = logits.to(torch.promote_types(dtype, torch.float32)).where(column < vocab_size, float("-inf"))
    log_sum = logits.logsumexp(1, keepdim=True)
    losses = (log_sum - logits.gather(1, target)) * counts
    if not differentiate:
        return losses, None
    return losses, (((logits - log_sum).exp() - (column == target).to(logits.dtype)) * counts).to(dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """Compute the head and its loss piece by piece.

    The forward pass computes the gradients too, so that logits are neither saved nor computed twice.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, differentiate):
        """Return the mean loss of x [N, C] and targets [N], -1 left out, for the first vocab_size rows of weight."""
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else weight.dtype
        w, total, dxs, dw = weight.to(dtype), 0, [], torch.zeros_like(weight)
        for rows, target in zip(x.split(LOSS_TOKENS), targets.split(LOSS_TOKENS)):
            rows = rows.to(dtype)
            losses, d = compute_losses(F.linear(rows, w), target, vocab_size, differentiate)
            total = total + losses.sum()
            if differentiate:
                dxs.append(d @ w)
                dw += d.t() @ rows
        count = (targets != -1).sum().clamp(min=1)
        if differentiate:
            ctx.save_for_backward(torch.cat(dxs).to(x.dtype), dw, count)
        return total / count

    @staticmethod
    def backward(ctx, grad):
        dx, dw, count = ctx.saved_tensors
        grad = grad / count
        return dx * grad, dw * grad, None, None, None
