"""Generate token after token on a GPU: the buffers of kernels/decode.py, and the CUDA graph of a token.

    decoder = Decoder(model, state, sampler, max_new_tokens=500)     # state: a ModelState, from reading the prompt
    for ids in decoder.tokens(500): ...                              # [B] int64 on the CPU
    state = decoder.state()                                          # a ModelState again

The graph holds the whole token, from its row of the embedding to the next one's id; the host launches it and reads ids
that are a token or two old, so that GPU and host do not wait for each other. A flush is launched between two tokens. It
generates with variants that decode on the kernels (attention/variant.py), whose state is a LayerState: here in buffers
of a fixed size, a KV cache until it takes as much memory as a state, then the state and a cache of FLUSH_EVERY tokens.
"""

import copy
from dataclasses import dataclass, replace

import torch

from attention.check import remember
from attention.embedding import symmetric_power_dim
from attention.rotary import rotation_rates
from attention.state import LayerState
from kernels import decode, sampling
from model import GPT, ModelState

# of logits in `failure`, by the dtype of weights and of states; measured are 7e-3, 6e-6 and (p = 6) 3e-2
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
STATE_TOLERANCE = {torch.bfloat16: 1e-1, torch.float32: 0.0}
AHEAD = 2  # tokens that are launched before the first of them is read


