"""Begin and end a program: a command line that refuses mistakes in one line, and an output that may be gone.

parser = Parser(prog="compare.py", description=...)
parser.add_argument("--times", type=at_least_1)
...
if __name__ == "__main__":
    run_program(main)
"""

import argparse
import errno
import math
import os
import sys
from contextlib import suppress

from sympow.data.command import drop_output, open_streams


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints one line for a mistake, and takes no abbreviated options."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message):
        print(f"{self.prog}: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)


def at_least_1(text):
    """Return a text as a whole number of at least 1, for add_argument's `type`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def positive(text):
    """Return a text as a number above 0 and finite, for add_argument's `type`."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")


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


def output_file(text):
    """Return the name of a file that can be written, for add_argument's `type`."""
    try:
        check_output(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error}") from None
    return text


def run_program(main):
    """Call main(), and exit with the status that it returns or exits with.

    Ctrl-C is status 130. A closed pipe (`| head`) ends the program quietly. Any other OSError that main() lets pass,
    such as a full disk behind stdout, is one line and status 1. Letters that the terminal cannot show become "?".
    """
    open_streams()
    try:
        try:
            status = main()
        except SystemExit as stop:
            status = stop.code
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        status = drop_output()
    except OSError as error:
        drop_output()
        where = "cannot write the output: " if error.errno and not error.filename else ""
        status = f"{os.path.basename(sys.argv[0])}: {where}{error}"
    sys.exit(status)
