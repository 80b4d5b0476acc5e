"""Generate token ids with the model's own step, on every device. train.py's samples come from here; generate.py has the
decoder's kernels too.

    logits, state = read_prompt(model, prompt_ids, max_new_tokens=100)
    sampler = Sampler(device, num_samples=2, seed=1337)
    for ids in generate_by_steps(model, logits, state, sampler, 100): ...     # a list of 2 ids
"""

import time

import torch

from ..attention.positions import check_length
from ..attention.operator.memory import check_generation_fits
from ..data.progress import bar

PIECE = {"cuda": 32768, "cpu": 1024}  # tokens of a prompt that are read in one call
RANGES = (  # of the choice of a token: (name, range in words, function of a value that is True in the range)
    ("temperature", "0 (greedy) or at least 1e-6", lambda x: x == 0 or x >= 1e-6),
    ("top_k", "at least 0", lambda x: x >= 0),
    ("top_p", "in (0, 1]", lambda x: 0 < x <= 1),
)


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
    """Return (logits [1, vocab_size] of the next token, the ModelState) after the prompt's ids; see generate.py."""
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


def generate_by_steps(model, logits, state, sampler, max_new_tokens, timings=None):
    """Yield max_new_tokens lists, the next token id of each of the sampler's rows, after logits [1, vocab_size] and a
    ModelState."""
    samples, timings = len(sampler.generators), timings or Timings(logits.device)
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

    def __init__(self, device, num_samples=1, kernel=None, *, seed=1337, temperature=0.8, top_k=200, top_p=1.0):
        """Set up the generators. kernel: kernels/decode/sampling.py's, which also takes logits padded with -inf.

        Raises ValueError for a temperature, top_k or top_p out of its range.
        """
        self.options = dict(temperature=temperature, top_k=top_k, top_p=top_p)
        for name, allowed, is_allowed in RANGES:
            if not is_allowed(self.options[name]):
                raise ValueError(f"{name} must be {allowed}, got {self.options[name]}")
        self.kernel, self.used = kernel, 0
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
