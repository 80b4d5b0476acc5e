"""Training survives kills, damaged checkpoints, full disks, signals and gradients that are not finite."""

import copy
import functools
import hashlib
import itertools
import json
import os
import pathlib
import queue
import re
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import types
from contextlib import suppress

import pytest
import torch
from helpers import (
    SMALL,
    assert_kills_change_nothing,
    byte_encoding,
    call,
    join,
    lines,
    make_dataset,
    metrics,
    refusal,
    start,
    start_ranks,
)
from safetensors.torch import load_file, save_file

from sympow import evaluate, export, sample, train
from sympow.data import DataError
from sympow.data.files import sha256_of
from sympow.data.tokenizer import Tokenizer
from sympow.training import batches
from sympow.runs import checkpoint, folder, processes

EXTRA = ["--attention=sympow_gating", "--dropout=0.1", "--warmup_iters=2"]
TINY = (
    "--n_layer=1 --n_head=1 --n_embd=16 --block_size=16 --batch_size=2 --tokens_per_step=64 --eval_tokens=64 "
    "--sample_tokens=1 --max_iters=2 --eval_interval=1 --pack=1"
).split()


@pytest.fixture
def go(go, monkeypatch):
    """Return a function that trains in tmp_path with these settings and others, and returns the exit status.

    Where a program would end at once, whatever its threads do, it raises SystemExit instead.
    """
    monkeypatch.setattr(os, "_exit", sys.exit)
    return functools.partial(go, *EXTRA)


