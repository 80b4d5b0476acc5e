"""Checkpoints: out_dir/ckpt/step_00001000/ with model.safetensors, optimizer.pt, progress.json and checksums.json.

Written under a temporary name, flushed to disk and renamed: a checkpoint under its own name was whole then. Whether it
still is, the size and sha256 of each file tell. Reading one executes no code.
"""

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from data.files import sha256_of, write_atomically

KEEP = 2  # newest checkpoints that stay
FILES = ("model.safetensors", "optimizer.pt", "progress.json")
WEIGHTS = ("model.safetensors", "progress.json")  # what `load` reads without an optimizer


class NotWritten(OSError):
    """A checkpoint could not be written whole: a full disk, for one. The older ones are as they were."""


class Writer:
    """Writes checkpoints beside training, which is held only while its state is copied into memory.

    One is written at a time, in a thread; what went wrong there is raised, as NotWritten, by every later call. A
    process that ends by itself waits for the thread, one that leaves by os._exit calls `wait` first."""

    current = None  # this process's

    def __init__(self, out_dir):
        Writer.current = self
        self.out_dir, self.copies, self.writing = out_dir, {}, None
        self.thread = ThreadPoolExecutor(1)

    def save(self, model, optimizer, progress):
        """Takes what they are now, after the checkpoint before is on disk, and returns before this one is."""
        self.wait()
        weights = {name: self._copy(name, x) for name, x in model.state_dict().items()}
        state = optimizer.state_dict()
        moments = {i: {k: self._copy((i, k), x) for k, x in of.items()} for i, of in state["state"].items()}
        self.writing = self.thread.submit(_write, self.out_dir, weights, state | {"state": moments}, progress)

    def wait(self):
        """Until nothing is being written."""
        if self.writing:
            self.writing.result()

    def check(self):
        """Raises what a finished write raised; waits for nothing."""
        if self.writing and self.writing.done():
            self.writing.result()

    def _copy(self, name, x):
        """x in memory of ours, which stays for the next time: new memory costs more than the copy itself."""
        if name not in self.copies:
            self.copies[name] = torch.empty(x.shape, dtype=x.dtype)
        return self.copies[name].copy_(x)


def _write(out_dir, weights, state, progress):
    """The checkpoint of progress["step"]; the newest KEEP stay, and that of progress["best_step"]."""
    folder = os.path.join(out_dir, "ckpt")
    final = _path(out_dir, progress["step"])
    temporary = os.path.join(folder, ".writing")
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed while it wrote
    try:
        os.makedirs(temporary)
        save_file(weights, os.path.join(temporary, "model.safetensors"))
        torch.save(state, os.path.join(temporary, "optimizer.pt"))
        write_json(os.path.join(temporary, "progress.json"), progress)
        files = {name: os.path.join(temporary, name) for name in FILES}
        sums = {name: {"bytes": os.path.getsize(path), "sha256": sha256_of(path)} for name, path in files.items()}
        write_json(os.path.join(temporary, "checksums.json"), sums)
        for name in os.listdir(temporary):
            flush(os.path.join(temporary, name))
        flush(temporary)
        before = _aside(final)  # the same step again: one of the two is there under its name at nearly all times
        os.rename(temporary, final)
        shutil.rmtree(before, ignore_errors=True)
        flush(folder)
        # those above are damaged: this run began below them
        stay = [path for path in _all(out_dir) if path <= final][-KEEP:]
        for old in set(_all(out_dir)) - {*stay, _path(out_dir, progress["best_step"])}:
            _remove(old)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        free = shutil.disk_usage(out_dir).free
        shutil.rmtree(temporary, ignore_errors=True)
        whole, why = newest(out_dir), f"{str(error).strip().splitlines()[0]}; {free:,} bytes are free there"
        kept = f"{whole} is whole: the same command goes on from there" if whole else "there is no older one"
        raise NotWritten(f"the checkpoint of step {progress['step']} could not be written ({why}); {kept}") from error


