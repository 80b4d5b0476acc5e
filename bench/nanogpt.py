"""Time training steps of nanoGPT's model and of ours in turns, in one process on one GPU.

    git clone https://github.com/karpathy/nanoGPT ../nanoGPT
    python -m bench.nanogpt ../nanoGPT                            # 124M at 1,024 and 4,096 tokens
    python -m bench.nanogpt ../nanoGPT --context 65536 --only sympow_gating --json out/nanogpt.json

nanoGPT's model.py is taken as it is, with the settings of its train.py: bfloat16 autocast, torch.compile, fused AdamW,
no biases, a vocabulary padded to 50,304. Both take the same steps on the same --tokens random tokens: forward,
backward, clipping and AdamW. Each turn is --steps steps after one that does not count, and the figure of a model is the
median of its --turns turns. Since the models take turns, a clock that falls as the GPU gets warm falls for all of them.
"""

import importlib.util
import sys
from functools import partial
from pathlib import Path
from statistics import median

import torch

from sympow.bench.timing import finish, make_parser, print_row, print_titles
from sympow.bench.train import VARIANTS, WARM_UP, take_steps
from sympow.model import GPT, GPTConfig
from sympow.training.optimizer import make_optimizer
from sympow.runs.program import refuse, run_program
from sympow.train import TrainConfig

PADDED = 50304  # nanoGPT's vocabulary
COLUMNS = {  # key of a row -> (title, place, format)
    "context": ("context", ">8", "d"),
    "model": ("model", "<22", "s"),
    "tokens_per_second": ("tokens/s", ">10", ",.0f"),
    "step_ms": ("ms a step", ">10", ".2f"),
    "ratio": ("/ nanoGPT", ">9", ".4f"),
    "fastest_ms": ("fastest", ">10", ".2f"),
    "slowest_ms": ("slowest", ">10", ".2f"),
    "gigabytes": ("GB", ">6", ".1f"),
}


def load_nanogpt(folder):
    """Return the module folder/model.py, which has to have nanoGPT's GPT and GPTConfig."""
    path = Path(folder) / "model.py"
    if not path.exists():
        refuse(f"{path} is missing: clone https://github.com/karpathy/nanoGPT and give its folder")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    if missing := [name for name in ("GPT", "GPTConfig") if not hasattr(module, name)]:
        refuse(f"{path} is not nanoGPT's model.py: it has no {missing[0]}")
    return module


def make_models(nanogpt, names, T, shape, device):
    """Return {name: (model, optimizer)}, nanoGPT's first; shape: n_layer, n_head and n_embd of all."""
    theirs = nanogpt.GPT(nanogpt.GPTConfig(block_size=T, vocab_size=PADDED, dropout=0.0, bias=False, **shape))
    theirs = theirs.to(device)
    models = {"nanoGPT": (theirs, theirs.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device))}
    for name in names:
        ours = GPT(GPTConfig(**VARIANTS[name] | shape)).to(device)
        models[name] = ours, make_optimizer(ours, TrainConfig())
    return models


def compare(nanogpt, T, args):
    """Print a row for each model at context T; return the rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = dict(n_layer=args.n_layer, n_head=args.n_head, n_embd=args.n_embd)
    torch.manual_seed(0)
    torch.compiler.reset()
    models, tokens = make_models(nanogpt, args.only, T, shape, device), max(args.tokens, T)
    ids = torch.randint(50257, (tokens // T, T + 1), device=device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    steps, gigabytes = {}, {}
    for name, (model, optimizer) in models.items():
        network = compiled(model) if device == "cuda" else model
        steps[name] = partial(take_steps, network, model, optimizer, x, y)
        allocated = reset_peak(device)
        steps[name](WARM_UP)  # which compiles
        gigabytes[name] = (torch.cuda.max_memory_allocated() - allocated) / 1e9  # 0 without a GPU
    seconds = {name: [] for name in models}
    for _ in range(args.turns):
        for name, take in steps.items():
            take(1)
            seconds[name].append(take(args.steps))
    rows, theirs = [], median(seconds["nanoGPT"])
    for name in models:
        step = median(seconds[name])
        row = dict(
            context=T,
            model=name,
            tokens_per_second=tokens / step,
            ratio=theirs / step,
            step_ms=1000 * step,
            fastest_ms=1000 * min(seconds[name]),
            slowest_ms=1000 * max(seconds[name]),
            gigabytes=gigabytes[name],
        )
        rows.append(row)
        print_row(COLUMNS, row)
    return rows


def compiled(model):
    """Return the model compiled. All of ours share one forward, and torch.compile would keep few versions of it."""
    torch._dynamo.config.recompile_limit = 8 * len(VARIANTS)
    return torch.compile(model)


def reset_peak(device):
    """Count the GPU's peak of allocated bytes from now on; return the bytes that are allocated now."""
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def main():
    parser = make_parser("nanogpt", __doc__, VARIANTS, ["softmax", "sympow_gating"])
    parser.add_argument("folder", help="a clone of https://github.com/karpathy/nanoGPT")
    parser.add_numbers(
        context=([1024, 4096], "context lengths"),
        tokens=(65536, "of a step, or one context if that is longer"),
        steps=(5, "of a turn"),
        turns=(7, "of each model"),
        n_layer=(12, "of all models"),
        n_head=(12, "of all models"),
        n_embd=(768, "of all models"),
    )
    args = parser.parse_args()
    nanogpt = load_nanogpt(args.folder)
    torch.set_float32_matmul_precision("high")  # as both train.py
    print(f"{args.tokens} tokens a step, compiled on a GPU; GB: a model's peak beyond all weights")
    print_titles(COLUMNS)
    rows = [row for T in args.context for row in compare(nanogpt, T, args)]
    finish(args, rows)


if __name__ == "__main__":
    run_program(main)
