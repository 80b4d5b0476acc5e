"""Write files whole or not at all, read JSON that may be damaged, and compute checksums.

with whole_file("book.state") as temporary:
    write(temporary)                        # renamed to book.state at the end, removed if anything fails
"""

import fcntl
import hashlib
import json
import os
import secrets
from contextlib import contextmanager, suppress

from . import DataError, describe_error


@contextmanager
def whole_file(path):
    """Yield the path of a temporary file in the same folder, which is made if need be.

    At the end it is flushed to disk and renamed to `path`, so that readers, also after a crash, find either the old
    file or the whole new one. If an error or an interrupt comes first, it is removed.
    """
    target = os.path.realpath(path)  # a link stays a link
    folder = os.path.dirname(target)
    # Short, so that it fits wherever the name does; random, since processes in containers have equal numbers.
    temporary = os.path.join(folder, f".{secrets.token_hex(6)}.tmp")
    os.makedirs(folder, exist_ok=True)
    try:
        yield temporary
        flush_to_disk(temporary)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.remove(temporary)
        raise
    flush_to_disk(folder)


def write_atomically(path, data):
    """Write bytes to path, whole or not at all."""
    try:
        with whole_file(path) as temporary, open(temporary, "wb") as f:
            f.write(data)
    except OSError as error:  # a full disk has no name of its own
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path, value):
    """Write a value as JSON, whole or not at all."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def flush_to_disk(path):
    """Block until a file, or the names in a folder, are on disk: a rename must survive a power cut, too."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_file(file):
    """Lock a file while it is open; return False if another process has it, and True where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def remove(path):
    """Delete a file if it is there."""
    with suppress(FileNotFoundError):
        os.remove(path)


def read_json(path):
    """Return the JSON object of a file as a dict.

    Raises FileNotFoundError if there is no file, and DataError of one line if it cannot be read or is no JSON object.
    """
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({describe_error(error)})") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged (it holds no JSON object)")
    return value


def sha256_of(path):
    """Return the sha256 of a file in hexadecimal. The file is read in pieces."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
