"""Datasets on disk and the loader: prepared tokens are read back, completely and in the same order everywhere."""

import errno
import importlib
import itertools
import json
import os
from functools import partial

import numpy as np
import pytest
import torch
from helpers import assert_same_batch_for_any_ranks, byte_encoding, call, flip_bits, verify

from sympow.data import DataError, command, shards
from sympow.data.corpus import Stream, find_files, plan_units
from sympow.data.dataset import Dataset
from sympow.data.loader import Windows, eval_batches, train_indices
from sympow.data.meta import read_meta, write_meta
from sympow.data.pystdlib import prepare as pystdlib
from sympow.data.shards import Unit, is_complete, write_dataset
from sympow.data.text import prepare as text
from sympow.data.tokenizer import Tokenizer

EOT = 256


def write(folder, train=(5, 4), val=3, length=12, calls=None, fail_at=None, first=0):
    """Write a dataset of different tokens: train shards with these numbers of rows, one val shard. Returns the rows."""
    offsets = np.cumsum([0, *train, val]) * length
    stream = ((first + np.arange(offsets[-1])) * 7 % 251).astype(np.uint16)
    counts = [*train, val]

    def unit(number):
        def read():
            if calls is not None:
                calls.append(number)
            if number == fail_at:
                raise KeyboardInterrupt
            return stream[offsets[number] : offsets[number + 1]].reshape(-1, length)

        return Unit("val" if number == len(train) else "train", read)

    units = [unit(number) for number in range(len(counts))]
    arguments = {"train": list(train), "val": val, "length": length}
    write_dataset(folder, units, Tokenizer("bytes"), length, arguments, "a test", "python data/x/prepare.py")
    return stream[: offsets[len(train)]].reshape(-1, length), stream[offsets[len(train)] :].reshape(-1, length)


# on disk


def test_meta_describes_what_is_there(tmp_path):
    train, val = write(tmp_path / "set")
    dataset = Dataset(tmp_path / "set")
    assert (dataset.name, dataset.vocab_size, dataset.eot, dataset.document_length) == ("set", 257, EOT, 12)
    assert (dataset.documents("train"), dataset.tokens("train"), dataset.documents("val")) == (9, 108, 3)
    assert dataset.tokenizer.kind == "bytes" and dataset.meta["dtype"] == "uint16"
    assert [s["documents"] for s in dataset.meta["splits"]["train"]["shards"]] == [5, 4]
    assert np.array_equal(dataset.read("train", 0, 108), train.ravel())
    assert np.array_equal(dataset.read("train", 50, 30), train.ravel()[50:80])  # over a shard's border
    assert np.array_equal(dataset.read("val", 0, 36), val.ravel())
    verify(dataset)


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_crash_between_a_shard_and_its_record_mixes_no_datasets(tmp_path, monkeypatch):
    train, _ = write(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "set", fail_at=1)
    with monkeypatch.context() as patch, pytest.raises(OSError):  # another dataset, with a shard of the same size
        record = lambda path, meta: full() if meta["units"] else write_meta(path, meta)  # no room for a shard's
        patch.setattr(shards, "write_meta", record)
        write(tmp_path / "set", train=(5, 1), first=1)
    write(tmp_path / "set")
    assert np.array_equal(Dataset(tmp_path / "set").read("train", 0, 108), train.ravel())
    verify(Dataset(tmp_path / "set"))


def test_other_arguments_make_another_dataset_and_say_so(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, fail_at=2)
    calls = []
    write(tmp_path, train=(2,), calls=calls)
    assert calls == [0, 1]
    assert not is_complete(tmp_path, {"train": [3]})  # also from a complete dataset
    assert "was made by python data/x/prepare.py: its shards are replaced" in capsys.readouterr().out
    write(tmp_path, train=(3,))
    assert Dataset(tmp_path).documents("train") == 3


def test_prepare_mends_a_complete_dataset_that_lost_a_shard(tmp_path):
    write(tmp_path)
    arguments = json.loads((tmp_path / "meta.json").read_text())["arguments"]
    assert is_complete(tmp_path, arguments)
    os.truncate(tmp_path / "train_00001.bin", 10)
    assert not is_complete(tmp_path, arguments)
    calls = []
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, calls=calls, fail_at=1)
    write(tmp_path, calls=calls)
    assert calls == [1, 1]  # a kill while repairing does not lose the whole shards
    verify(Dataset(tmp_path))


