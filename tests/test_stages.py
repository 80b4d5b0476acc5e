"""A run in stages takes the steps that its contexts alone would take, and no kill or resume changes that."""

import json
import math
import os
import re
import shutil
import signal
import sys
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from helpers import SMALL, call, dataset, join, metrics, start, start_ranks  # noqa: F401
from safetensors.torch import load_file
from test_train import Ticks

from sympow import evaluate
from sympow import train
from sympow.data.dataset import Dataset
from sympow.training import batches, stages
from sympow.runs import checkpoint
from sympow.runs import metrics as run_metrics
from sympow.runs.metrics import wandb_row

THEN = "--then=64@0.5,256@5"  # after 3 and after 5 of 6 steps
GATED = ["--attention=sympow_gating", "--dropout=0.1", "--sample_tokens=0"]


@pytest.fixture
def go(dataset, tmp_path, monkeypatch):  # noqa: F811
    """Return a function that trains in tmp_path with SMALL's settings and others, and returns the exit status."""
    monkeypatch.chdir(tmp_path)
    return lambda *argv: call(train.main, *SMALL, f"--dataset={dataset}", *argv)


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):  # noqa: F811
    """Return the folder of a run in three stages with dropout, without a break."""
    folder = tmp_path_factory.mktemp("stages") / "whole"
    options = [*SMALL, *GATED, f"--dataset={dataset}", THEN, "--eval_interval=1", f"--out_dir={folder}"]
    assert call(train.main, *options) == 0
    return folder


def lines(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f]


def progress(folder, step):
    with open(os.path.join(folder, "ckpt", f"step_{step:08d}", "progress.json")) as f:
        return json.load(f)


def weights(folder, step):
    return load_file(os.path.join(folder, "ckpt", f"step_{step:08d}", "model.safetensors"))


def assert_same_run(folder, other):
    for key in ("train_loss", "val_loss", "grad_norm", "context"):
        assert metrics(folder, key) == metrics(other, key), key
    assert [line["step"] for line in lines(folder)] == [line["step"] for line in lines(other)]
    theirs = weights(other, 6)
    assert all(torch.equal(x, theirs[name]) for name, x in weights(folder, 6).items())


@pytest.mark.parametrize("extra", [["--rope_base=77"], ["--pack=1", "--attention=sympow_gating"]])
def test_stages_are_runs_of_one_context_stitched_together(go, extra):
    assert go("--out_dir=out/stages", "--then=64@0.5,256@5", *extra) == 0
    parts = [(32, 4, 3), (64, 2, 5), (256, 1, 6)]  # context, batch size, last step
    for block_size, batch_size, last in parts:  # a run of one context that each time goes on with another one
        sizes = [f"--block_size={block_size}", f"--batch_size={batch_size}"]
        if block_size > 32:
            with open("out/one/config.json") as f:
                settings = json.load(f) | {"block_size": block_size}
            with open("out/one/config.json", "w") as f:
                json.dump(settings, f)
        assert go("--out_dir=out/one", *sizes, f"--max_iters={last}", *extra) == 0
    for key in ("train_loss", "grad_norm", "tokens"):
        assert metrics("out/stages", key) == metrics("out/one", key)
    assert metrics("out/stages", "val_loss")[6] == metrics("out/one", "val_loss")[6]  # at the final context
    assert metrics("out/stages", "val_loss")[3] != metrics("out/one", "val_loss")[3]
    one = weights("out/one", 6)
    assert all(torch.equal(x, one[name]) for name, x in weights("out/stages", 6).items())


def test_every_line_names_its_context_and_validation_is_at_the_final_one(whole):
    found = lines(whole)
    assert [line["context"] for line in found if "train_loss" in line] == [32, 32, 32, 64, 64, 256]
    assert [line["context"] for line in found if "val_loss" in line] == [256] * 6
    assert [line["tokens"] for line in found if "train_loss" in line] == [256 * i for i in range(1, 7)]
    assert progress(whole, 6)["stages"] == [[64, 3], [256, 5]]
    assert wandb_row(found[0])["train/context"] == 32 and wandb_row(found[1])["val/context"] == 256


