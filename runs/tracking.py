"""Where a run's numbers go: metrics.jsonl always, wandb if wanted.

metrics.jsonl is the truth, one JSON object a line. wandb is online if there is an API key, otherwise offline
(`python -m runs.wandb_upload out/NAME` uploads it later), and never asks for a login.
"""

import json
import netrc
import os
import re
import secrets
import sys
from urllib.parse import urlparse

from data.files import write_atomically


class Tracker:
    def __init__(self, cfg, settings, step, run_id):
        path = os.path.join(cfg.out_dir, "metrics.jsonl")
        self.file = None
        if not cfg.eval_only:
            self.samples = os.path.join(cfg.out_dir, "samples.jsonl")
            for name in (path, self.samples):
                # later ones are done again
                kept = [line for line in whole_lines(name) if json.loads(line)["step"] <= step]
                write_atomically(name, "".join(kept).encode())
            self.file = open(path, "a")
        self.run_id, self.folder = run_id, cfg.out_dir
        self.wandb = None if cfg.eval_only else self._start_wandb(cfg, settings)

    def _start_wandb(self, cfg, settings):
        mode = wandb_mode(cfg)
        if mode == "disabled":
            return None
        try:
            import wandb
        except ImportError:
            print("wandb is not installed: metrics go to metrics.jsonl alone")
            return None
        known = saved_id(cfg.out_dir)
        self.run_id = self.run_id or known or secrets.token_hex(4)  # a checkpoint's first
        if self.run_id != known:  # before there is a checkpoint to keep it
            write_atomically(os.path.join(cfg.out_dir, "wandb_id"), f"{self.run_id}\n".encode())
        args = dict(
            project=cfg.wandb_project, name=cfg.wandb_run_name or os.path.basename(os.path.normpath(cfg.out_dir)),
            id=self.run_id, resume="allow", dir=cfg.out_dir, config=settings,
        )  # fmt: skip
        quiet = dict(console="off", silent=True)  # the terminal belongs to the progress bar
        try:
            run = wandb.init(**args, mode=mode, settings=wandb.Settings(init_timeout=60, **quiet))
        except Exception as error:
            if mode != "online":
                raise
            print(f"wandb does not answer ({error}): logging offline")
            run = wandb.init(**args, mode="offline", settings=wandb.Settings(**quiet))
        run.define_metric("iter")
        run.define_metric("*", step_metric="iter")  # wandb's own step must grow, ours repeats after a resume
        return run

    def log(self, step, **values):
        """One line of numbers: train_loss, tokens, seconds, lr, ... or val_loss; None is left out."""
        values = {k: v for k, v in values.items() if v is not None}
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        self._tell_wandb("log", {"iter": step, **wandb_row(values)})

    def sample(self, step, text):
        """A sample of the model, into samples.jsonl and wandb."""
        _append(self.samples, {"step": step, "text": text})
        self._tell_wandb("log", {"iter": step, "sample": text})

    def flush(self):
        """On the disk with what was logged: called before a checkpoint, so that a power cut loses no step before it."""
        if self.file:
            for name in (self.file.name, self.samples):
                with open(name, "ab") as f:  # log() and sample() leave nothing in Python's buffers
                    os.fsync(f.fileno())

    def finish(self):
        if self.file:
            self.file.close()
        self._tell_wandb("finish")

    def _tell_wandb(self, method, *args):
        """Training goes on without wandb when its service has died."""
        if self.wandb is None:
            return
        try:
            getattr(self.wandb, method)(*args)
        except Exception as error:
            self.wandb = None
            again = f"`python -m runs.wandb_upload {self.folder}` uploads it later"
            print(f"wandb stopped: {type(error).__name__}: {error}; metrics.jsonl goes on, {again}")


def saved_id(folder):
    """The id under which wandb knows the run of this folder, from its file wandb_id; None if there is none."""
    try:
        with open(os.path.join(folder, "wandb_id"), encoding="utf-8") as f:
            found = f.read().strip()
    except (OSError, ValueError):
        return None
    return found if re.fullmatch(r"[\w-]{1,64}", found) else None  # else damaged


def wandb_row(values):
    """A line of metrics.jsonl under wandb's names."""
    names = {
        "train_loss": "train/loss", "val_loss": "val/loss", "lr": "lr", "tok_per_sec": "train/tok_per_sec",
        "grad_norm": "train/grad_norm", "skipped": "train/skipped", "relative_loss": "val/relative_loss",
    }  # fmt: skip
    row = {name: values[key] for key, name in names.items() if key in values}
    if "mfu" in values:
        row["mfu"] = 100 * values["mfu"]  # percent, as nanoGPT has it
    for key in ("gate", "beta"):
        row |= {f"{key}/layer_{i:02d}": mean for i, mean in enumerate(values.get(key, []))}
    return row


def wandb_mode(cfg):
    """online, offline or disabled; `auto` asks WANDB_MODE, then whether there is a key."""
    if not cfg.wandb_log:
        return "disabled"
    if cfg.wandb != "auto":
        return cfg.wandb
    if os.environ.get("WANDB_MODE") in ("online", "offline", "disabled"):
        return os.environ["WANDB_MODE"]
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        key = os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators(host)
    except (OSError, netrc.NetrcParseError):
        key = None
    return "online" if key else "offline"


def _append(path, value):
    with open(path, "a") as f:
        f.write(json.dumps(value) + "\n")


def whole_lines(path):
    """The lines of a file of JSON lines, if it is there, that hold an object with a step. A last one torn by a crash is
    left out, and so, with a warning, is what a power cut has left: NULs or garbage."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace") as f:
        lines = [line for line in f if line.endswith("\n")]
    kept = [line for line in lines if _has_step(line)]
    if len(kept) < len(lines):
        print(f"{path}: {len(lines) - len(kept)} damaged lines are left out", file=sys.stderr)
    return kept


def _has_step(line):
    try:
        return isinstance(json.loads(line)["step"], int)
    except (ValueError, KeyError, TypeError):
        return False
