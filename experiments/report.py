"""Write what an experiment found: a table in Markdown with the corpus in every row, and a figure of panels.

    Entry                                               # a row: a Run with its records, one for each seed
    Table("Loss", [("val loss", val_loss), ...], entries)
    Panel("tokens", "loss", {"softmax": (x, y, errors or None)})
    write_report("loss_ratios", "docs/data", entries, [Table, Panel, text, ...], command)

Nothing here is typed by hand: a cell is computed from NAME.json, and what was not run is a row that says so.
"""

import math
import os
from dataclasses import dataclass, field
from statistics import fmean, median, stdev

import numpy as np

from sympow.compare import format_count, markdown
from sympow.data.files import write_atomically
from sympow.runs.plots import (
    COLOURS, DASHES, STYLE, choose_picture, mean_and_standard_error, save_figure, short_count, smooth,
)  # fmt: skip

BINARY = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k"), (1, ""))  # units of an axis of powers of two


@dataclass(frozen=True)
class Entry:
    """A planned run: its name and settings, the ids of its seeds, and {id: record} of what was found."""

    name: str
    settings: dict
    ids: list
    known: dict
    missing: str = "not run"  # what a table says if there is no record

    @property
    def records(self):
        """Return the records of its seeds that are done."""
        return [self.known[i] for i in self.ids if i in self.known]

    def values(self, get):
        """Return get(record) of each seed, without None, numbers that are not finite, and records that lack it."""
        found = []
        for record in self.records:
            try:
                found.append(get(record))
            except (KeyError, IndexError):
                pass
        return [x for x in found if x is not None and math.isfinite(x)]

    def mean(self, get):
        """Return the mean of get(record) over the seeds, None without any."""
        values = self.values(get)
        return fmean(values) if values else None

    def deviation(self, get):
        """Return the standard deviation over the seeds, None with fewer than two."""
        values = self.values(get)
        return stdev(values) if len(values) > 1 else None


@dataclass
class Table:
    """columns: [(header, function of an Entry that returns a text, a number or None)]."""

    title: str
    columns: list
    entries: list


@dataclass
class Panel:
    """lines: {name: (x, y)} or {name: (x, y, standard errors)}; marks: {label: x} of vertical lines."""

    xlabel: str
    ylabel: str
    lines: dict
    title: str = ""
    log_x: bool = False
    level: float | None = None  # a horizontal line: of equality, or if `share` of a guess
    marks: dict = field(default_factory=dict)
    share: bool = False  # y from 0 to 1
    begins: dict = field(default_factory=dict)  # {name: x} of a diamond on its line


def val_loss(record):
    """Return the last validation loss of a record."""
    return record["val"][-1][1]


def loss_cell(get=val_loss):
    """Return a column's function: the mean over seeds, with the standard deviation if there are several."""

    def cell(entry):
        mean, deviation = entry.mean(get), entry.deviation(get)
        if mean is None or deviation is None:
            return None if mean is None else f"{mean:.4f}"
        return f"{mean:.4f} ± {deviation:.4f} ({len(entry.values(get))} seeds)"

    return cell


def ratio_cell(base, get=val_loss):
    """Return a column's function: the loss relative to that of the Entry base; "none" if they differ by less than two
    standard deviations over seeds."""

    def cell(entry):
        of, to = entry.mean(get), base and base.mean(get)
        return None if of is None or not to else "none" if is_noise(entry, base, get) else f"{of / to:.4f}"

    return cell


def texts_cell(measure, base=None):
    """Return a column's function: the mean loss of the texts of a measure ± its standard error over them, or with an
    Entry base the mean difference to its loss on each text, whose error is that of the difference. First seed alone."""

    def cell(entry):
        if base and (entry is base or not base.records):
            return None
        texts = [np.array(e.records[0]["measures"][measure]["texts"]) for e in (entry, base) if e]
        of, error = mean_and_standard_error((texts[0] - texts[1] if base else texts[0])[:, None])
        return f"{of.item():{'+' if base else ''}.4f}" + (f" ± {error.item():.4f}" if len(texts[0]) > 1 else "")

    return cell


def is_noise(a, b, get=val_loss):
    """Return True if two entries differ by less than two standard deviations, pooled over those that have seeds."""
    known = [x for x in (a.deviation(get), b.deviation(get)) if x is not None]
    if a is b or not known:
        return False
    pooled = math.sqrt(fmean(x * x for x in known))
    return abs(a.mean(get) - b.mean(get)) < 2 * pooled


