"""Define how a dataset lies on disk, and write it: every prepare script ends here.

    folder/meta.json         written last: its presence means that the dataset is complete
    folder/tokenizer.json    see tokenizer.py
    folder/train_00000.bin   tokens, little-endian uint16 or uint32, row-major [documents, document_length], no header
    folder/val_00000.bin

A dataset is made of units, and each gives one shard:

    write_dataset(folder, [Unit("train", read_rows), ...], tokenizer, document_length, arguments, ...)

New shards are written into folder/unfinished/ and move into the folder when all are there. So a failure or a kill
leaves an earlier dataset as it was. A shard is a pure function of its unit and gets its name only when it is whole. A
killed run resumes when it is run again, and a dataset that grows keeps the shards that its units still give.
"""

import hashlib
import itertools
import os
import shutil
import time
from contextlib import contextmanager, suppress
from typing import Callable, NamedTuple

import numpy as np

from . import DataError
from .dataset import Dataset
from .files import flush_to_disk, lock_file, remove, sha256_of, write_atomically
from .meta import SHARD, SPLITS, VERSION, find_meta, hash_json, shard_is_whole, shards_of, splits_of, write_meta
from .progress import STARTED, bar
from .tokenizer import FILES

UNFINISHED = "unfinished"  # the folder in a dataset's folder in which it is prepared
LOCK = ".lock"  # the file in there that a prepare script locks
OURS = {"meta.json", "prepare.py", "__pycache__", UNFINISHED, "progress.json", "journal.jsonl"}


class Unit(NamedTuple):
    split: str  # "train" or "val"
    read: Callable[[], np.ndarray]  # returns integer tokens [documents, document_length], perhaps no row
    key: object = None  # for JSON: all that the unit's tokens depend on; None: all arguments, and its number


def is_complete(folder, arguments, verify=False):
    """Return True, and print so, if the folder already holds the whole dataset that these arguments would make.

    All its shards must be there with their sizes. With verify, shards that differ from their sha256 are named and
    deleted first, so that they are made again. Raises DataError if a dataset may not be written to the folder.
    """
    _check_folder(folder)
    if os.path.exists(os.path.join(folder, UNFINISHED, "meta.json")):
        with _unfinished(folder):
            _finish(folder)
    damaged = verify and _remove_damaged(folder)
    try:
        meta = Dataset(os.path.abspath(folder)).meta
    except DataError as error:
        if not damaged and os.path.exists(os.path.join(folder, "meta.json")):
            print(f"{folder} is not complete: {error}")
        return False
    if meta["arguments"] != arguments:
        print(f"{folder} was made by {meta['prepare']}: its shards are replaced, but for equal ones")
        return False
    print(f"{folder} is complete already: {_summary(meta)}")
    return True


def begun_arguments(folder):
    """Return the arguments of the unfinished dataset in a folder, and of the finished one, as far as they are there."""
    return [meta["arguments"] for _, meta in _stored(folder)]


def write_dataset(folder, units, tokenizer, document_length, arguments, source, command, facts=None):
    """Write the shards that are not there yet, tokenizer.json and meta.json, then replace what was in the folder.

    units: an iterable of Unit; arguments: a dict for JSON; source: a line that says where the tokens come from;
    command: prepares the dataset again; facts: more entries of meta.json. Raises DataError if a unit gives rows of
    another length or ids beyond the vocabulary, or if a split has no row.
    """
    _check_folder(folder)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    meta = {
        "name": os.path.basename(os.path.abspath(folder)),
        "tokenizer": tokenizer.fingerprint(),
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "dtype": dtype.name,
        "document_length": document_length,
        "splits": splits_of({}),
        "source": source,
        "prepare": command,
        "arguments": arguments,
        "units": {},
        **(facts or {}),
    }
    with _unfinished(folder) as unfinished:
        tokenizer.save(unfinished)
        reused = _write_shards(folder, units, meta, dtype)
        for split, entry in meta["splits"].items():
            if not entry["tokens"]:
                for file in meta["units"]:
                    remove(os.path.join(unfinished, file))
                raise DataError(
                    f"{folder}: the {split} split has no whole row of {document_length} tokens; "
                    "give more text, a smaller --document_length or a larger --val_fraction"
                )
        write_meta(os.path.join(unfinished, "meta.json"), meta)
        _finish(folder)
    note = f", {reused} of {len(meta['units'])} shards were there" if reused else ""
    print(f"{folder} is complete: {_summary(meta)} ({time.monotonic() - STARTED:.1f} s{note})")


def _write_shards(folder, units, meta, dtype):
    """Write the shards of the units that are not there yet, and add all shards to meta. Returns how many were there."""
    unfinished = os.path.join(folder, UNFINISHED)
    stored = {
        (file, record["units"][file]): (path, shard)
        for path, record in reversed(_stored(folder))
        for file, shard in shards_of(record).items()
        if shard_is_whole(path, shard, dtype.itemsize)
    }
    progress = os.path.join(unfinished, "progress.json")
    listed = (find_meta(progress) or {"units": {}})["units"]
    shards, numbers, reused = {}, {split: itertools.count() for split in SPLITS}, 0
    for unit in bar(units, unit="shard", desc=meta["name"]):
        file = f"{unit.split}_{next(numbers[unit.split]):05d}.bin"
        key = [meta["arguments"], file] if unit.key is None else [unit.split, unit.key]
        unit_id = hash_json([VERSION, meta["document_length"], meta["tokenizer"], key])
        path, shard = stored.get((file, unit_id), (None, None))
        if path == folder:
            remove(os.path.join(unfinished, file))  # of another unit
        if shard is None:
            rows = unit.read()
            if not len(rows):
                continue
            if listed.get(file, unit_id) != unit_id:  # after a crash its shard must not be taken for the new one
                write_meta(progress, meta)
                listed = {}
            shard = _write_shard(os.path.join(unfinished, file), rows, meta, dtype)
        reused += path is not None
        meta["units"][file], shards[file] = unit_id, shard
        meta["splits"] = splits_of(shards)
        if path is None:
            write_meta(progress, meta)
    return reused


