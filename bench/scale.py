"""Measure how training speed grows with the number of GPUs of one node.

    python -m bench.scale                                       # DDP, FSDP and context parallel, 1 to 8 GPUs
    python -m bench.scale config/gpt2_xl.py --batch_size=4 --only fsdp

Arguments that are not this program's own are settings of train.py, which it starts by torchrun on random tokens.

DDP and FSDP (--shard=True): --tokens tokens a GPU and step, at any number of GPUs. Context parallel
(--context_parallel=N): --context tokens a GPU of one sequence, N times as many tokens on N GPUs. The speed is the
median of the tok_per_sec that metrics.jsonl has after --warm_up steps. The column `of linear` is this speed over N
times the speed of one GPU in the row of the same mode and tokens.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from sympow.attention.variant import RECIPE
from sympow.bench.timing import finish, make_parser, print_row, print_titles
from sympow.data.shards import Unit, write_dataset
from sympow.data.tokenizer import IdsEncoding, Tokenizer
from sympow.runs.program import run_program

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
MODES = ["ddp", "fsdp", "context"]
LIMIT = 600  # seconds for one row
MICRO_TOKENS = 65536  # of a GPU and micro-step, at most
LOG_INTERVAL = 5  # steps over which train.py takes the mean speed
SETTINGS = (
    "--attention=sympow_gating --p=2 --eval_interval=1000000 --sample_tokens=0 --wandb=disabled "
    f"--always_save_checkpoint=False --log_interval={LOG_INTERVAL}"
).split()
SETTINGS += [f"--{name}={value}" for name, value in RECIPE.items()]  # rotary positions, no other parts
COLUMNS = {  # key of a row -> (title, place, format)
    "mode": ("mode", "<8", "s"),
    "tokens": ("tokens a GPU", ">12", ",d"),
    "gpus": ("GPUs", ">4", "d"),
    "context": ("context", ">9", ",d"),
    "tokens_per_second": ("tokens/s", ">12", ",.0f"),
    "share": ("of linear", ">9", ".3f"),
}


def make_dataset(folder, document_length):
    """Write a dataset of random tokens, 4 training documents and 1 held out; return its path."""
    encoding = IdsEncoding()  # of GPT-2's size: the embedding is the largest gradient
    random_ids = partial(np.random.default_rng(0).integers, 0, encoding.eot_token)
    units = [
        Unit("train", partial(random_ids, (4, document_length))),
        Unit("val", partial(random_ids, (1, document_length))),
    ]
    path = os.path.join(folder, "random")
    with redirect_stdout(io.StringIO()):
        write_dataset(path, units, Tokenizer("ids", encoding), document_length, {}, "random", "bench.scale")
    return path


def settings_of(mode, gpus, tokens, args):
    """Return train.py's settings for a mode (ddp, fsdp or context) on `gpus` GPUs with so many tokens each."""
    if mode == "context":
        context = gpus * tokens
        settings = [f"--block_size={context}", "--batch_size=1", f"--tokens_per_step={context}"]
        return [f"--context_parallel={gpus}"] * (gpus > 1) + settings
    sequences = max(1, min(tokens, MICRO_TOKENS) // args.block_size)
    settings = [f"--block_size={args.block_size}", f"--batch_size={sequences}", f"--tokens_per_step={gpus * tokens}"]
    return settings + ["--shard=True"] * (mode == "fsdp" and gpus > 1)


def measure(mode, gpus, tokens, dataset, args):
    """Train for some steps; return {"tokens_per_second": ...} or {"failed": reason}."""
    with tempfile.TemporaryDirectory() as folder:
        out_dir = os.path.join(folder, "out")
        settings = [
            *SETTINGS,
            *settings_of(mode, gpus, tokens, args),
            f"--max_iters={args.warm_up + args.steps}",
            f"--eval_tokens={gpus}",
            f"--dataset={dataset}",
            f"--device={args.device}",
            *args.settings,
        ]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"] if gpus > 1 else []
        command = [sys.executable, *torchrun, str(TRAIN), *settings, f"--out_dir={out_dir}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=TRAIN.parent, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return dict(failed=f"not done after {LIMIT} s")
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it printed nothing"]
            return dict(failed=next((line for line in lines if line.startswith("train.py")), lines[-1])[:200])
        with open(os.path.join(out_dir, "metrics.jsonl")) as f:
            lines = [line for line in map(json.loads, f) if "tok_per_sec" in line]
    return dict(tokens_per_second=median(line["tok_per_sec"] for line in lines if line["step"] > args.warm_up))


def bench(args, dataset):
    """Measure every mode on every number of GPUs and print a row for each; return the rows."""
    print_titles(COLUMNS)
    rows = []
    for mode in args.only:
        for tokens in args.context if mode == "context" else args.tokens:
            one = None
            for gpus in args.gpus:
                context = gpus * tokens if mode == "context" else args.block_size
                row = dict(mode=mode, tokens=tokens, gpus=gpus, context=context)
                row |= measure(mode, gpus, tokens, dataset, args)
                speed = row.get("tokens_per_second")
                one = speed if gpus == 1 else one
                row["share"] = speed / (gpus * one) if speed and one else None
                rows.append(row)
                print_row(COLUMNS, row)
    return rows


def main():
    parser = make_parser("scale", __doc__, MODES, MODES)
    parser.epilog = "Other arguments, config/NAME.py or --key=value, are settings of train.py."
    parser.add_numbers(
        gpus=([2, 4, 8], "numbers of GPUs, beside 1"),
        tokens=([131072, 16384], "of a GPU and step"),
        context=([262144], "tokens of a GPU, context mode"),
        block_size=(1024, "the context in the other modes"),
        warm_up=(10, "steps that do not count"),
        steps=(20, "steps that do"),
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args, args.settings = parser.parse_known_args()
    args.gpus = sorted({1, *args.gpus})  # linear is relative to the speed of one GPU
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU here: --device=cpu tries it on the CPU")
    longest = max(args.block_size, max(args.gpus) * max(args.context))
    with tempfile.TemporaryDirectory() as folder:
        rows = bench(args, make_dataset(folder, longest))
    finish(args, rows)
    return not any("tokens_per_second" in row for row in rows)


if __name__ == "__main__":
    run_program(main)
