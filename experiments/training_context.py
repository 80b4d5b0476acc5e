"""Loss against training context, at equal tokens: figure 1 of Kumar et al. (2025).

Every model is read on the same held-out targets, each with between half of its training context and the whole of it
before it; and by position, from the beginning of a text on, also beyond its training context.
"""

from functools import partial
from statistics import fmean

from sympow.experiments.report import Panel, difference_cell, loss_cell, position_curve, ratio_cell, table, tokens_cell
from sympow.experiments.runs import main, variant

CONTEXTS = {2: (256, 8192, 2048, 512, 1024, 4096), 4: (1024, 8192, 4096, 2048)}  # {p: contexts in order of worth}
LONGEST = 8192


def variants(p):
    """Return softmax and the attentions of power p."""
    return ["softmax", *(f"{attention} p={p}" for attention in ("sympow", "sympow_gating", "conformal_sympow"))]


def plan(size):
    """Return the runs of p = 2 first, then of p = 4. Both are compared with the same runs of softmax."""
    runs = {}
    longest = LONGEST // size.shrink
    for p, contexts in CONTEXTS.items():
        for context in contexts:
            window = context // size.shrink
            measures = {
                "targets": dict(length=2 * longest, documents=4 * size.documents, start=longest, window=window),
                "positions": dict(length=longest, documents=size.documents),
            }
            for attention in variants(p):
                name = f"{attention}, {window:,}"
                runs[name] = size.run(name, context, steps=1000, measures=measures, **variant(attention))
    return list(runs.values())


def target_loss(record):
    """Return the mean loss on the targets that all models are read on."""
    return fmean(record["measures"]["targets"]["texts"])


def context_cell(entry):
    """Return the training context."""
    return entry.record["settings"]["block_size"]


def report(entries, size):
    """Return a table and two panels for each power."""
    blocks = ["On the same targets, each with between half of the training context and the whole of it before it."]
    panels, longest = [], LONGEST // size.shrink

    def softmax(entry):
        return entries.get(f"softmax, {context_cell(entry):,}")

    columns = [
        ("context", context_cell),
        ("tokens", tokens_cell),
        ("loss", partial(loss_cell, measure=target_loss)),
        ("to softmax", lambda entry: ratio_cell(entry, softmax(entry), target_loss)),
        ("difference on the same texts", lambda entry: difference_cell(entry, softmax(entry), "targets")),
    ]
    for p, contexts in CONTEXTS.items():
        rows, lines, curves = [], {}, {}
        for length in sorted(context // size.shrink for context in contexts):
            for attention in variants(p):
                if entry := entries.get(f"{attention}, {length:,}"):
                    rows.append(entry)
                    x, y = lines.setdefault(attention, ([], []))
                    x.append(length)
                    y.append(entry.mean(target_loss))
                    if length == longest:
                        curves[attention] = position_curve(entry)
        blocks.append(table(f"p = {p}", columns, rows))
        title = f"Models of p = {p} are read on the same targets as softmax."
        panels.append(Panel("training context, tokens", "loss, nats a token", lines, title, log_x=True))
        title = f"The training context is {longest:,} tokens (p = {p}). Bands are standard errors."
        panels.append(Panel("position, tokens", "loss, nats a token", curves, title, log_x=True))
    return blocks, panels


if __name__ == "__main__":
    main("training_context", plan, report)
