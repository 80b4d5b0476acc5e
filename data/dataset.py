"""Open a prepared dataset and read its tokens.

    dataset = Dataset("pystdlib")
    dataset.documents("train"), dataset.document_length         # the rows of a split and their length
    dataset.read("train", start=0, count=1000)                  # tokens, uint16 or uint32

The tokens lie in shards (see shards.py). A shard that is removed or cut while it is in use is refused by its name.
"""

import os

import numpy as np

from sympow import did_you_mean
from . import DataError
from .meta import SPLITS, VersionError, read_meta, shard_is_whole, shards_of
from .tokenizer import load_tokenizer

READ_AT_ONCE = 1 << 28  # tokens that one call reads at most


class Dataset:
    """A prepared dataset, opened for reading. name is the path of its folder, or NAME for data/NAME beside this file.

    Attributes: name, path, meta (dict of meta.json), vocab_size, eot, document_length, tokenizer. Raises DataError if
    the folder, meta.json, the tokenizer or a shard is missing or damaged, as far as that can be seen without reading
    the tokens: a shard must have exactly its size.
    """

    def __init__(self, name):
        self.path, prepare = _find(os.fspath(name))
        path = os.path.join(self.path, "meta.json")
        try:
            self.meta = read_meta(path)
        except FileNotFoundError:
            raise DataError(f"{path} is missing, the dataset is not prepared: run {prepare}") from None
        except VersionError:
            raise
        except DataError as error:
            raise DataError(f"{error}: delete it and run {prepare}") from error
        self.name, self.tokenizer = self.meta["name"], load_tokenizer(self.path)
        self.vocab_size, self.eot = self.tokenizer.vocab_size, self.tokenizer.eot
        if self.meta["arguments"].get("protocol"):
            raise DataError(f"{self.path} has the windows of --protocol, which is gone: run {prepare} without it")
        self.document_length = self.meta["document_length"]
        if self.tokenizer.fingerprint() != self.meta["tokenizer"]:
            raise DataError(f"{self.path}/tokenizer.json is of another dataset: run {self.meta['prepare']}")
        self._dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
        self._shards = {split: self.meta["splits"][split]["shards"] for split in SPLITS}
        self._ends = {split: np.cumsum([shard["documents"] for shard in self._shards[split]]) for split in SPLITS}
        for shard in shards_of(self.meta).values():
            if not shard_is_whole(self.path, shard, self._dtype.itemsize):
                raise self._damaged(shard)

    def documents(self, split):
        """Return the number of rows of a split, each of document_length tokens."""
        return self.meta["splits"][split]["documents"]

    def tokens(self, split):
        """Return the number of tokens of a split."""
        return self.documents(split) * self.document_length

    def check_tokens(self, tokenizer, owner):
        """Raise DataError if this dataset has other tokens than `owner`, a run's folder with this tokenizer."""
        if not tokenizer.same_tokens(self.tokenizer):
            raise DataError(
                f"the tokens of {owner} ({tokenizer.kind}, {tokenizer.vocab_size} ids) are not those of the dataset "
                f"{self.name} ({self.tokenizer.kind}, {self.vocab_size} ids): prepare it with the same tokenizer"
            )

    def read(self, split, start, count):
        """Return the tokens [start, start + count) of a split's rows, one after another: array [count], as stored.

        Raises DataError that names the shard if it cannot be read, was cut, or has a token beyond the vocabulary.
        """
        pieces = []
        ends = self._ends[split]
        while count:
            number = int(np.searchsorted(ends, start // self.document_length, side="right"))
            first = int(ends[number - 1]) * self.document_length if number else 0
            pieces.append(self._read_shard(self._shards[split][number], start - first, count))
            start += len(pieces[-1])
            count -= len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _read_shard(self, shard, start, count):
        """Return at most `count` tokens of a shard from `start` on, fewer at its end.

        The file is not mapped into memory: a mapped file that is cut ends the process (SIGBUS).
        """
        count, size = min(count, shard["tokens"] - start, READ_AT_ONCE), self._dtype.itemsize
        try:
            with open(os.path.join(self.path, shard["file"]), "rb") as file:
                content = os.pread(file.fileno(), count * size, start * size)
        except OSError as error:
            raise self._damaged(shard) from error
        if len(content) < count * size:
            raise self._damaged(shard)
        tokens = np.frombuffer(content, dtype=self._dtype)
        if tokens.max() >= self.vocab_size:
            raise DataError(
                f"{os.path.join(self.path, shard['file'])}: token id {tokens.max()} is not in the vocabulary of "
                f"{self.vocab_size}: delete this file and run {self.meta['prepare']}"
            )
        return tokens

    def _damaged(self, shard):
        """Return the DataError for a shard that is missing, has another size than it should have, or cannot be read."""
        path, size = os.path.join(self.path, shard["file"]), shard["tokens"] * self._dtype.itemsize
        return DataError(f"{path} is missing, or no file of {size} bytes: run {self.meta['prepare']}")


def _find(name):
    """Return (path of the dataset's folder, command that prepares it). Raises DataError if there is no such folder."""
    folder = os.path.dirname(os.path.realpath(__file__))
    path = os.path.join(folder, name or "NAME")
    if os.sep in name or (os.path.exists(name) and not os.path.isdir(path)):
        path = os.path.abspath(name)
    prepare = f"python data/text/prepare.py FILES --out={os.path.relpath(path)}"
    if os.path.exists(os.path.join(path, "prepare.py")):
        prepare = f"python data/{os.path.basename(path)}/prepare.py"
    if not os.path.isdir(path):
        if ":" in name and "," in name:
            raise DataError(f"{name} is a mixture of datasets, and one is needed here: give --dataset=NAME")
        folders = [d for d in sorted(os.listdir(folder)) if os.path.isdir(os.path.join(folder, d))]
        names = ", ".join(d for d in folders if os.path.exists(os.path.join(folder, d, "meta.json"))) or "none"
        hint = did_you_mean(os.path.basename(path), folders) or ":"
        raise DataError(f"no dataset {name!r}{hint} prepared datasets: {names}; your own text: {prepare}")
    return path, prepare
