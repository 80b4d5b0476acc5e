"""Generate token after token on a GPU: the buffers of kernels/decode/power.py, and the CUDA graph of a token.

    decoder = Decoder(model, state, sampler, max_new_tokens=500)     # state: a ModelState, from reading the prompt
    for ids in decoder.tokens(500): ...                              # [B] int64 on the CPU

The graph holds the whole token, from its row of the embedding to the next one's id. The host launches it and reads ids
that are a token or two old, so that GPU and host do not wait for each other. A flush is launched between two tokens.

Layers of different attentions stand side by side. A variant's `decodes_on_kernels` (attention/variant.py) decides how
its layer is computed, and what its State becomes here, in buffers of a fixed size:

    power      a KV cache until it takes as much memory as a state, then the state and a cache of FLUSH_EVERY tokens
    softmax    a KV cache with room for all tokens
    heinsen    the state
"""

import copy
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from sympow.attention.embedding import symmetric_power_dim
from sympow.attention.heinsen import LOG_VALUE_BOUND
from sympow.attention.operator.check import remember
from sympow.attention.operator.memory import check_generation_fits
from sympow.attention.rotary import rotation_rates
from sympow.attention.state import LayerState
from sympow.attention.variant import decoding_kernels
from sympow.kernels.common import device_guard
from sympow.kernels.decode import heinsen as decode_heinsen
from sympow.kernels.decode import power as decode
from sympow.kernels.decode import sampling
from sympow.kernels.decode import softmax as decode_softmax
from sympow.model import GPT

# of logits in `failure`, by the dtype of weights and of states; measured are 7e-3, 6e-6 and (p = 6) 3e-2
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
STATE_TOLERANCE = {torch.bfloat16: 1e-1, torch.float32: 0.0}
AHEAD = 2  # tokens that are launched before the first of them is read


@dataclass
class Group:
    """Holds layers of one attention with the same number of cached tokens, so that all are flushed together."""

    kind: str  # "power" or "softmax"
    p: int
    switch_over: str | int  # of their LayerStates
    rates: torch.Tensor  # [D / 2] float64: turns per unit of position
    count: torch.Tensor  # [1] int32: cached tokens
    cached: int = 0  # `count` on the host
    limit: float = 0  # cached tokens at which they are flushed
    sums: tuple = ()  # of the parts of `attend`
    layers: list = field(default_factory=list)  # their CacheBuffers


@dataclass
class CacheBuffers:
    """Holds the state of one layer that has a KV cache, on the GPU."""

    group: Group
    position: torch.Tensor | None = None  # [B] float64
    cache: tuple = ()  # keys, values [B, C, Hkv, D], sums of log_g [B, C, Hkv] float64, resets [B, C, Hkv] int32
    power: tuple | None = None  # S [B, Hkv, Dphi, D] and z [B, Hkv, Dphi] float32, of the tokens before the cached ones

    def tensors(self):
        return self.position, *self.cache, *(self.power or ())


@dataclass
class HeinsenBuffers:
    """Holds the state of a layer of Heinsen's attention on the GPU."""

    state: tuple  # m, S and z of a HeinsenState, float32, changed in place
    log_value_bound: float | None  # None for signed values
    group = None

    def tensors(self):
        return self.state


