"""Prepare your own text: .txt, .md or any text files, .jsonl (one document a line), folders of them.

    python data/text/prepare.py book.txt                              # -> data/text, then train.py --dataset=text
    python data/text/prepare.py notes/ papers.jsonl --out=data/mine --tokenizer=gpt2
    python data/text/prepare.py src/ --suffix=.c,.h --out=data/c

Documents are joined with the end of text after each and cut into rows of --document_length tokens (less if the source
is small). The trailing --val_fraction is the validation split; files of folders are in an order that a hash of their
names gives, so it is a fair sample of them. A killed run is resumed by running it again.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from data.command import Parser, run
from data.corpus import find_files, fingerprint, plan_units
from data.shards import is_complete, write_dataset
from data.tokenizer import Tokenizer, gpt2_tokenizer


def prepare(files, tokenizer_name, args, source, key="text"):
    """Write files (data.corpus.File) as a dataset; tokenizer_name is bytes, gpt2, or gpt2-escaped as in longcrawl64."""
    arguments = {
        "tokenizer": tokenizer_name,
        "document_length": args.document_length,
        "val_fraction": args.val_fraction,
        "key": key,
        "files": fingerprint(files),
    }
    if is_complete(args.out, arguments, args.verify):
        return
    escaped = tokenizer_name == "gpt2-escaped"
    tokenizer = Tokenizer("bytes") if tokenizer_name == "bytes" else gpt2_tokenizer(json_escaped=escaped)
    units, length = plan_units(files, tokenizer, args.document_length, args.val_fraction, key)
    write_dataset(args.out, units, tokenizer, length, arguments, source, args.command)


def main(argv):
    parser = Parser(__doc__, __file__)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="text files, .jsonl files and folders")
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2"), default="bytes", help="gpt2 is downloaded once")
    parser.add_argument("--suffix", default=".txt,.md,.rst,.jsonl", help="which files of folders are taken")
    parser.add_argument("--key", default="text", help="where the text is in a line of .jsonl")
    args = parser.parse_args(argv)
    files = find_files(args.paths, args.suffix.split(","))
    prepare(files, args.tokenizer, args, ", ".join(args.paths), args.key)


if __name__ == "__main__":
    run(main)
