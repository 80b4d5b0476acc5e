"""Plot loss curves, and the loss against the position in the document.

    plot_loss_curves({"softmax": (train, val), ...}, "loss.png")                 # lines of metrics.jsonl
    plot_loss_by_position({"softmax": (positions, losses, 4096), ...}, "loss_by_position.png")

matplotlib is imported when a picture is plotted, so that programs run without it until then. `choose_picture`
refuses a picture that cannot be written before any work is done.
"""

import math
import os
import warnings

import numpy as np

from sympow.data.files import whole_file
from sympow.runs.program import check_output
from sympow.runs.settings import refuse

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


def plot_loss_curves(runs, png):
    """Plot the losses of runs against steps, tokens and training time, and relative to the first run.

    runs: {name: (train, val)}, the lines of metrics.jsonl with a training or a validation loss, ordered by step. An
    axis on which the curves look as on another one has no panel of its own. png: a file from `choose_picture`.
    """
    plt = _pyplot()
    axes_shown, shifts, looks = loss_axes(runs), relative_losses(runs), _looks(runs)
    smoothed = [(x, smooth(y)) for x, y in (loss_curve(train, "step", "train_loss") for train, _ in runs.values())]
    limits = loss_limits(smoothed + [loss_curve(val, "step", "val_loss") for _, val in runs.values()])
    places = PANELS[len(axes_shown) + bool(shifts)]
    finite = {name: not train or loss_curve(train, "step", "train_loss")[0] for name, (train, _) in runs.items()}
    handles = _run_handles(finite, looks)
    if any(val for _, val in runs.values()):
        colour = COLOURS[0] if len(runs) == 1 else "#777777"
        handles.append(plt.Line2D([], [], linestyle="none", color=colour, label="validation", **CIRCLES))
    with plt.style.context(["default", STYLE]):
        width = 11 if len(places[0]) > 1 else 7.5
        columns, rows = _legend_shape(handles, width)
        size = (width, 4 * len(places) + 0.24 * rows)
        figure, axes = plt.subplot_mosaic(places, figsize=size, layout="constrained")
        for i, (key, label, scale) in enumerate(axes_shown):
            _plot_losses(axes[i], runs, looks, key, scale)
            axes[i].set(xlabel=label, ylabel="loss, nats per token", ylim=limits)
            _set_linear_ticks(axes[i], key, longest(runs, key) / scale)
        if shifts:
            axis = axes[len(axes_shown)]
            _plot_relative_losses(axis, shifts, looks)
            axis.set(xlabel="tokens", ylabel=f"loss relative to {shorten(next(iter(runs)), 24)}, %")
            _set_linear_ticks(axis, "tokens", max(x for curves in shifts.values() for xs, _ in curves for x in xs))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        save_figure(figure, png)


def loss_axes(runs):
    """Return [(key, label, scale)] of the horizontal axes: step, tokens and seconds, as far as the lines have them.

    An axis that is another one in other units, the same for all runs to 2% of its length, is named in the label of
    that one: "step (65,536 tokens each)".
    """
    lines = [line for train, val in runs.values() for line in train + val]
    ends = {key: longest(runs, key) for key in ("step", "tokens", "seconds")}
    unit, scale = next((unit, n) for unit, n in TIME_UNITS if n == 1 or ends["seconds"] > 2 * n)
    found = {"step": []}  # key -> what one unit of it is in the axes that it stands for
    for key in ("tokens", "seconds"):
        for other in found:
            ratio = ends[key] / max(ends[other], 1)
            pairs = [(line.get(other, math.inf), line[key]) for line in lines if key in line]
            if all(abs(y - ratio * x) <= 0.02 * ends[key] for x, y in pairs):
                if ratio:
                    found[other].append(f"{ratio:,.0f} tokens" if key == "tokens" else f"{ratio:.2g} s")
                break
        else:
            found[key] = []
    labels = {"step": "step", "tokens": "tokens", "seconds": f"training time, {unit}"}
    labels = {key: labels[key] + (f" ({' and '.join(each)} each)" if each else "") for key, each in found.items()}
    return [(key, label, scale if key == "seconds" else 1) for key, label in labels.items()]


def longest(runs, key):
    """Return the largest step, or number of tokens or seconds, of all runs; 0 if no line has this key."""
    return max((line[key] for train, val in runs.values() for line in train + val if key in line), default=0)


