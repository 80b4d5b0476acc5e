"""Compare runs: print a table of their final losses and speeds, and plot their loss curves.

    python compare.py out/softmax out/sympow_p4
    python compare.py out/softmax out/sympow_p4 --metric=val_loss/code           # on one of several datasets
    python compare.py out/* --names softmax,p=4,"p=4 gated" --png docs/loss.png --markdown

Reads metrics.jsonl in each run's folder, also while the run is still writing it. Losses are compared with those of the
first run.
"""

import math
import os
import sys
from contextlib import suppress
from statistics import fmean, median

from sympow.data import DataError
from sympow.data.files import read_json
from sympow.runs.plots import choose_picture, plot_loss_curves
from sympow.runs.program import Parser, run_program
from sympow.runs.settings import refuse
from sympow.runs.metrics import read_lines

WARMUP_LINES = 3  # left out of a run's throughput, because of compilation and cold caches
KEYS = ("step", "train_loss", "val_loss", "tokens", "seconds", "tok_per_sec", "context")
LEGEND = "train loss: mean over the last 10% of the logged steps; val loss: the last evaluation; tokens/s: median"


def read_losses(folder, metric="val_loss"):
    """Return (train, val): the lines of a run's metrics.jsonl with a training or validation loss, ordered by step.

    metric: the validation loss that is wanted, val_loss or val_loss/NAME of one of several datasets; the lines of val
    have it as val_loss.
    """
    path = os.path.join(folder, "metrics.jsonl")
    if not os.path.isfile(path):
        refuse(f"{folder}: " + ("no metrics.jsonl in it" if os.path.isdir(folder) else "no such run folder"))
    train, val, known = {}, {}, {}
    try:
        lines = read_lines(path)
    except OSError as error:
        refuse(f"{folder}: {error}")
    for line in lines:
        known |= {key: None for key in line if key.partition("/")[0] == "val_loss"}
        line = numbers({**line, "val_loss": line.get(metric)})
        # A resumed run repeats the steps since its checkpoint; the later line of a step is the valid one.
        for key, of_steps in (("train_loss", train), ("val_loss", val)):
            if key in line and "step" in line:
                of_steps[line["step"]] = line
    if not train and not val:
        refuse(f"{folder}: its metrics.jsonl holds no losses yet")
    if metric != "val_loss" and not val:
        refuse(f"{folder}: its metrics.jsonl holds no {metric}" + (f", but {', '.join(known)}" if known else ""))
    return [train[step] for step in sorted(train)], [val[step] for step in sorted(val)]


def numbers(line):
    """Return the numbers that are used here of a line of metrics.jsonl. Only losses may be huge, inf or NaN."""
    found = {key: x for key in KEYS if isinstance(x := line.get(key), (int, float)) and not isinstance(x, bool)}
    return {key: x for key, x in found.items() if abs(x) < 1e18 or (key.endswith("loss") and isinstance(x, float))}


