"""Open a run's folder: choose the checkpoint to go on from, lock the folder, and record how the run was started.

    latest, saved = choose_checkpoint(cfg, dataset, thorough=True)   # refuses to mix or lose runs
    refuse_other_settings(cfg.out_dir, saved, settings, latest)      # if there is a latest checkpoint
    with start_folder(cfg, settings, dataset):                       # locked until the end
        ...

out_dir holds config.json, environment.json, metrics.jsonl, samples.jsonl, the tokenizer, ckpt/ and perhaps wandb/.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import torch

from sympow.data.files import write_json
from sympow.data.mixture import Mixture, sets_of
from sympow.runs import checkpoint
from sympow.training.optimizer import learning_rate
from sympow.runs.processes import warn
from sympow.runs.settings import from_launcher, refuse

# Settings that may change when a run goes on, because they do not change its steps. (max_seconds may change although
# it ends the schedule: a run that is given more time should use it. training/stages.py refuses a `then` that would
# change steps that were taken.)
FREE = {
    "out_dir", "init_from", "overwrite", "max_seconds", "max_skipped", "eval_interval", "eval_tokens", "eval_only",
    "log_interval", "always_save_checkpoint", "sample_tokens", "baseline", "wandb", "wandb_log", "wandb_project",
    "wandb_run_name", "wandb_group", "wandb_tags", "device", "backend", "timeout", "gradient_accumulation_steps",
    "activation_checkpointing", "then", "profile", "val_datasets",
}  # fmt: skip
# These do not change the steps either, unless there is dropout: each rank draws the masks for its own micro-batch, with
# the random numbers of its device, and torch.compile draws others. (gradient_accumulation_steps follows from them.)
FREE_WITHOUT_DROPOUT = {"batch_size", "ranks", "context_parallel", "device_type", "compile", "shard"}
# These do not change what an evaluation finds.
OF_TRAINING = {"distill_from", "distill_weight", "teacher"}
# These may change if every step so far had the learning rate that the new ones give.
SCHEDULE = {"schedule", "learning_rate", "warmup_iters", "min_lr", "decay_share", "lr_decay_iters", "max_iters"}
LOGS = (".log", ".out", ".err")  # files with these endings, which a shell or a scheduler opens, may lie in a new folder


def choose_checkpoint(cfg, dataset, thorough):
    """Return (the checkpoint of cfg.out_dir to go on from, the settings it was trained with), or (None, None) to start
    anew; refuse to mix or lose runs.

    thorough: compare checksums, not only sizes; rank 0 does that, for all ranks.
    """
    out_dir = cfg.out_dir
    saved = _saved_settings(cfg)
    _refuse_rising_rate(cfg, saved)
    # torchrun and Slurm start a job again with the same command, which must not overwrite what the first start made
    again = any(from_launcher(f"{name}_RESTART_COUNT") for name in ("TORCHELASTIC", "SLURM"))
    cfg.overwrite = cfg.overwrite and not again
    started_so = saved and not cfg.overwrite and _same_path(saved["init_from"], cfg.init_from)
    goes_on = (again and saved) or cfg.init_from == "auto" or (started_so and cfg.init_from != "scratch")
    if not goes_on:
        if not cfg.eval_only:  # evaluating does not write to out_dir
            _refuse_to_lose(cfg, dataset)
        return None, None
    latest = checkpoint.newest(out_dir, thorough, warn)
    if not latest and checkpoint.exists(out_dir):
        refuse(f"every checkpoint in {out_dir} is damaged: --init_from=scratch --overwrite=True starts anew")
    if latest and not saved:
        refuse(
            f"{out_dir} has checkpoints but no config.json, so its settings are not known: put it back, or choose "
            "another out_dir"
        )
    if cfg.eval_only and not latest:
        refuse(f"no checkpoint in {out_dir} to evaluate (--init_from=scratch evaluates new weights)")
    if not latest and not again and _evaluations(out_dir) > 1:  # after the first, a kill may come before the checkpoint
        refuse(
            f"{out_dir} has evaluations but no checkpoint, so its steps would be taken again and their lines replaced: "
            "put ckpt/ back, or --init_from=scratch --overwrite=True renames it and starts anew"
        )
    return latest, _read_settings(out_dir, latest) if latest else None


def _refuse_rising_rate(cfg, saved):
    """Refuse a schedule that would end above learning_rate, unless the run has had it since an earlier version."""
    known = saved and (saved.get("min_lr"), saved.get("learning_rate")) == (cfg.min_lr, cfg.learning_rate)
    if cfg.schedule != "constant" and cfg.min_lr > cfg.learning_rate and not known:
        refuse(
            f"min_lr must be at most learning_rate={cfg.learning_rate:g}, since schedule={cfg.schedule} goes down to "
            f"it, got {cfg.min_lr:g}: give --min_lr={cfg.learning_rate / 10:g}, say"
        )


def _saved_settings(cfg):
    """Return the settings in out_dir's config.json, None without one; refuse a folder that is no run's, unless it is
    new."""
    try:
        names = os.listdir(cfg.out_dir)
    except FileNotFoundError:
        names = []
    except OSError as error:  # a file, a name that is too long, or no permission
        refuse(f"out_dir {cfg.out_dir} cannot be used: {error.strerror}")
    if "config.json" in names:
        return _read_settings(cfg.out_dir)
    foreign = [name for name in names if name != ".lock" and not name.endswith((".tmp", *LOGS))]
    if foreign and not checkpoint.exists(cfg.out_dir) and not cfg.eval_only:
        inside = ", ".join(sorted(foreign)[:3]) + (", ..." if foreign[3:] else "")
        refuse(f"{cfg.out_dir} is not a run's folder, it has no config.json but {inside}: choose another out_dir")
    return None


def _read_settings(out_dir, latest=None):
    """Return the settings in out_dir's config.json; refuse if it is damaged, or not of the checkpoint `latest`."""
    try:
        return checkpoint.settings(out_dir, latest)
    except ValueError as error:
        refuse(f"{error}: put it right, or choose another out_dir")


