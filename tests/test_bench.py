"""What bench/ and kernels/tune.py do that needs no GPU: refuse without one, count FLOPs, write the table."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from sympow.bench import nanogpt  # noqa: E402
from sympow.kernels import CHUNKED_SIZES, HEAD_DIMS, cost, tune  # noqa: E402
from sympow.kernels.configs import Config, key  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


# What Python does with each command, in a fork of one process that has imported torch already (which takes seconds).
COMMANDS = """
import json, os, runpy, sys, tempfile
import torch

for command in json.loads(sys.argv[1]):
    errors = tempfile.TemporaryFile()
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        print(json.dumps([status, errors.read().decode()]), flush=True)
        continue
    os.dup2(errors.fileno(), 2)
    module = command[0] == "-m"
    sys.argv = command[module:]
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(command[0]))
    (runpy.run_module if module else runpy.run_path)(sys.argv[0], run_name="__main__")
    sys.exit()
"""


def test_without_a_gpu_or_with_wrong_arguments_they_say_so():
    reasons = {f"bench/{name}.py": "GPU" for name in ("attention", "train", "sample")}
    reasons |= {"-m sympow.kernels.tune": "GPU", "-m sympow.kernels.cost": "GPU"}
    reasons |= {"-m sympow.kernels.cost 64": "it takes no arguments"}
    reasons |= {"doctor.py --fix": "unrecognized arguments"}
    commands = [command.split() for command in reasons]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    argv = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    for (command, reason), line in zip(reasons.items(), done.stdout.splitlines(), strict=True):
        status, errors = json.loads(line)
        assert status == 2 and errors.count("\n") == 1 and reason in errors, (command, errors)


NANOGPT = """
from dataclasses import dataclass
import torch

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.wte = config, torch.nn.Embedding(config.vocab_size, config.n_embd)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        assert (weight_decay, learning_rate, betas, device_type) == (0.1, 6e-4, (0.9, 0.95), "cpu")
        return torch.optim.AdamW(self.parameters(), learning_rate)

    def forward(self, idx, targets):
        assert idx.is_contiguous() and idx.shape == targets.shape == (2, 32) and self.config.block_size == 32
        logits = self.wte(idx) @ self.wte.weight.t()
        return logits, torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
"""


def test_nanogpt_and_our_models_take_turns(tmp_path, monkeypatch, capsys):
    (tmp_path / "model.py").write_text(NANOGPT)
    sizes = "--context=32 --tokens=64 --n_layer=1 --n_head=2 --n_embd=16 --turns=2 --steps=1".split()
    taken, take_steps = [], nanogpt.take_steps
    seen = lambda network, model, *rest: taken.append(type(model).__module__) or take_steps(network, model, *rest)
    monkeypatch.setattr(nanogpt, "take_steps", seen)
    monkeypatch.setattr(sys, "argv", ["nanogpt.py", str(tmp_path), *sizes, f"--json={tmp_path / 'rows.json'}"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    nanogpt.main()
    theirs, *ours = rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["model"] for row in rows] == ["nanoGPT", "softmax", "sympow_gating"] and theirs["ratio"] == 1
    assert all(row["ratio"] == pytest.approx(theirs["step_ms"] / row["step_ms"]) for row in ours)
    assert all(row["fastest_ms"] <= row["step_ms"] <= row["slowest_ms"] for row in rows)
    assert taken[3:] == 2 * [x for name in ("nanogpt_model", "sympow.model", "sympow.model") for x in (name, name)]
    assert capsys.readouterr().out.count("\n") == 2 + len(rows)


@pytest.mark.parametrize("text,reason", [(None, "is missing: clone"), ("x = 1", "is not nanoGPT's model.py")])
def test_what_is_not_nanogpt_is_refused(text, reason, tmp_path, capsys):
    if text:
        (tmp_path / "model.py").write_text(text)
    with pytest.raises(SystemExit):
        nanogpt.load_nanogpt(tmp_path)
    errors = capsys.readouterr().err
    assert reason in errors and errors.count("\n") == 1


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


def test_tuning_measures_or_fills_in_every_entry_of_the_table():
    cases = tune.cases_of(tune.SIZES, HEAD_DIMS, tune.TAKES_OVER, (False, True))
    powers = lambda case: (case.p,) if case.chunked or case.kernel not in tune.KERNELS else tune.TAKES_OVER[case.p]
    filled = {key(*case._replace(p=p)) for case in cases for p in powers(case)}
    assert {"forward bfloat16 D=64 p=0 gated", "dkdv float32 D=16 p=2"} <= filled
    for device, entries in json.loads(tune.OWN_TABLE.read_text()).items():
        assert set(entries) <= filled, device


def test_a_power_for_each_row_is_timed_with_any_tile_sizes(monkeypatch):
    """On the CPU, in the interpreter, with resets for gates."""
    monkeypatch.setattr(tune, "DEVICE", "cpu")
    monkeypatch.setattr(tune, "WIDTH", 16)
    for kernel, other in (("forward", Config(64, 32, 4, 1)), ("dkdv", Config(32, 64, 4, 1))):
        run = tune.launcher(tune.Case(kernel, torch.float32, 16, 0, True), 1, 40)
        results = [run(Config(32, 32, 4, 1)), run(other)]
        assert len(results[0]) == (2 if kernel == "forward" else 4) and tune.difference(*results) < 1e-5


def test_the_cost_model_has_numbers_for_every_size_the_chunked_kernels_take():
    assert tuple(cost.CHUNKED) == CHUNKED_SIZES
    assert {D for D, _ in CHUNKED_SIZES} <= set(cost.QUADRATIC)


def test_wrong_or_missing_results_never_win():
    good = [torch.ones(3), torch.ones(2)]
    assert tune.difference(good, good) == 0
    assert not tune.difference([good[0] * float("nan"), good[1]], good) <= 1
    assert tune.difference([good[0] * 2, good[1]], good) == pytest.approx(1)


def test_log_attention_is_timed_beside_the_route_of_its_paper(tmp_path, capsys):
    from helpers import call

    from sympow.bench import heinsen

    options = ["--T", "16", "40", "--heads=1", "--head_dim=4", "--batch=2", f"--json={tmp_path / 'rows.json'}"]
    assert call(heinsen.main, *options) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["T"], row["contender"]) for row in rows] == [
        (T, name) for T in (16, 40) for name in heinsen.CONTENDERS
    ]
    assert all(row["differs"] < 1e-5 for row in rows if row["contender"] == "log")
    assert all(row["faster"] > 0 for row in rows if row["contender"] != "logcumsumexp")
    out = capsys.readouterr().out
    assert out.count("logcumsumexp") == 2 and "ours without kernels: the tensors are on cpu" in out
    assert call(heinsen.main, "--T=0") == 2


def test_a_contender_that_does_not_fit_is_named_and_the_others_go_on(monkeypatch, capsys):
    from helpers import call

    from sympow.bench import heinsen

    def fails(q, k, v):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 GiB.\nSee")

    monkeypatch.setitem(heinsen.CONTENDERS, "logcumsumexp", fails)
    assert call(heinsen.main, "--T=16", "--heads=1", "--head_dim=4") == 0
    out = capsys.readouterr().out
    assert "T=16 logcumsumexp: OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB.\n" in out
    assert "signed" in out
