"""Generate text from a trained run, at a cost a token that does not grow with the context (for the sympow variants).

    python sample.py                                            # the newest run, one sample
    python sample.py --out_dir=out/demo --prompt="def " --num_samples=3 --max_new_tokens=200
    python sample.py --prompt=FILE:notes.txt --temperature=0 --json
    python sample.py --prompt=FILE:book.txt --save_state=book.state --max_new_tokens=0       # read once,
    python sample.py --load_state=book.state --prompt="Question: "                          # ask many times

The model reads the end-of-text token, then the prompt, then its own tokens one by one: attention/state.py says what it
keeps of them. `generate` below knows token ids and nothing of text.
"""

import glob
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from attention.state import check_memory, crossover
from data.tokenizer import load_tokenizer
from kernels import why_not
from model import GPT, GPTConfig
from runs import checkpoint
from runs.settings import choose_device, read_settings, refuse


@dataclass
class SampleConfig:
    out_dir: str = ""  # a run's folder; default: the newest in out/
    prompt: str = ""  # a text, or FILE:path
    start: str = ""  # nanoGPT's name for prompt
    num_samples: int = 1
    max_new_tokens: int = 500
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 200  # only the k likeliest tokens; 0: all
    top_p: float = 1.0  # only the likeliest tokens that together have this probability; 1: all
    seed: int = 1337  # sample i draws with seed + i
    save_state: str = ""  # a file for what is kept of everything read so far, when the prompt has been read
    load_state: str = ""  # such a file: the prompt goes on from there
    form: str = "auto"  # auto: read keys and values until a state is cheaper; recurrent: a state from the first token
    fold_at: int = 0  # tokens that are kept before they become a state; 0: as many as take a state's memory
    state_dtype: str = "float32"  # or bfloat16: on a GPU states take half the memory, and are rounded at every fold
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    dtype: str = "auto"  # auto: bfloat16 on GPUs that have it, else float32
    json: bool = False  # end with one JSON line of timings


def main():
    given, _ = read_settings((SampleConfig,), sys.argv[1:], usage=__doc__)
    cfg = SampleConfig(**given)
    check(cfg)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8
    run = cfg.out_dir or newest_run()
    say = lambda line: print(f"sample.py: {line}", file=sys.stderr)
    folder = checkpoint.newest(run, True, say, checkpoint.WEIGHTS)
    if not folder:
        refuse(no_checkpoint(run))
    run = checkpoint.run_of(run)
    text = cfg.prompt or cfg.start
    if text.startswith("FILE:"):
        try:
            with open(text[5:], encoding="utf-8") as f:
                text = f.read()
        except (OSError, UnicodeDecodeError) as error:
            refuse(f"cannot read the prompt: {error}")
    model, tokenizer, device, autocast = load_run(run, folder, cfg)
    if cfg.state_dtype != "float32" and device.type != "cuda":
        refuse(f"state_dtype={cfg.state_dtype} is for GPUs, here states are float32")
    fold = model.transformer.h[0].attn.mix.fold
    if fold == "never" and (cfg.fold_at or cfg.form == "recurrent"):
        refuse(f"attention={model.config.attention} has no recurrent form: it keeps every key and value")

    before = None
    if cfg.load_state:
        try:
            before = checkpoint.load_state(cfg.load_state, model)
        except (OSError, ValueError) as error:
            refuse(f"cannot go on from {cfg.load_state}: {error}")
        fold = before[1].layers[0].fold
    elif cfg.form == "recurrent":
        fold = "always"
    if fold == "auto":
        with autocast:
            c, size, state_dtype = model.config, dtype_of_keys(model).itemsize, getattr(torch, cfg.state_dtype)
        fold = cfg.fold_at or crossover(c.p, c.head_dim, c.head_dim, size, state_dtype)
    prompt = [*([] if before else [tokenizer.eot]), *tokenizer.encode(text)]
    timings = Timings(device)
    samples = [tokenizer.stream() for _ in range(cfg.num_samples)]
    texts = [text] * cfg.num_samples
    try:
        print(text, end="", flush=True) if cfg.num_samples == 1 else None
        with torch.inference_mode(), autocast:
            tokens, before = generate(model, prompt, cfg, fold, timings, before), None
            for ids in tokens:
                for i, token in enumerate(ids):
                    piece = samples[i].feed(token)
                    texts[i] += piece
                    if cfg.num_samples == 1:
                        print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass  # what was drawn so far is printed
    except (MemoryError, torch.OutOfMemoryError) as error:
        sys.exit(f"sample.py: {str(error).splitlines()[0]}")
    except CannotSave as error:
        refuse(error)
    if cfg.num_samples == 1:
        print(samples[0].flush())
    else:
        print("\n---------------\n".join(t + s.flush() for t, s in zip(texts, samples)))
    report = timings.report(cfg.num_samples, len(prompt))
    summary = [
        f"prompt {report['prefill_tokens_per_second']:,.0f} tokens/s",
        f"then {report['decode_tokens_per_second']:,.0f} tokens/s",
        f"state {report['state_bytes'] / 1e6:,.1f} MB",
    ]
    if fold != "never":
        summary.append(f"of fixed size from {1 if fold == 'always' else fold:,} tokens on")
    if device.type == "cuda":
        summary.append(f"peak GPU memory {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB")
    print(f"[{run}, {model.config.attention}: {', '.join(summary)}]", file=sys.stderr)
    if cfg.json:
        print(json.dumps(report))


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
            checkpoint.save_state(cfg.save_state, model, logits, state)
        except OSError as error:
            raise CannotSave(f"cannot write {cfg.save_state}: {error}") from error
    if not cfg.max_new_tokens:
        return
    logits = logits.expand(cfg.num_samples, -1)
    kernels = device.type == "cuda" and graph and c.attention != "softmax"
    if kernels and not why_not(dtype, c.head_dim, c.head_dim, c.p):
        from decoder import Decoder  # not everywhere is Triton
        from kernels import decode

        sampler = Sampler(cfg, device, decode.draw)
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
        """kernel: kernels.decode.draw, in place of `draw` here."""
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


