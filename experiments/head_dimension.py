"""Head dimension against power at equal width and depth: which is the best use of a megabyte of state?"""

from functools import partial

from sympow.experiments.costs import CONTEXTS, speed_cell
from sympow.experiments.report import LOSS_COLUMNS, Panel, ratio_cell, table, val_loss
from sympow.experiments.runs import main

SHAPES = ((2, 64), (4, 16), (4, 32), (2, 128), (4, 64))  # (p, head dimension) at a width of 384
MEASURED = ", measured"  # ends the name of a new model


def plan(size):
    """Return gated runs at context 4,096 with as many heads as the width has room for, and their new models.

    A smaller width has smaller heads.
    """
    runs, width = [], size.model["n_embd"]
    speed = dict(contexts=[size.length(n) for n in CONTEXTS], tokens=size.tokens_per_step)
    speed["depths"] = [size.model["n_layer"]]
    measures = {"state": dict(tokens=size.length(1 << 20)), "speed": speed}
    for p, head_dim in SHAPES:
        head_dim = head_dim * width // 384 // 2 * 2
        name, settings = f"p={p}, D={head_dim}", dict(attention="sympow_gating", p=p)
        if head_dim * size.model["n_head"] != width:
            settings |= dict(n_head=width // head_dim, head_dim=head_dim)
        runs.append(size.run(name, 4096, steps=1000, **settings))
        runs.append(size.new_model(name + MEASURED, measures, **settings))
    return runs


def report(entries, size):
    """Return the table, and the loss against the megabytes of state."""
    trained = [entry for entry in entries.values() if not entry.name.endswith(MEASURED)]

    def of_model(cell):
        """Return the function of a column: the cell of the entry's new model."""
        return lambda entry: cell(entries[name]) if (name := entry.name + MEASURED) in entries else None

    state = of_model(lambda entry: entry.record["measures"]["state"]["state"])
    columns = [
        *LOSS_COLUMNS,
        ("to the first row", partial(ratio_cell, base=trained[0] if trained else None)),
        ("state, bytes", state),
        *((f"tokens/s at {size.length(n):,}", of_model(partial(speed_cell, context=size.length(n)))) for n in CONTEXTS),
    ]
    points = {e.name: ([state(e) / 1e6], [e.mean(val_loss)]) for e in trained if state(e)}
    blocks = [table("sympow_gating, equal width and depth; states in bfloat16", columns, trained)]
    return blocks, [Panel("state, MB", "validation loss, nats", points, log_x=True)]


if __name__ == "__main__":
    main("head_dimension", plan, report)
