"""Heinsen's log attention against float64: outputs, states and every gradient, at any size of queries and keys."""

import math
from functools import partial

import pytest
import torch
from helpers import raises_one_line
from numerics import DEVICE, Largest, gradients, relative_error

from sympow.attention import ATTENTIONS, LogState, PowerState, heinsen
from sympow.attention.operator import check, heinsen_forms
from sympow.attention import heinsen_attention
from sympow.attention import heinsen_naive as naive
from sympow.attention.positions import LogPosition, log_recurrence
from sympow.attention.state import LayerState
from sympow.model import GPT, GPTConfig

FORMS = ["quadratic", "chunked", "recurrent"]
CHUNK = 16


def inputs(T, n=None, B=2, H=4, Hkv=2, D=5, E=6, dtype=torch.float64, resets=False, state=False, change=lambda k: k):
    """Return q, k, v (and S0, z0) as float64 leaves with values that are exact in dtype, resets or None, m0 or None."""
    generator = torch.Generator().manual_seed(T)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator).to(DEVICE)
    tensors = [make(B, n or T, H, D), change(make(B, T, Hkv, D)), make(B, T, Hkv, E)]
    m, *Sz = naive.state_after(make(B, 5, Hkv, D), make(B, 5, Hkv, E)) if state else (None,)
    leaves = [x.to(dtype).double().requires_grad_() for x in tensors] + [
        x.float().double().requires_grad_() for x in Sz
    ]
    resets = (torch.rand(B, T, generator=generator) < 0.1).to(DEVICE) if resets else None
    return leaves, resets, m if m is None else m.float().double()


def as_float32(tensors):
    """Return the tensors as float32 leaves of a graph of their own."""
    return [x.detach().float().requires_grad_() for x in tensors]


def assert_equal_to_specification(made, *, tolerance, gradients=None, dtype=torch.float64, values="signed", **settings):
    """Compare y, S, z and every gradient, through y and the state after, with the specification of the same inputs.

    A state of log-values is one of positive sums: S0 is made positive.
    """
    leaves, resets, m = made
    if m is not None and values == "log":
        leaves[3] = leaves[3].detach().abs().requires_grad_()
    sums = torch.promote_types(dtype, torch.float32)
    state = None if m is None else (m, *leaves[3:])
    y = naive.quadratic(*leaves[:3], values=values, resets=resets, initial_state=state)
    reference, *after = naive.state_after(*leaves[1:3], values=values, resets=resets, initial_state=state)
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(x.shape, generator=generator).to(dtype).to(x) for x in (y, *after)]
    expected = [y, *after, *torch.autograd.grad([y, *after], leaves, dys)]

    cast = [x.detach().to(t).requires_grad_() for x, t in zip(leaves, [dtype] * 3 + [sums] * 2)]
    settings |= dict(values=values, resets=resets, return_state=True)
    state = None if m is None else LogState(m.to(sums), *cast[3:])
    y, (last, *after) = heinsen_attention(*cast[:3], initial_state=state, **settings)
    assert y.dtype == dtype and last.equal(reference.to(sums)) and {last.dtype, *(x.dtype for x in after)} == {sums}
    outputs = [y, *after]
    grads = torch.autograd.grad(outputs, cast, [dy.to(x.dtype) for dy, x in zip(dys, outputs)])
    floor = 1e-3 * dys[0].norm().item()
    for name, ref, out in zip(("y", "S", "z", "dq", "dk", "dv", "dS0", "dz0"), expected, outputs + [*grads]):
        error = relative_error(out, ref, floor)
        assert error <= (gradients if gradients and name[0] == "d" else tolerance), f"{name}: error {error:.1e}"


# ---- the forms


def test_the_specification_is_one_function_in_two_forms():
    (q, k, v, *Sz), resets, m = inputs(23, resets=True, state=True)
    for values in ("signed", "log"):
        settings = dict(values=values, resets=resets, initial_state=(m, *(x.exp() for x in Sz)))
        y, state = naive.recurrent(q, k, v, **settings)
        assert torch.allclose(naive.quadratic(q, k, v, **settings), y, rtol=1e-9)
        assert all(map(torch.allclose, naive.state_after(k, v, **settings), state))


