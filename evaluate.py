"""Measure the loss by position: how much a model gains from its context, also beyond its training length. Or, with
--tasks, score it on tasks of lm-evaluation-harness.

    python evaluate.py                                                     # the newest run, 4 times its context
    python evaluate.py --out_dir=out/softmax,out/sympow_gating_p2 --length=65536 --documents=16
    python evaluate.py --out_dir=out/demo --length=1000000 --pack=1 --png=loss_by_position.png
    python evaluate.py --out_dir=out/softmax,hf/sympow_gating_p2 --tasks=lambada_openai,hellaswag

Held-out documents are read piece by piece, and the model's state is carried from one piece to the next, so that memory
does not grow with the length (except for a KV cache). Prints the mean loss between powers of two and plots the loss
against the position, with the training context marked: the second figure of "Conformal Transformations for Symmetric
Power Transformers" (Kumar et al., 2025). Tasks print a table of their metrics and write them to tasks.json in the
run's folder.
"""

import json
import os
import sys
from dataclasses import dataclass
from importlib.metadata import version

import torch

from sympow.attention.check import first_line
from sympow.attention.learned_position import TooLong, check_length, most_tokens
from sympow.data import DataError
from sympow.data.dataset import Dataset
from sympow.data.files import read_json, write_json
from sympow.data.loader import Windows
from sympow.data.progress import bar
from sympow.data.tokenizer import load_tokenizer
from sympow.model import GPTConfig
from sympow.runs import checkpoint
from sympow.runs.folder import fingerprint
from sympow.runs.load import is_exported, load_exported, load_run, longest_text, newest_run, no_checkpoint
from sympow.runs.plots import choose_picture, means_by_position, plot_loss_by_position, shorten
from sympow.runs.program import run_program
from sympow.runs.scores import score_pieces
from sympow.runs.settings import check_ranges, choose_device, read_settings, refuse
from sympow.training.stages import final_context

TASKS_FILE = "tasks.json"  # in a run's folder


@dataclass
class EvaluateConfig:
    out_dir: str = ""  # a run's folder, or several with commas; default: the newest in out/; for tasks also exports
    names: str = ""  # names of the runs in the table and the picture, separated by commas; default: their folders
    # loss by position
    dataset: str = ""  # a folder in data/, or any path; default: the one the run was trained on
    length: int = 0  # tokens of each document; 0: 4 times the final training context, at most the whole document
    documents: int = 16  # number of documents
    pack: bool = False  # concatenate documents, to read on where one ends
    piece: int = 0  # tokens to read at a time; 0: 65,536 on a GPU, else 1,024
    png: str = "loss_by_position.png"  # where the picture goes
    # tasks of lm-evaluation-harness
    tasks: str = ""  # names of tasks or groups, or paths of YAML files, separated by commas
    include_path: str = ""  # a folder with more tasks
    num_fewshot: int = -1  # examples before each question; -1: as many as the task is defined with
    limit: float = 0.0  # only so many documents of each task, or this share of them if it is below 1; 0: all
    batch_size: int = 8  # texts that are read at a time
    max_length: int = 0  # tokens of a text that are read; 0: with softmax layers the training context, else all
    # both
    device: str = "auto"  # auto: cuda or cpu; cuda:1, ...
    dtype: str = "auto"  # auto: bfloat16 on GPUs that have it, else float32
    json: bool = False  # end with one JSON line: each run's mean losses between powers of two, or its metrics by task


OF_POSITIONS = "dataset length documents pack piece png".split()
OF_TASKS = "include_path num_fewshot limit batch_size max_length".split()
RANGES = (
    ("length piece max_length", "at least 0", lambda x: x >= 0),
    ("documents batch_size", "at least 1", lambda x: x >= 1),
    ("num_fewshot", "at least 0, or -1", lambda x: x >= -1),
    ("limit", "0, a share below 1 or a whole number", lambda x: 0 <= x < 1 or x == int(x) > 0),
)


