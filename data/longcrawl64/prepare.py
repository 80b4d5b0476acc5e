"""Prepare LongCrawl64: documents of exactly 65,536 GPT-2 tokens (https://manifestai.com/articles/longcrawl64/).

    python data/longcrawl64/prepare.py --documents=2048               # 134 M tokens of the Hugging Face mirror
    python data/longcrawl64/prepare.py --source=/data/longcrawl64     # a local copy: train.zarr and heldout.zarr
    python data/longcrawl64/prepare.py --source=/data/longcrawl64 --direct     # training reads the arrays themselves
    python data/longcrawl64/prepare.py --source=/data/longcrawl64 --check      # count its chunk files and stop
    python data/longcrawl64/prepare.py --source=books.jsonl           # other long text, packed into the same layout

The source is two zarr arrays (v2 or v3; local or any fsspec URL), train [6609334, 65536] and heldout [52131, 65536] of
uint16 in chunks of [2048, 2048]: about 800 GB, written here as row-major shards of one chunk row each (268 MB), heldout
as the validation split. A killed run is resumed by running it again.

zarr returns the fill value for a chunk that is missing, without a word, and copies of this dataset with missing or
zeroed chunks have been met. So the chunk files are counted first, and a missing chunk, or one that holds a single
value, is refused by name. --skip_missing takes the chunk rows that are complete instead.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import numpy as np

from data import DataError, need
from data.command import Parser, run
from data.corpus import find_files
from data.shards import Unit, is_complete, write_dataset, write_direct
from data.text.prepare import prepare
from data.tokenizer import gpt2_tokenizer

MIRROR = "hf://datasets/clankur/longcrawl64@5e2f38e601ca7c16fa304f30536d9e2945bb2a32"
ARRAYS = {"train": "train.zarr", "val": "heldout.zarr"}
METADATA = (".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json")
CHUNKS_AT_ONCE = 8  # of 8 MB each: enough to keep a network busy


def retrying(call, attempts=10, sleep=time.sleep):
    """call(), again after 1, 2, 4, ... 60 s when the network or the server (429, 5xx) is what failed."""
    for attempt in range(attempts):
        try:
            return call()
        except Exception as error:
            if attempt == attempts - 1 or not _passing(error):
                raise
            wait = min(60, 2**attempt)
            print(f"{type(error).__name__}, trying again in {wait} s: {error}", file=sys.stderr)
            sleep(wait)


def _status(error):
    """An HTTP client's error, as a number, if it is one."""
    response = getattr(error, "response", None)
    return getattr(error, "status", None) or getattr(response, "status_code", None)


def _passing(error):
    """Whether an error is worth another try. HTTP clients have exceptions of their own, so they are told by name and
    status."""
    status = _status(error)
    if isinstance(status, int):
        return status == 429 or status >= 500
    names = {kind.__name__ for kind in type(error).__mro__}
    network = "ConnectionError TimeoutError Timeout TransportError ClientConnectionError ClientPayloadError"
    return bool(names.intersection(network.split()))


