"""Prepared datasets to batches. Everything is a pure function of (seed, step, rank): nothing is drawn, nothing is
saved, and a resumed run goes on where it stopped.

    windows = Windows(Dataset("pystdlib"), "train", block_size=1024)
    inputs, targets = train_batch(windows, seed=1, step=0, rank=0, world=1, micro=0, accumulation=1, batch_size=8)
    for inputs, targets in eval_batches(val_windows, eval_tokens=1 << 20, batch_size=8, rank=0, world=1):
        ...

Inputs and targets are torch.int64 [B, T]. A window is T targets x[i:i+T] of a row of tokens x; the inputs are the
same tokens shifted right by one, position 0 being x[i-1], or the end of text when i = 0. So a row of L tokens gives
windows up to T = L without being altered, and the model learns to start from the end of text.
"""

import functools
import json
import os

import numpy as np
import torch

from data import DataError
from data.files import sha256_of
from data.shards import shard_is_whole
from data.tokenizer import load_tokenizer
from data.zarr_rows import ChunkedRows

RECT = 16  # documents that go through their windows together
AHEAD = 4  # micro-batches before it is wanted, a chunk of a zarr array is asked for
OPEN_SHARDS = 256  # a mapped file costs a file descriptor, and 1,024 is a usual limit


class Dataset:
    """A folder written by a prepare script: a path, or NAME for data/NAME beside this file.

    Attributes: name, path, meta (dict of meta.json), vocab_size, eot, document_length, tokenizer.
    Raises DataError if the folder, meta.json or a shard is missing, or a shard has not exactly its size.
    """

    def __init__(self, name):
        here = os.path.dirname(os.path.abspath(__file__))
        self.path = os.path.join(here, name)
        if os.sep in name or (os.path.isdir(name) and not os.path.isdir(self.path)):
            self.path = os.path.abspath(name)
        if os.path.exists(os.path.join(self.path, "prepare.py")):
            prepare = f"python data/{os.path.basename(self.path)}/prepare.py"
        else:
            prepare = f"python data/text/prepare.py FILES --out={os.path.relpath(self.path)}"
        if not os.path.isdir(self.path):
            known = sorted(d for d in os.listdir(here) if os.path.exists(os.path.join(here, d, "prepare.py")))
            raise DataError(f"no dataset {name!r} (datasets here: {', '.join(known)}; your own text: {prepare})")
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
            self._shards = {split: self.meta["splits"][split]["shards"] for split in ("train", "val")}
        except FileNotFoundError:
            raise DataError(f"{meta_path} is missing, the dataset is not prepared: run {prepare}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{meta_path} is damaged ({error!r}): delete it and run {prepare}") from error
        self._ends = {}  # split -> row number at which each shard ends
        self._direct = {}  # split -> ChunkedRows, of a dataset that is read from zarr arrays
        for split, shards in self._shards.items():
            zarr = self.meta["splits"][split].get("zarr")
            if zarr:
                documents = self.meta["splits"][split]["documents"]
                self._direct[split] = ChunkedRows(zarr["url"], zarr["rows"], documents, self.document_length)
                self._ends[split] = np.array([documents])
                continue
            self._ends[split] = np.cumsum([shard["documents"] for shard in shards])
            for shard in shards:
                if not shard_is_whole(self.path, shard, self._dtype.itemsize):
                    path = os.path.join(self.path, shard["file"])
                    size = os.path.getsize(path) if os.path.exists(path) else None
                    wrong = "is missing" if size is None else f"has {size} bytes instead of {self._bytes(shard)}"
                    raise DataError(f"{path} {wrong}: run {prepare}")
        self._map = functools.lru_cache(OPEN_SHARDS)(self._open)

    @functools.cached_property
    def tokenizer(self):
        """The Tokenizer that the dataset was made with."""
        return load_tokenizer(self.path)

    def documents(self, split):
        """Number of rows of a split, each of document_length tokens."""
        return int(self._split(self._ends, split)[-1])

    def tokens(self, split):
        """Number of tokens of a split."""
        return self.documents(split) * self.document_length

    def verify(self):
        """Compare every shard with its sha256; reads all data. Raises DataError naming the first that differs."""
        for shards in self._shards.values():
            for shard in shards:
                path = os.path.join(self.path, shard["file"])
                if sha256_of(path) != shard["sha256"]:
                    raise DataError(f"{path} is not what was written (sha256 differs): {self.remedy}")

    def read(self, split, start, count):
        """Tokens [start, start + count) of the rows of a split, one after the other: array [count] of the stored
        dtype."""
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
        """So many documents, one after the other, are best read together: a row of chunks of a zarr array; else 1."""
        return self.meta["splits"][split]["zarr"]["together"] if split in self._direct else 1

    def expect(self, split, start, count):
        """These tokens will be read soon."""
        if split in self._direct:
            self._direct[split].expect(start, count)

    def shard_path(self, split, position):
        """The file that holds the token at this position of the split."""
        if split in self._direct:
            return self._direct[split].file(position)
        number = int(np.searchsorted(self._ends[split], position // self.document_length, side="right"))
        return os.path.join(self.path, self._shards[split][number]["file"])

    @property
    def remedy(self):
        if self._direct:  # the files are the user's source
            return "damaged, get this chunk again"
        return f"delete this file and run {self.meta['prepare']}"

    def _bytes(self, shard):
        return shard["tokens"] * self._dtype.itemsize

    def _split(self, by_split, split):
        if split not in by_split:
            raise DataError(f"split must be one of {', '.join(by_split)}, got {split!r}")
        return by_split[split]

    def _open(self, split, number):
        path = os.path.join(self.path, self._shards[split][number]["file"])
        return np.memmap(path, dtype=self._dtype, mode="r")


class Windows:
    """The windows of T = block_size tokens of a split; len() counts them.

    Unpacked, a row of L tokens has W = L // T windows and window w of row d has the index d * W + w (the L % T tokens
    at a row's end are not visited). Packed, the rows are one stream, window k is stream[kT:(k+1)T], and the input at
    each row's start is the end of text, so a model that resets its state wherever the input is the end of text keeps
    rows apart.

    Raises DataError if block_size, which the message calls `name`, is longer than a row (unpacked) or than the split
    (packed).
    """

    def __init__(self, dataset, split, block_size, pack=False, name="block_size"):
        length = dataset.document_length
        if block_size < 1:
            raise DataError(f"{name} must be at least 1, got {block_size}")
        if not pack and block_size > length:
            raise DataError(
                f"{name} {block_size} is longer than the documents of {dataset.name} ({length} tokens): "
                f"give --{name}={length} or less, or --pack=1 to run over document borders"
            )
        if pack and block_size > dataset.tokens(split):
            raise DataError(
                f"{name} {block_size} is longer than the {split} split of {dataset.name} "
                f"({dataset.tokens(split)} tokens): give a smaller --{name} or more text"
            )
        self.dataset, self.split, self.block_size, self.pack = dataset, split, block_size, pack
        # What training permutes: rows of per_document windows each. A packed window counts as a row of its own.
        self.documents = dataset.tokens(split) // block_size if pack else dataset.documents(split)
        self.per_document = 1 if pack else length // block_size
        # documents (packed: windows) that are put in order as one, and how many go through their windows together
        together = dataset.together(split)
        self.block = max(1, together * length // block_size) if pack and together > 1 else together
        self.rect = self.block if self.block > 1 else RECT
        self.orders = {}  # see _epoch_order

    def __len__(self):
        return self.documents * self.per_document

    def batch(self, indices):
        """Window numbers [B] -> (inputs, targets), torch.int64 [B, T] each.

        Raises IndexError beyond len(self), and DataError naming the shard if a token is not in the vocabulary.
        """
        T, L = self.block_size, self.dataset.document_length
        indices = np.asarray(indices, dtype=np.int64).reshape(-1)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"window numbers must be in [0, {len(self)}), got {indices.min()} to {indices.max()}")
        documents, windows = np.divmod(indices, self.per_document)
        starts = documents * (T if self.pack else L) + windows * T
        tokens = np.empty((len(indices), T + 1), dtype=np.int64)  # the token before each window, and the window
        for row, start in zip(tokens, starts.tolist()):
            row[0] = self.dataset.eot  # stays where the window begins a document
            before = int(start % L > 0)
            row[1 - before :] = self.dataset.read(self.split, start - before, T + before)
        if tokens.size and tokens.max() >= self.dataset.vocab_size:
            self._refuse(tokens, starts)
        inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        for row, start in zip(inputs, starts.tolist()):
            row[-start % L :: L] = self.dataset.eot  # packed: documents that start inside the window
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def expect(self, indices):
        """Windows that will be wanted soon."""
        T, L = self.block_size, self.dataset.document_length
        for document, window in zip(*np.divmod(indices, self.per_document)):
            self.dataset.expect(self.split, int(document * (T if self.pack else L) + window * T), T)

    def _refuse(self, tokens, starts):
        row, column = np.argwhere(tokens >= self.dataset.vocab_size)[0]
        path = self.dataset.shard_path(self.split, int(starts[row] + column - 1))
        raise DataError(
            f"{path}: token id {tokens[row, column]} is not in the vocabulary of {self.dataset.vocab_size}: "
            + self.dataset.remedy
        )


def train_indices(windows, seed, start, count):
    """The training order: window numbers np.int64 [count] at the positions start, start + 1, ..., a pure function of
    seed.

    An epoch of len(windows) positions visits every window exactly once. Its documents are permuted and cut into
    groups of windows.rect; in round r, group b takes window (offset_b + r) % W of its documents. So a batch is a
    rectangle, some documents by one window, and the windows seen at one time lie at different places of their
    documents, not all at the beginning.
    """
    D, W = windows.documents, windows.per_document
    positions = np.arange(start, start + count, dtype=np.int64)
    epochs, positions = np.divmod(positions, len(windows))
    rounds, places = np.divmod(positions, D)
    indices = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        order, offsets = _epoch_order(windows, seed, epoch)
        here = epochs == epoch
        window = (offsets[places[here] // windows.rect] + rounds[here]) % W
        indices[here] = order[places[here]].astype(np.int64) * W + window
    return indices


def _epoch_order(windows, seed, epoch):
    """(documents in this epoch's order [D], first window of each group [ceil(D / rect)])."""
    if (seed, epoch) not in windows.orders:
        while len(windows.orders) > 1:  # a batch may straddle two epochs, so two are kept
            windows.orders.pop(next(iter(windows.orders)))
        D, W = windows.documents, windows.per_document
        # Raw bits and a stable sort: numpy promises these for ever, but not its shuffles, and a run must resume
        # anywhere.
        bits = np.random.PCG64(np.random.SeedSequence([abs(seed), int(seed < 0), epoch]))
        keys = bits.random_raw(D)
        if windows.block == 1:
            order = np.argsort(keys, kind="stable")
        else:  # rows of chunks in a random order, the last one, which may be short, at the end; documents within them
            blocks = np.argsort(np.argsort(bits.random_raw(D // windows.block), kind="stable"))
            blocks = np.append(blocks, D)[np.minimum(np.arange(D) // windows.block, D // windows.block)]
            order = np.lexsort((keys, blocks))
        order = order.astype(np.int32 if D < 1 << 31 else np.int64)
        offsets = (bits.random_raw(-(-D // windows.rect)) % W).astype(np.int64)
        windows.orders[seed, epoch] = order, offsets
    return windows.orders[seed, epoch]


def train_batch(windows, seed, step, rank, world, micro, accumulation, batch_size):
    """(inputs, targets) [batch_size, T] of micro-batch `micro` of `rank` in a step.

    A step takes world * accumulation * batch_size consecutive positions of the training order, dealt out micro-batch by
    micro-batch and rank by rank, so the same global batch comes from any number of ranks.
    """
    start = ((step * accumulation + micro) * world + rank) * batch_size
    if windows.block > 1:
        windows.expect(train_indices(windows, seed, start + AHEAD * world * batch_size, batch_size))
    return windows.batch(train_indices(windows, seed, start, batch_size))


def eval_batches(windows, eval_tokens, batch_size, rank, world):
    """Yields (inputs, targets) [batch_size, T] over the first eval_tokens // T windows (at least one, at most all).

    Whatever the batch size and the number of ranks, the ranks together see exactly these windows once. Every rank
    yields equally many batches of one shape: rows beyond the end have targets of -1, which the loss ignores (for the
    last ranks a whole batch can be such rows).
    """
    count = min(max(1, eval_tokens // windows.block_size), len(windows))
    for start in range(rank * batch_size, -(-count // (world * batch_size)) * world * batch_size, world * batch_size):
        indices = np.arange(start, start + batch_size)
        inputs, targets = windows.batch(np.minimum(indices, count - 1))
        targets[torch.from_numpy(indices >= count)] = -1
        yield inputs, targets
