"""Loss against training context, at equal tokens: figure 1 of Kumar et al. (2025).

Every model is read on the same held-out targets, each with between half of its training context and the whole of it
before it; and by position, from the beginning of a text on, also beyond its training context.
"""

from sympow.experiments.report import (
    Panel,
    difference_cell,
    loss_cell,
    position_curve,
    ratio_cell,
    table,
    tokens_cell,
)
from sympow.experiments.runs import main

CONTEXTS = {2: (256, 8192, 2048, 512, 1024, 4096), 4: (1024, 8192, 4096, 2048)}  # {p: contexts in order of worth}
LONGEST = 8192


def variants(p):
    """Return {name: settings} of softmax and the attentions of power p."""
    powers = {f"{name} p={p}": dict(attention=name, p=p) for name in ("sympow", "sympow_gating", "conformal_sympow")}
    return {"softmax": dict(attention="softmax")} | powers


def plan(size):
    """Return the runs of p = 2, then those of p = 4; both are compared with the same runs of softmax."""
    runs, longest = {}, size.length(LONGEST)
    for p, contexts in CONTEXTS.items():
        for context in contexts:
            window = size.length(context)
            targets = dict(length=2 * longest, documents=4 * size.documents, start=longest, window=window)
            for variant, settings in variants(p).items():
                run = size.run(f"{variant}, {window:,}", context, steps=1000, **settings)
                runs[run.name] = run.measure(targets=targets, positions=dict(length=longest, documents=size.documents))
    return list(runs.values())


def target_loss(record):
    """Return the mean loss on the targets that all models are read on."""
    return record["measures"]["targets"]["loss"]


def report(entries, size):
    """Return a table and two panels for each power."""
    blocks = ["On the same targets, each with between half of the training context and the whole of it before it."]
    panels, longest = [], size.length(LONGEST)

    def softmax(entry):
        return entries.get(f"softmax, {entry.settings['block_size']:,}")

    columns = [
        ("context", lambda entry: entry.settings["block_size"]),
        ("tokens", tokens_cell),
        ("loss", loss_cell(target_loss)),
        ("to softmax", lambda entry: ratio_cell(softmax(entry), target_loss)(entry)),
        ("difference on the same texts", lambda entry: difference_cell("targets", softmax(entry))(entry)),
    ]
    for p, contexts in CONTEXTS.items():
        rows, lines, curves = [], {}, {}
        for length in sorted(map(size.length, contexts)):
            for variant in variants(p):
                if entry := entries.get(f"{variant}, {length:,}"):
                    rows.append(entry)
                    x, y = lines.setdefault(variant, ([], []))
                    x.append(length)
                    y.append(entry.mean(target_loss))
                    if length == longest:
                        curves[variant] = position_curve(entry)
        blocks.append(table(f"p = {p}", columns, rows))
        panels.append(Panel("training context", "loss on the same targets, nats", lines, f"p = {p}", log_x=True))
        title = f"p = {p}, trained at {longest:,}"
        panels.append(Panel("position", "loss, nats", curves, title, log_x=True, cut=True))
    return blocks, panels


if __name__ == "__main__":
    raise SystemExit(main("training_context", plan, report))
