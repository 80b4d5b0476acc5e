"""The model: one file, five attentions, the same function read at once or token by token."""

import copy
import itertools
import math
import types

import pytest
import torch
import torch.utils.flop_counter
from torch import nn

from sympow.layers import activation
from sympow.layers import loss as loss_module
from sympow.layers import norm as norm_module
from sympow.attention import ATTENTIONS
from sympow.attention.gates import linear_fp32
from sympow.model import GPT, GPTConfig

KINDS = [(a, "auto") for a in ATTENTIONS] + [("conformal_sympow", "none"), ("conformal_sympow", "fixed")]
POWER = [k for k in KINDS if k[0] not in ("softmax", "even_power", "adaptive_power", "heinsen")]


def tiny(attention="sympow", gate="auto", **kwargs):
    """Return a small model with grouped heads whose gates and rotations differ from their initial values."""
    torch.manual_seed(0)
    shape = dict(vocab_size=97, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, head_dim=8, gate_bias=2.0, rope_base=100.0)
    model = GPT(GPTConfig(**{**shape, "attention": attention, "gate": gate, **kwargs}))
    for name, p in model.named_parameters():
        if "W_" in name:
            torch.nn.init.normal_(p, std=0.3)
        elif p.dim() == 2:
            torch.nn.init.normal_(p, std=0.2)  # logits of a size that shows differences
    return model.eval()


@pytest.mark.parametrize("attention,gate", KINDS)
@pytest.mark.parametrize("switch_over", ["auto", "always"])
def test_token_by_token_equals_reading_at_once(attention, gate, switch_over):
    model = tiny(attention, gate, reset_token=7)
    default = model.transformer.h[0].attn.mix.switch_over
    ids = torch.randint(0, 97, (2, 150))
    with torch.no_grad():
        expected, _ = model(ids)
        assert expected.std() > 0.5
        state = model.empty_state(2, switch_over if default == "auto" else None)
        x, state = model.hidden(ids[:, :40], state)
        logits = [model.logits(x)]
        for t in range(40, 150):
            step, state = model.step(ids[:, t], state)
            logits.append(step.unsqueeze(1))
    assert (torch.cat(logits, dim=1) - expected).abs().max() < 1e-4
    assert state.n_tokens == 150
    if default is not None:  # a layer with a KV cache
        assert (state.layers[0].power is not None) == (default == "auto")  # the flush did happen on the way


@pytest.mark.parametrize("attention,gate", KINDS)
def test_a_long_prompt_is_read_in_pieces(attention, gate):
    model, ids = tiny(attention, gate), torch.randint(0, 97, (1, 70))
    with torch.no_grad():
        logits, state = model.read(ids, model.empty_state(1), piece=16)
        assert (logits - model(ids)[0][:, -1]).abs().max() < 1e-4


@pytest.mark.parametrize("attention,gate", POWER)
def test_memory_of_a_state_is_bounded(attention, gate):
    model = tiny(attention, gate)
    state, sizes = model.empty_state(1), []
    with torch.no_grad():
        for _ in range(400):
            _, state = model.step(torch.randint(0, 97, (1,)), state)
            sizes.append(state.bytes())
    power = 2 * 2 * 36 * 9 * 4  # layers x heads x Dphi x (E + 1) x bytes
    assert max(sizes[:20]) < 1.1 * power and power < min(sizes[100:])
    assert max(sizes[100:]) == max(sizes[300:]) < 2.2 * power


@pytest.mark.parametrize("p", [2, 4])
def test_an_even_power_checkpoint_loaded_as_sympow_gives_the_same_logits(p):
    even, sympow = tiny("even_power", p=p), tiny("sympow", p=p, form="chunked", chunk_size=8)
    ids = torch.randint(0, 97, (2, 50))
    sympow.load_state_dict(even.state_dict())
    with torch.no_grad():
        assert (even(ids)[0] - sympow(ids)[0]).abs().max() < 1e-4


@pytest.mark.parametrize("form", ["quadratic", "chunked", "recurrent"])
def test_the_form_does_not_change_what_is_learned(form):
    ids = torch.randint(0, 97, (2, 33))
    results = []
    for kwargs in ({}, dict(form=form, chunk_size=8)):
        model = tiny("conformal_sympow", **kwargs).double()
        model(ids, ids)[1].backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-12) for a, b in zip(*results))


