"""train.py with attentions that only experiments have: forgetting, gated_deltanet, gated_deltanet_wide, window_power.

    python -m experiments.train --attention=forgetting --n_layer=6 ...
    python -m experiments.train --align_iters=100 --init_from=PATH --distill_from=PATH ...

With --align_iters=N training has a layerwise start of N micro-steps, as RADLADS (Goldstein et al., 2025) has: see
`align`.
"""

from dataclasses import dataclass

from sympow.runs import threads  # noqa: F401 (before torch)
import torch
from torch.nn import functional as F

from sympow.attention import ATTENTIONS
from sympow.experiments.forgetting import Forgetting
from sympow.experiments.gated_deltanet import GatedDeltaNet, WideDeltaNet
from sympow.experiments.window_power import WindowPower
from sympow.runs.program import run_program
from sympow.train import TrainConfig, main
from sympow.training.batches import micro_batches
from sympow.training.optimizer import take_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AUTOCAST = torch.autocast("cuda", torch.bfloat16, enabled=DEVICE == "cuda")


@dataclass
class Config(TrainConfig):
    align_iters: int = 0  # micro-steps of a layerwise start


def register():
    """Let models have the attentions of the experiments."""
    ATTENTIONS.update(
        forgetting=Forgetting, gated_deltanet=GatedDeltaNet, gated_deltanet_wide=WideDeltaNet, window_power=WindowPower
    )


def align(run):
    """Let the attention of each layer learn from the teacher's for cfg.align_iters micro-steps, unless run resumes.

    It reads what the teacher's layer reads, and learns to add to the residual stream what the teacher's adds, by the
    squared error. Errors of different sizes count alike with AdamW, because no two layers share a weight. The
    teacher is a GPT without learned positions. A signal ends the start.
    """
    teacher, steps = run.plan.teacher.model, 0 if run.plan.resume else run.plan.cfg.align_iters
    for _, (_, ids, _) in zip(range(steps), micro_batches(run.plan, run.progress)):
        with run.plan.autocast:
            x = teacher.transformer.wte(ids).flatten(0, 1)
            for theirs, ours in zip(teacher.transformer.h, run.model.transformer.h):
                outputs = (block.attn(x, block.ln_1, ids.shape, None, None)[0] for block in (ours, theirs))
                F.mse_loss(*outputs).backward()
                x = sum(theirs(x, None, ids.shape)[:2])
        take_step(run.model, run.optimizer, 1.0)
        if run.stop_signals.number:
            break


if __name__ == "__main__":
    register()
    run_program(lambda: main(align, Config))
