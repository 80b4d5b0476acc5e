"""OpenWebText is prepared from a local file: all steps but the download. More of documents.py is in test_hf.py."""

import json
import os

import numpy as np
import pytest
import tiktoken
from helpers import byte_encoding, kill_in_second_shard

from sympow.data import DataError, documents
from sympow.data.dataset import Dataset
from sympow.data.openwebtext import prepare as openwebtext

datasets = pytest.importorskip("datasets")

TEXTS = [f"document {i} " + "word " * (i % 7) for i in range(100)]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    encoding = byte_encoding()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)


def write_source(tmp_path, form):
    path = tmp_path / f"part.{form}"
    if form == "parquet":
        datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def prepare(tmp_path, source, *argv):
    openwebtext.main([f"--source={source}", f"--out={tmp_path / 'out'}", "--document_length=16", *argv])
    return Dataset(str(tmp_path / "out"))


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_documents_are_kept_in_order_and_one_in_n_is_validation(tmp_path, form, monkeypatch):
    monkeypatch.setattr(documents, "DOCUMENTS", 30)
    dataset = prepare(tmp_path, write_source(tmp_path, form), "--val_fraction=0.1")
    tok = dataset.tokenizer
    val = "".join(text + "<|endoftext|>" for text in TEXTS[::10])
    shown = tok.decode(dataset.read("val", 0, dataset.tokens("val")))
    assert val.startswith(shown) and len(tok.encode(val)) - dataset.tokens("val") < 16 + 12 * 10
    shards = dataset.meta["splits"]["train"]["shards"]
    assert len(shards) == 3
    first = tok.decode(dataset.read("train", 0, shards[0]["tokens"])).split("<|endoftext|>")
    train = [text for i, text in enumerate(TEXTS) if i % 10]
    assert first[:-1] == train[: len(first) - 1] and len(first) >= 29
    assert np.array_equal(dataset.read("train", shards[0]["tokens"], 5), tok.encode(train[30])[:5])


def test_complete_dataset_is_not_loaded_again(tmp_path, monkeypatch, capsys):
    source = write_source(tmp_path, "parquet")
    prepare(tmp_path, source, "--val_fraction=0.1")
    monkeypatch.setattr(documents, "open_stream", None)
    prepare(tmp_path, source, "--val_fraction=0.1")
    assert "complete already" in capsys.readouterr().out


@pytest.mark.slow  # two more processes; test_longcrawl64.py has the same of another script
def test_kill_9_within_a_shard_loses_that_shard_alone(tmp_path, monkeypatch, capfd):
    source, options = write_source(tmp_path, "parquet"), ["--val_fraction=0.1", "--document_length=16"]
    setup = "from sympow.data import documents; from sympow.data.openwebtext import prepare; documents.DOCUMENTS = 30"
    first = kill_in_second_shard(tmp_path / "out", setup, f"--source={source}", *options)
    monkeypatch.setattr(documents, "DOCUMENTS", 30)
    dataset = prepare(tmp_path, source, *options)
    printed = capfd.readouterr()
    assert "1 of 4 shards were there" in printed.out
    assert os.stat(tmp_path / "out/train_00000.bin").st_mtime_ns == first.st_mtime_ns
    assert not list((tmp_path / "out").glob("*.tmp")) and not (tmp_path / "out/progress.json").exists()
    dataset.verify()
    openwebtext.main([f"--source={source}", f"--out={tmp_path / 'whole'}", *options])
    assert dataset.meta["splits"] == Dataset(str(tmp_path / "whole")).meta["splits"]  # sha256 of each shard, too


def test_a_dataset_that_grows_tokenizes_what_is_new(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(documents, "DOCUMENTS", 20)
    source, calls = write_source(tmp_path, "jsonl"), []
    for name in ("training", "held_out"):
        read = getattr(documents.Documents, name)
        noted = lambda self, first, last, read=read: calls.append(first) or read(self, first, last)
        monkeypatch.setattr(documents.Documents, name, noted)
    for count, begun in ((50, [1, 23, 45, 0]), (90, [45, 67, 89, 0])):
        calls.clear()
        dataset = prepare(tmp_path, source, "--val_fraction=0.1", f"--documents={count}")
        assert calls == begun and dataset.meta["arguments"]["documents"] == count
    assert "2 of 6 shards were there" in capsys.readouterr().out
    dataset.verify()
    openwebtext.main(
        [
            f"--source={source}",
            f"--out={tmp_path / 'whole'}",
            "--document_length=16",
            "--val_fraction=0.1",
            "--documents=90",
        ]
    )
    assert dataset.meta["splits"] == Dataset(str(tmp_path / "whole")).meta["splits"]
    for wrong, message in (("101", "part.jsonl has 100"), ("1", "at least 2"), ("0", "at least 2")):
        with pytest.raises(DataError, match=message):
            prepare(tmp_path, source, f"--documents={wrong}")


@pytest.mark.parametrize("values", [[*TEXTS[:1], None, *TEXTS], [5] * 100, [["x"]] * 100])
def test_a_document_without_text_is_one_line_and_leaves_what_was_there(tmp_path, values):
    old = prepare(tmp_path, write_source(tmp_path, "jsonl"), "--val_fraction=0.1").meta
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in values))
    with pytest.raises(DataError, match=r"document \d+ of the source has .* in the place of text"):
        prepare(tmp_path, tmp_path / "bad.jsonl", "--val_fraction=0.1")
    assert Dataset(str(tmp_path / "out")).meta == old and not (tmp_path / "out" / "unfinished").exists()


def test_another_file_under_the_same_name_is_another_source(tmp_path, capsys):
    source = write_source(tmp_path, "jsonl")
    prepare(tmp_path, source, "--val_fraction=0.1")
    source.write_text(source.read_text().replace("document", "dokument"))
    dataset = prepare(tmp_path, source, "--val_fraction=0.1")
    assert "its shards are replaced" in capsys.readouterr().out
    assert dataset.tokenizer.decode(dataset.read("train", 0, 8)) == "dokument"


def test_unusable_sources_are_refused_in_one_line(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        prepare(tmp_path, tmp_path / "nosuch.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="cannot load .*bad.parquet"):
        prepare(tmp_path, tmp_path / "bad.parquet")
    (tmp_path / "other.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match='no column "text", only body'):
        prepare(tmp_path, tmp_path / "other.jsonl")


def test_the_default_source_is_a_parquet_repository(monkeypatch, tmp_path):
    monkeypatch.setattr(documents, "_revision", lambda source, *_: f"newest of {source.name}")
    monkeypatch.setattr(datasets, "load_dataset", lambda **options: pytest.fail(f"asked for {options}"))
    with pytest.raises(pytest.fail.Exception) as asked:
        openwebtext.main([f"--out={tmp_path / 'out'}"])
    revision = "newest of Skylion007/openwebtext"
    options = {"path": openwebtext.REPOSITORY, "name": None, "split": "train", "revision": revision, "streaming": True}
    assert str(asked.value) == f"asked for {options}"


def test_shards_are_the_bytes_that_earlier_versions_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "DOCUMENTS", 30)
    splits = prepare(tmp_path, write_source(tmp_path, "jsonl"), "--val_fraction=0.1").meta["splits"]
    assert [shard["sha256"][:8] for split in splits.values() for shard in split["shards"]] == [
        "9a0af3c7", "acec3e9b", "a1450c3f", "c640356a",
    ]  # fmt: skip
