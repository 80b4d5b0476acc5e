"""Report the problems of this machine, and how to fix them.

    make doctor                   # or: python doctor.py
    python -m sympow.doctor       # where the package is installed

Prints what torch.utils.collect_env finds, then a verdict. On a GPU, every kernel is compared with float64, output and
gradients; that takes up to three minutes, most of them to compile. The exit status is 0 if all is well (a machine
without a GPU is well), 1 if something is wrong.
"""

import argparse
import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path

PYTHON = (3, 11)  # the oldest that works
TORCH = "torch>=2.11,<2.16"  # as in requirements.txt
REQUIRED = ["numpy", "safetensors", "tqdm"]  # the programs need these, and parts of them the rest of requirements.txt
PIP = f"{sys.executable} -m pip install"
INSTALL_TORCH = f'run {PIP} --force-reinstall "{TORCH}"'


def find_problems(environment):
    """Return one line for each thing that is wrong: what it is, and how to fix it.

    environment: a SystemEnv of torch.utils.collect_env.
    """
    problems = []
    low, high = map(release, TORCH.split(","))
    if not low <= release(environment.torch_version) < high:
        problems.append(f"torch {environment.torch_version} is not the version needed: {INSTALL_TORCH}")
    in_clone = Path(__file__).resolve().with_name("train.py").exists()  # the installed package has no programs
    if missing := [name for name in REQUIRED if in_clone and not importlib.util.find_spec(name)]:
        problems.append(f"required packages are missing: run {PIP} {' '.join(missing)}")
    on_gpu = sees_gpu(environment)
    if environment.nvidia_gpu_models and not on_gpu:
        problems.append(
            f"nvidia-smi sees a GPU, but torch {environment.torch_version}, built for CUDA "
            f"{environment.cuda_compiled_version}, cannot use it with driver {environment.nvidia_driver_version} (CUDA "
            "13 needs 580, CUDA 12 525): check CUDA_VISIBLE_DEVICES, update the driver, or "
            f"{INSTALL_TORCH} --index-url https://download.pytorch.org/whl/cu126"
        )
    if on_gpu and not importlib.util.find_spec("triton"):
        problems.append(f"Triton is missing, without which the kernels cannot run: {INSTALL_TORCH}")
    if not (environment.gcc_version or environment.clang_version or os.environ.get("CC")):
        problems.append("no C compiler, which torch.compile needs: run apt install gcc g++, or conda install gxx")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        problems.append("no Python.h, which torch.compile needs: run apt install python3-dev, or take conda's Python")
    return problems


def release(version):
    """Return the numbers of a version as a tuple, to be compared."""
    return tuple(map(int, re.findall(r"\d+", version)))


def sees_gpu(environment):
    """Return True if torch can use a GPU."""
    return environment.is_cuda_available == "True"


def try_kernels():
    """Compare the kernels with float64; return {a kernel, its size and errors: what is wrong, or ""}.

    Sizes that the kernels do not support on this GPU are left out.
    """
    trials = {}
    try:
        import torch

        from sympow.attention.operator.check import check_all
        from sympow.kernels.support import why_not

        if reason := why_not("quadratic", torch.bfloat16, 64, 64, 2):
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
    from sympow.generation.decoder import find_wrong_token
    from sympow.model import GPTConfig

    trials = {}
    powers = dict(sympow=2, sympow_gating=2, conformal_sympow=4, even_power=6, softmax=2, heinsen=2)
    for dtype in (torch.bfloat16, torch.float32):
        for attention, p in powers.items():
            config = GPTConfig(n_layer=1, n_head=4, n_embd=128, vocab_size=257, attention=attention, p=p)
            problem = find_wrong_token(config, ATTENTIONS[attention], dtype, torch.float32)
            trials[f"generation {dtype} {attention} D=32 p={p}"] = problem
    return trials


def last_line(error):
    """Return the last line of an exception's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def examine():
    """Print what torch.utils.collect_env finds; return (problems, lines about what was tried).

    Nothing is printed where torch cannot be imported. The lines are for those without problems.
    """
    if sys.version_info < PYTHON:
        return ["Python is too old: install Python 3.11 or later, remove .venv and run make env"], []
    try:
        from torch.utils import collect_env
    except Exception as error:  # a broken installation may raise anything, such as OSError for a missing library
        return [f"torch cannot be imported ({last_line(error)}): {INSTALL_TORCH}"], []
    environment = collect_env.get_env_info()
    print(collect_env.pretty_str(environment))
    problems = find_problems(environment)
    if problems or not sees_gpu(environment):
        return problems, ["no GPU: everything runs in plain PyTorch, slower"]
    print("comparing the kernels with float64 (up to three minutes, to compile them) ...", file=sys.stderr)
    trials = try_kernels()
    problems = [
        f"{name}: {error}; PyTorch takes the place of these kernels, slower" for name, error in trials.items() if error
    ]
    return problems, [f"ok: {name}" for name in trials]


def main():
    parser = argparse.ArgumentParser(prog="doctor.py", description=(__doc__ or "").partition("\n")[0])
    _, unknown = parser.parse_known_args()
    if unknown:
        parser.exit(2, f"doctor.py: unrecognized arguments: {' '.join(unknown)}\n")
    problems, lines = examine()
    lines = [f"WRONG: {line}" for line in problems] or [*lines, "all well"]
    print("\nverdict", *lines, sep="\n  ")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
