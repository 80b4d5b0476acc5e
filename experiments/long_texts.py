"""Which attention should train on long texts, if all have the same time? Read at 65,536 tokens, where a state pays.

Every contender has the parts of experiments.recipe and trains for SECONDS on one GPU: from scratch at 65,536 tokens, or
in stages, at 4,096 for 80% of the time and then at 65,536, where the learning rate falls. SECONDS counts training steps
alone, without compilation, evaluations and checkpoints, which train.py's max_seconds would count too. So a short run
measures the speed at both contexts first, and a run takes as many steps as fit into SECONDS. One kind of GPU must train
all of them. The records decide what is trained next: repeat the command until its status is 0.

Held-out texts of 65,536 tokens are read at once. Then the last 4,096 tokens of each are scored once more behind another
project's text: a model that uses what is far away loses by it.

    pip install flash-linear-attention      # for forgetting, on GPUs
"""

import os
from dataclasses import replace
from functools import partial

import numpy as np

from sympow.experiments import recipe
from sympow.experiments.report import (
    Panel,
    differences_by_position,
    loss_cell,
    mean_cell,
    position_curve,
    seconds_cell,
    seeds_difference_cell,
    span_columns,
    table,
    text_by_text_cell,
    texts_loss,
    tokens_cell,
    val_loss,
)
from sympow.experiments.runs import (
    CONTEXT,
    LONG,
    SEEDS,
    WINDOW,
    main,
    make_run,
    read_records,
)

NAME, RATE = "long_texts", 9.6e-3
SECONDS = 400.0  # of training steps
SOFTMAX = "softmax, convolution, output gate"  # the best one of recipe.SOFTMAX
WINDOWED = f"softmax, window {WINDOW:,}"
# of recipe.CONTENDERS, the most important first
NAMES = (SOFTMAX, "forgetting", WINDOWED, "p=2, heads of 64", "p=2, heads of 128", "hybrid 3:1")
SHARES = {"from scratch": 0.0, "in stages": 0.8}  # of the time that is spent at CONTEXT before LONG
BOUNDS = (0, CONTEXT, 16384, LONG)  # of the positions that are averaged
MEMORY = (LONG, 1 << 20)  # tokens after which the memory of generation is given
MEASURES = {"swapped": "all but the scored tokens", "swapped_far": "all but twice as many"}


