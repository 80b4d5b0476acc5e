"""The command line of the four prepare scripts: the options that they share, one-line errors, exit status 2.

def main(argv):
    args = Parser(__doc__, __file__).parse_args(argv)       # args.out, args.document_length, args.val_fraction, ...

if __name__ == "__main__":
    run(main)
"""

import argparse
import os
import shlex
import sys

from data import DataError


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations or a usage dump; `--val-fraction` and `--val_fraction` are the same option."""

    def __init__(self, description, script, val_fraction=0.05):
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False)
        self.folder = os.path.dirname(os.path.abspath(script))
        self.add_argument("--out", default=self.folder, help="folder to write; data/NAME makes it --dataset=NAME")
        self.add_argument("--document_length", type=int, default=65536, help="tokens in a row")
        self.add_argument("--val_fraction", type=float, default=val_fraction, help="part of the text for validation")
        self.add_argument("--verify", action="store_true", help="read all shards; damaged ones are made again")

    def parse_args(self, argv):
        """The arguments, and as args.command how to prepare this dataset again, for meta.json and error messages."""
        words = []
        for word in argv:
            key, equals, value = word.partition("=")
            if key.startswith("--"):
                key = "--" + key[2:].replace("-", "_")
            words.append(key + equals + value)
        args = super().parse_args(words)
        if args.document_length < 1:
            self.error(f"--document_length must be at least 1, got {args.document_length}")
        if not 0 < args.val_fraction <= 0.5:
            self.error(f"--val_fraction must be above 0 and at most 0.5, got {args.val_fraction}")
        again = [word for word in argv if word != "--verify"]
        args.command = shlex.join(["python", f"data/{os.path.basename(self.folder)}/prepare.py", *again])
        return args

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def run(main):
    """Call main(argv) and exit: 0 done, 2 refused or failed in one line on stderr, 130 interrupted."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the unfinished shards", file=sys.stderr)
        sys.exit(130)
    except (DataError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
