"""Files that survive a crash: what is written appears whole or not at all."""

import hashlib
import os


def write_atomically(path, data):
    """Write bytes so that a reader, or a crash at any moment, sees the old file or the new one and nothing between."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    if os.name == "posix":  # the rename itself must survive a power cut too
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sha256_of(path):
    """Hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()