@pytest.mark.parametrize("attention,gate", KINDS)
def test_a_reset_token_hides_everything_before_it(attention, gate):
    model = tiny(attention, gate, reset_token=7)
    ids = torch.randint(8, 97, (1, 30))
    ids[0, 12] = 7
    other = ids.clone()
    other[0, :12] = torch.randint(8, 97, (12,))
    with torch.no_grad():
        a, b, alone = model(ids)[0], model(other)[0], model(ids[:, 12:])[0]
    assert (a[0, 12:] - b[0, 12:]).abs().max() < 1e-5 < (a[0, 5:12] - b[0, 5:12]).abs().max()
    assert (a[0, 12:] - alone[0]).abs().max() < 1e-5


@pytest.mark.parametrize("attention,gate", KINDS)
def test_no_token_sees_the_future_and_every_parameter_learns(attention, gate):
    model, ids = tiny(attention, gate), torch.randint(0, 97, (1, 30))
    x = model.transformer.wte(ids).detach().requires_grad_()
    model.transformer.wte.register_forward_hook(lambda *_: x)
    (g,) = torch.autograd.grad(model(ids)[0][0, 17].square().sum(), x)
    assert (g[0, 18:] == 0).all() and (g[0, :18].abs().sum(-1) > 0).all()
    model = tiny(attention, gate)
    model(ids, ids)[1].backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_activation_checkpointing_changes_nothing(attention):
    ids = torch.randint(0, 97, (2, 20))
    grads = []
    for on in (False, True):
        model = tiny(attention, activation_checkpointing=on)
        model(ids, ids)[1].backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


OPTIONS = {
    "plain": {},
    "checkpointing": dict(activation_checkpointing=True),
    "chunked, resets": dict(form="chunked", chunk_size=8, reset_token=3),
}
COMPILED = {  # each attention and each option; all pairs, with two layers, where slow tests run
    ("softmax", "plain"), ("even_power", "chunked, resets"), ("sympow", "plain"), ("sympow_gating", "checkpointing"),
    ("conformal_sympow", "chunked, resets"), ("adaptive_power", "chunked, resets"), ("heinsen", "chunked, resets"),
}  # fmt: skip


@pytest.mark.slow
def test_a_pattern_compiles_without_a_graph_break():
    compiles_without_a_graph_break("sympow_gating,softmax", "chunked, resets", n_layer=2)


def compiles_without_a_graph_break(attention, option, n_layer):
    torch._dynamo.reset()
    ids = torch.randint(0, 97, (2, 20))
    model = tiny(attention, n_layer=n_layer, **OPTIONS[option])
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, ids)[1]
    loss.backward()
    assert torch.allclose(loss, model(ids, ids)[1])


@pytest.mark.parametrize("attention,option", sorted(COMPILED))
def test_compiles_without_a_graph_break(attention, option):
    assert {attention for attention, _ in COMPILED} == set(ATTENTIONS)
    compiles_without_a_graph_break(attention, option, n_layer=1)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_pair_compiles_without_a_graph_break(attention, option):
    compiles_without_a_graph_break(attention, option, n_layer=2)


def test_the_loss_is_the_mean_over_targets_and_never_holds_all_logits(monkeypatch):
    model, ids = tiny(), torch.randint(0, 97, (2, 150))
    targets = torch.randint(0, 97, (2, 150))
    targets[1, 30:] = -1
    logits = model(ids)[0]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    whole = model(ids, targets)[1]
    whole.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    monkeypatch.setattr(loss_module, "LOSS_TOKENS", 16)
    calls, saved, linear = [], [], loss_module.F.linear
    record = lambda x, w, *rest: calls.append((x.shape, w.data_ptr())) or linear(x, w, *rest)
    monkeypatch.setattr(loss_module.F, "linear", record)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        pieces = model(ids, targets)[1]
    pieces.backward()
    head = [shape for shape, weight in calls if weight == model.transformer.wte.weight.data_ptr()]
    assert len(head) == 19 and max(shape[0] for shape in head) <= 16  # each once
    assert not [shape for shape in saved if shape[-1:] == (97,)]
    assert torch.allclose(whole, expected) and torch.allclose(pieces, expected)
    assert all(torch.allclose(p.grad, g, atol=1e-6) for p, g in zip(model.parameters(), grads))
    assert model(ids, torch.full_like(ids, -1))[1] == 0  # no target at all

    with torch.no_grad(), torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        assert torch.allclose(model(ids, targets)[1], expected)
    products = counter.get_total_flops()
    with torch.no_grad(), torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        model(ids)
    assert products == counter.get_total_flops()  # evaluation makes no gradients