def resized(size):
    """Return the Size of the runs, with steps of two texts of LONG. Size tiny has shorter ones, and evaluates less."""
    if size.shrink == 1:
        return size
    shrink = max(64, size.shrink)
    return replace(size, shrink=shrink, tokens_per_step=2 * LONG // shrink, eval_tokens=size.eval_tokens // 4)


def plan(size):
    """Return the runs that the records so far ask for: the speeds, then the first seed of all, then the others.

    Of size tiny there is one seed.
    """
    size = resized(size)
    records = read_records(os.path.join(size.folder, f"{NAME}.json"))
    speeds = {name: recipe.speed_run(size, name) for name in NAMES}
    measured = {name: run.find(records) for name, run in speeds.items()}
    runs = [speeds[name] for name, record in measured.items() if not record]
    for seed in SEEDS if size.shrink == 1 else SEEDS[:1]:
        for name, record in measured.items():
            runs += [timed_run(size, name, way, record, seed) for way in SHARES if record]
    return runs


def timed_run(size, name, way, record, seed):
    """Return the Run of a contender that takes SECONDS, trained in a way of SHARES. record: of its `speed_run`.

    In stages the learning rate falls in the steps at LONG, which take the last fifth of the time.
    """
    seconds, share = SECONDS / size.fewer, SHARES[way]
    short, long = record["measures"]["speed"].values()  # at CONTEXT and LONG
    steps, settings = steps_within(size, (1 - share) * seconds, long), dict(context=LONG)
    if share:
        first = steps_within(size, share * seconds, short)
        settings = dict(then=f"{LONG // size.shrink}@{first}", decay_share=round(steps / (first + steps), 4))
        steps += first
    settings = recipe.CONTENDERS[name] | settings | dict(steps=steps * size.fewer)
    texts = long_texts(size) | dict(bounds=[n // size.shrink for n in BOUNDS])
    measures = {"positions": texts, "size": dict(lengths=[n // size.shrink for n in MEMORY])} | swapped_measures(size)
    return replace(make_run(size, f"{name}, {way}", settings, RATE, seed), measures=measures)


def long_texts(size):
    """Return a measure's arguments for long held-out texts that validation does not read."""
    return dict(length=LONG // size.shrink, documents=4 * size.documents, skip=size.eval_tokens)


def swapped_measures(size):
    """Return {name in MEASURES: arguments}, where the last CONTEXT tokens of each text are scored."""
    texts = long_texts(size) | dict(last=CONTEXT // size.shrink)
    return {"swapped": texts, "swapped_far": texts | dict(recent=CONTEXT // size.shrink)}


def steps_within(size, seconds, speed):
    """Return how many steps take so many seconds at a speed in tokens a second, at least 12."""
    return max(12, round(seconds * speed / size.tokens_per_step))


# ---- the report


def swapped_cell(entry, measure):
    """Return the mean difference between the losses behind foreign and own text ± its standard error.

    A text's losses are the means over the seeds.
    """
    seeds = [record["measures"][measure] for record in entry.records]
    own, foreign = (np.mean([losses[name] for losses in seeds], axis=0) for name in ("own", "foreign"))
    return mean_cell(foreign - own, sign="+")


def swapped_columns():
    """Return the columns of swapped_cell for MEASURES."""
    return [(f"foreign: {title}", partial(swapped_cell, measure=name)) for name, title in MEASURES.items()]


def best_way(entries, name):
    """Return the Entry of a contender with the lower validation loss of its ways, or None if it is not trained."""
    tried = [entry for way in SHARES if (entry := entries.get(f"{name}, {way}"))]
    return min(tried, key=lambda entry: entry.mean(val_loss), default=None)


def report(entries, size):
    """Return the table, and a panel for each way of training: losses by position, minus softmax's in its better way."""
    size = resized(size)
    softmax, windowed = best_way(entries, SOFTMAX), best_way(entries, WINDOWED)
    lengths = " / ".join(f"{n // size.shrink:,}" for n in MEMORY)
    columns = [
        ("tokens", tokens_cell),
        ("seconds", seconds_cell),
        (f"validation at {LONG // size.shrink:,}", loss_cell),
        ("to softmax's best", partial(seeds_difference_cell, base=softmax)),
        ("held-out texts", partial(loss_cell, measure=texts_loss)),
        *span_columns("positions", [n // size.shrink for n in BOUNDS]),
        ("to softmax's best, text by text", partial(text_by_text_cell, base=softmax)),
        ("to the window's best, text by text", partial(text_by_text_cell, base=windowed)),
        *swapped_columns(),
        (f"MB after {lengths}", recipe.bytes_cell),
    ]
    title = f"Equal time, {SECONDS / size.fewer:.0f} seconds of training steps"
    note = "Differences to a best model have 95% confidence intervals, over the seeds or over the texts. Losses by "
    note += f"position, and what foreign text costs the last {CONTEXT // size.shrink:,} tokens, have standard errors."
    panels, context = [], CONTEXT // size.shrink
    for way in SHARES if softmax else ():
        trained = {name: entry for name in NAMES if (entry := entries.get(f"{name}, {way}"))}
        curves = {name: position_curve(entry) for name, entry in trained.items()}
        lines = differences_by_position(curves, position_curve(softmax))
        title_of_panel = f"Trained {way}. The base is {softmax.name}.\nThe dashed line is at {context:,} tokens."
        label = "loss minus softmax's best, nats a token"
        panels.append(Panel("position, tokens", label, lines, title_of_panel, log_x=True, context=context))
    return [table(title, columns, entries.values()), note], panels


if __name__ == "__main__":
    main(NAME, plan, report, seeds=None, corpus="source_bpe")
