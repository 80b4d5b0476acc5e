"""Prepare texts that test whether a model recalls what it has read, near and far. This needs no network.

    python data/recall/prepare.py            # -> data/recall

tasks.py describes the texts. Training has documents of --context bytes, so that every answer lies in the window of a
model that is trained at this context. A row has --times of them, behind one another. The validation split begins with
--short such rows, for the loss. Its other rows are one document each, --times the context long: they measure accuracy
against the distance of the answer. All are bytes and a function of the options.
"""

import functools
import os
import sys
import zlib

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))

from sympow.data import DataError
from sympow.data.command import Parser, run
from sympow.data.recall.tasks import make_pairs
from sympow.data.shards import Unit, is_complete, write_dataset
from sympow.data.tokenizer import Tokenizer

SHARD = 16 << 20  # bytes


def main(argv):
    parser = Parser(__doc__, __file__)
    parser.add_argument("--context", type=int, default=1024, help="bytes of a document of training")
    parser.add_argument("--times", type=int, default=16, help="how many times as long the documents of validation are")
    parser.add_argument("--train_tokens", type=int, default=1 << 28, help="bytes of training")
    parser.add_argument("--short", type=int, default=16, help="rows of validation with documents as in training")
    parser.add_argument("--long", type=int, default=64, help="rows of validation with one document each")
    args = parser.parse_args(argv)
    smallest = {"context": 256, "times": 1, "train_tokens": args.context, "short": 1, "long": 1}
    for name, limit in smallest.items():
        if getattr(args, name) < limit:
            raise DataError(f"--{name} must be at least {limit}, got {getattr(args, name)}")
    length = args.context * args.times
    arguments = {"task": "pairs"}  # stands in datasets that are there already, and they stay complete
    arguments |= {name: getattr(args, name) for name in smallest}
    if is_complete(args.out, arguments, args.verify):
        return
    rows, shard_rows = -(-args.train_tokens // length), max(1, SHARD // length)
    parts = [("train", min(shard_rows, rows - first), args.times) for first in range(0, rows, shard_rows)]
    parts += [("val", args.short, args.times), ("val", args.long, 1)]
    units = [
        Unit(split, functools.partial(_rows, split, number, (count, length), pieces))
        for number, (split, count, pieces) in enumerate(parts)
    ]
    write_dataset(args.out, units, Tokenizer("bytes"), length, arguments, "pairs", args.command, arguments)


def _rows(split, number, shape, pieces):
    """Return rows of this shape, of `pieces` documents each. number: the number of the shard, its seed."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"{split} {number}".encode())))
    text = make_pairs(rng, shape[0] * pieces, shape[1] // pieces)
    return text.astype(np.uint16).reshape(shape)


if __name__ == "__main__":
    run(main)
