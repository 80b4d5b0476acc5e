"""evaluate.py measures the loss by position, in pieces of any size."""

import json
import shutil

import pytest
import torch
from helpers import SMALL, call, make_dataset
from test_sample import small

from sympow import evaluate
from sympow import train
from sympow.runs import plots, scores


@pytest.mark.parametrize("attention", ["softmax", "sympow_gating", "conformal_sympow"])
def test_pieces_give_the_parallel_forwards_losses(attention, monkeypatch):
    monkeypatch.setattr(scores, "LOGITS_AT_ONCE", 257 * 100)
    model, ids = small(attention), torch.randint(257, (2, 301))
    with torch.no_grad():
        logits = model(ids[:, :-1])[0]
        losses = scores.losses_by_position(model, ids[:, :-1], ids[:, 1:], piece=64)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    assert losses.shape == (2, 300) and (losses.flatten() - expected).abs().max() < 1e-4
    targets = torch.where(torch.arange(300) < 9, -1, ids[:, 1:])  # which have no loss
    with torch.no_grad():
        others = scores.losses_by_position(model, ids[:, :-1], targets, piece=64)
    assert torch.equal(others, torch.where(targets == -1, 0, losses))


def test_means_between_powers_of_two_and_the_standard_error_over_documents():
    assert evaluate.between_powers(torch.arange(1.0, 8.0)) == {"1-1": 1.0, "2-2": 2.0, "3-4": 3.5, "5-7": 6.0}
    mean, error = plots.mean_and_standard_error([[1.0, 2.0], [3.0, 2.0], [5.0, 2.0]])
    assert mean.tolist() == [3.0, 2.0] and error.tolist() == pytest.approx([2 / 3**0.5, 0.0])


@pytest.fixture(scope="module")
def trained_runs(dataset, tmp_path_factory):
    """Train a run of each of two attentions for two steps; return their folder."""
    folder = tmp_path_factory.mktemp("runs")
    for name, attention in (("a", "conformal_sympow"), ("b", "softmax")):
        settings = [f"--dataset={dataset}", f"--attention={attention}", f"--out_dir={folder}/{name}"]
        assert call(train.main, *SMALL, *settings, "--max_iters=2", "--eval_interval=1") == 0
    return folder


@pytest.fixture
def out(trained_runs, tmp_path, monkeypatch):
    """Work in a new folder with copies of the runs in out/."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained_runs, tmp_path / "out")


def read_report(capsys, *argv):
    """Return the report of evaluate.py on two documents, {run: losses}, and what it prints before."""
    capsys.readouterr()
    assert call(evaluate.main, "--documents=2", "--json", *argv) == 0
    *lines, report = capsys.readouterr().out.splitlines()
    return json.loads(report), lines


def test_fewer_documents_than_were_asked_for_are_said_to_be_all(out, capsys):
    assert call(evaluate.main, "--out_dir=out/a", "--documents=100000") == 0
    assert " documents of 128 tokens, all there are\n" in capsys.readouterr().out
    assert not [*out.parent.glob("*.png")]


@pytest.mark.parametrize("folders", [["--out_dir=out/a,out/b"], ["out/a", "out/b"]])
def test_the_program_prints_and_plots_two_runs(folders, out, capsys):
    report, lines = read_report(capsys, *folders, "--png=curves.png")
    assert list(report) == ["out/a", "out/b"] and lines[0].split() == ["position", "out/a", "out/b"]
    assert lines[-2:] == [
        "mean loss in nats a token over 2 documents of 128 tokens",
        "wrote curves.png",
    ]
    assert all(0 < loss < 20 for losses in report.values() for loss in losses.values())
    assert (out.parent / "curves.png").stat().st_size > 10_000


def test_mistakes_are_refused_before_work(out, monkeypatch, refused):
    monkeypatch.setattr(evaluate, "evaluate_run", lambda *args: pytest.fail("work has started"))
    shutil.copytree(out / "b", out / "c")
    (out / "c/config.json").write_text("[" * 100_000)
    for arguments, message in (
        ("--length=100000000", "longer than"),
        ("--out_dir=out/none", "no checkpoint in out/none"),
        ("--dtype=float16", "dtype must be one of auto, float32, bfloat16, got 'float16'"),
        ("--png=x.foo", "png=x.foo must end in"),
        ("--out_dir=out/a,out/c", "out/c/config.json"),
        ("--out_dir=out/a,out/b --names=x", "2 different names, got x"),
    ):
        assert message in refused(call, evaluate.main, "--out_dir=out/a", *arguments.split())


def test_runs_on_different_data_are_named_and_a_name_may_have_a_comma(out, tmp_path, capsys):
    settings = json.loads((out / "b/config.json").read_text())
    settings["dataset"] = make_dataset(tmp_path / "other", "".join(f"{i}, {i * 7}; other lines\n" for i in range(500)))
    (out / "b/config.json").write_text(json.dumps(settings))
    _, lines = read_report(capsys, "--out_dir=out/a,out/b", "--length=16")
    message = "losses on different data, which cannot be compared: out/a text (bytes), out/b text (bytes)"
    assert message in lines
    (out / "b").rename(out / "b,c")
    report, lines = read_report(capsys, "--out_dir=out/b,c", "--names=x", "--length=16")
    assert list(report) == ["x"] and message not in lines


def test_documents_are_read_from_their_start(out, monkeypatch):
    starts, batch = [], evaluate.Windows.batch

    def record(windows, indices):
        starts.extend(i % windows.per_document for i in indices)
        return batch(windows, indices)

    monkeypatch.setattr(evaluate.Windows, "batch", record)
    assert call(evaluate.main, "--out_dir=out/a", "--length=128", "--documents=3") == 0  # a row has four such windows
    assert starts == [0, 0, 0]
