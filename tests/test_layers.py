"""attention= as a pattern over the layers: each layer has its own attention, gate, state and form."""

import pytest
from test_config import config_of

from sympow.attention import ATTENTIONS, Softmax, Sympow, SympowGating
from sympow.attention.variant import RECIPE
from sympow.model import GPT, GPTConfig

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
