"""Report the problems of this machine, and how to fix them.

    make doctor                   # or: python doctor.py
    python -m sympow.doctor       # where the package is installed

Prints one line each for Python, torch, Triton, the GPUs, the C compiler and the packages, then a verdict. On a GPU,
every kernel is compared with float64, output and gradients; that takes up to three minutes, most of them to compile.
The exit status is 0 if all is well (a machine without a GPU is well), 1 if something is wrong.

`examine` looks at the machine. `describe` and `judge` are pure functions of the Machine that it returns, so that tests
can ask about machines on which they do not run.
"""

from __future__ import annotations  # so that an older Python gets to the line that says it is too old

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

PYTHON = (3, 11)  # the oldest that works
TORCH = "torch>=2.11,<2.14"  # as in requirements.txt
REQUIRED = ["numpy", "safetensors", "tqdm"]  # the programs need these, and parts of them the rest of requirements.txt
REQUIREMENTS = Path(__file__).with_name("requirements.txt")  # is missing where the package is installed
OLDEST_DRIVER = {12: 525, 13: 580}  # for each major version of CUDA
WHEELS = "https://download.pytorch.org/whl"
PIP = f"{sys.executable} -m pip install"


@dataclass
class Machine:
    """Holds what `examine` sees. The defaults describe a machine without a GPU on which all is well."""

    python: tuple = PYTHON
    torch: str | None = "2.13.0"  # version; None if it cannot be imported
    torch_error: str = ""  # why it cannot be imported, or why it cannot start CUDA
    cuda_build: str | None = None  # version of CUDA that torch was built for; None for a CPU build
    torch_gpus: list[str] = field(default_factory=list)
    driver: str | None = None  # version of NVIDIA's driver
    gpus: list[str] = field(default_factory=list)  # that nvidia-smi lists
    triton: str | None = "3.7.0"
    compiler: str | None = "cc"
    has_python_h: bool = True
    packages: dict[str, str | None] = field(default_factory=dict)  # {name: version or None}
    trials: dict[str, str] = field(default_factory=dict)  # {what was tried on the GPU: what is wrong, or ""}


def examine():
    """Look at this machine, compare the kernels with float64 if it has a GPU, and return the Machine."""
    machine = Machine(
        python=sys.version_info[:2],
        triton=find_version("triton"),
        compiler=shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang"),
        has_python_h=Path(sysconfig.get_paths()["include"], "Python.h").exists(),
        packages={name: find_version(name) for name in list_packages()},
    )
    examine_driver(machine)
    examine_torch(machine)
    if machine.torch_gpus and not find_problems(machine):
        print("comparing the kernels with float64 (up to three minutes, to compile them) ...", file=sys.stderr)
        machine.trials = try_kernels()
    return machine


def find_version(package):
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def list_packages():
    """Return the names of the packages in requirements.txt, besides torch and Triton; none if there is no such file."""
    lines = REQUIREMENTS.read_text().splitlines() if REQUIREMENTS.exists() else []
    names = [re.match(r"[\w-]+", line)[0] for line in lines]
    return [name for name in names if name not in ("torch", "triton")]


def examine_driver(machine):
    """Fill in the version of NVIDIA's driver and the GPUs that nvidia-smi lists."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # there is no driver, or no GPU
        return
    for line in listing.splitlines():
        gpu, _, machine.driver = line.rpartition(", ")
        machine.gpus.append(gpu)


def examine_torch(machine):
    """Fill in the version of torch, its CUDA and the GPUs that it sees, or why it cannot be imported."""
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything, such as OSError for a missing library
        machine.torch, machine.torch_error = None, last_line(error)
        return
    machine.torch, machine.cuda_build = torch.__version__, torch.version.cuda
    try:
        torch.cuda.init()
    except Exception as error:  # a CPU build, no GPU, or a GPU that this torch cannot use
        machine.torch_error = last_line(error)
        return
    machine.torch_gpus = [str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]


def last_line(error):
    """Return the last line of an exception's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def try_kernels():
    """Compare the kernels with float64; return {a kernel, its size and errors: what is wrong, or ""}.

    Sizes that the kernels do not support on this GPU are left out.
    """
    trials = {}
    try:
        import torch

        from sympow.attention.operator.check import check_all
        from sympow.kernels import unsupported_reason

        if reason := unsupported_reason("quadratic", torch.bfloat16, 64, 64, 2):
            return {"kernels": reason}
        for line, ok in check_all():
            trials[line] = "" if ok else "too far from float64"
        if importlib.util.find_spec("sympow.generation"):  # programs may not be installed
            trials |= try_generation()
    except Exception as error:
        trials["kernels"] = f"{type(error).__name__}: {last_line(error)}"
    return trials


