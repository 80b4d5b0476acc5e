"""Head dimension against power at equal parameters: which is the best use of a megabyte of state?"""

from sympow.experiments.costs import CONTEXTS, speeds
from sympow.experiments.report import Panel, Table, loss_cell, ratio_cell, tokens_cell, val_loss
from sympow.experiments.runs import Run, main

SHAPES = ((2, 64), (4, 16), (4, 32), (2, 128), (4, 64))  # (p, head dimension)
MEASURED = ", measured"  # ends the name of a run that is not trained


def plan(size):
    """Return gated runs at context 4,096, with as many heads as the width has room for; then what is measured."""
    width, runs, measured = size.model["n_embd"], [], []
    for p, head_dim in SHAPES:
        D = head_dim if size.shrink == 1 else max(2, head_dim * width // 384 // 2 * 2)
        shape = {} if D * size.model["n_head"] == width else dict(n_head=max(1, width // D), head_dim=D)
        if any(run.name == f"p={p}, D={D}" for run in runs):
            continue  # in a small size shapes may be the same
        runs.append(size.run(f"p={p}, D={D}", 4096, 131_072_000, attention="sympow_gating", p=p, **shape))
        run = Run(f"{runs[-1].name}{MEASURED}", size.model | dict(attention="sympow_gating", p=p) | shape)
        speed = dict(contexts=[size.length(n) for n in CONTEXTS], tokens=size.micro_tokens)
        measured.append(run.measure(state=dict(tokens=size.length(1 << 20)), speed=speed))
    return runs + measured


def report(entries, size):
    """Return the table, and the loss against the bytes of state."""
    base, trained = entries[0], [entry for entry in entries if not entry.name.endswith(MEASURED)]
    measured = {entry.name.removesuffix(MEASURED): entry for entry in entries if entry.name.endswith(MEASURED)}
    state = lambda entry: measured[entry.name].mean(lambda record: record["measures"]["state"]["state"])
    speed = lambda n: lambda entry: measured[entry.name].mean(lambda record: speeds(record)[size.length(n)])
    whole = lambda get: lambda entry: None if get(entry) is None else round(get(entry))
    columns = [
        ("parameters", whole(lambda entry: entry.mean(lambda record: record["parameters"]))), ("tokens", tokens_cell),
        ("val loss", loss_cell()), (f"to {base.name}", ratio_cell(base)),
        ("state, bytes", whole(state)), *((f"tokens/s at {size.length(n):,}", whole(speed(n))) for n in CONTEXTS),
    ]  # fmt: skip
    done = [entry for entry in trained if entry.records and state(entry)]
    points = {entry.name: ([state(entry)], [entry.mean(val_loss)]) for entry in done}
    return [
        Table("sympow_gating, equal width and depth; states in bfloat16", columns, trained),
        Panel("state, bytes", "validation loss, nats", points, log_x=True),
    ]


if __name__ == "__main__":
    raise SystemExit(main("head_dimension", plan, report))
