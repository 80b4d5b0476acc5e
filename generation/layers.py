"""How decoder.py computes one token of each kind of attention, and of each kind of position embedding.

A variant's `decodes_on_kernels` (attention/variant.py) names an entry of LAYERS, of a position embedding one of
EMBEDDINGS. A layer is made from the State after the prompt, which it copies into buffers of a fixed size:

    power      a KV cache until it takes as much memory as a state, then the state and a cache of FLUSH_EVERY tokens
    softmax    a KV cache with room for all tokens; in a window for its own and WINDOW_SPARE more
    heinsen    the state

attention/state.py's CachePolicy decides how many tokens these are. The decoder asks a layer, whatever it is, for

    step()                           launch the attention of one token, from x to y
    count_token()                    note that a token was read
    room()                           return how many tokens it can read before its cache is full
    flush_full(tokens_left, turn)    flush its cache if full, or at its turn; return True if it has other buffers now
    tensors()                        the buffers of its state
    changes()                        the buffers that a step changes, except for the entry that it appends to a cache

A flush takes longer than a token's layer. So the layers have turns, from 0 to 1 of the tokens between two flushes, and
no token waits for the flushes of all.
"""

import math
from typing import NamedTuple

import torch
from torch.nn import functional as F

from ..attention.embedding import symmetric_power_dim
from ..attention.heinsen import LOG_VALUE_BOUND
from ..attention.operator.heinsen_forms import IS_LOG
from ..attention.positions import POSITIONS
from ..attention.rotary import TURNS, rotation_rates
from ..attention.state import LayerState
from ..kernels.decode import cache as decode_cache
from ..kernels.decode import heinsen as decode_heinsen
from ..kernels.decode import power as decode_power
from ..kernels.decode import qkv as decode_qkv
from ..kernels.decode import softmax as decode_softmax
from ..kernels.decode.linear import Convolution, Ids, Linear, linear
from ..layers.activation import mlp_widths
from ..layers.mixing import projected_heads


