"""What bench/ and kernels/tune.py do that needs no GPU: refuse without one, take turns, write the table."""

import importlib
import json
import os

import pytest
import torch
from helpers import call

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from sympow.attention import heinsen_naive  # noqa: E402
from sympow.bench import attention, sample, scale  # noqa: E402
from sympow.kernels import configs, cost, tune  # noqa: E402
from sympow.kernels.support import CHUNKED_SIZES  # noqa: E402
from sympow.kernels.configs import Config, key  # noqa: E402
from sympow.runs.program import run_program  # noqa: E402

REFUSALS = {
    "bench.attention": "GPU",
    "bench.train": "GPU",
    "bench.attention --fit_cost": "GPU",
    "bench.train 64": "unrecognized arguments",
    "kernels.tune": "GPU",
    "bench.sample": "GPU",
    "bench.scale": "GPU",
    "bench.scale --tokens=0": "at least 1",
    "doctor --fix": "unrecognized arguments",
}


@pytest.mark.parametrize("command", REFUSALS)
def test_without_a_gpu_or_with_wrong_arguments_programs_say_so_in_one_line(command, refused):
    name, *arguments = command.split()

    def program():
        run_program(importlib.import_module(f"sympow.{name}").main)

    assert REFUSALS[command] in refused(call, program, *arguments)


def test_the_help_of_a_program_that_starts_train_py_says_what_it_hands_on(capsys):
    assert call(scale.main, "--help") == 0
    assert "config/NAME.py or --key=value, are settings of train.py" in " ".join(capsys.readouterr().out.split())


def test_the_table_keeps_what_was_not_measured(tmp_path):
    path = tmp_path / "table.json"
    tune.write_table(path, "A", {"dq bfloat16 D=16 p=2": Config(32, 32, 4, 1)})
    tune.write_table(path, "B", {"forward bfloat16 D=16 p=2": Config(64, 32, 4, 1)})
    tune.write_table(path, "A", {"forward bfloat16 D=16 p=2": Config(32, 64, 8, 2, 168)})
    assert json.loads(path.read_text()) == {
        "A": {"dq bfloat16 D=16 p=2": [32, 32, 4, 1, 0], "forward bfloat16 D=16 p=2": [32, 64, 8, 2, 168]},
        "B": {"forward bfloat16 D=16 p=2": [64, 32, 4, 1, 0]},
    }
    assert os.listdir(tmp_path) == ["table.json"]


def test_tuning_measures_every_entry_of_the_table():
    names = {key(*case) for case in tune.all_cases()}
    assert {"forward bfloat16 D=64 p=8 gated", "dkdv bfloat16 D=16 p=2"} <= names
    for device, entries in json.loads(tune.configs.OWN_TABLE.read_text()).items():
        assert set(entries) <= names, device


def test_an_entry_holds_for_larger_powers_with_gates_and_in_chunks_unless_these_have_one():
    entries = {"dq bfloat16 D=16 p=2": 1, "dq bfloat16 D=16 p=4 gated": 2, "query_state bfloat16 D=16 p=2": 3}
    find = lambda kernel, p, gated, chunked: configs.entry(entries, kernel, torch.bfloat16, 16, p, gated, chunked)
    assert [find("dq", p, False, False) for p in (2, 4, 8)] == [1, 1, 1] and find("dq", 4, False, True) == 1
    assert [find("dq", p, True, False) for p in (2, 4, 8)] == [1, 2, 2] and find("dq", 4, True, True) == 2
    assert find("query_state", 2, False, False) == 3
    assert find("query_state", 4, False, False) is find("forward", 2, False, False) is None


