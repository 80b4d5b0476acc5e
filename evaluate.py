"""Measure the loss by position: how much a model gains from its context, also beyond its training length. Or, with
--tasks, score it on tasks of lm-evaluation-harness.

    python evaluate.py                                                     # the newest run, 4 times its context
    python evaluate.py out/softmax out/sympow_gating_p2 --length=65536 --documents=16
    python evaluate.py out/demo --length=1000000 --pack=1 --png=loss_by_position.png
    python evaluate.py out/softmax hf/sympow_gating_p2 --tasks=lambada_openai,hellaswag

Held-out documents are read piece by piece, and the model's state is carried from one piece to the next, so that memory
does not grow with the length (except for a KV cache). Prints the mean loss between powers of two. With --png it plots
the loss against the position, with the training context marked: the second figure of "Conformal Transformations for
Symmetric Power Transformers" (Kumar et al., 2025). Tasks print a table of their metrics and write them to tasks.json in
the run's folder.
"""

import json
import os
import sys
from dataclasses import dataclass
from importlib.metadata import version

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # which python -I leaves out

from sympow.runs import threads  # noqa: F401 (before torch)
import torch

from sympow.attention.operator.dispatch import first_line
from sympow.attention.positions import TooLong, check_length, most_tokens
from sympow.compare import choose_names, plain
from sympow.data import DataError
from sympow.data.dataset import Dataset
from sympow.data.files import read_json, write_json
from sympow.data.loader import Windows
from sympow.data.progress import bar
from sympow.data.tokenizer import load_tokenizer
from sympow.model import GPTConfig
from sympow.runs import checkpoint
from sympow.runs.folder import fingerprint
from sympow.runs.load import load_run, newest_run, no_checkpoint, training_context, transformers_type
from sympow.runs.plots import choose_picture, means_by_position, plot_loss_by_position
from sympow.runs.program import check_output, run_program, refuse
from sympow.runs.scores import score_pieces
from sympow.runs.settings import DTYPE_RANGE, check_ranges, choose_device, read_settings
from sympow.runs.source import open_source


@dataclass
class EvaluateConfig:
    out_dir: str = ""  # folders of runs, of export.py or of transformers; default: the newest in out/
    names: str = ""  # names of the runs in the table and the picture, separated by commas; default: their folders
    # loss by position
    dataset: str = ""  # a folder in data/, or any path; default: the one the run was trained on
    length: int = 0  # tokens of each document; 0: 4 times the final training context, at most the whole document
    documents: int = 16  # number of documents
    pack: bool = False  # join documents to longer texts; only a model trained with pack forgets where one begins
    png: str = ""  # a file for a picture of the loss by position
    # tasks of lm-evaluation-harness
    tasks: str = ""  # names of tasks or groups, or paths of YAML files, separated by commas
    include_path: str = ""  # a folder with more tasks
    num_fewshot: int = -1  # examples before each question; -1: as many as the task is defined with
    limit: float = 0.0  # only so many documents of each task, or this share of them if it is below 1; 0: all
    batch_size: int = 8  # texts that are read at a time
    max_length: int = 0  # tokens read of a text; 0: the training context with softmax layers, else all
    # both
    device: str = "auto"  # auto: cuda or cpu; cuda:1, ...
    dtype: str = "auto"  # auto: bfloat16 on GPUs that have it, else float32
    json: bool = False  # end with one JSON line: each run's mean losses between powers of two, or its metrics by task


POSITION_SETTINGS = ("dataset", "length", "documents", "pack", "png")
DETAILS = ("samples", "num_fewshot", "version")  # of a task, which are no metrics
TASK_SETTINGS = ("include_path", "num_fewshot", "limit", "batch_size", "max_length")
RANGES = (
    DTYPE_RANGE,
    ("length max_length", "at least 0", lambda x: x >= 0),
    ("documents batch_size", "at least 1", lambda x: x >= 1),
    ("num_fewshot", "at least 0, or -1", lambda x: x >= -1),
    ("limit", "0, a share below 1 or a whole number", lambda x: 0 <= x < 1 or x == int(x) > 0),
)


