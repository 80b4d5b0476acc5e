"""Three learning rates for each variant, so that rate and variant are not confused."""

from sympow.experiments.report import Panel, loss_cell, table, tokens_cell, val_loss
from sympow.experiments.runs import main

RATES = (3e-4, 6e-4, 1.2e-3)
VARIANTS = {
    "softmax": dict(attention="softmax"),
    "sympow_gating p=2": dict(attention="sympow_gating", p=2),
    "conformal_sympow p=2": dict(attention="conformal_sympow", p=2),
    "sympow p=2": dict(attention="sympow", p=2),
    "even_power p=4": dict(attention="even_power", p=4),
}


def plan(size):
    """Return the runs at the context of most other experiments, so that equal ones are trained once."""
    return [
        size.run(f"{name}, lr {rate:g}", 4096, steps=1000, learning_rate=rate, **settings)
        for name, settings in VARIANTS.items()
        for rate in RATES
    ]


def report(entries, size):
    """Return the losses at all rates, and the best rate of each variant that has had them all."""
    lines, best = {}, []
    for name in VARIANTS:
        losses = {rate: entries[key].mean(val_loss) for rate in RATES if (key := f"{name}, lr {rate:g}") in entries}
        if losses:
            lines[name] = list(losses), list(losses.values())
        if len(losses) == len(RATES):
            best.append(f"{name}: {min(losses, key=losses.get):g}")
    columns = [
        ("learning rate", lambda entry: f"{entry.settings['learning_rate']:g}"),
        ("tokens", tokens_cell),
        ("val loss", loss_cell()),
    ]
    title = f"Constant learning rates, context {size.length(4096):,}"
    blocks = [table(title, columns, entries.values()), "Best of these rates: " + (", ".join(best) or "not known yet")]
    return blocks, [Panel("learning rate", "validation loss, nats", lines)]


if __name__ == "__main__":
    raise SystemExit(main("learning_rates", plan, report))
