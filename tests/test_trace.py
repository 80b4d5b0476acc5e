"""train.py --profile=STEP writes a trace of one step and changes no bit of the run."""

import gzip
import json

import pytest
import torch
from helpers import SMALL, call, dataset, join, metrics, start_ranks  # noqa: F401 (dataset is a fixture)

from sympow import train

SHORT = [*SMALL, "--n_layer=1", "--max_iters=4", "--eval_interval=4", "--sample_tokens=0"]


@pytest.fixture
def go(dataset, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    return lambda *argv: call(train.main, *SHORT, f"--dataset={dataset}", *argv)


def read_trace(path):
    """Return the names of the events of a trace that have a duration."""
    with gzip.open(path) as f:
        events = json.load(f)["traceEvents"]
    return [event["name"] for event in events if event["ph"] == "X"]


def test_a_profiled_step_leaves_a_trace_a_table_and_the_same_bits(go, tmp_path, capsys):
    assert go("--out_dir=out/without") == 0
    assert go("--out_dir=out/with", "--profile=3") == 0
    weights = [tmp_path / f"out/{name}/ckpt/step_00000004/model.safetensors" for name in ("without", "with")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert metrics("out/without") == metrics("out/with") and len(metrics("out/with")) == 4
    assert not list((tmp_path / "out/without").glob("trace*"))

    path = tmp_path / "out/with/trace_step_3.json.gz"
    names = read_trace(path)
    # two micro-steps of a layer and the head
    assert names.count("Optimizer.step#AdamW.step") == 1 and names.count("aten::mm") + names.count("aten::addmm") >= 30
    printed = capsys.readouterr().out
    assert "wrote out/with/trace_step_3.json.gz\n" in printed and "Self CPU" in printed and "aten::mm " in printed

    path.unlink()
    more = ["--max_iters=5", "--out_dir=out/with"]
    assert go(*more, "--profile=3") == 0  # the step has been taken
    assert len(metrics("out/with")) == 5 and not path.exists()
    assert go(*more, "--max_iters=6", "--profile=6") == 0  # what a run goes on with may change
    assert read_trace(path.with_name("trace_step_6.json.gz"))


def test_a_full_disk_leaves_no_trace_and_does_not_end_training(go, tmp_path, monkeypatch, capsys):
    def full(trace, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    assert go("--out_dir=out/a", "--profile=3") == 0
    assert "cannot write out/a/trace_step_3.json.gz: [Errno 28]" in capsys.readouterr().out
    assert len(metrics("out/a")) == 4 and not list((tmp_path / "out/a").glob("trace*"))


@pytest.mark.slow
def test_with_a_sharded_model_on_two_ranks_one_trace_is_written(dataset, tmp_path):  # noqa: F811
    for name, step in (("without", 0), ("with", 3)):
        options = [*SHORT, f"--dataset={dataset}", f"--out_dir={name}", "--shard=True", f"--profile={step}"]
        assert join(*start_ranks(2, train.main, *options, cwd=tmp_path)) == [0, 0]
    assert metrics(tmp_path / "without") == metrics(tmp_path / "with")
    (path,) = (tmp_path / "with").glob("trace*")
    names = read_trace(path)
    assert names.count("aten::mm") + names.count("aten::addmm") >= 15
