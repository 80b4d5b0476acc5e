"""Write texts whose answers stand far before them, and find the questions in a text again.

    rows = make_pairs(rng, documents=64, length=1024)                 # key and value, again and again: 64 x 1024 bytes
    rows = make_needles(rng, haystack, length=1024)         # notes in other text, haystack, asked for later
    for question in questions(rows[0].tobytes(), "pairs"): ...        # (distance in bytes, begin and end of the value)

In `pairs` a record is two letters of a key and one of its value, and half of the records are earlier ones again: which
one, by its distance, uniform on a logarithmic axis. A document holds ever more pairs, one for six of its bytes. In
`needle` a record is "[[key: 1234]]" in place of 13 bytes of the text, at most eight of them in a document of any
length, each twice. So the first asks how much a state holds, the second how long it holds it. A record whose key has
stood before is a question: its distance is that to the newest record of this key, whose value must come again.
"""

import re

import numpy as np

RECORD = {"pairs": re.compile(rb"([@-\x7f][\x80-\xbf])([0-?])"), "needle": re.compile(rb"\[\[([a-z]{3}): (\d{4})\]\]")}
CHANCE = {"pairs": 1 / 16, "needle": 1e-4}  # of a guess among all values
KEYS = 64 * 64  # of pairs: two letters of 64
SLOT = 16  # bytes, of which a needle takes 13
NEEDLES = 8  # in a document


def questions(text, task):
    """Return [(distance, begin, end)] of the records in text (bytes) whose keys stood in it before.

    distance: bytes from the newest record with this key; text[begin:end] is the value, which must be the same again.
    """
    newest, found = {}, []
    for match in RECORD[task].finditer(text):
        key, value = match.groups()
        at, before = newest.get(key, (None, None))
        if before == value:
            found.append((match.start() - at, *match.span(2)))
        newest[key] = match.start(), value
    return found


def make_pairs(rng, documents, length):
    """Return uint8 [documents, length] of the task `pairs`. rng: a numpy Generator. Raises ValueError if a document
    would need more keys than there are."""
    records = -(-length // 3)
    if records > 1.8 * KEYS:
        raise ValueError(f"pairs of {length} bytes need more than {KEYS} keys: at most {int(5.4 * KEYS)} bytes")
    text = np.empty((documents, records, 3), np.uint8)
    rows, new = np.arange(documents), np.zeros(documents, np.int64)  # new: how many keys a document has had
    a, b = rng.integers(0, KEYS // 2, (2, documents)) * 2 + 1
    for i in range(records):
        key = (new * a + b) % KEYS  # each key once, in an order of its own in each document
        key = ((key ^ (key >> 5)) * 2731) % KEYS
        fresh = np.stack((key // 64 + 64, key % 64 + 128, rng.integers(48, 64, documents)), 1)
        distance = np.floor(i ** rng.random(documents)).astype(np.int64) if i else new  # 1 to i, log-uniform
        again = (rng.random(documents) < 0.5) & (i > 0) | (new >= KEYS)
        text[:, i] = np.where(again[:, None], text[rows, i - distance], fresh)
        new += ~again
    return text.reshape(documents, -1)[:, :length]


def make_needles(rng, haystack, length):
    """Return uint8 [documents, length] of the task `needle` out of haystack, uint8 [documents, length], as it stays."""
    text, documents, slots = haystack.copy(), len(haystack), length // SLOT
    rows, used = np.arange(documents), np.zeros((documents, slots), bool)
    for i in range(NEEDLES):
        distance = np.floor((slots - 1) ** rng.random(documents)).astype(np.int64)
        first = rng.integers(0, slots - distance)
        free = ~(used[rows, first] | used[rows, first + distance])
        key, value = rng.integers(0, 26**2, documents), rng.integers(0, 10**4, documents)
        letters = [np.full(documents, i) + 97, key // 26 + 97, key % 26 + 97]
        digits = [value // 10**n % 10 + 48 for n in (3, 2, 1, 0)]
        mark = lambda letter: [np.full(documents, ord(letter))]
        record = np.stack(2 * mark("[") + letters + mark(":") + mark(" ") + digits + 2 * mark("]"), 1).astype(np.uint8)
        for slot in (first, first + distance):
            used[rows, slot] |= free
            columns = slot[:, None] * SLOT + np.arange(record.shape[1])
            text[rows[:, None], columns] = np.where(free[:, None], record, text[rows[:, None], columns])
    return text
