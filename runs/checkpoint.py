"""Write and read checkpoints: out_dir/ckpt/step_00001000/ with model.safetensors, optimizer.safetensors, progress.json
and checksums.json.

    with Writer(out_dir, ranks) as writer:
        writer.save(model, optimizer, progress)                  # copies the state; a thread writes the copy
    progress = load(newest(out_dir), model, optimizer)

A checkpoint is written under a temporary name, flushed to disk and renamed, so a checkpoint under its own name was
whole when it was renamed. The size and sha256 of each file show whether it still is. Reading a checkpoint executes no
code.

Each rank writes its rows of a sharded model: rank 0 of 4 writes model.1-of-4.safetensors and
optimizer.1-of-4.safetensors (see parts.py). Any number of ranks, sharded or not, reads either form.
"""

import glob
import json
import math
import os
import re
import secrets
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..attention.variant import with_defaults
from ..data import DataError
from ..data.files import flush_to_disk, read_json, sha256_of, write_json
from ..data.huggingface import one_line
from ..model import GPTConfig
from .parts import (
    OR_REMOVED,
    Tensors,
    compare_shapes,
    is_sharded,
    own_rows,
    part_name,
    read_shapes,
    save_part,
    shapes_of,
)
from .settings import final_context

VERSION = 1  # of config.json and progress.json; files of another version are refused
WRITING = ".writing-"  # the name of a checkpoint begins with this until it is whole
OLD = ".old"  # the name of a checkpoint ends with this while its step is being saved again
STEP = re.compile(r"step_\d{8,}(\.old)?")
KEEP = 2  # the newest checkpoints that are not removed; the best one is not removed either
FILES = ("model", "optimizer", "progress")  # the beginnings of the names of a checkpoint's files
WEIGHTS = ("model", "progress")  # those that `load` reads without an optimizer
CHANGEABLE = {"activation_checkpointing": None, "dropout": None}  # the weights mean the same with other values


class NotWritten(OSError):
    """Raised if a checkpoint could not be written, for example on a full disk. Older checkpoints are not affected."""


@dataclass
class Progress:
    """The progress of a run: the contents of progress.json."""

    step: int = 0  # optimizer steps taken
    seconds: float = 0.0  # spent in training: steps, evaluations, samples and checkpoints of all starts together
    best: float = math.inf  # lowest validation loss so far
    best_step: int = 0  # the step of the lowest loss
    skipped: tuple = (0, 0)  # steps skipped because their gradient was not finite: in all, and in a row up to this step
    evaluated: bool = True  # False if metrics.jsonl has no validation loss of this step, which may be due
    model: dict | None = None  # settings of the model, to notice damage of config.json
    stages: list | tuple = ()  # [context, steps before it] of each stage after the first that has begun
    context: int = 0  # of the validation losses


