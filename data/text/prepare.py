"""Prepare your own text: .txt, .md or any other text files, .jsonl (one document per line), and folders of them.

    python data/text/prepare.py book.txt                              # -> data/text, then train.py --dataset=text
    python data/text/prepare.py notes/ papers.jsonl --out=data/mine --tokenizer=gpt2
    python data/text/prepare.py src/ --suffix=.c,.h --out=data/c --tokenizer=bpe:8192
    python data/text/prepare.py notes/ --out=data/mine --tokenizer=llama/tokenizer.json

Documents are joined, with the end of text after each, and cut into rows of --document_length tokens (fewer if the
source is small). The files are ordered by a hash of their names, and the last --val_fraction of their text is the
validation split: one file or line may be cut. Files with other suffixes are counted in a line. A killed run is resumed
by running the same command again.

Tokenizers: bytes; gpt2 (downloaded once); bpe:SIZE, a byte-level BPE of SIZE ids that is trained on the training split;
or the tokenizer.json of a model, as Hugging Face's tokenizers writes it. The last two need `pip install tokenizers`.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))

from sympow.data.command import Parser, run
from sympow.data.corpus import find_files, parse_suffixes, prepare_files


def main(argv):
    parser = Parser(__doc__, __file__)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="text files, .jsonl files and folders")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, gpt2, bpe:SIZE or PATH/tokenizer.json")
    parser.add_argument("--suffix", default=".txt,.md,.rst,.jsonl", help="which files of folders are taken")
    parser.add_argument("--key", default="text", help="where the text is in a line of .jsonl")
    args = parser.parse_args(argv)
    files = find_files(args.paths, parse_suffixes(args.suffix))
    prepare_files(files, args.tokenizer, args, ", ".join(args.paths), args.key)


if __name__ == "__main__":
    run(main)
