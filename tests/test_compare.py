"""compare.py tells where runs ended, whatever the state of their logs."""

import json
from statistics import fmean

import pytest

import compare
from runs import plotting


def write_run(folder, train=(), val=(), tail=""):
    """Write a run's folder with these losses at steps 10, 20, ..., the last evaluation at the last step."""
    folder.mkdir()
    first = max(0, len(train) - len(val)) + 1
    lines = [
        dict(step=10 * i, train_loss=y, tokens=1000 * i, seconds=0.5 * i, tok_per_sec=100 if i < 4 else 2000 + i)
        for i, y in enumerate(train, 1)
    ]
    lines += [dict(step=10 * i, val_loss=y, tokens=1000 * i, seconds=0.5 * i) for i, y in enumerate(val, first)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return str(folder)


def cells(capsys, *argv):
    compare.main(list(argv))
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    return [dict(zip(rows[0], row)) for row in rows[2:]]


@pytest.fixture
def options(tmp_path):
    """Ask for a markdown table and a picture."""
    return ["--markdown", f"--png={tmp_path}/pictures/loss.png"]


@pytest.fixture
def table_only(options, monkeypatch):
    """Ask for a markdown table and no picture, which would take a second."""
    monkeypatch.setattr(compare, "plot_loss_curves", lambda runs, png: None)
    return options


def test_table_and_picture_of_three_runs(tmp_path, capsys, options):
    falling = [5 - 0.1 * i for i in range(20)]
    a = write_run(tmp_path / "a", falling, [4.0, 3.0])
    b = write_run(tmp_path / "b", [y - 0.1 for y in falling], [3.9, 2.7])
    c = write_run(tmp_path / "c", falling[:5], [4.1])
    rows = cells(capsys, a, b, c, *options)
    assert [row["run"] for row in rows] == ["a", "b", "c"]
    assert [row["steps"] for row in rows] == ["200", "200", "50"]
    assert rows[0]["tokens"] == "20,000"
    assert rows[0]["train loss"] == f"{fmean(falling[-2:]):.4f}"
    assert [row["val loss"] for row in rows] == ["3.0000", "2.7000", "4.1000"]
    assert [row["val vs first"] for row in rows] == ["1.000x", "0.900x", "1.367x"]
    assert rows[0]["tokens/s"] == "2,012"  # the median, without the slow first three lines
    assert (tmp_path / "pictures/loss.png").read_bytes().startswith(b"\x89PNG")


def test_training_losses_are_compared_if_a_run_was_never_evaluated(tmp_path, capsys, table_only):
    a = write_run(tmp_path / "a", [4.0], [5.0])
    b = write_run(tmp_path / "b", [3.0])
    rows = cells(capsys, a, b, *table_only)
    assert rows[1]["train vs first"] == "0.750x" and rows[1]["val loss"] == "-"


def test_a_run_that_went_on_since_its_evaluation_is_compared_by_training_loss(tmp_path, capsys, table_only):
    a = write_run(tmp_path / "a", [4.0, 3.0], [3.5])
    b = write_run(tmp_path / "b", [4.0, 3.0], [3.4], tail='{"step": 30, "train_loss": 2.7, "tokens": 3000}\n')
    rows = cells(capsys, a, b, *table_only)
    assert rows[0]["val loss"] == "3.5000" and rows[1]["val loss"] == "3.4000 at 20"
    assert rows[1]["train vs first"] == "0.900x"


def test_torn_last_line_is_left_out(tmp_path, capsys, table_only):
    a = write_run(tmp_path / "a", [4.0, 3.0], tail='{"step": 30, "train_lo')
    assert cells(capsys, a, *table_only)[0]["steps"] == "20"


def test_lines_that_hold_no_number_are_left_out(tmp_path, capsys, table_only):
    a = write_run(tmp_path / "a", [4.0], tail='7\n[]\n\n{"step": 20}\n{"step": 30, "train_loss": null}\n\x00\x00\n')
    compare.read_losses(a)
    assert "metrics.jsonl: 4 damaged lines are left out" in capsys.readouterr().err
    assert cells(capsys, a, *table_only)[0]["steps"] == "10"


def test_after_a_resume_the_later_line_wins(tmp_path, capsys, table_only):
    a = write_run(tmp_path / "a", [4.0, 3.0], tail='{"step": 20, "train_loss": 2.5, "tokens": 2000}\n')
    assert cells(capsys, a, *table_only)[0]["train loss"] == "2.5000"


def test_throughput_falls_back_on_tokens_over_seconds(tmp_path, capsys, table_only):
    a = tmp_path / "a"
    a.mkdir()
    (a / "metrics.jsonl").write_text('{"step": 1, "train_loss": 2.0, "tokens": 6000, "seconds": 3.0}\n')
    assert cells(capsys, str(a), *table_only)[0]["tokens/s"] == "2,000"


def test_diverged_run_still_gets_its_row_and_picture(tmp_path, capsys, options):
    a = write_run(tmp_path / "a", [4.0, float("nan"), float("inf")], [float("nan")])
    assert cells(capsys, a, *options)[0]["val loss"] == "nan"


def test_skipped_step_leaves_no_hole(tmp_path, capsys, options):
    losses = [4.0] * 95 + [3.0, float("nan"), 3.0, float("inf"), 2.0]
    a = write_run(tmp_path / "a", losses)
    assert cells(capsys, a, *options)[0]["train loss"] == f"{fmean([4.0] * 5 + [3.0, 3.0, 2.0]):.4f}"
    train, _ = compare.read_losses(a)
    x, y = plotting.loss_curve(train, "step", "train_loss")
    assert 970 not in x and len(x) == len(y) == 98 and plotting.smooth(y)[-1] == 2.5
    b = write_run(tmp_path / "b", [4.0, float("nan")])  # diverged
    assert cells(capsys, b, *options)[0]["train loss"] == "nan"


def test_run_of_evaluations_alone(tmp_path, capsys, options):
    assert cells(capsys, write_run(tmp_path / "a", val=[3.0]), *options)[0]["train loss"] == "-"


def test_names_replace_the_folders(tmp_path, capsys, options):
    a, b = write_run(tmp_path / "a", [4.0]), write_run(tmp_path / "b", [3.0])
    assert [row["run"] for row in cells(capsys, a, b, "--names", "x,$p=4", *options)] == ["x", "$p=4"]


def test_plain_table_is_aligned_and_explains_itself(tmp_path, capsys):
    a = write_run(tmp_path / "a", [4.0])
    compare.main([a, f"--png={tmp_path}/loss.png"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines[0]) == len(lines[1])
    assert "last 10%" in lines[3]


def test_first_steps_do_not_squash_the_picture():
    losses = [11.0, 9.0, 7.0] + [4.0 - 0.01 * i for i in range(97)]
    low, high = plotting.loss_limits([(list(range(100)), losses)])
    assert 2.9 < low < min(losses) and 4.0 < high < 4.2


def test_lowest_point_of_a_short_run_stays_in_the_picture():
    long_run = (list(range(1000)), [3.0] * 1000)
    assert plotting.loss_limits([long_run, ([1, 2], [9.0, 8.0])])[1] > 8.0


@pytest.mark.parametrize("content", [None, "", "{}\n", '{"step": 3, "lr": 0.1}\n'])
def test_refuses_a_folder_without_losses_in_one_line(tmp_path, capsys, content):
    folder = tmp_path / "a"
    if content is not None:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(content)
    with pytest.raises(SystemExit) as stop:
        compare.main([str(folder), f"--png={tmp_path}/loss.png"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 + (content == "{}\n") and str(folder) in error  # that line is warned of


@pytest.mark.parametrize("argv", [[], ["--names=x,y"], ["--nope"]])
def test_refuses_a_wrong_command_line_in_one_line(tmp_path, capsys, argv):
    with pytest.raises(SystemExit) as stop:
        compare.main([write_run(tmp_path / "a", [4.0]), *argv] if argv else [])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
