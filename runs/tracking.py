"""Record a run's numbers, always in metrics.jsonl and on request in wandb, and read them again.

metrics.jsonl is the authority: one JSON object a line. wandb is online if there is an API key, otherwise offline
(`python -m runs.wandb_upload out/NAME` uploads it later), and never asks for a login.
"""

import json
import math
import netrc
import os
import re
import secrets
import sys
import time
from urllib.parse import urlparse

import numpy as np

from data.files import write_atomically
from runs.settings import refuse


class Tracker:
    """Writes metrics.jsonl and samples.jsonl of a run, and the same to wandb.

    Lines of steps after `step`, at which the run goes on, are removed, because those steps are taken again, and so are
    the validation loss and the sample of that step itself if it is not `evaluated`: a kill came before the checkpoint
    with it. run_id: the id that wandb gave the run, if a checkpoint has one. Attribute: run_id, or None without wandb.
    """

    def __init__(self, cfg, settings, step, run_id, evaluated=True):
        path, self.samples = (os.path.join(cfg.out_dir, name) for name in ("metrics.jsonl", "samples.jsonl"))
        for name in (path, self.samples):
            again = lambda line: line["step"] > step - (not evaluated and "train_loss" not in line)
            lines = [line for line in whole_lines(name) if not again(json.loads(line))]
            write_atomically(name, "".join(lines).encode())
        self.file = open(path, "a")
        self.run_id, self.folder = run_id, cfg.out_dir
        self.wandb = self._start_wandb(cfg, settings)

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
        self.run_id = self.run_id or known or secrets.token_hex(4)  # the id in the checkpoint comes first
        if self.run_id != known:  # saved now, because the first checkpoint may be much later
            write_atomically(os.path.join(cfg.out_dir, "wandb_id"), f"{self.run_id}\n".encode())
        args = dict(
            project=cfg.wandb_project, name=cfg.wandb_run_name or os.path.basename(os.path.normpath(cfg.out_dir)),
            id=self.run_id, resume="allow", dir=cfg.out_dir, config=settings,
        )  # fmt: skip
        quiet = dict(console="off", silent=True)  # wandb prints nothing: the progress bar uses the terminal
        try:
            run = wandb.init(**args, mode=mode, settings=wandb.Settings(init_timeout=60, **quiet))
        except Exception as error:
            if mode != "online":
                raise
            print(f"wandb does not answer ({error}): logging offline")
            run = wandb.init(**args, mode="offline", settings=wandb.Settings(**quiet))
        run.define_metric("iter")
        run.define_metric("*", step_metric="iter")  # wandb's own step must grow, but steps repeat after a resume
        return run

    def log(self, step, **values):
        """Write one line of numbers, such as train_loss, tokens, seconds and lr; those that are None are left out."""
        values = {k: v for k, v in values.items() if v is not None}
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        self._tell_wandb("log", {"iter": step, **wandb_row(values)})

    def sample(self, step, text):
        """Write a text that the model generated to samples.jsonl and wandb."""
        _append(self.samples, {"step": step, "text": text})
        self._tell_wandb("log", {"iter": step, "sample": text})

    def flush_to_disk(self):
        """Block until all lines are on disk. Call it before a checkpoint, so that a power cut loses no earlier step."""
        for name in (self.file.name, self.samples):
            with open(name, "ab") as f:  # log() and sample() leave nothing in Python's buffers
                os.fsync(f.fileno())

    def finish(self):
        """Close the file and end the wandb run."""
        self.file.close()
        self._tell_wandb("finish")

    def _tell_wandb(self, method, *args):
        """Call a method of the wandb run; if wandb's service has died, go on without it."""
        if self.wandb is None:
            return
        try:
            getattr(self.wandb, method)(*args)
        except Exception as error:
            self.wandb = None
            again = f"`python -m runs.wandb_upload {self.folder}` uploads it later"
            print(f"wandb stopped: {type(error).__name__}: {error}; metrics.jsonl goes on, {again}")


