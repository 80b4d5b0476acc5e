"""attention= as a pattern over the layers: each layer has its own attention, gate, state and form."""

from dataclasses import dataclass

import pytest
import torch
from test_model import tiny

from sympow.attention import ATTENTIONS, Softmax, Sympow, SympowGating
from sympow.attention.state import LayerState, State
from sympow.attention.variant import RECIPE
from sympow.generation.generate import generate
from sympow.generation.steps import read_prompt
from sympow.model import GPT, GPTConfig
from sympow.generation import state_file
from sympow.runs.settings import read_settings

SHAPE = dict(vocab_size=97, n_head=4, n_kv_head=2, n_embd=32, head_dim=8, rope_base=99.0, gate_bias=2.0)


@pytest.mark.parametrize(
    "attention,gate,n_layer,gates",
    [
        ("sympow_gating, sympow,softmax", "auto", 6, ["learned", "none", "none"] * 2),
        ("sympow_gating,sympow", "fixed", 2, ["fixed", "none"]),
        ("sympow_gating,sympow,softmax", "auto", 5, ["learned", "none", "none", "learned", "none"]),  # cut
    ],
)
def test_the_pattern_is_repeated_and_each_layer_has_its_own_gate(attention, gate, n_layer, gates):
    config = GPTConfig(attention=attention, gate=gate, n_layer=n_layer, **SHAPE)
    assert config.attention == attention.replace(" ", "")
    kinds = [type(block.attn.mix) for block in GPT(config).transformer.h]
    assert kinds == ([SympowGating, Sympow, Softmax] * 2)[:n_layer]
    assert [config.layer(i).gate for i in range(n_layer)] == gates


def config_of(arguments):
    """Return the GPTConfig of a text such as "attention=sympow p=4"."""
    return GPTConfig(**read_settings((GPTConfig,), [f"--{argument}" for argument in arguments.split()])[0])


@pytest.mark.parametrize(
    "arguments,message",
    [
        ("attention=sympow,softmax,softmax n_layer=2", "attention has a pattern of 3 layers, the model has n_layer=2"),
        ("attention=sympow,", "got ''"),
        ("attention=sympow,soft", "got 'soft'"),
        ("attention=sympow,softmax gate=learned", "no layer of attention=sympow,softmax takes gate=learned"),
        ("attention=sympow positions=none,rotary gate=learned", "no layer of attention=sympow takes gate=learned"),
        ("attention=sympow_gating,softmax gate=none", "is attention=sympow"),
        ("positions=none,learned", "positions=learned is a table for all layers, got positions=none,learned"),
        ("positions=none,rotary,none n_layer=2", "positions has a pattern of 3 layers, the model has n_layer=2"),
        ("positions=none,half", "positions must be one of auto, rotary, none, learned, got 'half'"),
    ],
)
def test_a_wrong_pattern_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        config_of(arguments)


RECIPES = {
    "softmax": "rotary 6.9 4 False",
    "conformal_sympow": "rotary 3.0 4 True",
    "sympow_gating": "none 3.0 4 True",
}
# arguments; positions, gate_bias, convolution and output_gate
CHOICES = [
    *((f"attention={name}", "rotary 6.9 0 False") for name in ATTENTIONS if name not in RECIPES),
    *((f"attention={name}", choice) for name, choice in RECIPES.items()),
    ("attention=sympow_gating gate_bias=auto convolution=2 output_gate=0", "none 3.0 2 False"),
    ("attention=sympow_gating gate=fixed", "rotary 6.9 0 False"),
    ("attention=conformal_sympow gate=none", "rotary 6.9 0 False"),
    ("attention=softmax,sympow_gating", "none 3.0 4 True"),
    ("attention=softmax,sympow", "rotary 6.9 0 False"),
    ("attention=conformal_sympow,sympow_gating", "rotary,none 3.0 4 True"),
    ("attention=sympow_gating positions=auto,rotary", "none,rotary 3.0 4 True"),
    ("attention=softmax positions=rotary,auto", "rotary 6.9 4 False"),
    ("attention=softmax,heinsen,sympow_gating", "none,rotary,none 3.0 4 True"),
    ("attention=sympow_gating positions=learned,learned", "learned 3.0 4 True"),
]


@pytest.mark.parametrize("arguments,values", CHOICES)
def test_auto_is_what_an_attention_learns_best_with(arguments, values):
    config = config_of(arguments)
    assert " ".join(str(getattr(config, name)) for name in RECIPE) == values
    assert GPTConfig(**vars(config)) == config


def test_a_fresh_gate_is_sigmoid_of_gate_bias_at_every_token():
    gate = ATTENTIONS["sympow_gating"](GPTConfig(attention="sympow_gating", gate_bias=0.5)).gate
    products = torch.randn(2, 768) @ gate.input_weight().T
    assert torch.allclose(gate(products).exp(), torch.tensor(0.5).sigmoid().expand(2, 12))


# ---- a position embedding and an output layer of an attention's own


@dataclass
class CountState(State):
    tokens: torch.Tensor  # [B] float32


class Count(torch.nn.Module):
    """A position embedding that adds 1 / (1 + the number of tokens before)."""

    def empty_state(self, batch, device):
        return CountState(torch.zeros(batch, device=device))

    def forward(self, x, resets=None, state=None):
        start = x.new_zeros(len(x), 1) if state is None else state.tokens[:, None]
        positions = torch.arange(x.shape[1]) + start
        return x + 1 / (1 + positions[..., None]), state and CountState(positions[:, -1] + 1)


class Unrotated(Softmax):
    def rotate(self, qkv, positions):
        return self.split(qkv)

    @classmethod
    def position_embedding(cls, config):
        return Count()

    @classmethod
    def output_layer(cls, config):
        layer = torch.nn.Sequential(torch.nn.Linear(config.n_head * config.head_dim, 8), torch.nn.GELU())
        layer.c_proj = torch.nn.Linear(8, config.n_embd)
        return layer


@pytest.fixture
def unrotated(monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "unrotated", Unrotated)


@torch.inference_mode()
def test_an_attention_may_bring_its_position_embedding_and_output_layer(unrotated, tmp_path):
    model = tiny("unrotated,sympow")
    first, second = model.transformer.h
    assert not hasattr(first, "mlp") and not hasattr(first, "ln_2") and hasattr(second, "mlp")
    assert GPT(model.config).transformer.h[0].attn.c_proj.c_proj.weight.std() < 0.015  # 0.02 / sqrt(2 n_layer)
    prompt, file, options = [5, 10, 7, 20, 30], str(tmp_path / "a.state"), dict(max_new_tokens=12, temperature=0.0)
    (ids,) = zip(*generate(model, prompt, **options))
    logits, _ = model(torch.tensor([[*prompt, *ids]]))
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == list(ids)
    state_file.save_state(file, model, *read_prompt(model, prompt))
    logits, state = state_file.load_state(file, model)
    assert list(zip(*generate(model, prefix=(logits, state), **options))) == [ids]
    assert state.embedding.tokens == 5 and type(state.layers[0]) is LayerState
    assert state.repeat(2).embedding.tokens.shape == (2,)
