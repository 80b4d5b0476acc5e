"""Which attention should I use? Each at its best learning rate with three seeds, then the best at equal time.

Every variant is trained with each of RATES. If the best is the highest or lowest, the next rate is tried too. Then
softmax and the two best others train for the same seconds, and the best rate of each gets two more seeds. Rates are
chosen by the validation loss, the tables read other texts. The records decide what is trained next: repeat the command
until its status is 0.
"""

import os
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch

from sympow.attention.variant import RECIPE
from sympow.experiments.measure import kept_bytes
from sympow.experiments.report import (
    Entry,
    Panel,
    difference_cell,
    loss_cell,
    megabytes,
    position_curve,
    span_columns,
    table,
    texts_cell,
    tokens_cell,
    val_loss,
)
from sympow.experiments.runs import SIZES, main, read_records, variant
from sympow.model import GPT, GPTConfig
from sympow.runs.settings import fields_of

NAME = "which_attention"
CONTEXT, WINDOW, LONG = 4096, 2048, 65536
RATES, EDGE = (1.2e-3, 2.4e-3, 4.8e-3), 2.0  # beyond an edge, the next rate is so many times as high or low
SECONDS = 250.0  # of training steps at equal time, without compilation and evaluation
SPEED_STEPS = 120  # of the runs that measure how many steps those are
SEEDS = (1337, 1338, 1339)
BOUNDS = (256, 4096, 16384, 65536)  # of the positions that are averaged
MEMORY = (4096, 65536, 1 << 20)  # tokens after which the memory of generation is given
VARIANTS = {
    "softmax": variant("softmax"),
    "softmax in a window": dict(attention="softmax", window=WINDOW),  # what the hybrid gains over it comes from states
    "hybrid in a window": dict(attention="sympow_gating,sympow_gating,sympow_gating,softmax", p=2, window=WINDOW),
    "gated p=4": variant("sympow_gating p=4"),
    "gated p=2, wide heads": variant("sympow_gating p=2") | dict(heads=128),
    "conformal p=2": variant("conformal_sympow p=2"),
}


def plan(size):
    """Return the runs that the records so far ask for: all rates, then equal time and seeds of the best ones."""
    records = read_records(os.path.join(size.folder, f"{NAME}.json"))
    searches = {name: search(partial(tuned, size, name), records, RATES) for name in VARIANTS}
    runs = [run for tried, _ in searches.values() for run in tried]
    losses = {name: losses for name, (_, losses) in searches.items() if losses}
    if len(losses) == len(VARIANTS):
        best = {name: min(of_rates, key=of_rates.get) for name, of_rates in losses.items()}
        ranking = sorted(best.keys() - {"softmax"}, key=lambda name: min(losses[name].values()))
        runs += [at_equal_time(size, name, best[name], records) for name in ("softmax", *ranking[:2])]
        runs += [tuned(size, name, rate, seed=seed) for name, rate in best.items() for seed in SEEDS[1:]]
    return runs


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
    """Return the Run of a variant at one rate for 131 M tokens."""
    return make_run(size, f"{name}, lr {rate:g}", VARIANTS[name], rate, seed)


