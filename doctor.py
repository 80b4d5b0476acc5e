"""Report what this machine has, what is wrong with it, and how to fix it.

    make doctor        # or: python doctor.py

Prints one line each for Python, torch, Triton, the GPUs, the C compiler and the packages, then a verdict. On a GPU,
every kernel is compared with float64, output and gradients; that takes about four minutes, nearly all of them to
compile. The exit status is 0 if all is well (a machine without a GPU is well), 1 if something is wrong. `gather` looks
at the machine; `report` and `verdict` are pure functions of what it found, so that tests can ask about machines on
which they do not run.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from dataclasses import dataclass, field

from sympow.runs.program import Parser, run_program

TORCH = "torch>=2.11,<2.14"  # as in requirements.txt
REQUIRED = ["numpy", "safetensors", "tqdm"]
OPTIONAL = ["matplotlib", "tiktoken", "tokenizers", "datasets", "zarr", "wandb", "pytest"]
# The oldest driver for each major version of CUDA, and where the wheels for it are.
OLDEST_DRIVER = {12: 525, 13: 580}
WHEELS = "https://download.pytorch.org/whl"


@dataclass
class Facts:
    """Holds what `gather` found. The defaults describe a machine without a GPU where all is well."""

    executable: str = sys.executable
    python: str = platform.python_version()
    system: str = "Linux"
    machine: str = ""
    torch: str | None = "2.13.0"  # version; None if it cannot be imported
    torch_error: str = ""  # why it cannot be imported
    cuda_build: str | None = None  # CUDA (or ROCm) version that torch was built for; None for a CPU build
    cuda_available: bool = False
    cuda_error: str = ""  # torch's error when it cannot start CUDA
    torch_gpus: list[str] = field(default_factory=list)
    triton: str | None = "3.7.0"
    triton_wanted: str = "triton"  # the requirement that the installed torch names
    driver: str | None = None
    smi_gpus: list[str] = field(default_factory=list)
    smi_error: str = ""
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    compiler: str | None = "cc"
    python_h: str | None = "Python.h"
    include_dir: str = ""  # where Python.h should be
    packages: dict[str, str | None] = field(default_factory=lambda: dict.fromkeys(REQUIRED + OPTIONAL, "1.0"))
    trials: dict[str, str] = field(default_factory=dict)  # {name of a trial on the GPU: its error, or ""}

    @property
    def has_gpu(self):
        return bool(self.smi_gpus or self.torch_gpus)


# ---- gathering facts


def gather():
    """Look at this machine, try Triton, torch.compile and the kernels if it has a GPU, and return the Facts."""
    facts = Facts(system=platform.system(), machine=platform.platform())
    facts.visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    facts.packages = {name: version(name) for name in REQUIRED + OPTIONAL}
    facts.triton = version("triton") or version("pytorch-triton")
    facts.include_dir = sysconfig.get_paths()["include"]
    header = os.path.join(facts.include_dir, "Python.h")
    facts.python_h = header if os.path.exists(header) else None
    facts.compiler = find_compiler()
    ask_nvidia_smi(facts)
    ask_torch(facts)
    if facts.torch_gpus and not problems(facts):
        facts.trials = {"a Triton kernel": error_of(try_triton), "torch.compile": error_of(try_compile)}
        if not any(facts.trials.values()):
            print("comparing the kernels with float64 (about four minutes, to compile them) ...", file=sys.stderr)
            facts.trials |= try_kernels()
    return facts


def version(package):
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def output(*command):
    """Run a command; return (exit status, stdout and stderr). The status is 127 if the command is missing or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def find_compiler():
    """Return path and version of the compiler that Triton would use ($CC, then gcc, then clang), or None."""
    for name in filter(None, [os.environ.get("CC"), "gcc", "clang", "cc"]):
        path = shutil.which(name)
        if path:
            status, text = output(path, "--version")  # fails for the cc of macOS that only asks to be installed
            if status == 0:
                return f"{path} ({text.splitlines()[0] if text else 'version unknown'})"
    return None


def ask_nvidia_smi(facts):
    """Fill in the driver and the GPUs that nvidia-smi lists, or its error."""
    if not shutil.which("nvidia-smi"):
        return
    status, text = output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if "No devices" in text:  # nvidia-smi is there but no GPU, as in a container without one
        return
    if status != 0:
        facts.smi_error = last_line(text)
        return
    for line in text.splitlines():
        gpu, _, facts.driver = line.rpartition(", ")
        facts.smi_gpus.append(gpu)


