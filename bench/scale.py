"""Measure how training speed grows with the number of GPUs of one node.

    python bench/scale.py                                       # DDP, FSDP and context parallel, 1 to 8 GPUs
    python bench/scale.py config/gpt2_xl.py --batch_size=4 --only fsdp

Arguments that are not this program's own are settings of train.py, which it starts by torchrun on random tokens.

DDP and FSDP (--shard=True): --tokens tokens a GPU and step, at any number of GPUs. Context parallel
(--context_parallel=N): --context tokens a GPU of one sequence, so that N GPUs train at N times that context. The speed
is the median of the tok_per_sec that metrics.jsonl has after --warm_up steps; its share of linear is that of N times
the speed of one GPU in the same row.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sympow.data.files import write_json  # noqa: E402
from sympow.data.shards import Unit, write_dataset  # noqa: E402
from sympow.data.tokenizer import END_OF_TEXT, WORDS, Tokenizer  # noqa: E402
from sympow.runs.program import Parser, at_least_1, output_file, positive, run_program  # noqa: E402

VOCABULARY = 50257  # GPT-2's: the embedding is the largest gradient
LOG_INTERVAL = 5  # steps over which train.py takes the mean speed
SETTINGS = (
    "--attention=sympow_gating --p=2 --eval_interval=1000000 --sample_tokens=0 --wandb=disabled "
    f"--always_save_checkpoint=False --log_interval={LOG_INTERVAL}"
).split()


def make_dataset(folder, document_length, vocab_size=VOCABULARY):
    """Write a dataset of random tokens, 4 training documents and 1 held out; return its path."""
    import tiktoken

    pieces = [bytes([i]) for i in range(256)] + [bytes(pair) for pair in product(range(256), repeat=2)]
    ranks = {piece: i for i, piece in enumerate(pieces[: vocab_size - 1])}
    encoding = tiktoken.Encoding(
        "random", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: vocab_size - 1}
    )
    random = np.random.default_rng(0)
    rows = lambda count: lambda: random.integers(0, vocab_size - 1, (count, document_length))
    units = [Unit("train", rows(4), 4 * document_length), Unit("val", rows(1), document_length)]
    path = os.path.join(folder, "random")
    with redirect_stdout(io.StringIO()):
        write_dataset(path, units, Tokenizer("bpe", encoding), document_length, {}, "random", "bench/scale.py")
    return path


def settings_of(mode, gpus, tokens, args):
    """Return train.py's settings for a mode (ddp, fsdp or context) on `gpus` GPUs with so many tokens each."""
    if mode == "context":
        context = gpus * tokens
        return [f"--context_parallel={gpus}"] * (gpus > 1) + [
            f"--block_size={context}", "--batch_size=1", f"--tokens_per_step={context}",
        ]  # fmt: skip
    sequences = max(1, min(tokens, args.micro_tokens) // args.block_size)
    shape = [f"--block_size={args.block_size}", f"--batch_size={sequences}", f"--tokens_per_step={gpus * tokens}"]
    return shape + ["--shard=True"] * (mode == "fsdp" and gpus > 1)


def measure(mode, gpus, tokens, dataset, args):
    """Train for some steps; return (tokens a second, None) or (None, a line that says why it did not run)."""
    steps = args.warm_up + args.steps
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        argv = [*SETTINGS, *settings_of(mode, gpus, tokens, args), f"--max_iters={steps}", f"--eval_tokens={gpus}"]
        argv += [f"--dataset={dataset}", *args.settings, f"--out_dir={out}"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"] if gpus > 1 else []
        command = [sys.executable, *torchrun, str(ROOT / "train.py"), *argv]
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=args.limit)
        except subprocess.TimeoutExpired:
            return None, f"not done after {args.limit:g} s"
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it printed nothing"]
            return None, next((line for line in lines if line.startswith("train.py")), lines[-1])[:200]
        with open(os.path.join(out, "metrics.jsonl")) as f:
            lines = [line for line in map(json.loads, f) if "tok_per_sec" in line]
    return median(line["tok_per_sec"] for line in lines if line["step"] > args.warm_up), None


def bench(args):
    """Measure every mode on every number of GPUs and print a row for each; return True if none could run."""
    there = torch.cuda.device_count() if args.device == "cuda" else max(args.gpus)
    args.settings = [f"--device={args.device}", *args.settings]
    rows, modes = (
        [],
        [(mode, tokens) for mode in args.only for tokens in (args.context if mode == "context" else args.tokens)],
    )
    longest = max([args.block_size, *(n * tokens for mode, tokens in modes for n in args.gpus if mode == "context")])
    print(f"{'mode':<8} {'tokens a GPU':>12} {'GPUs':>4} {'context':>9} {'tokens/s':>12} {'of linear':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        dataset = args.dataset or make_dataset(folder, longest)
        for (mode, tokens), gpus in product(modes, args.gpus):
            row = dict(
                mode=mode, tokens=tokens, gpus=gpus, context=gpus * tokens if mode == "context" else args.block_size
            )
            if gpus == 1:
                one = None
            speed, row["failed"] = None, f"only {there} GPUs are here"
            if gpus <= there:
                speed, row["failed"] = measure(mode, gpus, tokens, dataset, args)
            if gpus == 1:
                one = speed
            row |= dict(tokens_per_second=speed, share=speed / (gpus * one) if speed and one else None)
            share = f"{row['share']:.3f}" if row["share"] else "-"
            result = f"{speed:>12,.0f} {share:>9}" if speed else f"  {row['failed']}"
            print(f"{mode:<8} {tokens:>12,} {gpus:>4} {row['context']:>9,} {result}", flush=True)
            rows.append(row)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"\n{name}, torch {torch.__version__}, {' '.join(args.settings)}")
    if args.json:
        write_json(args.json, rows)
    return not any(row["tokens_per_second"] for row in rows)


def main():
    parser = Parser(prog="bench/scale.py", description=__doc__.splitlines()[0])
    modes = ("ddp", "fsdp", "context")
    parser.add_argument("--only", nargs="+", choices=modes, default=modes)
    parser.add_argument("--gpus", type=at_least_1, nargs="+", default=None, help="numbers of GPUs")
    parser.add_argument("--tokens", type=at_least_1, nargs="+", default=[131072, 16384], help="of a GPU and step")
    parser.add_argument("--context", type=at_least_1, nargs="+", default=[262144], help="tokens of a GPU, context mode")
    parser.add_argument("--block_size", type=at_least_1, default=1024, help="the context in the other modes")
    parser.add_argument("--micro_tokens", type=at_least_1, default=65536, help="of a GPU and micro-step, at most")
    parser.add_argument("--warm_up", type=at_least_1, default=10, help="steps that do not count")
    parser.add_argument("--steps", type=at_least_1, default=20, help="steps that do")
    parser.add_argument("--limit", type=positive, default=600.0, help="seconds for one row")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dataset", help="instead of random tokens")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows there too")
    args, args.settings = parser.parse_known_args()
    args.gpus = sorted({1, *(args.gpus or (2, 4, 8))})  # one GPU is what linear is measured by
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU here: --device=cpu")
    sys.exit(bench(args))


if __name__ == "__main__":
    run_program(main)