# (step, micro-step) whose batch is being read when a run ends; the first batch of a step is read within the step before
MOMENTS = [(2, 1), (3, 0), (3, 1), (4, 1), (5, 0)]


class Ended(Exception):
    """Stands for what ends a run without warning."""


def test_a_run_that_ends_before_in_or_after_the_step_of_a_switch_goes_on_with_the_same_bits(go, whole, monkeypatch):
    read, left = batches.train_batch, [*MOMENTS]

    def ending(windows, seed, step, part, *sizes):
        if (step, part) in left[:1]:
            raise Ended(left.pop(0))
        return read(windows, seed, step, part, *sizes)

    monkeypatch.setattr(batches, "train_batch", ending)
    options = [*GATED, THEN, "--eval_interval=1", "--out_dir=out/a"]
    for _ in MOMENTS:
        with pytest.raises(Ended):
            go(*options)
    assert go(*options) == 0 and not left
    assert_same_run("out/a", whole)


def train_until_read():
    """Train as train.py; die by SIGKILL when the batch of (step, micro-step) DIE is read."""
    read, at = batches.train_batch, os.environ["DIE"]

    def dying(windows, seed, step, part, *sizes):
        if at == f"{step} {part}":
            os.kill(os.getpid(), signal.SIGKILL)
        return read(windows, seed, step, part, *sizes)

    batches.train_batch = dying
    train.main()


@pytest.mark.slow
def test_a_kill_before_in_and_after_the_step_of_a_switch_changes_no_bit(whole, dataset, tmp_path):  # noqa: F811
    options = [*SMALL, *GATED, f"--dataset={dataset}", THEN, "--eval_interval=1", "--out_dir=out"]
    for step, micro in MOMENTS:
        process = start(train_until_read, *options, env={"DIE": f"{step} {micro}"}, cwd=tmp_path)
        assert join(process) == [-signal.SIGKILL], (step, micro, (tmp_path / "log").read_text())
    assert call(train.main, *options[:-1], f"--out_dir={tmp_path}/out") == 0
    assert_same_run(tmp_path / "out", whole)


def test_a_signal_in_the_step_of_a_switch_changes_no_bit(go, whole, monkeypatch):
    share = train.share

    def signal_in_the_first_step_at_64(run):
        if [*run.progress.stages] == [[64, 3]] and run.progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return share(run)

    options = [*GATED, THEN, "--eval_interval=1", "--out_dir=out/a"]
    with monkeypatch.context() as patch:
        patch.setattr(train, "share", signal_in_the_first_step_at_64)
        assert go(*options) == 0 and max(metrics("out/a")) == 3
    assert go(*options) == 0
    assert_same_run("out/a", whole)


def train_and_note_contexts():
    """Train as train.py; write step and context of every micro-step to contexts_RANK."""
    read = batches.train_batch

    def noted(windows, seed, step, *sizes):
        with open(f"contexts_{os.environ['RANK']}", "a") as f:
            print(step, windows.block_size, file=f)
        return read(windows, seed, step, *sizes)

    batches.train_batch = noted
    stages.REHEARSED = ("cpu",)
    train.main()


@pytest.mark.slow
@pytest.mark.parametrize("limits", [["--max_seconds=1", "--max_iters=100000"], ["--max_iters=6"]])
def test_ranks_switch_at_the_same_step(go, dataset, tmp_path, limits):  # noqa: F811
    sizes = ["--batch_size=2", "--tokens_per_step=1024", "--eval_interval=100000", "--then=64@0.5,256@0.8", *limits]
    ranks = start_ranks(2, train_and_note_contexts, *SMALL, f"--dataset={dataset}", *sizes, cwd=tmp_path)
    assert join(*ranks) == [0, 0], (tmp_path / "rank_0").read_text()
    noted = [(tmp_path / f"contexts_{i}").read_text().splitlines() for i in range(2)]
    assert noted[0] == noted[1]
    logged = metrics("out/train", "context")
    # of a step that was read ahead before the time for a switch had come, the batch that was read again is what counts
    for step, context in dict(map(int, line.split()) for line in noted[0]).items():
        assert logged.get(step + 1, context) == context
    assert list(dict.fromkeys(logged.values())) == [32, 64, 256]
    if limits[0] == "--max_iters=6":  # two ranks take the same steps as one
        assert go(*sizes, "--out_dir=out/one") == 0
        for key in ("train_loss", "val_loss", "grad_norm"):
            assert metrics("out/train", key) == pytest.approx(metrics("out/one", key), rel=1e-5), key


