"""Training survives kills, damaged checkpoints, full disks, signals and gradients that are not finite."""

import copy
import fcntl
import hashlib
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from contextlib import suppress

import pytest
import torch
from helpers import ROOT, SMALL, call, dataset, join, make_dataset, metrics, start, start_ranks  # noqa: F401
from safetensors.torch import load_file, save_file

from sympow import evaluate
from sympow import train
from sympow.data import DataError
from sympow.training import batches
from sympow.runs import checkpoint
from sympow.runs.load import load_run

EXTRA = ["--attention=sympow_gating", "--dropout=0.1", "--warmup_iters=2"]


@pytest.fixture
def go(dataset, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    return lambda *argv: call(train.main, *SMALL, *EXTRA, f"--dataset={dataset}", *argv)


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):  # noqa: F811
    """Return a folder with two runs of 6 steps: `whole`, and `cut` after step 5 with checkpoints at 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("finished")
    options = [*SMALL, *EXTRA, f"--dataset={dataset}"]
    cut = ["--max_iters=5", "--lr_decay_iters=6", "--eval_interval=2"]
    assert call(train.main, *options, f"--out_dir={folder}/whole") == 0
    assert call(train.main, *options, f"--out_dir={folder}/cut", *cut) == 0
    return folder


def lines(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f]


def assert_same_run(folder, other):
    """Assert that both runs have every step once, with the same numbers to the last bit."""
    for key in ("train_loss", "val_loss", "grad_norm"):
        assert metrics(folder, key) == metrics(other, key), key
    assert [line["step"] for line in lines(folder)] == [line["step"] for line in lines(other)]


def flip(path, at):
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 4]))


# the optimizer and the schedule with the most to go on from
OTHER = ["--optimizer=muon", "--dtype=float16", "--schedule=wsd", "--decay_share=0.5"]


@pytest.mark.parametrize("other", [(), pytest.param(OTHER, marks=pytest.mark.slow)], ids=["default", "muon"])
def test_twenty_kills_at_random_moments_change_nothing(dataset, tmp_path, other):  # noqa: F811
    seed = int.from_bytes(os.urandom(4), "big")
    moments, kills, out = random.Random(seed), 0, tmp_path / "out"
    small = (
        "--n_layer=1 --n_head=1 --n_embd=16 --block_size=16 --tokens_per_step=128 --eval_tokens=64 --sample_tokens=1"
    )
    often = ["--max_iters=14", "--eval_interval=2"]
    options = [*SMALL, *EXTRA, *small.split(), *often, *other, f"--dataset={dataset}"]
    go = lambda name: start(train.main, *options, f"--out_dir=out/{name}", cwd=tmp_path)
    assert join(go("whole")) == [0]
    began = time.time()
    assert join(go("again")) == [0]
    took = time.time() - began
    while kills < 20:
        process = go("killed")
        process.join(moments.uniform(0, took))
        if process.exitcode is None:
            process.kill()
            kills += 1
        assert join(process)[0] in (0, -signal.SIGKILL)
        if process.exitcode == 0:  # it was done before: start anew
            os.rename(out / "killed", out / f"done_{len(os.listdir(out))}")
    assert join(go("killed")) == [0]
    for folder in sorted(os.listdir(out)):
        assert_same_run(out / folder, out / "whole")
        for step in os.listdir(out / folder / "ckpt"):
            assert step[0] == "." or not checkpoint.damage(out / folder / "ckpt" / step), (seed, step)


@pytest.mark.parametrize(
    "file,harm,message",
    [
        ("model.safetensors", lambda path: os.truncate(path, os.path.getsize(path) // 2), "bytes instead of"),
        ("model.safetensors", lambda path: flip(path, os.path.getsize(path) - 5), "is not what was written"),
        ("optimizer.pt", lambda path: flip(path, 2000), "is not what was written"),
        ("progress.json", lambda path: flip(path, 10), "is not what was written"),
        ("optimizer.pt", os.remove, "is missing"),
        ("checksums.json", lambda path: os.truncate(path, 50), "checksums.json"),
    ],
)
def test_a_damaged_checkpoint_is_left_out_and_the_one_before_it_taken(go, finished, capsys, file, harm, message):
    shutil.copytree(finished, "out")
    harm(f"out/cut/ckpt/step_00000005/{file}")
    capsys.readouterr()
    assert go("--out_dir=out/cut", "--lr_decay_iters=6") == 0
    printed = capsys.readouterr()
    assert re.search(f"step_00000005 is damaged and left out: .*{message}", printed.err)
    assert "going on from out/cut/ckpt/step_00000004, step 4" in printed.out
    assert metrics("out/cut") == metrics("out/whole")


def test_if_every_checkpoint_is_damaged_nothing_starts_anew_unasked(go, finished, capsys):
    shutil.copytree(finished / "whole", "out/a")
    for step in os.listdir("out/a/ckpt"):
        flip(f"out/a/ckpt/{step}/model.safetensors", 3000)
    assert go("--out_dir=out/a") == 2
    assert "every checkpoint in out/a is damaged" in capsys.readouterr().err
    assert go("--out_dir=out/a", "--init_from=scratch", "--overwrite=True") == 0


def test_ranks_take_the_checkpoint_that_rank_0_found_whole(go, finished, dataset):  # noqa: F811
    shutil.copytree(finished / "cut", "out/a")
    config = json.load(open("out/a/config.json"))
    json.dump({**config, "ranks": 2}, open("out/a/config.json", "w"))
    flip("out/a/ckpt/step_00000005/optimizer.pt", 2000)  # the others see its size alone
    argv = [*SMALL, *EXTRA, f"--dataset={dataset}", "--out_dir=out/a", "--lr_decay_iters=6"]
    later = ["--schedule=wsd", "--decay_share=0.5"]  # other rates from the fifth step on, which only step_00000005 took
    assert join(*start_ranks(2, train.main, *argv, *later)) == [0, 0]
    assert "going on from out/a/ckpt/step_00000004, step 4" in open("rank_0").read()
    assert list(metrics("out/a")) == [1, 2, 3, 4, 5, 6]


def train_with_small_files():
    """Train as train.py, but without files above LARGEST bytes, as if the disk were full."""
    largest = int(os.environ["LARGEST"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    train.main()


def test_a_full_disk_leaves_the_older_checkpoints_whole(go, dataset, capsys):  # noqa: F811
    assert go("--out_dir=out/a", "--max_iters=3") == 0
    largest = os.path.getsize("out/a/ckpt/step_00000003/model.safetensors")
    argv = [*SMALL, *EXTRA, f"--dataset={dataset}", "--out_dir=out/a", "--max_iters=6"]
    assert join(start(train_with_small_files, *argv, env={"LARGEST": str(largest // 2)})) == [1]
    error = open("log").read()
    assert "the checkpoint of step 6 could not be written (" in error
    assert "step_00000003 is whole: the same command goes on from there" in error
    assert os.listdir("out/a/ckpt") == ["step_00000003"]
    assert not checkpoint.damage("out/a/ckpt/step_00000003")
    assert go("--out_dir=out/a", "--max_iters=6") == 0
    assert "going on from out/a/ckpt/step_00000003, step 3" in capsys.readouterr().out


def test_what_is_written_is_what_was_there_when_save_was_called(tmp_path, monkeypatch):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step():
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    step()
    before = [copy.deepcopy(x.state_dict()) for x in (model, optimizer)]
    go_on, write = threading.Event(), checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", lambda *args: go_on.wait(30) and write(*args))
    writer = checkpoint.Writer(tmp_path)
    writer.save(model, optimizer, checkpoint.Progress(1))
    writer.check()
    step()  # in place, while the writer waits
    assert not checkpoint.exists(tmp_path)
    go_on.set()
    writer.wait()
    found = torch.nn.Linear(3, 3)
    other = torch.optim.AdamW(found.parameters(), fused=True)
    assert checkpoint.load(checkpoint.newest(tmp_path, thorough=True), found, other).step == 1
    assert torch.equal(found.weight, before[0]["weight"]) and not torch.equal(found.weight, model.weight)
    for i, of in before[1]["state"].items():
        assert all(torch.equal(other.state_dict()["state"][i][name], x) for name, x in of.items())


def test_training_goes_on_while_a_checkpoint_is_written(go, monkeypatch):
    waited, later, write, batch = [], threading.Event(), checkpoint.save_file, batches.train_batch

    def slow(*args):
        waited.append(later.wait(30))
        write(*args)

    def taken(windows, seed, step, *args):
        if step == 5:
            later.set()
        return batch(windows, seed, step, *args)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    monkeypatch.setattr(batches, "train_batch", taken)
    assert go("--out_dir=out/a") == 0
    assert waited == [True, True]  # the checkpoint of step 3 was written after step 5 had begun
    assert sorted(os.listdir("out/a/ckpt")) == ["step_00000003", "step_00000006"]
    assert [line["step"] for line in lines("out/a") if "checkpoint_seconds" in line] == [4]


def test_a_write_that_fails_ends_training_soon_and_every_call_says_so(go, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    assert go("--out_dir=out/a", "--max_iters=2") == 0
    monkeypatch.setattr(checkpoint, "save_file", full)
    monkeypatch.setattr(os, "_exit", sys.exit)
    assert go("--out_dir=out/a", "--max_iters=100000", "--eval_interval=3") == 1
    error = capsys.readouterr().err.strip()
    assert "train.py: the checkpoint of step 3 could not be written ([Errno 28] No space left on device; " in error
    assert error.endswith("out/a/ckpt/step_00000002 is whole: the same command goes on from there")
    assert max(metrics("out/a")) < 1000 and os.listdir("out/a/ckpt") == ["step_00000002"]
    model, writer = torch.nn.Linear(1, 1), checkpoint.Writer(tmp_path / "new")
    optimizer = torch.optim.AdamW(model.parameters())
    writer.save(model, optimizer, checkpoint.Progress(3))
    for act in (writer.wait, writer.check, lambda: writer.save(model, optimizer, checkpoint.Progress(4))):
        with pytest.raises(checkpoint.NotWritten, match="step 3 could not be written .* there is no older one"):
            act()


TINY = (
    "--n_layer=1 --n_head=1 --n_embd=16 --block_size=16 --batch_size=2 --tokens_per_step=64 --eval_tokens=64 "
    "--sample_tokens=1 --max_iters=2 --eval_interval=1 --pack=1"
).split()


def at_moments(monkeypatch, act):
    """Call act(name, number) before each numbered moment at which training reads, computes, logs or saves something."""
    number = itertools.count(1)
    for owner, name in (
        (batches, "train_batch"), (train.GPT, "loss"), (train.GPT, "statistics"), (batches, "generate"),
        (train.Tracker, "log"), (train.Tracker, "sample"), (train.Tracker, "flush_to_disk"),
        (checkpoint.Writer, "save"),
    ):  # fmt: skip

        def wrapped(*args, real=getattr(owner, name), name=name, **kwargs):
            act(name, next(number))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it is run, except that the thread ends its write."""


