"""train.py with attentions that only experiments have: forgetting, gated_deltanet, and those with parts.

python -m experiments.train --attention=sympow_gating+rms --p=2 --n_layer=6 ...
"""

import sys

from sympow.runs import threads  # noqa: F401 (before torch)
import torch

from sympow.attention import ATTENTIONS
from sympow.runs.program import refuse, run_program

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AUTOCAST = torch.autocast("cuda", torch.bfloat16, enabled=DEVICE == "cuda")


def register(attention):
    """Add the attentions of this name or pattern to ATTENTIONS; refuse in one line where one needs fla, and it is
    missing."""
    for name in attention.split(","):
        if name.startswith("gated_deltanet"):
            from sympow.experiments import gated_deltanet

            require_fla(name)
            ATTENTIONS["gated_deltanet"] = gated_deltanet.GatedDeltaNet
            ATTENTIONS["gated_deltanet_wide"] = gated_deltanet.WideDeltaNet
        elif name == "forgetting":
            from sympow.experiments.forgetting import Forgetting

            if torch.cuda.is_available():
                require_fla(name)
            ATTENTIONS[name] = Forgetting
        elif "+" in name:
            from sympow.experiments.parts import attention_with_parts

            ATTENTIONS[name] = attention_with_parts(name)


def require_fla(name):
    """Refuse an attention of this name in one line where flash-linear-attention is missing."""
    try:
        import fla.ops  # noqa: F401
    except Exception as error:  # an ImportError, or whatever fla raises
        refuse(f"{name} needs flash-linear-attention (pip install flash-linear-attention): {error}")


if __name__ == "__main__":
    from sympow.train import main

    register(next((arg for arg in sys.argv[:0:-1] if arg.startswith("--attention=")), "").removeprefix("--attention="))
    run_program(main)