def test_with_a_limit_of_time_a_resumed_run_never_goes_back_a_stage(go, monkeypatch):
    monkeypatch.setattr("sympow.runs.metrics.time", Ticks())
    timed = ["--then=64@0.5", "--max_iters=100000", "--eval_interval=100000", "--out_dir=out/a"]
    assert go(*timed, "--max_seconds=1") == 0
    found = metrics("out/a", "context")
    ((context, began),) = progress("out/a", last := max(metrics("out/a")))["stages"]
    assert context == 64 and 0.3 * last < began < 0.7 * last
    assert all(found[step] == (32 if step <= began else 64) for step in metrics("out/a"))
    assert go(*timed, "--max_seconds=4") == 0  # half of which is not over
    contexts = [line["context"] for line in lines("out/a") if "train_loss" in line]
    assert contexts == sorted(contexts) and max(metrics("out/a")) > last
    assert progress("out/a", max(metrics("out/a")))["stages"] == [[64, began]]


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--then=64"], "then must be CONTEXT@START"),
        (["--then=64@1.5"], "then must be CONTEXT@START"),
        (["--then=64@0"], "then must be CONTEXT@START"),
        (["--then=64@0.5,"], "then must be CONTEXT@START"),
        (["--then=32@0.5"], "then must have contexts that grow from block_size=32 on"),
        (["--then=128@0.5,64@0.9"], "then must have contexts that grow from block_size=32 on"),
        (["--then=64@0.9,128@0.5"], "contexts that start after [5, 3] steps"),
        (["--then=64@0.5,128@2"], "contexts that start after [3, 2] steps"),
        (["--then=1024@0.5"], "then 1024 is longer than the documents of text (512 tokens)"),
        (["--then=2048@0.5", "--pack=1"], "then 2048 is longer than the val split of text (1536 tokens)"),
        (["--then=96@0.5"], "multiple of 1 ranks x context 96 = 96, got 256"),
        (["--then=512@0.5"], "multiple of 1 ranks x context 512 = 512, got 256"),
    ],
)
def test_stages_that_cannot_be_are_refused_before_anything_is_made(go, capsys, argv, message):
    assert go(*argv, "--out_dir=out/a") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not os.path.exists("out")


def test_sizes_follow_from_the_first_stage(dataset):  # noqa: F811
    data = Dataset(dataset)
    for world, batch_size, tokens, then, expected in (
        (1, 4, 256, "64@1,128@2", [(4, 2), (2, 2), (1, 2)]),  # tokens in a micro-step stay
        (1, 1, 1024, "64@1,256@2", [(1, 32), (1, 16), (1, 4)]),  # a window is longer than the micro-step was
        (2, 4, 1024, "64@1,512@2", [(4, 4), (2, 4), (1, 1)]),
        (1, 6, 768, "64@1,128@2", [(6, 4), (3, 4), (1, 6)]),  # 192 / 128 is not whole
    ):
        cfg = train.TrainConfig(block_size=32, batch_size=batch_size, tokens_per_step=tokens, then=then)
        found, held_out = stages.make_stages(cfg, {}, data, SimpleNamespace(data_world=world))
        assert [(stage.batch_size, stage.accumulation) for stage in found] == expected
        assert all(s.batch_size * s.accumulation * s.block_size * world == tokens for s in found)
        assert held_out.block_size == found[-1].block_size and held_out.parts[0].windows.split == "val"


