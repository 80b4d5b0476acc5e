"""Tokens a second in training, by context, of models of two sizes: what equal_time.py computes crossings with.

Two shallow models are measured of each, of one and two times the pattern's layers (at least 2 and 4), and the whole
one's step is on the line through both: all layers cost the same, and more of them need not fit.
"""

from sympow.experiments.report import Table
from sympow.experiments.runs import Run, main

ATTENTIONS = {
    "softmax": dict(attention="softmax"),
    "sympow_gating": dict(attention="sympow_gating", p=2),
    "conformal_sympow": dict(attention="conformal_sympow", p=2),
    "hybrid": dict(attention="sympow_gating,sympow_gating,sympow_gating,softmax", p=2),
    "gated_deltanet": dict(attention="gated_deltanet"),
}
SHAPES = {
    "124M": dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50257),
    "1.5B": dict(n_layer=48, n_head=25, n_embd=1600, vocab_size=50257),
}
CONTEXTS = (4096, 65536)


def plan(size):
    """Return what is measured: nothing is trained."""
    runs = []
    for shape, model in SHAPES.items():
        if size.shrink > 1:
            model = model | dict(n_head=2, n_embd=32 if shape == "124M" else 64, vocab_size=257)
        for name, attention in ATTENTIONS.items():
            depth = 4 if name == "hybrid" else 2
            needs = "fla" if name == "gated_deltanet" else ""
            contexts, tokens = [size.length(n) for n in CONTEXTS], size.length(65536)
            run = Run(f"{shape} {name}", model | attention, needs=needs)
            runs.append(run.measure(speed=dict(contexts=contexts, tokens=tokens, layers=[depth, 2 * depth])))
    return runs


def speeds(record):
    """Return {context: tokens a second} of a record."""
    return {int(context): speed for context, speed in record["measures"]["speed"].items()}


def report(entries, size):
    """Return the table."""
    speed = lambda n: lambda e: round(speeds(e.records[0])[size.length(n)])
    columns = [(f"tokens/s at {size.length(n):,}", speed(n)) for n in CONTEXTS]
    title = f"Training, {size.length(65536):,} tokens a step; the whole model's step is computed from two depths"
    return [Table(title, columns, entries)]


if __name__ == "__main__":
    raise SystemExit(main("costs", plan, report))
