"""Write and read checkpoints: out_dir/ckpt/step_00001000/ with model.safetensors, optimizer.pt, progress.json and
checksums.json.

    with Writer(out_dir, ranks) as writer:
        writer.save(model, optimizer, progress)                  # copies the state; a thread writes the copy
    progress = load(newest(out_dir), model, optimizer, device)

A checkpoint is written under a temporary name, flushed to disk and renamed, so a checkpoint under its own name was
whole when it was renamed. Size and sha256 of each file show if it still is. Reading a checkpoint executes no code.

Of a sharded model each rank writes what it holds: model.1-of-4.safetensors and optimizer.1-of-4.safetensors for rank 0
of 4 (see parts.py); optimizer.pt then has only what is not sharded. Any number of ranks, sharded or not, reads either.
"""

import glob
import json
import math
import os
import re
import secrets
import shutil
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sympow.data.files import flush_to_disk, sha256_of, write_json
from sympow.model import GPTConfig
from sympow.runs.parts import PART, Tensors, is_sharded, own_rows, part_name, save_part, shard_like, unlike

WRITING = ".writing"  # a checkpoint has this name, or one that begins with it, until it is whole
KEEP = 2  # the newest checkpoints that are not removed; the best one is not removed either
FILES = ("model.safetensors", "optimizer.pt", "progress.json")
WEIGHTS = ("model", "progress")  # the beginnings of the names of the files that `load` reads without an optimizer
NOT_JSON = (ValueError, KeyError, TypeError, RecursionError)  # what reading a damaged JSON file may raise


class NotWritten(OSError):
    """Raised if a checkpoint could not be written, for example on a full disk. Older checkpoints are not affected."""


@dataclass
class Progress:
    """The progress of a run: the contents of progress.json."""

    step: int = 0  # optimizer steps taken
    seconds: float = 0.0  # spent in training: steps, evaluations, samples and checkpoints of all starts together
    best: float = math.inf  # lowest validation loss so far
    best_step: int = 0  # the step of the lowest loss
    wandb_id: str | None = None  # under which wandb knows the run
    skipped: tuple = (0, 0)  # steps skipped because their gradient was not finite: in all, and in a row up to this step
    evaluated: bool = True  # False if metrics.jsonl has no validation loss of this step, which may be due
    model: dict | None = None  # settings of the model, to notice damage of config.json
    stages: list | tuple = ()  # [context, steps before it] of each stage after the first that has begun
    context: int = 0  # of the validation losses, 0: block_size


class Writer:
    """Writes checkpoints while training goes on; training waits only while its state is copied into memory.

    A thread writes one checkpoint at a time. If that fails, every later call raises NotWritten. Used as a context
    manager, a Writer waits at the end for the last write, and reports its failure unless another error is on its way.
    Every rank has a Writer; those of ranks other than 0 write nothing unless the model is sharded.
    """

    def __init__(self, out_dir, ranks=None):
        self.out_dir, self.copies, self.writing = out_dir, {}, None
        self.rank, self.world, self.store = (ranks.rank, ranks.world, ranks.store) if ranks else (0, 1, None)
        self.thread, self.saves, self.stop = ThreadPoolExecutor(1), 0, threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is not None:
            self.stop.set()  # other ranks may never write their parts
        try:
            self.wait()
        except NotWritten:
            if error is None:
                raise

    def save(self, model, optimizer, progress):
        """Copy the state of model and optimizer and return while a thread writes it. Called on every rank.

        Waits first until the previous checkpoint is on disk.
        """
        self.wait()
        tensors, state = {"model": model.state_dict(), "optimizer": {}}, optimizer.state_dict()
        sharded = any(is_sharded(x) for x in tensors["model"].values())
        if self.rank and not sharded:
            return
        rest = {i: {} for i in state["state"]}  # of the optimizer's state: what is not sharded
        for i, of in state["state"].items():
            for k, x in of.items():
                if is_sharded(x):
                    tensors["optimizer"][f"{i}.{k}"] = x
                else:
                    rest[i][k] = self._copy((i, k), x)
        held = {kind: {name: own_rows(x) for name, x in of.items()} for kind, of in tensors.items()}
        copies = {kind: {n: self._copy((kind, n), x) for n, (x, _) in of.items()} for kind, of in held.items()}
        files = {} if sharded else {"model.safetensors": partial(save_file, copies["model"])}
        for kind, of in held.items() if sharded else ():
            first_rows = {name: first for name, (_, first) in of.items()}
            files[part_name(kind, self.rank, self.world)] = partial(save_part, copies[kind], first_rows)
        if not self.rank:
            files["optimizer.pt"] = partial(torch.save, {**state, "state": rest})
        self.saves += 1
        peers = Peers(self, self.saves) if sharded else None
        write = _write_part if self.rank else _write
        self.writing = self.thread.submit(write, self.out_dir, files, replace(progress), peers)

    def wait(self):
        """Block until the background write has finished; raise NotWritten if it failed."""
        if self.writing:
            self.writing.result()

    def check(self):
        """Raise NotWritten if the last write has finished and failed; never block."""
        if self.writing and self.writing.done():
            self.writing.result()

    def _copy(self, name, x):
        """Copy x into memory that the next checkpoint reuses, because allocating it takes longer than the copy."""
        if name not in self.copies:
            self.copies[name] = torch.empty(x.shape, dtype=x.dtype)
        return self.copies[name].copy_(x)


