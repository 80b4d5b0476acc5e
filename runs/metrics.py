"""Record a run's numbers, always in metrics.jsonl and on request in wandb, and read them again.

metrics.jsonl is the authority: one JSON object a line.
"""

import json
import math
import os
import secrets
import time
from pathlib import Path

import numpy as np

from sympow.data.files import write_atomically
from sympow.runs.processes import warn
from sympow.runs.settings import refuse
from sympow.runs.wandb_run import WandbRun, past_rows, run_options, saved_id, wandb_row


class Tracker:
    """Writes metrics.jsonl and samples.jsonl of a run, and the same to wandb.

    Lines of steps after progress.step, at which the run goes on, are removed, because those steps are taken again, and
    so are the validation loss and the sample of that step itself if it is not `evaluated`: a kill came before the
    checkpoint with it. settings: the contents of config.json. Attribute: run_id, under which wandb knows the run, from
    the checkpoint if it has one; None if wandb is turned off.
    """

    def __init__(self, cfg, settings, progress, model):
        path, self.sample_path = (os.path.join(cfg.out_dir, name) for name in ("metrics.jsonl", "samples.jsonl"))
        lines, samples = (keep_lines(name, progress.step, progress.evaluated) for name in (path, self.sample_path))
        self.samples = [[line["step"], line["text"]] for line in samples if isinstance(line.get("text"), str)]
        self.file = open(path, "a")
        self.run_id, self.wandb = progress.wandb_id, None
        if cfg.wandb_log and cfg.wandb != "disabled":
            self.run_id = choose_id(cfg.out_dir, progress.wandb_id)
            options = run_options(cfg.out_dir, settings, self.run_id, model.parameter_count())
            self.wandb = WandbRun(cfg.wandb, cfg.out_dir, options, past_rows(lines, self.samples))

    def log(self, step, **values):
        """Write one line of numbers, such as train_loss, tokens, seconds and lr; those that are None are left out."""
        line = {"step": step, **{k: v for k, v in values.items() if v is not None}}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log(wandb_row(line))

    def sample(self, step, text):
        """Write a text that the model generated to samples.jsonl, and all of them to wandb as a table."""
        with open(self.sample_path, "a") as f:
            f.write(json.dumps({"step": step, "text": text}) + "\n")
        self.samples.append([step, text])
        if self.wandb:
            self.wandb.log({"iter": step, "samples": [*self.samples]})

    def flush_to_disk(self):
        """Block until all lines are on disk. Call it before a checkpoint, so that a power cut loses no earlier step."""
        for name in (self.file.name, self.sample_path):
            with open(name, "ab") as f:  # log() and sample() leave nothing in Python's buffers
                os.fsync(f.fileno())

    def finish(self):
        """Close the file and end the wandb run."""
        self.file.close()
        if self.wandb:
            self.wandb.finish()


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


def baseline_losses(run, context):
    """Return [(tokens, validation loss)] of the run in this folder, for relative_loss; [] if run is "".

    Losses at another context than this one are taken, with a warning, only if there are no others. Refuses a folder
    without losses. Those that are not finite are left out.
    """
    if not run:
        return []
    path = os.path.join(run, "metrics.jsonl")
    if not os.path.isfile(path):
        refuse(f"baseline must be a run's folder, got {run}: there is no {path}")
    try:
        lines = [line for line in map(json.loads, whole_lines(path)) if "val_loss" in line]
    except OSError as error:
        refuse(f"baseline {run} cannot be read: {error}")
    like = [line for line in lines if line.get("context", context) == context]  # earlier versions did not name it
    if lines and not like:
        warn(f"baseline {run} was not evaluated at context {context}: relative_loss compares losses of two contexts")
    pairs = [(line.get("tokens"), line["val_loss"]) for line in like or lines]
    if found := sorted(pair for pair in pairs if all(map(_is_positive, pair))):
        return found
    refuse(f"baseline must be a run that was evaluated, got {run}: {path} has no line with val_loss and tokens")


def relative_loss(loss, tokens, baseline):
    """Return by what share a validation loss is above the baseline's after the same number of tokens.

    Between two evaluations of the baseline its loss is interpolated; outside of them the result is None.
    """
    if not baseline or not baseline[0][0] <= tokens <= baseline[-1][0]:
        return None
    return loss / float(np.interp(tokens, *zip(*baseline))) - 1


def choose_id(folder, of_checkpoint):
    """Return the id for wandb: the checkpoint's, else that of an earlier start of this run, else a new one.

    It is saved in the file wandb_id at once, because the first checkpoint may be much later.
    """
    known = saved_id(folder)
    chosen = of_checkpoint or known or secrets.token_hex(4)
    if chosen != known:
        write_atomically(os.path.join(folder, "wandb_id"), f"{chosen}\n".encode())
    return chosen


def keep_lines(path, step, evaluated):
    """Remove damaged lines and those that come again from a file of JSON lines; return the objects that stay.

    Lines of later steps come again, and, unless the step is evaluated, those of its evaluation.
    """
    again = lambda line: line["step"] > step - (not evaluated and "train_loss" not in line)
    kept = [line for line in whole_lines(path) if not again(json.loads(line))]
    text = "".join(kept).encode()
    if text != (Path(path).read_bytes() if os.path.exists(path) else None):  # needs no space if nothing changes
        write_atomically(path, text)
    return [json.loads(line) for line in kept]


def whole_lines(path):
    """Return the lines of a file of JSON lines that hold an object with a step; none if there is no such file.

    A last line that a crash tore is left out, and so, with a warning, is what a power cut leaves: NULs or garbage.
    """
    if not os.path.exists(path):
        return []
    if not os.path.isfile(path):  # reading a device such as /dev/full would never end
        refuse(f"{path} must be a file, not a folder or a device: remove it")
    with open(path, encoding="utf-8", errors="replace", newline="\n") as f:
        lines = f.readlines()
    if lines and not lines[-1].endswith("\n"):  # torn, unless only the end of the line is missing
        lines[-1:] = [lines[-1] + "\n"] if _has_step(lines[-1]) else []
    whole = [line for line in lines if _has_step(line)]
    if len(whole) < len(lines):
        warn(f"{path}: {len(lines) - len(whole)} damaged lines are left out")
    return whole


def _has_step(line):
    try:
        return type(json.loads(line)["step"]) is int
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def _is_positive(x):
    return isinstance(x, (int, float)) and 0 < x < 1e300
