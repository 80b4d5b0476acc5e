"""Loss by position far beyond the training context: figure 2 of Kumar et al. (2025), with standard errors."""

from sympow.experiments.report import Panel, Table, loss_cell, position_line, tokens_cell
from sympow.experiments.runs import main

CONTEXT, LENGTH, LONGEST = 4096, 65536, 1 << 20
BOUNDS = (1024, 4096, 16384, 65536, 262144, 1048576)  # of the positions that are averaged
VARIANTS = {  # in order of worth
    "sympow_gating p=2": dict(attention="sympow_gating", p=2),
    "conformal_sympow p=2": dict(attention="conformal_sympow", p=2),
    "sympow p=2": dict(attention="sympow", p=2),
    "softmax": dict(attention="softmax"),
    "sympow p=4": dict(attention="sympow", p=4),
    "heinsen": dict(attention="heinsen"),
    "adaptive mixture": dict(attention="adaptive_power", adaptive="mixture"),
}


def variants(size):
    """Return {name: settings}: VARIANTS, of which the mixture has heads of half the width, for its state of p = 4."""
    D = size.model["n_embd"] // size.model["n_head"] // 2
    narrow = dict(n_head=2 * size.model["n_head"], head_dim=D)
    return {name: of | narrow if "adaptive" in of else of for name, of in VARIANTS.items()}


def plan(size):
    """Return the runs at context 4,096, read to 65,536, gating and conformal to 1,048,576."""
    runs = []
    for name, settings in variants(size).items():
        run = size.run(name, CONTEXT, 131_072_000, **settings)
        bounds = [size.length(n) for n in BOUNDS]
        near = [n for n in bounds if n <= size.length(LENGTH)]
        run = run.measure(positions=dict(documents=size.documents, length=size.length(LENGTH), bounds=near))
        if name in ("sympow_gating p=2", "conformal_sympow p=2"):
            far = [n for n in bounds if n >= size.length(LENGTH)]
            run = run.measure(far=dict(documents=size.documents, length=size.length(LONGEST), bounds=far))
        runs.append(run)
    return runs


def mean_between(measure, first, last):
    """Return a column's function: the mean loss of positions above `first` up to `last`, with its standard error.

    They are two neighbours of the bounds that the measure was given.
    """

    def cell(entry):
        if not (found := entry.records[0]["measures"].get(measure)):
            return None
        i = found["spans"]["bounds"].index(first)
        return f"{found['spans']['mean'][i]:.4f} ± {found['spans']['errors'][i]:.4f}"

    return cell


def report(entries, size):
    """Return the table by position, and a panel for each length."""
    bounds = [size.length(n) for n in BOUNDS]
    columns = [("tokens", tokens_cell), ("val loss", loss_cell())]
    for first, last in zip(bounds, bounds[1:]):
        measure = "positions" if last <= size.length(LENGTH) else "far"
        columns.append((f"{first:,} to {last:,}", mean_between(measure, first, last)))
    documents = lambda of: lambda entry: entry.records[0]["measures"].get(of, {}).get("documents")
    columns += [(f"texts of {size.length(n):,}", documents(of)) for n, of in ((LENGTH, "positions"), (LONGEST, "far"))]
    joined = any(m.get("joined") for e in entries for r in e.records for m in r["measures"].values())
    note = "Texts of several projects behind one another are among those that are read." if joined else ""
    panels = [
        Panel("position", "loss, nats", {e.name: position_line(e, measure) for e in entries}, title, True,
              marks={f"trained at {size.length(CONTEXT):,}": size.length(CONTEXT)})
        for measure, title in (("positions", f"to {size.length(LENGTH):,}"), ("far", f"to {size.length(LONGEST):,}"))
    ]  # fmt: skip
    title = "Mean loss by position ± standard error over texts, which are the same for every run"
    return [Table(title, columns, entries), note, *panels]


if __name__ == "__main__":
    raise SystemExit(main("evaluation_length", plan, report))
