"""Open a run's folder: lock it, choose the checkpoint to resume from, and record how the run was started.

    lock = lock_out_dir(cfg.out_dir)                                 # if it has a checkpoint, before one is chosen
    latest, saved = choose_checkpoint(cfg, thorough=True)            # refuses to mix or lose runs
    refuse_other_settings(cfg, latest, saved, settings)      # if there is a latest checkpoint
    with start_folder(cfg, settings, dataset, latest, lock):         # locked until the end
        ...

out_dir holds config.json, environment.json, metrics.jsonl, samples.jsonl, the tokenizer, ckpt/ and perhaps wandb/.
"""

import json
import math
import os
import socket
import time
from dataclasses import fields

from sympow.code import TRAINING, short_hash, warn_of_changes
from ..data.files import lock_file, write_json
from ..data.mixture import Mixture
from . import checkpoint, starts
from .metrics import read_lines
from .processes import warn
from .program import refuse
from .settings import from_launcher

# Settings that may change when a run resumes, because they do not change its steps. max_seconds may change although it
# ends the schedule: a run that is given more time should use it. training/stages.py refuses a `then` that would change
# steps that were taken.
FREE = (
    {"out_dir", "init_from", "overwrite", "max_seconds", "max_skipped", "then", "gradient_accumulation_steps"}
    | {"eval_interval", "eval_tokens", "eval_only", "val_datasets", "log_interval", "sample_tokens"}
    | {"always_save_checkpoint", "device", "backend", "timeout", "activation_checkpointing"}
    | {"wandb", "wandb_log", "wandb_project", "wandb_run_name"}
)
# These do not change the steps either, unless there is dropout: each rank draws the masks for its own micro-batch, with
# the random numbers of its device, and torch.compile draws others. gradient_accumulation_steps follows from them.
FREE_WITHOUT_DROPOUT = {"batch_size", "ranks", "context_parallel", "device_type", "compile", "shard"}
# These do not change the result of an evaluation.
OF_TRAINING = {"distill_from", "distill_weight", "teacher"}
LOGS = (".log", ".out", ".err")  # files with these endings, which a shell or a scheduler opens, may lie in a new folder


def choose_checkpoint(cfg, thorough):
    """Return (the checkpoint of cfg.out_dir to resume from, the settings it was trained with), or (None, None).

    (None, None) starts anew. Refuses to mix or lose runs.

    thorough: compare checksums, not only sizes; rank 0 does that, for all ranks. Raises DataError if config.json cannot
    be read.
    """
    out_dir = cfg.out_dir
    saved = _saved_settings(cfg)
    # torchrun and Slurm start a job again with the same command, which must not overwrite what the first start made
    restarted = any(from_launcher(f"{name}_RESTART_COUNT") for name in ("TORCHELASTIC", "SLURM"))
    cfg.overwrite = cfg.overwrite and not restarted
    if cfg.overwrite and cfg.init_from == "auto":
        refuse("overwrite=True needs --init_from=scratch, or weights: init_from=auto resumes the run in out_dir")
    same_source = saved and os.path.realpath(saved["init_from"]) == os.path.realpath(cfg.init_from)
    same_command = same_source and cfg.init_from != "scratch" and not cfg.overwrite
    if not (cfg.init_from == "auto" or same_command or (restarted and saved)):
        if _has_steps(out_dir) and not (cfg.overwrite or cfg.eval_only):  # evaluating does not write to out_dir
            refuse(f"{out_dir} is not empty: --overwrite=True renames it and starts anew, or choose another out_dir")
        inside = f"{os.path.realpath(cfg.init_from)}/".startswith(f"{os.path.realpath(out_dir)}/")
        if cfg.overwrite and inside and _has_steps(out_dir):
            refuse(f"{cfg.init_from} is in out_dir {out_dir}, which would be renamed: choose another out_dir")
        return None, None
    latest = checkpoint.newest(out_dir, thorough, warn)
    if not latest and checkpoint.exists(out_dir):
        refuse(
            f"no checkpoint in {out_dir} can be used: --init_from=scratch --overwrite=True renames it and starts anew"
        )
    if cfg.eval_only and not latest:
        refuse(f"no checkpoint in {out_dir} to evaluate (--init_from=scratch evaluates new weights)")
    if not latest and not restarted and _count_evaluations(out_dir) > 1:  # a kill may come before the first checkpoint
        refuse(
            f"{out_dir} has evaluations but no checkpoint, so its steps would be taken again and their lines replaced: "
            "put ckpt/ back, or --init_from=scratch --overwrite=True renames it and starts anew"
        )
    return latest, checkpoint.settings(out_dir, latest) if latest else None


def _count_evaluations(out_dir):
    """Return the number of evaluations with a finite loss in metrics.jsonl; 0 if there is no such file."""
    lines = read_lines(os.path.join(out_dir, "metrics.jsonl"))
    return sum(math.isfinite(line.get("val_loss", math.nan)) for line in lines)


def _saved_settings(cfg):
    """Return the settings in out_dir's config.json, None in a new folder; refuse a folder that is no run's."""
    names = os.listdir(cfg.out_dir) if os.path.isdir(cfg.out_dir) else []
    if "config.json" in names or checkpoint.exists(cfg.out_dir):
        return checkpoint.settings(cfg.out_dir)
    foreign = [name for name in names if name != ".lock" and not name.endswith((".tmp", *LOGS))]
    if foreign and not cfg.eval_only:
        refuse(f"{cfg.out_dir} is not a run's folder, it has {min(foreign)} but no config.json: choose another out_dir")
    return None


