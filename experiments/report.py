"""Tables in Markdown and a figure, both from the records of an experiment.

Entry("softmax", settings, records)                       # a row: one record for each seed
table("Loss", [("val loss", loss_cell())], entries)       # Markdown
plot([Panel("million tokens", "loss", {"softmax": (x, y)})], "loss.png")
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median, stdev

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from sympow.compare import format_count, markdown
from sympow.runs.plots import COLOURS, STYLE, mean_and_standard_error, smooth


@dataclass(frozen=True)
class Entry:
    """A row of a table: its name, the settings of train.py, and a record for each seed that is finished."""

    name: str
    settings: dict
    records: list

    def mean(self, measure):
        """Return the mean of measure(record) over the seeds."""
        return fmean(map(measure, self.records))

    def deviation(self, measure):
        """Return the standard deviation of measure(record) over the seeds, or None with one seed."""
        return stdev(map(measure, self.records)) if len(self.records) > 1 else None


@dataclass
class Panel:
    """One panel of a figure.

    lines: {name: (x, y)} or {name: (x, y, standard errors)}. context: x of a dashed line, the training context. level:
    y of a horizontal line. diamonds: {name: x or None} of a mark on a line. cut: leave out losses above twice the
    median of the lines' ends, such as the first ones.
    """

    xlabel: str
    ylabel: str
    lines: dict
    title: str = ""
    log_x: bool = False
    context: int | None = None
    level: float | None = None
    diamonds: dict = field(default_factory=dict)
    cut: bool = False


# ---- tables: a column is (header, function of an Entry that returns a text, a number or None)


def val_loss(record):
    """Return the last validation loss of a record."""
    return record["val"][-1][1]


def loss_cell(measure=val_loss):
    """Return the function of a column: the mean over seeds, with the standard deviation if there are several."""

    def cell(entry):
        deviation = entry.deviation(measure)
        seeds = "" if deviation is None else f" ± {deviation:.4f} ({len(entry.records)} seeds)"
        return f"{entry.mean(measure):.4f}{seeds}"

    return cell


def ratio_cell(base, measure=val_loss):
    """Return the function of a column: the loss divided by the loss of the Entry base.

    The text is "none" if they differ by less than two standard deviations, pooled over the entries that have seeds.
    """

    def cell(entry):
        if base is None:
            return None
        loss, base_loss = entry.mean(measure), base.mean(measure)
        deviations = [x for x in (entry.deviation(measure), base.deviation(measure)) if x is not None]
        noise = 2 * math.sqrt(fmean(x * x for x in deviations)) if deviations else 0
        return "none" if 0 < abs(loss - base_loss) < noise else f"{loss / base_loss:.4f}"

    return cell


def texts_cell(measure):
    """Return the function of a column: the mean loss over texts ± its standard error, of the first seed."""
    return lambda entry: mean_of_texts(entry.records[0]["measures"][measure]["texts"], "")


def difference_cell(measure, base):
    """Return the function of a column: texts_cell of the difference to the Entry base, taken text by text."""

    def cell(entry):
        if base in (None, entry):
            return None
        losses, base_losses = (np.array(e.records[0]["measures"][measure]["texts"]) for e in (entry, base))
        return mean_of_texts(losses - base_losses, "+")

    return cell


def mean_of_texts(losses, sign):
    """Return the text of a cell: the mean of losses ± its standard error; sign: "+" for a sign before the mean."""
    mean, error = mean_and_standard_error(np.reshape(losses, (-1, 1)))
    return f"{mean.item():{sign}.4f} ± {error.item():.4f}"


def span_cell(measure, first):
    """Return the function of a column: the mean loss of the positions from `first` to the next bound of the measure,
    with its standard error over texts."""

    def cell(entry):
        if measure not in entry.records[0]["measures"]:
            return None
        spans = entry.records[0]["measures"][measure]["spans"]
        i = spans["bounds"].index(first)
        return f"{spans['mean'][i]:.4f} ± {spans['errors'][i]:.4f}"

    return cell


def tokens_cell(entry):
    """Return the tokens of training, with the number of epochs if they are more than one."""
    record = entry.records[0]
    epochs = record["tokens"] / record["corpus"]["tokens"]["train"]
    return format_count(record["tokens"]) + (f" ({epochs:.1f} epochs)" if epochs > 1.05 else "")


def table(title, columns, entries):
    """Return a table in Markdown, with the corpus and its number of files in every row.

    Raises ValueError if the records are on different corpora, because their losses cannot be compared.
    """
    corpora = {record["corpus"]["sha256"] for entry in entries for record in entry.records}
    if len(corpora) > 1:
        raise ValueError(f"runs on different corpora are not put into one table: {', '.join(sorted(corpora))}")
    rows = []
    for entry in entries:
        corpus = entry.records[0]["corpus"]
        values = [*(cell(entry) for _, cell in columns), f"{corpus['name']} {corpus['sha256']}", corpus["files"]]
        rows.append([entry.name, *map(show, values)])
    return f"**{title}**\n\n" + markdown(["run", *(header for header, _ in columns), "corpus (sha256)", "files"], rows)


def show(value):
    """Return the text of a cell."""
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


# ---- curves: lines of a Panel


def over_seeds(curves):
    """Return (tokens [N] of the first curve, losses [curves, N] there) for curves [[tokens, loss], ...], one a seed."""
    curves = [np.array(curve).T for curve in curves]
    return curves[0][0], np.array([np.interp(curves[0][0], *curve) for curve in curves])


def val_curve(entry):
    """Return (million tokens, validation losses, standard deviations over the seeds: 0 with one seed)."""
    x, losses = over_seeds([[point[:2] for point in record["val"] if point[0]] for record in entry.records])
    return x / 1e6, losses.mean(0), losses.std(0, ddof=len(losses) > 1)


def ratio_curve(entry, base):
    """Return (million tokens, training loss divided by that of the Entry base), of means over the seeds, smoothed."""
    (x, losses), (base_x, base_losses) = (over_seeds([record["train"] for record in e.records]) for e in (entry, base))
    inside = (x <= base_x[-1]) & (x > 0.02 * base_x[-1])
    ratios = losses.mean(0) / np.interp(x, base_x, base_losses.mean(0))
    return x[inside] / 1e6, smooth(list(ratios[inside]))


def position_curve(entry, measure="positions", first=0):
    """Return (positions, mean losses, standard errors) of the first seed, from the position `first` on."""
    curve = entry.records[0]["measures"][measure]
    start = np.searchsorted(curve["positions"], first)
    return tuple(np.array(curve[name][start:]) for name in ("positions", "mean", "errors"))


def step_times(stages, speeds, counts):
    """Return the seconds in which so many tokens are trained on, for each of `counts`.

    stages: [[context, tokens at its beginning]]; speeds: {context as a text: tokens a second}.
    """
    tokens, seconds = [0], [0.0]
    for (context, _), (_, end) in pairwise([*stages, (None, counts[-1])]):
        seconds.append(seconds[-1] + (end - tokens[-1]) / speeds[str(context)])
        tokens.append(end)
    return np.interp(counts, tokens, seconds).tolist()


# ---- the figure


def plot(panels, png):
    """Draw panels in rows of two with one legend; a name has the same colour in all of them."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    columns, rows, handles = min(2, len(panels)), -(-len(panels) // 2), {}
    with matplotlib.rc_context(STYLE):
        figure = Figure((6.5 * columns, 4 * rows + 0.12 * len(names)), layout="constrained")
        for axis, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels):
            draw_panel(axis, panel, colours)
            lines, labels = axis.get_legend_handles_labels()
            handles = dict(zip(labels, lines)) | handles
        figure.legend(handles=handles.values(), loc="outside lower center", ncols=2 * columns)
        figure.savefig(png, dpi=130)


def draw_panel(axis, panel, colours):
    """Draw one panel; points are marked where there are few."""
    for name, (x, y, *errors) in panel.lines.items():
        axis.plot(x, y, color=colours[name], label=name, marker="o" if len(x) <= 25 else None, markersize=4)
        if errors:
            axis.fill_between(x, y - errors[0], y + errors[0], color=colours[name], alpha=0.15, linewidth=0)
        if diamond := panel.diamonds.get(name):
            look = dict(marker="D", markersize=7, markeredgecolor="white", zorder=3)
            axis.plot(diamond, np.interp(diamond, x, y), color=colours[name], **look)
    if panel.level is not None:
        axis.axhline(panel.level, color="#777777", linewidth=1)
    if panel.context:
        axis.axvline(panel.context, color="#777777", linestyle="--", linewidth=1)
    axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
    if panel.log_x:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:,.7g}")
    if panel.cut:
        ends = [y[-1] for _, y, *_ in panel.lines.values()]
        low = min(min(y) for _, y, *_ in panel.lines.values())
        high = min(max(2 * median(ends), *ends), axis.get_ylim()[1])
        axis.set_ylim(low - 0.05 * (high - low), high)
