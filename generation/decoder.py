"""Generate token after token on a GPU: one token of the model on the kernels of kernels/decode, as one CUDA graph.

    decoder = Decoder(model, state, sampler, max_new_tokens=500)     # state: a ModelState, from reading the prompt
    for ids in decoder.tokens(500): ...                              # [B] int64 on the CPU

The graph holds the whole token, from its row of the embedding to the next one's id. The host launches it and reads ids
that are a token or two old, so that GPU and host do not wait for each other. A flush is launched between two tokens.

This repeats the forward pass of model.py, and never runs it: `why_not` compares the two on the model's own weights.
Layers of different attentions stand side by side; layers.py has one class for each kind of them.
"""

import copy
import functools
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from sympow import check_choice
from sympow.code import record_code
from ..attention.operator.check import remember
from ..attention.operator.memory import check_generation_fits
from ..attention.variant import decoding_kernels
from ..data.meta import hash_json
from ..kernels.common import device_guard
from ..kernels.decode import sampling
from ..kernels.decode.linear import Linear, Norm, embed, linear
from ..kernels.decode.qkv import Gates
from ..layers.activation import GATED, mlp_widths
from ..layers.norm import NORMS
from ..model import GPT
from .layers import EMBEDDINGS, LAYERS, Buffers, Weights, float32
from .steps import Sampler

# of logits in `compare`, by the dtype of weights and of states; measured are 7e-3, 6e-6 and (p = 6) 3e-2
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
# of logits in `Decoder.why_not`, where the model is as exact as the decoder: a changed model is off by 10% and more.
# Rounding to bfloat16 is 8e-3 to 1.4e-2 in 12 layers, and grows with their number; float32 has products in tf32.
MODEL_TOLERANCE = {torch.bfloat16: 5e-2, torch.float32: 5e-3}
STATE_TOLERANCE = {torch.bfloat16: 1e-1, torch.float32: 0.0}
GELU_KINDS = {"gelu": 1, "gelu_tanh": 2, "swiglu": 0}  # of kernels/decode/linear.py; SwiGLU comes with the next layer
AHEAD = 2  # tokens that are launched before the first of them is read


