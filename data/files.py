"""Write files so that they survive a crash, read JSON that may be damaged, and compute checksums."""

import hashlib
import json
import os

from . import DataError


def write_atomically(path, data):
    """Write bytes to path so that readers, also after a crash, find either the old file or the whole new one.

    If writing fails (a full disk, a limit on file sizes), nothing is left beside the old file.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as error:
        remove(temporary)
        raise OSError(error.errno, error.strerror, path) from error  # a full disk has no name of its own
    except BaseException:
        remove(temporary)
        raise
    flush_folder(os.path.dirname(os.path.abspath(path)))


def flush_folder(path):
    """Write a folder's names to disk: a rename must survive a power cut, too."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove(path):
    """Delete a file if it is there."""
    try:
        os.remove(path)
    except FileNotFoundError:
        pass


def read_json(path):
    """Return the JSON object of a file as a dict.

    Raises FileNotFoundError if there is no file, and DataError of one line if it cannot be read or is no JSON object.
    """
    try:
        with open(path, encoding="utf-8") as f:
            found = json.load(f)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {str(error)[:100]})") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged (it holds no JSON object)")
    return found


def sha256_of(path):
    """Return the sha256 of a file in hexadecimal. The file is read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()
