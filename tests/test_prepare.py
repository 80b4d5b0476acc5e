"""Preparing loses nothing: neither the dataset that was there, nor files of others, nor text that was given."""

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from helpers import ROOT, byte_encoding, call, verify
from test_data import all_tokens, prepare_content, prepare_text, shown, write

from sympow.data import DataError, command
from sympow.data.corpus import find_files, plan_units
from sympow.data.dataset import Dataset
from sympow.data.meta import read_meta, write_meta
from sympow.data.shards import Unit, is_complete, write_dataset
from sympow.data.split import Stream
from sympow.data.text import prepare as text
from sympow.data.tokenizer import Tokenizer


def contents(folder):
    """Return {path below a folder: bytes} of all its files."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# the dataset that was there


CALLS = ("replace", "remove", "unlink", "rmdir", "mkdir")


def write_until(folder, number):
    """Write another dataset in a forked process that ends, as kill -9 would end it, before file operation `number`.

    Returns whether it was killed.
    """
    child = os.fork()
    if child == 0:
        done = [0]

        def ending(name):
            real = getattr(os, name)

            def call(*args, **options):
                if done[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                done[0] += 1
                return real(*args, **options)

            return call

        for name in CALLS:
            setattr(os, name, ending(name))
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            write(folder, train=(5, 4, 2), val=2)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] != 0


@pytest.mark.parametrize("first", [False, True])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_dataset_or_one_that_is_gone_on_with(
    tmp_path, monkeypatch, first
):
    """With `first` there is no old dataset."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # slow, and of no use where only the process is killed
    write(tmp_path / "old")
    write(tmp_path / "new", train=(5, 4, 2), val=2)
    old, new = contents(tmp_path / "old"), contents(tmp_path / "new")
    arguments, states, killed = {"train": [5, 4, 2], "val": 2, "length": 12}, [], True
    for number in itertools.count():
        folder = tmp_path / str(number)
        if not first:
            write(folder)
        killed = write_until(folder, number)
        try:
            verify(Dataset(folder))
            states.append("old" if finished(folder, old) == finished(tmp_path / "old", old) else "new")
        except DataError as error:
            states.append("neither")
            assert first or "meta.json is missing" in str(error)
        calls = []
        if not is_complete(folder, arguments):
            assert first or states[-1] == "old"  # else all is there and has only to be moved
            write(folder, train=(5, 4, 2), val=2, calls=calls)
        assert finished(folder, new) == new
        if not killed:
            break
    assert states == sorted(states, key=["old", "neither", "new"].index) and len(set(states)) == 3 - first
    assert number > 15 and not (folder / "unfinished").exists()


def finished(folder, dataset):
    """Return the files of a finished dataset; meta.json has the name of `dataset`."""
    files = {name: data for name, data in contents(folder).items() if not name.startswith("unfinished")}
    meta = folder.with_suffix(".json")
    write_meta(meta, read_meta(folder / "meta.json") | {"name": json.loads(dataset["meta.json"])["name"]})
    return files | {"meta.json": meta.read_bytes()}


