"""Softmax and even powers at equal tokens: the ratios of "Symmetric Power Transformers", section 2, over tokens."""

from dataclasses import replace

from sympow.experiments.report import (
    Panel, Table, find, loss_cell, ratio_cell, ratio_curve, tokens_cell, val_curve,
)  # fmt: skip
from sympow.experiments.runs import main

PAPER = {2: 1.03, 4: 0.98, 6: 0.97}  # loss to softmax's, 124M on LongCrawl64, 100,000 steps of 524,288 tokens


def plan(size):
    """Return the runs: context 4,096, 0.5 B tokens each, in steps of twice the other experiments' tokens, which are
    nearer to the paper's."""
    size = replace(size, tokens_per_step=2 * size.tokens_per_step)
    each = dict(context=4096, tokens=524_288_000)
    powers = [size.run(f"even_power p={p}", **each, attention="even_power", p=p) for p in PAPER]
    return [size.run("softmax", **each, attention="softmax"), *powers]


def report(entries, size):
    """Return the table with the paper's ratios, and the curves of loss and ratio."""
    base = find(entries, "softmax")
    paper = {f"even_power p={p}": ratio for p, ratio in PAPER.items()} | {"softmax": 1.0}
    columns = [
        ("tokens", tokens_cell), ("val loss", loss_cell()), ("to softmax", ratio_cell(base)),
        ("paper, after 52 B tokens", lambda entry: paper.get(entry.name.partition(",")[0])),
    ]  # fmt: skip
    return [
        Table(f"Context {size.length(4096):,}, constant learning rate", columns, entries),
        Panel("tokens", "validation loss, nats", {entry.name: val_curve(entry) for entry in entries}),
        Panel("tokens", "training loss to softmax's", {e.name: ratio_curve(e, base) for e in entries}, level=1.0),
    ]


if __name__ == "__main__":
    raise SystemExit(main("loss_ratios", plan, report))
