"""Train on several prepared datasets at once, each by its weight, and evaluate on several.

    dataset = open_dataset("code:0.7,prose:0.3")                    # a Mixture; for a plain name, its Dataset
    windows = open_windows(dataset, "train", 1024, pack=False)      # for data.loader.train_batch
    held_out = HeldOut(dataset, "math,mail", 1024, pack=False)      # the windows of an evaluation

Every row of a batch is a window of one of the datasets. Which one follows from its place in the training order alone:
among the first n rows of a run, each dataset has its share of n, rounded. Each goes through its own windows in the
order in which it would come alone, and begins its next epoch when it has been read.
"""

import os
import re
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch

from . import DataError
from .dataset import Dataset
from .loader import Windows

PART = re.compile(r"(.+):(\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})")  # NAME:WEIGHT


class Mixture:
    """Several datasets of one tokenizer, with a weight each. It serves in the place of a Dataset for training.

    Attributes: sets ({name: Dataset}), weights (Fractions that add up to 1), name, document_length (the shortest), and
    vocab_size, eot and tokenizer of the first dataset.
    """

    check_tokens = Dataset.check_tokens

    def __init__(self, parts):
        """parts: [(name or path, weight)]. Raises DataError if a dataset cannot be opened, if two have one name, or if
        their tokens differ."""
        self.sets = open_sets([name for name, _ in parts])
        total = sum(weight for _, weight in parts)
        self.weights = [weight / total for _, weight in parts]
        self._shares = [weight / sum(self.weights[i:]) for i, weight in enumerate(self.weights)]
        self.name = ",".join(self.sets)
        first = next(iter(self.sets.values()))
        for dataset in self.sets.values():
            dataset.check_tokens(first.tokenizer, f"the dataset {first.name}")
        self.document_length = min(dataset.document_length for dataset in self.sets.values())
        self.vocab_size, self.eot, self.tokenizer = first.vocab_size, first.eot, first.tokenizer

    def counts(self, position):
        """Return how many of the first `position` rows of the training order each dataset has; their sum is position.

        With k datasets no count is further than (k - 1) / 2 from weight * position: the first dataset gets its share,
        rounded, the second its share of the rows that the first has left, and so on. All of it is exact arithmetic.
        """
        counts, remaining = [], position
        for share in self._shares:
            counts.append((2 * share.numerator * remaining + share.denominator) // (2 * share.denominator))
            remaining -= counts[-1]
        return counts

    def choose(self, start, count):
        """Return which dataset, by its number, each of the rows start, start + 1, ... is from: np.int64 [count]."""
        counts = np.array([self.counts(position) for position in range(start, start + count + 1)])
        return np.diff(counts, axis=0).argmax(axis=1)


def open_dataset(text):
    """Return the Dataset of a name or path, or the Mixture of "NAME:WEIGHT,NAME:WEIGHT"; weights need not add up to 1.

    Raises DataError for a mixture with a weight missing, or one that is 0, and as Dataset and Mixture do.
    """
    if os.path.isdir(text) or not ("," in text or PART.fullmatch(text)):
        return Dataset(text)
    parts = [PART.fullmatch(part.strip()) for part in text.split(",")]
    if len(parts) < 2 or not all(parts) or not all(Fraction(part[2]) for part in parts):
        raise DataError(
            "dataset must be a name or path, or at least two with a weight above 0 each, as in code:0.7,prose:0.3, "
            f"got {text!r}"
        )
    return Mixture([(part[1], Fraction(part[2])) for part in parts])


def open_sets(names):
    """Return {name: Dataset} of names or paths, by the names of their folders. Raises DataError if two have the same
    name."""
    sets = {}
    for path in names:
        dataset = Dataset(path)
        name = os.path.basename(dataset.path)
        if name in sets:
            raise DataError(f"{sets[name].path} and {dataset.path} have the same name, {name}: rename one of them")
        sets[name] = dataset
    return sets


def open_windows(dataset, split, block_size, pack=False, name="block_size"):
    """Return the Windows of a split, or the MixedWindows if the dataset is a Mixture; arguments as for Windows."""
    if not isinstance(dataset, Mixture):
        return Windows(dataset, split, block_size, pack, name)
    return MixedWindows(dataset, [Windows(part, split, block_size, pack, name) for part in dataset.sets.values()])


class MixedWindows:
    """The windows of a Mixture, for data.loader.train_batch. Attributes: parts (the Windows of each dataset, of one
    block_size), mixture, block_size."""

    def __init__(self, mixture, parts):
        self.mixture, self.parts, self.block_size = mixture, parts, parts[0].block_size

    def train_rows(self, seed, start, count, spans=None):
        """Return (inputs, targets) [count, T] of these places of the training order, as Windows.train_rows does."""
        chosen, counts, rows, order = self.mixture.choose(start, count), self.mixture.counts(start), [], []
        for number, windows in enumerate(self.parts):
            places = np.flatnonzero(chosen == number)
            if len(places):
                rows.append(windows.train_rows(seed, counts[number], len(places), spans))
                order.append(places)
        order = torch.from_numpy(np.argsort(np.concatenate(order)))
        return tuple(torch.cat(parts)[order] for parts in zip(*rows))


class Part(NamedTuple):
    """A held-out split: the key of its loss in the metrics, its weight in val_loss, and its windows."""

    key: str
    weight: float
    windows: Windows


class HeldOut:
    """The held-out windows that an evaluation reads, all of one block_size. Attributes: parts ([Part]), block_size.

    A Dataset alone has one part, "val_loss". A Mixture has a part "val_loss/NAME" for each of its datasets, with its
    weight. val_datasets, names or paths with commas between, add parts "val_loss/NAME" with a weight of 0.
    """

    def __init__(self, dataset, val_datasets, block_size, pack=False, name="block_size"):
        """Raise DataError if one of val_datasets cannot be opened, has other tokens, or the name of another dataset."""
        if isinstance(dataset, Mixture):
            sets, weights, keys = dataset.sets, dataset.weights, [f"val_loss/{name}" for name in dataset.sets]
        else:
            sets, weights, keys = {os.path.basename(dataset.path): dataset}, [1], ["val_loss"]
        self.parts = [
            Part(key, float(weight), Windows(part, "val", block_size, pack, name))
            for key, weight, part in zip(keys, weights, sets.values())
        ]
        names = [word.strip() for word in val_datasets.split(",")] if val_datasets else []
        for key, part in open_sets(names).items():
            if key in sets:
                raise DataError(
                    f"val_datasets has {key}, which is a name of the training data already: {sets[key].path} and "
                    f"{part.path} cannot both be val_loss/{key}"
                )
            part.check_tokens(dataset.tokenizer, f"the training data {dataset.name}")
            self.parts.append(Part(f"val_loss/{key}", 0.0, Windows(part, "val", block_size, pack, name)))
        self.block_size = block_size

    def losses(self, means):
        """Return {key: loss} for the metrics, val_loss first; means: the mean loss a token of each part.

        val_loss of a Mixture is the mean of its datasets' losses by their weights.
        """
        val_loss = sum(part.weight * mean for part, mean in zip(self.parts, means) if part.weight)
        return {"val_loss": val_loss} | {part.key: mean for part, mean in zip(self.parts, means)}
