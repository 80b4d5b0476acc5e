"""Measure the model of one run, and write the measurements to FOLDER.json. runs.py starts this program.

python -m experiments.measure RUN        # RUN: a Run as JSON
"""

import json
import lzma
import math
import sys
from statistics import median

import numpy as np
from sympow.runs import threads  # noqa: F401 (before torch)
import torch

from sympow.attention.gates import LearnedGate
from sympow.attention.operator.memory import generation_bytes
from sympow.bench.train import make_steps
from sympow.data.dataset import Dataset
from sympow.data.files import write_json
from sympow.experiments import mqar_task
from sympow.experiments.runs import Run
from sympow.experiments.train import AUTOCAST, DEVICE, register
from sympow.model import GPT, GPTConfig
from sympow.runs.load import load_run
from sympow.runs.plots import mean_and_standard_error, means_by_position
from sympow.runs.program import run_program, refuse
from sympow.runs.scores import losses_by_position
from sympow.runs.settings import fields_of

BATCH = 1 << 16  # tokens of windows that are read together
QUANTILES, LONGEST = (0.05, 0.5, 0.95), 1e7  # of half-lives, and tokens


def main(run):
    """Measure a run and write the measurements to FOLDER.json."""
    register(run.settings["attention"])
    dataset = mqar_task.TASKS.get(run.dataset) or Dataset(run.dataset)
    if "max_iters" in run.settings:
        _, model, *_ = load_run(run.folder, DEVICE)
    else:
        with torch.device("meta"):
            model = GPT(GPTConfig(vocab_size=dataset.vocab_size, **fields_of(GPTConfig, run.settings)))
    measured = {name: MEASURES[name](model, dataset, **arguments) for name, arguments in run.measures.items()}
    write_json(f"{run.folder}.json", measured)


# ---- measurements: each takes the model, trained or on the meta device, the dataset and the arguments of the plan


def positions(model, dataset, length, documents, window=0, bounds=(), skip=0):
    """Return the losses by position over held-out texts of `length` tokens, from their beginnings.

    skip: leave out the texts in the first tokens of the held-out split, as many as validation reads.

    window: read in windows of so many tokens that overlap by half, so that a token sees between half a window
    and a whole one; 0: read on with the state. `spans` has the mean losses between two neighbours of `bounds`. Errors
    are standard errors over the texts.
    """
    texts = held_out(dataset, length, documents, skip)
    losses = [read_text(model, *text, window) for text in texts]
    curves = [means_by_position(row) for row in losses]
    spans = [[row[a:b].mean() for a, b in zip(bounds, bounds[1:])] for row in losses]
    span_means, span_errors = mean_and_standard_error(spans)
    return dict(
        texts=[row.mean() for row in losses],
        positions=curves[0][0],
        mean=np.mean([means for _, means in curves], axis=0).tolist(),
        spans=dict(mean=span_means.tolist(), errors=span_errors.tolist()),
    )


def held_out(dataset, length, documents, skip=0):
    """Return [(inputs, targets)] [1, length] of at most so many texts, spread over the held-out split after `skip`
    tokens.

    Each is of one project, if data/source has prepared the dataset. Otherwise a text longer than a row is made of
    successive rows. Refuses a length that no project has.
    """
    return [read_tokens(dataset, start, length) for _, start in find_texts(dataset, length, documents, skip)]


