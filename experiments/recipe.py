"""Does power attention with the recipe learn as well as softmax? Every contender at its best rate, with several seeds.

All train with Muon. Each is trained with both of RATES, and with the next one while the best lies on the edge. Rates
are chosen by the validation loss. The best one gets three seeds; p = 4, softmax with its best parts and forgetting get
five. A contender that is FAR behind the best keeps its one seed. All read other
texts too. The records decide what is trained next: repeat the command until its status is 0.

The first form of this experiment had AdamW in the place of Muon, without weight decay. The table of rates has its
losses.

    pip install flash-linear-attention      # for gated_deltanet and, on GPUs, for forgetting

Softmax in a window of 2,048 keeps as many bytes as the state of p = 2 with heads of 64. States of heads of 96 and 128
are larger than keys and values of the training context: softmax with a convolution is the window beside them.
Models named speed are new ones that train on random tokens, alone on a card.
"""

from functools import partial

from sympow.experiments.parts import AROUND, BASE, CONVOLUTION
from sympow.experiments.report import (
    bytes_column,
    entries_of,
    format_numbers,
    loss_cell,
    parameters_cell,
    plot,
    seeds_column,
    table,
    texts_cell,
    texts_column,
    tokens_cell,
    val_loss,
)
from sympow.experiments.runs import CONTEXT, LONG, SEEDS, WINDOW, Run, main, make_run
from sympow.model import GPTConfig
from sympow.runs.settings import fields_of

NAME = "recipe"
MUON = dict(optimizer="muon", weight_decay=0.1)
MEMORY = (4096, 65536, 1 << 20)  # tokens after which the memory of generation is given
RATES, EDGE = (9.6e-3, 4.8e-3), 2.0  # beyond an edge, the next rate is so many times as high or low
CLOSEST = ("p=4, heads of 64", "forgetting", "softmax, convolution, output gate")
# The highest rate of attentions without a power: twice that cost softmax with its best parts 0.09, forgetting 0.06.
HIGHEST = 9.6e-3
FAR = 0.2  # nats a token behind the best: more seeds, which differ by 0.02, would not change the order
SOFTMAX = {
    "softmax": dict(attention="softmax"),
    "softmax, convolution": dict(attention="softmax", convolution=CONVOLUTION),
    "softmax, convolution, output gate": dict(attention="softmax", **AROUND),
}
CONTENDERS = {  # name -> settings, the most important first
    "p=4, heads of 64": BASE | dict(p=4),
    "forgetting": BASE | dict(attention="forgetting"),
    "p=2, heads of 64": BASE,
    "p=2, heads of 128": BASE | dict(heads=128),
    f"softmax, window {WINDOW:,}": SOFTMAX["softmax, convolution"] | dict(window=WINDOW),
    f"softmax, window {WINDOW:,}, output gate": SOFTMAX["softmax, convolution, output gate"] | dict(window=WINDOW),
    "hybrid 3:1": BASE | dict(attention="sympow_gating,sympow_gating,sympow_gating,softmax", window=WINDOW),
    **SOFTMAX,
    "gated_deltanet": dict(attention="gated_deltanet"),
    "gated_deltanet, heads of 256": dict(attention="gated_deltanet_wide", n_head=2, head_dim=256),
    "p=2, heads of 96": BASE | dict(heads=96),
    "p=4, heads of 32": BASE | dict(p=4, heads=32),
    "conformal p=2": BASE | dict(attention="conformal_sympow", positions="rotary"),
    "sympow p=2": dict(attention="sympow", p=2, **AROUND),
}


def plan(size):
    """Return the runs that the records so far ask for: rates, seeds of the best ones, then speeds.

    Of size tiny all contenders have one rate and one seed, and two of them a speed.
    """
    records = size.records(NAME)
    searches = {name: search(size, name, records) for name in CONTENDERS}
    runs = [run for tried, _ in searches.values() for run in tried]
    best = {name: min(zip(losses.values(), losses)) for name, (_, losses) in searches.items() if losses}
    if size.full and len(best) == len(CONTENDERS):
        limit = min(best.values())[0] + FAR
        for name, (loss, rate) in best.items():
            count = 5 if name in CLOSEST else 3 if loss < limit else 1
            runs += [tuned(size, name, rate, seed) for seed in SEEDS[1:count]]
    return runs + [speed_run(size, name) for name in CONTENDERS][: None if size.full else 2]


def search(size, name, records):
    """Return the Runs of a contender that are tried, and {rate: validation loss} once all of them have records.

    The next rate is tried too while the best one lies on the edge; without a power up to HIGHEST, of size tiny none.
    Before all have records, the losses are {}.
    """
    highest = 1 if "sympow" in CONTENDERS[name]["attention"] else HIGHEST
    rates, runs = RATES if size.full else RATES[:1], []
    while rates:
        runs += [tuned(size, name, rate) for rate in rates]
        records_of_runs = [run.find(records) for run in runs]
        if None in records_of_runs:
            return runs, {}
        losses = {record["settings"]["learning_rate"]: val_loss(record) for record in records_of_runs}
        best = min(losses, key=losses.get)
        edges = {max(losses): best * EDGE, min(losses): best / EDGE}
        rates = [edges[best]] if size.full and best in edges and edges[best] <= highest else []
    return runs, losses


