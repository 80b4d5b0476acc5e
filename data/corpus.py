"""Turn text files into a dataset: the part that the text, pystdlib and longcrawl64 scripts share.

    files = find_files(["notes", "book.txt"], suffixes=(".txt", ".md"))
    prepare_files(files, "bytes", args, source="my notes")      # args as data.command.Parser gives them

The files form one long stream of bytes, of which the trailing val_fraction is the validation split. The stream is cut
into units of about UNIT bytes. Each unit is tokenized alone, with an end of text after every document, and cut into
rows. A plain file is one document; a .jsonl file has one document per line.
"""

import bisect
import functools
import hashlib
import json
import math
import os
from typing import NamedTuple

import numpy as np

from . import DataError
from .shards import Unit, is_complete, write_dataset
from .tokenizer import Tokenizer, gpt2_tokenizer

UNIT = 32 << 20  # bytes of source per shard: as much is held in memory, and as much work is lost by a kill
SMALLEST = 2048  # bytes of text that a dataset needs at least
NOT_TEXT = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".parquet", ".pdf", ".bin", ".zarr")


class File(NamedTuple):
    path: str
    name: str  # relative to the folder that was searched: the order must not depend on where that folder lies
    size: int
    mtime_ns: int


def find_files(paths, suffixes, skip_folders=("__pycache__",)):
    """Return a list of File for paths, which may be files and folders; folders are searched for the suffixes.

    Paths stay in the order given. The files of a folder are ordered by a hash of their names, so that the end of the
    list, which becomes the validation split, is a fair sample. Hidden, empty and unreadable files are left out. Raises
    DataError if a path is missing or is not text, or if too little text is found.
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
            except OSError:  # for example a dangling link
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
    """Return a hash over names, sizes and modification times, which changes when a file is edited."""
    listing = [[file.name, file.size, file.mtime_ns] for file in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def prepare_files(files, tokenizer_name, args, source, key="text"):
    """Write a dataset of files (a list of File) to args.out, unless it is complete there.

    tokenizer_name: bytes, gpt2, or gpt2-escaped as in longcrawl64; args: the options of data.command.Parser; source: a
    line that says where the text comes from; key: the name of the text in a line of .jsonl.
    """
    arguments = {
        "tokenizer": tokenizer_name,
        "document_length": args.document_length,
        "val_fraction": args.val_fraction,
        "key": key,
        "files": fingerprint(files),
    }
    if is_complete(args.out, arguments, args.verify):
        return
    escaped = tokenizer_name == "gpt2-escaped"
    tokenizer = Tokenizer("bytes") if tokenizer_name == "bytes" else gpt2_tokenizer(json_escaped=escaped)
    units, length = plan_units(files, tokenizer, args.document_length, args.val_fraction, key)
    write_dataset(args.out, units, tokenizer, length, arguments, source, args.command)


def plan_units(files, tokenizer, document_length, val_fraction, key="text"):
    """Cut the files into units; return (list of Unit, length of a row in tokens).

    Rows are document_length long. A small source gets shorter rows, a power of two and at most 1/16 of its tokens, so
    that both splits have a row and little is dropped at their ends.
    """
    corpus = Corpus(files, tokenizer, key)
    rate = corpus.tokens_per_byte()
    tokens = int(corpus.total * rate)
    length = document_length
    if length > tokens // 16:
        length = 1 << max(0, (tokens // 16).bit_length() - 1)
        print(f"rows of {length} tokens instead of {document_length}: the source has about {tokens:,} tokens")

    # The validation split is a whole number of rows. Where tokens per byte are an estimate it gets 2% more bytes, and
    # still more if these do not fill a row (unusual text, or .jsonl with few long lines).
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
        """Return the units of one split, the bytes [begin, end) of the stream."""
        cuts = sorted({begin, end, *(min(end, corpus.align(c)) for c in range(begin + UNIT, end, UNIT))})
        return [
            Unit(split, functools.partial(corpus.rows, a, b, length), int((b - a) * rate))
            for a, b in zip(cuts, cuts[1:])
        ]

    return units("train", 0, cut) + units("val", cut, corpus.total), length


class Corpus:
    """The files as one stream of bytes. Any part [begin, end) between two aligned positions can be tokenized alone."""

    def __init__(self, files, tokenizer, key):
        self.files, self.tokenizer, self.key = files, tokenizer, key
        self.starts = [0]  # where each file begins in the stream; the last entry is the total
        for file in files:
            self.starts.append(self.starts[-1] + file.size)
        self.total = self.starts[-1]
        # If the tokens are bytes, a cut may fall anywhere and each byte is one token.
        self.raw = tokenizer.kind == "bytes" and not any(_is_jsonl(file) for file in files)

    def tokens_per_byte(self):
        """Return the number of tokens per byte: 1 for bytes, otherwise measured on the last MB of the stream."""
        if self.raw:
            return 1.0
        size = 1 << 20
        while (begin := self.align(max(0, self.total - size))) == self.total:  # one long line
            size *= 2
        return max(1, len(self.tokens(begin, self.total))) / (self.total - begin)

    def align(self, position):
        """Return the first position from here on where the stream may be cut.

        That is the start of a line in .jsonl, whose records are never cut, about the start of a line in text for a BPE,
        and anywhere in text as bytes.
        """
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
                # A line longer than what was read ahead is cut between two characters.
                inside = next((i for i, byte in enumerate(ahead[:4]) if byte & 0xC0 != 0x80), 0)
                offset += newline + 1 if newline >= 0 else inside
        return self.starts[number] + min(offset, file.size)

    def tokens(self, begin, end):
        """Return the token ids [n] of the bytes [begin, end), with an end of text after each document that ends."""
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
        if self.tokenizer.kind == "bytes":  # plain files are still bytes here and stay exactly as they are
            raw = self.tokenizer.encode_bytes
            ids = [raw(t) if isinstance(t, bytes) else self.tokenizer.encode_batch([t])[0] for t in texts]
        else:
            ids = self.tokenizer.encode_batch(texts)
        return join_documents(ids, ended, self.tokenizer)

    def rows(self, begin, end, length):
        """Return tokens(begin, end) as rows [n, length]. The tokens after the last whole row are dropped."""
        return cut_rows(self.tokens(begin, end), length)

    def _read(self, file, offset, count):
        """Return count bytes of a file. Raises DataError if it has become shorter."""
        with open(file.path, "rb") as f:
            f.seek(offset)
            data = f.read(count)
        if len(data) != count:
            raise DataError(f"{file.path} changed while it was read: run the command again")
        return data

    def _records(self, file, data):
        """Return the texts of the lines of a .jsonl file. Raises DataError for a line without text under the key."""
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
    """Concatenate arrays of ids, with the end of text after each array whose flag in `ended` is true."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    stop = np.array([tokenizer.eot], dtype=dtype)
    pieces = [np.zeros(0, dtype)]
    for array, end in zip(ids, ended):
        pieces.append(array.astype(dtype))
        if end:
            pieces.append(stop)
    return np.concatenate(pieces)


def cut_rows(tokens, length):
    """Return tokens [n] as rows [n // length, length]. The tokens after the last whole row are dropped."""
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def _is_jsonl(file):
    return file.path.endswith(".jsonl")
