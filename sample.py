"""Generate text from a trained run, at a constant cost per token, whatever the context (for the sympow variants).

    python sample.py                                            # the newest run, one sample
    python sample.py out/demo --prompt="def " --num_samples=3 --max_new_tokens=200
    python sample.py --prompt=FILE:notes.txt --temperature=0 --json
    python sample.py --prompt=FILE:book.txt --save_state=book.state --max_new_tokens=0       # read once,
    python sample.py --load_state=book.state --prompt="Question: "                          # ask many times

The model reads the end-of-text token, then the prompt, then its own tokens one by one. generation/steps.py samples
the next token; attention/state.py describes the state between two tokens.
"""

import json
import os
import sys
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # which python -I leaves out

from sympow.runs import threads  # noqa: F401 (before torch)
import torch

from sympow.attention.positions import TooLong
from sympow.data import DataError
from sympow.data.progress import bar
from sympow.generation import state_file
from sympow.generation.generate import generate
from sympow.generation.steps import RANGES, Timings, cache_dtype, read_prompt
from sympow.runs import checkpoint
from sympow.runs.load import load_run, newest_run
from sympow.runs.program import check_output, run_program, refuse
from sympow.runs.settings import DTYPE_RANGE, check_ranges, read_settings


@dataclass
class SampleConfig:
    out_dir: str = ""  # a folder, also without --out_dir=: a run's, export.py's, transformers'; default: the newest run
    prompt: str = ""  # a text, or FILE:path
    num_samples: int = 1
    max_new_tokens: int = 500
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 200  # only the k likeliest tokens; 0: all
    top_p: float = 1.0  # only the likeliest tokens that together have this probability; 1: all
    seed: int = 1337  # sample i is generated with seed + i
    save_state: str = ""  # a file for the state after the prompt
    load_state: str = ""  # such a file: the prompt continues from there
    switch_over: int = 0  # cached tokens that a state replaces, 1: a state at once; 0: when both are equally large
    state_dtype: str = "float32"  # or bfloat16, on a GPU: half the memory, rounded whenever cached tokens move in
    device: str = "auto"  # auto: cuda or cpu; cuda:1, ...
    dtype: str = "auto"  # auto: bfloat16 on GPUs that have it, else float32
    json: bool = False  # end with one JSON line of timings


def main():
    settings, _ = read_settings((SampleConfig,), sys.argv[1:], usage=__doc__, folders=True)
    cfg = SampleConfig(**settings)
    check(cfg)
    text = read_text(cfg.prompt)
    if cfg.load_state and not cfg.out_dir:
        cfg.out_dir = read_state(state_file.find_run, cfg.load_state)
    cfg.out_dir = cfg.out_dir or newest_run()
    folder, model, tokenizer, device, autocast = load_run(cfg.out_dir, cfg.device, cfg.dtype)
    if cfg.state_dtype != "float32" and device.type != "cuda":
        refuse(f"state_dtype={cfg.state_dtype} is for GPUs, here states are float32")
    timings = Timings(device)
    try:
        prompt = [*([] if cfg.load_state else [tokenizer.start]), *tokenizer.encode(text)]
        with torch.inference_mode(), autocast:
            limit = write_samples(model, tokenizer, cfg, text, prompt, timings)
    except (DataError, TooLong) as error:
        refuse(error)
    except (MemoryError, torch.OutOfMemoryError) as error:
        sys.exit(f"sample.py: {str(error).splitlines()[0]}")
    report = timings.report(cfg.num_samples, len(prompt))
    print_summary(checkpoint.run_of(folder), model, device, report, limit)
    if cfg.json:
        print(json.dumps(report))


def write_samples(model, tokenizer, cfg, text, prompt, timings):
    """Print the samples, a single one while it is generated, several when all are finished.

    Returns the number of cached tokens from which on the state has a fixed size, or None.
    """
    switch_over = choose_switch_over(model, cfg)
    prefix = None, model.empty_state(1, switch_over)
    if cfg.load_state:
        prefix = read_state(state_file.load_state, cfg.load_state, model)
    limit = fixed_size_limit(prefix[1])
    sizes = dict(
        max_new_tokens=cfg.max_new_tokens,
        num_samples=cfg.num_samples,
        state_dtype=getattr(torch, cfg.state_dtype),
        timings=timings,
    )
    # each state is held by one name alone, so that its memory is free when the next one needs it
    prefix = read_prompt(model, prompt, prefix, **sizes)
    if not prefix[0].isfinite().all():
        sys.exit("sample.py: the model has no finite logits after the prompt: its weights, or the state, are not sound")
    if cfg.save_state:
        state_file.save_state(cfg.save_state, model, *prefix, cfg.out_dir)
        print(f"wrote {cfg.save_state}", file=sys.stderr)
        if not cfg.max_new_tokens:
            return limit  # the text was read for its state, and may be a book
    options = {name: getattr(cfg, name) for name in ("temperature", "top_k", "top_p", "seed")}
    tokens = generate(model, prefix=prefix, **sizes, **options)
    del prefix
    read = (prompt or [tokenizer.eot]) if cfg.load_state else prompt[1:]  # the next word keeps its space
    streams = [tokenizer.stream(read) for _ in range(cfg.num_samples)]
    texts = [text] * cfg.num_samples
    alone = cfg.num_samples == 1
    if alone:
        print(text, end="", flush=True)
    try:
        for ids in bar(tokens, total=cfg.max_new_tokens, unit="token", leave=False, disable=alone):
            pieces = [stream.feed(token) for stream, token in zip(streams, ids)]
            texts = [text + piece for text, piece in zip(texts, pieces)]
            if alone:
                print(pieces[0], end="", flush=True)
    except KeyboardInterrupt:
        pass  # the text so far is printed
    if alone:
        print(streams[0].flush())
    else:
        print("\n---------------\n".join(text + stream.flush() for text, stream in zip(texts, streams)))
    return limit


