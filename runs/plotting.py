"""Plot loss curves, and the loss against the position in the document.

    plot_loss_curves({"softmax": (train, val), ...}, "loss.png")                 # lines of metrics.jsonl
    plot_loss_by_position({"out/softmax": losses, ...}, [4096], "loss_by_position.png")

matplotlib is imported when a picture is plotted, so that programs run without it until then. Both functions raise
ImportError if it is missing, OSError if the file cannot be written, and ValueError for a file type it does not know.
"""

import math
from pathlib import Path
from statistics import fmean

import numpy as np

STYLE = {  # settings of matplotlib
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "text.parse_math": False,
}
# Okabe and Ito's palette, which colour-blind readers can tell apart, strongest first.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D"]
DASHES = ["-", "-.", ":"]  # from the eighth run on the colours repeat with the next kind of line
CIRCLES = {"marker": "o", "markersize": 4.5, "markerfacecolor": "white", "linewidth": 1}  # validation losses


def plot_loss_curves(runs, png):
    """Plot loss against steps, tokens and training time, and relative to the first run if there are several.

    runs: {name: (train, val)}, the lines of metrics.jsonl with a training or a validation loss, ordered by step.
    """
    plt = _pyplot()
    panels, shifts = _panels(runs), relative_losses(runs)
    looks = {name: (COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]) for i, name in enumerate(runs)}
    smoothed = [(x, smooth(y)) for x, y in (loss_curve(train, "step", "train_loss") for train, _ in runs.values())]
    limits = loss_limits(smoothed + [loss_curve(val, "step", "val_loss") for _, val in runs.values()])
    count = len(panels) + bool(shifts)
    columns = min(count, 2)
    rows = -(-count // columns)
    with plt.rc_context(STYLE):
        size = (5.5 * columns, 4.2 * rows)
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        axes = axes.flatten()
        for axis, (key, label, scale) in zip(axes, panels):
            _plot_losses(axis, runs, looks, key, scale)
            axis.set(xlabel=label, ylabel="loss, nats per token", ylim=limits)
            axis.set_xlim(left=0)
        if shifts:
            _plot_relative_losses(axes[len(panels)], shifts, looks, next(iter(runs)))
        for axis in axes[count:]:
            axis.set_visible(False)
        if any(train and val for train, val in runs.values()):
            colour = COLOURS[0] if len(runs) == 1 else "#888888"
            axes[0].plot([], [], linestyle="none", color=colour, label="validation", **CIRCLES)
        axes[0].legend(loc="upper right")
        _save(figure, png)


def _panels(runs):
    """Return (key, label, scale) of each horizontal axis that the logged lines have values for."""
    lines = [line for train, val in runs.values() for line in train + val]
    panels = [("step", "step", 1)]
    if any("tokens" in line for line in lines):
        panels.append(("tokens", "tokens, millions", 1e6))
    if longest := max(line.get("seconds", 0) for line in lines):
        unit, scale = ("hours", 3600) if longest > 2 * 3600 else ("minutes", 60) if longest > 120 else ("seconds", 1)
        panels.append(("seconds", f"training time, {unit}", scale))
    return panels


def _plot_losses(axis, runs, looks, key, scale):
    """Plot the training losses of each run, smoothed over a pale copy, and its validation losses as circles."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for name, (train, val) in runs.items():
        colour, dash = looks[name]
        x, y = loss_curve(train, key, "train_loss", scale)
        axis.plot(x, y, color=colour, alpha=0.22, linewidth=0.8)
        marker = "o" if len(x) == 1 else None
        axis.plot(x, smooth(y), dash, color=colour, linewidth=1.7, marker=marker, label=name if x else None)
        # Beside a training curve the circles need no line, which would cut the corner between two of them.
        style, label = ("none", None) if train else ("--", name)
        x, y = loss_curve(val, key, "val_loss", scale)
        every = max(1, len(x) // 25)
        axis.plot(x, y, linestyle=style, color=colour, markevery=every, label=label, **CIRCLES)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=key == "step"))
    if key == "step":
        axis.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def _plot_relative_losses(axis, shifts, looks, first):
    """Plot the result of relative_losses; first: the name of the run that the others are compared with."""
    for name, (x, y) in shifts.items():
        colour, dash = looks[name]
        axis.plot(x, y, dash, color=colour, linewidth=1.7, marker="o" if len(x) == 1 else None)
    axis.set(xlabel="tokens, millions", ylabel=f"loss relative to {first}, %")
    axis.set_xlim(left=0)


def loss_curve(lines, key, loss, scale=1):
    """Return (x, y), the finite losses against steps, tokens or seconds, of the lines that have this key."""
    lines = [line for line in lines if key in line and math.isfinite(line[loss])]
    return [line[key] / scale for line in lines], [line[loss] for line in lines]


def smooth(values):
    """Return a running mean over 4% of the points around each, which removes batch noise and keeps the shape."""
    half = len(values) // 50
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def relative_losses(runs):
    """Return {name: (millions of tokens, percent)}: how far each run's smoothed training loss is above the first run's
    after as many tokens. The dict is empty if there is nothing to compare."""
    curves = {name: loss_curve(train, "tokens", "train_loss", 1e6) for name, (train, _) in runs.items()}
    (base_x, base_y), *others = ((x, smooth(y)) for x, y in curves.values())
    if not others or not base_x:
        return {}
    found = {}
    for name, (x, y) in curves.items():
        pairs = [(at, loss) for at, loss in zip(x, smooth(y)) if base_x[0] <= at <= base_x[-1]]
        if pairs:
            base = np.interp([at for at, _ in pairs], base_x, base_y)
            found[name] = [at for at, _ in pairs], [100 * (loss / b - 1) for (_, loss), b in zip(pairs, base)]
    return found if len(found) > 1 else {}


def loss_limits(curves):
    """Return (low, high) of the loss axis for [(steps, losses)].

    The losses of the first steps would squash all that follow, so those of the first 5% of the longest run may lie
    above the axis. Every run's lowest loss is within it.
    """
    points = [(s, y) for steps, losses in curves for s, y in zip(steps, losses) if math.isfinite(y)]
    if not points:
        return 0.0, 1.0
    start = 0.05 * max(s for s, _ in points)
    low = min(y for _, y in points)
    lowest = [min((y for y in losses if math.isfinite(y)), default=low) for _, losses in curves]
    high = max([y for s, y in points if s > start] + lowest)
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


def plot_loss_by_position(curves, contexts, png):
    """Plot the mean loss at each position of a document, and mark the training contexts.

    curves: {run's folder: losses [length]}, arrays or tensors; contexts: the runs' training contexts, in tokens.
    """
    plt = _pyplot()
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
        for i, (run, losses) in enumerate(curves.items()):
            x, y = means_by_position(losses)
            axis.plot(x, y, color=COLOURS[i % len(COLOURS)], linewidth=1.7, label=Path(run).name)
        for context in sorted(set(contexts)):
            axis.axvline(context, color="#888888", linestyle="--", linewidth=1)
            axis.annotate(
                f"trained at {context:,}", (context, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
                textcoords="offset points", va="top", color="#555555", fontsize=9,
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{int(x):,}")
        axis.set(xlabel="position in the document, tokens", ylabel="loss, nats per token")
        axis.legend()
        _save(figure, png)


def means_by_position(losses, points=80):
    """Return (positions, means) of losses [length] over at most `points` intervals.

    They grow with the position, so that they are about equally wide on a logarithmic axis.
    """
    losses = np.asarray(losses)
    edges = np.unique(np.logspace(0, math.log10(len(losses) + 1), points + 1).round().astype(int))
    stretches = list(zip(edges[:-1].tolist(), edges[1:].tolist()))
    return [(a * (b - 1)) ** 0.5 for a, b in stretches], [float(losses[a - 1 : b - 1].mean()) for a, b in stretches]


def _pyplot():
    """Import matplotlib with a backend that needs no screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure, png):
    """Write a figure to a file, whose folder is made if need be, and free its memory."""
    Path(png).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=150)
    figure.clear()
    _pyplot().close(figure)
