"""Loss by position: what a model still gains from its context, and what happens beyond the length it was trained at.

    python evaluate.py                                                     # the newest run, 4 times its context
    python evaluate.py --out_dir=out/softmax,out/sympow_gating_p2 --length=65536 --documents=16
    python evaluate.py --out_dir=out/demo --length=1000000 --pack=1 --png=loss_by_position.png

Held-out documents are read a piece at a time, with the state carried over, so that memory does not grow with the length
(for the sympow variants). Prints the mean loss between powers of two, and draws loss against position with the training
context marked: the second figure of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al., 2025).
"""

import json
import os
import sys
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from compare import COLOURS, STYLE
from data import DataError
from data.dataset import Dataset
from data.loader import Windows
from runs import checkpoint
from runs.load import load_run, newest_run, no_checkpoint
from runs.settings import read_settings, refuse

LOGITS_AT_ONCE = 2**28  # entries: 1 GB in float32


@dataclass
class EvaluateConfig:
    out_dir: str = ""  # a run's folder, or several with commas between; default: the newest in out/
    dataset: str = ""  # a folder in data/, or any path; default: the one the run was trained on
    length: int = 0  # tokens of a document that are read; 0: 4 times the training context, or the whole document
    documents: int = 16  # how many
    pack: bool = False  # documents one behind another, to read on where one ends
    piece: int = 0  # tokens at a time; 0: 65,536 on a GPU, else 1,024
    png: str = "loss_by_position.png"  # where the picture goes
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    dtype: str = "auto"  # auto: bfloat16 on GPUs that have it, else float32
    json: bool = False  # end with one JSON line: of each run the mean loss between powers of two


def main():
    given, _ = read_settings((EvaluateConfig,), sys.argv[1:], usage=__doc__)
    cfg = EvaluateConfig(**given)
    for name, least in (("length", 0), ("documents", 1), ("piece", 0)):
        if getattr(cfg, name) < least:
            refuse(f"{name} must be at least {least}, got {getattr(cfg, name)}")
    runs = [os.path.normpath(run) for run in cfg.out_dir.split(",") if run] or [newest_run()]
    for run in runs:
        if not checkpoint.newest(run):
            refuse(no_checkpoint(run))
    curves, contexts, report = {}, {}, {}
    for run in runs:
        losses, context = of_run(run, cfg)
        curves[run], contexts[run], report[run] = losses, context, between_powers(losses)
    print(table(report))
    wrong = None
    try:
        draw(curves, contexts, cfg.png)
        print(f"wrote {cfg.png}")
    except ImportError:
        print("no picture, matplotlib is missing: pip install matplotlib", file=sys.stderr)
    except (OSError, ValueError) as error:  # ValueError: an extension that matplotlib does not know
        wrong = f"evaluate.py: cannot write {cfg.png}: {error}"
    if cfg.json:
        print(json.dumps(report))
    sys.exit(wrong)


def of_run(run, cfg):
    """(mean loss at each position [length] float64, the context it was trained at)."""
    folder = checkpoint.newest(run)
    try:
        settings = checkpoint.settings(checkpoint.run_of(run))
    except ValueError as error:
        refuse(error)
    context = settings["block_size"]
    try:
        dataset = Dataset(cfg.dataset or settings["dataset"])
        most = dataset.tokens("val") if cfg.pack else dataset.document_length
        windows = Windows(dataset, "val", cfg.length or min(4 * context, most), cfg.pack, name="length")
    except DataError as error:
        refuse(error)
    model, _, device, autocast = load_run(checkpoint.run_of(run), folder, cfg)
    if model.config.vocab_size != dataset.vocab_size:
        refuse(f"{run} has a vocabulary of {model.config.vocab_size}, {dataset.name} one of {dataset.vocab_size}")
    count = min(cfg.documents, len(windows))
    step = len(windows) // count  # spread over the split
    total = torch.zeros(windows.block_size, dtype=torch.float64)
    for i in range(count):
        inputs, targets = (x.to(device) for x in windows.batch([i * step]))
        try:
            with torch.inference_mode(), autocast:
                total += by_position(model, inputs, targets, cfg.piece or None)[0].double().cpu()
        except MemoryError as error:
            sys.exit(f"evaluate.py: {error}")
        print(f"\r{run}: {i + 1} of {count} documents of {windows.block_size:,} tokens", end="", file=sys.stderr)
    print(file=sys.stderr)
    return total / count, context


def by_position(model, inputs, targets, piece=None):
    """The loss in nats of each of the targets [B, T], float32."""
    piece = piece or (65536 if inputs.is_cuda else 1024)
    state, losses = model.empty_state(len(inputs)), []
    at_once = max(1, LOGITS_AT_ONCE // model.config.vocab_size // len(inputs))
    for part, wanted in zip(inputs.split(piece, 1), targets.split(piece, 1)):
        x, state = model.hidden(part, state)
        for rows, target in zip(x.split(at_once, 1), wanted.split(at_once, 1)):
            logits = model.logits(rows).float()
            losses.append(F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape))
    return torch.cat(losses, 1)


def between_powers(losses):
    """{"a-b": mean loss of positions a to b}, counted from 1, b a power of two: 1-1, 2-2, 3-4, 5-8, ..."""
    found, before = {}, 0
    while before < len(losses):
        last = min(max(1, 2 * before), len(losses))
        found[f"{before + 1}-{last}"] = losses[before:last].mean().item()
        before = last
    return found


def table(report):
    names = list(report)
    rows = list(dict.fromkeys(place for name in names for place in report[name]))
    width = max(len("position"), *map(len, rows))
    columns = [max(len(name), 8) for name in names]
    lines = ["  ".join([f"{'position':>{width}}", *(f"{n:>{c}}" for n, c in zip(names, columns))])]
    for place in rows:
        cells = [f"{report[n][place]:>{c}.4f}" if place in report[n] else " " * c for n, c in zip(names, columns)]
        lines.append("  ".join([f"{place:>{width}}", *cells]))
    return "\n".join(lines)


def smoothed(losses, points=80):
    """(positions, means) over at most `points` stretches that grow with the position, as a logarithmic axis wants."""
    edges = (
        torch.logspace(0, torch.log10(torch.tensor(float(len(losses) + 1))).item(), points + 1).round().long().unique()
    )
    pairs = list(zip(edges[:-1].tolist(), edges[1:].tolist()))
    return [(a * (b - 1)) ** 0.5 for a, b in pairs], [losses[a - 1 : b - 1].mean().item() for a, b in pairs]


def draw(curves, contexts, png):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
        for i, (run, losses) in enumerate(curves.items()):
            axis.plot(*smoothed(losses), color=COLOURS[i % len(COLOURS)], linewidth=1.7, label=os.path.basename(run))
        for context in sorted(set(contexts.values())):
            axis.axvline(context, color="#888888", linestyle="--", linewidth=1)
            axis.annotate(
                f"trained at {context:,}", (context, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
                textcoords="offset points", va="top", color="#555555", fontsize=9,
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{int(x):,}")
        axis.set_xlabel("position in the document, tokens")
        axis.set_ylabel("loss, nats a token")
        axis.legend()
        figure.savefig(png, dpi=150)
        plt.close(figure)


if __name__ == "__main__":
    main()
