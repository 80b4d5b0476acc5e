"""When is it worth it? Equal GPU time on documents of 65,536 tokens: softmax and others, at 4,096 and in stages.

Every run has the same seconds; the axis is the time of training steps alone, without compilation and evaluation. The
model that is trained at 4,096 only is read in windows of 4,096, each half of the one before. Attention weighs most in a
small model, which flatters what is linear, so the curves are drawn again with the speeds of larger models (costs.py):
as if these learned from as many tokens as the small one, which they would not; the point is where the order turns.
"""

import os
from dataclasses import replace

import numpy as np

from sympow.compare import format_count
from sympow.data.files import read_json
from sympow.experiments.costs import speeds
from sympow.experiments.evaluation_length import mean_between
from sympow.experiments.report import Panel, Table, position_line, texts_cell, time_curve, tokens_cell
from sympow.experiments.runs import main

SHORT, LONG, SHARE = 4096, 65536, 0.7  # the long stage begins after this share of the time
BOUNDS = (256, 4096, 16384, 65536)  # of the positions that are averaged
HYBRID = "sympow_gating,sympow_gating,sympow_gating,softmax"
VARIANTS = {
    "softmax": (dict(attention="softmax"), False),
    "softmax in stages": (dict(attention="softmax"), True),
    "sympow_gating in stages": (dict(attention="sympow_gating", p=2), True),
    "conformal_sympow in stages": (dict(attention="conformal_sympow", p=2), True),
    "hybrid 3:1 in stages": (dict(attention=HYBRID, p=2), True),
    "gated_deltanet in stages": (dict(attention="gated_deltanet"), True),
}


def plan(size):
    """Return the runs. Their depth is a multiple of the hybrid's pattern of four layers."""
    shape = dict(n_layer=8, n_head=5, n_embd=320, eval_tokens=1 << 20) if size.shrink == 1 else {}
    runs = []
    for name, (settings, staged) in VARIANTS.items():
        then = {"then": f"{size.length(LONG)}@{SHARE}"} if staged else {}
        run = size.run(name, SHORT, seconds=size.seconds, **settings, **shape, **then)
        window, bounds = 0 if staged else size.length(SHORT), [size.length(n) for n in BOUNDS]
        texts = dict(length=size.length(LONG), documents=size.documents, window=window, bounds=bounds)
        runs.append(run.measure(positions=texts))
    needs = {"gated_deltanet in stages": "fla"}
    return [replace(run, needs=needs.get(run.name, "")) for run in runs]


def retimed(entry, costs):
    """Return (seconds, losses) of an entry if its tokens took what they take another model, {context: tokens/s}."""
    record, seconds, found = entry.records[0], 0.0, []
    stages = [(context, begin) for context, begin in record["stages"]] + [(None, float("inf"))]
    for tokens, loss, _ in record["val"]:
        seconds = 0.0
        for i, (context, begin) in enumerate(stages[:-1]):
            first = begin if i else 0
            seconds += max(0, min(tokens, stages[i + 1][1]) - first) / costs[context]
        found.append((seconds, loss))
    return [list(x) for x in zip(*(point for point in found if point[0]))]


def long_begins(entries, speed):
    """Return {name: seconds} at which the second stage begins, of the entries that have one.

    speed: returns {context: tokens a second} of an entry.
    """
    stages = [(entry, entry.records[0]["stages"]) for entry in entries]
    return {entry.name: of[1][1] / speed(entry)[of[0][0]] for entry, of in stages if len(of) > 1}


def leads(curve, base):
    """Return (the times between which a curve's loss is below the base's at equal time, [(from, to), ...], and the last
    time that both reach); None if they have no times in common."""
    (x, y), (at, of) = curve, base
    if not x or not at or min(x[-1], at[-1]) <= max(x[0], at[0]):
        return None
    grid = np.linspace(max(x[0], at[0]), min(x[-1], at[-1]), 500)
    below = np.interp(grid, x, y) < np.interp(grid, at, of)
    turns = np.flatnonzero(np.diff(below, prepend=False, append=False))  # from each second one on it is behind again
    return [(float(grid[i]), float(grid[j - 1])) for i, j in turns.reshape(-1, 2)], float(grid[-1])


