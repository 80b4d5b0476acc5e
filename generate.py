"""Token ids in, token ids out: what sample.py and the samples during training share. It knows nothing of text."""

import time

import torch

from attention import power
from attention.state import check_memory
from kernels import unsupported_reason
from runs import state_file


def generate(model, prompt, cfg, fold="auto", timings=None, before=None, graph=True):
    """Yields the next token of each sample, a list of num_samples ids, max_new_tokens times.

    prompt: ids. It is read once; every sample draws its own first token and goes on from there. before: (logits, state)
    after what was read before the prompt; without it the prompt has at least one id. graph: on a GPU, with decoder.py.
    """
    device = model.transformer.wte.weight.device
    timings = timings or Timings(device)
    timings.start()
    logits, state = before or (None, model.empty_state(1, fold))
    before, c, state_dtype = None, model.config, getattr(torch, cfg.state_dtype)
    dtype = dtype_of_keys(model)
    check_memory(c, state, len(prompt) + cfg.max_new_tokens, cfg.num_samples, dtype.itemsize, state_dtype, device)
    if prompt:
        logits, state = model.read(torch.tensor([prompt], device=device), state)
    timings.prefilled(state.bytes())
    if cfg.save_state:
        try:
            state_file.save_state(cfg.save_state, model, logits, state)
        except OSError as error:
            raise CannotSave(f"cannot write {cfg.save_state}: {error}") from error
    if not cfg.max_new_tokens:
        return
    logits = logits.expand(cfg.num_samples, -1)
    kernels = device.type == "cuda" and graph and c.attention != "softmax"
    if kernels and not (power.disabled or unsupported_reason("quadratic", dtype, c.head_dim, c.head_dim, c.p)):
        from decoder import Decoder  # not everywhere is Triton
        from kernels.sampling import sample_next_token

        sampler = Sampler(cfg, device, sample_next_token)
        decoder = Decoder(model, state, sampler, cfg.max_new_tokens, dtype, cfg.num_samples, state_dtype)
        del state  # what one sequence keeps need not be there twice
        sampler.ready()
        sampler(logits, decoder.ids)
        if cfg.max_new_tokens > 1:
            decoder.capture()
        timings.start()
        for ids in decoder.tokens(cfg.max_new_tokens):
            yield ids.tolist()
            timings.decoded(decoder.bytes())
        return
    sampler, ids = Sampler(cfg, device), torch.empty(cfg.num_samples, dtype=torch.int64, device=device)
    state = state.repeat(cfg.num_samples) if cfg.num_samples > 1 else state
    for i in range(cfg.max_new_tokens):
        sampler.ready()
        sampler(logits, ids)
        yield ids.tolist()
        if i + 1 < cfg.max_new_tokens:
            logits, state = model.step(ids, state)
        timings.decoded(state.bytes())


def dtype_of_keys(model):
    """Of keys and values: autocast's where it is on, else that of the weights."""
    weight = model.transformer.wte.weight
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class CannotSave(OSError):
    pass


class Sampler:
    """Draws one token for each sample; sample i with the numbers of its own generator, of seed + i, whatever the batch
    and the device. They are made on the CPU, many at a time, so that a CUDA graph can hold the drawing."""

    AT_ONCE = 1024

    def __init__(self, cfg, device, kernel=None):
        """kernel: kernels.sampling.sample_next_token, in place of `draw` here."""
        self.cfg, self.kernel, self.used = cfg, kernel, 0
        self.generators = [torch.Generator().manual_seed(cfg.seed + i) for i in range(cfg.num_samples)]
        self.numbers = torch.empty(cfg.num_samples, self.AT_ONCE, dtype=torch.float64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)

    def ready(self):
        """To be called before each drawing: sees to it that there are numbers."""
        if self.used % self.AT_ONCE == 0:
            new = [torch.rand(self.AT_ONCE, generator=g, dtype=torch.float64) for g in self.generators]
            self.numbers.copy_(torch.stack(new))
            self.at.zero_()
        self.used += 1

    def __call__(self, logits, ids):
        """logits [N, vocab_size] -> ids [N], in place."""
        if self.kernel and self.cfg.temperature > 0:
            options = {name: getattr(self.cfg, name) for name in ("temperature", "top_k", "top_p")}
            self.kernel(logits.float(), ids, self.numbers, self.at, **options)
        else:
            ids.copy_(draw(logits, self.cfg, self.numbers.index_select(1, self.at)))
        self.at += 1


def draw(logits, cfg, u):
    """One token a row of logits [N, vocab_size]: [N] int64, by the numbers u [N, 1] float64 in [0, 1). Of tokens as
    likely as the last that top_k or top_p takes, all are taken."""
    if cfg.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / cfg.temperature
    if 0 < cfg.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(cfg.top_k).values[:, -1:], float("-inf"))
    probabilities = logits.softmax(-1)
    if cfg.top_p < 1:
        values = probabilities.sort(descending=True).values
        enough = values.cumsum(-1) - values >= cfg.top_p  # those before a token already have top_p
        least = values.masked_fill(enough, 1).amin(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0)
    total = probabilities.double().cumsum(-1)
    drawn = torch.searchsorted(total, u * total[:, -1:], right=True)
    return drawn.squeeze(-1).clamp(max=logits.shape[-1] - 1)


class Timings:
    """Seconds of the prompt and of each token, from when the device has done it."""

    def __init__(self, device):
        self.device, self.prefill, self.steps, self.state_bytes = device, 0.0, [], 0

    def _now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def start(self):
        self.last = self._now()

    def prefilled(self, state_bytes):
        now = self._now()
        self.prefill, self.last, self.state_bytes = now - self.last, now, state_bytes

    def decoded(self, state_bytes):
        now = time.perf_counter()  # the ids have been read, so the device has done them
        self.steps.append(now - self.last)
        self.last, self.state_bytes = now, state_bytes

    def report(self, samples, prompt_tokens):
        steps = sorted(self.steps) or [0.0]
        at = lambda share: 1000 * steps[min(len(steps) - 1, int(share * len(steps)))]
        return {
            "prefill_tokens_per_second": prompt_tokens / self.prefill if self.prefill else 0.0,
            "decode_tokens_per_second": samples * len(steps) / sum(steps) if sum(steps) else 0.0,
            "decode_ms_per_token_p50": at(0.50),
            "decode_ms_per_token_p99": at(0.99),
            "state_bytes": self.state_bytes,
        }
