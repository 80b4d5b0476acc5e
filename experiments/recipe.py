"""Does power attention with the recipe learn as well as softmax? Every contender at its best rate, with several seeds.

All train with Muon. Each is trained with both of RATES, and with the next one while the best lies on the edge. Rates
are chosen by the validation loss. The best one gets three seeds; p = 4, softmax with its best parts and forgetting get
five. A contender that is FAR behind softmax keeps its one seed. All seeds but the first, which chose the rate, read
other texts too. The records decide what is trained next: repeat the command until its status is 0.

The first form of this experiment had AdamW in the place of Muon, without weight decay. A second table has its records.
The contenders of WITH_ADAMW are trained with it too, with both rates of ADAMW_RATES and one seed.

    pip install flash-linear-attention      # for gated_deltanet and, on GPUs, for forgetting

Softmax in a window of 2,048 keeps as many bytes as the state of p = 2 with heads of 64. States of heads of 96 and 128
are larger than keys and values of the training context: softmax with a convolution is the window beside them.
Models named speed are new ones that train on random tokens, alone on a card.
"""

import os
from dataclasses import replace
from functools import partial
from itertools import zip_longest

from sympow.experiments.parts import (
    AROUND,
    BASE,
    CONVOLUTION,
    HYBRID,
    MUON,
)
from sympow.experiments.report import (
    Entry,
    Panel,
    at_once_cell,
    entries_of,
    loss_cell,
    megabytes,
    merge_rates,
    rates_table,
    seeds_difference_cell,
    table,
    text_by_text_cell,
    texts_loss,
    val_loss,
)
from sympow.experiments.runs import CONTEXT, LONG, MEMORY, WINDOW, main, make_run, read_records
from sympow.model import GPTConfig
from sympow.runs.settings import fields_of

NAME = "recipe"
RATES, EDGE = (9.6e-3, 4.8e-3), 2.0  # beyond an edge, the next rate is so many times as high or low
SEEDS = (1337, 1338, 1339, 1340, 1341)  # the last two are for the closest contenders
FAR = 0.15  # nats a token: more seeds, which differ by 0.02, would not change the order
ADAMW_RATES = (2.4e-3, 1.2e-3)
SOFTMAX = {
    "softmax": dict(attention="softmax"),
    "softmax, convolution": dict(attention="softmax", convolution=CONVOLUTION),
    "softmax, convolution, output gate": dict(attention="softmax", **AROUND),
}
PARTS = {  # name -> settings, the most important first
    "p=4, heads of 64": BASE | dict(p=4),
    "forgetting": BASE | dict(attention="forgetting"),
    "softmax, convolution": SOFTMAX["softmax, convolution"],
    "p=2, heads of 64": BASE,
    "p=2, heads of 128": BASE | dict(heads=128),
    f"softmax, window {WINDOW:,}": SOFTMAX["softmax, convolution"] | dict(window=WINDOW),
    "hybrid 3:1": HYBRID,
    **SOFTMAX,
    "gated_deltanet": dict(attention="gated_deltanet"),
    "gated_deltanet, heads of 256": dict(attention="gated_deltanet_wide", n_head=2, head_dim=256),
    "p=2, heads of 96": BASE | dict(heads=96),
    "p=4, heads of 32": BASE | dict(p=4, heads=32),
    "conformal p=2": BASE | dict(attention="conformal_sympow", positions="rotary"),
    "sympow p=2": dict(attention="sympow", p=2, **AROUND),
}
CONTENDERS = {name: settings | MUON for name, settings in PARTS.items()}
WITH_ADAMW = ("p=4, heads of 64", "forgetting", *SOFTMAX, "p=2, heads of 64", "p=2, heads of 128", "hybrid 3:1")


def plan(size):
    """Return the runs that the records so far ask for: rates in turn, seeds of the best ones, speeds, then AdamW's.

    Of size tiny all contenders have one rate and one seed, and two of them a speed.
    """
    records = read_records(os.path.join(size.folder, f"{NAME}.json"))
    full = size.shrink == 1
    rates, seeds = (RATES, SEEDS[1:]) if full else (RATES[:1], ())
    searches = {name: search(partial(tuned, size, name), records, rates, extend=full) for name in CONTENDERS}
    runs = [run for turn in zip_longest(*(tried for tried, _ in searches.values())) for run in turn if run]
    best = {
        name: min((loss, rate) for rate, loss in losses.items()) for name, (_, losses) in searches.items() if losses
    }
    softmax = min(SOFTMAX, key=best.get) if best.keys() >= SOFTMAX.keys() else None
    if softmax:
        names = [name for name, (loss, _) in best.items() if loss < best[softmax][0] + FAR]
        closest = [name for name in names if name in ("p=4, heads of 64", "forgetting", softmax)]
        for i, seed in enumerate(seeds):
            runs += [tuned(size, name, best[name][1], seed) for name in (names if i < 2 else closest)]
    runs += [speed_run(size, name) for name in CONTENDERS][: None if full else 2]
    return runs + [with_adamw(size, name, rate) for name in WITH_ADAMW for rate in ADAMW_RATES if full]


def search(make_run, records, rates, extend=True):
    """Return the Runs make_run(rate) that are tried, and {rate: validation loss} once all of them have records.

    extend: try the next rate too while the best one lies on the edge. Before all have records, the losses are {}.
    """
    runs = []
    while rates:
        runs += map(make_run, rates)
        records_of_runs = [run.find(records) for run in runs]
        if None in records_of_runs:
            return runs, {}
        losses = {record["settings"]["learning_rate"]: val_loss(record) for record in records_of_runs}
        rates = next_rates(losses) if extend else ()
    return runs, losses


