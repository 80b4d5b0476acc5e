"""metrics.jsonl survives whatever happens to wandb, the machine or the file; wandb neither ends training nor holds it
up."""

import builtins
import glob
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from helpers import run
from wandb_server import no_key, wandb_server  # noqa: F401 (fixtures)

from sympow.runs import metrics
from sympow.runs.checkpoint import Progress
from sympow.runs.metrics import Tracker, baseline_losses, relative_loss, wandb_row
from sympow.runs.processes import exit_statuses

pytestmark = pytest.mark.usefixtures("no_key")


@pytest.fixture(autouse=True)
def program_name(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])


def start(folder, step=0, wandb="disabled", evaluated=False, **settings):
    """Start the Tracker of a run in this folder, which goes on from a step."""
    settings = {"wandb_run_name": "", "wandb_group": "", "wandb_tags": "", **settings}
    cfg = types.SimpleNamespace(out_dir=str(folder), wandb_log=True, wandb=wandb, wandb_project="p", **settings)
    folder.mkdir(exist_ok=True)
    model = types.SimpleNamespace(parameter_count=lambda: 1234)
    return Tracker(cfg, vars(cfg), Progress(step=step, evaluated=evaluated), model)


def steps(folder, name="metrics.jsonl"):
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def wandb_services():
    """Return the process ids of the wandb services that this process has started."""
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    pids = [pid for task_children in children for pid in task_children]
    return [int(pid) for pid in pids if Path(f"/proc/{pid}/comm").read_text() == "wandb-core\n"]


# ---- wandb, with the real package


