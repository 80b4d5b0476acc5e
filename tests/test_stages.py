"""A run in stages takes the steps that its contexts alone would take, and no kill or resume changes that."""

import json
import math
import os
import pathlib
import signal
import sys
from fractions import Fraction
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from helpers import SMALL, assert_same_run, call, join, lines, metrics, refusal, start_ranks, weights
from test_train import Ticks

from sympow import evaluate
from sympow import train
from sympow.data.dataset import Dataset
from sympow.training import batches, stages
from sympow.runs import checkpoint
from sympow.runs import metrics as run_metrics
from sympow.runs.settings import final_context, parse_stages

THEN = "--then=64@0.5,256@5"  # after 3 and after 5 of 6 steps
GATED = ["--attention=sympow_gating", "--dropout=0.1", "--sample_tokens=0"]


@pytest.fixture(scope="module")
def reference(dataset, tmp_path_factory):
    """Return the folder of a run in three stages with dropout, without a break."""
    folder = tmp_path_factory.mktemp("stages") / "reference"
    options = [*SMALL, *GATED, f"--dataset={dataset}", THEN, "--eval_interval=1", f"--out_dir={folder}"]
    assert call(train.main, *options) == 0
    return folder


def progress(folder, step):
    with open(os.path.join(folder, "ckpt", f"step_{step:08d}", "progress.json")) as f:
        return json.load(f)


@pytest.mark.parametrize("extra", [["--rope_base=77"], ["--pack=1", "--attention=sympow_gating,softmax", "--window=8"]])
def test_stages_are_runs_of_one_context_stitched_together(go, extra):
    assert go("--out_dir=out/stages", "--then=64@0.5,256@5", *extra) == 0
    parts = [(32, 4, 3), (64, 2, 5), (256, 1, 6)]  # context, batch size, last step
    for block_size, batch_size, last in parts:  # a run of one context that each time goes on with another one
        sizes = [f"--block_size={block_size}", f"--batch_size={batch_size}"]
        if block_size > 32:
            config = pathlib.Path("out/one/config.json")
            config.write_text(json.dumps(json.loads(config.read_text()) | {"block_size": block_size}))
        assert go("--out_dir=out/one", *sizes, f"--max_iters={last}", *extra) == 0
    for key in ("train_loss", "grad_norm", "tokens"):
        assert metrics("out/stages", key) == metrics("out/one", key)
    assert metrics("out/stages", "val_loss")[6] == metrics("out/one", "val_loss")[6]  # at the final context
    assert metrics("out/stages", "val_loss")[3] != metrics("out/one", "val_loss")[3]
    assert [line["context"] for line in lines("out/stages") if "val_loss" in line] == [256, 256]
    assert weights("out/stages") == weights("out/one")


# A run stops when it reads the batch of (step, micro-step); the step before reads the first batch of a step ahead
MOMENTS = [(2, 1), (3, 0), (3, 1), (4, 1), (5, 0)]


class Ended(Exception):
    """Stands for what ends a run without warning."""


@pytest.mark.parametrize("event", ["end", "signal"])
def test_a_run_that_stops_before_in_or_after_the_step_of_a_switch_goes_on_with_the_same_bits(
    go, reference, monkeypatch, event
):
    read, moments = batches.train_batch, [*MOMENTS]

    def stop(windows, seed, step, part, *sizes):
        if (step, part) in moments[:1]:
            moments.pop(0)
            if event == "end":
                raise Ended
            os.kill(os.getpid(), signal.SIGTERM)
        return read(windows, seed, step, part, *sizes)

    monkeypatch.setattr(batches, "train_batch", stop)
    options = [*GATED, THEN, "--eval_interval=1", "--out_dir=out/a"]
    for _ in MOMENTS:
        with suppress(Ended):
            assert go(*options) == 0
    assert go(*options) == 0 and not moments
    assert_same_run("out/a", reference)


def train_and_note_contexts():
    """Train as train.py, by a clock of this rank's own; write step and context of every micro-step to contexts_RANK."""
    read = batches.train_batch
    run_metrics.time = Ticks(0.01 * (1 + int(os.environ["RANK"])))

    def noted(windows, seed, step, *sizes):
        with open(f"contexts_{os.environ['RANK']}", "a") as f:
            print(step, windows.block_size, file=f)
        return read(windows, seed, step, *sizes)

    batches.train_batch = noted
    stages.REHEARSED = ("cpu",)
    train.main()