def summarise(name, train, val):
    """Return a run's row of the table as a dict, with None for what the run did not log."""

    def last(key):
        return max((line[key] for line in train + val if key in line), default=None)

    steps, tokens, seconds = last("step"), last("tokens"), last("seconds")
    rates, first = {}, next((line["context"] for line in train if "context" in line), None)
    for line in train:  # a speed for each context of a run in stages
        if line.get("tok_per_sec"):
            rates.setdefault(line.get("context", first), []).append(line["tok_per_sec"])
    medians = [median(of[WARMUP_LINES:] or of) for of in rates.values()]
    tail = [line["train_loss"] for line in train[-max(1, len(train) // 10) :]]
    tail = [loss for loss in tail if math.isfinite(loss)] or tail  # the loss of a skipped step may be NaN
    return {
        "run": name,
        "steps": steps,
        "tokens": tokens,
        "train": fmean(tail) if tail else None,
        "val": val[-1]["val_loss"] if val else None,
        "val_step": val[-1]["step"] if val else None,
        "val_context": val[-1].get("context") if val else None,
        "rates": medians or ([tokens / seconds] if tokens and seconds else []),
    }


def table(rows, metric="val_loss"):
    """Return (header, cells) as strings, one list of cells for each run; metric: as for read_losses."""
    # Compare training losses if a run was not evaluated at its last step, because it is going on or was killed.
    kind = "val" if all(row["val"] is not None and row["val_step"] == row["steps"] for row in rows) else "train"
    base = rows[0][kind]
    header = [
        "run",
        "steps",
        "tokens",
        "train loss",
        metric.replace("val_loss", "val loss"),
        f"{kind} vs first",
        "tokens/s",
    ]
    cells = [
        [
            row["run"],
            f"{row['steps']:,}",
            format_count(row["tokens"]),
            format_loss(row["train"]),
            format_evaluation(row),
            f"{row[kind] / base:.3f}x" if base and row[kind] is not None else "-",
            " then ".join(f"{rate:,.0f}" for rate in row["rates"]) or "-",
        ]
        for row in rows
    ]
    return header, cells


def other_contexts(rows):
    """Return a line that names the contexts of the validation losses if they are not all the same, or else ""."""
    known = {row["run"]: row["val_context"] for row in rows if row["val_context"]}
    if len({*known.values()}) < 2:
        return ""
    return "\nval losses at different contexts: " + ", ".join(f"{name} {n:,}" for name, n in known.items())


def other_data(folders):
    """Return a line that names the data of runs, {name: folder}, if they were trained on different sets, or else ""."""
    known = {}
    for name, folder in folders.items():
        with suppress(FileNotFoundError, DataError, KeyError):  # a copy of a run may have its metrics alone
            settings = read_json(os.path.join(folder, "config.json"))
            known[name] = settings["data"], settings["dataset"]
    if len({data for data, _ in known.values()}) < 2:
        return ""
    return "\nlosses on different data: " + ", ".join(f"{name} {dataset}" for name, (_, dataset) in known.items())


def format_loss(value):
    return "-" if value is None else f"{value:.4f}"


def format_evaluation(row):
    """Format the last validation loss, with its step if training went on after it."""
    late = row["val"] is not None and row["val_step"] < row["steps"]
    return format_loss(row["val"]) + (f" at {row['val_step']:,}" if late else "")


def format_count(n):
    """Format a number of tokens: 6,144 or 1.31M or 2.6B."""
    if n is None:
        return "-"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:,}"


def plain(header, cells):
    """Format the table in aligned columns."""
    widths = [max(len(row[i]) for row in [header, *cells]) for i in range(len(header))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])])
        for row in [header, *cells]
    )


def markdown(header, cells):
    """Format the table in GitHub's markdown."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in [header, *cells]]
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [escaped[0], rule, *escaped[1:]])


def choose_names(folders, names):
    """Return a different name for each run: the given names, or the names of the folders, or else their whole paths."""
    if names:
        chosen = names.split(",")
        if len(chosen) != len(folders):
            refuse(f"--names has {len(chosen)} names for {len(folders)} runs")
    else:
        chosen = [os.path.basename(os.path.realpath(folder)) for folder in folders]
        if len(set(chosen)) < len(chosen):
            chosen = folders
    if len(set(chosen)) < len(chosen):
        refuse(f"two runs have the same name: {', '.join(chosen)}")
    return chosen


def main(argv=None):
    parser = Parser(prog="compare.py", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="run folders, such as out/softmax")
    parser.add_argument("--png", default="compare.png", help="where the picture goes (default: compare.png)")
    parser.add_argument("--names", help="names of the runs, separated by commas (default: their folders')")
    parser.add_argument("--markdown", action="store_true", help="print the table in GitHub's markdown")
    parser.add_argument("--metric", default="val_loss", help="val_loss, or val_loss/NAME of one of several datasets")
    args = parser.parse_args(argv)
    if args.metric.partition("/")[0] != "val_loss":
        refuse(f"--metric must be val_loss or val_loss/NAME, got {args.metric!r}")
    names = choose_names(args.runs, args.names)
    picture, missing = choose_picture(args.png)
    runs = {name: read_losses(folder, args.metric) for name, folder in zip(names, args.runs)}
    rows = [summarise(name, train, val) for name, (train, val) in runs.items()]
    print((markdown if args.markdown else plain)(*table(rows, args.metric)))
    data = other_data(dict(zip(names, args.runs))) if args.metric == "val_loss" else ""
    print(f"\n{LEGEND}{other_contexts(rows)}{data}", flush=True)
    if missing:
        sys.exit(f"compare.py: {missing}")
    try:
        plot_loss_curves(runs, picture)
    except OSError as error:
        sys.exit(f"compare.py: cannot write {picture}: {error}")
    print(f"wrote {picture}")


if __name__ == "__main__":
    run_program(main)
