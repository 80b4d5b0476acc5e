"""Read and check meta.json, which describes a dataset, and tell folders of ours from those of others.

    meta = read_meta("data/pystdlib")       # a dict whose values have been checked
    meta = own_meta("data/mine")            # the same or None, before writing there; refuses what is not ours

What is read here may be damaged, or written by someone else: a name in it never leads out of the folder.
"""

import os
import re

from . import DataError
from .files import read_json
from .tokenizer import FILES

SPLITS = ("train", "val")
SHARD = re.compile(r"(?:train|val)_\d{5,9}\.bin")
UNFINISHED = "unfinished"  # the folder in a dataset's folder in which it is prepared
JOURNAL = "journal.jsonl"  # the file in there by which documents.py goes on
LOCK = ".lock"  # the file in there that a prepare script locks
KEYS = {"arguments", "splits", "prepare", "vocab_size"}  # a meta.json without these is of another program


def read_meta(folder):
    """Return the dict of folder/meta.json.

    Raises FileNotFoundError if there is none, and DataError of one line if it cannot be read or its values make no
    sense: other types, counts that do not fit each other, a shard whose name is not a shard's.
    """
    path = os.path.join(folder, "meta.json")
    meta = read_json(path)
    try:
        _check(meta)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise DataError(f"{path} is damaged ({reason})") from error
    return meta


def _check(meta):
    """Raise KeyError, TypeError, AttributeError or ValueError if a meta.json is not as write_dataset makes it."""
    kinds = {"name": str, "tokenizer": str, "prepare": str, "arguments": dict, "vocab_size": int, "eot": int}
    for key, kind in kinds.items():
        if not isinstance(meta[key], kind):
            raise ValueError(f"{key} is {str(meta[key])[:40]!r}")
    length = meta["document_length"]
    if not _is_count(length) or not length:
        raise ValueError(f"document_length is {str(length)[:40]!r}")
    if meta["dtype"] not in ("uint16", "uint32") or not 0 <= meta["eot"] < meta["vocab_size"] <= 1 << 32:
        raise ValueError(f"dtype {meta['dtype']}, vocab_size {meta['vocab_size']} and eot {meta['eot']} do not fit")
    for split in SPLITS:
        parts = [meta["splits"][split], *meta["splits"][split]["shards"]]
        for part in parts:
            if not all(_is_count(part[key]) for key in ("documents", "tokens")):
                raise ValueError(f"counts of the {split} split are no numbers")
            if part["tokens"] != part["documents"] * length:
                raise ValueError(f"{part['documents']} rows of {length} are not {part['tokens']} tokens")
        for shard in parts[1:]:
            if not SHARD.fullmatch(shard["file"]) or not isinstance(shard["sha256"], str):
                raise ValueError(f"a shard is named {shard['file'][:80]!r}")
        if not 0 < parts[0]["documents"] == sum(shard["documents"] for shard in parts[1:]):
            raise ValueError(f"the {split} split has {parts[0]['documents']} rows, its shards others")
    check_units(meta.get("units", {}))


def check_units(units):
    """Raise TypeError or AttributeError if this is not {file: id of its unit}."""
    if not all(isinstance(unit, str) for unit in units.values()):
        raise TypeError(f"units is {str(units)[:40]}")


def _is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def shards_of(meta):
    """Return the shards of a meta.json by file name."""
    return {shard["file"]: shard for split in meta["splits"].values() for shard in split["shards"]}


def shard_is_whole(folder, shard, token_bytes):
    """Return True if a shard {file, tokens, ...} of meta.json exists with exactly its size."""
    try:
        return os.path.getsize(os.path.join(folder, shard["file"])) == shard["tokens"] * token_bytes
    except OSError:
        return False


def own_meta(folder):
    """Return the meta.json of the dataset in a folder, or None if there is none, before a dataset is written there.

    A meta.json of ours that is damaged counts as none. Raises DataError if the folder is not ours: it is ours if it is
    missing or empty, if its meta.json is ours, or if it holds nothing but what a prepare script leaves. A folder with a
    prepare.py may hold other files, too; the folder `unfinished` in it may not.
    """
    if not os.path.lexists(folder):
        return None
    if not os.path.isdir(folder):
        raise DataError(f"--out={folder} is not a folder")
    unfinished = os.path.join(folder, UNFINISHED)
    if os.path.lexists(unfinished) and not _is_unfinished(unfinished):
        raise DataError(f"{unfinished} is not of a dataset of ours: move it away, or give another --out")
    try:
        return read_meta(folder)
    except FileNotFoundError:
        pass
    except DataError:
        if not KEYS <= (_try_json(folder, "meta.json") or dict.fromkeys(KEYS)).keys():
            raise DataError(f"{folder}/meta.json is not of a dataset of ours: give another --out") from None
    names = set(os.listdir(folder))
    written = {name for name in names if SHARD.fullmatch(name) or name in (*FILES, "meta.json", "progress.json")}
    strangers = {name for name in names - written if not name.startswith(".") and not name.endswith(".tmp")}
    strangers -= {"prepare.py", "__pycache__", UNFINISHED}
    if "prepare.py" in names:
        strangers = set()
    if written and not _left_by_prepare(folder):
        strangers |= written
    if strangers:
        some = ", ".join(sorted(strangers)[:3]) + (", ..." if len(strangers) > 3 else "")
        raise DataError(f"{folder} is not empty and holds no dataset of ours ({some}): give another --out")
    return None


def _left_by_prepare(folder):
    """Return True if a folder without a readable meta.json has the tokenizer, or the progress, of a dataset of ours."""
    tokenizer, progress = _try_json(folder, "tokenizer.json") or {}, _try_json(folder, "progress.json") or {}
    return {"kind", "json_escaped"} <= tokenizer.keys() or {"arguments", "shards"} <= progress.keys()


def _is_unfinished(folder):
    """Return True if this is the folder of an interrupted preparation: nothing else is in there."""
    if not os.path.isdir(folder):
        return False
    names = (*FILES, "meta.json", "progress.json", JOURNAL, LOCK)
    return all(SHARD.fullmatch(n) or n in names or n.endswith(".tmp") for n in os.listdir(folder))


def _try_json(folder, name):
    """Return a parsed JSON object, or None if it is missing or damaged."""
    try:
        return read_json(os.path.join(folder, name))
    except (FileNotFoundError, DataError):
        return None
