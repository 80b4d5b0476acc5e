"""Measure the training speed of whole models on one GPU, in tokens per second, for several contexts and attentions.

    python bench/train.py                                # 124M: softmax and gated sympow at 1,024 to 65,536 tokens
    python bench/train.py --context 1048576 --activation_checkpointing --only sympow_gating
    python bench/train.py --only softmax sympow_gating_p4 --json out/train.json

A step is forward, backward, clipping and AdamW on --tokens random tokens, compiled, in bfloat16 autocast, as in
train.py without accumulation; short contexts are batched to reach --tokens. softmax is scaled_dot_product_attention on
the backend that torch chooses (on an H200 cuDNN's), in the same GPT-2. The figure is the median of ROUNDS after WARM_UP
steps; in a round the host waits for the GPU after --steps steps alone, as train.py does where it logs. The last column
is the share of the GPU's peak that 6 FLOPs a weight and token take (attention is not counted, so that variants can be
compared).
"""

import math
import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.data.files import write_json  # noqa: E402
from sympow.model import GPT, GPTConfig  # noqa: E402
from sympow.runs.machine import peak_flops  # noqa: E402
from sympow.training.optimizer import make_optimizer  # noqa: E402
from sympow.runs.program import Parser, at_least_1, output_file, run_program  # noqa: E402
from sympow.train import TrainConfig  # noqa: E402

WARM_UP, ROUNDS, STEPS = 4, 5, 4
VARIANTS = {
    "softmax": dict(attention="softmax"),
    "sympow_p2": dict(attention="sympow", p=2),
    "sympow_gating": dict(attention="sympow_gating", p=2),
    "sympow_gating_p4": dict(attention="sympow_gating", p=4),
    "sympow_gating_p4_d32": dict(attention="sympow_gating", p=4, n_head=24, head_dim=32),
    "conformal_sympow": dict(attention="conformal_sympow", p=2),
    "heinsen": dict(attention="heinsen"),
    "adaptive_continuous": dict(attention="adaptive_power"),
    "adaptive_mixture_d32": dict(attention="adaptive_power", adaptive="mixture", n_head=24, head_dim=32),
    "hybrid": dict(attention="sympow_gating,sympow_gating,softmax", p=2),
}
DEFAULT = ("softmax", "sympow_gating")


def take_steps(network, model, optimizer, x, y, steps):
    """Take steps of training on the tokens x and targets y; return the seconds of one, with the wait for the GPU.

    network is the model, compiled or not; it returns (logits or None, loss). Raises FloatingPointError for a loss that
    is not finite.
    """
    start = time.perf_counter()
    for _ in range(steps):
        with torch.autocast(x.device.type, torch.bfloat16):
            _, loss = network(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if not math.isfinite(loss.item()):  # waits for the GPU
        raise FloatingPointError(f"the loss is {loss.item()}")
    return (time.perf_counter() - start) / steps


def measure(settings, T, tokens, args):
    """Train one model at context T; return tokens_per_second, step_ms, first_step_s, gigabytes and share of peak."""
    torch.manual_seed(0)
    torch.compiler.reset()
    torch.cuda.reset_peak_memory_stats()
    config = GPTConfig(**settings, activation_checkpointing=args.activation_checkpointing, reset_token=args.reset_token)
    model = GPT(config).cuda()
    optimizer = make_optimizer(model, TrainConfig())
    network = model if args.no_compile else torch.compile(model)
    ids = torch.randint(config.vocab_size, (tokens // T, T + 1), device="cuda")
    seconds = lambda steps: take_steps(network, model, optimizer, ids[:, :-1], ids[:, 1:], steps)
    first = seconds(1)
    seconds(WARM_UP)
    step = median(seconds(args.steps) for _ in range(ROUNDS))
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    peak = peak_flops(torch.device("cuda"))
    return dict(
        tokens_per_second=tokens / step, step_ms=1000 * step, first_step_s=first,
        gigabytes=torch.cuda.max_memory_allocated() / 1e9, share=peak and 6 * weights * tokens / step / peak,
    )  # fmt: skip


def bench(args):
    """Measure every context with every attention and print a row for each; return True if one failed."""
    header = f"{'context':>8} {'attention':<22} {'tokens/s':>10} {'ms a step':>10} {'/ softmax':>9} {'/ own first':>11}"
    print(f"{header} {'GB':>6} {'share':>6}", flush=True)
    rows, first = [], {}
    for T in args.context:
        tokens, softmax = max(args.tokens, T), None
        for name in args.only:
            row = dict(context=T, attention=name, tokens=tokens)
            try:
                row |= measure(VARIANTS[name], T, tokens, args)
            except Exception as error:  # out of memory, a compiler's error: the others go on
                row["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
                print(f"{T:>8} {name:<22} {row['failed']}", flush=True)
            else:
                speed = row["tokens_per_second"]
                softmax = speed if name == "softmax" else softmax
                ratio = f"{speed / softmax:.2f}" if softmax else "-"
                own = speed / first.setdefault(name, speed)
                share = f"{row['share']:.0%}" if row["share"] else "-"
                print(
                    f"{T:>8} {name:<22} {speed:>10,.0f} {row['step_ms']:>10.1f} {ratio:>9} {own:>11.2f} "
                    f"{row['gigabytes']:>6.1f} {share:>6}   first step {row['first_step_s']:.0f} s", flush=True,
                )  # fmt: skip
            rows.append(row)
            torch.cuda.empty_cache()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.tokens} tokens a step or one context")
    if args.json:
        write_json(args.json, rows)
    return any("failed" in row for row in rows)


def main():
    parser = Parser(prog="bench/train.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--context", type=at_least_1, nargs="+", default=[1024, 4096, 16384, 65536], help="context lengths"
    )
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="NAME", default=DEFAULT, help=" ".join(VARIANTS))
    parser.add_argument(
        "--tokens", type=at_least_1, default=65536, help="tokens of a step, or one context if that is longer"
    )
    parser.add_argument("--steps", type=at_least_1, default=STEPS, help="steps of a round")
    parser.add_argument("--activation_checkpointing", action="store_true")
    parser.add_argument("--reset_token", type=int, default=-1, help="a token id that resets the state")
    parser.add_argument("--no_compile", action="store_true")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows there too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here, and there is nothing else to measure")
    torch.set_float32_matmul_precision("high")  # as train.py
    sys.exit(bench(args))


if __name__ == "__main__":
    run_program(main)
