"""The gate on attention's output: against its formula in float64, and in models, whole, packed and in pieces."""

import pytest
import torch
from torch.nn import functional as F

import sympow
from sympow.attention import ATTENTIONS
from sympow.layers.output_gate import OutputGate
from sympow.model import GPT, GPTConfig
from sympow.training.optimizer import muon_weights


def model_of(attention, **settings):
    torch.manual_seed(0)
    sizes = dict(vocab_size=40, n_layer=2, n_head=4, n_embd=32, gate_bias=2.0, output_gate=True)
    model = GPT(GPTConfig(attention=attention, **sizes | settings)).double()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def test_it_is_its_formula_with_every_gradient():
    torch.manual_seed(0)
    layer = OutputGate(6).double()
    layer.weight.data = torch.randn(6, dtype=torch.float64)
    y, gate = (torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = layer.weight * y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gate * gate.sigmoid()
    assert torch.allclose(layer(y, gate), expected, atol=1e-12)
    assert torch.autograd.gradcheck(lambda y, gate, _: layer(y, gate), (y, gate, layer.weight))


def test_bfloat16_is_computed_in_float32():
    torch.manual_seed(0)
    layer, (y, gate) = OutputGate(64), (torch.randn(2, 9, 4, 64, dtype=torch.bfloat16) for _ in range(2))
    assert torch.equal(layer(y, gate), layer(y.float(), gate.float()).bfloat16())


@pytest.mark.parametrize("convolution", [0, 3])
@torch.no_grad()
def test_the_librarys_layer_gates_the_output_of_the_layer_without(convolution):
    torch.manual_seed(0)
    settings = dict(p=2, n_kv_head=2, convolution=convolution, bias=True)
    plain, gated = (sympow.Attention(32, 4, output_gate=gate, **settings).double() for gate in (False, True))
    weights = plain.state_dict()
    for name in ("weight", "bias"):
        weights[f"c_attn.{name}"] = torch.cat((weights[f"c_attn.{name}"], torch.randn_like(weights[f"c_proj.{name}"])))
    weights["output_gate.weight"] = torch.randn(8, dtype=torch.float64)
    gated.load_state_dict(weights)
    plain.c_proj = torch.nn.Identity()
    x, resets = torch.randn(2, 9, 32, dtype=torch.float64), torch.arange(9) % 4 == 3
    resets = resets.expand(2, 9)
    gate = F.linear(x, weights["c_attn.weight"][-32:], weights["c_attn.bias"][-32:])
    y = gated.output_gate(plain(x, resets).unflatten(-1, (4, 8)), gate.unflatten(-1, (4, 8)))
    assert torch.allclose(gated(x, resets), gated.c_proj(y.flatten(2)), atol=1e-12)


@pytest.mark.parametrize("attention", [*ATTENTIONS, "sympow_gating,softmax"])
@torch.no_grad()
def test_documents_stay_apart_and_a_state_goes_on(attention):
    model = model_of(attention, reset_token=3, convolution=3, bias=True)
    ids = torch.randint(4, 40, (2, 12))
    ids[:, 5] = 3
    whole = model(ids)[0]
    alone = torch.cat([model(part)[0] for part in ids.split((5, 7), dim=1)], 1)
    assert torch.allclose(whole, alone, atol=1e-9)
    logits, state = model.read(ids[:, :4], model.empty_state(2), piece=3)
    for t in range(4, 12):
        assert torch.allclose(logits, whole[:, t - 1], atol=1e-6)
        logits, state = model.step(ids[:, t], state)


def test_every_weight_of_it_trains_and_its_matrix_is_one_of_muon():
    model = model_of("sympow_gating", n_kv_head=2)
    ids = torch.randint(40, (2, 9))
    model(ids[:, :-1], ids[:, 1:])[1].backward()
    rows = muon_weights(model)
    for block in model.transformer.h:
        attn = block.attn
        assert (attn.output_gate.weight.grad != 0).all() and (attn.c_attn.weight.grad[-32:] != 0).all()
        assert rows[attn.c_attn.weight] == [32, 16, 16, 32]
        assert not any(weight is attn.output_gate.weight for weight in rows)


@torch.no_grad()
def test_statistics_see_what_attention_sees():
    model, ids = model_of("adaptive_power", n_layer=1), torch.randint(40, (1, 9))
    queries, mix = [], model.mixes()[0]
    mix.power.register_forward_hook(lambda module, args, y: queries.append(args[0]))
    model.statistics(ids)
    assert len(queries) == 2 and torch.equal(*queries)
