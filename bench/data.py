"""Measure how many tokens per second the loader gives to several ranks of one machine.

    python bench/data.py                                         # pystdlib, 8 ranks
    python bench/data.py --dataset=longcrawl64 --block_size=65536 --batch_size=1 --ranks 1 8

Each rank is a process that reads its own batches in the order of training, as train.py does, and drops them.
"""

import multiprocessing
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.data import DataError  # noqa: E402
from sympow.data.dataset import Dataset  # noqa: E402
from sympow.data.loader import Windows, train_batch  # noqa: E402
from sympow.runs.program import Parser, at_least_1, positive, run_program  # noqa: E402


def read_batches(name, block_size, batch_size, pack, rank, world, seconds, start, counts):
    """Read batches as one rank for `seconds` after all ranks are ready, and put the number of tokens into counts."""
    windows = Windows(Dataset(name), "train", block_size, pack)
    start.wait()
    end, step = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        train_batch(windows, 1337, step, rank, world, batch_size)
        step += 1
    counts.put(step * batch_size * block_size)


def measure(name, block_size, batch_size, pack, ranks, seconds):
    """Return the tokens per second of all ranks together."""
    spawn = multiprocessing.get_context("spawn")
    start, counts = spawn.Barrier(ranks), spawn.Queue()
    args = [(name, block_size, batch_size, pack, rank, ranks, seconds, start, counts) for rank in range(ranks)]
    processes = [spawn.Process(target=read_batches, args=a, daemon=True) for a in args]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends this process, and this one ends its children
    for process in processes:
        process.start()
    signal.signal(signal.SIGINT, handler)
    total = sum(counts.get() for _ in processes)
    for process in processes:
        process.join()
    return total / seconds


def main():
    parser = Parser(prog="bench/data.py", description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="pystdlib", help="a folder in data/, or any path")
    parser.add_argument("--block_size", type=at_least_1, default=1024)
    parser.add_argument("--batch_size", type=at_least_1, default=64, help="sequences in a batch of each rank")
    parser.add_argument("--pack", action="store_true")
    parser.add_argument("--ranks", type=at_least_1, nargs="+", default=[8])
    parser.add_argument("--seconds", type=positive, default=5.0)
    args = parser.parse_args()
    try:
        Windows(Dataset(args.dataset), "train", args.block_size, args.pack)
    except DataError as error:
        parser.error(str(error))
    for ranks in args.ranks:
        speed = measure(args.dataset, args.block_size, args.batch_size, args.pack, ranks, args.seconds)
        print(f"{args.dataset}, {args.block_size} context: {speed / 1e6:.1f}M tokens/s to {ranks} ranks", flush=True)


if __name__ == "__main__":
    run_program(main)