def test_a_folder_in_which_another_process_prepares_is_refused(tmp_path):
    write(tmp_path)
    (tmp_path / "unfinished").mkdir()
    with open(tmp_path / "unfinished" / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files_before = contents(tmp_path)
        with pytest.raises(DataError, match="another process is preparing"):
            write(tmp_path, train=(1,))
        assert contents(tmp_path) == files_before
    write(tmp_path, train=(1,))
    assert not (tmp_path / "unfinished").exists()


def test_shards_of_an_interrupted_preparation_do_not_replace_finished_ones(tmp_path):
    """The first shard of all has the same name and size."""

    def prepare(value, train):
        units = [Unit("train", lambda: np.full((2, 4), value), value), Unit("train", train), Unit("val", lambda: VAL)]
        write_dataset(tmp_path, units, Tokenizer("bytes"), 4, {"train": repr(train)}, "", "")

    def failing():
        raise KeyboardInterrupt

    prepare(1, lambda: VAL)
    with pytest.raises(KeyboardInterrupt):
        prepare(2, failing)
    verify(Dataset(tmp_path))
    prepare(1, lambda: np.full((3, 4), 9))
    assert Dataset(tmp_path).read("train", 0, 8).tolist() == 8 * [1]
    verify(Dataset(tmp_path))


VAL = np.full((1, 4), 9)


# files of others


@pytest.mark.parametrize(
    "files, refused",
    [
        ({"meta.json": b'{"dtype": "float32"}', "model.bin": b"x"}, True),
        ({"meta.json": b"[1, 2]", "notes.txt": b"x"}, True),
        ({"notes.txt": b"mine"}, True),
        ({"unfinished/essay.txt": b"mine"}, True),
        ({"val_00007.bin": b"mine"}, True),
        ({"tokenizer.json": b"mine"}, True),
        ({"prepare.py": b"", "train.bin": b"nanoGPT's", "input.txt": b"x"}, False),
        ({"prepare.py": b"", ".gitignore": b"x", "__pycache__/prepare.pyc": b"x"}, False),
        ({".DS_Store": b"x"}, False),
        ({}, False),
    ],
)
def test_folders_of_others_are_refused_and_stay_as_they_are(tmp_path, files, refused):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    if refused:
        for verify in (False, True):
            with pytest.raises(DataError, match="give another --out|name another folder") as error:
                is_complete(tmp_path, {}, verify)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
        with pytest.raises(DataError, match="give another --out|name another folder"):
            write(tmp_path)
        assert contents(tmp_path) == files
    else:
        write(tmp_path)
        write(tmp_path, train=(3,))
        after = contents(tmp_path)
        assert {name: after[name] for name in files} == files


def test_files_of_others_in_a_dataset_of_ours_stay(tmp_path):
    write(tmp_path)
    mine = [tmp_path / name for name in ("notes.txt", "train.bin", "folder.json")]
    for path in mine:
        path.write_text("mine")
    write(tmp_path, train=(3,))
    assert all(path.exists() for path in mine) and not (tmp_path / "train_00001.bin").exists()
    mine[0].rename(tmp_path / "train_00001.bin")
    with pytest.raises(DataError, match="has train_00001.bin, no file of ours: give another --out"):
        write(tmp_path)


def test_a_damaged_meta_json_is_made_again_and_an_unfinished_dataset_with_damaged_files_starts_over(tmp_path, capsys):
    write(tmp_path)
    files_before = contents(tmp_path)
    for damaged in ("{", "[" * 100_000):
        (tmp_path / "meta.json").write_text(damaged)
        assert not is_complete(tmp_path, json.loads(files_before["meta.json"])["arguments"], verify=True)
        assert "is not complete" in capsys.readouterr().out
        write(tmp_path)
        assert contents(tmp_path) == files_before
    for name in ("meta.json", "progress.json"):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "new", fail_at=2)
        (tmp_path / "new/unfinished" / name).write_text("{")
        assert not is_complete(tmp_path / "new", {})
    write(tmp_path / "new")
    verify(Dataset(tmp_path / "new"))


def test_a_dataset_behind_a_link_is_read_and_written(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "set").symlink_to(tmp_path / "disk")
    for counts in ((5, 4), (3,)):
        train, _ = write(tmp_path / "set", train=counts)
        dataset = Dataset(tmp_path / "set")
        assert np.array_equal(dataset.read("train", 0, train.size), train.ravel())
    assert (tmp_path / "set").is_symlink() and (tmp_path / "disk" / "meta.json").exists()


# what is given


@pytest.fixture
def three_sources(tmp_path):
    """Make a folder of notes (letters a to m), one of code (A to M) and papers.jsonl (digits)."""
    for name, letters in (("notes/{:02d}.txt", "abcdefghijklm"), ("code/{:02d}.py", "ABCDEFGHIJKLM")):
        (tmp_path / name).parent.mkdir()
        for i, letter in enumerate(2 * letters):
            (tmp_path / name.format(i)).write_text(letter * 400 + "\n")
    lines = [json.dumps({"text": f"{i:03d}" * 40}) + "\n" for i in range(100)]
    (tmp_path / "papers.jsonl").write_text("".join(lines))
    return [tmp_path / "notes", tmp_path / "code", tmp_path / "papers.jsonl"]


def test_what_is_not_taken_is_said(tmp_path, three_sources, capsys):
    notes, code, papers = three_sources
    for name in (".hidden.txt", "scan.pdf", "LOUD.TXT", "empty.md", "photo.jpg", "photo2.jpg"):
        (notes / name).write_text("" if name == "empty.md" else "x" * 50)
    (notes / "gone.txt").symlink_to(tmp_path / "nowhere")
    (notes / "loop").symlink_to(notes)
    (notes / "Makefile").write_text("x")
    os.mkfifo(notes / "pipe.txt")
    prepare_text(tmp_path, *three_sources, notes / "00.txt")
    out = capsys.readouterr().out
    counts = next(line for line in out.splitlines() if "left out: " in line)
    assert "28 files" in counts and ": 27 .txt, 1 .jsonl;" in counts  # LOUD.TXT is text, too
    assert "left out: 26 .py, 2 .jpg, 1 " in counts