def test_offline_parts_of_a_run_become_one_run_by_wandb_sync(tmp_path, wandb_server, capsys):  # noqa: F811
    """A part that was online is in the same run. Steps taken again are twice in wandb and once in metrics.jsonl."""
    folder = tmp_path / "a"
    for first, last, mode in ((0, 2, "offline"), (1, 3, "online"), (3, 4, "offline")):
        tracker = start(folder, first, mode, wandb_group="g", wandb_tags="t, u,")
        for step in range(first + 1, last + 1):
            tracker.log(step, train_loss=1.0, tokens=10 * step, seconds=0.5, memory=1.5, anything=7)
        tracker.sample(last, "text")
        tracker.finish()
        assert len(wandb_server.runs) == (last > 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"wandb is offline (as asked): `wandb sync {folder}/wandb/offline-run-*` uploads it later"
    assert lines == [lines[0], f"wandb: {wandb_server.url}/e/p/runs/{tracker.run_id}", lines[0]]
    assert steps(folder) == [1, 2, 3, 4] and tracker.run_id == (folder / "wandb_id").read_text().strip()
    parts = glob.glob(f"{folder}/wandb/offline-run-*")
    wandb_program = os.path.join(os.path.dirname(sys.executable), "wandb")
    subprocess.run([wandb_program, "sync", *parts], check=True, capture_output=True, stdin=subprocess.DEVNULL)
    ((run_id, run),) = wandb_server.runs.items()
    assert run_id == tracker.run_id and (run["groupName"], run["displayName"], run["tags"]) == ("g", "a", ["t", "u"])
    assert run["config"]["parameters"]["value"] == 1234
    rows = [row for row in run["rows"] if "train/loss" in row]
    assert sorted(row["iter"] for row in rows) == [1, 2, 2, 3, 4]
    row = next(row for row in rows if row["iter"] == 4)
    assert row.items() >= {"tokens": 40, "seconds": 0.5, "memory": 1.5, "anything": 7}.items()
    assert len(run["rows"]) == len(rows) + 3  # a sample of each part


@pytest.mark.parametrize("status", [None, 401, 0])
def test_without_a_key_or_an_answer_the_run_is_offline(tmp_path, wandb_server, monkeypatch, capsys, status):  # noqa: F811
    """None: there is no key, and nothing asks for one; 0: the server accepts connections and is silent."""
    monkeypatch.setattr(metrics, "START_SECONDS", 1)
    wandb_server.status = status
    if status is None:
        monkeypatch.delenv("WANDB_API_KEY")
    tracker = start(tmp_path / "a", wandb="auto")
    tracker.log(1, train_loss=2.0)
    tracker.sample(1, "a < b")
    tracker.finish()
    (offline,) = (tmp_path / "a/wandb").glob(f"offline-run-*-{tracker.run_id}")
    assert next(offline.rglob("*.html")).read_text() == "<pre>a &lt; b</pre>"
    output = capsys.readouterr()
    reason = "no API key: `wandb login`, or set WANDB_API_KEY" if status is None else "CommError: "
    assert output.out.startswith(f"wandb is offline ({reason}") and output.out.count("\n") == 1 and not output.err


def test_the_environment_turns_wandb_off(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = start(tmp_path / "a", wandb="auto")
    tracker.finish()
    assert not tracker.wandb and not capsys.readouterr().out


def test_a_server_that_falls_silent_does_not_keep_training_from_ending(tmp_path, wandb_server, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(metrics, "FINISH_SECONDS", 1)
    tracker = start(tmp_path / "a", wandb="online")
    wandb_server.status = 0
    tracker.log(1, train_loss=2.0)
    began = time.perf_counter()
    tracker.finish()
    assert time.perf_counter() - began < 10
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["wandb stopped (TimeoutError: Timed out finishing run.): metrics.jsonl has all numbers"]


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import os, signal
from test_tracking import start, wandb_services
tracker = start(Path({folder!r}), wandb="online")
(service,) = wandb_services()
os.kill(service, signal.SIGKILL)
os.waitid(os.P_PID, service, os.WEXITED | os.WNOWAIT)
tracker.log(1, train_loss=2.0)
tracker.sample(1, "text")
tracker.log(2, train_loss=2.0)
tracker.finish()
"""


def test_training_goes_on_when_wandbs_service_is_killed(tmp_path, wandb_server):  # noqa: F811
    """In a process of its own, at whose end wandb prints nothing."""
    ended = run("-c", KILLED.format(tests=os.path.dirname(__file__), folder=str(tmp_path / "a")))
    lines = (ended.stdout + ended.stderr).splitlines()
    assert len(lines) == 2 and lines[1].startswith("wandb stopped (ConnectionResetError")
    assert lines[1].endswith("metrics.jsonl has all numbers") and steps(tmp_path / "a") == [1, 2]
    assert steps(tmp_path / "a", "samples.jsonl") == [1]


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'wandb'"), AttributeError("np.float_")])
def test_training_goes_on_without_wandb(tmp_path, monkeypatch, capsys, error):
    """wandb 0.16 raises an AttributeError when it is imported beside numpy 2."""
    real_import = builtins.__import__

    def broken_import(name, *args, **kwargs):
        if name == "wandb":
            raise error
        return real_import(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", broken_import)
        tracker = start(tmp_path / "a", wandb="auto")
        tracker.log(1, train_loss=2.0)
        tracker.sample(1, "text")
        tracker.finish()
    out = capsys.readouterr().out
    assert out == f"wandb stopped ({type(error).__name__}: {error}): metrics.jsonl has all numbers\n"
    assert steps(tmp_path / "a") == [1]


def test_a_run_has_one_id_until_its_file_is_damaged(tmp_path):
    first = metrics.choose_id(tmp_path)
    assert metrics.choose_id(tmp_path) == first == (tmp_path / "wandb_id").read_text().strip()
    (tmp_path / "wandb_id").write_bytes(b"\0" * 9)
    assert metrics.choose_id(tmp_path) not in ("", first)
    assert start(tmp_path / "b").run_id is None and not (tmp_path / "b/wandb_id").exists()


def test_rows_have_nanogpts_names_and_a_value_for_each_layer():
    line = {"step": 3, "val_loss": 2.0, "val_loss/code": 1.0, "rate": [0.5, None, 0.25], "seconds": 3.0, "context": 8}
    assert wandb_row(line) == {
        "iter": 3, "val/loss": 2.0, "val/loss/code": 1.0, "rate/layer_00": 0.5, "rate/layer_02": 0.25, "seconds": 3.0,
        "val/context": 8,
    }  # fmt: skip
    assert wandb_row({"step": 3, "train_loss": 2.0, "mfu": 0.5, "context": 8}) == {
        "iter": 3, "train/loss": 2.0, "mfu": 50.0, "train/context": 8,
    }  # fmt: skip


# ---- files


DAMAGE = (
    b'{"step": 1, "train_loss": 2.0}\n' + b"\0" * 4096 + b'{"step": 2}\n\xff\xfe{\n[1]\n7\n{"lr": 1}\n{"step": "x"}\n'
    b'{"step": true}\n' + b"[" * 100_000 + b"\n"
)


def test_damaged_and_torn_lines_are_left_out_with_a_warning(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_bytes(DAMAGE + b'{"step": 3, "train_loss": 1.0}\n{"step": 4, "tr')
    tracker = start(tmp_path, step=3)
    assert capsys.readouterr().err == f"train.py: {tmp_path}/metrics.jsonl: 9 damaged lines are left out\n"
    tracker.log(4, train_loss=1.0)
    tracker.finish()
    assert steps(tmp_path) == [1, 3, 4]


def test_a_last_line_without_its_end_is_kept_if_it_is_whole(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lr": 2.0}\n{"step": 2, "lr": 2.0}')
    tracker = start(tmp_path, step=2, evaluated=True)
    tracker.log(3, lr=2.0)
    tracker.finish()
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("step,evaluated,left", [(2, True, [1, 2, 2]), (2, False, [1, 2]), (1, True, [1])])
def test_lines_that_come_again_are_removed_and_a_file_without_them_is_left_alone(tmp_path, step, evaluated, left):
    """A resume on a full disk must not fail on a file that it would write as it is."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "train_loss": 3.0}, {"step": 2, "train_loss": 2.0}, {"step": 2, "val_loss": float("nan")}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    inode = os.stat(path).st_ino
    start(tmp_path, step=step, evaluated=evaluated).finish()
    assert steps(tmp_path) == left and (os.stat(path).st_ino == inode) == (len(left) == 3)


def test_a_line_that_does_not_fit_on_the_disk_ends_training_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", sys.exit)
    tracker = start(tmp_path)
    tracker.log(1, train_loss=1.0)
    tracker.file = open("/dev/full", "a")
    with pytest.raises(SystemExit) as stopped, exit_statuses(None):
        tracker.log(2, train_loss=1.0)
    error = capsys.readouterr().err
    assert stopped.value.code == 1 and "cannot read or write: [Errno 28]" in error and error.count("\n") == 1
    assert steps(tmp_path) == [1]


def test_flush_brings_both_files_to_the_disk(tmp_path, monkeypatch):
    line_counts = {}

    def fsync(number):
        path = os.readlink(f"/proc/self/fd/{number}")
        line_counts[os.path.basename(path)] = Path(path).read_text().count("\n")

    tracker = start(tmp_path)
    monkeypatch.setattr(os, "fsync", fsync)
    tracker.log(1, train_loss=2.0)
    tracker.log(2, train_loss=2.0)
    tracker.sample(2, "text")
    tracker.flush_to_disk()
    assert line_counts == {"metrics.jsonl": 2, "samples.jsonl": 1}
    tracker.finish()


# ---- the baseline


@pytest.mark.parametrize(
    "text", ["", '{"step": 1, "val_loss": 2.0}\n', '{"step": 1, "val_loss": "x", "tokens": 5}\n', "\0\0", "[" * 100_000]
)
def test_a_baseline_without_losses_is_refused(tmp_path, capsys, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        baseline_losses(str(tmp_path), 32)
    line = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and "baseline must be a run's folder" in line


def test_losses_of_a_baseline_that_are_no_numbers_are_left_out(tmp_path):
    values = ["NaN", "0.0", "null", "Infinity", "1" + "0" * 400, "2.0"]
    lines = [f'{{"step": {i}, "tokens": {i}, "val_loss": {value}}}\n' for i, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert baseline_losses(str(tmp_path), 32) == [(5, 2.0)] and baseline_losses("", 32) == []
    assert relative_loss(3.0, 5, [(5, 2.0)]) == 0.5 and relative_loss(3.0, 6, [(5, 2.0)]) is None
