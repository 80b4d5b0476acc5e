"""evaluate.py measures the loss by position, in pieces of any size."""

import json

import pytest
import torch
from helpers import SMALL, call, dataset, make_dataset  # noqa: F401 (dataset is a fixture)
from test_sample import small

from sympow import evaluate
from sympow import train
from sympow.runs import plots, scores
from sympow.runs.plots import means_by_position


@pytest.mark.parametrize("attention", ["softmax", "sympow_gating", "conformal_sympow"])
def test_pieces_give_the_parallel_forwards_losses(attention, monkeypatch):
    monkeypatch.setattr(scores, "LOGITS_AT_ONCE", 257 * 100)
    model, ids = small(attention), torch.randint(257, (2, 301))
    with torch.no_grad():
        logits = model(ids[:, :-1])[0]
        losses = scores.losses_by_position(model, ids[:, :-1], ids[:, 1:], piece=64)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    assert losses.shape == (2, 300) and (losses.flatten() - expected).abs().max() < 1e-4
    assert (losses.mean() - model(ids[:, :-1], ids[:, 1:])[1]).abs() < 1e-5


def test_means_between_powers_of_two():
    losses = torch.arange(1.0, 8.0)
    assert evaluate.between_powers(losses) == {"1-1": 1.0, "2-2": 2.0, "3-4": 3.5, "5-7": 6.0}
    x, y = means_by_position(torch.ones(1000))
    assert len(x) == len(y) < 80 and x == sorted(x) and set(y) == {1.0}


def test_the_band_is_the_standard_error_over_documents(monkeypatch):
    mean, error = plots.mean_and_standard_error([[1.0, 2.0], [3.0, 2.0], [5.0, 2.0]])
    assert mean.tolist() == [3.0, 2.0] and error.tolist() == pytest.approx([2 / 3**0.5, 0.0])
    assert plots.mean_and_standard_error([[1.0, 2.0]])[1].tolist() == [0.0, 0.0]
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, png: figures.append(figure))
    positions = [1.0, 10.0, 100.0, 1000.0]
    curves = {"a": (positions, [[9.0, 3.0, 2.0, 2.0]] * 5, 128), "b": (positions, [[9.0, 4.0, 3.0, 3.0]] * 5, 256)}
    plots.plot_loss_by_position(curves, "x.png")
    ((axis,),) = (figure.axes for figure in figures)
    assert axis.get_title("left") == "mean of 5 documents; band: standard error" and len(axis.collections) == 2
    assert axis.get_xlabel() == "position in the document, tokens"
    labels = [text.get_text() for text in axis.get_xticklabels()]
    assert labels == ["1", "2", "5", "10", "20", "50", "100", "200", "500", "1k"]
    assert [text.get_text() for text in axis.texts] == ["trained at 128", "trained at 256"]
    assert axis.get_ylim()[1] < 5  # the first loss would squash the others


@pytest.mark.parametrize(
    "number,text", [(1, "1"), (500, "500"), (1000, "1k"), (64_000, "64k"), (2e6, "2M"), (0.5, "0.5")]
)
def test_numbers_on_axes_are_short(number, text):
    assert plots.short_count(number) == text


