"""The one way into a run for the programs that use its model: choose the run, and load its newest whole checkpoint.

run, model, tokenizer, device, autocast = load_run(cfg.out_dir or newest_run(), cfg)
"""

import glob
import os
from contextlib import nullcontext

import torch

from data import DataError
from data.tokenizer import load_tokenizer
from model import GPT, GPTConfig
from runs import checkpoint
from runs.processes import warn
from runs.settings import choose_device, refuse


def load_run(path, cfg):
    """Return the run's folder, its model, its tokenizer, the device and the autocast context to use.

    path: a run's folder or one of its checkpoints; cfg has the settings device and dtype. The checksums of the weights
    are compared: a damaged checkpoint is named on stderr and left out for the one before it. Refuse a run without a
    checkpoint, or with a config.json or tokenizer that cannot be read or does not fit.
    """
    folder, run = checkpoint.newest(path, True, warn, checkpoint.WEIGHTS), checkpoint.run_of(path)
    if not folder:
        refuse(no_checkpoint(path))
    try:
        saved = checkpoint.settings(run, folder)["model"]
    except ValueError as error:
        refuse(error)
    device, dtype = choose_device(cfg.device, cfg.dtype)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device
    try:
        model = GPT(GPTConfig(**saved))
        checkpoint.load(folder, model)
    except (TypeError, ValueError, RuntimeError) as error:  # settings of no model, or of one with other weights
        refuse(f"{folder} does not fit the settings in {run}/config.json: {error}")
    model.to(device).eval()
    autocast = torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext()
    try:
        return run, model, load_tokenizer(run), device, autocast
    except DataError as error:
        refuse(error)


def newest_run():
    """Return the run in out/ with the newest checkpoint; refuse if there is none."""
    if not (runs := trained_runs()):
        refuse("no run in out/: train one with `python train.py config/demo.py`, or name one with --out_dir")
    return max(runs, key=lambda r: os.path.getmtime(checkpoint.newest(r)))


def no_checkpoint(run):
    """Return a message that a run has no checkpoint, which names the runs that have one."""
    runs = ", ".join(trained_runs())
    other = f"there is one in {runs}" if runs else "train one with `python train.py config/demo.py`"
    return f"no checkpoint in {run}: {other}"


def trained_runs():
    """Return the folders in out/ that have a checkpoint."""
    return [run for run in sorted(glob.glob("out/*")) if checkpoint.newest(run)]
