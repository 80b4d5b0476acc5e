"""Record a run's numbers in metrics.jsonl, send them to wandb, and read them again.

    tracker = Tracker(cfg, settings, progress, model)
    tracker.log(12, train_loss=3.2, tokens=98304, seconds=4.5, lr=6e-4)      # a line of metrics.jsonl, a row in wandb
    tracker.sample(12, "def f(x):")                                          # a line of samples.jsonl
    tracker.finish()

metrics.jsonl is the authority: one JSON object a line, and each step once. wandb may have steps twice that were taken
again after a resume.
"""

import html
import json
import math
import os
import secrets
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from ..data import describe_error, files
from .processes import print_to_terminal, warn

START_SECONDS = 30  # that the start of training waits for wandb's server
FINISH_SECONDS = 60  # that the end of training waits for wandb's last uploads
NO_KEY = "no API key: `wandb login`, or set WANDB_API_KEY"
NANOGPT_NAMES = {
    "step": "iter",
    "train_loss": "train/loss",
    "val_loss": "val/loss",
    "tok_per_sec": "train/tok_per_sec",
    "grad_norm": "train/grad_norm",
    "skipped": "train/skipped",
}


class Tracker:
    """Writes metrics.jsonl and samples.jsonl of a run, and sends their lines to wandb.

    Training resumes from progress.step, so lines of later steps are removed: these steps are taken again. If
    progress.evaluated is False, that step is evaluated again too, and the lines of its evaluation are removed.
    settings: the contents of config.json. Attribute: run_id, the run's id in wandb, or None if wandb is turned off.
    """

    def __init__(self, cfg, settings, progress, model):
        self.path = os.path.join(cfg.out_dir, "metrics.jsonl")
        self.sample_path = os.path.join(cfg.out_dir, "samples.jsonl")
        for path in (self.path, self.sample_path):
            remove_repeated_lines(path, progress)
        self.file = open(self.path, "a")
        self.run_id = self.wandb = None
        if cfg.wandb_log and cfg.wandb != "disabled":
            self.run_id = choose_id(cfg.out_dir)
            with self.wandb_errors():
                self.wandb = start_wandb(cfg, settings, self.run_id, model.parameter_count())

    def log(self, step, **values):
        """Write one line of numbers, such as train_loss, tokens, seconds and lr, to metrics.jsonl and to wandb.

        Names of one's own are taken too, and numbers of numpy and torch. A list or a vector has one value for each
        layer. Values of None are left out.
        """
        line = {"step": step}
        for name, value in values.items():
            if value is not None:
                line[name] = value.tolist() if hasattr(value, "tolist") else value
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if self.wandb:
            with self.wandb_errors():
                self.wandb.log(wandb_row(line))

    def sample(self, step, text):
        """Write a text that the model generated to samples.jsonl, and send it to wandb."""
        with open(self.sample_path, "a") as file:
            file.write(json.dumps({"step": step, "text": text}) + "\n")
        if self.wandb:
            with self.wandb_errors():
                import wandb

                # not a wandb.Table, which waits for the server
                self.wandb.log({"iter": step, "sample": wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)})

    def flush_to_disk(self):
        """Block until all lines are on disk. Call it before a checkpoint, so that a power cut loses no earlier step."""
        for path in (self.path, self.sample_path):
            files.flush_to_disk(path)  # log() and sample() leave nothing in Python's buffers

    def finish(self):
        """Close metrics.jsonl and end the wandb run, for which it waits at most about FINISH_SECONDS."""
        self.file.close()
        if self.wandb:
            with self.wandb_errors():
                self.wandb.finish()

    @contextmanager
    def wandb_errors(self):
        """Print an error of wandb in one line, and log no more to wandb. Training goes on."""
        try:
            yield
        except Exception as error:
            self.wandb = None
            print_to_terminal(f"wandb stopped ({describe_error(error)}): metrics.jsonl has all numbers")
            with suppress(Exception, SystemExit):  # otherwise wandb prints a traceback when the process ends
                import wandb

                wandb.teardown()


class Clock:
    """Counts the seconds of training, including earlier starts, and measures the speed of its steps."""

    def __init__(self, seconds, step):
        self.began = time.perf_counter() - seconds
        self.start_lap(step)

    def seconds(self):
        """Return the seconds of training up to now: steps, evaluations, samples and checkpoints of all starts."""
        return time.perf_counter() - self.began

    def start_lap(self, step):
        """Measure the speed from this step on. Call it after an evaluation, which is no step."""
        self.lap = time.perf_counter(), step

    def steps_per_second(self, step):
        """Return the speed since the last call or `start_lap`."""
        (lap_start, first_step), now = self.lap, time.perf_counter()
        self.start_lap(step)
        return (step - first_step) / (now - lap_start)


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


