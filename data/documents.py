"""Prepare what Hugging Face's `datasets` can read as a stream: the part that the hf and openwebtext scripts share.

    prepare_documents(["HuggingFaceFW/fineweb-edu"], args)         # args as `add_options` and data.command.Parser give

A document's number is its place in its split. Each shard is made of documents that follow each other, so it depends on
their numbers alone. Nothing is downloaded but what is read. A run that was killed goes on at the shard that it was
writing; a dataset that grows reads the documents that it has had again, but does not tokenize them again.
"""

import glob
import json
import logging
import os
import re
import sys
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from . import DataError, describe_error, need
from .corpus import cut_rows
from .files import write_atomically
from .huggingface import one_line
from .meta import hash_json
from .shards import UNFINISHED, Unit, begun_arguments, is_complete, write_dataset
from .split import join_documents
from .tokenizer import named_tokenizer

DOCUMENTS = 8192  # per shard: about 40 MB of text from the web
BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}  # of `datasets`, by suffix
DEEPEST = 900  # lists and objects of JSON in each other, fewer than any parser takes
ROWS = 1000  # of parquet in memory; `datasets` would take as many as the first group has, which may be none
COLUMN_OPTIONS = {"parquet": "columns", "csv": "usecols"}  # by kind of files, which columns are read
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
OPTIONS = "document_length val_fraction documents split val_split config column shard_documents revision".split()


class Source(NamedTuple):
    """Names what is read. options: arguments of datasets.load_dataset; files: a hash over local files, or None; kind:
    of local files, as in BUILDERS."""

    name: str
    options: dict
    files: str | None
    kind: str = ""


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
    source, tokenizer = find_source(paths, args.column), named_tokenizer(args.tokenizer)
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
    journal = os.path.join(args.out, UNFINISHED, "journal.jsonl")
    train = val = Documents(source, args.split, args, every, journal, key)
    try:
        if args.val_split:
            val = Documents(source, args.val_split, args)
        units = plan(train, val, key, tokenizer, args)
        write_dataset(args.out, units, tokenizer, args.document_length, arguments, source.name, args.command)
    finally:
        train.close()
        val.close()


def find_source(paths, column):
    """Return the Source that paths stand for: one folder, files of one kind, or the name of a dataset on the hub.

    column: the one to read as text. Raises DataError if it is text in some parquet files and not in others.
    """
    first = paths[0]
    on_hub = HUB_NAME.fullmatch(first) and _suffix(first) not in BUILDERS and not os.path.lexists(first)
    if len(paths) == 1 and on_hub:
        return Source(first, {"path": first}, None)
    for path in paths:
        if not os.path.exists(path):
            raise DataError(f"{path} does not exist")
    paths = [os.path.abspath(path) for path in paths]
    if len(paths) == 1 and os.path.isdir(first):  # `datasets` finds splits and configurations in it
        files = glob.glob(os.path.join(glob.escape(paths[0]), "**"), recursive=True)
        files = sorted(file for file in files if _suffix(file) in BUILDERS)
        options = {"path": paths[0]}
    else:
        files, options = paths, {"path": BUILDERS.get(_suffix(first)), "data_files": paths}
    kinds = {BUILDERS.get(_suffix(file)) for file in files}
    if len(kinds) != 1 or None in kinds:
        raise DataError(f"{', '.join(paths)}: give files of one kind ({', '.join(BUILDERS)}), or one folder of them")
    if kinds == {"parquet"}:
        options["batch_size"] = ROWS
        types = {file: _parquet_type(file, column) for file in files}
        numbers = [f"{file}: {name}" for file, name in types.items() if "string" not in name]
        if 0 < len(numbers) < len(files):  # `datasets` would write numbers as text
            raise DataError(f'column "{column}" is text in some files and not in others: {numbers[0]}')
    if kinds == {"json"}:
        for file in files:
            _check_depth(file)
    if kinds == {"csv"}:  # cells of "NA" and "null" are text, and 007 is no number
        options |= {"converters": {column: str}, "keep_default_na": False}
    identity = [[file, (status := os.stat(file)).st_size, status.st_mtime_ns] for file in files]
    return Source(", ".join(paths), options, hash_json(identity), *kinds)


def _parquet_type(file, column):
    """Return the name of the type of a column in a parquet file."""
    with one_line(file, "cannot be read"):
        schema = need("pyarrow.parquet").read_schema(file)
        return str(schema.field(column).type) if column in schema.names else "missing"


def _check_depth(file):
    """Raise DataError if a line of JSON is nested so deeply that the parser of `datasets` would overflow the stack."""
    with one_line(file, "cannot be read"), open(file, "rb") as f:
        for line in f:
            if line.count(b"[") + line.count(b"{") > DEEPEST:
                with suppress(ValueError):  # which `datasets` reports
                    json.loads(line)  # raises RecursionError


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
    remedy = "give --split, --config, ... that it has" if source.files else "go online, or give local files"
    return DataError(f"cannot load {source.name} ({describe_error(error)}): {remedy}")


def open_stream(source, split, config, revision):
    """Return the datasets.IterableDataset of a split. Raises DataError if it cannot be opened."""
    datasets, hub = need("datasets"), need("huggingface_hub")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    for logger in (datasets.utils.logging, hub.utils.logging):  # their errors say as much
        logger.set_verbosity(logging.CRITICAL)
    try:
        return datasets.load_dataset(**source.options, name=config, split=split, revision=revision, streaming=True)
    except StopIteration:  # of an empty .jsonl
        raise DataError(f"{source.name}: its split {split} has no documents") from None
    except Exception as error:
        raise _cannot_load(source, error) from error


