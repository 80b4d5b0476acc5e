"""Generate token after token on a GPU: the buffers of kernels/decode.py, and the CUDA graph of a token.

    decoder = Decoder(model, state, sampler, max_new_tokens=500)     # state: a ModelState, from reading the prompt
    for ids in decoder.tokens(500): ...                              # [B] int64 on the CPU
    state = decoder.state()                                          # a ModelState again

The graph holds the whole token, from its row of the embedding to the next one's id; the host launches it and reads ids
that are a token or two old, so that GPU and host do not wait for each other. A flush is launched between two tokens.

Layers of different attentions stand side by side. What a variant's `decodes_on_kernels` (attention/variant.py) says is
how its layer is computed, and what its State becomes here, in buffers of a fixed size:

    power      a KV cache until it takes as much memory as a state, then the state and a cache of FLUSH_EVERY tokens
    softmax    a KV cache with room for all tokens
    heinsen    the state
"""

import copy
from dataclasses import dataclass, replace

import torch

from sympow.attention.check import remember
from sympow.attention.embedding import symmetric_power_dim
from sympow.attention.heinsen import LOG_VALUE_BOUND
from sympow.attention.memory import check_generation_fits
from sympow.attention.rotary import rotation_rates
from sympow.attention.state import LayerState, ModelState, State
from sympow.attention.variant import decoding_kernels
from sympow.kernels import decode, decode_heinsen, decode_softmax, sampling
from sympow.kernels.common import device_guard
from sympow.model import GPT

# of logits in `failure`, by the dtype of weights and of states; measured are 7e-3, 6e-6 and (p = 6) 3e-2
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
STATE_TOLERANCE = {torch.bfloat16: 1e-1, torch.float32: 0.0}
AHEAD = 2  # tokens that are launched before the first of them is read


@dataclass
class Group:
    """Layers of one attention whose KV caches hold the same number of tokens, so that all are flushed together."""

    kind: str  # "power" or "softmax"
    p: int
    switch_over: str | int  # of their LayerStates
    rates: torch.Tensor  # [D / 2] float64: turns per unit of position
    count: torch.Tensor  # [1] int32: cached tokens
    cached: int = 0  # `count` on the host
    limit: float = 0  # cached tokens at which they are flushed
    sums: tuple = ()  # of the parts of `attend`


@dataclass
class CacheBuffers:
    """The state of one layer that has a KV cache, on the GPU."""

    group: Group
    gated: bool  # True if its LayerState has log_g
    position: torch.Tensor | None = None  # [B] float64
    cache: tuple = ()  # keys, values [B, C, Hkv, D], sums of log_g [B, C, Hkv] float64, resets [B, C, Hkv] int32
    power: tuple | None = None  # S [B, Hkv, Dphi, D] and z [B, Hkv, Dphi] float32, of the tokens before the cached ones

    def tensors(self):
        return self.position, *self.cache, *(self.power or ())


@dataclass
class HeinsenBuffers:
    """The state of a layer of Heinsen's attention on the GPU."""

    state: State  # a HeinsenState, whose m, S and z are changed in place; position is the one before the first token
    log_value_bound: float | None  # None for signed values
    group = None

    def tensors(self):
        return self.state.m, self.state.S, self.state.z


