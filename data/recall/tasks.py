"""Write texts with questions that a part far before answers, and find the questions in a text again.

    rows = make_pairs(rng, documents=64, length=1024)       # key and value, again and again: 64 x 1024 bytes
    for question in questions(rows[0].tobytes()): ...       # (distance in bytes, position of the value)

A record is a key of two letters and a value of one. Half of the records repeat an earlier one, at a distance that is
uniform on a logarithmic axis. A document holds ever more pairs of a key and a value, one for six of its bytes. A record
is a question if its key has stood before: the value of the newest record of this key must come again.
"""

import re

import numpy as np

from .. import DataError

RECORD = re.compile(rb"([@-\x7f][\x80-\xbf])([0-?])")
CHANCE = 1 / 16  # of a guess among all values
KEYS = 64 * 64  # two letters of 64


def questions(text):
    """Return [(distance, position)] of the records in text (bytes) that repeat a key.

    distance: bytes from the newest record with this key; text[position] is the value, which must be the same again.
    """
    newest, records = {}, []
    for match in RECORD.finditer(text):
        key, value = match.groups()
        start, newest_value = newest.get(key, (None, None))
        if newest_value == value:
            records.append((match.start() - start, match.start(2)))
        newest[key] = match.start(), value
    return records


def make_pairs(rng, documents, length):
    """Return uint8 [documents, length] of such records. rng: a numpy Generator. Raises DataError if a document would
    need more keys than there are."""
    records = -(-length // 3)
    if records > 1.8 * KEYS:
        raise DataError(f"pairs of {length} bytes need more than {KEYS} keys: at most {int(5.4 * KEYS)} bytes")
    text = np.empty((documents, records, 3), np.uint8)
    rows, new = np.arange(documents), np.zeros(documents, np.int64)  # new: how many keys a document has had
    a, b = rng.integers(0, KEYS // 2, (2, documents)) * 2 + 1
    for i in range(records):
        key = (new * a + b) % KEYS  # each key once, in an order of its own in each document
        key = ((key ^ (key >> 5)) * 2731) % KEYS
        fresh = np.stack((key // 64 + 64, key % 64 + 128, rng.integers(48, 64, documents)), 1)
        distance = np.floor(i ** rng.random(documents)).astype(np.int64) if i else new  # 1 to i, log-uniform
        repeated = (rng.random(documents) < 0.5) & (i > 0) | (new >= KEYS)
        text[:, i] = np.where(repeated[:, None], text[rows, i - distance], fresh)
        new += ~repeated
    return text.reshape(documents, -1)[:, :length]