def refuse_other_settings(cfg, latest, saved, settings):
    """Refuse to resume a run if a setting differs from the saved ones that would change its steps.

    If only the code is another than for the steps up to the checkpoint `latest`, rank 0 prints a warning. A run that
    began before there was a setting was trained with its default; `saved` has the model's defaults already.
    """
    old, new = ({**values, **values["model"], "model": None} for values in (saved, settings))
    old = {field.name: field.default for field in fields(cfg)} | old
    free = set(FREE)
    if new["schedule"] == "constant" or new["lr_decay_iters"]:  # then no rate depends on max_iters
        free |= {"max_iters"}
    if old["data"] == new["data"]:  # the dataset may have been moved or renamed
        free |= {"dataset"}
    if old.get("teacher") == new["teacher"]:
        free |= {"distill_from"}
    if new["eval_only"]:
        free |= OF_TRAINING
    if new["eval_only"] or not new["dropout"]:
        free |= FREE_WITHOUT_DROPOUT
    changed = [key for key in new if key not in free and old.get(key) != new[key]]
    if changed:
        was, now = (" ".join(f"{key}={values.get(key)}" for key in changed) for values in (old, new))
        reason = " (on which the dropout masks depend)" if FREE_WITHOUT_DROPOUT & {*changed} else ""
        if changed == ["max_iters"]:
            reason = f" (on which the rates of schedule={new['schedule']} depend)"
        refuse(
            f"{cfg.out_dir} was trained with {was}, now {now}{reason}: resume with what it was, choose another out_dir "
            f"(--init_from={cfg.out_dir} begins it with these weights if they fit), or start anew with "
            "--init_from=scratch --overwrite=True"
        )
    if from_launcher("RANK") == 0:
        warn_of_changes(f"{cfg.out_dir} was last trained with", starts.last_code(latest), TRAINING)


def start_folder(cfg, settings, dataset, latest, lock):
    """Make out_dir with config.json, environment.json and the tokenizer, so that it can be read without the data.

    With cfg.overwrite, a folder that has a run is renamed first. latest: the checkpoint to resume from, or None. lock:
    what lock_out_dir returned before a checkpoint was chosen, False if there was none. Returns the lock on the folder,
    which lasts until it is closed, so that it serves in a `with` statement. Refuses a folder in which another process
    trains or that cannot be written.
    """
    out_dir = os.path.realpath(cfg.out_dir)  # a link stays a link
    try:
        if not lock:
            lock = lock_out_dir(out_dir)
            if checkpoint.exists(out_dir):
                refuse(f"another process has begun a run in {cfg.out_dir}: the same command again resumes it")
        if cfg.overwrite and _has_steps(out_dir):
            _rename(out_dir)
            lock, old_lock = lock_out_dir(out_dir), lock
            old_lock.close()
        write_json(os.path.join(out_dir, "config.json"), {"version": checkpoint.VERSION, **settings})
        dataset.tokenizer.save(out_dir)
        starts.record_start(out_dir, checkpoint.step_of(latest) if latest else 0)
    except FileExistsError:
        refuse(f"out_dir {cfg.out_dir} is no folder, but a file: give the name of a folder, new or a run's")
    except OSError as error:
        refuse(f"cannot write to out_dir {cfg.out_dir}: {error}")
    return lock


def _rename(out_dir):
    """Rename a folder to the first free of NAME.old-1, NAME.old-2, ..."""
    n = 1
    while os.path.lexists(f"{out_dir}.old-{n}"):
        n += 1
    os.rename(out_dir, f"{out_dir}.old-{n}")
    warn(f"{out_dir} was renamed to {out_dir}.old-{n}")


def lock_out_dir(out_dir):
    """Lock a folder, made if it is missing, for as long as the returned file is open and this process lives."""
    path, owner = os.path.join(out_dir, ".lock"), "another process"
    for _ in range(20):  # a process that was just killed, or its child, may hold the lock for an instant
        os.makedirs(out_dir, exist_ok=True)
        file = open(path, "a+")
        if not lock_file(file):
            file.seek(0)
            owner = file.read().strip() or owner
            time.sleep(0.05)
        elif os.path.samestat(os.fstat(file.fileno()), os.stat(path)):  # else its last owner has renamed the folder
            file.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
            return file
    refuse(f"{owner} is training in {out_dir}: stop it, or choose another out_dir")


def fingerprint(dataset):
    """Return a hash of a dataset's shards and their order, the same wherever they lie.

    A Mixture's hash follows from its datasets' hashes and weights, in their order.
    """
    if isinstance(dataset, Mixture):
        parts = [[fingerprint(one), str(weight)] for one, weight in zip(dataset.sets.values(), dataset.weights)]
    else:
        parts = [list(dataset.meta["splits"].values()), dataset.eot]
    return short_hash(json.dumps(parts).encode())


def _has_steps(folder):
    """Return True if a run's folder has results: a checkpoint, or lines of metrics.jsonl."""
    log = os.path.join(folder, "metrics.jsonl")
    return checkpoint.exists(folder) or (os.path.isfile(log) and os.path.getsize(log) > 0)
