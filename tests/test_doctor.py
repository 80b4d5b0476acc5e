"""The doctor names what is wrong with a machine, and how to fix it. The machines are made up here."""

import subprocess
import sys

import pytest
from helpers import ROOT

from sympow import doctor
from sympow.doctor import Machine

GPU = dict(gpus=["NVIDIA H200, 143771 MiB"], driver="580.82.07")
SEEN = dict(GPU, torch="2.13.0+cu130", cuda_build="13.0", torch_gpus=["NVIDIA H200"])
PACKAGES = dict(numpy="2.0", safetensors="0.7", tqdm="4.67", wandb="0.31")


@pytest.mark.parametrize(
    "machine,words",
    [
        (dict(python=(3, 9)), ["Python is too old", "3.11"]),
        (dict(torch=None, torch_error="No module named 'torch'"), ["No module named 'torch'", doctor.TORCH]),
        (dict(torch="2.3.1+cu121"), ["torch 2.3.1+cu121 is not the version needed", doctor.TORCH]),
        (dict(packages=dict(PACKAGES, numpy=None)), ["pip install numpy"]),
        (GPU, ["CPU build", "pip install", "/cu130"]),
        (dict(GPU, driver="535.54.03"), ["CPU build", "/cu126"]),
        (dict(GPU, driver="570.124.06", cuda_build="13.0"), ["570.124.06 is too old", "580", "/cu126"]),
        (
            dict(GPU, cuda_build="13.0", torch_error="CUDA unknown error"),
            ["CUDA unknown error", "CUDA_VISIBLE_DEVICES"],
        ),
        (dict(GPU, driver="[N/A]", cuda_build="13.0", torch_error="CUDA unknown error"), ["CUDA unknown error"]),
        (dict(SEEN, triton=None), ["Triton is missing", "pip install"]),
        (dict(compiler=None), ["no C compiler", "apt install gcc"]),
        (dict(SEEN, has_python_h=False), ["no Python.h", "python3-dev"]),
        (dict(SEEN, trials={"float32 D=64 p=2: y 3.0e-01": "too far from float64"}), ["D=64 p=2", "too far from"]),
    ],
)
def test_a_problem_is_one_line_with_its_fix(machine, words):
    lines, status = doctor.judge(Machine(**machine))
    assert status == 1 and len(lines) == 1 and "\n" not in lines[0]
    assert all(word in lines[0] for word in words), lines


def test_every_problem_has_its_own_line():
    lines, status = doctor.judge(Machine(**GPU, compiler=None, has_python_h=False))
    assert status == 1 and len(lines) == 3


@pytest.mark.parametrize(
    "machine,lines",
    [
        ({}, ["no GPU: everything runs in plain PyTorch, slower", "all well"]),
        (dict(triton=None, torch="2.11.0a0+git123"), ["no GPU: everything runs in plain PyTorch, slower", "all well"]),
        (dict(SEEN, trials={"float32 D=64 p=2: y 3.0e-07": ""}), ["ok: float32 D=64 p=2: y 3.0e-07", "all well"]),
        (dict(SEEN, packages=dict(PACKAGES, wandb=None)), ["all well"]),
    ],
)
def test_a_machine_is_well(machine, lines):
    assert doctor.judge(Machine(**machine)) == (lines, 0)


def test_the_report_has_one_line_for_each_fact():
    lines = doctor.describe(Machine(**SEEN, packages=dict(PACKAGES, wandb=None)))
    assert all("\n" not in label + value for label, value in lines)
    labels = ["Python", "platform", "torch", "Triton", "NVIDIA driver", "C compiler", "Python.h", *PACKAGES]
    assert sorted(label for label, _ in lines) == sorted([*labels, "GPU 0, nvidia-smi", "GPU 0, torch"])
    assert "pip install -r requirements.txt" in dict(lines)["wandb"]


def test_packages_are_those_of_the_requirements(monkeypatch, tmp_path):
    assert doctor.TORCH in doctor.REQUIREMENTS.read_text()
    assert {*doctor.REQUIRED, "wandb", "zarr"} <= set(doctor.list_packages())
    monkeypatch.setattr(doctor, "REQUIREMENTS", tmp_path / "requirements.txt")  # where the package is installed
    assert doctor.list_packages() == []


def test_a_kernel_that_fails_is_named(monkeypatch):
    def check_all():
        yield "float32 D=64 p=2: y 3.0e-07", True
        raise RuntimeError("first\n\nno ptxas")

    monkeypatch.setattr("sympow.attention.operator.check.check_all", check_all)
    monkeypatch.setattr("sympow.kernels.unsupported_reason", lambda *size: "")
    assert doctor.try_kernels() == {"float32 D=64 p=2: y 3.0e-07": "", "kernels": "RuntimeError: no ptxas"}


def test_it_runs_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is not there')")
    code = "import sys; sys.path.insert(0, sys.argv.pop()); import doctor; sys.exit(doctor.main())"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and done.stderr == ""
    assert "WRONG: torch cannot be imported (libcudart is not there)" in done.stdout
