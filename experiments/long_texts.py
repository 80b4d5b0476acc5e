"""Which attention should read long texts, if all have the same time to train? Read at 65,536 tokens.

Every contender has the parts of experiments.recipe and trains for SECONDS on one GPU: at 4,096 tokens alone, or in
stages, at 4,096 for 80% of the time and then at 65,536. The better way of each gets two more seeds. Three records are
from scratch at 65,536: each of these models lost 0.15 to 0.36 by it. SECONDS counts training steps alone, without
compilation, evaluations and checkpoints, which train.py's max_seconds would count too. So a short run measures the
speed at both contexts first, and a run takes as many steps as fit into SECONDS. One kind of GPU must train all of them.
The records decide what is trained next: repeat the command until its status is 0.

Held-out texts of 65,536 tokens are read at once; softmax over all tokens that knows 4,096 reads them in windows. Then
the last 4,096 tokens of each are scored once more behind another project's text, which stands in the place of all but
the last 8,192: a model that uses what is far away loses by it.

    pip install flash-linear-attention      # for forgetting, on GPUs
"""

from functools import partial
from statistics import fmean

from sympow.experiments.recipe import CONTENDERS, MEMORY, MUON, speed_run
from sympow.experiments.report import (
    bytes_column,
    loss_cell,
    mean_of_texts,
    span_columns,
    table,
    texts_cell,
    texts_column,
    tokens_cell,
)
from sympow.experiments.runs import CONTEXT, LONG, SEEDS, WINDOW, main, make_run

NAME, RATE = "long_texts", 9.6e-3
SECONDS = 100.0  # of training steps, in which p = 2 with heads of 64 takes 151 M tokens
FEW = 0.05  # of a run's steps
SOFTMAX = "softmax, convolution, output gate"  # the best one of recipe.SOFTMAX
ROPE_BASE = 5e5  # of SOFTMAX that learns at LONG; with 10,000 it lost 0.07
WINDOWED = f"softmax, window {WINDOW:,}"
# of recipe.CONTENDERS, the most important first
NAMES = (
    "p=4, heads of 64",
    "hybrid 3:1",
    f"{WINDOWED}, output gate",
    "forgetting",
    SOFTMAX,
    "p=2, heads of 64",
    WINDOWED,
    "p=2, heads of 128",
)
SHARES = {f"at {CONTEXT:,} alone": 1.0, "in stages": 0.8}  # of the time that is spent at CONTEXT
BOUNDS = (0, CONTEXT, 16384, LONG)  # of the positions that are averaged


def plan(size):
    """Return the runs that the records so far ask for: the speeds, then both ways of each, then seeds of the better.

    Speeds that experiments.recipe has measured are not measured again. Of size tiny there is one seed.
    """
    known = size.records("recipe") | size.records(NAME)
    speeds, first_seeds, more_seeds = [], [], []
    for name in NAMES:
        speed = speed_run(size, name)
        record = speed.find(known)
        if not record:
            speeds.append(speed)
            continue
        runs = {way: timed_run(size, name, way, record) for way in SHARES}
        first_seeds += runs.values()
        losses = {way: text_loss(trained) for way, run in runs.items() if (trained := run.find(known))}
        if size.full and len(losses) == len(SHARES):
            way = min(losses, key=losses.get)
            more_seeds += [timed_run(size, name, way, record, seed) for seed in SEEDS[1:3]]
    return speeds + first_seeds + more_seeds


def timed_run(size, name, way, record, seed=SEEDS[0]):
    """Return the Run of a contender that takes SECONDS, trained in a way of SHARES. record: of its `speed_run`.

    In stages the learning rate falls in the steps at LONG, which take the last fifth of the time. A contender that
    takes FEW of them, because it is slow there, has the decay of all other runs: the last fifth of its steps.
    """
    share, seconds = SHARES[way], SECONDS / size.fewer
    short, long = (speed / size.tokens_per_step for speed in record["measures"]["speed"].values())  # steps a second
    first = round(share * seconds * short)
    last = max(12, round((1 - share) * seconds * long)) if share < 1 else 0
    settings = dict(steps=first + last)
    if last:
        settings["then"] = f"{LONG // size.shrink}@{first}"
        if (at_long := last / (first + last)) > FEW:
            settings["decay_share"] = round(at_long, 4)
        if name == SOFTMAX:
            settings["rope_base"] = ROPE_BASE
    texts = dict(length=LONG // size.shrink, documents=4 * size.documents, skip=size.eval_tokens)
    measures = dict(positions=texts | dict(bounds=size.shrunk(BOUNDS)), size=dict(lengths=size.shrunk(MEMORY)))
    if last or name != SOFTMAX:
        measures["swapped"] = texts | dict(last=CONTEXT // size.shrink)
    else:
        measures["positions"]["window"] = CONTEXT // size.shrink
    return make_run(size, f"{name}, {way}", CONTENDERS[name] | MUON | settings, RATE, seed, measures)


# ---- the report


def swapped_cell(entry):
    """Return how much more loss a text's end has behind foreign text."""
    return mean_of_texts(entry.measured("swapped"), entry)


def text_loss(record):
    """Return the mean loss of a record's held-out texts."""
    return fmean(record["measures"]["positions"]["texts"])


def report(entries, size):
    """Return the table."""
    trained = [entry for entry in entries.values() if not entry.name.endswith(", speed")]
    texts = partial(texts_cell, measure="positions")
    columns = [("tokens", tokens_cell), ("validation loss", loss_cell), ("held-out texts", texts)]
    for label, name in {"to the best softmax": SOFTMAX, "to the best window": WINDOWED}.items():
        rivals = [entry for entry in trained if entry.name.startswith(name)]
        best = min(rivals, key=lambda entry: text_loss(entry.record), default=None)
        columns.append(texts_column(label, best))
    columns += [
        *span_columns(size.shrunk(BOUNDS)),
        ("behind foreign text", swapped_cell),
        bytes_column(size.shrunk(MEMORY)),
    ]
    return [
        table(
            f"{SECONDS / size.fewer:.0f} seconds of training steps each; "
            "differences have 95% confidence intervals over the texts",
            columns,
            trained,
        )
    ]


if __name__ == "__main__":
    main(NAME, plan, report)
