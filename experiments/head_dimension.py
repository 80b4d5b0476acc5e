"""Head dimension against power at equal parameters: which is the best use of a megabyte of state?"""

from experiments.report import Panel, Table, loss_cell, ratio_cell, tokens_cell, val_loss
from experiments.runs import main

SHAPES = ((2, 64), (4, 16), (4, 32), (2, 128), (4, 64))  # (p, head dimension)


def plan(size):
    """Return gated runs at context 4,096, with as many heads as the width has room for."""
    width, runs = size.model["n_embd"], []
    for p, head_dim in SHAPES:
        D = head_dim if size.shrink == 1 else max(2, head_dim * width // 384 // 2 * 2)
        shape = {} if D * size.model["n_head"] == width else dict(n_head=max(1, width // D), head_dim=D)
        if any(run.name == f"p={p}, D={D}" for run in runs):
            continue  # in a small size shapes may be the same
        run = size.run(f"p={p}, D={D}", 4096, 262_144_000, attention="sympow_gating", p=p, **shape)
        far = dict(contexts=[size.length(65536)], tokens=min(65536, size.micro_tokens))
        runs.append(run.measure(state=dict(tokens=size.length(1 << 20)), speed=far))
    return runs


def state_bytes(record):
    """Return the bytes of a sequence's states in bfloat16."""
    return record["measures"]["state"]["state"]


def report(entries, size):
    """Return the table, and the loss against the bytes of state."""
    base = entries[0]
    trained = lambda entry: entry.mean(lambda record: record["tokens_per_second"][str(size.length(4096))])
    further = lambda entry: entry.mean(lambda record: record["measures"]["speed"][str(size.length(65536))])
    whole = lambda get: lambda entry: None if get(entry) is None else round(get(entry))
    columns = [
        ("parameters", whole(lambda entry: entry.mean(lambda record: record["parameters"]))), ("tokens", tokens_cell),
        ("val loss", loss_cell()), (f"to {base.name}", ratio_cell(base)),
        ("state, bytes", whole(lambda entry: entry.mean(state_bytes))),
        (f"tokens/s at {size.length(4096):,}", whole(trained)),
        (f"at {size.length(65536):,}", whole(further)),
    ]  # fmt: skip
    done = [entry for entry in entries if entry.records]
    points = {entry.name: ([entry.mean(state_bytes)], [entry.mean(val_loss)]) for entry in done}
    return [
        Table("sympow_gating, equal width and depth; states in bfloat16", columns, entries),
        Panel("state, bytes", "validation loss, nats", points, log_x=True),
    ]


if __name__ == "__main__":
    raise SystemExit(main("head_dimension", plan, report))