class Zarr:
    """One zarr array [documents, length] of uint16, read strictly. Raises DataError if it is not there or of another
    kind."""

    def __init__(self, url, length):
        zarr, storage = need("zarr"), need("zarr.storage")
        self.url = url

        class Strict(storage.WrapperStore):
            async def get(self, key, prototype, byte_range=None):
                value = await self._store.get(key, prototype, byte_range)
                if value is None and key.rpartition("/")[2] not in METADATA:
                    raise DataError(_missing(url, [key]))
                return value

        def connect():
            remote = "://" in url
            open_store = storage.FsspecStore.from_url if remote else storage.LocalStore
            store = open_store(url, read_only=True)
            return zarr.open_array(Strict(store), mode="r")

        try:
            self.array = retrying(connect, attempts=4)  # who is offline should not wait long to hear it
        except Exception as error:  # not there, offline, no package for this kind of URL, ...
            raise DataError(f"cannot open {url} as a zarr array: {type(error).__name__}: {error}") from error
        shape, dtype = self.array.shape, self.array.dtype
        if len(shape) != 2 or shape[1] != length or dtype != np.uint16 or self.array.shards:
            kind = "sharded " if self.array.shards else ""
            raise DataError(
                f"{url} must be uint16 [documents, {length}] in plain chunks, got {kind}{dtype} {list(shape)}"
            )
        self.documents = shape[0]
        self.chunk_rows, self.chunk_columns = self.array.chunks
        self.chunks = range(-(-self.documents // self.chunk_rows))  # numbers of the chunk rows

    def keys(self, row):
        """The files of a chunk row, by their names below the array's folder: "12.3", "12/3" or "c/12/3"."""
        columns = range(-(-self.array.shape[1] // self.chunk_columns))
        return [self.array.metadata.encode_chunk_key((row, column)) for column in columns]

    def missing(self, rows):
        """Those chunk files of the chunk rows `rows` that are not there; None if the store cannot list its files."""
        fs, root = need("fsspec").core.url_to_fs(self.url)
        root = root.rstrip("/")
        try:
            found = {path.removeprefix(root + "/") for path in retrying(partial(fs.find, root))}
        except NotImplementedError:
            return None
        if not found.intersection(METADATA):
            return None
        return [key for row in rows for key in self.keys(row) if key not in found]

    def read(self, row, count):
        """The first `count` documents of a chunk row -> uint16 [count, length], each chunk fetched and decoded once."""
        out = np.empty((count, self.array.shape[1]), dtype=np.uint16)

        def fetch(column):
            columns = slice(column * self.chunk_columns, (column + 1) * self.chunk_columns)
            out[:, columns] = self.chunk(row, column)[:count]

        with ThreadPoolExecutor(CHUNKS_AT_ONCE) as pool:
            list(pool.map(fetch, range(len(self.keys(row)))))
        return out

    def chunk(self, row, column):
        """One chunk, uint16 [documents, tokens]. Raises DataError, naming it, if it is missing, damaged or constant."""
        first, columns = row * self.chunk_rows, slice(column * self.chunk_columns, (column + 1) * self.chunk_columns)
        last = min(first + self.chunk_rows, self.documents)
        name = f"{self.url}/{self.keys(row)[column]}"
        try:
            block = retrying(lambda: self.array[first:last, columns])
        except DataError:
            raise
        except Exception as error:  # of a codec, of the network, of the disk
            why = " ".join(f"({type(error).__name__}: {error})".split())
            if _passing(error) or _status(error) or getattr(error, "errno", None):
                raise DataError(f"{name}: chunk cannot be read {why}") from error
            raise DataError(f"{name}: chunk cannot be decoded {why}: damaged, get it again") from error
        if block.size > 1 and block.min() == block.max():
            raise DataError(f"{name}: chunk holds nothing but {block[0, 0]}, damaged: get it again")
        return block


def _missing(url, keys):
    some = ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
    return f"{url}: {len(keys)} chunk files are missing ({some}): complete the copy, or use --skip_missing"


def plan(array, documents, skip_missing):
    """[(chunk row, how many of its documents)] for the first `documents` (all if None) of those that can be had."""
    rows = list(array.chunks)
    if not skip_missing and documents is not None:
        rows = rows[: -(-documents // array.chunk_rows)]
    print(f"{array.url}: looking for the chunk files of {array.documents:,} documents")
    missing = array.missing(rows) or []
    if missing and not skip_missing:
        raise DataError(_missing(array.url, missing))
    absent = set(missing)
    rows = [row for row in rows if not absent.intersection(array.keys(row))]
    found, left = [], array.documents if documents is None else documents
    for row in rows:
        count = min(left, array.chunk_rows, array.documents - row * array.chunk_rows)
        if count:
            found.append((row, count))
        left -= count
    if not found or (left and documents is not None):
        had = sum(count for _, count in found)
        raise DataError(f"{array.url}: {documents or 'all'} documents asked for, {had} can be had")
    return found


def check(arrays):
    """Count the chunk files and print those missing; exit status 0 if all are there, 2 otherwise."""
    complete = True
    for array in arrays:
        missing = array.missing(array.chunks)
        if missing is None:
            raise DataError(f"{array.url}: the files of this store cannot be listed")
        total = sum(len(array.keys(row)) for row in array.chunks)
        print(f"{array.url}: {total - len(missing):,} of {total:,} chunk files")
        for key in missing:
            print(f"  missing {key}")
        complete = complete and not missing
    return 0 if complete else 2


def main(argv):
    parser = Parser(__doc__, __file__)
    parser.add_argument("--source", default=MIRROR, help="folder or URL of the zarr arrays, or text to pack instead")
    parser.add_argument("--documents", type=int, help="train documents to take (unset: all)")
    parser.add_argument("--val_documents", type=int, help="heldout documents (unset: all, or 2048 with --documents)")
    parser.add_argument("--skip_missing", action="store_true", help="leave out chunk rows that are not complete")
    parser.add_argument("--direct", action="store_true", help="write no tokens: training reads the arrays themselves")
    parser.add_argument("--check", action="store_true", help="only count the chunk files and list those missing")
    parser.add_argument("--key", default="text", help="for text: where it is in a line of .jsonl")
    args = parser.parse_args(argv)
    source = args.source.rstrip("/")
    for name in ("documents", "val_documents"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise DataError(f"--{name} must be at least 1, got {getattr(args, name)}")

    held = [name for name in ARRAYS.values() if os.path.exists(os.path.join(source, name))]
    if "://" not in source and not held:
        if args.documents or args.val_documents or args.check or args.skip_missing:
            names = " and ".join(ARRAYS.values())
            raise DataError(f"{source} has no {names}; --documents, --check and --skip_missing are for zarr sources")
        files = find_files([source], (".txt", ".md", ".jsonl"))
        prepare(files, "gpt2-escaped", args, source, args.key)
        return 0

    arguments = {
        "zarr": source if "://" in source else os.path.abspath(source),
        "documents": args.documents,
        "val_documents": args.val_documents,
        "skip_missing": args.skip_missing,
        "document_length": args.document_length,
        **({"direct": True} if args.direct else {}),
    }
    if not args.check and not args.skip_missing and is_complete(args.out, arguments, args.verify):
        return 0
    arrays = {split: Zarr(f"{source}/{name}", args.document_length) for split, name in ARRAYS.items()}
    if args.check:
        return check(arrays.values())
    documents = {"train": args.documents, "val": args.val_documents}
    if args.documents and not args.val_documents:  # a small training set does not need 52,131 documents beside it
        documents["val"] = min(2048, arrays["val"].documents)
    tokenizer = gpt2_tokenizer(json_escaped=True)
    plans = {split: plan(arrays[split], documents[split], args.skip_missing) for split in arrays}
    if args.skip_missing:  # a copy that has grown has other rows, which must not be mixed with those already taken
        arguments["rows"] = {split: [row for row, _ in rows] for split, rows in plans.items()}
        if is_complete(args.out, arguments, args.verify):
            return 0
    if args.direct:
        url = arguments["zarr"]  # absolute: training may start in another folder
        rows = {s: {"url": f"{url}/{ARRAYS[s]}", "together": arrays[s].chunk_rows, "rows": plans[s]} for s in arrays}
        write_direct(args.out, rows, tokenizer, args.document_length, arguments, source, args.command)
        return 0
    size = args.document_length
    units = [
        Unit(split, partial(arrays[split].read, row, count), count * size)
        for split in arrays
        for row, count in plans[split]
    ]
    write_dataset(args.out, units, tokenizer, args.document_length, arguments, source, args.command)
    return 0


if __name__ == "__main__":
    run(main)
