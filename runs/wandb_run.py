"""Send a run's numbers to wandb from a thread, so that wandb can neither end training nor hold it up.

    run = WandbRun("auto", out_dir, options, history)    # returns at once; options: those of wandb.init
    run.log({"iter": 12, "train/loss": 3.2})             # never waits
    run.finish()                                         # waits for at most FINISH_SECONDS

A run is online if wandb finds an API key and its server answers, and offline otherwise; nothing asks for a login.
Rows have nanoGPT's names and their own axis, iter. Of a run that wandb knows already, rows that it has are not sent
again, and rows that it lacks (because the run was offline for a while) are sent first.
"""

import atexit
import json
import math
import os
import queue
import re
import sys
import threading
from contextlib import suppress

from sympow.runs.processes import print_to_terminal

START_SECONDS = 30  # after which a server that does not answer leaves the run offline; training does not wait for it
FINISH_SECONDS = 60  # that the end of training waits for wandb
TABLE_ROWS = 200  # samples in wandb's table, the newest ones: each evaluation sends the table again
NO_KEY = "it finds no API key: `wandb login`, or set WANDB_API_KEY"


class WandbRun:
    """A run in wandb, to which a thread sends rows in the order of `log`.

    If wandb fails, a line says so and later rows are left out: metrics.jsonl has them. setting: auto, online or
    offline. options: arguments of wandb.init. history: rows of the steps before this start.
    """

    def __init__(self, setting, folder, options, history):
        self.folder, self.rows, self.thread = folder, queue.SimpleQueue(), None
        try:
            import wandb  # here, because two threads that import at the same time may get in each other's way
        except ImportError as error:
            missing = getattr(error, "name", None) == "wandb"
            self._print("is not installed" if missing else f"cannot be imported ({in_short(error)})")
        except Exception as error:  # a version that does not fit numpy or another package
            self._print(f"cannot be imported ({in_short(error)})")
        else:
            self.thread = threading.Thread(target=self._work, args=(wandb, setting, options, history), daemon=True)
            self.thread.start()

    def log(self, row):
        """Send a row: a dict with its step as iter. row["samples"], a list of [step, text], becomes a table."""
        if self.thread and self.thread.is_alive():
            self.rows.put(row)

    def finish(self):
        """Send what is left and end the run in wandb. Gives up after FINISH_SECONDS."""
        if not self.thread:
            return
        self.rows.put(None)
        self.thread.join(FINISH_SECONDS / 12)
        if self.thread.is_alive():
            print_to_terminal(f"waiting for wandb, for at most {FINISH_SECONDS} s")
            self.thread.join(FINISH_SECONDS)
        if self.thread.is_alive():
            self._print(f"did not take all rows within {FINISH_SECONDS} s")
            atexit.register(leave_without_wandb)

    def _work(self, wandb, setting, options, history):
        """Start the run and send rows until `finish`."""
        try:
            run = self._start(wandb, setting, options)
            if not run:
                return
            known = known_steps(run)
            for row in history if known else ():
                send_row(wandb, run, row, known)
            while row := self.rows.get():
                send_row(wandb, run, row, known)
            run.finish()
        except BaseException as error:  # its service was killed, its disk is full, ...
            self._print(f"stopped ({in_short(error)})")

    def _start(self, wandb, setting, options):
        """Return a run of wandb, online or offline; None if WANDB_MODE and the like turn wandb off."""
        reason = "as asked"
        try:
            mode = choose_mode(wandb, setting)
            if mode == "online":
                run = init(wandb, mode, options)
                print_to_terminal(f"wandb: {run.url}")
                return run
        except Exception as error:
            mode, reason = "offline", NO_KEY if isinstance(error, NoKey) else in_short(error)
            with suppress(Exception):  # otherwise wandb's service takes the id for that of a run that goes on
                wandb.teardown()
        if mode == "disabled":
            return None
        run = init(wandb, "offline", options)
        self._print(f"is offline ({reason}), in {os.path.dirname(os.path.normpath(run.dir))}")
        return run

    def _print(self, text):
        """Print what happened to wandb, in one line that says how its rows come to wandb later."""
        later = f"`python -m runs.wandb_upload {self.folder}` uploads them later"
        print_to_terminal(" ".join(f"wandb {text}: metrics.jsonl has all numbers, {later}".split()))


