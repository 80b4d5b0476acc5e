"""Three learning rates for each variant, so that rate and variant are not confused."""

from sympow.experiments.report import Panel, Table, find_all, loss_cell, tokens_cell, val_loss
from sympow.experiments.runs import main

VARIANTS = {
    "softmax": dict(attention="softmax"),
    "sympow_gating p=2": dict(attention="sympow_gating", p=2),
    "conformal_sympow p=2": dict(attention="conformal_sympow", p=2),
    "sympow p=2": dict(attention="sympow", p=2),
    "even_power p=4": dict(attention="even_power", p=4),
}


def plan(size):
    """Return the runs at the context of most other experiments, so that equal ones are trained once."""
    return [size.run(name, 4096, 131_072_000, **settings) for name, settings in VARIANTS.items()]


def report(entries, size):
    """Return the losses of all rates, and which is best for each variant that has had them all."""
    lines, best = {}, []
    for name in VARIANTS:
        planned = sorted(find_all(entries, name), key=lambda entry: entry.settings["learning_rate"])
        of = [entry for entry in planned if entry.records]
        lines[name] = [e.settings["learning_rate"] for e in of], [e.mean(val_loss) for e in of]
        if of and of == planned:
            best.append(f"{name}: {min(of, key=lambda e: e.mean(val_loss)).settings['learning_rate']:g}")
    columns = [
        ("learning rate", lambda entry: f"{entry.settings['learning_rate']:g}"), ("tokens", tokens_cell),
        ("val loss", loss_cell()),
    ]  # fmt: skip
    return [
        Table(f"Constant learning rates, context {size.length(4096):,}", columns, entries),
        "Best of these rates: " + ", ".join(best) if best else "",
        Panel("learning rate", "validation loss, nats", lines, log_x=True),
    ]


if __name__ == "__main__":
    raise SystemExit(main("learning_rates", plan, report, learning_rates="3e-4,6e-4,1.2e-3"))
