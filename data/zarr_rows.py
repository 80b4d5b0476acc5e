"""Rows of tokens straight from a zarr array in chunks, for datasets that are too large to write a second time.

    rows = ChunkedRows(url, chunk_rows=[0, 1, 5], documents=6000, length=65536)
    rows.expect(start, count)          # will be wanted soon: fetched and decoded by threads beside the training
    tokens = rows.read(start, count)

A chunk of LongCrawl64 holds 2,048 tokens of 2,048 documents. The loader's order takes the documents of one row of
chunks together (see `_epoch_order`), so each chunk is decoded once for all windows that lie in it.
"""

import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from data import DataError, need

METADATA = (".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json")
CHUNKS_AT_ONCE = 8  # of 8 MB each: enough to keep a network busy
THREADS = 4
BYTES = 2**30  # of decoded chunks that stay


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
                    raise DataError(missing_message(url, [key]))
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


def missing_message(url, keys):
    some = ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
    return f"{url}: {len(keys)} chunk files are missing ({some}): complete the copy, or use --skip_missing"


def missing_chunks(zarr, length):
    """The chunk files that meta.json's entry {url, rows, ...} of a split needs and that are not there."""
    return Zarr(zarr["url"], length).missing(zarr["rows"]) or []


class ChunkedRows:
    """Documents 0, 1, ... are those of the rows of chunks in `chunk_rows`, of which the last may be cut short."""

    def __init__(self, url, chunk_rows, documents, length):
        self.url, self.chunk_rows, self.documents, self.length = url, chunk_rows, documents, length
        self.array, self.chunks, self.lock = None, OrderedDict(), threading.Lock()

    def read(self, start, count):
        """Tokens [start, start + count) of the documents, one after the other: uint16 [count]."""
        out, done = np.empty(count, dtype=np.uint16), 0
        for row, column, inside, first, size in self._pieces(start, count):
            out[done : done + size] = self._chunk(row, column).result()[inside, first : first + size]
            done += size
        return out

    def expect(self, start, count):
        for row, column, *_ in self._pieces(start, count):
            self._chunk(row, column)

    def file(self, position):
        """The chunk that holds the token at this position, by name."""
        ((row, column, *_),) = self._pieces(position, 1)
        return f"{self.url}/{self.array.keys(row)[column]}"

    def _open(self):
        """Here and not before, in the process and thread that reads."""
        if self.array is None:
            self.array = Zarr(self.url, self.length)
            self.pool = ThreadPoolExecutor(THREADS)
            self.keep = max(2, BYTES // (2 * self.array.chunk_rows * self.array.chunk_columns))
        return self.array

    def _pieces(self, start, count):
        """(row and column of a chunk, document inside it, first token inside it, tokens) from start on."""
        array = self._open()
        while count:
            document, token = divmod(start, self.length)
            place, inside = divmod(document, array.chunk_rows)
            column, first = divmod(token, array.chunk_columns)
            size = min(count, array.chunk_columns - first, self.length - token)
            yield self.chunk_rows[place], column, inside, first, size
            start, count = start + size, count - size

    def _chunk(self, row, column):
        """A future of a chunk's tokens, uint16 [documents, tokens]."""
        with self.lock:
            found = self.chunks.pop((row, column), None) or self.pool.submit(self.array.chunk, row, column)
            self.chunks[row, column] = found
            while len(self.chunks) > self.keep:
                self.chunks.popitem(last=False)
        return found