def fixed_size_limit(state):
    """Return the number of tokens from which on a ModelState has a fixed size.

    Returns None if one of its layers grows or has no such number.
    """
    limits = [1 if layer.fixed_size else getattr(layer, "switch_over", None) for layer in state.layers]
    limits = [1 if limit == "always" else limit for limit in limits]
    return max(limits) if all(isinstance(limit, int) for limit in limits) else None


def print_summary(run, model, device, report, limit):
    """Print one line on stderr: speed, memory, and from which token on (`limit`) the state has a fixed size."""
    # 0 where a loaded state stands for the prompt, and where nothing is generated
    speeds = {"prompt ": report["prefill_tokens_per_second"], "": report["decode_tokens_per_second"]}
    speed = ", then ".join(f"{part}{value:,.0f} tokens/s" for part, value in speeds.items() if value)
    summary = [speed, f"state {report['state_bytes'] / 1e6:,.1f} MB"]
    if limit:
        summary.append(f"of fixed size from {limit:,} tokens on")
    if device.type == "cuda":
        summary.append(f"peak GPU memory {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB")
    print(f"[{run}, {model.config.attention}: {', '.join(summary)}]", file=sys.stderr)


def read_text(prompt):
    """Return the prompt's text, from its file for FILE:path."""
    try:
        if prompt.startswith("FILE:"):
            path = os.path.expanduser(prompt[5:])
            with open(path, encoding="utf-8", newline="") as file:  # line ends stay, as prepare.py reads them
                return file.read()
        prompt.encode()
        return prompt
    except UnicodeError:
        refuse("the prompt is not UTF-8")
    except OSError as error:
        refuse(f"cannot read the prompt: {error}")


def choose_switch_over(model, cfg):
    """Return the number of cached tokens at which a state replaces the KV cache, or None to leave it to the attention.

    Refuses a setting that no attention of the model takes.
    """
    attentions = [attention for attention in model.attentions() if attention.switch_over not in ("never", None)]
    if cfg.switch_over and not attentions:
        refuse(f"attention={model.config.attention} takes no switch_over: it has no KV cache that becomes a state")
    if cfg.switch_over or {attention.switch_over for attention in attentions} != {"auto"}:
        return cfg.switch_over or None
    sizes = cache_dtype(model).itemsize, getattr(torch, cfg.state_dtype)
    return max(attention.cache_policy(attention.empty_state(1, "cpu"), *sizes).limit for attention in attentions)


def read_state(read, path, *arguments):
    """Return what a function of state_file reads from a file; refuse one that cannot be used."""
    try:
        return read(path, *arguments)
    except (OSError, ValueError) as error:
        refuse(f"cannot resume from {path}: {error}")


def check(cfg):
    """Refuse settings that are out of range, with the value and what would be right."""
    ranges = [
        *RANGES,
        ("num_samples", "at least 1 and below 2^31", lambda x: 1 <= x < 2**31),
        ("seed", "positive and below 2^63", lambda x: 0 <= x < 2**63 - cfg.num_samples),
        ("max_new_tokens", "at least 1, or 0 with --save_state", lambda x: x >= (not cfg.save_state)),
        ("switch_over", "at least 0", lambda x: x >= 0),
        ("switch_over", "left out with load_state", lambda x: not (x and cfg.load_state)),
        ("state_dtype", ["float32", "bfloat16"]),
        DTYPE_RANGE,
    ]
    try:
        check_ranges(cfg, ranges)
        if cfg.save_state:
            check_output(cfg.save_state)
    except ValueError as error:
        refuse(error)
    except OSError as error:
        refuse(f"save_state={cfg.save_state} cannot be written: {error}")


if __name__ == "__main__":
    run_program(main)
