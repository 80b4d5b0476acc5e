"""compare.py tells where runs ended, whatever the state of their logs."""

import json
from statistics import fmean

import pytest

from sympow import compare
from sympow.runs import plots


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


@pytest.mark.parametrize(
    "tail,expected",
    [
        ('{"step": 30, "train_lo', {"steps": "20", "train loss": "3.0000"}),  # torn
        ('7\n[]\n\n{"step": 30}\n\x00\x00\n', {"steps": "20", "train loss": "3.0000"}),
        ('{"step": 20, "train_loss": 2.5, "tokens": 9}\n', {"steps": "20", "train loss": "2.5000"}),  # a resumed run
    ],
)
def test_the_last_whole_line_of_a_step_counts(tail, expected, tmp_path, capsys, table_only):
    (row,) = cells(capsys, write_run(tmp_path / "a", [4.0, 3.0], tail=tail), *table_only)
    assert expected.items() <= row.items()


def test_throughput_falls_back_on_tokens_over_seconds(tmp_path, capsys, table_only):
    line = '{"step": 1, "train_loss": 2.0, "tokens": 6000, "seconds": 3.0}\n'
    assert cells(capsys, write_run(tmp_path / "a", tail=line), *table_only)[0]["tokens/s"] == "2,000"


def test_a_diverged_run_and_one_of_evaluations_alone_get_their_rows_and_picture(tmp_path, capsys, options):
    diverged = write_run(tmp_path / "a", [4.0, float("nan"), float("inf")], [float("nan")])
    rows = cells(capsys, diverged, write_run(tmp_path / "b", val=[3.0]), *options)
    assert rows[0]["val loss"] == "nan" and rows[1]["train loss"] == "-"


def test_skipped_step_leaves_no_hole(tmp_path, capsys, table_only):
    losses = [4.0] * 95 + [3.0, float("nan"), 3.0, float("inf"), 2.0]
    a = write_run(tmp_path / "a", losses)
    assert cells(capsys, a, *table_only)[0]["train loss"] == f"{fmean([4.0] * 5 + [3.0, 3.0, 2.0]):.4f}"
    train, _ = compare.read_losses(a)
    x, y = plots.loss_curve(train, "step", "train_loss")
    assert 970 not in x and len(x) == len(y) == 98 and plots.smooth(y)[-1] == 2.5
    b = write_run(tmp_path / "b", [4.0, float("nan")])  # diverged
    assert cells(capsys, b, *table_only)[0]["train loss"] == "nan"


def test_names_replace_the_folders(tmp_path, capsys, table_only):
    a, b = write_run(tmp_path / "a", [4.0]), write_run(tmp_path / "b", [3.0])
    assert [row["run"] for row in cells(capsys, a, b, "--names", "x,$p=4", *table_only)] == ["x", "$p=4"]


def test_plain_table_is_aligned_and_explains_itself(tmp_path, capsys):
    a = write_run(tmp_path / "a", [4.0])
    compare.main([a, f"--png={tmp_path}/loss.png"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines[0]) == len(lines[1])
    assert "last 10%" in lines[3]


@pytest.fixture
def figures(monkeypatch):
    """Return a list that gets the figures, drawn, instead of files."""
    found = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, png: (figure.canvas.draw(), found.append(figure)))
    return found


def test_axes_on_which_the_curves_look_alike_share_a_panel(tmp_path):
    runs = {name: compare.read_losses(write_run(tmp_path / name, [4.0, 3.0], [3.5])) for name in ("a", "b")}
    assert plots.loss_axes(runs) == [("step", "step", 1)]
    for line in runs["b"][0] + runs["b"][1]:
        line["seconds"] *= 2
    assert plots.loss_axes(runs)[1:] == [("seconds", "training time, seconds", 1)]
    for line in runs["b"][0] + runs["b"][1]:
        line["tokens"] *= 2
    assert [label for _, label, _ in plots.loss_axes(runs)] == ["step", "tokens"]
    for line in runs["b"][0]:
        del line["tokens"]
    assert [key for key, _, _ in plots.loss_axes(runs)] == ["step", "tokens", "seconds"]


def test_nine_runs_with_long_names_cover_nothing(figures, tmp_path):
    lines = lambda key, i: [
        dict(step=s, tokens=1000 * s, seconds=s * (1 + i), **{key: 3 + i + 1 / s}) for s in range(1, 40)
    ]
    runs = {f"{'long_' * 20}{i}": (lines("train_loss", i), lines("val_loss", i)[::9]) for i in range(9)}
    plots.plot_loss_curves(runs, "x.png")
    (figure,) = figures
    assert len(figure.axes) == 3 and all(axis.get_visible() for axis in figure.axes)
    (legend,) = figure.legends
    top = legend.get_window_extent().y1
    assert legend.get_window_extent().y0 >= 0 and all(axis.get_tightbbox().y0 > top for axis in figure.axes)
    names = [text.get_text() for text in legend.get_texts()]
    assert len(set(names)) == 10 and max(map(len, names)) <= plots.NAME_LENGTH
    looks = {(line.get_color(), line.get_linestyle()) for line in legend.get_lines()[:9]}
    assert len(looks) == 9
    for axis in figure.axes:
        circles = [line for line in axis.lines if line.get_marker() == "o" and line.get_linestyle() == "None"]
        assert len(circles) == 9
        for ticks in (axis.get_xticks(), axis.get_yticks()):
            step = f"{ticks[1] - ticks[0]:e}"
            assert step[:8] in ("1.000000", "2.000000", "5.000000"), ticks