class Writer:
    """Writes checkpoints into out_dir, a folder that is there, while training goes on.

    Training waits only while its state is copied into memory.

    A thread writes one checkpoint at a time. If that fails, every later call raises NotWritten. Used as a context
    manager, a Writer waits at the end for the last write, and reports its failure unless another error is on its way.
    Every rank has a Writer. Ranks other than 0 write nothing unless the model is sharded.
    """

    def __init__(self, out_dir, ranks=None):
        self.out_dir, self.copies, self.writing = out_dir, {"model": {}, "optimizer": {}}, None
        self.rank, self.world, self.store = (ranks.rank, ranks.world, ranks.store) if ranks else (0, 1, None)
        self.thread, self.stop = ThreadPoolExecutor(1), threading.Event()
        self.saves, self.sharded = 0, False

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
        weights, state = model.state_dict(), optimizer.state_dict()["state"]
        moments = {f"{i}.{key}": x for i, tensors in state.items() for key, x in tensors.items()}
        self.sharded = any(map(is_sharded, weights.values()))
        if self.rank and not self.sharded:
            return
        self.saves += 1
        progress = replace(progress)  # training changes its own
        files = {**self._copy_tensors("model", weights), **self._copy_tensors("optimizer", moments)}
        self.writing = self.thread.submit(self._write, files, progress)

    def wait(self):
        """Block until the background write has finished; raise NotWritten if it failed."""
        if self.writing:
            self.writing.result()

    def check(self):
        """Raise NotWritten if the last write has finished and failed; never block."""
        if self.writing and self.writing.done():
            self.wait()

    def _copy_tensors(self, kind, tensors):
        """Copy this rank's rows of tensors; return {name of the file: function that writes them to a path}.

        The next checkpoint reuses the memory, because allocating it takes longer than the copy.
        """
        copies, first_rows = self.copies[kind], {}
        for name, x in tensors.items():
            rows, first_rows[name] = own_rows(x)
            if name not in copies:
                copies[name] = torch.empty(rows.shape, dtype=rows.dtype)
            copies[name].copy_(rows)
        if self.sharded:
            return {part_name(kind, self.rank, self.world): partial(save_part, copies, first_rows)}
        return {f"{kind}.safetensors": partial(save_file, copies)}

    def _write(self, files, progress):
        """Write this rank's files of a checkpoint, and on rank 0 complete it. Raises NotWritten if that fails."""
        try:
            if self.rank:
                folder = self._hear(0)["folder"]
                os.makedirs(folder, exist_ok=True)  # on another node the new folder may not be visible yet
                self._tell(_write_files(folder, files))
            else:
                self._write_checkpoint(files, progress)
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, by three libraries
            with suppress(RuntimeError):  # rank 0, which has the store, is gone
                self._tell({"error": str(error)})
            older = newest(self.out_dir)
            remedy = f"{older} is whole: the same command resumes from there" if older else "there is no older one"
            message = f"the checkpoint of step {progress.step} could not be written ({error}); {remedy}"
            raise NotWritten(message) from error

    def _write_checkpoint(self, files, progress):
        """Write the checkpoint of progress.step; remove all but the newest KEEP and the best one.

        The temporary name is random, so that a rank of an earlier start that still lives cannot write into the folder.
        """
        path = _path(self.out_dir, progress.step)
        temporary = os.path.join(self.out_dir, "ckpt", WRITING + secrets.token_hex(4))
        os.stat(self.out_dir)  # if it is gone, training ends
        os.makedirs(temporary)
        try:
            self._tell({"folder": temporary})
            contents = {"version": VERSION, **asdict(progress)}
            sums = _write_files(temporary, {**files, "progress.json": lambda file: write_json(file, contents)})
            for rank in range(1, self.world if self.sharded else 1):
                sums |= self._hear(rank)
            write_json(os.path.join(temporary, "checksums.json"), sums)
            flush_to_disk(temporary)
            if os.path.isdir(path):  # the same step, which stays readable until the new one has its name
                shutil.rmtree(path + OLD, ignore_errors=True)
                os.rename(path, path + OLD)
            os.rename(temporary, path)
            flush_to_disk(os.path.dirname(path))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _clean(self.out_dir, path, progress.best_step)  # later ones are damaged, or the run would have begun there

    def _tell(self, value):
        """Publish a JSON value of this rank: the folder on rank 0, the checksums of its files on the others.

        The threads of a sharded model meet in torch.distributed's store, because no collective may run beside training.
        """
        if self.sharded:
            self.store.set(f"checkpoint_{self.saves}/{self.rank}", json.dumps(value))

    def _hear(self, rank):
        """Wait for the value of a rank and return it; raise OSError if that rank failed, or if training has ended."""
        key = f"checkpoint_{self.saves}/{rank}"
        while not self.store.check([key]):  # a `get` that waits would hold up the other threads' use of the store
            if self.stop.wait(0.05):
                raise OSError(f"training has ended before rank {rank} had written its part")
        value = json.loads(self.store.get(key))
        if error := value.get("error"):
            raise OSError(f"rank {rank}: {error}")
        return value


def _write_files(folder, files):
    """Write files {name: function that takes the path} and flush them; return {name: {"bytes", "sha256"}}."""
    sums = {}
    for name, write in files.items():
        path = os.path.join(folder, name)
        write(path)
        flush_to_disk(path)
        sums[name] = {"bytes": os.path.getsize(path), "sha256": sha256_of(path)}
    return sums


def remove_leftovers(out_dir, current, best_step):
    """Remove from ckpt/ what a kill left: half-written checkpoints and, beside the newest one, superfluous ones.

    current: the checkpoint from which the run resumes, or None. Where a newer one is damaged, all others stay.
    """
    for path in glob.glob(os.path.join(glob.escape(out_dir), "ckpt", f"{WRITING}*")):
        shutil.rmtree(path, ignore_errors=True)
    if current in _all(out_dir)[-1:]:
        _clean(out_dir, current, best_step)


def _clean(out_dir, current, best_step):
    """Remove all checkpoints but the newest KEEP up to the path `current`, and the best one.

    A kill may leave one half removed, which its checksums tell.
    """
    checkpoints = [path for path in _all(out_dir) if path <= current and not path.endswith(OLD)]
    staying = {current, _path(out_dir, best_step), *checkpoints[-KEEP:]}
    folder = os.path.join(out_dir, "ckpt")
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if path not in staying and (STEP.fullmatch(name) or name.startswith(WRITING)):
            shutil.rmtree(path, ignore_errors=True)


def newest(path, thorough=False, log=lambda line: None, files=FILES):
    """Return the folder of the newest checkpoint at `path` that is whole, or None.

    path: a run's folder, or a checkpoint itself. log: called with a line for each that is left out. thorough, files:
    as `damage` takes them. If training removes one meanwhile, since it has newer ones, the choice begins again.
    """
    for folder in [path] if _is_checkpoint(path) else reversed(_all(path)):
        problem = damage(folder, thorough, files)
        if not problem:
            return folder
        if not os.path.lexists(folder):
            return newest(path, thorough, log, files)
        log(f"{folder} is left out: {problem}")
    return None