def test_the_specification_is_softmax_of_the_paper():
    tensors, *_ = inputs(9, H=1, Hkv=1)
    q, k, v = (x[:, :, 0] for x in tensors)
    scores = (q.exp() @ k.exp().transpose(1, 2)).log()  # log(exp(Q) exp(K)^T)
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    assert torch.allclose(naive.quadratic(*tensors)[:, :, 0], scores.softmax(-1) @ v)
    log_S = torch.logcumsumexp(k[..., None] + v[:, :, None], 1)  # [B, T, D, E]
    log_Z = torch.logcumsumexp(k[..., None], 1)
    log_y = (q[..., None] + log_S).logsumexp(2) - (q[..., None] + log_Z).logsumexp(2)
    assert torch.allclose(naive.quadratic(*tensors, values="log")[:, :, 0], log_y)


LENGTHS = [(1, 1), (2, 2), (7, 7), (16, 16), (17, 5), (37, 37), (53, 20)]
HEADS = (1, 1), (3, 3), (6, 2), (4, 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("values", ["signed", "log"])
@pytest.mark.parametrize(
    "sizes",
    [dict(T=T, n=n, state=T % 2 == 0, resets=resets) for T, n in LENGTHS for resets in (False, True)]
    + [dict(T=37, state=True), dict(T=37, state=True, resets=True)]
    + [dict(T=37, H=H, Hkv=Hkv, E=1) for H, Hkv in HEADS],
)
def test_every_form_equals_the_specification_for_any_length_state_and_heads(form, sizes, values):
    assert_equal_to_specification(inputs(**sizes), form=form, values=values, chunk_size=CHUNK, tolerance=1e-9)


def test_gradients_through_a_chain_of_states_are_those_of_the_whole():
    leaves, *_ = inputs(37, change=lambda k: k + torch.linspace(0, 20, 37)[:, None, None])

    def in_pieces(*tensors):
        outputs, state = [], None
        for tokens in zip(*(x.split((9, 1, 27), 1) for x in tensors)):
            y, state = heinsen_attention(*tokens, chunk_size=8, initial_state=state, return_state=True)
            assert not state.m.requires_grad  # a reference, which cancels
            outputs.append(y)
        return torch.cat(outputs, 1)

    results = gradients(in_pieces, leaves), gradients(naive.quadratic, leaves)
    assert all(map(partial(torch.allclose, rtol=1e-9), *results))


def test_what_a_state_means_does_not_depend_on_its_reference():
    (q, k, v, S, z), _, m = inputs(20, state=True)
    y = heinsen_attention(q, k, v, initial_state=LogState(m, S, z))
    shift = torch.randn_like(m)
    moved = LogState(m + shift, S * (-shift).exp().unsqueeze(-1), z * (-shift).exp())
    assert torch.allclose(heinsen_attention(q, k, v, initial_state=moved), y)


@pytest.mark.parametrize("form", FORMS)
def test_rows_after_a_reset_have_gradients_however_large_the_keys_before(form):
    leaves, *_ = inputs(40, dtype=torch.float32, change=lambda k: k + 200 * (torch.arange(40) < 20)[:, None, None])
    resets = (torch.arange(40) == 20).expand(2, 40)
    assert_equal_to_specification((leaves, resets, None), form=form, dtype=torch.float32, tolerance=1e-5)


def test_it_can_be_differentiated_twice():
    leaves, *_ = inputs(9, B=1, H=1, Hkv=1, D=2, E=2)
    assert torch.autograd.gradgradcheck(partial(heinsen_attention, chunk_size=4), leaves)


# ---- numbers of any size


RANGES = {
    "plain": lambda k: k,
    "large": lambda k: 80 * k.tanh(),
    "growing": lambda k: k + torch.linspace(-40, 40, k.shape[1], device=k.device)[:, None, None],  # by e^80 in a chunk
    "falling": lambda k: k + torch.linspace(40, -40, k.shape[1], device=k.device)[:, None, None],
    "a large key": lambda k: torch.where((torch.arange(k.shape[1]) == 100)[:, None, None], 80, k),
    "a feature far below": lambda k: k - 80 * (torch.arange(k.shape[3]) % 2),
}


ACCURACY = [
    (torch.float32, dict(form="quadratic", tolerance=3e-6)),
    (torch.float32, dict(form="chunked", chunk_size=128, tolerance=3e-6)),
    (torch.bfloat16, dict(values="signed", chunk_size=64, tolerance=4e-3, gradients=8e-3)),
    (torch.bfloat16, dict(values="log", chunk_size=64, tolerance=4e-3, gradients=8e-3)),
]


@pytest.mark.parametrize("size", RANGES)
@pytest.mark.parametrize("dtype,settings", ACCURACY)
def test_every_dtype_is_accurate_for_any_size_of_queries_and_keys(dtype, settings, size):
    leaves, *rest = inputs(200, B=1, D=16, E=16, dtype=dtype, state=True, change=RANGES[size])
    if size == "large":
        leaves[0] = RANGES[size](leaves[0].detach()).to(dtype).double().requires_grad_()
    assert_equal_to_specification((leaves, *rest), dtype=dtype, **settings)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e9, 1e12, -1e12, 1e29])
