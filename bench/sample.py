"""Measure generation on one GPU: a 124M model with gated sympow beside transformers' GPT-2 of the same size.

    python bench/sample.py                                      # batch 1 and 64, after 1,000 and 1,000,000 tokens
    python bench/sample.py --only sympow_gating --batch 1 8 64 256 --context 1000 --json out/sample.json

Weights are random and in bfloat16, states in float32 or --state_dtype; tokens are sampled with sample.py's defaults. A
line has the tokens a second of all samples together, the median and the 99th percentile of the milliseconds from one
token to the next, the share of the GPU's bandwidth that one read of the weights and the state a token takes, and what
is allocated.
"""

import gc
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.bench.train import VARIANTS  # noqa: E402
from sympow.data.files import write_json  # noqa: E402
from sympow.generation.decoder import Decoder  # noqa: E402
from sympow.generation.generate import PIECE, Sampler  # noqa: E402
from sympow.model import GPT, GPTConfig  # noqa: E402
from sympow.runs.program import Parser, at_least_1, output_file, run_program  # noqa: E402

SWITCH_OVER = 512  # tokens, fewer than any context that is measured, so that each has a state
WARM_UP = 200
BANDWIDTH = {"NVIDIA H200": 4.3e12, "NVIDIA H100 80GB HBM3": 3.0e12}  # bytes per second of a plain copy
PREFILL = 65536


def ours(settings, batch, context, tokens, state_dtype):
    """Return the figures of one line of the table for our model."""
    model = GPT(GPTConfig(**settings)).cuda().eval()
    ids = torch.randint(model.config.vocab_size, (1, context), device="cuda")
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        logits, state = model.read(ids, model.empty_state(1, SWITCH_OVER), PIECE["cuda"])
        sampler = Sampler(torch.device("cuda"), batch, on_kernel=True)
        decoder = Decoder(model, state, sampler, WARM_UP + tokens, torch.bfloat16, batch, state_dtype)
        sampler.prepare()
        sampler(logits.expand(batch, -1), decoder.ids)
        del ids, state, logits
        for _ in decoder.tokens(WARM_UP):
            pass
        times = [time.perf_counter()]
        for _ in decoder.tokens(tokens):
            times.append(time.perf_counter())
    weights = 2 * sum(p.numel() for p in model.parameters())
    return row(times, batch) | dict(bytes=weights + decoder.bytes(), allocated=torch.cuda.memory_allocated())


class TokenTimes:
    """A streamer for transformers that records the time of each token."""

    def __init__(self):
        self.times = []

    def put(self, ids):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def transformers(cache, batch, context, tokens):
    """Return the same for transformers' GPT-2; it runs once before it is timed, to compile for its static cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_positions=4096)).cuda().bfloat16().eval()
    ids = torch.randint(50257, (batch, context), device="cuda")
    options = dict(do_sample=True, top_k=200, temperature=0.8, pad_token_id=0, eos_token_id=None)
    options |= dict(cache_implementation="static") if cache == "static" else {}
    with torch.inference_mode():
        for _ in range(2):
            streamer = TokenTimes()
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, streamer=streamer, **options
            )
    return row(streamer.times[2:], batch) | dict(allocated=torch.cuda.max_memory_allocated())


def row(times, batch):
    steps = sorted(1000 * (b - a) for a, b in zip(times, times[1:]))
    at = lambda share: steps[int(share * (len(steps) - 1))]
    mean = 1000 * (times[-1] - times[0]) / len(steps)
    return dict(tokens_per_second=1000 * batch / mean, p50=at(0.5), p99=at(0.99))


def prefill(settings):
    """Return (speeds, peaks) of reading prompts.

    speeds: tokens per second of reading a prompt of PREFILL tokens, and of the model's forward pass on it; peaks: the
    most bytes allocated while that prompt is read, and while one of 2^20 tokens is read.
    """
    model = GPT(GPTConfig(**settings)).cuda().eval()
    ids = torch.randint(model.config.vocab_size, (1, 2**20), device="cuda")
    read = lambda n: model.read(ids[:, :n], model.empty_state(1), PIECE["cuda"])
    forward = lambda n: model.logits(model.hidden(ids[:, :n])[0][:, -1])
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        speeds = []
        for run in (read, forward):
            seconds = []
            for _ in range(6):
                torch.cuda.synchronize()
                start = time.perf_counter()
                run(PREFILL)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            speeds.append(PREFILL / sorted(seconds[2:])[1])
        peaks = []
        for n in (PREFILL, 2**20):
            torch.cuda.reset_peak_memory_stats()
            read(n)
            peaks.append(torch.cuda.max_memory_allocated())
    return speeds, peaks


def main():
    names = ("transformers_dynamic", "transformers_static", *VARIANTS)
    parser = Parser(prog="bench/sample.py", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"these: {' '.join(names)}")
    parser.add_argument("--batch", type=at_least_1, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=at_least_1, nargs="+", default=[1000, 1_000_000], help="tokens read before")
    parser.add_argument("--tokens", type=at_least_1, default=1000, help="that are timed")
    parser.add_argument("--state_dtype", default="float32", choices=("float32", "bfloat16"), help="of our states")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows there too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here to measure on")
    bandwidth, rows = BANDWIDTH.get(torch.cuda.get_device_name()), []
    header = f"{'':<22} {'batch':>5} {'context':>9} {'tokens/s':>9} {'p50 ms':>8} {'p99 ms':>8}"
    print(f"{header} {'share':>6} {'allocated':>10}", flush=True)
    for name in args.only or names[:2] + ("sympow_gating",):
        for batch in args.batch:
            for context in args.context:
                if name not in VARIANTS and context > 3000:
                    continue
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                line = dict(name=name, batch=batch, context=context)
                try:
                    if name in VARIANTS:
                        line |= ours(VARIANTS[name], batch, context, args.tokens, getattr(torch, args.state_dtype))
                    else:
                        line |= transformers(name.split("_")[1], batch, context, args.tokens)
                except Exception as error:  # no transformers, out of memory: the others go on
                    line["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
                    print(f"{name:<22} {batch:>5} {context:>9,} {line['failed']}", flush=True)
                else:
                    seconds = batch / line["tokens_per_second"]
                    share = f"{line['bytes'] / bandwidth / seconds:.0%}" if bandwidth and "bytes" in line else "-"
                    print(
                        f"{name:<22} {batch:>5} {context:>9,} {line['tokens_per_second']:>9,.0f} {line['p50']:>8.3f} "
                        f"{line['p99']:>8.3f} {share:>6} {line['allocated'] / 1e6:>7,.0f} MB", flush=True,
                    )  # fmt: skip
                rows.append(line)
    for name in args.only or ("sympow_gating",):
        if name in VARIANTS:
            (read, forward), (peak, peak_long) = prefill(VARIANTS[name])
            share = read / forward
            print(f"{name}: a prompt of {PREFILL:,} tokens at {read:,.0f} tokens/s, {share:.2f} of the forward pass;")
            print(f"at most {peak / 1e9:.2f} GB are allocated, for one of {2**20:,} tokens {peak_long / 1e9:.2f}")
            line = dict(name=name, prefill_tokens_per_second=read, forward_tokens_per_second=forward)
            rows.append(line | dict(prefill_allocated=peak, prefill_allocated_long=peak_long))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if args.json:
        write_json(args.json, rows)
    return any("failed" in line for line in rows)


if __name__ == "__main__":
    run_program(main)
