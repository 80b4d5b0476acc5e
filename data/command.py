"""Parse the command line of a prepare script: common options, errors of one line, exit status 2.

def main(argv):
    args = Parser(__doc__, __file__).parse_args(argv)       # args.out, args.document_length, args.val_fraction, ...

if __name__ == "__main__":
    run(main)
"""

import argparse
import os
import shlex
import sys

from . import DataError
from .terminal import PathParser, drop_output, replace_odd_letters


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


class Parser(PathParser):
    """An ArgumentParser with the options of all prepare scripts, without abbreviations and without a usage dump."""

    def __init__(self, description, script, val_fraction=0.05):
        """Add the common options. script: the path of the prepare script; its folder is the default of --out."""
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False)
        self.folder = os.path.dirname(os.path.abspath(script))
        self.add_argument("--out", default=self.folder, help="folder to write; data/NAME makes it --dataset=NAME")
        self.add_argument("--document_length", type=int, default=65536, help="tokens in a row")
        self.add_argument("--val_fraction", type=float, default=val_fraction, help="part of the text for validation")
        self.add_argument("--verify", action="store_true", help="read all shards; damaged ones are made again")

    def parse_args(self, argv):
        """Parse argv and check the common options.

        The result also has args.command, the command that prepares this dataset again, for meta.json and error
        messages.
        """
        args = super().parse_args(argv)
        if args.document_length < 1:
            self.error(f"--document_length must be at least 1, got {args.document_length}")
        if not args.out:
            self.error("--out must be a folder, got an empty name")
        if not 0 < args.val_fraction <= 0.5:
            self.error(f"--val_fraction must be above 0 and at most 0.5, got {args.val_fraction}")
        options = [word for word in argv if word != "--verify"]
        args.command = shlex.join(["python", f"data/{os.path.basename(self.folder)}/prepare.py", *options])
        return args

    def error(self, message):
        """Exit with status 2 and one line on stderr."""
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def run(main):
    """Call main(argv). Exit with status 2 after one line on stderr if it was refused or failed, with 130 if it was
    interrupted."""
    replace_odd_letters()
    try:
        main(sys.argv[1:])
        sys.stdout.flush()  # a full disk is noticed here and not when Python ends
    except KeyboardInterrupt:
        _end("interrupted; the same command resumes with the unfinished shards", 130)
    except (DataError, OSError, MemoryError, RecursionError) as error:
        _end("error: " + " ".join((str(error) or type(error).__name__).split()), 2)


def _end(line, status):
    """Print a line on stderr and exit. The rest of stdout is dropped if it cannot be written (`| head`)."""
    print(line, file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()
    sys.exit(status)
