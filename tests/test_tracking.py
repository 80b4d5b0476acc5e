"""metrics.jsonl survives whatever happens to wandb, the machine or the file; wandb neither ends training nor holds it
up."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import refusal
from wandb_server import no_key, wandb_server  # noqa: F401 (fixtures)

from sympow.runs import metrics
from sympow.runs.checkpoint import Progress
from sympow.runs.metrics import Tracker, wandb_row
from sympow.runs.processes import exit_statuses

pytestmark = pytest.mark.usefixtures("no_key")


def start(folder, step=0, wandb="disabled", evaluated=False):
    """Start the Tracker of a run in this folder, which resumes from a step."""
    settings = {"out_dir": str(folder), "wandb_log": True, "wandb": wandb, "wandb_project": "p"}
    settings["wandb_run_name"] = ""
    folder.mkdir(exist_ok=True)
    model = types.SimpleNamespace(parameter_count=lambda: 1234)
    return Tracker(types.SimpleNamespace(**settings), settings, Progress(step=step, evaluated=evaluated), model)


def logged_steps(folder):
    """Return the steps of the lines in metrics.jsonl."""
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---- wandb, with the real package


def test_offline_parts_of_a_run_become_one_run_by_wandb_sync(tmp_path, wandb_server, capsys):  # noqa: F811
    """A part that was online is in the same run. Steps taken again are twice in wandb and once in metrics.jsonl."""
    numbers = [None, 7, np.float32(0.5), np.int64(7), torch.tensor(0.5)]
    for first, last, mode in ((0, 2, "offline"), (1, 3, "online"), (3, 4, "offline")):
        tracker = start(tmp_path / "a", first, mode)
        for step in range(first + 1, last + 1):
            tracker.log(step, train_loss=1.0, tokens=10 * step, seconds=0.5, **{"mine/x": numbers[step]})
        tracker.sample(last, "text")
        tracker.finish()
        assert len(wandb_server.runs) == (last > 2)
    offline = f"wandb is offline (as asked): `wandb sync {tmp_path}/a/wandb/offline-run-*` uploads it later"
    online = f"wandb: {wandb_server.url}/e/p/runs/{tracker.run_id}"
    assert capsys.readouterr().out.splitlines() == [offline, online, offline]
    assert logged_steps(tmp_path / "a") == [1, 2, 3, 4]
    program = [sys.executable, "-m", "wandb", "sync", *(tmp_path / "a/wandb").glob("offline-run-*")]
    subprocess.run(program, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    ((run_id, run),) = wandb_server.runs.items()
    assert run_id == tracker.run_id and run["config"]["parameters"]["value"] == 1234
    rows = {row["iter"]: row for row in run["rows"] if "train/loss" in row}
    assert sorted(row["iter"] for row in run["rows"]) == [1, 2, 2, 2, 3, 3, 4, 4]  # a sample of each part
    assert rows[4].items() >= {"tokens": 40, "seconds": 0.5}.items()
    lines = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [row["mine/x"] for row in lines] == [rows[step]["mine/x"] for step in sorted(rows)] == numbers[1:]


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
    start(tmp_path / "a", wandb="auto").finish()
    assert not capsys.readouterr().out and not (tmp_path / "a/wandb").exists()


def test_a_server_that_falls_silent_does_not_keep_training_from_ending(tmp_path, wandb_server, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(metrics, "FINISH_SECONDS", 0.5)
    tracker = start(tmp_path / "a", wandb="online")
    wandb_server.status = 0
    tracker.log(1, train_loss=2.0)
    start_time = time.perf_counter()
    tracker.finish()
    assert time.perf_counter() - start_time < 40
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["wandb stopped (TimeoutError: Timed out finishing run.): metrics.jsonl has all numbers"]


def test_training_goes_on_when_wandbs_service_is_killed(tmp_path, wandb_server, capfd):  # noqa: F811
    tracker = start(tmp_path / "a", wandb="online")
    children = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
    (service,) = (int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "wandb-core\n")
    os.kill(service, signal.SIGKILL)
    os.waitid(os.P_PID, service, os.WEXITED | os.WNOWAIT)
    tracker.log(1, train_loss=2.0)
    tracker.sample(1, "text")
    tracker.log(2, train_loss=2.0)
    tracker.finish()
    output = capfd.readouterr()
    lines = (output.out + output.err).splitlines()
    assert len(lines) == 2 and lines[1].startswith("wandb stopped (ConnectionResetError")
    assert lines[1].endswith("metrics.jsonl has all numbers")
    assert logged_steps(tmp_path / "a") == [1, 2]
    assert (tmp_path / "a/samples.jsonl").read_text() == '{"step": 1, "text": "text"}\n'


def test_training_goes_on_without_wandb(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = start(tmp_path / "a", wandb="auto")
    tracker.log(1, train_loss=2.0)
    tracker.sample(1, "text")
    tracker.finish()
    out = capsys.readouterr().out
    assert out.startswith("wandb stopped (ModuleNotFoundError: ") and out.count("\n") == 1
    assert logged_steps(tmp_path / "a") == [1]


def test_rows_have_nanogpts_names_and_a_value_for_each_layer():
    line = {"step": 3, "val_loss": 2.0, "val_loss/code": 1.0, "rate": [0.5, None], "mfu": 0.5, "context": 8}
    names = {"iter": 3, "val/loss": 2.0, "val/loss/code": 1.0, "rate/layer_00": 0.5, "mfu": 50.0, "val/context": 8}
    assert wandb_row(line) == names


# ---- files


def test_damaged_and_torn_lines_are_left_out_with_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    damage = b'\0\0{"step": 2}\n\xff\xfe{\n[1]\n{"lr": 1}\n{"step": "x"}\n' + b"[" * 100_000
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n{"step": 4, "tr')
    tracker = start(tmp_path, step=3, evaluated=True)
    assert capsys.readouterr().err == f"train.py: {tmp_path}/metrics.jsonl: 7 damaged lines are left out\n"
    tracker.log(4, train_loss=1.0)
    tracker.finish()
    assert logged_steps(tmp_path) == [1, 3, 4]


@pytest.mark.parametrize("step,evaluated,left", [(2, True, [1, 2, 2]), (2, False, [1, 2]), (1, True, [1])])
def test_lines_that_come_again_are_removed_and_a_file_without_them_is_left_alone(tmp_path, step, evaluated, left):
    """A resume on a full disk must not fail on a file that it would write as it is."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train_loss": 3.0}\n{"step": 2, "train_loss": 2.0}\n{"step": 2, "val_loss": NaN}\n')
    inode = os.stat(path).st_ino
    start(tmp_path, step=step, evaluated=evaluated).finish()
    assert logged_steps(tmp_path) == left and (os.stat(path).st_ino == inode) == (len(left) == 3)


def test_a_line_that_does_not_fit_on_the_disk_ends_training_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", sys.exit)
    tracker = start(tmp_path)
    tracker.log(1, train_loss=1.0)
    tracker.file = open("/dev/full", "a")
    with pytest.raises(SystemExit) as exit_status, exit_statuses(None):
        tracker.log(2, train_loss=1.0)
    assert exit_status.value.code == 1 and "cannot read or write: [Errno 28]" in refusal(capsys)
    assert logged_steps(tmp_path) == [1]


def test_flush_brings_both_files_to_the_disk(tmp_path, monkeypatch):
    contents = []
    tracker = start(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda number: contents.append(Path(f"/proc/self/fd/{number}").read_text()))
    tracker.log(1, lr=2.0)
    tracker.sample(2, "text")
    tracker.flush_to_disk()
    assert contents == ['{"step": 1, "lr": 2.0}\n', '{"step": 2, "text": "text"}\n']