class Buffers:
    """The buffers that all layers of a token share, for B sequences of a model with this GPTConfig."""

    def __init__(self, config, B, dtype, state_dtype, device):
        self.config, self.B, self.dtype, self.state_dtype, self.device = config, B, dtype, state_dtype, device
        c = config
        self.ids = self.zeros(B, dtype=torch.int64)
        self.newest = Ids(self.ids, c.reset_token)
        self.x, self.h = self.zeros(B, c.n_embd), self.zeros(B, mlp_widths(c)[0])
        self.qkv = self.zeros(B, sum(projected_heads(c)) * c.head_dim)  # and the output gate behind them
        self.y = self.zeros(B, c.n_head * c.head_dim)
        self.rotation = self.zeros(B, 2, c.head_dim)
        self._sums = {}

    def zeros(self, *shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def sums(self, parts, softmax):
        """Return the Sums of so many parts, which all layers of this kind use in turn."""
        if (parts, softmax) not in self._sums:
            heads = self.B, self.config.n_head
            num, den = self.zeros(parts, *heads, self.config.head_dim), self.zeros(parts, *heads)
            arrived, maxima = self.zeros(*heads, dtype=torch.int32), torch.zeros_like(den) if softmax else None
            self._sums[parts, softmax] = decode_cache.Sums(num, den, arrived, maxima)
        return self._sums[parts, softmax]


class Weights(NamedTuple):
    """The weights of one block: matrices in the dtype of generation, the rest in float32."""

    qkv: Linear  # c_attn
    proj: Linear
    fc: Linear
    out: Linear
    gates: decode_qkv.Gates
    beta: torch.Tensor | None
    convolution: torch.Tensor | None  # [n, (H + 2 Hkv) D]
    output_gate: torch.Tensor | None  # [D]
    head_norms: list  # of q and of k, [D] each; empty without


def float32(x):
    """Return a tensor in float32 and contiguous; None stays None."""
    return None if x is None else x.float().contiguous()


class Projection:
    """c_attn of a layer with the convolution behind it, and the norms of its heads, if it has them.

    `heads` are the decode_cache.Heads that its attention reads.
    """

    def __init__(self, buffers, weights, state):
        """Copy the convolution's last inputs from `state`, the layer's State. weights: the block's Weights."""
        self.buffers, self.linear, self.head_norms, self.recent = buffers, weights.qkv, weights.head_norms, []
        self.heads = decode_cache.Heads(buffers.qkv, buffers.qkv.shape[1], buffers.rotation, weights.output_gate)
        if weights.convolution is not None:
            n, C = weights.convolution.shape
            recent = buffers.zeros(buffers.B, n - 1, C)
            convolution = Convolution(weights.convolution, recent, C, buffers.newest)
            self.linear, self.recent = self.linear._replace(convolution=convolution), [recent]
        if state.conv_inputs is not None:
            self.recent[0].copy_(state.conv_inputs.flatten(2))

    def normalize_heads(self):
        b = self.buffers
        heads_of_each = b.qkv.view(b.B, -1, b.config.head_dim).split(projected_heads(b.config), 1)
        for heads, weight in zip(heads_of_each, self.head_norms):
            heads.copy_(F.rms_norm(heads, weight.shape, weight, b.config.norm_eps))


class CachedLayer:
    """A layer with a KV cache. `cached` is the number of cached tokens, which are flushed when they are `limit`."""

    def __init__(self, buffers, weights, attention, state, count, tokens_left):
        """Copy a LayerState. count: a row [1] int32 for the number of cached tokens, which the decoder counts up."""
        c = buffers.config
        self.buffers, self.weights, self.count = buffers, weights, count
        self.attention, self.switch_over, self.power = attention, state.switch_over, None
        self.projection = Projection(buffers, weights, state)
        rates = rotation_rates(c.head_dim, attention.rope_base, buffers.device)
        # a rate of 0 leaves queries and keys as they are
        rates *= POSITIONS[attention.config.positions] * TURNS[attention.config.rope_unit]
        self.place = decode_qkv.Position(state.position, rates, buffers.rotation, weights.beta)
        self.allocate(state, tokens_left)

    def allocate(self, state, tokens_left):
        """Allocate the buffers for a LayerState and the tokens that will be cached, and copy it."""
        b, c, n = self.buffers, self.buffers.config, state.cached_tokens
        policy = self.attention.cache_policy(state, b.dtype.itemsize)
        self.limit, self.window, C = policy.limit, policy.window, policy.room(n, tokens_left)
        shape = b.B, C, c.n_kv_head
        k, v = (b.zeros(*shape, c.head_dim, dtype=b.dtype) for _ in range(2))
        sums, resets = b.zeros(*shape, dtype=torch.float64), b.zeros(*shape, dtype=torch.int32)
        if n:
            k[:, :n], v[:, :n] = state.k, state.v
        if n and state.log_g is not None:
            reset = state.log_g == float("-inf")
            sums[:, :n] = state.log_g.double().masked_fill(reset, 0).cumsum(1)
            resets[:, :n] = reset.cumsum(1)
        self.cache = decode_cache.Cache(k, v, sums, resets, self.count)
        self.cached = n
        self.count.fill_(self.cached)
        self.parts = decode_cache.parts_of_cache(b.B * c.n_head, C)

    def step(self):
        b = self.buffers
        decode_qkv.qkv(
            self.projection.linear,
            b.qkv,
            b.x,
            newest=b.newest,
            gates=self.weights.gates,
            position=self.place,
            cache=self.cache,
            rounding=b.dtype if b.device.type == "cuda" else torch.float32,
        )
        self.projection.normalize_heads()
        self.attend()

    def count_token(self):
        self.cached += 1

    def room(self):
        return self.limit - self.cached

    def should_flush(self, tokens_left, turn):
        """Return whether the cache is full, or has more than its window at this layer's turn."""
        between = self.limit - self.window  # tokens from flush to flush; the first one into a state is of a full cache
        takes_turns = self.cached > self.window and (self.window or self.power)
        return self.cached >= self.limit or takes_turns and (tokens_left + int(turn * between)) % between == 0

    def tensors(self):
        return [*self.changes(), *self.cache[:4]]

    def changes(self):
        return [self.place.position, *self.projection.recent]


class SoftmaxLayer(CachedLayer):
    """Softmax over all cached tokens, or over the last ones in a window."""

    def attend(self):
        b, cache = self.buffers, self.cache
        if b.config.reset_token < 0:
            cache = decode_cache.Cache(cache.k, cache.v, cache.gate_sums, None, cache.count)
        sums, window = b.sums(self.parts, softmax=True), self.window or decode_softmax.NO_WINDOW
        decode_softmax.attend_softmax(self.projection.heads, cache, sums, b.y, window)

    def flush_full(self, tokens_left, turn):
        """Move the window to the front of the cache; the buffers stay."""
        if self.should_flush(tokens_left, turn):
            for x in self.cache[:4]:
                x[:, : self.window] = x[:, self.cached - self.window : self.cached].clone()
            self.cached = self.window
            self.count.fill_(self.cached)
        return False


class PowerLayer(CachedLayer):
    def allocate(self, state, tokens_left):
        super().allocate(state, tokens_left)
        b = self.buffers
        if state.power:
            self.power = decode_power.State(state.S.to(b.state_dtype).contiguous(), float32(state.z))
            heads, (F, D) = b.B * b.config.n_head, state.S.shape[2:]
            self.parts += decode_power.parts_of_state(heads, F, D)

    def attend(self):
        b = self.buffers
        sums = b.sums(self.parts, softmax=False)
        decode_power.attend(self.projection.heads, self.cache, self.power, sums, b.y, self.attention.p)

    def flush_full(self, tokens_left, turn):
        """Flush the cache into the state. The first time allocates the state and a smaller cache."""
        full, first = self.should_flush(tokens_left, turn), self.power is None
        if full:
            self.flush()
        if full and first:
            self.cache = None  # free it before the smaller one is made
            S, z = self.power
            self.allocate(LayerState(self.place.position, S=S, z=z, switch_over=self.switch_over), tokens_left)
        return full and first

    def flush(self):
        b, c = self.buffers, self.buffers.config
        if self.power is None:
            shape = b.B, c.n_kv_head, symmetric_power_dim(c.head_dim, self.attention.p)
            self.power = decode_power.State(b.zeros(*shape, c.head_dim, dtype=b.state_dtype), b.zeros(*shape))
        decode_power.flush(self.cache, self.cached, self.power, self.attention.p)
        self.cached = 0
        self.count.zero_()

    def tensors(self):
        return super().tensors() + list(self.power or ())


class HeinsenLayer:
    def __init__(self, buffers, weights, attention, state, count, tokens_left):
        """Copy a HeinsenState."""
        self.buffers, self.weights = buffers, weights
        self.state = decode_heinsen.State(float32(state.m), float32(state.S), float32(state.z))
        self.projection = Projection(buffers, weights, state)
        self.log_value_bound = LOG_VALUE_BOUND if IS_LOG[attention.config.values] else None  # None for signed values

    def step(self):
        b = self.buffers
        linear(self.projection.linear, b.qkv, b.x)
        self.projection.normalize_heads()
        decode_heinsen.attend_heinsen(
            self.projection.heads,
            b.newest,
            self.state,
            b.y,
            log_value_bound=self.log_value_bound,
        )

    def count_token(self):
        pass

    def room(self):
        return math.inf

    def flush_full(self, tokens_left, turn):
        return False

    def tensors(self):
        return [*self.state, *self.projection.recent]

    changes = tensors


class PositionTable:
    """GPT-2's position embedding."""

    def __init__(self, buffers, embedding, state):
        self.buffers, self.table, self.position = buffers, embedding.weight.float(), state.position

    def step(self):
        b = self.buffers
        if b.config.reset_token >= 0:
            self.position.masked_fill_(b.ids == b.config.reset_token, 0)
        b.x += self.table.index_select(0, self.position)
        self.position += 1

    def tensors(self):
        return [self.position]


class LogPosition:
    """The position embedding of Heinsen's models."""

    def __init__(self, buffers, embedding, state):
        self.buffers, self.log_x = buffers, float32(state.log_x)
        self.dense = Linear(float32(embedding.dense.weight), float32(embedding.dense.bias))
        self.hidden = buffers.zeros(buffers.B, self.dense.weight.shape[0])

    def step(self):
        b = self.buffers
        linear(self.dense, self.hidden, b.x)
        decode_heinsen.add_log_position(self.hidden, self.log_x, b.x, b.newest)

    def tensors(self):
        return [self.log_x]


LAYERS = {"power": PowerLayer, "softmax": SoftmaxLayer, "heinsen": HeinsenLayer}
EMBEDDINGS = {"learned": PositionTable, "heinsen": LogPosition}
