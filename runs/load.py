"""Load the model of a run, and choose the run.

model, tokenizer, device, autocast = load_run("out/demo", checkpoint.newest("out/demo"), cfg)
"""

import glob
import os
from contextlib import nullcontext

import torch

from data.tokenizer import load_tokenizer
from model import GPT, GPTConfig
from runs import checkpoint
from runs.settings import choose_device, refuse


def load_run(run, folder, cfg):
    """Return the model of a checkpoint, its tokenizer, the device and the autocast context to use.

    run: the run's folder; folder: that of the checkpoint; cfg has the settings device and dtype.
    """
    try:
        saved = checkpoint.settings(run)["model"]
    except ValueError as error:
        refuse(error)
    device, dtype = choose_device(cfg.device, cfg.dtype)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device
    model = GPT(GPTConfig(**saved))
    checkpoint.load(folder, model)
    model.to(device).eval()
    autocast = torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext()
    return model, load_tokenizer(run), device, autocast


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
    return [run for run in sorted(glob.glob("out/*")) if checkpoint.newest(run)]
