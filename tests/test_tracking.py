"""metrics.jsonl survives whatever happens to wandb, the machine or the file; wandb gets each row once."""

import atexit
import builtins
import json
import os
import resource
import signal
import sys
import types
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import FakeWandb
from wandb_server import WandbServer

from sympow.runs import wandb_run, wandb_upload
from sympow.runs.checkpoint import Progress
from sympow.runs.processes import exit_statuses
from sympow.runs.metrics import Tracker, baseline_losses, relative_loss
from sympow.runs.wandb_run import past_rows, wandb_row

KEY = "a" * 40
MODEL = dict(n_layer=1, n_head=1, n_embd=32, vocab_size=64)


@pytest.fixture(autouse=True)
def no_key(monkeypatch, tmp_path):
    """Hide the keys and settings of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, folder in {"HOME": "", "WANDB_CONFIG_DIR": "config", "WANDB_CACHE_DIR": "cache"}.items():
        monkeypatch.setenv(name, str(tmp_path / "home" / folder))
    monkeypatch.setattr(sys, "argv", ["train.py"])


@pytest.fixture
def fake(monkeypatch):
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def server(monkeypatch):
    """Start a stand-in for wandb's server, to which the real package speaks with a key."""
    import wandb

    server = WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield server
    server.close()
    with suppress(ConnectionError):  # a test has killed its service
        wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)


def start(folder, step=0, run_id=None, wandb="offline", **more):
    cfg = dict(out_dir=str(folder), wandb_log=True, wandb=wandb, wandb_project="p", wandb_run_name="", **more)
    folder.mkdir(exist_ok=True)
    settings = {**cfg, "seed": 1, "model": MODEL, "block_size": 32, "init_from": "auto", "dataset": "d"}
    (folder / "config.json").write_text(json.dumps({"version": 1, **settings}))
    model = types.SimpleNamespace(parameter_count=lambda: 1234)
    return Tracker(types.SimpleNamespace(**cfg), settings, Progress(step=step, wandb_id=run_id), model)


def steps(folder, name="metrics.jsonl"):
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def refused(capsys, function, *args):
    """Call a function that exits with status 2; return its line on stderr, which is the only one."""
    with pytest.raises(SystemExit) as stopped:
        function(*args)
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and err.count("\n") == 1
    return err


@pytest.mark.parametrize("first", ["log", "sample", "finish"])
def test_training_goes_on_when_wandb_dies(tmp_path, fake, capsys, first):
    tracker = start(tmp_path / "a")
    tracker.log(1, train_loss=2.0)
    while not fake.rows:  # a thread sends them
        tracker.wandb.thread.join(0.001)
    fake.dead = True
    if first == "log":
        tracker.log(2, train_loss=2.0)
    if first != "finish":
        tracker.sample(2, "text")
        tracker.log(3, train_loss=2.0)
    tracker.finish()
    out = capsys.readouterr().out
    assert out.count("wandb stopped (ConnectionResetError: Connection lost): metrics.jsonl has all numbers") == 1
    assert f"`python -m runs.wandb_upload {tmp_path / 'a'}`" in out
    assert steps(tmp_path / "a") == {"log": [1, 2, 3], "sample": [1, 3], "finish": [1]}[first]
    assert len(fake.rows) == 1


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module", name="wandb"), AttributeError("np.float_")])
def test_training_goes_on_without_wandb(tmp_path, monkeypatch, capsys, error):
    """wandb 0.16 raises an AttributeError when it is imported beside numpy 2."""
    real = builtins.__import__

    def broken(name, *args, **kwargs):
        if name == "wandb":
            raise error
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", broken)
    tracker = start(tmp_path / "a")
    tracker.log(1, train_loss=2.0)
    tracker.sample(1, "text")
    tracker.finish()
    out = capsys.readouterr().out
    what = "is not installed" if isinstance(error, ImportError) else "cannot be imported (AttributeError: np.float_)"
    assert out.startswith(f"wandb {what}: metrics.jsonl has all numbers") and out.count("\n") == 1
    assert "wandb cannot be imported" in refused(capsys, wandb_upload.main, [str(tmp_path / "a")])


@pytest.mark.parametrize("variable", [{"WANDB_MODE": "disabled"}, {"WANDB_DISABLED": "true"}])
def test_the_environment_turns_wandb_off(tmp_path, fake, monkeypatch, capsys, variable):
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    start(tmp_path / "a", wandb="auto").finish()
    assert not fake.inits and not capsys.readouterr().out