def ask_torch(facts):
    """Fill in the version of torch, its CUDA and the GPUs that it sees, or why it cannot be imported."""
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything, such as OSError for a missing library
        facts.torch, facts.torch_error = None, last_line(str(error))
        return
    facts.torch = torch.__version__
    facts.cuda_build = torch.version.cuda or torch.version.hip
    named = importlib.metadata.requires("torch") if version("torch") else None
    facts.triton_wanted = next((r.split(";")[0].strip() for r in named or [] if r.startswith("triton")), "triton")
    with warnings.catch_warnings(action="ignore"):  # the verdict reports the problem in one line
        facts.cuda_available = torch.cuda.is_available()
    if facts.cuda_build and not facts.cuda_available:
        facts.cuda_error = error_of(torch.cuda.init)
    for i in range(torch.cuda.device_count() if facts.cuda_available else 0):
        gpu = torch.cuda.get_device_properties(i)
        shared = getattr(gpu, "shared_memory_per_block_optin", 0)
        facts.torch_gpus.append(
            f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB, "
            f"{gpu.multi_processor_count} SMs, {shared / 1024:.0f} KB shared memory a block"
        )


def try_triton():
    """Compile and run a Triton kernel on the GPU; raise if that fails."""
    global tl  # a kernel looks names up among the globals of its module
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def double(x_ptr, n: tl.constexpr):
        i = tl.arange(0, n)
        tl.store(x_ptr + i, 2 * tl.load(x_ptr + i))

    x = torch.ones(64, device="cuda")
    double[(1,)](x, 64)
    assert (x == 2).all(), "the kernel ran but gave wrong numbers"


def try_compile():
    """Compile a function with torch.compile and run it on the GPU; raise if that fails."""
    import torch

    x = torch.ones(64, device="cuda")
    y = torch.compile(lambda x: torch.relu(2 * x) + 1)(x)
    assert (y == 3).all(), "the compiled function ran but gave wrong numbers"


def try_kernels():
    """Compare the kernels with float64; return {line with a kernel, its size and errors: "" or what is wrong}.

    Sizes that the kernels do not support on this GPU are left out.
    """
    trials = {}
    try:
        import torch

        from sympow.attention.check import check_all
        from sympow.kernels import unsupported_reason

        for line, ok in check_all():
            trials[f"kernels, {line}"] = "" if ok else "too far from float64"
        if not unsupported_reason("quadratic", torch.bfloat16, 64, 64, 2):
            trials |= try_generation()
    except Exception as error:
        trials["kernels"] = f"{type(error).__name__}: {last_line(str(error))}"
    return trials


# attention and p of the layers whose generation is tried: each kernel and each branch of the power at least once
GENERATION = [
    ("sympow", 2), ("sympow_gating", 2), ("conformal_sympow", 4), ("even_power", 6), ("softmax", 2), ("heinsen", 2)
]  # fmt: skip


def try_generation():
    """Compare one layer of decoder.py with the model in float64; return what `try_kernels` does."""
    import torch

    from sympow.attention import ATTENTIONS
    from sympow.generation.decoder import TOLERANCE, errors
    from sympow.model import GPTConfig

    trials = {}
    for dtype in (torch.bfloat16, torch.float32):
        for attention, p in GENERATION:
            config = GPTConfig(n_layer=1, n_head=4, n_embd=128, vocab_size=257, attention=attention, p=p)
            most = max(errors(config, ATTENTIONS[attention], dtype, torch.float32), key=lambda e: (e != e, e))
            name = f"kernels, generation {str(dtype).removeprefix('torch.')} {attention} D=32 p={p}: logits {most:.1e}"
            trials[name] = "" if most <= TOLERANCE[dtype] else "too far from float64"
    return trials


def error_of(function):
    """Call a function; return "" if it returns, otherwise the last line of what it raises."""
    try:
        function()
    except Exception as error:
        error = getattr(error, "inner_exception", error)  # torch.compile wraps the cause in general advice
        return f"{type(error).__name__}: {last_line(str(error))}"
    return ""


