"""The model: one file, five attentions, the same function read at once or token by token."""

import copy
import itertools
import math

import numerics
import pytest
import torch
import torch.utils.flop_counter
from torch import nn
from torch.autograd import forward_ad
from helpers import LLAMA, raises_one_line
from test_config import config_of

from sympow.layers import activation
from sympow.layers import loss as loss_module
from sympow.layers import norm as norm_module
from sympow.attention import ATTENTIONS
from sympow.attention.state import CachePolicy
from sympow.model import GPT, GPTConfig

KINDS = [(a, "auto") for a in ATTENTIONS] + [("conformal_sympow", "none"), ("conformal_sympow", "fixed")]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def tiny(attention="sympow", gate="auto", **kwargs):
    """Return a small model with grouped heads. Its gates and rotations differ from their initial values."""
    torch.manual_seed(0)
    shape = dict(vocab_size=97, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, head_dim=8, gate_bias=2.0, rope_base=100.0)
    model = GPT(GPTConfig(**{**shape, "attention": attention, "gate": gate, **kwargs}))
    for name, p in model.named_parameters():
        if "W_" in name:
            torch.nn.init.normal_(p, std=0.3)
        elif p.dim() == 2:
            torch.nn.init.normal_(p, std=0.2)  # logits of a size that shows differences
    return model.eval()


def gradients(ids, **settings):
    """Return the gradients of a small model's loss."""
    model = tiny(**settings)
    model(ids, ids)[1].backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("attention,gate", KINDS)
@pytest.mark.parametrize("switch_over", ["auto", "always"])
def test_reading_in_pieces_and_token_by_token_equals_reading_at_once(attention, gate, switch_over):
    model = tiny(attention, gate, reset_token=7)
    default = model.transformer.h[0].attn.mix.switch_over
    ids = torch.randint(0, 97, (2, 150))
    with torch.no_grad():
        expected, _ = model(ids)
        assert expected.std() > 0.5
        step, state = model.read(
            ids[:, :70], model.empty_state(2, switch_over if default == "auto" else None), piece=16
        )
        logits = [step]
        for t in range(70, 150):
            step, state = model.step(ids[:, t], state)
            logits.append(step)
    assert (torch.stack(logits, dim=1) - expected[:, 69:]).abs().max() < 1e-4
    assert state.n_tokens == 150
    if default is not None:  # a layer with a KV cache
        assert (state.layers[0].power is not None) == (default == "auto")  # the flush did happen on the way


@pytest.mark.parametrize(
    "switch_over,settings,limit,room,state",
    [
        ("auto", {}, 2113, 1010, False),  # 2080 features, each of 65 numbers of 4 bytes; a token has 256
        ("auto", dict(p=4), 778457, 1010, False),
        ("auto", dict(p=(2, 4)), 780569, 1010, False),
        ("auto", dict(state_dtype=torch.bfloat16), 1073, 1010, False),
        ("auto", dict(has_state=True), 64, 64, True),
        ("always", {}, 1, 10, True),
        ("never", {}, math.inf, 1010, False),
        (500, {}, 500, 500, True),
        (500, dict(has_state=True), 64, 64, True),
        (5, dict(has_state=True), 5, 10, True),
        (30, dict(window=30), 94, 94, False),
        (3000, dict(window=3000), 3064, 1074, False),
    ],
)
def test_one_policy_decides_when_a_state_takes_the_place_of_a_cache(switch_over, settings, limit, room, state):
    """With 10 cached tokens, after which 1,000 follow, in bfloat16 at head dimension 64."""
    policy = CachePolicy(switch_over, **dict(p=2) | settings, D=64, E=64, itemsize=2)
    assert (policy.limit, policy.room(10, 1000)) == (limit, room)
    assert policy.bytes(10, 1000) == (268 * room, state * policy.bytes_of_state())


