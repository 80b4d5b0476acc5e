"""What bench/ and kernels/tune.py do that needs no GPU: refuse without one, count FLOPs, write the table."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from kernels import CHUNKED_SIZES, cost, tune  # noqa: E402
from kernels.configs import Config  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.mark.parametrize(
    "command",
    [["bench/attention.py"], ["bench/train.py"], ["bench/sample.py"], ["bench/drift.py"], ["-m", "kernels.tune"]],
)
def test_without_a_gpu_they_say_so(command):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "GPU" in done.stderr, done.stderr


def test_the_table_keeps_what_was_not_measured(tmp_path):
    path = tmp_path / "table.json"
    tune.write_table(path, "A", {"dq float32 D=16 p=2": Config(32, 32, 4, 1)})
    tune.write_table(path, "B", {"forward float32 D=16 p=2": Config(64, 32, 4, 1)})
    tune.write_table(path, "A", {"forward float32 D=16 p=2": Config(32, 64, 8, 2, 168)})
    assert json.loads(path.read_text()) == {
        "A": {"dq float32 D=16 p=2": [32, 32, 4, 1, 0], "forward float32 D=16 p=2": [32, 64, 8, 2, 168]},
        "B": {"forward float32 D=16 p=2": [64, 32, 4, 1, 0]},
    }
    assert os.listdir(tmp_path) == ["table.json"]


def test_the_cost_model_has_numbers_for_every_size_the_chunked_kernels_take():
    assert tuple(cost.CHUNKED) == CHUNKED_SIZES
    assert {D for D, _ in CHUNKED_SIZES} <= set(cost.QUADRATIC)


def test_wrong_or_missing_results_never_win():
    good = [torch.ones(3), torch.ones(2)]
    assert tune.difference(good, good) == 0
    assert not tune.difference([good[0] * float("nan"), good[1]], good) <= 1
    assert tune.difference([good[0] * 2, good[1]], good) == pytest.approx(1)


def test_the_loader_is_timed(tmp_path):
    from helpers import make_dataset

    dataset = make_dataset(tmp_path / "data")
    options = ["--block_size=64", "--batch_size=4", "--ranks", "1", "2", "--seconds=0.3"]
    run = lambda *argv: subprocess.run(
        [sys.executable, "bench/data.py", *argv], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    done = run(f"--dataset={dataset}", *options)
    assert done.returncode == 0, done.stderr
    assert [line.split()[-2:] for line in done.stdout.splitlines()] == [["1", "ranks"], ["2", "ranks"]]
    missing = run("--dataset=nowhere")
    assert missing.returncode == 2 and "no dataset 'nowhere'" in missing.stderr


def test_checkpoints_are_timed(tmp_path):
    small = ["--n_layer=1", "--n_head=1", "--n_embd=32", "--times=2", f"--folder={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "bench/checkpoint.py", *small], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[::2] for line in done.stdout.splitlines()[1:]] == [["held", "written", "pause"]] * 2
    assert not list(tmp_path.iterdir())
