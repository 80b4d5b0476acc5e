"""Does a corpus need long context? A positive control with softmax, which forgets nothing.

Softmax is trained at 4,096 tokens and then at 65,536. It reads held-out texts of 65,536. Their last 4,096 tokens are
scored twice: after their own beginning, and after another project's. If the loss hardly changes, this corpus is no
test of long context. xz is measured first in the same way, which takes a minute and no training.
"""

from functools import partial

import numpy as np

from sympow.experiments.report import mean_cell, table, tokens_cell
from sympow.experiments.runs import main, variant
from sympow.experiments.which_attention import CONTEXT, LONG, schedule

RATE, SHARE = 2.4e-3, 0.6  # the long stage begins after this share of the time
SECONDS = 2  # how many times as long as the runs at equal time
NEEDED = 0.01  # nats a token by which a corpus of long context must differ
MEASURES = {"swapped": "all but the scored tokens", "swapped_far": "all but twice as many"}


def plan(size):
    """Return the runs: xz, which is not trained, and softmax."""
    measures = swapped_measures(size)
    settings = dict(then=f"{LONG // size.shrink}@{SHARE}", max_seconds=SECONDS * size.seconds) | schedule(size, RATE)
    xz = {name: arguments | dict(xz=True) for name, arguments in measures.items()}
    return [
        size.new_model("xz", xz, **variant("softmax")),  # the model is not read
        size.run("softmax in stages", CONTEXT, measures=measures, **variant("softmax"), **settings),
    ]


def long_texts(size):
    """Return a measure's arguments for long held-out texts that validation does not read."""
    return dict(length=LONG // size.shrink, documents=4 * size.documents, skip=size.eval_tokens)


def swapped_measures(size):
    """Return {name in MEASURES: arguments}, where the last CONTEXT tokens of each text are scored."""
    texts = long_texts(size) | dict(last=CONTEXT // size.shrink)
    return {"swapped": texts, "swapped_far": texts | dict(recent=CONTEXT // size.shrink)}


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


def trained_cell(entry):
    """Return the tokens of training, or None for xz."""
    return tokens_cell(entry) if "tokens" in entry.record else None


def own_cell(entry):
    """Return the mean loss behind the texts' own beginnings."""
    return mean_cell(np.array(entry.record["measures"]["swapped"]["own"]))


def report(entries, size):
    """Return the table, and no figure."""
    columns = [("tokens", trained_cell), ("loss of the last tokens", own_cell)]
    columns += swapped_columns()
    note = f"A corpus on which long context matters differs by at least {NEEDED} nats a token."
    return [table("Another project's text in the place of the beginning", columns, entries.values()), note], []


if __name__ == "__main__":
    main("control", plan, report, corpus="source_bpe")