def main():
    settings, _ = read_settings((EvaluateConfig,), sys.argv[1:], usage=__doc__, folders=True)
    cfg = EvaluateConfig(**settings)
    for name in POSITION_SETTINGS if cfg.tasks else TASK_SETTINGS:
        if name in settings:
            refuse(f"--{name} " + ("belongs to the loss by position, not to --tasks" if cfg.tasks else "needs --tasks"))
    try:
        check_ranges(cfg, RANGES)
    except ValueError as error:
        refuse(error)
    try:
        compare = compare_tasks if cfg.tasks else compare_positions
        report = compare(choose_runs(cfg), cfg)
    except (DataError, TooLong) as error:
        refuse(error)
    except (MemoryError, torch.OutOfMemoryError) as error:
        sys.exit(f"evaluate.py: {first_line(error)}")
    if cfg.json:
        print(json.dumps(report))


def choose_runs(cfg):
    """Return {name: folder} of the runs to evaluate; refuse folders without weights and names that do not fit."""
    is_one = os.path.isdir(cfg.out_dir)  # the name of a folder may have a comma
    folders = [cfg.out_dir] if is_one else cfg.out_dir.split(",")
    folders = list(dict.fromkeys(os.path.normpath(folder) for folder in folders if folder)) or [newest_run()]
    for folder in folders:
        if not (checkpoint.newest(folder) or transformers_type(folder)):
            refuse(no_checkpoint(folder))
    return dict(zip(choose_names(cfg.names, folders), folders))


# ---- loss by position


def compare_positions(runs, cfg):
    """Print and plot the losses by position of these runs, {name: folder}; return {name: `between_powers`}."""
    picture = choose_picture(cfg.png)
    windows = {name: open_documents(folder, cfg) for name, folder in runs.items()}  # refused before any work
    curves = {}
    report = {}
    for name, folder in runs.items():
        losses = evaluate_run(folder, cfg, windows[name])
        report[name] = between_powers(losses.mean(0))
        means = [means_by_position(document) for document in losses]
        curves[name] = means[0][0], [document_means for _, document_means in means], training_context(folder)
    print(table(report, "position"))
    counts = [f"{len(curves[name][1]):,} documents of {windows[name].block_size:,} tokens" for name in runs]
    fewer = ", all there are" * any(len(losses) < cfg.documents for _, losses, _ in curves.values())
    print(f"mean loss in nats a token over {' or '.join(dict.fromkeys(counts))}{fewer}", flush=True)
    datasets = {name: window.dataset for name, window in windows.items()}
    if len({fingerprint(dataset) for dataset in datasets.values()}) > 1:
        names = ", ".join(f"{name} {dataset.name} ({dataset.tokenizer.kind})" for name, dataset in datasets.items())
        print(f"losses on different data, which cannot be compared: {names}", flush=True)
    if picture:
        plot_loss_by_position(curves, picture)
        print(f"wrote {picture}")
    return report


def open_documents(folder, cfg):
    """Return the Windows of the documents that a run is to read; refuse what does not fit."""
    run = checkpoint.run_of(folder)
    try:
        settings = {} if transformers_type(folder) else checkpoint.settings(run)
        if not (cfg.dataset or settings):
            refuse(f"{folder} names no dataset: give --dataset")
        dataset = Dataset(cfg.dataset or settings["dataset"])
        if settings:
            dataset.check_tokens(load_tokenizer(run), folder)
        model = settings["model"] if settings else open_source(folder, dataset, "out_dir").model
        config = GPTConfig(**model)
        context = training_context(folder)
        check_length(config, cfg.length, "--length")
        longest = dataset.tokens("val") if cfg.pack else dataset.document_length
        length = cfg.length or min(4 * context or longest, longest, most_tokens(config))
        return Windows(dataset, "val", length, cfg.pack, name="length")
    except ValueError as error:
        refuse(error)


