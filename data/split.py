"""Divide text files into a training and a validation split, and read parts of them.

    spans = split_sources(sources, size=50_000, in_bytes=True, key="text")        # {"train": [Span], "val": [Span]}
    stream = Stream(spans["val"], in_bytes=True, key="text")
    tokens = stream.tokens(0, stream.total, tokenizer)

Every source (a list of files) gives validation its share by size. Of plain files that is the end of the list, which is
ordered by a hash of the names: whole files, but for one that is cut. Of .jsonl files it is the lines with the highest
hashes of their contents, so equal lines are in one split, wherever they stand.
"""

import bisect
import functools
import hashlib
import json
import os
import sys
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from . import DataError

BUCKETS = 1 << 16  # of hashes, among which the documents of .jsonl files are counted


class Span(NamedTuple):
    file: object  # a corpus.File
    begin: int
    end: int
    lines: range | None = None  # of .jsonl: the buckets that are taken
    share: float = 1.0  # of .jsonl: the part of the bytes that these buckets hold
    by_place: bool = False  # of .jsonl: equal lines have different buckets


def is_jsonl(file):
    """Return True if a File has one document per line, by its name."""
    return file.path.lower().endswith(".jsonl")


def whole_stream(files, in_bytes, key):
    """Return the Stream of all text of a source."""
    return Stream([Span(f, 0, f.size, range(BUCKETS) if is_jsonl(f) else None) for f in files], in_bytes, key)