class Peers:
    """Lets the threads that write one checkpoint, one on each rank, hear of each other.

    They meet in torch.distributed's store, because no collective may run beside those of training.
    """

    def __init__(self, writer, number):
        self.rank, self.world, self.stop = writer.rank, writer.world, writer.stop
        self.store = dist.PrefixStore(f"checkpoint_{number}", writer.store)

    def tell(self, value):
        """Publish a JSON value of this rank: of rank 0 the folder, of the others the checksums of their files."""
        self.store.set(str(self.rank), json.dumps(value))

    def hear(self, rank):
        """Return what a rank has told, when it has; raise OSError if that is a failure, or if training has ended."""
        while not self.store.check([str(rank)]):  # a `get` that waits would hold up the other threads' use of the store
            if self.stop.wait(0.05):
                raise OSError(f"training has ended before rank {rank} had written its part")
        told = json.loads(self.store.get(str(rank)))
        if error := told.get("error"):
            raise OSError(f"rank {rank}: {error}")
        return told


def _write_files(folder, files):
    """Write files {name: function that takes the path} and flush them; return {name: {"bytes", "sha256"}}."""
    sums = {}
    for name, write in files.items():
        path = os.path.join(folder, name)
        write(path)
        flush_to_disk(path)
        sums[name] = {"bytes": os.path.getsize(path), "sha256": sha256_of(path)}
    return sums


def _write_part(out_dir, files, progress, peers):
    """Write the files of a rank other than 0 into the folder that rank 0 has made, and tell rank 0 their checksums."""
    try:
        folder = peers.hear(0)["folder"]
        os.makedirs(folder, exist_ok=True)  # on another node the new folder may not be visible yet
        peers.tell(_write_files(folder, files))
    except (OSError, RuntimeError, SafetensorError) as error:
        with suppress(RuntimeError):  # rank 0, which has the store, is gone
            peers.tell({"error": _first_line(error)})
        raise _not_written(out_dir, progress.step, error) from error


def _write(out_dir, files, progress, peers=None):
    """Write the checkpoint of progress.step; remove all but the newest KEEP and the best one.

    peers: of the ranks that write the parts of a sharded model. The name of the folder is another one each time then,
    so that a rank of an earlier start that still lives cannot write into it.
    """
    folder = os.path.join(out_dir, "ckpt")
    final = _path(out_dir, progress.step)
    temporary = os.path.join(folder, WRITING + (f"-{secrets.token_hex(4)}" if peers else ""))
    shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed while it wrote
    told = False
    try:
        os.makedirs(temporary)
        if peers:
            peers.tell({"folder": temporary})
            told = True
        sums = _write_files(temporary, {**files, "progress.json": lambda path: write_json(path, asdict(progress))})
        for rank in range(1, peers.world if peers else 1):
            sums |= peers.hear(rank)
        write_json(os.path.join(temporary, "checksums.json"), sums)
        flush_to_disk(os.path.join(temporary, "checksums.json"))
        flush_to_disk(temporary)
        if os.path.isdir(final):  # of the same step; after a kill before the next line, `newest` finds it aside
            _move_aside(final)
        os.rename(temporary, final)
        shutil.rmtree(_aside(final), ignore_errors=True)
        flush_to_disk(folder)
        # checkpoints of later steps are damaged, or this run would have started from one of them
        stay = [path for path in _all(out_dir) if path <= final][-KEEP:]
        for old in set(_all(out_dir)) - {*stay, _path(out_dir, progress.best_step)}:
            _remove(old)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, by three libraries
        if peers and not told:
            with suppress(RuntimeError):
                peers.tell({"error": _first_line(error)})
        shutil.rmtree(temporary, ignore_errors=True)
        raise _not_written(out_dir, progress.step, error) from error


def _first_line(error):
    return str(error).strip().splitlines()[0]


