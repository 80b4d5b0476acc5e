"""Compare runs: print a table of their final losses and speeds, and with --png plot their loss curves.

    python compare.py out/softmax out/sympow_p4
    python compare.py out/softmax out/sympow_p4 --metric=val_loss/code           # on one of several datasets
    python compare.py out/* --names softmax,p=4,"p=4 gated" --png docs/loss.png --markdown

Reads metrics.jsonl in each run's folder, also while the run is still writing it. Losses are compared with the first
run's.
"""

import glob
import math
import os
import sys
from contextlib import suppress
from statistics import fmean, median

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # which python -I leaves out

from sympow import did_you_mean
from sympow.code import changed_files
from sympow.data import DataError
from sympow.data.dataset import Dataset
from sympow.data.files import read_json
from sympow.runs.plots import choose_picture, plot_loss_curves
from sympow.runs.program import Parser, run_program, refuse
from sympow.runs.metrics import read_lines
from sympow.runs.folder import fingerprint
from sympow.runs.starts import codes_of

NOT_COMPARED = {"out_dir", "wandb_run_name"}  # in which runs differ without a meaning
WARMUP_LINES = 3  # left out of a run's throughput, because of compilation and cold caches
LEGEND = "train loss: mean over the last 10% of the logged steps; val loss: the last evaluation; tokens/s: median"


def read_losses(folder, metric="val_loss"):
    """Return (train, val): the lines of a run's metrics.jsonl with a training or validation loss, ordered by step.

    metric: the validation loss, val_loss or val_loss/NAME of one of several datasets. The lines of val have it as
    val_loss. If a step has several lines, the last one counts: a resumed run repeats the steps since its checkpoint.
    """
    path = os.path.join(folder, "metrics.jsonl")
    if not os.path.isfile(path):
        problem = "no metrics.jsonl in it" if os.path.isdir(folder) else "no such run folder"
        runs = sorted(filter(os.path.isdir, glob.glob("out/*")))
        hint = did_you_mean(folder, runs) or f": the runs in out/ are {', '.join(runs) or 'none'}"
        refuse(f"{folder}: {problem}{hint}")
    train, val, metrics = {}, {}, set()
    for line in read_lines(path):
        metrics |= {key for key in line if key.partition("/")[0] == "val_loss"}
        if "train_loss" in line:
            train[line["step"]] = line
        if metric in line:
            val[line["step"]] = line | {"val_loss": line[metric]}
    if not train and not val:
        refuse(f"{folder}: its metrics.jsonl holds no losses yet")
    if metric != "val_loss" and not val:
        refuse(f"{folder}: its metrics.jsonl holds no {metric}, but {', '.join(sorted(metrics)) or 'no val_loss'}")
    return [train[step] for step in sorted(train)], [val[step] for step in sorted(val)]


