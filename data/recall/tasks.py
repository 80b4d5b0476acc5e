"""Write texts with questions that a part far before answers, and find the questions in a text again.

    rows = make_pairs(rng, documents=64, length=1024)                 # key and value, again and again: 64 x 1024 bytes
    rows = make_needles(rng, haystack)                      # notes in other text, haystack, asked for later
    for question in questions(rows[0].tobytes(), "pairs"): ...        # (distance in bytes, begin and end of the value)

In `pairs` a record is a key of two letters and a value of one. Half of the records repeat an earlier one, at a distance
that is uniform on a logarithmic axis. A document holds ever more pairs, one for six of its bytes. In `needle` a record
is "[[key: 1234]]" in place of 13 bytes of the text, at most eight of them in a document of any length, each twice. So
the first asks how much a state holds, the second how long. A record is a question if its key has stood before: the
value of the newest record of this key must come again.
"""

import re

import numpy as np

from .. import DataError

RECORD = {
    "pairs": re.compile(rb"([@-\x7f][\x80-\xbf])([0-?])"),
    "needle": re.compile(rb"\[\[([a-z]{3}): (\d{4})\]\]"),
}
CHANCE = {"pairs": 1 / 16, "needle": 1e-4}  # of a guess among all values
KEYS = 64 * 64  # of pairs: two letters of 64
SLOT = 16  # bytes; a needle takes 13 of them
NEEDLES = 8  # in a document


def questions(text, task):
    """Return [(distance, begin, end)] of the records in text (bytes) that repeat a key.

    distance: bytes from the newest record with this key; text[begin:end] is the value, which must be the same again.
    """
    newest, records = {}, []
    for match in RECORD[task].finditer(text):
        key, value = match.groups()
        position, newest_value = newest.get(key, (None, None))
        if newest_value == value:
            records.append((match.start() - position, *match.span(2)))
        newest[key] = match.start(), value
    return records


def make_pairs(rng, documents, length):
    """Return uint8 [documents, length] of the task `pairs`. rng: a numpy Generator. Raises DataError if a document
    would need more keys than there are."""
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


def make_needles(rng, haystack):
    """Return uint8 [documents, length] of the task `needle`: a copy of haystack [documents, length] with records."""
    text, documents, slots = haystack.copy(), len(haystack), haystack.shape[1] // SLOT
    rows, used = np.arange(documents), np.zeros((documents, slots), bool)
    for i in range(NEEDLES):
        distance = np.floor((slots - 1) ** rng.random(documents)).astype(np.int64)
        first = rng.integers(0, slots - distance)
        free = ~(used[rows, first] | used[rows, first + distance])
        key, value = rng.integers(0, 26**2, documents), rng.integers(0, 10**4, documents)
        record = np.tile(np.frombuffer(b"[[a**: ****]]", np.uint8), (documents, 1))
        record[:, 2] += i
        record[:, 3:5] = np.stack((key // 26, key % 26), 1) + ord("a")
        record[:, 7:11] = value[:, None] // [1000, 100, 10, 1] % 10 + ord("0")
        for slot in (first, first + distance):
            used[rows, slot] |= free
            columns = slot[:, None] * SLOT + np.arange(record.shape[1])
            text[rows[:, None], columns] = np.where(free[:, None], record, text[rows[:, None], columns])
    return text
