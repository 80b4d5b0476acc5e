"""Plot loss curves, and the loss against the position in the document.

    plot_loss_curves({"softmax": (train, val), ...}, "loss.png")                 # lines of metrics.jsonl
    plot_loss_by_position({"softmax": (positions, losses, 4096), ...}, "loss_by_position.png")

matplotlib is imported when a picture is plotted, so that programs run without it until then. `choose_picture`
refuses a picture that cannot be written before any work is done.
"""

import logging
import math
import os
import warnings
from itertools import pairwise

import numpy as np

from sympow.data.files import whole_file
from sympow.runs.program import check_output, refuse

STYLE = {  # settings of matplotlib
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.titlesize": 9,
    "axes.titlecolor": "#555555",
    "axes.titlelocation": "left",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "text.parse_math": False,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
}
# Okabe and Ito's palette, which colour-blind readers can tell apart, strongest first.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D"]
DASHES = ["-", "--", ":", "-."]  # from the eighth run on the colours repeat with the next kind of line
CIRCLES = {"marker": "o", "markersize": 4.5, "markerfacecolor": "white", "linewidth": 1}  # validation losses
NAME_LENGTH = 36  # letters of a name in a picture
PANELS = {1: [[0]], 2: [[0, 1]], 3: [[0, 0], [1, 2]], 4: [[0, 1], [2, 3]]}  # where they stand
TIME_UNITS = [("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1)]


# ---- loss curves


def plot_loss_curves(runs, png, comparable):
    """Plot the losses of runs against steps, tokens and training time, and of comparable ones relative to the first.

    runs, comparable: {name: (train, val)}, the lines of metrics.jsonl with a training or a validation loss, ordered by
    step. An axis on which the curves look as on another one has no panel of its own. png: a file from `choose_picture`.
    """
    from matplotlib import style
    from matplotlib.lines import Line2D

    axes_shown, relative, looks = loss_axes(runs), relative_losses(comparable), _looks(runs)
    train_curves = [loss_curve(train, "step", "train_loss") for train, _ in runs.values()]
    val_curves = [loss_curve(val, "step", "val_loss") for _, val in runs.values()]
    limits = loss_limits([(steps, smooth(losses)) for steps, losses in train_curves] + val_curves)
    handles = _run_handles(looks)
    if any(losses for _, losses in val_curves):
        colour = COLOURS[0] if len(runs) == 1 else "#777777"
        handles.append(Line2D([], [], linestyle="none", color=colour, label="validation", **CIRCLES))
    panels = PANELS[len(axes_shown) + bool(relative)]
    with style.context(["default", STYLE]):
        figure, axes = _make_figure(panels, handles, height=4 * len(panels))
        for i, (key, label, unit) in enumerate(axes_shown):
            _plot_losses(axes[i], runs, looks, key, unit)
            axes[i].set(xlabel=label, ylabel="loss, nats per token", ylim=limits)
            _set_linear_ticks(axes[i], key, longest(runs, key) / unit)
        axes[0].set_title("Thick lines are training losses, smoothed. Circles are validation losses.")
        if relative:
            axis = axes[len(axes_shown)]
            _plot_relative_losses(axis, relative, looks)
            first = shorten(next(iter(runs)), 24)
            title = f"Below 0 the loss is lower than {first}'s after as many tokens."
            axis.set(xlabel="tokens", ylabel=f"loss relative to {first}, %", title=title)
            _set_linear_ticks(axis, "tokens", longest(runs, "tokens"))
        save_figure(figure, png)


def loss_axes(runs):
    """Return [(key, label, unit)] of the horizontal axes: step, tokens and seconds, as far as the lines have them.

    An axis that is proportional to an earlier one, with one factor for all runs to 2% of its length, is left out.
    """
    lines = [line for train, val in runs.values() for line in train + val]
    ends = {key: longest(runs, key) for key in ("step", "tokens", "seconds")}
    unit, seconds = next((unit, n) for unit, n in TIME_UNITS if n == 1 or ends["seconds"] > 2 * n)
    axes = [("step", "step", 1)]
    for axis in (("tokens", "tokens", 1), ("seconds", f"training time, {unit}", seconds)):
        key = axis[0]
        if not any(_is_proportional(lines, key, shown, ends[key] / max(ends[shown], 1)) for shown, _, _ in axes):
            axes.append(axis)
    return axes


def _is_proportional(lines, key, shown, ratio):
    """Return True if line[key] is ratio * line[shown] in all lines with this key, to 2% of the largest value."""
    pairs = [(line.get(shown, math.inf), line[key]) for line in lines if key in line]
    largest = max((value for _, value in pairs), default=0)
    return all(abs(value - ratio * shown_value) <= 0.02 * largest for shown_value, value in pairs)


def longest(runs, key):
    """Return the largest step, or number of tokens or seconds, of all runs; 0 if no line has this key."""
    return max((line[key] for train, val in runs.values() for line in train + val if key in line), default=0)


def _plot_losses(axis, runs, looks, key, unit):
    """Plot the training losses of each run, smoothed over a pale copy, and its validation losses as circles."""
    for name, (train, val) in runs.items():
        x, losses = loss_curve(train, key, "train_loss", unit)
        axis.plot(x, losses, color=looks[name]["color"], alpha=0.22, linewidth=0.8)
        _plot_curve(axis, x, smooth(losses), looks[name])
        _plot_circles(axis, *loss_curve(val, key, "val_loss", unit), looks[name], alone=not train)


def _plot_curve(axis, x, y, look):
    """Plot a line, or a dot if there is a single point."""
    axis.plot(x, y, **look, marker="o" if len(x) == 1 else None, markersize=4.5)


def _plot_circles(axis, x, y, look, alone):
    """Plot validation losses as circles. Beside a training curve they need no line, which would cut corners."""
    line = look if alone else look | {"linestyle": "none"}
    axis.plot(x, y, **line | CIRCLES, markevery=max(1, len(x) // 25))


def _plot_relative_losses(axis, relative, looks):
    """Plot the result of relative_losses, the training losses as lines and the validation losses as circles."""
    late = []
    for name, (train, val) in relative.items():
        _plot_curve(axis, *train, looks[name])
        _plot_circles(axis, *val, looks[name], alone=not train[0])
        for tokens, percents in (train, val):
            # The first steps, and a run that has diverged, would squash all other curves.
            late += [y for x, y in zip(tokens, percents) if x > 0.05 * tokens[-1] and y < 100]
    if late:
        axis.set_ylim(add_margins(min(late), max(late), least=1))


def loss_curve(lines, key, loss, unit=1):
    """Return (x, losses), the finite losses against steps, tokens or seconds, of the lines that have this key."""
    lines = [line for line in lines if key in line and abs(line[loss]) < 1e30]  # matplotlib fails far above that
    return [line[key] / unit for line in lines], [line[loss] for line in lines]


def smooth(values):
    """Return a running mean over 4% of the points around each, from 3 to 2,001, which removes batch noise.

    At the first points it is over as many points behind each as before it, so that it begins where the values do. Fewer
    than 10 values are returned as they are.
    """
    half = min(max(len(values) // 50, len(values) >= 10), 1000)
    if not half:
        return list(values)
    window = np.ones(2 * half + 1)
    means = np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
    return [*(np.mean(values[: 2 * i + 1]) for i in range(half)), *means[half:]]


def relative_losses(runs):
    """Return {name: [(tokens, percents) of the training losses, (tokens, percents) of the validation losses]}.

    The percents say how far a run's loss is above the first run's after as many tokens. Returns {} if there is nothing
    to compare.
    """
    relative = {name: [] for name in runs}
    for i, loss in enumerate(("train_loss", "val_loss")):
        curves = {name: loss_curve(lines[i], "tokens", loss) for name, lines in runs.items()}
        base_tokens, base_losses = next(iter(curves.values()))
        for name, curve in curves.items():
            tokens, losses = map(np.array, curve)
            base = np.interp(tokens, base_tokens, base_losses, left=0, right=0) if base_tokens else 0 * tokens
            tokens, losses, base = (values[base > 0] for values in (tokens, losses, base))
            percents = (100 * (losses / base - 1)).tolist()
            if loss == "train_loss":  # smoothed last, so that the noise of batches that both runs have seen cancels
                percents = smooth(percents)
            relative[name].append((tokens.tolist(), percents))
    relative = {name: curves for name, curves in relative.items() if any(tokens for tokens, _ in curves)}
    return relative if len(relative) > 1 else {}


def loss_limits(curves):
    """Return (low, high) of the loss axis for [(steps, losses)], of finite losses.

    Losses of the first 5% of the longest run, which would squash all others, may lie above the axis. So may losses
    above every run's first, of a run that has diverged. Every run's lowest loss is within it.
    """
    curves = [np.array(curve, dtype=float) for curve in curves]
    curves = [curve for curve in curves if curve.size]
    if not curves:
        return 0.0, 1.0
    start = 0.05 * max(steps.max() for steps, _ in curves)
    lowest = [losses.min() for _, losses in curves]
    latest = np.concatenate([losses[steps > start] for steps, losses in curves])
    highest_first = max(losses[0] for _, losses in curves)
    return add_margins(min(lowest), max([*lowest, min(latest.max(initial=-math.inf), highest_first)]))


def add_margins(low, high, least=0.1):
    """Return (low, high) of an axis on which 5% are left free at both ends, or `least` if they are equal."""
    margin = 0.05 * (high - low) or least
    return low - margin, high + margin


# ---- loss by position


def plot_loss_by_position(curves, png):
    """Plot the mean loss at each position of a document with its standard error, and mark the training contexts.

    curves: {name: (positions [n], losses [documents, n], training context in tokens)}, as `means_by_position` makes
    them for each document. png: a file from `choose_picture`.
    """
    from matplotlib import style

    looks = _looks(curves)
    end = max(positions[-1] for positions, _, _ in curves.values())
    with style.context(["default", STYLE]):
        figure, axes = _make_figure([[0]], _run_handles(looks), height=4.2)
        axis, late = axes[0], []
        for name, (positions, losses, _) in curves.items():
            mean, error = mean_and_standard_error(losses)
            axis.fill_between(positions, mean - error, mean + error, color=looks[name]["color"], alpha=0.2, linewidth=0)
            _plot_curve(axis, positions, mean, looks[name])
            # The first quarter of the logarithmic axis has losses several times higher, and may lie above the picture.
            is_late = np.asarray(positions) >= positions[-1] ** 0.25
            late += [*(mean - error)[is_late], *(mean + error)[is_late], mean.min()]
        late = [loss for loss in late if math.isfinite(loss)]
        if late:
            axis.set_ylim(add_margins(min(late), max(late)))
        counts = " or ".join(f"{n:,}" for n in sorted({len(losses) for _, losses, _ in curves.values()}))
        contexts = sorted({context for _, _, context in curves.values() if context <= 1.05 * end})
        title = f"Lines are means over {counts} documents, bands are standard errors."
        if contexts:
            title += f"\nThe dashed line is the training context, {' or '.join(f'{n:,}' for n in contexts)} tokens."
        axis.set(xlabel="position in the document, tokens", ylabel="loss, nats per token", title=title)
        _set_log_ticks(axis, end)
        for context in contexts:
            axis.axvline(context, color="#777777", linestyle=(0, (4, 3)), linewidth=1)
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


# ---- what both pictures share


def choose_picture(png):
    """Return the path of the picture to be written: png, with .png at its end if it has no suffix; "" for "", none.

    Refuses a suffix that matplotlib does not know, a file that cannot be written, and a picture without matplotlib.
    """
    if not png:
        return png
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no remarks about fonts and caches
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        refuse(f"png={png} needs matplotlib ({error}): pip install matplotlib")
    root, suffix = os.path.splitext(png)
    if suffix in ("", "."):
        png = f"{root}.png"
    formats = sorted(FigureCanvasBase.get_supported_filetypes().keys() - {"pgf"})  # pgf needs LaTeX
    if picture_format(png) not in formats:
        refuse(f"png={png} must end in {', '.join(formats)}, or in nothing for png")
    try:
        check_output(png)
    except OSError as error:
        refuse(f"png={png} cannot be written: {error}")
    return png


def picture_format(png):
    """Return the format that the suffix of a file names, such as png or pdf."""
    return os.path.splitext(png)[1][1:].lower()


def shorten(name, length=NAME_LENGTH):
    """Return a name in one line of at most `length` letters, the middle of a longer one left out."""
    name = " ".join(name.encode(errors="replace").decode().split())  # a folder's name need not be UTF-8
    keep = length - 1
    return name if len(name) <= length else f"{name[: keep - keep // 2]}…{name[len(name) - keep // 2 :]}"


def short_count(n):
    """Format a number as 500 or 2k or 1.5M."""
    size, unit = next(
        ((size, unit) for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if n >= size), (1, "")
    )
    return f"{n / size:g}{unit}"


def _looks(names):
    """Return {name: settings of its lines}, different for the first 28 names."""
    return {
        name: dict(color=COLOURS[i % len(COLOURS)], linestyle=DASHES[i // len(COLOURS) % len(DASHES)], linewidth=1.7)
        for i, name in enumerate(names)
    }


def _run_handles(looks):
    """Return a line for each run in the legend, with its name, shortened. Equal short names get a number."""
    from matplotlib.lines import Line2D

    short = [shorten(name) for name in looks]
    labels = [f"{name} ({i})" if short.count(name) > 1 else name for i, name in enumerate(short, 1)]
    # matplotlib leaves out labels that begin with an underscore; a space of no width before it prevents that
    labels = [f"\u200b{label}" if label.startswith("_") else label for label in labels]
    return [Line2D([], [], label=label, **look) for label, look in zip(labels, looks.values())]


def _make_figure(panels, handles, height):
    """Return a figure with the panels of subplot_mosaic, this many inches high, and a legend below; and its axes."""
    from matplotlib.figure import Figure

    width = 11 if len(panels[0]) > 1 else 7.5
    column_width = 0.7 + 0.083 * max(len(handle.get_label()) for handle in handles)
    columns = min(len(handles), max(1, int(width / column_width)))
    rows = math.ceil(len(handles) / columns)
    figure = Figure((width, height + 0.24 * rows), layout="constrained")
    figure.legend(handles=handles, loc="outside lower center", ncols=math.ceil(len(handles) / rows))
    return figure, figure.subplot_mosaic(panels)


def _set_linear_ticks(axis, key, end):
    """Set ticks at 1, 2 or 5 times a power of ten on both axes; the horizontal one has the unit of `key`, to `end`."""
    end = end or 1
    axis.set_xlim(-0.015 * end, 1.03 * end)  # room for circles at both ends
    axis.locator_params("x", nbins=6, steps=[1, 2, 5, 10], integer=key == "step")
    axis.locator_params("y", nbins=7, steps=[1, 2, 5, 10])
    if key != "seconds":
        axis.xaxis.set_major_formatter(lambda x, _: short_count(x) if key == "tokens" else f"{x:,.0f}")


def _set_log_ticks(axis, end):
    """Make the horizontal axis logarithmic from 1 to `end`, with ticks at 1, 2, 5, 10, ...; a long one at 1, 10, ..."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_xscale("log")
    axis.set_xlim(0.95, 1.05 * end)
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if end < 16_000 else (1,)))
    axis.xaxis.set_major_formatter(lambda x, _: short_count(x))
    axis.xaxis.set_minor_locator(NullLocator())


def save_figure(figure, png):
    """Write a figure to a file, whole or not at all. Makes the file's folder if need be."""
    with whole_file(png) as temporary, warnings.catch_warnings(action="ignore"):  # of letters that the font has not
        figure.savefig(temporary, dpi=150, format=picture_format(png))
