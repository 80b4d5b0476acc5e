"""Generate token ids from token ids. sample.py and train.py encode and decode their text.

    for ids in generate(model, prompt_ids, max_new_tokens=100, num_samples=2): ...     # a list of num_samples ids

    logits, state = read_prompt(model, prompt_ids, max_new_tokens=100)                 # the same in two steps,
    for ids in generate(model, prefix=(logits, state), max_new_tokens=100): ...        # with the state in between

On a GPU, decoder.py generates if there are kernels for all layers of the model, and if it computes this model: its
logits are compared with what `GPT.step` computes at the start. Otherwise `GPT.step` generates.
"""

import time
import weakref

import torch

from ..attention.operator.check import first_line
from ..attention.operator.dispatch import warn_once, why_not
from ..attention.positions import check_length
from ..attention.operator.memory import check_generation_fits
from ..attention.variant import decoding_kernels
from ..data.progress import bar

NOT_THIS_MODEL = "the decoder does not compute this model: generating with GPT.step"
_different = weakref.WeakSet()  # the models that were named so already
PIECE = {"cuda": 32768, "cpu": 1024}  # tokens of a prompt that are read in one call


def generate(
    model,
    ids=(),
    *,
    max_new_tokens,
    num_samples=1,
    temperature=0.8,
    top_k=200,
    top_p=1.0,
    seed=1337,
    switch_over=None,
    state_dtype=torch.float32,
    timings=None,
    prefix=None,
    cuda_graph=True,
):
    """Read the prompt; return an iterator over max_new_tokens lists, the next token id of each of num_samples samples.

    ids: the prompt. It is read once; every sample then goes on from there by itself.
    prefix: (logits, ModelState) after the text before the prompt; without it the prompt must have at least one id.
    temperature: 0 always takes the likeliest token; top_k (0: all) and top_p (1: all) bound the choice.
    seed: sample i has its own random numbers, from seed + i.
    switch_over: the number of cached tokens at which a state replaces the KV cache (default: the attention's own).
    state_dtype: the dtype of states between flushes, on the kernels.
    cuda_graph: generate with decoder.py on a GPU.

    Raises MemoryError before anything is read if the state of generation will not fit, TooLong if the text is longer
    than the model's table of positions.
    """
    device = model.transformer.wte.weight.device
    timings = timings or Timings(device)
    if ids or prefix is None:
        prefix = read_prompt(
            model,
            ids,
            prefix,
            max_new_tokens=max_new_tokens,
            num_samples=num_samples,
            switch_over=switch_over,
            state_dtype=state_dtype,
            timings=timings,
        )
    logits, state = prefix
    on_kernels = cuda_graph and max_new_tokens > 0 and decodes_on_kernels(model, state_dtype)
    sampler = Sampler(device, num_samples, on_kernels, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p)
    if on_kernels:
        return _decode(model, logits, state, sampler, max_new_tokens, state_dtype, timings)
    return _step(model, logits, state, sampler, max_new_tokens, timings)


def _decode(model, logits, state, sampler, max_new_tokens, state_dtype, timings):
    """Yield the tokens of `generate` from decoder.py, or from `_step` if the decoder does not compute this model."""
    decoder = _make_decoder(model, logits, state, sampler, max_new_tokens, state_dtype)
    if decoder is None:
        yield from _step(model, logits, state, sampler, max_new_tokens, timings)
        return
    del state  # free it: the decoder has a copy of its own
    sampler.prepare()
    sampler(logits.expand(len(decoder.ids), -1), decoder.ids)
    if max_new_tokens > 1:
        decoder.capture()
    timings.start()
    for tokens in decoder.tokens(max_new_tokens):
        yield tokens.tolist()
        timings.add_step(decoder.bytes())


def _make_decoder(model, logits, state, sampler, max_new_tokens, state_dtype):
    """Return a Decoder that resumes from `state`, or None, with a warning, if its logits differ from GPT.step's."""
    from .decoder import Decoder, check_difference  # Triton is not everywhere

    try:
        samples = len(sampler.generators)
        decoder = Decoder(model, state, sampler, max_new_tokens, cache_dtype(model), samples, state_dtype)
        problem = check_difference(decoder, model, logits, state) if max_new_tokens > 1 else ""
    except (AttributeError, ValueError) as error:  # it has other blocks than model.py
        problem = first_line(error)
    if not problem:
        return decoder
    if model not in _different:
        _different.add(model)
        warn_once(f"{NOT_THIS_MODEL} ({problem})")
    return None


def _step(model, logits, state, sampler, max_new_tokens, timings):
    """Yield the tokens of `generate` from the model's own `step`."""
    samples = len(sampler.generators)
    tokens = torch.empty(samples, dtype=torch.int64, device=logits.device)
    logits, state = logits.expand(samples, -1), state.repeat(samples) if samples > 1 else state
    timings.start()
    for i in range(max_new_tokens):
        if i:
            logits, state = model.step(tokens, state)
        sampler.prepare()
        sampler(logits, tokens)
        yield tokens.tolist()
        timings.add_step(state.bytes())


def read_prompt(
    model,
    ids,
    prefix=None,
    *,
    max_new_tokens=1,
    num_samples=1,
    switch_over=None,
    state_dtype=torch.float32,
    timings=None,
):
    """Return (logits [1, vocab_size] of the next token, the ModelState) after the prompt's ids; see `generate`."""
    device = model.transformer.wte.weight.device
    timings = timings or Timings(device)
    timings.start()
    logits, state = prefix or (None, model.empty_state(1, switch_over))
    text = f"this text, with {max_new_tokens:,} new ones,"  # the last of them is not read
    check_length(model.config, state.n_tokens + len(ids) + max(0, max_new_tokens - 1), text)
    tokens, itemsize = len(ids) + max_new_tokens, cache_dtype(model).itemsize
    check_generation_fits(model.attentions(), state, tokens, num_samples, itemsize, state_dtype, device)
    pieces = torch.tensor([ids], device=device).split(PIECE.get(device.type, 1024), dim=1) if ids else ()
    with bar(total=len(ids), desc="prompt", unit="token", unit_scale=True, leave=False, delay=1) as progress:
        for piece in pieces:
            logits, state = model.read(piece, state, piece.shape[1])
            progress.update(piece.shape[1])
    timings.set_prefill(state.bytes())
    return logits, state


