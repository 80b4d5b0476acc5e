"""Define how a dataset lies on disk, and write it: every prepare script ends here.

    folder/meta.json         written last: its presence means that the dataset is complete
    folder/tokenizer.json    see tokenizer.py
    folder/train_00000.bin   tokens, little-endian uint16 or uint32, row-major [documents, document_length], no header
    folder/val_00000.bin

A dataset is made of units, each of which gives one shard:

    write_dataset(folder, [Unit("train", read_rows, 1 << 20), ...], tokenizer, document_length, arguments, ...)

A shard is a pure function of its unit and gets its name only when it is whole, so a killed run is resumed by running
it again: progress.json lists the shards that are done. `arguments` holds everything that the content depends on; if it
has changed, the writer starts over.
"""

import hashlib
import itertools
import json
import os
import re
import time
from typing import Callable, NamedTuple

import numpy as np

from . import DataError, need
from .files import sha256_of, write_atomically
from .zarr_rows import missing_chunks

FORMAT = 1
SPLITS = ("train", "val")


class Unit(NamedTuple):
    split: str  # "train" or "val"
    read: Callable[[], np.ndarray]  # returns integer tokens [documents, document_length]
    tokens: int  # roughly how many, for the progress bar only


def shard_is_whole(folder, shard, token_bytes):
    """Return True if a shard {file, tokens, ...} of meta.json exists with exactly its size."""
    try:
        return os.path.getsize(os.path.join(folder, shard["file"])) == shard["tokens"] * token_bytes
    except OSError:
        return False


def is_complete(folder, arguments, verify=False):
    """Return True, and print so, if the folder already holds the whole dataset that these arguments would make.

    All its shards must be there with their sizes; for a zarr array that is read in place, all its chunks. With verify,
    shards whose sha256 differs are named and deleted first, so that they are made again.
    """
    if verify:
        _remove_damaged(folder)
    meta = _read_json(folder, "meta.json")
    if meta is None or meta.get("arguments") != _normal(arguments):
        return False
    size = np.dtype(meta["dtype"]).itemsize
    splits = meta["splits"].values()
    if not all(shard_is_whole(folder, shard, size) for split in splits for shard in split["shards"]):
        return False
    if any(split.get("zarr") and missing_chunks(split["zarr"], meta["document_length"]) for split in splits):
        return False
    print(f"{folder} is complete already: {_summary(meta)}")
    return True


def write_dataset(folder, units, tokenizer, document_length, arguments, source, command):
    """Write the shards that are not there yet, then tokenizer.json and meta.json; return meta as a dict.

    units: a list of Unit; arguments: a dict for JSON; source: a line that says where the tokens come from; command: the
    command that does this again. Raises DataError if a unit gives rows of another length or ids beyond the vocabulary,
    or if a split has no row.
    """
    os.makedirs(folder, exist_ok=True)
    arguments = _normal(arguments)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    done = _finished_shards(folder, arguments)
    started = time.monotonic()
    numbers = {split: itertools.count() for split in SPLITS}
    units = {f"{unit.split}_{next(numbers[unit.split]):05d}.bin": unit for unit in units}
    there = {
        file: unit.tokens
        for file, unit in units.items()
        if file in done and (not done[file]["tokens"] or shard_is_whole(folder, done[file], dtype.itemsize))
    }
    bar = need("tqdm").tqdm(
        total=sum(unit.tokens for unit in units.values()), initial=sum(there.values()),
        unit="tok", unit_scale=True, desc=folder,
    )  # fmt: skip
    shards = {split: [] for split in SPLITS}
    for file, unit in units.items():
        if file not in there:
            done[file] = _write_shard(folder, file, unit.read(), tokenizer.vocab_size, document_length, dtype)
            _save_progress(folder, arguments, done)
            bar.update(unit.tokens)
        if done[file]["tokens"]:
            shards[unit.split].append(done[file])
    bar.close()

    splits = {}
    for split, rows in shards.items():
        if not rows:
            raise DataError(
                f"{folder}: the {split} split has no whole row of {document_length} tokens; "
                "give more text or a smaller --document_length"
            )
        splits[split] = {key: sum(shard[key] for shard in rows) for key in ("documents", "tokens")} | {"shards": rows}
    meta = _write_meta(folder, tokenizer, dtype, document_length, splits, source, command, arguments)
    reused = f", {len(there)} of {len(units)} shards were there" if there else ""
    print(f"{folder} is complete: {_summary(meta)} ({time.monotonic() - started:.1f} s{reused})")
    return meta


def write_direct(folder, arrays, tokenizer, document_length, arguments, source, command):
    """Write tokenizer.json and meta.json of a dataset whose tokens stay in their zarr arrays; return meta as a dict.

    arrays: {split: {"url", "together": documents in a row of chunks, "rows": [(row of chunks, how many documents)]}}
    """
    os.makedirs(folder, exist_ok=True)
    splits = {}
    for split, array in arrays.items():
        documents = sum(count for _, count in array["rows"])
        zarr = array | {"rows": [row for row, _ in array["rows"]]}
        splits[split] = {"documents": documents, "tokens": documents * document_length, "shards": [], "zarr": zarr}
    dtype = np.dtype("<u2")
    meta = _write_meta(folder, tokenizer, dtype, document_length, splits, source, command, _normal(arguments))
    print(f"{folder} is complete: {_summary(meta)}, read where they are")
    return meta


