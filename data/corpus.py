"""Text files to units of token rows; what the text, pystdlib and (for text sources) longcrawl64 scripts share.

    files = find_files(["notes", "book.txt"], suffixes=(".txt", ".md"))
    units, document_length = plan_units(files, tokenizer, document_length=65536, val_fraction=0.05)

The files form one long stream of bytes. It is cut into units of about UNIT bytes, the trailing val_fraction being the
validation split; each unit is tokenized alone, an end of text after every document, and cut into rows. A plain file is
one document; a .jsonl file has one a line.
"""

import bisect
import functools
import hashlib
import json
import math
import os
from typing import NamedTuple

import numpy as np

from data import DataError
from data.shards import Unit

UNIT = 32 << 20  # bytes of source for one shard: what is held in memory, and what a kill can lose
SMALLEST = 2048  # bytes
NOT_TEXT = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".parquet", ".pdf", ".bin", ".zarr")


class File(NamedTuple):
    path: str
    name: str  # relative to the folder it was found in: the order must not depend on where that folder lies
    size: int
    mtime_ns: int


def find_files(paths, suffixes, skip_folders=("__pycache__",)):
    """Files, and folders searched for suffixes, as a list of File; files in the order given, a folder's by a hash of
    their names, so that the end of the list, which becomes validation, is a fair sample.

    Hidden, empty and unreadable files are left out. Raises DataError if a path is missing, is not text, or nothing is
    found.
    """
    files, skipped = [], 0
    for path in paths:
        if os.path.isdir(path):
            found = []
            for folder, subfolders, names in os.walk(path):
                subfolders[:] = [d for d in subfolders if d not in skip_folders and not d.startswith(".")]
                for name in names:
                    if name.endswith(tuple(suffixes)) and not name.startswith("."):
                        full = os.path.join(folder, name)
                        found.append((os.path.relpath(full, path).replace(os.sep, "/"), full))
            found.sort(key=lambda item: hashlib.sha256(item[0].encode("utf-8", "surrogateescape")).digest())
        elif not os.path.exists(path):
            raise DataError(f"{path} does not exist")
        elif path.endswith(NOT_TEXT):
            raise DataError(f"{path} is not a text file: unpack or convert it to .txt or .jsonl first")
        else:
            found = [(os.path.basename(path), path)]
        for name, full in found:
            try:
                status = os.stat(full)
            except OSError:  # a dangling link
                status = None
            if status is None or not status.st_size or not os.access(full, os.R_OK):
                skipped += 1
            else:
                files.append(File(full, name, status.st_size, status.st_mtime_ns))
    total = sum(file.size for file in files)
    if total < SMALLEST:
        kinds = ",".join(suffixes)
        raise DataError(
            f"{', '.join(map(str, paths))}: {total} bytes of text in {len(files)} files ({kinds} in folders) "
            f"is too little: give at least {SMALLEST} bytes"
        )
    left_out = f"; {skipped} empty or unreadable files left out" if skipped else ""
    print(f"{len(files):,} files, {total:,} bytes{left_out}")
    return files


