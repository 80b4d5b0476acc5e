"""compare.py tells where runs ended, whatever the state of their logs."""

import json
import re
import sys
from pathlib import Path

import pytest
from helpers import call

from sympow import compare
from sympow.data.dataset import Dataset
from sympow.data.text import prepare
from sympow.runs.folder import fingerprint


def log_lines(key, losses, **values):
    """Return lines of metrics.jsonl with these losses at steps 10, 20, ..."""
    return [{"step": 10 * i, "tokens": 1000 * i, key: loss, **values} for i, loss in enumerate(losses, 1)]


def write_run(folder, *lines, tail="", **settings):
    """Write a run's folder with these lines in metrics.jsonl; return its path."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    if settings:
        (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def read_table(capsys, *argv):
    """Return the rows of the table that compare.py prints, {title: cell}."""
    compare.main([*argv, "--markdown"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    header, _, *rows = [line.strip("| ").split(" | ") for line in lines]
    return [dict(zip(header, row)) for row in rows]


@pytest.fixture
def no_picture(monkeypatch, tmp_path):
    """Work in a new folder, and let a picture fail."""
    monkeypatch.setattr(compare, "plot_loss_curves", lambda runs, png: pytest.fail("nobody asked for a picture"))
    monkeypatch.chdir(tmp_path)


def test_table_and_picture_of_three_runs(tmp_path, capsys):
    losses, runs = [5 - 0.1 * i for i in range(20)], []
    for name, steps, val_loss in (("a", 20, 3.0), ("b", 20, 2.7), ("c", 5, 4.1)):
        lines = log_lines("train_loss", losses[:steps], tok_per_sec=2000 + steps)
        runs.append(write_run(tmp_path / name, *lines, {"step": 10 * steps, "val_loss": val_loss}))
    rows = read_table(capsys, ",".join(runs[:2]), runs[2], "--names=a,$p=4$,c", f"--png={tmp_path}/pictures/loss.png")
    assert ", ".join(rows[0]) == "run, steps, tokens, train loss, val loss, val vs first, tokens/s, bits/byte"
    assert [list(row.values()) for row in rows] == [
        ["a", "200", "20,000", "3.1500", "3.0000", "1.000x", "2,020", "-"],
        ["$p=4$", "200", "20,000", "3.1500", "2.7000", "0.900x", "2,020", "-"],
        ["c", "50", "5,000", "4.6000", "4.1000", "1.367x", "2,005", "-"],
    ]
    assert (tmp_path / "pictures/loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("tail,shown", [("", "-"), ('{"step": 10, "val_loss": 3.4}\n', "3.4000 at 10")])
def test_without_an_evaluation_at_every_end_training_losses_are_compared(tail, shown, tmp_path, capsys, no_picture):
    first = write_run(tmp_path / "a", *log_lines("train_loss", [4.0]), {"step": 10, "val_loss": 3.5})
    second = write_run(tmp_path / "b", *log_lines("train_loss", [4.0, 3.0]), tail=tail)
    row = read_table(capsys, first, second)[1]
    assert row["train vs first"] == "0.750x" and row["val loss"] == shown


@pytest.mark.parametrize(
    "tail,loss",
    [
        ('{"step": 30, "train_lo', "3.0000"),  # torn
        ('7\n[]\n\n{"step": 30}\n\x00\x00\n' + "[" * 100_000 + "\n", "3.0000"),
        ('{"step": 20, "train_loss": 2.5, "tokens": 9}\n', "2.5000"),  # a resumed run
        ('{"step": 20, "train_loss": NaN}\n', "nan"),  # it has diverged
    ],
)
def test_the_last_whole_line_of_a_step_counts(tail, loss, tmp_path, capsys, no_picture):
    (row,) = read_table(capsys, write_run(tmp_path / "a", *log_lines("train_loss", [4.0, 3.0]), tail=tail))
    assert row["steps"] == "20" and row["train loss"] == loss


def test_a_diverged_run_and_one_of_evaluations_alone_have_a_picture(tmp_path, capsys):
    lines = log_lines("train_loss", [4.0, float("nan"), float("inf")]) + log_lines("val_loss", [float("nan")])
    runs = write_run(tmp_path / "a", *lines), write_run(tmp_path / "b", *log_lines("val_loss", [3.0]))
    rows = read_table(capsys, *runs, f"--png={tmp_path}/loss.png")
    assert rows[0]["val loss"] == "nan at 10" and rows[1]["train loss"] == "-"


def test_files_beside_the_runs_are_left_out_by_name(tmp_path, capsys):
    """As `compare.py out/*` gives them after `make demo`."""
    (tmp_path / "loss.png").touch()
    run = write_run(tmp_path / "run", *log_lines("train_loss", [3.0, 2.0]))
    compare.main([str(tmp_path / "loss.png"), run])
    out = capsys.readouterr().out
    assert out.startswith(f"left out, as they are no run folders: {tmp_path}/loss.png\nrun ")


# ---- pictures


def test_a_picture_without_matplotlib_is_refused_and_the_table_needs_none(tmp_path, capsys, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    run = write_run(tmp_path / "a", *log_lines("train_loss", [4.0]))
    assert "pip install matplotlib" in refused(call, compare.main, run, "--png=x.png")
    assert read_table(capsys, run)[0]["train loss"] == "4.0000"


# ---- what is refused, and what is said


@pytest.mark.parametrize("settings", [{"model": None}, {"model": 3}])
def test_settings_without_a_model_are_one_line(tmp_path, refused, settings):
    run = write_run(tmp_path / "a", *log_lines("val_loss", [4.0]), **settings)
    assert f"{run}/config.json is damaged: its model must be a dict" in refused(call, compare.main, run)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ("out/sofmax", "out/sofmax: no such run folder: did you mean out/softmax?"),
        ("sympow", "sympow: no such run folder: did you mean out/sympow?"),
        ("x", "x: no such run folder: the runs in out/ are out/empty, out/softmax, out/sympow"),
        (".", ".: no metrics.jsonl in it: the runs in out/ are out/empty, out/softmax, out/sympow"),
        ("out/empty", "out/empty: its metrics.jsonl holds no losses yet"),
        ("out/softmax --names=x,y", "--names must be 1 different names, got x,y"),
        ("out/softmax --nope", "unrecognized arguments: --nope"),
        ("out/softmax --png=x.foo", "png=x.foo must end in "),
        ("out/softmax --png=folder/", "png=folder/ must end in "),
        ("out/softmax --png=/dev/null/x.png", "png=/dev/null/x.png cannot be written: "),
    ],
)
def test_a_mistake_is_one_line_that_says_what_would_be_right(tmp_path, refused, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    for name in ("sympow", "softmax"):
        write_run(Path("out", name), *log_lines("train_loss", [4.0]))
    write_run(Path("out/empty"), {"step": 3, "lr": 0.1})
    Path("out/sofmax.png").touch()  # a picture is no run
    assert refused(call, compare.main, *arguments.split()).startswith(f"compare.py: {message}")


def test_each_context_has_its_speed_and_what_cannot_be_compared_is_named(tmp_path, capsys, no_picture):
    runs = []
    for name, data, contexts in (("staged", "12", [32, 256]), ("plain", "34", [32])):
        lines = [{"step": n, "tokens": n, "train_loss": 4.0, "tok_per_sec": 1000 * n, "context": n} for n in contexts]
        lines.append({"step": contexts[-1], "val_loss": 3.0, "context": contexts[-1]})
        runs.append(write_run(tmp_path / name, *lines, data=data, dataset=f"data/of_{name}"))
    compare.main(runs)
    out = capsys.readouterr().out
    assert "32,000 then 256,000 " in out
    for line in ("staged plain", "data 12 34", "dataset data/of_staged data/of_plain", "tokens 256 32"):
        assert f"{line}\n" in re.sub(" +", " ", out)
    compare.main(runs[:1])
    assert "differs" not in capsys.readouterr().out


def test_bits_a_byte_compare_tokenizers(tmp_path, capsys):
    runs = []
    (tmp_path / "text").write_text(800 * "a line of text\n")
    for kind in ("bytes", "bpe:300"):
        prepare.main([f"{tmp_path}/text", f"--out={tmp_path}/{kind}", f"--tokenizer={kind}", "--document_length=64"])
        data = fingerprint(Dataset(f"{tmp_path}/{kind}"))
        settings = dict(dataset=f"{tmp_path}/{kind}", data=data, eval_tokens=64)
        runs.append(write_run(tmp_path / f"on_{kind}", {"step": 1, "val_loss": 1.5}, **settings))
    bits, bits_of_bpe = (row["bits/byte"] for row in read_table(capsys, *runs))
    assert bits == "2.1640" and 0.5 < float(bits_of_bpe) < 1  # 1.5 / log(2), and less where a token has three bytes
    (tmp_path / "bytes").rename(tmp_path / "kept")
    (tmp_path / "bpe:300").rename(tmp_path / "bytes")  # other data under the name
    assert [row["bits/byte"] for row in read_table(capsys, *runs)] == ["-", "-"]
