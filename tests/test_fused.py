"""The fused kernels in the interpreter: against float64, and a model with all of them against one without."""

import warnings

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton has no wheel for this system")

import loss  # noqa: E402
from attention import check, dispatch  # noqa: E402
from attention.rotary import rotary, rotate  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

NAMES = [name for name, _ in check.FUSED_SIZES[::2]]
SHAPE = dict(vocab_size=75, n_head=4, n_kv_head=2, n_embd=24, head_dim=6, rope_base=99.0, gate_bias=2.0)


@pytest.fixture
def on(monkeypatch):
    """Return a function that switches the fused kernels of these names on, for tensors on the CPU too, and returns the
    set of those that are used from then on."""
    used = set()
    reason = lambda name, device, dtype: used.add(name) or ""
    reason._dynamo_marked_constant = True  # as that of dispatch.py
    monkeypatch.setattr(dispatch, "fused_kernel_reason", reason)

    def switch_on(*names):
        monkeypatch.setattr(dispatch, "FUSED", names)
        used.clear()
        return used

    return switch_on


def test_only_kernels_that_are_checked_can_be_switched_on():
    assert {*dispatch.FUSED} <= {*NAMES}
    assert not any(dispatch.uses_fused(name, torch.zeros(1)) for name in NAMES)


@pytest.mark.parametrize("name,dtype", check.FUSED_SIZES)
def test_a_kernel_and_its_gradients_equal_float64(name, dtype):
    line, ok = check._line(name, check.fused_errors(name, dtype, T=37, device="cpu"), dtype)
    assert ok, line


def test_a_kernel_that_is_wrong_gives_way_to_pytorch(monkeypatch):
    errors = {"y": 0.0, "dx": float("nan")}
    monkeypatch.setattr(check, "fused_errors", lambda *size: errors)
    monkeypatch.setattr(check, "remember", lambda name, find, device: find())
    monkeypatch.setattr(dispatch, "unusable_machine", lambda device: "")
    monkeypatch.setattr(dispatch, "_warned", set())
    for name, value in dict(is_available=True, is_current_stream_capturing=False, device_count=2).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    with warnings.catch_warnings(record=True) as told:
        reason = dispatch.fused_kernel_reason("rotary", "cuda", torch.bfloat16)
        assert dispatch.fused_kernel_reason("rotary", "cuda", torch.bfloat16) == reason
    assert len(told) == 1 and "rotary runs in plain PyTorch" in str(told[0].message)
    assert reason == "wrong results, rotary bfloat16: y 0.0e+00, dx nan"
    errors["dx"] = 1e-3
    assert dispatch.fused_kernel_reason("rotary", "cuda", torch.bfloat16) == ""
    assert "float64" in dispatch.fused_kernel_reason("rotary", "cuda", torch.float64)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("D", [16, 6])
def test_q_and_k_are_rotated_as_one_by_one(D, learned, on):
    """Strided views of one projection, more tokens than a program has, positions far into a text."""
    B, T, H, HKV = 2, 37, 3, 1
    found = []
    for names in ((), NAMES):
        on(*names)
        torch.manual_seed(0)
        qkv = torch.randn(B, T, (H + 2 * HKV) * D, requires_grad=True)
        q, k, _ = qkv.unflatten(-1, (-1, D)).split((H, HKV, HKV), 2)
        u = 60_000 + torch.rand(B, T, dtype=torch.float64).cumsum(1) if learned else torch.arange(T).double()
        u.requires_grad_(learned)
        rotated = rotate(q, k, u, 65536.0)
        dy = [torch.randn(x.shape).transpose(0, 1).contiguous().transpose(0, 1) for x in rotated]
        found.append([*rotated, *torch.autograd.grad(rotated, [qkv, u][: 1 + learned], dy)])
    assert torch.equal(found[0][0], rotary(q, u, 65536.0))
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_losses_leave_the_padding_and_masked_targets_out(on):
    logits, targets = 5 * torch.randn(9, 128), torch.randint(100, (9,))
    logits[:, 100:], targets[3] = 1e4, -1
    expected = F.cross_entropy(logits[:, :100], targets, reduction="none", ignore_index=-1)
    for names in ((), ("cross_entropy",)):
        on(*names)
        losses, *nothing = loss.compute_losses(logits.clone(), targets, 100, False)
        again, d, scales = loss.compute_losses(logits.clone(), targets, 100, True)
        assert nothing == [None, None] and torch.equal(losses, again)
        assert torch.allclose(losses.flatten(), expected, rtol=1e-5) and (scales is None) == (not names)
        d = d if scales is None else d * scales.unsqueeze(1)
        assert (d[:, 100:] == 0).all() and (d[3] == 0).all() and torch.allclose(d.sum(1), torch.zeros(9), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_entry_whose_exponential_would_overflow_comes_late(dtype, on):
    """Later blocks of a row may raise what exponents are relative to, twice; so may a first block of -inf."""
    on("cross_entropy")
    logits, targets = 3 * torch.randn(5, 3100), torch.tensor([7, 1500, 2999, 3050, 2500])
    logits[:2, 1500], logits[1:3, 2999], logits[3, :1024], logits[4, 2000:] = 1e3, 3e4, float("-inf"), 70.0
    logits = logits.to(dtype)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    (wanted,) = torch.autograd.grad(expected.sum(), exact)
    losses, d, scales = loss.compute_losses(logits.clone(), targets, 3100, True)
    assert torch.allclose(losses.double(), expected, rtol=1e-5, atol=1e-4)
    bound = 4e-3 if dtype == torch.bfloat16 else 1e-5
    assert ((d.double() * scales.unsqueeze(1) - wanted).norm(dim=1) <= bound * wanted.norm(dim=1)).all()


def test_float16_cannot_hold_the_exponentials(on):
    used = on("cross_entropy")
    assert loss.compute_losses(torch.randn(3, 8).half(), torch.zeros(3, dtype=torch.int64), 8, True)[2] is None
    assert not used


def gradients(network, model, ids, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, value = network(ids, ids.roll(-1, 1))
    return [value, *torch.autograd.grad(value, list(model.parameters()))]


def assert_close(found, wanted, bound):
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= bound * max(b.norm(), 1e-2)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_learns_the_same_with_all_of_them(autocast, on):
    model = GPT(GPTConfig(**SHAPE, n_layer=2, attention="softmax,conformal_sympow", reset_token=7, bias=True))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    ids = torch.randint(0, 75, (2, 12))
    wanted = gradients(model, model, ids, autocast)
    for name in NAMES:
        used = on(name)
        assert_close(gradients(model, model, ids, autocast), wanted, 0.05 if autocast else 1e-4)
        assert used == {name}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_they_are_part_of_a_compiled_graph(checkpointing, on):
    on(*NAMES)
    torch._dynamo.reset()
    pattern = dict(attention="softmax,conformal_sympow", activation_checkpointing=checkpointing)
    model = GPT(GPTConfig(**SHAPE, n_layer=2, **pattern))
    ids = torch.randint(0, 75, (2, 33))
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
    assert_close(gradients(compiled, model, ids, True), gradients(model, model, ids, True), 0.05)