def main():
    given, _ = read_settings((EvaluateConfig,), sys.argv[1:], usage=__doc__)
    cfg = EvaluateConfig(**given)
    try:
        check_ranges(cfg, RANGES)
    except ValueError as error:
        refuse(error)
    if wrong := [name for name in (OF_POSITIONS if cfg.tasks else OF_TASKS) if name in given]:
        refuse(f"--{wrong[0]} " + ("belongs to the loss by position, not to --tasks" if cfg.tasks else "needs --tasks"))
    one = cfg.out_dir and checkpoint.newest(cfg.out_dir)  # a name may have a comma
    listed = [cfg.out_dir] if one else cfg.out_dir.split(",")
    runs = list(dict.fromkeys(os.path.normpath(run) for run in listed if run)) or [newest_run()]
    for run in runs:
        if not (checkpoint.newest(run) or (cfg.tasks and is_exported(run))):
            refuse(no_checkpoint(run))
    names = cfg.names.split(",") if cfg.names else runs
    if len(names) != len(runs) or len(set(names)) < len(names):
        refuse(f"--names must be {len(runs)} different names, got {cfg.names or ','.join(names)}")
    (compare_tasks if cfg.tasks else compare_positions)(dict(zip(names, runs)), cfg)


def compare_positions(runs, cfg):
    """Print and plot the losses by position of these runs, {name: folder}."""
    picture, missing = choose_picture(cfg.png)
    windows = {name: open_documents(run, cfg) for name, run in runs.items()}  # refused before anything is evaluated
    curves, report, joined = {}, {}, False
    for name, run in runs.items():
        losses, *curves[name], rows = evaluate_run(run, cfg, windows[name])
        report[name], joined = between_powers(losses), joined or rows
    print(table(report, "position"))
    counts = {f"{len(curves[name][1]):,} documents of {windows[name].block_size:,} tokens" for name in runs}
    print(f"mean loss in nats a token over {' or '.join(sorted(counts))}", flush=True)
    data = {name: window.dataset for name, window in windows.items()}
    if len({fingerprint(dataset) for dataset in data.values()}) > 1:
        names = ", ".join(f"{name} {dataset.name} ({dataset.tokenizer.kind})" for name, dataset in data.items())
        print(f"losses on different data, which cannot be compared: {names}", flush=True)
    if picture:
        try:
            plot_loss_by_position(curves, picture, joined)
            print(f"wrote {picture}")
        except OSError as error:
            missing = f"cannot write {picture}: {error}"
    if cfg.json:
        print(json.dumps(report))
    if missing:
        sys.exit(f"evaluate.py: {missing}")


def open_documents(run, cfg):
    """Return the Windows of the documents that the run is to read; refuse what does not fit."""
    try:
        settings = checkpoint.settings(checkpoint.run_of(run))
        dataset = Dataset(cfg.dataset or settings["dataset"])
        dataset.check_tokens(load_tokenizer(checkpoint.run_of(run)), run)
        config, most = GPTConfig(**settings["model"]), dataset.tokens("val") if cfg.pack else dataset.document_length
        most = min(most, most_tokens(config))
        check_length(config, cfg.length, "--length")
        return Windows(dataset, "val", cfg.length or min(4 * final_context(settings), most), cfg.pack, name="length")
    except (DataError, ValueError) as error:
        refuse(error)


def evaluate_run(run, cfg, windows):
    """Return the run's mean loss at each position [length] float64, then what a picture needs of it: the positions and
    losses [documents, n] of `means_by_position`, the final training context, and True if they are of joined texts."""
    folder, model, _, device, autocast = load_run(run, cfg)
    count = min(cfg.documents, windows.documents)
    step = windows.documents // count * windows.per_document  # spread the documents over the split, each from its start
    total, curves, joined = torch.zeros(windows.block_size, dtype=torch.float64), [], False
    try:
        look = dict(desc=shorten(run, 30), unit="token", unit_scale=True, leave=False)
        with torch.inference_mode(), autocast, bar(total=count * len(total), **look) as shown:
            for i in range(count):
                inputs, targets = windows.batch([i * step])
                joined = joined or windows.dataset.eot in inputs[0, 1:]
                pieces = []
                for losses, _ in score_pieces(model, inputs.to(device), targets.to(device), cfg.piece or None):
                    pieces.append(losses[0].cpu())
                    shown.update(len(pieces[-1]))
                losses = torch.cat(pieces)
                total += losses
                curves.append(means_by_position(losses))
    except (DataError, MemoryError, torch.OutOfMemoryError) as error:
        sys.exit(f"evaluate.py: {first_line(error)}")
    return total / count, curves[0][0], [y for _, y in curves], final_context(checkpoint.settings(folder)), joined


