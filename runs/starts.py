"""Record how each start of a run began: the command, the commit, the versions and the machine.

    record_start(out_dir)                # appends environment() to environment.json, a list of all starts
"""

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import torch

from sympow.data.files import write_json
from sympow.runs.settings import from_launcher


def record_start(out_dir):
    """Append this start to environment.json, a list of all starts; begin a new list if the file cannot be read."""
    path = os.path.join(out_dir, "environment.json")
    try:
        with open(path) as f:
            starts = json.load(f)
    except (OSError, ValueError):
        starts = []
    write_json(path, [*starts, environment()])


def environment():
    """Return one start of environment.json: the command, this repository's commit, versions, machine and time."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in ("torch", "triton", "numpy", "safetensors", "wandb")},
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "host": socket.gethostname(),
        "world": from_launcher("WORLD_SIZE", 1),
    }


def _git(*arguments):
    """Return what git prints for this repository, "" without git."""
    if not shutil.which("git"):
        return ""
    command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
