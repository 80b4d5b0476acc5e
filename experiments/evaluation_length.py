"""Loss by position far beyond the training context: figure 2 of Kumar et al. (2025), with standard errors."""

from experiments.report import Panel, Table, loss_cell, position_line, tokens_cell
from experiments.runs import main

CONTEXT, LENGTH, LONGEST = 4096, 65536, 1 << 20
VARIANTS = {  # in order of worth
    "sympow_gating p=2": dict(attention="sympow_gating", p=2),
    "conformal_sympow p=2": dict(attention="conformal_sympow", p=2),
    "sympow p=2": dict(attention="sympow", p=2),
    "softmax": dict(attention="softmax"),
    "sympow p=4": dict(attention="sympow", p=4),
    "heinsen": dict(attention="heinsen"),
    "adaptive mixture": dict(attention="adaptive_power", adaptive="mixture"),
}


def plan(size):
    """Return the runs at context 4,096, read to 65,536, gating and conformal to 1,048,576."""
    runs = []
    for name, settings in VARIANTS.items():
        if name == "adaptive mixture":  # heads of half the width, for its state of p = 4
            D = size.model["n_embd"] // size.model["n_head"] // 2
            settings = settings | dict(n_head=2 * size.model["n_head"], head_dim=D)
        run = size.run(name, CONTEXT, 262_144_000, **settings)
        texts = dict(documents=size.documents, length=size.length(LENGTH))
        run = run.measure(positions=texts)
        if name in ("sympow_gating p=2", "conformal_sympow p=2"):
            run = run.measure(far=texts | dict(length=size.length(LONGEST)))
        runs.append(run)
    return runs


def mean_between(measure, first, last):
    """Return a column's function: the mean loss of positions above `first` up to `last`, with its standard error."""

    def cell(entry):
        positions, mean, errors = (*position_line(entry, measure), ())[:3]
        at = [i for i, x in enumerate(positions) if first < x <= last]
        if not at:
            return None
        average = lambda values: sum(values[i] for i in at) / len(at)
        return f"{average(mean):.4f} ± {average(errors):.4f}"

    return cell


def report(entries, size):
    """Return the table by position, and a panel for each length."""
    bounds = [size.length(n) for n in (1024, 4096, 16384, 65536, 262144, 1048576)]
    spans = list(zip(bounds, bounds[1:]))
    columns = [("tokens", tokens_cell), ("val loss", loss_cell())]
    for first, last in spans:
        measure = "positions" if last <= size.length(LENGTH) else "far"
        columns.append((f"{first:,} to {last:,}", mean_between(measure, first, last)))
    documents = lambda entry: entry.mean(lambda record: record["measures"]["positions"]["documents"])
    columns.append(("documents", lambda entry: None if documents(entry) is None else round(documents(entry))))
    joined = any(m.get("joined") for e in entries for r in e.records for m in r["measures"].values())
    note = "Texts of several projects behind one another are among those that are read." if joined else ""
    panels = [
        Panel("position", "loss", {e.name: position_line(e, measure) for e in entries}, title, True,
              marks={f"trained at {size.length(CONTEXT):,}": size.length(CONTEXT)})
        for measure, title in (("positions", "all"), ("far", "gating and conformal, further"))
    ]  # fmt: skip
    title = "Loss by position ± standard error over documents; means over intervals of equal ratio"
    return [Table(title, columns, entries), note, *panels]


if __name__ == "__main__":
    raise SystemExit(main("evaluation_length", plan, report))
