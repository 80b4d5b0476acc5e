"""The kernel of cross entropy against float64, and a model with it against one without.

On the CPU in Triton's interpreter; with TEST_GPU=1 on the GPU.
"""

import pytest
import torch
from numerics import DEVICE
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from sympow.attention.operator import dispatch  # noqa: E402
from sympow.layers import loss  # noqa: E402
from sympow.model import GPT, GPTConfig  # noqa: E402

SHAPE = dict(vocab_size=75, n_head=4, n_kv_head=2, n_embd=24, head_dim=6, rope_base=99.0, gate_bias=2.0)


@pytest.fixture
def kernel(monkeypatch):
    """Return a function that switches the kernel on or off, for tensors on the CPU too, and counts its uses."""
    uses = []

    def switch(on):
        reason = lambda form, device, dtype: uses.append(dtype) or "" if on else "off"
        reason._dynamo_marked_constant = True  # like dispatch.py's
        monkeypatch.setattr(loss, "why_not", reason)
        uses.clear()
        return uses

    return switch


def test_where_the_kernel_cannot_run_one_line_says_so(monkeypatch):
    monkeypatch.setattr(dispatch.backend, "why_not", lambda *sizes: "Triton is not installed")
    monkeypatch.setattr(dispatch, "_warned", set())
    with pytest.warns(UserWarning, match="cross entropy runs in plain PyTorch"):
        assert dispatch.why_not("cross_entropy", "cuda", torch.bfloat16) == "Triton is not installed"
    for dtype in (torch.float64, torch.float16):  # the second cannot hold the exponentials
        assert "computed in PyTorch" in dispatch.why_not("cross_entropy", "cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_entry_whose_exponential_would_overflow_comes_late(dtype, kernel):
    """Later blocks of a row may raise the reference of exponents, twice; so may a block after one of -inf."""
    kernel(True)
    logits, targets = 3 * torch.randn(5, 3100), torch.tensor([7, 1500, 2999, 3050, 2500])
    logits[:2, 1500], logits[1:3, 2999], logits[3, :1024], logits[4, 2000:] = 1e3, 3e4, float("-inf"), 70.0
    logits, targets = logits.to(DEVICE, dtype), targets.to(DEVICE)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    (exact_gradient,) = torch.autograd.grad(expected.sum(), exact)
    losses, d, scales = loss.compute_losses(logits.clone(), targets, 3100, True)
    assert torch.allclose(losses.double(), expected, rtol=1e-5, atol=1e-4)
    bound = 4e-3 if dtype == torch.bfloat16 else 1e-5
    assert ((d.double() * scales.unsqueeze(1) - exact_gradient).norm(dim=1) <= bound * exact_gradient.norm(dim=1)).all()


def gradients(network, model, ids, autocast):
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        _, value = network(ids, ids.roll(-1, 1))
    return [value, *torch.autograd.grad(value, list(model.parameters()))]


def assert_close(results, expected, bound):
    for a, b in zip(results, expected, strict=True):
        assert (a - b).norm() <= bound * max(b.norm(), 1e-2)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_learns_the_same_with_it(autocast, kernel):
    model = GPT(GPTConfig(**SHAPE, n_layer=2, attention="softmax,conformal_sympow", reset_token=7, bias=True))
    model.to(DEVICE)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    ids = torch.randint(0, 75, (2, 12), device=DEVICE)
    expected = gradients(model, model, ids, autocast)
    uses = kernel(True)
    assert_close(gradients(model, model, ids, autocast), expected, 0.05 if autocast else 1e-4)
    assert uses


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_is_part_of_a_compiled_graph(checkpointing, kernel):
    kernel(True)
    torch._dynamo.reset()
    pattern = dict(attention="softmax,conformal_sympow", activation_checkpointing=checkpointing)
    model = GPT(GPTConfig(**SHAPE, n_layer=2, **pattern)).to(DEVICE)
    ids = torch.randint(0, 75, (2, 33), device=DEVICE)
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
    assert_close(gradients(compiled, model, ids, True), gradients(model, model, ids, True), 0.05)