def damage(folder, thorough=True, files=FILES):
    """Return a text that says why a checkpoint, or these files in it, cannot be used; "" if they can.

    thorough: compare all checksums and the names and shapes of all tensors, not only sizes and progress.json. files:
    the beginnings of the names of the files that will be read; with "progress" the weights must fit its model.
    """
    try:
        for name, file in read_json(os.path.join(folder, "checksums.json")).items():
            if name.split(".")[0] not in (*files, "progress"):
                continue
            path = os.path.join(folder, name)
            thoroughly = thorough or name == "progress.json"
            if os.path.getsize(path) != file["bytes"] or (thoroughly and sha256_of(path) != file["sha256"]):
                return f"{name} is not what was written"
        model = read_progress(folder).model
        shapes = {kind: read_shapes(folder, kind) for kind in files if thorough and kind != "progress"}
        if shapes and model and "progress" in files:
            if difference := compare_shapes(shapes["model"], shapes_of(GPTConfig(**model))):
                return (
                    f"its weights are not those of this model.py ({difference}); --init_from={folder} takes what fits"
                )
    except FileNotFoundError as error:
        return f"{os.path.basename(error.filename)} is missing"
    except (KeyError, TypeError, AttributeError):
        return "checksums.json or progress.json is not what was written"
    except (OSError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def exists(path):
    """Return True if a run's folder has any checkpoint, whole or damaged."""
    return bool(_all(path))


def step_of(folder):
    """Return the step of a checkpoint, from the name of its folder."""
    return int(re.search(r"step_(\d+)", os.path.basename(folder))[1])


def run_of(path):
    """Return the run's folder, which has config.json and the tokenizer, of a run or of one of its checkpoints."""
    return os.path.dirname(os.path.dirname(os.path.abspath(path))) if _is_checkpoint(path) else path


def settings(run, folder=None):
    """Return the contents of a run's config.json. Settings of the model that it lacks have their defaults.

    folder: a checkpoint, which must name the same settings of the model. Raises DataError if config.json cannot be
    read, is of another version, or differs from the checkpoint.
    """
    path = os.path.join(run, "config.json")
    contents = _read_versioned(path)
    with one_line(path, "is damaged"):
        contents["model"] = with_defaults(GPTConfig, contents["model"])
        final_context(contents)
        GPTConfig(**contents["model"])
    model = read_progress(folder).model if folder else None
    if model and {**model, **CHANGEABLE} != {**contents["model"], **CHANGEABLE}:
        raise DataError(f"{path} is damaged: the model in it is not that of {folder}")
    return contents


def read_progress(folder):
    """Return the Progress of a checkpoint, its model with later defaults.

    Raises DataError if it is of another version, or none that a run makes.
    """
    path = os.path.join(folder, "progress.json")
    contents = _read_versioned(path)
    contents.pop("moments", None)  # of earlier versions
    with suppress(TypeError, ValueError):
        progress = Progress(**contents)
        progress.model = progress.model and with_defaults(GPTConfig, progress.model)
        return progress
    raise DataError(f"{path} is damaged: it is no run's progress")


def _read_versioned(path):
    """Return the contents of a JSON file without its version. Raises DataError if it is missing or of another one."""
    try:
        contents = read_json(path)
    except FileNotFoundError:
        raise DataError(f"{path}, which a run has beside its checkpoints, is missing{OR_REMOVED}") from None
    if (version := contents.pop("version", None)) != VERSION:
        raise DataError(f"{path} is of version {version}, and this program reads version {VERSION}")
    return contents


def load(folder, model, optimizer=None):
    """Fill model (and optimizer) from a checkpoint and return its Progress.

    Either may be sharded, and so may the checkpoint. The model is one with the settings in progress.json: `damage`
    says whether the weights fit it.
    """
    with Tensors(folder, "model") as saved, torch.no_grad():
        for name, x in model.state_dict().items():
            saved.fill(name, x)
    if optimizer is not None:
        _load_optimizer(folder, optimizer)
    return read_progress(folder)


def _load_optimizer(folder, optimizer):
    """Fill an optimizer from a checkpoint; each rank reads the rows of the moments that its parameters have."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    with Tensors(folder, "optimizer") as saved, torch.no_grad():
        for name, shape in saved.shapes.items():
            i, _, key = name.partition(".")
            parameter = parameters[int(i)]
            x = torch.empty_like(parameter) if shape == [*parameter.shape] else torch.empty(shape)
            saved.fill(name, x)
            state.setdefault(int(i), {})[key] = x
    state = {i: state[i] for i in sorted(state)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _is_checkpoint(path):
    return os.path.isfile(os.path.join(path, "progress.json"))


def _path(out_dir, step):
    return os.path.join(out_dir, "ckpt", f"step_{step:08d}")


def _all(out_dir):
    """Return the paths of all checkpoints of a run, oldest first."""
    folder = os.path.join(out_dir, "ckpt")
    names = filter(STEP.fullmatch, os.listdir(folder)) if os.path.isdir(folder) else []
    names = sorted(names, key=lambda name: (name.removesuffix(OLD), not name.endswith(OLD)))
    return [os.path.join(folder, name) for name in names]