def test_the_order_of_paths_changes_nothing_and_documents_are_in_one_split(tmp_path, three_sources):
    options = ["--suffix=.txt,.py", "--val_fraction=0.2", "--document_length=64"]
    dataset = prepare_text(tmp_path, *three_sources, *options)
    train, val = shown(dataset, "train"), shown(dataset, "val")
    assert 0.15 < dataset.tokens("val") / (len(train) + len(val)) < 0.25
    documents = [{d for d in split.split("<|endoftext|>")[1:-1] if len(d) == 120} for split in (train, val)]
    assert not documents[0] & documents[1] and len(documents[0] | documents[1]) > 96
    reordered = prepare_text(tmp_path / "2", *reversed(three_sources), three_sources[0] / "03.txt", *options)
    assert reordered.meta["splits"] == dataset.meta["splits"]


def test_one_document_alone_cannot_be_split_and_says_so(tmp_path):
    line = json.dumps({"text": "long " * 1000}) + "\n"
    with pytest.raises(DataError, match="a.jsonl: cannot cut off a validation split: give more or shorter documents"):
        prepare_content(tmp_path, line, name="a.jsonl")
    assert not (tmp_path / "out").exists()
    prepare_content(tmp_path, 2 * line, name="a.jsonl")  # the same document twice


@pytest.mark.parametrize(
    "line", [b'{"text": null}', b'{"text": 5}', b"[" * 100_000, b'{"text": "\xff"', b"5", b'{"body": "x"}', b"\x00"]
)
def test_a_line_of_jsonl_without_text_is_one_line_and_leaves_no_folder(tmp_path, line):
    good = json.dumps({"text": "word " * 90}).encode() + b"\n"
    with pytest.raises(DataError, match='a.jsonl: a line is not JSON with text under "text"') as error:
        prepare_content(tmp_path, good * 5 + line + b"\n" + b'{"text": "other"}\n' * 5, name="a.jsonl")
    assert len(str(error.value)) < 300 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "argument",
    [
        "--suffix=",
        "--suffix=,.",
        "--out=" + "x" * 300,
        "--out=a.txt",
        "--out=a.txt/b",
        "--out=",
        "--out=/proc/x",
        "x" * 300,
        "--key=",
    ],
)
def test_odd_arguments_are_one_line_and_leave_no_folder(tmp_path, monkeypatch, refused, argument):
    (tmp_path / "a.txt").write_text("text\n" * 1000)
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n' * 1000)
    monkeypatch.chdir(tmp_path)
    assert refused(call, partial(command.run, text.main), "a.txt", "b.jsonl", "--out=new", argument)
    assert sorted(os.listdir()) == ["a.txt", "b.jsonl"]


@pytest.mark.parametrize("content", [b"\r\nline\r\n" * 500, bytes(range(256)) * 20, b"x" * 5000 + b"\n", b"\n" * 4000])
def test_odd_text_is_kept_to_the_byte(tmp_path, content):
    dataset = prepare_content(tmp_path, content, "--document_length=16")
    stored = all_tokens(dataset)
    train = dataset.tokens("train")
    assert content.startswith(stored[:train]) and stored[train:] in content and len(stored) > len(content) - 64


def test_text_that_is_not_utf8_is_said_where_it_loses_bytes(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes("naïve café\n".encode("latin-1") * 500)
    files = find_files([tmp_path / "a.txt"], (".txt",))
    units, _, tok = plan_units(files, Tokenizer("bpe", byte_encoding()), 64, 0.1)
    assert tok.decode(units[0].read()[0]).startswith("na\ufffdve caf\ufffd\n")
    assert capsys.readouterr().err.count(f"{tmp_path}/a.txt is not UTF-8 (byte 0xef): such bytes become U+FFFD") == 1


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 1000)
    files = find_files([tmp_path / "a.txt"], (".txt",))
    (tmp_path / "a.txt").write_text("other text" * 1000)
    os.utime(tmp_path / "a.txt", ns=(0, 0))
    with pytest.raises(DataError, match="a.txt changed while it was read"):
        list(Stream(files, True, "text").documents(0, 100))


# progress, disks and pipes


@pytest.mark.parametrize(
    "shell, message",
    [
        ("ulimit -f 1; {script}", b"File too large"),
        ("{script} > /dev/full", b"No space left"),
        ("{script} | true; exit ${{PIPESTATUS[0]}}", b""),
    ],
)
def test_a_disk_or_pipe_that_takes_no_more_is_one_line(tmp_path, shell, message):
    (tmp_path / "a.txt").write_text("hello there\n" * 1000)
    script = f"{sys.executable} {ROOT}/data/text/prepare.py {tmp_path / 'a.txt'} --out={tmp_path / 'out'}"
    done = subprocess.run(["bash", "-c", shell.format(script=script)], cwd=ROOT, stderr=subprocess.PIPE)
    assert message in done.stderr and b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr
    assert done.returncode == 2 or not message
    assert done.stderr.count(b"\n") <= 1
    assert not (tmp_path / "out" / "unfinished").exists()
    assert message != b"File too large" or not (tmp_path / "out").exists()