def load_run(run, folder, cfg):
    """The model of a checkpoint, its tokenizer, the device and the autocast context to use."""
    try:
        saved = checkpoint.settings(run)["model"]
    except ValueError as error:
        refuse(error)
    device, dtype = choose_device(cfg.device, cfg.dtype)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches there
    model = GPT(GPTConfig(**saved))
    checkpoint.load(folder, model)
    model.to(device).eval()
    autocast = torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext()
    return model, load_tokenizer(run), device, autocast


def newest_run():
    """The run in out/ with the newest checkpoint."""
    if not (runs := trained_runs()):
        refuse("no run in out/: train one with `python train.py config/demo.py`, or name one with --out_dir")
    return max(runs, key=lambda r: os.path.getmtime(checkpoint.newest(r)))


def no_checkpoint(run):
    """That there is none, and where there are some."""
    runs = ", ".join(trained_runs())
    other = f"there is one in {runs}" if runs else "train one with `python train.py config/demo.py`"
    return f"no checkpoint in {run}: {other}"


def trained_runs():
    return [run for run in sorted(glob.glob("out/*")) if checkpoint.newest(run)]


def check(cfg):
    for name, fits, want in (
        ("num_samples", cfg.num_samples >= 1, "at least 1"),
        ("seed", 0 <= cfg.seed < 2**63 - cfg.num_samples, "positive and below 2^63"),
        ("max_new_tokens", cfg.max_new_tokens >= (not cfg.save_state), "at least 1, or 0 with --save_state"),
        ("temperature", cfg.temperature >= 0, "0 (greedy) or positive"),
        ("top_k", cfg.top_k >= 0, "positive, or 0 for all"),
        ("top_p", 0 < cfg.top_p <= 1, "in (0, 1]"),
        ("fold_at", cfg.fold_at >= 0, "positive, or 0 for as many tokens as take a state's memory"),
        ("form", cfg.form in ("auto", "recurrent"), "auto or recurrent"),
        ("fold_at", not (cfg.fold_at and cfg.form == "recurrent"), "left out with form=recurrent, which folds at once"),
        ("fold_at", not (cfg.fold_at and cfg.load_state), "left out with load_state: the file has its own"),
        ("form", not (cfg.form == "recurrent" and cfg.load_state), "left out with load_state: the file has its own"),
        ("save_state", os.path.isdir(os.path.dirname(cfg.save_state) or "."), "in a folder that is there"),
        ("save_state", not os.path.isdir(cfg.save_state or "file"), "a file, not a folder"),
        ("state_dtype", cfg.state_dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
        ("dtype", cfg.dtype in ("auto", "float32", "bfloat16"), "auto, float32 or bfloat16"),
    ):
        if not fits:
            refuse(f"{name} must be {want}, got {getattr(cfg, name)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
