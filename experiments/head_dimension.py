"""Head dimension against power at equal parameters: which is the best use of a megabyte of state?"""

from sympow.experiments.costs import CONTEXTS, speed_cell
from sympow.experiments.report import Panel, loss_cell, ratio_cell, table, tokens_cell, val_loss
from sympow.experiments.runs import main

SHAPES = ((2, 64), (4, 16), (4, 32), (2, 128), (4, 64))  # (p, head dimension) at a width of 384
MEASURED = ", measured"  # ends the name of a new model


def plan(size):
    """Return gated runs at context 4,096 with as many heads as the width has room for, and their new models.

    A smaller width has smaller heads, and may have the same shape twice.
    """
    runs, width = {}, size.model["n_embd"]
    speed = dict(contexts=[size.length(n) for n in CONTEXTS], tokens=size.tokens_per_step)
    for p, head_dim in SHAPES:
        head_dim = max(2, head_dim * width // 384 // 2 * 2)
        name, settings = f"p={p}, D={head_dim}", dict(attention="sympow_gating", p=p)
        if head_dim * size.model["n_head"] != width:
            settings |= dict(n_head=width // head_dim, head_dim=head_dim)
        runs[name] = size.run(name, 4096, steps=1000, **settings)
        model = size.model_run(name + MEASURED, **settings)
        runs[model.name] = model.measure(state=dict(tokens=size.length(1 << 20)), speed=speed)
    return list(runs.values())


def state_cell(entry):
    """Return the bytes of state."""
    return entry.records[0]["measures"]["state"]["state"]


def parameters_cell(entry):
    """Return how many parameters a new model has."""
    return entry.records[0]["measures"]["state"]["parameters"]


def report(entries, size):
    """Return the table, and the loss against the megabytes of state."""
    trained = [entry for entry in entries.values() if not entry.name.endswith(MEASURED)]

    def of_model(cell):
        """Return the function of a column: the cell of the entry's new model."""
        return lambda entry: cell(entries[name]) if (name := entry.name + MEASURED) in entries else None

    columns = [
        ("parameters", lambda entry: entry.records[0].get("parameters") or of_model(parameters_cell)(entry)),
        ("tokens", tokens_cell),
        ("val loss", loss_cell()),
        ("to the first row", ratio_cell(trained[0] if trained else None)),
        ("state, bytes", of_model(state_cell)),
        *((f"tokens/s at {size.length(n):,}", of_model(speed_cell(size.length(n)))) for n in CONTEXTS),
    ]
    points = {}
    for entry in trained:
        if state := of_model(state_cell)(entry):
            points[entry.name] = [state / 1e6], [entry.mean(val_loss)]
    blocks = [table("sympow_gating, equal width and depth; states in bfloat16", columns, trained)]
    return blocks, [Panel("state, MB", "validation loss, nats", points, log_x=True)]


if __name__ == "__main__":
    raise SystemExit(main("head_dimension", plan, report))
