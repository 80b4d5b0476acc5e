"""Measure the model of one run, and write FOLDER.json: the machine, and the measures. runs.py starts this program.

python -m experiments.measure RUN        # RUN: a Run as JSON
"""

import json
import sys
from itertools import pairwise
from statistics import median

import numpy as np
from sympow.runs import threads  # noqa: F401 (before torch)
import torch

from sympow.attention.operator.memory import generation_bytes
from sympow.bench.train import make_steps
from sympow.data.dataset import Dataset
from sympow.data.files import write_json
from sympow.experiments import mqar_task
from sympow.experiments.runs import Run
from sympow.experiments.train import AUTOCAST, DEVICE, register
from sympow.model import GPT, GPTConfig
from sympow.runs.load import load_run
from sympow.runs.program import refuse, run_program
from sympow.runs.scores import losses_by_position
from sympow.runs.settings import fields_of
from sympow.runs.starts import environment

BATCH = 1 << 16  # tokens of windows that are read together


def main(run):
    """Measure a run and write the machine and the measurements to FOLDER.json."""
    register()
    dataset = mqar_task.TASKS.get(run.dataset) or Dataset(run.dataset)
    if "max_iters" in run.settings:
        _, model, *_ = load_run(run.folder, DEVICE)
    else:
        with torch.device("meta"):
            model = GPT(GPTConfig(vocab_size=dataset.vocab_size, **fields_of(GPTConfig, run.settings)))
    measured = {name: MEASURES[name](model, dataset, **arguments) for name, arguments in run.measures.items()}
    machine = environment()
    machine = dict(device=(*machine["gpus"], "CPU")[0], commit=machine["commit"][:10], **machine["versions"])
    write_json(f"{run.folder}.json", dict(machine=machine, measures=measured))


# ---- measurements: each takes the model, trained or on the meta device, the dataset and the arguments of the plan


def positions(model, dataset, length, documents, skip, window=0, bounds=()):
    """Return texts, the mean loss of each held-out text of `length` tokens; projects, the project of each; and spans,
    the mean losses of all of them between positions that are neighbours in bounds.

    skip: leave out the texts in the first tokens of the held-out split, as many as validation reads. window: read in
    windows of so many tokens that overlap by half, so that a token sees between half a window and a whole one; 0: read
    on with the state.
    """
    projects, starts = zip(*find_texts(dataset, length, documents, skip))
    losses = np.array([read_text(model, *read_tokens(dataset, start, length), window) for start in starts])
    spans = [losses[:, begin:end].mean() for begin, end in pairwise(bounds)]
    return dict(texts=losses.mean(1).tolist(), projects=projects, spans=spans)


def find_texts(dataset, length, documents, skip):
    """Return [(project, first token)] of at most so many texts, spread over the held-out split after `skip` tokens.

    Each is of one project, if data/source has prepared the dataset. Otherwise a text longer than a row is made of
    successive rows, and taken for a project. Refuses a length that no project has.
    """
    texts, begin = [], 0
    row = dataset.document_length
    stride = -(-length // row) * row
    for project, rows in dataset.meta.get("held_out", {"": dataset.documents("val")}).items():
        end = begin + rows * row
        texts += [(project or start, start) for start in range(begin, end - stride + 1, stride) if start >= skip]
        begin = end
    if not texts:
        refuse(f"{dataset.name} has no held-out text of {length:,} tokens after the first {skip:,}")
    count = min(documents, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]


def swapped_context(model, dataset, length, documents, skip, last):
    """Return for each held-out text how much more loss its last tokens have behind another project's beginning.

    last: how many tokens are scored. As many before them stay the text's own.
    """
    texts, differences = find_texts(dataset, length, documents, skip), []
    for i, (project, start) in enumerate(texts):
        foreign_starts = [start for name, start in texts[i:] + texts[:i] if name != project]
        if not foreign_starts:
            refuse(f"{dataset.name} holds out one project, {project}: a beginning of another one is needed")
        own, targets = read_tokens(dataset, start, length)
        foreign, _ = read_tokens(dataset, foreign_starts[0], length)
        foreign[:, -2 * last :] = own[:, -2 * last :]
        own_loss, foreign_loss = (read_text(model, ids, targets, 0)[-last:].mean() for ids in (own, foreign))
        differences.append(foreign_loss - own_loss)
    return differences


def read_tokens(dataset, start, length):
    """Return (inputs, targets) [1, length] of the held-out tokens from `start` on, after an end of text."""
    targets = torch.from_numpy(dataset.read("val", start, length).astype(np.int64))[None]
    inputs = targets.roll(1)
    inputs[0, 0] = dataset.eot
    return inputs, targets


@AUTOCAST
@torch.inference_mode()
def read_text(model, inputs, targets, window):
    """Return the losses [length] float64 of the targets of one text; window: as for `positions`."""
    piece, window = window or None, min(window or inputs.shape[1], inputs.shape[1])
    half, batch = window // 2, max(1, BATCH // window)
    windows = zip(*(ids[0].to(DEVICE).unfold(0, window, half).split(batch) for ids in (inputs, targets)))
    losses = torch.cat([losses_by_position(model, *pair, piece) for pair in windows]).double().cpu().numpy()
    return np.concatenate([losses[0, :half], losses[:, half:].reshape(-1)])


def speed(model, dataset, contexts, tokens):
    """Return {context: tokens a second in training}, the median of steps on random tokens, compiled on a GPU."""
    speeds = {}
    for context in contexts:
        seconds = make_steps(model.config, context, tokens, DEVICE)
        seconds(3)
        speeds[context] = tokens / median(seconds(1) for _ in range(5))
    return speeds


def model_size(model, dataset, lengths):
    """Return {parameters: their number, bytes: kept by generation after each of these lengths}.

    States are in float32, caches in bfloat16. Layers of power attention have a cache until a state takes less. For a
    moment generation needs both.
    """
    sizes = []
    for tokens in lengths:
        arguments = model.attentions(), model.empty_state(1), tokens, 2, torch.float32
        sizes.append(min(sum(generation_bytes(*arguments, switch_over)) for switch_over in (None, "always")))
    return dict(parameters=model.parameter_count(), bytes=sizes)


MEASURES = {
    "positions": positions,
    "far": positions,
    "swapped": swapped_context,
    "mqar": mqar_task.recall,
    "speed": speed,
    "size": model_size,
}


if __name__ == "__main__":
    run_program(lambda: main(Run(**json.loads(sys.argv[1]))))