def _write_meta(folder, tokenizer, dtype, document_length, splits, source, command, arguments):
    meta = {
        "name": os.path.basename(os.path.abspath(folder)),
        "tokenizer": tokenizer.kind,
        "json_escaped": tokenizer.json_escaped,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "dtype": dtype.name,
        "document_length": document_length,
        "splits": splits,
        "source": source,
        "prepare": command,
        "arguments": arguments,
    }
    tokenizer.save(folder)
    write_atomically(os.path.join(folder, "meta.json"), json.dumps(meta, indent=1).encode())
    _remove(folder, "progress.json")
    return meta


def _write_shard(folder, file, rows, vocab_size, document_length, dtype):
    rows = np.asarray(rows)
    if rows.ndim != 2 or rows.shape[1] != document_length or rows.dtype.kind not in "iu":
        raise DataError(f"{file}: rows must be integers [n, {document_length}], got {rows.dtype} {list(rows.shape)}")
    if rows.size == 0:  # less than one row of tokens: recorded as done, without a file
        return {"file": file, "documents": 0, "tokens": 0, "sha256": None}
    if rows.min() < 0 or rows.max() >= vocab_size:
        raise DataError(f"{file}: token id {rows.max()} is not in the vocabulary of {vocab_size}")
    rows = np.ascontiguousarray(rows, dtype=dtype)
    write_atomically(os.path.join(folder, file), rows.data)
    return {
        "file": file,
        "documents": rows.shape[0],
        "tokens": rows.size,
        "sha256": hashlib.sha256(rows.data).hexdigest(),
    }


def _saved_shards(saved):
    """Return the shards of a parsed meta.json by file name."""
    return {shard["file"]: shard for split in saved["splits"].values() for shard in split["shards"]}


def _remove_damaged(folder):
    """Delete the shards whose sha256 differs from what meta.json, or else progress.json, says; print their names."""
    meta = _read_json(folder, "meta.json") or {}
    if "splits" in meta:
        shards = _saved_shards(meta)
    else:
        shards = (_read_json(folder, "progress.json") or {}).get("shards", {})
    print(f"{folder}: reading {len(shards)} shards")
    for file, shard in shards.items():
        path = os.path.join(folder, file)
        if os.path.exists(path) and sha256_of(path) != shard["sha256"]:
            print(f"{path} is not what was written (sha256 differs): it is made again")
            os.remove(path)


def _finished_shards(folder, arguments):
    """Return the shards that an earlier run with the same arguments has finished, by file name; delete all others."""
    saved = _read_json(folder, "meta.json")
    if saved is not None:  # the dataset was complete once, but a shard was lost or the arguments are new
        if not {"arguments", "splits"} <= saved.keys():
            raise DataError(f"{folder}/meta.json is not of a dataset of ours: give another --out")
        shards = _saved_shards(saved)
    else:
        saved = _read_json(folder, "progress.json") or {"arguments": arguments, "shards": {}}
        shards = saved["shards"]
    if saved["arguments"] != arguments:
        print(f"{folder}: {_difference(saved['arguments'], arguments)}; starting over")
        shards = {}
    elif shards:
        print(f"{folder}: going on, writing the shards that are missing or cut off")
    _save_progress(folder, arguments, shards)  # before meta.json is removed, so that one of the two always exists
    _remove(folder, "meta.json")
    for name in os.listdir(folder):
        ours = re.fullmatch(r"((?:train|val)_\d{5,}\.bin|\w+\.json|vocab\.tiktoken)(\.\d+\.tmp)?", name)
        if ours and (ours[2] or (name.endswith(".bin") and name not in shards)):
            _remove(folder, name)
    return shards


def _save_progress(folder, arguments, shards):
    progress = {"arguments": arguments, "shards": shards}
    write_atomically(os.path.join(folder, "progress.json"), json.dumps(progress).encode())


def _difference(old, new):
    """Return a text that names the arguments that differ, with their old and new values."""
    keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    changes = (f"{key}={str(old.get(key))[:40]}, now {str(new.get(key))[:40]}" for key in keys)
    return "prepared with " + ", ".join(changes)


def _summary(meta):
    parts = [f"{split} {s['tokens']:,} tokens in {s['documents']:,} rows" for split, s in meta["splits"].items()]
    return ", ".join(parts) + f" of {meta['document_length']:,}"


def _normal(arguments):
    """Return the arguments as JSON gives them back (tuples become lists), to compare them with what was saved."""
    return json.loads(json.dumps({"format": FORMAT, **arguments}))


def _read_json(folder, name):
    """Return the parsed file, or None if it is missing or unreadable (it is then made again)."""
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as f:
            return json.load(f)
    except (OSError, ValueError):
        return None


def _remove(folder, name):
    try:
        os.remove(os.path.join(folder, name))
    except FileNotFoundError:
        pass