def decodes_on_kernels(model, state_dtype=torch.float32):
    """Return True if decoder.py can generate with this model.

    The model must be on a GPU, with kernels for all its layers and for its position embedding, and each layer must end
    with a projection and an MLP. Before the first use the kernels are compared with float64; if they fail, a warning
    says so.
    """
    embeddings, dtype, D = model.transformer, cache_dtype(model), model.config.head_dim
    device, layers = embeddings.wte.weight.device, [block.attn for block in embeddings.h]
    parts = [layer.mix for layer in layers] + ([embeddings.wpe] if hasattr(embeddings, "wpe") else [])
    if device.type != "cuda" or not all(map(decoding_kernels, parts)) or any(layer.replaces_mlp for layer in layers):
        return False
    powers = {layer.mix.p for layer in layers if decoding_kernels(layer.mix) == "power"}
    reasons = [why_not("quadratic", device, dtype, D, D, p) for p in powers]
    if any(reasons) or why_not("decode", device, dtype, D, D, 2):
        return False
    from .decoder import compare  # Triton is not everywhere

    problem = compare(model, dtype, state_dtype)
    if problem:
        warn_once(f"{NOT_THIS_MODEL} ({problem})")
    return not problem


def cache_dtype(model):
    """Return the dtype of cached keys and values: autocast's if it is on, else the weights' own."""
    weight = model.transformer.wte.weight
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class Sampler:
    """Samples one token for each of num_samples rows of logits.

    Row i uses the numbers of its own generator, from seed + i, whatever the batch and the device are. They are made on
    the CPU, many at a time, so that a call can be captured in a CUDA graph.
    """

    NUMBERS = 1024  # made at a time for each row

    def __init__(self, device, num_samples=1, on_kernel=False, *, seed=1337, temperature=0.8, top_k=200, top_p=1.0):
        """Set up the generators. on_kernel: sample on the GPU kernel, which also takes logits padded with -inf."""
        self.options = dict(temperature=temperature, top_k=top_k, top_p=top_p)
        self.kernel, self.used = None, 0
        if on_kernel:
            from ..kernels.decode import sampling  # Triton is not everywhere

            self.kernel = sampling.sample_next_token
        self.generators = [torch.Generator().manual_seed(seed + i) for i in range(num_samples)]
        self.numbers = torch.empty(num_samples, self.NUMBERS, dtype=torch.float64, device=device)
        self.index = torch.zeros(1, dtype=torch.int64, device=device)  # of the next number

    def prepare(self):
        """Make new numbers if all are used. Call it before each token, outside of a CUDA graph."""
        if self.used % self.NUMBERS == 0:
            rows = [torch.rand(self.NUMBERS, generator=g, dtype=torch.float64) for g in self.generators]
            self.numbers.copy_(torch.stack(rows))
            self.index.zero_()
        self.used += 1

    def __call__(self, logits, ids):
        """Write the next token of each row of logits [N, vocab_size] into ids [N]."""
        if self.kernel and self.options["temperature"] > 0:
            self.kernel(logits.float(), ids, self.numbers, self.index, **self.options)
        else:
            ids.copy_(sample_next_token(logits, self.numbers.index_select(1, self.index), **self.options))
        self.index += 1


def sample_next_token(logits, u, *, temperature, top_k, top_p):
    """Return one token [N] int64 for each row of logits [N, vocab_size], by the numbers u [N, 1] float64 in [0, 1).

    Tokens that are as likely as the last one within top_k or top_p count as within.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p < 1:
        values = probabilities.sort(descending=True).values
        outside = values.cumsum(-1) - values >= top_p  # the likelier tokens have top_p already
        least = values.masked_fill(outside, 1).amin(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0)
    total = probabilities.double().cumsum(-1)
    tokens = torch.searchsorted(total, u * total[:, -1:], right=True)
    return tokens.squeeze(-1).clamp(max=logits.shape[-1] - 1)


class Timings:
    """Records the seconds that the prompt and each token took, until the device has finished them."""

    def __init__(self, device):
        self.device, self.steps = device, []

    def start(self):
        """Begin to time the next step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.last = time.perf_counter()

    def set_prefill(self, state_bytes):
        """Record that the prompt has been read since `start`."""
        started = self.last
        self.start()
        self.prefill, self.state_bytes = self.last - started, state_bytes

    def add_step(self, state_bytes):
        """Record that a token was generated since the last one, or since `start`."""
        now = time.perf_counter()  # the ids have been read, so the device has finished
        self.steps.append(now - self.last)
        self.last, self.state_bytes = now, state_bytes

    def report(self, num_samples, prompt_tokens):
        """Return the figures of `sample.py --json`."""
        seconds = torch.tensor(self.steps or [0.0])
        p50, p99 = (1000 * seconds.quantile(torch.tensor([0.5, 0.99]))).tolist()
        return {
            "prefill_tokens_per_second": prompt_tokens / self.prefill,
            "decode_tokens_per_second": num_samples * len(self.steps) / sum(self.steps) if self.steps else 0.0,
            "decode_ms_per_token_p50": p50,
            "decode_ms_per_token_p99": p99,
            "state_bytes": self.state_bytes,
        }
