"""How much does a state recall? Multi-query associative recall by bytes of state, up to 256 pairs in 1,024 tokens.

mqar_task.py describes the task and the training. All models have two layers of one width, and some 1.45M parameters.
Power attention has the parts of the recipe. Its state grows with the dimension of its heads, as the state of Gated
DeltaNet does, which needs `pip install flash-linear-attention`. Windows keep as many bytes as p = 2 with heads of 16
and 32; the hybrid has one layer of p = 2 and one of a window. Softmax has no positions, as in Zoology: rotated ones,
which stand beside it, are new to a model beyond its training context. All models train at the first rate before the
others. The best mean over the tests chooses the rate. There is one seed.
"""

from statistics import fmean

from sympow.attention.variant import RECIPE
from sympow.code import short_hash
from sympow.experiments.mqar_task import TASKS
from sympow.experiments.parts import BASE, CONVOLUTION
from sympow.experiments.recipe import merge_rates
from sympow.experiments.report import format_numbers, table
from sympow.experiments.runs import SEEDS, Run, main

RATES = (3e-3, 1e-3, 1e-2)
LENGTH = 1024  # tokens after which the bytes of states and caches are given
SOFTMAX = dict(attention="softmax", positions="none", convolution=CONVOLUTION, head_dim=32)
CONTENDERS = {  # "kind: size" -> settings, the most important kind first
    **{f"p=2: heads of {n}": BASE | dict(head_dim=n) for n in (8, 16, 32, 64)},
    **{f"Gated DeltaNet: heads of {n}": dict(attention="gated_deltanet", head_dim=n) for n in (32, 64, 128)},
    **{f"softmax: window of {n}": SOFTMAX | dict(window=n) for n in (80, 464)},
    "softmax: all tokens": SOFTMAX,
    "softmax rotated: all tokens": SOFTMAX | dict(positions="rotary"),
    **{f"p=4: heads of {n}": BASE | dict(p=4, head_dim=n) for n in (8, 16)},
    "p=2 rotated: heads of 32": BASE | dict(positions="rotary", head_dim=32),
    "hybrid: heads of 32, window of 464": BASE | dict(attention="sympow_gating,softmax", window=464, head_dim=32),
}
TINY = ("p=2: heads of 16", "softmax: all tokens")


class RecallRun(Run):
    """A training that needs no dataset: `dataset` is a key of TASKS."""

    def corpus(self):
        return dict(name=self.dataset, sha256=short_hash(repr(TASKS[self.dataset]).encode()))


def plan(size):
    """Return the runs; of size tiny a few at one rate."""
    task, names, rates = ("mqar", CONTENDERS, RATES) if size.full else ("mqar_tiny", TINY, RATES[:1])
    return [make_run(task, name, rate) for rate in rates for name in names]


def make_run(task, name, rate):
    """Return the Run of a contender on a task at one rate."""
    settings, width = RECIPE | CONTENDERS[name], TASKS[task].width
    settings |= dict(n_layer=2, n_embd=width, n_head=width // settings["head_dim"], learning_rate=rate, seed=SEEDS[0])
    measures = {"mqar": dict(rate=rate, seed=SEEDS[0]), "size": dict(lengths=[LENGTH])}
    return RecallRun(f"{name}, lr {rate:g}", task, settings, measures)


# ---- the report: an Entry has the records of a contender at all rates


def best(entry):
    """Return what is measured at the best rate."""
    measures = (record["measures"] for record in entry.records)
    return max(measures, key=lambda measured: fmean(measured["mqar"]["accuracy"].values()))


def report(entries, size):
    """Return the table of accuracies by number of pairs."""
    contenders = merge_rates(entries.values())
    columns = [
        (f"bytes after {LENGTH:,} tokens", lambda entry: format_numbers(best(entry)["size"]["bytes"])),
        ("rate", lambda entry: best(entry)["mqar"]["rate"]),
    ]
    for test in best(contenders[0])["mqar"]["accuracy"]:
        columns.append((test, lambda entry, test=test: f"{best(entry)['mqar']['accuracy'][test]:.1%}"))
    return [table("Right answers by pairs and tokens, at the best rate", columns, contenders)]


if __name__ == "__main__":
    main("mqar", plan, report, corpus="")