@pytest.mark.slow
def test_ranks_switch_at_the_same_step(dataset, tmp_path):
    sizes = ["--batch_size=2", "--tokens_per_step=1024", "--then=64@0.5,256@0.8"]
    limits = ["--max_seconds=1", "--max_iters=100000", "--eval_interval=100000"]
    ranks = start_ranks(2, train_and_note_contexts, *SMALL, f"--dataset={dataset}", *sizes, *limits, cwd=tmp_path)
    assert join(*ranks) == [0, 0], (tmp_path / "rank_0").read_text()
    noted = [(tmp_path / f"contexts_{i}").read_text().splitlines() for i in range(2)]
    assert noted[0] == noted[1]
    logged = {line["step"]: line["context"] for line in lines(tmp_path / "out/train") if "train_loss" in line}
    # of a step that was read ahead before the time for a switch had come, the batch that was read again is what counts
    for step, context in dict(map(int, line.split()) for line in noted[0]).items():
        assert logged.get(step + 1, context) == context
    assert list(dict.fromkeys(logged.values())) == [32, 64, 256]


def test_with_a_limit_of_time_a_resumed_run_never_goes_back_a_stage(go, monkeypatch):
    monkeypatch.setattr("sympow.runs.metrics.time", Ticks())
    timed = ["--then=64@0.5", "--max_iters=100000", "--eval_interval=100000", "--out_dir=out/a"]
    assert go(*timed, "--max_seconds=1") == 0
    contexts, last = metrics("out/a", "context"), max(metrics("out/a"))
    ((context, switch),) = progress("out/a", last)["stages"]
    assert context == 64 and 0.3 * last < switch < 0.7 * last
    assert all(contexts[step] == (32 if step <= switch else 64) for step in metrics("out/a"))
    assert go(*timed, "--max_seconds=4") == 0  # 2 s have not passed
    contexts = [line["context"] for line in lines("out/a") if "train_loss" in line]
    assert contexts == sorted(contexts) and max(metrics("out/a")) > last
    assert progress("out/a", max(metrics("out/a")))["stages"] == [[64, switch]]


def test_sizes_follow_from_the_first_stage(dataset):
    data = Dataset(dataset)
    for world, batch_size, tokens, then, expected in (
        (1, 4, 256, "64@1,128@2", [(4, 2), (2, 2), (1, 2)]),  # tokens in a micro-step stay
        (1, 1, 1024, "64@1,256@2", [(1, 32), (1, 16), (1, 4)]),  # a window is longer than the micro-step was
        (2, 6, 1536, "64@1,128@2", [(6, 4), (3, 4), (1, 6)]),  # 192 / 128 is not whole
    ):
        cfg = train.TrainConfig(block_size=32, batch_size=batch_size, tokens_per_step=tokens, then=then)
        plan, held_out = stages.make_stages(cfg, {}, data, SimpleNamespace(data_world=world))
        assert [(stage.batch_size, stage.accumulation) for stage in plan] == expected
        assert all(s.batch_size * s.accumulation * s.block_size * world == tokens for s in plan)
        assert held_out.block_size == plan[-1].block_size and held_out.parts[0].windows.split == "val"


def test_shares_are_exact():
    assert parse_stages("64@0.1,128@0.29,256@.9") == [
        (64, Fraction(1, 10)),
        (128, Fraction(29, 100)),
        (256, Fraction(9, 10)),
    ]
    assert [stages.steps_before(Fraction(29, 100), n) for n in (100, 10, 5, 1)] == [29, 3, 1, 0]  # 0.29 * 100 < 29
    assert stages.steps_before(90, 100) == stages.steps_before(Fraction(9, 10), 100) == 90


