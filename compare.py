"""Compare runs: a table of where they ended and a picture of how they got there.

    python compare.py out/softmax out/sympow_p4
    python compare.py out/* --names softmax,p=4,"p=4 gated" --png docs/loss.png --markdown

Reads metrics.jsonl in each run folder, while the run is still writing it too. Losses are compared with the first run's.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from statistics import fmean, median

import numpy as np

from runs.tracking import whole_lines

# Okabe and Ito's palette, which colour-blind readers can tell apart, the strongest first.
STYLE = {  # of matplotlib
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
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D"]
DASHES = ["-", "-.", ":"]  # for the eighth run and on
WARMUP_LINES = 3  # of a run's throughput: compilation and cold caches


def refuse(message):
    print(f"compare.py: {message}", file=sys.stderr)
    sys.exit(2)


# ---- reading


def load_run(folder):
    """(train, val): the logged training and evaluation lines of a run, in the order of their steps."""
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        refuse(f"{folder}: " + ("no metrics.jsonl in it" if Path(folder).is_dir() else "no such run folder"))
    train, val = {}, {}
    for line in map(json.loads, whole_lines(path)):
        # A resumed run repeats the steps since its checkpoint: the later line is the one it went on from.
        for key, lines in (("train_loss", train), ("val_loss", val)):
            if isinstance(line.get(key), (int, float)):
                lines[line["step"]] = line
    if not train and not val:
        refuse(f"{folder}: its metrics.jsonl holds no losses yet")
    return [train[step] for step in sorted(train)], [val[step] for step in sorted(val)]


def summarise(name, train, val):
    """One row of the table; None where the run did not log what is asked for."""

    def last(key):
        return max((line[key] for line in train + val if key in line), default=None)

    steps, tokens, seconds = last("step"), last("tokens"), last("seconds")
    rates = [line["tok_per_sec"] for line in train if line.get("tok_per_sec")]
    if rates:
        rate = median(rates[WARMUP_LINES:] or rates)
    else:
        rate = tokens / seconds if tokens and seconds else None
    tail = [line["train_loss"] for line in train[-max(1, len(train) // 10) :]]
    tail = [loss for loss in tail if math.isfinite(loss)] or tail  # a skipped step's may be NaN
    return {
        "run": name,
        "steps": steps,
        "tokens": tokens,
        "train": fmean(tail) if tail else None,
        "val": val[-1]["val_loss"] if val else None,
        "val_step": val[-1]["step"] if val else None,
        "rate": rate,
    }


# ---- the table


def table(rows):
    """(header, cells) as strings, one list of cells for each run."""
    # a run that is going on, or was cut, has no evaluation of where it is now: then the training losses are compared
    kind = "val" if all(row["val"] is not None and row["val_step"] == row["steps"] for row in rows) else "train"
    base = rows[0][kind]
    header = ["run", "steps", "tokens", "train loss", "val loss", f"{kind} vs first", "tokens/s"]
    cells = []
    for row in rows:
        relative = f"{row[kind] / base:.3f}x" if base and row[kind] is not None else "-"
        cells.append(
            [
                row["run"],
                f"{row['steps']:,}",
                count(row["tokens"]),
                loss(row["train"]),
                last_evaluation(row),
                relative,
                "-" if row["rate"] is None else f"{row['rate']:,.0f}",
            ]
        )
    return header, cells


LEGEND = "train loss: mean over the last 10% of the logged steps; val loss: the last evaluation; tokens/s: median"


def loss(value):
    return "-" if value is None else f"{value:.4f}"


def last_evaluation(row):
    """The last validation loss, with its step if training went on since."""
    late = row["val"] is not None and row["val_step"] < row["steps"]
    return loss(row["val"]) + (f" at {row['val_step']:,}" if late else "")


def count(n):
    """6,144 stays; 1.31M, 2.6B."""
    if n is None:
        return "-"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:,}"


def plain(header, cells):
    widths = [max(len(row[i]) for row in [header, *cells]) for i in range(len(header))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])])
        for row in [header, *cells]
    )


def markdown(header, cells):
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in [header, *cells]]
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [escaped[0], rule, *escaped[1:]])


# ---- the picture


def curve(lines, key, loss, scale=1):
    """(x, y): the finite losses against steps or seconds, of the lines that tell them."""
    lines = [line for line in lines if key in line and math.isfinite(line[loss])]
    return [line[key] / scale for line in lines], [line[loss] for line in lines]


def smooth(values):
    """A running mean over 4% of the points, around each: takes the batch noise off, keeps the shape."""
    half = len(values) // 50
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def relative(runs):
    """{name: (millions of tokens, percent)} of each run: how far its training loss, smoothed, is above the first run's
    after as many tokens. Empty where there is nothing to compare."""
    curves = {name: curve(train, "tokens", "train_loss", 1e6) for name, (train, _) in runs.items()}
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
    """(low, high) of the loss axis for [(steps, losses)]: the fall of the first steps would squash all that follows.

    The first 5% of the longest run may leave the picture at the top; every run's lowest point stays in it.
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


