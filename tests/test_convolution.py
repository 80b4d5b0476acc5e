"""The convolution before attention: against a loop in float64, alone and in models, whole, packed and in pieces."""

import re
from functools import partial

import pytest
import torch

from sympow.attention.operator.memory import generation_bytes
from sympow.layers.convolution import Convolution
from sympow.model import GPT, GPTConfig

STARTS = {0: [4], 1: [0, 7]}  # of documents, in each of two sequences


HEADS = [2, 1, 1, 2]  # of q, k, v and a gate, which is not convolved


def joined(layer, x, *args):
    """Return what the layer does to q, k and v, which stand side by side in x [B, T, 4, D], as one tensor."""
    gate = torch.randn(*x.shape[:2], 2, x.shape[3], dtype=x.dtype)
    *qkv, untouched = layer(torch.cat((x, gate), dim=2), *args)
    assert untouched.equal(gate) and [part.shape[2] for part in qkv] == HEADS[:3]
    return torch.cat(qkv, dim=2)


def resets(T):
    starts = torch.zeros(2, T, dtype=torch.bool)
    for row, tokens in STARTS.items():
        starts[row, tokens] = True
    return starts


def convolve_in_a_loop(x, weight, starts):
    (B, T, H, D), n = x.shape, len(weight)
    y, weight = x.clone(), weight.view(n, H, D)
    for b in range(B):
        for t in range(T):
            for i in range(n):
                s = t - n + 1 + i
                if s >= 0 and not starts[b, s + 1 : t + 1].any():
                    y[b, t] += weight[i] * x[b, s]
    return y


@pytest.mark.parametrize("n", [2, 4, 12])
@pytest.mark.parametrize("packed", [False, True])
def test_it_is_the_loop_whole_and_in_pieces(n, packed):
    torch.manual_seed(0)
    layer, x = Convolution(HEADS, 3, n).double(), torch.randn(2, 10, 4, 3, dtype=torch.float64, requires_grad=True)
    starts = resets(10) if packed else torch.zeros(2, 10, dtype=torch.bool)
    expected, dy = convolve_in_a_loop(x, layer.weight, starts), torch.randn(2, 10, 4, 3, dtype=torch.float64)
    expected_gradients = torch.autograd.grad(expected, (x, layer.weight), dy)
    for lengths in ((10,), (3, 1, 6), (1,) * 10):
        outputs, recent, begin = [], None, 0
        for length in lengths:
            piece = slice(begin, begin + length)
            args = x[:, piece], starts[:, piece] if packed else None, recent
            outputs.append(joined(layer, *args))
            recent = layer.last_inputs(*args)
            begin += length
        y = torch.cat(outputs, 1)
        assert torch.allclose(y, expected, atol=1e-12)
        grads = torch.autograd.grad(y, (x, layer.weight), dy)
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(grads, expected_gradients))


def small(attention, **settings):
    torch.manual_seed(0)
    sizes = dict(vocab_size=40, n_layer=2, n_head=2, n_embd=32, gate_bias=2.0, convolution=3)
    model = GPT(GPTConfig(attention=attention, **sizes | settings)).double()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


@pytest.mark.parametrize("attention", ["sympow", "heinsen"])
@pytest.mark.parametrize("tokens", [0, 5])
@torch.no_grad()
def test_its_inputs_count_once_as_memory_of_generation_and_hold_no_others(attention, tokens):
    counts = []
    for convolution in (0, 4):
        model = small(attention, convolution=convolution)
        state = model.empty_state(1)
        if tokens:
            _, state = model.read(torch.zeros(1, tokens, dtype=torch.int64), state)
        counts.append(generation_bytes(model.attentions(), state, 100, 2, torch.float32))
    assert counts[1][0] == counts[0][0] and counts[1][1] - counts[0][1] == 2 * 3 * 3 * 32 * 4
    for layer in state.layers if tokens else ():
        assert layer.conv_inputs.untyped_storage().nbytes() == layer.conv_inputs.nbytes


@pytest.mark.parametrize("output_gate", [False, True])
@torch.no_grad()
def test_statistics_see_what_attention_sees(output_gate):
    model, ids = small("adaptive_power", n_layer=1, output_gate=output_gate, reset_token=3), torch.arange(9).view(1, 9)
    queries, mix = [], model.attentions()[0]
    mix.power.register_forward_hook(lambda module, args, y: queries.append(args[0]))
    model.statistics(ids)
    assert len(queries) == 2 and torch.equal(*queries)


def test_it_has_every_derivative_of_torch():
    torch.manual_seed(0)
    layer, x = Convolution(HEADS[:3], 3, 3).double(), torch.randn(2, 8, 4, 3, dtype=torch.float64, requires_grad=True)

    def loss(x, weight=layer.weight, starts=resets(8)):
        qkv = torch.func.functional_call(layer, {"weight": weight}, (x, starts))
        return torch.cat(qkv, dim=2).square().sum()

    expected = torch.autograd.grad(loss(x), (x, layer.weight))
    direction = torch.randn_like(x)
    assert torch.allclose(torch.func.jvp(loss, (x,), (direction,))[1], (expected[0] * direction).sum())
    assert torch.allclose(torch.func.grad(loss)(x), expected[0]) and torch.func.functionalize(loss)(x) == loss(x)
    batched = torch.autograd.grad(loss(x), layer.weight, torch.tensor([1.0, 2.0]).double(), is_grads_batched=True)[0]
    assert torch.allclose(batched, torch.stack((expected[1], 2 * expected[1])))
    assert torch.autograd.gradgradcheck(loss, (x, layer.weight))


def test_it_has_the_dtype_of_its_input():
    layer, x, recent = Convolution(HEADS[:3], 3, 3), torch.randn(1, 4, 4, 3).bfloat16(), torch.zeros(1, 2, 4, 3)
    assert {y.dtype for y in (*layer(x, recent=recent), layer.last_inputs(x, None, recent))} == {torch.bfloat16}


def test_a_source_without_one_gets_it_and_a_source_with_one_loses_it(go, capsys):
    go = partial(go, "--attention=sympow_gating")
    assert go("--convolution=0", "--out_dir=out/plain", "--max_iters=2") == 0
    assert go("--convolution=4", "--init_from=out/plain", "--out_dir=out/a", "--max_iters=2") == 0
    assert "h.*.attn.conv.weight" in capsys.readouterr().out
    losses = []
    for name, source, n in (("b", "plain", 0), ("c", "plain", 4), ("d", "a", 0)):
        settings = [f"--convolution={n}", f"--init_from=out/{source}", f"--out_dir=out/{name}", "--eval_only=True"]
        assert go(*settings) == 0
        losses += re.findall("val loss ([0-9.]+)", capsys.readouterr().out)
    assert losses[0] == losses[1] and len(losses) == 3  # a new one changes nothing at first; one can be dropped
