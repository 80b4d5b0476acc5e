"""Tokens a second in training, by context, of models of two sizes: equal_time.py computes crossings with them.

Two shallow models are measured for each. Their depths are one and two times the pattern of layers, at least 2 and 4.
The step of the whole model is on the line through both: all layers cost the same, and more of them need not fit.
"""

from functools import partial

from sympow.experiments.report import table
from sympow.experiments.runs import main, variant

ATTENTIONS = {
    "softmax": variant("softmax"),
    "sympow_gating": variant("sympow_gating p=2"),
    "conformal_sympow": variant("conformal_sympow p=2"),
    "hybrid": dict(attention="sympow_gating,sympow_gating,sympow_gating,softmax", p=2),
    "gated_deltanet": variant("gated_deltanet"),
}
SHAPES = {
    "124M": dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50257),
    "1.5B": dict(n_layer=48, n_head=25, n_embd=1600, vocab_size=50257),
}
CONTEXTS = (4096, 65536)


def plan(size):
    """Return the models that are measured; nothing is trained. Small sizes have the depths of the shapes alone."""
    runs = []
    contexts = [n // size.shrink for n in CONTEXTS]
    for shape, model in SHAPES.items():
        if size.shrink > 1:
            model = {"n_layer": model["n_layer"]}
        for name, attention in ATTENTIONS.items():
            depth = 4 if name == "hybrid" else 2
            speed = dict(contexts=contexts, tokens=contexts[-1], depths=[depth, 2 * depth])
            runs.append(size.new_model(f"{shape} {name}", {"speed": speed}, **model, **attention))
    return runs


def speed_cell(entry, context):
    """Return the tokens a second at a context."""
    return round(entry.record["measures"]["speed"][str(context)])


def speed_columns(size):
    """Return the columns of speed_cell for both contexts."""
    contexts = [n // size.shrink for n in CONTEXTS]
    return [(f"tokens/s at {context:,}", partial(speed_cell, context=context)) for context in contexts]


def report(entries, size):
    """Return the table."""
    title = "Training; the step of the whole model is computed from two depths"
    return [table(title, speed_columns(size), entries.values())], []


if __name__ == "__main__":
    main("costs", plan, report)
