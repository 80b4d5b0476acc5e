"""Score texts with a model, a piece at a time: the loss of each token, and whether it was the likeliest.

    losses = losses_by_position(model, inputs, targets)                  # [B, T] in nats

The model's state is carried from one piece to the next, so that memory does not grow with the length (except for a KV
cache).
"""

import torch
from torch.nn import functional as F

LOGITS_AT_ONCE = 2**28  # numbers: 1 GB in float32


def losses_by_position(model, inputs, targets, piece=None):
    """Return the loss of each target in nats, float32 [B, T], for inputs and targets [B, T] read a piece at a time."""
    return torch.cat([losses for losses, _ in score_pieces(model, inputs, targets, piece)], 1)


def score_pieces(model, inputs, targets, piece=None):
    """Yield the scores of one piece of n tokens after the other, for inputs and targets [B, T].

    They are the losses in nats, float32 [B, n], and whether the targets were the likeliest tokens, bool [B, n]. A
    target of -1 costs no logits and has 0 and True. piece: tokens of each sequence that are read at a time; by default
    65,536 of all sequences on a GPU, else 1,024.
    """
    piece = min(piece or max(1, (65536 if inputs.is_cuda else 1024) // len(inputs)), inputs.shape[1])
    state = model.empty_state(len(inputs))
    at_once = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    for part, wanted in zip(inputs.split(piece, 1), targets.split(piece, 1)):
        x, state = model.hidden(part, state)
        scored = wanted >= 0
        losses, likeliest = torch.zeros(wanted.shape, device=x.device), torch.ones_like(scored)
        found = [scores(model, *rows) for rows in zip(x[scored].split(at_once), wanted[scored].split(at_once))]
        if found:
            losses[scored], likeliest[scored] = map(torch.cat, zip(*found))
        yield losses, likeliest


def scores(model, x, targets):
    """Return the losses of targets [N], and whether they were the likeliest tokens, for x [N, n_embd]."""
    logits = model.logits(x).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets
