"""Prepare LongCrawl64: documents of exactly 65,536 GPT-2 tokens (https://manifestai.com/articles/longcrawl64/).

    python data/longcrawl64/prepare.py --documents=2048               # 134 M tokens of the Hugging Face mirror
    python data/longcrawl64/prepare.py --source=/data/longcrawl64     # a local copy: train.zarr and heldout.zarr
    python data/longcrawl64/prepare.py --source=books.jsonl           # other long text, packed into the same layout

The source is two zarr arrays (v2 or v3; local or any fsspec URL), train [6609334, 65536] and heldout [52131, 65536] of
uint16 in chunks of [2048, 2048], about 800 GB in all. Each row of chunks is written as one row-major shard (268 MB);
heldout becomes the validation split. A killed run is resumed by running the same command again, and with other
--documents the shards that are there stay (the last one is written again if it grows).

zarr silently returns the fill value for a missing chunk, and there are copies of this dataset with missing or zeroed
chunks. So the chunk files are counted first, and a missing chunk, or one that holds a single value, is refused by name.
With --skip_missing only the rows of chunks that are complete are taken.
"""

import os
import sys
from functools import partial

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from sympow.data import DataError
from sympow.data.command import Parser, run
from sympow.data.corpus import find_files, prepare_files
from sympow.data.shards import Unit, is_complete, write_dataset
from sympow.data.tokenizer import gpt2_tokenizer
from sympow.data.zarr_rows import Zarr, missing_message

MIRROR = "hf://datasets/clankur/longcrawl64@5e2f38e601ca7c16fa304f30536d9e2945bb2a32"
ARRAYS = {"train": "train.zarr", "val": "heldout.zarr"}


def plan(array, documents, skip_missing):
    """Return [(row of chunks, number of its documents to take)] for the first `documents` documents, or all if None.

    Raises DataError if chunk files are missing (unless skip_missing, which leaves such rows out) or if the array has
    fewer documents.
    """
    rows = list(array.chunks)
    if not skip_missing and documents is not None:
        rows = rows[: -(-documents // array.chunk_rows)]
    print(f"{array.url}: looking for the chunk files of {array.documents:,} documents")
    missing = set(array.missing(rows))
    if missing and not skip_missing:
        raise DataError(missing_message(array.url, sorted(missing)))
    parts, remaining = [], array.documents if documents is None else documents
    for row in rows:
        count = min(remaining, array.chunk_rows, array.documents - row * array.chunk_rows)
        if count and missing.isdisjoint(array.keys(row)):
            parts.append((row, count))
            remaining -= count
    if not parts or (remaining and documents is not None):
        total = sum(count for _, count in parts)
        raise DataError(f"{array.url}: {documents or 'all'} documents asked for, {total} can be had")
    return parts


def prepare_zarr(args, source):
    """Write the dataset from zarr arrays."""
    arguments = {
        "zarr": source if "://" in source else os.path.abspath(source),
        "documents": args.documents,
        "val_documents": args.val_documents,
        "skip_missing": args.skip_missing,
        "document_length": args.document_length,
    }
    if not args.skip_missing and is_complete(args.out, arguments, args.verify):
        return
    arrays = {split: Zarr(f"{source}/{name}", args.document_length) for split, name in ARRAYS.items()}
    documents = {"train": args.documents, "val": args.val_documents}
    if args.documents and not args.val_documents:  # a small training set does not need all 52,131 heldout documents
        documents["val"] = min(2048, arrays["val"].documents)
    plans = {split: plan(arrays[split], documents[split], args.skip_missing) for split in arrays}
    if args.skip_missing:  # a copy that has grown has other complete rows
        arguments["rows"] = {split: [row for row, _ in parts] for split, parts in plans.items()}
        if is_complete(args.out, arguments, args.verify):
            return
    length = args.document_length
    units = [
        Unit(split, partial(arrays[split].read, row, count), [arguments["zarr"], row, count])
        for split in arrays
        for row, count in plans[split]
    ]
    write_dataset(args.out, units, gpt2_tokenizer(json_escaped=True), length, arguments, source, args.command)


def main(argv):
    parser = Parser(__doc__, __file__)
    parser.add_argument("--source", default=MIRROR, help="folder or URL of the zarr arrays, or text to pack instead")
    parser.add_argument("--documents", type=int, help="train documents to take (unset: all)")
    parser.add_argument("--val_documents", type=int, help="heldout documents (unset: all, or 2048 with --documents)")
    parser.add_argument("--skip_missing", action="store_true", help="leave out chunk rows that are not complete")
    parser.add_argument("--key", default="text", help="for text: where it is in a line of .jsonl")
    args = parser.parse_args(argv)
    source = args.source.rstrip("/")
    for name in ("documents", "val_documents"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise DataError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if "://" in source or any(os.path.exists(os.path.join(source, name)) for name in ARRAYS.values()):
        prepare_zarr(args, source)
        return
    if args.documents or args.val_documents or args.skip_missing:
        names = " and ".join(ARRAYS.values())
        raise DataError(f"{source} has no {names}; --documents and --skip_missing are for zarr sources")
    prepare_files(find_files([source], (".txt", ".md", ".jsonl")), "gpt2-escaped", args, source, args.key)


if __name__ == "__main__":
    run(main)
