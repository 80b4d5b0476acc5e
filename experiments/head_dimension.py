"""Head dimension against power at equal width and depth: which is the best use of a megabyte of state?"""

from functools import partial

from sympow.experiments.report import LOSS_COLUMNS, Panel, ratio_cell, table, val_loss
from sympow.experiments.runs import main

SHAPES = ((2, 64), (4, 16), (4, 32), (2, 128), (4, 64))  # (p, head dimension) at a width of 384
CONTEXTS = (4096, 65536)  # of the speeds
MEASURED = ", measured"  # ends the name of a new model
TITLE = "Each point is a gated model of the same width and depth."


def plan(size):
    """Return gated runs at context 4,096 with as many heads as the width has room for, and their new models.

    A smaller width has smaller heads.
    """
    runs, width = [], size.model["n_embd"]
    speed = dict(contexts=[n // size.shrink for n in CONTEXTS], tokens=size.tokens_per_step)
    measures = {"state": dict(tokens=(1 << 20) // size.shrink), "speed": speed}
    for p, head_dim in SHAPES:
        head_dim = head_dim * width // 384 // 2 * 2
        name, settings = f"p={p}, D={head_dim}", dict(attention="sympow_gating", p=p)
        if head_dim * size.model["n_head"] != width:
            settings |= dict(n_head=width // head_dim, head_dim=head_dim)
        runs.append(size.run(name, 4096, steps=1000, **settings))
        runs.append(size.new_model(name + MEASURED, measures, **settings))
    return runs


def state_cell(entry):
    """Return the bytes of a text's state."""
    return entry.record["measures"]["state"]["state"]


def speed_cell(entry, context):
    """Return the tokens a second at a context."""
    return round(entry.record["measures"]["speed"][str(context)])


def report(entries, size):
    """Return a table of the losses and one of the new models, and the loss against the megabytes of state."""
    models = {name: entry for name, entry in entries.items() if name.endswith(MEASURED)}
    trained = [entry for entry in entries.values() if entry.name not in models]
    points = {}
    for entry in trained:
        if model := models.get(entry.name + MEASURED):
            points[entry.name] = [state_cell(model) / 1e6], [entry.mean(val_loss)]
    columns = [("state, bytes", state_cell)]
    for context in [n // size.shrink for n in CONTEXTS]:
        columns.append((f"tokens/s at {context:,}", partial(speed_cell, context=context)))
    loss_columns = [*LOSS_COLUMNS, ("to the first row", lambda entry: ratio_cell(entry, trained[0]))]
    blocks = [
        table("sympow_gating, equal width and depth", loss_columns, trained),
        table("States in bfloat16", columns, models.values()),
    ]
    return blocks, [Panel("state, MB", "validation loss, nats a token", points, TITLE, log_x=True)]


if __name__ == "__main__":
    main("head_dimension", plan, report)