def summarise(name, train, val):
    """Return a run's row of the table as a dict, with None for what the run did not log."""
    steps, tokens = (
        max((line[key] for line in train + val if key in line), default=None) for key in ("step", "tokens")
    )
    speeds = {}  # of each context of a run in stages
    for line in train:
        if line.get("tok_per_sec"):
            speeds.setdefault(line.get("context"), []).append(line["tok_per_sec"])
    tail = [line["train_loss"] for line in train[-max(1, len(train) // 10) :]]
    tail = [loss for loss in tail if math.isfinite(loss)] or tail  # the loss of a skipped step may be NaN
    last_val = val[-1] if val else {}
    return {
        "run": name,
        "steps": steps,
        "tokens": tokens,
        "train": fmean(tail) if tail else None,
        "val": last_val.get("val_loss"),
        "val_step": last_val.get("step"),
        "val_context": last_val.get("context"),
        "speeds": [median(values[WARMUP_LINES:] or values) for values in speeds.values()],
    }


def table(rows, metric="val_loss"):
    """Return (header, cells) as strings, one list of cells for each run; metric: as for read_losses."""
    # Compare training losses if a run was not evaluated at its last step, because it is training or was killed.
    kind = "val" if all(row["val"] is not None and row["val_step"] == row["steps"] for row in rows) else "train"
    base = rows[0][kind]
    header = [
        "run",
        "steps",
        "tokens",
        "train loss",
        metric.replace("_", " ", 1),
        f"{kind} vs first",
        "tokens/s",
        "bits/byte",
    ]
    cells = []
    for row in rows:
        ratio = f"{row[kind] / base:.3f}x" if base and row[kind] is not None else "-"
        val = format_loss(row["val"])
        if row["val"] is not None and row["val_step"] < row["steps"]:  # training went on
            val += f" at {row['val_step']:,}"
        speeds = " then ".join(f"{speed:,.0f}" for speed in row["speeds"]) or "-"
        steps = f"{row['steps']:,}"
        tokens = format_count(row["tokens"])
        cells.append(
            [row["run"], steps, tokens, format_loss(row["train"]), val, ratio, speeds, format_loss(row["bits"])]
        )
    return header, cells


def saved_settings(folder):
    """Return the settings of a run, with the model's among them, {} for a copy that has no config.json."""
    with suppress(FileNotFoundError, DataError):
        settings = read_json(os.path.join(folder, "config.json"))
        if not isinstance(model := settings.pop("model", {}), dict):
            refuse(f"{folder}/config.json is damaged: its model must be a dict, got {model}")
        return settings | model
    return {}


def differences(settings):
    """Return a table of what differs between runs, {name: settings}, or "" if nothing does."""
    rows = []
    for key in sorted(set().union(*settings.values()) - NOT_COMPARED):
        cells = [str(values.get(key, "-")) for values in settings.values()]
        if len({*cells} - {"-"}) > 1:
            rows.append([key, *cells])
    return f"\n{plain(['what differs', *settings], rows)}\n" if rows else ""


def bits_per_byte(loss, settings):
    """Return a run's validation loss in bits a byte of text, or None if its data cannot be read.

    The end of a text has no bytes, and a byte that is no UTF-8 counts as three, as U+FFFD does.
    """
    with suppress(DataError, KeyError):
        dataset = Dataset(settings["dataset"])
        if fingerprint(dataset) != settings["data"]:  # the name stands for other data now
            return None
        ids = dataset.read("val", 0, min(settings["eval_tokens"], dataset.tokens("val")))
        text = dataset.tokenizer.decode(ids[ids != dataset.eot])
        return loss / math.log(2) * len(ids) / len(text.encode())


def other_code(folders, rows):
    """Return a line that names runs, {name: folder}, and the files that differ, at any of their steps, from the code of
    the first step of all; "" if there is none. Of a start without a record nothing is known."""
    steps = {row["run"]: row["steps"] for row in rows}
    codes = [(name, code) for name, folder in folders.items() for code in codes_of(folder, steps[name])]
    changes = {name: files for name, code in codes if (files := changed_files(codes[0][1], code))}
    runs = ", ".join(f"{name} ({files})" for name, files in changes.items())
    return runs and f"\nlosses by different code: {runs}"


def format_loss(value):
    return "-" if value is None else f"{value:.4f}"


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
    widths = [max(map(len, column)) for column in zip(header, *cells)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])])
        for row in [header, *cells]
    )


def markdown(header, cells):
    """Format the table in GitHub's markdown."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in [header, *cells]]
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [escaped[0], rule, *escaped[1:]])


def choose_names(names, default):
    """Return a different name for each run: those in `names`, separated by commas, or the list `default`."""
    chosen = names.split(",") if names else default
    if len(chosen) != len(default) or len(set(chosen)) < len(chosen):
        refuse(f"--names must be {len(default)} different names, got {','.join(chosen)}")
    return chosen


def main(argv=None):
    parser = Parser(__doc__, prog="compare.py")
    parser.add_argument("runs", nargs="+", help="run folders, such as out/softmax")
    parser.add_argument("--png", default="", help="a file for a picture of the loss curves")
    parser.add_argument("--names", help="names of the runs, separated by commas (default: their folders')")
    parser.add_argument("--markdown", action="store_true", help="print the table in GitHub's markdown")
    parser.add_argument("--metric", default="val_loss", help="val_loss, or val_loss/NAME of one of several datasets")
    args = parser.parse_args(argv)
    args.runs = [folder for text in args.runs for folder in ([text] if os.path.exists(text) else text.split(","))]
    files = [path for path in args.runs if os.path.isfile(path)]
    if 0 < len(files) < len(args.runs):  # such as pictures among out/*
        print(f"left out, as they are no run folders: {', '.join(files)}")
        args.runs = [path for path in args.runs if path not in files]
    if args.metric.partition("/")[0] != "val_loss":
        refuse(f"--metric must be val_loss or val_loss/NAME, got {args.metric!r}")
    short = [os.path.basename(os.path.realpath(folder)) for folder in args.runs]
    names = choose_names(args.names, short if len(set(short)) == len(short) else args.runs)
    picture = choose_picture(args.png)
    runs = {name: read_losses(folder, args.metric) for name, folder in zip(names, args.runs)}
    rows = [summarise(name, train, val) for name, (train, val) in runs.items()]
    settings = {name: saved_settings(folder) for name, folder in zip(names, args.runs)}
    one_dataset = args.metric != "val_loss"  # of validation, whatever a run was trained on
    for row in rows:
        row["bits"] = bits_per_byte(row["val"], {} if one_dataset or not row["val"] else settings[row["run"]])
        settings[row["run"]] |= {key: row[key] for key in ("tokens", "val_context") if row[key]}
    print((markdown if args.markdown else plain)(*table(rows, args.metric)))
    print(f"{differences(settings)}\n{LEGEND}{other_code(dict(zip(names, args.runs)), rows)}", flush=True)
    if picture:
        plot_loss_curves(runs, picture)
        print(f"wrote {picture}")


if __name__ == "__main__":
    run_program(main)