def _not_written(out_dir, step, error):
    """Return a NotWritten that says why the checkpoint of a step could not be written, and which one is left."""
    whole, why = newest(out_dir), _first_line(error)
    with suppress(OSError):  # out_dir is gone
        why += f"; {shutil.disk_usage(out_dir).free:,} bytes are free there"
    rest = f"{whole} is whole: the same command goes on from there" if whole else "there is no older one"
    return NotWritten(f"the checkpoint of step {step} could not be written ({why}); {rest}")


def remove_leftovers(out_dir, current, best_step):
    """Remove what a kill left in ckpt/ while it was written or cleared. Nothing is removed that `newest` may need.

    current: the checkpoint from which the run goes on, or None.
    """
    for half in glob.glob(os.path.join(glob.escape(out_dir), "ckpt", WRITING + "*")):
        shutil.rmtree(half, ignore_errors=True)
    if current not in (there := _all(out_dir))[-1:]:  # without a checkpoint, or beside damaged ones
        return
    shutil.rmtree(_aside(current), ignore_errors=True)
    for old in {*there[:-KEEP]} - {_path(out_dir, best_step)}:
        _remove(old)


def newest(path, thorough=False, log=lambda line: None, files=None):
    """Return the folder of the newest checkpoint at `path` that is whole, or None.

    path: a run's folder, or a checkpoint itself. thorough: compare checksums, not only sizes. log: called with a line
    for each damaged checkpoint. files: the beginnings of the names of the files that will be read, if not all of them.

    The last resort is a whole checkpoint that a kill left under the name `.removing`, while another took its place.
    """
    aside = _aside(_path(path, 0))
    there = [*reversed(_all(path)), *([aside] if os.path.isdir(aside) else [])]
    for folder in [path] if _is_checkpoint(path) else there:
        wrong = damage(folder, thorough, files)
        if not wrong:
            if thorough and not os.path.exists(os.path.join(folder, "checksums.json")):
                log(f"{folder} is of a version without checksums: only the form of its files was checked")
            return folder
        log(f"{folder} is damaged and left out: {wrong}")
    return None


def settings(run, folder=None):
    """Return the settings a run was trained with, from its config.json.

    folder: a checkpoint whose progress.json must name the same settings of the model. Raises ValueError if config.json
    cannot be read, or says something else than the checkpoint.
    """
    path = os.path.join(run, "config.json")
    try:
        with open(path) as f:
            found = json.load(f)
        for name, kind in (("model", dict), ("dataset", str), ("init_from", str), ("block_size", int)):
            _check_type(name, found[name], kind)
        _check_type("then", found.get("then", ""), str)
        check_model_settings(found["model"])
        for name, value in (read_progress(folder).model or {} if folder else {}).items():
            # what the weights mean does not depend on these two, of which the first may change when a run goes on
            if found["model"].get(name) != value and name not in ("activation_checkpointing", "dropout"):
                raise ValueError(f"it has {name}={found['model'].get(name)}, {folder} {name}={value}")
        return found
    except (OSError, *NOT_JSON) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}, which a run has beside its checkpoints, is missing or damaged ({why})") from None


def check_model_settings(model):
    """Raise KeyError or TypeError unless `model` is a dict of fields of GPTConfig, each of its type."""
    kinds = {of.name: of.type for of in fields(GPTConfig)}
    _check_type("model", model, dict)
    model["vocab_size"]
    for name, value in model.items():
        _check_type(name, value, kinds[name])


def _check_type(name, value, kind):
    if not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError(f"{name} is {str(value)[:50]!r}")


def damage(folder, thorough=True, files=None):
    """Return a text that says what is wrong with a checkpoint, or with these files of it; "" if nothing is.

    thorough: compare checksums, not only sizes. files: as `newest` takes them.
    """
    try:
        with open(os.path.join(folder, "checksums.json")) as f:
            sums = json.load(f)
        if not all({"bytes", "sha256"} <= of.keys() for of in sums.values()) or not sums.keys() >= _files(sums):
            return "checksums.json is not what was written"
    except FileNotFoundError:
        return _damage_without_checksums(folder)
    except (OSError, AttributeError, *NOT_JSON) as error:
        return f"checksums.json: {error}"
    for name in sorted(name for name in _files(sums) if not files or name.split(".")[0] in files):
        file, of = os.path.join(folder, name), sums[name]
        size = os.path.getsize(file) if os.path.exists(file) else None
        if size != of["bytes"]:
            return f"{name} " + ("is missing" if size is None else f"has {size:,} bytes instead of {of['bytes']}")
        try:
            if thorough and sha256_of(file) != of["sha256"]:
                return f"{name} is not what was written (sha256 differs)"
        except OSError as error:
            return f"{name}: {error}"
    return ""


