"""The one way into a run for the programs that use its model: choose the run, and load its newest whole checkpoint.

    folder, model, tokenizer, device, autocast = load_run(out_dir or newest_run())

A folder that export.py wrote has the model without the run: `load_exported`. No code in a folder is ever run.
"""

import glob
import os
from contextlib import suppress

import torch

from sympow.code import warn_of_changes
from ..data import DataError
from ..data.files import read_json
from ..data.huggingface import read_huggingface
from ..data.progress import waiting
from ..data.tokenizer import Tokenizer, load_tokenizer
from ..model import GPT, GPTConfig
from . import checkpoint
from .machine import check_kernels_of_prompts
from .parts import Tensors
from .processes import warn
from .program import refuse
from .settings import choose_device, final_context
from .source import exported_settings
from .starts import last_code


@waiting("reading the weights")
def load_run(path, device="auto", dtype="auto"):
    """Return the checkpoint's folder, its model, its tokenizer, the device and the autocast context to use.

    path: a run's folder or one of its checkpoints; device and dtype: settings as of train.py. The checksums of the
    weights are compared: a damaged checkpoint is named on stderr and left out for the one before it. If training
    removes it while it is read, a newer one is chosen. Refuse a run without a checkpoint, or with a config.json or
    tokenizer that cannot be read or does not fit.
    """
    run, (device, autocast) = checkpoint.run_of(path), choose_precision(device, dtype)
    while folder := checkpoint.newest(path, True, warn, checkpoint.WEIGHTS):
        try:
            settings, tokenizer = checkpoint.settings(run, folder), load_tokenizer(run)
            model = GPT(GPTConfig(**settings["model"]))
            checkpoint.load(folder, model)
            warn_of_changes(f"{run} was last trained with", last_code(folder))
            model = model.to(device).eval()
            with autocast:
                check_kernels_of_prompts(model)
            return folder, model, tokenizer, device, autocast
        except (DataError, FileNotFoundError) as error:
            if not checkpoint.damage(folder, False, checkpoint.WEIGHTS):  # nothing of it has gone
                refuse(error)
    refuse(no_checkpoint(path))


def load_exported(path, device):
    """Return the model and the tokenizer in a folder that export.py wrote.

    Raises ValueError or RuntimeError if the folder is damaged.
    """
    settings = exported_settings(read_json(os.path.join(path, "config.json")), path)
    model, tokenizer = GPT(GPTConfig(**settings)), read_huggingface(os.path.join(path, "tokenizer.json"))
    with Tensors(path, "model") as saved:
        model.load_state_dict({name.removeprefix("gpt."): saved.read(name) for name in saved.shapes})
    if tokenizer.n_vocab != model.config.vocab_size:
        raise DataError("its tokenizer has another number of tokens than its model")
    return model.to(device).eval(), Tokenizer("huggingface", tokenizer)


def choose_precision(device, dtype):
    """Return the device and the autocast context for two settings."""
    device, dtype = choose_device(device, dtype)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device
    return device, torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def transformers_type(path):
    """Return the model's type in a folder of transformers, "sympow" if export.py wrote it; "" for another folder."""
    with suppress(DataError, FileNotFoundError):
        return read_json(os.path.join(path, "config.json")).get("model_type", "")
    return ""


def is_exported(path):
    """Return True for a folder that export.py has written."""
    return transformers_type(path) == "sympow"


def longest_text(path):
    """Return how many tokens the model of a run, or of an exported folder, is to read at most; None for any number.

    Softmax has not learned distances beyond the training context, unless its window hides them, and learned positions
    end with their table. Power attention with rotary positions has no limit.
    """
    if is_exported(path):
        limit = read_json(os.path.join(path, "config.json")).get("max_position_embeddings")
        return limit and int(limit)
    settings = checkpoint.settings(checkpoint.run_of(path))
    model, limits = settings["model"], []
    context = final_context(settings)
    if "softmax" in model["attention"].split(",") and not 0 < model["window"] <= context:
        limits.append(context)
    if model["positions"] == "learned":
        limits.append(model["n_positions"])
    return min(limits, default=None)


def newest_run():
    """Return the run in out/ with the newest checkpoint; refuse if there is none."""
    if not (runs := trained_runs()):
        refuse("no run in out/: train one with `python train.py config/demo.py`, or name one with --out_dir")
    return runs[0]


def no_checkpoint(run):
    """Return a message that a run has no checkpoint, which names the runs that have one, or says what takes it."""
    if is_exported(run):
        return f"{run} is an exported model: name its run here (evaluate.py --tasks and train.py --init_from take it)"
    if checkpoint.exists(run):
        return f"no checkpoint in {run} can be used"
    if os.path.exists(os.path.join(run, "config.json")):
        return f"no checkpoint in {run} yet: training writes one after each evaluation (--eval_interval)"
    runs = ", ".join(trained_runs())
    remedy = f"there is one in {runs}" if runs else "train one with `python train.py config/demo.py`"
    return f"no checkpoint in {run}: {remedy}"


def trained_runs():
    """Return the folders in out/ that have a checkpoint, the one with the newest first."""
    newest = {run: checkpoint.newest(run) for run in sorted(glob.glob("out/*"))}
    return sorted(filter(newest.get, newest), key=lambda run: os.path.getmtime(newest[run]), reverse=True)