def _check_folder(folder):
    """Raise DataError if the folder has files of others and is neither a dataset nor has a prepare.py.

    A shard or a tokenizer that no meta.json names is of others, in any folder.
    """
    unfinished = os.path.join(folder, UNFINISHED)
    metas = [*filter(None, (find_meta(os.path.join(path, "meta.json")) for path in (folder, unfinished)))]
    shards, strangers = _sort_names(folder)
    if metas or os.path.exists(os.path.join(folder, "prepare.py")):
        strangers = set()
    if metas or not os.path.exists(os.path.join(folder, "meta.json")):  # the names in a damaged one are unknown
        strangers |= shards - {file for meta in metas for file in (*FILES, *shards_of(meta))}
    if strangers := strangers | _sort_names(unfinished)[1]:
        raise DataError(f"{folder} or its {UNFINISHED}/ has {min(strangers)}, no file of ours: give another --out")


def _sort_names(folder):
    """Return (the names of shards and tokenizers, names that no prepare script writes) in a folder, as sets."""
    names = {name for name in os.listdir(folder) if not name.startswith(".")} if os.path.isdir(folder) else set()
    shards = {name for name in names if SHARD.fullmatch(name) or name in FILES}
    return shards, names - shards - OURS


@contextmanager
def _unfinished(folder):
    """Make and lock folder/unfinished; yield its path. Refuse it while another process prepares a dataset there.

    After an error it is removed again if no shard is in it.
    """
    path = os.path.join(folder, UNFINISHED)
    os.makedirs(path, exist_ok=True)
    # NFS locks only what is open for writing: a file, which the folder itself cannot be.
    with open(os.path.join(path, LOCK), "a") as file:
        if not lock_file(file):
            raise DataError(f"another process is preparing {folder}: wait for it, or give another --out")
        try:
            yield path
        except BaseException:
            if not any(SHARD.fullmatch(name) or name == "meta.json" for name in os.listdir(path)):
                shutil.rmtree(path)
                with suppress(OSError):  # something else is in it
                    os.rmdir(folder)
            raise


def _stored(folder):
    """Return [(folder, its meta)] of the unfinished dataset in a folder, and of the finished one, if they are there."""
    unfinished = os.path.join(folder, UNFINISHED)
    metas = [
        (unfinished, find_meta(os.path.join(unfinished, "progress.json"))),
        (folder, find_meta(os.path.join(folder, "meta.json"))),
    ]
    return [(path, meta) for path, meta in metas if meta]


def _finish(folder):
    """Let the dataset in folder/unfinished, which has a meta.json, take the place of the one in the folder.

    Of what was there it removes only the shards that the old meta.json names. While new ones come the folder has no
    meta.json, so that nothing reads a mixture.
    """
    unfinished = os.path.join(folder, UNFINISHED)
    meta = find_meta(os.path.join(unfinished, "meta.json"))
    if meta is None:  # damaged
        remove(os.path.join(unfinished, "meta.json"))
        return
    shards = shards_of(meta)
    old = find_meta(os.path.join(folder, "meta.json"))
    for name in shards_of(old).keys() - shards.keys() if old else ():
        remove(os.path.join(folder, name))
    remove(os.path.join(folder, "meta.json"))
    for name in os.listdir(unfinished):
        if name in shards or name in FILES:
            os.replace(os.path.join(unfinished, name), os.path.join(folder, name))
    flush_to_disk(folder)
    os.replace(os.path.join(unfinished, "meta.json"), os.path.join(folder, "meta.json"))
    flush_to_disk(folder)
    shutil.rmtree(unfinished)


def _write_shard(path, rows, meta, dtype):
    """Write rows [n, document_length] as the shard at path; return {file, documents, tokens, sha256}."""
    file, document_length, vocab_size = os.path.basename(path), meta["document_length"], meta["vocab_size"]
    if rows.ndim != 2 or rows.shape[1] != document_length or rows.dtype.kind not in "iu":
        raise DataError(f"{file}: rows must be integers [n, {document_length}], got {rows.dtype} {list(rows.shape)}")
    if rows.min() < 0 or rows.max() >= vocab_size:
        raise DataError(f"{file}: token id {rows.max()} is not in the vocabulary of {vocab_size}")
    rows = np.ascontiguousarray(rows, dtype=dtype)
    write_atomically(path, rows.data)
    digest = hashlib.sha256(rows.data).hexdigest()
    return {"file": file, "documents": rows.shape[0], "tokens": rows.size, "sha256": digest}


def _remove_damaged(folder):
    """Delete the shards, finished and unfinished, that differ from their sha256; name and return them."""
    damaged = []
    for path, meta in _stored(folder):
        print(f"{path}: reading {len(meta['units'])} shards")
        for file, shard in shards_of(meta).items():
            file = os.path.join(path, file)
            if os.path.exists(file) and sha256_of(file) != shard["sha256"]:
                print(f"{file} is not what was written (sha256 differs): it is made again")
                os.remove(file)
                damaged.append(file)
    return damaged


def _summary(meta):
    parts = [f"{split} {s['tokens']:,} tokens in {s['documents']:,} rows" for split, s in meta["splits"].items()]
    return ", ".join(parts) + f" of {meta['document_length']:,}"