@dataclass
class LayerBuffers:
    """One layer's state on the GPU."""

    position: torch.Tensor  # [B] float64
    cache: tuple  # keys, values [B, C, Hkv, D], sums of log_g [B, C, Hkv] float64, counts of resets [B, C, Hkv] int32
    power: tuple | None  # S [B, Hkv, Dphi, D] and z [B, Hkv, Dphi] float32, of the tokens before the cached ones

    def tensors(self):
        return self.position, *self.cache, *(self.power or ())


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
        self.c, self.sampler, self.n_tokens = model.config, sampler, state.n_tokens
        w = model.transformer.wte.weight
        self.device, self.dtype = w.device, dtype or w.dtype
        layers = state.layers
        self.B, self.tokens_left = len(layers[0].position) * num_samples, max_new_tokens
        self.state_dtype, self.switch_over = state_dtype, layers[0].switch_over
        c, D = self.c, self.c.head_dim
        first = model.transformer.h[0].attn.mix
        first.check_memory(layers[0], max_new_tokens, self.B, self.dtype.itemsize, state_dtype, self.device)
        self.weights = [self._weights(block) for block in model.transformer.h]
        t, norm = model.transformer, self._norm
        self.wte, self.ends = w.to(self.dtype), (norm(t.ln_wte), norm(t.ln_f))
        self.rates = rotation_rates(D, c.rope_base, self.device)
        new = lambda *shape, dtype=torch.float32: torch.zeros(shape, dtype=dtype, device=self.device)
        self.x, self.h = new(self.B, c.n_embd), new(self.B, 4 * c.n_embd)
        self.qkv, self.y = new(self.B, (c.n_head + 2 * c.n_kv_head) * D), new(self.B, c.n_head * D)
        self.rotation = new(self.B, 2, D)
        self.padded = new(self.B, -(-c.vocab_size // sampling.SAMPLE_BLOCK) * sampling.SAMPLE_BLOCK)
        self.padded.fill_(float("-inf"))
        self.logits = self.padded[:, : c.vocab_size]
        self.ids, self.count = new(self.B, dtype=torch.int64), new(1, dtype=torch.int32)
        self._allocate(
            [layer.repeat(num_samples) for layer in layers]
        )  # a copy, so that the caller's state is not changed
        if self.cached >= self.limit:
            self._flush()

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

    def _allocate(self, layers):
        """Allocate buffers for these LayerStates and the tokens that will be cached."""
        c, D, n = self.c, self.c.head_dim, layers[0].cached_tokens
        self.limit = layers[0].switch_over_limit(c.p, D, D, self.dtype.itemsize)
        C = int(max(n, min(self.limit, n + self.tokens_left)))
        heads, power = self.B * c.n_head, layers[0].power
        parts = decode.parts_of_cache(heads, C)
        if power is not None:
            parts += decode.parts_of_state(heads, power.z.shape[2], D)
        new = lambda *shape, dtype=torch.float32: torch.zeros(shape, dtype=dtype, device=self.device)
        self.sums = new(parts, self.B, c.n_head, D), new(parts, self.B, c.n_head)
        self.sums += (new(self.B, c.n_head, dtype=torch.int32),)
        self.layers = [self._layer_buffers(layer, n, C) for layer in layers]
        self._bytes = sum(x.numel() * x.element_size() for layer in self.layers for x in layer.tensors())
        self.cached, self.graph = n, None
        self.count.fill_(n)

    def _layer_buffers(self, layer, n, C):
        """Return a LayerState with n cached tokens as LayerBuffers for C tokens."""
        B, H, D, power = self.B, self.c.n_kv_head, self.c.head_dim, layer.power
        new = lambda *shape, dtype: torch.zeros(shape, dtype=dtype, device=self.device)
        cache = (*(new(B, C, H, D, dtype=self.dtype) for _ in range(2)),)
        cache += new(B, C, H, dtype=torch.float64), new(B, C, H, dtype=torch.int32)
        if n:
            cache[0][:, :n], cache[1][:, :n] = layer.k, layer.v
        if n and layer.log_g is not None:
            reset = layer.log_g == float("-inf")
            cache[2][:, :n] = layer.log_g.double().masked_fill(reset, 0).cumsum(1)
            cache[3][:, :n] = reset.cumsum(1)
        if power:
            power = power.S.to(self.state_dtype).contiguous(), power.z.float().contiguous()
        return LayerBuffers(layer.position, cache, power)

    def state(self):
        """Return the ModelState after the tokens read so far."""
        return ModelState([self._layer_state(*pair) for pair in zip(self.weights, self.layers)], self.n_tokens)

    def _layer_state(self, weights, buffers):
        n, (k, v, total, resets) = self.cached, buffers.cache
        S, z = (x.float().clone() for x in buffers.power) if buffers.power else (None, None)
        layer = LayerState(buffers.position.clone(), S=S, z=z, switch_over=self.switch_over)
        if not n:
            return layer
        layer.k, layer.v = k[:, :n].clone(), v[:, :n].clone()
        if self.c.reset_token >= 0 or weights["gate"] is not None or weights["slopes"] is not None:
            difference = lambda x: torch.cat((torch.zeros_like(x[:, :1]), x[:, :n]), 1).diff(dim=1)
            layer.log_g = difference(total).float().masked_fill(difference(resets) > 0, float("-inf"))
        return layer

    def bytes(self):
        """Return the bytes of the state's buffers; called at every token, so it must be cheap."""
        return self._bytes

    # ---- a token

    def _token(self):
        """Launch one token: from ids to logits, and to the ids that the sampler writes."""
        c, x = self.c, self.x
        decode.embed(self.ids, self.wte, self.ends[0], x)
        for w, layer in zip(self.weights, self.layers):
            decode.qkv(
                w["qkv"][0], self.qkv, x, norm=w["norm_1"], bias=w["qkv"][1], ids=self.ids, gate=w["gate"],
                beta=w["beta"], slopes=w["slopes"], position=layer.position, rates=self.rates, rotation=self.rotation,
                cache=layer.cache, count=self.count, reset_token=c.reset_token,
                rounding=self.dtype if self.device.type == "cuda" else torch.float32,
            )  # fmt: skip
            decode.attend(self.qkv, self.rotation, layer.cache, self.count, layer.power, self.sums, self.y, c.p)
            decode.linear(w["proj"][0], x, self.y, bias=w["proj"][1], add=True)
            decode.linear(w["fc"][0], self.h, x, norm=w["norm_2"], bias=w["fc"][1], gelu=True)
            decode.linear(w["out"][0], x, self.h, bias=w["out"][1], add=True)
        decode.linear(self.wte[: c.vocab_size], self.logits, x, norm=self.ends[1])
        self.count += 1
        self.sampler(self.padded, self.ids)

    def capture(self):
        """Capture the token as a CUDA graph, on a GPU.

        It runs once before, to compile. What that run changes is restored, except entry n of the cache, which the next
        token writes.
        """
        if self.device.type != "cuda":
            return
        changed = [self.ids, self.count, self.sampler.at, *(layer.position for layer in self.layers)]
        saved = [x.clone() for x in changed]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._token()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._token()
        for x, before in zip(changed, saved):
            x.copy_(before)
        self.graph = graph

    def step(self):
        """Read the tokens `ids` and overwrite them with the next ones."""
        self.sampler.prepare()
        if self.device.type != "cuda":
            self._token()
        else:
            if self.graph is None:
                self.capture()
            self.graph.replay()
        self.cached, self.n_tokens, self.tokens_left = self.cached + 1, self.n_tokens + 1, self.tokens_left - 1
        if self.cached >= self.limit:
            self._flush()

    def _flush(self):
        """Flush the caches into the states. The first flush allocates the states and then smaller caches."""
        c, first = self.c, self.layers[0].power is None
        if first:
            shape = self.B, c.n_kv_head, symmetric_power_dim(c.head_dim, c.p)
            for layer in self.layers:
                S = torch.zeros(*shape, c.head_dim, dtype=self.state_dtype, device=self.device)
                layer.power = S, torch.zeros(*shape, device=self.device)
        for layer in self.layers:
            decode.flush(layer.cache, self.cached, layer.power, c.p)
        self.cached = 0
        self.count.zero_()
        if first:
            states = [
                LayerState(b.position, S=b.power[0], z=b.power[1], switch_over=self.switch_over) for b in self.layers
            ]
            self.layers = []  # frees the caches before the smaller ones are made
            self._allocate(states)

    def tokens(self, n):
        """Yield the sampled ids [B], on the CPU, n times; the first are already in `ids`."""
        cuda, waiting = self.device.type == "cuda", []
        for i in range(n):
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
    """Return "" if a Decoder of weights of `dtype` agrees with GPT.step in float64 on the current GPU, for a layer of
    each kind that the model has; else one line that says what is wrong. It takes seconds, once (attention/check.py)."""
    if not torch.cuda.is_available():
        return ""
    small = replace(model.config, n_layer=1, vocab_size=min(model.config.vocab_size, 1000), dropout=0.0)
    kinds = dict.fromkeys(type(block.attn.mix) for block in model.transformer.h)
    for kind in kinds:
        name = f"generation, {kind.__qualname__}, {dtype}, states in {state_dtype}, {small}"
        if wrong := remember(name, lambda: _failure(small, kind, dtype, state_dtype)):
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
    """Return the relative errors of the logits of five tokens, before and after a flush, for layers of the class
    `kind`, a Variant, in a model of this GPTConfig."""
    with torch.random.fork_rng([torch.cuda.current_device()] if device == "cuda" else []):
        model = GPT(config)
        for block in model.transformer.h:
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