def test_shares_are_exact():
    assert stages.parse_stages("64@0.1,128@0.29,256@.9") == [
        (64, Fraction(1, 10)), (128, Fraction(29, 100)), (256, Fraction(9, 10)),
    ]  # fmt: skip
    assert [stages.steps_before(Fraction(29, 100), n) for n in (100, 10, 5, 1)] == [29, 3, 1, 0]  # 0.29 * 100 < 29
    assert stages.steps_before(90, 100) == stages.steps_before(Fraction(9, 10), 100) == 90


def test_on_resume_stages_that_have_begun_stay_and_later_ones_may_change(go, capsys):
    def refused(*argv):
        capsys.readouterr()
        assert go("--out_dir=out/a", *argv) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert go("--out_dir=out/a", "--max_iters=4", "--then=64@0.5") == 0
    went_on = "--then='64@2' is what it did, and later stages may follow with commas"
    assert went_on in refused("--max_iters=6", "--then=64@0.5")  # would have been after 3 steps
    assert went_on in refused("--max_iters=6", "--then=64@3")
    assert went_on in refused("--max_iters=6", "--then=128@2")
    assert went_on in refused("--max_iters=6")
    assert went_on in refused("--max_iters=6", "--then=64@2,128@3")  # by which it had entered 128
    assert "was trained with block_size=32, now block_size=64" in refused("--block_size=64", "--then=128@2")
    assert progress("out/a", 4)["best"] < math.inf
    assert go("--out_dir=out/a", "--max_iters=6", "--then=64@2,256@4") == 0
    assert [line["context"] for line in lines("out/a") if "train_loss" in line] == [32, 32, 64, 64, 256, 256]
    assert [line["context"] for line in lines("out/a") if "val_loss" in line] == [64, 64, 256]
    assert progress("out/a", 6)["best"] == metrics("out/a", "val_loss")[6]  # others were at another context
    assert go("--out_dir=out/a", "--eval_only=True") == 0
    shown = capsys.readouterr().out
    assert re_val(shown) == 32 and go("--out_dir=out/a", "--eval_only=True", "--then=64@2,256@4") == 0
    shown = capsys.readouterr().out
    assert re_val(shown) == 256 and f"val loss {metrics('out/a', 'val_loss')[6]:.4f} at" in shown


def re_val(text):
    """Return the context at the end of the line with the validation loss."""
    line = [line for line in text.splitlines() if "val loss" in line][-1]
    return int(line.split()[-1].replace(",", ""))


def test_a_run_without_stages_goes_on_with_one(go):
    assert go("--out_dir=out/a", "--max_iters=3") == 0
    saved = "out/a/ckpt/step_00000003"
    before = json.load(open(f"{saved}/progress.json"))
    assert before["stages"] == [] and before["context"] == 32
    assert go("--out_dir=out/a", "--then=256@0.5") == 0
    assert go("--out_dir=out/b", "--then=256@3") == 0
    assert metrics("out/a") == metrics("out/b")
    assert metrics("out/a", "val_loss")[6] == metrics("out/b", "val_loss")[6]


def test_the_rehearsal_at_the_final_context_changes_no_bit_and_tells_too_little_memory(go, whole, monkeypatch, capsys):
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
    assert_same_run("out/a", whole)

    def full(self, ids, *args):
        if ids.shape[1] == 256:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, ids, *args)

    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(train.GPT, "forward", full)
    capsys.readouterr()
    assert go(*options, "--out_dir=out/b", "--tokens_per_step=2048", "--batch_size=16") == 1
    error = capsys.readouterr().err  # batches of 2 at 256
    assert "out of memory: at context 256: CUDA out of memory; a smaller" in error and error.count("\n") == 1
    assert not metrics("out/b")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_rehearsal_of_a_resumed_run_needs_no_second_moments(go, monkeypatch, optimizer):
    options = [
        "--then=256@5",
        "--eval_interval=100",
        "--sample_tokens=0",
        f"--optimizer={optimizer}",
        "--out_dir=out/a",
    ]
    assert go(*options, "--max_iters=2") == 0
    monkeypatch.setattr(stages, "REHEARSED", ("cpu",))
    stand_ins, rehearse = [], train.rehearse

    def noted(*args):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_like", lambda x: stand_ins.append(x) or torch.zeros_like(x))
            rehearse(*args)

    monkeypatch.setattr(train, "rehearse", noted)
    assert go(*options, "--max_iters=3") == 0
    assert not stand_ins


