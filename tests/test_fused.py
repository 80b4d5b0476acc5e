"""The fused kernels in the interpreter: against float64, and a model with all of them against one without."""

import warnings

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from sympow.layers import loss  # noqa: E402
from sympow.attention.operator import check, dispatch  # noqa: E402
from sympow.attention.rotary import rotary, rotate_heads  # noqa: E402
from sympow.model import GPT, GPTConfig  # noqa: E402

NAMES = ["rotary", "cross_entropy"]
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


@pytest.mark.parametrize("size", [size for size in check.SIZES if size.form in NAMES])
def test_a_kernel_and_its_gradients_equal_float64(size):
    bound, gradient_bound = check.TOLERANCE[size.dtype]
    for name, error in check.errors(size, 37, "cpu").items():
        assert error <= (bound if name == "y" else gradient_bound), name


def test_a_kernel_that_is_wrong_gives_way_to_pytorch(monkeypatch):
    errors = {"y": 0.0, "dx": float("nan")}
    monkeypatch.setattr(check, "errors", lambda size, T: errors)
    monkeypatch.setattr(check, "remember", lambda name, compare, *rest: compare())
    monkeypatch.setattr(dispatch, "unusable_machine", lambda device: "")
    monkeypatch.setattr(dispatch, "_warned", set())
    for name, value in dict(is_available=True, is_current_stream_capturing=False, device_count=2).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    with warnings.catch_warnings(record=True) as told:
        reason = dispatch.fused_kernel_reason("rotary", "cuda", torch.bfloat16)
        assert dispatch.fused_kernel_reason("rotary", "cuda", torch.bfloat16) == reason
    assert len(told) == 1 and "rotary runs in plain PyTorch" in str(told[0].message)
    assert reason == "wrong results, rotary bfloat16 T=400: y 0.0e+00, dx nan"
    errors["dx"] = 1e-3
    assert dispatch.fused_kernel_reason("rotary", "cuda", torch.bfloat16) == ""
    assert "float64" in dispatch.fused_kernel_reason("rotary", "cuda", torch.float64)


def turned(on, qkv, H, Hkv, u, dy, compiled=False):
    """Return [q, k, v and the gradients to qkv and, if u needs one, to u] in PyTorch, and the same on the kernel.

    dy: the gradients of q, k and v, None where an output is not used.
    """
    leaves, results = [qkv.requires_grad_(), u][: 1 + u.requires_grad], []
    for names in ((), ("rotary",)):
        used, f = on(*names), rotate_heads
        if compiled:
            torch._dynamo.reset()
            f = torch.compile(f, backend="aot_eager_decomp_partition", fullgraph=True)
        outputs = f(qkv, H, Hkv, u, 65536.0)
        assert outputs[2].data_ptr() == qkv[:, :, H + Hkv :].data_ptr()  # v is not copied
        used_outputs, grads = zip(*((y, d) for y, d in zip(outputs, dy, strict=True) if d is not None))
        gradients = torch.autograd.grad(used_outputs, leaves, grads, allow_unused=True)
        results.append([*outputs, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients))])
        assert used == {*names}
    return results


def assert_same(results, expected, bound=1e-5):
    for a, b in zip(results, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=bound, atol=bound)


def positions(kind, B, T):
    """Return positions far into a text: of all sequences or of each, with a gradient if they are learned."""
    shape = (T,) if "shared" in kind else (B, T)
    u = 60_000 + torch.rand(shape, dtype=torch.float64).cumsum(-1)
    return u.requires_grad_("learned" in kind)


@pytest.mark.parametrize("kind", ["shared", "own", "learned", "learned, shared"])
@pytest.mark.parametrize("D", [48, 6])
def test_q_and_k_are_rotated_as_one_by_one_and_v_is_left(D, kind, on):
    """Strided views, more tokens than a program has, gradients of any strides, D between powers of two."""
    B, T, H, Hkv = 2, 37, 3, 1
    qkv = torch.randn(T, B, H + 2 * Hkv, D + 4).transpose(0, 1)[..., :D]
    dy = [torch.randn(B, n, T, D).transpose(1, 2) for n in (H, Hkv)] + [torch.randn(B, T, 1, 1).expand(B, T, Hkv, D)]
    u = positions(kind, B, T)
    plain, fused = turned(on, qkv, H, Hkv, u, dy)
    assert torch.equal(plain[0], rotary(qkv[:, :, :H], u, 65536.0))
    assert_same(fused, plain)
    assert fused[3].is_contiguous() and torch.equal(fused[3][:, :, H + Hkv :], dy[2])