class Decoder:
    def __init__(self, model, state, sampler, max_new_tokens, dtype=None, num_samples=1, state_dtype=torch.float32):
        """Allocate the buffers and copy the weights and `state` into them.

        model: a GPT. Its weights are copied in dtype (default: the embedding's).
        state_dtype: the dtype of S between flushes.
        sampler: a steps.Sampler or alike. Called with logits [B, >= vocab_size], -inf beyond the vocabulary, and the
        buffer of ids [B], it writes the next ids there, in a CUDA graph. Its prepare() is called before each token; its
        `index` is a tensor that sampling changes.
        num_samples: how often each of the state's sequences is continued.

        Raises MemoryError before it allocates if the buffers would not fit, and ValueError or AttributeError for a
        model with other layers than model.py has.
        """
        c, wte = model.config, model.transformer.wte.weight
        self.config, self.sampler, self.num_samples, self.device = c, sampler, num_samples, wte.device
        self.attentions = model.attentions()
        dtype, B = dtype or wte.dtype, len(state.layers[0].position) * num_samples
        check_generation_fits(self.attentions, state, max_new_tokens, B, dtype.itemsize, state_dtype, self.device)
        self.buffers = Buffers(c, B, dtype, state_dtype, self.device)
        self._copy_weights(model)
        columns = -(-c.vocab_size // sampling.SAMPLE_BLOCK) * sampling.SAMPLE_BLOCK
        self.padded = torch.full((B, columns), float("-inf"), device=self.device)
        self.logits, self.ids = self.padded[:, : c.vocab_size], self.buffers.ids
        self.load(state, max_new_tokens)

    # ---- weights: matrices in dtype, the rest in float32

    def _copy_weights(self, model):
        c, transformer = self.config, model.transformer
        self.wte = transformer.wte.weight.to(self.buffers.dtype)
        head = self.wte if c.tied_head else model.head_weight().to(self.buffers.dtype)
        self.head = Linear(head[: c.vocab_size], None, _norm(transformer.ln_f))
        self.ln_wte = _norm(transformer.ln_wte) if c.embedding_norm else None
        self.wpe = transformer["wpe"] if "wpe" in transformer else None
        check_choice("activation", c.activation, GELU_KINDS)
        self.gelu, self.gated = GELU_KINDS[c.activation], c.activation in GATED
        self.weights = [self._block_weights(block) for block in transformer.h]

    def _block_weights(self, block):
        c, attn, mlp = self.config, block.attn, block.mlp
        gates, heads = attn.mix.decoder_weights(), c.n_head * c.head_dim
        hidden, width = mlp_widths(c)
        return Weights(
            qkv=self._linear(attn.c_attn, sum(attn.heads) * c.head_dim, c.n_embd, _norm(block.ln_1)),
            proj=self._linear(attn.c_proj, c.n_embd, heads),
            fc=self._linear(mlp.c_fc, hidden, c.n_embd, _norm(block.ln_2)),
            out=self._linear(mlp.c_proj, c.n_embd, width),
            gates=Gates(*map(float32, gates["gate"] or (None, None)), float32(gates["slopes"])),
            beta=float32(gates["beta"]),
            convolution=float32(attn.conv.weight) if attn.conv else None,
            output_gate=float32(attn.output_gate.weight) if attn.output_gate else None,
            head_norms=[float32(norm.weight) for norm in (attn.q_norm, attn.k_norm) if norm],
        )

    def _linear(self, layer, outputs, inputs, norm=Norm()):
        """Return a Linear of an nn.Linear. Raises ValueError for a shape that config has not."""
        if layer.weight.shape != (outputs, inputs):
            raise ValueError(f"a linear layer has the shape {list(layer.weight.shape)}, not {[outputs, inputs]}")
        return Linear(layer.weight.to(self.buffers.dtype), float32(layer.bias), norm)

    # ---- the state in buffers

    def load(self, state, max_new_tokens):
        """Go on from a ModelState, which is copied, for max_new_tokens tokens."""
        buffers, self.tokens_left, self.graph = self.buffers, max_new_tokens, None
        # a count of cached tokens for each layer, 16 bytes a row: kernels want aligned pointers
        self.counts = buffers.zeros(len(self.attentions), 4, dtype=torch.int32)
        self.layers, self.embedding = [], None
        for i, (attention, weights, layer) in enumerate(zip(self.attentions, self.weights, state.layers)):
            make = LAYERS[decoding_kernels(attention)]
            layer = layer.repeat(self.num_samples)
            self.layers.append(make(buffers, weights, attention, layer, self.counts[i, :1], max_new_tokens))
        if state.embedding:
            make = EMBEDDINGS[decoding_kernels(self.wpe)]
            self.embedding = make(buffers, self.wpe, state.embedding.repeat(self.num_samples))
        self._count_bytes()
        self._flush_full()

    def _count_bytes(self):
        parts = self.layers + ([self.embedding] if self.embedding else [])
        self._bytes = sum(x.nbytes for part in parts for x in part.tensors())

    def bytes(self):
        """Return the bytes of the state's buffers; called at every token, so it must be cheap."""
        return self._bytes

    def _flush_full(self):
        """Flush the caches that are full, or at their layer's turn, into the states."""
        with device_guard(self.device):
            count = len(self.layers)
            replaced = [layer.flush_full(self.tokens_left, i / count) for i, layer in enumerate(self.layers)]
        if any(replaced):
            self.graph = None
            self._count_bytes()

    # ---- a token

    def _token(self):
        """Launch one token: from ids to logits, and to the ids that the sampler writes."""
        b = self.buffers
        if self.ln_wte:
            embed(b.ids, self.wte, self.ln_wte, b.x)
        else:
            b.x.copy_(self.wte.index_select(0, b.ids))
        if self.embedding:
            self.embedding.step()
        for weights, layer in zip(self.weights, self.layers):
            layer.step()
            linear(weights.proj, b.x, b.y, add=True)
            linear(weights.fc, b.h, b.x, gelu=self.gelu)
            linear(weights.out, b.x, b.h, gated=self.gated, add=True)
        linear(self.head, self.logits, b.x)
        self.counts += 1
        self.sampler(self.padded, self.ids)

    @contextmanager
    def _restored(self):
        """Restore the tensors that tokens in this context change, except entries of the caches beyond their ends."""
        tensors = [self.ids, self.counts, self.sampler.index]
        tensors += self.embedding.tensors() if self.embedding else []
        tensors += [x for layer in self.layers for x in layer.changes()]
        saved = [x.clone() for x in tensors]
        yield
        for x, saved_x in zip(tensors, saved):
            x.copy_(saved_x)

    def capture(self):
        """Capture the token as a CUDA graph. It runs once before, to compile; the state stays as it was."""
        with device_guard(self.device), self._restored():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._token()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):  # torch's own stays on the first GPU that captures
                self._token()
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
        for layer in self.layers:
            layer.count_token()
        self._flush_full()

    def tokens(self, n):
        """Yield the sampled ids [B], on the CPU, n times; the first are already in `ids`."""
        cuda, waiting = self.device.type == "cuda", []
        for i in range(n):
            with device_guard(self.device):  # not around the yield: the caller's device is its own
                if cuda:
                    ids, event = torch.empty_like(self.ids, device="cpu", pin_memory=True), torch.cuda.Event()
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

    # ---- the comparison with the model

    @torch.no_grad()
    def why_not(self, model, logits, state, tokens=3):
        """Return "" if the decoder computes this model, else by how much the logits differ from model.step's.

        logits and state are the model's after the prompt; the decoder was made from this state, and resumes from it as
        if nothing had happened. The tokens are the likeliest ones after the prompt, fewer if the decoder is made for
        fewer or would flush a cache. Without any, or without memory for model.step's copy of a KV cache, nothing is
        compared here. Layers of these sizes were compared with float64 before.
        """
        count = min(tokens, self.tokens_left - 1, *(layer.room() for layer in self.layers))
        with self._restored():
            try:
                errors = self.errors(model, logits, state, count, self._token)
            except torch.OutOfMemoryError:
                errors = []
        error = torch.stack(errors).max().item() if errors else 0.0
        tolerance = max(MODEL_TOLERANCE[self.buffers.dtype], STATE_TOLERANCE[self.buffers.state_dtype])
        return "" if error <= tolerance else f"logits differ by {error:.1%}"  # NaN does

    def errors(self, model, logits, state, tokens, read):
        """Return the relative errors of the logits for the likeliest tokens after `state`, [1] each.

        read: a method that reads the tokens `ids`, `step` or, without flushes, `_token`.
        """
        errors = []
        for _ in range(tokens):
            ids = logits.argmax(-1)
            logits, state = model.step(ids, state)
            with device_guard(self.device):
                self.ids.copy_(ids.repeat_interleave(self.num_samples))
                read()
            expected = logits.repeat_interleave(self.num_samples, 0).float()
            errors.append((self.logits - expected).norm() / expected.norm())
        return errors


