"""Does it use the state? Associative recall up to 16 times the training context.

data/recall/tasks.py describes the texts. They are prepared when they are missing.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise

from sympow.data.recall import prepare
from sympow.data.recall.tasks import CHANCE
from sympow.experiments.evaluation_length import variants
from sympow.experiments.report import LOSS_COLUMNS, Panel, table
from sympow.experiments.runs import main

CONTEXT, TIMES, SHORT, LONG = 1024, 16, 16, 128
STEPS = 4000  # of an eighth of the other experiments' tokens, because more steps are worth more here


def resized(size):
    """Return the Size of the runs, with contexts of at least 256 and smaller steps."""
    context = max(256, CONTEXT // size.shrink)
    tokens_per_step = max(context, size.tokens_per_step // 8)
    tokens = STEPS // size.fewer * tokens_per_step
    return replace(
        size,
        dataset=f"out/experiments/data/pairs_{context}_{tokens}",
        shrink=CONTEXT // context,
        tokens_per_step=tokens_per_step,
        eval_tokens=min(size.eval_tokens, SHORT * TIMES * context),
    )


def prepare_pairs(size):
    """Prepare the texts of the Size that `resized` returns."""
    new = resized(size)
    options = dict(
        context=CONTEXT // new.shrink,
        times=TIMES,
        train_tokens=STEPS // size.fewer * new.tokens_per_step,
        short=SHORT,
        long=LONG,
        out=new.dataset,
    )
    prepare.main([f"--{key}={value}" for key, value in options.items()])


def plan(size):
    """Return the runs, with the variants of evaluation_length.py."""
    new = resized(size)
    measures = {"recall": dict(documents=size.documents)}
    return [new.run(name, CONTEXT, STEPS, measures, **settings) for name, settings in variants(size).items()]


def recall_results(entry):
    """Return the lists of distances, accuracies and numbers of questions."""
    results = entry.record["measures"]["recall"]
    return results["distance"], results["accuracy"], results["questions"]


def accuracy_cell(entry, first, last):
    """Return the share of questions answered at distances above `first`, up to `last`."""
    right, count = 0, 0
    for distance, accuracy, questions in zip(*recall_results(entry)):
        if first < distance <= last:
            right += accuracy * questions
            count += questions
    return f"{right / count:.1%} of {count:,}" if count else None


def accuracy_columns(bounds):
    """Return the columns of accuracy_cell between neighbours of these distances."""
    return [
        (f"{first:,} to {last:,}", partial(accuracy_cell, first=first, last=last)) for first, last in pairwise(bounds)
    ]


def report(entries, size):
    """Return the table of accuracies by distance, and their curves."""
    context = CONTEXT // resized(size).shrink
    columns = [*LOSS_COLUMNS, *accuracy_columns((0, context // 8, context, 4 * context, 16 * context))]
    lines = {name: recall_results(entry)[:2] for name, entry in entries.items()}
    title = "The dashed line is the training context, and the grey line is a guess."
    panel = Panel("distance, bytes", "accuracy", lines, title, log_x=True, context=context, level=CHANCE)
    return [table(f"Accuracy by distance in bytes; a guess has {CHANCE:.2%}", columns, entries.values())], [panel]


if __name__ == "__main__":
    main("recall", plan, report, prepare=prepare_pairs)
