"""Softmax and even powers at equal tokens: the ratios of "Symmetric Power Transformers", section 2, over tokens."""

from sympow.experiments.report import Panel, loss_cell, ratio_cell, ratio_curve, table, tokens_cell, val_curve
from sympow.experiments.runs import main

# loss to softmax's, 124M on LongCrawl64, 100,000 steps of 524,288 tokens
PAPER = {"softmax": 1.0, "even_power p=2": 1.03, "even_power p=4": 0.98, "even_power p=6": 0.97}


def plan(size):
    """Return the runs at context 4,096, with twice the tokens a step of other experiments, nearer to the paper's."""
    powers = [(f"even_power p={p}", dict(attention="even_power", p=p)) for p in (2, 4, 6)]
    return [
        size.run(name, 4096, steps=2000, tokens_per_step=2 * size.tokens_per_step, **settings)
        for name, settings in [("softmax", dict(attention="softmax")), *powers]
    ]


def report(entries, size):
    """Return the table with the paper's ratios, and the curves of loss and ratio."""
    softmax = entries.get("softmax")
    columns = [
        ("tokens", tokens_cell),
        ("val loss", loss_cell()),
        ("to softmax", ratio_cell(softmax)),
        ("paper, after 52 B tokens", lambda entry: PAPER[entry.name]),
    ]
    losses = {name: val_curve(entry) for name, entry in entries.items()}
    ratios = {name: ratio_curve(entry, softmax) for name, entry in entries.items() if softmax}
    panels = [
        Panel("million tokens", "validation loss, nats", losses, cut=True),
        Panel("million tokens", "training loss to softmax's", ratios, level=1.0),
    ]
    title = f"Context {size.length(4096):,}, constant learning rate"
    return [table(title, columns, entries.values())], panels


if __name__ == "__main__":
    raise SystemExit(main("loss_ratios", plan, report))
