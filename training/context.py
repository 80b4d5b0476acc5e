"""Context parallel: groups of ranks that share the tokens of their sequences, as --context_parallel=N asks for.

    check_context(cfg, model_cfg, contexts)             # refuses what cannot be split, before anything is allocated
    slices = split_context(model, layout, ...)          # from then on the model gets this rank's tokens of a sequence
    slices.of(block_size)                               # which these are: [(start, end), ...]
    with whole_sequences(model): ...                    # on one rank alone

The mathematics is in attention/context.py. All ranks of a group must take part in each forward and backward pass of the
model. Generation, which has a state, never involves other ranks.
"""

from contextlib import contextmanager

import torch

from sympow.attention import ATTENTIONS
from sympow.attention.context import Context, pieces_of
from sympow.attention.learned_position import check_length
from sympow.attention.variant import splits_context
from sympow.runs.settings import nearest_multiples


def check_context(cfg, model_cfg, contexts):
    """Raise ValueError if the model cannot read sequences of these lengths, or not on cfg.context_parallel ranks.

    The number of ranks must be a multiple of it, which runs.parallel.Layout checks.
    """
    size = cfg.context_parallel
    check_length(model_cfg, max(contexts), "a context of this run")
    if size > 1 and model_cfg.positions == "learned":
        raise ValueError(f"positions=learned cannot be spread over context_parallel={size} ranks")
    for T in contexts if size > 1 else ():
        _check_length(size, T, model_cfg)


def _check_length(size, T, model_cfg):
    for layer in {name: model_cfg.layer(i) for i, name in enumerate(model_cfg.attention.split(","))}.values():
        variant, name = ATTENTIONS[layer.attention], f"attention={layer.attention}"
        try:
            if not splits_context(variant):
                raise ValueError("its class does not set splits_context (attention/variant.py)")
            variant.context_layout(layer, T, torch.float32, torch.device("cpu"))
        except ValueError as error:
            raise ValueError(f"{name} cannot be spread over context_parallel={size} ranks: {error}") from error
    if model_cfg.form == "recurrent":
        raise ValueError("form=recurrent cannot be spread over ranks: use form=auto, chunked or quadratic")
    if T % (2 * size):
        raise ValueError(
            f"a context must be a multiple of 2 x context_parallel = {2 * size} tokens, so that each rank can hold "
            f"an early and a late piece, got {T}: {nearest_multiples(T, 2 * size)} would do"
        )


class Slices:
    """The tokens of a sequence that a rank holds. Attributes: rank and size (in and of its group), balanced."""

    def __init__(self, rank, size, balanced):
        self.rank, self.size, self.balanced = rank, size, balanced

    def of(self, block_size):
        """Return [(start, end), ...], the tokens of a sequence of block_size tokens; None if they are all of them."""
        if self.size == 1:
            return None
        n = block_size // (self.size * (1 + self.balanced))
        return [(i * n, (i + 1) * n) for i in pieces_of(self.rank, self.size, self.balanced)]


def split_context(model, layout, block_size, dtype, compiled):
    """Make the layers of the model compute with this rank's tokens of each sequence; return their Slices.

    layout: the connected Layout, whose context groups share sequences. All layers have one layout of tokens: "balanced"
    if that of any layer for block_size tokens is. compiled: True if torch.compile will compile the model; the exchange
    between ranks then stays outside of its graphs.
    """
    size, mixes = layout.context_size, [block.attn.mix for block in model.transformer.h]
    if size == 1:
        return Slices(0, 1, False)
    device = model.transformer.wte.weight.device
    balanced = "balanced" in [mix.context_layout(mix.config, block_size, dtype, device) for mix in mixes]
    call = lambda function, *args, **kwargs: function(*args, **kwargs)
    context = Context(layout.context_group, balanced, torch.compiler.disable(call) if compiled else None)
    for mix in mixes:
        mix.context = context
    return Slices(context.rank, size, balanced)


@contextmanager
def whole_sequences(model):
    """Let the model compute whole sequences, on this rank alone."""
    # a layer without a context stays as it is: an attribute that is set makes torch.compile compile anew
    mixes = [block.attn.mix for block in model.transformer.h if block.attn.mix.context is not None]
    contexts = [mix.context for mix in mixes]
    try:
        for mix in mixes:
            mix.context = None
        yield
    finally:
        for mix, context in zip(mixes, contexts):
            mix.context = context
