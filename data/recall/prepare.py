"""Prepare texts that test whether a model recalls what it has read, near and far. This needs no network.

    python data/recall/prepare.py                                                    # pairs -> data/recall
    python data/recall/prepare.py --task=needle --haystack=pystdlib --out=data/recall_needle

tasks.py describes the two tasks. Training has documents of --context bytes, so that every answer lies in the window of
a model that is trained at this context. A row has --times of them, behind one another. The validation split begins with
--short such rows, for the loss; its other rows are one document each, --times the context long, on which the accuracy
is measured against the distance of the answer. All are bytes and a function of the options; the haystack of needles is
a prepared dataset of bytes, split by split.
"""

import functools
import os
import sys
import zlib

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

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
    for name, least in (("context", 256), ("times", 1), ("train_tokens", args.context), ("short", 1), ("long", 1)):
        if getattr(args, name) < least:
            raise DataError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    length = args.context * args.times
    names = ("task", "context", "times", "train_tokens", "short", "long")
    arguments, haystack = {name: getattr(args, name) for name in names}, None
    if args.task == "needle":
        haystack = Dataset(args.haystack)
        if haystack.tokenizer.kind != "bytes":
            raise DataError(
                f"--haystack={args.haystack} must be a dataset of bytes, it is of {haystack.tokenizer.kind}"
            )
        arguments["haystack"] = [shard["sha256"] for s in haystack.meta["splits"].values() for shard in s["shards"]]
    if is_complete(args.out, arguments, args.verify):
        return
    rows, most = -(-args.train_tokens // length), max(1, SHARD // length)
    sizes = [("train", min(most, rows - at), args.times) for at in range(0, rows, most)]
    units = [
        Unit(split, functools.partial(_rows, haystack, split, i, count, length, pieces, args.task))
        for i, (split, count, pieces) in enumerate([*sizes, ("val", args.short, args.times), ("val", args.long, 1)])
    ]
    source = f"{args.task}" + (f" in {haystack.name}" if haystack else "")
    write_dataset(args.out, units, Tokenizer("bytes"), length, arguments, source, args.command, arguments)


def _rows(haystack, split, number, count, length, pieces, task):
    """Return `count` rows [count, length] of `pieces` documents each; number: that of the shard, its seed."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"{split} {number}".encode())))
    documents, size = count * pieces, length // pieces
    try:
        if task == "pairs":
            text = make_pairs(rng, documents, size)
        else:
            text = make_needles(rng, _hay(haystack, split, rng, documents, size), size)
    except ValueError as error:
        raise DataError(error) from None
    return text.astype(np.uint16).reshape(count, length)


def _hay(haystack, split, rng, documents, size):
    """Return uint8 [documents, size] of a split's text, from places drawn by rng; ends of text are new lines."""
    total = haystack.tokens(split)
    if total < size:
        raise DataError(f"the haystack {haystack.name} has {total} tokens of {split}, a document needs {size}")
    found = np.stack([haystack.read(split, int(at), size) for at in rng.integers(0, total - size + 1, documents)])
    return np.where(found > 255, 10, found).astype(np.uint8)


if __name__ == "__main__":
    run(main)