def test_verify_makes_damaged_shards_again_and_edits_are_noticed(tmp_path, capsys):
    content = all_tokens(prepare_content(tmp_path, "some text. " * 1000))
    damaged = tmp_path / "out" / "train_00000.bin"
    damaged.write_bytes(bytes(damaged.stat().st_size))  # tokens that are in the vocabulary
    dataset = prepare_text(tmp_path, tmp_path / "a.txt", "--verify")
    out = capsys.readouterr().out
    assert f"{damaged} is not what was written (sha256 differs): it is made again" in out and "is missing" not in out
    assert all_tokens(dataset) == content and "--verify" not in dataset.meta["prepare"]
    verify(dataset)
    prepare_text(tmp_path, tmp_path / "a.txt", "--verify")
    out = capsys.readouterr().out
    assert "complete already" in out and "sha256" not in out
    assert all_tokens(prepare_content(tmp_path, "same size!!" * 1000)).startswith(b"same size!!")


def test_verify_holds_for_what_a_killed_prepare_left(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, fail_at=2)
    (tmp_path / "unfinished" / "train_00001.bin").write_bytes(bytes(96))
    assert not is_complete(tmp_path, {}, verify=True)
    write(tmp_path, calls=(calls := []))
    assert calls == [1, 2]
    verify(Dataset(tmp_path))


def test_units_below_one_row_give_no_file(tmp_path):
    write(tmp_path, train=(5, 0, 4))
    assert Dataset(tmp_path).documents("train") == 9
    with pytest.raises(DataError, match="val split has no whole row of 12"):
        write(tmp_path / "new", val=0)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "bad", [np.full((2, 12), 257), np.full((2, 12), -1), np.zeros((2, 11), int), np.zeros((2, 12))]
)
def test_wrong_rows_are_refused_at_write(tmp_path, bad):
    with pytest.raises(DataError, match="train_00000.bin"):
        write_dataset(tmp_path, [Unit("train", lambda: bad)], Tokenizer("bytes"), 12, {}, "", "")


def test_large_vocabularies_are_stored_in_32_bits(tmp_path, monkeypatch):
    tok = Tokenizer("bytes")
    tok.vocab_size = 100_000
    monkeypatch.setattr("sympow.data.dataset.load_tokenizer", lambda folder: tok)
    rows = np.full((2, 4), 99_999)
    write_dataset(tmp_path, [Unit(s, lambda: rows) for s in ("train", "val")], tok, 4, {}, "", "")
    assert Dataset(tmp_path).meta["dtype"] == "uint32"
    assert Windows(Dataset(tmp_path), "val", 4).batch([1])[1].tolist() == rows[:1].tolist()


def cut_shard(folder):
    os.truncate(folder / "train_00001.bin", 24)


def spoil_token(folder):
    content = (folder / "train_00001.bin").read_bytes()
    (folder / "train_00001.bin").write_bytes(content[:-2] + b"\xff\xff")


def write_in_meta(content):
    return lambda folder: (folder / "meta.json").write_bytes(content)


def rename_shard(folder):
    meta = read_meta(folder / "meta.json")
    meta["splits"]["train"]["shards"][0]["file"] = "../train_00000.bin"
    write_meta(folder / "meta.json", meta)


GONE = "train_00001.bin is missing, or no file of 96 bytes: run python data/x/prepare.py"


@pytest.mark.parametrize(
    "harm,message",
    [
        (cut_shard, GONE),
        (lambda folder: os.remove(folder / "train_00001.bin"), GONE),
        (spoil_token, "train_00001.bin: token id 65535 is not in the vocabulary of 257: delete this file"),
        (rename_shard, "meta.json is damaged .a shard has another folder"),
        (write_in_meta(b"[" * 100_000), "meta.json is damaged .*RecursionError.*delete it and run"),
        (write_in_meta(b"\xff\xfe" * 500), "meta.json is damaged .*UnicodeDecodeError"),
        (write_in_meta(b"[]"), "meta.json is damaged .*no JSON object"),
        (write_in_meta(b'{"version": 2, "vocab_size": 257}'), "meta.json is damaged .sha256 differs"),
        (lambda folder: os.remove(folder / "meta.json"), "not prepared: run python data/text/prepare.py FILES --out="),
    ],
)
def test_damage_is_one_line_with_its_remedy_also_while_the_data_are_in_use(tmp_path, harm, message):
    write(tmp_path)
    windows = Windows(Dataset(tmp_path), "train", 12)
    windows.batch([5, 8])
    harm(tmp_path)
    with pytest.raises(DataError, match=message) as error:
        Windows(Dataset(tmp_path), "train", 12).batch([8])
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    if "train_00001" in message:
        with pytest.raises(DataError, match=message):
            windows.batch([5, 8])


