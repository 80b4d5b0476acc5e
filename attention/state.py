"""Keep what a layer needs of earlier tokens, so that generation does not read them again.

Each layer has a State, and a ModelState holds the States of all layers. For softmax and the power variants it is a
LayerState: a KV cache and, in variants with a recurrent form, a PowerState of the tokens before the cached ones.

    state = LayerState.empty(batch, device)
    y, state = attend_and_append(q, k, v, log_g, positions, state, p=2)      # again and again, any number of tokens

Keys and values are cached until they take as much memory as the PowerState would: 2,113 tokens for p=2 at head
dimension 64 in bfloat16, 778,457 for p=4. Then all of them are flushed into one, and again whenever FLUSH_EVERY new
ones have gathered. So time and memory per token are bounded for texts of any length. CachePolicy decides all this.
"""

import math
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import torch

from .gates import join_gates
from .operator.forms import PowerState, flush, read_cache
from .operator.memory import state_bytes
from .power import attend_causally

FLUSH_EVERY = 64
WINDOW_SPARE = 64  # tokens that the decoder's cache holds beyond a window, before it moves the window to its front
CACHED = "k", "v", "log_g"  # the tensors of a LayerState that have a row for each cached token


def check_switch_over(switch_over):
    """Raise ValueError unless this is a switch_over of a CachePolicy."""
    if switch_over not in ("auto", "always", "never") and not (type(switch_over) is int and switch_over > 0):
        raise ValueError(f"switch_over must be auto, always, never or at least 1, got {switch_over!r}")


class CachePolicy(NamedTuple):
    """Decide how many tokens' keys and values a layer caches, and when a state takes their place.

    When `limit` tokens are cached, all of them become one state; in a window, the last `window` of them are kept.
    """

    # cached tokens that become a state: a number, "always" (1), "never", or "auto", as many as take a state's memory
    switch_over: str | int
    p: int | tuple  # the power of the state, or of several states
    D: int  # width of keys
    E: int  # width of values
    itemsize: int  # bytes of a number in the cache
    has_state: bool = False  # True if a state holds the tokens before the cached ones
    state_dtype: torch.dtype = torch.float32
    window: int = 0  # tokens that a token sees, itself among them; 0: all

    @property
    def limit(self):
        """The number of tokens at which the cache is full, or inf if it grows with the text."""
        if self.window:
            return self.window + WINDOW_SPARE
        limit = {"never": math.inf, "always": 1}.get(self.switch_over, self.switch_over)
        if limit == "auto":
            limit = math.ceil(self.bytes_of_state() / ((self.D + self.E) * self.itemsize))
        return min(limit, FLUSH_EVERY) if self.has_state else limit

    def room(self, cached, tokens):
        """Return how many tokens the cache has room for if `cached` are in it and so many `tokens` follow."""
        if self.window:
            return min(self.window, cached + tokens) + WINDOW_SPARE
        return int(max(cached, min(self.limit, cached + tokens)))

    def bytes_of_state(self):
        """Return the bytes of a state, for one key/value head of one sequence."""
        return state_bytes(1, self.D, self.E, self.p, self.state_dtype)

    def bytes(self, cached, tokens):
        """Return the bytes of (the cache, the state) once `tokens` follow, for one key/value head of one sequence."""
        cache = ((self.D + self.E) * self.itemsize + 12) * self.room(cached, tokens)
        has_state = self.has_state or (self.limit <= cached + tokens and not self.window)
        return cache, has_state * self.bytes_of_state()


@dataclass
class State:
    """The state of one layer.

    Subclass it as a dataclass. The batch is the first dimension of its tensors, which are None if they are missing.
    Those with a row for each token in their second dimension are called k, v and log_g. Its other fields can be written
    as JSON. The methods below follow from that.
    """

    fixed_size = False  # True if its tensors have the same shapes after any number of tokens
    # [B, n - 1, H + 2 Hkv, D] the last inputs of the layer's convolution over n tokens, None without one
    conv_inputs: torch.Tensor | None = field(default=None, kw_only=True)

    def tensors(self):
        """Return {name: tensor} of the fields that hold a tensor."""
        return {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), torch.Tensor)}

    def settings(self):
        """Return {name: value} of the fields that never hold a tensor, for a file beside the tensors."""
        return {f.name: x for f in fields(self) if not isinstance(x := getattr(self, f.name), torch.Tensor | None)}

    def bytes(self):
        """Return the bytes that the tensors take."""
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    def map(self, function):
        """Apply a function that acts on the batch to every tensor; return the new state."""
        return replace(self, **{name: function(x) for name, x in self.tensors().items()})

    def repeat(self, n):
        """Return the state of each sequence n times over, for several continuations of one prompt."""
        return self.map(lambda x: x.repeat_interleave(n, dim=0))


