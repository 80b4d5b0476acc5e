"""Define how a dataset lies on disk, and write it: every prepare script ends here.

    folder/meta.json         written last: its presence means that the dataset is complete
    folder/tokenizer.json    see tokenizer.py
    folder/train_00000.bin   tokens, little-endian uint16 or uint32, row-major [documents, document_length], no header
    folder/val_00000.bin

A dataset is made of units, each of which gives one shard:

    write_dataset(folder, [Unit("train", read_rows, 1 << 20), ...], tokenizer, document_length, arguments, ...)

All is written into folder/unfinished/ (see staging.py) and takes the place of what was in the folder when it is whole,
so a failure or a kill leaves an earlier dataset as it was. A shard is a pure function of its unit and gets its name
only when it is whole: a killed run goes on when it is run again, and a dataset that grows keeps the shards whose units
stay the same.
"""

import hashlib
import itertools
import json
import os
import time
from typing import Callable, NamedTuple

import numpy as np

from . import DataError
from .files import sha256_of, write_atomically
from .meta import SHARD, SPLITS, own_meta, shard_is_whole, shards_of
from .progress import Progress
from .staging import Staging, finish_interrupted, open_staging
from .tokenizer import FILES, VOCABULARY_FILES, load_tokenizer

FORMAT = 1


class Unit(NamedTuple):
    split: str  # "train" or "val"
    read: Callable[[], np.ndarray | None]  # returns integer tokens [documents, document_length], or None
    tokens: int  # roughly how many, for the progress bar only
    key: object = None  # for JSON: all that the unit's tokens depend on; None: all arguments, and its number


def is_complete(folder, arguments, verify=False):
    """Return True, and print so, if the folder already holds the whole dataset that these arguments would make.

    All its shards must be there with their sizes. With verify, shards whose sha256 differs are named and deleted first, so that they are made again. Raises DataError if the folder
    is not one that a dataset may be written to.
    """
    meta = own_meta(folder)
    if os.path.isdir(folder):
        finish_interrupted(folder)
        meta = own_meta(folder)
        if meta is None and os.path.exists(os.path.join(folder, "meta.json")):
            print(f"{folder}/meta.json is damaged: the dataset is made again")
        if verify:
            _remove_damaged(folder, meta)
    if meta is None or meta["arguments"] != _normal(arguments):
        return False
    size = np.dtype(meta["dtype"]).itemsize
    splits = meta["splits"].values()
    if not all(shard_is_whole(folder, shard, size) for split in splits for shard in split["shards"]):
        return False
    try:
        tokenizer = load_tokenizer(folder)
    except DataError as error:
        print(f"{error}: it is made again")
        return False
    if (tokenizer.vocab_size, tokenizer.eot) != (meta["vocab_size"], meta["eot"]):
        print(f"{folder}/tokenizer.json and meta.json are of two datasets: they are made again")
        return False
    print(f"{folder} is complete already: {_summary(meta)}")
    if os.path.isdir(unfinished := Staging(folder).path):
        print(f"{unfinished} holds an interrupted preparation with other options: go on with it, or delete it")
    return True


def earlier_arguments(folder):
    """Return [(folder, arguments)] of what was begun, and what is finished, in this folder."""
    meta, staging = own_meta(folder), Staging(folder)
    found = [(staging.path, staging.arguments), (folder, meta["arguments"] if meta else {})]
    return [(path, arguments) for path, arguments in found if arguments]


def earlier_tokenizer(folder, arguments):
    """Return the Tokenizer with which the same arguments have begun, or finished, a dataset here, or None."""
    for path, saved in earlier_arguments(folder):
        if saved == _normal(arguments):
            try:
                return load_tokenizer(path)
            except DataError:
                pass
    return None


def write_dataset(
    folder, units, tokenizer, document_length, arguments, source, command, open_ended=False, facts=None
):  # fmt: skip
    """Write the shards that are not there yet, tokenizer.json and meta.json, then replace what was in the folder;
    return meta as a dict.

    units: a list of Unit; arguments: a dict for JSON; source: a line that says where the tokens come from; command: the
    command that does this again; facts: more entries of meta.json; open_ended: there are more units than the source has
    text for, so that their number says nothing of the progress. A unit of which `read` returns None ends its split.
    Raises DataError if a unit gives rows of another length or ids beyond the vocabulary, or if a split has no row.
    """
    started = time.monotonic()
    arguments = _normal(arguments)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    old = own_meta(folder)
    numbers = {split: itertools.count() for split in SPLITS}
    units = {f"{unit.split}_{next(numbers[unit.split]):05d}.bin": unit for unit in units}
    ids = _unit_ids(units, tokenizer, document_length, arguments)
    with open_staging(folder) as staging:
        done = _take_over(staging, old, ids, arguments, dtype)
        tokenizer.save(staging.path)
        there, tokens = len(done), {file: unit.tokens for file, unit in units.items()}
        total = None if open_ended else sum(tokens.values())
        progress, ended = Progress(folder, total, sum(tokens[file] for file in done)), set()
        try:
            for file, unit in units.items():
                if file in done or unit.split in ended:
                    continue
                if (rows := unit.read()) is None:
                    ended.add(unit.split)
                    continue
                done[file] = _write_shard(staging.file(file), rows, tokenizer.vocab_size, document_length, dtype)
                staging.save(arguments, done, {file: ids[file] for file in done})
                progress.update(unit.tokens)
        finally:
            progress.close()
        units = {file: unit for file, unit in units.items() if file in done}
        ids = {file: ids[file] for file in units}
        splits = _splits(units, done)
        for split, rows in splits.items():
            if not rows["tokens"]:
                staging.clear()
                staging.shards = {}
                raise DataError(
                    f"{folder}: the {split} split has no whole row of {document_length} tokens; "
                    "give more text, a smaller --document_length or a larger --val_fraction"
                )
        meta = _meta(folder, tokenizer, dtype, document_length, splits, source, command, arguments)
        _finish(staging, old, meta | {"units": ids} | (facts or {}), tokenizer)
    reused = f", {there} of {len(units)} shards were there" if there else ""
    print(f"{folder} is complete: {_summary(meta)} ({time.monotonic() - started:.1f} s{reused})")
    return meta