def test_entries_of_features_need_not_be_beside_each_other(on):
    qkv = torch.randn(2, 5, 8, 7).transpose(2, 3)
    assert_same(*turned(on, qkv, 3, 2, positions("learned", 2, 5), [torch.randn(2, 5, n, 8) for n in (3, 2, 2)])[::-1])


@pytest.mark.parametrize("without,compiled", [*((x, False) for x in ("q", "k", "v", "qk", "kv")), ("kv", True)])
def test_the_gradient_of_what_is_not_used_is_zero(without, compiled, on):
    sizes = dict(q=4, k=2, v=2)
    dy = [None if name in without else torch.randn(2, 9, n, 6) for name, n in sizes.items()]
    for kind in ("own", "learned"):
        assert_same(*turned(on, torch.randn(2, 9, 8, 6), 4, 2, positions(kind, 2, 9), dy, compiled)[::-1])


@pytest.mark.parametrize("kind", ["shared", "learned"])
def test_the_gradient_of_a_compiled_rotation_is_that_of_the_kernel_alone(kind, on):
    """v is a view of an input of the graph, of which torch.compile might take the gradient elsewhere."""
    dy = [torch.randn(2, 9, n, 6) for n in (4, 2, 2)]
    assert_same(*turned(on, torch.randn(2, 9, 8, 6), 4, 2, positions(kind, 2, 9), dy, compiled=True)[::-1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_rotates_too(mode, on):
    qkv, u = torch.randn(1, 3, 5, 6), torch.arange(3.0, dtype=torch.float64)
    expected = rotate_heads(qkv, 3, 1, u, 99.0)
    on("rotary")
    with mode():
        assert_same(rotate_heads(qkv, 3, 1, u, 99.0), expected)


def test_under_torchs_transforms_pytorch_rotates(on):
    qkv, u = torch.randn(3, 2, 5, 5, 6), positions("own", 2, 5)
    product = lambda qkv: (torch.cat(rotate_heads(qkv, 3, 1, u, 99.0), 2) ** 3).sum()
    transformed = lambda: [
        torch.func.vmap(torch.func.grad(product))(qkv), *torch.func.jvp(product, (qkv[0],), (qkv[1],))
    ]  # fmt: skip
    expected = transformed()
    on("rotary")
    assert_same(transformed(), expected)


def test_losses_leave_the_padding_and_masked_targets_out(on):
    logits, targets = 5 * torch.randn(9, 128), torch.randint(100, (9,))
    logits[:, 100:], targets[3] = 1e4, -1
    expected = F.cross_entropy(logits[:, :100], targets, reduction="none", ignore_index=-1)
    for names in ((), ("cross_entropy",)):
        on(*names)
        losses, *nothing = loss.compute_losses(logits.clone(), targets, 100, False)
        repeated, d, scales = loss.compute_losses(logits.clone(), targets, 100, True)
        assert nothing == [None, None] and torch.equal(losses, repeated)
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
    (exact_gradient,) = torch.autograd.grad(expected.sum(), exact)
    losses, d, scales = loss.compute_losses(logits.clone(), targets, 3100, True)
    assert torch.allclose(losses.double(), expected, rtol=1e-5, atol=1e-4)
    bound = 4e-3 if dtype == torch.bfloat16 else 1e-5
    assert ((d.double() * scales.unsqueeze(1) - exact_gradient).norm(dim=1) <= bound * exact_gradient.norm(dim=1)).all()


def test_float16_cannot_hold_the_exponentials(on):
    used = on("cross_entropy")
    assert loss.compute_losses(torch.randn(3, 8).half(), torch.zeros(3, dtype=torch.int64), 8, True)[2] is None
    assert not used


def gradients(network, model, ids, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, value = network(ids, ids.roll(-1, 1))
    return [value, *torch.autograd.grad(value, list(model.parameters()))]


def assert_close(results, expected, bound):
    for a, b in zip(results, expected, strict=True):
        assert (a - b).norm() <= bound * max(b.norm(), 1e-2)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_learns_the_same_with_all_of_them(autocast, on):
    model = GPT(GPTConfig(**SHAPE, n_layer=2, attention="softmax,conformal_sympow", reset_token=7, bias=True))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    ids = torch.randint(0, 75, (2, 12))
    expected = gradients(model, model, ids, autocast)
    for name in NAMES:
        used = on(name)
        assert_close(gradients(model, model, ids, autocast), expected, 0.05 if autocast else 1e-4)
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
