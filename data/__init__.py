"""Datasets: prepare scripts (one folder each), their on-disk format, tokenizers and the loader.

    python data/pystdlib/prepare.py                 # writes data/pystdlib/{meta.json,tokenizer.json,*.bin}

    from data.loader import Dataset, Windows, train_batch
    windows = Windows(Dataset("pystdlib"), "train", block_size=1024)

Reading prepared data needs numpy and torch only; what a prepare script needs beyond them is imported when it is used.
"""

import importlib


class DataError(ValueError):
    """Data or arguments that cannot be used. The message is one line that names the file and the remedy."""


def need(module):
    """Import an optional package; without it, a DataError of one line instead of a traceback."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"cannot import {module} ({error}): run pip install -r requirements.txt") from error