@pytest.mark.parametrize("p", [2, 4])
def test_an_even_power_checkpoint_loaded_as_sympow_gives_the_same_logits(p):
    even, sympow = tiny("even_power", p=p), tiny("sympow", p=p, form="chunked", chunk_size=8)
    ids = torch.randint(0, 97, (2, 50))
    sympow.load_state_dict(even.state_dict())
    with torch.no_grad():
        assert (even(ids)[0] - sympow(ids)[0]).abs().max() < 1e-4


@pytest.mark.parametrize("attention,gate", KINDS)
def test_a_reset_token_hides_everything_before_it(attention, gate):
    model = tiny(attention, gate, reset_token=7)
    ids = torch.randint(8, 97, (2, 30))
    ids[:, 12] = 7
    ids[1, 12:] = ids[0, 12:]
    with torch.no_grad():
        (a, b), alone = model(ids)[0], model(ids[:1, 12:])[0][0]
    assert (a[12:] - b[12:]).abs().max() < 1e-5 < (a[5:12] - b[5:12]).abs().max()
    assert (a[12:] - alone).abs().max() < 1e-5


@pytest.mark.parametrize("attention,gate", KINDS)
def test_no_token_sees_the_future_and_every_parameter_learns(attention, gate):
    model, ids = tiny(attention, gate), torch.randint(0, 97, (1, 30))
    x = model.transformer.wte(ids).detach().requires_grad_()
    model.transformer.wte.register_forward_hook(lambda *_: x)
    (g,) = torch.autograd.grad(model(ids)[0][0, 17].square().sum(), x)
    assert (g[0, 18:] == 0).all() and (g[0, :18].abs().sum(-1) > 0).all()
    assert all(gradient is not None and gradient.any() for gradient in gradients(ids, attention=attention, gate=gate))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_activation_checkpointing_changes_nothing(attention):
    ids = torch.randint(0, 97, (2, 20))
    grads = [gradients(ids, attention=attention, activation_checkpointing=on) for on in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


OPTIONS = {
    "plain": {},
    "checkpointing": dict(activation_checkpointing=True),
    "chunked, resets": dict(form="chunked", chunk_size=8, reset_token=3),
    "Llama": LLAMA,
}
FAST = {  # the option with which an attention is compiled in the fast tests
    "softmax": "plain", "even_power": "chunked, resets", "sympow": "plain", "sympow_gating": "checkpointing",
    "conformal_sympow": "plain", "adaptive_power": "chunked, resets", "heinsen": "plain",
    "sympow_gating,softmax": "Llama",
}  # fmt: skip


@pytest.mark.parametrize(
    "attention,option",
    [
        pytest.param(attention, option, marks=() if FAST.get(attention) == option else pytest.mark.slow)
        for attention, option in itertools.product([*ATTENTIONS, "sympow_gating,softmax"], OPTIONS)
    ],
)
def test_compiles_without_a_graph_break(attention, option):
    torch._dynamo.reset()
    ids = torch.randint(0, 97, (2, 20))
    model = tiny(attention, n_layer=len(attention.split(",")), **OPTIONS[option])
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, ids)[1]
    loss.backward()
    assert torch.allclose(loss, model(ids, ids)[1])


def test_the_loss_is_the_mean_over_targets_and_never_holds_all_logits(monkeypatch):
    model, ids = tiny(), torch.randint(0, 97, (2, 150))
    targets = torch.randint(0, 97, (2, 150))
    targets[1, 30:] = -1
    logits = model(ids)[0]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss = model(ids, targets)[1]
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    monkeypatch.setattr(loss_module, "LOSS_TOKENS", 16)
    rows, saved, compute = [], [], loss_module.compute_losses
    monkeypatch.setattr(loss_module, "compute_losses", lambda x, *rest: rows.append(len(x)) or compute(x, *rest))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        pieces = model(ids, targets)[1]
    pieces.backward()
    assert rows == 18 * [16] + [12]  # each once
    assert not [shape for shape in saved if shape[-1:] == (97,)]
    assert torch.allclose(loss, expected) and torch.allclose(pieces, expected)
    assert all(torch.allclose(p.grad, g, atol=1e-6) for p, g in zip(model.parameters(), grads))
    assert model(ids, torch.full_like(ids, -1))[1] == 0  # no target at all
    assert torch.equal(model(ids, targets.masked_fill(targets < 0, -100))[1], pieces)  # as transformers says it
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"\[300\].*144"):  # whole pieces fewer
        model(ids, targets.flatten()[:144])


