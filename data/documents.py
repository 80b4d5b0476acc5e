"""Prepare what Hugging Face's `datasets` can read as a stream: the part that the hf and openwebtext scripts share.

    prepare_documents(["HuggingFaceFW/fineweb-edu"], args)         # args as `add_options` and data.command.Parser give

A document's number is its place in its split. Each shard is made of documents that follow each other, so it depends on
their numbers alone. Nothing is downloaded but what is read. A run that was killed goes on at the shard that it was
writing; a dataset that grows reads the documents that it has had again, but does not tokenize them again.
"""

import hashlib
import json
import logging
import os
import re
import sys
from functools import partial
from typing import NamedTuple

from . import DataError, need
from .corpus import cut_rows
from .files import write_atomically
from .meta import JOURNAL, UNFINISHED
from .shards import Unit, earlier_arguments, is_complete, write_dataset
from .split import join_documents
from .tokenizer import check_name, named_tokenizer

DOCUMENTS = 8192  # per shard: about 40 MB of text from the web
TOKENS = 1100  # in an average document, for the progress bar
SHARDS = 1 << 16  # the most shards where --documents does not say how many documents to take
BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}  # of `datasets`, by suffix
DEFAULTS = {"split": "train", "val_split": None, "config": None, "revision": None}  # of options for a dataset's parts
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Source(NamedTuple):
    """What is read. options: arguments of datasets.load_dataset; files: [size, mtime_ns] of local files, or None."""

    name: str
    options: dict
    files: list | None


def add_options(parser):
    """Add the options of a script that reads documents to its Parser."""
    add = parser.add_argument
    add("--documents", type=int, help=f"documents to take (unset: all, at most {SHARDS:,} shards)")
    add("--split", default=DEFAULTS["split"], help="split that is read")
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
    _check_options(args)
    source = find_source(paths, [key for key in DEFAULTS if getattr(args, key) != DEFAULTS[key]])
    arguments = {"source": source.name, "document_length": args.document_length, "val_fraction": args.val_fraction}
    if source.files:  # other files that later take these names must not be mixed with them
        arguments["file"] = source.files
    usual = DEFAULTS | {"column": "text", "shard_documents": DOCUMENTS}  # as it was before there were these options
    read = {key: getattr(args, key) for key in usual if getattr(args, key) != usual[key]}
    tokenizer = None
    if args.tokenizer != "gpt2":
        tokenizer = named_tokenizer(args.tokenizer)  # by its contents: the path may get others
        arguments["tokenizer"] = hashlib.sha256(b"".join(tokenizer.files().values())).hexdigest()[:16]
    if args.documents is not None:
        arguments["documents"] = args.documents
    if not source.files and not args.revision and (revision := _revision(source, args.out, arguments | read)):
        read["revision"] = revision
    arguments |= read
    if is_complete(args.out, arguments, args.verify):
        return
    key = [source.name, source.files, *([read] if read else [])]
    every = None if args.val_split else round(1 / args.val_fraction)
    journal = os.path.join(args.out, UNFINISHED, JOURNAL)
    train = val = Documents(source, args.split, args.column, read, every, (journal, key))
    try:
        if args.val_split:
            val = Documents(source, args.val_split, args.column, read)
        tokenizer = tokenizer or named_tokenizer(args.tokenizer)
        units = plan(train, val, key, tokenizer, args)
        endless = args.documents is None or val is not train
        write_dataset(args.out, units, tokenizer, args.document_length, arguments, source.name, args.command, endless)
    finally:
        train.close(), val.close()


def _check_options(args):
    """Raise DataError for options that are out of range."""
    if args.documents is not None and args.documents < 2:
        raise DataError(f"--documents must be at least 2, one of which is for validation, got {args.documents}")
    if args.shard_documents < 1:
        raise DataError(f"--shard_documents must be at least 1, got {args.shard_documents}")
    if args.tokenizer.startswith("bpe:"):
        raise DataError("--tokenizer must be bytes, gpt2 or PATH/tokenizer.json: bpe:SIZE needs data/text/prepare.py")
    check_name(args.tokenizer)


def find_source(paths, of_datasets=()):
    """Return the Source that paths stand for: one folder, files of one kind, or the name of a dataset on the hub.

    of_datasets: names of options that were given and that files do not have.
    """
    known = ", ".join(BUILDERS)
    first = paths[0]
    if len(paths) == 1 and os.path.isdir(first):  # `datasets` finds splits and configurations in it
        files = [path for path in _search(first) if _suffix(path) in BUILDERS]
        _one_kind(files, f"{first}: ")
        listing = json.dumps([[os.path.relpath(path, first) for path in files], _identity(files)])
        identity = [len(files), hashlib.sha256(listing.encode()).hexdigest()[:16]]
        return Source(os.path.abspath(first), {"path": os.path.abspath(first)}, identity)
    on_hub = HUB_NAME.fullmatch(first) and _suffix(first) not in BUILDERS and not os.path.lexists(first)
    if len(paths) == 1 and on_hub:
        return Source(first, {"path": first}, None)
    for path in paths:
        if not os.path.exists(path):
            raise DataError(
                f"{path} does not exist" + ("" if len(paths) == 1 else ": give one dataset, or files alone")
            )
    files = [file for path in paths for file in (_search(path) if os.path.isdir(path) else [path])]
    if of_datasets:
        raise DataError(f"--{of_datasets[0]} is for a dataset's name or a single folder: files have none")
    if wrong := [file for file in files if _suffix(file) not in BUILDERS]:
        raise DataError(f"{wrong[0]} is not one of {known}")
    kind = _one_kind(files, "")
    files = [os.path.abspath(file) for file in files]
    name, identity = (files[0], _identity(files)[0]) if len(files) == 1 else (", ".join(files), _identity(files))
    return Source(name, {"path": kind, "data_files": files}, identity)


