"""The output gate's kernel for prompts beside its module in float64; models that read by it and the convolution's."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from numerics import DEVICE, GPU, relative_error  # noqa: E402

from sympow.attention.operator import check, dispatch  # noqa: E402
from sympow.kernels import convolution as convolution_kernels  # noqa: E402
from sympow.kernels.decode import prompt  # noqa: E402
from sympow.layers import convolution, output_gate  # noqa: E402
from sympow.layers.output_gate import OutputGate  # noqa: E402
from sympow.model import GPT, GPTConfig  # noqa: E402

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


def heads(*shape, dtype):
    """Return heads [B, T, H, D] as they stand among others in what c_attn returns."""
    B, T, H, D = shape
    return torch.randn(B, T, H + 2, D, device=DEVICE).to(dtype)[:, :, 1:-1]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("T,H,D", [(1, 2, 16), (37, 5, 64), (9, 3, 20)])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
@torch.no_grad()
def test_a_gated_prompt_equals_float64(T, H, D, eps, dtype):
    layer, y, gate = OutputGate(D, eps).to(DEVICE), *(heads(2, T, H, D, dtype=dtype) for _ in range(2))
    layer.weight.normal_(mean=1)
    z = prompt.gate(y, gate, layer.weight, eps)
    assert z.dtype == dtype and relative_error(z, layer.double()(y.double(), gate.double()), 0) < ROUNDING[dtype]


@torch.no_grad()
def test_numbers_that_do_not_stand_side_by_side_are_read_as_they_are():
    x, norm = torch.randn(2, 5, 3, 16, device=DEVICE)[..., ::2], OutputGate(8)
    z = prompt.gate(x, x, norm.to(DEVICE).weight, norm.eps)
    assert relative_error(z, norm.double()(x.double(), x.double()), 0) < 1e-6


@pytest.mark.parametrize(
    "form,module,kernel",
    [("convolution", convolution_kernels, name) for name in ("convolve", "differentiable_convolve", "_backward")]
    + [("prompt", prompt, "gate")],
)
def test_the_comparison_before_they_are_used_finds_wrong_numbers(form, module, kernel, monkeypatch):
    size = check.Size(form, torch.float32, 20)
    assert max(check.errors(size, 37, DEVICE).values()) < 1e-6
    launch = getattr(module, kernel)
    double = lambda results: tuple(map(double, results)) if isinstance(results, tuple) else 2 * results
    monkeypatch.setattr(module, kernel, lambda *args, **options: double(launch(*args, **options)))
    assert max(check.errors(size, 37, DEVICE).values()) > 0.1


@pytest.mark.parametrize("packed", [False, True])
@torch.inference_mode()
def test_a_model_reads_and_evaluates_by_them_as_by_its_modules(packed, monkeypatch):
    sizes = dict(vocab_size=40, n_layer=2, n_head=3, n_kv_head=1, n_embd=48, reset_token=3 if packed else -1)
    model = GPT(GPTConfig(attention="sympow_gating", **sizes)).to(DEVICE)
    ids, results = torch.randint(40, (2, 21), device=DEVICE), []
    for gate, convolve in ((None, None), (prompt, convolution_kernels)):
        monkeypatch.setattr(output_gate, "prompt_kernels", lambda x, kernels=gate: kernels)
        monkeypatch.setattr(convolution, "convolution_kernels", lambda x, kernels=convolve: kernels)
        logits, state = model.read(ids, model.empty_state(2), piece=8)
        inputs = [layer.conv_inputs for layer in state.layers]
        with torch.autocast(DEVICE, torch.bfloat16):
            results.append((logits, *inputs, model(ids)[0], model.read(ids, model.empty_state(2), piece=2)[0]))
    for module, kernel, rounding in zip(*results, [1e-5] * 3 + [2e-2] * 2, strict=True):
        assert kernel.dtype == module.dtype and relative_error(kernel, module, 0) < rounding


def test_they_compute_on_a_gpu_what_needs_no_gradient_and_nothing_traces(monkeypatch):
    answers, x = [], torch.randn(2, 3, device=DEVICE)
    ask = lambda x: answers.append(dispatch.prompt_kernels(x) is prompt) or x
    with torch.no_grad():
        torch.func.vmap(ask)(ask(x))
        monkeypatch.setattr(dispatch, "why_not", lambda *sizes: "")
        with FlopCounterMode(display=False):
            ask(x)
        torch.compile(ask, backend="eager")(ask(x))
    ask(x)
    assert answers == [GPU, False, False, True, False, False]