def draw(runs, png):
    """Writes loss against steps, tokens and training time of {name: (train, val)} to a PNG, and of several the loss
    relative to the first one's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    longest = max([line.get("seconds", 0) for train, val in runs.values() for line in train + val])
    unit, scale = ("hours", 3600) if longest > 2 * 3600 else ("minutes", 60) if longest > 120 else ("seconds", 1)
    panels = [("step", "step", 1)]
    if any("tokens" in line for train, val in runs.values() for line in train + val):
        panels.append(("tokens", "tokens, millions", 1e6))
    panels += [("seconds", f"training time, {unit}", scale)] if longest else []
    shifts = relative(runs)
    count = len(panels) + bool(shifts)
    columns = min(count, 2)
    circles = {"marker": "o", "markersize": 4.5, "markerfacecolor": "white", "linewidth": 1}
    look = {name: (COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]) for i, name in enumerate(runs)}
    with plt.rc_context(STYLE):
        rows = -(-count // columns)
        figure, axes = plt.subplots(
            rows, columns, figsize=(5.5 * columns, 4.2 * rows), squeeze=False, layout="constrained"
        )
        axes = axes.flatten()
        curves = [(x, smooth(y)) for x, y in (curve(train, "step", "train_loss") for train, _ in runs.values())]
        curves += [curve(val, "step", "val_loss") for _, val in runs.values()]
        for axis, (key, label, scale) in zip(axes, panels):
            for name, (train, val) in runs.items():
                colour, dash = look[name]
                x, y = curve(train, key, "train_loss", scale)
                axis.plot(x, y, color=colour, alpha=0.22, linewidth=0.8)
                alone = "o" if len(x) == 1 else None
                axis.plot(x, smooth(y), dash, color=colour, linewidth=1.7, marker=alone, label=name if x else None)
                # Beside a training curve the circles need no line: between two of them it would cut the corner.
                x, y = curve(val, key, "val_loss", scale)
                axis.plot(
                    x,
                    y,
                    linestyle="none" if train else "--",
                    color=colour,
                    markevery=max(1, len(x) // 25),
                    label=None if train else name,
                    **circles,
                )
            axis.set_xlabel(label)
            axis.set_xlim(left=0)
            axis.set_ylim(*loss_limits(curves))
            axis.set_ylabel("loss, nats per token")
            axis.xaxis.set_major_locator(MaxNLocator(6, integer=key == "step"))
            if key == "step":
                axis.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
        if shifts:
            axis = axes[len(panels)]
            for name, (x, y) in shifts.items():
                axis.plot(x, y, look[name][1], color=look[name][0], linewidth=1.7, marker="o" if len(x) == 1 else None)
            axis.set_xlabel("tokens, millions")
            axis.set_ylabel(f"loss relative to {next(iter(runs))}, %")
            axis.set_xlim(left=0)
        for axis in axes[count:]:
            axis.set_visible(False)
        if any(train and val for train, val in runs.values()):
            colour = COLOURS[0] if len(runs) == 1 else "#888888"
            axes[0].plot([], [], linestyle="none", color=colour, label="validation", **circles)
        axes[0].legend(loc="upper right")
        Path(png).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=150)
        plt.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="run folders, such as out/softmax")
    parser.add_argument("--png", default="compare.png", help="where the picture goes (default: compare.png)")
    parser.add_argument("--names", help="names of the runs, separated by commas (default: their folders')")
    parser.add_argument("--markdown", action="store_true", help="print the table in GitHub's markdown")
    parser.error = refuse
    args = parser.parse_args(argv)

    names = [Path(run).resolve().name for run in args.runs]
    if args.names:
        names = args.names.split(",")
        if len(names) != len(args.runs):
            refuse(f"--names has {len(names)} names for {len(args.runs)} runs")
    elif len(set(names)) < len(names):
        names = args.runs
    if len(set(names)) < len(names):
        refuse(f"two runs have the same name: {', '.join(names)}")

    runs = {name: load_run(folder) for name, folder in zip(names, args.runs)}
    header, cells = table([summarise(name, train, val) for name, (train, val) in runs.items()])
    print((markdown if args.markdown else plain)(header, cells))
    print(f"\n{LEGEND}")
    try:
        draw(runs, args.png)
    except ImportError:
        refuse("no picture, matplotlib is missing: pip install matplotlib")
    except (OSError, ValueError) as error:  # ValueError: an extension that matplotlib does not know
        refuse(f"cannot write {args.png}: {error}")
    print(f"wrote {args.png}")


if __name__ == "__main__":
    main()
