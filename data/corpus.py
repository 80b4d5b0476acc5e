"""Turn text files into a dataset: the part that the text and pystdlib scripts share.

    files = find_files(["notes", "papers.jsonl"], suffixes=(".txt", ".md"))
    prepare_files(files, "bytes", args, source="my notes")      # args as data.command.Parser gives them

A plain file is one document; a .jsonl file has one document per line. The files are ordered by a hash of their names,
and their text is one long stream: its end is the validation split. Each split is cut into units of about UNIT bytes,
and each unit is tokenized alone, with an end of text after every document, and cut into rows.
"""

import functools
import hashlib
import math
import os
from collections import Counter
from typing import NamedTuple

from . import DataError
from .meta import hash_json
from .shards import Unit, is_complete, write_dataset
from .split import Stream
from .tokenizer import split_long_text
from .vocabulary import named_tokenizer, train_tokenizer, trained_size

UNIT = 32 << 20  # bytes of source per shard: as much is held in memory, and as much work is lost by a kill
SMALLEST = 2048  # bytes of text that a dataset needs at least
SAMPLE = 64 << 20  # bytes of the training split that a tokenizer is trained on, in pieces of PIECE
PIECE = 1 << 20
BYTES_PER_TOKEN = 4  # assumed of tokens that are no bytes, where splits are cut
COUNTED = 8 << 20  # bytes: a split below this is tokenized to see that it fills a row
NOT_TEXT = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".parquet", ".pdf", ".bin", ".zarr")


class File(NamedTuple):
    path: str
    name: str  # relative to the folder that was searched: the order must not depend on where that folder lies
    size: int
    mtime_ns: int


def parse_suffixes(text):
    """Return the tuple of suffixes in a text like ".txt,.md". Raises DataError if there is none."""
    suffixes = tuple("." + word.strip().lstrip(".").lower() for word in text.split(",") if word.strip(" ."))
    if not suffixes:
        raise DataError(f"--suffix must be like .txt,.md, got {text!r}")
    return suffixes


def find_files(paths, suffixes, skip_folders=("__pycache__",)):
    """Return the Files that the paths stand for, in the order of a hash of their names; folders are searched for the
    suffixes.

    The order of the paths changes nothing, and a file that is found twice is taken once. Files with other suffixes are
    counted and printed; hidden, empty and unreadable ones and linked folders are left out. Raises DataError if a path
    is missing or is not text, or if too little text is found.
    """
    files, skipped = {}, Counter()  # by real paths, by suffixes
    for path in sorted(map(str, paths), key=lambda path: (not os.path.isdir(path), path)):
        if not os.path.lexists(path):
            raise DataError(f"{path or repr(path)} does not exist")
        if path.lower().endswith(NOT_TEXT) and not os.path.isdir(path):
            raise DataError(f"{path} is not a text file: unpack or convert it to .txt or .jsonl first")
        names = _search(path, suffixes, skip_folders, skipped) if os.path.isdir(path) else [""]
        for name in names:
            full = os.path.join(path, name) if name else path
            if os.path.isfile(full) and os.access(full, os.R_OK) and (status := os.stat(full)).st_size:
                file = File(full, name or os.path.basename(path), status.st_size, status.st_mtime_ns)
                files.setdefault(os.path.realpath(full), file)
    total = sum(file.size for file in files.values())
    note = f"; left out: {_counts(skipped)}" if skipped else ""
    if total < SMALLEST:
        raise DataError(
            f"{', '.join(map(str, paths))}: {total} bytes of text in {len(files)} files ({','.join(suffixes)} in "
            f"folders{note}) is too little: give at least {SMALLEST} bytes"
        )
    kinds = Counter(_suffix(file.name) for file in files.values())
    print(f"{len(files):,} files, {total:,} bytes: {_counts(kinds)}{note}")
    return sorted(files.values(), key=_hash_of_name)


def _hash_of_name(file):
    return hashlib.sha256(file.name.encode("utf-8", "surrogateescape")).digest(), file.path