@pytest.mark.parametrize("kernel,p,chunked", [("forward", 4, False), ("dkdv", 2, False), ("query_state", 2, True)])
def test_both_passes_are_run_with_the_sizes_on_trial(kernel, p, chunked, monkeypatch):
    """On the CPU, in the interpreter."""
    monkeypatch.setattr(tune, "HEADS", 16)
    case = tune.Case(kernel, torch.float32, 16, p, not chunked)
    passes = tune.make_passes(case, 1, 40, "cpu")
    first, candidate = passes(), Config(32, 64, 4, 1)
    with tune.trial(case, candidate, "cpu"):
        assert configs.find(*case, configs.gpu(torch.device("cpu"))) == candidate
        assert tune.difference(passes(), first) < 1e-5
    assert len(first) == (4 if chunked else 5)


def test_the_cost_model_has_numbers_for_every_size_the_chunked_kernels_take():
    assert tuple(cost.CHUNKED) == CHUNKED_SIZES
    assert {D for D, _ in CHUNKED_SIZES} <= set(cost.QUADRATIC)


def test_wrong_or_missing_results_never_win():
    good = [torch.ones(3), torch.ones(2)]
    assert tune.difference(good, good) == 0
    assert not tune.difference([good[0] * float("nan"), good[1]], good) <= 1
    assert tune.difference([good[0] * 2, good[1]], good) == pytest.approx(1)


def test_log_attention_is_timed_beside_the_equations_of_its_paper():
    q, k, v = torch.randn(3, 2, 16, 1, 4).unbind()
    for name in ("logcumsumexp", "heinsen_log"):
        contender = attention.build(name, [q, k, v], None, torch.ones(2, 16, 1, 4))
        y = contender.forward()
        assert torch.allclose(y, heinsen_naive.quadratic(q, k, v, values="log"), atol=1e-5)


def test_the_cost_model_is_fitted_to_what_is_measured(monkeypatch, capsys):
    """The model itself gives the times, so the fit finds its numbers."""
    tokens = 8

    def nanoseconds(q, k, v, log_g, form, chunk_size=None, **options):
        T = made[0]
        return cost.quadratic_ns(T, 32) if form == "quadratic" else cost.chunked_ns(T, chunk_size, 32, 2)

    def make_inputs(B, T, D):
        made[:] = [T]
        return [None] * 3, torch.ones(tokens), None

    made = []
    monkeypatch.setitem(cost.QUADRATIC, 32, cost.QUADRATIC[32])
    monkeypatch.setattr(attention, "make_inputs", make_inputs)
    monkeypatch.setattr(attention.Contender, "forward_backward", attention.Contender.forward)
    monkeypatch.setattr(attention, "power_attention", nanoseconds)
    monkeypatch.setattr(attention, "milliseconds", lambda call, calls: call() * tokens / 1e6)
    attention.fit_cost(32, 2)
    printed = capsys.readouterr().out
    assert "QUADRATIC 32: (1.05, 0.00084)" in printed and "CHUNKED 32, 2: (1.64, 134)" in printed


def test_the_picture_of_costs_has_the_rows_of_both_programs(tmp_path, monkeypatch, capsys):
    training = [dict(attention="softmax", context=n, tokens_per_second=1e6 / n, step_ms=1.0) for n in (8, 4)]
    training += [dict(attention="softmax", context=16, failed="out of memory")]
    generation = [dict(name="softmax", batch=b, context=n, p50=float(b * n)) for b in (1, 64) for n in (4, 8)]
    for name, rows in dict(training=training, generation=generation).items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    figures, save_figure = [], sample.save_figure
    monkeypatch.setattr(sample, "save_figure", lambda figure, png: (figures.append(figure), save_figure(figure, png)))
    png = tmp_path / "cost.png"
    assert call(sample.main, "--plot", tmp_path / "training.json", tmp_path / "generation.json", f"--png={png}") == 0
    lines = [{line.get_label(): line.get_xydata().tolist() for line in axis.lines} for axis in figures[0].axes]
    assert lines[0]["softmax"] == lines[1]["softmax"] == [[4, 4], [8, 8]]
    assert png.stat().st_size > 1000 and str(png) in capsys.readouterr().out
