"""Rows of tokens straight from a zarr array in chunks, for datasets that are too large to write a second time.

    rows = ChunkedRows(url, chunk_rows=[0, 1, 5], documents=6000, length=65536)
    rows.expect(start, count)          # will be wanted soon: fetched and decoded by threads beside the training
    tokens = rows.read(start, count)

A chunk of LongCrawl64 holds 2,048 tokens of 2,048 documents. The loader's order takes the documents of one row of
chunks together (see `_epoch_order`), so each chunk is decoded once for all windows that lie in it.
"""

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np

THREADS = 4
BYTES = 2**30  # of decoded chunks that stay


def missing_chunks(zarr, length):
    """The chunk files that meta.json's entry {url, rows, ...} of a split needs and that are not there."""
    from data.longcrawl64.prepare import Zarr

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
            from data.longcrawl64.prepare import Zarr

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