def test_the_network_is_compiled_once_for_each_context_and_mode(go, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append([x.shape for x in inputs if isinstance(x, torch.Tensor) and x.dtype == torch.int64])
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend=backend, **options))
    monkeypatch.setattr(stages, "REHEARSED", ("cpu",))  # compiles what the last stage needs
    torch._dynamo.reset()
    sizes = ["--then=64@2,128@3", "--n_layer=1", "--max_iters=4", "--eval_interval=1"]
    assert go("--out_dir=out/a", "--compile=True", *sizes) == 0
    networks = [tuple(shapes[0]) for shapes in graphs if shapes]
    assert sorted(networks) == [(1, 128), (1, 128), (2, 64), (4, 32)]  # at 128 for evaluations too
    torch._dynamo.reset()


def test_speeds_never_mix_two_stages(go, monkeypatch):
    laps, lap = [], run_metrics.Clock.steps_per_second
    monkeypatch.setattr(
        run_metrics.Clock, "steps_per_second", lambda self, n: laps.append((self.lap[1], n)) or lap(self, n)
    )
    assert go("--out_dir=out/a", "--then=64@3,128@5", "--log_interval=4", "--eval_interval=100", "--max_iters=9") == 0
    assert laps == [(0, 1), (3, 4), (5, 6), (6, 8), (8, 9)]  # (after step, up to step)
    assert [line["context"] for line in lines("out/a") if "train_loss" in line] == [32, 64, 128, 128, 128]


def test_the_display_says_the_stage_and_the_plan(go, capsys):
    assert go("--out_dir=out/a", "--then=64@0.5,256@5", "--max_seconds=1000", "--sample_tokens=0") == 0
    out = capsys.readouterr().out
    plan = (
        "tokens a step: 1 ranks x 4 sequences x 32 context x 2 accumulation; after 3 steps: 1 ranks x 2 "
        "sequences x 64 context x 2 accumulation; after 5 steps: 1 ranks x 1 sequences x 256 context x 1 accumulation "
        "= 256\n"
    )
    assert plan in out
    assert "after step 3: context 64\n" in out
    assert re.search(r"step 6: loss \d\.\d{4} at context 256, ", out)


def test_a_baseline_is_compared_at_the_same_context_if_it_has_it(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": i, "val_loss": loss, "tokens": 100 * i, "context": context}) + "\n"
            for i, loss, context in ((1, 4.0, 32), (2, 3.0, 32), (3, 2.0, 256), (4, 1.0, 256))
        )
    )
    assert run_metrics.baseline_losses(str(tmp_path), 32) == [(100, 4.0), (200, 3.0)]
    assert run_metrics.baseline_losses(str(tmp_path), 256) == [(300, 2.0), (400, 1.0)]
    assert not capsys.readouterr().err
    assert len(run_metrics.baseline_losses(str(tmp_path), 64)) == 4
    assert "was not evaluated at context 64" in capsys.readouterr().err


def test_evaluate_takes_the_final_context_for_the_training_context(whole):
    cfg = evaluate.EvaluateConfig(documents=1, device="cpu")
    windows = evaluate.open_documents(str(whole), cfg)
    assert windows.block_size == 512  # 4 times 256 is more than a document has; 4 times 32 is not
    assert stages.final_context(checkpoint.settings(str(whole))) == 256


def test_a_damaged_then_is_one_line(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "a")
    (tmp_path / "a/config.json").write_text(
        json.dumps(json.loads((whole / "config.json").read_text()) | {"then": "64"})
    )
    assert call(evaluate.main, f"--out_dir={tmp_path}/a", "--device=cpu") == 2
    error = capsys.readouterr().err
    assert "then" in error and error.count("\n") == 1
