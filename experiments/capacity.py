"""How much does a state hold? Associative recall at 16,384 bytes, in training and in the test, at equal bytes of state.

Each power attention is compared with softmax in a window. Its KV cache takes as many bytes as the state.
data/recall/tasks.py describes the texts. The test has texts as long as in training, so that no model must extrapolate.
The first half of the steps has windows of 1,024 bytes: at 16,384 from the first step softmax has not begun to learn
after 65 M bytes. All have --convolution=4, by which a key's two letters and the value behind it meet in one layer.
Three runs without it show what it does.
"""

from dataclasses import replace
from math import comb

from sympow.data.recall import prepare
from sympow.data.recall.tasks import CHANCE
from sympow.experiments.head_dimension import state_cell
from sympow.experiments.recall import accuracy_columns, recall_results
from sympow.experiments.report import LOSS_COLUMNS, Panel, table
from sympow.experiments.runs import main
from sympow.experiments.which_attention import schedule

CONTEXT, FIRST_CONTEXT, STEPS = 16384, 1024, 6000
RATE = 1.2e-3  # half of the best one for eight times as many tokens a step
SHAPES = ((2, 64), (2, 128), (4, 16))  # (p, head dimension) at a width of 384
DISTANCES = (0, 64, 256, 512, 1024, 2048, 16384)  # bytes, of the columns


def resized(size):
    """Return the Size of the runs: a step is one text, because more steps are worth more here."""
    context = CONTEXT // size.shrink
    dataset = f"out/experiments/data/capacity_{context}_{STEPS // size.fewer}"
    return replace(size, dataset=dataset, tokens_per_step=context, eval_tokens=min(size.eval_tokens, 16 * context))


def prepare_pairs(size):
    """Prepare the texts of the Size that `resized` returns."""
    new = resized(size)
    context, steps = new.tokens_per_step, STEPS // size.fewer
    options = dict(context=context, times=1, train_tokens=steps * context, short=16, long=64, out=new.dataset)
    prepare.main([f"--{key}={value}" for key, value in options.items()])


def window_of(p, D):
    """Return how many tokens' keys and values are as many numbers as a head's state, C(D + p - 1, p) (D + 1)."""
    return round(comb(D + p - 1, p) * (D + 1) / (2 * D))


def shapes(size):
    """Return [(p, head dimension)] at the width of this Size."""
    return [(p, max(4, D * size.model["n_embd"] // 384 // 2 * 2)) for p, D in SHAPES]


def names_of(p, D):
    """Return the names of gated power attention, softmax in a window of as many bytes, and the hybrid of both."""
    return f"gated p={p}, D={D}", f"softmax, window {window_of(p, D):,}", f"hybrid 1:1, p={p}, D={D}"


def plan(size):
    """Return the runs: softmax, and for each shape the variants of `names_of`, a hybrid for p = 2 alone. The last three
    have no convolution."""
    new = resized(size)
    variants = {"softmax": dict(attention="softmax", convolution=4)}
    for p, D in shapes(size):
        heads = dict(n_head=size.model["n_embd"] // D, head_dim=D)
        window = dict(window=window_of(p, D))
        power_name, window_name, hybrid_name = names_of(p, D)
        power = dict(attention="sympow_gating", p=p, convolution=4, **heads)
        variants |= {power_name: power, window_name: dict(attention="softmax", convolution=4, **window)}
        if p == 2:
            variants[hybrid_name] = power | window | dict(attention="sympow_gating,softmax")
    for name in ("softmax", *names_of(*shapes(size)[0])[:2]):
        settings = dict(variants[name])
        del settings["convolution"]
        variants[f"{name}, no convolution"] = settings
    measures = {"recall": dict(documents=64), "state": dict(tokens=new.tokens_per_step)}
    common = schedule(new, RATE) | dict(n_layer=4, then=f"{new.tokens_per_step}@0.5")
    return [new.run(name, FIRST_CONTEXT, STEPS, measures, **settings, **common) for name, settings in variants.items()]


def report(entries, size):
    """Return the table of accuracies by distance, and the curves of each shape."""
    distances = [n // size.shrink for n in DISTANCES]
    columns = [*LOSS_COLUMNS, ("state, bytes", state_cell), *accuracy_columns(distances)]
    panels = []
    for p, D in shapes(size):
        if names_of(p, D)[0] not in entries:
            continue
        labels = dict(zip(names_of(p, D), ("gated power attention", "softmax in a window", "hybrid of both")))
        labels["softmax"] = "softmax"
        lines = {labels[name]: recall_results(entry)[:2] for name, entry in entries.items() if name in labels}
        title = f"p={p} and heads of {D}, and a window of {window_of(p, D):,}. The grey line is a guess."
        panels.append(Panel("distance, bytes", "accuracy", lines, title, log_x=True, level=CHANCE))
    return [table(f"Accuracy by distance in bytes; a guess has {CHANCE:.2%}", columns, entries.values())], panels


if __name__ == "__main__":
    main("capacity", plan, report, prepare=prepare_pairs)
