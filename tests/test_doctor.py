"""The doctor names what is wrong with a machine, and how to fix it. The machines are made up here."""

import importlib.util
import re
import subprocess
import sys

import pytest
from helpers import ROOT
from torch.utils.collect_env import SystemEnv

from sympow import doctor

WELL = dict.fromkeys(SystemEnv._fields) | dict(
    torch_version="2.13.0+cpu", gcc_version="12.2.0", is_cuda_available="False"
)
GPU = dict(nvidia_gpu_models="GPU 0: NVIDIA H200", nvidia_driver_version="570.124.06", cuda_compiled_version="13.0")


def problems(**environment):
    return doctor.find_problems(SystemEnv(**WELL | environment))


@pytest.mark.parametrize(
    "environment,words",
    [
        (dict(torch_version="2.3.1+cu121"), ["torch 2.3.1+cu121 is not the version needed", doctor.TORCH]),
        (GPU, ["built for CUDA 13.0", "driver 570.124.06", "/cu126", "CUDA_VISIBLE_DEVICES"]),
        (dict(gcc_version=None), ["no C compiler", "apt install gcc"]),
    ],
)
def test_a_problem_is_one_line_with_its_fix(environment, words, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    (line,) = problems(**environment)
    assert "\n" not in line and all(word in line for word in words), line


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    assert problems() == problems(**GPU, is_cuda_available="True") == problems(torch_version="2.11.0a0+git123") == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    text = "\n".join(problems(is_cuda_available="True"))
    assert re.findall("numpy safetensors tqdm|Triton is missing|no Python.h", text) == [
        "numpy safetensors tqdm",
        "Triton is missing",
        "no Python.h",
    ]


def test_a_kernel_that_is_wrong_is_a_problem(monkeypatch, capsys):
    from torch.utils import collect_env

    monkeypatch.setattr(collect_env, "get_env_info", lambda: SystemEnv(**WELL | GPU | dict(is_cuda_available="True")))
    for error, status, line in (("", 0, "ok: D=64"), ("too far from float64", 1, "WRONG: D=64: too far from float64;")):
        monkeypatch.setattr(doctor, "try_kernels", lambda error=error: {"D=64": error})
        monkeypatch.setattr(sys, "argv", ["doctor.py"])
        assert doctor.main() == status and line in capsys.readouterr().out


def test_the_version_of_torch_is_that_of_the_requirements():
    with open(f"{ROOT}/requirements.txt") as f:
        assert doctor.TORCH in f.read()


def test_a_kernel_that_fails_is_named(monkeypatch):
    def check_all():
        yield "float32 D=64 p=2: y 3.0e-07", True
        raise RuntimeError("first\n\nno ptxas")

    monkeypatch.setattr("sympow.attention.operator.check.check_all", check_all)
    monkeypatch.setattr("sympow.kernels.support.why_not", lambda *size: "")
    assert doctor.try_kernels() == {"float32 D=64 p=2: y 3.0e-07": "", "kernels": "RuntimeError: no ptxas"}


def test_it_runs_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is not there')")
    code = "import sys; sys.path.insert(0, sys.argv.pop()); import doctor; sys.exit(doctor.main())"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and done.stderr == ""
    assert "WRONG: torch cannot be imported (libcudart is not there)" in done.stdout
