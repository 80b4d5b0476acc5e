"""Read rows of tokens from a zarr array, strictly.

    array = Zarr(url, length=65536)    # a missing, damaged or constant chunk raises DataError
    tokens = array.read(row, count)    # the first documents of a row of chunks, uint16 [count, length]

A chunk of LongCrawl64 holds 2,048 tokens of 2,048 documents.
"""

import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from . import DataError, describe_error, need

METADATA = (".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json")
CHUNKS_AT_ONCE = 8  # chunks of 8 MB that Zarr.read fetches at the same time: enough to keep a network busy


class Zarr:
    """A zarr array [documents, length] of uint16 in plain chunks, where a missing chunk is an error.

    Attributes: url, documents, chunk_rows and chunk_columns (documents and tokens in a chunk), chunks (the numbers of
    the rows of chunks). Raises DataError if the array is not there or is of another kind.
    """

    def __init__(self, url, length):
        self.url, self.attempts = url, 10 if "://" in url else 1
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # zarr asks for several files; one error is enough
        try:
            self.array = _open_strictly(url)
            count = self.array.nchunks  # 103,296 in LongCrawl64; the file of each is looked for
        except Exception as error:  # many kinds: not there, offline, no package for this kind of URL, ...
            reason = f"({describe_error(error)})"
            raise DataError(f"cannot open {url} as a zarr array {reason}: give another copy as --source") from error
        shape, dtype = self.array.shape, self.array.dtype
        if len(shape) != 2 or shape[1] != length or dtype != np.uint16 or self.array.shards or count > 10**7:
            raise DataError(
                f"{url} must be uint16 [documents, {length}] in plain chunks, at most 10,000,000 of them, "
                f"got {dtype} {list(shape)}, shards {self.array.shards}"
            )
        self.documents = shape[0]
        self.chunk_rows, self.chunk_columns = self.array.chunks
        self.chunks = range(-(-self.documents // self.chunk_rows))

    def keys(self, row):
        """Return the files of a row of chunks, named as below the array's folder: "12.3", "12/3" or "c/12/3"."""
        columns = range(-(-self.array.shape[1] // self.chunk_columns))
        return [self.array.metadata.encode_chunk_key((row, column)) for column in columns]

    def count(self, row):
        """Return the number of documents of a row of chunks; the last one may have fewer."""
        return min(self.chunk_rows, self.documents - row * self.chunk_rows)

    def missing(self, rows):
        """Return the missing files of these rows of chunks; none if the store cannot list its files."""
        fs, root = need("fsspec").core.url_to_fs(self.url)
        root = root.rstrip("/")
        try:
            files = {path.removeprefix(root + "/") for path in retrying(partial(fs.find, root), self.attempts)}
        except NotImplementedError:
            return []
        except Exception as error:  # of any store
            raise DataError(f"cannot list the files of {self.url}: {describe_error(error)}") from error
        if files.isdisjoint(METADATA):
            return []
        return [key for row in rows for key in self.keys(row) if key not in files]

    def read(self, row, count):
        """Return the first `count` documents of a row of chunks, uint16 [count, length]. Each chunk is read once."""
        with ThreadPoolExecutor(CHUNKS_AT_ONCE) as pool:
            chunks = pool.map(partial(self.chunk, row), range(len(self.keys(row))))
            return np.concatenate([chunk[:count] for chunk in chunks], axis=1)

    def chunk(self, row, column):
        """Return a chunk, uint16 [documents, tokens]. Raises DataError that names it if it is missing, damaged or
        constant."""
        name = f"{self.url}/{self.keys(row)[column]}"
        try:
            block = retrying(lambda: self.array.get_block_selection((row, column)), self.attempts)
        except DataError:
            raise
        except Exception as error:  # from a codec, the network or the disk
            raise DataError(f"{name}: chunk cannot be read or decoded ({describe_error(error)})") from error
        if block.size > 1 and block.min() == block.max():
            raise DataError(f"{name}: chunk holds nothing but {block[0, 0]}, damaged: get it again")
        return block


def _open_strictly(url):
    """Open a zarr array that raises DataError for a missing chunk. (zarr itself returns the fill value.)"""
    zarr, storage = need("zarr"), need("zarr.storage")

    class Strict(storage.WrapperStore):
        async def get(self, key, prototype, byte_range=None):
            value = await self._store.get(key, prototype, byte_range)
            if value is None and key.rpartition("/")[2] not in METADATA:
                raise DataError(f"{url}: {missing_message([key])}")
            return value

    open_store = storage.FsspecStore.from_url if "://" in url else storage.LocalStore
    return zarr.open_array(Strict(open_store(url, read_only=True)), mode="r")


def missing_message(keys):
    """Return the text that refuses an array without these chunk files."""
    shown = ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
    return f"{len(keys)} chunk files are missing ({shown}): complete the copy"


def retrying(call, attempts=10, sleep=time.sleep):
    """Return call(); try again after 1, 2, 4, ... 60 s while it fails with another error than DataError."""
    for attempt in range(attempts):
        try:
            return call()
        except Exception as error:  # of the network, in the types of many clients, or damage, which does not pass
            if attempt == attempts - 1 or isinstance(error, (DataError, NotImplementedError)):
                raise
            seconds = min(60, 2**attempt)
            print(f"{type(error).__name__}, trying again in {seconds} s: {error}", file=sys.stderr)
            sleep(seconds)