def evaluate_run(folder, cfg, windows):
    """Return the losses of a run in nats, float64 [documents, length]."""
    _, model, _, device, autocast = load_run(folder, cfg.device, cfg.dtype)
    count = min(cfg.documents, windows.documents)
    stride = windows.documents // count * windows.per_document  # over the whole split, each document from its start
    total = count * windows.block_size
    losses = []
    progress = bar(total=total, desc=folder, unit="token", unit_scale=True, leave=False)
    with torch.inference_mode(), autocast, progress:
        for i in range(count):
            inputs, targets = windows.batch([i * stride])
            pieces = []
            for piece_losses in score_pieces(model, inputs.to(device), targets.to(device)):
                pieces.append(piece_losses.double().cpu())
                progress.update(piece_losses.numel())
            losses.append(torch.cat(pieces, 1))
    return torch.cat(losses)


def between_powers(losses):
    """Return {"a-b": mean loss of positions a to b}, counted from 1, b a power of two: 1-1, 2-2, 3-4, 5-8, ..."""
    means = {}
    start = 0
    while start < len(losses):
        end = min(max(1, 2 * start), len(losses))
        means[f"{start + 1}-{end}"] = losses[start:end].mean().item()
        start = end
    return means


# ---- tasks of lm_eval


def compare_tasks(runs, cfg):
    """Print the metrics of these runs, {name: folder}, on tasks of lm_eval, and write them to tasks.json in each.

    Returns {name: {task: metrics}}.
    """
    try:
        from sympow.runs.tasks import UNLIMITED, load_model, load_tasks, run_tasks  # takes seconds, and is optional
    except ModuleNotFoundError as error:
        refuse(f'--tasks needs lm-evaluation-harness ({error}): pip install "lm_eval[hf]"')
    report = {}
    rows = {}
    for folder in runs.values():
        try:
            check_output(tasks_file(folder))
            read_metrics(folder)
        except OSError as error:
            refuse(f"{tasks_file(folder)} cannot be written: {error}")
    tasks = load_tasks([name for name in cfg.tasks.split(",") if name], cfg.include_path, cfg.num_fewshot)
    try:
        for name, folder in runs.items():
            model = load_model(folder, cfg)
            report[name] = run_tasks(tasks, model, cfg.limit)
            rows[name] = {
                f"{task} {metric}": x
                for task, metrics in report[name].items()
                for metric, x in metrics.items()
                if metric not in DETAILS
            }
            write_metrics(folder, cfg, report[name], None if model.max_length == UNLIMITED else model.max_length)
    finally:  # a later run, or a full disk, must not cost the scores
        if rows:
            print(table(rows, "task"), flush=True)
    return report


def tasks_file(run):
    """Return the path of tasks.json in a run's folder, or in a folder of transformers."""
    return os.path.join(run if transformers_type(run) else checkpoint.run_of(run), "tasks.json")


def read_metrics(run):
    """Return the contents of a run's tasks.json, {} if there is none. Raises DataError if it is damaged."""
    return read_json(tasks_file(run)) if os.path.exists(tasks_file(run)) else {}


def write_metrics(run, cfg, report, max_length):
    """Add {task: metrics} of a run to tasks.json in its folder, with the checkpoint and the settings behind them."""
    weights = checkpoint.newest(run, True, files=checkpoint.WEIGHTS) or run
    settings = {
        "checkpoint": os.path.basename(weights),
        "dtype": str(choose_device(cfg.device, cfg.dtype)[1]).removeprefix("torch."),
        "limit": cfg.limit,
        "max_length": max_length,
        "lm_eval": version("lm_eval"),
    }
    write_json(tasks_file(run), read_metrics(run) | {task: metrics | settings for task, metrics in report.items()})


def table(report, head):
    """Format {run: {row: number}} as a table with a column for each run. head: the title of the rows' names."""
    rows = dict.fromkeys(name for numbers in report.values() for name in numbers)
    cells = [
        [name, *(f"{numbers[name]:.4f}" if name in numbers else "" for numbers in report.values())] for name in rows
    ]
    return plain([head, *report], cells)


if __name__ == "__main__":
    run_program(main)
