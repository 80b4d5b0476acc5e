"""Open a run's folder: choose the checkpoint to go on from, lock the folder, and record how the run was started.

    resume = choose_checkpoint(cfg, settings, thorough=True)         # refuses to mix or lose runs
    with start_folder(cfg, settings, dataset):                       # locked until the end
        ...

out_dir holds config.json, environment.json, metrics.jsonl, samples.jsonl, the tokenizer, ckpt/ and perhaps wandb/.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time

import torch

from runs import checkpoint
from runs.processes import warn
from runs.settings import refuse

# Settings that may change when a run goes on, because they do not change its steps. (max_seconds may change although
# it ends the cosine of decay_lr: a run that is given more time should use it.)
FREE = {
    "out_dir", "init_from", "overwrite", "max_seconds", "max_skipped", "eval_interval", "eval_tokens", "eval_only",
    "log_interval", "always_save_checkpoint", "sample_tokens", "baseline", "wandb", "wandb_log", "wandb_project",
    "wandb_run_name", "device", "backend", "timeout", "compile", "batch_size", "gradient_accumulation_steps",
    "activation_checkpointing",
}  # fmt: skip


def choose_checkpoint(cfg, settings, thorough):
    """Return the checkpoint of cfg.out_dir to go on from, or None to start anew; refuse to mix or lose runs.

    settings: those that config.json would hold for this start. thorough: compare checksums, not only sizes; rank 0
    does that, for all ranks.
    """
    latest = checkpoint.newest(cfg.out_dir, thorough, warn)
    if not latest and checkpoint.exists(cfg.out_dir) and not (cfg.init_from == "scratch" and cfg.overwrite):
        refuse(f"every checkpoint in {cfg.out_dir} is damaged: --init_from=scratch --overwrite=True starts anew")
    saved = None
    if os.path.exists(os.path.join(cfg.out_dir, "config.json")):
        try:
            saved = checkpoint.settings(cfg.out_dir)
        except ValueError as error:
            refuse(f"{error}: put it right, or move {cfg.out_dir} away")
    # torchrun and Slurm start a job again with the same command, which must not overwrite what the first start made
    again = any(int(os.environ.get(f"{name}_RESTART_COUNT") or 0) for name in ("TORCHELASTIC", "SLURM"))
    cfg.overwrite = cfg.overwrite and not again
    started_so = saved and not cfg.overwrite and saved["init_from"] == cfg.init_from
    goes_on = (again and saved) or cfg.init_from == "auto" or (started_so and cfg.init_from != "scratch")
    if not goes_on:
        if not cfg.eval_only:  # evaluating does not write to out_dir
            _refuse_to_lose(cfg)
        return None
    if latest and not saved:
        refuse(
            f"{cfg.out_dir} has checkpoints but no config.json, so its settings are not known: put it back, or choose "
            "another out_dir"
        )
    if latest:
        _refuse_other_settings(cfg.out_dir, saved, settings)
    if cfg.eval_only and not latest:
        refuse(f"no checkpoint in {cfg.out_dir} to evaluate (--init_from=scratch evaluates new weights)")
    return latest


def _refuse_to_lose(cfg):
    """Refuse to start anew in a folder with files, unless they may be renamed."""
    if not _has_files(cfg.out_dir):
        return
    if not cfg.overwrite:
        refuse(f"{cfg.out_dir} is not empty: --overwrite=True renames it and starts anew, or choose another out_dir")
    if os.path.realpath(cfg.init_from).startswith(os.path.realpath(cfg.out_dir)):
        refuse(f"init_from {cfg.init_from} is in out_dir {cfg.out_dir}, which would be renamed: choose another out_dir")


def _refuse_other_settings(out_dir, saved, settings):
    """Refuse to go on if a setting that is not FREE differs from the saved ones."""
    old, new = _flat(saved), _flat(settings)
    # the end of the cosine changes the steps before it, the end of training does not
    free = FREE | ({"max_iters", "lr_decay_iters"} if _end_of_cosine(saved) == _end_of_cosine(settings) else set())
    if changed := [key for key in new if key not in free and old.get(key, new[key]) != new[key]]:
        was, now = (" ".join(f"{key}={of[key]}" for key in changed) for of in (old, new))
        refuse(
            f"{out_dir} was trained with {was}, now {now}: go on with what it was, choose another out_dir, or "
            f"start anew with --init_from=scratch --overwrite=True"
        )


def _flat(settings):
    """Return all settings in one dict, the dataset by its name alone, because it may have been moved."""
    dataset = os.path.basename(os.path.normpath(settings["dataset"]))
    return {**settings, **settings["model"], "model": 0, "dataset": dataset}


def _end_of_cosine(settings):
    return (settings["lr_decay_iters"] or settings["max_iters"]) if settings["decay_lr"] else 0


def source_settings(init_from, dataset, left_out):
    """Return the model settings, except those in left_out, of the run in init_from whose weights are used.

    Returns {} where init_from is auto or scratch. Raises ValueError if there is no checkpoint in that folder, or if its
    vocabulary is not the dataset's.
    """
    if init_from in ("auto", "scratch"):
        return {}
    if not checkpoint.newest(init_from):
        raise ValueError(
            "init_from must be auto (nanoGPT's resume: goes on where out_dir left off), scratch or a folder with a "
            f"checkpoint, got {init_from!r}"
        )
    model = checkpoint.settings(checkpoint.run_of(init_from))["model"]
    if model["vocab_size"] != dataset.vocab_size:
        raise ValueError(
            f"{init_from} has a vocabulary of {model['vocab_size']}, the dataset {dataset.name} one of "
            f"{dataset.vocab_size}: prepare it with the same tokenizer"
        )
    return {name: value for name, value in model.items() if name not in left_out}


def load_source_weights(init_from, model):
    """Fill the model with the weights of the run in the folder init_from; refuse if they do not fit."""
    try:
        checkpoint.load(checkpoint.newest(init_from, True, warn, checkpoint.WEIGHTS), model)
    except RuntimeError as error:  # names or shapes differ
        refuse(f"the weights of {init_from} do not fit this model: {error}")


def start_folder(cfg, settings, dataset):
    """Make out_dir with config.json, environment.json and the tokenizer, so that it can be read without the data.

    With cfg.overwrite, a folder that has files is renamed first. Returns the lock on the folder, which lasts until it
    is closed, so that it serves in a `with` statement. Refuses a folder in which another process trains.
    """
    lock = lock_out_dir(cfg.out_dir)
    if cfg.overwrite and cfg.init_from != "auto" and _has_files(cfg.out_dir):
        n = 1
        while os.path.exists(f"{cfg.out_dir}.old-{n}"):
            n += 1
        os.rename(cfg.out_dir, f"{cfg.out_dir}.old-{n}")
        warn(f"what was in {cfg.out_dir} is {cfg.out_dir}.old-{n} now")
        lock.close()
        lock = lock_out_dir(cfg.out_dir)
    dataset.tokenizer.save(cfg.out_dir)
    checkpoint.write_json(os.path.join(cfg.out_dir, "config.json"), settings)
    path = os.path.join(cfg.out_dir, "environment.json")
    try:
        with open(path) as f:
            starts = json.load(f)
    except (OSError, ValueError):
        starts = []
    checkpoint.write_json(path, [*starts, environment()])
    return lock


def lock_out_dir(out_dir):
    """Lock a folder, made if it is missing, for as long as the returned file is open and this process lives."""
    os.makedirs(out_dir, exist_ok=True)
    lock = open(os.path.join(out_dir, ".lock"), "a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "another process"
        lock.close()
        refuse(f"{owner} is training in {out_dir}: stop it, or choose another out_dir")
    except OSError:  # a file system without locks
        return lock
    lock.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
    return lock


def fingerprint(dataset):
    """Return a hash of the dataset's shards and their order, the same wherever they lie."""
    splits = [{k: v for k, v in split.items() if k != "zarr"} for split in dataset.meta["splits"].values()]
    return hashlib.sha256(json.dumps([splits, dataset.eot]).encode()).hexdigest()[:16]


def environment():
    """Return the contents of environment.json: the command, this repository's commit, versions, machine and time."""
    folder = os.path.dirname(os.path.abspath(__file__))
    git = lambda *args: subprocess.run(["git", "-C", folder, *args], capture_output=True, text=True).stdout.strip()
    try:
        commit, changed = git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except OSError:  # no git
        commit, changed = "", False
    versions = {name: _version(name) for name in ("torch", "triton", "numpy", "safetensors", "wandb")}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return dict(
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"), command=sys.argv, commit=commit, changed=changed,
        python=sys.version.split()[0], versions=versions, cuda=torch.version.cuda, gpus=gpus,
        host=socket.gethostname(), world=int(os.environ.get("WORLD_SIZE", 1)),
    )  # fmt: skip


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_files(folder):
    return os.path.isdir(folder) and os.listdir(folder) not in ([], [".lock"])
