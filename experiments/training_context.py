"""Loss against training context, at equal tokens: figure 1 of Kumar et al. (2025).

Every model is read on the same held-out targets, each with between half of its training context and the whole of it
before it; and by position, from the beginning of a text on, also beyond its training context.
"""

from sympow.experiments.report import Panel, Table, loss_cell, position_line, ratio_cell, texts_cell, tokens_cell
from sympow.experiments.runs import main

CONTEXTS = {2: (256, 8192, 2048, 512, 1024, 4096), 4: (1024, 8192, 4096, 2048)}  # p: in order of worth
VARIANTS = ("softmax", "sympow", "sympow_gating", "conformal_sympow")
LONGEST = 8192


def plan(size):
    """Return the runs of p = 2, then those of p = 4; softmax's are the same for both."""
    runs = []
    for p, contexts in CONTEXTS.items():
        for context in contexts:
            for variant in VARIANTS:
                if variant == "softmax" and any(run.name == f"softmax, {size.length(context):,}" for run in runs):
                    continue
                name = variant if variant == "softmax" else f"{variant} p={p}"
                power = {} if variant == "softmax" else {"p": p}
                run = size.run(f"{name}, {size.length(context):,}", context, 131_072_000, attention=variant, **power)
                targets = dict(
                    length=2 * size.length(LONGEST), documents=4 * size.documents, start=size.length(LONGEST)
                )
                by_position = dict(length=size.length(LONGEST), documents=size.documents)
                runs.append(run.measure(targets=targets | dict(window=size.length(context)), positions=by_position))
    return runs


def target_loss(record):
    """Return the mean loss on the targets that all models are read on."""
    return record["measures"]["targets"]["loss"]


def report(entries, size):
    """Return a table and two panels for each power."""
    parts = ["On the same targets, each with between half of the training context and the whole of it before it."]
    for p, contexts in CONTEXTS.items():
        lengths = [size.length(context) for context in contexts]
        of = [entry for entry in entries if entry.settings["block_size"] in lengths]
        of = [entry for entry in of if entry.settings.get("p", p) == p]
        softmax = {e.settings["block_size"]: e for e in of if e.settings["attention"] == "softmax"}
        base = lambda entry, softmax=softmax: softmax.get(entry.settings["block_size"])
        columns = [
            ("context", lambda entry: entry.settings["block_size"]), ("tokens", tokens_cell),
            ("loss", loss_cell(target_loss)),
            ("to softmax", lambda entry, base=base: ratio_cell(base(entry), target_loss)(entry)),
            ("difference on the same texts", lambda entry, base=base: texts_cell("targets", base(entry))(entry)),
        ]  # fmt: skip
        order = sorted(of, key=lambda e: (e.settings["block_size"], VARIANTS.index(e.settings["attention"])))
        parts.append(Table(f"p = {p}", columns, order))
        lines = {}
        for entry in order:
            x, y = lines.setdefault(entry.name.partition(",")[0], ([], []))
            if entry.mean(target_loss) is not None:
                x.append(entry.settings["block_size"]), y.append(entry.mean(target_loss))
        parts.append(Panel("training context", "loss on the same targets, nats", lines, f"p = {p}", log_x=True))
        longest = [entry for entry in of if entry.settings["block_size"] == size.length(LONGEST)]
        by_position = {entry.name.partition(",")[0]: position_line(entry) for entry in longest}
        title = f"p = {p}, trained at {size.length(LONGEST):,}"
        parts.append(Panel("position", "loss, nats", by_position, title, log_x=True))
    return parts


if __name__ == "__main__":
    raise SystemExit(main("training_context", plan, report))
