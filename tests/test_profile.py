"""bench/profile_step.py and bench/fused.py: kinds of kernels, floors, and both programs at tiny sizes on the CPU."""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers import call

from sympow.attention import dispatch
from sympow.bench import fused, profile_step
from sympow.model import GPT, GPTConfig

NAMES = {
    "step: forward Torch-Compiled Region: 0/0 aten::mm nvjet_hsh_256x128_64x4": "matrix products, forward",
    "step: backward CompiledFunctionBackward aten::mm sm90_xmma_gemm_bf16": "matrix products, backward",
    "step: forward aten::_scaled_dot_product_cudnn_attention cudnn_generated_fort_native_sdpa_sm90": "attention",
    "step: backward sympow::packed_flash_backward aten::_flash_attention_backward flash_bwd_kernel": "attention",
    "step: forward sympow::chunked update_state_kernel": "attention",
    "step: forward sympow::mm_fp32 aten::mm nvjet": "gates",
    "step: forward triton_poi_fused__to_copy_add_flip_mul_3": "rotations",
    "step: backward sympow::rotate_backward rotate_backward_kernel": "rotations",
    "step: backward triton_per_fused_add_native_layer_norm_native_layer_norm_backward_5": "LayerNorm backward",
    "step: forward triton_per_fused__to_copy_add_native_layer_norm_1": "LayerNorm forward",
    "step: backward triton_per_fused__to_copy_add_mean_mul_sub_5": "LayerNorm backward",
    "step: forward triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_sub_8": "LayerNorm forward",
    "step: backward triton_poi_fused_gelu_gelu_backward_2": "GELU",
    "step: forward triton_red_fused__to_copy_logsumexp_where_7": "loss beyond its products",
    "step: forward sympow::cross_entropy_ cross_entropy_kernel": "loss beyond its products",
    "step: update Optimizer.step#AdamW.step aten::_fused_adamw_ multi_tensor_apply_kernel": "optimizer",
    "step: backward triton_poi_fused_cat_4": "copies and casts",
    "step: backward something new": "other",
}


@pytest.mark.parametrize("names", NAMES)
def test_a_kernel_has_the_kind_of_its_name_or_of_the_operator_around_it(names):
    assert profile_step.kind_of(names) == NAMES[names]


def test_floors_are_those_of_the_sizes():
    model = GPT(GPTConfig(n_layer=1, vocab_size=999))
    found = profile_step.floors(model, model.config, 64, 1024)
    products = found["matrix products, forward"] + found["matrix products, backward"]
    assert products == pytest.approx(6e3 * (1024 + 12 * 768) * 768 * 65536 / 701e12)
    assert found["rotations"] == pytest.approx(2.81 / 12, rel=0.01) and found["GELU"] == pytest.approx(
        5.6 / 12, rel=0.01
    )
    assert found["gates"] == 0 and found["attention"] == pytest.approx(6 * 1024 * 768 * 65536 / 701e9)
    assert found.keys() == profile_step.KINDS.keys() - {"other"}


def event(name, start, kernels=(), parent=None, device=torch.autograd.DeviceType.CPU, duration=0.0):
    return SimpleNamespace(
        name=name, device_type=device, cpu_parent=parent, self_cpu_time_total=duration,
        kernels=[SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels],
        time_range=SimpleNamespace(start=start, elapsed_us=lambda: duration),
    )  # fmt: skip


def test_kernels_count_for_the_phase_that_launched_them_and_none_is_lost():
    region = event("Torch-Compiled Region", 1)
    events = [
        event("step: forward", 0), event("step: backward", 10), region,
        event("aten::mm", 2, [("nvjet", 3000.0)], parent=region),
        event("aten::mm", 12, [("nvjet", 6000.0)]),  # in autograd's thread
        event("nvjet", 2, device=torch.autograd.DeviceType.CUDA, duration=9000.0),
        event("memcpy32_post", 3, device=torch.autograd.DeviceType.CUDA, duration=600.0),
        event("step: update", 1, device=torch.autograd.DeviceType.CUDA),  # of an earlier step, which the GPU is at
    ]  # fmt: skip
    for i in range(1, profile_step.STEPS):
        slower = event("aten::mm", 100 * i + 1, [("nvjet", 9000.0 + i)])
        events += [event("step: forward", 100 * i), slower]
        events.append(event("nvjet", 100 * i + 2, device=torch.autograd.DeviceType.CUDA, duration=9000.0 + i))
    events += [event("step: forward", -9), event("aten::mm", -5, [("nvjet", 1.0)])]  # a step that does not count
    found, totals = profile_step.summarize(events, gpu=True)
    milliseconds = {kind: round(ms, 3) for kind, (ms, _) in found.items()}
    other = round(0.6 / profile_step.STEPS, 3)
    assert milliseconds == {"matrix products, forward": 3.0, "matrix products, backward": 6.0, "other": other}
    assert totals == [9.0, *(9 + i / 1000 for i in range(1, profile_step.STEPS))]
    assert found["other"][1].keys() == {"launched by no operator"}


def test_a_step_is_profiled(tmp_path, capsys):
    sizes = "--n_layer=1 --n_head=2 --n_embd=32 --vocab_size=99 --block_size=32 --batch_size=2 --documents=9 --top=1"
    assert call(profile_step.main, *sizes.split(), f"--json={tmp_path / 'a.json'}") == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 15 and all(line.count("|") == 6 for line in table)  # no gates in softmax
    kinds = json.loads((tmp_path / "a.json").read_text())["kinds"]
    for kind in ("optimizer", "rotations", "LayerNorm backward", "GELU", "matrix products, backward", "attention"):
        assert kinds[kind]["milliseconds"] > 0 and kinds[kind]["floor"] > 0
    assert call(profile_step.main, "--attention=none") == 2 and "attention must be one of" in capsys.readouterr().err


def test_fused_kernels_are_compared_with_pytorch(tmp_path, capsys, monkeypatch):
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    asked = []
    monkeypatch.setattr(dispatch, "fused_kernel_reason", lambda name, *_: asked.append(name) or "")
    monkeypatch.setattr(fused, "ROUNDS", 1), monkeypatch.setattr(fused, "WARM_UP", 1)
    before, file = dispatch.FUSED, tmp_path / "a.json"
    assert call(fused.main, "--tokens=6", "--width=64", "--vocab=128", "--no_compile", f"--json={file}") == 0
    assert dispatch.FUSED == before and {*asked} == {"rotary", "cross_entropy"}
    rows = json.loads(file.read_text())
    assert [row["piece"] for row in rows] == list(fused.PIECES)
    assert all(isinstance(row[contender], float) for row in rows for contender in fused.CONTENDERS[:4])
    assert call(fused.main, "--width=100") == 2
