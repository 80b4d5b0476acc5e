"""Generate text from a trained run, at a cost a token that does not grow with the context (for the sympow variants).

    python sample.py                                            # the newest run, one sample
    python sample.py --out_dir=out/demo --prompt="def " --num_samples=3 --max_new_tokens=200
    python sample.py --prompt=FILE:notes.txt --temperature=0 --json

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

import checkpoint
from config import choose_device, read_settings, refuse
from data.tokenizer import load_tokenizer
from model import GPT, GPTConfig


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
    form: str = "auto"  # auto: read keys and values until a state is cheaper; recurrent: a state from the first token
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    dtype: str = "auto"  # auto: bfloat16 on GPUs that have it, else float32
    json: bool = False  # end with one JSON line of timings


def main():
    given, _ = read_settings((SampleConfig,), sys.argv[1:], usage=__doc__)
    cfg = SampleConfig(**given)
    check(cfg)
    run = cfg.out_dir or newest_run()
    folder = checkpoint.newest(run)
    if not folder:
        refuse(f"no checkpoint in {run}: train one with `python train.py config/demo.py`")
    run = checkpoint.run_of(run)
    text = cfg.prompt or cfg.start
    if text.startswith("FILE:"):
        try:
            with open(text[5:], encoding="utf-8") as f:
                text = f.read()
        except (OSError, UnicodeDecodeError) as error:
            refuse(f"cannot read the prompt: {error}")
    model, tokenizer, device, autocast = load_run(run, folder, cfg)
    fold = model.transformer.h[0].attn.mix.fold
    if cfg.form == "recurrent":
        if fold == "never":
            refuse(f"attention={model.config.attention} has no recurrent form: it keeps every key and value")
        fold = "always"

    prompt = [tokenizer.eot, *tokenizer.encode(text)]
    timings = Timings(device)
    samples = [tokenizer.stream() for _ in range(cfg.num_samples)]
    texts = [text] * cfg.num_samples
    print(text, end="", flush=True) if cfg.num_samples == 1 else None
    try:
        with torch.inference_mode(), autocast:
            for ids in generate(model, prompt, cfg, fold, timings):
                for i, token in enumerate(ids):
                    piece = samples[i].feed(token)
                    texts[i] += piece
                    if cfg.num_samples == 1:
                        print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass  # what was drawn so far is printed
    except MemoryError as error:
        sys.exit(f"sample.py: {error}")
    if cfg.num_samples == 1:
        print(samples[0].flush())
    else:
        print("\n---------------\n".join(t + s.flush() for t, s in zip(texts, samples)))
    report = timings.report(cfg.num_samples, len(prompt))
    print(
        f"[{run}, {model.config.attention}: prompt {report['prefill_tokens_per_second']:,.0f} tokens/s, "
        f"then {report['decode_tokens_per_second']:,.0f} tokens/s, state {report['state_bytes'] / 1e6:,.1f} MB"
        + (
            f", peak GPU memory {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB]"
            if device.type == "cuda"
            else "]"
        ),
        file=sys.stderr,
    )
    if cfg.json:
        print(json.dumps(report))


def generate(model, prompt, cfg, fold="auto", timings=None):
    """Yields the next token of each sample, a list of num_samples ids, max_new_tokens times.

    prompt: at least one id. It is read once; every sample draws its own first token and goes on from there.
    """
    device = model.transformer.wte.weight.device
    timings = timings or Timings(device)
    generators = [torch.Generator().manual_seed(cfg.seed + i) for i in range(cfg.num_samples)]
    timings.start()
    logits, state = model.read(torch.tensor([prompt], device=device), model.empty_state(1, fold))
    logits, state = logits.expand(cfg.num_samples, -1), state.repeat(cfg.num_samples)
    timings.prefilled(state)
    for i in range(cfg.max_new_tokens):
        ids = draw(logits, cfg, generators)
        yield ids.tolist()
        if i + 1 < cfg.max_new_tokens:
            logits, state = model.step(ids, state)
        timings.decoded(state)


def draw(logits, cfg, generators):
    """One token a row of logits [N, vocab_size]: [N] int64. Row i uses one number of generators[i]."""
    if cfg.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / cfg.temperature
    if 0 < cfg.top_k < logits.shape[-1]:
        smallest = logits.topk(cfg.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    probabilities = logits.softmax(-1)
    if cfg.top_p < 1:
        values, order = probabilities.sort(descending=True)
        enough = values.cumsum(-1) - values >= cfg.top_p  # those before a token already have top_p
        probabilities = probabilities.scatter(-1, order, values.masked_fill(enough, 0))
    total = probabilities.double().cumsum(-1)
    u = torch.stack([torch.rand(1, generator=g, dtype=torch.float64) for g in generators]).to(total.device)
    return torch.searchsorted(total, u * total[:, -1:], right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


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

    def prefilled(self, state):
        now = self._now()
        self.prefill, self.last, self.state_bytes = now - self.last, now, state.bytes()

    def decoded(self, state):
        now = self._now()
        self.steps.append(now - self.last)
        self.last, self.state_bytes = now, state.bytes()

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
    with open(os.path.join(run, "config.json")) as f:
        saved = json.load(f)["model"]
    device, dtype = choose_device(cfg.device, cfg.dtype)
    model = GPT(GPTConfig(**saved))
    checkpoint.load(folder, model)
    model.to(device).eval()
    autocast = torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext()
    return model, load_tokenizer(run), device, autocast


def newest_run():
    """The run in out/ with the newest checkpoint."""
    runs = [r for r in glob.glob("out/*") if checkpoint.newest(r)]
    if not runs:
        refuse("no run in out/: train one with `python train.py config/demo.py`, or name one with --out_dir")
    return max(runs, key=lambda r: os.path.getmtime(checkpoint.newest(r)))


def check(cfg):
    for name, fits, want in (
        ("num_samples", cfg.num_samples >= 1, "at least 1"),
        ("max_new_tokens", cfg.max_new_tokens >= 1, "at least 1"),
        ("temperature", cfg.temperature >= 0, "0 (greedy) or positive"),
        ("top_k", cfg.top_k >= 0, "positive, or 0 for all"),
        ("top_p", 0 < cfg.top_p <= 1, "in (0, 1]"),
        ("form", cfg.form in ("auto", "recurrent"), "auto or recurrent"),
        ("dtype", cfg.dtype in ("auto", "float32", "bfloat16"), "auto, float32 or bfloat16"),
    ):
        if not fits:
            refuse(f"{name} must be {want}, got {getattr(cfg, name)}")


if __name__ == "__main__":
    main()
