"""Prepare source code, or documentation, by project: whole projects are held out, and repeated files are left out.

    python data/source/prepare.py --root=/usr/lib/python3/site-packages                  # -> data/source, as bytes
    python data/source/prepare.py --root ~/src /usr/include --suffix=.c,.h,.py --out=data/code
    python data/source/prepare.py --root ~/src --suffix=.rst,.md,.txt --out=data/prose   # English
    python data/source/prepare.py --root ~/src --tokenizer=bpe:8192 --out=data/source_bpe

Every folder in a root, and every file that lies in the root itself, is a project; versions of a project (zlib-1.2,
zlib-1.3) are one. Its files follow each other in the order of their paths, without anything between; an end of text
stands between projects. Files above 65,536 bytes, which are tables and amalgamations, are left out.

Projects are ordered by a hash of their names, with the large ones in front. A file is dropped if more than half of its
shingles (five lines) stand in an earlier file. So there are no copies within training, and validation has no vendored
copies and no other versions of a file of training. The last projects, as many as give --val_fraction of the text and at
least 2 M tokens where the corpus has them, are the validation split, the small ones first. A row of it is one
project's; in training, rows are cut from the whole text. meta.json counts files, projects and what was dropped, and
names what is held out.

--tokenizer=bpe:SIZE trains a tokenizer on the training split. Every file is encoded by itself.
"""

import functools
import hashlib
import os
import re
import sys
from collections import Counter

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))

from sympow.data import DataError, batches
from sympow.data.command import Parser, run
from sympow.data.corpus import (
    BYTES_PER_TOKEN,
    SAMPLE,
    UNIT,
    cut_rows,
    find_files,
    fingerprint,
    parse_suffixes,
    row_length,
)
from sympow.data.near_duplicates import repeated_shares
from sympow.data.shards import Unit, is_complete, write_dataset
from sympow.data.split import join_documents, open_file
from sympow.data.vocabulary import named_tokenizer, train_tokenizer, trained_size

LARGE = 65536  # bytes of a file that is a table or an amalgamation
ENOUGH = 2_000_000  # tokens of validation, where the corpus has ten times as many
REPEATED = 0.5  # share of shingles that earlier files have, above which a file is dropped
NO_PROJECTS = (".dist-info", ".egg-info", ".data", ".libs")  # what pip puts beside packages


def main(argv):
    parser = Parser(__doc__, __file__, val_fraction=0.02)
    parser.add_argument("--root", nargs="+", required=True, metavar="DIR", help="folders of projects")
    parser.add_argument("--suffix", default=".py,.pyi,.c,.h,.cc,.cpp,.hpp,.cu,.cuh", help="which files are taken")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, gpt2, bpe:SIZE or PATH/tokenizer.json")
    args = parser.parse_args(argv)
    tokenizer = named_tokenizer(args.tokenizer)
    for root in args.root:
        if not os.path.isdir(root):
            raise DataError(f"--root={root} is not a folder")
    files = find_files(args.root, parse_suffixes(args.suffix))
    arguments = {
        "document_length": args.document_length,
        "val_fraction": args.val_fraction,
        "fingerprint": fingerprint(files),
    }
    if args.tokenizer != "bytes":
        arguments["tokenizer"] = tokenizer.fingerprint() if tokenizer else args.tokenizer
    if is_complete(args.out, arguments, args.verify):
        return
    projects, dropped = group_files(files)
    token_size = 1 if args.tokenizer == "bytes" else BYTES_PER_TOKEN
    projects = order_projects(projects, args.val_fraction, token_size)
    projects, copies = drop_repeated(projects)
    sizes = count_tokens(projects, token_size)
    length = row_length(sum(sizes.values()), args.document_length)
    train, val = split_projects(sizes, args.val_fraction, length)
    if tokenizer is None:
        texts = sample_texts([file for name in train for file in projects[name]])
        tokenizer = train_tokenizer(texts, trained_size(args.tokenizer))
    units = train_units([projects[name] for name in train], tokenizer, length)
    held_out = {}
    for name in val:
        parts = [(file, False) for file in projects[name]]
        rows = _rows(parts, tokenizer, length)
        held_out[name] = len(rows)
        units.append(Unit("val", lambda rows=rows: rows))
    facts = {
        "files": sum(len(projects[name]) for name in (*train, *val)),
        "projects": len(train) + len(val),
        "dropped": dict(dropped | copies),
        "held_out": held_out,
    }
    print(f"{facts['files']:,} files of {len(sizes):,} projects, {len(val)} held out; dropped: {facts['dropped']}")
    if length < args.document_length:
        print(f"rows of {length} tokens instead of {args.document_length}: there are {sum(sizes.values()):,} tokens")
    source = f"{args.suffix} in {', '.join(args.root)}, by project"
    write_dataset(args.out, units, tokenizer, length, arguments, source, args.command, facts)


