"""Heinsen's log attention against float64: outputs, states and every gradient, at any size of queries and keys."""

import math

import pytest
import torch
from numerics import Largest, relative_error

from sympow.attention import ATTENTIONS, LogState, PowerState, heinsen
from sympow.attention.operator import check, dispatch, heinsen_forms
from sympow.attention import heinsen_attention
from sympow.attention import heinsen_naive as naive
from sympow.attention.positions import LogPosition, log_recurrence
from sympow.attention.state import LayerState
from sympow.model import GPT, GPTConfig

FORMS = ["quadratic", "chunked", "recurrent"]
CHUNK = 16


def inputs(T, n=None, B=2, H=4, Hkv=2, D=5, E=6, dtype=torch.float64, resets=False, state=False, change=lambda k: k):
    """Return q, k, v (and S0, z0) as float64 leaves whose values are exact in dtype, resets or None, m0 or None."""
    generator = torch.Generator().manual_seed(T)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
    tensors = [make(B, n or T, H, D), change(make(B, T, Hkv, D)), make(B, T, Hkv, E)]
    m, *Sz = naive.state_after(make(B, 5, Hkv, D), make(B, 5, Hkv, E)) if state else (None,)
    leaves = [x.to(dtype).double().requires_grad_() for x in tensors] + [
        x.float().double().requires_grad_() for x in Sz
    ]
    resets = torch.rand(B, T, generator=generator) < 0.1 if resets else None
    return leaves, resets, m if m is None else m.float().double()


def assert_equal_to_specification(
    made, *, tolerance, gradients=None, dtype=torch.float64, values="signed", causal=True, **settings
):
    """Compare y, S, z and every gradient, through y and the state after, with the specification of the same inputs."""
    leaves, resets, m = made
    results, dys = [], None
    for exact in (True, False):
        if exact:
            of, state = leaves, m if m is None else (m, *leaves[3:])
            y = naive.quadratic(*of[:3], values=values, causal=causal, resets=resets, initial_state=state)
            after = naive.state_after(*of[1:3], values=values, resets=resets, initial_state=state)
        else:
            sums = torch.promote_types(dtype, torch.float32)
            to = [dtype] * 3 + [sums] * 2
            of = [x.detach().to(t).requires_grad_() for x, t in zip(leaves, to)]
            state = None if m is None else LogState(m.to(sums), *of[3:])
            y, after = heinsen_attention(
                *of[:3], values=values, causal=causal, resets=resets, initial_state=state, return_state=True, **settings
            )
            assert y.dtype == dtype and all(x.dtype == sums for x in after)
            assert after[0].equal(results[0][0].to(sums))
        outputs = [y, *after[1:]]
        if dys is None:
            generator = torch.Generator().manual_seed(1)
            dys = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype).double() for x in outputs]
        grads = torch.autograd.grad(outputs, of, [dy.to(x.dtype) for dy, x in zip(dys, outputs)])
        results.append([after[0].detach(), *outputs, *grads])
    names = ["m", "y", "S", "z", "dq", "dk", "dv", "dS0", "dz0"]
    floor = 1e-3 * dys[0].norm().item()
    for name, ref, out in list(zip(names, *results))[1:]:
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
    (q, k, v), *_ = inputs(9, H=1, Hkv=1)
    scores = (q[:, :, 0].exp() @ k[:, :, 0].exp().transpose(1, 2)).log()  # log(exp(Q) exp(K)^T)
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    assert torch.allclose(naive.quadratic(q, k, v)[:, :, 0], scores.softmax(-1) @ v[:, :, 0])
    log_S = torch.logcumsumexp(k[:, :, 0, :, None] + v[:, :, 0, None], 1)  # [B, T, D, E]
    log_Z = torch.logcumsumexp(k[:, :, 0, :, None], 1)
    log_y = (q[:, :, 0, :, None] + log_S).logsumexp(2) - (q[:, :, 0, :, None] + log_Z).logsumexp(2)
    assert torch.allclose(naive.quadratic(q, k, v, values="log")[:, :, 0], log_y)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T,n", [(1, 1), (2, 2), (7, 7), (16, 16), (17, 5), (37, 37), (53, 20)])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("values", ["signed", "log"])
