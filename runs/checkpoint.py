"""Write and read checkpoints: out_dir/ckpt/step_00001000/ with model.safetensors, optimizer.pt, progress.json and
checksums.json.

    with Writer(out_dir) as writer:
        writer.save(model, optimizer, progress)                  # copies the state; a thread writes the copy
    progress = load(newest(out_dir), model, optimizer, device)

A checkpoint is written under a temporary name, flushed to disk and renamed, so a checkpoint under its own name was
whole when it was renamed. Size and sha256 of each file show if it still is. Reading a checkpoint executes no code.
"""

import json
import math
import os
import re
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from data.files import flush_to_disk, sha256_of, write_json
from model import GPTConfig

KEEP = 2  # the newest checkpoints that are not removed; the best one is not removed either
FILES = ("model.safetensors", "optimizer.pt", "progress.json")
WEIGHTS = ("model.safetensors", "progress.json")  # what `load` reads without an optimizer
NOT_JSON = (ValueError, KeyError, TypeError, RecursionError)  # what reading a damaged JSON file may raise


class NotWritten(OSError):
    """Raised if a checkpoint could not be written, for example on a full disk. Older checkpoints are not affected."""


@dataclass
class Progress:
    """The progress of a run: the contents of progress.json."""

    step: int = 0  # optimizer steps taken
    seconds: float = 0.0  # spent in training: steps, evaluations, samples and checkpoints of all starts together
    best: float = math.inf  # lowest validation loss so far
    best_step: int = 0  # the step of the lowest loss
    wandb_id: str | None = None  # under which wandb knows the run
    skipped: tuple = (0, 0)  # steps skipped because their gradient was not finite: in all, and in a row up to this step
    evaluated: bool = True  # False if metrics.jsonl has no validation loss of this step, which may be due
    model: dict | None = None  # settings of the model, to notice damage of config.json
    stages: list | tuple = ()  # [context, steps before it] of each stage after the first that has begun
    context: int = 0  # of the validation losses, 0: block_size


class Writer:
    """Writes checkpoints while training goes on; training waits only while its state is copied into memory.

    A thread writes one checkpoint at a time. If that fails, every later call raises NotWritten. Used as a context
    manager, a Writer waits at the end for the last write, and reports its failure unless another error is on its way.
    """

    def __init__(self, out_dir):
        self.out_dir, self.copies, self.writing = out_dir, {}, None
        self.thread = ThreadPoolExecutor(1)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        try:
            self.wait()
        except NotWritten:
            if error is None:
                raise

    def save(self, model, optimizer, progress):
        """Copy the state of model and optimizer and return while a thread writes it.

        Waits first until the previous checkpoint is on disk.
        """
        self.wait()
        weights = {name: self._copy(name, x) for name, x in model.state_dict().items()}
        state = optimizer.state_dict()
        moments = {i: {k: self._copy((i, k), x) for k, x in of.items()} for i, of in state["state"].items()}
        state["state"] = moments
        self.writing = self.thread.submit(_write, self.out_dir, weights, state, replace(progress))

    def wait(self):
        """Block until the background write has finished; raise NotWritten if it failed."""
        if self.writing:
            self.writing.result()

    def check(self):
        """Raise NotWritten if the last write has finished and failed; never block."""
        if self.writing and self.writing.done():
            self.writing.result()

    def _copy(self, name, x):
        """Copy x into memory that the next checkpoint reuses, because allocating it takes longer than the copy."""
        if name not in self.copies:
            self.copies[name] = torch.empty(x.shape, dtype=x.dtype)
        return self.copies[name].copy_(x)


