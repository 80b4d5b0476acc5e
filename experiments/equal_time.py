"""When is it worth it? Equal GPU time on documents of 65,536 tokens: softmax and others, at 4,096 and in stages.

Every run has the same seconds; the axis is the time of training steps alone, without compilation and evaluation. The
model that is trained at 4,096 only is read in windows of 4,096 that overlap by half. Attention weighs most in a
small model, which flatters linear attention, so the curves are drawn again with the speeds of larger models (costs.py):
as if these learned from as many tokens as the small one, which they would not; the point is where the order turns.
"""

import os
from functools import partial

import numpy as np

from sympow.compare import format_count
from sympow.experiments.costs import ATTENTIONS
from sympow.experiments.report import (
    Panel,
    difference_cell,
    position_curve,
    span_columns,
    timed,
    table,
    texts_cell,
    tokens_cell,
)
from sympow.experiments.runs import main, read_records, variant

SHORT, LONG, SHARE = 4096, 65536, 0.7  # the long stage begins after this share of the time
BOUNDS = (256, 4096, 16384, 65536)  # of the positions that are averaged
VARIANTS = {
    "softmax": variant("softmax"),
    "softmax in stages": variant("softmax"),
    "sympow_gating in stages": variant("sympow_gating p=2"),
    "conformal_sympow in stages": variant("conformal_sympow p=2"),
    "hybrid 3:1 in stages": ATTENTIONS["hybrid"],
    "gated_deltanet in stages": variant("gated_deltanet"),
}


def plan(size):
    """Return the runs. Their depth is a multiple of the hybrid's pattern of four layers."""
    shape = dict(n_layer=8, n_head=5, n_embd=320, eval_tokens=1 << 20) if size.shrink == 1 else {}
    positions = dict(length=LONG // size.shrink, documents=size.documents, bounds=[n // size.shrink for n in BOUNDS])
    windows = positions | dict(window=SHORT // size.shrink)
    runs = []
    for name, settings in VARIANTS.items():
        then = {} if name == "softmax" else {"then": f"{LONG // size.shrink}@{SHARE}"}
        measures = {"positions": positions if then else windows}
        runs.append(size.run(name, SHORT, measures=measures, **settings, **shape, **then))
    return runs


# ---- losses over seconds


def time_curve(record):
    """Return (seconds of training, validation losses) of a record."""
    return tuple(zip(*((seconds, loss) for tokens, loss, seconds in record["val"] if tokens)))


def other_speeds(folder):
    """Return {shape: {attention: {context: tokens a second}}} from costs.json, {} if it is missing."""
    shapes = {}
    for record in read_records(os.path.join(folder, "costs.json")).values():
        shape = record["name"].partition(" ")[0]
        shapes.setdefault(shape, {})[record["settings"]["attention"]] = record["measures"]["speed"]
    return shapes


# ---- the report


def long_tokens_cell(entry):
    """Return the tokens of the last stage, or None without stages."""
    record = entry.record
    return format_count(record["tokens"] - record["stages"][-1][1]) if len(record["stages"]) > 1 else None


def leads_cell(entry, curves):
    """Return when the entry's loss is below softmax's, for {name: time_curve}."""
    if not {entry.name, "softmax"} <= curves.keys():
        return None
    (x, y), (base_x, base_y) = curves[entry.name], curves["softmax"]
    end = min(x[-1], base_x[-1])
    times = np.linspace(max(x[0], base_x[0]), end, 500)
    ahead = np.interp(times, x, y) < np.interp(times, base_x, base_y)
    turns = np.flatnonzero(np.diff(ahead, prepend=False, append=False))  # every second one is a first time behind
    spans = [f"{times[i]:.0f} to {times[j - 1]:.0f}" for i, j in turns.reshape(-1, 2)]
    return f"ahead from {', '.join(spans)} of {end:.0f} s" if spans else f"behind until {end:.0f} s"


def report(entries, size):
    """Return the tables at equal time, and the losses over seconds and by position; those also at other speeds."""
    records = {name: entry.record for name, entry in entries.items()}
    columns = [
        ("tokens", tokens_cell),
        ("of them in the long stage", long_tokens_cell),
        ("seconds of training", lambda entry: f"{entry.record['seconds']:.1f}"),
        ("loss of the texts", texts_cell),
        ("to softmax's", partial(difference_cell, base=entries.get("softmax"), measure="positions")),
        *span_columns("positions", [n // size.shrink for n in BOUNDS]),
    ]
    groups = {"this model": records}
    for shape, speeds in other_speeds(size.folder).items():
        groups[shape] = {
            name: timed(record, speeds[attention])
            for name, record in records.items()
            if (attention := record["settings"]["attention"]) in speeds
        }
    panels, leads = [], []
    for shape, group in groups.items():
        curves = {name: time_curve(record) for name, record in group.items()}
        title = f"Seconds are at the speed of {shape}."
        panels.append(Panel("seconds of training", "validation loss, nats a token", curves, title, cut=True))
        leads.append((f"costs of {shape}", partial(leads_cell, curves=curves)))
    positions = {name: position_curve(entry) for name, entry in entries.items()}
    title, context = "The dashed line is the short context.", SHORT // size.shrink
    panels.insert(
        1, Panel("position, tokens", "loss, nats a token", positions, title, log_x=True, context=context, cut=True)
    )
    notes = [
        "The curves are of long texts for runs in stages, and of short windows for softmax.",
        "The texts are read after the whole run. The difference to softmax's loss is taken text by text.",
    ]
    staged = [entry for entry in entries.values() if entry.name != "softmax"]
    comparison = table("Against softmax at the short context, at equal time", leads, staged)
    return [
        table("Equal time; loss by position ± standard error", columns, entries.values()),
        *notes,
        comparison,
    ], panels


if __name__ == "__main__":
    main("equal_time", plan, report)