def test_exponents_far_beyond_those_of_float32_give_the_rows_of_float64(form, size):
    """A negative size: no entry is positive."""
    q, k, v = (torch.randn(2, 40, 2, 8) for _ in range(3))
    q, k = (size * (x.abs() if size < 0 else x) for x in (q, k))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = heinsen_attention(*leaves, form=form, chunk_size=CHUNK)
    q, k, v = (x.detach().double() for x in leaves)
    largest = (q + k.cummax(1).values).amax(-1, keepdim=True)  # cancels
    assert torch.allclose(y.double(), naive.quadratic(q - largest, k, v), atol=1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(y.sum(), leaves))


@pytest.mark.parametrize("form", FORMS)
def test_a_key_below_the_least_reference_gives_nan(form):
    q, k, v = (torch.randn(1, 20, 1, 4) for _ in range(3))
    k[:, 9] = -2e30
    is_nan = heinsen_attention(q, k, v, form=form, chunk_size=CHUNK).isnan()
    assert is_nan[:, 9:].all() and not is_nan[:, :9].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("token", [13, 16, 29])
@pytest.mark.parametrize("name,value", [("k", 85.0), ("k", math.inf), ("v", math.nan), ("k", math.nan), ("v", 1e30)])
def test_rows_before_a_large_or_broken_token_keep_their_bits(form, token, name, value):
    leaves = as_float32(inputs(40)[0])

    def attend():
        y = heinsen_attention(*leaves, form=form, chunk_size=CHUNK)
        return y, *torch.autograd.grad(y[:, :token].sum(), leaves)  # the later rows weigh nothing

    expected = attend()
    with torch.no_grad():
        leaves["qkv".index(name)][:, token, :, 0] = value
    y, *grads = attend()
    for x, reference in zip((y, *grads), expected):
        assert x[:, :token].equal(reference[:, :token])
    assert all(x.isfinite().all() for x in grads)
    later, finite = y[:, token:], math.isfinite(value)
    assert not later.equal(expected[0][:, token:])
    assert later.isfinite().all() == finite and later.isnan().any() != finite


def test_nan_and_infinity_in_a_query_stay_in_its_row():
    (q, k, v), *_ = inputs(20, H=1, Hkv=1)
    with torch.no_grad():
        q[:, 4, :, 0], q[:, 9, :, 0] = math.nan, math.inf
    is_nan = heinsen_attention(q, k, v, chunk_size=8).isnan()
    assert is_nan[:, [4, 9]].all() and is_nan.sum() == 4 * 6  # of two sequences, with values of 6 entries


