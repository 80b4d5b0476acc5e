"""bench/profile_step.py and bench/fused.py: kinds of kernels, and both programs at tiny sizes on the CPU."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import call

from sympow.attention.operator import dispatch
from sympow.bench import fused, profile_step
from sympow.model import GPTConfig

NAMES = {
    "aten::mm nvjet_hsh_256x128_64x4": "matrix products",
    "CompiledFunctionBackward aten::mm sm90_xmma_gemm_bf16": "matrix products",
    "aten::_scaled_dot_product_cudnn_attention cudnn_generated_fort_native_sdpa_sm90": "attention",
    "sympow::packed_flash_backward aten::_flash_attention_backward flash_bwd_kernel": "attention",
    "sympow::chunked update_state_kernel": "attention",
    "sympow::mm_fp32 aten::mm nvjet": "gates",
    "triton_poi_fused__to_copy_add_flip_mul_3": "rotations",
    "sympow::rotate_backward rotate_backward_kernel": "rotations",
    "triton_per_fused_add_native_layer_norm_native_layer_norm_backward_5": "LayerNorm",
    "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_sub_8": "LayerNorm",
    "triton_poi_fused_gelu_gelu_backward_2": "GELU",
    "triton_red_fused__to_copy_logsumexp_where_7": "loss beyond its products",
    "sympow::cross_entropy_ cross_entropy_kernel": "loss beyond its products",
    "Optimizer.step#AdamW.step aten::_fused_adamw_ multi_tensor_apply_kernel": "optimizer",
    "aten::_foreach_norm multi_tensor_apply_kernel": "optimizer",
    "triton_poi_fused_cat_4": "copies and casts",
    "something new": "other",
}


@pytest.mark.parametrize("names", NAMES)
def test_a_kernel_has_the_kind_of_its_name_or_of_the_operator_around_it(names):
    assert profile_step.kind_of(f"{profile_step.STEP} {names}") == NAMES[names]


def event(name, start, kernels=(), parent=None, device=torch.autograd.DeviceType.CPU):
    kernels = [SimpleNamespace(name=kernel, duration=microseconds) for kernel, microseconds in kernels]
    time_range = SimpleNamespace(start=start)
    return SimpleNamespace(name=name, device_type=device, cpu_parent=parent, kernels=kernels, time_range=time_range)


def test_kernels_count_for_the_step_that_launched_them_and_the_shortest_step_is_taken():
    events = [event(profile_step.STEP, -9), event("aten::mm", -5, [("nvjet", 1.0)])]  # a step that does not count
    for i in range(profile_step.STEPS):
        gates = event("sympow::mm_fp32", 100 * i + 1)
        events += [event(profile_step.STEP, 100 * i), gates, event("aten::mm", 100 * i + 2, [("nvjet", 3e3)], gates)]
        events.append(event("aten::mm", 100 * i + 3, [("nvjet", 6e3 + abs(i - 2))]))  # in autograd's thread
        events.append(event("nvjet", 100 * i + 4, device=torch.autograd.DeviceType.CUDA))
    assert profile_step.summarize(events, gpu=True) == {"gates": 3.0, "matrix products": 6.0}


def test_a_step_is_profiled(tmp_path, monkeypatch, capsys):
    small = partial(GPTConfig, n_layer=1, n_head=2, n_embd=32, vocab_size=99)
    monkeypatch.setattr(profile_step, "GPTConfig", small)
    assert call(profile_step.main, "--block_size=32", "--batch_size=2", f"--json={tmp_path / 'a.json'}") == 0
    rows = {row["kind"]: row["milliseconds"] for row in json.loads((tmp_path / "a.json").read_text())}
    assert list(rows) == [*profile_step.KINDS, "all", "without the profiler"]
    for kind in ("optimizer", "rotations", "LayerNorm", "GELU", "matrix products", "attention"):
        assert 0 < rows[kind] < rows["all"]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows) + 2  # titles, rows and the machine
    assert call(profile_step.main, "--attention=none") == 2 and "attention must be one of" in capsys.readouterr().err


def test_fused_operators_are_timed_beside_pytorch(tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    checked = []
    monkeypatch.setattr(dispatch, "fused_kernel_reason", lambda name, *_: checked.append((name, dispatch.FUSED)))
    monkeypatch.setattr(dispatch, "FUSED", ())
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    for name, value in dict(ROUNDS=1, WARM_UP=1, TOKENS=6, WIDTH=64, VOCABULARY=128).items():
        monkeypatch.setattr(fused, name, value)
    assert call(fused.main, f"--json={tmp_path / 'a.json'}") == 0
    assert {(name, (name,)) for name in fused.OPERATORS} == set(checked)
    rows = json.loads((tmp_path / "a.json").read_text())
    assert [row["operator"] for row in rows] == ["rotary", "cross_entropy"]
    assert all(row[contender] > 0 for row in rows for contender in fused.CONTENDERS)