def _search(folder):
    """Return the files in a folder and those below it, without hidden ones, in the order of their names."""
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(here, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _suffix(path):
    return os.path.splitext(path)[1].lower()


def _one_kind(files, where):
    """Return the builder of `datasets` for these files. Raises DataError if there is none, or more than one."""
    kinds = sorted({BUILDERS[_suffix(file)] for file in files})
    if not kinds:
        raise DataError(f"{where}there are no files that end in {', '.join(BUILDERS)}")
    if len(kinds) > 1:
        raise DataError(f"{where}files must be of one kind, got {' and '.join(kinds)}")
    return kinds[0]


def _identity(files):
    """Return [size, mtime_ns] of each file, so that a dataset of other files with the same names is another one."""
    status = [os.stat(file) for file in files]
    return [[found.st_size, found.st_mtime_ns] for found in status]


def _revision(source, folder, arguments):
    """Return the commit on the hub to read: that with which the dataset in the folder was begun, or the newest.

    None for a dataset that an earlier version began without one.
    """
    same = lambda found: {k: v for k, v in found.items() if k not in ("format", "documents", "revision")}
    for _, found in earlier_arguments(folder):
        if same(found) == same(arguments):
            return found.get("revision")
    hub = need("huggingface_hub")
    try:
        return hub.HfApi().dataset_info(source.name).sha
    except Exception as error:
        raise _cannot_load(source, error) from error


def _cannot_load(source, error):
    """Return the DataError for whatever `datasets` or the hub raised, which is of many kinds."""
    remedy = "give --split, --config, ... that it has" if source.files else "go online, or give local files"
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return DataError(f"cannot load {source.name} ({reason}): {remedy}")


def open_stream(source, split, config=None, revision=None):
    """Return the datasets.IterableDataset of a split. Raises DataError if it cannot be opened."""
    datasets, hub = need("datasets"), need("huggingface_hub")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    for logger in (datasets.utils.logging, hub.utils.logging):  # what they would print is in the errors they raise
        logger.set_verbosity(logging.CRITICAL)
    options = {"name": config, "revision": revision}
    options = {key: value for key, value in options.items() if value is not None}
    try:
        return datasets.load_dataset(**source.options, split=split, streaming=True, **options)
    except StopIteration:  # of an empty .jsonl
        raise DataError(f"{source.name}: its split {split} has no documents") from None
    except Exception as error:
        raise _cannot_load(source, error) from error


class Documents:
    """The texts of a split, by number. They are read in order; to go back costs a start from the nearest known place.

    What was read of documents that are held out, and how to go on after each shard, is kept in a journal beside the
    unfinished shards, so that a run that was killed reads nothing twice but the shard that it was writing.
    """

    def __init__(self, source, split, column, options, every=None, journal=None):
        """every: one document in so many is held out; journal: (path, key), whose contents count for this key alone.

        Raises DataError if there is no first document with text in this column.
        """
        self.source, self.column, self.every = source, column, every
        self.stream = open_stream(source, split, options.get("config"), options.get("revision"))
        self._check_first(split)
        self.stream = self.stream.select_columns([column])
        self.path, self.key = journal or (None, None)
        self.states = {0: self.stream.state_dict()}  # number of a document -> state of the stream before it
        self.held = {}  # number of a held-out document -> where it is in the journal
        self.position, self.rows, self.end = 0, iter(self.stream), None  # end: the number of documents, once seen
        self.opened, self.lines = False, []  # of the journal: what is still to be written

    def _check_first(self, split):
        """Raise DataError, which says what there is, if the column is missing or its first value is no text."""
        rows = iter(self.stream)
        first = self._next(rows)
        rows.close()
        if first is None:
            raise DataError(f"{self.source.name}: its split {split} has no documents")
        if self.column not in first:
            raise DataError(f'{self.source.name} has no column "{self.column}", only {", ".join(first)}')
        text = [name for name, value in first.items() if isinstance(value, str)]
        if not isinstance(first[self.column], str | None) and text:
            raise DataError(
                f'{self.source.name}: column "{self.column}" holds {str(first[self.column])[:40]!r} in the place of '
                f"text; with text there is {', '.join(text)}"
            )

    def training(self, first, last):
        """Return the texts of the documents first to last that are not held out, fewer if the split ends; None if it
        ends before."""
        self._open_journal()
        self._seek(first)
        texts = []
        while self.position <= last and (text := self._take()) is not None:
            if not self._is_held(self.position - 1):
                texts.append(text)
        self.lines.append({"at": self.position, "state": self.stream.state_dict()})
        self._write_journal()
        return texts or None

    def held_out(self, first, last):
        """Return the texts of the held-out documents first to last, fewer if the split ends; None if it ends before."""
        self._open_journal()
        texts = []
        for number in range(first, last + 1, self.every):
            if number not in self.held:
                self._seek(number)
                if self.position < number or self._take() is None:
                    break
                self._write_journal()
            texts.append(self._held_text(number))
        return texts or None

    def close(self):
        """End the reading of files, which the interpreter would complain about when it ends."""
        self.rows.close()

    def _is_held(self, number):
        return self.every is not None and number % self.every == 0

    def _seek(self, number):
        """Go to a document, or to the end if there are fewer, from the nearest known place before it."""
        start = max(place for place in self.states if place <= number)
        if not start <= self.position <= number:
            self.rows.close()
            self.stream.load_state_dict(self.states[start])
            self.position, self.rows = start, iter(self.stream)
        while self.position < number and self._take() is not None:
            pass

    def _take(self):
        """Return the text of the next document, or None at the end; note it if it is held out."""
        number, row = self.position, self._next(self.rows)
        if row is None:
            self.end = number
            return None
        if not isinstance(text := row.get(self.column), str):
            raise DataError(f"document {number} of the source has {str(text)[:40]!r} in the place of text")
        self.position += 1
        if self._is_held(number) and number not in self.held:
            self.lines.append({"number": number, "text": text})
        return text

    def _next(self, rows):
        """Return the next row, or None. Raises DataError for whatever goes wrong in reading, such as a lost network."""
        try:
            return next(rows, None)
        except Exception as error:
            raise _cannot_load(self.source, error) from error

    def _open_journal(self):
        """Take over what the journal of an interrupted run has, up to the first line that is not whole."""
        if self.opened or not self.path:
            return
        head = {"key": self.key, "every": self.every, "datasets": need("datasets").__version__}
        self.opened, whole, content = True, json.dumps(head).encode() + b"\n", b""
        if os.path.exists(self.path):
            with open(self.path, "rb") as f:
                content = f.read()
        if content.startswith(whole):
            for line in content[len(whole) :].splitlines(keepends=True):
                try:
                    found = json.loads(line)
                except ValueError:
                    break
                if not line.endswith(b"\n"):
                    break
                self._learn(found, len(whole))
                whole += line
        if whole != content:
            write_atomically(self.path, whole)

    def _learn(self, line, place):
        if "state" in line:
            self.states[line["at"]] = line["state"]
        else:
            self.held[line["number"]] = place

    def _write_journal(self):
        """Append what was read since the last call to the journal, so that it is on disk before the shard."""
        if not self.path:
            self.lines = []
        if not self.lines:
            return
        with open(self.path, "ab") as f:
            for line in self.lines:
                self._learn(line, f.tell())
                f.write(json.dumps(line).encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())
        self.lines = []

    def _held_text(self, number):
        with open(self.path, "rb") as f:
            f.seek(self.held[number])
            return json.loads(f.readline())["text"]


def plan(train, val, key, tokenizer, args):
    """Return the list of Unit. key: what identifies the documents, for the units' keys.

    Without --documents there are units for SHARDS shards, of which those after the last document come to nothing.
    """
    every, size, units = train.every, args.shard_documents, []
    total = args.documents or SHARDS * size

    def add(split, count, number, read):
        for begin in range(0, count, size):
            first, last = number(begin), number(min(begin + size, count) - 1)
            tokens = (min(begin + size, count) - begin) * TOKENS
            rows = partial(_rows, partial(read, first, last), tokenizer, args)
            units.append(Unit(split, rows, tokens, [key, every, first, last]))

    def counted(read, first, last):
        texts = read(first, last)
        if args.documents and train.end is not None and train.end <= last:
            raise DataError(f"--documents={args.documents}: {train.source.name} has {train.end}")
        return texts

    if every is None:
        add("train", total, lambda i: i, partial(counted, train.training))
        add("val", SHARDS * size, lambda i: i, val.training)
    else:
        held = -(-total // every)
        add("train", total - held, lambda i: i + i // (every - 1) + 1, partial(counted, train.training))
        add("val", held, lambda i: i * every, partial(counted, train.held_out))
    return units


def _rows(read, tokenizer, args):
    """Return the texts that read() gives as rows of tokens [n, length], the end of text after each; None for none."""
    if (texts := read()) is None:
        return None
    return cut_rows(join_documents(tokenizer.encode_batch(texts), [True] * len(texts), tokenizer), args.document_length)
