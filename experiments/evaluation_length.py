"""Loss by position far beyond the training context: figure 2 of Kumar et al. (2025), with standard errors."""

from functools import partial

from sympow.experiments.report import LOSS_COLUMNS, Panel, position_curve, span_columns, table
from sympow.experiments.runs import main, variant

CONTEXT = 4096
BOUNDS = (1024, 4096, 16384, 65536, 262144, 1 << 20)  # of the positions that are averaged
VARIANTS = ("sympow_gating p=2", "conformal_sympow p=2", "sympow p=2", "softmax", "sympow p=4", "heinsen")


def variants(size):
    """Return {name: settings} in order of worth. The mixture has heads of half the width, for its state of p = 4."""
    heads = 2 * size.model["n_head"]
    narrow = dict(n_head=heads, head_dim=size.model["n_embd"] // heads)
    mixture = dict(attention="adaptive_power", adaptive="mixture", **narrow)
    return {name: variant(name) for name in VARIANTS} | {"adaptive mixture": mixture}


def plan(size):
    """Return the runs at context 4,096, read to 65,536, gating and conformal to 1,048,576."""
    runs, bounds = [], [n // size.shrink for n in BOUNDS]
    for name, settings in variants(size).items():
        measures = {"positions": dict(documents=size.documents, length=bounds[3], bounds=bounds[:4])}
        if settings["attention"] in ("sympow_gating", "conformal_sympow"):
            measures["far"] = dict(documents=size.documents, length=bounds[5], bounds=bounds[3:])
        runs.append(size.run(name, CONTEXT, steps=1000, measures=measures, **settings))
    return runs


def documents_cell(entry, measure):
    """Return how many texts were read."""
    return entry.record["measures"].get(measure, {}).get("documents")


def report(entries, size):
    """Return the table by position, and a panel for each length."""
    bounds = [n // size.shrink for n in BOUNDS]
    columns = [*LOSS_COLUMNS, *span_columns("positions", bounds[:4]), *span_columns("far", bounds[3:])]
    panels, context = [], CONTEXT // size.shrink
    for measure, length in (("positions", bounds[3]), ("far", bounds[5])):
        columns.append((f"texts of {length:,}", partial(documents_cell, measure=measure)))
        readers = [entry for entry in entries.values() if measure in entry.record["measures"]]
        curves = {entry.name: position_curve(entry, measure) for entry in readers}
        title = f"Bands are standard errors over texts of {length:,} tokens.\nThe dashed line is the training context."
        panels.append(
            Panel("position, tokens", "loss, nats a token", curves, title, log_x=True, context=context, cut=True)
        )
    title = "Mean loss by position ± standard error over texts, which are the same for every run"
    return [table(title, columns, entries.values())], panels


if __name__ == "__main__":
    main("evaluation_length", plan, report)
