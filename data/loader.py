"""Turn prepared datasets into batches. A batch is a pure function of (seed, step, rank), without a random state that
would have to be saved, so a resumed run continues exactly where it stopped.

    windows = Windows(Dataset("pystdlib"), "train", block_size=1024)
    inputs, targets = train_batch(windows, seed=1, step=0, part=0, parts=1, batch_size=8)
    for inputs, targets in eval_batches(val_windows, eval_tokens=1 << 20, batch_size=8, rank=0, world=1):
        ...

Inputs and targets are torch.int64 [B, T]. A window is T targets x[i:i+T] of a row of tokens x. Its inputs are the same
tokens shifted right by one: the first is x[i-1], or the end of text if i = 0. So a row of L tokens gives windows of up
to T = L tokens unaltered, and the model learns to start from the end of text.
"""

import functools

import numpy as np
import torch

from . import DataError
from .progress import bar

RECT = 16  # how many documents go through their windows together


class Windows:
    """The windows of T = block_size tokens of a split; len() counts them.

    Without pack, a row of L tokens has W = L // T windows, and window w of row d has the index d * W + w. The L % T
    tokens at the end of a row are not visited. With pack, the rows are one stream, and window k is stream[kT:(k+1)T];
    the input at the start of each row is the end of text, so a model that resets its state at that token keeps rows
    apart.

    Raises DataError if block_size, which the message calls `name`, is longer than a row, or with pack than the split.
    """

    def __init__(self, dataset, split, block_size, pack=False, name="block_size"):
        length = dataset.document_length
        if not pack and block_size > length:
            fits_with_pack = block_size <= min(dataset.tokens("train"), dataset.tokens("val"))
            raise DataError(
                f"{name} {block_size} is longer than the documents of {dataset.name} ({length} tokens): "
                f"give --{name}={length} or less" + ", or --pack=1 to run over document borders" * fits_with_pack
            )
        if pack and block_size > dataset.tokens(split):
            raise DataError(
                f"{name} {block_size} is longer than the {split} split of {dataset.name} "
                f"({dataset.tokens(split)} tokens): give a smaller --{name} or more text"
            )
        self.dataset, self.split, self.block_size, self.pack = dataset, split, block_size, pack
        # Training permutes rows of per_document windows each. With pack, every window counts as a row of its own.
        self.documents = dataset.tokens(split) // block_size if pack else dataset.documents(split)
        self.per_document = 1 if pack else length // block_size

    def __len__(self):
        return self.documents * self.per_document

    def batch(self, indices, spans=None):
        """Return (inputs, targets), torch.int64 [B, T] each, of the windows with these numbers [B].

        spans [(start, end), ...]: read only these tokens of each window, and return them one span behind the other.
        Raises DataError as Dataset.read does.
        """
        indices = np.asarray(indices, dtype=np.int64).reshape(-1)
        documents, windows = np.divmod(indices, self.per_document)
        length = self.block_size if self.pack else self.dataset.document_length
        starts = documents * length + windows * self.block_size
        parts = [self._read(starts + start, end - start) for start, end in spans or [(0, self.block_size)]]
        return tuple(x[0] if len(x) == 1 else torch.cat(x, dim=1) for x in zip(*parts))

    def _read(self, starts, T):
        """Return (inputs, targets) [B, T] for the T tokens from each of `starts` [B] on."""
        L = self.dataset.document_length
        tokens = np.empty((len(starts), T + 1), dtype=np.int64)  # the token before each window, and the window
        for row, start in zip(tokens, starts.tolist()):
            row[0] = self.dataset.eot  # the end of text remains if the window begins a document
            first = int(start % L == 0)
            row[first:] = self.dataset.read(self.split, start - 1 + first, T + 1 - first)
        inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        for row, start in zip(inputs, starts.tolist()):
            row[-start % L :: L] = self.dataset.eot  # with pack: documents that start inside the window
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def train_rows(self, seed, start, count, spans=None):
        """Return (inputs, targets) [count, T] of the windows at `count` places of the training order from `start` on.

        spans: as for `batch`.
        """
        return self.batch(train_indices(self, seed, start, count), spans)


def train_indices(windows, seed, start, count):
    """Return the window numbers, np.int64 [count], at the positions start, start + 1, ... of the training order.

    The order is a pure function of seed. An epoch of len(windows) positions visits every window exactly once. Its
    documents are permuted and cut into groups of RECT; in round r, group b takes window (offset_b + r) % W of
    its documents. So a batch is a rectangle, some documents by one window, and the windows seen at one time lie at
    different places of their documents, not all at the beginning.
    """
    D, W = windows.documents, windows.per_document
    positions = np.arange(start, start + count, dtype=np.int64)
    epochs, positions = np.divmod(positions, len(windows))
    rounds, places = np.divmod(positions, D)
    indices = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        order, offsets = _epoch_order(D, W, seed, epoch)
        in_epoch = epochs == epoch
        window = (offsets[places[in_epoch] // RECT] + rounds[in_epoch]) % W
        indices[in_epoch] = order[places[in_epoch]].astype(np.int64) * W + window
    return indices


@functools.lru_cache(64)
def _epoch_order(D, W, seed, epoch):
    """Return (the D documents in the order of this epoch, the first of W windows of each group [ceil(D / RECT)])."""
    # numpy promises that raw bits and a stable sort never change, but its shuffles may, and a run must resume with any
    # version.
    bits = np.random.PCG64(np.random.SeedSequence([abs(seed), int(seed < 0), epoch]))
    order = np.argsort(bits.random_raw(D), kind="stable")
    offsets = bits.random_raw(-(-D // RECT)) % W
    return order.astype(np.int32 if D < 1 << 31 else np.int64), offsets.astype(np.int64)


def train_batch(windows, seed, step, part, parts, batch_size, spans=None):
    """Return (inputs, targets) [batch_size, T] of part number `part` of a step; windows: Windows or
    data.mixture.MixedWindows.

    A step takes parts * batch_size consecutive positions of the training order. With `world` ranks and several
    micro-batches a step, micro-batch m of rank r is part m * world + r, so that any number of ranks sees the same
    global batch. spans: as for `Windows.batch`.
    """
    return windows.train_rows(seed, (step * parts + part) * batch_size, batch_size, spans)


def eval_batches(windows, eval_tokens, batch_size, rank, world, spans=None, shown=False):
    """Yield (inputs, targets) [batch_size, T] over the first eval_tokens // T windows (at least one, at most all).

    For any batch size and number of ranks, the ranks together see each of these windows once. Every rank yields the
    same number of batches of one shape: rows beyond the end have targets of -1, which the loss ignores. For the last
    ranks a whole batch may consist of such rows. spans: as for `Windows.batch`. shown: show a progress bar.
    """
    count = min(max(1, eval_tokens // windows.block_size), len(windows))
    rows = world * batch_size
    starts = range(rank * batch_size, -(-count // rows) * rows, rows)
    for start in bar(starts, desc="evaluation", unit="batch", leave=False, disable=not shown):
        indices = np.arange(start, start + batch_size)
        inputs, targets = windows.batch(np.minimum(indices, count - 1), spans)
        targets[torch.from_numpy(indices >= count)] = -1
        yield inputs, targets
