"""Prepare what Hugging Face's `datasets` can read as a stream: the part of data/hf/prepare.py that reads.

    prepare_documents(["HuggingFaceFW/fineweb-edu"], args)         # args as `add_options` and data.command.Parser give

A document's number is its place in its split. Each shard is made of documents that follow each other, so it depends on
their numbers alone. A stream is read once, from its start: after a kill, and for a dataset that grows, the documents of
shards that are there are read again, but not tokenized again. Nothing is downloaded but what is read.
"""

import glob
import logging
import os
import re
import sys
from functools import partial
from typing import NamedTuple

from . import DataError, describe_error, need
from .corpus import cut_rows
from .meta import hash_json
from .shards import Unit, begun_arguments, is_complete, write_dataset
from .split import join_documents
from .vocabulary import named_tokenizer

DOCUMENTS = 8192  # per shard: about 40 MB of text from the web
BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}  # of `datasets`, by suffix
ROWS = 1000  # of parquet in memory; `datasets` would take as many as the first group has, which may be none
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
OPTIONS = "document_length val_fraction documents split val_split config column shard_documents revision".split()


class Source(NamedTuple):
    """Names what is read. options: arguments of datasets.load_dataset; files: a hash over local files, or None."""

    name: str
    options: dict
    files: str | None


def add_options(parser):
    """Add the options of a script that reads documents to its Parser."""
    add = parser.add_argument
    add("--documents", type=int, help="documents to take (unset: all)")
    add("--split", default="train", help="split that is read")
    add("--val_split", help="split for validation (unset: one document in 1 / val_fraction of --split)")
    add("--config", help="configuration of the dataset, such as sample-10BT")
    add("--column", default="text", help="column that holds the text")
    add("--revision", help="commit or branch on the hub (unset: the newest when a dataset is begun)")
    add("--tokenizer", default="gpt2", help="bytes, gpt2 or PATH/tokenizer.json")
    add("--shard_documents", type=int, default=DOCUMENTS, help="documents in a shard, all of them in memory at once")


def prepare_documents(paths, args):
    """Write the dataset of a name on the hub, or of local files or a folder, to args.out, unless it is complete there.

    Raises DataError of one line if it cannot be had: no such dataset, configuration, split or column, no network, no
    documents, no text.
    """
    if args.documents is not None and args.documents < 2:
        raise DataError(f"--documents must be at least 2, one of them for validation, got {args.documents}")
    if args.shard_documents < 1:
        raise DataError(f"--shard_documents must be at least 1, got {args.shard_documents}")
    if args.tokenizer.startswith("bpe:"):
        raise DataError("--tokenizer must be bytes, gpt2 or PATH/tokenizer.json: bpe:SIZE needs data/text/prepare.py")
    source, tokenizer = find_source(paths), named_tokenizer(args.tokenizer)
    if source.files is None:
        args.revision = args.revision or _revision(source, args.out)
    arguments = {
        "source": source.name,
        "files": source.files,
        "tokenizer": tokenizer.fingerprint(),
        **{name: getattr(args, name) for name in OPTIONS},
    }
    if is_complete(args.out, arguments, args.verify):
        return
    every = None if args.val_split else round(1 / args.val_fraction)
    key = [source.name, source.files, args.split, args.val_split, args.config, args.column, args.revision, every]
    train = Documents(source, args.split, args, every, args.documents)
    val = Documents(source, args.val_split, args) if args.val_split else train
    units = plan(train, val, key, tokenizer, args)
    write_dataset(args.out, units, tokenizer, args.document_length, arguments, source.name, args.command)


def find_source(paths):
    """Return the Source that paths stand for: one folder, files of one kind, or the name of a dataset on the hub."""
    first = paths[0]
    on_hub = HUB_NAME.fullmatch(first) and _suffix(first) not in BUILDERS and not os.path.lexists(first)
    if len(paths) == 1 and on_hub:
        return Source(first, {"path": first}, None)
    paths = files = [os.path.abspath(path) for path in paths]
    options = {"path": BUILDERS.get(_suffix(first)), "data_files": paths}
    if len(paths) == 1 and os.path.isdir(first):  # `datasets` finds splits and configurations in it
        files = glob.glob(os.path.join(glob.escape(paths[0]), "**"), recursive=True)
        files = sorted(file for file in files if _suffix(file) in BUILDERS)
        options = {"path": paths[0]}
    kinds = {BUILDERS.get(_suffix(file)) for file in files}
    if len(kinds) != 1 or None in kinds or not all(map(os.path.exists, files)):
        raise DataError(
            f"{', '.join(paths)}: give files of one kind ({', '.join(BUILDERS)}), or one folder of them, that are "
            "there; data/text/prepare.py takes other text"
        )
    if kinds == {"parquet"}:
        options["batch_size"] = ROWS
    identity = [[file, (status := os.stat(file)).st_size, status.st_mtime_ns] for file in files]
    return Source(", ".join(paths), options, hash_json(identity))


