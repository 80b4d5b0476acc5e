"""Write files so that they survive a crash, and compute their checksums."""

import hashlib
import os


def write_atomically(path, data):
    """Write bytes to path so that readers, also after a crash, find either the old file or the whole new one."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    if os.name == "posix":  # flush the folder too: the rename itself must survive a power cut
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sha256_of(path):
    """Return the sha256 of a file in hexadecimal. The file is read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()
