"""Any dataset that Hugging Face's `datasets` reads is prepared as a stream, here from local files of three kinds."""

import csv
import json
import os
import shutil
import types

import pytest
from helpers import verify

from sympow.data import DataError, documents, files, shards
from sympow.data.dataset import Dataset
from sympow.data.hf import prepare as hf
from sympow.data.text import prepare as prepare_text

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"document {i} " + "word " * (i % 7) for i in range(100)]
OPTIONS = ["--document_length=16", "--val_fraction=0.1", "--tokenizer=bytes", "--shard_documents=20"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Return a folder with TEXTS in three parquet files with small groups of rows, and another split of five texts."""
    folder = tmp_path_factory.mktemp("parts")
    for i, cut in enumerate((slice(0, 37), slice(37, 60), slice(60, 100))):
        rows = {"text": TEXTS[cut], "id": [*range(len(TEXTS[cut]))]}
        datasets.Dataset.from_dict(rows).to_parquet(str(folder / f"train-{i}.parquet"), batch_size=8)
    rows = {"text": [f"held out {i}" * 9 for i in range(5)], "id": [*range(5)]}
    datasets.Dataset.from_dict(rows).to_parquet(str(folder / "test-0.parquet"))
    return folder


@pytest.fixture(scope="module")
def undisturbed(parts, tmp_path_factory):
    """Return the dataset of the folder, prepared without a break."""
    return prepare(tmp_path_factory.mktemp("whole") / "out", parts)


def prepare(out, *argv):
    hf.main([*map(str, argv), f"--out={out}", *OPTIONS])
    return Dataset(out)


def splits(dataset):
    return {split: [shard["sha256"] for shard in entry["shards"]] for split, entry in dataset.meta["splits"].items()}


def texts(dataset, split):
    return dataset.tokenizer.decode(dataset.read(split, 0, dataset.tokens(split))).split("<|endoftext|>")


def test_a_folder_and_files_of_each_kind_give_the_same_documents(undisturbed, parts, tmp_path):
    assert [len(hashes) for hashes in splits(undisturbed).values()] == [5, 1]
    assert texts(undisturbed, "train")[:18] == [text for i, text in enumerate(TEXTS) if i % 10][:18]
    assert texts(undisturbed, "val")[:5] == TEXTS[:50:10]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"body": text, "n": 1}) + "\n" for text in TEXTS))
    with open(tmp_path / "all.csv", "w", newline="") as f:
        csv.writer(f).writerows([["body"], *([text] for text in TEXTS)])
    files = [parts / f"train-{i}.parquet" for i in range(3)]
    for argv in ([tmp_path / "all.jsonl", "--column=body"], [tmp_path / "all.csv", "--column=body"], files):
        assert splits(prepare(tmp_path / "out", *argv)) == splits(undisturbed), argv


def test_parts_and_groups_without_rows_are_left_out(undisturbed, parts, tmp_path):
    tables = [pq.read_table(parts / f"train-{i}.parquet") for i in range(3)]
    pq.write_table(tables[0][:0], tmp_path / "train-0.parquet")
    with pq.ParquetWriter(tmp_path / "train-1.parquet", tables[0].schema) as file:
        for table in (tables[0][:0], *tables):
            file.write_table(table)
    assert splits(prepare(tmp_path / "out", tmp_path)) == splits(undisturbed)
    assert splits(prepare(tmp_path / "out", *sorted(tmp_path.glob("*.parquet")))) == splits(undisturbed)


@pytest.mark.parametrize("stop", ["train_00001", "train_00004", "val_00000", "meta.json"])
def test_a_run_that_was_cut_gives_the_same_bytes_and_tokenizes_what_is_missing(
    undisturbed, parts, tmp_path, monkeypatch, stop
):
    write, rows, tokenized = shards.write_atomically, documents._rows, []

    def cut(path, data):
        if stop in path:
            raise KeyboardInterrupt
        write(path, data)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for module in (shards, files):
            patch.setattr(module, "write_atomically", cut)
        prepare(tmp_path / "out", parts)
    monkeypatch.setattr(documents, "_rows", lambda read, *args: tokenized.append(read.args) or rows(read, *args))
    dataset = prepare(tmp_path / "out", parts)
    assert splits(dataset) == splits(undisturbed) and dataset.meta["units"] == undisturbed.meta["units"]
    # shards of training end with documents 22, 44, 66 and 88; at 112 the stream has ended
    expected = {"train_00001": [23, 45, 67, 89, 0], "train_00004": [89, 0], "val_00000": [112, 0], "meta.json": [112]}
    assert [first for first, _ in tokenized] == expected[stop]
    assert not (tmp_path / "out" / "unfinished").exists()


@pytest.mark.parametrize("damage", ["train_00001.bin", "val_00000.bin"])
def test_a_damaged_shard_is_made_again(undisturbed, parts, tmp_path, damage):
    shutil.copytree(undisturbed.path, tmp_path / "out")
    with open(tmp_path / "out" / damage, "r+b") as f:
        f.write(b"xx")
    assert splits(prepare(tmp_path / "out", parts, "--verify")) == splits(undisturbed)
    verify(Dataset(tmp_path / "out"))


def test_another_file_under_the_same_name_is_another_source(tmp_path, capsys):
    for word in ("document", "dokument"):
        lines = (json.dumps({"text": text.replace("document", word)}) + "\n" for text in TEXTS)
        (tmp_path / "part.jsonl").write_text("".join(lines))
        dataset = prepare(tmp_path / "out", tmp_path / "part.jsonl")
    assert "its shards are replaced" in capsys.readouterr().out and texts(dataset, "train")[0].startswith("dokument")


@pytest.mark.parametrize("other", ["unknown", 5, "0000-01-01"])
def test_columns_beside_the_text_may_hold_anything(tmp_path, other):
    """`datasets` takes the type of a column, here a date, from the first 10 MB."""
    rows = [{"date": "2024-01-31T10:00:00", "text": text} for text in TEXTS]
    rows[50]["text"] *= 1_000_000
    rows[-1]["date"] = other
    (tmp_path / "part.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = prepare(tmp_path / "out", tmp_path / "part.jsonl")
    assert texts(dataset, "val")[:5] == TEXTS[:50:10]


def test_a_column_that_comes_after_10_mb_is_refused_with_the_script_that_takes_it(tmp_path):
    rows = [{"text": text} for text in TEXTS]
    rows[0]["text"] *= 1_000_000
    rows[-1]["date"] = "2024-01-31"
    part = tmp_path / "part.jsonl"
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="cannot load .*CastError.*or .jsonl of any columns to data/text/prepare.py"):
        prepare(tmp_path / "out", part)
    prepare_text.main([str(part), f"--out={tmp_path / 'out'}", *OPTIONS[:3]])
    assert Dataset(tmp_path / "out").tokens("train") > 10_000_000


def test_a_dataset_grows_to_any_number_of_documents_and_to_all(undisturbed, parts, tmp_path, capsys):
    for count in (30, 75):
        dataset = prepare(tmp_path / "out", parts, f"--documents={count}")
        assert splits(dataset) == splits(prepare(tmp_path / str(count), parts, f"--documents={count}"))
    assert "1 of 5 shards were there" in capsys.readouterr().out
    assert splits(prepare(tmp_path / "out", parts)) == splits(undisturbed)
    with pytest.raises(DataError, match="has 100 documents, not 101"):
        prepare(tmp_path / "out", parts, "--documents=101")


def test_validation_may_be_a_split_of_its_own(parts, tmp_path):
    dataset = prepare(tmp_path / "out", parts, "--val_split=test")
    assert texts(dataset, "val")[:3] == [f"held out {i}" * 9 for i in range(3)]
    assert texts(dataset, "train")[:18] == TEXTS[:18] and len(splits(dataset)["train"]) == 5


@pytest.mark.parametrize(
    "argv, reason",
    [
        (["{parts}", "--split=nope"], r"Bad split: nope. Available splits: \['train', 'test'\]"),
        (["{parts}", "--config=nope"], "'nope' not found. Available"),
        (["{parts}", "--column=body"], 'in the column "body"; its columns are text, id'),
        (["{parts}", "--column=id"], "document 0 .* has '0' in the place of text in the column"),
        (["{tmp}/empty.jsonl"], "cannot load .*empty.jsonl"),
        (["{tmp}/none.parquet"], "has 0 documents, not 1"),
        (["{tmp}/cut.jsonl"], "cannot load .*cut.jsonl"),
        (["{tmp}/holes.jsonl"], "document 4 of .* has 'None'"),
        (["no.parquet"], "no.parquet: give files of one kind .*that are there; data/text/prepare.py takes other text"),
        (["{tmp}/holes.jsonl", "{parts}"], "give files of one kind .*, or one folder of them"),
        (["{tmp}/holes.jsonl", "--split=test"], 'Bad split: test|Unknown split "test"'),
        (["{parts}", "--tokenizer=bpe:300"], "bpe:SIZE needs data/text/prepare.py"),
        (["{parts}", "--documents=1"], "at least 2"),
        (["{parts}", "--document_length=9999"], "no whole row of 9999 tokens"),
    ],
)
def test_what_cannot_be_prepared_is_one_line_that_says_what_there_is(parts, tmp_path, argv, reason):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "cut.jsonl").write_text('{"text": "a"}\n{"te')
    (tmp_path / "holes.jsonl").write_text('{"text": "a"}\n' * 4 + '{"text": null}\n' * 200)
    datasets.Dataset.from_dict({"text": []}).cast_column("text", datasets.Value("string")).to_parquet(
        str(tmp_path / "none.parquet")
    )
    argv = [word.format(parts=parts, tmp=tmp_path) for word in argv]
    with pytest.raises(DataError, match=reason) as refused:
        hf.main([*OPTIONS, f"--out={tmp_path / 'out'}", *argv])
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


def test_a_dataset_is_called_as_on_the_hub_or_as_its_file(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "prepare.py").write_text("")
    for path, name in (("HuggingFaceFW/fineweb-edu", "fineweb-edu"), ("/x/part.v2.jsonl", "part.v2"), ("/x/y/", "y")):
        assert hf.folder_of([path], str(tmp_path)) == str(tmp_path / name)
    for paths in (["a.csv", "b.csv"], ["somebody/text"]):  # the second is the folder of another script
        with pytest.raises(DataError, match="give --out"):
            hf.folder_of(paths, str(tmp_path))


def test_a_name_on_the_hub_is_read_at_the_commit_at_which_it_was_begun(parts, tmp_path, monkeypatch):
    import huggingface_hub

    newest, requests, load = types.SimpleNamespace(sha="1111"), [], datasets.load_dataset
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name: newest)

    def load_dataset(path, split, streaming, name, revision):
        requests.append((path, name, split, revision))
        return load(str(parts), split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    argv = ["somebody/prose", "--config=sample-10BT"]
    prepare(tmp_path / "out", *argv, "--documents=30")
    newest.sha = "2222"
    dataset = prepare(tmp_path / "out", *argv, "--documents=60")
    assert dataset.meta["arguments"]["revision"] == "1111"
    assert requests == 2 * [("somebody/prose", "sample-10BT", "train", "1111")]
    prepare(tmp_path / "out", *argv, "--documents=60")  # complete: nobody is asked
    prepare(tmp_path / "other", *argv)
    assert [revision for *_, revision in requests] == ["1111", "1111", "2222"]
    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_: 1 / 0)
    with pytest.raises(DataError, match="cannot load somebody/prose .*: go online, or give local files"):
        prepare(tmp_path / "third", *argv)
    assert not os.path.exists(tmp_path / "third")
