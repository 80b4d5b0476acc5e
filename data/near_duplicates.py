"""Find files that mostly repeat earlier ones: copies, vendored packages, other versions of one header.

    repeated = repeated_shares(texts)            # of each text, the share of its shingles that stand in an earlier text

A shingle is five lines behind one another, without their white space and without lines of fewer than four letters.
"""

LINES = 5  # in a shingle
SHORTEST = 4  # letters of a line that counts: a line of "}" or "else" is in every file
WHITE = bytes(byte for byte in range(33) if byte != 10)
END = (LINES - 1) * [b""]  # lines behind each text: one of fewer than LINES has shingles too


def repeated_shares(texts):
    """Return [n]: the share of the shingles of each of n texts (an iterable of bytes) that an earlier one has.

    A text without a line that counts has 0. Takes about 70 bytes of memory for a line of text, a hash of its shingle.
    """
    known, shares = set(), []
    for text in texts:
        lines = [line for line in text.translate(None, WHITE).split(b"\n") if len(line) >= SHORTEST] + END
        shingles = [hash(tuple(lines[i : i + LINES])) for i in range(len(lines) - len(END))]
        shares.append(sum(shingle in known for shingle in shingles) / max(1, len(shingles)))
        known.update(shingles)
    return shares
