"""OpenWebText is prepared from a local file: all steps but the download. More of documents.py is in test_hf.py."""

import json
import os

import pytest
import tiktoken
from helpers import byte_encoding, kill_in_second_shard, verify

from sympow.data import DataError, documents
from sympow.data.dataset import Dataset
from sympow.data.openwebtext import prepare as openwebtext

datasets = pytest.importorskip("datasets")

TEXTS = [f"document {i} " + "word " * (i % 7) for i in range(100)]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    encoding = byte_encoding()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "part.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


OPTIONS = ["--document_length=16", "--val_fraction=0.1"]


def prepare(source, *argv, out="out"):
    folder = source.parent / out
    openwebtext.main([f"--source={source}", f"--out={folder}", *OPTIONS, *argv])
    return Dataset(folder)


def test_complete_dataset_is_not_loaded_again(source, monkeypatch, capsys):
    prepare(source)
    monkeypatch.setattr(documents, "open_stream", None)
    prepare(source)
    assert "complete already" in capsys.readouterr().out


@pytest.mark.slow  # two more processes; test_longcrawl64.py has the same of another script
def test_kill_9_within_a_shard_loses_that_shard_alone(source, capfd):
    options = [*OPTIONS, "--shard_documents=30"]
    setup = "from sympow.data.openwebtext import prepare"
    first = kill_in_second_shard(source.parent / "out", setup, f"--source={source}", *options)
    dataset = prepare(source, *options)
    assert "1 of 4 shards were there" in capfd.readouterr().out
    assert os.stat(source.parent / "out/train_00000.bin").st_mtime_ns == first.st_mtime_ns
    assert not (source.parent / "out/unfinished").exists()
    verify(dataset)
    assert dataset.meta["splits"] == prepare(source, *options, out="whole").meta["splits"]  # sha256 of each shard, too


def test_a_dataset_that_grows_tokenizes_what_is_new(source, monkeypatch, capsys):
    firsts = []

    def note(read):
        def noted(self, first, last):
            firsts.append(first)
            return read(self, first, last)

        return noted

    for name in ("training", "held_out"):
        monkeypatch.setattr(documents.Documents, name, note(getattr(documents.Documents, name)))
    for count, expected in ((50, [1, 23, 45, 0]), (90, [45, 67, 89, 0])):
        firsts.clear()
        dataset = prepare(source, "--shard_documents=20", f"--documents={count}")
        assert firsts == expected and dataset.meta["arguments"]["documents"] == count
    assert "2 of 6 shards were there" in capsys.readouterr().out
    verify(dataset)
    for count, message in (("101", "part.jsonl has 100"), ("1", "at least 2"), ("0", "at least 2")):
        with pytest.raises(DataError, match=message):
            prepare(source, f"--documents={count}")


@pytest.mark.parametrize("texts", [[*TEXTS[:1], None, *TEXTS], [5] * 100])
def test_a_document_without_text_is_one_line_and_leaves_the_dataset(source, texts):
    meta = prepare(source).meta
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.raises(DataError, match=r"document \d+ of the source has .* in the place of text"):
        prepare(source)
    assert Dataset(source.parent / "out").meta == meta


def test_another_file_under_the_same_name_is_another_source(source, capsys):
    prepare(source)
    source.write_text(source.read_text().replace("document", "dokument"))
    dataset = prepare(source)
    assert "its shards are replaced" in capsys.readouterr().out
    assert dataset.tokenizer.decode(dataset.read("train", 0, 8)) == "dokument"


def test_the_default_source_is_a_parquet_repository(monkeypatch, tmp_path):
    monkeypatch.setattr(documents, "_revision", lambda source, *_: f"newest of {source.name}")
    monkeypatch.setattr(datasets, "load_dataset", lambda **options: pytest.fail(f"asked for {options}"))
    with pytest.raises(pytest.fail.Exception) as refused:
        openwebtext.main([f"--out={tmp_path / 'out'}"])
    revision = "newest of Skylion007/openwebtext"
    options = {"path": openwebtext.REPOSITORY, "name": None, "split": "train", "revision": revision, "streaming": True}
    assert str(refused.value) == f"asked for {options}"


def test_shards_are_the_bytes_that_were_always_written(source):
    splits = prepare(source, "--shard_documents=30").meta["splits"]
    hashes = [shard["sha256"][:8] for split in splits.values() for shard in split["shards"]]
    assert hashes == ["9a0af3c7", "acec3e9b", "a1450c3f", "c640356a"]