class Clock:
    """Counts the seconds of training, from those of earlier starts on, and measures the speed of its steps."""

    def __init__(self, seconds, step):
        self.began = time.perf_counter() - seconds
        self.start_lap(step)

    def seconds(self):
        """Return the seconds of training up to now: steps, evaluations, samples and checkpoints of all starts."""
        return time.perf_counter() - self.began

    def start_lap(self, step):
        """Measure the speed from this step on; called after an evaluation, which is no step."""
        self.lap = time.perf_counter(), step

    def steps_per_second(self, step):
        """Return the speed since the last call or `start_lap`."""
        (then, first), now = self.lap, time.perf_counter()
        self.start_lap(step)
        return (step - first) / (now - then)


class SkippedSteps:
    """Counts the steps that were skipped because their gradient was not finite.

    Attributes: total, in_a_row (up to the last step that was counted).
    """

    def __init__(self, total=0, in_a_row=0):
        self.total, self.in_a_row, self.pending = total, in_a_row, None

    def count(self, grad_norm, wait):
        """Count a step by the norm of its gradient, a scalar tensor, or None if no step was taken.

        It is read one step later, when the GPU has long computed it, or with `wait` at once.
        """
        for norm in (self.pending, grad_norm if wait else None):
            if norm is not None:
                skipped = not math.isfinite(norm.item())
                self.total, self.in_a_row = self.total + skipped, (self.in_a_row + 1) * skipped
        self.pending = None if wait else grad_norm


def baseline_losses(run):
    """Return [(tokens, validation loss)] of the run in this folder, for relative_loss; [] if run is ""."""
    if not run:
        return []
    path = os.path.join(run, "metrics.jsonl")
    if not os.path.isfile(path):
        refuse(f"baseline must be a run's folder, got {run}: there is no {path}")
    found = map(json.loads, whole_lines(path))
    return sorted((line["tokens"], line["val_loss"]) for line in found if "val_loss" in line)


def relative_loss(loss, tokens, baseline):
    """Return by what share a validation loss is above the baseline's after the same number of tokens.

    Between two evaluations of the baseline its loss is interpolated; outside of them the result is None.
    """
    if not baseline or not baseline[0][0] <= tokens <= baseline[-1][0]:
        return None
    return loss / float(np.interp(tokens, *zip(*baseline))) - 1


def saved_id(folder):
    """Return the id under which wandb knows the run in this folder, from its file wandb_id; None if there is none."""
    try:
        with open(os.path.join(folder, "wandb_id"), encoding="utf-8") as f:
            found = f.read().strip()
    except (OSError, ValueError):
        return None
    return found if re.fullmatch(r"[\w-]{1,64}", found) else None  # otherwise the file is damaged


def wandb_row(values):
    """Return the values of a line of metrics.jsonl under the names that they have in wandb, which are nanoGPT's."""
    names = {
        "train_loss": "train/loss", "val_loss": "val/loss", "lr": "lr", "tok_per_sec": "train/tok_per_sec",
        "grad_norm": "train/grad_norm", "skipped": "train/skipped", "relative_loss": "val/relative_loss",
    }  # fmt: skip
    row = {name: values[key] for key, name in names.items() if key in values}
    if "mfu" in values:
        row["mfu"] = 100 * values["mfu"]  # percent, as nanoGPT has it
    for key, value in values.items():
        if isinstance(value, list):  # what an attention reports of each layer
            row |= {f"{key}/layer_{i:02d}": mean for i, mean in enumerate(value)}
    return row


def wandb_mode(cfg):
    """Return online, offline or disabled; wandb=auto looks at WANDB_MODE, then for an API key."""
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
    """Return the objects with a step in a file of JSON lines; none if there is no such file.

    A last line that a crash tore is left out, and so, with a warning, is what a power cut leaves: NULs or garbage.
    """
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace") as f:
        lines = [line for line in f if line.endswith("\n")]
    whole = [line for line in lines if _has_step(line)]
    if len(whole) < len(lines):
        print(f"{path}: {len(lines) - len(whole)} damaged lines are left out", file=sys.stderr)
    return whole


def _has_step(line):
    try:
        return isinstance(json.loads(line)["step"], int)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
