"""Prepare OpenWebText: 8 million documents of text from the web, about 9 billion GPT-2 tokens (18 GB).

    python data/openwebtext/prepare.py
    python data/openwebtext/prepare.py --source=part.parquet          # a local .parquet or .jsonl with a column "text"

This is data/hf/prepare.py with its own --out and --source, and says there how documents become rows. One document in
2,000 goes to the validation split (0.05%, as in nanoGPT).
"""

import os
import sys

sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))

from sympow.data.command import Parser, run
from sympow.data.documents import add_options, prepare_documents

REPOSITORY = "Skylion007/openwebtext"  # parquet; the script-based "openwebtext" is no longer run by `datasets`


def main(argv):
    parser = Parser(__doc__, __file__, val_fraction=0.0005)
    parser.add_argument("--source", default=REPOSITORY, help="Hugging Face dataset, or a local .parquet or .jsonl")
    add_options(parser)
    args = parser.parse_args(argv)
    prepare_documents([args.source], args)


if __name__ == "__main__":
    run(main)
