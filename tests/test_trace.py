"""train.py --profile=STEP writes a trace of one step and changes no bit of the run."""

import gzip
import json

import pytest
from helpers import SMALL, call, dataset, join, metrics, start_ranks  # noqa: F401 (dataset is a fixture)

from sympow import train
from sympow.runs import trace

SHORT = [*SMALL, "--n_layer=1", "--max_iters=4", "--eval_interval=4", "--sample_tokens=0"]


def read_trace(path):
    """Return {name: number of events} of a trace."""
    with gzip.open(path) as f:
        events = json.load(f)["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    return {name: names.count(name) for name in set(names)}


def test_a_profiled_step_leaves_a_trace_a_table_and_the_same_bits(dataset, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    for name, step in (("without", 0), ("with", 3)):
        assert call(train.main, *SHORT, f"--dataset={dataset}", f"--out_dir=out/{name}", f"--profile={step}") == 0
    weights = [tmp_path / f"out/{name}/ckpt/step_00000004/model.safetensors" for name in ("without", "with")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert metrics("out/without") == metrics("out/with") and len(metrics("out/with")) == 4
    assert not list((tmp_path / "out/without").glob("trace*"))

    (path,) = (tmp_path / "out/with").glob("trace*")
    names = read_trace(path)
    assert path.name == "trace_step_3.json.gz"
    products = sum(count for name, count in names.items() if name in ("aten::mm", "aten::addmm"))
    assert names["Optimizer.step#AdamW.step"] == 1 and products >= 2 * 3 * 5  # two micro-steps of a layer and the head
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("step 3: wrote"))
    assert "out/with/trace_step_3.json.gz" in lines[at] and lines[at + 1].split() == [
        "ms",
        "share",
        "calls",
        "operator",
    ]
    table = [line.split() for line in lines[at + 2 : at + 12]]
    assert all(float(row[0]) >= 0 and row[1].endswith("%") and int(row[2]) > 0 for row in table)
    times = [float(row[0]) for row in table]
    assert times == sorted(times, reverse=True) and any(row[3].startswith("aten::") for row in table)

    path.unlink()
    more = [*SHORT, "--max_iters=5", f"--dataset={dataset}", "--out_dir=out/with"]
    assert call(train.main, *more, "--profile=3") == 0  # the step has been taken
    assert len(metrics("out/with")) == 5 and not path.exists()
    assert call(train.main, *more, "--max_iters=6", "--profile=6") == 0  # what a run goes on with may change
    assert read_trace(path.with_name("trace_step_6.json.gz"))


def test_a_full_disk_and_a_step_cut_short_leave_no_trace(dataset, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)

    def full(found, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace, "write_trace", full)
    assert call(train.main, *SHORT, f"--dataset={dataset}", "--out_dir=out/a", "--profile=3") == 0
    assert "cannot write out/a/trace_step_3.json.gz: [Errno 28]" in capsys.readouterr().out

    class Trainer:
        records, device, ranks = True, train.torch.device("cpu"), None
        cfg, progress = train.TrainConfig(profile=3, out_dir="out/a"), train.checkpoint.Progress(2)

    with trace.profile_step(Trainer):
        pass  # a signal came: the step is not counted
    assert not list((tmp_path / "out/a").glob("trace*"))


@pytest.mark.parametrize(
    "options,message",
    [
        (["--profile=2"], "profile must be 0 (none) or a step from 3 to 4, got 2"),
        (["--profile=5"], "profile must be 0 (none) or a step from 3 to 4, got 5"),
        (["--profile=-1"], "got -1"),
        (["--profile=3", "--eval_only=True"], "profile=3 is a step of training, and eval_only takes none"),
        (["--profile=3-5"], "profile must be a whole number"),
    ],
)
def test_a_step_that_is_not_taken_is_refused(dataset, tmp_path, monkeypatch, capsys, options, message):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    assert call(train.main, *SHORT, f"--dataset={dataset}", "--out_dir=out/a", *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_with_a_sharded_model_on_two_ranks_one_trace_is_written(dataset, tmp_path):  # noqa: F811
    for name, step in (("without", 0), ("with", 3)):
        options = [*SHORT, f"--dataset={dataset}", f"--out_dir=out/{name}", "--shard=True", f"--profile={step}"]
        folder = tmp_path / name
        folder.mkdir()
        assert join(*start_ranks(2, train.main, *options, cwd=str(folder))) == [0, 0]
    assert metrics(tmp_path / "without/out/without") == metrics(tmp_path / "with/out/with")
    (path,) = (tmp_path / "with/out/with").glob("trace*")
    names = read_trace(path)
    assert sum(count for name, count in names.items() if name in ("aten::mm", "aten::addmm")) >= 2 * 3 * 5 / 2
