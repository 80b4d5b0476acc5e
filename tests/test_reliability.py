"""What survives what: kills, damaged checkpoints, full disks, signals, gradients that are not finite."""

import copy
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from helpers import ROOT, SMALL, call, dataset, make_dataset, metrics, run  # noqa: F401 (dataset is a fixture)

import train
from runs import checkpoint

EXTRA = ["--attention=sympow_gating", "--dropout=0.1", "--warmup_iters=2"]


@pytest.fixture
def go(dataset, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    return lambda *argv: call(train.main, *SMALL, *EXTRA, f"--dataset={dataset}", *argv)


def lines(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f]


def assert_same_run(folder, other):
    """Every step once, to the last bit."""
    for key in ("train_loss", "val_loss", "grad_norm"):
        assert metrics(folder, key) == metrics(other, key), key
    assert [line["step"] for line in lines(folder)] == [line["step"] for line in lines(other)]


def flip(path, at):
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 4]))


KILLS = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
import train

def start(out_dir):
    child = os.fork()
    if not child:
        sys.argv = ["train.py", *sys.argv[1:], f"--out_dir={out_dir}"]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            train.main()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return child

random.seed(int(os.environ["SEED"]))
assert os.waitpid(start("out/whole"), 0)[1] == 0
began = time.time()
assert os.waitpid(start("out/killed"), 0)[1] == 0  # how long a run takes
took = time.time() - began
os.rename("out/killed", "out/again")
kills = 0
while kills < 20:
    child = start("out/killed")
    time.sleep(random.uniform(0, took))
    if os.waitpid(child, os.WNOHANG)[0]:  # it was done: anew
        os.rename("out/killed", f"out/done_{len(os.listdir('out'))}")
        continue
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    kills += 1
assert os.waitpid(start("out/killed"), 0)[1] == 0
print(kills)
"""


def test_twenty_kills_at_random_moments_change_nothing(dataset, tmp_path):  # noqa: F811
    seed = str(int.from_bytes(os.urandom(4), "big"))
    options = [*SMALL, *EXTRA, f"--dataset={dataset}", "--max_iters=40", "--eval_interval=4"]
    done = run("-c", KILLS, *options, cwd=tmp_path, env={"SEED": seed})
    assert done.stdout.split() == ["20"], (seed, done)
    for folder in sorted(os.listdir(tmp_path / "out")):
        assert_same_run(tmp_path / "out" / folder, tmp_path / "out" / "whole")
        for step in os.listdir(tmp_path / "out" / folder / "ckpt"):
            assert step[0] == "." or not checkpoint.damage(tmp_path / "out" / folder / "ckpt" / step), (seed, step)


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
def test_a_damaged_checkpoint_is_left_out_and_the_one_before_it_taken(go, capsys, file, harm, message):
    assert go("--out_dir=out/whole") == 0
    assert go("--out_dir=out/cut", "--max_iters=5", "--lr_decay_iters=6", "--eval_interval=2") == 0  # at 2, 4 and 5
    harm(f"out/cut/ckpt/step_00000005/{file}")
    capsys.readouterr()
    assert go("--out_dir=out/cut", "--lr_decay_iters=6") == 0
    said = capsys.readouterr()
    assert f"step_00000005 is damaged and left out: {message}" in said.err or message in said.err
    assert "going on from out/cut/ckpt/step_00000004, step 4" in said.out
    assert metrics("out/cut") == metrics("out/whole")


def test_if_every_checkpoint_is_damaged_nothing_starts_anew_unasked(go, capsys):
    assert go("--out_dir=out/a") == 0
    for step in os.listdir("out/a/ckpt"):
        flip(f"out/a/ckpt/{step}/model.safetensors", 3000)
    assert go("--out_dir=out/a") == 2
    assert "every checkpoint in out/a is damaged" in capsys.readouterr().err
    assert go("--out_dir=out/a", "--init_from=scratch", "--overwrite=True") == 0


def test_ranks_take_the_checkpoint_that_rank_0_found_whole(go, dataset):  # noqa: F811
    assert go("--out_dir=out/a", "--max_iters=5", "--lr_decay_iters=6", "--eval_interval=2") == 0  # at 2, 4 and 5
    flip("out/a/ckpt/step_00000005/optimizer.pt", 2000)  # the others see its size alone
    done = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", f"{ROOT}/train.py", *SMALL, *EXTRA,
        f"--dataset={dataset}", "--out_dir=out/a", "--lr_decay_iters=6",
    )  # fmt: skip
    assert "going on from out/a/ckpt/step_00000004, step 4" in done.stdout
    assert list(metrics("out/a")) == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_leaves_the_older_checkpoints_whole(dataset, tmp_path):  # noqa: F811
    options = [*SMALL, *EXTRA, f"--dataset={dataset}", "--out_dir=out/a"]
    run(os.path.join(ROOT, "train.py"), *options, "--max_iters=3", cwd=tmp_path)
    largest = os.path.getsize(tmp_path / "out/a/ckpt/step_00000003/model.safetensors")
    limited = textwrap.dedent(f"""
        import resource, sys
        import train
        resource.setrlimit(resource.RLIMIT_FSIZE, ({largest // 2}, {largest // 2}))
        train.main()
    """)
    done = run("-c", limited, *options, "--max_iters=6", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "the checkpoint of step 6 could not be written (" in done.stderr
    assert "step_00000003 is whole: the same command goes on from there" in done.stderr
    assert os.listdir(tmp_path / "out/a/ckpt") == ["step_00000003"]
    assert not checkpoint.damage(tmp_path / "out/a/ckpt/step_00000003")
    again = run(os.path.join(ROOT, "train.py"), *options, "--max_iters=6", cwd=tmp_path)
    assert "going on from out/a/ckpt/step_00000003, step 3" in again.stdout


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
    writer.save(model, optimizer, {"step": 1, "best_step": 0})
    writer.check()
    step()  # in place, while the writer waits
    assert not checkpoint.exists(tmp_path)
    go_on.set()
    writer.wait()
    found = torch.nn.Linear(3, 3)
    other = torch.optim.AdamW(found.parameters(), fused=True)
    assert checkpoint.load(checkpoint.newest(tmp_path, thorough=True), found, other)["step"] == 1
    assert torch.equal(found.weight, before[0]["weight"]) and not torch.equal(found.weight, model.weight)
    for i, of in before[1]["state"].items():
        assert all(torch.equal(other.state_dict()["state"][i][name], x) for name, x in of.items())


def test_training_goes_on_while_a_checkpoint_is_written(go, monkeypatch):
    waited, later, write, batch = [], threading.Event(), checkpoint.save_file, train.train_batch

    def slow(*args):
        waited.append(later.wait(30))
        write(*args)

    def taken(windows, seed, step, *args):
        if step == 5:
            later.set()
        return batch(windows, seed, step, *args)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    monkeypatch.setattr(train, "train_batch", taken)
    assert go("--out_dir=out/a") == 0
    assert waited == [True, True]  # the checkpoint of step 3 was written after step 5 had begun
    assert sorted(os.listdir("out/a/ckpt")) == ["step_00000003", "step_00000006"]
    assert [line["step"] for line in lines("out/a") if "checkpoint_seconds" in line] == [4]


def test_a_write_that_fails_ends_training_soon_and_every_call_says_so(go, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    assert go("--out_dir=out/a", "--max_iters=2") == 0
    monkeypatch.setattr(checkpoint, "save_file", full)
    monkeypatch.setattr(train, "fail", lambda message: sys.exit(str(message)))
    said = "the checkpoint of step 3 could not be written ([Errno 28] No space left on device; "
    message = go("--out_dir=out/a", "--max_iters=100000", "--eval_interval=3")
    assert message.startswith(said)
    assert message.endswith("out/a/ckpt/step_00000002 is whole: the same command goes on from there")
    assert max(metrics("out/a")) < 1000 and os.listdir("out/a/ckpt") == ["step_00000002"]
    model, writer = torch.nn.Linear(1, 1), checkpoint.Writer(tmp_path / "new")
    optimizer = torch.optim.AdamW(model.parameters())
    writer.save(model, optimizer, {"step": 3, "best_step": 0})
    for act in (writer.wait, writer.check, lambda: writer.save(model, optimizer, {"step": 4, "best_step": 0})):
        with pytest.raises(checkpoint.NotWritten, match="step 3 could not be written .* there is no older one"):
            act()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_within_a_step_saves_and_loses_nothing(go, monkeypatch, number):
    assert go("--out_dir=out/whole") == 0
    calls, real = [0], train.train_batch

    def batch(*args):
        calls[0] += 1
        if calls[0] == 5:  # two micro-steps a step, one read ahead: within the third
            os.kill(os.getpid(), number)
        return real(*args)

    monkeypatch.setattr(train, "train_batch", batch)
    assert go("--out_dir=out/cut") == 0
    assert max(metrics("out/cut")) == 2 and os.listdir("out/cut/ckpt") == ["step_00000002"]
    assert go("--out_dir=out/cut") == 0
    assert metrics("out/cut") == metrics("out/whole")


def test_an_evaluation_that_a_signal_came_before_is_made_up_for(go, monkeypatch):
    assert go("--out_dir=out/whole") == 0
    calls, real = [0], train.train_batch

    def batch(*args):
        calls[0] += 1
        if calls[0] in (7, 15):  # in the last micro-step of steps 3 and, after the next start, 6: both are evaluated
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(train, "train_batch", batch)
    for last in (3, 6, 6):
        assert go("--out_dir=out/cut") == 0
        assert max(metrics("out/cut")) == last
    assert_same_run("out/cut", "out/whole")


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
    assert go(*again) == 0
    anew = "--init_from=scratch", "--overwrite=True", "--out_dir=out/b"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert go(*anew, "--max_iters=6") == 2 or os.path.isdir("out/b/ckpt/step_00000006")
    assert not os.path.exists("out/b.old-1")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert go(*anew) == 0 and os.path.isdir("out/b.old-1/ckpt/step_00000006")


def test_other_data_under_the_same_name_are_refused(go, tmp_path, capsys):
    assert go("--out_dir=out/a", "--max_iters=3") == 0
    other = make_dataset(tmp_path / "other", "another text\n" * 1000)
    assert go("--out_dir=out/a", f"--dataset={other}") == 2
    assert "was trained with data=" in capsys.readouterr().err
    assert go("--out_dir=out/a") == 0


def test_weights_without_a_finite_loss_are_not_saved(go, monkeypatch):
    monkeypatch.setattr(train, "fail", lambda message: sys.exit(message))
    said = go("--out_dir=out/a", "--learning_rate=1e38", "--warmup_iters=0", "--max_iters=30", "--max_skipped=8")
    assert "8 steps in a row had no finite gradient" in said and "there is no checkpoint" in said
    assert not os.path.isdir("out/a/ckpt")


def test_what_is_saved_after_damaged_checkpoints_stays(go):
    assert go("--out_dir=out/a", "--max_iters=4", "--eval_interval=2") == 0
    shutil.copytree("out/a/ckpt/step_00000004", "out/a/ckpt/step_00000008")
    for step in (4, 8):
        os.truncate(f"out/a/ckpt/step_0000000{step}/model.safetensors", 10)
    assert go("--out_dir=out/a", "--max_iters=3", "--eval_interval=2") == 0
    assert sorted(os.listdir("out/a/ckpt")) == ["step_00000002", "step_00000003"]


def test_a_checkpoint_without_checksums_is_looked_at_too(go):
    assert go("--out_dir=out/a") == 0
    for harm in (
        lambda path: os.remove(f"{path}/checksums.json") or os.remove(f"{path}/optimizer.pt"),
        lambda path: open(f"{path}/checksums.json", "w").write('{"model.safetensors": {"bytds": 1}}'),
    ):
        shutil.copytree("out/a/ckpt/step_00000006", "out/a/ckpt/step_00000009")
        harm("out/a/ckpt/step_00000009")
        assert checkpoint.newest("out/a") == "out/a/ckpt/step_00000006"
        shutil.rmtree("out/a/ckpt/step_00000009")


def not_finite(monkeypatch, steps):
    """The loss of these micro-steps (two make a step) is NaN."""
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
    found = [line for line in lines("out/a") if "train_loss" in line]
    assert [line.get("skipped", 0) for line in found] == [0, 0, 1, 1, 2, 2]
    saved = checkpoint.load("out/a/ckpt/step_00000006", tiny := train.GPT(model_of("out/a")))
    assert saved["skipped"] == [2, 0] and all(p.isfinite().all() for p in tiny.parameters())
    assert all(v == v for v in metrics("out/a", "val_loss").values())


def model_of(folder):
    with open(os.path.join(folder, "config.json")) as f:
        return train.GPTConfig(**json.load(f)["model"])


def test_after_so_many_in_a_row_training_stops_and_names_the_last_good_checkpoint(go, monkeypatch, capsys):
    not_finite(monkeypatch, set(range(9, 100)))  # from step 5 on

    def fail(message):
        print(message, file=sys.stderr)
        raise SystemExit(1)

    monkeypatch.setattr(train, "fail", fail)
    assert go("--out_dir=out/a", "--max_iters=30", "--max_skipped=4", "--eval_interval=2") == 1
    said = capsys.readouterr().err
    assert (
        "4 steps in a row had no finite gradient" in said
        and "the last good checkpoint is out/a/ckpt/step_0000000" in said
    )
    weights = train.GPT(model_of("out/a"))
    checkpoint.load(checkpoint.newest("out/a", thorough=True), weights)
    assert all(p.isfinite().all() for p in weights.parameters())


@pytest.fixture
def two_ranks(dataset, tmp_path):  # noqa: F811
    """Two processes that train together and have taken some steps."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    options = [*SMALL, *EXTRA, f"--dataset={dataset}", "--max_iters=100000", "--timeout=4", "--eval_interval=100000"]
    env = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    ranks = [
        subprocess.Popen(
            [sys.executable, os.path.join(ROOT, "train.py"), *options], cwd=tmp_path, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**env, "RANK": str(i), "LOCAL_RANK": str(i), "MASTER_PORT": str(port)},
        )
        for i in range(2)
    ]  # fmt: skip
    log, begin = tmp_path / "out/train/metrics.jsonl", time.time()
    while not (log.exists() and log.stat().st_size) and time.time() < begin + 60:
        time.sleep(0.1)
    yield ranks
    for process in ranks:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "number,said",
    [(signal.SIGKILL, "rank 1 on {host} no longer answers"), (signal.SIGSTOP, "nothing has happened for")],
)
def test_a_dead_or_hung_rank_ends_the_job_with_its_name(two_ranks, number, said):
    two_ranks[1].send_signal(number)
    _, err = two_ranks[0].communicate(timeout=40)
    assert two_ranks[0].returncode == 1
    assert said.format(host=socket.gethostname()) in err and f"rank 1 on {socket.gethostname()}" in err, err


def test_a_signal_to_one_rank_stops_both_at_the_same_step_with_status_0(two_ranks, tmp_path):
    two_ranks[1].send_signal(signal.SIGTERM)
    errors = [process.communicate(timeout=40)[1] for process in two_ranks]
    assert [process.returncode for process in two_ranks] == [0, 0], errors
    (step,) = os.listdir(tmp_path / "out/train/ckpt")
    assert int(step.removeprefix("step_")) == max(metrics(tmp_path / "out/train")) > 0
    assert not checkpoint.damage(tmp_path / "out/train/ckpt" / step)


def test_torchrun_starts_again_after_a_worker_was_killed(dataset, tmp_path):  # noqa: F811
    options = [*SMALL, *EXTRA, f"--dataset={dataset}", "--max_iters=150", "--eval_interval=20", "--timeout=2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=2"]
    env = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "KILLED": str(tmp_path / "killed")}
    (tmp_path / "train_and_die.py").write_text(
        textwrap.dedent("""
        import os, signal
        import train

        batch = train.train_batch

        def killed(windows, seed, step, *args):
            if step == 50 and os.environ["RANK"] == "1" and not os.path.exists(os.environ["KILLED"]):
                open(os.environ["KILLED"], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return batch(windows, seed, step, *args)

        train.train_batch = killed
        train.main()
    """)
    )
    done = subprocess.run(
        [*torchrun, "train_and_die.py", *options], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 on" in done.stderr and "going on from out/train/ckpt/step_00000040, step 40" in done.stdout
    assert list(metrics(tmp_path / "out/train")) == list(range(1, 151))
    assert list(metrics(tmp_path / "out/train", "val_loss")) == [20, 40, 60, 80, 100, 120, 140, 150]
