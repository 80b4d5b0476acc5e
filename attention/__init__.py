"""The mathematics of the attentions in plain PyTorch, one file per idea.

The variants are chapters with the same headings: softmax, even_power, sympow, sympow_gating, conformal_sympow,
adaptive_power, heinsen; variant is what the model asks of each of them. embedding, rotary and gates hold the
mathematics that they share; naive is the specification, power the operator, state the state of generation.
heinsen_naive is heinsen's specification, positions has the position embeddings before the first layer. operator/ has
the choice between forms and kernels, the forms in fast PyTorch, and the check of the kernels; parallel/ has sequences
that are spread over ranks; compat/ has the interfaces of two libraries.
"""

if __name__ != "sympow.attention":
    raise ImportError("attention/ is imported as sympow.attention")

from sympow import check_choice
from .adaptive_power import AdaptivePower, check_powers
from .conformal_sympow import ConformalSympow
from .even_power import EvenPower
from .heinsen import IS_LOG, OUTPUT_LAYERS, Heinsen, LogState, heinsen_attention
from .operator.forms import PowerState
from .power import power_attention, power_attention_sums
from .softmax import Softmax
from .sympow import Sympow
from .sympow_gating import SympowGating
from .variant import RECIPE, Variant, check_layer

ATTENTIONS = {
    "softmax": Softmax,
    "even_power": EvenPower,
    "sympow": Sympow,
    "sympow_gating": SympowGating,
    "conformal_sympow": ConformalSympow,
    "adaptive_power": AdaptivePower,
    "heinsen": Heinsen,
}

__all__ = [
    "ATTENTIONS", "LogState", "PowerState", "Variant", "heinsen_attention", "power_attention", "power_attention_sums",
    *(cls.__name__ for cls in ATTENTIONS.values()),
]  # fmt: skip


def check_settings(config):
    """Choose head_dim and n_kv_head of a GPTConfig where they are 0, and raise ValueError for wrong values.

    Settings of attentions that the model does not have are checked too: with right values they may stand.
    """
    check_layer(config)
    check_powers(config)
    check_choice("values", config.values, IS_LOG)
    check_choice("residual", config.residual, OUTPUT_LAYERS)


def layer_pattern(setting, text, choices, n_layer):
    """Return the names in `text`, the value of a setting, with commas between, of the layers in turn.

    Raises ValueError if one of them is not among the choices, or if there are more of them than layers.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        check_choice(setting, name, choices)
    if len(names) > n_layer:
        raise ValueError(f"{setting} has a pattern of {len(names)} layers, the model has n_layer={n_layer}")
    return names


def leading_layer(layers):
    """Return the layer, one of a list of GPTConfigs, that sets the recipe of all layers.

    It is the first with a recipe of its own, or the first. Softmax layers count only if there are no others.
    """
    leading = [layer for layer in layers if not ATTENTIONS[layer.attention].follows] or layers
    return next((layer for layer in leading if ATTENTIONS[layer.attention].recipe(layer) != RECIPE), leading[0])


def join_positions(layers, leading=None):
    """Join the positions of layers (a list of GPTConfigs) to one value of the setting positions.

    leading: the layer from which softmax layers take theirs, or None. Raises ValueError if only some layers have
    positions=learned, a table that all layers see.
    """
    places = [leading.positions if leading and ATTENTIONS[x.attention].follows else x.positions for x in layers]
    joined = ",".join(places if len({*places}) > 1 else places[:1])
    if "learned" in places and "," in joined:
        raise ValueError(f"positions=learned is a table for all layers, got positions={joined}")
    return joined