def test_the_paddings_logits_are_cut_off():
    model = GPT(GPTConfig(vocab_size=257, n_layer=1, n_head=2, n_embd=16))
    assert model.transformer.wte.weight.shape == (320, 16)
    assert model(torch.zeros(1, 3, dtype=torch.long))[0].shape == (1, 3, 257)


@pytest.mark.parametrize("attention", ["sympow_gating", "conformal_sympow"])
@pytest.mark.parametrize("bias", [0.0, 6.9])
def test_a_fresh_models_mean_gate_is_sigmoid_of_gate_bias(attention, bias):
    model = GPT(GPTConfig(vocab_size=97, n_layer=1, n_head=4, n_embd=32, attention=attention, gate_bias=bias))
    mix = model.transformer.h[0].attn.mix
    gates = mix.log_gates(linear_fp32(torch.randn(2, 50, 32), mix.input_weight())).exp()
    assert gates.shape == (2, 50, 4)
    assert gates.mean().item() == pytest.approx(1 / (1 + math.exp(-bias)), rel=1e-5)


def test_statistics_are_those_of_the_model_without_dropout():
    model, ids = tiny("conformal_sympow", dropout=0.5), torch.randint(0, 97, (2, 30))
    expected = model.statistics(ids)
    assert not model.training and len(expected["gate"]) == len(expected["beta"]) == 2
    model.train()
    assert model.statistics(ids) == expected and model.training


def test_a_fresh_conformal_model_is_a_plain_one():
    plain, conformal = tiny("sympow"), tiny("conformal_sympow", "none")
    torch.nn.init.zeros_(conformal.transformer.h[0].attn.mix.W_beta)
    torch.nn.init.zeros_(conformal.transformer.h[1].attn.mix.W_beta)
    conformal.load_state_dict(plain.state_dict(), strict=False)
    ids = torch.randint(0, 97, (1, 30))
    with torch.no_grad():
        assert torch.allclose(plain(ids)[0], conformal(ids)[0], atol=1e-6)


def test_gpt2_sizes_names_and_initialisation():
    with torch.device("meta"):
        model = GPT(GPTConfig(bias=True))
    names = dict(model.named_parameters())
    assert sum(p.numel() for p in names.values()) / 1e6 == pytest.approx(124, abs=1)
    for name in (
        "wte.weight", "h.0.ln_1.weight", "h.11.attn.c_attn.weight", "h.3.attn.c_proj.bias", "h.0.mlp.c_fc.weight",
        "ln_f.weight",
    ):  # fmt: skip
        assert f"transformer.{name}" in names
    assert not [n for n in names if n.startswith("lm_head")]  # tied: saved once
    model = GPT(GPTConfig(vocab_size=640, n_layer=8, n_head=4, n_embd=256))
    assert model.transformer.wte.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.transformer.h[0].attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.transformer.h[0].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)


def test_heads_may_have_any_even_dimension():
    config = GPTConfig(n_head=48, head_dim=16, attention="sympow", p=4, n_layer=1, n_embd=96, vocab_size=97)
    model = GPT(config)
    assert model.transformer.h[0].attn.c_attn.weight.shape == (3 * 768, 96)
    assert model(torch.zeros(1, 4, dtype=torch.long))[0].shape == (1, 4, 97)


@pytest.mark.parametrize(
    "wrong,message",
    [
        (dict(n_embd=100, n_head=12), "n_embd must be a multiple of n_head, got 100 and 12: n_head=10"),
        (dict(p=3), "p must be a positive even integer, got 3"),
        (dict(head_dim=15), "head_dim must be even"),
        (dict(n_kv_head=5), "n_head must be a multiple of n_kv_head, got 12 and 5"),
        (dict(attention="linear"), "attention must be one of softmax, even_power"),
        (dict(attention="sympow", gate="learned"), "attention=sympow has no gates, got gate=learned"),
        (dict(attention="sympow_gating", gate="none"), "is attention=sympow"),
        (dict(form="fast"), "form must be one of"),
    ],
)
def test_impossible_configurations_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**wrong)


