"""Write the record of one run: its losses, measurements of its model, and the machine. runs.py calls this program.

python -m experiments.measure RUN out/experiments/softmax-0123456789.recall.json        # RUN: a Run as JSON
"""

import json
import sys
import time
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

from sympow.data.dataset import Dataset
from sympow.data.files import write_json
from sympow.data.loader import Windows
from sympow.data.recall.tasks import questions
from sympow.experiments import gated_deltanet
from sympow.experiments.runs import Run
from sympow.model import GPT, GPTConfig
from sympow.runs.load import load_run
from sympow.runs.plots import mean_and_standard_error, means_by_position
from sympow.runs.program import run_program
from sympow.runs.scores import losses_by_position
from sympow.train import TrainConfig
from sympow.training.optimizer import make_optimizer

BATCH = 1 << 16  # tokens of windows that are read together
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AUTOCAST = torch.autocast("cuda", torch.bfloat16, enabled=DEVICE == "cuda")


def main(run):
    """Measure a run and write what was measured to FOLDER.json."""
    if run.settings["attention"] == "gated_deltanet":
        gated_deltanet.register()
    if "max_iters" in run.settings:
        _, model, *_ = load_run(run.folder, SimpleNamespace(device=DEVICE, dtype="auto"))
    else:
        settings = {name: value for name, value in run.settings.items() if name != "seed"}
        with torch.device("meta"):
            model = GPT(GPTConfig(**{"vocab_size": 257, **settings}))
    dataset = Dataset(run.dataset)
    measured = {name: MEASURES[name](model, dataset, **arguments) for name, arguments in run.measures.items()}
    write_json(f"{run.folder}.json", measured)


# ---- measurements: each takes the model, trained or on the meta device, the dataset and the arguments of the plan


def positions(model, dataset, length, documents, window=0, start=0, bounds=()):
    """Return the losses by position over held-out texts of `length` tokens, from their beginnings.

    window: read in windows of so many tokens, each half of the one before, so that a token sees between half a window
    and a whole one; 0: read on with the state. `loss`, and the loss of each text, is over the positions from `start`
    on. `spans` has the mean losses between two neighbours of `bounds`. Errors are standard errors over the texts.
    """
    texts = held_out(dataset, length, documents)
    losses = [read_text(model, *text, window) for text in texts]
    curves = [means_by_position(row) for row in losses]
    mean, errors = mean_and_standard_error([means for _, means in curves])
    spans = [[row[a:b].mean() for a, b in zip(bounds, bounds[1:])] for row in losses]
    span_means, span_errors = mean_and_standard_error(spans)
    means = [row[start:].mean() for row in losses]
    return dict(
        documents=len(texts),
        length=length,
        joined=any(dataset.eot in inputs[0, 1:] for inputs, _ in texts),
        loss=np.mean(means),
        texts=means,
        positions=curves[0][0],
        mean=mean.tolist(),
        errors=errors.tolist(),
        spans=dict(bounds=bounds, mean=span_means.tolist(), errors=span_errors.tolist()),
    )


