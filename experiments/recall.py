"""Does it use the state? Associative recall, and a needle in a haystack, up to 16 times the training context.

data/recall/tasks.py has the two tasks. Their data are prepared when they are missing, the haystack from --dataset.
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


def resized(size, task):
    """Return the Size of the runs of a task, with contexts of at least 256 and smaller steps."""
    context = max(256, CONTEXT // size.shrink)
    tokens_per_step = max(context, size.tokens_per_step // 8)
    tokens = STEPS // size.fewer * tokens_per_step
    return replace(
        size,
        dataset=f"out/experiments/data/{task}_{context}_{tokens}",
        shrink=CONTEXT // context,
        tokens_per_step=tokens_per_step,
        eval_tokens=min(size.eval_tokens, SHORT * TIMES * context),
    )


def prepare_tasks(size):
    """Prepare the datasets of both tasks."""
    for task in CHANCE:
        task_size = resized(size, task)
        options = dict(
            task=task,
            context=CONTEXT // task_size.shrink,
            times=TIMES,
            train_tokens=STEPS // size.fewer * task_size.tokens_per_step,
            short=SHORT,
            long=LONG,
            haystack=size.dataset,
            out=task_size.dataset,
        )
        prepare.main([f"--{key}={value}" for key, value in options.items()])


def plan(size):
    """Return the runs of both tasks, with the variants of evaluation_length.py."""
    runs = []
    for task in CHANCE:
        documents = 8 * size.documents if task == "needle" else size.documents
        for name, settings in variants(size).items():
            measures = {"recall": dict(documents=documents)}
            runs.append(resized(size, task).run(f"{name}, {task}", CONTEXT, STEPS, measures, **settings))
    return runs


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
    """Return a table and a panel for each task."""
    blocks, panels = [], []
    for task, chance in CHANCE.items():
        context = CONTEXT // resized(size, task).shrink
        columns = [*LOSS_COLUMNS, *accuracy_columns((0, context // 8, context, 4 * context, 16 * context))]
        rows = [entry for entry in entries.values() if entry.name.endswith(f", {task}")]
        blocks.append(table(f"{task}: accuracy by distance in bytes; a guess has {chance:.2%}", columns, rows))
        lines = {entry.name.removesuffix(f", {task}"): recall_results(entry)[:2] for entry in rows}
        title = f"The task is {task}. The dashed line is the training context, the grey line a guess."
        panel = Panel("distance, bytes", "accuracy", lines, title, log_x=True, context=context, level=chance)
        panels.append(panel)
    return blocks, panels


if __name__ == "__main__":
    main("recall", plan, report, prepare=prepare_tasks)
