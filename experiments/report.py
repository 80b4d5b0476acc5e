"""Tables in Markdown and a figure, both from the records of an experiment.

Entry("softmax", records)                       # a row: one record for each seed
table("Loss", [("val loss", loss_cell)], entries)       # Markdown
plot([Panel("million tokens", "loss, nats", {"softmax": (x, y)}, "Points are validation losses.")], "loss.png")
"""

from dataclasses import dataclass
from functools import partial
from itertools import cycle, pairwise
from statistics import fmean, stdev

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from sympow.compare import format_count, markdown
from sympow.runs.plots import COLOURS, STYLE, mean_and_standard_error

# 97.5% quantiles of Student's t distribution for 1, 2, 3, ... degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
FIRST_POSITION = 64  # of a curve: before it a text's language is unknown, and losses differ several times more


@dataclass(frozen=True)
class Entry:
    """A row of a table: its name, and a record for each seed that is finished."""

    name: str
    records: list

    @property
    def record(self):
        """Return the record of the first seed."""
        return self.records[0]

    def mean(self, measure):
        """Return the mean of measure(record) over the seeds."""
        return fmean(map(measure, self.records))


@dataclass
class Panel:
    """One panel of a figure. The title is a sentence that says what points and lines are.

    lines: {name: (x, y)}. context: x of a dashed line, the training context.
    """

    xlabel: str
    ylabel: str
    lines: dict
    title: str = ""
    log_x: bool = False
    log_y: bool = False
    context: int | None = None


def entries_of(records):
    """Return {name: the Entry of the records with this name}."""
    entries = {}
    for record in records:
        entries.setdefault(record["name"], Entry(record["name"], [])).records.append(record)
    return entries


# ---- tables: a column is (header, function of an Entry that returns a text, a whole number or None)


def val_loss(record):
    """Return the last validation loss of a record."""
    return record["val"][-1][1]


def loss_cell(entry, measure=val_loss):
    """Return the mean of measure(record) over the seeds, with its standard deviation if there are several."""
    mean = f"{entry.mean(measure):.4f}"
    if len(entry.records) == 1:
        return mean
    return f"{mean} ± {stdev(map(measure, entry.records)):.4f} ({len(entry.records)} seeds)"


def megabytes(sizes):
    """Return sizes in bytes as a cell of megabytes."""
    return " / ".join(f"{size / 1e6:,.1f}" for size in sizes)


def seeds_difference_cell(entry, base):
    """Return the mean difference of validation losses to the Entry base ± half of its 95% confidence interval.

    Both are over the seeds that the two have in common, seed by seed: models of one seed read the same batches, and
    their losses rise and fall together. One seed has no interval. None without a base, or a common seed.
    """
    if base in (None, entry):
        return None
    losses, base_losses = (
        {record["settings"]["seed"]: val_loss(record) for record in row.records} for row in (entry, base)
    )
    differences = [losses[seed] - base_losses[seed] for seed in losses if seed in base_losses]
    if len(differences) < 2:
        return f"{differences[0]:+.4f}" if differences else None
    error = stdev(differences) / len(differences) ** 0.5
    return f"{fmean(differences):+.4f} ± {STUDENT[len(differences) - 2] * error:.4f} ({len(differences)} seeds)"


def difference_cell(entry, base, measure, interval=False):
    """Return the mean difference to the Entry base, taken text by text, ± its standard error; None without a base.

    A text's loss is the mean over the seeds. interval: give half of the 95% confidence interval in place of the error.
    """
    if base in (None, entry):
        return None
    texts = [np.mean([record["measures"][measure]["texts"] for record in e.records], axis=0) for e in (entry, base)]
    factor = STUDENT[len(texts[0]) - 2] if interval else 1.0
    return mean_cell(texts[0] - texts[1], sign="+", factor=factor)


def text_by_text_cell(entry, base):
    """Return the mean difference to the Entry base over texts in pieces ± half of its 95% confidence interval."""
    return difference_cell(entry, base, measure="positions", interval=True)


def mean_cell(values, sign="", factor=1.0):
    """Return the mean of values ± its standard error times a factor; sign "+" shows the sign of a positive mean."""
    mean, error = mean_and_standard_error(values[:, None])
    return f"{mean[0]:{sign}.4f} ± {factor * error[0]:.4f}"


def span_cell(entry, measure, index):
    """Return the mean loss of a span of positions ± its standard error over texts; None if it was not measured.

    Both are means over the seeds.
    """
    if measure not in entry.record["measures"]:
        return None
    mean, error = (
        entry.mean(lambda record: record["measures"][measure]["spans"][name][index]) for name in ("mean", "errors")
    )
    return f"{mean:.4f} ± {error:.4f}"


def span_columns(measure, bounds):
    """Return the columns of span_cell for a measure that has these bounds."""
    names = [f"{first:,} to {last:,}" for first, last in pairwise(bounds)]
    return [(name, partial(span_cell, measure=measure, index=i)) for i, name in enumerate(names)]