def test_flops_grow_with_the_context_only_in_the_quadratic_form():
    quadratic = GPT(GPTConfig(vocab_size=97, n_layer=1, n_head=2, n_embd=64, attention="even_power"))
    chunked = GPT(GPTConfig(vocab_size=97, n_layer=1, n_head=2, n_embd=64, attention="sympow", form="chunked"))
    weights = 6 * sum(p.numel() for p in quadratic.parameters() if p.dim() == 2)
    assert quadratic.flops_per_token(4096) == weights + 2 * 6 * 4096 * 32
    assert chunked.flops_per_token(1 << 14) == chunked.flops_per_token(1 << 20)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gates", [0, 3])
def test_a_gain_that_is_a_part_of_the_linear_layer_changes_nothing(bias, gates, dtype):
    layers = nn.LayerNorm(96, bias=False).double(), nn.Linear(96, 160, bias=bias).double()
    nn.init.normal_(layers[0].weight, 1, 0.5)
    layers[0].weight.data[7] = 0  # its gradient must be right too
    x = (3 * torch.randn(50, 96) + 5).double()
    x[3] = 2.0  # no variance
    dy = torch.randn(50, gates or 96).double(), torch.randn(50, 160).double()
    rows = torch.randn(gates, 96).double() if gates else None

    def run(compute, layers, x, dy):
        leaves = [x.clone().requires_grad_(), *layers[0].parameters(), *layers[1].parameters()]
        weight = rows if rows is None else rows.to(x.dtype).requires_grad_()
        leaves += [weight] if gates else []
        outputs = compute(*layers, leaves[0], weight)
        return [*outputs, *torch.autograd.grad(outputs, leaves, [d.to(y.dtype) for d, y in zip(dy, outputs)])]

    first = lambda x, weight: x if weight is None else x @ weight.t()
    wanted = run(lambda norm, linear, x, weight: (first(norm(x), weight), linear(norm(x))), layers, x, dy)
    wide = torch.promote_types(dtype, torch.float32)
    narrow = [copy.deepcopy(layer).to(wide) for layer in layers]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = run(lambda *given: norm_module.folded(*given, dtype), narrow, x.to(wide), dy)
    assert [y.dtype for y in found] == [wide, dtype] + [wide] * (len(found) - 2)
    limit = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype]
    for a, b in zip(found, wanted):
        a, b = (t[[i for i in range(50) if i != 3]] if len(t) == 50 else t for t in (a, b))  # 1 / sqrt(eps) there
        assert (a.double() - b).norm() <= limit * b.norm()
    assert all(torch.isfinite(y).all() for y in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gain_that_is_a_part_of_the_head_changes_nothing(dtype, monkeypatch):
    model, narrow = tiny(n_embd=64, vocab_size=500), dtype == torch.bfloat16
    nn.init.normal_(model.transformer.ln_f.weight, 1, 0.5)
    exact, ids, norms = copy.deepcopy(model).double(), torch.randint(500, (2, 60)), []

    def run(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow and model is not exact):
            loss = model(ids[:, :-1], ids[:, 1:])[1]
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    def folds(x, norm, *linear):
        norms.append(norm)
        return not linear

    wanted, unfolded = run(exact), run(model)
    monkeypatch.setattr("sympow.layers.norm.folds", folds)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: dtype)
    found, error = run(model), lambda x, y: (x.double() - y).norm() / y.norm()
    assert norms[-1] is model.transformer.ln_f
    for a, b, c in zip(found, wanted, unfolded):
        assert error(a, b) < max(1.5 * error(c, b), 2e-3 if narrow else 2e-6)


class OnGpu(torch.Tensor):
    is_cuda = True


def test_a_stored_sum_is_the_sum():
    x, dy = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8)
    doubled = 2 * x
    y = norm_module.Stored.apply(doubled)
    assert y.data_ptr() == doubled.data_ptr() and torch.equal(y, doubled) and y.stride() == (8, 1)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], 2 * dy)
    assert norm_module.stored(doubled) is doubled  # on a CPU, uncompiled