def _evaluations(out_dir):
    """Return the number of evaluations with a finite loss in metrics.jsonl; 0 if there is no such file."""
    with suppress(FileNotFoundError), open(os.path.join(out_dir, "metrics.jsonl"), "rb") as f:
        return sum(re.search(rb'"val_loss": -?\d', line) is not None for line in f)
    return 0


def _refuse_to_lose(cfg, dataset):
    """Refuse to start anew in a folder with a run, unless it may be renamed."""
    out_dir = cfg.out_dir
    if not _has_steps(out_dir):
        return
    if not cfg.overwrite:
        refuse(f"{out_dir} is not empty: --overwrite=True renames it and starts anew, or choose another out_dir")
    source = {} if cfg.init_from == "scratch" else {f"init_from {cfg.init_from}": cfg.init_from}
    data = {f"the dataset {one.path}": one.path for one in sets_of(dataset).values()}
    for what, path in {**source, **data, "the current folder": "."}.items():
        if os.path.commonpath([os.path.realpath(path), os.path.realpath(out_dir)]) == os.path.realpath(out_dir):
            refuse(f"{what} is in out_dir {out_dir}, which would be renamed: choose another out_dir")


def refuse_other_settings(out_dir, saved, settings, latest):
    """Refuse to go on from the checkpoint `latest` if a setting differs from the saved ones that would change the run's
    steps."""
    new = _flat(settings)
    # what a run of an earlier version lacks is as it is now, but for what that version could not do
    earlier = {"positions": "rotary", "embedding_norm": True, "activation": "gelu"}
    model = {**settings["model"], **earlier, **saved["model"]}
    earlier = {"optimizer": "adamw", "schedule": "cosine" if saved.get("decay_lr") else "constant"}
    earlier |= {"distill_from": "", "teacher": ""}
    old = _flat({**settings, **earlier, **saved, "model": model})
    changed = {key for key in SCHEDULE if old[key] != new[key]}
    free = FREE | (changed if changed and _same_rates(old, new, checkpoint.read_progress(latest).step) else set())
    if old["data"] == new["data"]:  # which may have been moved or renamed
        free |= {"dataset"}
    if new["eval_only"]:
        free |= OF_TRAINING
    if old["teacher"] == new["teacher"]:
        free |= {"distill_from"} if new["teacher"] else {"distill_weight"}
    if new["eval_only"] or not new["dropout"]:
        free |= FREE_WITHOUT_DROPOUT
    if changed := [key for key in new if key not in free and old[key] != new[key]]:
        was, now = (" ".join(f"{key}={of[key]}" for key in changed) for of in (old, new))
        masks = " (on which the dropout masks depend)" if FREE_WITHOUT_DROPOUT & {*changed} else ""
        refuse(
            f"{out_dir} was trained with {was}, now {now}{masks}: go on with what it was, choose another out_dir, or "
            f"start anew with --init_from=scratch --overwrite=True"
        )


def _flat(settings):
    """Return all settings in one dict: the dataset without its path, compile=auto on a CPU as what it means there."""
    dataset = ",".join(os.path.basename(os.path.normpath(part)) for part in settings["dataset"].split(","))
    flat = {**settings, **settings["model"], "model": 0, "dataset": dataset}
    if flat.get("device_type") == "cpu" and flat.get("compile") == "auto":
        flat["compile"] = "False"
    return flat


