"""The head and its losses, for a vocabulary so large that the logits of all tokens would not fit into memory."""

from itertools import repeat

import torch
from torch.nn import functional as F

from ..attention.operator.backend import cross_entropy, transforms_active
from ..attention.operator.dispatch import why_not

LOSS_TOKENS = 16384  # logits of at most this many tokens exist at any time: 3.3 GB of float32 for GPT-2
DISTILL_TOKENS = 4096  # with a teacher, because its logits exist too


def compute_losses(logits, targets, vocab_size, differentiate):
    """Return (losses [N], d [N, V], scales [N]) of logits [N, V].

    The gradient is d scales[:, None], or d if scales is None. Without `differentiate` both are None. Targets [N] of -1
    have zeros. d has the logits' dtype; the logits may be overwritten.
    """
    if not why_not("cross_entropy", logits.device, logits.dtype):
        losses, scales = cross_entropy().cross_entropy_(logits, targets, vocab_size, differentiate)
        return (losses, logits, scales) if differentiate else (losses, None, None)
    dtype = logits.dtype
    column, counts, target = _columns_of_targets(logits, targets)
    logits = logits.to(torch.promote_types(dtype, torch.float32)).where(column < vocab_size, float("-inf"))
    log_sum = logits.logsumexp(1, keepdim=True)
    losses = (log_sum - logits.gather(1, target)) * counts
    if not differentiate:
        return losses, None, None
    return losses, (((logits - log_sum).exp() - (column == target).to(logits.dtype)) * counts).to(dtype), None


def _columns_of_targets(logits, targets):
    """Return the numbers of the columns [V], whether each target counts [N, 1], and its column [N, 1], 0 for -1."""
    column = torch.arange(logits.shape[1], device=logits.device)
    return column, (targets != -1).unsqueeze(1), targets.clamp(min=0).unsqueeze(1)


def compute_distilled_losses(logits, teacher, targets, vocab_size, distill_weight):
    """Return what `compute_losses` does if it differentiates, of the cross entropy + distill_weight KL(t || s).

    logits and teacher [N, V] give the distributions s and t over the first vocab_size columns. The gradient to the
    logits is s - onehot(target) + distill_weight (s - t).
    """
    dtype = logits.dtype
    column, counts, target = _columns_of_targets(logits, targets)
    wide, outside = torch.promote_types(dtype, torch.float32), column >= vocab_size
    log_s, log_t = (x.to(wide).masked_fill(outside, float("-inf")).log_softmax(1) for x in (logits, teacher))
    s, t = log_s.exp(), log_t.exp()
    divergence = (t * (log_t - log_s).masked_fill(outside, 0)).sum(1, keepdim=True)
    losses = (distill_weight * divergence - log_s.gather(1, target)) * counts
    gradient = s - (column == target).to(wide) + distill_weight * (s - t)
    return losses, (gradient * counts).to(dtype), None


class LinearCrossEntropy(torch.autograd.Function):
    """Compute the head and its loss piece by piece.

    The forward pass computes the gradients too, so that logits are neither saved nor computed twice. The loss has
    no second derivative.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, teacher_x=None, teacher_weight=None, distill_weight=0.0):
        """Return the mean loss of x [N, C] and targets [N], -1 left out, for the first vocab_size rows of weight.

        teacher_x [N, C'] and teacher_weight [V, C'] are another model's, which gets no gradient. distill_weight times
        the KL divergence of its distribution from this model's is then part of the loss.
        """
        differentiate = any(ctx.needs_input_grad[:2])
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else weight.dtype
        w, total, dxs, factors, dw = weight.to(dtype), 0, [], [], torch.zeros_like(weight)
        size, teacher_rows, teacher_w = LOSS_TOKENS, repeat(None), None
        if teacher_x is not None:
            size, teacher_rows, teacher_w = DISTILL_TOKENS, teacher_x.split(DISTILL_TOKENS), teacher_weight.to(dtype)
        for rows, target, teacher_part in zip(x.split(size), targets.split(size), teacher_rows):
            rows = rows.to(dtype)
            logits = F.linear(rows, w)
            if teacher_part is None:
                losses, d, scales = compute_losses(logits, target, vocab_size, differentiate)
            else:
                teacher = F.linear(teacher_part.to(dtype), teacher_w)
                losses, d, scales = compute_distilled_losses(logits, teacher, target, vocab_size, distill_weight)
            total = total + losses.sum()
            if differentiate:
                dxs.append(d @ w)
                if scales is not None:
                    factors.append(scales)
                    rows = (rows * scales.unsqueeze(1)).to(dtype)
                dw += d.t() @ rows
        count = (targets != -1).sum().clamp(min=1)
        if differentiate:
            ctx.save_for_backward(torch.cat(dxs), torch.cat(factors) if factors else None, dw, count)
            ctx.dtype = x.dtype
        return total / count

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # the gradients below would be constants
            raise NotImplementedError("the loss has no second derivative (create_graph=True): compute it from logits")
        dx, factors, dw, count = ctx.saved_tensors
        grad = grad / count
        dx = dx.to(grad.dtype) * (grad if factors is None else (factors * grad).unsqueeze(1))
        return dx.to(ctx.dtype), dw * grad, *5 * [None]


def head_weight(embedding, head=None):
    """Return the weight [V, C] of the head: an nn.Linear, or if that is None an nn.Embedding.

    Another module in the place of either, such as LoRA's, is asked for all rows.
    """
    layer = embedding if head is None else head
    weight = layer.weight
    if isinstance(layer, (torch.nn.Embedding, torch.nn.Linear)):
        return weight
    if head is None:
        return embedding(torch.arange(len(weight), device=weight.device))
    return head(weight.new_ones(weight.shape[1]).diag()).t()


def head_loss(x, weight, targets, vocab_size, teacher):
    """Return the mean cross entropy of rows x [N, C] times the head's weight [V, C] and targets [B, T].

    Targets below 0 are left out. Raises RuntimeError unless there are N targets, and NotImplementedError within
    torch.func and forward mode. Its backward pass raises that for create_graph=True.

    teacher: (hidden, weight, w), the output of `hidden` [B, T, C'] and the wte.weight of another model with this
    vocabulary, or None. It adds w times the mean KL divergence of its next-token distribution from this model's.
    """
    if transforms_active():
        raise NotImplementedError("the loss has no forward mode, and none of torch.func: compute it from logits")
    teacher = (teacher[0].flatten(0, 1), *teacher[1:]) if teacher else ()
    if not torch.is_grad_enabled():  # otherwise the weight would still need a gradient inside
        x, weight = x.detach(), weight.detach()
    targets = targets.reshape(len(x)).clamp(min=-1)
    return LinearCrossEntropy.apply(x, weight, targets, vocab_size, *teacher)