def _unit_ids(units, tokenizer, document_length, arguments):
    """Return {file: hash of all that the tokens of its unit depend on}: units with one id give the same shard."""
    files = {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files().items()}
    ids = {}
    for file, unit in units.items():
        key = [arguments, file] if unit.key is None else [unit.split, unit.key]
        ids[file] = hashlib.sha256(json.dumps([FORMAT, document_length, files, key]).encode()).hexdigest()[:24]
    return ids


def _take_over(staging, old, ids, arguments, dtype):
    """Put the finished shards of the old dataset and of an interrupted run that are wanted into the unfinished dataset;
    return them as {file: shard}."""
    found = {}  # id of a unit -> (path of its shard, shard)
    before = [(staging.path, staging.arguments, staging.shards, staging.units)]
    if old is not None:
        before.append((staging.folder, old["arguments"], shards_of(old), old.get("units", {})))
    for path, saved, shards, units in before:
        if not units and saved == arguments:  # written by an earlier version
            units = ids
        for file, shard in shards.items():
            if file in units and (not shard["tokens"] or shard_is_whole(path, shard, dtype.itemsize)):
                found.setdefault(units[file], (os.path.join(path, file), shard))
    kept = {file: found[unit] for file, unit in ids.items() if unit in found}
    shards = {file: {**shard, "file": file} for file, (_, shard) in kept.items()}
    saved = staging.arguments or (old and old["arguments"])
    if saved and saved != arguments:
        what = f"{len(kept)} of {len(ids)} shards are kept" if kept else "starting over"
        print(f"{staging.folder}: {_difference(saved, arguments)}; {what}")
    elif kept:
        print(f"{staging.folder}: going on, writing the shards that are missing or cut off")
    sources = {file: path for file, (path, shard) in kept.items() if shard["tokens"]}
    staging.take_over(sources, arguments, shards, {file: ids[file] for file in shards})
    return shards


def _finish(staging, old, meta, tokenizer):
    """Write meta.json, which makes the unfinished dataset whole, and let it take the place of the old one."""
    new = {*shards_of(meta), *tokenizer.files()}
    if old is None:
        owned = [*FILES, *(name for name in os.listdir(staging.folder) if SHARD.fullmatch(name))]
    else:
        owned = [*shards_of(old), VOCABULARY_FILES.get(old["tokenizer"], "tokenizer.json")]
    stale = {*owned, "progress.json"} - new
    staging.save(staging.arguments, staging.shards, staging.units, sorted(stale))
    write_atomically(staging.file("meta.json"), json.dumps(meta, indent=1).encode())
    staging.finish()


def _splits(units, done):
    """Return {split: {documents, tokens, shards}} of the finished shards. Shards without a row are left out."""
    splits = {}
    for split in SPLITS:
        rows = [done[file] for file, unit in units.items() if unit.split == split and done[file]["tokens"]]
        splits[split] = {key: sum(shard[key] for shard in rows) for key in ("documents", "tokens")} | {"shards": rows}
    return splits


def _meta(folder, tokenizer, dtype, document_length, splits, source, command, arguments):
    return {
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


def _write_shard(path, rows, vocab_size, document_length, dtype):
    """Write rows [n, document_length] as the shard at path; return {file, documents, tokens, sha256}."""
    rows, file = np.asarray(rows), os.path.basename(path)
    if rows.ndim != 2 or rows.shape[1] != document_length or rows.dtype.kind not in "iu":
        raise DataError(f"{file}: rows must be integers [n, {document_length}], got {rows.dtype} {list(rows.shape)}")
    if rows.size == 0:  # less than one row of tokens: recorded as done, without a file
        return {"file": file, "documents": 0, "tokens": 0, "sha256": None}
    if rows.min() < 0 or rows.max() >= vocab_size:
        raise DataError(f"{file}: token id {rows.max()} is not in the vocabulary of {vocab_size}")
    rows = np.ascontiguousarray(rows, dtype=dtype)
    write_atomically(path, rows.data)
    return {
        "file": file,
        "documents": rows.shape[0],
        "tokens": rows.size,
        "sha256": hashlib.sha256(rows.data).hexdigest(),
    }


def _remove_damaged(folder, meta):
    """Delete the shards, of the dataset and of an interrupted run, whose sha256 is not what was written; name them."""
    staging = Staging(folder)
    shards = {os.path.join(folder, file): shard for file, shard in (shards_of(meta) if meta else {}).items()}
    shards |= {staging.file(file): shard for file, shard in staging.shards.items()}
    print(f"{folder}: reading {len(shards)} shards")
    for path, shard in shards.items():
        if os.path.exists(path) and sha256_of(path) != shard["sha256"]:
            print(f"{path} is not what was written (sha256 differs): it is made again")
            os.remove(path)


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
