"""Prepare LongCrawl64: documents of exactly 65,536 GPT-2 tokens (https://manifestai.com/articles/longcrawl64/).

    python data/longcrawl64/prepare.py --documents=2048               # 134 M tokens of the Hugging Face mirror
    python data/longcrawl64/prepare.py --source=/data/longcrawl64     # a local copy: train.zarr and heldout.zarr

The source is two zarr arrays (v2 or v3; local or any fsspec URL), train [6609334, 65536] and heldout [52131, 65536] of
uint16 in chunks of [2048, 2048], about 800 GB in all. Each row of chunks is written as one row-major shard (268 MB);
heldout becomes the validation split. A killed run is resumed by running the same command again, and with other
--documents the shards that are there stay (the last one is written again if it grows).

zarr silently returns the fill value for a missing chunk, and there are copies of this dataset with missing or zeroed
chunks. So the chunk files are counted first, and only rows of chunks that are complete are taken, in their order, up to
--documents. With --strict, a missing chunk among the first --documents is refused by name. A chunk that holds a single
value is always refused. zarr has no checksums: a flipped byte in a chunk that still decodes is not noticed.
"""

import os
import sys
from functools import partial

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))

from sympow.data import DataError
from sympow.data.command import Parser, run
from sympow.data.shards import Unit, begun_arguments, is_complete, write_dataset
from sympow.data.tokenizer import IdsEncoding, Tokenizer
from sympow.data.vocabulary import gpt2_tokenizer
from sympow.data.zarr_rows import Zarr, missing_message

MIRROR = "hf://datasets/clankur/longcrawl64@5e2f38e601ca7c16fa304f30536d9e2945bb2a32"
ARRAYS = {"train": "train.zarr", "val": "heldout.zarr"}


def plan(array, documents, strict):
    """Return ([[row of chunks, number of its documents to take]], True if they are fewer than `documents`); None: all.

    Only complete rows of chunks are taken, and a line says how many there are. Raises DataError if there is none. With
    strict, the first rows must be complete and the array must have so many documents.
    """
    limit = documents or array.documents
    rows = array.chunks[: -(-limit // array.chunk_rows) if strict else None]
    print(f"{array.url}: looking for the chunk files of {array.documents:,} documents")
    missing = array.missing(rows)
    parts, taken, absent = [], 0, set(missing)
    complete = [row for row in rows if absent.isdisjoint(array.keys(row))]
    for row in complete:
        if count := min(array.count(row), limit - taken):
            parts.append([row, count])
            taken += count
    summary = (
        f"{array.url}: {taken:,} of {limit:,} documents are taken; {sum(map(array.count, complete)):,} of "
        f"{array.documents:,} are there, in {len(complete):,} complete rows of chunks of {len(rows):,}"
    )
    if not parts or (strict and taken < limit):
        raise DataError(f"{summary}; {missing_message(missing)}")
    print(summary)
    return parts, taken < limit


def prepare_arrays(args, source):
    """Write the dataset of the two arrays in a folder, or at a URL."""
    arguments = {
        "zarr": source if "://" in source else os.path.abspath(source),
        "documents": args.documents,
        "val_documents": args.val_documents,
        "strict": args.strict,
        "document_length": args.document_length,
        "protocol": None,  # stands in datasets that are there already, and they stay complete
    }
    if arguments in begun_arguments(args.out) and is_complete(args.out, arguments, args.verify):
        return
    arrays = {split: Zarr(f"{source}/{name}", args.document_length) for split, name in ARRAYS.items()}
    documents = {"train": args.documents, "val": args.val_documents}
    if args.documents and not args.val_documents:  # a small training set does not need all 52,131
        documents["val"] = min(2048, arrays["val"].documents)
    parts = {}
    for split, array in arrays.items():
        parts[split], incomplete = plan(array, documents[split], args.strict)
        if incomplete:  # a copy that has grown has other rows
            arguments[f"{split}_rows"] = parts[split]
    tokenizer = zarr_tokenizer()
    if tokenizer.kind == "ids":
        arguments["vocabulary"] = False
    if is_complete(args.out, arguments, args.verify):
        return
    length = args.document_length
    units = [
        Unit(split, partial(arrays[split].read, row, count), [arguments["zarr"], row, count])
        for split in arrays
        for row, count in parts[split]
    ]
    write_dataset(args.out, units, tokenizer, length, arguments, source, args.command)


def zarr_tokenizer():
    """Return GPT-2's tokenizer, or without its vocabulary, which the tokens do not need, one that knows ids alone."""
    try:
        return gpt2_tokenizer(json_escaped=True)
    except DataError as error:
        print(f"{error}. The tokens are prepared without it; samples will show ids", file=sys.stderr)
        return Tokenizer("ids", IdsEncoding(), json_escaped=True)


def main(argv):
    parser = Parser(__doc__, __file__)
    parser.add_argument("--source", default=MIRROR, help="folder or URL of the zarr arrays")
    parser.add_argument("--documents", type=int, help="train documents to take at most (unset: all)")
    parser.add_argument("--val_documents", type=int, help="heldout documents (unset: all; 2048 with --documents)")
    parser.add_argument("--strict", action="store_true", help="refuse missing chunks and too few documents")
    args = parser.parse_args(argv)
    for name in ("documents", "val_documents"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise DataError(f"--{name} must be at least 1, got {value}")
    prepare_arrays(args, args.source.rstrip("/"))


if __name__ == "__main__":
    run(main)