@pytest.mark.parametrize("state", [False, True])
def test_every_form_equals_the_specification_for_any_length(form, T, n, resets, values, state):
    leaves, *rest = inputs(T, n, resets=resets, state=state)
    if values == "log":  # a state of positive values
        leaves[3:] = [x.detach().abs().requires_grad_() for x in leaves[3:]]
    assert_equal_to_specification((leaves, *rest), form=form, values=values, chunk_size=CHUNK, tolerance=1e-9)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("form", FORMS)
def test_query_heads_share_key_value_heads(form, heads):
    made = inputs(21, H=heads[0], Hkv=heads[1], E=1)
    assert_equal_to_specification(made, form=form, chunk_size=CHUNK, tolerance=1e-9)


@pytest.mark.parametrize("values", ["signed", "log"])
@pytest.mark.parametrize("T,n,state", [(40, 7, False), (3, 11, False), (20, 30, True)])
def test_without_an_order_every_query_sees_every_key_and_the_state(T, n, state, values):
    leaves, *rest = inputs(T, n, state=state)
    leaves[3:] = [x.detach().abs().requires_grad_() for x in leaves[3:]]  # of positive values
    assert_equal_to_specification((leaves, *rest), causal=False, values=values, tolerance=1e-9)


def test_gradients_through_a_chain_of_states_are_those_of_the_whole():
    (q, k, v), *_ = inputs(37, change=lambda k: k + torch.linspace(0, 20, 37)[:, None, None])
    dy = torch.randn(2, 37, 4, 6, dtype=torch.float64)
    expected = torch.autograd.grad(naive.quadratic(q, k, v), (q, k, v), dy)
    parts, state = [], None
    for rows in (slice(0, 9), slice(9, 10), slice(10, 37)):
        y, state = heinsen_attention(
            q[:, rows], k[:, rows], v[:, rows], chunk_size=8, initial_state=state, return_state=True
        )
        assert not state.m.requires_grad  # a reference, which cancels
        parts.append(y)
    for found, ref in zip(torch.autograd.grad(torch.cat(parts, 1), (q, k, v), dy), expected):
        assert torch.allclose(found, ref, rtol=1e-9)


def test_what_a_state_means_does_not_depend_on_its_reference():
    (q, k, v, S, z), _, m = inputs(20, state=True)
    y = heinsen_attention(q, k, v, initial_state=LogState(m, S, z))
    shift = torch.randn_like(m)
    moved = LogState(m + shift, S * (-shift).exp().unsqueeze(-1), z * (-shift).exp())
    assert torch.allclose(heinsen_attention(q, k, v, initial_state=moved), y)


@pytest.mark.parametrize("form", FORMS)
def test_rows_after_a_reset_have_gradients_however_large_the_keys_before(form):
    (q, k, v), *_ = inputs(40, dtype=torch.float32, change=lambda k: k + 200 * (torch.arange(40) < 20)[:, None, None])
    resets = (torch.arange(40) == 20).expand(2, 40)
    assert_equal_to_specification(([q, k, v], resets, None), form=form, dtype=torch.float32, tolerance=1e-5)


def test_it_can_be_differentiated_twice():
    (q, k, v), *_ = inputs(9, B=1, H=1, Hkv=1, D=2, E=2)
    f = lambda *x: heinsen_attention(*x, chunk_size=4)
    assert torch.autograd.gradgradcheck(f, (q, k, v))


# ---- numbers of any size


RANGES = {
    "plain": lambda k: k,
    "large": lambda k: 80 * k.tanh(),
    "growing": lambda k: k + torch.linspace(-40, 40, k.shape[1])[:, None, None],  # by e^80 in a chunk
    "falling": lambda k: k + torch.linspace(40, -40, k.shape[1])[:, None, None],
    "a large key": lambda k: torch.where((torch.arange(k.shape[1]) == 100)[:, None, None], 80, k),
    "a feature far below": lambda k: k - 80 * (torch.arange(k.shape[3]) % 2),
}


@pytest.mark.parametrize("of", RANGES)
@pytest.mark.parametrize("form", FORMS[:2])
def test_float32_is_accurate_for_any_size_of_queries_and_keys(form, of):
    (q, *others), resets, m = inputs(200, B=1, D=16, E=16, dtype=torch.float32, state=True, change=RANGES[of])
    if of == "large":
        q = (80 * q.detach().tanh()).float().double().requires_grad_()
    made = [q, *others], resets, m
    assert_equal_to_specification(made, form=form, dtype=torch.float32, tolerance=3e-6, chunk_size=128)