def _same_rates(old, new, steps):
    """Return True if both settings give each of the first `steps` steps the same learning rate.

    If the time may have lowered those rates, True only if both mean the same schedule.
    """
    if old["max_seconds"] and old["schedule"] != "constant":
        ends = [of["lr_decay_iters"] or of["max_iters"] for of in (old, new)]
        return ends[0] == ends[1] and all(old[key] == new[key] for key in SCHEDULE - {"lr_decay_iters", "max_iters"})
    a, b = (SimpleNamespace(**{key: of[key] for key in (*SCHEDULE, "max_seconds")}) for of in (old, new))
    try:
        return all(learning_rate(step, a) == learning_rate(step, b) for step in range(steps))
    except (TypeError, ZeroDivisionError):  # config.json was edited
        return False


def _same_path(a, b):
    return os.path.normpath(a) == os.path.normpath(b) or os.path.realpath(a) == os.path.realpath(b)


def start_folder(cfg, settings, dataset):
    """Make out_dir with config.json, environment.json and the tokenizer, so that it can be read without the data.

    With cfg.overwrite, a folder that has a run is renamed first. Returns the lock on the folder, which lasts until it
    is closed, so that it serves in a `with` statement. Refuses a folder in which another process trains or that cannot
    be written, of which nothing is left then.
    """
    lock, made = lock_out_dir(cfg.out_dir)
    try:
        if cfg.overwrite and cfg.init_from != "auto" and _has_steps(cfg.out_dir):
            _rename(cfg.out_dir)
            lock.close()
            lock, made = lock_out_dir(cfg.out_dir)
        _remove_temporary_files(cfg.out_dir)
        write_json(os.path.join(cfg.out_dir, "config.json"), settings)
        dataset.tokenizer.save(cfg.out_dir)
        _record_environment(os.path.join(cfg.out_dir, "environment.json"))
    except OSError as error:
        _remove_folders(made)
        refuse(f"cannot write to out_dir {cfg.out_dir}: {error}")
    return lock


def _remove_temporary_files(out_dir):
    """Remove what a start that was killed left of files that it was writing.

    Those of the last minute stay, because another program may be writing a picture or a state here.
    """
    for name in os.listdir(out_dir):
        path = os.path.join(out_dir, name)
        if re.fullmatch(r"\.[0-9a-f]{12}\.tmp", name) and os.path.getmtime(path) < time.time() - 60:
            os.remove(path)


def _rename(out_dir):
    """Rename a folder to the first free of NAME.old-1, NAME.old-2, ..."""
    n = 1
    while os.path.lexists(f"{out_dir}.old-{n}"):
        n += 1
    os.rename(out_dir, f"{out_dir}.old-{n}")
    warn(f"what was in {out_dir} is {out_dir}.old-{n} now")


def lock_out_dir(out_dir):
    """Lock a folder, made if it is missing, for as long as the returned file is open and this process lives.

    Returns (that file, the folders that were made, the innermost first).
    """
    made, folder = [], os.path.abspath(out_dir)
    while not os.path.lexists(folder):
        made.append(folder)
        folder = os.path.dirname(folder)
    try:
        os.makedirs(out_dir, exist_ok=True)
        lock = open(os.path.join(out_dir, ".lock"), "a+", errors="replace")
    except OSError as error:
        _remove_folders(made)
        refuse(f"out_dir {out_dir} cannot be made or written: {error.strerror}")
    until = time.monotonic() + 1  # a process that was just killed, or its child, may hold the lock for an instant
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.05)
                continue
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            lock.close()
            refuse(f"{owner} is training in {out_dir}: stop it, or choose another out_dir")
        except OSError:  # a file system without locks
            return lock, made
    lock.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
    return lock, made


def _remove_folders(made):
    """Remove folders that this start made, the innermost, with what is in it, first."""
    if made:
        shutil.rmtree(made[0], ignore_errors=True)
    with suppress(OSError):  # somebody else uses it too
        for folder in made[1:]:
            os.rmdir(folder)


def fingerprint(dataset):
    """Return a hash of the dataset's shards and their order, the same wherever they lie; of a Mixture, one of its
    datasets' hashes and weights, in their order."""
    if isinstance(dataset, Mixture):
        parts = [[fingerprint(one), str(weight)] for one, weight in zip(dataset.sets.values(), dataset.weights)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    splits = [{k: v for k, v in split.items() if k != "zarr"} for split in dataset.meta["splits"].values()]
    return hashlib.sha256(json.dumps([splits, dataset.eot]).encode()).hexdigest()[:16]


def _record_environment(path):
    """Append this start to environment.json, a list of all starts."""
    try:
        with open(path) as f:
            starts = json.load(f)
    except (OSError, *checkpoint.NOT_JSON):
        starts = []
    write_json(path, [*(starts if isinstance(starts, list) else []), environment()])


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
        host=socket.gethostname(), world=from_launcher("WORLD_SIZE", 1),
    )  # fmt: skip


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_steps(folder):
    """Return True if a run's folder has results: a checkpoint, or lines of metrics.jsonl."""
    log = os.path.join(folder, "metrics.jsonl")
    return checkpoint.exists(folder) or (os.path.isfile(log) and os.path.getsize(log) > 0)
