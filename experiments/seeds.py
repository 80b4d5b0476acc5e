"""How much is noise: gating and conformal with three seeds each."""

from sympow.experiments.report import LOSS_COLUMNS, Panel, ratio_cell, ratio_curve, table, val_curve
from sympow.experiments.runs import main, variant


def plan(size):
    """Return gating and conformal, p = 2 and 4, at context 4,096."""
    names = [f"{attention} p={p}" for p in (2, 4) for attention in ("sympow_gating", "conformal_sympow")]
    return [size.run(name, 4096, steps=1000, **variant(name)) for name in names]


def report(entries, size):
    """Return the table, and conformal's loss relative to gating's over tokens."""

    def gating(entry):
        return entries.get(entry.name.replace("conformal_sympow", "sympow_gating"))

    columns = [*LOSS_COLUMNS, ("to gating", lambda entry: ratio_cell(entry, gating(entry)))]
    blocks = [
        table("Gating and conformal", columns, entries.values()),
        "In the figure lines are means over the seeds, and bands their standard deviations; one seed has no band.",
    ]
    losses = {name: val_curve(entry) for name, entry in entries.items()}
    ratios = {e.name: ratio_curve(e, gating(e)) for e in entries.values() if gating(e) not in (None, e)}
    panels = [
        Panel("million tokens", "validation loss, nats", losses, cut=True),
        Panel("million tokens", "conformal's training loss to gating's", ratios, level=1.0),
    ]
    return blocks, panels


if __name__ == "__main__":
    main("seeds", plan, report, seeds=(1337, 1338, 1339))