@pytest.mark.parametrize("of", RANGES)
@pytest.mark.parametrize("values", ["signed", "log"])
def test_bfloat16_is_as_accurate_as_its_outputs(of, values):
    leaves, resets, m = inputs(200, B=1, D=16, E=16, dtype=torch.bfloat16, state=True, change=RANGES[of])
    if values == "log":
        leaves[3] = leaves[3].detach().exp().float().double().requires_grad_()
    if of == "large":
        leaves[0] = (80 * leaves[0].detach().tanh()).bfloat16().double().requires_grad_()
    settings = dict(dtype=torch.bfloat16, values=values, chunk_size=64)
    assert_equal_to_specification((leaves, resets, m), tolerance=4e-3, gradients=8e-3, **settings)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("at", [13, 16, 29])
@pytest.mark.parametrize("which,value", [("k", 85.0), ("k", math.inf), ("v", math.nan), ("k", math.nan), ("v", 1e30)])
def test_rows_before_a_large_or_broken_token_keep_their_bits(form, at, which, value):
    leaves, *_ = inputs(40, dtype=torch.float32)
    runs = []
    for broken in (False, True):
        q, k, v = (x.detach().float().requires_grad_() for x in leaves)
        with torch.no_grad():
            if broken:
                {"k": k, "v": v}[which][:, at, :, 0] = value
        y = heinsen_attention(q, k, v, form=form, chunk_size=CHUNK)
        before = torch.autograd.grad(y[:, :at].sum(), (q, k, v), retain_graph=True)  # the later rows weigh nothing
        runs.append((y, before))
    (y, grads), (changed, found) = runs
    assert y[:, :at].equal(changed[:, :at]) and not y[:, at:].equal(changed[:, at:])
    assert changed[:, at:].isfinite().all() == math.isfinite(value)
    assert changed[:, at:].isnan().any() == (not math.isfinite(value))
    assert all(grad[:, :at].equal(again[:, :at]) and again.isfinite().all() for grad, again in zip(grads, found))


def test_nan_and_infinity_in_a_query_stay_in_its_row():
    (q, k, v), *_ = inputs(20, H=1, Hkv=1)
    with torch.no_grad():
        q[:, 4, :, 0], q[:, 9, :, 0] = math.nan, math.inf
    wrong = heinsen_attention(q, k, v, chunk_size=8).isnan().all(-1)[..., 0]
    assert wrong.nonzero()[:, 1].tolist() == [4, 9] * 2 and wrong.sum() == 4


@pytest.mark.parametrize("form", FORMS)
def test_a_reset_ends_what_a_broken_token_or_state_does(form):
    (q, k, v, S, z), _, m = inputs(40, state=True)
    resets = torch.zeros(2, 40, dtype=torch.bool)
    resets[:, [10, 30]] = True
    settings = dict(form=form, chunk_size=CHUNK, resets=resets, return_state=True)
    y, _ = heinsen_attention(q, k, v, **settings)
    with torch.no_grad():
        v[:, 25] = math.nan
        S.fill_(math.nan)
    broken, state = heinsen_attention(q, k, v, initial_state=LogState(m, S, z), **settings)
    assert broken[:, :10].isnan().all() and broken[:, 25:30].isnan().all()
    assert torch.allclose(broken[:, 10:25], y[:, 10:25]) and torch.allclose(broken[:, 30:], y[:, 30:])
    assert all(x.isfinite().all() for x in state)
    _, state = heinsen_attention(q[:, :28], k[:, :28], v[:, :28], **settings | {"resets": resets[:, :28]})
    assert state.z.isnan().all()


def test_a_row_without_any_weight_is_zero():
    (q, k, v), *_ = inputs(3, dtype=torch.float32, change=lambda k: k - 200)
    state = LogState(torch.zeros(2, 2, 5), torch.zeros(2, 2, 5, 6), torch.zeros(2, 2, 5))  # an m without a key
    for values in ("signed", "log"):
        leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
        y = heinsen_attention(*leaves, values=values, initial_state=state)
        assert y.eq(0).all() and all(g.eq(0).all() for g in torch.autograd.grad(y.sum(), leaves))


