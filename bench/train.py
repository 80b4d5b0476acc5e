"""Measure the training speed of whole models on one GPU, in tokens per second, for several contexts and attentions.

    python -m bench.train                                # 124M: softmax and gated sympow at 1,024 to 65,536 tokens
    python -m bench.train --context 1048576 --activation_checkpointing --only sympow_gating
    python -m bench.train --only softmax sympow_gating_p4 --json out/train.json

A step is forward, backward, clipping and AdamW on --tokens random tokens, compiled, in bfloat16 autocast, as in
train.py without accumulation; short contexts are batched to reach --tokens. softmax is scaled_dot_product_attention on
the backend that torch chooses (cuDNN's on an H200), in the same GPT-2. The figure is the median of ROUNDS after WARM_UP
steps; in a round the host waits for the GPU after --steps steps alone, as train.py does where it logs.
"""

import math
import time
from functools import partial
from statistics import median

import torch

from sympow.attention.variant import RECIPE
from sympow.bench.timing import finish, make_parser, print_row, print_titles, require_gpu
from sympow.data import describe_error
from sympow.model import GPT, GPTConfig
from sympow.training.optimizer import make_optimizer, take_step
from sympow.training.parallel import compile_parts
from sympow.runs.machine import cache_graphs
from sympow.runs.program import run_program
from sympow.train import TrainConfig

WARM_UP, ROUNDS = 4, 5
PARTS = dict(convolution=4, output_gate=True)
VARIANTS = {  # with the parts that each learns best with
    "softmax": dict(attention="softmax", **PARTS),
    "softmax_window": dict(attention="softmax", window=2048, **PARTS),
    "softmax_plain": RECIPE | dict(attention="softmax"),  # as GPT-2 has it, but for rotary positions
    "sympow_gating": dict(attention="sympow_gating", p=2),
    "sympow_gating_d128": dict(attention="sympow_gating", p=2, n_head=6),
    "sympow_gating_p4": dict(attention="sympow_gating", p=4),
    "sympow_gating_p4_d32": dict(attention="sympow_gating", p=4, n_head=24, head_dim=32),
    "hybrid": dict(attention="sympow_gating,sympow_gating,sympow_gating,softmax", p=2, window=2048),
    "conformal_sympow": dict(attention="conformal_sympow", p=2),
    "sympow": dict(attention="sympow", p=2, **PARTS),
    "heinsen": dict(attention="heinsen"),
}
COLUMNS = {  # key of a row -> (title, place, format)
    "context": ("context", ">8", "d"),
    "attention": ("attention", "<22", "s"),
    "tokens_per_second": ("tokens/s", ">10", ",.0f"),
    "step_ms": ("ms a step", ">10", ".1f"),
    "speed_to_softmax": ("/ softmax", ">9", ".2f"),
    "gigabytes": ("GB", ">6", ".1f"),
    "first_step_s": ("1st step s", ">10", ".0f"),
}


def take_steps(model, optimizer, x, y, steps):
    """Take steps of training on the tokens x and targets y; return the seconds of one, with the wait for the GPU.

    The model's parts may be compiled; it returns (logits or None, loss). Raises FloatingPointError for a loss that is
    not finite.
    """
    start = time.perf_counter()
    for _ in range(steps):
        with torch.autocast(x.device.type, torch.bfloat16):
            _, loss = model(x, y)
        loss.backward()
        take_step(model, optimizer, 1.0)
    if not math.isfinite(loss.item()):  # waits for the GPU
        raise FloatingPointError(f"the loss is {loss.item()}")
    return (time.perf_counter() - start) / steps


def make_steps(config, T, tokens, device):
    """Return a function of a number of steps: `take_steps` of a new model of this GPTConfig, compiled on a GPU.

    A step is of so many random tokens at context T.
    """
    torch.set_float32_matmul_precision("high")  # as train.py
    torch.compiler.reset()
    model = GPT(config).to(device)
    if device != "cpu":
        cache_graphs()
        compile_parts(model)
    ids = torch.randint(config.vocab_size, (tokens // T, T + 1), device=device)
    return partial(take_steps, model, make_optimizer(model, TrainConfig()), ids[:, :-1], ids[:, 1:])


def measure(settings, T, tokens, args):
    """Train one model at context T; return tokens_per_second, step_ms, first_step_s and gigabytes."""
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    config = GPTConfig(**settings, activation_checkpointing=args.activation_checkpointing)
    seconds = make_steps(config, T, tokens, "cuda")
    first_step = seconds(1)
    seconds(WARM_UP)
    step = median(seconds(args.steps) for _ in range(ROUNDS))
    gigabytes = torch.cuda.max_memory_allocated() / 1e9
    return dict(tokens_per_second=tokens / step, step_ms=1000 * step, first_step_s=first_step, gigabytes=gigabytes)


def bench(args):
    """Measure every context with every attention and print a row for each; return the rows."""
    print(f"{args.tokens} tokens a step, or one context if that is longer\n")
    print_titles(COLUMNS)
    rows = []
    for T in args.context:
        softmax = None
        for name in args.only:
            row = dict(context=T, attention=name, tokens=max(args.tokens, T))
            try:
                row |= measure(VARIANTS[name], T, row["tokens"], args)
            except Exception as error:  # out of memory, a compiler's error: the others go on
                row["failed"] = describe_error(error)
            else:
                speed = row["tokens_per_second"]
                softmax = speed if name == "softmax" else softmax
                row["speed_to_softmax"] = speed / softmax if softmax else None
            rows.append(row)
            print_row(COLUMNS, row)
            torch.cuda.empty_cache()
    return rows


def main():
    parser = make_parser("train", __doc__, VARIANTS, ["softmax", "sympow_gating"])
    parser.add_numbers(
        context=([1024, 4096, 16384, 65536], "context lengths"),
        tokens=(65536, "of a step, or one context if that is longer"),
        steps=(4, "of a round"),
    )
    parser.add_argument("--activation_checkpointing", action="store_true")
    args = parser.parse_args()
    require_gpu(parser)
    rows = bench(args)
    finish(args, rows)
    return any("failed" in row for row in rows)


if __name__ == "__main__":
    run_program(main)
