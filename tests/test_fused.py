"""The fused kernels in the interpreter: against float64, and a model with all of them against one without."""

import types
import warnings

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from sympow.layers import loss  # noqa: E402
from sympow.attention import ATTENTIONS, even_power  # noqa: E402
from sympow.attention.operator import check, dispatch  # noqa: E402
from sympow.attention.rotary import rotary, rotate_heads  # noqa: E402
from sympow.kernels import fused, operators, rotated  # noqa: E402
from sympow.model import GPT, GPTConfig  # noqa: E402

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


@pytest.mark.parametrize("name,dtype", [*check.FUSED_SIZES, ("rotary", torch.float16)])
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


def turned(on, qkv, H, Hkv, u, dy, compiled=False):
    """Return [q, k, v and the gradients to qkv and, if u needs one, to u] in PyTorch, and the same on the kernel.

    dy: the gradients of q, k and v, None where an output is not used.
    """
    leaves, found = [qkv.requires_grad_(), u][: 1 + u.requires_grad], []
    for names in ((), ("rotary",)):
        used, f = on(*names), rotate_heads
        if compiled:
            torch._dynamo.reset()
            f = torch.compile(f, backend="aot_eager_decomp_partition", fullgraph=True)
        outputs = f(qkv, H, Hkv, u, 65536.0)
        assert outputs[2].data_ptr() == qkv[:, :, H + Hkv :].data_ptr()  # v is not copied
        used_outputs, grads = zip(*((y, d) for y, d in zip(outputs, dy, strict=True) if d is not None))
        gradients = torch.autograd.grad(used_outputs, leaves, grads, allow_unused=True)
        found.append([*outputs, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients))])
        assert used == {*names}
    return found


def assert_same(found, wanted, bound=1e-5):
    for a, b in zip(found, wanted, strict=True):
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
    wanted = rotate_heads(qkv, 3, 1, u, 99.0)
    on("rotary")
    with mode():
        assert_same(rotate_heads(qkv, 3, 1, u, 99.0), wanted)


def test_under_torchs_transforms_pytorch_rotates(on):
    qkv, u = torch.randn(3, 2, 5, 5, 6), positions("own", 2, 5)
    product = lambda qkv: (torch.cat(rotate_heads(qkv, 3, 1, u, 99.0), 2) ** 3).sum()
    transformed = lambda: [
        torch.func.vmap(torch.func.grad(product))(qkv), *torch.func.jvp(product, (qkv[0],), (qkv[1],))
    ]  # fmt: skip
    wanted = transformed()
    on("rotary")
    assert_same(transformed(), wanted)


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


