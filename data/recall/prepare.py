"""Prepare texts that test whether a model recalls what it has read, near and far. This needs no network.

    python data/recall/prepare.py                                                    # pairs -> data/recall
    python data/recall/prepare.py --task=needle --haystack=pystdlib --out=data/recall_needle

tasks.py describes the two tasks. Training has documents of --context bytes, so that every answer lies in the window of
a model that is trained at this context. A row has --times of them, behind one another. The validation split begins with
--short such rows, for the loss. Its other rows are one document each, --times the context long: they measure accuracy
against the distance of the answer. All are bytes and a function of the options; the haystack of needles is a prepared
dataset of bytes, split by split.
"""

import functools
import os
import sys
import zlib

import numpy as np

sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))

from sympow.data import DataError
from sympow.data.command import Parser, run
from sympow.data.dataset import Dataset
from sympow.data.recall.tasks import RECORD, make_needles, make_pairs
from sympow.data.shards import Unit, is_complete, write_dataset
from sympow.data.tokenizer import Tokenizer

SHARD = 16 << 20  # bytes


def main(argv):
    parser = Parser(__doc__, __file__)
    parser.add_argument("--task", choices=RECORD, default="pairs", help="what is asked for")
    parser.add_argument("--context", type=int, default=1024, help="bytes of a document of training")
    parser.add_argument("--times", type=int, default=16, help="how many times as long the documents of validation are")
    parser.add_argument("--train_tokens", type=int, default=1 << 28, help="bytes of training")
    parser.add_argument("--short", type=int, default=16, help="rows of validation with documents as in training")
    parser.add_argument("--long", type=int, default=64, help="rows of validation with one document each")
    parser.add_argument("--haystack", default="pystdlib", help="prepared dataset of bytes that needles lie in")
    args = parser.parse_args(argv)
    smallest = {"context": 256, "times": 1, "train_tokens": args.context, "short": 1, "long": 1}
    for name, limit in smallest.items():
        if getattr(args, name) < limit:
            raise DataError(f"--{name} must be at least {limit}, got {getattr(args, name)}")
    length = args.context * args.times
    arguments, haystack = {name: getattr(args, name) for name in ("task", *smallest)}, None
    if args.task == "needle":
        haystack = Dataset(args.haystack)
        if haystack.tokenizer.kind != "bytes":
            raise DataError(
                f"--haystack={args.haystack} must be a dataset of bytes, it is of {haystack.tokenizer.kind}"
            )
        arguments["haystack"] = haystack.meta["splits"]
    if is_complete(args.out, arguments, args.verify):
        return
    rows, shard_rows = -(-args.train_tokens // length), max(1, SHARD // length)
    parts = [("train", min(shard_rows, rows - first), args.times) for first in range(0, rows, shard_rows)]
    parts += [("val", args.short, args.times), ("val", args.long, 1)]
    units = [
        Unit(split, functools.partial(_rows, haystack, split, number, (count, length), pieces))
        for number, (split, count, pieces) in enumerate(parts)
    ]
    source = args.task + (f" in {haystack.name}" if haystack else "")
    write_dataset(args.out, units, Tokenizer("bytes"), length, arguments, source, args.command, arguments)


def _rows(haystack, split, number, shape, pieces):
    """Return rows of this shape, of `pieces` documents each, of needles if there is a haystack, otherwise of pairs.

    number: the number of the shard, its seed.
    """
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"{split} {number}".encode())))
    documents, size = shape[0] * pieces, shape[1] // pieces
    if haystack:
        text = make_needles(rng, _hay(haystack, split, rng, documents, size))
    else:
        text = make_pairs(rng, documents, size)
    return text.astype(np.uint16).reshape(shape)


def _hay(haystack, split, rng, documents, size):
    """Return uint8 [documents, size] of a split's text, from places drawn by rng; ends of text are new lines."""
    total = haystack.tokens(split)
    if total < size:
        raise DataError(f"the haystack {haystack.name} has {total} tokens of {split}, a document needs {size}")
    starts = rng.integers(0, total - size + 1, documents).tolist()
    tokens = np.stack([haystack.read(split, start, size) for start in starts])
    return np.where(tokens > 255, ord("\n"), tokens).astype(np.uint8)


if __name__ == "__main__":
    run(main)