# ---- log-values


def test_log_values_are_accurate_up_to_their_bound_and_refused_beyond():
    """The worst case: a row's largest weight belongs to the smallest value, and the largest value to small weights."""
    B, T, D, bound = 1, 64, 4, heinsen.LOG_VALUE_BOUND
    k = torch.linspace(-40, 40, T).reshape(1, T, 1, 1).expand(B, T, 1, D).contiguous()
    v = torch.linspace(bound, -bound, T).reshape(1, T, 1, 1).expand(B, T, 1, 3).contiguous()
    q = torch.randn(B, T, 1, D)
    for later in (k, -k, k / 2, 8 * k):
        leaves = [x.double().requires_grad_() for x in (q, later, v)]
        ref = naive.quadratic(*leaves, values="log")
        cast = [x.detach().float().requires_grad_() for x in leaves]
        y = heinsen_attention(*cast, values="log")
        assert (y - ref).abs().max() < 1e-4
        for found, grad in zip(*(torch.autograd.grad(out.sum(), x) for out, x in ((y, cast), (ref, leaves)))):
            assert (found - grad).norm() <= 1e-4 * grad.norm() + 1e-4
    v[0, 5, 0, 1] = bound + 1
    with pytest.raises(ValueError, match="values='log' takes log-values from -30 to 30, got one of size 31"):
        heinsen_attention(q, k, v, values="log")
    v[0, 5, 0, 1] = -math.inf
    with pytest.raises(ValueError, match="got one of size inf"):
        heinsen_attention(q, k, v, values="log")


def test_in_training_a_log_value_beyond_the_bound_makes_the_loss_nan_which_is_a_skipped_step():
    model, ids = model_of(values="log").train(), torch.randint(0, 97, (2, 9))
    assert model(ids, ids)[1].isfinite()
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight *= 1e4
    assert model(ids, ids)[1].isnan()


