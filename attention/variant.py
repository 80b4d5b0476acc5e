"""The contract between the model and an attention: everything that GPT, training and generation ask of one.

To add an attention: subclass Variant in a file of its own, name it in ATTENTIONS (attention/__init__.py), and write a
config/NAME.py. Only `forward` and `empty_state` must be written; all else here has a default. Nothing outside
attention/ asks which variant it has. README, "Add your own attention", has a whole one in 30 lines, and
tests/test_variant.py takes every variant through training, saving and generation.

What generation keeps of a layer's tokens is a subclass of State (attention/state.py), a dataclass, which is
    made      by empty_state, and by forward from the one before, which stays as it is
    reset     by forward, at a token where `resets` is true: it is then the state of this token and later ones
    repeated  state.repeat(n), for several samples of one prompt
    sized     state.bytes()
    saved     state.tensors() and state.settings(); type(state)(**tensors, **settings) makes it again
State itself has the last three.
"""

import math
from dataclasses import fields, replace

import torch
from torch import nn

from sympow import check_choice
from .operator.arguments import check_form, check_power
from .positions import POSITIONS, LearnedPosition
from .rotary import TURNS, rotate, rotation_of
from .state import CachePolicy, LayerState, count_positions

MOST_CONVOLVED = 64  # tokens of a convolution, which adds them up one after another
# the values of "auto" for most attentions (see Variant.recipe), and the defaults of versions without "auto"
RECIPE = dict(positions="rotary", gate_bias=6.9, convolution=0, output_gate=False)
LEARNED_GATES = RECIPE | dict(gate_bias=3.0, convolution=4, output_gate=True)  # and for power attention with such gates


def splits_context(variant):
    """Return `splits_context` of the class of a Variant itself, False if it has none."""
    return vars(variant).get("splits_context", False)


def decoding_kernels(part):
    """Return `decodes_on_kernels` of the class of a Variant or position embedding itself, "" if it has none."""
    return vars(type(part)).get("decodes_on_kernels", "")


def with_defaults(cls, saved):
    """Return saved settings of a model, fields of the dataclass cls, with defaults of the fields that it has got since.

    What is "auto" by default now is in RECIPE what it was before.
    """
    return {field.name: RECIPE.get(field.name, field.default) for field in fields(cls)} | saved


def check_layer(config):
    """Choose head_dim and n_kv_head where they are 0, and raise ValueError for settings that no attention takes.

    config: a GPTConfig. `Variant.check` knows the settings that one attention takes.
    """
    for name, least in dict(n_head=1, n_embd=1, n_kv_head=0, head_dim=0, mlp_width=0).items():
        if getattr(config, name) < least:
            raise ValueError(f"{name} must be positive, got {getattr(config, name)}")
    if not config.head_dim and config.n_embd % config.n_head:
        raise ValueError(
            f"n_embd must be a multiple of n_head, got {config.n_embd} and {config.n_head}; or set head_dim"
        )
    config.head_dim = config.head_dim or config.n_embd // config.n_head
    config.n_kv_head = config.n_kv_head or config.n_head
    if config.head_dim % 2:
        odd = f"head_dim must be even (rotary positions turn pairs), got {config.head_dim}"
        raise ValueError(f"{odd}; it is n_embd / n_head if it is not given")
    if config.n_head % config.n_kv_head:
        raise ValueError(f"n_head must be a multiple of n_kv_head, got {config.n_head} and {config.n_kv_head}")
    check_power(config.p)
    check_form(config.form, None)
    if config.chunk_size < 0:
        raise ValueError(f"chunk_size must be positive, or 0 to choose it, got {config.chunk_size}")
    if not 1 < config.rope_base < math.inf:
        raise ValueError(f"rope_base must be above 1 and finite, got {config.rope_base}")
    check_choice("rope_unit", config.rope_unit, TURNS)
    check_choice("gate", config.gate, ("auto", "learned", "fixed", "none"))


def check_recipe(config):
    """Raise ValueError for settings around an attention, which are chosen, that no attention takes."""
    for name, none in dict(window="all", convolution="none").items():
        n = getattr(config, name)
        if type(n) is not int or n < 0 or n == 1:
            raise ValueError(f"{name} must be a whole number of at least 2 tokens, or 0 for {none}, got {n!r}")
    if config.convolution > MOST_CONVOLVED:
        raise ValueError(f"convolution must be at most {MOST_CONVOLVED} tokens, got {config.convolution}")
    if type(config.output_gate) is not bool:
        raise ValueError(f"output_gate must be True or False, got {config.output_gate!r}")
    if type(config.gate_bias) not in (int, float) or not math.isfinite(config.gate_bias):
        raise ValueError(f"gate_bias must be a finite number, got {config.gate_bias!r}")