def test_a_key_that_wandb_login_stored_is_found_and_nothing_asks_for_one(tmp_path, server, monkeypatch):
    import wandb

    monkeypatch.delenv("WANDB_API_KEY")
    assert pytest.raises(wandb_run.NoKey, wandb_run.choose_mode, wandb, "online")
    assert wandb_run.choose_mode(wandb, "offline") == "offline"
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.login(key=KEY, verify=False)  # stores it
    wandb.teardown()
    assert KEY in (tmp_path / "netrc").read_text()
    assert wandb_run.choose_mode(wandb, "auto") == "online"
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_run.choose_mode(wandb, "auto") == "offline" and wandb_run.choose_mode(wandb, "online") == "online"


@pytest.mark.parametrize("status", ["dead", 401, 500, 0])
def test_without_an_answer_of_wandbs_server_the_run_is_offline(tmp_path, server, monkeypatch, capsys, status):
    """The real package; 0: the server accepts connections and is silent."""
    monkeypatch.setattr(wandb_run, "START_SECONDS", 1)
    if status == "dead":
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    else:
        server.status = status
    folder = tmp_path / "a"
    tracker = start(folder, wandb="auto")
    tracker.log(1, train_loss=2.0)
    assert tracker.wandb.thread.is_alive()  # nothing has waited for it
    tracker.sample(1, "text")
    tracker.finish()
    (offline,) = (folder / "wandb").glob("offline-run-*")
    assert offline.name.endswith(tracker.run_id)
    assert json.loads(next(offline.rglob("*.table.json")).read_text()) == {
        "columns": ["step", "text"], "data": [[1, "text"]],
    }  # fmt: skip
    out = capsys.readouterr().out
    assert "wandb is offline (" in out and f"in {offline}: metrics" in out and out.count("wandb_upload") == 1


def test_wandb_gets_each_step_once_whatever_was_offline_killed_or_taken_again(tmp_path, server, capsys):
    """The real package: a run that goes on is one run, and its rows are in the order of their steps."""
    folder = tmp_path / "a"

    def go(first, last, wandb="auto", upload=None):
        tracker = start(folder, first, wandb=wandb, wandb_group="g", wandb_tags="t,u")
        for step in range(first + 1, last + 1):
            tracker.log(step, train_loss=1.0)
            if step % 2 == 0:
                tracker.log(step, val_loss=1.0)
                tracker.sample(step, f"text {step}")
        tracker.finish()
        return tracker

    go(0, 2, "offline")
    assert not server.runs
    go(2, 5)  # sends the rows of the offline phase first
    go(3, 6)  # steps 4 and 5 are taken again
    go(6, 8, "disabled")
    assert wandb_upload.main([str(folder)]) is None
    assert f"{folder}: 2 steps" in capsys.readouterr().out
    ((run_id, run),) = server.runs.items()
    assert run_id == (folder / "wandb_id").read_text().strip()
    sent = lambda key: [row["iter"] for row in run["rows"] if key in row]
    assert (sent("train/loss"), sent("val/loss")) == ([1, 2, 3, 4, 5, 6, 7, 8], [2, 4, 6, 8])
    assert [row["iter"] for row in run["rows"]] == sorted(row["iter"] for row in run["rows"])
    assert (run["groupName"], run["displayName"], run["tags"]) == ("g", "a", ["t", "u"])
    assert run["config"]["parameters"]["value"] > 10_000 and run["config"]["commit"]["value"] == ""


def test_a_server_that_falls_silent_does_not_keep_training_from_ending(tmp_path, server, monkeypatch, capsys):
    monkeypatch.setattr(wandb_run, "FINISH_SECONDS", 1)
    hooks = []
    monkeypatch.setattr(atexit, "register", lambda *hook: hooks.append(hook) or hook[0])
    tracker = start(tmp_path / "a", wandb="online")
    tracker.log(1, train_loss=2.0)
    while "URL" not in (out := capsys.readouterr().out.replace(server.url, "URL")):
        tracker.wandb.thread.join(0.05)
    assert out == f"wandb: URL/e/p/runs/{tracker.run_id}\n"
    server.status = 0
    tracker.log(2, train_loss=2.0)
    tracker.finish()
    out = capsys.readouterr().out
    assert "wandb did not take all rows within 1 s: metrics.jsonl has all numbers" in out
    assert hooks[-1] == (wandb_run.leave_without_wandb,)  # wandb's own hook would wait on
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            if Path(f"/proc/{child}/comm").read_text() == "wandb-core\n":
                os.kill(int(child), signal.SIGKILL)  # lets the thread end
    tracker.wandb.thread.join(30)
    assert not tracker.wandb.thread.is_alive()


