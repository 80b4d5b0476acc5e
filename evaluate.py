"""Measure the loss by position: how much a model gains from its context, also beyond its training length.

    python evaluate.py                                                     # the newest run, 4 times its context
    python evaluate.py --out_dir=out/softmax,out/sympow_gating_p2 --length=65536 --documents=16
    python evaluate.py --out_dir=out/demo --length=1000000 --pack=1 --png=loss_by_position.png

Held-out documents are read piece by piece, and the model's state is carried from one piece to the next, so that memory
does not grow with the length (except for a KV cache). Prints the mean loss between powers of two and plots the loss
against the position, with the training context marked: the second figure of "Conformal Transformations for Symmetric
Power Transformers" (Kumar et al., 2025).
"""

import json
import os
import sys
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from attention.check import first_line
from attention.learned_position import check_length, most_tokens
from data import DataError
from data.dataset import Dataset
from data.loader import Windows
from data.progress import bar
from data.tokenizer import load_tokenizer
from model import GPTConfig
from runs import checkpoint
from runs.load import load_run, newest_run, no_checkpoint
from runs.plotting import choose_picture, means_by_position, plot_loss_by_position, shorten
from runs.program import run_program
from runs.settings import check_ranges, read_settings, refuse
from runs.stages import final_context

LOGITS_AT_ONCE = 2**28  # numbers: 1 GB in float32


@dataclass
class EvaluateConfig:
    out_dir: str = ""  # a run's folder, or several separated by commas; default: the newest in out/
    names: str = ""  # names of the runs in the table and the picture, separated by commas; default: their folders
    dataset: str = ""  # a folder in data/, or any path; default: the one the run was trained on
    length: int = (
        0  # tokens to read of each document; 0: 4 times the final training context, at most the whole document
    )
    documents: int = 16  # number of documents
    pack: bool = False  # concatenate documents, to read on where one ends
    piece: int = 0  # tokens to read at a time; 0: 65,536 on a GPU, else 1,024
    png: str = "loss_by_position.png"  # where the picture goes
    device: str = "auto"  # auto: cuda or cpu; cuda:1, ...; mps (Apple's GPUs: untested)
    dtype: str = "auto"  # auto: bfloat16 on GPUs that have it, else float32
    json: bool = False  # end with one JSON line: the mean losses of each run between powers of two


def main():
    given, _ = read_settings((EvaluateConfig,), sys.argv[1:], usage=__doc__)
    cfg = EvaluateConfig(**given)
    try:
        check_ranges(
            cfg, (("length piece", "at least 0", lambda x: x >= 0), ("documents", "at least 1", lambda x: x >= 1))
        )
    except ValueError as error:
        refuse(error)
    runs = list(dict.fromkeys(os.path.normpath(run) for run in cfg.out_dir.split(",") if run)) or [newest_run()]
    for run in runs:
        if not checkpoint.newest(run):
            refuse(no_checkpoint(run))
    names = cfg.names.split(",") if cfg.names else runs
    if len(names) != len(runs) or len(set(names)) < len(names):
        refuse(f"--names must be {len(runs)} different names, got {cfg.names or ','.join(names)}")
    picture, missing = choose_picture(cfg.png)
    windows = {run: open_documents(run, cfg) for run in runs}  # refused before anything is evaluated
    curves, report, joined = {}, {}, False
    for name, run in zip(names, runs):
        losses, *curves[name], rows = evaluate_run(run, cfg, windows[run])
        report[name], joined = between_powers(losses), joined or rows
    print(table(report))
    counts = {f"{len(curves[n][1]):,} documents of {windows[r].block_size:,} tokens" for n, r in zip(names, runs)}
    print(f"mean loss in nats over {' or '.join(sorted(counts))}", flush=True)
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
                for losses in piece_losses(model, inputs.to(device), targets.to(device), cfg.piece or None):
                    pieces.append(losses[0].cpu())
                    shown.update(len(pieces[-1]))
                losses = torch.cat(pieces)
                total += losses
                curves.append(means_by_position(losses))
    except (DataError, MemoryError, torch.OutOfMemoryError) as error:
        sys.exit(f"evaluate.py: {first_line(error)}")
    return total / count, curves[0][0], [y for _, y in curves], final_context(checkpoint.settings(folder)), joined


def losses_by_position(model, inputs, targets, piece=None):
    """Return the loss of each target in nats, float32 [B, T], for inputs and targets [B, T] read a piece at a time."""
    return torch.cat(list(piece_losses(model, inputs, targets, piece)), 1)


def piece_losses(model, inputs, targets, piece=None):
    """Yield the losses [B, n] of one piece of losses_by_position after the other."""
    piece = min(piece or (65536 if inputs.is_cuda else 1024), inputs.shape[1])
    state = model.empty_state(len(inputs))
    at_once = max(1, LOGITS_AT_ONCE // model.config.vocab_size // len(inputs))
    for part, wanted in zip(inputs.split(piece, 1), targets.split(piece, 1)):
        x, state = model.hidden(part, state)
        losses = []
        for rows, target in zip(x.split(at_once, 1), wanted.split(at_once, 1)):
            logits = model.logits(rows).float()
            losses.append(F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape))
        yield torch.cat(losses, 1)


def between_powers(losses):
    """Return {"a-b": mean loss of positions a to b}, counted from 1, b a power of two: 1-1, 2-2, 3-4, 5-8, ..."""
    found, before = {}, 0
    while before < len(losses):
        last = min(max(1, 2 * before), len(losses))
        found[f"{before + 1}-{last}"] = losses[before:last].mean().item()
        before = last
    return found


def table(report):
    """Format {run: {positions: loss}} as a table with a column for each run."""
    names = list(report)
    rows = list(dict.fromkeys(positions for name in names for positions in report[name]))
    width = max(len("position"), *map(len, rows))
    columns = [max(len(name), 8) for name in names]
    lines = ["  ".join([f"{'position':>{width}}", *(f"{n:>{c}}" for n, c in zip(names, columns))])]
    for row in rows:
        cells = [f"{report[n][row]:>{c}.4f}" if row in report[n] else " " * c for n, c in zip(names, columns)]
        lines.append("  ".join([f"{row:>{width}}", *cells]))
    return "\n".join(lines)


if __name__ == "__main__":
    run_program(main)