class Variant(nn.Module):
    gates = ("none",)  # the allowed settings of `gate`; gate=auto means the first
    # Its decode step: the name of a class in LAYERS of generation/layers.py ("power", "softmax", "heinsen"), or "" for
    # none. Only the class itself is asked, not its base classes, because a subclass computes something else. If one
    # layer of a model has none, generation steps through the `forward` of all.
    decodes_on_kernels = ""
    # The number of cached tokens at which a state replaces the KV cache, or "auto", "always" or "never"; None if there
    # is no KV cache, or no such choice.
    switch_over = None
    windows = False  # True if it has a window where the setting `window` is not 0
    follows = False  # True if in a hybrid positions=auto is what another layer's recipe has
    rotates = True  # False if its `forward` does not rotate q and k by their positions
    # True if its `forward` computes one rank's part of a sequence when `context` is set (parallel/context.py). Only the
    # class itself is asked: a subclass that computes something else must say so too.
    splits_context = False
    context = None  # a context.Context, or None where each rank has whole sequences; set from outside

    def __init__(self, config):
        """Store config, its layer's model.GPTConfig (n_embd, n_head, n_kv_head, head_dim, p, rope_base, gate, ...):
        config.attention is one name, also where the model's is a pattern.

        GPT initialises each nn.Linear and nn.Embedding that is made here as GPT-2 does; an nn.Parameter stays as made.
        """
        super().__init__()
        # p: the power of its states; a tuple if it has states of several powers
        self.config, self.p, self.rope_base = config, config.p, config.rope_base

    @classmethod
    def check(cls, config):
        """Raise ValueError for settings of the model that this attention does not take, before anything is built."""

    @classmethod
    def recipe(cls, config):
        """Return {name: value} for the settings in RECIPE: the values of "auto", with which this attention learns best.

        config: a GPTConfig. Its gate is chosen before.
        """
        return RECIPE

    @classmethod
    def choose_settings(cls, config):
        """Set what is "auto" in config, and raise ValueError for settings that this attention does not take."""
        if config.gate == "auto":
            config.gate = cls.gates[0]
        for name, value in cls.recipe(config).items():
            if getattr(config, name) == "auto":
                setattr(config, name, value)
        check_recipe(config)
        cls.check(config)
        if config.gate not in cls.gates:
            takes = "has no gates" if cls.gates == ("none",) else f"takes gate={' or '.join(cls.gates)}"
            raise ValueError(f"attention={config.attention} {takes}, got gate={config.gate}")
        if config.window and not cls.windows:
            name, window = config.attention, config.window
            raise ValueError(f"attention={name} has no window, got window={window}: only softmax has one")

    @classmethod
    def position_embedding(cls, config):
        """Return the module that gives all layers their positions, or None if this attention needs none. The default is
        GPT-2's table for positions=learned.

        The model has one, which comes before its first layer and is called with x [B, T, n_embd], resets and state as
        `forward` below; it returns (x, the state after). Its empty_state(batch, device) returns a State. A class
        that has decodes_on_kernels = "heinsen" (see above) has a linear layer `dense` with a bias, from n_embd to 2
        n_embd, and a State of one tensor, log x [B, n_embd]; with "learned" it is a LearnedPosition.
        """
        return LearnedPosition(config.n_positions, config.n_embd) if config.positions == "learned" else None

    @classmethod
    def output_layer(cls, config):
        """Return a module from the heads' outputs [B, T, H * D] to what is added to the residual stream [B, T, n_embd],
        in place of GPT-2's projection and MLP, or None to have those.

        GPT initialises a linear layer in it that is called c_proj as the last one of a block.
        """
        return None

    def input_weight(self):
        """Return the weights W [n, n_embd] of its gates and positions, or None.

        If W is returned, all functions here get x W^T [B, T, n], float32 or wider, in the place of the layer's input x
        [B, T, n_embd]. The model computes it in one pass, with LayerNorm's gain as a part of W. A subclass that needs x
        itself returns None.
        """
        return None

    def forward(self, x, qkv, resets=None, state=None):
        """Attend causally.

        x [B, T, n_embd] is the layer's normalised input, or its products (see `input_weight`), and qkv its projections,
        (q [B, T, H, D], k and v [B, T, Hkv, D]), after the convolution if there is one, under autocast in its dtype;
        `rotate` rotates them. Query head h belongs to key/value head h // (H / Hkv). resets [B, T] bool or None: a
        token where it is true sees nothing before it. state: the State of the tokens before, or None in training. With
        a state T is 1 or the length of a piece of a text, and calls with pieces give what one call with all tokens
        would.
        Returns (y [B, T, H, D] in q's dtype, the state after these tokens, or None if there was none).
        """
        raise NotImplementedError

    def rotate(self, qkv, positions):
        """Return (q, k, v), q and k rotated by the positions [T] or [B, T] float64 of their tokens. In a layer with
        positions=learned or none they are as they are."""
        q, k, v = qkv
        if POSITIONS[self.config.positions]:
            factors = rotation_of(q, positions, self.rope_base, self.config.rope_unit)
            q, k = (rotate(x, *factors) for x in (q, k))
        return q, k, v

    def empty_state(self, batch, device, switch_over=None):
        """Return the State before any token of `batch` sequences. switch_over replaces the variant's own, if given;
        variants without that choice ignore it."""
        raise NotImplementedError

    def positions(self, x, state, speed=None):
        """Return the positions of the tokens of x [B, T, ...] that follow `state`, [T] or [B, T] float64.

        They count on from state.position, or with `speed` [B, T] add it up. `context` counts the tokens of other ranks.
        """
        if self.context is None or state is not None:
            return count_positions(x, state, speed)
        return self.context.positions(x, speed)

    @classmethod
    def context_layout(cls, config, block_size, dtype, device):
        """Return how ranks should share sequences of block_size tokens, see parallel/context.py: "contiguous" if a
        token costs the same wherever it is, "balanced" if it costs more the later it comes. Asked only if
        `splits_context`. Raises ValueError for settings that do not allow it."""
        return "balanced"

    def statistics(self, x, q):
        """Return {name: number} of what it has learned, for x, as `forward` gets it, and q [B, T, H, D], unrotated.
        Every evaluation logs, under each name, the list of the layers' numbers."""
        return {}

    def plans(self, block_size, dtype, device, ranks=1):
        """Return the dispatch.Plans by which training computes attention, one for each power; none without kernels.

        ranks: how many share a sequence of block_size tokens. Before training the kernels are compared with float64.
        """
        return []

    def prompt_plans(self, dtype, device):
        """Return the dispatch.Plans by which a text is read in pieces, with a state between them."""
        return []

    def attention_flops(self, block_size, dtype, device):
        """Return the FLOPs of its own products for one training token, forward and backward.

        The default counts all causal pairs.
        """
        return 6 * block_size * self.config.n_head * self.config.head_dim

    def decoder_weights(self):
        """Return {"gate": (W_gamma, b) or None, "slopes": fixed -log gates [Hkv] or None, "beta": W_beta or None}, for
        decoder.py; asked only of variants that decode on the kernels."""
        return dict(gate=None, slopes=None, beta=None)

    def generation_bytes(self, state, max_new_tokens, itemsize, state_dtype, switch_over=None):
        """Return the bytes of one sequence's (KV cache, state) once `state`, a State, is `max_new_tokens` longer.

        itemsize: bytes of a number in a KV cache; state_dtype: of states between flushes; switch_over: replaces the
        state's own, if given. The default is for a state that does not grow.
        """
        state = replace(state, conv_inputs=None)  # which operator/memory.py counts
        tensors = list(state.tensors().values())
        return 0, state.bytes() // len(tensors[0]) if tensors else 0


class KVCacheVariant(Variant):
    """A Variant with a LayerState: a KV cache and, unless switch_over is "never", a PowerState before it."""

    switch_over = "never"

    def empty_state(self, batch, device, switch_over=None):
        return LayerState.empty(batch, device, self.choose_switch_over(switch_over))

    def choose_switch_over(self, requested):
        """Return the switch_over of a LayerState: the requested one, or its own for None and if that is "never"."""
        if self.config.window or self.switch_over == "never":
            return self.config.window or "never"
        return requested or self.switch_over

    def cache_policy(self, state, itemsize, state_dtype=torch.float32):
        """Return the CachePolicy of a LayerState with a cache of numbers of so many bytes, and S in state_dtype."""
        c = self.config
        sizes = c.head_dim, c.head_dim, itemsize
        return CachePolicy(state.switch_over, self.p, *sizes, state.S is not None, state_dtype, c.window)

    def generation_bytes(self, state, max_new_tokens, itemsize, state_dtype, switch_over=None):
        if switch_over:
            state = replace(state, switch_over=self.choose_switch_over(switch_over))
        policy = self.cache_policy(state, itemsize, state_dtype)
        return tuple(self.config.n_kv_head * x for x in policy.bytes(state.cached_tokens, max_new_tokens))
