"""Measure how long a checkpoint stops training, and how long it takes to write beside it.

    python bench/checkpoint.py                          # 124M, here or on a GPU if there is one
    python bench/checkpoint.py --n_layer=24 --n_head=16 --n_embd=1024 --folder=/mnt/shared

Model and AdamW state are saved a few times. `held` is how long the training loop waits; the first time includes the
allocation of memory for the copy. `written` is the time from then until the checkpoint is on disk under its name.
`pause` is the longest time for which this thread, which goes on as training does, had to wait in between.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.model import GPT, GPTConfig  # noqa: E402
from sympow.runs.checkpoint import Progress, Writer  # noqa: E402
from sympow.runs.program import Parser, at_least_1, run_program  # noqa: E402


def main():
    parser = Parser(prog="bench/checkpoint.py", description=__doc__.splitlines()[0])
    for name in ("n_layer", "n_head", "n_embd"):
        parser.add_argument(f"--{name}", type=at_least_1, default=getattr(GPTConfig, name))
    parser.add_argument("--folder", help="where to write (a temporary folder in it); default: the system's")
    parser.add_argument("--times", type=at_least_1, default=4)
    args = parser.parse_args()
    if args.folder and not os.path.isdir(args.folder):
        parser.error(f"argument --folder: no folder {args.folder}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        config = GPTConfig(attention="sympow_gating", n_layer=args.n_layer, n_head=args.n_head, n_embd=args.n_embd)
    except ValueError as error:
        parser.error(str(error))
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    print(f"{model.parameter_count() / 1e6:.1f}M parameters, {device.type}, seconds")
    with tempfile.TemporaryDirectory(dir=args.folder) as out_dir:
        writer = Writer(out_dir)
        for step in range(1, args.times + 1):
            begin = time.perf_counter()
            writer.save(model, optimizer, Progress(step))
            now = saved = time.perf_counter()
            pause = 0.0
            while not writer.writing.done():
                time.sleep(0.0005)
                pause, now = max(pause, time.perf_counter() - now), time.perf_counter()
            writer.wait()
            print(f"held {saved - begin:.2f}, written {now - saved:.1f}, pause {pause:.3f}", flush=True)


if __name__ == "__main__":
    run_program(main)
