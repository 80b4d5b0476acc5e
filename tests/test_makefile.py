"""The quick start runs the right commands, and git tracks the right files."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def make(*arguments, folder=ROOT):
    """Return (exit status, stdout, stderr) of make, without the environment variables of an outer make."""
    outer = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PY", "PYTHON"}
    env = {key: value for key, value in os.environ.items() if key not in outer}
    done = subprocess.run(["make", *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout, done.stderr


needs_make = pytest.mark.skipif(not shutil.which("make"), reason="needs make")
DEMO = [
    "data/pystdlib/prepare.py",
    "train.py config/demo.py --attention=softmax --output_gate=True --out_dir=out/demo_softmax",
    "train.py config/demo.py --attention=softmax --output_gate=True --window=256 --out_dir=out/demo_window",
    "train.py config/demo.py --out_dir=out/demo_power",
    "compare.py out/demo_softmax out/demo_window out/demo_power --names=softmax,window,sympow_gating"
    " --png=out/demo_loss.png",
    "evaluate.py --out_dir=out/demo_softmax,out/demo_window,out/demo_power --names=softmax,window,sympow_gating"
    " --length=2048"
    " --documents=24 --png=out/demo_loss_by_position.png",
    'sample.py --out_dir=out/demo_power --prompt="def " --max_new_tokens=600',
]


@needs_make
@pytest.mark.parametrize("options, python", [([], ".venv/bin/python"), (["PY=python3"], "python3")])
def test_each_target_runs_its_programs_in_order_and_a_named_interpreter_makes_no_environment(options, python):
    status, out, _ = make("-n", "demo", *options)
    assert status == 0 and (".venv" in out) == (python != "python3")
    assert [line for line in out.splitlines() if line.endswith(tuple(DEMO))] == [f"{python} {c}" for c in DEMO]
    for target, command in (("test", "-m pytest -rfE -n auto"), ("doctor", "doctor.py")):
        assert f"{python} {command}" in make("-n", target, *options)[1]


@needs_make
def test_help_is_the_default_and_names_every_target():
    status, out, _ = make()
    assert status == 0
    for target in ("help", "env", "demo", "test", "test-slow", "test-all", "doctor"):
        assert f"make {target} " in out


@needs_make
@pytest.mark.parametrize("version", ["Python 3.10.4", None])
def test_env_refuses_an_unfit_python_and_makes_nothing(tmp_path, version):
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    if version:  # an interpreter that fails the version check and tells its version
        (tmp_path / "old").write_text(f'#!/bin/sh\ncase "$1" in --version) echo {version};; *) exit 1;; esac\n')
        (tmp_path / "old").chmod(0o755)
    status, _, error = make("env", "PYTHON=./old", folder=tmp_path)
    lines = [line for line in error.splitlines() if not line.startswith("make")]
    assert status != 0 and len(lines) == 1
    assert (version or "no such interpreter") in lines[0]
    assert not (tmp_path / ".venv").exists()


def test_requirements_are_well_formed_and_leave_triton_to_torch():
    requirements = pytest.importorskip("packaging.requirements")
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    parsed = {r.name: r for r in map(requirements.Requirement, filter(None, lines))}
    torches = ["2.10.0", "2.11.0", "2.15.0+cu132", "2.16.0"]
    assert list(parsed["torch"].specifier.filter(torches)) == ["2.11.0", "2.15.0+cu132"]
    assert not parsed["triton"].specifier
    assert parsed["triton"].marker.evaluate({"sys_platform": "linux"})
    assert not parsed["triton"].marker.evaluate({"sys_platform": "darwin"})


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_git_ignores_what_is_made_and_keeps_what_is_written(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    made = """.venv/bin/python out/demo/metrics.jsonl out/demo/ckpt/model.safetensors wandb/run-1/log loss.png
        data/pystdlib/train.bin data/pystdlib/val_000.bin data/text/meta.json data/text/tokenizer.json
        data/fineweb/vocab.tiktoken data/longcrawl64/progress.json data/longcrawl64/train.zarr/0.0
        __pycache__/model.pyc attention/__pycache__/power.pyc data/__pycache__/loader.pyc
        data/pystdlib/__pycache__/prepare.pyc .pytest_cache/README.md x-1.0-py3-none-any.whl model.pt
        hf/demo/config.json""".split()
    written = """README.md train.py requirements.txt docs/loss.png docs/notes.md data/loader.py data/__init__.py
        data/pystdlib/prepare.py data/longcrawl64/README.md config/demo.py kernels/table.json .ci/run
        tests/test_data.py attention/power.py""".split()
    command = ["git", "-C", str(tmp_path), "check-ignore", "--stdin"]
    listed = subprocess.run(command, input="\n".join(made + written), capture_output=True, text=True)
    assert sorted(listed.stdout.split()) == sorted(made)