def _write(out_dir, weights, state, progress):
    """Write the checkpoint of progress.step; remove all but the newest KEEP and the best one."""
    folder = os.path.join(out_dir, "ckpt")
    final = _path(out_dir, progress.step)
    temporary = os.path.join(folder, ".writing")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed while it wrote
    try:
        os.makedirs(temporary)
        save_file(weights, os.path.join(temporary, "model.safetensors"))
        torch.save(state, os.path.join(temporary, "optimizer.pt"))
        write_json(os.path.join(temporary, "progress.json"), asdict(progress))
        files = {name: os.path.join(temporary, name) for name in FILES}
        sums = {name: {"bytes": os.path.getsize(path), "sha256": sha256_of(path)} for name, path in files.items()}
        write_json(os.path.join(temporary, "checksums.json"), sums)
        for name in os.listdir(temporary):
            flush_to_disk(os.path.join(temporary, name))
        flush_to_disk(temporary)
        if os.path.isdir(final):  # of the same step; after a kill before the next line, `newest` finds it aside
            _move_aside(final)
        os.rename(temporary, final)
        shutil.rmtree(_aside(final), ignore_errors=True)
        flush_to_disk(folder)
        # checkpoints of later steps are damaged, or this run would have started from one of them
        stay = [path for path in _all(out_dir) if path <= final][-KEEP:]
        for old in set(_all(out_dir)) - {*stay, _path(out_dir, progress.best_step)}:
            _remove(old)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, by three libraries
        shutil.rmtree(temporary, ignore_errors=True)
        whole, why = newest(out_dir), str(error).strip().splitlines()[0]
        with suppress(OSError):  # out_dir is gone
            why += f"; {shutil.disk_usage(out_dir).free:,} bytes are free there"
        rest = f"{whole} is whole: the same command goes on from there" if whole else "there is no older one"
        raise NotWritten(f"the checkpoint of step {progress.step} could not be written ({why}); {rest}") from error


def remove_leftovers(out_dir, current, best_step):
    """Remove what a kill left in ckpt/ while it was written or cleared. Nothing is removed that `newest` may need.

    current: the checkpoint from which the run goes on, or None.
    """
    shutil.rmtree(os.path.join(out_dir, "ckpt", ".writing"), ignore_errors=True)
    if current not in (there := _all(out_dir))[-1:]:  # without a checkpoint, or beside damaged ones
        return
    shutil.rmtree(_aside(current), ignore_errors=True)
    for old in {*there[:-KEEP]} - {_path(out_dir, best_step)}:
        _remove(old)


def newest(path, thorough=False, log=lambda line: None, files=None):
    """Return the folder of the newest checkpoint at `path` that is whole, or None.

    path: a run's folder, or a checkpoint itself. thorough: compare checksums, not only sizes. log: called with a line
    for each damaged checkpoint. files: the names of the files that will be read, if not all of them.

    The last resort is a whole checkpoint that a kill left under the name `.removing`, while another took its place.
    """
    is_checkpoint = os.path.isfile(os.path.join(path, "model.safetensors"))
    aside = _aside(_path(path, 0))
    for folder in [path] if is_checkpoint else [*reversed(_all(path)), *([aside] if os.path.isdir(aside) else [])]:
        wrong = damage(folder, thorough, files)
        if not wrong:
            if thorough and not os.path.exists(os.path.join(folder, "checksums.json")):
                log(f"{folder} is of a version without checksums: only the form of its files was checked")
            return folder
        log(f"{folder} is damaged and left out: {wrong}")
    return None


def settings(run, folder=None):
    """Return the settings a run was trained with, from its config.json.

    folder: a checkpoint whose progress.json must name the same settings of the model. Raises ValueError if config.json
    cannot be read, or says something else than the checkpoint.
    """
    path = os.path.join(run, "config.json")
    try:
        with open(path) as f:
            found = json.load(f)
        for name, kind in (("model", dict), ("dataset", str), ("init_from", str), ("block_size", int)):
            _check_type(name, found[name], kind)
        _check_type("then", found.get("then", ""), str)
        kinds = {of.name: of.type for of in fields(GPTConfig)}
        found["model"]["vocab_size"]
        for name, value in found["model"].items():
            _check_type(name, value, kinds[name])
        for name, value in (read_progress(folder).model or {} if folder else {}).items():
            # what the weights mean does not depend on these two, of which the first may change when a run goes on
            if found["model"].get(name) != value and name not in ("activation_checkpointing", "dropout"):
                raise ValueError(f"it has {name}={found['model'].get(name)}, {folder} {name}={value}")
        return found
    except (OSError, *NOT_JSON) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}, which a run has beside its checkpoints, is missing or damaged ({why})") from None


