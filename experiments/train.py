"""train.py with attentions that only experiments have: forgetting, gated_deltanet and gated_deltanet_wide.

python -m experiments.train --attention=forgetting --n_layer=6 ...
"""

from sympow.runs import threads  # noqa: F401 (before torch)
import torch

from sympow.attention import ATTENTIONS
from sympow.experiments.forgetting import Forgetting
from sympow.experiments.gated_deltanet import GatedDeltaNet, WideDeltaNet
from sympow.runs.program import run_program

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AUTOCAST = torch.autocast("cuda", torch.bfloat16, enabled=DEVICE == "cuda")


def register():
    """Let models have the attentions of the experiments."""
    ATTENTIONS.update(forgetting=Forgetting, gated_deltanet=GatedDeltaNet, gated_deltanet_wide=WideDeltaNet)


if __name__ == "__main__":
    from sympow.train import main

    register()
    run_program(main)
