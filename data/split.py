"""Read the text of files as one stream, which is cut into a training and a validation split and into units.

stream = Stream(files, in_bytes=True, key="text")
cut = stream.align(stream.total - 50_000)
tokens = stream.tokens(cut, stream.total, tokenizer)
"""

import bisect
import functools
import json
import os
import sys
from itertools import accumulate

import numpy as np

from . import DataError

LINE = 1 << 16  # bytes of plain text in which a line is looked for


def is_jsonl(file):
    """Return True if a File has one document per line, by its name."""
    return file.path.lower().endswith(".jsonl")


def open_file(file):
    """Open a File. Raises DataError if it is not the one that was found any more."""
    opened = open(file.path, "rb")
    status = os.fstat(opened.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        opened.close()
        raise DataError(f"{file.path} changed while it was read: run the command again")
    return opened


@functools.cache  # once for a file
def _print_not_utf8(path, byte):
    print(
        f"{path} is not UTF-8 (byte 0x{byte:02x}): such bytes become U+FFFD, only --tokenizer=bytes keeps them",
        file=sys.stderr,
    )


class Stream:
    """The text of files, one after another. Any part [begin, end) between two aligned positions can be read alone.

    Attribute: total (bytes of the files).
    """

    def __init__(self, files, in_bytes, key):
        """in_bytes: plain files stay bytes and may be cut anywhere; key: that under which .jsonl has the text."""
        self.files, self.in_bytes, self.key = files, in_bytes, key
        # where each file begins in the stream; the last entry is the total
        self.starts = [0, *accumulate(file.size for file in files)]
        self.total = self.starts[-1]

    def align(self, position):
        """Return the first position from here on where the stream may be cut.

        That is the start of a line in .jsonl, the start of a line, or of a character of a long line, in text for a BPE,
        and anywhere in text as bytes.
        """
        number = bisect.bisect_right(self.starts, position) - 1
        if number == len(self.files) or position == self.starts[number]:
            return position
        file, offset = self.files[number], position - self.starts[number]
        if is_jsonl(file):
            with open_file(file) as f:
                f.seek(offset - 1)
                f.readline()
                return self.starts[number] + f.tell()
        if self.in_bytes:
            return position
        with open_file(file) as f:
            f.seek(offset)
            text = f.read(LINE)
        characters = (i for i, byte in enumerate(text) if byte & 0xC0 != 0x80)
        return position + (text.find(b"\n") + 1 or next(characters, 0))

    def documents(self, begin, end):
        """Yield (text, True if a document ends there) of the bytes [begin, end); plain files as bytes if in_bytes."""
        for file, start in zip(self.files, self.starts):
            first, last = max(begin - start, 0), min(end - start, file.size)
            if first >= last:
                continue
            with open_file(file) as f:
                f.seek(first)
                if is_jsonl(file):
                    while f.tell() < last:
                        if (line := f.readline()).strip():
                            yield self._text(file, line), True
                    continue
                data = f.read(last - first)
            if not self.in_bytes:
                try:
                    data = data.decode()
                except UnicodeDecodeError as error:
                    _print_not_utf8(file.path, data[error.start])
                    data = data.decode("utf-8", "replace")
            yield data, last == file.size

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