def newest(path, thorough=False, say=lambda line: None, files=None):
    """The checkpoint to read at `path`, a run's folder or a checkpoint itself: the newest that is whole, by the sizes
    of its files, or if `thorough` by their checksums; None if there is none. `say` gets a line for each damaged one.
    files: the names of those that will be read, if not all."""
    own = os.path.isfile(os.path.join(path, "model.safetensors"))
    for folder in [path] if own else reversed(_all(path)):
        wrong = damage(folder, thorough, files)
        if not wrong:
            return folder
        say(f"{folder} is damaged and left out: {wrong}")
    return None


def settings(run):
    """What a run was trained with, its config.json; ValueError where that cannot be read."""
    path = os.path.join(run, "config.json")
    try:
        with open(path) as f:
            found = json.load(f)
        found["model"], found["block_size"], found["init_from"]
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}, which a run has beside its checkpoints, is missing or damaged ({why})") from None


def damage(folder, thorough=True, files=None):
    """What is wrong with a checkpoint, or with these files of it; "" if nothing is."""
    try:
        with open(os.path.join(folder, "checksums.json")) as f:
            sums = json.load(f)
        if not all({"bytes", "sha256"} <= of.keys() for of in sums.values()) or not sums.keys() >= {*FILES}:
            return "checksums.json is not what was written"
    except FileNotFoundError:  # of before there were any
        sums, missing = {}, [name for name in FILES if not os.path.exists(os.path.join(folder, name))]
        if missing:
            return f"{missing[0]} is missing"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"checksums.json: {error}"
    for name, of in sums.items():
        if files and name not in files:
            continue
        file = os.path.join(folder, name)
        size = os.path.getsize(file) if os.path.exists(file) else None
        if size != of["bytes"]:
            return f"{name} " + ("is missing" if size is None else f"has {size:,} bytes instead of {of['bytes']:,}")
        if thorough and sha256_of(file) != of["sha256"]:
            return f"{name} is not what was written (sha256 differs)"
    return ""


def exists(path):
    """Whether a run's folder has any checkpoint, damaged, half gone or not."""
    return bool(_all(path)) or os.path.isdir(os.path.join(path, "ckpt", ".removing"))


def run_of(path):
    """The run's folder, with config.json and the tokenizer, of `path`: a run, or one of its checkpoints."""
    if os.path.isfile(os.path.join(path, "model.safetensors")):
        return os.path.dirname(os.path.dirname(os.path.abspath(path)))
    return path


def load(folder, model, optimizer=None, device="cpu"):
    """Fills model (and optimizer) from a checkpoint; returns its progress."""
    model.load_state_dict(load_file(os.path.join(folder, "model.safetensors")))
    if optimizer is not None:
        state = torch.load(os.path.join(folder, "optimizer.pt"), map_location=device, weights_only=True)
        optimizer.load_state_dict(state)
    with open(os.path.join(folder, "progress.json")) as f:
        return json.load(f)


def write_json(path, value):
    """Writes beside `path` and renames, so that no reader ever sees half of it."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def _path(out_dir, step):
    return os.path.join(out_dir, "ckpt", f"step_{step:08d}")


def _all(out_dir):
    folder = os.path.join(out_dir, "ckpt")
    names = sorted(n for n in os.listdir(folder) if re.fullmatch(r"step_\d{8,}", n)) if os.path.isdir(folder) else []
    return [os.path.join(folder, n) for n in names]


def _remove(folder):
    """A checkpoint goes in one step, too: a kill must not leave half of it under its name."""
    going = _aside(folder)
    if os.path.isdir(going):
        shutil.rmtree(going)


def _aside(folder):
    """Where a checkpoint is, if there is one, when it no longer has its name."""
    going = os.path.join(os.path.dirname(folder), ".removing")
    shutil.rmtree(going, ignore_errors=True)  # of a run that was killed while it removed
    if os.path.isdir(folder):
        os.rename(folder, going)
    return going


def flush(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
