"""What is computed, in plain PyTorch, one file an idea: read them in this order.

softmax, even_power, sympow, sympow_gating, conformal_sympow are the five attentions; embedding and power hold the
mathematics they share, rotary and gates their parts, state what they keep while generating.
"""

from attention.conformal_sympow import ConformalSympow
from attention.even_power import EvenPower
from attention.power import PowerState, power_attention
from attention.softmax import Softmax
from attention.sympow import Sympow
from attention.sympow_gating import SympowGating

ATTENTIONS = {
    "softmax": Softmax,
    "even_power": EvenPower,
    "sympow": Sympow,
    "sympow_gating": SympowGating,
    "conformal_sympow": ConformalSympow,
}

__all__ = ["ATTENTIONS", "PowerState", "power_attention", *(cls.__name__ for cls in ATTENTIONS.values())]