def tuned(size, name, rate, seed=SEEDS[0], **settings):
    """Return the Run of a contender at one rate; settings: more of train.py's.

    It reads texts that validation does not read: in windows and, if the model can, at once.
    """
    settings = CONTENDERS[name] | MUON | settings
    texts = dict(length=LONG // size.shrink, documents=size.documents, skip=size.eval_tokens)
    measures = dict(size=dict(lengths=size.shrunk(MEMORY)), positions=texts | dict(window=CONTEXT // size.shrink))
    if "softmax" not in settings["attention"] or "window" in settings:
        measures["far"] = texts
    return make_run(size, f"{name}, lr {rate:g}", settings, rate, seed, measures)


def speed_run(size, name):
    """Return the Run that measures a contender's speed at both contexts."""
    settings = fields_of(GPTConfig, tuned(size, name, RATES[0]).settings) | dict(seed=SEEDS[0])
    measures = {"speed": dict(contexts=size.shrunk([CONTEXT, LONG]), tokens=size.tokens_per_step)}
    return Run(f"{name}, speed", size.dataset, settings, measures)


# ---- the report


def contender_of(entry):
    """Return the name of the contender of an Entry that is named CONTENDER, lr RATE or CONTENDER, speed.

    The contender of CONTENDER, AdamW, lr RATE is the same.
    """
    return entry.name.rpartition(", ")[0].removesuffix(", AdamW")


def merge_rates(entries):
    """Return an Entry of each contender, with the records of all its rates."""
    records = [record | {"name": contender_of(entry)} for entry in entries for record in entry.records]
    return list(entries_of(records).values())


def best_rates(entries):
    """Return {contender: its best Entry}, which has the most seeds, or else the lowest loss."""
    best = {}
    for entry in sorted(entries, key=lambda entry: (-len(entry.records), entry.loss)):
        best.setdefault(contender_of(entry), entry)
    return best


def trained(entries, names=CONTENDERS):
    """Return the Entries that are named NAME, lr RATE, from this experiment's {name: Entry}, in the order of names."""
    return [entry for name in names for entry in entries.values() if entry.name.startswith(f"{name}, lr ")]


def first_losses(entry):
    """Return {"OPTIMIZER, RATE": validation loss} of an Entry's runs with the first seed."""
    losses = {}
    for record in entry.records:
        settings = record["settings"]
        if settings["seed"] == SEEDS[0]:
            name = f"{settings.get('optimizer', 'adamw')}, {settings['learning_rate']:g}"
            losses[name] = f"{val_loss(record):.4f}"
    return losses


def rates_table(entries):
    """Return the table of the first seed's losses by rate, of Entries named CONTENDER, lr RATE."""
    rates = sorted({rate for entry in entries for rate in first_losses(entry)})
    columns = [(rate, lambda entry, rate=rate: first_losses(entry).get(rate)) for rate in rates]
    return table(f"Validation loss by learning rate, seed {SEEDS[0]}", columns, merge_rates(entries))


def best_table(entries, columns):
    """Return the table of the best rates, with columns beside losses and differences to the best softmax.

    Differences have 95% confidence intervals.
    """
    best = best_rates(entries)
    softmax = min((best[name] for name in SOFTMAX if name in best), key=lambda entry: entry.loss, default=None)
    first = [
        ("validation loss", loss_cell),
        seeds_column("to softmax's best", softmax),
        seeds_column("to forgetting", best.get("forgetting")),
    ]
    last = texts_column("other texts, to softmax's best", softmax)
    return table("The best rates, Muon", [*first, *columns, last], best.values())


def speeds_cell(entry, entries):
    """Return the tokens a second in training at both contexts; entries: this experiment's {name: Entry}."""
    if model := entries.get(f"{contender_of(entry)}, speed"):
        return format_numbers(model.measured("speed")[0].values())


def measured_columns(size):
    """Return the columns of what is measured beside the validation loss."""
    return [
        ("parameters", parameters_cell),
        ("other texts, in windows", partial(texts_cell, measure="positions")),
        ("at once", partial(texts_cell, measure="far")),
        bytes_column(size.shrunk(MEMORY)),
    ]


def report(entries, size):
    """Return the tables of all rates and of the best ones, and a figure of the loss over the bytes that are kept."""
    contexts = format_numbers(size.shrunk([CONTEXT, LONG]))
    columns = [*measured_columns(size), (f"tokens/s at {contexts}", partial(speeds_cell, entries=entries))]
    tried, points = trained(entries), {}
    for name, entry in best_rates(tried).items():
        if sizes := entry.measured("size"):
            points[name] = sizes[0]["bytes"][-1] / 1e6, entry.loss
    plot(points, f"MB kept after {MEMORY[-1] // size.shrink:,} tokens", f"{size.folder}/{NAME}.png")
    return [
        rates_table(tried + trained(entries, [f"{name}, AdamW" for name in CONTENDERS])),
        best_table(tried, columns),
        "Differences have 95% confidence intervals, over the seeds or over the texts.",
        f"![{NAME}]({NAME}.png)",
    ]


def report_others(entries, size):
    """Return the table of other models of these contenders."""
    return [best_table(entries.values(), [("tokens", tokens_cell), *measured_columns(size)])]


if __name__ == "__main__":
    main(NAME, plan, report)
