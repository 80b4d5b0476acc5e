"""Begin and end a program: a command line that refuses mistakes in one line, and an output that may be gone.

parser = Parser(__doc__, prog="compare.py")
parser.add_numbers(times=(1, "how often"))
...
if __name__ == "__main__":
    run_program(main)
"""

import argparse
import os
import socket
import sys
from contextlib import suppress
from typing import NoReturn

from ..data.terminal import PathParser, drop_output, replace_odd_letters


def refuse(message, every_rank=False) -> NoReturn:
    """Print one line to stderr and exit with status 2.

    Among several ranks only the first of each node prints it, or with every_rank each rank that refuses.
    """
    if every_rank or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{process_name()}: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def process_name():
    """Return the name of the program, and among several ranks also the rank and its host: "train.py (rank 3 on n7)".

    Programs of bench/ and experiments/ are modules: "bench.train".
    """
    (folder, name), rank = os.path.split(sys.argv[0]), os.environ.get("RANK")
    room = os.path.basename(folder)
    name = f"{room}.{name.removesuffix('.py')}" if room in ("bench", "experiments") else name
    several = rank and os.environ.get("WORLD_SIZE", "1") != "1"
    return f"{name} (rank {rank} on {socket.gethostname()})" if several else name


class Parser(PathParser):
    """An ArgumentParser that prints one line for a mistake, and takes no abbreviated options."""

    def __init__(self, docstring, **kwargs):
        """Show the first line of the program's docstring in --help; `python -OO` has None in its place."""
        super().__init__(description=(docstring or "").partition("\n")[0], allow_abbrev=False, **kwargs)

    def add_numbers(self, **options):
        """Add options for whole numbers of at least 1: name=(default, help). A list as default takes several."""
        for name, (default, text) in options.items():
            several = "+" if isinstance(default, list) else None
            self.add_argument(f"--{name}", type=at_least_1, nargs=several, default=default, help=text)

    def error(self, message):
        refuse(message)


def at_least_1(text):
    """Return a text as a whole number of at least 1, for add_argument's `type`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def check_output(path):
    """Raise OSError if a file cannot be written at this path, as far as that can be seen before it is written.

    Missing folders count as writable if the one that they would be made in is.
    """
    if not path:
        raise OSError("its name is empty")
    with suppress(FileNotFoundError):  # other errors, such as a name that is too long, are raised
        os.stat(path)
        if not os.path.isfile(path):
            raise OSError("it is no file")
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"{folder} is no folder that can be written")


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
    replace_odd_letters()
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