@pytest.mark.parametrize("form", FORMS)
def test_a_reset_ends_what_a_broken_token_or_state_does(form):
    (q, k, v, S, z), _, m = inputs(40, state=True)
    resets = torch.zeros(2, 40, dtype=torch.bool)
    resets[:, [10, 30]] = True
    settings = dict(form=form, chunk_size=CHUNK, return_state=True)
    y, _ = heinsen_attention(q, k, v, resets=resets, **settings)
    with torch.no_grad():
        v[:, 25] = math.nan
        S.fill_(math.nan)
    broken, state = heinsen_attention(q, k, v, resets=resets, initial_state=LogState(m, S, z), **settings)
    is_broken = torch.tensor([True] * 10 + [False] * 15 + [True] * 5 + [False] * 10)
    assert broken[:, is_broken].isnan().all() and torch.allclose(broken[:, ~is_broken], y[:, ~is_broken])
    assert all(x.isfinite().all() for x in state)
    _, state = heinsen_attention(*(x[:, :28] for x in (q, k, v)), resets=resets[:, :28], **settings)
    assert state.z.isnan().all()


def test_torch_compile_takes_it_whole_with_lengths_that_change():
    torch.compiler.reset()
    compiled = torch.compile(heinsen_attention, dynamic=True, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (10, 12, 15):
            q, k, v = (torch.randn(2, T, 2, 6) for _ in range(3))
            assert torch.allclose(compiled(q, k, v), heinsen_attention(q, k, v), atol=1e-6)


def test_a_row_without_any_weight_is_zero():
    tensors, *_ = inputs(3, dtype=torch.float32, change=lambda k: k - 200)
    state = LogState(torch.zeros(2, 2, 5), torch.zeros(2, 2, 5, 6), torch.zeros(2, 2, 5))  # an m without a key
    for values in ("signed", "log"):
        leaves = as_float32(tensors)
        y = heinsen_attention(*leaves, values=values, initial_state=state)
        assert not y.any() and not any(x.any() for x in torch.autograd.grad(y.sum(), leaves))


# ---- log-values


@pytest.mark.parametrize("factor", [40, -40, 20, 320])
def test_log_values_are_accurate_up_to_their_bound(factor):
    """The worst case: a row's largest weight belongs to the smallest value, and the largest value to small weights."""
    line = torch.linspace(-1, 1, 64).reshape(1, 64, 1, 1)
    tensors = (
        torch.randn(1, 64, 1, 4),
        factor * line.expand(1, 64, 1, 4),
        -heinsen.LOG_VALUE_BOUND * line.expand(1, 64, 1, 3),
    )
    leaves = as_float32(tensors)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    y, expected = heinsen_attention(*leaves, values="log"), naive.quadratic(*exact, values="log")
    assert (y - expected).abs().max() < 1e-4
    for x, reference in zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(expected.sum(), exact)):
        assert relative_error(x, reference, floor=1) <= 1e-4


@pytest.mark.parametrize("value", [31.0, -math.inf])
def test_log_values_beyond_their_bound_are_refused(value):
    (q, k, v), *_ = inputs(9)
    with torch.no_grad():
        v[0, 5, 0, 1] = value
    message = f"values='log' takes log-values from -30 to 30, got one of size {abs(value):g}"
    with pytest.raises(ValueError, match=message):
        heinsen_attention(q, k, v, values="log")


def test_in_training_a_log_value_beyond_the_bound_makes_the_loss_nan_which_is_a_skipped_step():
    model, ids = model_of(values="log").train(), torch.randint(0, 97, (2, 9))
    assert model(ids, ids)[1].isfinite()
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight *= 1e4
    assert model(ids, ids)[1].isnan()