@dataclass
class LayerState(State):
    position: torch.Tensor  # [B] float64, of the newest token: the number of tokens, or the sum of a learned speed
    k: torch.Tensor | None = None  # [B, n, Hkv, D] the cached keys, rotated
    v: torch.Tensor | None = None  # [B, n, Hkv, E] the cached values
    log_g: torch.Tensor | None = None  # [B, n, Hkv] of the cached tokens, None without gates and resets
    S: torch.Tensor | None = None  # [B, Hkv, Dphi, E] of the tokens before those, None before the first flush
    z: torch.Tensor | None = None  # [B, Hkv, Dphi]
    # cached tokens that become a state: "auto" as above, "always" (1), "never", or n; in a window, its tokens
    switch_over: str | int = "auto"

    @staticmethod
    def empty(batch, device, switch_over="auto"):
        """Return the state before any token."""
        check_switch_over(switch_over)
        position = torch.zeros(batch, dtype=torch.float64, device=device)
        return LayerState(position, switch_over=switch_over)

    @property
    def power(self):
        """Return the PowerState of the tokens before the cached ones, or None."""
        return None if self.S is None else PowerState(self.S, self.z)

    @property
    def cached_tokens(self):
        return 0 if self.k is None else self.k.shape[1]

    def append(self, k, v, log_g, positions):
        """Return the state with new tokens' keys, values and gates in its cache; positions [B, n] or [n] are theirs."""
        position = positions[..., -1].expand(k.shape[0])
        if self.k is not None:
            log_g = join_gates((self.k, self.log_g), (k, log_g))
            k, v = torch.cat((self.k, k), dim=1), torch.cat((self.v, v), dim=1)
        return replace(self, k=k, v=v, log_g=log_g, position=position)

    def last(self, n):
        """Return the state with the last n tokens of its cache alone."""
        if self.cached_tokens <= n:
            return self
        return replace(self, **{name: x[:, -n:].clone() for name, x in self.tensors().items() if name in CACHED})

    def must_flush(self, p):
        """Return True if the cache holds as many tokens as it may, for a state of power p, or a tuple of powers."""
        sizes = p, self.k.shape[-1], self.v.shape[-1], self.k.element_size()
        return self.cached_tokens >= CachePolicy(self.switch_over, *sizes, self.S is not None).limit


@dataclass
class ModelState:
    """The state of a model: the State of each layer, how many tokens have been read, and the State of its position
    embedding, if it has one."""

    layers: list[State]
    n_tokens: int = 0
    embedding: State | None = None

    def parts(self):
        """Return {name: State}: each layer's is called layers.0, layers.1, ..."""
        parts = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return parts if self.embedding is None else parts | {"embedding": self.embedding}

    def map(self, function):
        """Apply a function that acts on the batch to every tensor of every part; return the new state."""
        embedding = self.embedding and self.embedding.map(function)
        return ModelState([layer.map(function) for layer in self.layers], self.n_tokens, embedding)

    def repeat(self, n):
        """Return the state of each sequence n times over."""
        return self.map(lambda x: x.repeat_interleave(n, dim=0))

    def bytes(self):
        """Return the bytes that all tensors take."""
        return sum(part.bytes() for part in self.parts().values())


def attend_and_append(q, k, v, log_g, positions, state, *, p):
    """Attend from n new tokens to themselves and `state`; return y [B, n, H, E] and the state after them."""
    appended = state.append(k, v, log_g, positions)
    must_flush = appended.must_flush(p)
    y, power = attend_to_state(q, (k, v, log_g), (state, appended), state.power, must_flush, p=p)
    if must_flush:
        appended = replace(appended, k=None, v=None, log_g=None, S=power.S, z=power.z)
    return y, appended


def attend_to_state(q, tokens, states, power, must_flush, *, p):
    """Attend from n new tokens to themselves, the KV cache and `power`; return (y [B, n, H, E], a PowerState or None).

    tokens: k, v and log_g of the new tokens; states: the LayerStates without and with them. power, a PowerState or
    None, holds the tokens before the cache, and is returned with all cached tokens flushed into it if must_flush.
    """
    state, appended = states
    if must_flush and q.shape[1] > 1:  # a piece of a prompt: flush the cache, then go on in chunks
        if state.k is not None:
            power = flush(state.k, state.v, state.log_g, power, p=p)
        return attend_causally(q, *tokens, p=p, form="chunked", initial_state=power, return_state=True)
    if state.k is None and power is None and not must_flush:  # the first piece
        return attend_causally(q, *tokens, p=p, form="quadratic"), None
    return read_cache(q, appended.k, appended.v, appended.log_g, power, p=p, flush_cache=must_flush)


def count_positions(x, state, speed):
    """Return the positions of the tokens of x [B, T, C], float64, counted on from the state's.

    They are 1, 2, 3, ... [T], or with a speed [B, T] its running sums [B, T].
    """
    if speed is None:
        steps = torch.arange(1, x.shape[1] + 1, dtype=torch.float64, device=x.device)  # [T]
    else:
        steps = speed.double().cumsum(dim=1)  # [B, T]
    return steps if state is None else state.position.unsqueeze(1) + steps
