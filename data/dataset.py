"""Open a prepared dataset and read its tokens.

    dataset = Dataset("pystdlib")
    dataset.documents("train"), dataset.document_length         # the rows of a split and their length
    dataset.read("train", start=0, count=1000)                  # tokens, uint16 or uint32

The tokens lie in shards (see shards.py), which are mapped into memory, or in the chunks of a zarr array.
"""

import functools
import json
import os

import numpy as np

from . import DataError
from .files import sha256_of
from .shards import SPLITS, shard_is_whole
from .tokenizer import load_tokenizer
from .zarr_rows import ChunkedRows

OPEN_SHARDS = 256  # each mapped file takes a file descriptor, and 1,024 is a usual limit


class Dataset:
    """A prepared dataset, opened for reading. name is the path of its folder, or NAME for data/NAME beside this file.

    Attributes: name, path, meta (dict of meta.json), vocab_size, eot, document_length, tokenizer.
    Raises DataError if the folder, meta.json or a shard is missing, or a shard has not exactly its size.
    """

    def __init__(self, name):
        self.path, prepare = _find(name)
        meta_path = os.path.join(self.path, "meta.json")
        try:
            with open(meta_path, encoding="utf-8") as f:
                self.meta = json.load(f)
            prepare = self.meta["prepare"]
            self.name = self.meta["name"]
            self.vocab_size = self.meta["vocab_size"]
            self.eot = self.meta["eot"]
            self.document_length = self.meta["document_length"]
            self._dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
            self._shards = {split: self.meta["splits"][split]["shards"] for split in SPLITS}
        except FileNotFoundError:
            raise DataError(f"{meta_path} is missing, the dataset is not prepared: run {prepare}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{meta_path} is damaged ({error!r}): delete it and run {prepare}") from error
        self._ends = {}  # split -> the row number at which each shard ends
        self._direct = {}  # split -> ChunkedRows, if the dataset is read from zarr arrays
        for split, shards in self._shards.items():
            zarr = self.meta["splits"][split].get("zarr")
            if zarr:
                documents = self.meta["splits"][split]["documents"]
                self._direct[split] = ChunkedRows(zarr["url"], zarr["rows"], documents, self.document_length)
                self._ends[split] = np.array([documents])
            else:
                self._check_sizes(shards)
                self._ends[split] = np.cumsum([shard["documents"] for shard in shards])
        self._map = functools.lru_cache(OPEN_SHARDS)(self._open)

    @functools.cached_property
    def tokenizer(self):
        """Load the Tokenizer that the dataset was made with."""
        return load_tokenizer(self.path)

    @property
    def remedy(self):
        """Return advice on what to do about a damaged file."""
        if self._direct:  # the files are the user's source
            return "damaged, get this chunk again"
        return f"delete this file and run {self.meta['prepare']}"

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
                    raise DataError(f"{path} is not what was written (sha256 differs): {self.remedy}")

    def read(self, split, start, count):
        """Return the tokens [start, start + count) of a split's rows, one after another: array [count], as stored."""
        if split in self._direct:
            return self._direct[split].read(start, count)
        pieces = []
        while count:
            row = start // self.document_length
            number = int(np.searchsorted(self._ends[split], row, side="right"))
            first = int(self._ends[split][number - 1]) * self.document_length if number else 0
            piece = self._map(split, number)[start - first : start - first + count]
            pieces.append(piece)
            start += len(piece)
            count -= len(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def together(self, split):
        """Return how many neighbouring documents are best read together: those in a row of chunks, or 1 in shards."""
        return self.meta["splits"][split]["zarr"]["together"] if split in self._direct else 1

    def expect(self, split, start, count):
        """Announce that these tokens will be read soon, so that chunks of a zarr array are fetched ahead."""
        if split in self._direct:
            self._direct[split].expect(start, count)

    def shard_path(self, split, position):
        """Return the path of the file that holds the token at this position of the split."""
        if split in self._direct:
            return self._direct[split].file(position)
        number = int(np.searchsorted(self._ends[split], position // self.document_length, side="right"))
        return os.path.join(self.path, self._shards[split][number]["file"])

    def _check_sizes(self, shards):
        """Raise DataError for the first of these shards that is missing or has another size than it should have."""
        for shard in shards:
            if not shard_is_whole(self.path, shard, self._dtype.itemsize):
                path = os.path.join(self.path, shard["file"])
                size = os.path.getsize(path) if os.path.exists(path) else None
                expected = shard["tokens"] * self._dtype.itemsize
                wrong = "is missing" if size is None else f"has {size} bytes instead of {expected}"
                raise DataError(f"{path} {wrong}: run {self.meta['prepare']}")

    def _open(self, split, number):
        """Map a shard into memory: array [tokens]."""
        path = os.path.join(self.path, self._shards[split][number]["file"])
        return np.memmap(path, dtype=self._dtype, mode="r")


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
        known = sorted(d for d in os.listdir(folder) if os.path.exists(os.path.join(folder, d, "prepare.py")))
        raise DataError(f"no dataset {name!r} (datasets here: {', '.join(known)}; your own text: {prepare})")
    return path, prepare