class Documents:
    """The texts of a split, by number. They are read in order; to go back costs a start from the nearest known place.

    The texts of documents that are held out, and how to go on after each shard, are kept in a journal beside the
    unfinished shards, so that a run that was killed reads nothing twice but the shard that it was writing.
    Attributes: end (the number of documents, None until the stream has ended).
    """

    def __init__(self, source, split, args, every=None, journal=None, key=None):
        """every: one document in so many is held out; journal: its path; key: the journal counts for this one alone.

        Raises DataError if there is no first document with text in the column args.column, and in reading if there are
        fewer than args.documents.
        """
        self.source, self.column, self.every, self.required = source, args.column, every, every and args.documents
        self.stream = open_stream(source, split, args.config, args.revision)
        self._check_first(split)
        if column_option := COLUMN_OPTIONS.get(source.kind):  # other columns may differ from file to file
            source = source._replace(options=source.options | {column_option: [self.column]})
            self.stream = open_stream(source, split, args.config, args.revision)
        self.stream = self.stream.select_columns([self.column])
        self.journal, self.key = journal, key
        self.states = {0: self.stream.state_dict()}  # number of a document -> state of the stream before it
        self.offsets = {}  # number of a held-out document -> where it is in the journal
        self.position, self.rows, self.end = 0, iter(self.stream), None
        self.opened, self.lines = False, []  # of the journal: the lines that are still to be written

    def _check_first(self, split):
        """Raise DataError that names the columns if args.column is missing or its first value is no text."""
        rows = iter(self.stream)
        first = self._next(rows)
        rows.close()
        if first is None:
            raise DataError(f"{self.source.name}: its split {split} has no documents")
        if self.column not in first:
            raise DataError(f'{self.source.name} has no column "{self.column}", only {", ".join(first)}')
        text = [name for name, value in first.items() if isinstance(value, str)]
        if text and not isinstance(first[self.column], str | None):
            raise DataError(
                f'{self.source.name}: column "{self.column}" holds {str(first[self.column])[:40]!r} in the place of '
                f"text; with text there is {', '.join(text)}"
            )

    def training(self, first, last):
        """Return the texts of the documents first to last that are not held out, fewer if the split ends."""
        self._seek(first)
        texts = []
        while self.position <= last and (text := self._take()) is not None:
            if not self._is_held_out(self.position - 1):
                texts.append(text)
        self.lines.append({"position": self.position, "state": self.stream.state_dict()})
        self._write_journal()
        return texts

    def held_out(self, first, last):
        """Return the texts of the held-out documents first to last, fewer if the split ends."""
        self._read_journal()
        texts = []
        for number in range(first, last + 1, self.every):
            if number not in self.offsets:
                self._seek(number)
                if self.position < number or self._take() is None:
                    break
                self._write_journal()
            with open(self.journal, "rb") as f:
                f.seek(self.offsets[number])
                texts.append(json.loads(f.readline())["text"])
        return texts

    def close(self):
        """End the reading of files, which the interpreter would complain about when it ends."""
        self.rows.close()

    def _is_held_out(self, number):
        return self.every is not None and number % self.every == 0

    def _seek(self, number):
        """Go to a document, or to the end if there are fewer, from the nearest known place before it."""
        self._read_journal()
        start = max(position for position in self.states if position <= number)
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
            if self.required and number < self.required:
                raise DataError(f"--documents={self.required}: {self.source.name} has {number}")
            self.end = number
            return None
        if not isinstance(text := row.get(self.column), str):
            raise DataError(f"document {number} of the source has {str(text)[:40]!r} in the place of text")
        self.position += 1
        if self._is_held_out(number) and number not in self.offsets:
            self.lines.append({"number": number, "text": text})
        return text

    def _next(self, rows):
        """Return the next row, or None. Raises DataError for whatever goes wrong in reading, such as a lost network."""
        try:
            return next(rows, None)
        except Exception as error:
            raise _cannot_load(self.source, error) from error

    def _read_journal(self):
        """Take over the lines that the journal of an interrupted run has, but for a last one that was cut."""
        if self.opened or not self.journal:
            return
        self.opened = True
        head = json.dumps([self.key, need("datasets").__version__]).encode() + b"\n"
        complete, content = head, b""
        if os.path.exists(self.journal):
            with open(self.journal, "rb") as f:
                content = f.read()
        if content.startswith(head):
            for line in content[len(head) :].splitlines(keepends=True):
                if line.endswith(b"\n"):
                    self._note(json.loads(line), len(complete))
                    complete += line
        write_atomically(self.journal, complete)

    def _note(self, line, offset):
        """Remember a line that stands at this offset of the journal.

        A state that equals an earlier one is not where the stream was: `datasets` 5.0.0 does not advance it after a
        state has been loaded. Documents are counted from the state before it then.
        """
        if "state" not in line:
            self.offsets[line["number"]] = offset
        elif line["state"] not in self.states.values():
            self.states[line["position"]] = line["state"]

    def _write_journal(self):
        """Append what was read since the last call to the journal, so that it is on disk before the shard."""
        if self.journal:
            with open(self.journal, "ab") as f:
                for line in self.lines:
                    self._note(line, f.tell())
                    f.write(json.dumps(line).encode() + b"\n")
                f.flush()
                os.fsync(f.fileno())
        self.lines = []


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
        yield from units("val", train, train.held_out, lambda i: i * every, held_out)


def _rows(read, tokenizer, length):
    """Return the texts that read() gives as rows of tokens [n, length], the end of text after each."""
    texts = read()
    return cut_rows(join_documents(tokenizer.encode_batch(texts), [True] * len(texts), tokenizer), length)
