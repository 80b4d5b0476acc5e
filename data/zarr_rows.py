"""Read rows of tokens straight from a zarr array, for datasets that are too large to be written a second time.

    array = Zarr(url, length=65536)    # opened strictly: a missing, damaged or constant chunk raises DataError
    tokens = array.read(row, count)    # the first documents of a row of chunks, uint16 [count, length]

    rows = ChunkedRows(url, rows=[0, 1, 5], together=2048, documents=6000, length=65536)
    rows.expect(start, count)          # announce what will be read: threads fetch and decode it beside the training
    tokens = rows.read(start, count)   # tokens of the documents of these rows of chunks, uint16 [count]

A chunk of LongCrawl64 holds 2,048 tokens of 2,048 documents. The order of training takes the documents of one row of
chunks together, so that each chunk is decoded once for all the windows that lie in it.
"""

import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from . import DataError, need

METADATA = (".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json")
CHUNKS_AT_ONCE = 8  # chunks of 8 MB that Zarr.read fetches at the same time: enough to keep a network busy
THREADS = 4  # that fetch and decode chunks for ChunkedRows
BYTES = 2**30  # of decoded chunks in the cache of ChunkedRows


# ---- a zarr array, read strictly


class Zarr:
    """A zarr array [documents, length] of uint16 in plain chunks, where a missing chunk is an error.

    Attributes: url, documents, chunk_rows and chunk_columns (documents and tokens in a chunk), chunks (the numbers of
    the rows of chunks). Raises DataError if the array is not there or is of another kind.
    """

    def __init__(self, url, length):
        self.url = url
        try:
            self.array = retrying(partial(_open_strictly, url), attempts=4)  # few, so that being offline shows soon
        except Exception as error:  # many kinds: not there, offline, no package for this kind of URL, ...
            raise DataError(f"cannot open {url} as a zarr array: {type(error).__name__}: {error}") from error
        shape, dtype = self.array.shape, self.array.dtype
        if len(shape) != 2 or shape[1] != length or dtype != np.uint16 or self.array.shards:
            kind = "sharded " if self.array.shards else ""
            raise DataError(
                f"{url} must be uint16 [documents, {length}] in plain chunks, got {kind}{dtype} {list(shape)}"
            )
        self.documents = shape[0]
        self.chunk_rows, self.chunk_columns = self.array.chunks
        self.chunks = range(-(-self.documents // self.chunk_rows))

    def keys(self, row):
        """Return the files of a row of chunks, named as below the array's folder: "12.3", "12/3" or "c/12/3"."""
        columns = range(-(-self.array.shape[1] // self.chunk_columns))
        return [self.array.metadata.encode_chunk_key((row, column)) for column in columns]

    def missing(self, rows):
        """Return the missing files of these rows of chunks, or None if the store cannot list its files."""
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
        """Return the first `count` documents of a row of chunks, uint16 [count, length]. Each chunk is read once."""
        out = np.empty((count, self.array.shape[1]), dtype=np.uint16)

        def fetch(column):
            columns = slice(column * self.chunk_columns, (column + 1) * self.chunk_columns)
            out[:, columns] = self.chunk(row, column)[:count]

        with ThreadPoolExecutor(CHUNKS_AT_ONCE) as pool:
            list(pool.map(fetch, range(len(self.keys(row)))))
        return out

    def chunk(self, row, column):
        """Return a chunk, uint16 [documents, tokens]. Raises DataError that names it if it is missing, damaged or
        constant."""
        first, columns = row * self.chunk_rows, slice(column * self.chunk_columns, (column + 1) * self.chunk_columns)
        last = min(first + self.chunk_rows, self.documents)
        name = f"{self.url}/{self.keys(row)[column]}"
        try:
            block = retrying(lambda: self.array[first:last, columns])
        except DataError:
            raise
        except Exception as error:  # from a codec, the network or the disk
            reason = " ".join(f"({type(error).__name__}: {error})".split())
            if _is_temporary(error) or _http_status(error) or getattr(error, "errno", None):
                raise DataError(f"{name}: chunk cannot be read {reason}") from error
            raise DataError(f"{name}: chunk cannot be decoded {reason}: damaged, get it again") from error
        if block.size > 1 and block.min() == block.max():
            raise DataError(f"{name}: chunk holds nothing but {block[0, 0]}, damaged: get it again")
        return block


def _open_strictly(url):
    """Open a zarr array whose missing chunks raise DataError. (zarr itself returns the fill value for them.)"""
    zarr, storage = need("zarr"), need("zarr.storage")

    class Strict(storage.WrapperStore):
        async def get(self, key, prototype, byte_range=None):
            value = await self._store.get(key, prototype, byte_range)
            if value is None and key.rpartition("/")[2] not in METADATA:
                raise DataError(missing_message(url, [key]))
            return value

    open_store = storage.FsspecStore.from_url if "://" in url else storage.LocalStore
    return zarr.open_array(Strict(open_store(url, read_only=True)), mode="r")


def missing_message(url, keys):
    """Return the line that refuses an array without these chunk files."""
    some = ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
    return f"{url}: {len(keys)} chunk files are missing ({some}): complete the copy, or use --skip_missing"


def missing_chunks(zarr, length):
    """Return the missing chunk files of those that a split needs; zarr: its entry {url, rows, ...} in meta.json."""
    return Zarr(zarr["url"], length).missing(zarr["rows"]) or []


# ---- networks that fail now and then


def retrying(call, attempts=10, sleep=time.sleep):
    """Return call(); try again after 1, 2, 4, ... 60 s if the network or the server (429, 5xx) has failed."""
    for attempt in range(attempts):
        try:
            return call()
        except Exception as error:
            if attempt == attempts - 1 or not _is_temporary(error):
                raise
            wait = min(60, 2**attempt)
            print(f"{type(error).__name__}, trying again in {wait} s: {error}", file=sys.stderr)
            sleep(wait)


def _is_temporary(error):
    """Return True if a request that failed with this error is worth another try.

    HTTP clients have exceptions of their own, which are recognised by status and name, without importing the clients.
    """
    status = _http_status(error)
    if isinstance(status, int):
        return status == 429 or status >= 500
    names = {kind.__name__ for kind in type(error).__mro__}
    network = "ConnectionError TimeoutError Timeout TransportError ClientConnectionError ClientPayloadError"
    return bool(names.intersection(network.split()))


def _http_status(error):
    """Return the status code in the error of an HTTP client, or None for other errors."""
    response = getattr(error, "response", None)
    return getattr(error, "status", None) or getattr(response, "status_code", None)


# ---- a cache of decoded chunks


class ChunkedRows:
    """The documents of some rows of chunks as one stream of tokens, with a cache of decoded chunks.

    Documents 0, 1, ... are those of the rows of chunks in `rows`, in this order, `together` in each; of the last row
    some may be left out. Raises DataError at the first use if the array is not of that shape (any more).
    """

    def __init__(self, url, rows, together, documents, length):
        self.url, self.chunk_rows, self.documents, self.length = url, rows, documents, length
        self.together = together
        self.array, self.chunks, self.lock = None, OrderedDict(), threading.Lock()

    def read(self, start, count):
        """Return the tokens [start, start + count) of the documents, one after another: uint16 [count]."""
        out, done = np.empty(count, dtype=np.uint16), 0
        for row, column, document, first, size in self._pieces(start, count):
            out[done : done + size] = self._chunk(row, column).result()[document, first : first + size]
            done += size
        return out

    def expect(self, start, count):
        """Start to fetch and decode the chunks that hold these tokens."""
        for row, column, *_ in self._pieces(start, count):
            self._chunk(row, column)

    def file(self, position):
        """Return the name of the chunk that holds the token at this position."""
        ((row, column, *_),) = self._pieces(position, 1)
        return f"{self.url}/{self.array.keys(row)[column]}"

    def _open(self):
        """Open the array at the first use, because it must be opened in the process that reads."""
        if self.array is None:
            array = Zarr(self.url, self.length)
            if array.chunk_rows != self.together or max(self.chunk_rows) not in array.chunks:
                raise DataError(
                    f"{self.url} has {len(array.chunks)} rows of chunks of {array.chunk_rows} documents, the dataset "
                    f"was made of rows of {self.together} up to number {max(self.chunk_rows)}: prepare it again"
                )
            self.array = array
            self.pool = ThreadPoolExecutor(THREADS)
            self.most = max(2, BYTES // (2 * self.array.chunk_rows * self.array.chunk_columns))  # chunks in the cache
        return self.array

    def _pieces(self, start, count):
        """Yield (row and column of a chunk, document in it, first token in it, number of tokens) from start on."""
        array = self._open()
        while count:
            document, token = divmod(start, self.length)
            place, document = divmod(document, array.chunk_rows)
            column, first = divmod(token, array.chunk_columns)
            size = min(count, array.chunk_columns - first, self.length - token)
            yield self.chunk_rows[place], column, document, first, size
            start, count = start + size, count - size

    def _chunk(self, row, column):
        """Return a future of a chunk, uint16 [documents, tokens], from the cache or else from a thread."""
        with self.lock:
            found = self.chunks.pop((row, column), None) or self.pool.submit(self.array.chunk, row, column)
            self.chunks[row, column] = found
            while len(self.chunks) > self.most:
                self.chunks.popitem(last=False)
        return found
