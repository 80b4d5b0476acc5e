"""The doctor names what is wrong with a machine, and how to fix it. The machines are made up here."""

import subprocess
import sys
from pathlib import Path

import pytest

from sympow import doctor
from sympow.doctor import Facts

ROOT = Path(doctor.__file__).parent
GPU = dict(smi_gpus=["NVIDIA H200, 143771 MiB"], driver="580.82.07")
SEEN = dict(GPU, torch="2.13.0+cu130", cuda_build="13.0", cuda_available=True, torch_gpus=["NVIDIA H200"])


def only_problem(**facts):
    """Return the only problem line of a machine with these facts; check that the verdict is that line and status 1."""
    lines, status = doctor.verdict(Facts(**facts))
    assert status == 1 and len(lines) == 1, lines
    assert "\n" not in lines[0]
    return lines[0]


def test_machine_without_gpu_is_well():
    lines, status = doctor.verdict(Facts())
    assert status == 0
    assert "no GPU: everything runs on the CPU, slower" in lines
    assert lines[-1] == "all well"


def test_machine_with_working_gpu_is_well_and_says_what_ran():
    lines, status = doctor.verdict(Facts(**SEEN, trials={"a Triton kernel": "", "torch.compile": ""}))
    assert status == 0
    assert [line.split(" compiled")[0] for line in lines] == ["ok: a Triton kernel", "ok: torch.compile", "all well"]


def test_gpu_that_a_cpu_build_of_torch_cannot_see():
    line = only_problem(**GPU)
    assert "CPU build" in line and "pip install" in line and line.endswith("/cu130")


def test_cpu_build_under_an_older_driver_gets_wheels_that_the_driver_runs():
    assert only_problem(**dict(GPU, driver="535.54.03")).endswith("/cu126")


def test_driver_too_old_for_the_cuda_build():
    line = only_problem(**dict(GPU, driver="570.124.06"), cuda_build="13.0")
    assert "570.124.06 is too old" in line and "580" in line and "/cu126" in line and "cu128" in line


def test_gpu_hidden_by_the_environment():
    line = only_problem(**GPU, cuda_build="13.0", visible_devices="")
    assert 'CUDA_VISIBLE_DEVICES=""' in line and "unset CUDA_VISIBLE_DEVICES" in line


@pytest.mark.parametrize("driver", ["580.82.07", "[N/A]", None])
def test_gpu_that_torch_cannot_use_for_another_reason_quotes_torch(driver):
    assert "CUDA unknown error" in only_problem(
        **dict(GPU, driver=driver), cuda_build="13.0", cuda_error="RuntimeError: CUDA unknown error"
    )


@pytest.mark.parametrize("system, fix", [("Linux", "apt install gcc"), ("Darwin", "xcode-select")])
def test_missing_compiler(system, fix):
    line = only_problem(compiler=None, system=system)
    assert "no C compiler" in line and fix in line


def test_missing_python_headers():
    assert "python3-dev" in only_problem(**SEEN, python_h=None, include_dir="/usr/include/python3.11")


def test_missing_triton_matters_on_linux_with_a_gpu_only():
    assert 'pip install "triton==3.6.0"' in only_problem(**SEEN, triton=None, triton_wanted="triton==3.6.0")
    assert doctor.problems(Facts(triton=None)) == []
    assert doctor.problems(Facts(**SEEN, triton=None, system="Windows")) == []


def test_missing_torch_and_torch_of_another_version():
    assert "No module" in only_problem(torch=None, torch_error="No module named 'torch'")
    assert "--force-reinstall" in only_problem(torch=None, torch_error="libcudart.so.13: cannot open")
    assert "torch 2.3.1" in only_problem(torch="2.3.1+cu121")
    assert doctor.problems(Facts(torch="2.11.0a0+git123")) == []


def test_torch_range_is_that_of_the_requirements():
    assert doctor.TORCH in (ROOT / "requirements.txt").read_text()


def test_missing_packages_fail_only_if_required():
    packages = dict(Facts().packages, numpy=None, wandb=None)
    assert "pip install numpy" in only_problem(packages=packages)
    lines, status = doctor.verdict(Facts(packages=dict(packages, numpy="2.0")))
    assert status == 0 and any("wandb" in line for line in lines)


def test_broken_driver_is_named():
    assert "Driver/library version mismatch" in only_problem(smi_error="Failed: Driver/library version mismatch")


def test_failed_trial_on_the_gpu_is_quoted():
    line = only_problem(**SEEN, trials={"a Triton kernel": "CompileError: no ptxas", "torch.compile": ""})
    assert "a Triton kernel" in line and "no ptxas" in line


def test_a_kernel_with_wrong_results_is_named():
    line = only_problem(**SEEN, trials={"kernels, float32 D=64 p=2: y 3.0e-01": "too far from float64"})
    assert "D=64 p=2" in line and "train.py does without" in line
    lines, _ = doctor.verdict(Facts(**SEEN, trials={"kernels, float32 D=64 p=2: y 3.0e-07": ""}))
    assert lines[0] == "ok: kernels, float32 D=64 p=2: y 3.0e-07"


@pytest.mark.parametrize(
    "absent,files",
    [
        (["pytest"], "-r tests/requirements.txt"), (["wandb"], "-r requirements.txt"),
        (["wandb", "pytest"], "-r tests/requirements.txt -r requirements.txt"),
    ],
)  # fmt: skip
def test_what_is_missing_is_in_the_files_that_are_named(absent, files):
    packages = {name: "" if name in absent else "1.0" for name in (*doctor.REQUIRED, *doctor.OPTIONAL)}
    (line,) = (line for line in doctor.verdict(Facts(packages=packages))[0] if "optional" in line)
    assert line.endswith(f"-m pip install {files}")
    text = "".join((ROOT / file).read_text() for file in files.split()[1::2])
    assert all(name in text for name in absent)


def test_every_problem_has_its_own_line():
    lines, status = doctor.verdict(Facts(**GPU, compiler=None, python_h=None))
    assert status == 1 and len(lines) == 3


def test_error_of_gives_the_last_line():
    def fail():
        raise ValueError("first\n\nlast\n")

    assert doctor.error_of(fail) == "ValueError: last"
    assert doctor.error_of(lambda: None) == ""


def test_runs_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is not there')")
    code = "import sys; sys.path.insert(0, sys.argv.pop()); from sympow import doctor; sys.exit(doctor.main())"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr == ""
    assert "WRONG: torch cannot be imported (libcudart is not there)" in done.stdout


def test_report_has_one_line_for_each_fact():
    facts = Facts(**SEEN)
    lines = doctor.report(facts)
    assert all("\n" not in label + value for label, value in lines)
    labels = [label for label, _ in lines]
    for label in ["Python", "platform", "torch", "Triton", "NVIDIA driver", "C compiler", "Python.h", *facts.packages]:
        assert labels.count(label) == 1
