"""Read models of transformers as this repository's: GPT-2, Llama (SmolLM2 is one), Qwen2 and Qwen3.

    settings = settings_of(config, path)             # of GPTConfig, from the contents of a config.json
    parts = stored_names(kind, names, settings)      # {our name: names of the tensors that it is put together from}
    tensor = join(kind, parts[name], tensors, head_dim)

A Llama keeps q, k and v apart, and its MLP's gate and up: here they lie below each other. It turns entry i of a head
together with entry i + D / 2, where this repository turns neighbours: the rows of q and k are put in that order.
"""

import re
from typing import NamedTuple

import torch

from ..attention.variant import RECIPE
from ..data import DataError

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "swiglu"}
NOT_WEIGHTS = re.compile(r"transformer\.h\.\d+\.attn\.((masked_)?bias|.*inv_freq)")  # masks and speeds of rotation
TRANSPOSED = re.compile(r"(transformer\.)?h\.\d+\.(attn|mlp)\.c_\w+\.weight")  # transformers' Conv1D
ROTATED = re.compile(r".*\.self_attn\.[qk]_(proj|norm)\.\w+")


class Family(NamedTuple):
    """What transformers' models of one type have in the place of this repository's settings and names."""

    names: dict  # {pattern in a tensor's name: what comes in its place}
    settings: dict  # {setting: the name in config.json}
    defaults: dict  # of values that a config.json may lack
    allowed: dict  # {name in config.json: the values, the default first, that this model can have}
    fixed: dict  # the other settings


GPT2 = Family(
    names={r"^(?!transformer\.|lm_head\.)": "transformer."},
    settings=dict(
        **{name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd", "n_positions")},
        mlp_width="n_inner",
        norm_eps="layer_norm_epsilon",
        activation="activation_function",
        tied_head="tie_word_embeddings",
    ),
    defaults=dict(n_inner=0, layer_norm_epsilon=1e-5, activation_function="gelu_new", tie_word_embeddings=True),
    allowed=dict(
        activation_function=("gelu_new", "gelu_pytorch_tanh", "gelu"),
        scale_attn_weights=(True,),
        add_cross_attention=(False,),
        scale_attn_by_inverse_layer_idx=(False,),
    ),
    fixed=dict(attention="softmax", bias=True, positions="learned", embedding_norm=False),
)
LLAMA = Family(
    names={
        r"^model\.": "",
        r"^embed_tokens": "transformer.wte",
        r"^norm\.": "transformer.ln_f.",
        r"^layers\.": "transformer.h.",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn": "attn",
        "[qkv]_proj": "c_attn",
        "(gate|up)_proj": "c_fc",
        "(o|down)_proj": "c_proj",
    },
    settings=dict(
        vocab_size="vocab_size",
        n_layer="num_hidden_layers",
        n_head="num_attention_heads",
        n_kv_head="num_key_value_heads",
        n_embd="hidden_size",
        head_dim="head_dim",
        mlp_width="intermediate_size",
        norm_eps="rms_norm_eps",
        rope_base="rope_theta",
        tied_head="tie_word_embeddings",
        activation="hidden_act",
        bias="attention_bias",
    ),
    defaults=dict(
        num_key_value_heads=0,
        head_dim=0,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        hidden_act="silu",
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
    ),
    allowed=dict(
        hidden_act=("silu",),
        use_sliding_window=(False,),
        rope_type=("default",),
        partial_rotary_factor=(1.0,),
    ),
    fixed=dict(norm="rmsnorm", embedding_norm=False, rope_unit="radian", attention="softmax"),
)
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA}


def settings_of(config, path):
    """Return the settings with which this repository's model is the one of a config.json of transformers.

    Raises DataError for a model that is more than that, such as scaled rotations, and KeyError for a missing size.
    """
    kind = config["model_type"]
    family, rope = FAMILIES[kind], config.get("rope_scaling") or config.get("rope_parameters") or {}
    values = {**family.defaults, "rope_type": rope.get("type", "default")}
    entries = {**config, **rope, **(config.get("quantization_config") or {})}
    values |= {name: value for name, value in entries.items() if value is not None}
    # a Llama has biases everywhere or nowhere; a quantised model computes otherwise, unless it came from GGUF
    allowed = family.allowed | {"attention_bias": (values.get("mlp_bias"),), "quant_method": ("gguf",)}
    differences = [f"{name}={values[name]}" for name, x in allowed.items() if values.get(name, x[0]) not in x]
    if differences:
        raise DataError(f"{path} is no {kind} as this model can be it: its config.json has {', '.join(differences)}")
    settings = {ours: values[theirs] for ours, theirs in family.settings.items()}
    settings |= dict(activation=ACTIVATIONS[settings["activation"]], qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3")
    return {**RECIPE, **family.fixed, **settings}


def stored_names(kind, names, settings):
    """Return {our name: names in a file, in the order in which they are put together} for all names in a file.

    settings: of the model. Masks and the like are left out. A weight that is not known gets a name that no model has.
    """
    parts, patterns = {}, FAMILIES[kind].names if kind in FAMILIES else {r"^gpt\.": ""}
    for stored in sorted(names, key=lambda name: name.replace("q_proj", "a_proj")):  # q, k, v
        name = stored
        for pattern, ours in patterns.items():
            name = re.sub(pattern, ours, name)
        is_embedding = name == "lm_head.weight" and settings.get("tied_head", True)
        if not (is_embedding or NOT_WEIGHTS.fullmatch(name)):
            parts.setdefault(name, []).append(stored)
    return parts


def join(kind, stored, tensors, head_dim):
    """Return a tensor as this repository has it from those in a file, with the names `stored`."""
    if kind == "gpt2" and TRANSPOSED.fullmatch(stored[0]):
        return tensors[0].t()
    parts = [pair(x, head_dim) if ROTATED.fullmatch(name) else x for name, x in zip(stored, tensors)]
    return torch.cat(parts) if parts[1:] else parts[0]


def pair(x, head_dim):
    """Return x [H D, ...] with entry i of each head beside entry i + D / 2."""
    return x.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