def test_rows_that_see_a_log_value_beyond_the_bound_are_nan_where_it_cannot_be_looked_at(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    (q, k, v), *_ = inputs(20, dtype=torch.float32)
    q, k, v = (x.detach().float() for x in (q, k, v))
    y = heinsen_attention(q, k, v, values="log", chunk_size=8)
    v[:, 11, :, 0] = 31
    wrong = heinsen_attention(q, k, v, values="log", chunk_size=8)
    assert wrong[:, :11].equal(y[:, :11]) and wrong[:, 11:].isnan().all()


# ---- arguments


def tiny(**shapes):
    shape = dict(q=(1, 3, 4, 5), k=(1, 3, 2, 5), v=(1, 3, 2, 6)) | shapes
    return [torch.randn(*size) for size in shape.values()]


@pytest.mark.parametrize(
    "tensors,settings,message",
    [
        (tiny(), dict(values="logs"), "values must be signed or log, got 'logs'"),
        (tiny(), dict(form="parallel"), "form must be one of auto, quadratic, chunked, recurrent, got 'parallel'"),
        (tiny(), dict(chunk_size=0), "chunk_size must be a positive integer, got 0"),
        (tiny(), dict(causal=False, resets=torch.zeros(1, 3, dtype=bool)), "resets are of causal attention"),
        (
            tiny(),
            dict(resets=torch.zeros(1, 3)),
            r"resets must be bool \[B, T\] = \[1, 3\], got torch.float32 \[1, 3\]",
        ),
        (tiny(k=(1, 3, 2, 4)), {}, r"do not fit: \[1, 3, 4, 5\], \[1, 3, 2, 4\], \[1, 3, 2, 6\]"),
        (tiny(v=(1, 2, 2, 6)), {}, "do not fit"),
        (tiny(q=(1, 4, 4, 5)), {}, "the last n of T tokens, got n=4 above T=3"),
        (tiny(q=(1, 3, 3, 5)), {}, "a multiple of the key/value heads, got 3 and 2"),
        (tiny(q=(1, 0, 4, 5)), {}, "must be positive"),
        (tiny(q=(1, 3, 5)), {}, r"must be \[B, T, H, D\], got \[1, 3, 5\]"),
        (
            [x.half() if i else x for i, x in enumerate(tiny())],
            {},
            "share one floating dtype, got torch.float32, torch",
        ),
        ([x.long() for x in tiny()], {}, "share one floating dtype"),
        (tiny(), dict(initial_state=PowerState(*torch.zeros(2, 1))), "must be a LogState or another .* got PowerState"),
        (
            tiny(),
            dict(initial_state=LogState(*torch.zeros(3, 1, 2, 5))),
            r"m \[1, 2, 5\], S \[1, 2, 5, 6\], z .* got m",
        ),
        (
            tiny(),
            dict(initial_state=heinsen_forms.empty_log_state(1, 2, 5, 6, torch.float64)),
            "initial_state must be torch.float32 for q of torch.float32, got .*float64",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tensors, settings, message):
    with pytest.raises(ValueError, match=message) as refused:
        heinsen_attention(*tensors, **settings)
    assert "\n" not in str(refused.value)


# ---- the position embedding


@pytest.mark.parametrize("T", [1, 15, 16, 17, 300])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_log_x_and_its_gradients_equal_the_recurrence(T, resets, dtype, tolerance):
    generator = torch.Generator().manual_seed(T)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
    leaves = [torch.nn.functional.logsigmoid(3 * make(2, T, 3)), make(2, T, 3), make(2, 3)]
    resets = torch.rand(2, T, generator=generator) < 0.1 if resets else None
    dy, results = make(2, T, 3), []
    for f, to in ((log_recurrence, dtype), (None, torch.float64)):
        a, b, first = of = [x.to(to).requires_grad_() for x in leaves]
        y = f(a, b, first, resets) if f else naive.positions(a, b, resets, first)
        results.append([y, *torch.autograd.grad(y, of, dy.to(to))])
    for found, ref in zip(*results):
        assert found.dtype == dtype and relative_error(found, ref, 0) <= tolerance


def test_log_x_is_exact_after_65536_tokens():
    """Also where x forgets little, so that a sum over the text matters; the source's float32 sum over it would not."""
    T, C = 65536, 3
    generator = torch.Generator().manual_seed(0)
    a = torch.nn.functional.logsigmoid(torch.randn(1, T, C, generator=generator) + torch.tensor([0.0, 3.0, 9.0]))
    b = torch.randn(1, T, C, generator=generator)
    found = log_recurrence(a, b, torch.zeros(1, C))
    ref = torch.empty(T, C, dtype=torch.float64)
    for c in range(C):  # x itself is inside float64's range here
        kept, added, x = a[0, :, c].double().exp().tolist(), b[0, :, c].double().exp().tolist(), [1.0]
        for t in range(T):
            x.append(x[-1] * kept[t] + added[t])
        ref[:, c] = torch.tensor(x[1:], dtype=torch.float64).log()
    assert (found[0] - ref).abs().max() < 1e-5
    total = a.cumsum(1)
    source = total + torch.logcumsumexp(torch.cat((torch.zeros(1, 1, C), b - total), 1), 1)[:, 1:]
    assert (source[0] - ref).abs().max() > 1e-3


def test_pieces_of_a_text_have_the_positions_of_the_whole():
    torch.manual_seed(0)
    layer, x, resets = LogPosition(8), torch.randn(2, 40, 8), torch.rand(2, 40) < 0.1
    whole, none = layer(x, resets)
    assert none is None
    parts, state = [], layer.empty_state(2, "cpu")
    for rows in (slice(0, 1), slice(1, 33), slice(33, 40)):
        y, state = layer(x[:, rows], resets[:, rows], state)
        parts.append(y)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-6)
    start = resets[0].nonzero()[-1].item()  # a text begins anew
    assert torch.allclose(layer(x[:1, start:])[0], whole[:1, start:], atol=1e-6)


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


@pytest.mark.parametrize("residual", ["gpt2", "glu"])
@pytest.mark.parametrize("values", ["signed", "log"])
@torch.inference_mode()
def test_reading_in_pieces_gives_what_one_pass_does(residual, values):
    model = model_of(residual=residual, values=values, reset_token=7)
    ids = torch.randint(0, 97, (2, 60))
    ids[0, 20] = 7
    logits, _ = model(ids)
    state, size = model.empty_state(2), None
    for t, cut in ((0, 23), (23, 24), (24, 60)):
        x, state = model.hidden(ids[:, t:cut], state)
        assert torch.allclose(model.logits(x), logits[:, t:cut], atol=1e-4)
        assert size in (None, state.bytes())
        size = state.bytes()
    assert size == 2 * (2 * (8 + 2 * 8 * 10 * 4) + 32 * 4)  # two layers of D (E + 2) numbers a head, and log x
    assert [layer.position.tolist() for layer in state.layers] == [[60.0, 60.0]] * 2


def test_the_gated_residual_layer_takes_the_place_of_the_mlp():
    model = GPT(heinsen_config(residual="glu", n_layer=8))
    names = {name for name, _ in model.transformer.h[0].named_parameters()}
    assert names == {"ln_1.weight", "attn.c_attn.weight", *(f"attn.c_proj.{n}" for n in GLU)}
    assert model.transformer.h[0].attn.c_proj.c_proj.weight.std() < 0.01  # 0.02 / 4
    x = torch.randn(2, 32)
    layer = model.transformer.h[0].attn.c_proj
    a, b = layer.c_fc(x).chunk(2, dim=-1)
    assert torch.allclose(layer(x), layer.c_proj(a * b.sigmoid()))
    assert not hasattr(model_of(residual="gpt2").transformer.h[0].attn.c_proj, "c_fc")


GLU = ("c_fc.weight", "c_fc.bias", "c_proj.weight")


@pytest.mark.parametrize(
    "settings,message",
    [
        (dict(values="sign"), "values must be signed or log, got 'sign'"),
        (dict(residual="mlp"), "residual must be gpt2 or glu, got 'mlp'"),
        (dict(gate="learned"), "attention=heinsen has no gates, got gate=learned"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        heinsen_config(**settings)


def test_the_state_of_another_variant_is_refused():
    mix, qkv = ATTENTIONS["heinsen"](heinsen_config()), torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match="the state of a heinsen layer must be a HeinsenState, got LayerState"):
        mix(None, qkv, None, LayerState.empty(1, "cpu"))


def test_its_products_are_counted_by_form():
    flops = lambda T, **kwargs: ATTENTIONS["heinsen"](heinsen_config(**kwargs)).attention_flops(T, torch.float32, "cpu")
    assert flops(4096, form="quadratic") == 6 * 4096 * 4 * 8
    assert flops(4096, chunk_size=64) == 6 * (64 * 4 * 8 + (4 + 2) * 8 * 9)
    assert flops(1024) == flops(65536)  # linear


def test_doubled_precision_takes_doubled_states():
    model = model_of().double()
    ids = torch.randint(0, 97, (1, 20))
    x, state = model.hidden(ids[:, :10], model.empty_state(1))
    x, state = model.hidden(ids[:, 10:], state)
    assert torch.allclose(model.logits(x), model(ids)[0][:, 10:]) and state.layers[0].S.dtype == torch.float64


# ---- the way to the kernels


def stand_in(q, k, v, documents, m=None, S=None, z=None, *, final):
    """Compute what the kernels do, in PyTorch."""
    resets = None
    if documents is not None:
        assert documents.dtype == torch.int32
        resets = torch.diff(documents, dim=1, prepend=torch.zeros_like(documents[:, :1])) > 0
    state = None if m is None else LogState(m, S, z)
    y, state = heinsen_forms.attend(q, k, v, resets=resets, initial_state=state)
    return y.to(v.dtype), *(state if final else (None, None, None))


@pytest.fixture
def kernels(monkeypatch):
    """Let dispatch believe that tensors are on a GPU with kernels, which PyTorch stands for; return their calls."""
    calls = []
    reason = dispatch.heinsen_kernel_reason
    for module in (dispatch, heinsen):
        monkeypatch.setattr(module, "heinsen_kernel_reason", lambda device, *sizes: reason("cuda", *sizes))
    monkeypatch.setattr(
        dispatch, "heinsen_unsupported_reason", lambda dtype, D, E, device: "" if D == E == 8 else f"D={D}"
    )
    run = lambda *args, **kwargs: calls.append((args[0].shape[1], args[0].dtype)) or stand_in(*args, **kwargs)
    monkeypatch.setattr("sympow.kernels.heinsen.operator.heinsen_attention", run)
    monkeypatch.setattr(dispatch, "_warned", set())
    return calls


@pytest.mark.parametrize("values", ["signed", "log"])
@pytest.mark.parametrize("n,resets,state", [(40, True, True), (13, True, False), (13, False, True)])
def test_kernels_are_asked_for_the_last_queries_with_the_state_of_the_tokens_before(kernels, values, n, resets, state):
    leaves, resets, m = inputs(40, n, D=8, E=8, dtype=torch.float32, resets=resets, state=state)
    leaves[3:] = [x.detach().abs().requires_grad_() for x in leaves[3:]]
    made = leaves, resets, m
    assert_equal_to_specification(made, dtype=torch.float32, values=values, tolerance=1e-5)
    assert kernels == [(n, torch.float32)]


def test_float16_is_computed_by_the_float32_kernels_and_comes_back_as_float16(kernels):
    made = inputs(40, D=8, E=8, dtype=torch.float16)
    assert_equal_to_specification(made, dtype=torch.float16, tolerance=1e-3)
    assert kernels == [(40, torch.float32)]


def test_sizes_that_the_kernels_do_not_take_run_in_pytorch_with_one_line(kernels):
    with pytest.warns(
        UserWarning, match="heinsen attention runs in plain PyTorch, not on its Triton kernels: D=5"
    ) as told:
        heinsen_attention(*tiny())
        heinsen_attention(*tiny())
    assert len(told) == 1 and not kernels
    heinsen_attention(*(x.double() for x in tiny(q=(1, 3, 4, 8), k=(1, 3, 2, 8), v=(1, 3, 2, 8))))
    assert not kernels


@pytest.mark.parametrize("wrong", ["", "y", "dk"])
def test_kernels_are_compared_with_float64_before_their_first_use(monkeypatch, wrong):
    def attention(q, k, v, *args, **kwargs):
        if wrong == "dk":
            k = k.detach() + (k - k.detach()) * 1.5
        y, *state = stand_in(q, k, v, *args, **kwargs)
        return y * (1.1 if wrong == "y" else 1), *state

    monkeypatch.setattr("sympow.kernels.heinsen.operator.heinsen_attention", attention)
    errors = check.errors
    monkeypatch.setattr(check, "errors", lambda size, T: errors(size, 100, "cpu"))
    monkeypatch.setattr(check, "remember", lambda name, compare, *rest: compare())
    for name, value in dict(is_available=True, is_current_stream_capturing=False, device_count=2).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    problem = check.failure(check.Size("heinsen", torch.float32, 16))
    assert problem.startswith("wrong results, heinsen float32 D=16 T=1216: y ") if wrong else not problem


def test_training_checks_the_kernels_that_it_will_use(kernels, monkeypatch):
    asked = []
    monkeypatch.setattr(
        dispatch, "failure", lambda size, device: asked.append((size.dtype, size.v_dtype, size.D, device)) or ""
    )
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    for values, *dtypes in (("signed", bf16, bf16, bf16), ("log", bf16, bf16, f32), ("signed", f16, f32, f32)):
        mix = ATTENTIONS["heinsen"](heinsen_config(values=values))
        assert mix.training_plan(4096, dtypes[0], "cuda").on_kernels
        assert asked.pop() == (*dtypes[1:], 16, torch.device("cuda"))  # rows of 8 are padded


@pytest.mark.parametrize("values", ["signed", "log"])
def test_the_kernels_in_the_interpreter_equal_the_specification(monkeypatch, values):
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    monkeypatch.setattr(heinsen, "heinsen_kernel_reason", lambda *sizes: "")
    made = inputs(24, 18, B=1, H=2, Hkv=1, D=16, E=16, dtype=torch.float32, resets=True, change=lambda k: 20 * k)
    assert_equal_to_specification(made, dtype=torch.float32, values=values, tolerance=1e-5)


@pytest.mark.parametrize("values", ["signed", "log"])
def test_no_tensor_is_as_large_as_the_states_of_all_tokens(values):
    T, D = 2048, 32
    q, k, v = (torch.randn(1, T, 1, D).requires_grad_() for _ in range(3))
    with Largest() as largest:
        y = heinsen_attention(q, k, v, values=values)
        torch.autograd.grad(y.sum(), (q, k, v))
    assert T * D <= largest.entries <= 2 * T * D  # not T * D * D: those of the inputs, or of a chunk