# ---- files of JSON lines


def remove_repeated_lines(path, progress):
    """Remove damaged lines, and lines that training will write again, from a file of JSON lines.

    Lines after progress.step come again. Lines of that step without a training loss belong to its evaluation, and come
    again unless progress.evaluated is True.
    """
    lines = []
    for line in read_lines(path):
        last_step = progress.step if progress.evaluated or "train_loss" in line else progress.step - 1
        if line["step"] <= last_step:
            lines.append(line)
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    if not os.path.exists(path) or Path(path).read_bytes() != text:  # a full disk does not matter if nothing changes
        files.write_atomically(path, text)


def read_lines(path):
    """Return the objects with a step in a file of JSON lines; [] if there is no such file.

    Leaves out, with a warning, a last line that a crash tore and lines that a power cut damaged: NULs or garbage.
    """
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        lines = [parse_line(text) for text in file]
    undamaged = [line for line in lines if line is not None]
    if len(undamaged) < len(lines):
        warn(f"{path}: {len(lines) - len(undamaged)} damaged lines are left out")
    return undamaged


def parse_line(text):
    """Return the object of a JSON line, or None if it is damaged or has no step."""
    try:
        line = json.loads(text)
        return line if type(line["step"]) is int else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


# ---- wandb


def choose_id(folder):
    """Return the run's id in wandb: the one in the file wandb_id, or a new one, which is written there."""
    path = Path(folder, "wandb_id")
    run_id = path.read_text(errors="replace").strip() if path.exists() else ""
    if not run_id.isalnum():  # the file is missing or damaged
        run_id = secrets.token_hex(4)
        files.write_atomically(path, f"{run_id}\n".encode())
    return run_id


def start_wandb(cfg, settings, run_id, parameters):
    """Return a run of wandb: online if wandb finds an API key and its server answers, otherwise offline.

    Nothing asks for a login. Prints one line. Returns None if WANDB_MODE turns wandb off.
    settings: the contents of config.json. parameters: their number in the model.
    """
    import wandb

    quiet = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=START_SECONDS,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
    )
    if cfg.wandb != "auto":
        quiet.mode = cfg.wandb
    mode, reason = wandb.setup(quiet).settings.mode, "as asked"
    if mode == "disabled":
        return None
    options = {
        "id": run_id,
        "project": cfg.wandb_project,
        "name": cfg.wandb_run_name or os.path.basename(os.path.abspath(cfg.out_dir)),
        "dir": cfg.out_dir,
        "config": settings | {"parameters": parameters},
    }
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        mode, reason = "offline", NO_KEY
    if mode == "online":
        try:
            run = init_wandb(wandb, quiet, options)
            print_to_terminal(f"wandb: {run.url}")
            return run
        except Exception as error:
            reason = describe_error(error)
            wandb.teardown()  # otherwise wandb takes the offline run for a second run with the same id
    quiet.mode = "offline"
    run = init_wandb(wandb, quiet, options)
    print_to_terminal(f"wandb is offline ({reason}): `wandb sync {cfg.out_dir}/wandb/offline-run-*` uploads it later")
    return run


def init_wandb(wandb, quiet, options):
    """Start a run of wandb with the settings `quiet` and the arguments `options` of wandb.init."""
    wandb.setup(quiet)
    run = wandb.init(resume="allow", **options)
    for axis in ("iter", "tokens", "seconds", "memory"):
        run.define_metric(axis)
    run.define_metric("*", step_metric="iter")  # wandb's own step counts rows, and a step may have several
    return run


def wandb_row(line):
    """Return a line of metrics.jsonl as a row for wandb. It has nanoGPT's names where nanoGPT has the value.

    A list has one value for each layer, or None for a layer without it: "gate" becomes gate/layer_00, gate/layer_01.
    """
    split = "val" if "val_loss" in line else "train"
    row = {}
    for name, value in line.items():
        if isinstance(value, list):
            row |= {f"{name}/layer_{i:02d}": mean for i, mean in enumerate(value) if mean is not None}
        elif name == "mfu":
            row[name] = 100 * value  # percent, as in nanoGPT
        elif name == "context":
            row[f"{split}/context"] = value
        else:
            row[NANOGPT_NAMES.get(name, name.replace("val_loss/", "val/loss/"))] = value
    return row
