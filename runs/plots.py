"""Plot loss curves, and the loss against the position in the document.

    plot_loss_curves({"softmax": (train, val), ...}, "loss.png")                 # lines of metrics.jsonl
    plot_loss_by_position({"softmax": (positions, losses, 4096), ...}, "loss_by_position.png")

matplotlib is imported when a picture is plotted, so that programs run without it until then. `choose_picture`
refuses a picture that cannot be written before any work is done.
"""

import math
import os
from itertools import pairwise

import numpy as np

from ..data.files import whole_file
from .program import check_output, refuse

STYLE = {  # settings of matplotlib
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "text.parse_math": False,
}
# Okabe and Ito's palette, which colour-blind readers can tell apart, strongest first.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D"]


def plot_loss_curves(runs, png):
    """Plot the losses of runs against millions of tokens and minutes or hours of training.

    runs: {name: (train, val)}, the lines of metrics.jsonl with a training or a validation loss, ordered by step. png: a
    file from `choose_picture`.
    """
    title = "Lines are training losses, smoothed. Circles are validation losses."
    figure, axes = make_figure(2)
    seconds = max((line.get("seconds", 0) for lines in runs.values() for line in sum(lines, [])), default=0)
    hours = seconds > 2 * 3600
    time = ("seconds", "hours of training", 3600) if hours else ("seconds", "minutes of training", 60)
    quantities = [("tokens", "million tokens", 1e6), time]
    for axis, (key, label, unit) in zip(axes, quantities):
        axis.set(xlabel=label, ylabel="loss, nats per token", title=title)
        ends = []
        for name, (train, val) in runs.items():
            x, losses = loss_curve(train, key, "train_loss", unit)
            (line,) = axis.plot(x, smooth(losses), label=name)
            val_curve = loss_curve(val, key, "val_loss", unit)
            axis.plot(*val_curve, "o", color=line.get_color(), markerfacecolor="white", markersize=4.5)
            ends += [losses[-1] for losses in (losses, val_curve[1]) if losses]
        leave_out_beginnings(axis, ends)
    save_figure(figure, png)


def loss_curve(lines, key, loss, unit=1):
    """Return (x, losses), the finite losses against tokens or seconds, of the lines that have this key."""
    lines = [line for line in lines if key in line and abs(line[loss]) < 1e30]  # matplotlib fails far above that
    return [line[key] / unit for line in lines], [line[loss] for line in lines]


def smooth(values):
    """Return a running mean over 4% of the points around each, which removes the noise of batches."""
    if not values:
        return values
    window = np.ones(2 * (len(values) // 50) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def plot_loss_by_position(curves, png):
    """Plot the mean loss at each position of a document with its standard error, and mark the training contexts.

    curves: {name: (positions [n], losses [documents, n], training context in tokens)}, as `means_by_position` makes
    them for each document. png: a file from `choose_picture`.
    """
    figure, (axis,) = make_figure(1)
    ends = []
    for name, (positions, losses, context) in curves.items():
        mean, error = mean_and_standard_error(losses)
        (line,) = axis.plot(positions, mean, label=name)
        axis.fill_between(positions, mean - error, mean + error, color=line.get_color(), alpha=0.2, linewidth=0)
        if 0 < context <= positions[-1]:
            axis.axvline(context, color="#777777", linestyle="--", linewidth=1)
        ends.append(mean[-1])
    title = "Lines are means over documents, bands are standard errors.\nDashed lines are training contexts."
    axis.set(xlabel="position in the document, tokens", ylabel="loss, nats per token", title=title, xscale="log")
    leave_out_beginnings(axis, ends)
    save_figure(figure, png)


def means_by_position(losses, points=80):
    """Return (positions, means) of losses [length] over at most `points` intervals.

    They grow with the position, so that they are about equally wide on a logarithmic axis.
    """
    losses = np.asarray(losses)
    edges = np.unique(np.logspace(0, math.log10(len(losses) + 1), points + 1).round().astype(int))
    stretches = list(pairwise(edges.tolist()))
    return [(a * (b - 1)) ** 0.5 for a, b in stretches], [float(losses[a - 1 : b - 1].mean()) for a, b in stretches]


def mean_and_standard_error(losses):
    """Return (mean [n], its standard error [n]) over the documents of losses [documents, n]; one has an error of 0."""
    losses = np.asarray(losses, dtype=np.float64)
    count = len(losses)
    error = losses.std(axis=0, ddof=1) / count**0.5 if count > 1 else np.zeros(losses.shape[1])
    return losses.mean(axis=0), error


def make_figure(panels):
    """Return (a figure, the axes of its panels) in this file's style."""
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"axes.prop_cycle": cycler(color=COLOURS)}):
        figure = Figure((7 * panels, 5), layout="constrained")
        return figure, figure.subplots(1, panels, squeeze=False).flatten()


def leave_out_beginnings(axis, ends):
    """End the vertical axis at twice the largest of the curves' last losses: the first ones would squash them all."""
    finite = [loss for loss in ends if math.isfinite(loss)]
    if finite:
        axis.set_ylim(top=min(2 * max(finite), axis.get_ylim()[1]))


def save_figure(figure, png):
    """Write a figure, with a legend below it, to a file, whole or not at all. Makes the file's folder if need be."""
    import matplotlib

    with matplotlib.rc_context(STYLE), whole_file(png) as temporary:
        for axis in (part for axes in figure.axes for part in (axes.xaxis, axes.yaxis)):
            if axis.get_scale() == "log":  # its own labels are markup, which STYLE does not read
                axis.set_major_formatter("{x:,.7g}")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.savefig(temporary, dpi=150, format=picture_format(png))


def choose_picture(png):
    """Return the path png of the picture to be written, "" for none.

    Refuses a suffix that matplotlib does not know, a file that cannot be written, and a picture without matplotlib.
    """
    if not png:
        return png
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        refuse(f"png={png} needs matplotlib ({error}): pip install matplotlib")
    formats = FigureCanvasBase.get_supported_filetypes()
    if picture_format(png) not in formats:
        refuse(f"png={png} must end in {', '.join(sorted(formats))}")
    try:
        check_output(png)
    except OSError as error:
        refuse(f"png={png} cannot be written: {error}")
    return png


def picture_format(png):
    """Return the format that the suffix of a file names, such as png or pdf."""
    return os.path.splitext(png)[1][1:].lower()