def try_generation():
    """Compare one layer of the decoder with the model in float64; return what `try_kernels` does.

    Each kernel and each branch of the power is tried at least once.
    """
    import torch

    from sympow.attention import ATTENTIONS
    from sympow.generation.decoder import TOLERANCE, measure_errors
    from sympow.model import GPTConfig

    trials = {}
    powers = dict(sympow=2, sympow_gating=2, conformal_sympow=4, even_power=6, softmax=2, heinsen=2)
    for dtype in (torch.bfloat16, torch.float32):
        for attention, p in powers.items():
            config = GPTConfig(n_layer=1, n_head=4, n_embd=128, vocab_size=257, attention=attention, p=p)
            errors = measure_errors(config, ATTENTIONS[attention], dtype, torch.float32)
            ok = all(error <= TOLERANCE[dtype] for error in errors)  # NaN is not
            name = f"generation {dtype} {attention} D=32 p={p}: logits {max(errors):.1e}"
            trials[name] = "" if ok else "too far from float64"
    return trials


def describe(machine):
    """Return a (label, value) pair for each line of the report."""
    build = f"CUDA {machine.cuda_build} build" if machine.cuda_build else "no CUDA build"
    return [
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
        ("torch", f"{machine.torch} ({build})" if machine.torch else f"missing ({machine.torch_error})"),
        ("Triton", machine.triton or "missing"),
        ("NVIDIA driver", machine.driver or "none"),
        *((f"GPU {i}, nvidia-smi", gpu) for i, gpu in enumerate(machine.gpus)),
        *((f"GPU {i}, torch", gpu) for i, gpu in enumerate(machine.torch_gpus)),
        ("C compiler", machine.compiler or "missing"),
        ("Python.h", "installed" if machine.has_python_h else "missing"),
        *(
            (name, version or "missing: run pip install -r requirements.txt")
            for name, version in machine.packages.items()
        ),
    ]


def find_problems(machine):
    """Return one line for each thing that is wrong: what it is, and how to fix it."""
    problems = []
    if machine.python < PYTHON:
        problems.append("Python is too old: install Python 3.11 or later, remove .venv and run make env")
    if machine.torch is None:
        problems.append(f'torch cannot be imported ({machine.torch_error}): run {PIP} --force-reinstall "{TORCH}"')
    elif not (2, 11) <= release(machine.torch) < (2, 14):
        problems.append(f'torch {machine.torch} is not the version needed: run {PIP} "{TORCH}"')
    missing = [name for name in REQUIRED if name in machine.packages and not machine.packages[name]]
    if missing:
        problems.append(f"required packages are missing: run {PIP} {' '.join(missing)}")
    if machine.torch and machine.gpus and not machine.torch_gpus:
        problems.append(explain_unseen_gpu(machine))
    if machine.torch_gpus and machine.triton is None:
        problems.append(
            f'Triton is missing, without which the kernels cannot run: run {PIP} --force-reinstall "{TORCH}"'
        )
    if machine.compiler is None:
        problems.append("no C compiler, which torch.compile needs: run apt install gcc g++, or conda install gxx")
    if not machine.has_python_h:
        problems.append("no Python.h, which torch.compile needs: run apt install python3-dev, or take conda's Python")
    for name, error in machine.trials.items():
        if error:
            problems.append(f"{name}: {error}; PyTorch takes the place of these kernels, slower")
    return problems


def release(version):
    """Return the numbers of a version as a tuple, to be compared."""
    return tuple(map(int, re.findall(r"\d+", version)))


def explain_unseen_gpu(machine):
    """Return the line about a GPU that nvidia-smi sees and torch does not."""
    driver = release(machine.driver)
    index = "cu130" if driver >= (OLDEST_DRIVER[13],) else "cu126"
    fix = f'run {PIP} --force-reinstall "{TORCH}" --index-url {WHEELS}/{index}'
    if machine.cuda_build is None:
        return f"nvidia-smi sees a GPU but this torch is a CPU build: {fix}"
    oldest = OLDEST_DRIVER.get(release(machine.cuda_build)[0], 0)
    if driver and driver < (oldest,):
        return (
            f"driver {machine.driver} is too old for torch's CUDA {machine.cuda_build}, which needs {oldest} or later: "
            f"update the driver, or {fix}"
        )
    return (
        f"nvidia-smi sees a GPU but torch cannot use it ({machine.torch_error}): check CUDA_VISIBLE_DEVICES, restart "
        f"the machine, or {fix}"
    )


def judge(machine):
    """Return (lines, exit status): all problems and 1, or what was tried and 0."""
    problems = find_problems(machine)
    if problems:
        return [f"WRONG: {line}" for line in problems], 1
    lines = [f"ok: {name}" for name in machine.trials]
    if not machine.torch_gpus:
        lines.append("no GPU: everything runs in plain PyTorch, slower")
    return [*lines, "all well"], 0


def main():
    parser = argparse.ArgumentParser(prog="doctor.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write_checked", action="store_true", help="note in the package what passes on this GPU")
    args, unknown = parser.parse_known_args()
    if unknown:
        parser.exit(2, f"doctor.py: unrecognized arguments: {' '.join(unknown)}\n")
    machine = examine()
    for label, value in describe(machine):
        print(f"{label:<18} {value}")
    lines, status = judge(machine)
    print("\nverdict", *lines, sep="\n  ")
    if args.write_checked and status == 0:
        from sympow.attention.operator.check import write_packaged

        write_packaged()
    return status


if __name__ == "__main__":
    sys.exit(main())
