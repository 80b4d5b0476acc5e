"""Does it use the state? Associative recall, and a needle in a haystack, up to 16 times the training context.

data/recall/tasks.py has the two tasks. Their data are prepared when they are missing, the haystack out of --dataset.
"""

import os
from dataclasses import replace

from sympow.data.recall import prepare
from sympow.data.recall.tasks import CHANCE
from sympow.experiments.evaluation_length import variants
from sympow.experiments.report import Panel, Table, loss_cell, tokens_cell
from sympow.experiments.runs import main

CONTEXT, TIMES, SHORT, LONG = 1024, 16, 16, 128
TOKENS = 65_536_000
SMALLER = 8  # times, a step than those of other experiments: more of them are worth more here


def plan(size):
    """Return the runs of both tasks; a variant's settings are those of evaluation_length.py."""
    runs, context = [], max(256, size.length(CONTEXT))
    step = max(context, size.tokens_per_step // SMALLER)
    size = replace(size, tokens_per_step=step, micro_tokens=step)
    block, tokens = context * size.shrink, size.tokens or TOKENS // size.fewer
    for task in CHANCE:
        out = os.path.join("out", "experiments", "data", f"{task}_{context}_{tokens}")
        options = dict(task=task, context=context, times=TIMES, train_tokens=tokens, short=SHORT, long=LONG, out=out)
        if size.trains:
            prepare.main([f"--{key}={value}" for key, value in (options | dict(haystack=size.dataset)).items()])
        for name, settings in variants(size).items():
            settings = settings | dict(eval_tokens=min(size.eval_tokens, SHORT * TIMES * context))
            run = size.run(f"{name}, {task}", block, TOKENS, **settings)
            documents = min(LONG, 8 * size.documents) if task == "needle" else size.documents
            run = run.measure(recall=dict(documents=documents))
            runs.append(replace(run, dataset=out))
    return runs


def accuracy(first, last):
    """Return a column's function: the share of questions answered whose distance is above `first`, up to `last`."""

    def cell(entry):
        found = entry.records[0]["measures"]["recall"]
        at = [i for i, x in enumerate(found["distance"]) if first < x <= last]
        asked = sum(found["questions"][i] for i in at)
        right = sum(found["accuracy"][i] * found["questions"][i] for i in at)
        return f"{right / asked:.1%} of {asked:,}" if asked else None

    return cell


def report(entries, size):
    """Return a table and a panel for each task."""
    parts, context = [], max(256, size.length(CONTEXT))
    bounds = [0, context // 8, context, 4 * context, 16 * context]
    for task, chance in CHANCE.items():
        of = [entry for entry in entries if entry.name.endswith(f", {task}")]
        columns = [("tokens", tokens_cell), ("val loss", loss_cell())]
        columns += [(f"{a:,} to {b:,}", accuracy(a, b)) for a, b in zip(bounds, bounds[1:])]
        parts.append(Table(f"{task}: accuracy by distance in bytes; a guess has {chance:.2%}", columns, of))
        found = {e.name.partition(",")[0]: e.records[0]["measures"]["recall"] for e in of if e.records}
        lines = {name: (recall["distance"], recall["accuracy"]) for name, recall in found.items()}
        marks = {f"trained at {context:,}": context}
        parts.append(Panel("distance, bytes", "accuracy", lines, task, True, chance, marks, share=True))
    return parts


if __name__ == "__main__":
    raise SystemExit(main("recall", plan, report))