@pytest.mark.parametrize(
    "name, guess", [("", ""), ("prosa", "did you mean prose[?] "), ("data/prosa", "did you mean prose[?] ")]
)
def test_a_dataset_that_is_not_there_is_refused_with_those_that_are_prepared(tmp_path, monkeypatch, name, guess):
    monkeypatch.setattr("sympow.data.dataset.__file__", str(tmp_path / "dataset.py"))
    for folder, file in (("prose", "meta.json"), ("code", "meta.json"), ("hf", "prepare.py")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).touch()
    with pytest.raises(
        DataError, match=f"^no dataset '{name}': {guess}prepared datasets: code, prose; your own text: python"
    ):
        Dataset(name)
    with pytest.raises(DataError, match="not prepared: run python data/hf/prepare.py"):
        Dataset("hf")


def test_a_flipped_bit_in_meta_json_is_noticed(tmp_path):
    write(tmp_path)
    for _ in flip_bits(tmp_path / "meta.json"):
        with pytest.raises(DataError, match="meta.json is (damaged|of version)"):
            Dataset(tmp_path)


def test_another_version_is_refused_by_name(tmp_path):
    write(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    for version in (1, 3, None):
        (tmp_path / "meta.json").write_text(json.dumps(meta | {"version": version}))
        for act in (Dataset, lambda folder: is_complete(folder, {}), write):
            with pytest.raises(DataError, match=f"meta.json is of version {version}, not 2: delete it and its shards"):
                act(str(tmp_path))


def test_the_tokenizer_of_another_dataset_is_refused(tmp_path):
    write(tmp_path)
    Tokenizer("bytes", json_escaped=True).save(tmp_path)
    with pytest.raises(DataError, match="tokenizer.json is of another dataset: run python data/x/prepare.py"):
        Dataset(tmp_path)
    assert not is_complete(tmp_path, {"train": [5, 4], "val": 3, "length": 12})
    write(tmp_path, calls=(calls := []))  # mended without reading the source
    assert calls == [] and not Dataset(tmp_path).tokenizer.json_escaped


# windows


def test_window_inputs_are_targets_shifted_by_one(tmp_path):
    train, _ = write(tmp_path)
    windows = Windows(Dataset(tmp_path), "train", 5)
    assert len(windows) == 9 * 2  # 12 // 5 = 2 a row
    inputs, targets = windows.batch(range(18))
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape == (18, 5)
    for d in range(9):
        row = train[d].tolist()
        assert inputs[2 * d].tolist() == [EOT, *row[:4]] and targets[2 * d].tolist() == row[:5]
        assert inputs[2 * d + 1].tolist() == row[4:9] and targets[2 * d + 1].tolist() == row[5:10]


@pytest.mark.parametrize("T", [1, 5, 12, 30, 107, 108])
def test_packed_windows_run_over_documents_and_mark_their_starts(tmp_path, T):
    stream = write(tmp_path)[0].ravel()
    windows = Windows(Dataset(tmp_path), "train", T, pack=True)
    assert len(windows) == 108 // T
    expected = np.concatenate([[EOT], stream[:-1]])
    expected[::12] = EOT
    n = len(windows) * T
    inputs, targets = windows.batch(range(len(windows)))
    assert np.array_equal(targets.numpy().ravel(), stream[:n])
    assert np.array_equal(inputs.numpy().ravel(), expected[:n])
    assert targets.is_contiguous() and inputs.is_contiguous()


# the order of training


class Shape:
    """The attributes of Windows that the training order depends on."""

    def __init__(self, documents, per_document):
        self.documents, self.per_document = documents, per_document

    def __len__(self):
        return self.documents * self.per_document


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (40, 5), (100, 1), (16, 3), (33, 64)])
def test_every_window_is_visited_once_an_epoch(shape):
    windows = Shape(*shape)
    for epoch in range(3):
        indices = train_indices(windows, 7, epoch * len(windows), len(windows))
        assert indices.dtype == np.int64
        assert sorted(indices.tolist()) == list(range(len(windows)))


def test_order_is_a_pure_function_of_seed_and_position():
    windows = Shape(40, 5)
    order = train_indices(windows, 7, 0, 700)
    for start, count in ((0, 1), (199, 2), (390, 250), (699, 1)):
        assert np.array_equal(train_indices(Shape(40, 5), 7, start, count), order[start : start + count])
    assert not np.array_equal(order[:200], order[200:400])  # another epoch
    assert not np.array_equal(order, train_indices(Shape(40, 5), 8, 0, 700))  # another seed
    assert not np.array_equal(train_indices(windows, -7, 0, 700), order)  # a seed of its own
    # Written down: a run that is resumed on another machine, or with another numpy, must see the same order.
    assert order[:5].tolist() == [185, 30, 160, 120, 115]