def _check_type(name, value, kind):
    if not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError(f"{name} is {str(value)[:50]!r}")


def damage(folder, thorough=True, files=None):
    """Return a text that says what is wrong with a checkpoint, or with these files of it; "" if nothing is.

    thorough: compare checksums, not only sizes.
    """
    try:
        with open(os.path.join(folder, "checksums.json")) as f:
            sums = json.load(f)
        if not all({"bytes", "sha256"} <= of.keys() for of in sums.values()) or not sums.keys() >= {*FILES}:
            return "checksums.json is not what was written"
    except FileNotFoundError:
        return _damage_without_checksums(folder)
    except (OSError, AttributeError, *NOT_JSON) as error:
        return f"checksums.json: {error}"
    for name in files or FILES:
        file, of = os.path.join(folder, name), sums[name]
        size = os.path.getsize(file) if os.path.exists(file) else None
        if size != of["bytes"]:
            return f"{name} " + ("is missing" if size is None else f"has {size:,} bytes instead of {of['bytes']}")
        try:
            if thorough and sha256_of(file) != of["sha256"]:
                return f"{name} is not what was written (sha256 differs)"
        except OSError as error:
            return f"{name}: {error}"
    return ""


def _damage_without_checksums(folder):
    """Return what `damage` does for a checkpoint without checksums.json, of which only the form can be checked.

    Versions that wrote no checksums did not count skipped steps either; in a later checkpoint the file was lost.
    """
    if missing := [name for name in FILES if not os.path.isfile(os.path.join(folder, name))]:
        return f"{missing[0]} is missing"
    try:
        with open(os.path.join(folder, "progress.json")) as f:
            if "skipped" in json.load(f):
                return "checksums.json is missing"
        with safe_open(os.path.join(folder, "model.safetensors"), "pt"):
            pass
    except (OSError, SafetensorError, *NOT_JSON) as error:
        return str(error).splitlines()[0]
    return "" if zipfile.is_zipfile(os.path.join(folder, "optimizer.pt")) else "optimizer.pt is not whole"


def exists(path):
    """Return True if a run's folder has any checkpoint, whole, damaged or half removed."""
    return bool(_all(path)) or os.path.isdir(_aside(_path(path, 0)))


def run_of(path):
    """Return the run's folder, which has config.json and the tokenizer, of a run or of one of its checkpoints."""
    if os.path.isfile(os.path.join(path, "model.safetensors")):
        return os.path.dirname(os.path.dirname(os.path.abspath(path)))
    return path


def load(folder, model, optimizer=None, device="cpu"):
    """Fill model (and optimizer) from a checkpoint and return its Progress."""
    model.load_state_dict(load_file(os.path.join(folder, "model.safetensors")))
    if optimizer is not None:
        state = torch.load(os.path.join(folder, "optimizer.pt"), map_location=device, weights_only=True)
        optimizer.load_state_dict(state)
    return read_progress(folder)


def read_progress(folder):
    """Return the Progress in a checkpoint."""
    with open(os.path.join(folder, "progress.json")) as f:
        saved = json.load(f)
    return Progress(**{of.name: saved[of.name] for of in fields(Progress) if of.name in saved})


def _path(out_dir, step):
    return os.path.join(out_dir, "ckpt", f"step_{step:08d}")


def _all(out_dir):
    """Return the paths of all checkpoints of a run, oldest first."""
    folder = os.path.join(out_dir, "ckpt")
    names = sorted(n for n in os.listdir(folder) if re.fullmatch(r"step_\d{8,}", n)) if os.path.isdir(folder) else []
    return [os.path.join(folder, n) for n in names]


def _remove(folder):
    """Remove a checkpoint; it loses its name in one step, so that a kill cannot leave half of it under that name."""
    _move_aside(folder)
    shutil.rmtree(_aside(folder))


def _move_aside(folder):
    """Rename a checkpoint, so that `newest` takes every other one before it."""
    shutil.rmtree(_aside(folder), ignore_errors=True)  # left by a run that was killed while it removed
    os.rename(folder, _aside(folder))


def _aside(folder):
    return os.path.join(os.path.dirname(folder), ".removing")
