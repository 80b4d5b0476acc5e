"""Which attention should train on long texts, if all have the same time? Read at 65,536 tokens, where a state pays.

Every contender has the parts of experiments.recipe and trains for SECONDS on one GPU: from scratch at 65,536 tokens, or
in stages, at 4,096 for 80% of the time and then at 65,536. SECONDS counts training steps alone, without compilation,
evaluations and checkpoints, which train.py's max_seconds would count too. So a short run measures the speed at both
contexts first, and a run takes as many steps as fit into SECONDS. One kind of GPU must train all of them. The records
decide what is trained next: repeat the command until its status is 0.

Held-out texts of 65,536 tokens are read at once. Then the last 4,096 tokens of each are scored once more behind another
project's text, which stands in the place of all but the last 8,192: a model that uses what is far away loses by it.

    pip install flash-linear-attention      # for forgetting, on GPUs
"""

from dataclasses import replace
from functools import partial
from statistics import fmean

from sympow.experiments.recipe import CONTENDERS, MEMORY, MUON, best_rates, speed_run
from sympow.experiments.report import (
    bytes_column,
    difference_columns,
    loss_cell,
    mean_difference,
    span_columns,
    table,
    texts_cell,
    tokens_cell,
)
from sympow.experiments.runs import CONTEXT, LONG, SEEDS, WINDOW, main, make_run

NAME, RATE = "long_texts", 9.6e-3
SECONDS = 100.0  # of training steps, in which p = 2 with heads of 64 takes 151 M tokens
FEW = 0.05  # of a run's steps
SOFTMAX = "softmax, convolution, output gate"  # the best one of recipe.SOFTMAX
WINDOWED = f"softmax, window {WINDOW:,}, output gate"
# of recipe.CONTENDERS, the most important first
NAMES = (SOFTMAX, "forgetting", WINDOWED, "p=2, heads of 64", "p=2, heads of 128", "hybrid 3:1")
SHARES = {"from scratch": 0.0, "in stages": 0.8}  # of the time that is spent at CONTEXT before LONG
BOUNDS = (0, CONTEXT, 16384, LONG)  # of the positions that are averaged


def plan(size):
    """Return the runs that the records so far ask for: the speeds, then the first seed of all, then the others.

    Speeds that experiments.recipe has measured are not measured again. Of size tiny there is one seed.
    """
    speeds = [speed_run(size, name) for name in NAMES]
    records = [run.find(size.records("recipe") | size.records(NAME)) for run in speeds]
    runs = [run for run, record in zip(speeds, records) if not record]
    for seed in SEEDS[: 3 if size.full else 1]:
        for name, record in zip(NAMES, records):
            runs += [timed_run(size, name, way, record, seed) for way in SHARES if record]
    return runs


def timed_run(size, name, way, record, seed):
    """Return the Run of a contender that takes SECONDS, trained in a way of SHARES. record: of its `speed_run`.

    In stages the learning rate falls in the steps at LONG, which take the last fifth of the time. A contender that
    takes FEW of them, because it is slow there, has the decay of all other runs: the last fifth of its steps.
    """
    share, seconds = SHARES[way], SECONDS / size.fewer
    short, long = (speed / size.tokens_per_step for speed in record["measures"]["speed"].values())  # steps a second
    first, last = round(share * seconds * short), max(12, round((1 - share) * seconds * long))
    settings = dict(context=LONG)
    if first:
        settings = dict(then=f"{LONG // size.shrink}@{first}")
        if (at_long := last / (first + last)) > FEW:
            settings["decay_share"] = round(at_long, 4)
    settings |= CONTENDERS[name] | MUON | dict(steps=(first + last) * size.fewer)
    run = make_run(size, f"{name}, {way}", settings, RATE, seed)
    texts = dict(length=LONG // size.shrink, documents=4 * size.documents, skip=size.eval_tokens)
    measures = dict(
        positions=texts | dict(bounds=size.shrunk(BOUNDS)),
        size=dict(lengths=size.shrunk(MEMORY)),
        swapped=texts | dict(last=CONTEXT // size.shrink),
    )
    return replace(run, measures=measures)


# ---- the report


def swapped_cell(entry):
    """Return how much more loss a text's end has behind foreign text. A text's is the mean over the seeds."""
    return mean_difference(list(map(fmean, zip(*entry.measured("swapped")))))


def report(entries, size):
    """Return the table, without a figure."""
    trained = [entry for entry in entries.values() if not entry.name.endswith(", speed")]
    best = best_rates(trained)
    columns = [
        ("tokens", tokens_cell),
        (f"validation at {LONG // size.shrink:,}", loss_cell),
        *difference_columns(best.get(SOFTMAX), "to softmax's best", "to softmax's best, text by text"),
        *difference_columns(best.get(WINDOWED), "to the window's best", "to the window's best, text by text"),
        ("held-out texts", partial(texts_cell, measure="positions")),
        *span_columns("positions", size.shrunk(BOUNDS)),
        ("behind foreign text", swapped_cell),
        bytes_column(size.shrunk(MEMORY)),
    ]
    title = f"{SECONDS / size.fewer:.0f} seconds of training steps each; differences have 95% confidence intervals"
    return [table(title, columns, trained)], None


if __name__ == "__main__":
    main(NAME, plan, report)