@pytest.mark.parametrize("how", ["signal", "kill"])
def test_each_line_comes_once_wherever_a_signal_or_a_kill_comes(go, monkeypatch, how):
    """Stop a run at moments from its start to the second step, and some again soon after the next start."""

    def start(moment):
        names = []

        def act(name, number):
            names.append(name)
            if number == moment and how == "kill":
                raise Killed
            if number == moment:
                os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch, suppress(Killed):
            at_moments(patch, act)
            assert go(*TINY, "--out_dir=out/cut") == 0
        return names

    def results():
        keys = ("step", "train_loss", "val_loss", "grad_norm")
        found = [{key: line[key] for key in keys if key in line} for line in lines("out/cut")]
        weights = open("out/cut/ckpt/step_00000002/model.safetensors", "rb").read()
        return found, open("out/cut/samples.jsonl").read(), weights

    names = start(0)
    whole, last = results(), names.index("save") + 3
    assert names[:last].count("log") == 2 and names[last - 2 : last] == ["loss", "train_batch"]  # of the next step
    for moment in range(1, last + 1, 1 if how == "signal" else 2):
        shutil.rmtree("out")
        start(moment)
        assert not os.path.exists("out/cut/ckpt/step_00000000"), names[moment - 1]
        if moment % 4 == 1:
            start(4)
        start(0)
        assert results() == whole, names[moment - 1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_within_a_step_saves_and_loses_nothing(go, finished, monkeypatch, capsys, number):
    calls, real = [0], batches.train_batch

    def batch(*args):
        calls[0] += 1
        if calls[0] == 5:  # two micro-steps a step, one read ahead: within the third
            os.kill(os.getpid(), number)
        return real(*args)

    monkeypatch.setattr(batches, "train_batch", batch)
    assert go("--out_dir=out/cut") == 0
    assert f"stopped after 2 steps: {signal.Signals(number).name} was received\n" in capsys.readouterr().out
    assert max(metrics("out/cut")) == 2 and os.listdir("out/cut/ckpt") == ["step_00000002"]
    assert go("--out_dir=out/cut") == 0
    assert metrics("out/cut") == metrics(finished / "whole")


def test_an_evaluation_that_a_signal_came_before_is_made_up_for(go, finished, monkeypatch):
    calls, real = [0], batches.train_batch

    def batch(*args):
        calls[0] += 1
        if calls[0] in (7, 15):  # in the last micro-step of steps 3 and, after the next start, 6: both are evaluated
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(batches, "train_batch", batch)
    for last in (3, 6, 6):
        assert go("--out_dir=out/cut") == 0
        assert max(metrics("out/cut")) == last
    assert_same_run("out/cut", finished / "whole")


def test_closed_streams_do_not_stop_training(go, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        patch.setattr(sys, "stderr", None)
        assert go(*TINY, "--out_dir=out/a") == 0
    assert max(metrics("out/a")) == 2


def test_a_second_process_in_one_folder_is_refused(go, capsys):
    os.makedirs("out/a")
    with open("out/a/.lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("process 12 on there", file=lock, flush=True)
        assert go("--out_dir=out/a") == 2
        assert "process 12 on there is training in out/a" in capsys.readouterr().err
    assert go("--out_dir=out/a") == 0


def test_the_same_command_goes_on_before_there_is_a_checkpoint_and_after_torchruns_restart(go, monkeypatch):
    assert go("--out_dir=out/a") == 0
    again = "--init_from=out/a", "--out_dir=out/b"
    assert go(*again) == 0
    shutil.rmtree("out/b/ckpt")  # killed before the first
    os.truncate("out/b/metrics.jsonl", open("out/b/metrics.jsonl").read().index('"step": 4') - 1)
    assert go(*again) == 0
    anew = "--init_from=scratch", "--overwrite=True", "--out_dir=out/b"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert go(*anew) == 0 and os.path.isdir("out/b/ckpt/step_00000006")
    assert not os.path.exists("out/b.old-1")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert go(*anew) == 0 and os.path.isdir("out/b.old-1/ckpt/step_00000006")


def test_a_run_whose_settings_are_gone_is_not_gone_on_with(go, capsys):
    assert go("--out_dir=out/a", "--max_iters=3") == 0
    os.rename("out/a/config.json", "config.json")
    before = sorted(os.listdir("out/a"))
    assert go("--out_dir=out/a", "--learning_rate=1") == 2
    assert "out/a has checkpoints but no config.json" in capsys.readouterr().err
    assert sorted(os.listdir("out/a")) == before
    os.rename("config.json", "out/a/config.json")
    assert go("--out_dir=out/a") == 0 and max(metrics("out/a")) == 6


def test_the_numbers_of_a_run_whose_checkpoints_are_gone_stay(go, capsys):
    assert go(*TINY, "--out_dir=out/a") == 0
    before = open("out/a/metrics.jsonl").read()
    shutil.rmtree("out/a/ckpt")
    assert go(*TINY, "--out_dir=out/a") == 2
    assert "out/a has evaluations but no checkpoint" in capsys.readouterr().err
    assert open("out/a/metrics.jsonl").read() == before
    assert go(*TINY, "--out_dir=out/a", "--init_from=scratch", "--overwrite=True") == 0
    assert open("out/a.old-1/metrics.jsonl").read() == before


def test_a_kill_finds_at_most_one_evaluation_without_a_checkpoint(go, monkeypatch):
    """The same command would not go on from two, because they look like a run whose checkpoints were deleted."""
    found, evaluate, save_file = [], train.mean_losses, checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", lambda *args: (time.sleep(0.5), save_file(*args)))
    noted = lambda trainer: (found.append(checkpoint.newest("out/a")), evaluate(trainer))[1]
    monkeypatch.setattr(train, "mean_losses", noted)
    assert go(*TINY, "--out_dir=out/a") == 0
    assert found == [None, "out/a/ckpt/step_00000001"]


def test_a_run_killed_after_evaluations_whose_weights_are_not_saved_goes_on(go):
    assert go(*TINY, "--out_dir=out/a") == 0
    before = open("out/a/metrics.jsonl").read()
    shutil.rmtree("out/a/ckpt")
    with open("out/a/metrics.jsonl", "w") as f:
        f.write("".join(json.dumps({"step": i, "val_loss": math.nan}) + "\n" for i in (1, 2)))
    assert go(*TINY, "--out_dir=out/a") == 0
    assert len(open("out/a/metrics.jsonl").readlines()) == len(before.splitlines())


def test_what_a_kill_left_of_checkpoints_is_removed_by_the_next_start(go):
    assert go("--out_dir=out/a", "--eval_interval=2") == 0
    whole = sorted(os.listdir("out/a/ckpt"))
    assert whole == ["step_00000004", "step_00000006"]
    # killed while the next one was written, before the third newest lost its name and while another was removed
    for name in (".writing", ".removing", "step_00000002"):
        shutil.copytree("out/a/ckpt/step_00000004", f"out/a/ckpt/{name}")
    assert go("--out_dir=out/a", "--eval_interval=2", "--eval_only=True") == 0 and len(os.listdir("out/a/ckpt")) == 5
    assert go("--out_dir=out/a", "--eval_interval=2") == 0
    assert sorted(os.listdir("out/a/ckpt")) == whole


def test_other_data_under_the_same_name_are_refused(go, tmp_path, capsys):
    assert go("--out_dir=out/a", "--max_iters=3") == 0
    other = make_dataset(tmp_path / "other", "another text\n" * 1000)
    assert go("--out_dir=out/a", f"--dataset={other}") == 2
    assert "was trained with data=" in capsys.readouterr().err
    assert go("--out_dir=out/a") == 0


def test_weights_without_a_finite_loss_are_not_saved(go, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", sys.exit)
    assert go("--out_dir=out/a", "--learning_rate=1e38", "--warmup_iters=0", "--max_iters=30", "--max_skipped=8") == 1
    printed = capsys.readouterr().err
    assert "8 steps in a row had no finite gradient" in printed and "there is no checkpoint" in printed
    assert not os.path.isdir("out/a/ckpt")


def test_what_is_saved_after_damaged_checkpoints_stays(go):
    assert go("--out_dir=out/a", "--max_iters=4", "--eval_interval=2") == 0
    shutil.copytree("out/a/ckpt/step_00000004", "out/a/ckpt/step_00000008")
    for step in (4, 8):
        os.truncate(f"out/a/ckpt/step_0000000{step}/model.safetensors", 10)
    assert go("--out_dir=out/a", "--max_iters=3", "--eval_interval=2") == 0
    assert sorted(os.listdir("out/a/ckpt")) == ["step_00000002", "step_00000003"]


@pytest.mark.parametrize("older", [False, True])
def test_a_run_of_an_earlier_version_goes_on(go, finished, capsys, older):
    """Write the files of earlier versions with only json, torch and safetensors; the older one has fewer of them."""
    made, run, step = finished / "whole", "out/a", "ckpt/step_00000003"
    os.makedirs(f"{run}/{step}")
    for name in ("metrics.jsonl", "samples.jsonl", "tokenizer.json"):
        shutil.copy(made / name, run)
    config = json.load(open(made / "config.json"))
    new = "ranks", "device_type", "optimizer", "schedule", "decay_share"  # which earlier versions did not record
    for name in (*new, *(["max_skipped"] if older else [])):
        del config[name]
    json.dump({**config, "decay_lr": False}, open(f"{run}/config.json", "w"))
    save_file(load_file(made / step / "model.safetensors"), f"{run}/{step}/model.safetensors")
    torch.save(torch.load(made / step / "optimizer.pt", weights_only=True), f"{run}/{step}/optimizer.pt")
    best = metrics(made, "val_loss")[3]
    progress = {"step": 3, "seconds": 1.5, "best": best, "best_step": 3, "wandb_id": None}
    if not older:
        progress |= {"skipped": [0, 0], "evaluated": True}
    json.dump(progress, open(f"{run}/{step}/progress.json", "w"))
    if not older:
        files = {name: open(f"{run}/{step}/{name}", "rb").read() for name in os.listdir(f"{run}/{step}")}
        sums = {name: {"bytes": len(x), "sha256": hashlib.sha256(x).hexdigest()} for name, x in files.items()}
        json.dump(sums, open(f"{run}/{step}/checksums.json", "w"))
    assert not checkpoint.damage(f"{run}/{step}")
    for options, message in (
        (["--optimizer=muon"], "was trained with optimizer=adamw, now optimizer=muon"),
        (
            ["--decay_lr=True", "--warmup_iters=0"],
            "warmup_iters=2 schedule=constant, now warmup_iters=0 schedule=cosine",
        ),
    ):
        assert go("--out_dir=out/a", *options) == 2 and message in capsys.readouterr().err
    assert go("--out_dir=out/a") == 0
    assert "going on from out/a/ckpt/step_00000003, step 3" in capsys.readouterr().out
    assert_same_run("out/a", made)
    saved = [json.load(open(f"{folder}/ckpt/step_00000006/progress.json")) for folder in (run, made)]
    assert saved[0].pop("seconds") > 1.5 and saved[1].pop("seconds") and saved[0] == saved[1]
    names = "step best best_step wandb_id skipped evaluated model scaler stages context"
    assert list(saved[0]) == names.split()
    assert sorted(os.listdir(f"{run}/ckpt/step_00000006")) == [
        "checksums.json", "model.safetensors", "optimizer.pt", "progress.json",
    ]  # fmt: skip


def not_finite(monkeypatch, steps):
    """Make the loss of these micro-steps (two make a step) NaN."""
    calls, real = [0], train.GPT.forward

    def forward(self, ids, targets=None, **kwargs):
        output = real(self, ids, targets, **kwargs)
        if self.training:
            calls[0] += 1
            if calls[0] in steps:
                return output[0], output[1] * float("nan")
        return output

    monkeypatch.setattr(train.GPT, "forward", forward)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_steps_without_a_finite_gradient_are_left_out_and_counted(go, monkeypatch, optimizer):
    not_finite(monkeypatch, {3, 8})  # in steps 2 and 4
    assert go("--out_dir=out/a", f"--optimizer={optimizer}") == 0
    found = [line for line in lines("out/a") if "train_loss" in line]
    assert [line.get("skipped", 0) for line in found] == [0, 0, 1, 1, 2, 2]
    saved = checkpoint.load("out/a/ckpt/step_00000006", tiny := train.GPT(model_of("out/a")))
    assert saved.skipped == [2, 0] and all(p.isfinite().all() for p in tiny.parameters())
    assert all(v == v for v in metrics("out/a", "val_loss").values())


def model_of(folder):
    with open(os.path.join(folder, "config.json")) as f:
        return train.GPTConfig(**json.load(f)["model"])


def test_after_so_many_in_a_row_training_stops_and_names_the_last_good_checkpoint(go, monkeypatch, capsys):
    not_finite(monkeypatch, set(range(9, 100)))  # from step 5 on

    monkeypatch.setattr(os, "_exit", sys.exit)
    assert go("--out_dir=out/a", "--max_iters=30", "--max_skipped=4", "--eval_interval=2") == 1
    printed = capsys.readouterr().err
    assert (
        "4 steps in a row had no finite gradient" in printed
        and "the last good checkpoint is out/a/ckpt/step_0000000" in printed
    )
    weights = train.GPT(model_of("out/a"))
    checkpoint.load(checkpoint.newest("out/a", thorough=True), weights)
    assert all(p.isfinite().all() for p in weights.parameters())


@pytest.fixture
def two_ranks(dataset, tmp_path):  # noqa: F811
    """Start two processes that train together, and wait until they have taken some steps."""
    options = [*SMALL, *EXTRA, f"--dataset={dataset}", "--max_iters=100000", "--timeout=10", "--eval_interval=100000"]
    ranks = start_ranks(2, train.main, *options, cwd=tmp_path)
    log, begin = tmp_path / "out/train/metrics.jsonl", time.time()
    while not (log.exists() and log.stat().st_size) and time.time() < begin + 60:
        time.sleep(0.1)
    yield ranks
    for process in ranks:
        process.kill()
    join(*ranks)


@pytest.mark.parametrize(
    "number,message",
    [(signal.SIGKILL, "rank 1 on {host} no longer answers"), (signal.SIGSTOP, "nothing has happened for")],
)
def test_a_dead_or_hung_rank_ends_the_job_with_its_name(two_ranks, tmp_path, number, message):
    os.kill(two_ranks[1].pid, number)
    assert join(two_ranks[0]) == [1]
    err = (tmp_path / "rank_0").read_text()
    assert message.format(host=socket.gethostname()) in err and f"rank 1 on {socket.gethostname()}" in err, err


def test_a_rank_ends_if_the_other_does_not_come(dataset, tmp_path):  # noqa: F811
    argv = [*SMALL, "--timeout=1", f"--dataset={dataset}"]
    pairs = []
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        pairs.append(start_ranks(2, train.main, *argv, cwd=tmp_path / str(i)))
        pairs[i][1 - i].kill()
    for i in range(2):
        assert join(pairs[i][i]) == [1]
        assert "the other ranks have not come within 1 s" in (tmp_path / str(i) / f"rank_{i}").read_text()
        assert not (tmp_path / str(i) / "out").exists()


def test_a_signal_to_one_rank_stops_both_at_the_same_step_with_status_0(two_ranks, tmp_path):
    os.kill(two_ranks[1].pid, signal.SIGTERM)
    assert join(*two_ranks) == [0, 0], (tmp_path / "rank_0").read_text()
    assert "steps: SIGTERM was received" in (tmp_path / "rank_0").read_text()
    (step,) = os.listdir(tmp_path / "out/train/ckpt")
    assert int(step.removeprefix("step_")) == max(metrics(tmp_path / "out/train")) > 0
    assert not checkpoint.damage(tmp_path / "out/train/ckpt" / step)


def train_and_die():
    """Train as train.py; rank 1 kills itself at step 50 of its first start."""
    batch = batches.train_batch

    def killed(windows, seed, step, *args):
        if step == 50 and os.environ["RANK"] == "1" and not os.path.exists(os.environ["KILLED"]):
            open(os.environ["KILLED"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(windows, seed, step, *args)

    batches.train_batch = killed
    train.main()


def torchrun_with_forks():
    """Run train_and_die as torchrun --standalone --nproc_per_node=2 --max_restarts=2 does, but in forks."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id="forks", start_method="fork", monitor_interval=0.1,
    )  # fmt: skip
    elastic_launch(config, train_and_die)()


def torchrun():
    """Run train_and_die under torchrun itself, whose workers are new interpreters."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=2"]
    sys.exit(subprocess.run([*run, __file__, *sys.argv[1:]]).returncode)


@pytest.mark.parametrize("launch", [torchrun_with_forks, pytest.param(torchrun, marks=pytest.mark.slow)])
def test_torchrun_starts_again_after_a_worker_was_killed(dataset, tmp_path, launch):  # noqa: F811
    options = [*SMALL, *EXTRA, f"--dataset={dataset}", "--max_iters=80", "--eval_interval=20", "--timeout=15"]
    env = {"KILLED": str(tmp_path / "killed")}
    done = join(start(launch, *options, cwd=tmp_path, env=env), timeout=120)
    log = (tmp_path / "log").read_text()
    assert done == [0], log
    assert "rank 1 on" in log and "going on from out/train/ckpt/step_00000040, step 40" in log
    assert list(metrics(tmp_path / "out/train")) == list(range(1, 81))
    assert list(metrics(tmp_path / "out/train", "val_loss")) == [20, 40, 60, 80]


def test_an_evaluation_alone_answers_a_signal_and_every_start_ctrl_c(go, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", sys.exit)
    assert go(*TINY, "--out_dir=out/a") == 0
    with monkeypatch.context() as patch:
        at_moments(patch, lambda name, number: os.kill(os.getpid(), signal.SIGTERM) if number == 2 else None)
        assert go(*TINY, "--out_dir=out/a", "--eval_only=True", "--eval_tokens=512") == 1
    assert capsys.readouterr().err == "train.py: the evaluation is not finished: SIGTERM was received\n"

    def ctrl_c(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "make_optimizer", ctrl_c)
    assert go(*TINY, "--out_dir=out/a") == 130
    assert capsys.readouterr().err == "train.py: interrupted\n"


def test_a_shard_that_goes_while_training_runs_ends_it_with_its_name(go, monkeypatch, capsys):
    def gone(windows, seed, step, *args, batch=batches.train_batch):
        if step == 2:  # which is read ahead, within the step before
            raise DataError("data/text/train_00000.bin has 10 bytes instead of 20: run data/text/prepare.py")
        return batch(windows, seed, step, *args)

    monkeypatch.setattr(batches, "train_batch", gone)
    assert go(*TINY, "--out_dir=out/a") == 2
    assert capsys.readouterr().err.startswith("train.py: data/text/train_00000.bin has 10 bytes instead of 20: run")
    assert os.listdir("out/a/ckpt") == ["step_00000001"]


def train_on_what_goes():
    """Train as train.py; rank 1 finds that a shard has gone."""
    batch = batches.train_batch

    def gone(windows, seed, step, part, *args):
        if (step, part) == (3, 1):  # of rank 1
            raise DataError("train_00000.bin is missing")
        return batch(windows, seed, step, part, *args)

    batches.train_batch = gone
    train.main()


@pytest.mark.slow
def test_a_shard_that_goes_ends_all_ranks(dataset, tmp_path):  # noqa: F811
    options = [*SMALL, f"--dataset={dataset}", "--timeout=20"]
    assert join(*start_ranks(2, train_on_what_goes, *options, cwd=tmp_path)) == [1, 2]
    assert f"(rank 1 on {socket.gethostname()}): train_00000.bin is missing\n" in (tmp_path / "rank_1").read_text()
    assert "a rank could not be reached: rank 1 on" in (tmp_path / "rank_0").read_text()


def train_and_signal_in_an_evaluation():
    """Train as train.py; rank 1 gets SIGTERM within the evaluation of step 3 of the first start."""
    seen, real = [0], batches.eval_batches

    def eval_batches(*args):
        for batch in real(*args):
            seen[0] += 1
            if seen[0] == 2 and os.environ["RANK"] == "1" and not os.path.exists("signalled"):
                open("signalled", "w").close()
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    batches.eval_batches = eval_batches
    train.main()


@pytest.mark.slow
def test_a_signal_to_one_rank_within_an_evaluation_leaves_each_line_once(dataset, tmp_path):  # noqa: F811
    argv = [*SMALL, *EXTRA, f"--dataset={dataset}"]
    assert join(*start_ranks(2, train_and_signal_in_an_evaluation, *argv, cwd=tmp_path)) == [0, 0]
    assert "stopped after 3 steps: SIGTERM was received" in (tmp_path / "rank_0").read_text()
    assert not metrics(tmp_path / "out/train", "val_loss")
    assert join(*start_ranks(2, train_and_signal_in_an_evaluation, *argv, cwd=tmp_path)) == [0, 0]
    found = lines(tmp_path / "out/train")
    assert [line["step"] for line in found if "train_loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in found if "val_loss" in line] == [3, 6]
    samples = (tmp_path / "out/train/samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in samples] == [3, 6]


def test_a_folder_that_is_no_run_is_neither_written_nor_renamed(go, dataset, capsys):  # noqa: F811
    os.makedirs("foreign/in")
    for name, text in (("tokenizer.json", "mine"), ("metrics.jsonl", '{"step": 9}\n')):
        open(f"foreign/{name}", "w").write(text)
    os.makedirs("other")
    open("other/config.json", "w").write('{"model_type": "another"}')
    before = {folder: sorted(os.listdir(folder)) for folder in ("foreign", "other", dataset)}
    anew = "--init_from=scratch", "--overwrite=True"
    for folder, message in (
        ("foreign", "foreign is not a run's folder, it has no config.json but in, metrics.jsonl, tokenizer.json"),
        (dataset, "is not a run's folder, it has no config.json but meta.json, tokenizer.json, train_00000.bin, ...:"),
        (".", ". is not a run's folder, it has no config.json but foreign, other: choose another out_dir"),
        ("other", "other/config.json, which a run has beside its checkpoints, is missing or damaged"),
        ("foreign/metrics.jsonl", "out_dir foreign/metrics.jsonl cannot be used: Not a directory"),
    ):
        for options in ((), anew):
            assert go(f"--out_dir={folder}", *options) == 2
            error = capsys.readouterr().err
            assert message in error and error.count("\n") == 1
    assert {folder: sorted(os.listdir(folder)) for folder in before} == before
    assert open("foreign/tokenizer.json").read() == "mine"


def test_a_new_folder_may_hold_logs_and_what_a_killed_start_left(go):
    os.makedirs("out/a")
    for name in ("slurm-1.out", "run.log", ".0123456789ab.tmp", ".lock"):
        open(f"out/a/{name}", "w").close()
    os.utime("out/a/.0123456789ab.tmp", (1e9, 1e9))
    assert go(*TINY, "--out_dir=out/a") == 0
    assert not os.path.exists("out/a/.0123456789ab.tmp") and os.path.exists("out/a/run.log")
    for name in ("ckpt", "metrics.jsonl"):  # killed before its first step
        shutil.rmtree("out/a/ckpt") if name == "ckpt" else os.remove(f"out/a/{name}")
    assert go(*TINY, "--out_dir=out/a", "--init_from=scratch") == 0 and not os.path.exists("out/a.old-1")


def test_what_would_be_renamed_with_a_run_is_named(go, dataset, monkeypatch, capsys):  # noqa: F811
    anew = [*TINY, "--init_from=scratch", "--overwrite=True"]
    assert go(*TINY, "--out_dir=a") == 0 and go(*TINY, "--out_dir=a2") == 0
    shutil.copytree(dataset, "a/data")
    capsys.readouterr()
    assert go(*anew, "--out_dir=a", f"--dataset={os.getcwd()}/a/data") == 2
    assert "a/data is in out_dir a, which would be renamed" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.chdir("a")
        assert go(*anew, "--out_dir=.") == 2
        assert "the current folder is in out_dir ., which would be renamed" in capsys.readouterr().err
    assert go(*TINY, "--out_dir=a", "--init_from=a2", "--overwrite=True") == 0 and os.path.isdir("a.old-1/ckpt")


def test_a_run_goes_on_without_the_run_that_its_weights_came_from(go, capsys):
    assert go(*TINY, "--out_dir=out/a", "--attention=even_power") == 0
    new = [*TINY, "--attention=sympow", "--out_dir=out/b"]
    assert go(*new, "--init_from=out/a") == 0
    os.rename("out/a", "out/moved")
    assert go(*new, "--init_from=out/a/", "--max_iters=3") == 0 and max(metrics("out/b")) == 3
    assert go(*new, "--init_from=out/a", "--out_dir=out/c") == 2
    assert "or a folder with a checkpoint, got 'out/a'" in capsys.readouterr().err and not os.path.exists("out/c")


def test_weights_that_can_not_be_taken_leave_no_folder(go, capsys):
    assert go(*TINY, "--out_dir=out/a") == 0
    for options, message in (
        (["--n_embd=32"], "transformer.wte.weight is [320, 16] instead of [320, 32], and "),
        (["--bias=True"], "do not fit this model: transformer."),
    ):
        assert go(*TINY, *options, "--out_dir=out/b", "--init_from=out/a") == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    for step in os.listdir("out/a/ckpt"):
        flip(f"out/a/ckpt/{step}/model.safetensors", 3000)
    for source in ("out/a", f"out/a/ckpt/{step}"):
        assert go(*TINY, "--out_dir=out/b", f"--init_from={source}") == 2
        assert f"init_from: there is no whole checkpoint in {source}\n" in capsys.readouterr().err
    assert os.listdir("out") == ["a"]


def test_weights_of_another_tokenizer_are_refused(go, capsys):
    import tiktoken

    from sympow.data.tokenizer import Tokenizer

    assert go(*TINY, "--out_dir=out/a") == 0
    ranks = {bytes([255 - i]): i for i in range(256)}
    other = tiktoken.Encoding("t", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})
    Tokenizer("bpe", other).save("out/a")
    assert go(*TINY, "--out_dir=out/b", "--init_from=out/a") == 2
    error = capsys.readouterr().err
    assert "the tokens of out/a (bpe, 257 ids) are not those of the dataset text (bytes, 257 ids)" in error
    assert error.count("\n") == 1 and not os.path.exists("out/b")
    assert call(evaluate.main, "--out_dir=out/a", "--length=64", "--documents=1") == 2
    assert (
        "the tokens of out/a (bpe, 257 ids) are not those of the dataset text (bytes, 257 ids)"
        in capsys.readouterr().err
    )
    Tokenizer("bytes", json_escaped=True).save("out/a")  # another text, the same tokens
    assert go(*TINY, "--out_dir=out/b", "--init_from=out/a") == 0


def test_what_the_dropout_masks_depend_on_stays_as_it_was(go, capsys):
    assert go("--out_dir=out/a", "--max_iters=3") == 0
    saved = json.load(open("out/a/config.json"))
    assert (saved["ranks"], saved["device_type"]) == (1, "cpu")
    masks = "(on which the dropout masks depend): go on with what it was"
    for options, changed, message in (
        (["--batch_size=2"], {}, f"was trained with batch_size=4, now batch_size=2 {masks}"),
        (["--compile=True"], {}, f"was trained with compile=False, now compile=True {masks}"),
        ([], {"ranks": 2}, f"was trained with ranks=2, now ranks=1 {masks}"),
        ([], {"device_type": "cuda", "compile": "False"}, f"with device_type=cuda, now device_type=cpu {masks}"),
    ):
        json.dump({**saved, **changed}, open("out/a/config.json", "w"))
        assert go("--out_dir=out/a", *options) == 2
        assert message in capsys.readouterr().err
        assert go("--out_dir=out/a", "--eval_only=True", *(o for o in options if "batch" in o)) == 0
    for name in ("ranks", "device_type"):  # a run of an earlier version
        del saved[name]
    json.dump({**saved, "model": {**saved["model"], "dropout": 0.0}}, open("out/a/config.json", "w"))
    assert go("--out_dir=out/a", "--dropout=0", "--batch_size=2") == 0 and max(metrics("out/a")) == 6


def test_checksums_that_are_lost_are_not_taken_for_those_of_an_earlier_version(go, finished, capsys):
    shutil.copytree(finished / "whole", "out/a")
    os.remove("out/a/ckpt/step_00000006/checksums.json")
    assert checkpoint.newest("out/a") == "out/a/ckpt/step_00000003"
    progress = json.load(open("out/a/ckpt/step_00000006/progress.json"))
    del progress["skipped"], progress["evaluated"]
    json.dump(progress, open("out/a/ckpt/step_00000006/progress.json", "w"))
    printed = []
    assert checkpoint.newest("out/a", True, printed.append) == "out/a/ckpt/step_00000006"
    assert printed == [
        "out/a/ckpt/step_00000006 is of a version without checksums: only the form of its files was checked"
    ]
    for name, harm in (("model.safetensors", 1000), ("optimizer.pt", 1000), ("progress.json", 9)):
        shutil.copytree("out/a", "out/b")
        os.truncate(f"out/b/ckpt/step_00000006/{name}", harm)
        assert checkpoint.newest("out/b") == "out/b/ckpt/step_00000003", name
        shutil.rmtree("out/b")
    with open("out/a/ckpt/step_00000006/checksums.json", "w") as f:
        f.write('{"model.safetensors": {"bytds": 1}}')
    assert checkpoint.newest("out/a") == "out/a/ckpt/step_00000003"


@pytest.mark.parametrize("name", ["config.json", "checksums.json", "progress.json", "environment.json"])
def test_json_nested_too_deep_is_damage_like_any_other(go, finished, capsys, name):
    shutil.copytree(finished / "cut", "out/a")
    folder = "out/a" if name in os.listdir("out/a") else "out/a/ckpt/step_00000005"
    if name == "progress.json":  # which is read, and no checksum compared, in a checkpoint of an earlier version
        os.remove(f"{folder}/checksums.json")
    with open(f"{folder}/{name}", "w") as f:
        f.write(100_000 * "[")
    capsys.readouterr()
    assert go("--out_dir=out/a", "--lr_decay_iters=6") == (2 if name == "config.json" else 0)
    error = capsys.readouterr().err
    assert "recursion" in error or name == "environment.json"
    assert error.count("\n") == (name != "environment.json")


@pytest.mark.parametrize(
    "change",
    [
        {"n_lazer": 2}, {"n_embd": "32"}, {"n_embd": 33}, {"n_embd": 64}, {"bias": True},
        {"rope_base": 513.0}, {"n_head": 4}, {"p": 4}, {"attention": "sympow"},  # which fit the weights, too
    ],
)  # fmt: skip
def test_settings_that_are_not_those_of_the_weights_are_refused(go, finished, capsys, change):
    shutil.copytree(finished / "whole", "out/a")
    saved = json.load(open("out/a/config.json"))
    json.dump({**saved, "model": {**saved["model"], **change}}, open("out/a/config.json", "w"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        load_run("out/a", types.SimpleNamespace(device="cpu", dtype="auto"))
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "out/a/config.json" in error and error.count("\n") == 1
    assert go("--out_dir=out/a") == 2 and capsys.readouterr().err.count("\n") == 1
    if "n_embd" not in change and "bias" not in change:
        assert go("--out_dir=out/b", "--init_from=out/a") == 2 and not os.path.exists("out/b")
        error = capsys.readouterr().err
        assert "out/a/config.json" in error and error.count("\n") == 1


@pytest.mark.parametrize("option", ["--out_dir={}", "--out_dir=new/{}", "{}.py", "--dataset={}", "--init_from={}",
                                    "--baseline={}", "--out_dir=/dev/null/{}"])  # fmt: skip
def test_names_that_are_too_long_are_refused_and_leave_nothing(go, capsys, option):
    assert go("--out_dir=out/a", option.format(300 * "x")) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and 300 * "x" in error and os.listdir() == []


def test_a_limit_on_the_size_of_files_is_one_line(go, dataset, capsys):  # noqa: F811
    argv = [*SMALL, *EXTRA, f"--dataset={dataset}", "--out_dir=out/a"]
    for largest, status in ((100, 2), (6000, 1)):
        assert join(start(train_with_small_files, *argv, env={"LARGEST": str(largest)}, log=str(largest))) == [status]
        error = open(str(largest)).read().splitlines()[-1]
        assert "File too large" in error and "train_with_small" not in error, error
        assert os.path.exists("out") == (status == 1)


def test_a_checkpoint_is_there_at_every_moment_while_its_own_step_is_saved_again(tmp_path, monkeypatch):
    model, writer = torch.nn.Linear(1, 1), checkpoint.Writer(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    writer.save(model, optimizer, checkpoint.Progress(3, evaluated=False))
    writer.wait()
    seen, rename = [], os.rename

    def noted(*args):
        rename(*args)
        seen.append(checkpoint.load(checkpoint.newest(tmp_path, thorough=True), model).evaluated)

    monkeypatch.setattr(os, "rename", noted)
    writer.save(model, optimizer, checkpoint.Progress(3))
    writer.wait()
    assert seen == [False, True] and os.listdir(tmp_path / "ckpt") == ["step_00000003"]


if __name__ == "__main__":  # as a worker of torchrun
    train_and_die()