def test_rows_that_see_a_log_value_beyond_the_bound_are_nan_where_it_cannot_be_looked_at(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    q, k, v = (x.detach().float() for x in inputs(20)[0])
    y = heinsen_attention(q, k, v, values="log", chunk_size=8)
    v[:, 11, :, 0] = 31
    broken = heinsen_attention(q, k, v, values="log", chunk_size=8)
    assert broken[:, :11].equal(y[:, :11]) and broken[:, 11:].isnan().all()


# ---- arguments


QKV = dict(q=torch.zeros(1, 3, 4, 5), k=torch.zeros(1, 3, 2, 5), v=torch.zeros(1, 3, 2, 6))


@pytest.mark.parametrize(
    "arguments,message",
    [
        (dict(values="logs"), "values must be one of signed, log, got 'logs'"),
        (dict(form="parallel"), "form must be one of auto, quadratic, chunked, recurrent, got 'parallel'"),
        (dict(chunk_size=0), "chunk_size must be a positive integer, got 0"),
        (dict(resets=torch.zeros(1, 3)), r"resets must be bool \[B, T\] = \[1, 3\], got torch.float32 \[1, 3\]"),
        (dict(initial_state=PowerState(*torch.zeros(2, 1))), "must be a LogState or another .* got PowerState"),
        (dict(initial_state=LogState(*torch.zeros(3, 1, 2, 5))), r"m \[1, 2, 5\], S \[1, 2, 5, 6\], z .* got m"),
        (
            dict(initial_state=heinsen_forms.empty_log_state(1, 2, 5, 6, torch.float64)),
            "initial_state must be torch.float32 for q of torch.float32, got .*float64",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_line(arguments, message):
    with raises_one_line(ValueError, message):
        heinsen_attention(**(QKV | arguments))


# ---- the position embedding


@pytest.mark.parametrize("T", [1, 15, 16, 17, 300])
@pytest.mark.parametrize("has_resets", [False, True])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_log_x_and_its_gradients_equal_the_recurrence(T, has_resets, dtype, tolerance):
    make = lambda *shape: torch.randn(*shape).to(dtype)
    tensors = [torch.nn.functional.logsigmoid(3 * make(2, T, 3)), make(2, T, 3), make(2, 3)]
    resets = torch.rand(2, T) < 0.1 if has_resets else None
    results = gradients(lambda a, b, first: log_recurrence(a, b, first, resets), tensors)
    one_by_one = lambda a, b, first: naive.positions(a, b, resets=resets, log_x=first)
    for x, reference in zip(results, gradients(one_by_one, tensors, to=torch.Tensor.double)):
        assert x.dtype == dtype and relative_error(x, reference, 0) <= tolerance


def test_log_x_is_exact_after_65536_tokens():
    """x begins at one. Also where it forgets little, so that a float32 sum over the text would be off by 1e-3."""
    T, C = 65536, 3
    a = torch.nn.functional.logsigmoid(torch.randn(1, T, C) + torch.tensor([0.0, 3.0, 9.0]))
    b = torch.randn(1, T, C)
    x, expected = torch.ones(C, dtype=torch.float64), []
    for factor, added in zip(a[0].double().exp(), b[0].double().exp()):  # x itself is inside float64's range here
        x = x * factor + added
        expected.append(x)
    assert (log_recurrence(a, b, torch.zeros(1, C))[0] - torch.stack(expected).log()).abs().max() < 1e-5


def test_positions_are_computed_in_float32_under_autocast_and_without_a_graph_break():
    torch.manual_seed(0)
    layer, x = LogPosition(8), torch.randn(1, 40, 8)
    y, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x)[0].equal(y) and layer(x.bfloat16())[0].dtype == torch.bfloat16
    torch.library.opcheck(torch.ops.sympow.log_recurrence.default, (*x.expand(2, 1, 40, 8).clone(), x[:, 0]))


# ---- the variant


def heinsen_config(**kwargs):
    return GPTConfig(**(dict(attention="heinsen", n_layer=2, n_head=4, n_kv_head=2, n_embd=32, vocab_size=97) | kwargs))


def model_of(**kwargs):
    torch.manual_seed(0)
    model = GPT(heinsen_config(**kwargs)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def test_it_brings_its_position_embedding_and_a_gated_residual_layer_in_the_place_of_the_mlp():
    model = GPT(heinsen_config(residual="glu", n_layer=8)).transformer
    assert type(model.wpe) is LogPosition
    block = model.h[0]
    layer, x = block.attn.c_proj, torch.randn(2, 32)
    names = {name for name, _ in block.named_parameters()}
    projections = {f"attn.c_proj.{name}" for name in ("c_fc.weight", "c_fc.bias", "c_proj.weight")}
    assert names == {"ln_1.weight", "attn.c_attn.weight"} | projections
    assert layer.c_proj.weight.std() < 0.01  # 0.02 / 4
    a, b = layer.c_fc(x).chunk(2, dim=-1)
    assert torch.allclose(layer(x), layer.c_proj(a * b.sigmoid()))
    assert not hasattr(model_of(residual="gpt2").transformer.h[0].attn.c_proj, "c_fc")


def test_the_state_of_another_variant_is_refused():
    mix, qkv = ATTENTIONS["heinsen"](heinsen_config()), torch.randn(1, 1, 8, 8).split((4, 2, 2), dim=2)
    with pytest.raises(ValueError, match="the state of a heinsen layer must be a HeinsenState, got LayerState"):
        mix(None, qkv, None, LayerState.empty(1, "cpu"))


# ---- the way to the kernels


@pytest.fixture
def kernels(monkeypatch):
    """Let heinsen_attention take the kernels, in the interpreter, for all but float64; return their calls."""
    operator = pytest.importorskip("sympow.kernels.heinsen.operator", reason="Triton has no wheel for this system")
    calls, attend = [], operator.heinsen_attention
    run = lambda *args, **kwargs: calls.append((args[0].shape[1], args[0].dtype)) or attend(*args, **kwargs)
    monkeypatch.setattr(operator, "heinsen_attention", run)
    monkeypatch.setattr(heinsen, "why_not", lambda form, device, dtype, *sizes: "no" * (dtype == torch.float64))
    return calls


@pytest.mark.parametrize("values", ["signed", "log"])
@pytest.mark.parametrize(
    "n,resets,state,dtype,tolerance",
    [
        (24, True, True, torch.float32, 1e-5),
        (18, True, False, torch.float32, 1e-5),
        (13, False, True, torch.float32, 1e-5),
        (24, False, False, torch.float16, 1e-3),
    ],
)
def test_kernels_are_asked_for_the_last_queries_with_the_state_of_the_tokens_before(
    kernels, values, n, resets, state, dtype, tolerance
):
    """float16 is computed by the float32 kernels and comes back as float16."""
    grow = (lambda k: 20 * k) if dtype == torch.float32 else (lambda k: k)
    made = inputs(24, n, B=1, H=2, Hkv=1, D=16, E=16, dtype=dtype, resets=resets, state=state, change=grow)
    assert_equal_to_specification(made, dtype=dtype, values=values, tolerance=tolerance)
    assert kernels == [(n, torch.float32)]


def test_training_plans_name_the_kernels_that_it_will_use(hopper):
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    bf16 = torch.bfloat16
    for values, v_dtype in (("signed", bf16), ("log", torch.float32)):
        (chosen,) = ATTENTIONS["heinsen"](heinsen_config(values=values)).plans(4096, bf16, "cuda")
        assert chosen.on_kernels and chosen.size == check.Size("heinsen", bf16, 16, v_dtype=v_dtype)  # padded from 8


@pytest.mark.parametrize("values", ["signed", "log"])
def test_no_tensor_is_as_large_as_the_states_of_all_tokens(values):
    T, D = 2048, 32
    q, k, v = (torch.randn(1, T, 1, D).requires_grad_() for _ in range(3))
    with Largest() as largest:
        y = heinsen_attention(q, k, v, values=values)
        torch.autograd.grad(y.sum(), (q, k, v))
    assert T * D <= largest.entries <= 2 * T * D  # as large as the inputs or a chunk, not T * D * D