def fingerprint(files):
    """A hash over names, sizes and times, which changes when a file was edited."""
    listing = [[file.name, file.size, file.mtime_ns] for file in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def plan_units(files, tokenizer, document_length, val_fraction, key="text"):
    """(list of Unit, length of a row). The rows are document_length long, or less for a small source: at most 1/16 of
    its tokens (then a power of two), so that both splits have a row and little is dropped at their ends."""
    corpus = Corpus(files, tokenizer, key)
    rate = corpus.tokens_per_byte()
    tokens = int(corpus.total * rate)
    length = document_length
    if length > tokens // 16:
        length = 1 << max(0, (tokens // 16).bit_length() - 1)
        print(f"rows of {length} tokens instead of {document_length}: the source has about {tokens:,} tokens")

    # Validation is a whole number of rows. Where tokens per byte are an estimate it gets 2% more bytes, and if that
    # is still not a row (rare text, or .jsonl with few long lines), more.
    rows = max(1, round(val_fraction * tokens / length))
    size = math.ceil(rows * length / rate * (1 if corpus.raw else 1.02))
    while True:
        cut = corpus.align(max(0, corpus.total - size))
        counted = corpus.total - cut > 8 << 20 or len(corpus.tokens(cut, corpus.total)) >= length
        if cut < corpus.total and counted:
            break
        size += max(1, size // 4)
        if size > corpus.total // 2:
            raise DataError(f"{files[-1].path}: cannot cut off a validation split; give more or shorter documents")

    def units(split, begin, end):
        cuts = sorted({begin, end, *(min(end, corpus.align(c)) for c in range(begin + UNIT, end, UNIT))})
        return [
            Unit(split, functools.partial(corpus.rows, a, b, length), int((b - a) * rate))
            for a, b in zip(cuts, cuts[1:])
        ]

    return units("train", 0, cut) + units("val", cut, corpus.total), length


class Corpus:
    """The files as one stream of bytes, of which any part [begin, end) between aligned positions can be tokenized."""

    def __init__(self, files, tokenizer, key):
        self.files, self.tokenizer, self.key = files, tokenizer, key
        self.starts = [0]  # where each file begins in the stream; the last entry is the total
        for file in files:
            self.starts.append(self.starts[-1] + file.size)
        self.total = self.starts[-1]
        # With bytes as tokens a cut may fall anywhere and each byte is one token.
        self.raw = tokenizer.kind == "bytes" and not any(_is_jsonl(file) for file in files)

    def tokens_per_byte(self):
        """1 for bytes; else measured on the last MB."""
        if self.raw:
            return 1.0
        size = 1 << 20
        while (begin := self.align(max(0, self.total - size))) == self.total:  # one long line
            size *= 2
        return max(1, len(self.tokens(begin, self.total))) / (self.total - begin)

    def align(self, position):
        """The first position from here on where the stream may be cut: a line's start in .jsonl (a record is never
        cut), about a line's start in text for a BPE, anywhere in text as bytes."""
        number = bisect.bisect_right(self.starts, position) - 1
        offset = position - self.starts[number]
        if offset == 0 or number == len(self.files):
            return position
        file = self.files[number]
        if not _is_jsonl(file) and self.tokenizer.kind == "bytes":
            return position
        with open(file.path, "rb") as f:
            if _is_jsonl(file):
                f.seek(offset - 1)
                f.readline()
                offset = f.tell()
            else:
                f.seek(offset)
                ahead = f.read(1 << 16)
                newline = ahead.find(b"\n")
                # A line too long to wait for is cut between two characters.
                inside = next((i for i, byte in enumerate(ahead[:4]) if byte & 0xC0 != 0x80), 0)
                offset += newline + 1 if newline >= 0 else inside
        return self.starts[number] + min(offset, file.size)

    def tokens(self, begin, end):
        """Token ids [n] of the stream's bytes [begin, end), an end of text after each document that ends here."""
        texts, ended = [], []
        for number in range(bisect.bisect_right(self.starts, begin) - 1, len(self.files)):
            first, last = max(begin, self.starts[number]), min(end, self.starts[number + 1])
            if first >= last:
                break
            file = self.files[number]
            data = self._read(file, first - self.starts[number], last - first)
            if _is_jsonl(file):
                documents = self._records(file, data)
            else:
                documents = [data if self.tokenizer.kind == "bytes" else data.decode("utf-8", "replace")]
            texts += documents
            ended += [_is_jsonl(file) or last == self.starts[number + 1]] * len(documents)
        if self.tokenizer.kind == "bytes":  # what is not a record is bytes still, so that it is kept as it is
            raw = self.tokenizer.encode_bytes
            ids = [raw(t) if isinstance(t, bytes) else self.tokenizer.encode_batch([t])[0] for t in texts]
        else:
            ids = self.tokenizer.encode_batch(texts)
        return join_documents(ids, ended, self.tokenizer)

    def rows(self, begin, end, length):
        """tokens(begin, end) as rows [n, length]; what is left at the end is dropped."""
        return cut_rows(self.tokens(begin, end), length)

    def _read(self, file, offset, count):
        with open(file.path, "rb") as f:
            f.seek(offset)
            data = f.read(count)
        if len(data) != count:
            raise DataError(f"{file.path} changed while it was read: run the command again")
        return data

    def _records(self, file, data):
        records = []
        for line in data.split(b"\n"):
            if line.strip():
                try:
                    records.append(json.loads(line)[self.key])
                    if not isinstance(records[-1], str):
                        raise TypeError
                except (ValueError, KeyError, TypeError, IndexError):
                    start = line[:40].decode("utf-8", "replace")
                    raise DataError(
                        f'{file.path}: a line is not JSON with text under "{self.key}" (--key names another): {start}'
                    ) from None
        return records


def join_documents(ids, ended, tokenizer):
    """Arrays of ids -> one array, the end of text after each whose flag in `ended` is true."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    stop = np.array([tokenizer.eot], dtype=dtype)
    pieces = [np.zeros(0, dtype)]
    for array, end in zip(ids, ended):
        pieces.append(array.astype(dtype))
        if end:
            pieces.append(stop)
    return np.concatenate(pieces)


def cut_rows(tokens, length):
    """Array [n] -> rows [n // length, length]; what is left at the end is dropped."""
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def _is_jsonl(file):
    return file.path.endswith(".jsonl")
