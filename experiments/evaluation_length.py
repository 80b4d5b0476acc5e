"""Loss by position far beyond the training context: figure 2 of Kumar et al. (2025), with standard errors."""

from itertools import pairwise

from sympow.experiments.report import Panel, loss_cell, position_curve, span_cell, table, tokens_cell
from sympow.experiments.runs import main

CONTEXT = 4096
BOUNDS = (1024, 4096, 16384, 65536, 262144, 1 << 20)  # of the positions that are averaged
MEASURES = {"positions": 65536, "far": 1 << 20}  # {name: length of the texts}
VARIANTS = {  # in order of worth
    "sympow_gating p=2": dict(attention="sympow_gating", p=2),
    "conformal_sympow p=2": dict(attention="conformal_sympow", p=2),
    "sympow p=2": dict(attention="sympow", p=2),
    "softmax": dict(attention="softmax"),
    "sympow p=4": dict(attention="sympow", p=4),
    "heinsen": dict(attention="heinsen"),
    "adaptive mixture": dict(attention="adaptive_power", adaptive="mixture"),
}


def variants(size):
    """Return {name: settings}: VARIANTS, with heads of half the width for the mixture, which has a state of p = 4."""
    heads = 2 * size.model["n_head"]
    narrow = dict(n_head=heads, head_dim=size.model["n_embd"] // heads)
    return VARIANTS | {"adaptive mixture": VARIANTS["adaptive mixture"] | narrow}


def plan(size):
    """Return the runs at context 4,096, read to 65,536, gating and conformal to 1,048,576."""
    runs, bounds = [], [size.length(n) for n in BOUNDS]
    measures = {
        "positions": dict(documents=size.documents, length=bounds[3], bounds=bounds[:4]),
        "far": dict(documents=size.documents, length=bounds[5], bounds=bounds[3:]),
    }
    for name, settings in variants(size).items():
        run = size.run(name, CONTEXT, steps=1000, **settings)
        reads_far = settings["attention"] in ("sympow_gating", "conformal_sympow")
        runs.append(run.measure(**measures) if reads_far else run.measure(positions=measures["positions"]))
    return runs


def documents_cell(measure):
    """Return the function of a column: how many texts were read."""
    return lambda entry: entry.records[0]["measures"].get(measure, {}).get("documents")


def report(entries, size):
    """Return the table by position, and a panel for each length."""
    columns = [("tokens", tokens_cell), ("val loss", loss_cell())]
    for first, last in pairwise(size.length(n) for n in BOUNDS):
        measure = "positions" if last <= size.length(MEASURES["positions"]) else "far"
        columns.append((f"{first:,} to {last:,}", span_cell(measure, first)))
    panels = []
    for measure, length in MEASURES.items():
        columns.append((f"texts of {size.length(length):,}", documents_cell(measure)))
        readers = [entry for entry in entries.values() if measure in entry.records[0]["measures"]]
        curves = {entry.name: position_curve(entry, measure) for entry in readers}
        context = size.length(CONTEXT)
        title = f"to {size.length(length):,}; dashed: the training context"
        panels.append(Panel("position", "loss, nats", curves, title, log_x=True, context=context, cut=True))
    title = "Mean loss by position ± standard error over texts, which are the same for every run"
    blocks = [table(title, columns, entries.values())]
    if any(read["joined"] for entry in entries.values() for read in entry.records[0]["measures"].values()):
        blocks.append("Texts of several projects behind one another are among those that are read.")
    return blocks, panels


if __name__ == "__main__":
    raise SystemExit(main("evaluation_length", plan, report))