def texts_loss(record, measure="positions"):
    """Return the mean loss of the texts that are read in windows ("positions") or at once ("far")."""
    return fmean(record["measures"][measure]["texts"])


def seconds_cell(entry):
    """Return the mean time of the training steps alone, over the seeds."""
    return f"{entry.mean(lambda record: record['seconds']):.0f}"


def at_once_cell(entry):
    """Return the loss of texts that are read at once, or None for softmax, which is not read so."""
    return loss_cell(entry, partial(texts_loss, measure="far")) if "far" in entry.record["measures"] else None


def losses_by_rate(entry):
    """Return {rate: validation losses of the seeds} of the records of one variant, the lowest rate first."""
    losses = {}
    for record in entry.records:
        losses.setdefault(record["settings"]["learning_rate"], []).append(val_loss(record))
    return dict(sorted(losses.items()))


def rate_cell(entry, rate):
    """Return the mean validation loss of the seeds at one rate, or None without a run."""
    losses = losses_by_rate(entry).get(rate)
    return f"{fmean(losses):.4f}" if losses else None


def merge_rates(tried):
    """Return {variant: the Entry with the records of all its rates} of Entries that are named VARIANT, lr RATE."""
    variants = {}
    for entry in tried:
        name, _ = entry.name.split(", lr ")
        variants.setdefault(name, Entry(name, [])).records.extend(entry.records)
    return variants


def tokens_cell(entry):
    """Return the tokens of training, with the number of epochs if they are more than one."""
    record = entry.record
    epochs = record["tokens"] / record["corpus"]["tokens"]["train"]
    return format_count(record["tokens"]) + (f" ({epochs:.1f} epochs)" if epochs > 1.05 else "")


LOSS_COLUMNS = [("tokens", tokens_cell), ("val loss", loss_cell)]


def table(title, columns, entries):
    """Return a table in Markdown under a title that names the corpus.

    columns: [(header, function of an Entry)]. Raises ValueError if the records are on different corpora, because their
    losses cannot be compared.
    """
    corpora = [record["corpus"] for entry in entries for record in entry.records]
    names = sorted({f"{corpus['name']} {corpus['sha256']}" for corpus in corpora})
    if len(names) > 1:
        raise ValueError(f"runs on different corpora are not put into one table: {', '.join(names)}")
    rows = []
    for entry in entries:
        values = [cell(entry) for _, cell in columns]
        rows.append([entry.name, *(f"{x:,}" if isinstance(x, int) else str(x or "-") for x in values)])
    return f"**{title}** ({', '.join(names)})\n\n" + markdown(["run", *(header for header, _ in columns)], rows)


def rates_table(variants, title="Validation loss by learning rate"):
    """Return the table of the losses by rate of what `merge_rates` returns."""
    rates = sorted({rate for entry in variants.values() for rate in losses_by_rate(entry)})
    columns = [(f"{rate:g}", partial(rate_cell, rate=rate)) for rate in rates]
    return table(title, columns, variants.values())


# ---- curves: lines of a Panel


def position_curve(entry, measure="positions"):
    """Return (positions from FIRST_POSITION on, the mean losses there over the seeds)."""
    curves = [record["measures"][measure] for record in entry.records]
    positions, means = (np.mean([curve[name] for curve in curves], axis=0) for name in ("positions", "mean"))
    shown = positions >= min(FIRST_POSITION, positions[-1] / 4)
    return positions[shown], means[shown]


def differences_by_position(curves, base, start=0):
    """Return {name: (positions from `start` on, mean losses minus the losses of base)}; {} if base is None.

    base and the values of curves are what position_curve returns, all at the same positions.
    """
    if base is None:
        return {}
    differences = {name: (positions, losses - base[1]) for name, (positions, losses) in curves.items()}
    return {name: (x[x >= start], y[x >= start]) for name, (x, y) in differences.items()}


# ---- the figure


def plot(panels, png):
    """Draw panels in rows of two with one legend; a name has the same colour in all of them."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = dict(zip(names, cycle(COLOURS)))
    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    handles = {}
    with matplotlib.rc_context(STYLE):
        figure = Figure((6.5 * columns, 4 * rows + 0.12 * len(names)), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for axis in axes[len(panels) :]:
            axis.remove()
        for axis, panel in zip(axes, panels):
            draw_panel(axis, panel, colours)
            handles = dict(zip(panel.lines, axis.lines)) | handles
        figure.legend(handles=handles.values(), loc="outside lower center", ncols=2 * columns)
        figure.savefig(png, dpi=130)


def draw_panel(axis, panel, colours):
    """Draw one panel; points are marked where there are few."""
    for name, (x, y) in panel.lines.items():
        axis.plot(x, y, color=colours[name], label=name, marker="o" if len(x) <= 25 else None, markersize=4)
    if panel.context:
        axis.axvline(panel.context, color="#777777", linestyle="--", linewidth=1)
    axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
    if panel.log_x:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:,.7g}")
    if panel.log_y:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