def test_a_table_that_is_refused_ends_only_the_tables(fake, capsys):
    def refuse_tables(columns, data):
        raise ValueError("no artifacts\nhere")

    fake.Table, known = refuse_tables, {}
    run = fake.init(mode="offline", dir="")
    for step in (1, 2):
        sample = {"iter": step, "samples": [[step, "text"]]}
        assert [wandb_run.send_row(fake, run, row, known) for row in ({"iter": step}, sample)] == [True, step == 1]
    assert capsys.readouterr().out.count("wandb took no table of samples (ValueError: no artifacts here)") == 1


DAMAGE = (
    b'{"step": 1, "train_loss": 2.0}\n' + b"\0" * 4096 + b'{"step": 2}\n\xff\xfe{\n[1]\n7\n{"lr": 1}\n{"step": "x"}\n'
    b'{"step": true}\n' + b"[" * 100_000 + b"\n"
)


def test_damaged_lines_are_left_out_with_a_warning(tmp_path, fake, capsys):
    folder = tmp_path / "a"
    start(folder).finish()
    (folder / "metrics.jsonl").write_bytes(DAMAGE + b'{"step": 3, "train_loss": 1.0}\n{"step": 4, "tr')
    assert wandb_upload.upload(fake, str(folder), None, "offline") == 2
    assert capsys.readouterr().err == f"train.py: {folder}/metrics.jsonl: 8 damaged lines are left out\n"
    tracker = start(folder, step=3, wandb="disabled")
    tracker.log(4, train_loss=1.0)
    tracker.finish()
    assert steps(folder) == [1, 3, 4] and "8 damaged lines" in capsys.readouterr().err


def test_a_last_line_without_its_end_is_kept_if_it_is_whole(tmp_path):
    start(tmp_path / "a", wandb="disabled").finish()
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 1, "lr": 2.0}\n{"step": 2, "lr": 2.0}')
    tracker = start(tmp_path / "a", step=2, wandb="disabled")
    tracker.log(3, lr=2.0)
    tracker.finish()
    assert steps(tmp_path / "a") == [1, 2, 3]


def test_files_that_need_no_change_are_not_written_again(tmp_path):
    """A resume on a full disk must not fail on a file that it would write as it is."""
    folder = tmp_path / "a"
    tracker = start(folder, wandb="disabled")
    tracker.log(1, train_loss=2.0)
    tracker.finish()
    before = os.stat(folder / "metrics.jsonl").st_ino
    start(folder, step=1, wandb="disabled").finish()
    assert os.stat(folder / "metrics.jsonl").st_ino == before
    start(folder, step=0, wandb="disabled").finish()
    assert steps(folder) == [] and os.stat(folder / "metrics.jsonl").st_ino != before


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/full", path)])
def test_what_is_no_file_is_refused(tmp_path, capsys, make):
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
        assert f"{name} must be a file" in refused(capsys, start, tmp_path)
        os.rename(tmp_path / name, tmp_path / "away") if make is not os.mkdir else (tmp_path / name).rmdir()


def test_a_line_that_does_not_fit_ends_training_in_one_line_and_leaves_whole_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", sys.exit)
    tracker, hard = start(tmp_path, wandb="disabled"), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    tracker.log(1, train_loss=1.0)
    with pytest.raises(SystemExit) as stopped, exit_statuses(None):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # EFBIG, as with `ulimit -f`
        try:
            tracker.log(2, train_loss=1.0, rate=[1.0] * 50)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    err = capsys.readouterr().err
    assert stopped.value.code == 1 and "cannot read or write: [Errno 27]" in err and err.count("\n") == 1
    assert (tmp_path / "metrics.jsonl").stat().st_size == 100
    tracker.file.close()  # writes its buffer, which the end of the process would have lost
    os.truncate(tmp_path / "metrics.jsonl", 100)
    tracker = start(tmp_path, step=1, wandb="disabled")
    tracker.log(2, train_loss=1.0)
    tracker.finish()
    assert steps(tmp_path) == [1, 2]


def test_flush_brings_both_files_to_the_disk(tmp_path, monkeypatch):
    synced = {}

    def fsync(number):
        path = os.readlink(f"/proc/self/fd/{number}")
        synced[os.path.basename(path)] = os.path.isfile(path) and open(path).read().count("\n")

    tracker = start(tmp_path / "a", wandb="disabled")
    monkeypatch.setattr(os, "fsync", fsync)
    tracker.log(1, train_loss=2.0)
    tracker.log(2, train_loss=2.0)
    tracker.sample(2, "text")
    tracker.flush_to_disk()
    assert synced == {"metrics.jsonl": 2, "samples.jsonl": 1}
    tracker.finish()


