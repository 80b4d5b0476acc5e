"""train.py with attentions that only experiments have: gated_deltanet, and those with parts.

python -m experiments.train --attention=sympow_gating+out --p=2 --n_layer=6 ...
"""

import sys

from sympow.runs import threads  # noqa: F401 (before torch)
import torch

from sympow.attention import ATTENTIONS
from sympow.runs.program import refuse, run_program


def register(attention):
    """Add the attentions of this name or pattern to ATTENTIONS; refuse in one line where fla is missing."""
    for name in attention.split(","):
        if name.startswith("gated_deltanet"):
            from sympow.experiments import gated_deltanet

            try:
                gated_deltanet.operator(torch.device("cpu"))
            except Exception as error:  # an ImportError, or whatever fla raises
                refuse(f"gated_deltanet needs flash-linear-attention (pip install flash-linear-attention): {error}")
            ATTENTIONS["gated_deltanet"] = gated_deltanet.GatedDeltaNet
            ATTENTIONS["gated_deltanet+plain"] = gated_deltanet.PlainDeltaNet
        elif "+" in name:
            from sympow.experiments.parts import attention_with_parts

            ATTENTIONS[name] = attention_with_parts(name)


if __name__ == "__main__":
    from sympow.train import main

    register(next((arg for arg in sys.argv[:0:-1] if arg.startswith("--attention=")), "").removeprefix("--attention="))
    run_program(main)
