"""How much is noise: gating and conformal with three seeds each. A difference below two standard deviations is none."""

from sympow.experiments.report import Panel, loss_cell, ratio_cell, ratio_curve, table, tokens_cell, val_curve
from sympow.experiments.runs import main


def plan(size):
    """Return gating and conformal, p = 2 and 4, at context 4,096."""
    names = [(attention, p) for p in (2, 4) for attention in ("sympow_gating", "conformal_sympow")]
    return [size.run(f"{name} p={p}", 4096, steps=1000, attention=name, p=p) for name, p in names]


def report(entries, size):
    """Return the table for each power, and conformal's loss relative to gating's over tokens."""
    blocks, ratios = [], {}
    for p in (2, 4):
        gating, conformal = entries.get(f"sympow_gating p={p}"), entries.get(f"conformal_sympow p={p}")
        columns = [("tokens", tokens_cell), ("val loss", loss_cell()), ("to gating", ratio_cell(gating))]
        rows = [entry for entry in (gating, conformal) if entry]
        blocks.append(table(f"p = {p}, context {size.length(4096):,}", columns, rows))
        if gating and conformal:
            ratios[conformal.name] = ratio_curve(conformal, gating)
    blocks.append(
        "In the figure lines are means over the seeds, and bands their standard deviations; one seed has no band."
    )
    losses = {name: val_curve(entry) for name, entry in entries.items()}
    panels = [
        Panel("million tokens", "validation loss, nats", losses, cut=True),
        Panel("million tokens", "conformal's training loss to gating's", ratios, level=1.0),
    ]
    return blocks, panels


if __name__ == "__main__":
    raise SystemExit(main("seeds", plan, report, seeds=(1337, 1338, 1339)))