def find_texts(dataset, length, documents, skip=0):
    """Return [(project, first token)] of the texts of `held_out`. Without projects each text is taken for one."""
    texts, row, rows = [], 0, -(-length // dataset.document_length)
    for project, count in dataset.meta.get("held_out", {"": dataset.documents("val")}).items():
        for first in range(row, row + count - rows + 1, rows):
            texts.append((project or first, first * dataset.document_length))
        row += count
    texts = [(project, start) for project, start in texts if start >= skip]
    if not texts:
        refuse(f"{dataset.name} has no held-out text of {length:,} tokens" + f" after the first {skip:,}" * bool(skip))
    count = min(documents, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]


def swapped_context(model, dataset, length, documents, last, recent=0, skip=0, xz=False):
    """Return the mean loss of the last tokens of each held-out text, behind its own beginning and another project's.

    last: how many tokens are scored. recent: how many tokens before them are the text's own in both cases. xz: score
    them by the bits that xz needs for them, without the model.
    """
    texts, losses = find_texts(dataset, length, documents, skip), {"own": [], "foreign": []}
    for i, (project, start) in enumerate(texts):
        foreign_texts = [text for text in texts[i:] + texts[:i] if text[0] != project]
        if not foreign_texts:
            refuse(f"{dataset.name} holds out one project, {project}: a beginning of another one is needed")
        inputs, targets = read_tokens(dataset, start, length)
        beginning = length - last - recent
        foreign = inputs.clone()
        foreign[:, :beginning] = read_tokens(dataset, foreign_texts[0][1], length)[0][:, :beginning]
        for name, ids in (("own", inputs), ("foreign", foreign)):
            if xz:
                losses[name].append(xz_loss(dataset.tokenizer, ids[0].tolist(), last))
            else:
                losses[name].append(read_text(model, ids, targets, 0)[-last:].mean())
    return losses


def xz_loss(tokenizer, ids, last):
    """Return by how much the last tokens lengthen what xz makes of a text, in nats a token."""
    pieces = [tokenizer.token_bytes(token) for token in ids]
    total, beginning = (len(lzma.compress(b"".join(part), preset=9)) for part in (pieces, pieces[:-last]))
    return 8 * math.log(2) * (total - beginning) / last


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
    """Return {context: tokens a second in training}, for random tokens."""
    return {context: tokens / step_seconds(model.config, context, tokens) for context in contexts}


def step_seconds(config, context, tokens):
    """Return the median time of a training step of so many tokens, compiled on a GPU."""
    seconds = make_steps(config, context, tokens, DEVICE)
    warm_up, steps = (3, 5) if DEVICE == "cuda" else (1, 2)
    seconds(warm_up)
    return median(seconds(1) for _ in range(steps))


@AUTOCAST
@torch.inference_mode()
def half_lives(model, dataset, length):
    """Return {layer: a list for each head of half-lives in tokens}: their quantiles of QUANTILES over a held-out text.

    A half-life is log 2 / -log gamma, at most LONGEST. Layers without learned gates are left out.
    """
    quantiles = {}
    for layer, block in enumerate(model.transformer.h):
        if isinstance(getattr(block.attn.mix, "gate", None), LearnedGate):

            def keep(gate, inputs, log_g, layer=layer):
                lives = math.log(2) / (-log_g[0].float()).clamp_min(math.log(2) / LONGEST)
                quantiles[layer] = lives.quantile(lives.new_tensor(QUANTILES), dim=0).T.tolist()

            block.attn.mix.gate.register_forward_hook(keep)
    model(held_out(dataset, length, 1)[0][0].to(DEVICE))
    return quantiles


def state_bytes(model, dataset, tokens):
    """Return {state: the bytes that generation in bfloat16 keeps of one text, in states and windows}."""
    return dict(
        state=sum(generation_bytes(model.attentions(), model.empty_state(1), tokens, 2, torch.bfloat16, "always"))
    )


def model_size(model, dataset, lengths):
    """Return {parameters: their number, bytes: `kept_bytes` after each of these lengths}."""
    return dict(parameters=model.parameter_count(), bytes=kept_bytes(model, lengths))


def kept_bytes(model, lengths):
    """Return the bytes that generation in bfloat16, with states in float32, keeps of texts of these lengths.

    For a moment it needs more: a cache that is moved into a state takes as much as the state.
    """
    state, sizes = model.empty_state(1), []
    for tokens in lengths:
        cache, states = generation_bytes(model.attentions(), state, tokens, 2, torch.float32)
        if states:  # then the layers that have one keep no cache
            cache, states = generation_bytes(model.attentions(), state, tokens, 2, torch.float32, "always")
        sizes.append(cache + states)
    return sizes


MEASURES = {
    "positions": positions,
    "far": positions,
    "swapped": swapped_context,
    "swapped_far": swapped_context,
    "mqar": mqar_task.recall,
    "speed": speed,
    "state": state_bytes,
    "size": model_size,
    "half_lives": half_lives,
}


if __name__ == "__main__":
    run_program(lambda: main(Run(**json.loads(sys.argv[1]))))