def test_a_batch_is_documents_by_one_window():
    indices = train_indices(Shape(160, 64), 3, 0, 160)
    documents, windows = indices // 64, indices % 64
    assert len(set(documents)) == 160
    for group in range(10):
        assert len(set(windows[group * 16 : (group + 1) * 16])) == 1
    assert len(set(windows)) > 5  # groups stand at different windows


def test_same_global_batch_for_any_ranks_and_batch_sizes(tmp_path):
    write(tmp_path, train=(30, 30))
    windows = Windows(Dataset(tmp_path), "train", 4)
    expected = windows.batch(train_indices(windows, 1, 3 * 16, 16))
    assert_same_batch_for_any_ranks(windows, 1, 3, expected)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("eval_tokens, count", [(1, 1), (4 * 7, 7), (10**9, 15)])
def test_evaluation_sees_the_same_windows_for_any_batch_size_and_ranks(tmp_path, eval_tokens, count, pack):
    write(tmp_path, val=5)
    windows = Windows(Dataset(tmp_path), "val", 4, pack)
    expected = windows.batch(range(count))
    for batch_size, world in itertools.product((1, 2, 4, 16), (1, 2, 4)):
        ranks = [list(eval_batches(windows, eval_tokens, batch_size, rank, world)) for rank in range(world)]
        inputs, targets = (torch.stack(tensors) for tensors in zip(*itertools.chain(*zip(*ranks, strict=True))))
        assert inputs.shape == targets.shape and inputs.shape[1:] == (batch_size, 4)
        inputs, targets = inputs.view(-1, 4), targets.view(-1, 4)
        real = (targets >= 0).all(1)
        assert (targets[~real] == -1).all()
        assert torch.equal(inputs[real], expected[0]) and torch.equal(targets[real], expected[1])


# text


def prepare_text(tmp_path, *argv):
    text.main([*map(str, argv), f"--out={tmp_path / 'out'}"])
    return Dataset(tmp_path / "out")


def prepare_content(tmp_path, content, *argv, name="a.txt"):
    """Prepare a text file with this content, bytes or str."""
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return prepare_text(tmp_path, tmp_path / name, *argv)


def shown(dataset, split):
    """Return the text of a split."""
    return dataset.tokenizer.decode(dataset.read(split, 0, dataset.tokens(split)))


def all_tokens(dataset):
    tokens = np.concatenate([dataset.read(split, 0, dataset.tokens(split)) for split in ("train", "val")])
    return tokens[tokens < 256].astype(np.uint8).tobytes()