def split_sources(sources, size, in_bytes, key):
    """Return {"train": list of Span, "val": list of Span}; val has about `size` bytes.

    A source that cannot be divided, such as a .jsonl file of one line, is left to training.
    """
    total = sum(file.size for files in sources for file in files)
    spans = {"train": [], "val": []}
    for files in sources:
        source_size = sum(file.size for file in files)
        target = -(-size * source_size // total)
        if is_jsonl(files[0]):
            first, share, by_place = _first_bucket(files, target)
            spans["train"] += [Span(file, 0, file.size, range(first), 1 - share, by_place) for file in files]
            if share:
                spans["val"] += [Span(file, 0, file.size, range(first, BUCKETS), share, by_place) for file in files]
            continue
        stream = whole_stream(files, in_bytes, key)
        cut = stream.align(max(0, source_size - target))
        if cut == source_size:  # the last line is that long
            cut = stream.align(max(0, source_size - target), at_line=False)
        for file in files:
            border = min(max(0, cut), file.size)
            cut -= file.size
            if border:
                spans["train"].append(Span(file, 0, border))
            if border < file.size:
                spans["val"].append(Span(file, border, file.size))
    return spans


def _first_bucket(files, target, by_place=False):
    """Return (the first bucket of the validation split, its share of the bytes, by_place) of .jsonl files.

    The split has at least `target` bytes, if that leaves a document for training; it is empty if there is just one.
    If all lines are equal, their places in the files are hashed as well (by_place).
    """
    sizes = np.zeros(BUCKETS, dtype=np.int64)
    for file in files:
        for offset, line in _lines(file, 0, file.size):
            sizes[_bucket(file, offset, line, by_place)] += len(line)
    filled = np.flatnonzero(sizes)
    if len(filled) < 2:
        return (BUCKETS, 0.0, True) if by_place else _first_bucket(files, target, by_place=True)
    from_end = np.cumsum(sizes[filled][::-1])
    count = min(int(np.searchsorted(from_end, target)) + 1, len(filled) - 1)
    return int(filled[-count]), float(from_end[count - 1] / from_end[-1]), by_place


def _bucket(file, offset, line, by_place):
    """Return the number below BUCKETS that stands for a line of a .jsonl file."""
    place = f"{file.name} {offset} ".encode("utf-8", "surrogateescape") if by_place else b""
    return int.from_bytes(hashlib.blake2b(place + line.strip(), digest_size=2).digest(), "big")


def open_file(file):
    """Open a File. Raises DataError if it is not the one that was found any more."""
    opened = open(file.path, "rb")
    status = os.fstat(opened.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        opened.close()
        raise DataError(f"{file.path} changed while it was read: run the command again")
    return opened


def _lines(file, begin, end):
    """Yield (offset, line) of the lines that are not empty from begin to end, two places between lines."""
    with open_file(file) as f:
        f.seek(begin)
        while begin < end and (line := f.readline()):
            if line.strip():
                yield begin, line
            begin += len(line)


@functools.cache  # once for a file
def _print_not_utf8(path, byte):
    print(
        f"{path} is not UTF-8 (byte 0x{byte:02x}): such bytes become U+FFFD, only --tokenizer=bytes keeps them",
        file=sys.stderr,
    )


class Stream:
    """The text of spans, one after another. Any part [begin, end) between two aligned positions can be read alone.

    Attributes: spans, total (bytes of the files), size (about how many of them belong to the split).
    """

    def __init__(self, spans, in_bytes, key):
        """in_bytes: plain files stay bytes and may be cut anywhere; key: that under which .jsonl has the text."""
        self.spans, self.in_bytes, self.key = spans, in_bytes, key
        # where each span begins in the stream; the last entry is the total
        self.starts = [0, *accumulate(span.end - span.begin for span in spans)]
        self.total = self.starts[-1]
        self.size = int(sum((span.end - span.begin) * span.share for span in spans))

    def _number(self, position):
        """Return the number of the span at a position."""
        return bisect.bisect_right(self.starts, position) - 1

    def advance(self, position, size):
        """Return the position from which on `size` more bytes of this split, or all that are left, lie before it."""
        for number in range(self._number(position), len(self.spans)):
            share, remaining = self.spans[number].share, self.starts[number + 1] - position
            if remaining * share >= size:
                return position + int(size / share)
            size -= remaining * share
            position = self.starts[number + 1]
        return self.total

    def align(self, position, at_line=True):
        """Return the first position from here on where the stream may be cut.

        That is the start of a line in .jsonl, about the start of a line in text for a BPE (without at_line, the start
        of a character), and anywhere in text as bytes.
        """
        number = self._number(position)
        if number == len(self.spans) or position == self.starts[number]:
            return position
        span = self.spans[number]
        if span.lines is None and self.in_bytes:
            return position
        offset = span.begin + position - self.starts[number]
        with open_file(span.file) as f:
            if span.lines is not None:
                f.seek(offset - 1)
                f.readline()
                offset = f.tell()
            else:
                f.seek(offset)
                text = f.read(1 << 16)
                newline = text.find(b"\n") if at_line else -1
                # A longer line is cut between two characters.
                character = next((i for i, byte in enumerate(text[:4]) if byte & 0xC0 != 0x80), 0)
                offset += newline + 1 if newline >= 0 else character
        return self.starts[number] + min(offset, span.end) - span.begin

    def documents(self, begin, end):
        """Yield (text, True if a document ends there) of the bytes [begin, end); plain files as bytes if in_bytes."""
        for number in range(self._number(begin), len(self.spans)):
            first, last = max(begin, self.starts[number]), min(end, self.starts[number + 1])
            if first >= last:
                break
            span = self.spans[number]
            offset = span.begin - self.starts[number]
            if span.lines is not None:
                for place, line in _lines(span.file, first + offset, last + offset):
                    if _bucket(span.file, place, line, span.by_place) in span.lines:
                        yield self._text(span.file, line), True
                continue
            with open_file(span.file) as f:
                f.seek(first + offset)
                data = f.read(last - first)
            if not self.in_bytes:
                try:
                    data = data.decode()
                except UnicodeDecodeError as error:
                    _print_not_utf8(span.file.path, data[error.start])
                    data = data.decode("utf-8", "replace")
            yield data, last + offset == span.file.size

    def tokens(self, begin, end, tokenizer):
        """Return the token ids [n] of the bytes [begin, end), with an end of text after each document that ends."""
        texts, ended = [], []
        for text, is_end in self.documents(begin, end):
            texts.append(text)
            ended.append(is_end)
        if self.in_bytes:  # plain files are still bytes here and stay exactly as they are
            raw = tokenizer.encode_bytes
            ids = [raw(text) if isinstance(text, bytes) else tokenizer.encode_batch([text])[0] for text in texts]
        else:
            ids = tokenizer.encode_batch(texts)
        return join_documents(ids, ended, tokenizer)

    def _text(self, file, line):
        """Return the text of a line of a .jsonl file. Raises DataError if it has none under the key."""
        try:
            text = json.loads(line)[self.key]
            if isinstance(text, str):
                return text
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            pass
        start = line[:40].decode("utf-8", "replace")
        raise DataError(f'{file.path}: a line is not JSON with text under "{self.key}" (--key names another): {start}')


def join_documents(ids, ended, tokenizer):
    """Concatenate arrays of ids, with the end of text after those that `ended` marks."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    stop = np.array([tokenizer.eot], dtype)
    pieces = [np.zeros(0, dtype)]
    for array, is_end in zip(ids, ended):
        pieces += [array.astype(dtype), stop[: int(is_end)]]
    return np.concatenate(pieces)