@pytest.fixture
def trained(go):
    """Train two steps of a tiny model in out/a."""
    assert go(*TINY, "--out_dir=out/a") == 0


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    """Return a folder with two runs of 6 steps: `whole`, and `cut` after step 5 with checkpoints at 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("finished")
    options = [*SMALL, *EXTRA, f"--dataset={dataset}"]
    cut = ["--max_iters=5", "--eval_interval=2"]
    assert call(train.main, *options, f"--out_dir={folder}/whole") == 0
    assert call(train.main, *options, f"--out_dir={folder}/cut", *cut) == 0
    return folder


@pytest.fixture
def cut(go, finished):
    """Put a copy of the run `cut` into out/a."""
    shutil.copytree(finished / "cut", "out/a")


def flip(path, position):
    """Flip a bit of the byte at a position of a file."""
    with open(path, "r+b") as f:
        f.seek(position)
        byte = f.read(1)[0]
        f.seek(position)
        f.write(bytes([byte ^ 4]))


def write(path, text):
    with open(path, "w") as f:
        f.write(text)


def change_json(path, **changes):
    """Change values of a JSON file; those that are None are removed."""
    with open(path) as f:
        contents = json.load(f) | changes
    write(path, json.dumps({name: value for name, value in contents.items() if value is not None}))


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments_change_nothing(dataset, tmp_path, kills):
    # Muon, with AdamW for the embedding and the gains, and wsd have the most to resume from
    extra = ["--optimizer=muon", "--schedule=wsd", "--decay_share=0.5", "--then=32@0.5"]
    often = ["--tokens_per_step=128", "--max_iters=10", "--eval_interval=2"]
    options = [*SMALL, *EXTRA, *TINY, *often, *extra, f"--dataset={dataset}"]
    assert_kills_change_nothing(
        lambda name: [start(train.main, *options, f"--out_dir=out/{name}", cwd=tmp_path)],
        tmp_path / "out",
        kills=kills,
        statuses={0, -signal.SIGKILL},
    )


@pytest.mark.parametrize(
    "file,harm,message",
    [
        ("model.safetensors", lambda path: os.truncate(path, os.path.getsize(path) // 2), "is not what was written"),
        ("model.safetensors", lambda path: flip(path, os.path.getsize(path) - 5), "is not what was written"),
        ("optimizer.safetensors", os.remove, "optimizer.safetensors is missing"),
        ("checksums.json", os.remove, "checksums.json is missing"),
        ("checksums.json", lambda path: change_json(path, **{"model.1-of-99999999": "0"}), "99 is missing"),
        ("checksums.json", lambda path: flip(path, 35), "checksums.json or progress.json is not what"),
        ("checksums.json", lambda path: write(path, 100_000 * "["), "checksums.json is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_left_out_and_the_one_before_it_taken(cut, file, harm, message):
    harm(f"out/a/ckpt/step_00000005/{file}")
    warnings = []
    assert checkpoint.newest("out/a", True, warnings.append) == "out/a/ckpt/step_00000004"
    (warning,) = warnings
    assert "step_00000005 is left out: " in warning and message in warning


def drop_tensor(path):
    """Remove a tensor from a file of weights."""
    save_file(dict(sorted(load_file(path).items())[1:]), path)


def fit_checksums(folder):
    """Write checksums.json anew, so that it fits the files of a checkpoint as they are."""
    sums = {}
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        sums[name] = {"bytes": os.path.getsize(path), "sha256": sha256_of(path)}
    sums.pop("checksums.json", None)
    write(f"{folder}/checksums.json", json.dumps(sums))


@pytest.mark.parametrize(
    "file,harm,message",
    [
        ("progress.json", lambda path: write(path, "[1]"), "it holds no JSON object"),
        *(
            ("progress.json", lambda path, changes=changes: change_json(path, **changes), message)
            for changes, message in (
                ({"steps": 5}, "it is no run's progress"),
                ({"model": {"n_layer": "2"}}, "progress.json is not what was written"),
                ({"model": {"n_layer": 10**9}}, "n_layer must be from 1 to 10,000, got 1000000000"),
                ({"model": {"n_lazer": 2}}, "progress.json is not what was written"),
                ({"model": {"attention": "none"}}, "attention"),
            )
        ),
        ("model.safetensors", lambda path: write(path, ""), "model.safetensors is damaged: "),
        ("model.safetensors", lambda path: write(path, 7 * "\0" + "\x7f{}"), "model.safetensors is damaged: "),
        ("model.safetensors", lambda path: write(path, "\x02" + 7 * "\0" + "[]"), "model.safetensors is damaged: "),
        ("model.safetensors", drop_tensor, "transformer.h.0.attn.c_attn.weight is missing"),
        ("optimizer.safetensors", lambda path: write(path, ""), "optimizer.safetensors is damaged: "),
        ("optimizer.safetensors", lambda path: os.rename(path, path[:-11] + "pt"), "optimizer.safetensors is missing"),
    ],
)
def test_what_fits_its_checksum_but_cannot_be_used_is_damage(cut, file, harm, message):
    folder = "out/a/ckpt/step_00000005"
    harm(f"{folder}/{file}")
    fit_checksums(folder)
    assert message in checkpoint.damage(folder)


def test_damage_is_named_by_every_program_and_the_checkpoint_before_it_taken(go, finished, cut, capsys):
    folder = "out/a/ckpt/step_00000005"
    flip(f"{folder}/model.safetensors", 70)
    fit_checksums(folder)
    shutil.copytree(folder, "out/a/ckpt/step_00000009")
    for program in (
        lambda: call(sample.main, "--out_dir=out/a", "--max_new_tokens=1"),
        lambda: call(evaluate.main, "--out_dir=out/a", "--documents=1", "--length=32"),
        lambda: call(export.main, "out/a", "--to=hf"),
        lambda: go(*TINY[3:], "--out_dir=out/b", "--init_from=out/a", "--max_iters=1"),
        lambda: go("--out_dir=out/a"),
    ):
        capsys.readouterr()
        status, error = program(), capsys.readouterr().err
        assert status == 0 and "model.safetensors is damaged: " in error, error
        assert "step_00000005 is left out: " in error, error
    assert metrics("out/a") == metrics(finished / "whole")
    assert max(os.listdir("out/a/ckpt")) == "step_00000006"  # the damaged one that is later has gone


def test_checkpoints_of_another_model_py_are_not_called_damaged(go, finished, capsys, monkeypatch):
    """As after a change of model.py, such as a norm of queries."""
    shutil.copytree(finished / "whole", "out/a")
    shapes = checkpoint.shapes_of
    monkeypatch.setattr(checkpoint, "shapes_of", lambda config: {**shapes(config), "q_norm.weight": [16]})
    assert go("--out_dir=out/a") == 2
    printed = capsys.readouterr().err
    assert (
        "its weights are not those of this model.py (q_norm.weight is missing, not [16]); --init_from=out/a/ckpt"
        in printed
    )
    assert "no checkpoint in out/a can be used" in printed and "damage" not in printed


def test_damaged_weights_can_not_be_taken_and_leave_no_folder(go, trained, capsys):
    for step in (1, 2):
        flip(f"out/a/ckpt/step_0000000{step}/model.safetensors", 3000)
    for source in ("out/a", "out/a/ckpt/step_00000002"):
        assert go(*TINY, "--out_dir=out/b", f"--init_from={source}") == 2
        assert f"init_from: there is no whole checkpoint in {source}; give" in capsys.readouterr().err
    assert os.listdir("out") == ["a"]


def test_ranks_take_the_checkpoint_that_rank_0_found_whole(cut, dataset):
    change_json("out/a/config.json", ranks=2)
    flip("out/a/ckpt/step_00000005/optimizer.safetensors", 2000)  # the other rank sees its size alone
    argv = [*SMALL, *EXTRA, f"--dataset={dataset}", "--out_dir=out/a"]
    assert join(*start_ranks(2, train.main, *argv)) == [0, 0]
    assert "resuming from out/a/ckpt/step_00000004, step 4" in open("rank_0").read()
    assert list(metrics("out/a")) == [1, 2, 3, 4, 5, 6]


def train_with_small_files():
    """Train as train.py, but without files above LARGEST bytes, as if the disk were full."""
    largest = int(os.environ["LARGEST"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    train.main()


def test_a_full_disk_ends_training_soon_and_leaves_the_older_checkpoints_whole(go, dataset, capsys):
    assert go("--out_dir=out/a", "--max_iters=3") == 0
    largest = os.path.getsize("out/a/ckpt/step_00000003/model.safetensors")
    argv = [*SMALL, *EXTRA, f"--dataset={dataset}", "--out_dir=out/a", "--max_iters=100000"]
    assert join(start(train_with_small_files, *argv, env={"LARGEST": str(largest // 2)})) == [1]
    error = open("log").read()
    assert ".py: the checkpoint of step 6 could not be written (" in error
    assert error.endswith("out/a/ckpt/step_00000003 is whole: the same command resumes from there\n")
    assert max(metrics("out/a")) < 1000 and os.listdir("out/a/ckpt") == ["step_00000003"]
    assert not checkpoint.damage("out/a/ckpt/step_00000003")
    assert go("--out_dir=out/a", "--max_iters=6") == 0
    assert "resuming from out/a/ckpt/step_00000003, step 3" in capsys.readouterr().out


def test_what_is_written_is_what_was_there_when_save_was_called(tmp_path, monkeypatch):
    def make():
        model = torch.nn.Linear(3, 3)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step():
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    model, optimizer = make()
    step()
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
    later, write_file = threading.Event(), checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", lambda *args: later.wait(30) and write_file(*args))
    writer = checkpoint.Writer(tmp_path)
    writer.save(model, optimizer, checkpoint.Progress(1))
    writer.check()
    step()  # in place, while the writer waits
    assert not checkpoint.exists(tmp_path) and not torch.equal(saved[0]["weight"], model.weight)
    later.set()
    writer.wait()
    model, optimizer = make()
    assert checkpoint.load(checkpoint.newest(tmp_path, thorough=True), model, optimizer).step == 1
    torch.testing.assert_close([model.state_dict(), optimizer.state_dict()["state"]], saved, rtol=0, atol=0)


def at_moments(monkeypatch, act):
    """Call act(name, number) before each numbered moment at which training reads, computes, logs or saves something."""
    number = itertools.count(1)
    moments = {
        batches: ["train_batch", "generate_by_steps"],
        train.GPT: ["forward", "statistics"],
        train.Tracker: ["log", "sample", "flush_to_disk"],
        checkpoint.Writer: ["save"],
    }

    def wrap(name, function):
        def wrapped(*args, **kwargs):
            act(name, next(number))
            return function(*args, **kwargs)

        return wrapped

    for owner, names in moments.items():
        for name in names:
            monkeypatch.setattr(owner, name, wrap(name, getattr(owner, name)))


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it is run, except that the thread ends its write."""


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("event", ["signal", "kill"])
def test_each_line_comes_once_wherever_a_signal_or_a_kill_comes(go, monkeypatch, event, stride):
    """Stop a run at moments from its start to the second step, and some again soon after the next start."""

    def start(moment):
        names = []

        def act(name, number):
            names.append(name)
            if number == moment and event == "kill":
                raise Killed
            if number == moment:
                os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch, suppress(Killed):
            at_moments(patch, act)
            assert go(*TINY, "--out_dir=out/cut") == 0
        return names

    def results():
        keys = ("step", "train_loss", "val_loss", "grad_norm")
        numbers = [{key: line[key] for key in keys if key in line} for line in lines("out/cut")]
        weights = open("out/cut/ckpt/step_00000002/model.safetensors", "rb").read()
        return numbers, open("out/cut/samples.jsonl").read(), weights

    names = start(0)
    expected, last = results(), names.index("save") + 3
    assert names[:last].count("log") == 2 and names[last - 2 : last] == ["forward", "train_batch"]  # of the next step
    for moment in range(1, last + 1, stride):
        shutil.rmtree("out")
        start(moment)
        assert not os.path.exists("out/cut/ckpt/step_00000000"), names[moment - 1]
        if moment % 4 == 1:
            start(4)
        start(0)
        assert results() == expected, names[moment - 1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_within_a_step_saves_and_loses_nothing(go, finished, monkeypatch, capsys, number):
    calls, real = [0], batches.train_batch

    def batch(*args):
        calls[0] += 1
        if calls[0] == 5:  # two micro-steps a step, one read ahead: within the third
            os.kill(os.getpid(), number)
        return real(*args)

    monkeypatch.setattr(batches, "train_batch", batch)
    options = {signal.SIGUSR1: ["--init_from=scratch"], signal.SIGINT: ["--init_from=scratch", "--overwrite=True"]}
    options = options.get(number, [])
    assert go("--out_dir=out/cut", *options) == 0
    stopped = f"stopped at step 2: {signal.Signals(number).name} was received\nsaved step 2; the same command"
    change = "".join([" with --init_from=auto", " without --overwrite"][: len(options)])
    assert f"{stopped}{change} resumes the run\n" in capsys.readouterr().out
    assert max(metrics("out/cut")) == 2 and os.listdir("out/cut/ckpt") == ["step_00000002"]
    assert go("--out_dir=out/cut", *options[:1], "--init_from=auto") == 0
    assert metrics("out/cut") == metrics(finished / "whole")


def train_with_a_long_backward_pass():
    """Train as train.py; from the fifth micro-step on, the backward pass is C++ that no signal interrupts."""
    real, calls = torch.Tensor.backward, []

    def backward(loss):
        calls.append(loss)
        if len(calls) > 5:  # the first one is before the first step: it arranges the buckets of gradients
            open(f"begun_{os.environ.get('RANK', 0)}", "w").close()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes, without the interpreter's lock
        real(loss)

    torch.Tensor.backward = backward
    train.main()


@pytest.mark.parametrize("count", [1, 2])
def test_ctrl_c_within_a_long_step_is_answered_at_once_and_a_second_one_ends_it(dataset, tmp_path, count):
    argv = [*SMALL, f"--dataset={dataset}", "--out_dir=out/a", "--eval_interval=1", f"--batch_size={4 // count}"]
    ranks = start_ranks(count, train_with_a_long_backward_pass, *argv, cwd=tmp_path)
    saved = "out/a/ckpt/step_00000002"
    answers = (
        ": stopping after this micro-step and saving the steps taken; Ctrl-C now ends training at once\n",
        f": ended at once; last checkpoint: {saved}; the same command resumes the run\n",
    )

    def printed():
        return "".join((tmp_path / f"rank_{rank}").read_text() for rank in range(count))

    def wait_for(condition, seconds):
        end = time.time() + seconds
        while not condition():
            assert time.time() < end, printed()
            time.sleep(0.05)

    def is_waiting(process):
        """Return True if a signal has not reached the process yet: a second one would be lost."""
        status = pathlib.Path(f"/proc/{process.pid}/status")
        return status.exists() and not re.search(r"^ShdPnd:\t0+$", status.read_text(), re.M)

    try:
        paths = [tmp_path / name for name in (saved, *(f"begun_{rank}" for rank in range(count)))]
        wait_for(lambda: all(path.exists() for path in paths), 600)
        for answer in answers:
            wait_for(lambda: not any(map(is_waiting, ranks)), 300)
            for process in ranks:
                os.kill(process.pid, signal.SIGINT)
            wait_for(lambda: answer in printed(), 300)
        assert join(*ranks) == count * [130]
    finally:
        for process in ranks:
            process.kill()
    assert [printed().count(answer) for answer in answers] == [1, 1]


def at_first_wait(monkeypatch, act):
    """Call act() when a process waits for the lock of a run's folder for the first time."""
    acts = [act]
    clock = types.SimpleNamespace(sleep=lambda seconds: acts and acts.pop()(), strftime=time.strftime)
    monkeypatch.setattr(folder, "time", clock)


def test_a_second_process_in_one_folder_is_refused_also_if_the_first_renames_it(go, cut, monkeypatch, capsys):
    locks = [folder.lock_out_dir("out/a")]

    def rename():  # as with --overwrite=True
        os.rename("out/a", "out/a.old-1")
        locks.append(folder.lock_out_dir("out/a"))
        locks[0].close()

    at_first_wait(monkeypatch, rename)
    assert go("--out_dir=out/a") == 2
    assert f"process {os.getpid()} on {socket.gethostname()} is training in out/a: stop it" in refusal(capsys)
    locks[1].close()


def test_a_run_that_another_process_began_meanwhile_is_not_taken_for_a_new_one(go, finished, monkeypatch, capsys):
    def begin(*args, start=folder.start_folder):
        shutil.copytree(finished / "cut", "out/a")
        return start(*args)

    monkeypatch.setattr(folder, "start_folder", begin)
    assert go("--out_dir=out/a") == 2
    assert "another process has begun a run in out/a: the same command again resumes it" in refusal(capsys)
    assert lines("out/a") == lines(finished / "cut")


def test_the_checkpoint_is_chosen_under_the_lock(go, finished, cut, monkeypatch, capsys):
    lock = folder.lock_out_dir("out/a")

    def end():  # another process, which has taken a step more
        shutil.rmtree("out/a/ckpt")
        shutil.copytree(finished / "whole", "out/a", dirs_exist_ok=True)
        lock.close()

    at_first_wait(monkeypatch, end)
    assert go("--out_dir=out/a", "--max_iters=7") == 0
    assert "resuming from out/a/ckpt/step_00000006, step 6" in capsys.readouterr().out


@pytest.mark.parametrize("moment", ["damage", "load"])
def test_a_checkpoint_that_training_removes_meanwhile_is_chosen_again(cut, monkeypatch, moment):
    real = getattr(checkpoint, moment)

    def remove(*args):
        monkeypatch.setattr(checkpoint, moment, real)
        os.rename("out/a/ckpt/step_00000005", "out/a/ckpt/step_00000009")
        return real(*args)

    monkeypatch.setattr(checkpoint, moment, remove)
    assert call(export.main, "out/a", "--to=hf") == 0
    assert "step_00000009" in open("hf/README.md").read()


def test_the_same_command_goes_on_before_there_is_a_checkpoint_and_after_torchruns_restart(go, trained, monkeypatch):
    command = *TINY, "--init_from=out/a", "--out_dir=out/b"
    assert go(*command) == 0
    shutil.rmtree("out/b/ckpt")  # killed before the first
    os.remove("out/b/metrics.jsonl")
    os.makedirs("out/b/ckpt/.writing-0")
    assert go(*command) == 0 and ".writing-0" not in os.listdir("out/b/ckpt")
    anew = *TINY, "--init_from=scratch", "--overwrite=True", "--out_dir=out/b"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert go(*anew) == 0 and not os.path.exists("out/b.old-1")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert go(*anew) == 0 and os.path.isdir("out/b.old-1/ckpt/step_00000002")


def test_a_run_without_its_settings_or_of_another_version_is_refused_by_name(go, trained, capsys):
    more, names = (*TINY, "--out_dir=out/a", "--max_iters=3"), sorted(os.listdir("out/a"))
    for version in (None, 2):
        change_json("out/a/config.json", version=version)
        message = f"out/a/config.json is of version {version}, and this program reads version 1"
        for options in (more, (*TINY, "--out_dir=out/b", "--init_from=out/a")):
            capsys.readouterr()
            assert go(*options) == 2 and message in refusal(capsys)
    removed = "is missing; if a run in training has removed it for a newer checkpoint, give the command again"
    with pytest.raises(DataError, match=f"step_9/progress.json, .*, {removed}"):
        checkpoint.read_progress("out/a/ckpt/step_9")
    with pytest.raises(DataError, match=f"step_9/model.safetensors {removed}"):
        checkpoint.load("out/a/ckpt/step_9", torch.nn.Linear(1, 1))
    os.rename("out/a/config.json", "config.json")
    assert go(*more) == 2
    assert "out/a/config.json, which a run has beside its checkpoints, is missing" in refusal(capsys)
    os.rename("config.json", "out/a/config.json")
    change_json("out/a/config.json", version=1)
    assert go(*more) == 0 and max(metrics("out/a")) == 3 and sorted(os.listdir("out/a")) == names
    change_json("out/a/ckpt/step_00000003/progress.json", version=2)
    with pytest.raises(DataError, match="progress.json is of version 2, and this program reads version 1"):
        checkpoint.settings("out/a", "out/a/ckpt/step_00000003")


def test_what_a_kill_left_of_checkpoints_is_removed_by_the_next_start(go):
    options = *TINY, "--max_iters=3", "--out_dir=out/a"
    assert go(*options) == 0
    names = sorted(os.listdir("out/a/ckpt"))
    assert names == ["step_00000002", "step_00000003"]
    # killed while the next one was written, after the newest had been saved again, and while the third was removed
    for name in (".writing-0123", "step_00000003.old", "step_00000001"):
        shutil.copytree("out/a/ckpt/step_00000002", f"out/a/ckpt/{name}")
    os.remove("out/a/ckpt/step_00000003.old/progress.json")
    assert go(*options, "--eval_only=True") == 0 and len(os.listdir("out/a/ckpt")) == 5
    assert go(*options) == 0
    assert sorted(os.listdir("out/a/ckpt")) == names


def test_other_data_under_the_same_name_are_refused(go, trained, tmp_path, capsys):
    folder = make_dataset(tmp_path / "other", "another text\n" * 1000)
    assert go(*TINY, "--out_dir=out/a", f"--dataset={folder}") == 2
    error = capsys.readouterr().err
    assert "was trained with dataset=" in error and " data=" in error


@pytest.mark.parametrize(
    "max_iters,nan,message",
    [
        (30, [], "8 steps in a row had no finite gradient; there is no checkpoint"),
        (3, [], "the validation loss of step 3, the last, is nan: it is not saved"),
        (3, range(1, 100), "3 steps in a row had no finite gradient; there is no checkpoint"),
    ],
)
def test_weights_without_a_finite_loss_are_not_saved(go, monkeypatch, capsys, max_iters, nan, message):
    not_finite(monkeypatch, nan)
    anew = "--learning_rate=1e38", "--warmup_iters=0", "--max_skipped=8"
    assert go("--out_dir=out/a", *anew, f"--max_iters={max_iters}") == 1
    assert message in capsys.readouterr().err and not os.path.isdir("out/a/ckpt")


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


def test_steps_without_a_finite_gradient_are_left_out_and_counted(go, monkeypatch):
    not_finite(monkeypatch, {3, 8})  # in steps 2 and 4
    assert go("--out_dir=out/a") == 0
    skipped = [line.get("skipped", 0) for line in lines("out/a") if "train_loss" in line]
    assert skipped == [0, 0, 1, 1, 2, 2]
    assert json.load(open("out/a/ckpt/step_00000006/progress.json"))["skipped"] == [2, 0]
    assert all(v == v for v in metrics("out/a", "val_loss").values())


def test_after_so_many_in_a_row_training_stops_and_names_the_last_good_checkpoint(go, monkeypatch, capsys):
    not_finite(monkeypatch, range(9, 100))  # from step 5 on
    assert go("--out_dir=out/a", "--max_iters=30", "--max_skipped=4", "--eval_interval=2") == 1
    error, newest = capsys.readouterr().err, checkpoint.newest("out/a", thorough=True)
    assert "4 steps in a row had no finite gradient" in error and f"the last good checkpoint is {newest}" in error
    assert all(x.isfinite().all() for x in load_file(f"{newest}/model.safetensors").values())


@pytest.fixture
def two_ranks(dataset, tmp_path):
    """Start two processes that train together, and wait until they have taken some steps."""
    options = [*SMALL, *EXTRA, f"--dataset={dataset}", "--max_iters=100000", "--timeout=5", "--eval_interval=100000"]
    ranks = start_ranks(2, train.main, *options, cwd=tmp_path)
    log, begin = tmp_path / "out/train/metrics.jsonl", time.time()
    while not (log.exists() and log.stat().st_size) and time.time() < begin + 600:
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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_ends_if_the_other_does_not_come(dataset, tmp_path, rank):
    ranks = start_ranks(2, train.main, *SMALL, "--timeout=1", f"--dataset={dataset}", cwd=tmp_path)
    ranks[1 - rank].kill()
    assert join(ranks[rank]) == [1]
    assert "ranks that have not come within 1 s: all others" in (tmp_path / f"rank_{rank}").read_text()
    assert not (tmp_path / "out").exists()


def test_a_signal_to_one_rank_stops_both_at_the_same_step_with_status_0(two_ranks, tmp_path):
    os.kill(two_ranks[1].pid, signal.SIGTERM)
    assert join(*two_ranks) == [0, 0], (tmp_path / "rank_0").read_text()
    (folder,) = os.listdir(tmp_path / "out/train/ckpt")
    step = int(folder.removeprefix("step_"))
    assert step == max(metrics(tmp_path / "out/train")) > 0
    assert f"stopped at step {step}: SIGTERM was received" in (tmp_path / "rank_0").read_text()
    assert not checkpoint.damage(tmp_path / "out/train/ckpt" / folder)


def train_and_die():
    """Train as train.py; rank 1 kills itself at step 10 of its first start."""
    batch = batches.train_batch

    def killed(windows, seed, step, *args):
        if step == 10 and os.environ["RANK"] == "1" and not os.path.exists(os.environ["KILLED"]):
            open(os.environ["KILLED"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(windows, seed, step, *args)

    batches.train_batch = killed
    train.main()


def torchrun():
    """Run train_and_die as torchrun --standalone --nproc_per_node=2 --max_restarts=2 does, but in forks."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    rendezvous = dict(rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="forks", start_method="fork")
    config = LaunchConfig(1, 1, nproc_per_node=2, max_restarts=2, monitor_interval=0.1, **rendezvous)
    elastic_launch(config, train_and_die)()


@pytest.mark.slow
def test_torchrun_starts_again_after_a_worker_was_killed(dataset, tmp_path):
    options = [*SMALL, *EXTRA, f"--dataset={dataset}", "--max_iters=16", "--eval_interval=4", "--timeout=8"]
    env = {"KILLED": str(tmp_path / "killed")}
    statuses = join(start(torchrun, *options, cwd=tmp_path, env=env))
    log = (tmp_path / "log").read_text()
    assert statuses == [0], log
    assert "rank 1 on" in log and "resuming from out/train/ckpt/step_00000008, step 8" in log
    assert list(metrics(tmp_path / "out/train")) == list(range(1, 17))
    assert list(metrics(tmp_path / "out/train", "val_loss")) == [4, 8, 12, 16]


def test_an_evaluation_alone_answers_a_signal_and_every_start_ctrl_c(go, trained, monkeypatch, capsys):
    answers = queue.Queue()  # of the thread that answers signals
    with monkeypatch.context() as patch:
        patch.setattr(processes, "warn", answers.put)
        at_moments(patch, lambda name, number: os.kill(os.getpid(), signal.SIGTERM) if number == 2 else None)
        assert go(*TINY, "--out_dir=out/a", "--eval_only=True", "--eval_tokens=512") == 1
        assert answers.get(timeout=600).startswith("stopping after this micro-step and saving")
    assert capsys.readouterr().err == "train.py: the evaluation is not finished: SIGTERM was received\n"

    def ctrl_c(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "make_optimizer", ctrl_c)
    assert go(*TINY, "--out_dir=out/a") == 130
    assert capsys.readouterr().err == "train.py: interrupted\n"


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
def test_a_signal_to_one_rank_within_an_evaluation_leaves_each_line_once(dataset, tmp_path):
    argv = [*SMALL, *EXTRA, f"--dataset={dataset}"]
    assert join(*start_ranks(2, train_and_signal_in_an_evaluation, *argv, cwd=tmp_path)) == [0, 0]
    assert "stopped at step 3: SIGTERM was received" in (tmp_path / "rank_0").read_text()
    assert not metrics(tmp_path / "out/train", "val_loss")
    assert join(*start_ranks(2, train_and_signal_in_an_evaluation, *argv, cwd=tmp_path)) == [0, 0]
    assert list(metrics(tmp_path / "out/train")) == [1, 2, 3, 4, 5, 6]
    assert list(metrics(tmp_path / "out/train", "val_loss")) == [3, 6] and len(lines(tmp_path / "out/train")) == 8


def test_a_folder_that_is_no_run_is_neither_written_nor_renamed(go, dataset, capsys):
    os.makedirs("foreign/in")
    write("foreign/tokenizer.json", "mine"), write("foreign/metrics.jsonl", '{"step": 9}\n')
    os.makedirs("other")
    write("other/config.json", '{"model_type": "another"}')
    contents = {name: sorted(os.listdir(name)) for name in ("foreign", "other", dataset)}
    for name, message in (
        ("foreign", "foreign is not a run's folder, it has in but no config.json: choose another out_dir"),
        (dataset, "is not a run's folder, it has meta.json but no config.json"),
        ("other", "other/config.json is of version None, and this program reads version 1"),
        ("foreign/metrics.jsonl", "out_dir foreign/metrics.jsonl is no folder, but a file: give the name of a folder"),
    ):
        for options in ((), ("--init_from=scratch", "--overwrite=True")):
            assert go(f"--out_dir={name}", *options) == 2
            assert message in refusal(capsys)
    assert {name: sorted(os.listdir(name)) for name in contents} == contents
    assert open("foreign/tokenizer.json").read() == "mine"


def test_a_new_folder_may_hold_logs_and_what_a_killed_start_left(go):
    os.makedirs("out/a")
    for name in ("slurm-1.out", "run.log", ".0123456789ab.tmp", ".lock"):
        open(f"out/a/{name}", "w").close()
    assert go(*TINY, "--out_dir=out/a") == 0 and os.path.exists("out/a/run.log")
    shutil.rmtree("out/a/ckpt")
    os.remove("out/a/metrics.jsonl")  # killed before its first step
    assert go(*TINY, "--out_dir=out/a", "--init_from=scratch") == 0 and not os.path.exists("out/a.old-1")


def test_weights_of_another_tokenizer_are_refused(go, trained, capsys):
    Tokenizer("bpe", byte_encoding()).save("out/a")
    capsys.readouterr()
    message = "the tokens of out/a (bpe, 257 ids) are not those of the dataset text (bytes, 257 ids)"
    assert go(*TINY, "--out_dir=out/b", "--init_from=out/a") == 2
    assert message in refusal(capsys) and not os.path.exists("out/b")
    assert call(evaluate.main, "--out_dir=out/a", "--length=64", "--documents=1") == 2
    assert message in capsys.readouterr().err


def test_the_settings_that_dropout_masks_depend_on_stay(go, trained, capsys):
    masks = "(on which the dropout masks depend): resume with what it was"
    for options, changes, message in (
        (["--batch_size=1"], {}, f"was trained with batch_size=2, now batch_size=1 {masks}"),
        (["--compile=True"], {}, f"was trained with compile=auto, now compile=True {masks}"),
        ([], {"ranks": 2}, f"was trained with ranks=2, now ranks=1 {masks}"),
        ([], {"device_type": "cuda"}, f"with device_type=cuda, now device_type=cpu {masks}"),
    ):
        change_json("out/a/config.json", **{"ranks": 1, "device_type": "cpu", **changes})
        assert go(*TINY, "--out_dir=out/a", *options) == 2
        assert message in capsys.readouterr().err
    assert go(*TINY, "--out_dir=out/a", "--eval_only=True", "--batch_size=1") == 0
    undropped = *TINY, "--out_dir=out/b", "--dropout=0"
    assert go(*undropped) == 0 and go(*undropped, "--batch_size=1", "--max_iters=3") == 0
    assert max(metrics("out/b")) == 3


def test_settings_that_are_not_those_of_the_weights_are_refused(finished, tmp_path):
    run = shutil.copytree(finished / "whole", tmp_path / "a")
    model = json.loads((run / "config.json").read_text())["model"]
    for change in ({"n_lazer": 2}, {"n_embd": 64}, {"rope_base": 513.0}, {"attention": "sympow"}):
        change_json(run / "config.json", model={**model, **change})
        with pytest.raises(DataError, match="a/config.json is damaged"):
            checkpoint.settings(run, run / "ckpt/step_00000006")


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


def test_the_numbers_of_a_run_whose_checkpoints_are_gone_stay(go, trained, capsys):
    numbers = open("out/a/metrics.jsonl").read()
    shutil.rmtree("out/a/ckpt")
    assert go(*TINY, "--out_dir=out/a") == 2
    assert "out/a has evaluations but no checkpoint" in capsys.readouterr().err
    assert open("out/a/metrics.jsonl").read() == numbers


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"then": "x@y"}, "then must be CONTEXT@START"),
        ({"model": [1]}, "TypeError"),
        ({"model": {"n_lazer": 2}}, "n_lazer"),
    ],
)
def test_an_odd_value_in_config_json_is_one_line_of_every_program(go, trained, capsys, changes, message):
    change_json("out/a/config.json", **changes)
    for program in (
        lambda: go(*TINY, "--out_dir=out/a"),
        lambda: go(*TINY, "--out_dir=out/b", "--init_from=out/a"),
        lambda: call(evaluate.main, "--out_dir=out/a"),
        lambda: call(sample.main, "--out_dir=out/a"),
    ):
        capsys.readouterr()
        assert program() == 2 and not os.path.exists("out/b")
        line = refusal(capsys)
        assert "out/a/config.json is damaged" in line and message in line


def test_a_link_as_out_dir_stays_a_link(go):
    os.symlink("elsewhere/a", "link")
    anew = [*TINY, "--out_dir=link", "--init_from=scratch", "--overwrite=True"]
    for target in ("a", "a.old-1", "a.old-2"):  # at first there is none
        assert go(*anew) == 0 and os.readlink("link") == "elsewhere/a"
        assert os.path.exists(f"elsewhere/{target}/ckpt/step_00000002")
    assert sorted(os.listdir("elsewhere")) == ["a", "a.old-1", "a.old-2"]


def test_a_flipped_bit_in_the_progress_is_noticed_by_every_rank(cut):
    path = "out/a/ckpt/step_00000005/progress.json"
    flip(path, open(path).read().rindex('"context": 3') + len('"context": '))  # 32 becomes 72, as good a number
    for files in (checkpoint.FILES, ("model",)):
        assert checkpoint.newest("out/a", thorough=False, files=files) == "out/a/ckpt/step_00000004"
