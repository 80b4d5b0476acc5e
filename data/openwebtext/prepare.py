"""Prepare OpenWebText: 8 million documents of text from the web, about 9 billion GPT-2 tokens (18 GB).

    python data/openwebtext/prepare.py --num_proc=8
    python data/openwebtext/prepare.py --source=part.parquet          # a local .parquet or .jsonl with a column "text"

Every document is followed by the end of text, and the stream is cut into rows of --document_length tokens. One document
in 2,000 goes to the validation split (0.05%, as in nanoGPT). A killed run is resumed by running the same command again,
and with a larger --documents the shards that are there stay.
"""

import os
import sys
from functools import partial

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import numpy as np

from data import DataError, need
from data.command import Parser, run
from data.corpus import cut_rows
from data.shards import Unit, is_complete, write_dataset
from data.split import join_documents
from data.tokenizer import gpt2_tokenizer

REPOSITORY = "Skylion007/openwebtext"  # parquet; the script-based "openwebtext" is no longer run by `datasets`
DOCUMENTS = 8192  # per shard: about 40 MB of text
TOKENS = 1100  # in an average document, for the progress bar


def load(source, num_proc):
    """Load the documents as a datasets.Dataset with a column "text". Raises DataError if that fails."""
    datasets = need("datasets")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    options = {"split": "train"}
    if source.endswith((".parquet", ".jsonl")):
        if not os.path.exists(source):
            raise DataError(f"{source} does not exist")
        name, options["data_files"] = ("parquet" if source.endswith(".parquet") else "json"), source
    else:
        name, options["num_proc"] = source, num_proc
    try:
        documents = datasets.load_dataset(name, **options)
    except Exception as error:  # `datasets` raises many kinds: offline, no such repository, a damaged file, ...
        raise DataError(
            f"cannot load {source} ({type(error).__name__}: {error}): "
            "go online, or give a local .parquet or .jsonl with --source"
        ) from error
    if "text" not in documents.column_names:
        raise DataError(f'{source} has no column "text", only {", ".join(documents.column_names)}')
    return documents


def rows(documents, numbers, tokenizer, length):
    """Return the documents with these numbers as rows of tokens [n, length], the end of text after each document.

    Raises DataError for a document whose text is null or no text.
    """
    texts = documents[numbers.tolist()]["text"]
    for number, text in zip(numbers.tolist(), texts):
        if not isinstance(text, str):
            raise DataError(f"document {number} of the source has {str(text)[:40]!r} in the place of text")
    return cut_rows(join_documents(tokenizer.encode_batch(texts), [True] * len(texts), tokenizer), length)


def plan(documents, source, tokenizer, args):
    """Return the list of Unit. source: what identifies the documents, for the units' keys."""
    every, numbers = round(1 / args.val_fraction), np.arange(len(documents))
    if args.documents is not None:
        if args.documents > len(documents):
            raise DataError(f"--documents={args.documents}: {args.source} has {len(documents)}")
        numbers = numbers[: args.documents]
    units = []
    for split, chosen in ("train", np.delete(numbers, np.s_[::every])), ("val", numbers[::every]):
        for part in (chosen[i : i + DOCUMENTS] for i in range(0, len(chosen), DOCUMENTS)):
            read = partial(rows, documents, part, tokenizer, args.document_length)
            # The part is the same whatever --documents is, but for the last one.
            key = [source, every, int(part[0]), int(part[-1])]
            units.append(Unit(split, read, len(part) * TOKENS, key))
    return units


def main(argv):
    parser = Parser(__doc__, __file__, val_fraction=0.0005)
    parser.add_argument("--source", default=REPOSITORY, help="Hugging Face dataset, or a local .parquet or .jsonl")
    parser.add_argument("--documents", type=int, help="documents to take (unset: all)")
    parser.add_argument("--num_proc", type=int, default=(os.cpu_count() or 1), help="processes for the download")
    args = parser.parse_args(argv)
    if args.documents is not None and args.documents < 2:
        raise DataError(f"--documents must be at least 2, one of which is for validation, got {args.documents}")
    if args.num_proc < 1:
        raise DataError(f"--num_proc must be at least 1, got {args.num_proc}")
    arguments = {
        "source": args.source,
        "document_length": args.document_length,
        "val_fraction": args.val_fraction,
    }
    if os.path.isfile(args.source):  # another file that later takes this name must not be mixed with it
        status = os.stat(args.source)
        arguments |= {"source": os.path.abspath(args.source), "file": [status.st_size, status.st_mtime_ns]}
    source = [arguments["source"], arguments.get("file")]
    if args.documents is not None:
        arguments["documents"] = args.documents
    if is_complete(args.out, arguments, args.verify):
        return
    tokenizer = gpt2_tokenizer()
    documents = load(args.source, args.num_proc)
    units = plan(documents, source, tokenizer, args)
    write_dataset(args.out, units, tokenizer, args.document_length, arguments, args.source, args.command)


if __name__ == "__main__":
    run(main)