def test_a_second_derivative_of_the_loss_is_refused_and_logits_have_it():
    """It would be without the curvature of the head."""
    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=11, attention="sympow")
    model, ids = GPT(config), torch.randint(11, (2, 6))
    weight = model.transformer.wte.weight
    loss = torch.nn.functional.cross_entropy(model(ids)[0].flatten(0, 1), ids.flatten())
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    torch.autograd.grad(gradient.square().sum(), weight)
    with raises_one_line(NotImplementedError, "no second derivative.*from logits"):
        torch.autograd.grad(model(ids, ids)[1], weight, create_graph=True)


def test_a_tangent_of_the_loss_is_refused_where_no_gradient_is_recorded_too():
    """There it was dropped without a word."""
    with forward_ad.dual_level(), torch.no_grad(), raises_one_line(NotImplementedError, "no forward mode.*from logits"):
        x = forward_ad.make_dual(torch.randn(6, 8), torch.randn(6, 8))
        loss_module.head_loss(x, torch.randn(11, 8), torch.randint(11, (6,)), 11, None)


def test_statistics_are_those_of_the_model_without_dropout():
    model, ids = tiny("conformal_sympow", dropout=0.5), torch.randint(0, 97, (2, 30))
    expected = model.statistics(ids)
    assert not model.training and len(expected["gate"]) == len(expected["beta"]) == 2
    model.train()
    assert model.statistics(ids) == expected and model.training


def test_gpt2_sizes_names_and_initialisation():
    with torch.device("meta"):
        model = GPT(GPTConfig(bias=True))
    parameters = dict(model.named_parameters())
    assert sum(p.numel() for p in parameters.values()) / 1e6 == pytest.approx(124, abs=1)
    names = "wte.weight h.0.ln_1.weight h.11.attn.c_attn.weight h.3.attn.c_proj.bias h.0.mlp.c_fc.weight ln_f.weight"
    assert {f"transformer.{name}" for name in names.split()} < parameters.keys()
    assert not [name for name in parameters if name.startswith("lm_head")]  # tied: saved once
    transformer = GPT(GPTConfig(vocab_size=640, n_layer=8, n_head=4, n_embd=256)).transformer
    block = transformer.h[0]
    for layer, std in ((transformer.wte, 0.02), (block.attn.c_attn, 0.02), (block.mlp.c_proj, 0.02 / 4)):
        assert layer.weight.std().item() == pytest.approx(std, rel=0.02)


def test_heads_may_have_any_even_dimension_and_the_paddings_logits_are_cut_off():
    model = GPT(GPTConfig(n_head=48, head_dim=16, attention="sympow", p=4, n_layer=1, n_embd=96, vocab_size=257))
    assert model.transformer.h[0].attn.c_attn.weight.shape == (3 * 768, 96)
    assert model.transformer.wte.weight.shape == (320, 96)
    assert model(torch.zeros(1, 4, dtype=torch.long))[0].shape == (1, 4, 257)


def test_flops_of_a_token_are_those_of_its_weights_and_of_each_layers_attention():
    model = tiny("even_power,sympow")
    weights = 6 * sum(p.numel() for p in model.parameters() if p.dim() == 2)
    attention = [mix.attention_flops(4096, torch.bfloat16, "cpu") for mix in model.attentions()]
    assert model.flops_per_token(4096) == weights + sum(attention)


PAIR = 6 * 4 * 8  # FLOPs of a token for each token of the context; it sees half of them on average