def between_powers(losses):
    """Return {"a-b": mean loss of positions a to b}, counted from 1, b a power of two: 1-1, 2-2, 3-4, 5-8, ..."""
    found, before = {}, 0
    while before < len(losses):
        last = min(max(1, 2 * before), len(losses))
        found[f"{before + 1}-{last}"] = losses[before:last].mean().item()
        before = last
    return found


def compare_tasks(runs, cfg):
    """Print the metrics of these runs, {name: folder}, on tasks of lm_eval, and write them to tasks.json in each."""
    try:
        from sympow.runs.tasks import HarnessModel, load_tasks, run_tasks  # takes seconds, and is optional
    except ModuleNotFoundError as error:
        refuse(f"--tasks needs lm-evaluation-harness ({error}): pip install lm_eval")
    report = {}
    try:
        tasks = load_tasks([name for name in cfg.tasks.split(",") if name], cfg.include_path, cfg.num_fewshot)
        for name, run in runs.items():
            folder, model, tokenizer, _, autocast = (load_exported if is_exported(run) else load_run)(run, cfg)
            most = cfg.max_length or longest_text(run)
            if getattr(model.config, "positions", "") == "learned":  # the code of an older export lacks it
                check_length(model.config, most, "--max_length")
            with torch.inference_mode(), autocast:
                report[name] = run_tasks(tasks, HarnessModel(model, tokenizer, cfg.batch_size, most), cfg.limit)
            path = os.path.join(folder, TASKS_FILE)
            dtype = str(choose_device(cfg.device, cfg.dtype)[1]).removeprefix("torch.")
            weights = checkpoint.newest(run, True, files=checkpoint.WEIGHTS) or run
            of = {"checkpoint": os.path.basename(weights), "dtype": dtype, "limit": cfg.limit, "max_length": most}
            of["lm_eval"] = version("lm_eval")
            written = read_json(path) if os.path.exists(path) else {}
            write_json(path, written | {task: {**metrics, **of} for task, metrics in report[name].items()})
    except (DataError, TooLong) as error:
        refuse(error)
    except (MemoryError, torch.OutOfMemoryError) as error:
        sys.exit(f"evaluate.py: {first_line(error)}")
    numbers = lambda metrics: {m: value for m, value in metrics.items() if isinstance(value, float)}
    rows = lambda found: {f"{task} {m}": x for task, metrics in found.items() for m, x in numbers(metrics).items()}
    print(table({name: rows(found) for name, found in report.items()}, "task"), flush=True)
    if cfg.json:
        print(json.dumps(report))


def table(report, head):
    """Format {run: {row: number}} as a table with a column for each run; head stands above the rows' names."""
    names = list(report)
    rows = list(dict.fromkeys(row for name in names for row in report[name]))
    width = max(len(head), *map(len, rows))
    columns = [max(len(name), 8) for name in names]
    lines = ["  ".join([f"{head:>{width}}", *(f"{n:>{c}}" for n, c in zip(names, columns))])]
    for row in rows:
        numbers = [report[name].get(row) for name in names]
        shown = ["" if x is None else f"{x:.4f}" if abs(x) < 1e6 else f"{x:.3e}" for x in numbers]
        cells = [f"{text:>{c}}" for text, c in zip(shown, columns)]
        lines.append("  ".join([f"{row:>{width}}", *cells]))
    return "\n".join(lines)


if __name__ == "__main__":
    run_program(main)