def test_the_program(dataset, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    for name, attention in (("a", "conformal_sympow"), ("b", "softmax")):
        args = [*SMALL, f"--dataset={dataset}", f"--attention={attention}", f"--out_dir=out/{name}"]
        assert call(train.main, *args, "--max_iters=2", "--eval_interval=2") == 0
    capsys.readouterr()
    options = ["--out_dir=out/a,out/b", "--documents=2", "--json"]
    assert call(evaluate.main, *options) == 0
    out, error = capsys.readouterr()
    assert error == ""  # bars are for terminals
    out = out.splitlines()
    report = json.loads(out[-1])
    assert list(report) == ["out/a", "out/b"] and out[0].split() == ["position", "out/a", "out/b"]
    assert "mean loss in nats a token over 2 documents of 128 tokens" in out and "different data" not in "".join(out)
    assert all(0 < loss < 20 for losses in report.values() for loss in losses.values())
    assert (tmp_path / "loss_by_position.png").stat().st_size > 10_000
    assert call(evaluate.main, "--out_dir=out/a", "--length=100000000") == 2
    error = capsys.readouterr().err
    assert "longer than" in error and "--length=" in error
    assert call(evaluate.main, "--out_dir=out/none") == 2
    monkeypatch.setattr(evaluate, "evaluate_run", lambda *args: pytest.fail("work has started"))
    assert call(evaluate.main, "--out_dir=out/a", "--png=x.foo") == 2
    (tmp_path / "out/b/config.json").write_text("[" * 100_000)
    assert call(evaluate.main, "--out_dir=out/a,out/b") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("evaluate.py: out/b/config.json")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert call(evaluate.main, "--out_dir=out/a,out/b", "--names=x") == 2
    assert "2 different names, got x" in capsys.readouterr().err
    assert call(evaluate.main, "--out_dir=out/a,out/a/", "--names=x", "--documents=1", "--length=8") == 0
    assert capsys.readouterr().out.split()[:2] == ["position", "x"]


def test_runs_on_different_data_are_named_and_a_name_may_have_a_comma(dataset, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    other = make_dataset(tmp_path / "other", "".join(f"{i}, {i * 7}; other lines\n" for i in range(500)))
    for data, out in ((dataset, "out/a"), (other, "out/b,c")):
        args = [*SMALL, f"--dataset={data}", f"--out_dir={out}", "--max_iters=1", "--eval_interval=1"]
        assert call(train.main, *args) == 0
    options = ["--documents=1", "--length=16"]
    assert call(evaluate.main, "--out_dir=out/b,c", *options) == 0
    assert "different data" not in capsys.readouterr().out
    (tmp_path / "out/b,c").rename(tmp_path / "out/d")
    assert call(evaluate.main, "--out_dir=out/a,out/d", *options) == 0
    said = capsys.readouterr().out
    assert "losses on different data, which cannot be compared: out/a text (bytes), out/d text (bytes)" in said


def test_damaged_weights_are_named_and_left_out(dataset, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    settings = [*SMALL, f"--dataset={dataset}", "--out_dir=out/a", "--max_iters=2", "--eval_interval=1"]
    assert call(train.main, *settings) == 0
    evaluate_it = ["--documents=1", "--length=64", "--json"]
    assert call(evaluate.main, "--out_dir=out/a/ckpt/step_00000001", *evaluate_it) == 0
    (expected,) = json.loads(capsys.readouterr().out.splitlines()[-1]).values()
    weights = tmp_path / "out/a/ckpt/step_00000002/model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-5] ^= 4
    weights.write_bytes(raw)
    assert call(evaluate.main, "--out_dir=out/a", *evaluate_it) == 0
    said = capsys.readouterr()
    assert "step_00000002 is damaged and left out: model.safetensors is not what was written" in said.err
    assert json.loads(said.out.splitlines()[-1]) == {"out/a": expected}
    for file in (tmp_path / "out/a/ckpt").glob("*/model.safetensors"):
        file.write_bytes(b"")
    assert call(evaluate.main, "--out_dir=out/a", *evaluate_it) == 2
    assert "every checkpoint in out/a is damaged" in capsys.readouterr().err


def test_documents_are_read_from_their_start(dataset, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    settings = [*SMALL, f"--dataset={dataset}", "--out_dir=out/a", "--max_iters=1", "--eval_interval=1"]
    assert call(train.main, *settings) == 0
    starts, batch = [], evaluate.Windows.batch

    def record(windows, indices):
        starts.extend(i % windows.per_document for i in indices)
        return batch(windows, indices)

    monkeypatch.setattr(evaluate.Windows, "batch", record)
    assert call(evaluate.main, "--out_dir=out/a", "--length=128", "--documents=3") == 0  # a row has four such windows
    assert starts == [0, 0, 0]