def test_on_resume_stages_that_have_begun_stay_and_later_ones_may_change(go, refused):
    assert go("--out_dir=out/a", "--max_iters=4", "--then=64@0.5") == 0
    message = "--then='64@2' is what it did, and later stages may follow with commas"
    for then in ("64@0.5", "64@3", "", "64@2,128@3"):  # after 3 steps, and in the last one it had entered 128
        assert message in refused(go, "--out_dir=out/a", "--max_iters=6", f"--then={then}")
    message = "was trained with block_size=32, now block_size=64"
    assert message in refused(go, "--out_dir=out/a", "--block_size=64", "--then=128@2")
    assert progress("out/a", 4)["best"] < math.inf and progress("out/a", 4)["context"] == 64
    assert go("--out_dir=out/a", "--max_iters=6", "--then=64@2,256@4") == 0
    assert [line["context"] for line in lines("out/a") if "train_loss" in line] == [32, 32, 64, 64, 256, 256]
    assert [line["context"] for line in lines("out/a") if "val_loss" in line] == [64, 64, 256]
    assert progress("out/a", 6)["best"] == metrics("out/a", "val_loss")[6]  # others were at another context


@pytest.mark.parametrize(
    "options,steps",
    [("--then=64@6", "[6]"), ("--then=64@0.5,256@90", "[3, 90]")],
)
def test_a_stage_that_would_never_begin_is_refused(go, refused, options, steps):
    message = refused(go, "--out_dir=out/a", *options.split())
    assert "one after the other, before max_iters=6, got" in message and f"after {steps} steps" in message
    assert not os.path.exists("out")


def test_a_stage_that_a_longer_run_reaches_comes_when_it_is_resumed(go, refused):
    assert go("--out_dir=out/a", "--max_iters=4") == 0
    assert "before max_iters=5, got" in refused(go, "--out_dir=out/a", "--max_iters=5", "--then=64@5")
    assert go("--out_dir=out/a", "--max_iters=6", "--then=64@5") == 0
    assert [line["context"] for line in lines("out/a") if "train_loss" in line] == [32] * 5 + [64]
    assert go("--out_dir=out/a", "--max_iters=6", "--then=64@5") == 0


def test_the_rehearsal_at_the_final_context_changes_no_bit_and_tells_too_little_memory(
    go, reference, monkeypatch, capsys
):
    options = [*GATED, THEN, "--eval_interval=1"]
    forward, shapes = train.GPT.forward, []

    def noted(self, ids, *args):
        shapes.append((tuple(ids.shape), torch.is_grad_enabled()))
        return forward(self, ids, *args)

    monkeypatch.setattr(stages, "REHEARSED", ("cpu",))
    with monkeypatch.context() as patch:
        patch.setattr(train.GPT, "forward", noted)
        assert go(*options, "--out_dir=out/a") == 0
    assert shapes[0] == ((1, 256), True) and shapes[1] == ((4, 32), True)
    assert_same_run("out/a", reference)

    def full(self, ids, *args):
        if ids.shape[1] == 256:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, ids, *args)

    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(train.GPT, "forward", full)
    capsys.readouterr()
    assert go(*options, "--out_dir=out/b", "--tokens_per_step=2048", "--batch_size=16") == 1
    assert "out of memory: at context 256: CUDA out of memory; a smaller" in refusal(capsys)  # batches of 2 at 256
    assert not metrics("out/b")


def test_evaluate_takes_the_final_context_for_the_training_context(reference):
    cfg = evaluate.EvaluateConfig(documents=1, device="cpu")
    windows = evaluate.open_documents(str(reference), cfg)
    assert windows.block_size == 512  # 4 times 256 is more than a document has; 4 times 32 is not
    assert final_context(checkpoint.settings(str(reference))) == 256


def test_a_longer_max_seconds_does_not_lead_back_to_an_earlier_stage():
    later = [SimpleNamespace(start=start) for start in (0, Fraction(1, 2), Fraction(9, 10))]
    cfg, progress = SimpleNamespace(max_iters=100, max_seconds=60.0), SimpleNamespace(seconds=30.0, stages=[])
    assert stages.stage_of(later, cfg, 10, progress) == 1
    progress.stages, cfg.max_seconds = [[256, 10]], 600.0
    assert stages.stage_of(later, cfg, 11, progress) == 1 and stages.stage_of(later, cfg, 90, progress) == 2