def next_rates(losses):
    """Return the rate beyond the edge on which the best one lies, or none."""
    best = min(losses, key=losses.get)
    if best == max(losses):
        return [best * EDGE]
    return [best / EDGE] if best == min(losses) else []


def tuned(size, name, rate, seed=SEEDS[0]):
    """Return the Run of a contender at one rate. The first seed, which chooses it, has no measures, of size small."""
    run = make_run(size, f"{name}, lr {rate:g}", CONTENDERS[name], rate, seed)
    return replace(run, measures={}) if seed == SEEDS[0] and size.shrink == 1 else run


def with_adamw(size, name, rate):
    """Return the Run of a contender with AdamW and the first seed, without measures."""
    run = make_run(size, f"{name}, AdamW, lr {rate:g}", PARTS[name], rate, SEEDS[0])
    return replace(run, measures={})


def speed_run(size, name):
    """Return the Run that measures a contender's speed at both contexts."""
    settings = fields_of(GPTConfig, tuned(size, name, RATES[0]).settings)
    contexts = [n // size.shrink for n in (CONTEXT, LONG)]
    measures = {"speed": dict(contexts=contexts, tokens=size.tokens_per_step)}
    return size.new_model(f"{name}, speed", measures, seed=SEEDS[0], **settings)


# ---- the report


def measured(entry):
    """Return the Entry of the records that have measures, or None without one."""
    records = [record for record in entry.records if record.get("measures")] if entry else []
    return Entry(entry.name, records) if records else None


def of_measured(cell, **arguments):
    """Return a cell of what is measured of an Entry, None where nothing is."""
    return lambda entry: cell(measured(entry), **arguments) if measured(entry) else None


def parameters_cell(entry):
    """Return the number of parameters."""
    return entry.record["measures"]["size"]["parameters"]


def bytes_cell(entry):
    """Return the megabytes that generation keeps after texts of the lengths of MEMORY."""
    return megabytes(entry.record["measures"]["size"]["bytes"])


def contender_of(entry):
    """Return the name of an Entry's contender."""
    return entry.name.rpartition(", ")[0]


def best_rates(entries):
    """Return {contender: the Entry of its best rate}, which has the most seeds, or else the lowest loss."""
    best = {}
    for entry in sorted(entries, key=lambda entry: (-len(entry.records), entry.mean(val_loss))):
        best.setdefault(contender_of(entry), entry)
    return best


def trained_with(optimizer, size):
    """Return the Entries of all records with an optimizer, also of runs that the plan does not ask for any more."""
    records = [
        record | dict(name=record["name"].replace(", AdamW", ""))
        for record in read_records(os.path.join(size.folder, f"{NAME}.json")).values()
        if ", lr " in record["name"] and record["settings"].get("optimizer", "adamw") == optimizer
    ]
    return sorted(entries_of(records).values(), key=lambda entry: list(CONTENDERS).index(contender_of(entry)))


def speeds_cell(entry, speeds):
    """Return the tokens a second in training at both contexts; speeds: {contender: Entry}."""
    if model := speeds.get(contender_of(entry)):
        return " / ".join(f"{speed:,.0f}" for speed in model.record["measures"]["speed"].values())


def rates_and_best(tried, optimizer, further=()):
    """Return the tables of all rates, of the first seed, and of the best ones, and the Entries of these.

    tried: Entries that are named CONTENDER, lr RATE. further: columns beside losses and differences.
    """
    first = [Entry(entry.name, [r for r in entry.records if r["settings"]["seed"] == SEEDS[0]]) for entry in tried]
    rates = rates_table(merge_rates(first), f"Validation loss by learning rate, {optimizer}, seed {SEEDS[0]}")
    best = best_rates(tried)
    softmax = min((best[name] for name in SOFTMAX if name in best), key=lambda x: x.mean(val_loss), default=None)
    columns = [
        ("validation loss", loss_cell),
        ("to softmax's best", partial(seeds_difference_cell, base=softmax)),
        ("to forgetting", partial(seeds_difference_cell, base=best.get("forgetting"))),
        *further,
    ]
    if softmax and measured(softmax):
        columns.append(("other texts, to softmax's best", of_measured(text_by_text_cell, base=measured(softmax))))
    return [rates, table(f"The best rates, {optimizer}", columns, best.values())], best


def report(entries, size):
    """Return the tables of all rates and of the best ones, and the loss over the bytes that are kept."""
    speeds = {contender_of(entry): entry for entry in entries.values() if entry.name.endswith(", speed")}
    lengths = " / ".join(f"{n // size.shrink:,}" for n in MEMORY)
    further = [
        ("parameters", of_measured(parameters_cell)),
        ("other texts, in windows", of_measured(loss_cell, measure=texts_loss)),
        ("at once", of_measured(at_once_cell)),
        (f"MB after {lengths}", of_measured(bytes_cell)),
        (f"tokens/s at {CONTEXT // size.shrink:,} / {LONG // size.shrink:,}", partial(speeds_cell, speeds=speeds)),
    ]
    blocks, points = [], {}
    if tried := trained_with("muon", size):
        blocks, best = rates_and_best(tried, "Muon", further)
        blocks.append("Differences have 95% confidence intervals, over the seeds or over the texts.")
        for name, entry in best.items():
            if model := measured(entry):
                points[name] = [model.record["measures"]["size"]["bytes"][1] / 1e6], [entry.mean(val_loss)]
    if earlier := trained_with("adamw", size):
        blocks += rates_and_best(earlier, "AdamW")[0]
    label = f"MB kept after {LONG // size.shrink:,} tokens"
    title = "Each point is a contender at its best rate."
    return blocks, [Panel(label, "validation loss, nats a token", points, title, log_x=True)]


if __name__ == "__main__":
    main(NAME, plan, report, seeds=None, corpus="source_bpe")
