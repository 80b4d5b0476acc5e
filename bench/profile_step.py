"""Print where the time of a training step goes, by kind of kernel.

    python bench/profile_step.py                                                        # 124M, softmax, 64 x 1,024
    python bench/profile_step.py --attention=sympow_gating --block_size=65536 --batch_size=1

A step is a step of bench/train.py, on a CPU not compiled. torch.profiler times every kernel of STEPS steps. The table
has the step that spent least time in kernels, because under the profiler all kernels of some steps are slower.

A kernel counts for the first kind in KINDS that matches its name or the names of the operators around it. (A kernel
that torch.compile made of several operators has their names.)
"""

import re
import sys
import time
from bisect import bisect_right
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.profiler import record_function

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.bench.timing import finish, make_parser, print_row, print_titles  # noqa: E402
from sympow.bench.train import take_steps  # noqa: E402
from sympow.model import GPT, GPTConfig  # noqa: E402
from sympow.training.optimizer import make_optimizer  # noqa: E402
from sympow.runs.program import at_least_1, run_program  # noqa: E402
from sympow.runs.machine import profiler  # noqa: E402
from sympow.train import TrainConfig  # noqa: E402

STEPS = 5
WARM_UP = 5.0  # seconds of steps on a GPU; its clock settles only some time after the compilation
UNCOUNTED = 4  # first steps under the profiler, which the GPU waits for while it starts
STEP = "training step"
KINDS = {  # kind -> pattern of names, the most specific kind first
    "optimizer": r"Optimizer\.step|_foreach_|linalg_vector_norm|aten::(stack|clamp|reciprocal)",
    "attention": r"scaled_dot_product|flash|fmha|cudnn_attention"
    r"|sympow\w*::(quadratic|chunked|adaptive|heinsen|packed|find|log_rec)",
    "gates": r"mm_fp32|log_?sigmoid",
    "rotations": r"sympow\w*::rotat|rotate_\w*kernel|flip",
    "loss beyond its products": r"cross_entropy|logsumexp|gather",
    "LayerNorm": r"layer_norm|mean_mul",
    "GELU": r"gelu|exp2\w*rsqrt",
    "matrix products": r"::(mm|addmm|bmm)\b|gemm|nvjet|cutlass|cublas|xmma",
    "embedding": r"embedding|index_put|index_select",
    "copies and casts": r"copy|cat\b|_cat_|memcpy|memset|fill|zero",
    "other": "",
}
COLUMNS = {"kind": ("kind", "<27", "s"), "milliseconds": ("ms a step", ">10", ".2f")}  # key -> (title, place, format)


def kind_of(names):
    """Return the kind of a kernel; names: its own and the names of the operators around it, in one text."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, names, re.IGNORECASE))


def operators_around(event):
    """Return the names of an operator and of all that called it, the outermost first, in one text."""
    names = []
    while event is not None:
        names.insert(0, event.name)
        event = event.cpu_parent
    return " ".join(names)


def summarize(events, gpu):
    """Return a Counter {kind: milliseconds} of the step that spent least time in kernels, on a CPU in operators.

    events: what torch.profiler recorded, with one operator named STEP around each step.
    """
    operators = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    starts = sorted(event.time_range.start for event in operators if event.name == STEP)[-STEPS:]
    steps = [Counter() for _ in starts]
    for event in operators:
        step = bisect_right(starts, event.time_range.start) - 1  # by time: autograd works in a thread of its own
        kernels = [(kernel.name, kernel.duration) for kernel in event.kernels]
        if not gpu:
            kernels = [("", event.self_cpu_time_total)]
        for name, microseconds in kernels:
            if step >= 0:
                steps[step][kind_of(f"{operators_around(event)} {name}")] += microseconds / 1000
    return min(steps, key=Counter.total)


def measure(config, batch_size, block_size):
    """Train a few steps, then more under the profiler; return its events and the milliseconds of a step without it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = GPT(config).to(device)
    optimizer = make_optimizer(model, TrainConfig())
    network = torch.compile(model) if device.type == "cuda" else model
    ids = torch.randint(1, config.vocab_size, (batch_size, block_size + 1), device=device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    step = partial(take_steps, network, model, optimizer, x, y, 1)
    step()
    seconds, end = [], time.monotonic() + (WARM_UP if device.type == "cuda" else 0.0)
    while len(seconds) < STEPS or time.monotonic() < end:
        seconds.append(step())
    with profiler(device) as profile:
        for _ in range(UNCOUNTED + STEPS):
            with record_function(STEP):
                step()
    return profile.events(), 1000 * median(seconds[-STEPS:])


def main():
    parser = make_parser("profile_step.py", __doc__)
    parser.add_argument("--attention", default="softmax", help="as in train.py")
    parser.add_argument("--block_size", type=at_least_1, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch_size", type=at_least_1, default=64, help="sequences")
    args = parser.parse_args()
    try:
        config = GPTConfig(attention=args.attention, p=2)
    except ValueError as error:
        parser.error(str(error))
    torch.set_float32_matmul_precision("high")  # as train.py
    events, step_ms = measure(config, args.batch_size, args.block_size)
    kinds = summarize(events, torch.cuda.is_available())
    print_titles(COLUMNS)
    rows = [dict(kind=kind, milliseconds=kinds[kind]) for kind in KINDS]
    rows += [dict(kind="all", milliseconds=kinds.total()), dict(kind="without the profiler", milliseconds=step_ms)]
    for row in rows:
        print_row(COLUMNS, row)
    finish(args, rows)


if __name__ == "__main__":
    run_program(main)
