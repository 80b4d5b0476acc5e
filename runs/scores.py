"""Score texts with a model, a piece at a time: the loss of each token.

    losses = losses_by_position(model, inputs, targets)                  # [B, T] in nats

The model's state is carried from one piece to the next, so that memory does not grow with the length (except for a KV
cache).
"""

import torch
from torch.nn import functional as F

LOGITS_AT_ONCE = 2**28  # numbers: 1 GB in float32


def losses_by_position(model, inputs, targets, piece=None):
    """Return the loss of each target in nats, float32 [B, T], for inputs and targets [B, T] read a piece at a time."""
    return torch.cat([*score_pieces(model, inputs, targets, piece)], 1)


def score_pieces(model, inputs, targets, piece=None):
    """Yield the losses in nats, float32 [B, n], of each piece of n tokens, for inputs and targets [B, T].

    The loss of a target of -1 is 0. piece: tokens of each sequence that are read at a time; by default 65,536 of all
    sequences on a GPU, else 1,024.
    """
    piece = piece or max(1, (65536 if inputs.is_cuda else 1024) // len(inputs))
    rows = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    state = model.empty_state(len(inputs))
    for input_piece, target_piece in zip(inputs.split(piece, 1), targets.split(piece, 1)):
        x, state = model.hidden(input_piece, state)
        losses = [
            F.cross_entropy(model.logits(x_rows).float(), target_rows, ignore_index=-1, reduction="none")
            for x_rows, target_rows in zip(x.flatten(0, 1).split(rows), target_piece.flatten().split(rows))
        ]
        yield torch.cat(losses).view_as(target_piece)