def group_files(files):
    """Return ({project: its Files in the order of their paths}, Counter of the files that are left out)."""
    projects, dropped = {}, Counter()
    for file in sorted(files):
        top = file.name.partition("/")[0]
        if top.endswith(NO_PROJECTS):
            dropped["of no project"] += 1
        elif file.size > LARGE:
            dropped["above 65,536 bytes"] += 1
        else:
            projects.setdefault(project_name(top, "/" not in file.name), []).append(file)
    return {name: sorted(files, key=lambda file: file.name) for name, files in projects.items()}, dropped


def project_name(top, is_file):
    """Return the name of a folder or file of a root without suffix and version: zlib for zlib-1.3 and zlib.h."""
    name = os.path.splitext(top)[0] if is_file else top
    return re.sub(r"[-_]v?\d[\w.+-]*$", "", name).lower() or name


def enough(total, val_fraction):
    """Return how many of `total` tokens the validation split needs."""
    return max(val_fraction * total, min(ENOUGH, total / 10))


def count_tokens(projects, token_size):
    """Return {project: its tokens}. token_size: bytes that are a token, about."""
    return {name: sum(file.size for file in files) // token_size for name, files in projects.items()}


def order_projects(projects, val_fraction, token_size):
    """Return the projects in the order in which they are read: the large ones, then by a hash of their names."""
    sizes = count_tokens(projects, token_size)
    limit = enough(sum(sizes.values()), val_fraction)

    def place(name):
        return sizes[name] <= limit, hashlib.sha256(name.encode("utf-8", "replace")).digest()

    return {name: projects[name] for name in sorted(projects, key=place)}


def drop_repeated(projects):
    """Return ({project: Files} of the files that stay, Counter of the files that are dropped)."""
    files = [(name, file) for name, members in projects.items() for file in members]
    shares, remaining, dropped = repeated_shares(read_file(file) for _, file in files), {}, Counter()
    for (name, file), share in zip(files, shares):
        if share > REPEATED:
            dropped["mostly repeated"] += 1
        else:
            remaining.setdefault(name, []).append(file)
    return remaining, dropped


def split_projects(sizes, val_fraction, length):
    """Return the names of (training, validation): the last projects that have enough whole rows are held out.

    The small ones come first, so that an evaluation, which reads the beginning of the split, reads many of them.
    sizes: {project: its tokens}.
    """
    train, val, missing = list(sizes), [], enough(sum(sizes.values()), val_fraction)
    while len(train) > 1 and missing > 0:
        name = train.pop()
        rows = sizes[name] // length
        missing -= rows * length
        val += [name] if rows else []  # a project that fills no row is on neither side
    if not val:
        raise DataError(f"{len(sizes)} projects cannot be split: give more folders, or a smaller --document_length")
    return train, sorted(val, key=sizes.get)


def sample_texts(files):
    """Yield the texts of about SAMPLE bytes of Files, evenly spaced."""
    step = -(-sum(file.size for file in files) // SAMPLE)
    for file in files[::step]:
        yield read_file(file).decode("utf-8", "replace")


def train_units(projects, tokenizer, length):
    """Return the Units of training: the files of all projects behind one another, in parts of about UNIT bytes."""
    files = [(file, file == files[-1]) for files in projects for file in files]
    parts = batches(files, UNIT, lambda entry: entry[0].size)
    return [Unit("train", functools.partial(_rows, part, tokenizer, length)) for part in parts]


def _rows(parts, tokenizer, length):
    """Return rows [n, length] of the files [(File, True if an end of text follows)]."""
    texts = [read_file(file) for file, _ in parts]
    if tokenizer.kind == "bytes":
        ids = map(tokenizer.encode_bytes, texts)
    else:
        ids = tokenizer.encode_batch([text.decode("utf-8", "replace") for text in texts])
    return cut_rows(join_documents(ids, [is_last for _, is_last in parts], tokenizer), length)


def read_file(file):
    """Return the bytes of a File. Raises DataError if it is not the one that was found any more."""
    with open_file(file) as f:
        return f.read()


if __name__ == "__main__":
    run(main)
