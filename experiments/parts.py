"""Which parts does an even power need? One factor at a time around gated p = 2 with heads of 64.

The base has no positions, gates that begin at sigmoid(3), a convolution of 4 tokens and an output gate. The factors are
settings of the model. The table has records of more models: some had parts that are no settings, and went with
them (q and k normalised, half of each head rotated, a convolution of k and v alone, an output that is normalised but
not gated, gates of a layer's heads that begin at sigmoid(1) to sigmoid(6)). Others are contenders of
experiments.recipe.
"""

from sympow.experiments.report import loss_cell, seeds_column, table
from sympow.experiments.runs import main, make_run

RATE = 2.4e-3
CONVOLUTION = 4  # tokens
AROUND = dict(convolution=CONVOLUTION, output_gate=True)
BASE = dict(attention="sympow_gating", p=2, positions="none", gate_bias=3.0, **AROUND)
RUNS = {  # name -> settings of runs.make_run, the most important first
    "p=2": BASE,
    "p=2, gate_bias 2": BASE | dict(gate_bias=2.0),
    "p=2, gate_bias 4": BASE | dict(gate_bias=4.0),
    "p=2, no output gate": BASE | dict(output_gate=False),
    "p=2, convolution 2": BASE | dict(convolution=2),
    "p=2, convolution 8": BASE | dict(convolution=8),
    "p=2, no convolution": BASE | dict(convolution=0),
    "p=2, rotary": BASE | dict(positions="rotary"),
    "p=2, weight decay 0.1": BASE | dict(weight_decay=0.1),
    "p=2, gate_bias 0": BASE | dict(gate_bias=0.0, log_interval=1),  # metrics.jsonl has the gradient's norms
}


def plan(size):
    """Return the runs, without measures: the validation loss chooses."""
    return [make_run(size, name, settings, RATE) for name, settings in RUNS.items()]


# ---- the report


def report(entries, size):
    """Return the table of the parts."""
    columns = [("val loss", loss_cell), seeds_column("to p=2", entries.get("p=2"))]
    return [table("One factor at a time", columns, entries.values())]


if __name__ == "__main__":
    main("parts", plan, report)
