"""Tables in Markdown and a figure, both from the records of an experiment.

Entry("softmax", records)                               # a row: one record for each seed
table("Loss", [("val loss", loss_cell)], entries)       # Markdown
plot({"softmax": (52.8, 1.66)}, "MB", "loss.png")

A cell is a function of an Entry that returns a text or a number, and None or [] for what was not measured.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean, stdev

from sympow.compare import format_count, markdown
from sympow.runs.plots import COLOURS, make_figure, save_figure
from sympow.runs.program import refuse

# 97.5% quantiles of Student's t distribution for 1, 2, 3, ... degrees of freedom; the last stands for more, too
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Entry:
    """A row of a table: its name, and a record for each seed that is finished."""

    name: str
    records: list

    @property
    def record(self):
        """Return the record of the first seed."""
        return self.records[0]

    @property
    def loss(self):
        """Return the mean of the last validation losses over the seeds."""
        return fmean(map(val_loss, self.records))

    def measured(self, name):
        """Return the results of a measure of measure.py, one for each seed that has it."""
        return [result for record in self.records if (result := measured(record, name)) is not None]


def measured(record, name):
    """Return the results of a measure of measure.py in a record, or None."""
    return record.get("measures", {}).get(name)


def entries_of(records):
    """Return {name: the Entry of the records with this name}."""
    entries = {}
    for record in records:
        entries.setdefault(record["name"], Entry(record["name"], [])).records.append(record)
    return entries


def val_loss(record):
    """Return the last validation loss of a record."""
    return record["val"][-1][1]


def spread(values):
    """Return the mean of one value a seed, with its standard deviation if there are several; None of no value."""
    if len(values) < 2:
        return f"{values[0]:.4f}" if values else None
    return f"{fmean(values):.4f} ± {stdev(values):.4f} ({len(values)} seeds)"


def loss_cell(entry):
    """Return the validation loss over the seeds."""
    return spread([*map(val_loss, entry.records)])


def texts_cell(entry, measure):
    """Return the mean loss of the texts that are read in windows ("positions") or at once ("far"), over the seeds."""
    return spread([fmean(result["texts"]) for result in entry.measured(measure)])


def span_columns(bounds):
    """Return the columns of the mean losses of texts between positions that are neighbours in bounds."""

    def cell(entry, index):
        return spread([result["spans"][index] for result in entry.measured("positions")])

    return [(f"{first:,} to {last:,}", partial(cell, index=i)) for i, (first, last) in enumerate(pairwise(bounds))]


def mean_difference(differences, groups=None):
    """Return the mean of differences ± half of its 95% confidence interval; one has no interval, and none no mean.

    groups: the group of each difference, None for one alone. Differences of a group rise and fall together, so a
    group counts as one observation (Liang and Zeger, 1986).
    """
    if not differences:
        return None
    mean, sums = fmean(differences), Counter()
    for group, difference in zip(groups or range(len(differences)), differences):
        sums[group] += difference - mean
    n = len(sums)
    if n < 2:
        return f"{mean:+.4f}"
    error = STUDENT[: n - 1][-1] * stdev(sums.values()) * n**0.5 / len(differences)
    return f"{mean:+.4f} ± {error:.4f}"


def mean_of_texts(differences, entry):
    """Return `mean_difference` over the texts of an Entry, of each one's mean over the seeds.

    differences: for each seed a list with a difference of each text. Texts of one project rise and fall together.
    """
    positions = entry.measured("positions")
    return mean_difference([*map(fmean, zip(*differences))], positions and positions[0]["projects"])


def pairs_of_seeds(entry, base):
    """Return [(record, base's record)] of the seeds that both Entries have, [] for base itself or if base is None.

    Models of one seed read the same batches, and rise and fall together.
    """
    if base in (None, entry):
        return []
    return [
        (record, base_record)
        for record in entry.records
        for base_record in base.records
        if record["settings"]["seed"] == base_record["settings"]["seed"]
    ]


def seeds_column(label, base):
    """Return the column of the differences to the Entry base over the seeds."""

    def cell(entry):
        pairs = pairs_of_seeds(entry, base)
        differences = [val_loss(record) - val_loss(base_record) for record, base_record in pairs]
        mean, count = mean_difference(differences), len(differences)
        return f"{mean} ({count} seeds)" if count > 1 else mean

    return label, cell


def texts_column(label, base):
    """Return the column of the differences to the Entry base over the texts in windows."""

    def cell(entry):
        differences = []
        for pair in pairs_of_seeds(entry, base):
            results = [measured(record, "positions") for record in pair]
            if all(results):
                losses = zip(*(result["texts"] for result in results))
                differences.append([x - y for x, y in losses])
        return mean_of_texts(differences, entry)

    return label, cell


def parameters_cell(entry):
    """Return the number of parameters."""
    sizes = entry.measured("size")
    return sizes and f"{sizes[0]['parameters']:,}"


def format_numbers(numbers, decimals=0):
    """Return numbers as one text: "4,096 / 65,536"."""
    return " / ".join(f"{n:,.{decimals}f}" for n in numbers)


def bytes_column(lengths):
    """Return the column of the megabytes that generation keeps after texts of these lengths."""

    def cell(entry):
        sizes = entry.measured("size")
        return sizes and format_numbers([size / 1e6 for size in sizes[0]["bytes"]], decimals=1)

    return f"MB after {format_numbers(lengths)}", cell


def tokens_cell(entry):
    """Return the tokens of training and the number of epochs."""
    record = entry.record
    epochs = record["tokens"] / record["corpus"]["tokens"]["train"]
    return f"{format_count(record['tokens'])} ({epochs:.1f} epochs)"


def table(title, columns, entries):
    """Return a table in Markdown under a title that names the corpus.

    columns: [(header, cell)]. Refuses records on different corpora, because their losses cannot be compared.
    """
    corpora = {f"{r['corpus']['name']} {r['corpus']['sha256']}" for entry in entries for r in entry.records}
    names = ", ".join(sorted(corpora))
    if len(corpora) > 1:
        refuse(f"runs on different corpora are not put into one table: {names}")
    rows = [[entry.name, *(str(cell(entry) or "-") for _, cell in columns)] for entry in entries]
    return f"**{title}** ({names})\n\n" + markdown(["run", *(header for header, _ in columns)], rows)


def plot(points, xlabel, png):
    """Draw points {name: (x, validation loss)} over a logarithm of x."""
    figure, (axis,) = make_figure(1)
    for i, (name, point) in enumerate(points.items()):
        axis.plot(*point, "os^"[i // len(COLOURS) % 3] + "-", label=name)  # other marks when the colours repeat
    axis.set(xlabel=xlabel, ylabel="validation loss, nats a token", xscale="log")
    save_figure(figure, png)
