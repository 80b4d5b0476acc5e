"""A run may train on several datasets by weight and evaluate on several: which rows it reads, and what it logs."""

import os
import random
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from helpers import SMALL, assert_same_batch_for_any_ranks, byte_encoding, call, metrics

from sympow import compare
from sympow import train
from sympow.data import DataError
from sympow.data.dataset import Dataset
from sympow.data.loader import train_indices
from sympow.data.mixture import HeldOut, open_dataset, open_windows
from sympow.data.shards import Unit, write_dataset
from sympow.data.tokenizer import Tokenizer
from sympow.training.batches import format_losses
from sympow.runs.folder import fingerprint


def write_set(folder, name, length, rows, val, tokenizer):
    """Write a dataset of random bytes with these numbers of rows; return its path."""
    tokens = np.random.default_rng(len(name) + ord(name[0])).integers(0, 256, (rows + val, length)).astype(np.uint16)
    halves = {"train": tokens[:rows], "val": tokens[rows:]}
    units = [Unit(split, lambda part=part: part) for split, part in halves.items()]
    write_dataset(folder / name, units, tokenizer, length, {"name": name}, "a test", "python prepare.py")
    return str(folder / name)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Return the folder of four datasets with rows of 64 to 512 tokens, and of one with another tokenizer."""
    folder, in_bytes = tmp_path_factory.mktemp("sets"), Tokenizer("bytes")
    for name, length, rows, val in (("a", 64, 40, 6), ("b", 128, 9, 3), ("c", 512, 5, 2), ("d", 64, 30, 4)):
        write_set(folder, name, length, rows, val, in_bytes)
    write_set(folder, "other", 64, 8, 2, Tokenizer("bpe", byte_encoding()))
    return folder


def mix(sets, text):
    """Return the dataset of a text such as "a:1,b:2"; the names are folders in `sets`."""
    return open_dataset(where(sets, text))


def where(sets, text):
    return ",".join(str(sets / part) for part in text.split(","))


# which rows


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_dataset_has_its_share_of_any_number_of_rows_exactly_but_for_rounding(sets, count):
    drawn = random.Random(int(os.environ.get("TEST_SEED", 0)) + count)
    mixture = mix(sets, ",".join(f"{name}:{drawn.randint(1, 10**6) / 1000}" for name in "abcd"[:count]))
    chosen = mixture.choose(0, 500)
    for n in (*range(0, 500, 13), 10**12 + 7):
        counts = mixture.counts(n)
        assert sum(counts) == n and all(abs(c - w * n) <= (count - 1) / 2 for c, w in zip(counts, mixture.weights))
        if n < 500:
            assert counts == np.bincount(chosen[:n], minlength=count).tolist()
    assert (mixture.choose(321, 50) == chosen[321:371]).all()


@pytest.mark.parametrize("pack", [False, True])
def test_same_global_batch_of_a_mixture_for_any_ranks_and_batch_sizes(sets, pack):
    windows = open_windows(mix(sets, "a:0.5,b:0.2,c:0.3"), "train", 32, pack)
    expected = windows.train_rows(1, 3 * 16, 16)
    assert_same_batch_for_any_ranks(windows, 1, 3, expected)
    first, last = (windows.train_rows(1, 48, 16, [span])[1] for span in ((0, 8), (8, 32)))  # what two ranks share
    assert torch.equal(torch.cat((first, last), 1), expected[1])


def test_a_dataset_goes_through_its_windows_as_it_would_alone_epoch_after_epoch(sets):
    windows = open_windows(mix(sets, "a:3,b:1"), "train", 32)
    chosen, (_, rows) = windows.mixture.choose(0, 400), windows.train_rows(7, 0, 400)
    for number, alone in enumerate(windows.parts):
        own = rows[chosen == number]
        assert torch.equal(own, alone.batch(train_indices(alone, 7, 0, len(own)))[1])
        epochs = [own[i : i + len(alone)] for i in range(0, len(own), len(alone))]
        assert len(epochs) > 2 and all(len({tuple(row) for row in part.tolist()}) == len(part) for part in epochs)
    assert [len(part) for part in windows.parts] == [80, 36]


# refusals


@pytest.mark.parametrize(
    "text, reason",
    [
        ("a,b", "with a weight above 0 each"),
        ("a:1,b", "with a weight above 0 each"),
        ("a:1,b:0", "with a weight above 0 each"),
        ("a:1,b:-1", "with a weight above 0 each"),
        ("a:0.7", "at least two"),
        ("a:1,", "with a weight above 0 each"),
        ("a:1,a:2", "have the same name"),
        ("a:1,nosuch:2", "no dataset"),
        ("a:1,other:1", "the tokens of the dataset a .* are not those of the dataset other"),
    ],
)
def test_what_is_no_mixture_is_refused_in_one_line(sets, text, reason):
    with pytest.raises(DataError, match=reason):
        mix(sets, text)


def test_a_program_that_needs_one_dataset_says_so_of_a_mixture():
    with pytest.raises(DataError, match="is a mixture of datasets.*--dataset=NAME"):
        Dataset("a:0.7,b:0.3")


def test_the_documents_of_a_mixture_are_as_long_as_the_shortest(sets):
    assert mix(sets, "c:1,b:1").document_length == 128


def test_names_of_losses_are_unambiguous(sets, tmp_path):
    shutil.copytree(sets / "a", tmp_path / "a")
    dataset = open_dataset(str(sets / "a"))
    for val_datasets, reason in (
        (f"{sets / 'c'},", "no dataset ''"),
        (str(tmp_path / "a"), "a name of the training data already"),
        (f"{sets / 'b'},{sets / 'b'}", "have the same name"),
        (f"{sets / 'other'}", "are not those of the dataset other"),
    ):
        with pytest.raises(DataError, match=reason):
            HeldOut(dataset, val_datasets, 32)
    held_out = HeldOut(mix(sets, "a:1,b:3"), f"{sets / 'c'}, {sets / 'd'}", 32)
    weights = {"val_loss/a": 0.25, "val_loss/b": 0.75, "val_loss/c": 0.0, "val_loss/d": 0.0}
    assert {part.key: part.weight for part in held_out.parts} == weights
    losses = held_out.losses([1.0, 2.0, float("nan"), 4.0])
    assert losses["val_loss"] == 1.75 and losses["val_loss/d"] == 4.0
    assert format_losses(losses).startswith("val loss 1.7500, val loss/a 1.0000, val loss/b 2.0000, val loss/c nan, ")
    assert [part.key for part in HeldOut(dataset, "", 32).parts] == ["val_loss"]


def test_the_fingerprint_is_of_the_shares_and_the_contents_wherever_they_lie(sets, tmp_path):
    shutil.copytree(sets / "b", tmp_path / "b")
    first, *hashes = (
        fingerprint(mix(sets, text)) for text in ("a:0.7,b:0.3", "a:0.6,b:0.4", "a:0.7,d:0.3", "b:0.3,a:0.7")
    )
    assert len({first, *hashes}) == 4 and fingerprint(mix(sets, "a:7,b:3")) == first
    assert fingerprint(open_dataset(f"{sets / 'a'}:0.7,{tmp_path / 'b'}:0.3")) == first


# training


@pytest.fixture(scope="module")
def options(sets):
    """Return the options of a run on three parts of a and one of b."""
    return [f"--dataset={where(sets, 'a:3,b:1')}", f"--val_datasets={sets / 'c'}", "--out_dir=out"]


@pytest.fixture
def go(go, options):
    """Return a function that trains in this process, in tmp_path/out."""
    return partial(go, *options)


@pytest.fixture(scope="module")
def unbroken(options, tmp_path_factory):
    """Return the folder of a run of 6 steps on a mixture without a break."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert call(train.main, *SMALL, *options, f"--out_dir={out}") == 0
    return out