def _search(path, suffixes, skip_folders, skipped):
    """Yield the names below a folder of the files with these suffixes; count all others that are not hidden."""
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = [name for name in subfolders if name not in skip_folders and not name.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            if name.lower().endswith(suffixes):
                yield os.path.relpath(os.path.join(folder, name), path).replace(os.sep, "/")
            else:
                skipped[_suffix(name)] += 1


def _suffix(name):
    return os.path.splitext(name)[1].lower()[:12] or "without a suffix"


def _counts(counter):
    """Return a text like "12 .py, 3 .pdf" of the most frequent kinds."""
    return ", ".join(f"{count:,} {kind}" for kind, count in counter.most_common(6))


def fingerprint(files):
    """Return a hash over names, sizes and modification times, which changes when a file is edited."""
    return hash_json([[file.name, file.size, file.mtime_ns] for file in files])


def prepare_files(files, tokenizer_name, args, source, key="text"):
    """Write a dataset of Files to args.out, unless it is complete there.

    tokenizer_name: bytes, gpt2, bpe:SIZE or the path of a tokenizer.json; args: the options of data.command.Parser;
    source: a line that says where the text comes from; key: the name of the text in a line of .jsonl.
    """
    tokenizer = named_tokenizer(tokenizer_name)
    arguments = {
        "tokenizer": tokenizer.fingerprint() if tokenizer else tokenizer_name,
        "document_length": args.document_length,
        "val_fraction": args.val_fraction,
        "key": key,
        "files": fingerprint(files),
    }
    if is_complete(args.out, arguments, args.verify):
        return
    size = None if tokenizer else trained_size(tokenizer_name)
    units, length, tokenizer = plan_units(files, tokenizer, args.document_length, args.val_fraction, key, size)
    write_dataset(args.out, units, tokenizer, length, arguments, source, args.command, {"files": len(files)})


def plan_units(files, tokenizer, document_length, val_fraction, key="text", trained=None):
    """Cut the Files into units; return (list of Unit, length of a row in tokens, the tokenizer).

    trained: the number of ids of a tokenizer that is trained on the training split, if the tokenizer is None. Rows are
    document_length long. A small source gets shorter rows, a power of two and at most 1/16 of its tokens, so that both
    splits have a row and little is dropped at their ends.
    """
    # If the tokens are bytes, a plain file may be cut anywhere.
    in_bytes = tokenizer is not None and tokenizer.kind == "bytes"
    stream, token_size = Stream(files, in_bytes, key), 1 if in_bytes else BYTES_PER_TOKEN
    tokens = stream.total // token_size
    length = row_length(tokens, document_length)
    rows = max(1, round(val_fraction * tokens / length))  # the validation split is a whole number of rows
    size = rows * length * token_size
    while (cut := stream.align(max(0, stream.total - size))) == stream.total:  # the last line is longer
        size *= 2
    if cut == 0:
        raise DataError(f"{files[-1].path}: cannot cut off a validation split: give more or shorter documents")
    splits = {"train": (0, cut), "val": (cut, stream.total)}
    if trained:
        tokenizer = train_tokenizer(_sample(stream, cut), trained)
        print(f"trained a tokenizer of {tokenizer.vocab_size:,} ids on the training split")
    for begin, end in splits.values():
        if end - begin <= COUNTED and (count := len(stream.tokens(begin, end, tokenizer))) < length:
            length = _power_of_two(count)
    if length < document_length:
        print(f"rows of {length} tokens instead of {document_length}: the source has about {tokens:,} tokens")
    units = []
    for split, (begin, end) in splits.items():
        while begin < end:
            stop = min(end, stream.align(min(end, begin + UNIT)))
            units.append(Unit(split, functools.partial(_rows, stream, begin, stop, tokenizer, length)))
            begin = stop
    return units, length, tokenizer


def row_length(tokens, document_length):
    """Return document_length, or a smaller power of two, so that about `tokens` tokens give 16 rows."""
    return document_length if document_length <= tokens // 16 else _power_of_two(int(tokens) // 16)


def _power_of_two(number):
    """Return the largest power of two that is at most `number`, at least 1."""
    return 1 << max(0, number.bit_length() - 1)


def _sample(stream, end):
    """Yield the text of a stream up to `end`, of a large one in evenly spaced parts that together have about SAMPLE
    bytes."""
    step = PIECE * max(1, math.ceil(end / SAMPLE))
    for begin in range(0, end, step):
        for text, _ in stream.documents(stream.align(begin), min(end, stream.align(min(end, begin + PIECE)))):
            yield from split_long_text(text)


def _rows(stream, begin, end, tokenizer, length):
    """Return the tokens of a part of a stream as rows [n, length]."""
    return cut_rows(stream.tokens(begin, end, tokenizer), length)


def cut_rows(tokens, length):
    """Return tokens [n] as rows [n // length, length]. The tokens after the last whole row are dropped."""
    return tokens[: len(tokens) // length * length].reshape(-1, length)