def at_equal_time(size, name, rate, records):
    """Return the Run of a variant for as many steps as take SECONDS of training, or of a few steps for its speed.

    The speed counts for the GPU that measured it: let one kind of GPU train all runs of equal time.
    """
    short = speed_run(size, name, VARIANTS[name], rate)
    record = short.find(records)
    if not record:
        return short
    seconds = SECONDS * size.seconds / SIZES["small"].seconds
    steps = steps_within(size, seconds, record["tokens_per_second"][str(CONTEXT // size.shrink)])
    return make_run(size, f"{name}, equal time", VARIANTS[name] | dict(steps=steps * size.fewer), rate)


def speed_run(size, name, settings, rate):
    """Return the Run of a few steps that measures the speed of a model at each of its contexts."""
    settings = dict(steps=SPEED_STEPS * size.fewer) | settings
    return replace(make_run(size, f"{name}, speed", settings, rate), measures={})


def steps_within(size, seconds, speed):
    """Return how many steps take so many seconds at a speed in tokens a second, at least 12."""
    return max(12, round(seconds * speed / size.tokens_per_step))


def make_run(size, title, settings, rate, seed=SEEDS[0]):
    """Return the Run of a model that is read in windows of its context and, where it can be, at once.

    settings: train.py's, and three more: steps, if they are not 1,000; context, if it is not CONTEXT; and heads, their
    dimension, if it is not 64. Size tiny divides heads, windows, contexts and steps.
    """
    settings = schedule(size, rate) | settings
    if "window" in settings:
        settings["window"] //= size.shrink
    if "heads" in settings:
        width = size.model["n_embd"]
        heads = settings.pop("heads")
        head_dim = max(4, min(heads, heads * width // 384 // 2 * 2))  # a width below 384 has smaller heads
        settings |= dict(n_head=width // head_dim, head_dim=head_dim)
    texts = texts_measure(size)
    measures = {"size": dict(lengths=[n // size.shrink for n in MEMORY]), "positions": texts}
    measures["half_lives"] = dict(length=CONTEXT // size.shrink)
    grows = "softmax" in settings["attention"] and "window" not in settings
    if not grows:
        measures["far"] = texts | dict(window=0)
    context, steps = settings.pop("context", CONTEXT), settings.pop("steps", 1000)
    return size.run(title, context, steps, measures, seed=seed, **settings)


def schedule(size, rate):
    """Return the settings of a rate with warm-up and decay, and of size small eight layers."""
    settings = dict(learning_rate=rate, schedule="wsd", warmup_iters=100 // size.fewer, min_lr=rate / 10)
    return settings | (dict(n_layer=8) if size.shrink == 1 else {})


def texts_measure(size):
    """Return the arguments of `positions` for texts that validation does not read, in windows."""
    texts = dict(length=LONG // size.shrink, documents=size.documents, skip=size.eval_tokens)
    return texts | dict(bounds=[n // size.shrink for n in BOUNDS], window=CONTEXT // size.shrink)


# ---- the report


def losses_by_rate(entry):
    """Return {rate: validation losses of the seeds} of the records of one variant, the lowest rate first."""
    losses = {}
    for record in entry.records:
        losses.setdefault(record["settings"]["learning_rate"], []).append(val_loss(record))
    return dict(sorted(losses.items()))


def rate_cell(entry, rate):
    """Return the mean validation loss of the seeds at one rate, or None without a run."""
    losses = losses_by_rate(entry).get(rate)
    return f"{fmean(losses):.4f}" if losses else None


def texts_loss(record, measure="positions"):
    """Return the mean loss of the texts that are read in windows ("positions") or at once ("far")."""
    return fmean(record["measures"][measure]["texts"])


def seconds_cell(entry):
    """Return the mean time of the training steps alone, over the seeds."""
    return f"{entry.mean(lambda record: record['seconds']):.0f}"


def at_once_cell(entry):
    """Return the loss of texts that are read at once, or None for softmax, which is not read so."""
    return loss_cell(entry, partial(texts_loss, measure="far")) if "far" in entry.record["measures"] else None


def merge_rates(tried):
    """Return {variant: the Entry with the records of all its rates} of Entries that are named VARIANT, lr RATE."""
    variants = {}
    for entry in tried:
        name, _ = entry.name.split(", lr ")
        variants.setdefault(name, Entry(name, [])).records.extend(entry.records)
    return variants


def rates_table(variants, title="Validation loss by learning rate"):
    """Return the table of the losses by rate of what `merge_rates` returns."""
    rates = sorted({rate for entry in variants.values() for rate in losses_by_rate(entry)})
    columns = [(f"{rate:g}", partial(rate_cell, rate=rate)) for rate in rates]
    return table(title, columns, variants.values())


def memory_cell(entry, lengths):
    """Return the megabytes that generation keeps of texts of these lengths, see `kept_bytes`."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**RECIPE | fields_of(GPTConfig, entry.record["settings"])))
    return megabytes(kept_bytes(model, lengths))


def half_lives_cell(entry):
    """Return the range of the heads' median half-lives over all seeds, in tokens; None without gates."""
    models = [record["measures"].get("half_lives", {}) for record in entry.records]
    medians = [median for layers in models for heads in layers.values() for _, median, _ in heads]
    return f"{min(medians):,.0f} to {max(medians):,.0f}" if medians else None


def report(entries, size):
    """Return the tables of all rates, of the best rates and of equal time, and the losses over rate and position."""
    timed = [entry for entry in entries.values() if entry.name.endswith("equal time")]
    tried = [entry for entry in entries.values() if entry not in timed]
    variants = merge_rates(tried)
    blocks = [rates_table(variants)] if tried else []
    seeds = [entry for entry in tried if len(entry.records) > 1]
    columns = [("tokens", tokens_cell), ("validation loss", loss_cell)]
    if seeds:
        texts = ("other texts, in windows", partial(loss_cell, measure=texts_loss))
        lengths = [n // size.shrink for n in MEMORY]
        memory = ("MB after " + " / ".join(f"{n:,}" for n in lengths), partial(memory_cell, lengths=lengths))
        lives = ("half-lives of heads, tokens", half_lives_cell)
        blocks.append(table("The best rates", [*columns, texts, ("at once", at_once_cell), memory, lives], seeds))
        blocks.append("A difference of two means below two standard deviations is none.")
    if timed:
        difference = partial(difference_cell, base=entries.get("softmax, equal time"), measure="positions")
        spans = span_columns("far", [n // size.shrink for n in BOUNDS])
        columns += [("seconds of training", seconds_cell)]
        columns += [("other texts, in windows", texts_cell), ("to softmax's", difference)]
        columns += [(f"at once, {title}", cell) for title, cell in spans]
        blocks.append(table("Equal time", columns, timed))
    lines = {}
    for name, entry in variants.items():
        losses = losses_by_rate(entry)
        lines[name] = tuple(losses), tuple(map(fmean, losses.values()))
    title = "All train for the same seconds. Softmax reads in windows, the others at once.\n"
    title += "The dashed line is the training context."
    curves, context = {}, CONTEXT // size.shrink
    for entry in timed:
        name = entry.name.removesuffix(", equal time")
        curves[name] = position_curve(entry, "positions" if name == "softmax" else "far")
    curves = differences_by_position(curves, curves.get("softmax"), BOUNDS[0] // size.shrink)
    return blocks, [
        Panel("learning rate", "validation loss, nats a token", lines, "Points are means over the seeds at a rate."),
        Panel("position, tokens", "loss minus softmax's, nats a token", curves, title, log_x=True, context=context),
    ]


def differences_by_position(curves, base, start=0):
    """Return {name: (positions from `start` on, mean losses minus the losses of base)}; {} if base is None.

    base and the values of curves are what position_curve returns, all at the same positions.
    """
    if base is None:
        return {}
    differences = {name: (positions, losses - base[1]) for name, (positions, losses) in curves.items()}
    return {name: (x[x >= start], y[x >= start]) for name, (x, y) in differences.items()}


if __name__ == "__main__":
    main(NAME, plan, report, seeds=None, corpus="source_bpe")
