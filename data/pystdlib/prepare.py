"""Prepare the source of the Python standard library as bytes. This needs no network: the source comes with Python.

    python data/pystdlib/prepare.py                                   # -> data/pystdlib, the default dataset
    python data/pystdlib/prepare.py --root=/usr/lib/python3 --out=data/python3      # any folder instead

Each file is a document and is stored byte for byte (the vocabulary is 256 byte values and an end of text). See
data/text/prepare.py for how rows and the validation split are cut.
"""

import os
import platform
import sys
import sysconfig

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))

from sympow.data import DataError
from sympow.data.command import Parser, run
from sympow.data.corpus import find_files, parse_suffixes, prepare_files


def main(argv):
    parser = Parser(__doc__, __file__)
    parser.add_argument("--root", help="folder to take instead of the standard library of this Python")
    parser.add_argument("--suffix", default=".py", help="which files are taken, e.g. .py,.pyi")
    args = parser.parse_args(argv)
    if args.root and not os.path.isdir(args.root):
        raise DataError(f"--root={args.root} is not a folder")
    # Installed packages lie inside the folder of the standard library but do not belong to it.
    installed = () if args.root else ("site-packages", "dist-packages")
    root = args.root or sysconfig.get_path("stdlib")
    files = find_files([root], parse_suffixes(args.suffix), ("__pycache__", *installed))
    # How this Python was built is no source. With some versions the demo's evaluations read nothing else.
    files = [file for file in files if not file.name.startswith("_sysconfigdata")]
    prepare_files(files, "bytes", args, args.root or f"standard library of Python {platform.python_version()}")


if __name__ == "__main__":
    run(main)
