"""Read the words of a command line, and write to an output that may be gone: as every program here."""

import argparse
import os
import re
import sys


class PathParser(argparse.ArgumentParser):
    """An ArgumentParser that takes ~ at the start of a path for the home folder, as a shell in ~/x, not in --out=~/x.

    Paths with commas between are taken apart. A prompt is no path.
    """

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        home = os.path.expanduser("~")
        words = [
            word if "--prompt" in (last, word[:8]) else re.sub("(^|(?<=[=,]))~(?=/)", home, word)
            for last, word in zip(["", *words], words)
        ]
        return super().parse_known_args(words, namespace)


def replace_odd_letters():
    """Let stdout write "?" for letters that it cannot, such as half a surrogate pair."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def drop_output():
    """Send the rest of stdout nowhere, so that Python's own flush at the end cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