def test_sums_are_stored_by_a_compiled_model_on_a_gpu_alone(monkeypatch):
    x, stored = torch.ones(2, 8), []
    monkeypatch.setattr(norm_module.Stored, "apply", lambda x: stored.append(x))
    for compiling, on_gpu in itertools.product((False, True), repeat=2):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        norm_module.stored(x.as_subclass(OnGpu) if on_gpu else x)
        assert len(stored) == (compiling and on_gpu)


def test_only_a_compiled_model_on_a_gpu_has_the_gain_in_the_linear_layer(monkeypatch):
    class Other(nn.Linear):  # LoRA, quantised weights
        pass

    hooks = [
        lambda layer: layer.register_forward_hook(lambda *given: None),
        lambda layer: layer.register_full_backward_hook(lambda *given: None),
        lambda layer: setattr(layer, "forward", layer.forward),
    ]
    taken, x = [], torch.ones(2, 8)
    monkeypatch.setattr(norm_module, "folded", lambda *given: taken.append(given))
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    for compiling, autocast, on_gpu, bias, kind, hook, dtype in itertools.product(
        *[(False, True)] * 4, (nn.Linear, Other), (None, *hooks), (torch.float32, torch.float64)
    ):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: autocast)
        norm, linear = nn.LayerNorm(8, bias=bias, dtype=dtype), kind(8, 8, dtype=dtype)
        if hook:
            hook(linear)
        given = (x.as_subclass(OnGpu) if on_gpu else x).to(dtype)
        norm_module.norm_linear(norm, linear, given)
        if not hook and kind is nn.Linear:
            folded = norm_module.norm_weight(norm, linear.weight, given)[1] is not linear.weight
            assert folded == (compiling and autocast and on_gpu and not bias and dtype == torch.float32)
    norm, linear, x, weight, dtype = taken.pop()
    assert not taken and norm.bias is None and type(linear) is nn.Linear and not linear._forward_hooks
    assert x.is_cuda and x.dtype == linear.weight.dtype == torch.float32 and dtype == torch.bfloat16


def test_all_layers_of_a_model_are_compiled_with_the_gain_in_the_linear_layer(monkeypatch):
    folded, model = [], GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=97, attention="sympow_gating,softmax"))

    def folds(x, norm, *linear):
        assert torch.compiler.is_compiling() and norm_module.plain(norm, *linear)
        folded.append(norm)
        return True

    monkeypatch.setattr("sympow.layers.norm.folds", folds)
    monkeypatch.setattr("sympow.model.stored", norm_module.Stored.apply)
    torch.compiler.reset()
    ids = torch.randint(97, (2, 17))
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.compile(model, fullgraph=True, backend="eager")(ids[:, :-1], ids[:, 1:])[1]
    loss.backward()
    assert len(folded) == 5 and all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gelu_of_compiled_models_is_exact(dtype):
    x = torch.cat((torch.linspace(-9, 13, 20001), 10 * torch.randn(1000).clamp(min=-0.9))).to(dtype).requires_grad_()
    dy, exact = torch.randn(len(x)).to(dtype), x.detach().double().requires_grad_()
    y = activation.Gelu.apply(x)
    found = y, *torch.autograd.grad(y, x, dy)
    y = exact * torch.special.ndtr(exact)
    wanted = y, *torch.autograd.grad(y, exact, dy.double())
    eps = torch.finfo(dtype).eps
    for a, b in zip(found, wanted):
        assert a.dtype == dtype  # float16 counts in steps of 6e-8 near zero; a gradient crosses zero
        assert torch.allclose(a.double(), b, rtol=max(1e-5, eps), atol=1e-7 if a is found[0] else 1e-5)


def test_only_a_compiled_model_on_a_gpu_takes_it(monkeypatch):
    taken = []
    monkeypatch.setattr(activation.Gelu, "apply", taken.append)
    monkeypatch.setattr(activation.F, "gelu", lambda x, approximate: None)
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        for dtype in (torch.bfloat16, torch.float32):
            for is_cuda in (False, True):
                for approximate in ("none", "tanh"):
                    activation.gelu(types.SimpleNamespace(dtype=dtype, is_cuda=is_cuda), approximate)
    assert [(x.dtype, x.is_cuda) for x in taken] == [(torch.bfloat16, True)]
