"""Read and write meta.json, which describes a dataset, and progress.json, which describes one that is unfinished.

write_meta("data/mine/meta.json", meta)       # adds the version and a sha256 of the other entries
meta = read_meta("data/mine/meta.json")       # refuses another version, and what is damaged
"""

import hashlib
import json
import os
import re

from . import DataError
from .files import read_json, write_json

VERSION = 2  # of the files in a dataset's folder
SPLITS = ("train", "val")
SHARD = re.compile(r"(train|val)_\d{5,9}\.bin")


class VersionError(DataError):
    """Reports a dataset that another version of this program has written."""


def write_meta(path, meta):
    """Write a dict as meta.json or progress.json, whole or not at all."""
    meta = {"version": VERSION, **meta}
    write_json(path, {**meta, "sha256": hash_json(meta)})


def read_meta(path):
    """Return the dict of a meta.json or progress.json.

    Raises FileNotFoundError if there is none, and DataError of one line if it is damaged or of another version.
    """
    meta = read_json(path)
    if meta.get("version") != VERSION:
        version = str(meta.get("version"))[:40]
        raise VersionError(
            f"{path} is of version {version}, not {VERSION}: delete it and its shards and prepare the dataset again, "
            "or name another folder"
        )
    if meta.pop("sha256", None) != hash_json(meta):
        raise DataError(f"{path} is damaged (sha256 differs)")
    if not all(map(SHARD.fullmatch, shards_of(meta))):  # it may be somebody else's, and files of these names go
        raise DataError(f"{path} is damaged (a shard has another folder)")
    return meta


def find_meta(path):
    """Return the dict of a meta.json or progress.json, or None if it is missing or damaged.

    Raises DataError if it is of another version.
    """
    try:
        return read_meta(path)
    except VersionError:
        raise
    except (FileNotFoundError, DataError):
        return None


def hash_json(value):
    """Return the sha256 of a value that JSON can express, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def shards_of(meta):
    """Return the shards of a meta.json by file name."""
    return {shard["file"]: shard for split in meta["splits"].values() for shard in split["shards"]}


def splits_of(shards):
    """Return the splits of a meta.json that has these shards, {file name: shard}."""
    splits = {}
    for split in SPLITS:
        own = [shard for file, shard in shards.items() if file.startswith(split)]
        splits[split] = {key: sum(shard[key] for shard in own) for key in ("documents", "tokens")} | {"shards": own}
    return splits


def shard_is_whole(folder, shard, token_bytes):
    """Return True if a shard {file, tokens, ...} of meta.json exists with exactly its size."""
    try:
        return os.path.getsize(os.path.join(folder, shard["file"])) == shard["tokens"] * token_bytes
    except OSError:
        return False
