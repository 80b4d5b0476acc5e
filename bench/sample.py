"""Measure generation on one GPU: a 124M model with gated sympow beside transformers' GPT-2 of the same size.

    python -m bench.sample                                      # batch 1 and 64, after 1,000 and 1,000,000 tokens
    python -m bench.sample --only sympow_gating --batch 1 8 64 256 --context 1000 --json out/sample.json
    python -m bench.sample --plot docs/data/training_cost.json docs/data/generation_cost.json   # docs/data/cost.png

Weights are random and in bfloat16, states in float32 or --state_dtype; tokens are sampled with sample.py's defaults. A
line has the tokens a second of all samples together, the median and the 99th percentile of the milliseconds from one
token to the next, and the allocated memory. --plot draws the time of a token over the context, in training and in
generation of one text, from what bench.train and this program have written with --json.
"""

import gc
import time
from itertools import product
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

from sympow.bench.timing import (
    finish,
    make_parser,
    milliseconds,
    print_row,
    print_titles,
    require_gpu,
)
from sympow.bench.train import VARIANTS
from sympow.data import describe_error
from sympow.data.files import read_json
from sympow.generation.decoder import Decoder
from sympow.generation.steps import PIECE, Sampler
from sympow.kernels.decode.sampling import sample_next_token
from sympow.model import GPT, GPTConfig
from sympow.runs.plots import make_figure, save_figure
from sympow.runs.program import output_file, run_program

LABELS = {  # of the picture
    "softmax": "softmax",
    "softmax_window": "softmax in a window of 2,048",
    "sympow_gating": "power attention, p=2, gated",
    "hybrid": "three layers of p=2 to one window",
}
SWITCH_OVER = 512  # tokens, fewer than any context that is measured, so that each has a state
WARM_UP = 200
PREFILL = 65536  # tokens
NAMES = ["transformers_dynamic", "transformers_static", *VARIANTS]
COLUMNS = {  # key of a row -> (title, place, format)
    "name": ("name", "<22", "s"),
    "batch": ("batch", ">5", "d"),
    "context": ("context", ">9", ",d"),
    "tokens_per_second": ("tokens/s", ">9", ",.0f"),
    "p50": ("p50 ms", ">8", ".3f"),
    "p99": ("p99 ms", ">8", ".3f"),
    "allocated_mb": ("MB", ">8", ",.0f"),
}
PREFILL_COLUMNS = {
    "name": ("name", "<22", "s"),
    "prefill_tokens_per_second": ("prompt tokens/s", ">15", ",.0f"),
}


def measure_ours(settings, batch, context, tokens, state_dtype):
    """Return the figures of one line of the table for our model."""
    model = GPT(GPTConfig(**settings)).cuda().eval()
    ids = torch.randint(model.config.vocab_size, (1, context), device="cuda")
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        logits, state = model.read(ids, model.empty_state(1, SWITCH_OVER), PIECE["cuda"])
        sampler = Sampler(torch.device("cuda"), batch, sample_next_token)
        decoder = Decoder(model, state, sampler, WARM_UP + tokens, torch.bfloat16, batch, state_dtype)
        sampler.prepare()
        sampler(logits.expand(batch, -1), decoder.ids)
        del ids, state, logits
        for _ in decoder.tokens(WARM_UP):
            pass
        times = [time.perf_counter()]
        for _ in decoder.tokens(tokens):
            times.append(time.perf_counter())
    return summarize(times, batch) | dict(allocated_mb=torch.cuda.memory_allocated() / 1e6)