def held_out(dataset, length, documents):
    """Return [(inputs, targets)] [1, length] of at most so many texts, spread over the held-out split.

    A text longer than a row is of one project, if data/source has prepared the dataset and a project is long enough.
    Otherwise it is made of successive rows, with ends of text between them.
    """
    rows = -(-length // dataset.document_length)
    projects = list(dataset.meta.get("held_out", {}).values())  # rows of each
    joined = max(projects, default=0) < rows
    starts, row = [], 0
    for count in [dataset.documents("val")] if joined else projects:
        starts += range(row, row + count - rows + 1, rows)
        row += count
    texts, count = [], min(documents, len(starts))
    for i in range(count):
        start = starts[i * len(starts) // count] * dataset.document_length
        targets = torch.from_numpy(dataset.read("val", start, length).astype(np.int64))[None]
        inputs = targets.roll(1)
        inputs[:, :: dataset.document_length if joined else length] = dataset.eot
        texts.append((inputs, targets))
    return texts


@AUTOCAST
@torch.inference_mode()
def read_text(model, inputs, targets, window):
    """Return the losses [length] float64 of the targets of one text; window: as for `positions`."""
    if not window or window >= inputs.shape[1]:
        return losses_by_position(model, inputs.to(DEVICE), targets.to(DEVICE))[0].double().cpu().numpy()
    half, batch = window // 2, max(1, BATCH // window)
    windows = zip(*(ids[0].unfold(0, window, half).split(batch) for ids in (inputs.to(DEVICE), targets.to(DEVICE))))
    losses = torch.cat([losses_by_position(model, *pair, window) for pair in windows]).double().cpu().numpy()
    return np.concatenate([losses[0, :half], losses[:, half:].reshape(-1)])


@AUTOCAST
@torch.inference_mode()
def recall(model, dataset, documents):
    """Return the share of questions answered, by distance, over the long documents of a dataset of data/recall."""
    windows, short = Windows(dataset, "val", dataset.document_length), dataset.meta["short"]
    texts, answers = [], []
    for i in range(short, min(windows.documents, short + documents)):
        inputs, targets = windows.batch([i])
        logits, _ = model(inputs.to(DEVICE))
        answers.append(logits[0].argmax(-1).cpu().numpy())
        texts.append(targets[0].numpy().astype(np.uint8).tobytes())
    return score(texts, answers, dataset.meta["task"], dataset.document_length) | dict(documents=len(texts))


def score(texts, answers, task, length):
    """Return {distance: [...], accuracy: [...], questions: [...]} over distances between powers of two up to `length`.

    texts: bytes. answers: an array of the expected ids for each text. A value is right if all its letters are. A
    distance is the geometric middle of its interval; intervals without questions are left out.
    """
    results = {}  # {number of binary digits: [True if the answer is right]}
    for text, answer in zip(texts, answers):
        for distance, begin, end in questions(text, task):
            right = answer[begin:end].tolist() == list(text[begin:end])
            results.setdefault(distance.bit_length(), []).append(right)
    intervals = [(2 ** (i - 0.5), results[i]) for i in sorted(results) if 2 ** (i - 1) <= length]
    return dict(
        distance=[round(middle) for middle, _ in intervals],
        accuracy=[np.mean(answers) for _, answers in intervals],
        questions=[len(answers) for _, answers in intervals],
    )


def speed(model, dataset, contexts, tokens, layers=()):
    """Return {context: tokens a second in training}, for random tokens.

    layers: measure models of these two depths, and compute the whole model's step from the line through both.
    """
    speeds, depths = {}, layers or [model.config.n_layer]
    for context in contexts:
        step_tokens = max(tokens, context)
        seconds = [step_seconds(replace(model.config, n_layer=n), context, step_tokens) for n in depths]
        line = np.polyfit(depths, seconds, len(depths) - 1)
        speeds[context] = step_tokens / np.polyval(line, model.config.n_layer)
    return speeds


def step_seconds(config, context, tokens):
    """Return the median time of a training step of so many tokens, compiled on a GPU as in training."""
    model = GPT(config).to(DEVICE)
    optimizer = make_optimizer(model, TrainConfig())
    torch.set_float32_matmul_precision("high")
    torch.compiler.reset()
    network = torch.compile(model, dynamic=False, disable=DEVICE == "cpu")
    ids = torch.randint(config.vocab_size, (tokens // context, context), device=DEVICE)
    times = []
    for _ in range(8 if DEVICE == "cuda" else 3):
        start = time.perf_counter()
        with AUTOCAST:
            _, loss = network(ids, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the GPU
        times.append(time.perf_counter() - start)
    return median(times[len(times) // 3 + 1 :])


def state_bytes(model, dataset, tokens):
    """Return {cache, state, parameters}: bytes that generation keeps after so many tokens, in bfloat16, and a count."""
    layers = zip(model.transformer.h, model.empty_state(1).layers)
    sizes = [block.attn.mix.generation_bytes(state, tokens, 2, torch.bfloat16, "always") for block, state in layers]
    cache, state = map(sum, zip(*sizes))
    return dict(cache=cache, state=state, parameters=model.parameter_count())


MEASURES = {
    "positions": positions,
    "targets": positions,
    "far": positions,
    "recall": recall,
    "speed": speed,
    "state": state_bytes,
}


if __name__ == "__main__":
    run_program(lambda: main(Run(**json.loads(sys.argv[1]))))