class Decoder:
    def __init__(
        self, model, state, sampler, max_new_tokens, dtype=None, num_samples=1, state_dtype=torch.float32
    ):  # fmt: skip
        """Allocate the buffers and copy the weights and `state` into them.

        model: a GPT, whose weights become dtype (default: the embedding's), and S between flushes state_dtype.
        sampler: called with logits [B, >= vocab_size], -inf beyond the vocabulary, and the buffer of ids [B], it writes
        the next ones there (in a CUDA graph); its prepare() is called before, its `at` is a tensor that sampling
        changes. num_samples: how often each of the state's sequences is continued. Raises MemoryError before it
        allocates if the buffers would not fit.
        """
        self.c, self.sampler, self.n_tokens, self.n_read = model.config, sampler, state.n_tokens, 0
        w, t = model.transformer.wte.weight, model.transformer
        self.device, self.dtype, self.state_dtype = w.device, dtype or w.dtype, state_dtype
        self.B, self.tokens_left = len(state.layers[0].position) * num_samples, max_new_tokens
        mixes, c, D = [block.attn.mix for block in t.h], self.c, self.c.head_dim
        if not all(map(decoding_kernels, mixes)):
            raise ValueError(f"not all layers of attention={c.attention} have kernels to generate with")
        check_generation_fits(mixes, state, max_new_tokens, self.B, self.dtype.itemsize, state_dtype, self.device)
        self.weights = [self._weights(block) for block in t.h]
        self.wte, self.ends = w.to(self.dtype), (c.embedding_norm and self._norm(t.ln_wte), self._norm(t.ln_f))
        learned = c.positions == "learned"
        self.positions = t.wpe.weight.float() if learned else None
        self.wpe = (t.wpe.dense.weight.float(), t.wpe.dense.bias.float()) if "wpe" in t and not learned else None
        self.gelu = 2 if c.activation == "gelu_tanh" else 1
        self.x, self.h = self._zeros(self.B, c.n_embd), self._zeros(self.B, 4 * c.n_embd)
        self.hidden = self.h.view(2, self.B, -1)[0]  # the position embedding is done before h is written
        self.qkv, self.y = self._zeros(self.B, (c.n_head + 2 * c.n_kv_head) * D), self._zeros(self.B, c.n_head * D)
        self.rotation = self._zeros(self.B, 2, D)
        self.padded = self._zeros(self.B, -(-c.vocab_size // sampling.SAMPLE_BLOCK) * sampling.SAMPLE_BLOCK)
        self.padded.fill_(float("-inf"))
        self.logits = self.padded[:, : c.vocab_size]
        self.ids, self.graph = self._zeros(self.B, dtype=torch.int64), None
        # a copy, so that the caller's state is not changed
        self.embedding = state.embedding and self._copy(state.embedding, num_samples)
        self._make_layers(mixes, state.layers, num_samples)
        self._flush_full()

    def _zeros(self, *shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=self.device)

    # ---- weights

    def _norm(self, layer):
        return layer.weight.float(), None if layer.bias is None else layer.bias.float()

    def _linear(self, layer):
        return layer.weight.to(self.dtype), None if layer.bias is None else layer.bias.float()

    def _weights(self, block):
        """Return a block's weights as the kernels take them: matrices in dtype, the rest in float32."""
        float32 = lambda x: x if x is None else tuple(y.float() for y in x) if isinstance(x, tuple) else x.float()
        return dict(
            norm_1=self._norm(block.ln_1), qkv=self._linear(block.attn.c_attn), proj=self._linear(block.attn.c_proj),
            norm_2=self._norm(block.ln_2), fc=self._linear(block.mlp.c_fc), out=self._linear(block.mlp.c_proj),
            **{name: float32(x) for name, x in block.attn.mix.decoder_weights().items()},
        )  # fmt: skip

    # ---- the state in buffers

    def _make_layers(self, mixes, states, num_samples):
        """Make self.layers, the buffers of each layer, and self.groups of those that have KV caches."""
        self.counts = self._zeros(len(mixes), 4, dtype=torch.int32)  # 16 bytes a row: kernels want aligned pointers
        self.layers, groups, of_group = [], {}, {}
        for w, mix, state in zip(self.weights, mixes, states):
            kind = decoding_kernels(mix)
            if kind == "heinsen":
                bound = LOG_VALUE_BOUND if mix.config.values == "log" else None
                self.layers.append(HeinsenBuffers(self._copy(state, num_samples), bound))
                continue
            alike = kind, mix.p, state.switch_over
            key = *alike, mix.rope_base, state.cached_tokens, state.power is None
            if key not in groups:
                rates = rotation_rates(self.c.head_dim, mix.rope_base, self.device)
                rates *= self.c.positions == "rotary"  # a rate of 0 leaves queries and keys as they are
                groups[key], of_group[key] = Group(*alike, rates, self.counts[len(groups), :1]), []
            of_group[key].append(state.repeat(num_samples))
            gated = self.c.reset_token >= 0 or w["gate"] is not None or w["slopes"] is not None
            self.layers.append(CacheBuffers(groups[key], gated))
        self.groups = list(groups.values())
        for key, group in groups.items():
            self._allocate(group, of_group.pop(key))
        self._add_up()

    def _copy(self, state, num_samples):
        """Return the state of each sequence num_samples times over, in float32 and contiguous, except `position`."""
        tensors = state.repeat(num_samples).tensors()
        return replace(
            state, **{name: x if name == "position" else x.float().contiguous() for name, x in tensors.items()}
        )

    def _allocate(self, group, states):
        """Allocate a group's buffers for its LayerStates and the tokens that will be cached."""
        c, D, n, power = self.c, self.c.head_dim, states[0].cached_tokens, states[0].power
        group.limit = states[0].switch_over_limit(group.p, D, D, self.dtype.itemsize)
        C = int(max(n, min(group.limit, n + self.tokens_left)))
        heads = self.B * c.n_head
        parts = decode.parts_of_cache(heads, C)
        if power is not None:
            parts += decode.parts_of_state(heads, power.z.shape[2], D)
        group.sums = self._zeros(parts, self.B, c.n_head, D), self._zeros(parts, self.B, c.n_head)
        group.sums += (self._zeros(self.B, c.n_head, dtype=torch.int32),)
        if group.kind == "softmax":
            group.sums += (self._zeros(parts, self.B, c.n_head),)
        for buffers, state in zip(self._layers_of(group), states):
            self._copy_to_buffers(buffers, state, n, C)
        group.cached = n
        group.count.fill_(n)

    def _layers_of(self, group):
        return [layer for layer in self.layers if layer.group is group]

    def _copy_to_buffers(self, buffers, state, n, C):
        """Copy a LayerState with n cached tokens to buffers for C tokens."""
        B, H, D, power = self.B, self.c.n_kv_head, self.c.head_dim, state.power
        cache = (*(self._zeros(B, C, H, D, dtype=self.dtype) for _ in range(2)),)
        cache += self._zeros(B, C, H, dtype=torch.float64), self._zeros(B, C, H, dtype=torch.int32)
        if n:
            cache[0][:, :n], cache[1][:, :n] = state.k, state.v
        if n and state.log_g is not None:
            reset = state.log_g == float("-inf")
            cache[2][:, :n] = state.log_g.double().masked_fill(reset, 0).cumsum(1)
            cache[3][:, :n] = reset.cumsum(1)
        if power:
            power = power.S.to(self.state_dtype).contiguous(), power.z.float().contiguous()
        buffers.position, buffers.cache, buffers.power = state.position, cache, power

    def _add_up(self):
        """Add up the size of the state."""
        tensors = [x for layer in self.layers for x in layer.tensors()]
        tensors += self.embedding.tensors().values() if self.embedding else ()
        self._bytes = sum(x.numel() * x.element_size() for x in tensors)

    def state(self):
        """Return the ModelState after the tokens read so far."""
        layers = [self._layer_state(layer) if layer.group else self._heinsen_state(layer) for layer in self.layers]
        return ModelState(layers, self.n_tokens, self.embedding and self.embedding.repeat(1))

    def _heinsen_state(self, buffers):
        state = buffers.state.repeat(1)  # a copy
        return replace(state, position=state.position + self.n_read)

    def _layer_state(self, buffers):
        n, (k, v, total, resets) = buffers.group.cached, buffers.cache
        S, z = (x.float().clone() for x in buffers.power) if buffers.power else (None, None)
        layer = LayerState(buffers.position.clone(), S=S, z=z, switch_over=buffers.group.switch_over)
        if not n:
            return layer
        layer.k, layer.v = k[:, :n].clone(), v[:, :n].clone()
        if buffers.gated:
            difference = lambda x: torch.cat((torch.zeros_like(x[:, :1]), x[:, :n]), 1).diff(dim=1)
            layer.log_g = difference(total).float().masked_fill(difference(resets) > 0, float("-inf"))
        return layer

    def bytes(self):
        """Return the bytes of the state's buffers; called at every token, so it must be cheap."""
        return self._bytes

    # ---- a token

    def _token(self):
        """Launch one token: from ids to logits, and to the ids that the sampler writes."""
        x = self.x
        self._embed(x)
        if self.wpe:
            (log_x,), hidden = self.embedding.tensors().values(), self.hidden
            decode.linear(self.wpe[0], hidden, x, bias=self.wpe[1])
            decode_heinsen.add_log_position(hidden, log_x, x, self.ids, reset_token=self.c.reset_token)
        for w, layer in zip(self.weights, self.layers):
            if layer.group:
                self._attend_to_cache(w, layer, layer.group)
            else:
                self._attend_heinsen(w, layer)
            decode.linear(w["proj"][0], x, self.y, bias=w["proj"][1], add=True)
            decode.linear(w["fc"][0], self.h, x, norm=w["norm_2"], bias=w["fc"][1], gelu=self.gelu)
            decode.linear(w["out"][0], x, self.h, bias=w["out"][1], add=True)
        decode.linear(self.wte[: self.c.vocab_size], self.logits, x, norm=self.ends[1])
        self.counts += 1
        self.sampler(self.padded, self.ids)

    def _embed(self, x):
        """Write the tokens' embeddings to x, with the vectors of their positions if the model has those."""
        if self.c.embedding_norm:
            decode.embed(self.ids, self.wte, self.ends[0], x)
        else:
            x.copy_(self.wte.index_select(0, self.ids))
        if self.positions is not None:
            (position,) = self.embedding.tensors().values()
            if self.c.reset_token >= 0:
                position.masked_fill_(self.ids == self.c.reset_token, 0)
            x += self.positions.index_select(0, position)
            position += 1

    def _attend_to_cache(self, w, layer, group):
        """Launch a layer's attention to its KV cache, and to its state if it has one: from x to y."""
        decode.qkv(
            w["qkv"][0], self.qkv, self.x, norm=w["norm_1"], bias=w["qkv"][1], ids=self.ids, gate=w["gate"],
            beta=w["beta"], slopes=w["slopes"], position=layer.position, rates=group.rates, rotation=self.rotation,
            cache=layer.cache, count=group.count, reset_token=self.c.reset_token,
            rounding=self.dtype if self.device.type == "cuda" else torch.float32,
        )  # fmt: skip
        inputs = self.qkv, self.rotation, layer.cache, group.count
        if group.kind == "softmax":
            decode_softmax.attend_softmax(*inputs, group.sums, self.y, resets=self.c.reset_token >= 0)
        else:
            decode.attend(*inputs, layer.power, group.sums, self.y, group.p)

    def _attend_heinsen(self, w, layer):
        """Launch a layer of Heinsen's attention, from x to y."""
        decode.linear(w["qkv"][0], self.qkv, self.x, norm=w["norm_1"], bias=w["qkv"][1])
        how = dict(reset_token=self.c.reset_token, log_value_bound=layer.log_value_bound)
        decode_heinsen.attend_heinsen(self.qkv, self.ids, layer.tensors(), self.y, **how)

    def capture(self):
        """Capture the token as a CUDA graph, on a GPU.

        It runs once before, to compile. What that run changes is restored, except entry n of the cache, which the next
        token writes.
        """
        if self.device.type == "cuda":
            with device_guard(self.device):
                self._capture()

    def _capture(self):
        changed = [self.ids, self.counts, self.sampler.at]
        changed += self.embedding.tensors().values() if self.embedding else ()
        for layer in self.layers:
            changed += [layer.position] if layer.group else layer.tensors()
        saved = [x.clone() for x in changed]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._token()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):  # torch's own stays on the first GPU that captures
            self._token()
        for x, before in zip(changed, saved):
            x.copy_(before)
        self.graph = graph

    def step(self):
        """Read the tokens `ids` and overwrite them with the next ones."""
        self.sampler.prepare()
        with device_guard(self.device):
            if self.device.type != "cuda":
                self._token()
            else:
                if self.graph is None:
                    self._capture()
                self.graph.replay()
        self.n_tokens, self.n_read, self.tokens_left = self.n_tokens + 1, self.n_read + 1, self.tokens_left - 1
        for group in self.groups:
            group.cached += 1
        self._flush_full()

    def _flush_full(self):
        """Flush the caches that are full into the states."""
        with device_guard(self.device):
            for group in self.groups:
                if group.cached >= group.limit:
                    self._flush(group)

    def _flush(self, group):
        """Flush a group's caches into the states. The first flush allocates the states and then smaller caches."""
        c, layers = self.c, self._layers_of(group)
        first = layers[0].power is None
        if first:
            shape = self.B, c.n_kv_head, symmetric_power_dim(c.head_dim, group.p)
            for layer in layers:
                layer.power = self._zeros(*shape, c.head_dim, dtype=self.state_dtype), self._zeros(*shape)
        for layer in layers:
            decode.flush(layer.cache, group.cached, layer.power, group.p)
        group.cached = 0
        group.count.zero_()
        if first:
            states = []
            for layer in layers:
                S, z = layer.power
                states.append(LayerState(layer.position, S=S, z=z, switch_over=group.switch_over))
                layer.cache = ()  # frees the caches before the smaller ones are made
            self._allocate(group, states)
            self.graph = None
            self._add_up()

    def tokens(self, n):
        """Yield the sampled ids [B], on the CPU, n times; the first are already in `ids`."""
        cuda, waiting = self.device.type == "cuda", []
        for i in range(n):
            with device_guard(self.device):  # not around the yield: the caller's device is its own
                if cuda:
                    ids, event = torch.empty(self.B, dtype=torch.int64, pin_memory=True), torch.cuda.Event()
                    ids.copy_(self.ids, non_blocking=True)
                    event.record()
                else:
                    ids, event = self.ids.clone(), None
            waiting.append((ids, event))
            if i + 1 < n:
                self.step()
            if len(waiting) > AHEAD * cuda:
                yield _when_copied(*waiting.pop(0))
        for pair in waiting:
            yield _when_copied(*pair)


def _when_copied(ids, event):
    """Wait for the copy of ids to the CPU, and return them."""
    if event:
        event.synchronize()
    return ids


def failure(model, dtype, state_dtype):
    """Return "" if a Decoder of weights of `dtype` agrees with GPT.step in float64 on the model's GPU, for a layer of
    each kind that the model has; else one line that says what is wrong. It takes seconds, once (attention/check.py)."""
    if not torch.cuda.is_available():
        return ""
    vocab_size, device = min(model.config.vocab_size, 1000), model.transformer.wte.weight.device
    positions = max(model.config.n_positions, 64)  # more than are read
    small = lambda mix: replace(mix.config, n_layer=1, vocab_size=vocab_size, dropout=0.0, n_positions=positions)
    kinds = {(type(mix), str(small(mix))): mix for mix in (block.attn.mix for block in model.transformer.h)}
    for (kind, config), mix in kinds.items():
        name = f"generation, {kind.__qualname__}, {dtype}, states in {state_dtype}, {config}"
        if wrong := remember(name, lambda: _failure(small(mix), kind, dtype, state_dtype), device):
            return wrong
    return ""


def _failure(config, kind, dtype, state_dtype, device="cuda"):
    most = max(TOLERANCE[dtype], STATE_TOLERANCE[state_dtype])
    for token, error in enumerate(errors(config, kind, dtype, state_dtype, device)):
        if not error <= most:  # NaN is not
            return f"wrong results, the logits of token {token} have an error of {error:.1e}"
    return ""


@torch.no_grad()
def errors(config, kind, dtype, state_dtype, device="cuda"):
    """Return the relative errors of the logits of five tokens, before and after a flush, for a model of this GPTConfig
    with layers of the class `kind`, a Variant, or if that is None with those of the config."""
    with torch.random.fork_rng([torch.cuda.current_device()] if device == "cuda" else []):
        model = GPT(config)
        for block in model.transformer.h if kind else ():
            block.attn.mix = kind(config)
        model = model.eval().to(device)
        for p in model.parameters():
            if p.dim() > 1:  # weights with which each product counts
                p.normal_(std=p.shape[-1] ** -0.5)
            p.copy_(p.to(dtype))
        ids = torch.randint(config.vocab_size, (2, 4), device=device)
    model, reference, found = model.to(dtype), copy.deepcopy(model).double(), []
    logits, state = reference.read(ids, reference.empty_state(2, 6))
    decoder = Decoder(model, state, _Likeliest(device), 8, state_dtype=state_dtype)
    decoder.ids.copy_(logits.argmax(-1))
    for _ in range(5):
        right, state = reference.step(decoder.ids.clone(), state)
        decoder.step()
        found.append(((decoder.logits - right).norm() / right.norm()).item())
    return found


class _Likeliest:
    """The sampler of `errors`."""

    def __init__(self, device):
        self.at = torch.zeros(1, device=device)

    def prepare(self):
        pass

    def __call__(self, logits, ids):
        ids.copy_(logits.argmax(-1))