def last_line(text):
    """Return the last line of a text that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


# ---- the verdict


def report(facts):
    """Return a (label, value) pair for each line of the report."""
    none = "missing"
    build = f"CUDA {facts.cuda_build} build" if facts.cuda_build else "CPU build"
    lines = [
        ("Python", f"{facts.python} ({facts.executable})"),
        ("platform", facts.machine or facts.system),
        ("torch", f"{facts.torch} ({build})" if facts.torch else f"{none} ({facts.torch_error})"),
        ("Triton", facts.triton or none),
        ("NVIDIA driver", facts.driver or facts.smi_error or "none"),
    ]
    lines += [(f"GPU {i}, nvidia-smi", gpu) for i, gpu in enumerate(facts.smi_gpus)] or [("GPUs, nvidia-smi", "none")]
    lines += [(f"GPU {i}, torch", gpu) for i, gpu in enumerate(facts.torch_gpus)] or [("GPUs, torch", "none")]
    lines += [("C compiler", facts.compiler or none), ("Python.h", facts.python_h or none)]
    lines += [(name, found or none) for name, found in facts.packages.items()]
    return lines


def problems(facts):
    """Return one line for each thing that is wrong: what it is, and how to fix it."""
    found = []
    pip = f"{facts.executable} -m pip install"
    if facts.torch is None:
        broken = "" if "No module named 'torch'" in facts.torch_error else "--force-reinstall "
        found.append(f'torch cannot be imported ({facts.torch_error}): run {pip} {broken}"{TORCH}"')
    elif not version_fits(facts.torch):
        found.append(f'torch {facts.torch} is not the version needed: run {pip} "{TORCH}"')
    missing = [name for name in REQUIRED if not facts.packages.get(name)]
    if missing:
        found.append(f"required package missing: run {pip} {' '.join(missing)}")
    if facts.smi_error:
        found.append(f"nvidia-smi fails ({facts.smi_error}): restart the machine or install its NVIDIA driver again")
    if facts.torch and facts.smi_gpus and not facts.torch_gpus:
        found.append(why_torch_sees_no_gpu(facts, pip))
    if facts.triton is None and facts.has_gpu and facts.system == "Linux":
        found.append(f'Triton is missing, without which the GPU kernels cannot run: run {pip} "{facts.triton_wanted}"')
    if facts.compiler is None:
        fix = "xcode-select --install" if facts.system == "Darwin" else "apt install gcc g++, or conda install gxx"
        found.append(f"no C compiler, which Triton and torch.compile need: run {fix}")
    if facts.python_h is None:
        fix = "apt install python3-dev, or take a Python from conda or python.org, which has them"
        where = f" in {facts.include_dir}" if facts.include_dir else ""
        found.append(f"no Python.h{where}, which Triton and torch.compile need: {fix}")
    for name, error in facts.trials.items():
        if error:
            fix = f'complete the compiler (apt install build-essential) or run {pip} --force-reinstall "{TORCH}"'
            if name.startswith("kernels"):
                fix = f'train.py does without them, slower; another Triton may help: {pip} --force-reinstall "{TORCH}"'
            found.append(f"{name} does not run on the GPU ({error}): {fix}")
    return found


def why_torch_sees_no_gpu(facts, pip):
    """Return the line about a GPU that nvidia-smi sees and torch does not. pip: how to call pip here."""
    digits = re.match(r"\d+", facts.driver or "")
    driver = int(digits[0]) if digits else 0
    index = f"{WHEELS}/{'cu130' if driver >= OLDEST_DRIVER[13] else 'cu126'}"
    fix = f'run {pip} --force-reinstall "{TORCH}" --index-url {index}'
    if facts.cuda_build is None:
        return f"nvidia-smi sees a GPU but this torch is a CPU build: {fix}"
    needed = OLDEST_DRIVER.get(int(facts.cuda_build.split(".")[0]), 0)
    if driver and driver < needed:
        return (
            f"driver {facts.driver} is too old for torch's CUDA {facts.cuda_build}, which needs {needed} or later: "
            f"update the driver, or {fix} (or its neighbour cu128)"
        )
    if facts.visible_devices is not None:
        return f'CUDA_VISIBLE_DEVICES="{facts.visible_devices}" hides the GPUs: run unset CUDA_VISIBLE_DEVICES'
    return (
        f"nvidia-smi sees a GPU but torch {facts.torch} cannot use it ({facts.cuda_error or 'no reason given'}): "
        f"restart the machine, check that /dev/nvidia* may be read, or {fix}"
    )


def version_fits(torch_version):
    """Return True if a version of torch is within the range TORCH."""
    low, high = ([int(n) for n in bound.split(".")] for bound in re.findall(r"[\d.]+", TORCH))
    return low <= [int(n) for n in re.findall(r"\d+", torch_version)[:2]] < high


def verdict(facts):
    """Return (lines, exit status): all problems and 1, or what was tried and 0."""
    wrong = problems(facts)
    if wrong:
        return [f"WRONG: {line}" for line in wrong], 1
    lines = [f"ok: {name}" + ("" if "kernels" in name else " compiled and ran on the GPU") for name in facts.trials]
    if not facts.has_gpu:
        lines.append("no GPU: everything runs on the CPU, slower")
    absent = [name for name in OPTIONAL if not facts.packages.get(name)]
    if absent:
        files = ["tests/requirements.txt"] * ("pytest" in absent) + ["requirements.txt"] * (absent != ["pytest"])
        pip = f"{facts.executable} -m pip install {' '.join(f'-r {file}' for file in files)}"
        lines.append(f"optional packages missing: {', '.join(absent)}; to have them run {pip}")
    return lines + ["all well"], 0


def main():
    Parser(prog="doctor.py", description=__doc__.splitlines()[0]).parse_args()
    facts = gather()
    lines = report(facts)
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        print(f"{label:<{width}}  {value}")
    print("\nverdict")
    text, status = verdict(facts)
    for line in text:
        print(f"  {line}")
    return status


if __name__ == "__main__":
    run_program(main)