@pytest.fixture
def kernels(on, monkeypatch):
    """Switch attention's kernels and rotary on, for tensors on the CPU too; return the shapes of qkv that the one
    operator was called with."""
    reason, rotate, calls = dispatch.kernel_reason, rotated.rotate, []
    asked = lambda form, device, *sizes: reason(form, "cuda", *sizes)
    asked._dynamo_marked_constant = True
    monkeypatch.setattr(dispatch, "kernel_reason", asked)
    monkeypatch.setattr(dispatch, "failure", lambda *size: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(rotated, "rotate", lambda qkv, *sizes: calls.append(qkv.shape) or rotate(qkv, *sizes))
    on("rotary")
    return calls


def power_model(attention, **settings):
    return GPT(GPTConfig(**SHAPE | dict(n_layer=1, head_dim=16, attention=attention) | settings))


@pytest.mark.parametrize("attention,p", [("even_power", 4), ("sympow", 2), ("sympow_gating", 2)])
def test_rotations_and_the_quadratic_form_are_one_operator(attention, p, kernels, on):
    model = power_model(attention, p=p, reset_token=7)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    ids = torch.randint(0, 75, (2, 140))
    found = gradients(model, model, ids, False)
    assert kernels == [(2, 140, 8, 16)]
    with torch.no_grad():
        assert torch.allclose(model(ids, ids.roll(-1, 1))[1], found[0], rtol=1e-5)
    assert len(kernels) == 2
    on()  # no rotations, and so two operators
    assert_close(found, gradients(model, model, ids, False), 1e-4)
    assert len(kernels) == 2


@pytest.mark.parametrize(
    "attention,settings",
    [("sympow_gating", dict(positions="learned", n_positions=9)), ("sympow_gating", dict(head_dim=12)),
     ("sympow_gating", dict(form="chunked", chunk_size=128)), ("conformal_sympow", {}), ("softmax", {})],
)  # fmt: skip
def test_what_it_does_not_take_are_two(attention, settings, kernels):
    model, ids = power_model(attention, **settings), torch.randint(0, 75, (1, 9))
    gradients(model, model, ids, False)
    with torch.no_grad():
        model(ids)
    assert not kernels


def test_an_attention_of_ones_own_is_not_passed_by(kernels, monkeypatch):
    class Halved(ATTENTIONS["sympow"]):
        def attend(self, q, k, v, log_g):
            return super().attend(q, k, v, log_g) / 2

    monkeypatch.setitem(ATTENTIONS, "halved", Halved)
    model, ids = power_model("halved", p=2), torch.randint(0, 75, (1, 9))
    model(ids)
    assert not kernels


def test_where_it_is_wrong_there_are_two_operators(kernels, monkeypatch):
    asked, model, ids = [], power_model("sympow_gating"), torch.randint(0, 75, (1, 9))
    wrong = lambda form, *size: asked.append((form, *size[:4])) or "wrong" * (form == "rotated")
    monkeypatch.setattr(dispatch, "failure", wrong)
    monkeypatch.setattr(dispatch, "_warned", set())
    plan = model.transformer.h[0].attn.mix.training_plan
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gradients(model, model, ids, False)
        assert plan(9, torch.float32, "cpu").on_kernels
    assert not kernels and {form for form, *_ in asked} == {"rotated", "quadratic"}
    assert [str(w.message) for w in told if "kernels" in str(w.message)] == [
        "power attention runs without its rotated kernels, which fail on this machine: wrong"
    ]
    monkeypatch.setattr(check, "_found", {(0, "rotated, a size"): "wrong"})
    monkeypatch.setattr(dispatch, "failure", lambda *size: "")
    assert check.kernel_failure(model, 9, torch.float32) == ""


@pytest.mark.parametrize("settings", [dict(head_dim=12), dict(p=10), {}])
def test_what_is_compared_is_what_will_run(settings, kernels, on, monkeypatch):
    asked, ids = [], torch.randint(0, 75, (1, 9))
    monkeypatch.setattr(dispatch, "failure", lambda form, *size: asked.append((form, *size)) or "")
    model, found = power_model("sympow", **settings), []
    for names in (("rotary",), ()):
        on(*names)
        for run in (lambda: model.transformer.h[0].attn.mix.training_plan(9, torch.float32, "cpu"), lambda: model(ids)):
            asked.clear()
            run()
            found.append({form for form, *_ in asked})
    one = {"rotated"} if not settings else {"quadratic"} if "head_dim" in settings else set()
    assert found == [one, one, *[one and {"quadratic"}] * 2] and bool(kernels) == (not settings)


def test_generation_contexts_and_transforms_have_their_own_ways(kernels, monkeypatch):
    mix, x, qkv = power_model("sympow_gating").transformer.h[0].attn.mix, torch.randn(1, 9, 2), torch.randn(1, 9, 8, 16)
    with torch.no_grad():
        whole, _ = mix(x, qkv)
        assert len(kernels) == 1
        stepped, state = mix(x, qkv, state=mix.empty_state(1, "cpu"))
        assert state is not None and torch.allclose(stepped, whole, atol=1e-5)
        mapped = torch.func.vmap(lambda qkv: mix(x, qkv)[0])(qkv.expand(2, 1, 9, 8, 16))
        assert torch.allclose(mapped, whole.expand(2, 1, 9, 4, 16), atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            assert mix(x, qkv)[0].dtype == torch.bfloat16
        with pytest.raises(ValueError, match="must be positive"):
            mix(x[:, :0], qkv[:, :0])
        monkeypatch.setattr(even_power, "power_attention_in_context", lambda *x, **how: "of a context")
        mix.context = types.SimpleNamespace(positions=lambda x, speed: torch.arange(9.0).double())
        assert mix(x, qkv)[0] == "of a context"
    assert len(kernels) == 1


class Unused(torch.autograd.Function):
    """Gives what it takes no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("dtype,tables", [(torch.float32, 2), (torch.float16, 1)])
def test_gradients_are_turned_back_where_they_are_computed(dtype, tables):
    """As by the two operators, but for one rounding: strided heads, a table for each sequence or one for all."""
    B, T, H, Hkv, D = 2, 150, 4, 2, 16
    qkv = torch.randn(B, T, D + 8, H + 2 * Hkv).transpose(2, 3)[..., :D].to(dtype).requires_grad_()
    log_g = F.logsigmoid(torch.randn(B, T, Hkv) + 4).requires_grad_()
    angle, dy = torch.randn(B, T, D // 2)[:tables].squeeze(0), torch.randn(B, T, H, D).to(dtype)
    table = angle.cos(), angle.sin()
    one = fused.rotated_attention(qkv, *table, log_g, H=H, p=4)
    two = operators.quadratic_attention(*fused.RotateHeads.apply(qkv, H, Hkv, *table, None), log_g, p=4)
    found, wanted = ([y, *torch.autograd.grad(y, (qkv, log_g), dy)] for y in (one, two))
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[2], wanted[2]) and found[1].is_contiguous()
    assert_close([found[1].float()], [wanted[1].float()], 1e-3 if dtype == torch.float16 else 0)
    assert torch.equal(found[1][:, :, H + Hkv :], wanted[1][:, :, H + Hkv :])
    (only,) = torch.autograd.grad(fused.rotated_attention(qkv, *table, log_g.detach(), H=H, p=4), qkv, dy)
    assert torch.equal(only, found[1])
    found = torch.autograd.grad(
        Unused.apply(fused.rotated_attention(qkv, *table, H=H, p=4)).sum(), qkv, allow_unused=True
    )
    assert found == (None,)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        (dqkv,) = torch.autograd.grad(fused.rotated_attention(qkv, *table, H=H, p=4), qkv, dy, create_graph=True)
        dqkv.sum().backward()


@pytest.mark.slow
def test_it_is_an_operator_as_torch_wants_them():
    qkv, log_g = torch.randn(1, 130, 8, 16, requires_grad=True), torch.zeros(1, 130, 2, requires_grad=True)
    angle = torch.randn(130, 8)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(rotated._rotated, (qkv, angle.cos(), angle.sin(), log_g, 4, 2), test_utils=tests)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_model_has_it_in_one_graph(checkpointing, kernels):
    torch._dynamo.reset()
    model = power_model("sympow_gating", p=2, activation_checkpointing=checkpointing)
    ids = torch.randint(0, 75, (2, 33))
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
    assert_close(gradients(compiled, model, ids, False), gradients(model, model, ids, False), 1e-3)
    assert len(kernels) >= 2


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