def test_equal_short_names_and_names_with_an_underscore_are_told_apart():
    names = [f"{'a' * 30}{i}{'b' * 30}" for i in range(2)] + ["_c", "日\n本\udcff"]
    handles = plots._run_handles(plots._looks(names))
    first, second, third, fourth = (handle.get_label() for handle in handles)
    assert first != second and not third.startswith("_") and fourth == "日 本?"


def test_noise_that_two_runs_share_cancels_in_their_relative_loss():
    noise = [1 + 0.1 * (i % 7) for i in range(100)]
    lines = lambda factor, n: [dict(step=i, tokens=i, train_loss=factor * noise[i]) for i in range(n)]
    shifts = plots.relative_losses({"a": (lines(2, 100), []), "b": (lines(2.2, 40), [])})
    assert max(abs(y - 10) for y in shifts["b"][0][1]) < 1e-6
    lines = lambda loss: [dict(step=i, tokens=i, train_loss=loss, val_loss=loss) for i in range(3)]
    shifts = plots.relative_losses({"a": (lines(2.0), lines(2.0)), "b": ([], lines(3.0)), "zero": (lines(0.0), [])})
    assert shifts["b"][1] == ([0, 1, 2], [50.0] * 3) and shifts["b"][0] == ([], [])
    assert plots.relative_losses({"zero": (lines(0.0), []), "a": (lines(2.0), [])}) == {}


@pytest.mark.parametrize(
    "png,name", [("x", "x.png"), ("x.", "x.png"), ("v1.2/x", "v1.2/x.png"), ("x.PDF", "x.PDF"), (".png", ".png.png")]
)
def test_the_picture_has_the_name_that_is_printed(png, name):
    assert plots.choose_picture(png) == (name, "")


@pytest.mark.parametrize("png", ["x.foo", "x.pgf", "", "folder/", ".", "..", "a" * 300, "/dev/null/x.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_work(png, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "read_losses", lambda folder: pytest.fail("work has started"))
    with pytest.raises(SystemExit) as stop:
        compare.main(["out/a", f"--png={png}"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "png" in error


def test_a_picture_that_could_not_be_written_leaves_nothing(tmp_path, monkeypatch, capsys):
    from matplotlib.figure import Figure

    def write_half(figure, path, **options):
        with open(path, "w") as f:
            f.write("half")
        raise OSError(27, "File too large")

    monkeypatch.setattr(Figure, "savefig", write_half)
    with pytest.raises(OSError, match="File too large"):  # run_program prints it in one line
        compare.main([write_run(tmp_path / "a", [4.0]), f"--png={tmp_path}/new/x.png"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_first_steps_do_not_squash_the_picture():
    losses = [11.0, 9.0, 7.0] + [4.0 - 0.01 * i for i in range(97)]
    low, high = plots.loss_limits([(list(range(100)), losses)])
    assert 2.9 < low < min(losses) and 4.0 < high < 4.2


def test_a_run_that_diverges_leaves_the_picture():
    steps = list(range(100))
    low, high = plots.loss_limits([(steps, [6.0] + [3.0] * 99), (steps, [6.0] + [900.0] * 99)])
    assert low < 3 and 6 < high < 7
    assert plots.loss_limits([(steps, [6.0] + [3.0] * 50 + [900.0] * 49)])[1] < 7


def test_lowest_point_of_a_short_run_stays_in_the_picture():
    long_run = (list(range(1000)), [3.0] * 1000)
    assert plots.loss_limits([long_run, ([1, 2], [9.0, 8.0])])[1] > 8.0


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


def test_speeds_are_of_each_context_and_other_contexts_of_val_losses_are_named(tmp_path, capsys, table_only):
    for name, contexts in (("staged", [32, 32, 256, 256]), ("plain", [32] * 4)):
        (tmp_path / name).mkdir()
        lines = [dict(step=i, train_loss=4.0, tok_per_sec=1000 * n, context=n) for i, n in enumerate(contexts, 1)]
        lines.append(dict(step=4, val_loss=3.0, context=contexts[-1]))
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    staged, plain = (str(tmp_path / name) for name in ("staged", "plain"))
    compare.main([staged, plain, *table_only])
    out = capsys.readouterr().out
    assert "| 32,000 then 256,000 |" in out and "| 32,000 |" in out
    assert out.endswith("val losses at different contexts: staged 256, plain 32\nwrote " + table_only[1][6:] + "\n")
    compare.main([plain, *table_only])
    assert "different contexts" not in capsys.readouterr().out


def test_runs_on_different_data_are_named(tmp_path, capsys, table_only):
    runs = [write_run(tmp_path / name, [4.0]) for name in "abc"]
    compare.main([*runs, *table_only])
    assert "different data" not in capsys.readouterr().out  # nothing is known of it
    for name, data in (("a", "12"), ("b", "34"), ("c", "12")):
        (tmp_path / name / "config.json").write_text(json.dumps({"data": data, "dataset": f"data/of_{name}"}))
    compare.main([*runs, *table_only])
    assert "losses on different data: a data/of_a, b data/of_b, c data/of_c\n" in capsys.readouterr().out
    compare.main([runs[0], runs[2], *table_only])
    assert "different data" not in capsys.readouterr().out