def tokens_cell(entry):
    """Return the tokens that an entry was trained on, and how many epochs they are if they are more than one."""
    found = {(r["tokens"], r["tokens"] / r["corpus"]["tokens"]["train"]) for r in entry.records if "tokens" in r}
    texts = [format_count(n) + (f" ({epochs:.1f} epochs)" if epochs > 1.05 else "") for n, epochs in sorted(found)]
    return " or ".join(texts) or None


def find(entries, name):
    """Return the first entry of `find_all`, None if there is none."""
    return next(iter(find_all(entries, name)), None)


def find_all(entries, name):
    """Return the entries whose name is this, or begins with it and a comma."""
    return [entry for entry in entries if f"{entry.name},".startswith(f"{name},")]


def markdown_table(table):
    """Return the Markdown of a Table, with the corpus and its number of files in every row.

    Raises ValueError if records are on different corpora: their losses cannot be compared.
    """
    corpora = {record["corpus"]["sha256"] for entry in table.entries for record in entry.records}
    if len(corpora) > 1:
        raise ValueError(f"runs on different corpora are not put into one table: {', '.join(sorted(corpora))}")
    header = ["run", *(name for name, _ in table.columns), "corpus (sha256)", "files"]
    cells = []
    for entry in table.entries:
        corpus = entry.records[0]["corpus"] if entry.records else None
        row = [show(get(entry)) if corpus else "-" for _, get in table.columns]
        if not corpus and row:
            row[0] = entry.missing
        files = f"{corpus['files']:,}" if corpus and corpus["files"] else "-"
        cells.append([entry.name, *row, f"{corpus['name']} {corpus['sha256']}" if corpus else "-", files])
    return (f"**{table.title}**\n\n" if table.title else "") + markdown(header, cells)


def show(value):
    """Return a cell's text."""
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def write_report(name, folder, entries, parts, command):
    """Write NAME.md, and NAME.png if there are panels, into the folder: parts are Tables, Panels and texts."""
    panels = [part for part in parts if isinstance(part, Panel) and any(len(line[0]) for line in part.lines.values())]
    blocks = [
        markdown_table(part) if isinstance(part, Table) else part for part in parts if not isinstance(part, Panel)
    ]
    if panels:
        draw(panels, os.path.join(folder, f"{name}.png"))
        blocks.append(f"![{name}]({name}.png)")
    machines = {}
    for m in (record["machine"] for entry in entries for record in entry.records):
        machine = f"{m['device']}, torch {m['torch']}, triton {m['triton'] or 'none'}, commit "
        machines.setdefault(machine, set()).add(m["commit"] or "unknown")
    machines = "; ".join(machine + " and ".join(sorted(commits)) for machine, commits in sorted(machines.items()))
    head = f"    {command}\n\n{machines or 'Nothing has been run.'}"
    text = "\n\n".join([f"# {name}", head, *filter(None, blocks)]) + "\n"
    write_atomically(os.path.join(folder, f"{name}.md"), text.encode())


