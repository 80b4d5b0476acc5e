"""Tokens a second in training, by context, of models of two sizes: equal_time.py computes crossings with them.

Two shallow models are measured for each. Their depths are one and two times the pattern of layers, at least 2 and 4.
The step of the whole model is on the line through both: all layers cost the same, and more of them need not fit.
"""

from sympow.experiments.report import table
from sympow.experiments.runs import main

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
    """Return the models that are measured; nothing is trained. Small sizes have the depths of the shapes alone."""
    runs, contexts = [], [size.length(n) for n in CONTEXTS]
    for shape, model in SHAPES.items():
        if size.shrink > 1:
            model = {"n_layer": model["n_layer"]}
        for name, attention in ATTENTIONS.items():
            depth = 4 if name == "hybrid" else 2
            run = size.model_run(f"{shape} {name}", **model, **attention)
            runs.append(run.measure(speed=dict(contexts=contexts, tokens=contexts[-1], layers=[depth, 2 * depth])))
    return runs


def speed_cell(context):
    """Return the function of a column: tokens a second at a context."""
    return lambda entry: round(entry.records[0]["measures"]["speed"][str(context)])


def report(entries, size):
    """Return the table."""
    contexts = [size.length(n) for n in CONTEXTS]
    columns = [(f"tokens/s at {context:,}", speed_cell(context)) for context in contexts]
    title = f"Training, {contexts[-1]:,} tokens a step; the whole model's step is computed from two depths"
    return [table(title, columns, entries.values())], []


if __name__ == "__main__":
    raise SystemExit(main("costs", plan, report))
