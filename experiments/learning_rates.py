"""Three learning rates for each variant, so that no variant is judged by one rate."""

from sympow.experiments.report import LOSS_COLUMNS, Panel, table, val_loss
from sympow.experiments.runs import main, variant

RATES = (3e-4, 6e-4, 1.2e-3)
VARIANTS = ("softmax", "sympow_gating p=2", "conformal_sympow p=2", "sympow p=2", "even_power p=4")


def plan(size):
    """Return the runs at the context of most other experiments, so that equal ones are trained once."""
    runs = []
    for name in VARIANTS:
        for rate in RATES:
            runs.append(size.run(f"{name}, lr {rate:g}", 4096, steps=1000, learning_rate=rate, **variant(name)))
    return runs


def report(entries, size):
    """Return the table of all rates, and the loss over the rate."""
    lines = {}
    for name in VARIANTS:
        losses = {rate: entries[key].mean(val_loss) for rate in RATES if (key := f"{name}, lr {rate:g}") in entries}
        if losses:
            lines[name] = list(losses), list(losses.values())
    columns = [
        ("learning rate", lambda entry: f"{entry.record['settings']['learning_rate']:g}"),
        *LOSS_COLUMNS,
    ]
    blocks = [table("Constant learning rates", columns, entries.values())]
    return blocks, [Panel("learning rate", "validation loss, nats", lines)]


if __name__ == "__main__":
    main("learning_rates", plan, report)