def _plot_losses(axis, runs, looks, key, scale):
    """Plot the training losses of each run, smoothed over a pale copy, and its validation losses as circles."""
    for name, (train, val) in runs.items():
        x, y = loss_curve(train, key, "train_loss", scale)
        axis.plot(x, y, color=looks[name]["color"], alpha=0.22, linewidth=0.8)
        axis.plot(x, smooth(y), **looks[name], marker="o" if len(x) == 1 else None, markersize=4.5)
        x, y = loss_curve(val, key, "val_loss", scale)
        _plot_circles(axis, x, y, looks[name], alone=not train)


def _plot_circles(axis, x, y, look, alone=False):
    """Plot validation losses as circles. Beside a training curve they need no line, which would cut corners."""
    look = look if alone else look | {"linestyle": "none"}
    axis.plot(x, y, **look | CIRCLES, markevery=max(1, len(x) // 25))


def _plot_relative_losses(axis, shifts, looks):
    """Plot the result of relative_losses, the training losses as lines and the validation losses as circles."""
    for name, (train, val) in shifts.items():
        axis.plot(*train, **looks[name], marker="o" if len(train[0]) == 1 else None, markersize=4.5)
        _plot_circles(axis, *val, looks[name], alone=not train[0])
    # Those of a run's first steps, and of a run that has diverged, would squash all others.
    points = [(x > 0.05 * xs[-1], y) for curves in shifts.values() for xs, ys in curves for x, y in zip(xs, ys)]
    shown = [y for late, y in points if late and y < 100]
    if shown:
        margin = 0.05 * (max(shown) - min(shown)) or 1
        axis.set_ylim(min(shown) - margin, max(shown) + margin)


def loss_curve(lines, key, loss, scale=1):
    """Return (x, y), the finite losses against steps, tokens or seconds, of the lines that have this key."""
    lines = [line for line in lines if key in line and abs(line[loss]) < 1e30]  # matplotlib fails far above that
    return [line[key] / scale for line in lines], [line[loss] for line in lines]


def smooth(values):
    """Return a running mean over 4% of the points around each, from 3 to 2,001, which removes batch noise.

    Fewer than 10 values are returned as they are.
    """
    half = min(max(len(values) // 50, len(values) >= 10), 1000)
    if not half:
        return list(values)
    window = np.ones(2 * half + 1)
    return list(np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same"))


def relative_losses(runs):
    """Return {name: ((tokens, percent) in training, the same in validation)}: how far each run's loss is above the
    first run's after as many tokens. {} if there is nothing to compare."""
    found = {}
    for which, loss in enumerate(("train_loss", "val_loss")):
        curves = {name: loss_curve(lines[which], "tokens", loss) for name, lines in runs.items()}
        base_x, base_y = next(iter(curves.values()))
        for name, (x, y) in curves.items():
            base = np.interp(x, base_x, base_y, left=0, right=0) if base_x else [0] * len(x)
            pairs = [(at, 100 * (loss / b - 1)) for at, loss, b in zip(x, y, base) if b > 0]
            percent = [y for _, y in pairs]
            # smoothed last, so that the noise of batches that both runs have seen cancels
            found.setdefault(name, []).append(([at for at, _ in pairs], percent if which else smooth(percent)))
    found = {name: curves for name, curves in found.items() if any(x for x, _ in curves)}
    return found if len(found) > 1 else {}


def loss_limits(curves):
    """Return (low, high) of the loss axis for [(steps, losses)].

    The losses of the first steps would squash all that follow, so those of the first 5% of the longest run may lie
    above the axis, and so may losses above every run's first, of a run that has diverged. Every run's lowest loss is
    within it.
    """
    curves = [[(s, y) for s, y in zip(*curve) if math.isfinite(y)] for curve in curves]
    curves = [points for points in curves if points]
    if not curves:
        return 0.0, 1.0
    start = 0.05 * max(s for points in curves for s, _ in points)
    lowest = [min(y for _, y in points) for points in curves]
    later = [y for points in curves for s, y in points if s > start]
    high = max([*lowest, min(max(later, default=-math.inf), max(points[0][1] for points in curves))])
    margin = 0.05 * (high - min(lowest)) or 0.1
    return min(lowest) - margin, high + margin


# ---- loss by position


def plot_loss_by_position(curves, png, joined=False):
    """Plot the mean loss at each position of a document with its standard error, and mark the training contexts.

    curves: {name: (positions [n], losses [documents, n], training context in tokens)}, as `means_by_position` makes
    them for each document. joined: True if the documents are rows of several texts. png: a file from `choose_picture`.
    """
    plt = _pyplot()
    looks = _looks(curves)
    with plt.style.context(["default", STYLE]):
        finite = {name: np.isfinite(np.mean(losses, axis=0)).any() for name, (_, losses, _) in curves.items()}
        handles = _run_handles(finite, looks)
        columns, rows = _legend_shape(handles, 7.5)
        figure, axis = plt.subplots(figsize=(7.5, 4.2 + 0.24 * rows), layout="constrained")
        for name, (positions, losses, _) in curves.items():
            mean, error = mean_and_standard_error(losses)
            axis.fill_between(positions, mean - error, mean + error, color=looks[name]["color"], alpha=0.2, linewidth=0)
            axis.plot(positions, mean, **looks[name], marker="o" if len(positions) == 1 else None)
        where = "row of joined texts" if joined else "document"
        title = _count_documents(curves, "row" if joined else "document")
        axis.set(xlabel=f"position in the {where}, tokens", ylabel="loss, nats per token", title=title)
        axis.set_ylim(_position_limits(curves))
        _set_log_ticks(axis, max(positions[-1] for positions, _, _ in curves.values()))
        _mark_contexts(axis, curves, looks)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        save_figure(figure, png)


def means_by_position(losses, points=80):
    """Return (positions, means) of losses [length] over at most `points` intervals.

    They grow with the position, so that they are about equally wide on a logarithmic axis.
    """
    losses = np.asarray(losses)
    edges = np.unique(np.logspace(0, math.log10(len(losses) + 1), points + 1).round().astype(int))
    stretches = list(zip(edges[:-1].tolist(), edges[1:].tolist()))
    return [(a * (b - 1)) ** 0.5 for a, b in stretches], [float(losses[a - 1 : b - 1].mean()) for a, b in stretches]


def mean_and_standard_error(losses):
    """Return (mean [n], its standard error [n]) over the documents of losses [documents, n]; one has an error of 0."""
    losses = np.asarray(losses, dtype=np.float64)
    count = len(losses)
    error = losses.std(axis=0, ddof=1) / count**0.5 if count > 1 else np.zeros(losses.shape[1])
    return losses.mean(axis=0), error


def _count_documents(curves, noun):
    """Return the title: over how many documents, or rows, the means are."""
    counts = sorted({len(losses) for _, losses, _ in curves.values()})
    if counts[-1] == 1:
        return f"1 {noun}"
    return f"mean of {' to '.join(f'{n:,}' for n in counts[:: max(1, len(counts) - 1)])} {noun}s; band: standard error"


def _position_limits(curves):
    """Return the limits of the loss axis, in which the losses of the first quarter of the logarithmic axis, which are
    several times higher, need not lie; None for no limits."""
    shown = []
    for positions, losses, _ in curves.values():
        mean, error = mean_and_standard_error(losses)
        late = np.asarray(positions) >= positions[-1] ** 0.25
        shown += [x for x in [*(mean - error)[late], *(mean + error)[late], mean.min()] if math.isfinite(x)]
    margin = 0.05 * (max(shown) - min(shown)) or 0.1 if shown else 0
    return (min(shown) - margin, max(shown) + margin) if shown else None


def _mark_contexts(axis, curves, looks):
    """Draw a line at each training context within the axis, in a run's colour if other runs have other ones."""
    end = max(positions[-1] for positions, _, _ in curves.values())
    contexts = sorted({context for _, _, context in curves.values()})
    for i, context in enumerate(c for c in contexts if c <= 1.05 * end):
        of = [name for name in curves if curves[name][2] == context]
        colour = looks[of[0]]["color"] if len(of) == 1 and len(contexts) > 1 else "#777777"
        side, shift = ("right", -4) if context > end**0.8 else ("left", 4)
        axis.axvline(context, color=colour, linestyle=(0, (4, 3)), linewidth=1)
        axis.annotate(
            f"trained at {context:,}", (context, 1), xycoords=("data", "axes fraction"), color="#333333", fontsize=9,
            bbox=dict(facecolor="white", edgecolor="none", pad=1),
            xytext=(shift, -4 - 13 * i), textcoords="offset points", va="top", ha=side,
        )  # fmt: skip


# ---- what both pictures share


def choose_picture(png):
    """Return (path of the picture to be written, ""), or (None, reason) if matplotlib is missing.

    The path is png, with .png at its end if it has no suffix. Refuses a suffix that matplotlib does not know and a file
    that cannot be written.
    """
    try:
        plt = _pyplot()
    except ImportError as error:
        return None, f"no picture, matplotlib is missing ({error}): pip install matplotlib"
    except ValueError as error:  # such as an unknown backend in MPLBACKEND
        refuse(f"matplotlib does not start: {error}")
    if not os.path.basename(png).strip("."):
        refuse(f"png must be a file, got {png!r}")
    path, suffix = os.path.splitext(png)
    if suffix in ("", "."):
        png, suffix = f"{path}.png", ".png"
    known = sorted(plt.FigureCanvasBase.get_supported_filetypes().keys() - {"pgf"})  # which needs LaTeX
    if suffix[1:].lower() not in known:
        refuse(f"png={png} must end in {', '.join(known)}, or in nothing for png")
    try:
        check_output(png)
    except OSError as error:
        refuse(f"png={png} cannot be written: {error}")
    return png, ""


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


def _run_handles(finite, looks):
    """Return a line for each run in the legend, with its name, shortened; equal short names get a number.

    finite: {name: False if the run has no finite loss}, which is then said after the name.
    """
    from matplotlib.lines import Line2D

    short = [shorten(name) + ("" if finite[name] else ", not finite") for name in finite]
    labels = [f"{name} ({i})" if short.count(name) > 1 else name for i, name in enumerate(short, 1)]
    # matplotlib leaves out labels that begin with an underscore; a space of no width before it prevents that
    labels = [f"\u200b{label}" if label.startswith("_") else label for label in labels]
    return [Line2D([], [], label=label, **looks[name]) for label, name in zip(labels, finite)]


def _legend_shape(handles, width):
    """Return (columns, rows) of a legend below a figure of this width in inches."""
    widest = 0.7 + 0.083 * max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(len(handles), int(width / widest)))
    rows = -(-len(handles) // columns)
    return -(-len(handles) // rows), rows


def _set_linear_ticks(axis, key, end):
    """Set ticks at 1, 2 or 5 times a power of ten on both axes; the horizontal one has the unit of `key`, to `end`."""
    from matplotlib.ticker import MaxNLocator

    end = end or 1
    axis.set_xlim(-0.015 * end, 1.03 * end)  # room for circles at both ends
    axis.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=key == "step"))
    axis.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    if key != "seconds":
        axis.xaxis.set_major_formatter(lambda x, _: short_count(x) if key == "tokens" else f"{x:,.0f}")


def _set_log_ticks(axis, end):
    """Make the horizontal axis logarithmic from 1 to `end`, with labels at 1, 2, 5, 10, 20, ..., or on a long axis at
    1, 10, 100, ... alone."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter

    decades = math.log10(max(end, 1.1))
    numbers = [digit * 10**n for n in range(int(decades) + 1) for digit in (1, 2, 5)]
    labelled = numbers if decades < 4.2 else numbers[::3]
    axis.set_xscale("log")
    axis.set_xlim(0.95, 1.05 * end)
    axis.xaxis.set_major_locator(FixedLocator([n for n in labelled if n <= 1.05 * end]))
    axis.xaxis.set_minor_locator(FixedLocator([n for n in numbers if n <= 1.05 * end]))
    axis.xaxis.set_major_formatter(lambda x, _: short_count(round(x)))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))


def _pyplot():
    """Import matplotlib with a backend that needs no screen, and without its remarks about fonts and caches."""
    import logging

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure, png, dpi=150):
    """Write a figure to a file, whole or not at all, whose folder is made if need be, and free its memory."""
    with whole_file(png) as temporary, warnings.catch_warnings(action="ignore"):  # of letters that the font has not
        figure.savefig(temporary, dpi=dpi, format=os.path.splitext(png)[1][1:].lower())
    _pyplot().close(figure)