@pytest.mark.parametrize("size", [2048, 20_000, 300_000, 1_115_394])
def test_one_small_file_gives_both_splits_and_drops_little(tmp_path, size):
    source = np.random.default_rng(0).integers(32, 127, size, dtype=np.uint8).tobytes()
    dataset = prepare_content(tmp_path, source)
    train, val = dataset.tokens("train"), dataset.tokens("val")
    assert train + val > 0.93 * size and 0.03 * size < val < 0.08 * size
    assert dataset.document_length >= min(65536, size // 32)
    assert source[:train] + source[-val:] == all_tokens(dataset)


def test_too_little_text_is_refused_in_one_line(tmp_path):
    (tmp_path / "a.txt").write_text("too short")
    (tmp_path / "b.gz").write_bytes(b"x" * 5000)
    (tmp_path / "empty").mkdir()
    for path, message in (
        ("a.txt", "9 bytes"),
        ("empty", "0 bytes"),
        ("nosuch", "does not exist"),
        ("b.gz", "not a text"),
    ):
        with pytest.raises(DataError, match=message) as error:
            prepare_text(tmp_path, tmp_path / path)
        assert "\n" not in str(error.value) and str(tmp_path / path) in str(error.value)


def test_folders_are_mixed_and_files_kept_byte_for_byte(tmp_path):
    source = tmp_path / "src"
    (source / "sub" / "__pycache__").mkdir(parents=True)
    documents = [bytes([i + 128]) * 500 + b"\xff\r\n" for i in range(40)]  # not UTF-8
    for i, document in enumerate(documents):
        (source / ("sub" if i % 2 else ".") / f"{i:02d}.txt").write_bytes(document)
    (source / "sub" / "__pycache__" / "x.txt").write_text("y" * 999)
    dataset = prepare_text(tmp_path, source, "--document_length=512")
    stored, splits = all_tokens(dataset), dataset.meta["splits"]
    files = find_files([source], (".txt",))
    tokens = Stream(files, True, "text").tokens(0, 40 * 504, Tokenizer("bytes"))
    parts = np.where(tokens < 256, tokens, 10).astype(np.uint8).tobytes().split(b"\xff\r\n\n")[:-1]
    assert sorted(parts) == [document[:-3] for document in documents] != parts and b"y" not in stored
    assert splits["val"]["tokens"] == 1024
    os.rename(source, tmp_path / "moved")  # the order does not depend on where the folder is
    assert prepare_text(tmp_path, tmp_path / "moved", "--document_length=512").meta["splits"] == splits


def test_jsonl_gives_a_document_a_line(tmp_path):
    path = tmp_path / "x.jsonl"
    documents = [f"é {i} " * 30 for i in range(100)]
    path.write_text("\n".join(json.dumps({"body": d}) for d in documents) + "\n\n")
    dataset = prepare_text(tmp_path, path, "--key=body", "--document_length=128")
    train, val = (
        shown(dataset, split).split("<|endoftext|>")[:-1] for split in ("train", "val")
    )  # the last one is cut off
    assert len(train) > 85 and len(val) > 1 and not set(train) & set(val)
    assert train == [d for d in documents if d in set(train)] and set(val) < set(documents)
    with pytest.raises(DataError, match='x.jsonl.*"text".*--key'):
        prepare_text(tmp_path, path)


def test_large_sources_are_cut_into_units_without_losing_text(tmp_path, monkeypatch):
    lines = "".join(f"line {i} ü\n" for i in range(5000))
    (tmp_path / "a.txt").write_text(lines)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"record {i}"}) + "\n" for i in range(2000)))
    files = find_files([tmp_path / "a.txt", tmp_path / "b.jsonl"], ())

    def split_text(tokenizer, unit):
        monkeypatch.setattr("sympow.data.corpus.UNIT", unit)
        units = plan_units(files, tokenizer, 1, 0.1)[0]  # rows of one token: none is dropped
        rows = {split: [unit.read().ravel() for unit in units if unit.split == split] for split in ("train", "val")}
        return len(units), *(tokenizer.decode(np.concatenate(row)) for row in rows.values())

    for tokenizer in (Tokenizer("bytes"), Tokenizer("bpe", byte_encoding())):
        count, train, val = split_text(tokenizer, 10_000)
        assert split_text(tokenizer, 1 << 30) == (2, train, val) and count > 8
        assert "\ufffd" not in train + val  # a BPE never sees half a character
        records = "".join(f"record {i}<|endoftext|>" for i in range(2000))
        assert train + val in (lines + "<|endoftext|>" + records, records + lines + "<|endoftext|>")
        assert 0.05 < len(val) / len(train + val) < 0.15


# pystdlib and the command line


def test_standard_library_is_taken_without_installed_packages_and_a_root_with_them(tmp_path, monkeypatch):
    for folder in ("lib", "lib/site-packages", "lib/dist-packages", "lib/test"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.py").write_text(f"# {folder}\n" * 500)
    (tmp_path / "lib" / "_sysconfigdata__linux.py").write_text("build_time_vars = {}\n" * 500)
    monkeypatch.setattr(pystdlib.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    for argv, taken in (([], False), ([f"--root={tmp_path / 'lib'}"], True)):
        pystdlib.main([*argv, f"--out={tmp_path / 'out'}"])
        content = all_tokens(Dataset(tmp_path / "out"))
        assert b"# lib/test\n" in content and b"build_time_vars" not in content and (b"packages" in content) == taken


@pytest.mark.parametrize("name", ["pystdlib", "text", "longcrawl64", "hf"])
def test_wrong_arguments_and_failures_are_one_line_with_status_2(tmp_path, name, capsys):
    paths = ["x.txt"] if name in ("text", "hf") else []
    refused = [["--bogus=1"], ["--document_length=x"], ["--val_fraction=0", *paths], ["--document_length", "0", *paths]]
    source = {"pystdlib": "--root=", "longcrawl64": "--source="}.get(name, "")
    refused.append([f"{source}{tmp_path / 'nosuch.txt'}"])
    script = importlib.import_module(f"sympow.data.{name}.prepare")
    for argv in refused:
        assert call(partial(command.run, script.main), *argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1, err


def test_missing_package_is_one_line():
    from sympow.data import need

    with pytest.raises(DataError, match="pip install -r requirements.txt"):
        need("no_such_package_anywhere")
