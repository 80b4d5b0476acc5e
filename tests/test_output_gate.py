"""The gate on attention's output: against its formula in float64, and behind a layer's attention.

tests/test_model.py and test_variant.py have both together in models, whole, packed and in pieces.
"""

import torch
from test_convolution import small

from sympow.layers.output_gate import OutputGate
from sympow.training.optimizer import muon_weights


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


def test_every_weight_of_it_and_of_the_convolution_trains_and_matrices_are_those_of_muon():
    model = small("sympow_gating", n_head=4, n_kv_head=2)
    ids = torch.randint(40, (2, 9))
    model(ids[:, :-1], ids[:, 1:])[1].backward()
    rows = muon_weights(model)
    for block in model.transformer.h:
        attn = block.attn
        assert (attn.output_gate.weight.grad != 0).all() and (attn.c_attn.weight.grad[-32:] != 0).all()
        assert rows[attn.c_attn.weight] == [32, 16, 16, 32]
        assert (attn.conv.weight.grad != 0).all() and not {attn.output_gate.weight, attn.conv.weight} & rows.keys()
