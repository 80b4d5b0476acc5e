"""Checkpoints: out_dir/ckpt/step_00001000/ with model.safetensors, optimizer.pt and progress.json.

Written under a temporary name, flushed to disk and renamed: a checkpoint under its own name is whole. Reading one
executes no code.
"""

import json
import os
import re
import shutil

import torch
from safetensors.torch import load_file, save_file

from data.shards import write_atomically

KEEP = 2  # newest checkpoints that stay


def save(out_dir, model, optimizer, progress):
    """Writes the checkpoint of progress["step"]; the newest KEEP stay, and that of progress["best_step"]."""
    folder = os.path.join(out_dir, "ckpt")
    final = _path(out_dir, progress["step"])
    temporary = os.path.join(folder, ".writing")
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed while it wrote
    os.makedirs(temporary)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, os.path.join(temporary, "model.safetensors"))
    torch.save(optimizer.state_dict(), os.path.join(temporary, "optimizer.pt"))
    write_json(os.path.join(temporary, "progress.json"), progress)
    for name in os.listdir(temporary):
        _flush(os.path.join(temporary, name))
    _flush(temporary)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(temporary, final)
    _flush(folder)
    for old in _all(out_dir)[:-KEEP]:
        if old != _path(out_dir, progress["best_step"]):
            shutil.rmtree(old)


def newest(path):
    """The checkpoint to read at `path`, a run's folder or a checkpoint itself; None if there is none."""
    if os.path.isfile(os.path.join(path, "model.safetensors")):
        return path
    found = _all(path)
    return found[-1] if found else None


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


def _flush(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
