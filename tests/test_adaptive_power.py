"""Adaptive power: both forms against their formulas, the network, and states."""

import math

import pytest
import torch
from numerics import gradients
from torch.nn import functional as F

from sympow.attention.operator import forms
from sympow.attention import naive
from sympow.attention.adaptive_power import PowerNetwork, adaptive_power_attention, mixture_attention, mixture_weights
from sympow.attention.power import power_attention
from sympow.attention.state import LayerState
from sympow.model import GPT, GPTConfig


def inputs(T, dtype=torch.float64, B=2, H=4, Hkv=2, D=16, E=16, documents=False):
    """Return [q, k, v, powers], log_g or None, and dy; some rows, keys and scores are zero, and some powers 1."""
    g = torch.Generator().manual_seed(T)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float32).to(dtype)
    q, k, v, powers = make(B, T, H, D), make(B, T, Hkv, D), make(B, T, Hkv, E), 1 + 4 * torch.rand(B, T, generator=g)
    powers[:, ::7] = 1
    if T > 30:
        q[0, 5], k[-1, 7], k[0, :9, 0] = 0, 0, 0
        q[0, 20, 0], k[0, :, 0, 0] = torch.eye(D)[0], 0  # all scores of a row are zero
    log_g = None
    if documents:
        log_g = torch.zeros(B, T, Hkv, dtype=dtype)
        for b, t, h in ((0, 13, 0), (0, 13, 1), (0, 90, 0), (1, 40, 1), (1, 64, 0), (1, 64, 1)):
            log_g[b % B, t % T, h % Hkv] = -math.inf
    return [q, k, v, powers.to(dtype)], log_g, make(B, T, H, E)


def assert_right(attention, tensors, log_g, dy, tolerance):
    """Compare y and the gradients to q, k, v and powers with float64 of the same inputs."""
    log_g64 = None if log_g is None else log_g.double()
    expected = gradients(lambda *x: naive.adaptive(*x, log_g64), tensors, dy, torch.Tensor.double)
    for name, x, r in zip(("y", "dq", "dk", "dv", "dp"), gradients(attention, tensors, dy), expected):
        floor = (1e-3 if r.shape[1] > 1 else 1) * dy.double().norm()  # a single token has no gradient but rounding
        error = (x.double() - r).norm() / max(r.norm(), floor)
        assert error <= tolerance, f"{name}: error {error:.1e}"  # NaN is not


# ---- the formulas


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("T,n", [(1, 1), (63, 63), (130, 130), (150, 17)])  # n: the last n tokens have queries
def test_attention_equals_the_specification(T, n, dtype, tolerance, documents, monkeypatch):
    (q, k, v, powers), log_g, dy = inputs(T, dtype, E=5, documents=documents)
    tensors, dy = [q[:, -n:], k, v, powers[:, -n:]], dy[:, -n:]
    attention = lambda *x: adaptive_power_attention(*x, log_g=log_g)
    assert_right(attention, tensors, log_g, dy, tolerance)
    monkeypatch.setitem(forms.SCORES_AT_ONCE, "cpu", 2**10)  # blocks of 16 rows, computed twice
    assert_right(attention, tensors, log_g, dy, tolerance)


@pytest.mark.parametrize("p", [2, 4])
def test_both_forms_are_power_attention_where_p_is_one_of_its_powers(p):
    (q, k, v, powers), log_g, _ = inputs(30, documents=True)
    expected, powers = power_attention(q, k, v, log_g, p=p), torch.full_like(powers, p)
    assert torch.allclose(adaptive_power_attention(q, k, v, powers, log_g=log_g), expected, rtol=1e-10)
    assert torch.allclose(mixture_attention(q, k, v, powers, p=(2, 4), log_g=log_g), expected, rtol=1e-12)


def test_at_three_a_mixture_is_the_mean_of_its_neighbours():
    (q, k, v, powers), _, _ = inputs(40, Hkv=4, D=8)
    powers = torch.full_like(powers, 3)
    mean = (naive.quadratic(q, k, v, p=2) + naive.quadratic(q, k, v, p=4)) / 2
    for form in ("quadratic", "chunked", "recurrent"):
        assert torch.allclose(mixture_attention(q, k, v, powers, p=(2, 4), form=form, chunk_size=16), mean)


def test_a_mixture_is_convex_and_of_the_two_neighbours():
    a = mixture_weights(torch.tensor([[2.0, 2.5, 4.0, 7.0, 8.0]]), (2, 4, 6, 8))
    expected = [[1, 0, 0, 0], [0.75, 0.25, 0, 0], [0, 1, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0, 1]]
    assert torch.equal(a, torch.tensor([expected]))


def test_the_sizes_of_q_and_k_change_nothing_and_later_tokens_no_earlier_row():
    (q, k, v, powers), log_g, _ = inputs(40, torch.float32, documents=True)
    attend = lambda q, k, powers=powers: adaptive_power_attention(q, k, v, powers, log_g=log_g)
    y = attend(q, k)
    for size in (2.0**-90, 2.0**90):
        assert torch.equal(attend(q * size, k), y) and torch.equal(attend(q, k * size), y)
    assert attend(q, k, powers * 100).isfinite().all()
    for value in (1e30, math.inf, math.nan):
        later = k.clone()
        later[:, 30:] = value
        changed = attend(q, later)
        assert torch.equal(changed[:, :30], y[:, :30])
        assert value == 1e30 or changed[:, 30:].isnan().all()
    powers[:, 9] = math.nan
    changed = attend(q, k, powers)
    assert changed[:, 9].isnan().all() and torch.equal(changed[:, 10:], y[:, 10:])