def describe_leads(curve, base):
    """Return the cell for a curve and softmax's."""
    if (found := leads(curve, base)) is None:
        return "no times in common"
    times, end = found
    if not times:
        return f"behind until {end:.0f} s"
    ahead = ", ".join(f"{begin:.0f} to {until:.0f}" for begin, until in times)
    return f"ahead from {ahead} of {end:.0f} s"


def loss_at(entry, seconds):
    """Return the cell of the validation loss after so many seconds of training, None between two stages."""
    record = entry.records[0]
    before = max((tokens for tokens, _, at in record["val"] if at <= seconds), default=0)
    after = min((tokens for tokens, _, at in record["val"] if at >= seconds), default=before)
    if any(before <= begin < after for _, begin in record["stages"][1:]):
        return None
    loss = np.interp(seconds, *time_curve(entry))
    return f"{loss:.4f}"


def long_tokens(entry):
    """Return the tokens of an entry's last stage, None without stages."""
    record = entry.records[0]
    return format_count(record["tokens"] - record["stages"][-1][1]) if len(record["stages"]) > 1 else None


def report(entries, size):
    """Return the tables at equal time, the figure with seconds, the loss by position, and both at other costs."""
    done = [entry for entry in entries if entry.records]
    common = min((entry.records[0]["seconds"] for entry in done), default=0.0)
    bounds = [size.length(n) for n in BOUNDS]
    columns = [
        ("tokens", tokens_cell), (f"of them at {size.length(LONG):,}", long_tokens),
        ("seconds of training", lambda e: e.records[0]["seconds"]),
        (f"val loss at {common:.0f} s", lambda e: loss_at(e, common)),
        ("loss of the texts", texts_cell("positions")), ("to softmax's", texts_cell("positions", entries[0])),
        *((f"{a:,} to {b:,}", mean_between("positions", a, b)) for a, b in zip(bounds, bounds[1:])),
    ]  # fmt: skip
    curves = {entry.name: time_curve(entry) for entry in done}
    title = f"Equal time; loss by position ± standard error, {size.documents} texts of {size.length(LONG):,}"
    note = (
        f"The validation loss, and so the curves, are those of texts of {size.length(LONG):,} in stages, before the "
        f"long stage too, and of windows of {size.length(SHORT):,} from their beginnings for softmax at "
        f"{size.length(SHORT):,}. The loss of the texts is that of all their targets after the whole run, and "
        "its difference to softmax's is taken text by text."
    )
    parts = [Table(title, columns, entries), note]
    own = lambda entry: {int(n): speed for n, speed in entry.records[0]["tokens_per_second"].items()}
    here = f"these models; from a diamond on trained at {size.length(LONG):,}"
    panels = [
        Panel("seconds of training", "validation loss, nats", curves, here, begins=long_begins(done, own)),
        Panel("position", "loss, nats", {e.name: position_line(e, first=64) for e in done}, log_x=True,
              marks={f"first stage {size.length(SHORT):,}": size.length(SHORT)}),
    ]  # fmt: skip
    against = [("this model", curves)]
    for shape, costs in other_costs(size).items():
        known = [entry for entry in done if entry.settings["attention"] in costs]
        curves = {entry.name: retimed(entry, costs[entry.settings["attention"]]) for entry in known}
        against.append((f"{shape}", curves))
        timed = f"the same losses, at the speed of {shape}"
        begins = long_begins(known, lambda entry, costs=costs: costs[entry.settings["attention"]])
        panels.append(Panel("seconds of training", "validation loss, nats", curves, timed, begins=begins))
    columns = [
        (f"costs of {shape}", lambda e, c=c: describe_leads(c[e.name], c["softmax"]) if e.name in c else None)
        for shape, c in against if "softmax" in c
    ]  # fmt: skip
    others = [entry for entry in entries if entry.name != "softmax"]
    if columns:
        parts.append(Table("Against softmax at the short context, at equal time", columns, others))
    return [*parts, *panels]


def other_costs(size):
    """Return {shape: {attention: {context: tokens/s}}} of costs.json, {} if it is not there."""
    path, found = os.path.join(size.folder, "costs.json"), {}
    for record in read_json(path)["runs"].values() if os.path.exists(path) else ():
        shape = record["name"].partition(" ")[0]
        found.setdefault(shape, {})[record["settings"]["attention"]] = speeds(record)
    return found


if __name__ == "__main__":
    raise SystemExit(main("equal_time", plan, report))
