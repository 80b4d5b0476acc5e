"""Open a prepared dataset and read its tokens.

    dataset = Dataset("pystdlib")
    dataset.documents("train"), dataset.document_length         # the rows of a split and their length
    dataset.read("train", start=0, count=1000)                  # tokens, uint16 or uint32

The tokens lie in shards (see shards.py). A file that is removed, cut or overwritten
while it is in use is refused by its name.
"""

import functools
import os
import time

import numpy as np

from . import DataError
from .files import sha256_of
from .meta import SPLITS, read_meta, shard_is_whole
from .tokenizer import load_tokenizer

CHECK_EVERY = 1.0  # seconds, after which the next read looks whether the shard was overwritten
OPEN_SHARDS = 256  # each open file takes a file descriptor, and 1,024 is a usual limit


class Dataset:
    """A prepared dataset, opened for reading. name is the path of its folder, or NAME for data/NAME beside this file.

    Attributes: name, path, meta (dict of meta.json), vocab_size, eot, document_length, tokenizer.
    Raises DataError if the folder, meta.json, the tokenizer or a shard is missing or damaged, as far as that can be
    seen without reading the tokens: a shard must have exactly its size.
    """

    def __init__(self, name):
        self.path, prepare = _find(name)
        try:
            self.meta = read_meta(self.path)
        except FileNotFoundError:
            path = os.path.join(self.path, "meta.json")
            raise DataError(f"{path} is missing, the dataset is not prepared: run {prepare}") from None
        except DataError as error:
            raise DataError(f"{error}: delete it and run {prepare}") from error
        self.name = self.meta["name"]
        self.vocab_size = self.meta["vocab_size"]
        self.eot = self.meta["eot"]
        self.document_length = self.meta["document_length"]
        self._dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
        self._shards = {split: self.meta["splits"][split]["shards"] for split in SPLITS}
        self.tokenizer = load_tokenizer(self.path)
        if (self.tokenizer.vocab_size, self.tokenizer.eot) != (self.vocab_size, self.eot):
            raise DataError(
                f"{self.path}/tokenizer.json has {self.tokenizer.vocab_size} ids, of which {self.tokenizer.eot} is the "
                f"end of text, meta.json {self.vocab_size} and {self.eot}: one is of another dataset, run "
                f"{self.meta['prepare']}"
            )
        self._ends = {}  # split -> the row number at which each shard ends
        self._changed = {}  # file -> when it was last written, to notice one that is replaced before it is read
        for split, shards in self._shards.items():
            self._check_sizes(shards)
            self._ends[split] = np.cumsum([shard["documents"] for shard in shards])
        self._check_unchanged()
        self._shard = functools.lru_cache(OPEN_SHARDS)(self._open)

    def documents(self, split):
        """Return the number of rows of a split, each of document_length tokens."""
        if split not in self._ends:
            raise DataError(f"split must be one of {', '.join(self._ends)}, got {split!r}")
        return int(self._ends[split][-1])

    def tokens(self, split):
        """Return the number of tokens of a split."""
        return self.documents(split) * self.document_length

    def verify(self):
        """Compare every shard with its sha256, reading all data. Raises DataError that names the first that differs."""
        for shards in self._shards.values():
            for shard in shards:
                path = os.path.join(self.path, shard["file"])
                if sha256_of(path) != shard["sha256"]:
                    raise DataError(f"{path} is not what was written (sha256 differs): delete this file and run " + self.meta["prepare"])

    def check_tokens(self, tokenizer, owner):
        """Raise DataError if the ids of this dataset are not those of `owner` (a run's folder) with this tokenizer."""
        if not tokenizer.same_tokens(self.tokenizer):
            raise DataError(
                f"the tokens of {owner} ({tokenizer.kind}, {tokenizer.vocab_size} ids) are not those of the dataset "
                f"{self.name} ({self.tokenizer.kind}, {self.vocab_size} ids): prepare it with the same tokenizer"
            )

    def read(self, split, start, count):
        """Return the tokens [start, start + count) of a split's rows, one after another: array [count], as stored.

        Raises DataError that names the file if it cannot be read, or is no longer what it was when the dataset was
        opened.
        """
        pieces = []
        while count:
            row = start // self.document_length
            number = int(np.searchsorted(self._ends[split], row, side="right"))
            first = int(self._ends[split][number - 1]) * self.document_length if number else 0
            piece = self._shard(split, number).read(start - first, count)
            pieces.append(piece)
            start += len(piece)
            count -= len(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def shard_path(self, split, position):
        """Return the path of the file that holds the token at this position of the split."""
        number = int(np.searchsorted(self._ends[split], position // self.document_length, side="right"))
        return os.path.join(self.path, self._shards[split][number]["file"])

    def _check_unchanged(self):
        """Raise DataError if another dataset has taken this one's place while it was opened.

        meta.json is removed before the first file is replaced, so files are of one dataset if it is still the same.
        """
        try:
            same = read_meta(self.path) == self.meta
        except (FileNotFoundError, DataError):
            same = False
        if not same:
            raise DataError(f"{self.path} is being prepared: start again when that is done")

    def _check_sizes(self, shards):
        """Raise DataError for the first of these shards that is missing or has another size than it should have."""
        for shard in shards:
            path, expected = os.path.join(self.path, shard["file"]), shard["tokens"] * self._dtype.itemsize
            if not shard_is_whole(self.path, shard, self._dtype.itemsize):
                raise DataError(f"{path} {_what_is_wrong(path, expected)}: run {self.meta['prepare']}")
            self._changed[shard["file"]] = os.stat(path).st_mtime_ns

    def _open(self, split, number):
        """Open a shard for reading."""
        shard = self._shards[split][number]
        return _Shard(os.path.join(self.path, shard["file"]), shard, self._dtype, self._changed[shard["file"]])


class _Shard:
    """An open shard. It is read and not mapped into memory: a mapped file that is cut ends the process (SIGBUS)."""

    def __init__(self, path, shard, dtype, changed):
        """shard: its entry in meta.json; changed: its modification time (ns) when the dataset was opened."""
        self.path, self.shard, self.dtype, self.changed = path, shard, dtype, changed
        self.size = shard["tokens"] * dtype.itemsize
        self.file, self.next_check = None, 0.0
        try:
            self.file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path} {_what_is_wrong(path, self.size, error)}") from error

    def __del__(self):
        if self.file is not None:
            os.close(self.file)

    def read(self, start, count):
        """Return at most `count` tokens from `start` on, fewer at the end of the shard.

        Raises DataError if the file has been cut, overwritten (noticed within CHECK_EVERY) or cannot be read.
        """
        size = self.dtype.itemsize
        count = min(count, self.shard["tokens"] - start, 1 << 28)  # one call reads at most 2 GB
        try:
            content = os.pread(self.file, count * size, start * size)
            if len(content) != count * size or time.monotonic() > self.next_check:
                self._check(os.fstat(self.file))
            if len(content) != count * size:
                raise DataError(f"{self.path} was cut while it was read, it should have {self.size} bytes")
        except OSError as error:
            raise DataError(f"{self.path} {_what_is_wrong(self.path, self.size, error)}") from error
        return np.frombuffer(content, dtype=self.dtype)

    def _check(self, status):
        """Raise DataError if the file has another size than it should have, or has been written to and differs."""
        if status.st_size != self.size:
            raise DataError(
                f"{self.path} has {status.st_size} bytes instead of {self.size}: it was cut or overwritten after the "
                "dataset was opened"
            )
        if status.st_mtime_ns != self.changed and sha256_of(self.path) != self.shard["sha256"]:
            raise DataError(f"{self.path} is not what was written (sha256 differs): it was overwritten while in use")
        self.changed = status.st_mtime_ns
        self.next_check = time.monotonic() + CHECK_EVERY


def _what_is_wrong(path, expected, error=None):
    """Return what a message says of a shard that cannot be used: missing, of another size, or not readable."""
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        return f"is missing, it should have {expected} bytes"
    except OSError as failure:
        error = failure
    if error is not None:
        return f"cannot be read ({error.strerror or error})"
    return f"has {size} bytes instead of {expected}"


def _find(name):
    """Return (path of the dataset's folder, command that prepares it). Raises DataError if there is no such folder."""
    folder = os.path.dirname(os.path.abspath(__file__))
    path = os.path.join(folder, name)
    if os.sep in name or (os.path.isdir(name) and not os.path.isdir(path)):
        path = os.path.abspath(name)
    if os.path.exists(os.path.join(path, "prepare.py")):
        prepare = f"python data/{os.path.basename(path)}/prepare.py"
    else:
        prepare = f"python data/text/prepare.py FILES --out={os.path.relpath(path)}"
    if not os.path.isdir(path):
        if ":" in name and "," in name:
            raise DataError(f"{name} is a mixture of datasets, and one is needed here: give --dataset=NAME")
        known = sorted(d for d in os.listdir(folder) if os.path.exists(os.path.join(folder, d, "prepare.py")))
        raise DataError(f"no dataset {name!r} (datasets here: {', '.join(known)}; your own text: {prepare})")
    return path, prepare
