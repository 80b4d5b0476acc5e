"""Token after token on a GPU: what kernels/decode.py works on, captured as a CUDA graph.

    decoder = Decoder(model, state, sampler, room=500)          # state: a ModelState, from reading the prompt
    for ids in decoder.tokens(500): ...                         # [B] int64 on the CPU
    state = decoder.state()                                     # a ModelState again

The graph holds the whole token, from its row of the embedding to the next one's id; the host launches it and reads
ids that are a token or two old, so that neither waits for the other. A fold is launched between two tokens. What is
kept is what attention/state.py keeps, in buffers of a fixed size: keys and values until they take as much memory as a
state, then the state and FOLD_EVERY of them.
"""

from dataclasses import replace

import torch

from attention.embedding import symmetric_power_dim
from attention.power import PowerState
from attention.rotary import rotation_rates
from attention.state import LayerState, check_memory
from kernels import decode, sampling
from model import ModelState

AHEAD = 2  # tokens that are launched before the first of them is read


class Decoder:
    def __init__(self, model, state, sampler, room, dtype=None, samples=1, state_dtype=torch.float32):
        """model: its weights in dtype (default: the embedding's), S of its states between folds in state_dtype.
        sampler: called with logits [B, >= vocab_size], -inf beyond the vocabulary, and the buffer of ids [B], it writes
        the next ones there (in a CUDA graph); its ready() is called before, its `at` is a tensor that drawing changes.
        room: tokens that will be read at most. samples: of each of the state's sequences.

        Raises MemoryError where what is kept will not fit, before anything is allocated."""
        self.c, self.sampler, self.position = model.config, sampler, state.position
        w = model.transformer.wte.weight
        self.device, self.dtype = w.device, dtype or w.dtype
        layers = state.layers
        self.state_dtype = state_dtype
        self.B, self.room, self.fold = len(layers[0].u) * samples, room, layers[0].fold
        c, D = self.c, self.c.head_dim
        check_memory(c, state, room, self.B, self.dtype.itemsize, state_dtype, self.device)
        self.weights = [self._weights(block) for block in model.transformer.h]
        t, norm = model.transformer, self._norm
        self.wte, self.ends = w.to(self.dtype), (norm(t.ln_wte), norm(t.ln_f))
        self.rates = rotation_rates(D, c.rope_base, self.device)
        new = lambda *shape, dtype=torch.float32: torch.zeros(shape, dtype=dtype, device=self.device)
        self.x, self.h = new(self.B, c.n_embd), new(self.B, 4 * c.n_embd)
        self.qkv, self.y = new(self.B, (c.n_head + 2 * c.n_kv_head) * D), new(self.B, c.n_head * D)
        self.turn = new(self.B, 2, D)
        blocks = -(-c.vocab_size // sampling.SAMPLE_BLOCK)
        self.padded = new(self.B, blocks * sampling.SAMPLE_BLOCK).fill_(float("-inf"))
        self.logits = self.padded[:, : c.vocab_size]
        self.ids, self.count = new(self.B, dtype=torch.int64), new(1, dtype=torch.int32)
        self._take(state, samples)
        if self.n >= self.limit:
            self._fold()

    # ---- weights and buffers

    def _norm(self, layer):
        return layer.weight.float(), None if layer.bias is None else layer.bias.float()

    def _linear(self, layer):
        return layer.weight.to(self.dtype), None if layer.bias is None else layer.bias.float()

    def _weights(self, block):
        mix = block.attn.mix
        gate, beta = getattr(mix, "gate", None), getattr(mix, "W_beta", None)
        learned = gate is not None and hasattr(gate, "W_gamma")
        return dict(
            norm_1=self._norm(block.ln_1), qkv=self._linear(block.attn.c_attn), proj=self._linear(block.attn.c_proj),
            norm_2=self._norm(block.ln_2), fc=self._linear(block.mlp.c_fc), out=self._linear(block.mlp.c_proj),
            gate=(gate.W_gamma.float(), gate.b.float()) if learned else None,
            slopes=-gate.log_g.float() if gate is not None and not learned else None,
            beta=None if beta is None else beta.float(),
        )  # fmt: skip

    def _kept(self, state):
        k = state.layers[0].k
        return 0 if k is None else k.shape[1]

    def _take(self, state, samples=None):
        """Buffers that hold `state`, each sequence `samples` times, and as many tokens more as will be kept. Without
        samples its PowerStates are ours already."""
        c, D, n = self.c, self.c.head_dim, self._kept(state)
        self.limit = state.layers[0].limit(c.p, D, D, self.dtype.itemsize)
        C = int(max(n, min(self.limit, n + self.room)))
        heads, power = self.B * c.n_head, state.layers[0].power
        parts = decode.parts_of_cache(heads, C)
        if power is not None:
            parts += decode.parts_of_state(heads, power.z.shape[2], D)
        new = lambda *shape, dtype=torch.float32: torch.zeros(shape, dtype=dtype, device=self.device)
        self.sums = new(parts, self.B, c.n_head, D), new(parts, self.B, c.n_head)
        self.sums += (new(self.B, c.n_head, dtype=torch.int32),)
        self.layers = []
        for layer in state.layers:
            layer = layer.repeat(samples) if samples else layer
            kept = (*(new(self.B, C, c.n_kv_head, D, dtype=self.dtype) for _ in range(2)),)
            kept += new(self.B, C, c.n_kv_head, dtype=torch.float64), new(self.B, C, c.n_kv_head, dtype=torch.int32)
            if n:
                kept[0][:, :n], kept[1][:, :n] = layer.k, layer.v
            if n and layer.log_g is not None:
                reset = layer.log_g == float("-inf")
                kept[2][:, :n] = layer.log_g.double().masked_fill(reset, 0).cumsum(1)
                kept[3][:, :n] = reset.cumsum(1)
            power = layer.power
            if power:
                power = power.S.to(self.state_dtype).contiguous(), power.z.float().contiguous()
            self.layers.append((layer.u, kept, power))
        tensors = [x for u, kept, power in self.layers for x in (u, *kept, *(power or ()))]
        self._bytes = sum(x.numel() * x.element_size() for x in tensors)
        self.n, self.graph = n, None
        self.count.fill_(n)

    def state(self):
        """The ModelState after the tokens read so far."""
        layers, gated = [], self.c.gated
        for u, (k, v, total, resets), power in self.layers:
            layer = LayerState(
                u.clone(), power=power and PowerState(*(x.float().clone() for x in power)), fold=self.fold
            )
            if self.n:
                log_g = None
                if gated:
                    first = lambda x: torch.cat((torch.zeros_like(x[:, :1]), x[:, : self.n]), 1).diff(dim=1)
                    log_g = first(total).float().masked_fill(first(resets) > 0, float("-inf"))
                layer = replace(layer, k=k[:, : self.n].clone(), v=v[:, : self.n].clone(), log_g=log_g)
            layers.append(layer)
        return ModelState(layers, self.position)

    def bytes(self):
        """Of what is kept; asked for at every token."""
        return self._bytes

    # ---- a token

    def _token(self):
        """From ids to logits, and to the ids that the sampler writes."""
        c, x = self.c, self.x
        decode.embed(self.ids, self.wte, self.ends[0], x)
        for w, (u, kept, power) in zip(self.weights, self.layers):
            decode.qkv(
                w["qkv"][0], self.qkv, x, norm=w["norm_1"], bias=w["qkv"][1], ids=self.ids, gate=w["gate"],
                beta=w["beta"], slopes=w["slopes"], position=u, rates=self.rates, rotation=self.turn, cache=kept,
                count=self.count, reset_token=c.reset_token,
                rounding=self.dtype if self.device.type == "cuda" else torch.float32,
            )  # fmt: skip
            decode.attend(self.qkv, self.turn, kept, self.count, power, self.sums, self.y, c.p)
            decode.linear(w["proj"][0], x, self.y, bias=w["proj"][1], add=True)
            decode.linear(w["fc"][0], self.h, x, norm=w["norm_2"], bias=w["fc"][1], gelu=True)
            decode.linear(w["out"][0], x, self.h, bias=w["out"][1], add=True)
        decode.linear(self.wte[: c.vocab_size], self.logits, x, norm=self.ends[1])
        self.count += 1
        self.sampler(self.padded, self.ids)

    def capture(self):
        """On a GPU, the token as a CUDA graph. It runs once before, to compile; what that changes, but for
        entry n of what is kept, which the next token writes, is put back."""
        if self.device.type != "cuda":
            return
        changed = [self.ids, self.count, self.sampler.at, *(u for u, _, _ in self.layers)]
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
        """Reads `ids`, and puts the next ones in their place."""
        self.sampler.ready()
        if self.device.type != "cuda":
            self._token()
        else:
            if self.graph is None:
                self.capture()
            self.graph.replay()
        self.n, self.position, self.room = self.n + 1, self.position + 1, self.room - 1
        if self.n >= self.limit:
            self._fold()

    def _fold(self):
        """What is kept becomes part of the states; the first time they are made, and the buffers shrink."""
        c, first = self.c, self.layers[0][2] is None
        if first:
            shape = self.B, c.n_kv_head, symmetric_power_dim(c.head_dim, c.p)
            zeros = lambda *shape, dtype=None: torch.zeros(shape, dtype=dtype, device=self.device)
            states = lambda: (zeros(*shape, c.head_dim, dtype=self.state_dtype), zeros(*shape))
            self.layers = [(u, kept, states()) for u, kept, _ in self.layers]
        for _, kept, power in self.layers:
            decode.flush(kept, self.n, power, c.p)
        self.n = 0
        self.count.zero_()
        if first:
            layers = [LayerState(u, power=PowerState(*power), fold=self.fold) for u, _, power in self.layers]
            self._take(ModelState(layers, self.position))

    def tokens(self, n):
        """Yields n times the ids [B] that were drawn, on the CPU; the first are those in `ids` already."""
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
                yield self._read(waiting.pop(0))
        for pair in waiting:
            yield self._read(pair)

    def _read(self, pair):
        ids, event = pair
        if event:
            event.synchronize()
        return ids
