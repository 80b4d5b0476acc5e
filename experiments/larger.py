"""Does the distance to softmax shrink or grow with the model? GPT-2 124M's shape beside the 17M of experiments.recipe.

12 layers of a width of 768 read the same corpus in as many steps of as many tokens as experiments.recipe, with the same
parts and one seed. With a vocabulary of 8,192 they have 98M parameters. Their rate is half of the recipe's, because
larger models want lower ones.

    pip install flash-linear-attention      # for forgetting, on GPUs
"""

from dataclasses import replace

from sympow.experiments.long_texts import SOFTMAX
from sympow.experiments.recipe import report_others, tuned
from sympow.experiments.runs import main

RATE = 4.8e-3
# the most important first
NAMES = (SOFTMAX, "p=4, heads of 64", "p=2, heads of 64", "forgetting", "p=2, heads of 128", "hybrid 3:1")
TIMES = dict(n_layer=1.5, n_head=2, n_embd=2)  # the layers, heads and width of the Size
BATCH = 8  # sequences in a micro-step, for GPUs of 80 GB


def plan(size):
    """Return the runs."""
    larger = replace(size, model={name: int(TIMES[name] * n) for name, n in size.model.items()})
    return [tuned(larger, name, RATE, batch_size=BATCH) for name in NAMES]


if __name__ == "__main__":
    main("larger", plan, report_others)