def in_short(error):
    """Return an exception's type and message in one line of at most 300 characters."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= 300 else text[:297] + "..."


class NoKey(Exception):
    """Raised if a run is to be online and wandb finds no API key."""


def choose_mode(wandb, setting):
    """Return online, offline or disabled for the setting wandb: auto, online or offline.

    auto does what wandb itself would do (WANDB_MODE, `wandb offline`), and obeys WANDB_DISABLED. Raises NoKey.
    """
    if setting == "auto" and os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
        return "disabled"
    if setting == "offline":
        return setting
    settings = wandb.setup(wandb.Settings(silent=True, **({"mode": setting} if setting != "auto" else {}))).settings
    mode = {"dryrun": "offline", "run": "online", "shared": "online"}.get(settings.mode, settings.mode)
    if setting == "auto" and mode != "online":
        return mode
    try:
        known = wandb.login(prompt=False, verify=False)
    except TypeError:  # wandb before 0.31, where this asks for nothing
        known = wandb.api.api_key
    if not known:
        raise NoKey(NO_KEY)
    return "online"


def init(wandb, mode, options):
    """Start a run in wandb; it prints nothing, because the progress bar uses the terminal."""
    quiet = wandb.Settings(init_timeout=START_SECONDS, console="off", silent=True)
    resume = "allow" if mode == "online" else None  # offline, wandb warns that it has nothing to resume
    run = wandb.init(**options, mode=mode, resume=resume, settings=quiet)
    run.define_metric("iter")
    run.define_metric("*", step_metric="iter")  # wandb counts rows, of which a step may have several
    run.define_metric("val/iter", hidden=True)
    return run


def send_row(wandb, run, row, known):
    """Log a row unless wandb has it (see known_steps); return True if it was sent.

    wandb's server keeps tables apart from other values. If it refuses one, a line says so, and the run goes on without.
    """
    if row["iter"] <= known.get(kind_of(row), -1):
        return False
    if "samples" not in row:
        run.log(row)
        return True
    try:
        run.log({**row, "samples": table(wandb, row["samples"])})
    except Exception as error:
        print_to_terminal(f"wandb took no table of samples ({in_short(error)}): they are in samples.jsonl")
        run.log({"iter": row["iter"]})  # raises an error if it is the whole run that has failed
        known["samples"] = math.inf
    return True


def run_options(folder, settings, run_id, parameters):
    """Return the arguments of wandb.init for a run's folder; settings: the contents of its config.json.

    parameters: their number in the model; None if it is not known.
    """
    config = {**settings, "commit": commit(folder)} | ({"parameters": parameters} if parameters else {})
    tags = [tag.strip() for tag in settings.get("wandb_tags", "").split(",") if tag.strip()]
    return dict(
        project=settings["wandb_project"], name=settings["wandb_run_name"] or os.path.basename(os.path.abspath(folder)),
        group=settings.get("wandb_group") or None, tags=tags or None, id=run_id, dir=folder, config=config,
    )  # fmt: skip


def commit(folder):
    """Return the commit that the run in a folder was last started with, "" if its environment.json does not say."""
    try:
        with open(os.path.join(folder, "environment.json"), encoding="utf-8") as f:
            return str(json.load(f)[-1]["commit"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""


def wandb_row(line):
    """Return a line of metrics.jsonl as a row for wandb, under the names that nanoGPT has."""
    names = {
        "train_loss": "train/loss", "val_loss": "val/loss", "lr": "lr", "tok_per_sec": "train/tok_per_sec",
        "grad_norm": "train/grad_norm", "skipped": "train/skipped", "relative_loss": "val/relative_loss",
    }  # fmt: skip
    row = {"iter": line["step"]} | {name: line[key] for key, name in names.items() if key in line}
    if "val_loss" in line:
        row["val/iter"] = line["step"]  # see known_steps
    if "context" in line:
        row["val/context" if "val_loss" in line else "train/context"] = line["context"]
    if "mfu" in line:
        row["mfu"] = 100 * line["mfu"]  # percent, as nanoGPT has it
    for key, value in line.items():
        if key.startswith(("val_loss/", "epochs/")):  # of one of several datasets
            row[key.replace("val_loss/", "val/loss/")] = value
        if isinstance(value, list):  # what an attention reports of each layer, None for others
            row |= {f"{key}/layer_{i:02d}": mean for i, mean in enumerate(value) if mean is not None}
    return row


def past_rows(lines, samples):
    """Return the rows of a run so far, by step, each kind once; of a step that was taken twice, the later line counts.

    lines: of metrics.jsonl. samples: [step, text] of samples.jsonl; all of them are one row.
    """
    rows = [wandb_row(line) for line in lines]
    if samples:
        rows.append({"iter": samples[-1][0], "samples": samples})
    last = {(row["iter"], ("train", "val", "samples").index(kind_of(row))): row for row in rows}
    return [last[key] for key in sorted(last)]


def kind_of(row):
    """Return train, val or samples for a row."""
    return "samples" if "samples" in row else "val" if "val/iter" in row else "train"


def known_steps(run):
    """Return the last step that wandb's server has of each kind of row, {"train": 12, ...}; {} if the run is offline.

    A kill, or a signal before an evaluation, can come between the rows of a step, so each kind has its own.
    """
    if run.offline:
        return {}
    train = run.summary.get("iter", -1)
    val = run.summary.get("val/iter", train)
    return {"train": train, "val": val, "samples": val}


def table(wandb, samples):
    """Return a wandb table of the newest samples, [[step, text], ...]."""
    rows = [[step, text.encode("utf-8", "replace").decode()] for step, text in samples[-TABLE_ROWS:]]
    return wandb.Table(columns=["step", "text"], data=rows)


def saved_id(folder):
    """Return the id under which wandb knows the run in this folder, from its file wandb_id; None if there is none."""
    try:
        with open(os.path.join(folder, "wandb_id"), encoding="utf-8") as f:
            found = f.read().strip()
    except (OSError, ValueError):
        return None
    return found if re.fullmatch(r"[\w-]{1,64}", found) else None  # otherwise the file is damaged


def leave_without_wandb():
    """End the process where wandb's own hook at exit would wait for its service, however long that takes."""
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(1 if hasattr(sys, "last_type") else 0)  # last_type: of an error that ended the program