@pytest.mark.parametrize(
    "arguments,T,flops",
    [
        ("attention=softmax window=100", 60, 60 * PAIR),
        ("attention=softmax window=7", 60, 2 * (54 * 7 + 21) / 60 * PAIR),
        ("attention=even_power", 4096, 4096 * PAIR),
        ("attention=sympow form=chunked chunk_size=16", 1 << 20, 16 * PAIR + 6 * (4 + 2) * 36 * 9),
        ("attention=heinsen form=quadratic", 4096, 4096 * PAIR),
        ("attention=heinsen chunk_size=64", 4096, 64 * PAIR + 6 * (4 + 2) * 8 * 9),
        ("attention=adaptive_power", 100, 100 * PAIR),
        ("attention=adaptive_power adaptive=mixture form=quadratic", 100, 2 * 100 * PAIR),
        (
            "attention=adaptive_power adaptive=mixture form=chunked chunk_size=16",
            100,
            2 * 16 * PAIR + 6 * (4 + 2) * (36 + 330) * 9,
        ),
    ],
)
def test_flops_of_attention_are_counted_by_form_window_and_power(arguments, T, flops):
    config = config_of(f"n_head=4 n_kv_head=2 n_embd=32 {arguments}")
    mix = ATTENTIONS[config.attention](config)
    assert mix.attention_flops(T, torch.float32, torch.device("cpu")) == pytest.approx(flops, rel=0.01)


NORMS = {"LayerNorm": lambda: nn.LayerNorm(96, bias=False), "RMSNorm": lambda: nn.RMSNorm(96, eps=1e-2)}
GAIN_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}


