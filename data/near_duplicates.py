"""Find files that mostly repeat earlier ones: copies, vendored packages, other versions of one header.

    repeated = repeated_shares(texts)            # of each text, the share of its shingles that stand in an earlier text

A shingle is five lines behind one another, without their white space and without lines of fewer than four letters, as a
hash of 64 bits. All is done on whole arrays, some 4 MB of text at a time, so one core reads tens of megabytes a second.
"""

import numpy as np

from . import batches

LINES = 5  # in a shingle
SHORTEST = 4  # letters of a line that counts: a line of "}" or "else" is in every file
BATCH = 4 << 20  # bytes of text that are hashed together
MIXER = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
END = b"\n" + (LINES - 1) * b"\xff\xfe\xff\xfe\n"  # lines behind each text: one of fewer than LINES has shingles too


def repeated_shares(texts):
    """Return float64 [n]: the share of the shingles of each of n texts (an iterable of bytes) that an earlier one has.

    A text without a line that counts has 0. Takes about 70 bytes of memory for a line of text.
    """
    parts, count = [(np.zeros(0, np.uint64), np.zeros(0, np.int32))], 0
    for batch in batches(texts, BATCH):
        hashes, owners = shingles(batch)
        parts.append((hashes, (owners + count).astype(np.int32)))
        count += len(batch)
    hashes, owners = map(np.concatenate, zip(*parts))
    _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
    earlier = owners[first[group]] < owners  # owners are in order, so the first text that has a hash stands first
    repeated = np.bincount(owners, weights=earlier, minlength=count)
    return repeated / np.maximum(np.bincount(owners, minlength=count), 1)


def shingles(texts):
    """Return (hashes uint64 [m], the number of the text of each [m]) of the shingles of a list of bytes."""
    raw = np.frombuffer(b"".join(part + END for part in texts), dtype=np.uint8)
    text_ends = np.cumsum([len(part) + len(END) for part in texts])
    letters = raw > 32
    ends = np.flatnonzero(raw == 10)  # of lines
    stops = np.cumsum(letters, dtype=np.int64)[ends]  # how many letters there are up to the end of each line
    starts = np.concatenate(([0], stops[:-1]))
    text = raw[letters]
    # The hash of a line is the sum of its letters times powers of MIXER, modulo 2^64: a difference of running sums.
    powers = _powers(MIXER, len(text) + 1)
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum((text.astype(np.uint64) + 1) * powers[:-1])))
    lines = (sums[stops] - sums[starts]) * _powers(pow(MIXER, -1, 1 << 64), len(text) + 1)[starts]
    counts = stops - starts >= SHORTEST
    lines, owner = lines[counts], np.searchsorted(text_ends, ends[counts], side="right")
    lines ^= lines >> np.uint64(29)
    n = max(0, len(lines) - LINES + 1)
    hashes = np.zeros(n, np.uint64)
    for i in range(LINES):
        hashes = (hashes ^ lines[i : i + n]) * np.uint64(MIXER)
        hashes ^= hashes >> np.uint64(32)
    inside = owner[:n] == owner[LINES - 1 : LINES - 1 + n]
    return hashes[inside], owner[:n][inside]


def _powers(base, count):
    """Return base^0, ..., base^(count - 1) modulo 2^64 as uint64."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)
