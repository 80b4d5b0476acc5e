"""The head and its cross entropy, for a vocabulary so large that the logits of all tokens would not fit into memory."""

import torch
from torch.nn import functional as F

LOSS_TOKENS = 16384  # logits of at most this many tokens exist at any time: 3.3 GB of float32 for GPT-2


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
        column = torch.arange(len(weight), device=x.device)
        for rows, target in zip(x.split(LOSS_TOKENS), targets.split(LOSS_TOKENS)):
            rows, counts = rows.to(dtype), (target != -1).unsqueeze(1)
            target = target.clamp(min=0).unsqueeze(1)
            logits = F.linear(rows, w).to(torch.promote_types(dtype, torch.float32))
            logits = logits.where(column < vocab_size, float("-inf"))
            log_sum = logits.logsumexp(1, keepdim=True)
            total = total + ((log_sum - logits.gather(1, target)) * counts).sum()
            if differentiate:
                d = (((logits - log_sum).exp() - (column == target).to(logits.dtype)) * counts).to(dtype)
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
