"""Datasets: prepare scripts (one folder each), their format on disk, tokenizers and the loader.

    python data/pystdlib/prepare.py                 # writes data/pystdlib/{meta.json,tokenizer.json,*.bin}

    from sympow.data.dataset import Dataset
    from sympow.data.loader import Windows, train_batch
    windows = Windows(Dataset("pystdlib"), "train", block_size=1024)

mixture.py trains and evaluates on several of them.
Reading a dataset of bytes needs only numpy and torch; other tokenizers need tiktoken or tokenizers. These, and what
prepare scripts need, are imported when they are used.
"""

import importlib

if __name__ != "sympow.data":
    raise ImportError("data/ is imported as sympow.data")


class DataError(ValueError):
    """Reports data or arguments that cannot be used, in one line that names the file and the remedy."""


def need(module):
    """Import and return an optional package. Raises a DataError of one line if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"cannot import {module} ({error}): run pip install {package}, or pip install -r requirements.txt"
        ) from error


def describe_error(error):
    """Return the type and the message of an exception in one line of at most 300 letters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def batches(items, limit, size=len):
    """Yield lists of items, each as soon as the sizes of its items add up to `limit`."""
    batch, total = [], 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= limit:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
