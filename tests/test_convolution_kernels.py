"""The convolution's kernels beside their module in float64: outputs and gradients, alone, in layers and in models."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from numerics import DEVICE, GPU, gradients, relative_error, uninitialized_memory_is_nan  # noqa: E402

from sympow.attention.operator import dispatch  # noqa: E402
from sympow.kernels import convolution as kernels  # noqa: E402
from sympow.layers import convolution as layers  # noqa: E402
from sympow.layers.convolution import Convolution  # noqa: E402
from sympow.model import GPT, GPTConfig  # noqa: E402

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 3e-3}
SIZES = [(1, 2, 16, 4), (37, 5, 64, 4), (150, 5, 20, 9), (3, 3, 20, 9), (129, 1, 8, 2)]  # T, H, D, n


def wider(*shape, dtype=torch.float32):
    """Return numbers of this shape as they stand among others, in what c_attn returns or in the weight of a layer."""
    *first, H, D = shape
    return torch.randn(*first, H + 2, D, device=DEVICE).to(dtype)[..., 1:-1, :]


def weights(n, H, D):
    """Return weights [n, H D], a slice of others."""
    return torch.randn(n, (H + 2) * D, device=DEVICE)[:, D:-D]


def some_resets(B, T):
    """Return resets [B, T] of many documents: some are side by side, some at the first token and one at the last."""
    resets = torch.rand(B, 2 * T, device=DEVICE)[:, ::2] < 0.2
    resets[:, 0] = resets[0, -2:] = True
    return resets


def in_float64(x, weight, resets=None, recent=None):
    """Return y by the PyTorch form of the layer, which is compared with a loop in test_convolution.py."""
    H, D = x.shape[2:]
    layer = Convolution([H, 0, 0], D, len(weight)).double()
    recent = None if recent is None else recent.double()
    args = x.double(), resets, recent
    return torch.func.functional_call(layer, {"weight": weight.double()}, args)[0]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("T,H,D,n", SIZES)
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_a_convolved_prompt_equals_float64(T, H, D, n, continued, packed, dtype):
    x, weight = wider(2, T, H, D, dtype=dtype), weights(n, H, D)
    recent = wider(2, n - 1, H, D, dtype=dtype) if continued else None
    resets = some_resets(2, T) if packed else None
    with uninitialized_memory_is_nan():
        y = kernels.convolve(x, weight, resets, recent)
    assert y.dtype == dtype and y.is_contiguous()
    assert relative_error(y, in_float64(x, weight, resets, recent), 0) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("T,H,D,n", SIZES)
@pytest.mark.parametrize("B,packed", [(1, False), (3, False), (3, True)])
def test_the_operator_and_its_gradients_equal_float64(T, H, D, n, B, packed, dtype):
    x, weight, dy = wider(B, T, H, D, dtype=dtype), weights(n, H, D), wider(B, T, H, D, dtype=dtype)
    resets = some_resets(B, T) if packed else None
    with uninitialized_memory_is_nan():
        results = gradients(kernels.differentiable_convolve, (x, weight, resets), dy)
    expected = gradients(in_float64, (x, weight, resets), dy, torch.Tensor.double)
    for result, reference, kind in zip(results, expected, (dtype, dtype, torch.float32), strict=True):
        assert result.dtype == kind and relative_error(result, reference, 0) < ROUNDING[kind]


def test_a_token_before_a_reset_gets_no_gradient_from_behind_it():
    x, weight = torch.ones(1, 9, 1, 16, device=DEVICE, requires_grad=True), torch.ones(4, 16, device=DEVICE)
    resets = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 0, 0]], device=DEVICE).bool()
    (dx,) = torch.autograd.grad(kernels.differentiable_convolve(x, weight, resets).sum(), x)
    assert (dx[0, :, 0] == torch.tensor([4, 3, 2, 2, 5, 5, 4, 3, 2], device=DEVICE).unsqueeze(1)).all()


def test_numbers_that_do_not_stand_side_by_side_are_read_as_they_are():
    x, dy = torch.randn(2, 2, 5, 3, 16, device=DEVICE)[..., ::2]
    tensors = x, weights(24, 1, 4).T, None
    results = gradients(kernels.differentiable_convolve, tensors, dy)
    expected = gradients(in_float64, tensors, dy, torch.Tensor.double)
    assert all(relative_error(a, b, 0) < 1e-6 for a, b in zip(results, expected, strict=True))


def test_weights_of_bfloat16_have_gradients_in_it():
    tensors = wider(2, 5, 3, 8), weights(4, 3, 8).bfloat16(), None
    *_, dweight = gradients(kernels.differentiable_convolve, tensors)
    *_, expected = gradients(in_float64, tensors, None, torch.Tensor.double)
    assert dweight.dtype == torch.bfloat16 and relative_error(dweight, expected, 0) < 3e-3


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_what_is_frozen_has_no_gradient_and_keeps_nothing(frozen):
    x, weight, sizes = torch.randn(1, 50, 2, 8, device=DEVICE), torch.randn(3, 16, device=DEVICE), []
    (x if frozen == "weight" else weight).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        y = kernels.differentiable_convolve(x, weight, None)
    y.sum().backward()
    assert (x.grad is None, weight.grad is None) == (frozen == "input", frozen == "weight")
    assert max(sizes) == (weight.numel() if frozen == "weight" else x.numel())
    leaf = x if frozen == "weight" else weight
    (expected,) = torch.autograd.grad(in_float64(x, weight).sum(), leaf)
    assert relative_error(leaf.grad, expected, 0) < 1e-6


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_operators_keep_torchs_promises(packed, frozen):
    """Of strides and dtypes too: tokens of the two sequences alternate in memory, and the weight is not float32."""
    x, dy = torch.randn(2, 5, 2, 3, 8, device=DEVICE).transpose(1, 2)
    weight, resets = weights(4, 3, 8).bfloat16(), some_resets(2, 5) if packed else None
    backward = dy, None if frozen else x, weight, resets
    torch.library.opcheck(torch.ops.sympow.convolve_backward.default, backward)
    forward = x.detach().requires_grad_(), weight.detach().requires_grad_(not frozen), resets
    torch.library.opcheck(torch.ops.sympow.convolve.default, forward)


def test_a_second_derivative_is_refused():
    x, weight = wider(2, 5, 3, 8).requires_grad_(), weights(4, 3, 8)
    y = kernels.differentiable_convolve(x, weight, None)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dx.sum().backward()


def test_gradients_come_in_batches_too():
    x, weight = wider(2, 5, 3, 8).requires_grad_(), weights(4, 3, 8).requires_grad_()
    y, dys = kernels.differentiable_convolve(x, weight, some_resets(2, 5)), torch.randn(3, 2, 5, 3, 8, device=DEVICE)
    backward = lambda dy, **options: torch.autograd.grad(y, (x, weight), dy, retain_graph=True, **options)
    expected = list(map(torch.stack, zip(*map(backward, dys))))
    for batched in (backward(dys, is_grads_batched=True), torch.func.vmap(backward)(dys)):
        assert all(relative_error(a, b, 0) < 1e-6 for a, b in zip(batched, expected, strict=True))


# ---- layers and models


@pytest.fixture
def on_kernels(monkeypatch):
    """Let layers believe that the kernels take their tensors."""
    monkeypatch.setattr(layers, "convolution_kernels", lambda x: kernels)


@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_has_the_outputs_and_gradients_of_its_pytorch_form(packed, on_kernels, monkeypatch):
    layer, x = Convolution([3, 1, 1, 3], 8, 4).to(DEVICE), torch.randn(2, 21, 8, 8, device=DEVICE, requires_grad=True)
    resets, dy = some_resets(2, 21) if packed else None, torch.randn(2, 21, 8, 8, device=DEVICE)
    q, k, v, gate = layer(x, resets)
    joins = {part.grad_fn.next_functions[0][0] for part in (q, k, v)} | {gate.grad_fn}
    assert len(joins) == 1  # the gradients of all heads are joined once
    results = [torch.cat((q, k, v, gate), 2)]
    results += torch.autograd.grad(results[0], (x, layer.weight), dy)
    with torch.no_grad():
        parts = layer(x, resets)
        results.append(torch.cat(parts, 2))
    assert parts[0].untyped_storage().data_ptr() == parts[2].untyped_storage().data_ptr()  # of one call
    monkeypatch.setattr(layers, "convolution_kernels", lambda x: None)
    expected = torch.cat(layer(x, resets), 2)
    expected = expected, *torch.autograd.grad(expected, (x, layer.weight), dy), expected
    assert all(relative_error(a, b, 0) < 1e-6 for a, b in zip(results, expected, strict=True))


def test_kernels_compute_what_they_can_differentiate(monkeypatch):
    """Where gradients are recorded, earlier tokens go to PyTorch with the others."""
    calls, layer = [], Convolution([2, 1, 1, 2], 3, 3)
    x, recent = torch.randn(1, 5, 6, 3), torch.randn(1, 2, 4, 3)
    record = lambda name: lambda x, *_: calls.append((name, x.shape[2])) or x
    known = SimpleNamespace(convolve=record("all"), differentiable_convolve=record("operator"))
    monkeypatch.setattr(layers, "convolution_kernels", lambda x: known)
    for gradient in (False, True):
        with torch.set_grad_enabled(gradient):
            layer(x), layer(x, recent=recent)
    assert calls == [("all", 4), ("all", 4), ("operator", 2), ("operator", 1), ("operator", 1)]


def test_the_kernels_are_for_gpus_and_not_for_transforms(request):
    x, takes = torch.randn(2, 3, device=DEVICE), lambda x: dispatch.convolution_kernels(x) is kernels
    assert takes(x) == GPU
    request.getfixturevalue("on_gpu")
    taken = [takes(y) for y in (x, x.bfloat16(), x.double(), x.half())]
    torch.func.vmap(lambda x: taken.append(takes(x)) or x)(x)
    assert taken == [True, True, False, False, False]


@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_model_takes_the_kernels_whole_and_has_the_gradients_of_an_uncompiled_one(packed, on_kernels):
    sizes = dict(vocab_size=40, n_layer=2, n_head=3, n_kv_head=1, n_embd=48, reset_token=3 if packed else -1)
    model = GPT(GPTConfig(attention="sympow_gating", **sizes)).to(DEVICE)
    ids, results = torch.randint(40, (2, 21), device=DEVICE), []
    for forward in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        _, loss = forward(ids, ids)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        with torch.no_grad():
            results[-1].append(forward(ids, ids)[1])
    for name, eager, compiled in zip(["loss", *dict(model.named_parameters()), "loss"], *results, strict=True):
        assert relative_error(compiled, eager, 1e-9) < 1e-4, name