def test_a_run_killed_before_its_first_checkpoint_is_the_same_wandb_run(tmp_path, fake, monkeypatch):
    folder = tmp_path / "a"
    init, there = fake.init, []
    monkeypatch.setattr(fake, "init", lambda **kw: there.append((folder / "wandb_id").read_text()) or init(**kw))

    def go(**more):
        tracker = start(folder, **more)
        tracker.log(1, train_loss=2.0)
        tracker.finish()
        return tracker

    tracker = [go() for _ in range(2)][-1]
    first = fake.inits[0]["id"]
    assert tracker.run_id == fake.inits[1]["id"] == first and there == [first + "\n"] * 2
    wandb_upload.upload(fake, str(folder), None, "offline")
    go(run_id="checkpoint")  # which wins
    wandb_upload.upload(fake, str(folder), None, "offline")
    assert [i["id"] for i in fake.inits] == [first] * 3 + ["checkpoint"] * 2
    (folder / "wandb_id").write_bytes(b"\0" * 9)
    assert go().run_id.isalnum()
    assert not (start(tmp_path / "b", wandb="disabled").run_id or (tmp_path / "b" / "wandb_id").exists())


def test_whatever_an_attention_reports_of_its_layers_goes_to_wandb():
    row = wandb_row({"step": 3, "val_loss": 2.0, "rate": [0.5, 0.25], "gate": [0.9], "seconds": 3.0})
    layers = {"rate/layer_00": 0.5, "rate/layer_01": 0.25, "gate/layer_00": 0.9}
    assert row == {"iter": 3, "val/iter": 3, "val/loss": 2.0, **layers}


def test_of_a_step_that_was_taken_twice_the_later_line_counts():
    lines = [{"step": 1, "lr": 1.0}, {"step": 2, "lr": 1.0}, {"step": 2, "val_loss": 3.0}, {"step": 2, "lr": 2.0}]
    assert past_rows(lines, [[2, "text"]]) == [
        {"iter": 1, "lr": 1.0}, {"iter": 2, "lr": 2.0}, {"iter": 2, "val/iter": 2, "val/loss": 3.0},
        {"iter": 2, "samples": [[2, "text"]]},
    ]  # fmt: skip


def test_an_upload_that_cannot_be_is_refused_in_one_line(tmp_path, fake, capsys, monkeypatch):
    run = lambda *argv: refused(capsys, wandb_upload.main, [str(x) for x in argv])
    folder = tmp_path / "a"
    tracker = start(folder, wandb="disabled")
    assert "a has nothing to upload" in run(folder)
    tracker.log(1, train_loss=2.0)
    assert "finds no API key: `wandb login`" in run(folder)
    assert "name at least one run's folder" in run()
    assert "unrecognized arguments: --mod" in run(folder, "--modes=offline")
    assert "is not a run's folder" in run(folder, tmp_path)
    assert "is not a run's folder" in run(tmp_path / ("n" * 300))
    monkeypatch.setenv("WANDB_API_KEY", "key")
    fake.network = False
    monkeypatch.setattr(wandb_upload, "leave_at_once", lambda line: lines.append(line))
    lines = []
    wandb_upload.main([str(folder)])
    assert lines == [f"{folder} is not wholly uploaded (RuntimeError: no network): the same command sends the rest"]
    for damage in ("{", "[1]", "[" * 100_000, "\0"):
        (folder / "config.json").write_text(damage)
        assert "its config.json" in run(folder).replace("config.json, which", "its config.json")


@pytest.mark.parametrize(
    "text", ["", '{"step": 1, "val_loss": 2.0}\n', '{"step": 1, "val_loss": "x", "tokens": 5}\n', "\0\0", "[" * 100_000]
)
def test_a_baseline_without_losses_is_refused(tmp_path, capsys, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert "baseline must be a run that was evaluated" in refused(capsys, baseline_losses, str(tmp_path), 32)


def test_losses_of_a_baseline_that_are_no_numbers_are_left_out(tmp_path):
    values = ["NaN", "0.0", "null", "Infinity", "1" + "0" * 400, "2.0"]
    lines = [f'{{"step": {i}, "tokens": {i}, "val_loss": {value}}}\n' for i, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert baseline_losses(str(tmp_path), 32) == [(5, 2.0)] and baseline_losses("", 32) == []
    assert relative_loss(3.0, 5, [(5, 2.0)]) == 0.5 and relative_loss(3.0, 6, [(5, 2.0)]) is None