KEYS = ("train_loss", "grad_norm", "val_loss", "val_loss/a", "val_loss/b", "val_loss/c", "epochs/a", "epochs/b")


def numbers(folder):
    return {key: metrics(folder, key) for key in KEYS}


def test_each_loss_is_logged_and_the_whole_is_their_weighted_mean(go, unbroken, sets, capsys):
    logged = numbers(unbroken)
    assert all([*logged[key]] == [3, 6] for key in KEYS[2:])
    for step in (3, 6):
        assert logged["val_loss"][step] == 0.75 * logged["val_loss/a"][step] + 0.25 * logged["val_loss/b"][step]
    assert [*logged["epochs/a"].values()] == [18 / 80, 36 / 80] and logged["epochs/b"][6] == 12 / 36
    for name in ("b", "c"):  # the loss of a dataset is what a run on it alone reports of the same weights
        argv = [f"--init_from={unbroken}", "--eval_only=True", f"--dataset={sets / name}", "--val_datasets="]
        assert go(*argv, f"--out_dir={name}") == 0
        assert f"val loss {logged[f'val_loss/{name}'][6]:.4f} at context 32" in capsys.readouterr().out


def test_a_run_on_a_mixture_that_is_cut_goes_on_with_the_same_bits(go, unbroken):
    assert go("--max_iters=4") == 0 and go() == 0
    assert [numbers("out")[key] | numbers(unbroken)[key] for key in KEYS] == [numbers("out")[key] for key in KEYS]


def test_other_weights_are_refused_on_resume_and_other_names_are_not(go, sets, unbroken, tmp_path, refused):
    shutil.copytree(unbroken, tmp_path / "out")
    shutil.copytree(sets / "b", tmp_path / "moved" / "b")
    message = refused(go, f"--dataset={where(sets, 'a:2,b:1')}")
    assert f"dataset={where(sets, 'a:3,b:1')}" in message and f"now dataset={where(sets, 'a:2,b:1')}" in message
    assert refused(go, f"--dataset={sets / 'a'}")
    moved = f"--dataset={sets / 'a'}:0.75,{tmp_path / 'moved' / 'b'}:0.25"
    assert go(moved, "--val_datasets=", "--max_iters=9") == 0
    assert [*metrics("out", "val_loss")] == [3, 6, 9] and 9 not in metrics("out", "val_loss/c")


def test_stages_and_packing_take_a_mixture(go, refused):
    argv = ["--pack=1", "--then=64@3,256@5", "--attention=sympow_gating", "--tokens_per_step=512"]
    assert go(*argv) == 0
    epochs = metrics("out", "epochs/a")  # 16 rows of 32 for 3 steps, 8 of 64 for 2, 2 of 256 for one
    assert epochs[6] == pytest.approx(36 / 80 + 12 / 40 + 1 / 10) and metrics("out", "context")[6] == 256
    message = "then 128 is longer than the documents of a (64 tokens)"
    assert message in refused(go, "--then=128@3", "--out_dir=b")


def test_compare_takes_the_loss_of_one_dataset(unbroken, capsys, refused):
    compare.main([str(unbroken), "--metric=val_loss/c"])
    out = capsys.readouterr().out
    assert "val loss/c" in out and f"{numbers(unbroken)['val_loss/c'][6]:.4f}" in out
    known = "val_loss, val_loss/a, val_loss/b, val_loss/c"
    for metric, reason in (
        ("val_loss/x", f"holds no val_loss/x, but {known}"),
        ("tokens", "--metric must be val_loss or val_loss/NAME, got 'tokens'"),
    ):
        assert reason in refused(call, compare.main, str(unbroken), f"--metric={metric}")
