"""Record how each start of a run began, with its code.

    record_start(out_dir, step)
    warn_of_changes("out/a was last trained with", last_code("out/a/ckpt/step_00000100"))       # of sympow/code.py

environment.json is a list of all starts. In each of them `step` is the step from which it resumed, `commit` and `diff`,
a file for `git apply`, make the code again, and `code` is its record (sympow/code.py).
"""

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from sympow.code import record_code, short_hash
from ..data.files import write_atomically, write_json
from .checkpoint import run_of, step_of
from .processes import warn
from .settings import from_launcher

ROOT = Path(__file__).resolve().parents[1]  # of this repository
# print what differs from the commit, new files of Python too, whatever git's settings are
DIFF = (
    "git read-tree HEAD && git add --intent-to-add -- '*.py' && "
    "git diff --binary --no-ext-diff --no-color --src-prefix=a/ --dst-prefix=b/ --unified=3 HEAD"
)


def record_start(out_dir, step):
    """Append this start, from a step on, to environment.json, and write its diff; begin a new list if the file cannot
    be read."""
    start = environment() | {"step": step}
    if not start["commit"]:
        warn("the commit and what differs from it are not kept: git does not read this folder as a repository")
    elif diff := _diff():
        start["diff"] = f"code-{short_hash(diff)}.diff"  # equal ones are one file
        write_atomically(os.path.join(out_dir, start["diff"]), diff)
    starts = [*read_starts(out_dir), start | {"code": record_code()}]
    write_json(os.path.join(out_dir, "environment.json"), starts)


def read_starts(run):
    """Return the starts in a run's environment.json; none if the file is missing or damaged."""
    try:
        with open(os.path.join(run, "environment.json")) as f:
            return [{"step": 0, "code": {}} | start for start in json.load(f)]
    except (OSError, ValueError, TypeError):
        return []


def codes_of(run, step):
    """Return the records of the code that took the steps of a run up to `step`, in order.

    A start is left out if it took no step, or was killed before it saved one.
    """
    starts = read_starts(run)
    ends = [*(start["step"] for start in starts[1:]), step]
    return [start["code"] for start, end in zip(starts, ends) if start["step"] < end and start["code"]]


def last_code(checkpoint):
    """Return the record of the code that took the last step before a checkpoint, None if it is not known."""
    return ([None] + codes_of(run_of(checkpoint), step_of(checkpoint)))[-1]


def environment():
    """Return one start of environment.json: the command, this repository's commit, versions, machine and time."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "commit": _commit(),
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in ("torch", "triton", "numpy", "safetensors", "wandb")},
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "host": socket.gethostname(),
        "world": from_launcher("WORLD_SIZE", 1),
    }


def _commit():
    """Return the commit of this repository, "" if git does not read its folder or finds it in another repository."""
    way_to_top, _, commit = _shell("git rev-parse --show-cdup HEAD").decode().partition("\n")
    return "" if way_to_top else commit.strip()


def _diff():
    """Return what DIFF prints; git's own index stays as it is."""
    with TemporaryDirectory() as folder:
        return _shell(DIFF, GIT_INDEX_FILE=os.path.join(folder, "index"), GIT_DIFF_OPTS="")


def _shell(command, **env):
    """Return the bytes that a command prints in this repository; none if there is no such command."""
    return subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, env=os.environ | env).stdout


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
