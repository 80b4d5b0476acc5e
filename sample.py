"""Generate text from a trained run, at a cost a token that does not grow with the context (for the sympow variants).

    python sample.py                                            # the newest run, one sample
    python sample.py --out_dir=out/demo --prompt="def " --num_samples=3 --max_new_tokens=200
    python sample.py --prompt=FILE:notes.txt --temperature=0 --json
    python sample.py --prompt=FILE:book.txt --save_state=book.state --max_new_tokens=0       # read once,
    python sample.py --load_state=book.state --prompt="Question: "                          # ask many times

The model reads the end-of-text token, then the prompt, then its own tokens one by one: attention/state.py says what it
keeps of them. `generate` below knows token ids and nothing of text.
"""

import json
import os
import sys
from dataclasses import dataclass

import torch

from attention.state import crossover
from generate import CannotSave, Timings, dtype_of_keys, generate
from runs import checkpoint, state_file
from runs.load import load_run, newest_run, no_checkpoint
from runs.settings import read_settings, refuse


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
            before = state_file.load_state(cfg.load_state, model)
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
