"""metrics.jsonl survives whatever happens to wandb, the machine or the file."""

import json
import os
import sys
import types

import pytest

from runs import wandb_upload
from runs.tracking import Tracker, wandb_row


class FakeWandb(types.ModuleType):
    """Stands for wandb and records its runs and rows; once `dead`, it fails as if its service was killed."""

    def __init__(self):
        super().__init__("wandb")
        self.inits, self.rows, self.dead, self.Settings = [], [], False, dict

    def init(self, **kwargs):
        self.inits.append(kwargs)
        call = lambda *args, **kwargs: self.call(*args)
        return types.SimpleNamespace(define_metric=lambda *a, **k: None, log=call, finish=call, summary={})

    def call(self, *row):
        if self.dead:
            raise ConnectionResetError("Connection lost")
        self.rows += row


@pytest.fixture
def fake(monkeypatch):
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def start(folder, step=0, run_id=None, wandb="offline"):
    cfg = dict(out_dir=str(folder), eval_only=False, wandb_log=True, wandb=wandb, wandb_project="p", wandb_run_name="")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**cfg, "seed": 1}))
    return Tracker(types.SimpleNamespace(**cfg), {}, step, run_id)


def steps(folder, name="metrics.jsonl"):
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("first", ["log", "sample", "finish"])
def test_training_goes_on_when_wandb_dies(tmp_path, fake, capsys, first):
    tracker = start(tmp_path / "a")
    tracker.log(1, train_loss=2.0)
    fake.dead = True
    if first == "log":
        tracker.log(2, train_loss=2.0)
    if first != "finish":
        tracker.sample(2, "text")
        tracker.log(3, train_loss=2.0)
    tracker.finish()
    out = capsys.readouterr().out
    assert out.count("wandb stopped: ConnectionResetError: Connection lost; metrics.jsonl goes on") == 1
    assert f"`python -m runs.wandb_upload {tmp_path / 'a'}`" in out and out.count("\n") == 1
    assert steps(tmp_path / "a") == {"log": [1, 2, 3], "sample": [1, 3], "finish": [1]}[first]
    assert len(fake.rows) == 1 and tracker.wandb is None


DAMAGE = (
    b'{"step": 1, "train_loss": 2.0}\n' + b"\0" * 4096 + b'{"step": 2}\n\xff\xfe{\n[1]\n7\n{"lr": 1}\n{"step": "x"}\n'
)


def test_damaged_lines_are_left_out_with_a_warning(tmp_path, fake, capsys):
    folder = tmp_path / "a"
    start(folder).finish()
    (folder / "metrics.jsonl").write_bytes(DAMAGE + b'{"step": 3, "train_loss": 1.0}\n{"step": 4, "tr')
    assert wandb_upload.upload(str(folder), None, "offline") == 2
    assert capsys.readouterr().err == f"{folder}/metrics.jsonl: 6 damaged lines are left out\n"
    tracker = start(folder, step=3, wandb="disabled")
    tracker.log(4, train_loss=1.0)
    tracker.finish()
    assert steps(folder) == [1, 3, 4] and "6 damaged lines" in capsys.readouterr().err


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
    for _ in range(2):
        tracker = start(folder)
    first = fake.inits[0]["id"]
    assert tracker.run_id == fake.inits[1]["id"] == first and there == [first + "\n"] * 2
    wandb_upload.upload(str(folder), None, "offline")
    start(folder, run_id="checkpoint")  # which wins
    wandb_upload.upload(str(folder), None, "offline")
    assert [i["id"] for i in fake.inits] == [first] * 3 + ["checkpoint"] * 2
    (folder / "wandb_id").write_bytes(b"\0" * 9)
    assert start(folder).run_id.isalnum()
    assert not (start(tmp_path / "b", wandb="disabled").run_id or (tmp_path / "b" / "wandb_id").exists())


def test_whatever_an_attention_reports_of_its_layers_goes_to_wandb():
    row = wandb_row({"val_loss": 2.0, "rate": [0.5, 0.25], "gate": [0.9], "seconds": 3.0})
    assert row == {"val/loss": 2.0, "rate/layer_00": 0.5, "rate/layer_01": 0.25, "gate/layer_00": 0.9}