def test_powers_that_do_not_fit_are_refused():
    (q, k, v, powers), _, _ = inputs(9)
    for changed in (powers[:, 1:], powers.int()):
        with pytest.raises(ValueError, match=r"powers must be floating point \[B, n\] = \[2, 9\], got"):
            adaptive_power_attention(q, k, v, changed)


def test_float16_is_computed_as_float32_and_comes_back():
    (q, k, v, powers), log_g, _ = inputs(40, torch.float32, documents=True)
    half = [x.half() for x in (q, k, v)]
    expected = adaptive_power_attention(*(x.float() for x in half), powers, log_g=log_g)
    assert torch.equal(adaptive_power_attention(*half, powers, log_g=log_g), expected.half())


# ---- the network and the model


def tiny(**kwargs):
    torch.manual_seed(0)
    shape = dict(vocab_size=97, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, head_dim=8, rope_base=100.0)
    model = GPT(GPTConfig(**{**shape, "attention": "adaptive_power", **kwargs})).eval()
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.2)
    return model


def test_the_network_is_the_notebooks_on_all_heads_queries():
    torch.manual_seed(0)
    network, q = PowerNetwork(12, 2.0, 4.0), torch.randn(2, 5, 3, 4)
    powers = network(q)
    plain = torch.sigmoid(network.out(F.relu(network.hidden(q.reshape(2, 5, 12)))))
    assert torch.allclose(powers, 2 + 2 * plain.squeeze(-1)) and powers.std() > 0.01
    assert sum(p.numel() for p in network.parameters()) == 13**2
    with torch.autocast("cpu", torch.bfloat16):
        rounded = network(q)
    assert rounded.dtype == torch.float32 and torch.allclose(rounded, powers, atol=0.02)
    assert not torch.equal(rounded, rounded.bfloat16().float())  # only its first layer is in bfloat16


def test_p_is_of_the_queries_before_they_are_rotated():
    mix, seen = tiny().transformer.h[0].attn.mix, []
    mix.power.register_forward_hook(lambda module, args, powers: seen.append((args[0], powers)))
    qkv = torch.randn(1, 6, 8, 8).split((4, 2, 2), dim=2)
    y, _ = mix(torch.empty(1, 6, 32), qkv)
    ((queries, powers),) = seen
    assert torch.equal(queries, qkv[0])
    rotated = mix.rotate(qkv, torch.arange(1.0, 7.0, dtype=torch.float64))
    assert torch.allclose(y, naive.adaptive(*rotated, powers), atol=1e-5)


@pytest.mark.parametrize("adaptive", ["continuous", "mixture"])
def test_mean_and_spread_of_p_are_reported_for_each_layer(adaptive):
    model, ids = tiny(adaptive=adaptive, p_max=6.0), torch.randint(0, 97, (2, 30))
    powers = []
    for block in model.transformer.h:
        block.attn.mix.power.register_forward_hook(lambda module, args, y: powers.append(y))
    statistics = model.statistics(ids)
    powers = powers[::2]  # each layer computes them for the statistics and for its output
    assert statistics["power"] == [x.mean().item() for x in powers] and 2 < min(statistics["power"])
    assert statistics["power_std"] == pytest.approx([x.std(correction=0).item() for x in powers])
    assert max(statistics["power"]) < 6 and 0 < min(statistics["power_std"])


def test_bounds_of_p_need_not_be_integers_but_finite():
    assert GPTConfig(attention="adaptive_power", p_min=1.5, p_max=2.7).adaptive == "continuous"
    with pytest.raises(ValueError, match="both finite, got 2.0 and inf"):
        GPTConfig(attention="adaptive_power", p_max=math.inf)


def test_states_of_other_variants_are_refused():
    qkv, x = torch.randn(1, 1, 8, 8).split((4, 2, 2), dim=2), torch.empty(1, 1, 32)
    S, z = torch.zeros(1, 2, 36, 8), torch.zeros(1, 2, 36)  # sympow's
    state = LayerState(torch.zeros(1, dtype=torch.float64), S=S, z=z)
    for adaptive, message in (("mixture", "has 366 features, got 36"), ("continuous", "has no S and z, got S")):
        with pytest.raises(ValueError, match=message):
            tiny(adaptive=adaptive).transformer.h[0].attn.mix(x, qkv, state=state)


def test_torch_compile_does_not_unroll_many_blocks(monkeypatch):
    model, ids, graphs = tiny(n_layer=1), torch.randint(0, 97, (2, 200)), []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    sizes = []
    for scores in (2**27, 2**10):  # 4 blocks, 13 blocks
        monkeypatch.setitem(forms.SCORES_AT_ONCE, "cpu", scores)
        torch.compiler.reset()
        graphs.clear()
        loss = torch.compile(model, backend=keep)(ids, ids)[1]
        loss.backward()
        assert torch.equal(loss, model(ids, ids)[1])
        sizes.append((len(graphs), sum(len(graph.graph.nodes) for graph in graphs)))
    (graphs_of_few, unrolled), (graphs_of_many, rolled) = sizes
    assert graphs_of_few == 1 < graphs_of_many and rolled < unrolled / 2
