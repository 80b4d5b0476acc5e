"""Generate text from a trained run, at a constant cost per token, whatever the context (for the sympow variants).

    python sample.py                                            # the newest run, one sample
    python sample.py --out_dir=out/demo --prompt="def " --num_samples=3 --max_new_tokens=200
    python sample.py --prompt=FILE:notes.txt --temperature=0 --json
    python sample.py --prompt=FILE:book.txt --save_state=book.state --max_new_tokens=0       # read once,
    python sample.py --load_state=book.state --prompt="Question: "                          # ask many times

The model reads the end-of-text token, then the prompt, then its own tokens one by one: attention/state.py describes the
state after them, generate.py samples the next token.
"""

import json
import os
import sys
from dataclasses import dataclass

import torch

from sympow.attention.learned_position import TooLong
from sympow.attention.memory import switch_over_tokens
from sympow.data import DataError
from sympow.generation.generate import Timings, cache_dtype, generate, read_prompt
from sympow.generation import state_file
from sympow.runs.load import load_run, newest_run
from sympow.runs.program import check_output, run_program
from sympow.runs.settings import check_ranges, read_settings, refuse


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
    seed: int = 1337  # sample i is generated with seed + i
    save_state: str = ""  # a file for the state after the prompt
    load_state: str = ""  # such a file: the prompt goes on from there
    form: str = "auto"  # auto: a KV cache until a state is cheaper; recurrent: a state from the first token on
    switch_over: int = 0  # cached tokens at which a state replaces the KV cache; 0: as many as take its memory
    state_dtype: str = "float32"  # or bfloat16: on a GPU states take half the memory, and are rounded at every flush
    device: str = "auto"  # auto: cuda or cpu; cuda:1, ...
    dtype: str = "auto"  # auto: bfloat16 on GPUs that have it, else float32
    json: bool = False  # end with one JSON line of timings


def main():
    given, _ = read_settings((SampleConfig,), sys.argv[1:], usage=__doc__)
    cfg = SampleConfig(**given)
    if cfg.prompt and cfg.start:
        refuse("start is another name for prompt: give one of them")
    check(cfg)
    text = read_text(cfg.prompt or cfg.start)
    run, model, tokenizer, device, autocast = load_run(cfg.out_dir or newest_run(), cfg)
    if cfg.state_dtype != "float32" and device.type != "cuda":
        refuse(f"state_dtype={cfg.state_dtype} is for GPUs, here states are float32")
    with autocast:
        switch_over = choose_switch_over(model, cfg)
    try:
        prompt = [*([] if cfg.load_state else [tokenizer.eot]), *tokenizer.encode(text)]
    except DataError as error:
        refuse(error)
    timings = Timings(device)
    try:
        with torch.inference_mode(), autocast:
            limit = write_samples(model, tokenizer, cfg, text, prompt, switch_over, timings)
    except TooLong as error:
        refuse(error)
    except (MemoryError, torch.OutOfMemoryError) as error:
        sys.exit(f"sample.py: {str(error).splitlines()[0]}")
    report = timings.report(cfg.num_samples, len(prompt))
    print_summary(run, model, device, report, limit)
    if cfg.json:
        print(json.dumps(report))


def write_samples(model, tokenizer, cfg, text, prompt, switch_over, timings):
    """Print the samples, a single one while it is generated, several when all are finished; return the number of cached
    tokens from which on the state has a fixed size, or None."""
    before = load_state(cfg.load_state, model) if cfg.load_state else (None, model.empty_state(1, switch_over))
    limit = fixed_size_limit(before[1])
    sizes = dict(max_new_tokens=cfg.max_new_tokens, num_samples=cfg.num_samples)
    sizes |= dict(state_dtype=getattr(torch, cfg.state_dtype), switch_over=switch_over, timings=timings)
    read, before = read_prompt(model, prompt, before, **sizes), None  # the loaded state need not be there twice
    if not read[0].isfinite().all():
        sys.exit("sample.py: the model has no finite logits after the prompt: its weights, or the state, are not sound")
    if cfg.save_state:
        save_state(cfg.save_state, model, *read)
        if not cfg.max_new_tokens:
            return limit  # the text was read for its state, and may be a book
    decoders, texts = [tokenizer.stream() for _ in range(cfg.num_samples)], [text] * cfg.num_samples
    alone = cfg.num_samples == 1
    if alone:
        print(text, end="", flush=True)
    options = {name: getattr(cfg, name) for name in ("temperature", "top_k", "top_p", "seed")}
    tokens, read = generate(model, before=read, **sizes, **options), None  # which frees its memory when it can
    try:
        for ids in tokens:
            for i, token in enumerate(ids):
                piece = decoders[i].feed(token)
                texts[i] += piece
                if alone:
                    print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass  # what was generated so far is printed
    if alone:
        print(decoders[0].flush())
    else:
        print("\n---------------\n".join(t + decoder.flush() for t, decoder in zip(texts, decoders)))
    return limit


