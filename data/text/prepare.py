"""Prepare your own text: .txt, .md or any other text files, .jsonl (one document per line), and folders of them.

    python data/text/prepare.py book.txt                              # -> data/text, then train.py --dataset=text
    python data/text/prepare.py notes/ papers.jsonl --out=data/mine --tokenizer=gpt2
    python data/text/prepare.py src/ --suffix=.c,.h --out=data/c

Documents are joined, with the end of text after each, and cut into rows of --document_length tokens (fewer if the
source is small). The trailing --val_fraction is the validation split. The files of a folder are ordered by a hash of
their names, so the split is a fair sample of them. A killed run is resumed by running the same command again.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from data.command import Parser, run
from data.corpus import find_files, prepare_files


def main(argv):
    parser = Parser(__doc__, __file__)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="text files, .jsonl files and folders")
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2"), default="bytes", help="gpt2 is downloaded once")
    parser.add_argument("--suffix", default=".txt,.md,.rst,.jsonl", help="which files of folders are taken")
    parser.add_argument("--key", default="text", help="where the text is in a line of .jsonl")
    args = parser.parse_args(argv)
    files = find_files(args.paths, args.suffix.split(","))
    prepare_files(files, args.tokenizer, args, ", ".join(args.paths), args.key)


if __name__ == "__main__":
    run(main)
