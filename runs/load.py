"""The one way into a run for the programs that use its model: choose the run, and load its newest whole checkpoint.

    folder, model, tokenizer, device, autocast = load_run(out_dir or newest_run())

A folder that export.py or transformers wrote has the model without the run: `load_folder`. No code in a folder is ever
run.
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
from .processes import warn
from .program import refuse
from .settings import choose_device, final_context
from .source import read_folder
from .starts import last_code


@waiting("reading the weights")
def load_run(path, device="auto", dtype="auto"):
    """Return the checkpoint's folder, its model, its tokenizer, the device and the autocast context to use.

    path: a run's folder, one of its checkpoints, or a folder that export.py or transformers wrote, which is then the
    "checkpoint's folder" too; device and dtype: settings as of train.py. Refuse what `load_checkpoint` and
    `load_folder` refuse.
    """
    device, dtype = choose_device(device, dtype)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    folder, model, tokenizer = load_folder(path) if transformers_type(path) else load_checkpoint(path)
    model = model.to(device).eval()
    with autocast:
        check_kernels_of_prompts(model)
    return folder, model, tokenizer, device, autocast


def load_checkpoint(path):
    """Return the folder of the newest whole checkpoint of a run, or of this checkpoint, its model and its tokenizer.

    The checksums of the weights are compared: a damaged checkpoint is named on stderr and left out for the one before
    it. If training removes it while it is read, a newer one is chosen. Refuse a run without a checkpoint, or with a
    config.json or tokenizer that cannot be read or does not fit.
    """
    run = checkpoint.run_of(path)
    while folder := checkpoint.newest(path, True, warn, checkpoint.WEIGHTS):
        try:
            settings, tokenizer = checkpoint.settings(run, folder), load_tokenizer(run)
            model = GPT(GPTConfig(**settings["model"]))
            checkpoint.load(folder, model)
            warn_of_changes(f"{run} was last trained with", last_code(folder))
            return folder, model, tokenizer
        except (DataError, FileNotFoundError) as error:
            if not checkpoint.damage(folder, False, checkpoint.WEIGHTS):  # nothing of it has gone
                refuse(error)
    refuse(no_checkpoint(path))


def load_folder(path):
    """Return the path of a folder that export.py or transformers wrote, its model and its tokenizer.

    A model of transformers that has more ids than its tokenizer has tokens loses them. Refuse a folder that is damaged,
    or has a model that this repository cannot have.
    """
    try:
        source = read_folder(path, read_json(os.path.join(path, "config.json")), path)
        if not os.path.exists(file := os.path.join(path, "tokenizer.json")):
            raise DataError(f"{file} is missing: AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH) writes it")
        encoding = read_huggingface(file)
        model = GPT(GPTConfig(**{**source.model, "vocab_size": encoding.n_vocab}))
        source.check(model.config, fresh=False)
        source.fill(model)
        tokenizer = Tokenizer("huggingface", encoding)
        if source.kind != "sympow":  # which was trained with an end of text before each text
            tokenizer.start = encoding.start_token
        return path, model, tokenizer
    except (OSError, ValueError) as error:
        refuse(error)


def transformers_type(path):
    """Return the model's type in a folder of transformers, "sympow" if export.py wrote it; "" for another folder."""
    with suppress(DataError, FileNotFoundError):
        return read_json(os.path.join(path, "config.json")).get("model_type", "")
    return ""


def longest_text(path):
    """Return how many tokens the model of a run, or of an exported folder, is to read at most; None for any number.

    Softmax has not learned distances beyond the training context, unless its window hides them, and learned positions
    end with their table. Power attention with rotary positions has no limit.
    """
    if transformers_type(path):
        return training_context(path) or None
    settings = checkpoint.settings(checkpoint.run_of(path))
    model, limits = settings["model"], []
    context = final_context(settings)
    if "softmax" in model["attention"].split(",") and not 0 < model["window"] <= context:
        limits.append(context)
    if model["positions"] == "learned":
        limits.append(model["n_positions"])
    return min(limits, default=None)


def training_context(path):
    """Return the final context of a run, or the one that config.json in a folder of transformers names, else 0."""
    if not transformers_type(path):
        return final_context(checkpoint.settings(checkpoint.run_of(path)))
    config = read_json(os.path.join(path, "config.json"))
    return int(config.get("max_position_embeddings") or 0)


def newest_run():
    """Return the run in out/ with the newest checkpoint; refuse if there is none."""
    if not (runs := trained_runs()):
        refuse("no run in out/: train one with `python train.py config/demo.py`, or name one with --out_dir")
    return runs[0]


def no_checkpoint(run):
    """Return a message that a run has no checkpoint, which names the runs that have one, or says what takes it."""
    if kind := transformers_type(run):
        return f"{run} is no run but a model of type {kind}: `python train.py --init_from={run} ...` makes a run of it"
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
