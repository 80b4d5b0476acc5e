"""Turn text files into a dataset: the part that the text and pystdlib scripts share.

    sources = find_files(["notes", "papers.jsonl"], suffixes=(".txt", ".md"))
    prepare_files(sources, "bytes", args, source="my notes")      # args as data.command.Parser gives them

A plain file is one document; a .jsonl file has one document per line. Each source gives its share of the validation
split, as split.py says. The text of a split is one long stream, which is cut into units of about UNIT bytes. Each unit
is tokenized alone, with an end of text after every document, and cut into rows.
"""

import functools
import hashlib
import math
import os
from collections import Counter
from typing import NamedTuple

from . import DataError
from .meta import hash_json
from .progress import waiting
from .shards import Unit, is_complete, write_dataset
from .split import Stream, is_jsonl, split_sources, whole_stream
from .tokenizer import named_tokenizer, split_long_text, train_tokenizer, trained_size

UNIT = 32 << 20  # bytes of source per shard: as much is held in memory, and as much work is lost by a kill
SMALLEST = 2048  # bytes of text that a dataset needs at least
SAMPLE = 64 << 20  # bytes of the training split that a tokenizer is trained on, in pieces of PIECE
PIECE = 1 << 20
# Assumed of a tokenizer that is trained on one of the splits, because it must not decide how they are cut.
BYTES_PER_TOKEN = 4
COUNTED = 8 << 20  # bytes: a split below this is tokenized to see that it fills a row
MANY = 20  # files that are named one by one (notes/*.txt) are one source, as in a folder, if there are so many
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
    """Return the sources, a list of lists of File, that the paths stand for; folders are searched for the suffixes.

    A source is a folder's plain files, its .jsonl files, or a file that is named itself. The plain files of a source
    are ordered by a hash of their names, and the order of the paths changes nothing. A file that is found twice is
    taken once. What is left out (other suffixes, hidden, empty and unreadable files, linked folders) is counted and
    printed. Raises DataError if a path is missing or is not text, or if too little text is found.
    """
    skipped, seen, sources, named = Counter(), set(), [], []
    for path in sorted(set(map(str, paths)), key=_order_of_path):
        if os.path.isdir(path):
            files = _usable(_search(path, suffixes, skip_folders, skipped), skipped, seen)
            if not files:
                print(f"{path}: nothing is taken from it: it has no {','.join(suffixes)}")
            sources += _by_kind(files)
        elif not os.path.lexists(path):
            raise DataError(f"{path or repr(path)} does not exist")
        elif path.lower().endswith(NOT_TEXT):
            raise DataError(f"{path} is not a text file: unpack or convert it to .txt or .jsonl first")
        else:
            named += _usable([(os.path.basename(path), path)], skipped, seen)
    sources += [[file] for file in named] if len(named) < MANY else _by_kind(named)
    sources = [sorted(source, key=_hash_of_name) for source in sources if source]
    files = [file for source in sources for file in source]
    total = sum(file.size for file in files)
    note = f"; left out: {skipped.total():,} ({_counts(skipped)})" if skipped else ""
    if total < SMALLEST:
        kinds = ",".join(suffixes)
        raise DataError(
            f"{', '.join(map(str, paths))}: {total} bytes of text in {len(files)} files ({kinds} in folders{note}) "
            f"is too little: give at least {SMALLEST} bytes"
        )
    print(f"{len(files):,} files, {total:,} bytes: {_counts(Counter(_suffix(file.name) for file in files))}{note}")
    return sources


def _order_of_path(path):
    return not os.path.isdir(path), os.path.basename(os.path.normpath(path)), path


def _by_kind(files):
    """Return the plain files and the .jsonl files, each as a source."""
    return [[file for file in files if is_jsonl(file) == jsonl] for jsonl in (False, True)]


def _hash_of_name(file):
    return hashlib.sha256(file.name.encode("utf-8", "surrogateescape")).digest(), file.path


def _search(path, suffixes, skip_folders, skipped):
    """Yield (name below the path, full path) of the files with these suffixes; count all others."""
    for folder, subfolders, names in os.walk(path, onerror=lambda error: skipped.update(["unreadable"])):
        skipped.update("hidden" for name in (*subfolders, *names) if name.startswith("."))
        subfolders[:] = [name for name in subfolders if name not in skip_folders and not name.startswith(".")]
        links = (os.path.islink(os.path.join(folder, name)) for name in subfolders)
        skipped.update("linked folders (name them to take them)" for link in links if link)
        for name in names:
            if name.lower().endswith(suffixes) and not name.startswith("."):
                full = os.path.join(folder, name)
                yield os.path.relpath(full, path).replace(os.sep, "/"), full
            elif not name.startswith("."):
                skipped[_suffix(name)] += 1


def _usable(paths, skipped, seen):
    """Return a File for each (name, path) that can be read, has contents and has not been seen; count the others."""
    files = []
    for name, path in paths:
        real = os.path.realpath(path)
        if not os.path.isfile(path) or not os.access(path, os.R_OK):  # for example a dangling link, or a pipe
            skipped["unreadable"] += 1
        elif not (status := os.stat(path)).st_size:
            skipped["empty"] += 1
        elif real in seen:
            skipped["found twice"] += 1
        else:
            seen.add(real)
            files.append(File(path, name, status.st_size, status.st_mtime_ns))
    return files


def _suffix(name):
    return os.path.splitext(name)[1].lower()[:12] or "without a suffix"


def _counts(counter):
    """Return a text like "12 .py, 3 .pdf" of the most frequent kinds."""
    return ", ".join(f"{count:,} {kind}" for kind, count in counter.most_common(6))