def draw(panels, png):
    """Draw panels in rows of two, with one legend; a name has the same colour in all of them."""
    png, missing = choose_picture(png)
    if missing:
        print(missing)
        return
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for panel in panels for name, line in panel.lines.items() if len(line[0])))
    looks = {
        name: dict(color=COLOURS[i % len(COLOURS)], linestyle=DASHES[i // len(COLOURS) % len(DASHES)], linewidth=1.6)
        for i, name in enumerate(names)
    }
    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    with plt.style.context(["default", STYLE, {"axes.formatter.useoffset": False}]):
        size = (6 * columns + 1.5 * (columns == 1), 4 * rows + 0.12 * len(names))
        figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        figure.get_layout_engine().set(wspace=0.04)
        for axis in axes.flat[len(panels) :]:
            axis.axis("off")
        for axis, panel in zip(axes.flat, panels):
            draw_panel(axis, panel, looks)
        points = {n for n in names if all(len(panel.lines.get(n, [()])[0]) <= 1 for panel in panels)}
        as_point = lambda name: dict(marker="o", linestyle="none") if name in points else {}
        handles = [plt.Line2D([], [], label=name, **looks[name] | as_point(name)) for name in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(names), 2 * columns))
        save_figure(figure, png, dpi=130)


def draw_panel(axis, panel, looks):
    """Draw one panel; points are marked where there are few."""
    shown = []  # of each line, what should be seen
    for name, (x, y, *errors) in panel.lines.items():
        if not len(x):
            continue
        x, y = np.asarray(x, float), np.asarray(y, float)
        axis.plot(x, y, **looks[name], marker="o" if len(x) <= 25 else None, markersize=4)
        if errors and errors[0] is not None:
            error, look = np.asarray(errors[0]), dict(color=looks[name]["color"], alpha=0.15, linewidth=0)
            axis.fill_between(x, y - error, y + error, **look)
        if (begin := panel.begins.get(name)) is not None:
            look = dict(marker="D", markersize=7, markeredgecolor="white", color=looks[name]["color"], zorder=3)
            axis.plot([begin], [np.interp(begin, x, y)], **look)
        few = panel.log_x and len(x) <= 25
        late = x >= (0 if few or not len(x) else x[-1] ** 0.3 if panel.log_x else 0.1 * x[-1])
        shown += [found] if (found := [v for v in y[late] if math.isfinite(v)]) else []
    if panel.level is not None:
        axis.axhline(panel.level, color="#777777", linewidth=1)
        if panel.share:
            place = dict(xycoords=("axes fraction", "data"), xytext=(-3, 3), textcoords="offset points", fontsize=8)
            axis.annotate("a guess", (1, panel.level), **place, ha="right")
    for label, x in panel.marks.items():
        axis.axvline(x, color="#777777", linestyle=(0, (4, 3)), linewidth=1)
        place = dict(xycoords=("data", "axes fraction"), xytext=(3, -10), textcoords="offset points", fontsize=8)
        axis.annotate(label, (x, 1), **place)
    axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
    if panel.log_x:
        axis.set_xscale("log", base=2)
        decimal = lambda x, _: short_count(float(f"{x:.3g}"))
        binary = lambda x, _: next(f"{x / n:.3g}{unit}" for n, unit in BINARY if x >= n or n == 1)
        values = sorted({x for line in panel.lines.values() for x in line[0]})
        marked = len(values) <= 8
        odd = any(x > 1 and math.log2(x) % 1 for x in values)
        axis.xaxis.set_major_formatter(decimal if marked and odd else binary)
        if marked:
            axis.set_xticks(values)
            axis.minorticks_off()
    elif "tokens" in panel.xlabel:
        axis.xaxis.set_major_formatter(lambda x, _: short_count(x))
    if panel.share:
        axis.set_ylim(-0.02, 1.02)
    elif shown:  # what is learned soon may lie above the axis, as may a few runs far beyond their training context
        low, ends = min(map(min, shown)), [found[-1] for found in shown]
        usual = 1.3 * median(map(max, shown)) if panel.log_x else 2 * median(ends)
        usual = math.inf if max(map(len, shown)) <= 8 else usual  # every point is a run's result: all are seen
        high = max(min(max(map(max, shown)), usual), max(map(min, shown)))
        margin = 0.06 * (high - low) or 0.1
        axis.set_ylim(low - margin, high + margin)


def over_seeds(curves):
    """Return (tokens [N] of the first curve, losses [curves, N] there) of curves [[tokens, loss], ...], one a seed."""
    curves = [np.array(curve, float).T for curve in curves]
    x = curves[0][0]
    return x, np.stack([np.interp(x, *curve) for curve in curves])


def val_curve(entry):
    """Return (tokens, validation losses, standard deviations) of an entry: means over its seeds, None with one seed."""
    if not entry.records:
        return [], [], None
    x, losses = over_seeds([[point[:2] for point in record["val"] if point[0]] for record in entry.records])
    return x, losses.mean(0), losses.std(0, ddof=1) if len(losses) > 1 else None


def time_curve(entry):
    """Return (seconds of training, validation losses) of an entry's first seed."""
    of = [point for point in entry.records[0]["val"] if point[0]] if entry.records else []
    return [seconds for _, _, seconds in of], [loss for _, loss, _ in of]


def ratio_curve(entry, base):
    """Return (x, y): the training loss relative to that of the Entry base at equal tokens, of means over the seeds of
    each, smoothed."""
    if not (entry.records and base and base.records):
        return [], []
    (x, y), (at, of) = (over_seeds([record["train"] for record in e.records]) for e in (entry, base))
    inside = (x <= at[-1]) & (x > 0.02 * at[-1])
    return x[inside], smooth(list(y.mean(0)[inside] / np.interp(x[inside], at, of.mean(0))))


def position_line(entry, measure="positions", first=0):
    """Return (positions, mean losses, standard errors) of an entry's first seed, from the position `first` on."""
    found = entry.records[0].get("measures", {}).get(measure) if entry.records else None
    if not found:
        return [], []
    begin = int(np.searchsorted(found["positions"], first))
    return tuple(found[name][begin:] for name in ("positions", "mean", "errors"))
