"""Profile one step of training: a trace for Perfetto, and a table of the operators that cost most.

    with profile_step(trainer):
        trainer.train_step()

With --profile=STEP rank 0 writes trace_step_STEP.json.gz into the run's folder; https://ui.perfetto.dev opens it.
"""

import gzip
import os
import shutil
import tempfile
from contextlib import contextmanager

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sympow.data.files import whole_file

FIRST = 3  # a step that is never the first of a start from nothing, in which torch.compile works, nor the next


def check(cfg):
    """Raise ValueError if the step of cfg.profile will not be taken, or is one that cannot stand for others."""
    if cfg.profile and cfg.eval_only:
        raise ValueError(f"profile={cfg.profile} is a step of training, and eval_only takes none")
    if cfg.profile and not FIRST <= cfg.profile <= cfg.max_iters:
        raise ValueError(f"profile must be 0 (none) or a step from {FIRST} to {cfg.max_iters}, got {cfg.profile}")


@contextmanager
def profile_step(trainer):
    """Write the trace of the step that is taken within, if it is the one of the setting `profile` and this is rank 0.

    A step that a signal cuts short, and one that an error ends, leaves no trace.
    """
    cfg, progress = trainer.cfg, trainer.progress
    if not trainer.records or cfg.profile != progress.step + 1:
        yield
        return
    with profiler(trainer.device) as found:
        yield
    if progress.step != cfg.profile:
        return
    trainer.ranks.beat()
    path = os.path.join(cfg.out_dir, f"trace_step_{progress.step}.json.gz")
    try:
        write_trace(found, path)
        trainer.ranks.log(f"step {progress.step}: wrote {path}\n{costliest(found, trainer.device)}")
    except OSError as error:  # a full disk is no reason to end training
        trainer.ranks.log(f"step {progress.step}: cannot write {path}: {error}")
    trainer.ranks.beat()


@contextmanager
def profiler(device):
    """Record what is run within, on the CPU and on the device, as a torch.profiler.profile."""
    gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as found:
        if gpu:
            torch.cuda.synchronize(device)  # what was launched before is not of this step
        yield found
        if gpu:
            torch.cuda.synchronize(device)


def write_trace(found, path):
    """Write the trace of a profile as gzipped JSON, whole or not at all."""
    with tempfile.TemporaryDirectory() as folder:
        plain = os.path.join(folder, "trace.json")
        found.export_chrome_trace(plain)
        with whole_file(path) as temporary, open(plain, "rb") as f, gzip.open(temporary, "wb", compresslevel=5) as g:
            shutil.copyfileobj(f, g)


def costliest(found, device, rows=10):
    """Return a table of the kernels that took most of a GPU's time; on a CPU, of the operators, without the time of
    operators that they call."""
    gpu = device.type == "cuda"
    kind, time = (DeviceType.CUDA, "self_device_time_total") if gpu else (DeviceType.CPU, "self_cpu_time_total")
    events = [(getattr(x, time), x) for x in found.key_averages() if x.device_type == kind and not x.is_user_annotation]
    total = sum(microseconds for microseconds, _ in events) or 1.0
    lines = [f"{'ms':>10} {'share':>6} {'calls':>6}  {'kernel' if gpu else 'operator'}"]
    for microseconds, x in sorted(events, key=lambda event: -event[0])[:rows]:
        lines.append(f"{microseconds / 1000:>10.3f} {microseconds / total:>6.1%} {x.count:>6}  {x.key[:90]}")
    return "\n".join(lines)