class Decoder:
    def __init__(self, model, state, sampler, max_new_tokens, dtype=None, num_samples=1, state_dtype=torch.float32):
        """Allocate the buffers and copy the weights and `state` into them.

        model: a GPT. Its weights are copied in dtype (default: the embedding's).
        state_dtype: the dtype of S between flushes.
        sampler: a generate.Sampler or alike. Called with logits [B, >= vocab_size], -inf beyond the vocabulary, and the
        buffer of ids [B], it writes the next ids there, in a CUDA graph. Its prepare() is called before each token; its
        `index` is a tensor that sampling changes.
        num_samples: how often each of the state's sequences is continued.

        Raises MemoryError before it allocates if the buffers would not fit.
        """
        embeddings, c = model.transformer, model.config
        wte, mixes = embeddings.wte.weight, [block.attn.mix for block in embeddings.h]
        self.c, self.sampler, self.tokens_left, self.graph = c, sampler, max_new_tokens, None
        self.device, self.dtype, self.state_dtype = wte.device, dtype or wte.dtype, state_dtype
        self.B = len(state.layers[0].position) * num_samples
        if not all(map(decoding_kernels, mixes)):
            raise ValueError(f"not all layers of attention={c.attention} have kernels to generate with")
        check_generation_fits(mixes, state, max_new_tokens, self.B, self.dtype.itemsize, state_dtype, self.device)
        self._copy_weights(embeddings)
        self.x, self.h = self._zeros(self.B, c.n_embd), self._zeros(self.B, 4 * c.n_embd)
        self.hidden = self.h.view(2, self.B, -1)[0]  # the position embedding is done before h is written
        self.qkv = self._zeros(self.B, (c.n_head + 2 * c.n_kv_head) * c.head_dim)
        self.y, self.rotation = self._zeros(self.B, c.n_head * c.head_dim), self._zeros(self.B, 2, c.head_dim)
        self.padded = self._zeros(self.B, -(-c.vocab_size // sampling.SAMPLE_BLOCK) * sampling.SAMPLE_BLOCK)
        self.padded.fill_(float("-inf"))
        self.logits, self.ids = self.padded[:, : c.vocab_size], self._zeros(self.B, dtype=torch.int64)
        self.embedding = None  # the one tensor of the position embedding's state
        if state.embedding:
            (tensor,) = state.embedding.repeat(num_samples).tensors().values()
            self.embedding = _float32(tensor) if tensor.is_floating_point() else tensor
        self._make_layers(mixes, state.layers, num_samples)
        self._flush_full()

    def _zeros(self, *shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=self.device)

    # ---- weights: matrices in dtype, the rest in float32

    def _copy_weights(self, embeddings):
        c = self.c
        self.wte, self.ln_f = embeddings.wte.weight.to(self.dtype), self._norm(embeddings.ln_f)
        self.ln_wte = self._norm(embeddings.ln_wte) if c.embedding_norm else None
        self.positions = self.wpe = None
        if c.positions == "learned":
            self.positions = embeddings.wpe.weight.float()
        elif "wpe" in embeddings:
            self.wpe = _float32(embeddings.wpe.dense.weight), _float32(embeddings.wpe.dense.bias)
        self.gelu = 2 if c.activation == "gelu_tanh" else 1
        self.weights = [self._block_weights(block) for block in embeddings.h]

    def _norm(self, layer):
        return _float32(layer.weight), _float32(layer.bias)

    def _linear(self, layer):
        return layer.weight.to(self.dtype), _float32(layer.bias)

    def _block_weights(self, block):
        weights = block.attn.mix.decoder_weights()
        return dict(
            norm_1=self._norm(block.ln_1),
            qkv=self._linear(block.attn.c_attn),
            proj=self._linear(block.attn.c_proj),
            norm_2=self._norm(block.ln_2),
            fc=self._linear(block.mlp.c_fc),
            out=self._linear(block.mlp.c_proj),
            gate=weights["gate"] and tuple(map(_float32, weights["gate"])),
            beta=_float32(weights["beta"]),
            slopes=_float32(weights["slopes"]),
        )

    # ---- the state in buffers

    def _make_layers(self, mixes, states, num_samples):
        """Make self.layers, the buffers of each layer, and self.groups, the layers that have KV caches."""
        self.counts = self._zeros(len(mixes), 4, dtype=torch.int32)  # 16 bytes a row: kernels want aligned pointers
        self.layers, groups, group_states = [], {}, {}
        for mix, state in zip(mixes, states):
            kind, state = decoding_kernels(mix), state.repeat(num_samples)  # a copy, which the decoder may change
            if kind == "heinsen":
                bound = LOG_VALUE_BOUND if mix.config.values == "log" else None
                self.layers.append(HeinsenBuffers((*map(_float32, (state.m, state.S, state.z)),), bound))
                continue
            key = kind, mix.p, state.switch_over, mix.rope_base, state.cached_tokens, state.power is None
            if key not in groups:
                rates = rotation_rates(self.c.head_dim, mix.rope_base, self.device)
                rates *= self.c.positions == "rotary"  # a rate of 0 leaves queries and keys as they are
                groups[key] = Group(kind, mix.p, state.switch_over, rates, self.counts[len(groups), :1])
                group_states[key] = []
            self.layers.append(CacheBuffers(groups[key]))
            groups[key].layers.append(self.layers[-1])
            group_states[key].append(state)
        self.groups = list(groups.values())
        for key, group in groups.items():
            self._allocate(group, group_states.pop(key))
        self._count_bytes()

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
        for buffers, state in zip(group.layers, states):
            self._copy_to_buffers(buffers, state, n, C)
        group.cached = n
        group.count.fill_(n)

    def _copy_to_buffers(self, buffers, state, n, C):
        """Copy a LayerState with n cached tokens to buffers for C tokens."""
        shape = self.B, C, self.c.n_kv_head
        k, v = (self._zeros(*shape, self.c.head_dim, dtype=self.dtype) for _ in range(2))
        sums, resets = self._zeros(*shape, dtype=torch.float64), self._zeros(*shape, dtype=torch.int32)
        if n:
            k[:, :n], v[:, :n] = state.k, state.v
        if n and state.log_g is not None:
            reset = state.log_g == float("-inf")
            sums[:, :n] = state.log_g.double().masked_fill(reset, 0).cumsum(1)
            resets[:, :n] = reset.cumsum(1)
        buffers.position, buffers.cache = state.position, (k, v, sums, resets)
        if state.power:
            buffers.power = state.S.to(self.state_dtype).contiguous(), _float32(state.z)

    def _count_bytes(self):
        tensors = [x for layer in self.layers for x in layer.tensors()]
        tensors += [] if self.embedding is None else [self.embedding]
        self._bytes = sum(x.nbytes for x in tensors)

    def bytes(self):
        """Return the bytes of the state's buffers; called at every token, so it must be cheap."""
        return self._bytes

    # ---- a token

    def _token(self):
        """Launch one token: from ids to logits, and to the ids that the sampler writes."""
        x, reset_token = self.x, self.c.reset_token
        self._embed(x)
        if self.wpe:
            decode.linear(self.wpe[0], self.hidden, x, bias=self.wpe[1])
            decode_heinsen.add_log_position(self.hidden, self.embedding, x, self.ids, reset_token=reset_token)
        for w, layer in zip(self.weights, self.layers):
            if layer.group:
                self._attend_to_cache(w, layer, layer.group)
            else:
                self._attend_heinsen(w, layer)
            decode.linear(w["proj"][0], x, self.y, bias=w["proj"][1], add=True)
            decode.linear(w["fc"][0], self.h, x, norm=w["norm_2"], bias=w["fc"][1], gelu=self.gelu)
            decode.linear(w["out"][0], x, self.h, bias=w["out"][1], add=True)
        decode.linear(self.wte[: self.c.vocab_size], self.logits, x, norm=self.ln_f)
        self.counts += 1
        self.sampler(self.padded, self.ids)

    def _embed(self, x):
        """Write the tokens' embeddings to x, with the vectors of their positions if the model has those."""
        if self.c.embedding_norm:
            decode.embed(self.ids, self.wte, self.ln_wte, x)
        else:
            x.copy_(self.wte.index_select(0, self.ids))
        if self.positions is not None:
            if self.c.reset_token >= 0:
                self.embedding.masked_fill_(self.ids == self.c.reset_token, 0)
            x += self.positions.index_select(0, self.embedding)
            self.embedding += 1

    def _attend_to_cache(self, w, layer, group):
        """Launch a layer's attention to its KV cache, and to its state if it has one: from x to y."""
        decode.qkv(
            w["qkv"][0],
            self.qkv,
            self.x,
            norm=w["norm_1"],
            bias=w["qkv"][1],
            ids=self.ids,
            gate=w["gate"],
            beta=w["beta"],
            slopes=w["slopes"],
            position=layer.position,
            rates=group.rates,
            rotation=self.rotation,
            cache=layer.cache,
            count=group.count,
            reset_token=self.c.reset_token,
            rounding=self.dtype if self.device.type == "cuda" else torch.float32,
        )
        inputs = self.qkv, self.rotation, layer.cache, group.count
        if group.kind == "softmax":
            decode_softmax.attend_softmax(*inputs, group.sums, self.y, resets=self.c.reset_token >= 0)
        else:
            decode.attend(*inputs, layer.power, group.sums, self.y, group.p)

    def _attend_heinsen(self, w, layer):
        """Launch a layer of Heinsen's attention, from x to y."""
        decode.linear(w["qkv"][0], self.qkv, self.x, norm=w["norm_1"], bias=w["qkv"][1])
        options = dict(reset_token=self.c.reset_token, log_value_bound=layer.log_value_bound)
        decode_heinsen.attend_heinsen(self.qkv, self.ids, layer.state, self.y, **options)

    def capture(self):
        """Capture the token as a CUDA graph.

        It runs once before, to compile. The tensors that this run changes are restored, except entry n of the cache,
        which the next token writes.
        """
        changed = [self.ids, self.counts, self.sampler.index]
        changed += [] if self.embedding is None else [self.embedding]
        for layer in self.layers:
            changed += [layer.position] if layer.group else layer.state
        with device_guard(self.device):
            saved = [x.clone() for x in changed]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._token()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):  # torch's own stays on the first GPU that captures
                self._token()
            for x, saved_x in zip(changed, saved):
                x.copy_(saved_x)
        self.graph = graph

    def step(self):
        """Read the tokens `ids` and overwrite them with the next ones."""
        self.sampler.prepare()
        with device_guard(self.device):
            if self.device.type != "cuda":
                self._token()
            else:
                if self.graph is None:
                    self.capture()
                self.graph.replay()
        self.tokens_left -= 1
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
        first = group.layers[0].power is None
        if first:
            shape = self.B, self.c.n_kv_head, symmetric_power_dim(self.c.head_dim, group.p)
            for layer in group.layers:
                layer.power = self._zeros(*shape, self.c.head_dim, dtype=self.state_dtype), self._zeros(*shape)
        for layer in group.layers:
            decode.flush(layer.cache, group.cached, layer.power, group.p)
        group.cached = 0
        group.count.zero_()
        if first:
            states = []
            for layer in group.layers:
                S, z = layer.power
                states.append(LayerState(layer.position, S=S, z=z, switch_over=group.switch_over))
                layer.cache = ()  # frees the caches before the smaller ones are made
            self._allocate(group, states)
            self.graph = None
            self._count_bytes()

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


def _float32(x):
    """Return a tensor in float32 and contiguous; None stays None."""
    return None if x is None else x.float().contiguous()


def _when_copied(ids, event):
    """Wait for the copy of ids to the CPU, and return them."""
    if event:
        event.synchronize()
    return ids


def failure(model, dtype, state_dtype):
    """Compare a Decoder of weights of `dtype` with GPT.step in float64 on the model's GPU.

    Each kind of layer that the model has is compared, which takes seconds, once (operator/check.py). Returns "" if
    they agree, else one line that says what is wrong.
    """
    if not torch.cuda.is_available():
        return ""
    config, device = model.config, model.transformer.wte.weight.device
    sizes = dict(n_layer=1, vocab_size=min(config.vocab_size, 1000), dropout=0.0)
    sizes["n_positions"] = max(config.n_positions, 64)  # more than are read
    for mix in (block.attn.mix for block in model.transformer.h):
        small = replace(mix.config, **sizes)
        name = f"generation, {type(mix).__qualname__}, {dtype}, states in {state_dtype}, {small}"
        compare = partial(find_failure, small, type(mix), dtype, state_dtype)
        if problem := remember(name, compare, device):
            return problem
    return ""


def find_failure(config, variant, dtype, state_dtype, device="cuda"):
    """Return "" if `measure_errors` are within the tolerance, else one line that says what is wrong."""
    tolerance = max(TOLERANCE[dtype], STATE_TOLERANCE[state_dtype])
    for token, error in enumerate(measure_errors(config, variant, dtype, state_dtype, device)):
        if not error <= tolerance:  # NaN is not
            return f"wrong results, the logits of token {token} have an error of {error:.1e}"
    return ""


@torch.no_grad()
def measure_errors(config, variant, dtype, state_dtype, device="cuda"):
    """Return the relative errors of the logits of five tokens, before and after a flush.

    config: a GPTConfig; variant: the class of its layers' attention, a Variant.
    """
    with torch.random.fork_rng([torch.cuda.current_device()] if device == "cuda" else []):
        model = GPT(config)
        for block in model.transformer.h:
            block.attn.mix = variant(config)
        model = model.eval().to(device)
        for p in model.parameters():
            if p.dim() > 1:  # weights with which each product counts
                p.normal_(std=p.shape[-1] ** -0.5)
            p.copy_(p.to(dtype))
        ids = torch.randint(config.vocab_size, (2, 4), device=device)
    model, reference, errors = model.to(dtype), copy.deepcopy(model).double(), []
    logits, state = reference.read(ids, reference.empty_state(2, 6))
    decoder = Decoder(model, state, Greedy(device), 8, state_dtype=state_dtype)
    decoder.ids.copy_(logits.argmax(-1))
    for _ in range(5):
        expected, state = reference.step(decoder.ids.clone(), state)
        decoder.step()
        errors.append(((decoder.logits - expected).norm() / expected.norm()).item())
    return errors


class Greedy:
    """Takes the likeliest token: the sampler of `measure_errors`."""

    def __init__(self, device):
        self.index = torch.zeros(1, device=device)

    def prepare(self):
        pass

    def __call__(self, logits, ids):
        ids.copy_(logits.argmax(-1))