def fingerprint(sources):
    """Return a hash over names, sizes and modification times, which changes when a file is edited."""
    return hash_json([[file.name, file.size, file.mtime_ns] for source in sources for file in source])


def prepare_files(sources, tokenizer_name, args, source, key="text"):
    """Write a dataset of the sources (lists of File) to args.out, unless it is complete there.

    tokenizer_name: bytes, gpt2, bpe:SIZE or the path of a tokenizer.json; args: the options of data.command.Parser;
    source: a line that says where the text comes from; key: the name of the text in a line of .jsonl.
    """
    tokenizer = named_tokenizer(tokenizer_name)
    arguments = {
        "tokenizer": tokenizer.fingerprint() if tokenizer else tokenizer_name,
        "document_length": args.document_length,
        "val_fraction": args.val_fraction,
        "key": key,
        "files": fingerprint(sources),
    }
    if is_complete(args.out, arguments, args.verify):
        return
    size = None if tokenizer else trained_size(tokenizer_name)
    units, length, tokenizer = plan_units(sources, tokenizer, args.document_length, args.val_fraction, key, size)
    facts = {"files": sum(map(len, sources))}
    write_dataset(args.out, units, tokenizer, length, arguments, source, args.command, facts)


def plan_units(sources, tokenizer, document_length, val_fraction, key="text", trained=None):
    """Cut the sources into units; return (list of Unit, length of a row in tokens, the tokenizer).

    trained: the number of ids of a tokenizer that is trained on the training split, if the tokenizer is None. Rows are
    document_length long. A small source gets shorter rows, a power of two and at most 1/16 of its tokens, so that both
    splits have a row and little is dropped at their ends.
    """
    # If the tokens are bytes, a plain file may be cut anywhere, and each byte is one token.
    in_bytes = tokenizer is not None and tokenizer.kind == "bytes"
    raw = in_bytes and not any(is_jsonl(file) for files in sources for file in files)
    total = sum(file.size for files in sources for file in files)
    rate = 1.0 if raw else 1 / BYTES_PER_TOKEN if trained else tokens_per_byte(sources, tokenizer, key)

    # The validation split is a whole number of rows, with 5% more bytes where tokens per byte are an estimate.
    rows = max(1, round(val_fraction * total * rate / row_length(total * rate, document_length)))
    size = math.ceil(rows * row_length(total * rate, document_length) / rate * (1 if raw else 1.05))
    splits = {s: Stream(spans, in_bytes, key) for s, spans in split_sources(sources, size, in_bytes, key).items()}
    for split, stream in splits.items():
        if not stream.total:
            raise DataError(
                f"{sources[-1][-1].path}: cannot cut off a validation split: no document is left for the {split} "
                "split; give more or shorter documents"
            )
    if trained:
        tokenizer = train_tokenizer(_sample(splits["train"]), trained)
        print(f"trained a tokenizer of {tokenizer.vocab_size:,} ids on the training split")
        rate = tokens_per_byte(sources, tokenizer, key)

    length = row_length(total * rate, document_length)
    for stream in splits.values():
        if stream.size <= COUNTED and (count := len(stream.tokens(0, stream.total, tokenizer))) < length:
            length = _power_of_two(count)
    if length < document_length:
        print(
            f"rows of {length} tokens instead of {document_length}: the source has about {int(total * rate):,} tokens"
        )

    units = []
    for split, stream in splits.items():
        begin = 0
        while begin < stream.total:
            end = stream.align(stream.advance(begin, UNIT))
            units.append(Unit(split, functools.partial(_rows, stream, begin, end, tokenizer, length)))
            begin = end
    return units, length, tokenizer


def row_length(tokens, document_length):
    """Return document_length, or a smaller power of two, so that about `tokens` tokens give 16 rows."""
    return document_length if document_length <= tokens // 16 else _power_of_two(int(tokens) // 16)


def _power_of_two(number):
    """Return the largest power of two that is at most `number`, at least 1."""
    return 1 << max(0, number.bit_length() - 1)


@waiting("measuring the tokens of the text")
def tokens_per_byte(sources, tokenizer, key):
    """Return the number of tokens per byte, measured on about 1 MB at the ends of the sources."""
    total, tokens, count = sum(file.size for files in sources for file in files), 0, 0
    for files in sources:
        stream = whole_stream(files, tokenizer.kind == "bytes", key)
        size = max(PIECE // 16, PIECE * stream.total // total)
        while (begin := stream.align(max(0, stream.total - size))) == stream.total:  # one long line
            size *= 2
        tokens += len(stream.tokens(begin, stream.total, tokenizer))
        count += stream.total - begin
    return max(1, tokens) / count


def _sample(stream):
    """Yield the text of a stream, of a large one in evenly spaced parts that together have about SAMPLE bytes."""
    parts = [(0, stream.total)]
    if stream.size > SAMPLE:
        count = SAMPLE // PIECE
        begins = [stream.align(stream.total * i // count) for i in range(count)]
        parts = [(begin, stream.align(stream.advance(begin, PIECE))) for begin in begins]
    for begin, end in parts:
        for text, _ in stream.documents(begin, end):
            yield from split_long_text(text)


def _rows(stream, begin, end, tokenizer, length):
    """Return the tokens of a part of a stream as rows [n, length]."""
    return cut_rows(stream.tokens(begin, end, tokenizer), length)


def cut_rows(tokens, length):
    """Return tokens [n] as rows [n // length, length]. The tokens after the last whole row are dropped."""
    return tokens[: len(tokens) // length * length].reshape(-1, length)
