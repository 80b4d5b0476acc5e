"""Prepare any dataset of the Hugging Face hub, or local .parquet, .jsonl, .json and .csv files and folders of them.

    python data/hf/prepare.py HuggingFaceFW/fineweb-edu --config=sample-10BT            # -> data/fineweb-edu
    python data/hf/prepare.py wikimedia/wikipedia --config=20231101.en --out=data/wiki --documents=1000000
    python data/hf/prepare.py parts/*.parquet --column=content --out=data/mine --tokenizer=bytes --val_fraction=0.01

Documents are read as a stream through `datasets`: nothing is downloaded but what is taken. Each is followed by the end
of text, and every --shard_documents of them are cut into rows of --document_length tokens. One document in
1 / val_fraction goes to the validation split, or all of --val_split. A killed run is resumed by running the same
command again, and with a larger --documents the shards that are there stay.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))

from sympow.data import DataError
from sympow.data.command import Parser, run
from sympow.data.documents import BUILDERS, add_options, prepare_documents

OUT = "data/NAME"


def folder_of(paths, scripts):
    """Return the folder that a dataset gets without --out: its name, in the folder in which the scripts are."""
    name, suffix = os.path.splitext(os.path.basename(os.path.abspath(paths[0])))
    folder = os.path.join(scripts, name if suffix.lower() in BUILDERS else name + suffix)
    if len(paths) > 1 or os.path.exists(os.path.join(folder, "prepare.py")):
        raise DataError(f"give --out=data/NAME, which is not clear from {', '.join(paths[:3])}")
    return folder


def main(argv):
    parser = Parser(__doc__, __file__, val_fraction=0.0005)
    parser.add_argument("paths", nargs="+", metavar="NAME|PATH", help="dataset on the hub, or files, or folders")
    parser.set_defaults(out=OUT)
    add_options(parser)
    args = parser.parse_args(argv)
    if args.out == OUT:
        args.out = folder_of(args.paths, os.path.dirname(parser.folder))
    prepare_documents(args.paths, args)


if __name__ == "__main__":
    run(main)