def _suffix(path):
    return os.path.splitext(path)[1].lower()


def _revision(source, folder):
    """Return the commit on the hub to read: that with which the dataset in the folder was begun, or the newest."""
    for arguments in begun_arguments(folder):
        if arguments.get("source") == source.name and arguments.get("revision"):
            return arguments["revision"]
    hub = need("huggingface_hub")
    try:
        return hub.HfApi().dataset_info(source.name).sha
    except Exception as error:
        raise _cannot_load(source, error) from error


def _cannot_load(source, error):
    """Return the DataError for whatever `datasets` or the hub raised, which is of many kinds."""
    local = "give --split, --config, ... that it has, or .jsonl of any columns to data/text/prepare.py"
    remedy = local if source.files else "go online, or give local files"
    return DataError(f"cannot load {source.name} ({describe_error(error)}): {remedy}")


def open_stream(source, split, args):
    """Return the datasets.IterableDataset of a split. Raises DataError if it cannot be opened.

    In JSON `datasets` takes a date in the first lines for the type of the whole column. Here any value is read as text.
    """
    datasets, hub = need("datasets"), need("huggingface_hub")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    for logger in (datasets.utils.logging, hub.utils.logging):  # their errors say as much
        logger.set_verbosity(logging.CRITICAL)
    options = dict(**source.options, name=args.config, split=split, revision=args.revision, streaming=True)
    try:
        stream = datasets.load_dataset(**options)
        if stream.info.builder_name == "json" and (features := stream.features):
            for name, kind in features.items():
                if isinstance(kind, datasets.Value) and name != args.column:
                    features[name] = datasets.Value("string")
            stream = datasets.load_dataset(**options, features=features)
        return stream
    except Exception as error:
        raise _cannot_load(source, error) from error


class Documents:
    """The texts of a split, which are read once and in order; those that are held out stay in memory.

    Attribute: end (the number of documents, None until the stream has ended).
    """

    def __init__(self, source, split, args, every=None, required=0):
        """every: one document in so many is held out; required: how many there must be, or 0.

        Reading raises DataError if there are fewer, or one has no text in the column args.column.
        """
        self.source, self.column, self.every, self.required = source, args.column, every, required
        self.rows = iter(open_stream(source, split, args))
        self.position, self.end, self.held_out = 0, None, []

    def training(self, first, last):
        """Return the texts of the documents first to last that are not held out, fewer if the split ends."""
        for _ in self._read(first):
            pass  # the texts of a shard that is there
        return list(self._read(last + 1))

    def validation(self, first, last):
        """Return the texts of the held-out documents first to last, fewer if the split ends."""
        for _ in self._read(last + 1):
            pass
        return self.held_out[first // self.every : last // self.every + 1]

    def _read(self, end):
        """Yield the texts of the documents before number `end` that have not been read and are not held out."""
        while self.position < end and self.end is None:
            try:
                row = next(self.rows, None)
            except Exception as error:  # such as a lost network
                raise _cannot_load(self.source, error) from error
            if row is None:
                if self.position < (self.required or 1):
                    raise DataError(f"{self.source.name} has {self.position} documents, not {self.required or 1}")
                self.end = self.position
                return
            if not isinstance(text := row.get(self.column), str):
                raise DataError(
                    f"document {self.position} of {self.source.name} has {str(text)[:40]!r} in the place of text in "
                    f'the column "{self.column}"; its columns are {", ".join(row)}'
                )
            self.position += 1
            if self.every and (self.position - 1) % self.every == 0:
                self.held_out.append(text)
            else:
                yield text


def plan(train, val, key, tokenizer, args):
    """Yield the Units of training, then of validation: each is made of args.shard_documents documents.

    Without args.documents they end when the stream of their documents has ended. key: what identifies the documents,
    for the units' keys.
    """

    def units(split, documents, read, number, count=sys.maxsize):
        size = args.shard_documents
        for begin in range(0, count, size):
            first, last = number(begin), number(min(begin + size, count) - 1)
            if documents.end is not None and first >= documents.end:
                break
            rows = partial(_rows, partial(read, first, last), tokenizer, args.document_length)
            yield Unit(split, rows, [key, first, last])

    every, total = train.every, args.documents or sys.maxsize
    if every is None:
        yield from units("train", train, train.training, lambda i: i, total)
        yield from units("val", val, val.training, lambda i: i)
    else:
        held_out = -(-total // every)
        yield from units("train", train, train.training, lambda i: i + i // (every - 1) + 1, total - held_out)
        yield from units("val", train, train.validation, lambda i: i * every, held_out)


def _rows(read, tokenizer, length):
    """Return the texts that read() gives as rows of tokens [n, length], the end of text after each."""
    texts = read()
    return cut_rows(join_documents(tokenizer.encode_batch(texts), [True] * len(texts), tokenizer), length)