def measure_transformers(cache, batch, context, tokens):
    """Return the figures for transformers' GPT-2; it runs once before it is timed, to compile for its static cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_positions=4096)).cuda().bfloat16().eval()
    ids = torch.randint(50257, (batch, context), device="cuda")
    options = dict(
        do_sample=True,
        top_k=200,
        temperature=0.8,
        pad_token_id=0,
        eos_token_id=None,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
    )
    options |= dict(cache_implementation="static") if cache == "static" else {}
    with torch.inference_mode():
        for _ in range(2):
            times = []
            streamer = SimpleNamespace(put=lambda ids: times.append(time.perf_counter()), end=lambda: None)
            model.generate(ids, streamer=streamer, **options)
    return summarize(times[2:], batch) | dict(allocated_mb=torch.cuda.max_memory_allocated() / 1e6)


def summarize(times, batch):
    """Return tokens a second, and percentiles of the milliseconds between tokens, given the times of all tokens."""
    steps = 1000 * np.diff(times)
    p50, p99 = np.quantile(steps, (0.5, 0.99)).tolist()
    return dict(tokens_per_second=1000 * batch / steps.mean().item(), p50=p50, p99=p99)


def measure_prefill(settings):
    """Return tokens a second of reading a prompt of PREFILL tokens."""
    model = GPT(GPTConfig(**settings)).cuda().eval()
    ids = torch.randint(model.config.vocab_size, (1, PREFILL), device="cuda")

    def read():
        model.read(ids, model.empty_state(1), PIECE["cuda"])

    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        duration = median([milliseconds(read) for _ in range(6)][2:])  # two calls do not count
    return dict(prefill_tokens_per_second=1000 * PREFILL / duration)


def measure(name, batch, context, args):
    """Return a row of the table: the figures, or why they could not be measured."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    row = dict(name=name, batch=batch, context=context)
    try:
        if name in VARIANTS:
            state_dtype = getattr(torch, args.state_dtype)
            return row | measure_ours(VARIANTS[name], batch, context, args.tokens, state_dtype)
        return row | measure_transformers(name.split("_")[1], batch, context, args.tokens)
    except Exception as error:  # no transformers, out of memory: the others go on
        return row | dict(failed=describe_error(error))


def plot_costs(training, generation, png):
    """Draw the time of a token over the context, from the rows of bench/train.py and of this program for one text."""
    measured = [row for row in training if "failed" not in row]
    steps = [(row["attention"], row["context"], 1e6 / row["tokens_per_second"]) for row in measured]
    texts = [(row["name"], row["context"], row["p50"]) for row in generation if "p50" in row and row["batch"] == 1]
    from matplotlib.ticker import LogLocator

    figure, axes = make_figure(2)
    for axis, ylabel, points, title in zip(
        axes,
        ("microseconds a token", "milliseconds a token"),
        (steps, texts),
        (
            "In training softmax's time grows with the context (124M parameters).",
            "In generation, with the text before.",
        ),
    ):
        for name, label in LABELS.items():
            line = sorted(point[1:] for point in points if point[0] == name)
            axis.plot([x for x, _ in line], [y for _, y in line], "o-", label=label, markersize=4)
        axis.set(xlabel="context, tokens", ylabel=ylabel, title=title, yscale="log")
        axis.set_xscale("log", base=2)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.minorticks_off()
    save_figure(figure, png)
    print(f"wrote {png}")


def main():
    parser = make_parser("sample", __doc__, NAMES, [*NAMES[:2], "sympow_gating"])
    parser.add_numbers(
        batch=([1, 64], "samples at once"),
        context=([1000, 1_000_000], "tokens of the prompt"),
        tokens=(1000, "that are timed"),
    )
    parser.add_argument("--state_dtype", default="float32", choices=("float32", "bfloat16"), help="of our states")
    parser.add_argument("--plot", nargs=2, metavar="FILE", help="of bench.train and of this program: only draw them")
    parser.add_argument("--png", type=output_file, default="docs/data/cost.png", help="what --plot draws")
    args = parser.parse_args()
    if args.plot:
        return plot_costs(*(read_json(path)["rows"] for path in args.plot), args.png)
    require_gpu(parser)
    rows = []
    print_titles(COLUMNS)
    for name, batch, context in product(args.only, args.batch, args.context):
        if name in VARIANTS or context <= 3000:  # GPT-2 has 4,096 positions
            rows.append(measure(name, batch, context, args))
            print_row(COLUMNS, rows[-1])
    print(f"\nreading {PREFILL:,} tokens\n")
    print_titles(PREFILL_COLUMNS)
    for name in args.only:
        if name in VARIANTS:
            rows.append(dict(name=name) | measure_prefill(VARIANTS[name]))
            print_row(PREFILL_COLUMNS, rows[-1])
    finish(args, rows)
    return any("failed" in row for row in rows)


if __name__ == "__main__":
    run_program(main)