def compare_folded(folded, reference, dtype, layers, inputs):
    """Compare outputs and gradients of two functions of layers and inputs, in `dtype` and in float64."""
    nn.init.normal_(layers[0].weight, 1, 0.5)
    layers[0].weight.data[7] = 0  # its gradient must be right too
    wide, results = torch.promote_types(dtype, torch.float32), []
    for compute, precision in ((reference, torch.float64), (folded, wide)):
        copies = [copy.deepcopy(layer).to(precision) for layer in layers]
        leaves = [x.detach().to(precision).requires_grad_() for x in inputs]
        outputs = compute(*copies, *leaves)
        leaves += [p for layer in copies for p in layer.parameters()]
        torch.manual_seed(0)
        dys = [torch.randn(y.shape).to(y.dtype) for y in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, dys)])
    for expected, result in zip(*results):
        assert (result.double() - expected).norm() <= GAIN_TOLERANCE[dtype] * expected.norm()
    return [y.dtype for y in results[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gates", [0, 3])
@pytest.mark.parametrize("norm", NORMS)
def test_a_gain_that_is_a_part_of_the_next_weights_changes_nothing(norm, bias, gates, dtype):
    def reference(norm, linear, x, weight=None):
        x = norm(x)
        return x if weight is None else x @ weight.t(), linear(x)

    def folded(norm, linear, x, weight=None):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return norm_module.folded(norm, linear, x, weight, dtype)

    layers = NORMS[norm](), nn.Linear(96, 160, bias=bias)
    inputs = [3 * torch.randn(50, 96) + 5, *([torch.randn(gates, 96)] if gates else [])]
    first, second, *grads = compare_folded(folded, reference, dtype, layers, inputs)
    assert second == dtype and {first, *grads} == {torch.promote_types(dtype, torch.float32)}


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("norm", NORMS)
def test_a_gain_that_is_a_part_of_the_head_changes_nothing(norm, dtype, monkeypatch):
    def folded(norm, head, x):
        rows, weight = norm_module.norm_weight(norm, head.weight, x)
        assert rows.dtype == dtype and weight is not head.weight
        return [rows @ weight.to(dtype).t()]

    monkeypatch.setattr("sympow.layers.norm.folds", lambda *layers: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: dtype)
    layers = NORMS[norm](), nn.Linear(96, 500, bias=False)
    compare_folded(folded, lambda norm, head, x: [head(norm(x))], dtype, layers, [3 * torch.randn(50, 96) + 5])


def test_rows_without_variance_have_finite_gradients():
    x = torch.full((1, 96), 2.0, requires_grad=True)
    y = norm_module.Normalize.apply(x, 1e-5, torch.bfloat16)
    assert not y.any() and torch.autograd.grad(y.sum(), x)[0].isfinite().all()


class OnGpu(torch.Tensor):
    is_cuda = True


def test_only_plain_layers_compiled_on_a_gpu_have_the_gain_in_the_next_weights(monkeypatch):
    class Other(nn.Linear):  # LoRA, quantised weights
        pass

    def folds(compiling=True, autocast=True, on_gpu=True, norm=nn.LayerNorm(8, bias=False), linear=nn.Linear(8, 8)):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: autocast)
        return norm_module.folds(x.as_subclass(OnGpu) if on_gpu else x, norm, linear)

    x, hooked, backward_hooked, replaced = torch.ones(2, 8), *(nn.Linear(8, 8) for _ in range(3))
    hooked.register_forward_hook(print)
    backward_hooked.register_full_backward_hook(print)
    replaced.forward = replaced.forward
    assert folds() and folds(norm=nn.RMSNorm(8))
    assert not folds(compiling=False) and not folds(autocast=False) and not folds(on_gpu=False)
    assert not folds(norm=nn.LayerNorm(8)) and not folds(norm=nn.LayerNorm(8, bias=False).double())
    assert not any(
        folds(linear=linear) for linear in (Other(8, 8), nn.Linear(8, 8).double(), hooked, backward_hooked, replaced)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gelu_of_compiled_models_is_exact(dtype):
    x = torch.cat((torch.linspace(-9, 13, 20001), 10 * torch.randn(1000).clamp(min=-0.9))).to(dtype)
    dy, rtol = torch.randn(len(x)).to(dtype), max(1e-5, torch.finfo(dtype).eps)
    y, gradient = numerics.gradients(activation.Gelu.apply, [x], dy)
    exact = lambda x: x * torch.special.ndtr(x)
    exact_y, exact_gradient = numerics.gradients(exact, [x], dy, torch.Tensor.double)
    assert y.dtype == gradient.dtype == dtype  # float16 counts in steps of 6e-8 near zero; a gradient crosses zero
    assert torch.allclose(y.double(), exact_y, rtol=rtol, atol=1e-7)
    assert torch.allclose(gradient.double(), exact_gradient, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_the_mlp_is_as_wide_as_its_activation_asks_for(name):
    mlp = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, activation=name, mlp_width=20)).transformer.h[0].mlp
    assert mlp(torch.randn(3, 8), torch.nn.Identity()).shape == (3, 8) and mlp.c_proj.weight.shape == (8, 20)


def test_an_activation_of_ones_own_is_one_line(monkeypatch):
    monkeypatch.setitem(activation.ACTIVATIONS, "relu2", lambda x: x.relu().square())
    mlp, x = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, activation="relu2")).transformer.h[0].mlp, torch.randn(3, 8)
    assert torch.equal(mlp(x, torch.nn.Identity()), mlp.c_proj(mlp.c_fc(x).relu().square()))


@pytest.mark.parametrize(
    "attention,name,value",
    [
        ("softmax", "activation", "relu"), ("sympow", "positions", "alibi"), ("sympow_gating", "gate", "slow"),
        ("heinsen", "values", "root"), ("heinsen", "residual", "none"), ("adaptive_power", "adaptive", "steps"),
    ],
)  # fmt: skip
def test_a_model_takes_no_name_that_it_does_not_know_for_another(attention, name, value):
    """As where somebody adds a value to those that GPTConfig allows, and forgets a place that should know it."""
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=64, attention=attention)
    setattr(config, name, value)
    with pytest.raises((KeyError, ValueError), match=value):
        GPT(config)(torch.zeros(1, 4, dtype=torch.int64))
