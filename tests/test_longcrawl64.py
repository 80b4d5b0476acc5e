"""LongCrawl64: every document arrives whole and in order, and missing parts of a copy are refused by name."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import zarr
from helpers import ROOT, byte_encoding, call, run, verify

from sympow import sample
from sympow.data import DataError, zarr_rows
from sympow.data.dataset import Dataset
from sympow.data.longcrawl64 import prepare as longcrawl64
from sympow.data.meta import read_meta, write_meta

LENGTH, ROWS, COLUMNS = 64, 4, 16  # as 65536, 2048, 2048
TRAIN, HELDOUT = 10, 7  # the last chunk row is not full
LAYOUTS = {"v2 dots": (2, "v2", "."), "v2 folders": (2, "v2", "/"), "v3": (3, "default", "/")}
OFFLINE = {  # for subprocesses: no host answers, and no cache has GPT-2's vocabulary
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HF_ENDPOINT": "http://no-such-host.invalid",
    "TIKTOKEN_CACHE_DIR": "/nonexistent",
}
CHUNK = {"v2 dots": "{}.{}", "v2 folders": "{}/{}", "v3": "c/{}/{}"}


@pytest.fixture(autouse=True)
def tiny_gpt2(monkeypatch):
    encoding = byte_encoding()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)


def make_source(folder, layout="v2 dots", train=None, length=LENGTH, chunks=(ROWS, COLUMNS)):
    version, encoding, separator = LAYOUTS[layout]
    generator = np.random.default_rng(0)
    arrays = {}
    for name, documents in (("train", TRAIN), ("heldout", HELDOUT)):
        values = generator.integers(1, 256, (documents, length), dtype=np.uint16)
        arrays[name] = train if name == "train" and train is not None else values
        array = zarr.create_array(
            str(folder / f"{name}.zarr"),
            shape=arrays[name].shape,
            chunks=chunks,
            dtype=arrays[name].dtype,
            zarr_format=version,
            chunk_key_encoding={"name": encoding, "separator": separator},
            config={"write_empty_chunks": True},
        )
        array[:] = arrays[name]
    return arrays


def prepare(tmp_path, *argv, source=None):
    out = tmp_path / "out"
    longcrawl64.main([f"--source={source or tmp_path}", f"--out={out}", f"--document_length={LENGTH}", *argv])
    return Dataset(out)


def rows(dataset, split):
    return dataset.read(split, 0, dataset.tokens(split)).reshape(-1, dataset.document_length)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_every_document_arrives_whole_and_in_order(tmp_path, layout, prefix):
    arrays = make_source(tmp_path, layout)
    dataset = prepare(tmp_path, source=f"{prefix}{tmp_path}")
    assert np.array_equal(rows(dataset, "train"), arrays["train"])
    assert np.array_equal(rows(dataset, "val"), arrays["heldout"])
    assert len(dataset.meta["splits"]["train"]["shards"]) == 3  # one a chunk row
    assert dataset.tokenizer.json_escaped and dataset.vocab_size == 257
    verify(dataset)


def test_documents_limits_what_is_taken_and_fetched(tmp_path):
    arrays = make_source(tmp_path)
    os.remove(tmp_path / "train.zarr" / "2.0")  # beyond what is asked for
    os.remove(tmp_path / "heldout.zarr" / "1.0")
    dataset = prepare(tmp_path, "--documents=6", "--val_documents=1", "--strict")
    assert np.array_equal(rows(dataset, "train"), arrays["train"][:6])
    assert np.array_equal(rows(dataset, "val"), arrays["heldout"][:1])
    make_source(tmp_path / "again")
    assert prepare(tmp_path, "--documents=11", source=tmp_path / "again").documents("train") == 10
    with pytest.raises(DataError, match="train.zarr: 10 of 11 documents are taken"):
        prepare(tmp_path, "--documents=11", "--strict", source=tmp_path / "again")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("listed", [True, False])
def test_missing_chunk_is_refused_by_name(tmp_path, layout, listed, monkeypatch):
    """A store that cannot list its files is refused in reading."""
    make_source(tmp_path, layout)
    strict = ["--strict"] if listed else []
    if not listed:
        monkeypatch.setattr(longcrawl64.Zarr, "missing", lambda self, rows: [])
    key = CHUNK[layout].format(1, 3)
    os.remove(tmp_path / "train.zarr" / key)
    with pytest.raises(DataError, match=rf"train.zarr: .*1 chunk files are missing \({key}\): complete the copy"):
        prepare(tmp_path, *strict)
    assert not (tmp_path / "out" / "meta.json").exists()


def test_complete_chunk_rows_are_taken_and_counted(tmp_path, capsys):
    arrays = make_source(tmp_path)
    os.rename(tmp_path / "train.zarr" / "0.2", tmp_path / "0.2")
    dataset = prepare(tmp_path)
    assert np.array_equal(rows(dataset, "train"), arrays["train"][4:])
    line = "6 of 10 documents are taken; 6 of 10 are there, in 2 complete rows of chunks of 3"
    assert f"{tmp_path}/train.zarr: {line}" in capsys.readouterr().out
    prepare(tmp_path)
    assert "is complete already" in capsys.readouterr().out
    dataset = prepare(tmp_path, "--documents=5", "--val_documents=7")
    assert np.array_equal(rows(dataset, "train"), arrays["train"][4:9])
    assert prepare(tmp_path, "--documents=7").documents("train") == 6
    os.remove(tmp_path / "train.zarr" / "1.2")
    os.remove(tmp_path / "train.zarr" / "2.2")
    with pytest.raises(DataError, match=r"train.zarr: 0 of 10 documents are taken.*3 chunk files are missing"):
        prepare(tmp_path)
    os.rename(tmp_path / "0.2", tmp_path / "train.zarr" / "0.2")
    assert np.array_equal(rows(prepare(tmp_path), "train"), arrays["train"][:4])  # not mixed with what was taken


@pytest.mark.parametrize("url", ["hf://datasets/nobody/nothing", "http://no-such-host.invalid/longcrawl64"])
def test_without_a_network_one_line_names_source(tmp_path, url):
    script = f"{os.path.dirname(longcrawl64.__file__)}/prepare.py"
    process = run(script, f"--source={url}", f"--out={tmp_path}/out", check=False, env=OFFLINE)
    assert process.returncode == 2 and not process.stdout
    assert re.fullmatch(rf"error: cannot open {url}/train.zarr .*: give another copy as --source\n", process.stderr)


@pytest.fixture(scope="module")
def scattered(tmp_path_factory):
    """Return the folder of a partial copy in the published layout, with small chunks, and its arrays."""
    folder = tmp_path_factory.mktemp("scattered")
    arrays = make_source(folder, length=65536, chunks=(2, 16384))
    for chunk in ("0.1", "2.0", "2.1", "4.3"):
        os.remove(folder / "train.zarr" / chunk)
    return folder, arrays


@pytest.fixture(scope="module")
def from_readme(scattered, tmp_path_factory):
    """Return what the command in README printed for that copy, without a network, and the folder of its dataset."""
    with open(os.path.join(ROOT, "README.md")) as f:
        (command,) = re.findall(r"^    python (data/longcrawl64/prepare.py .*?)  +#", f.read(), flags=re.M)
    out = tmp_path_factory.mktemp("readme") / "longcrawl64"
    return run(*command.split(), f"--source={scattered[0]}", f"--out={out}", cwd=ROOT, env=OFFLINE), out


def test_the_command_of_readme_takes_what_a_partial_copy_has(scattered, from_readme):
    process, dataset = from_readme[0], Dataset(from_readme[1])
    taken = [2, 3, 6, 7]  # documents of rows of chunks 1 and 3
    assert np.array_equal(rows(dataset, "train"), scattered[1]["train"][taken])
    assert np.array_equal(rows(dataset, "val"), scattered[1]["heldout"])
    assert "4 of 100,000 documents are taken; 4 of 10 are there, in 2 complete rows of chunks of 5" in process.stdout
    assert process.stderr.count("cannot download GPT-2's vocab.bpe") == 1
    assert (dataset.vocab_size, dataset.eot) == (50257, 50256)


def test_data_without_a_vocabulary_train_and_say_once_that_samples_are_ids(from_readme, go, capsys, refused):
    sizes = "n_layer=1 n_head=1 n_embd=32 block_size=64 batch_size=1 tokens_per_step=64 eval_tokens=64 max_iters=2"
    options = [f"--{size}" for size in f"{sizes} eval_interval=1 sample_tokens=3 wandb=disabled".split()]
    config = os.path.join(ROOT, "config/sympow_p4.py")
    assert go(config, f"--dataset={from_readme[1]}", "--out_dir=run", *options) == 0
    assert capsys.readouterr().err.count("text is shown as ids: the data came without GPT-2's vocabulary") == 1
    with open("run/samples.jsonl") as f:
        assert all(re.fullmatch(r"((<\d+>|<\|endoftext\|>){3})", json.loads(line)["text"]) for line in f)
    message = refused(call, sample.main, "--out_dir=run", "--prompt=Hello")
    assert "text cannot be encoded: the data came without GPT-2's vocabulary" in message
    assert call(sample.main, "--out_dir=run", "--prompt=", "--max_new_tokens=2") == 0


def test_a_vocabulary_that_can_be_had_later_is_taken(tmp_path, monkeypatch):
    def offline(name):
        raise OSError("no route to host")

    make_source(tmp_path)
    online = tiktoken.get_encoding
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    without = prepare(tmp_path).tokenizer
    monkeypatch.setattr(tiktoken, "get_encoding", online)
    assert (without.kind, prepare(tmp_path).tokenizer.kind) == ("ids", "bpe")


def test_a_dataset_of_other_windows_is_refused(tmp_path):
    """Earlier versions had --protocol=fox."""
    make_source(tmp_path)
    path = Path(prepare(tmp_path).path, "meta.json")
    meta = read_meta(path)
    write_meta(path, meta | {"arguments": meta["arguments"] | {"protocol": "fox"}})
    with pytest.raises(DataError, match="has the windows of --protocol, which is gone: run python .*prepare.py"):
        Dataset(path.parent)


def changed_train(rows, columns, value):
    """Return the documents of a train array, uint16 [TRAIN, LENGTH], with a value in this place."""
    train = np.random.default_rng(1).integers(1, 256, (TRAIN, LENGTH), dtype=np.uint16)
    train[rows, columns] = value
    return train


CONSTANT = slice(4, 8), slice(32, 48)


@pytest.mark.parametrize(
    "train, reason",
    [
        (np.ones((5, 32), np.uint16), r"uint16 \[5, 32\]"),
        (np.ones((5, LENGTH), np.int32), r"int32 \[5, 64\]"),
        (changed_train(*CONSTANT, 0), "train.zarr/1.2: chunk holds nothing but 0"),
        (changed_train(*CONSTANT, 33), "train.zarr/1.2: chunk holds nothing but 33"),
        (changed_train(9, 63, 257), "train_00002.bin: token id 257"),
    ],
)
def test_other_arrays_constant_chunks_and_ids_beyond_the_vocabulary_are_refused(tmp_path, train, reason):
    make_source(tmp_path, train=train)
    with pytest.raises(DataError, match=reason):
        prepare(tmp_path)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"shape": [10**12, LENGTH]}, r"got uint16 \[1000000000000, 64\]"),  # before its chunks are counted
        ({"chunks": [0, COLUMNS]}, "ZeroDivisionError"),
        (None, "cannot open .*train.zarr as a zarr array .*: give another copy"),
    ],
)
def test_damaged_or_missing_metadata_is_refused(tmp_path, changes, reason):
    make_source(tmp_path)
    path = tmp_path / "train.zarr" / ".zarray"
    metadata = json.loads(path.read_text())
    path.unlink()
    if changes:
        path.write_text(json.dumps(metadata | changes))
    with pytest.raises(DataError, match=reason):
        prepare(tmp_path)


def test_a_dataset_that_grows_fetches_what_is_new(tmp_path, monkeypatch, capsys):
    arrays = make_source(tmp_path)
    read, reads = longcrawl64.Zarr.read, []

    def noted(self, row, count):
        reads.append((os.path.basename(self.url), row))
        return read(self, row, count)

    monkeypatch.setattr(longcrawl64.Zarr, "read", noted)
    expected = {
        4: [("train.zarr", 0), ("heldout.zarr", 0), ("heldout.zarr", 1)],
        9: [("train.zarr", 1), ("train.zarr", 2)],
        10: [("train.zarr", 2)],  # there was one document of it
        8: [],
    }
    for documents, new in expected.items():
        dataset = prepare(tmp_path, f"--documents={documents}", "--val_documents=7")
        assert reads == new and np.array_equal(rows(dataset, "train"), arrays["train"][:documents])
        reads.clear()
    assert "3 of 5 shards were there" in capsys.readouterr().out
    assert not (tmp_path / "out" / "train_00002.bin").exists()
    verify(dataset)
    os.rename(tmp_path / "train.zarr", tmp_path / "elsewhere")  # complete: the source is not even opened
    prepare(tmp_path, "--documents=8", "--val_documents=7")


def test_an_array_that_fails_while_a_dataset_grows_leaves_it_as_it_was(tmp_path):
    arrays = make_source(tmp_path)
    prepare(tmp_path, "--documents=4", "--val_documents=7")
    (tmp_path / "train.zarr" / "2.1").write_bytes(b"damaged")
    with pytest.raises(DataError, match="train.zarr/2.1: chunk cannot be read or decoded"):
        prepare(tmp_path, "--documents=10", "--val_documents=7")
    dataset = Dataset(tmp_path / "out")
    verify(dataset)
    assert np.array_equal(rows(dataset, "train"), arrays["train"][:4])


def test_errors_of_the_network_are_tried_again_with_back_off(tmp_path, monkeypatch):
    arrays, seconds = make_source(tmp_path), []
    failures, retry = [TimeoutError() for _ in range(3)], zarr_rows.retrying

    def flaky(call, attempts):
        def once():
            if failures:
                raise failures.pop()
            return call()

        return retry(once, attempts, sleep=seconds.append)

    monkeypatch.setattr(zarr_rows, "retrying", flaky)
    array = longcrawl64.Zarr(f"file://{tmp_path}/train.zarr", LENGTH)
    assert np.array_equal(array.read(0, 2), arrays["train"][:2]) and len(seconds) == 3
    failures += [TimeoutError() for _ in range(9)]
    seconds.clear()
    with pytest.raises(TimeoutError):
        flaky(None, 9)
    assert seconds == [1, 2, 4, 8, 16, 32, 60, 60]
    failures.append(DataError("damage"))
    with pytest.raises(DataError):
        flaky(None, 9)
    assert len(seconds) == 8  # damage does not pass
