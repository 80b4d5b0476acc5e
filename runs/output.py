"""Write output files: refuse those that cannot be written before work starts, and write each whole or not at all.

check_output("book.state")                  # raises OSError with the reason
with whole_file("book.state") as temporary:
    write(temporary)                        # renamed to book.state at the end, removed if anything fails
"""

import errno
import json
import os
from contextlib import contextmanager, suppress


def check_output(path):
    """Raise OSError if a file cannot be written at this path, as far as that can be seen before it is written.

    Missing folders count as writable if the one that they would be made in is.
    """
    if not path:
        raise OSError("its name is empty")
    with suppress(FileNotFoundError):  # any other error, such as ENAMETOOLONG, means that it cannot be written either
        os.stat(path)
        if not os.path.isfile(path):  # a device would be replaced by a file of its name
            raise OSError(f"it is a {'folder' if os.path.isdir(path) else 'device or a pipe'}")
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)


def write_json(path, value):
    """Write a value as JSON, whole or not at all."""
    with whole_file(path) as temporary, open(temporary, "w") as f:
        f.write(json.dumps(value, indent=1) + "\n")


@contextmanager
def whole_file(path):
    """Yield the path of a temporary file in the same folder, which is made if need be.

    At the end it is flushed to disk and renamed to `path`; if an error or a signal comes first, it is removed, and so
    are the folders that were made.
    """
    path = os.path.realpath(path)  # a link stays a link
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, f".{os.getpid()}.tmp")  # short, so that any name fits that the disk takes
    made = []
    while not os.path.isdir(folder):
        made.append(folder)
        folder = os.path.dirname(folder)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        yield temporary
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.remove(temporary)
        with suppress(OSError):
            for folder in made:
                os.rmdir(folder)
        raise