def _files(sums):
    """Return the names of the files that a checkpoint must have, if `sums` are the checksums of some of them."""
    counts = [int(part[3]) for part in map(PART.fullmatch, sums) if part]
    if not counts:
        return {*FILES}
    parts = {part_name(kind, rank, counts[0]) for kind in ("model", "optimizer") for rank in range(counts[0])}
    return parts | {"optimizer.pt", "progress.json"}


def _damage_without_checksums(folder):
    """Return what `damage` does for a checkpoint without checksums.json, of which only the form can be checked.

    Versions that wrote no checksums did not count skipped steps either; in a later checkpoint the file was lost.
    """
    if missing := [name for name in FILES if not os.path.isfile(os.path.join(folder, name))]:
        return f"{missing[0]} is missing"
    try:
        with open(os.path.join(folder, "progress.json")) as f:
            if "skipped" in json.load(f):
                return "checksums.json is missing"
        with safe_open(os.path.join(folder, "model.safetensors"), "pt"):
            pass
    except (OSError, SafetensorError, *NOT_JSON) as error:
        return str(error).splitlines()[0]
    return "" if zipfile.is_zipfile(os.path.join(folder, "optimizer.pt")) else "optimizer.pt is not whole"


def exists(path):
    """Return True if a run's folder has any checkpoint, whole, damaged or half removed."""
    return bool(_all(path)) or os.path.isdir(_aside(_path(path, 0)))


def _is_checkpoint(path):
    return any(os.path.isfile(os.path.join(path, name)) for name in FILES)


def run_of(path):
    """Return the run's folder, which has config.json and the tokenizer, of a run or of one of its checkpoints."""
    if _is_checkpoint(path):
        return os.path.dirname(os.path.dirname(os.path.abspath(path)))
    return path


def load(folder, model, optimizer=None, device="cpu"):
    """Fill model (and optimizer) from a checkpoint and return its Progress.

    Either may be sharded, and so may the checkpoint. Raises RuntimeError if the weights are not those of the model.
    """
    own = model.state_dict()
    with Tensors(folder, "model") as saved, torch.no_grad():
        if wrong := unlike(saved.shapes, {name: [*x.shape] for name, x in own.items()}):
            raise RuntimeError(wrong)
        for name, x in own.items():
            saved.fill(name, x)
    if optimizer is not None:
        _load_optimizer(folder, optimizer, device)
    return read_progress(folder)


def _load_optimizer(folder, optimizer, device):
    """Fill an optimizer from a checkpoint; each rank reads the rows of the moments that its parameters have."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = any(map(is_sharded, parameters))
    options = dict(map_location="cpu", mmap=True) if sharded else dict(map_location=device)  # mmap: not all is read
    state = torch.load(os.path.join(folder, "optimizer.pt"), weights_only=True, **options)
    with Tensors(folder, "optimizer") as saved:
        for name in saved.shapes:
            i, _, k = name.partition(".")
            x = torch.empty_like(parameters[int(i)])
            saved.fill(name, x)
            state["state"][int(i)][k] = x
    if sharded:
        for i, of in state["state"].items():
            for k, x in of.items():
                of[k] = shard_like(parameters[i], x)
    optimizer.load_state_dict(state)


def read_progress(folder):
    """Return the Progress of a checkpoint; what a checkpoint of an earlier version lacks has its default."""
    with open(os.path.join(folder, "progress.json")) as f:
        saved = json.load(f)
    return Progress(**{of.name: saved[of.name] for of in fields(Progress) if of.name in saved})


def _path(out_dir, step):
    return os.path.join(out_dir, "ckpt", f"step_{step:08d}")


def _all(out_dir):
    """Return the paths of all checkpoints of a run, oldest first."""
    folder = os.path.join(out_dir, "ckpt")
    names = sorted(n for n in os.listdir(folder) if re.fullmatch(r"step_\d{8,}", n)) if os.path.isdir(folder) else []
    return [os.path.join(folder, n) for n in names]


def _remove(folder):
    """Remove a checkpoint; it loses its name in one step, so that a kill cannot leave half of it under that name."""
    _move_aside(folder)
    shutil.rmtree(_aside(folder))


def _move_aside(folder):
    """Rename a checkpoint, so that `newest` takes every other one before it."""
    shutil.rmtree(_aside(folder), ignore_errors=True)  # left by a run that was killed while it removed
    os.rename(folder, _aside(folder))


def _aside(folder):
    return os.path.join(os.path.dirname(folder), ".removing")