def _norm(layer):
    """Return the Norm of an nn.LayerNorm or nn.RMSNorm."""
    rms = 1 if type(layer) is NORMS["rmsnorm"] else None
    eps = layer.eps or torch.finfo(torch.float32).eps  # None in an nn.RMSNorm means that
    return Norm(float32(layer.weight), float32(getattr(layer, "bias", None)), eps, rms)


def _when_copied(ids, event):
    """Wait for the copy of ids to the CPU, and return them."""
    if event:
        event.synchronize()
    return ids


def compare(model, dtype, state_dtype):
    """Compare a Decoder of weights of `dtype` with GPT.step in float64 on the model's GPU.

    Each kind of layer that the model has is compared, which takes seconds, once (operator/check.py). Returns "" if
    they agree, else one line that says what is wrong.
    """
    if not torch.cuda.is_available():
        return ""
    config, device = model.config, model.transformer.wte.weight.device
    sizes = dict(
        n_layer=1,
        vocab_size=min(config.vocab_size, 1000),
        dropout=0.0,
        n_positions=max(config.n_positions, 64),  # more than are read
    )
    for attention in model.attentions():
        small = replace(attention.config, **sizes, window=min(attention.config.window, 4))  # tokens leave it
        name = f"generation, {type(attention).__qualname__}, {dtype}, states in {state_dtype}, {small}, {model_hash()}"
        compare_layer = partial(find_wrong_token, small, type(attention), dtype, state_dtype)
        if problem := remember(name, compare_layer, device):
            return problem
    return ""


@functools.cache
def model_hash():
    """Return a hash of the sources that a comparison of the decoder depends on, besides the kernels."""
    return hash_json(record_code(("model.py", "layers/", "attention/", "generation/"))["files"])[:16]


@torch.no_grad()
def find_wrong_token(config, variant, dtype, state_dtype, device="cuda"):
    """Return "" if five tokens, before and after a flush, have the right logits, else one line that says which has not.

    config: a GPTConfig; variant: the class of its layers' attention, a Variant.
    """
    with torch.random.fork_rng([torch.cuda.current_device()] if device == "cuda" else []):
        model = GPT(config)
        for block in model.transformer.h:
            block.attn.mix = variant(config)
        model = model.eval().to(device)
        for p in model.parameters():
            p.normal_(std=p.shape[-1] ** -0.5 if p.dim() > 1 else 1)  # so that each product and each vector counts
            p.copy_(p.to(dtype))
        ids = torch.randint(config.vocab_size, (2, 4), device=device)
    model, reference = model.to(dtype), copy.deepcopy(model).double()
    logits, state = reference.read(ids, reference.empty_state(2, 6))
    decoder = Decoder(model, state, Sampler(device, 2, temperature=0), 8, state_dtype=state_dtype)
    tolerance = max(TOLERANCE[dtype], STATE_TOLERANCE[state_dtype])
    for token, error in enumerate(decoder.errors(reference, logits, state, 5, decoder.step)):
        if not error <= tolerance:  # NaN is not
            return f"wrong results, the logits of token {token} have an error of {error.item():.1e}"
    return ""
