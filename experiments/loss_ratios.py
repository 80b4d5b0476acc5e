"""Softmax and even powers at equal tokens: the ratios of "Symmetric Power Transformers", section 2, over tokens."""

from functools import partial

from sympow.experiments.report import LOSS_COLUMNS, Panel, ratio_cell, ratio_curve, table, val_curve
from sympow.experiments.runs import main, variant

# loss to softmax's, 124M on LongCrawl64, 100,000 steps of 524,288 tokens
PAPER = {"softmax": 1, "even_power p=2": 1.03, "even_power p=4": 0.98, "even_power p=6": 0.97}


def plan(size):
    """Return the runs at context 4,096, with twice the tokens a step of other experiments, nearer to the paper's."""
    tokens = 2 * size.tokens_per_step
    return [size.run(name, 4096, steps=2000, tokens_per_step=tokens, **variant(name)) for name in PAPER]


def report(entries, size):
    """Return the table with the paper's ratios, and the curves of loss and ratio."""
    softmax = entries.get("softmax")
    columns = [
        *LOSS_COLUMNS,
        ("to softmax", partial(ratio_cell, base=softmax)),
        ("paper, after 52 B tokens", lambda entry: PAPER[entry.name]),
    ]
    losses = {name: val_curve(entry) for name, entry in entries.items()}
    ratios = {name: ratio_curve(entry, softmax) for name, entry in entries.items() if softmax}
    panels = [
        Panel("million tokens", "validation loss, nats a token", losses, "Points are validation losses.", cut=True),
        Panel(
            "million tokens",
            "training loss over softmax's",
            ratios,
            "Below 1 a loss is lower than softmax's.",
            level=1.0,
        ),
    ]
    return [table("Constant learning rate", columns, entries.values())], panels


if __name__ == "__main__":
    main("loss_ratios", plan, report)