def fixed_size_limit(state):
    """Return the number of tokens from which on a ModelState has a fixed size, or None if one of its layers grows or
    has no such number."""
    limits = [1 if layer.fixed_size else layer.settings().get("switch_over") for layer in state.layers]
    limits = [1 if limit == "always" else limit for limit in limits]
    return max(limits) if all(isinstance(limit, int) for limit in limits) else None


def print_summary(run, model, device, report, limit):
    """Print one line on stderr: speed, memory, and from which token on (`limit`) the state has a fixed size."""
    summary = [
        f"prompt {report['prefill_tokens_per_second']:,.0f} tokens/s",
        f"then {report['decode_tokens_per_second']:,.0f} tokens/s",
        f"state {report['state_bytes'] / 1e6:,.1f} MB",
    ]
    if limit:
        summary.append(f"of fixed size from {limit:,} tokens on")
    if device.type == "cuda":
        summary.append(f"peak GPU memory {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB")
    print(f"[{run}, {model.config.attention}: {', '.join(summary)}]", file=sys.stderr)


def read_text(prompt):
    """Return the prompt's text, from its file for FILE:path."""
    if not prompt.startswith("FILE:"):
        try:
            prompt.encode()
        except UnicodeEncodeError:
            refuse("the prompt is not UTF-8")
        return prompt
    try:
        with open(prompt[5:], encoding="utf-8", newline="") as f:  # line ends as they are, as prepare.py reads them
            return f.read()
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"cannot read the prompt {prompt[5:]!r}: {getattr(error, 'strerror', error)}")


def choose_switch_over(model, cfg):
    """Return the number of cached tokens at which a state replaces the KV cache, or None to leave it to the attention;
    refuse if there is no state."""
    mixes = [block.attn.mix for block in model.transformer.h]
    own = {mix.switch_over for mix in mixes}
    if own <= {"never", None}:
        if cfg.switch_over or cfg.form == "recurrent":
            name, given = model.config.attention, "switch_over" if cfg.switch_over else "form=recurrent"
            if "never" not in own:
                refuse(f"attention={name} takes no {given}: it has no KV cache that becomes a state")
            keeps = "it keeps" if own == {"never"} else "the layers that have a KV cache keep"
            refuse(f"attention={name} has no recurrent form: {keeps} every key and value")
        return None
    if cfg.form == "recurrent":
        return "always"
    if cfg.switch_over or own - {"never", None} != {"auto"}:
        return cfg.switch_over or None
    D, powers = model.config.head_dim, {mix.p for mix in mixes if mix.switch_over == "auto"}
    sizes = D, D, cache_dtype(model).itemsize, getattr(torch, cfg.state_dtype)
    return max(switch_over_tokens(p, *sizes) for p in powers)


def load_state(path, model):
    """Return (logits, ModelState) from a file; refuse one that cannot be used with this model."""
    try:
        return state_file.load_state(path, model)
    except (OSError, ValueError) as error:
        refuse(f"cannot go on from {path}: {error}")


def save_state(path, model, logits, state):
    """Write a state to a file; exit with one line and status 1 if that fails."""
    try:
        state_file.save_state(path, model, logits, state)
    except OSError as error:
        sys.exit(f"sample.py: cannot write {path}: {error}")


def check(cfg):
    """Refuse settings that are out of range, with the value and what would be right."""
    recurrent, loads = cfg.form == "recurrent", bool(cfg.load_state)
    rows = (
        ("num_samples", "at least 1 and below 2^31", lambda x: 1 <= x < 2**31),
        ("seed", "positive and below 2^63", lambda x: 0 <= x < 2**63 - cfg.num_samples),
        ("max_new_tokens", "at least 1, or 0 with --save_state", lambda x: x >= (not cfg.save_state)),
        ("temperature", "0 (greedy) or at least 1e-6", lambda x: x == 0 or x >= 1e-6),
        ("top_k", "positive, or 0 for all", lambda x: x >= 0),
        ("top_p", "in (0, 1]", lambda x: 0 < x <= 1),
        ("switch_over", "positive, or 0 for as many tokens as take a state's memory", lambda x: x >= 0),
        ("form", "auto or recurrent", lambda x: x in ("auto", "recurrent")),
        ("switch_over", "left out with form=recurrent, which has no KV cache", lambda x: not (x and recurrent)),
        ("switch_over", "left out with load_state: the file has its own", lambda x: not (x and loads)),
        ("form", "left out with load_state: the file has its own", lambda x: not (recurrent and loads)),
        ("save_state", "in a folder that is there", lambda x: os.path.isdir(os.path.dirname(x) or ".")),
        ("state_dtype", "float32 or bfloat16", lambda x: x in ("float32", "bfloat16")),
        ("dtype", "auto, float32 or bfloat16", lambda x: x in ("auto", "float32", "bfloat16")),
    )
    try:
        check_ranges(cfg, rows)
        if cfg.save_state:
            check_output(cfg.save_state)
    except ValueError as error:
        refuse(error)
    except OSError as error:
        refuse(f"save_state={cfg.save_state} cannot be written: {error}")


if __name__ == "__main__":
    run_program(main)
