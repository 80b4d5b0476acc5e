"""How much is noise: gating and conformal with three seeds each. A difference below two standard deviations is none."""

from sympow.experiments.report import Panel, Table, find, loss_cell, ratio_cell, ratio_curve, tokens_cell, val_curve
from sympow.experiments.runs import main


def plan(size):
    """Return gating and conformal, p = 2 and 4, at context 4,096."""
    names = [(attention, p) for p in (2, 4) for attention in ("sympow_gating", "conformal_sympow")]
    return [size.run(f"{name} p={p}", 4096, 131_072_000, attention=name, p=p) for name, p in names]


def report(entries, size):
    """Return the table for each power, and conformal's loss relative to gating's over tokens."""
    parts, ratios = [], {}
    for p in (2, 4):
        of = [entry for entry in entries if entry.settings["p"] == p]
        base = find(of, f"sympow_gating p={p}")
        columns = [("tokens", tokens_cell), ("val loss", loss_cell()), ("to gating", ratio_cell(base))]
        parts.append(Table(f"p = {p}, context {size.length(4096):,}", columns, of))
        conformal = find(of, f"conformal_sympow p={p}")
        ratios[f"conformal_sympow p={p}"] = ratio_curve(conformal, base)
    return [
        *parts,
        "In the figure lines are means over the seeds, and bands their standard deviations; one seed has no band.",
        Panel("tokens", "validation loss, nats", {entry.name: val_curve(entry) for entry in entries}),
        Panel("tokens", "conformal's training loss to gating's", ratios, level=1.0),
    ]


if __name__ == "__main__":
    raise SystemExit(main("seeds", plan, report, seeds="1337,1338,1339"))
