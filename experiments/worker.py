"""Train one run of an experiment, measure it, and write what came out: a process of its own for each run.

    python -m experiments.worker out/experiments/softmax-0123456789       # reads job.json, writes ID.json

The status is 3 if the run was stopped before its end: the next call goes on.
"""

import os
import signal
import sys
import time
from contextlib import nullcontext
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

from sympow import train
from sympow.compare import read_losses
from sympow.data.dataset import Dataset
from sympow.data.files import read_json, write_json
from sympow.data.loader import Windows
from sympow.data.recall.tasks import questions
from sympow.experiments import gated_deltanet
from sympow.experiments.runs import STOPPED
from sympow.model import GPT, GPTConfig
from sympow.runs import checkpoint
from sympow.runs.folder import environment
from sympow.runs.load import load_run
from sympow.training.optimizer import make_optimizer
from sympow.runs.plots import mean_and_standard_error, means_by_position
from sympow.runs.program import run_program
from sympow.runs.scores import losses_by_position
from sympow.runs.settings import fields_of, refuse

POINTS = 200  # of a curve that is kept
AT_ONCE = 1 << 16  # tokens of short windows that are read together


def main(folder):
    """Do the job of this folder; return 3 if training was stopped before its end."""
    job = read_json(os.path.join(folder, "job.json"))
    if job["needs"] and (reason := gated_deltanet.register()):
        refuse(reason)
    record = {key: job[key] for key in ("name", "settings", "corpus")}
    trains = "learning_rate" in job["settings"]
    if trains:
        out_dir = os.path.join(folder, "run")
        settings = {**job["settings"], "dataset": job["dataset"], "out_dir": out_dir, "wandb": "disabled"}
        sys.argv[1:] = [f"--{key}={value}" for key, value in settings.items()]
        train.main()
        if not is_finished(out_dir, settings):
            return STOPPED
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what is measured is not saved half-way
        record |= losses(out_dir) | {"parameters": parameters(out_dir)}
    loaded = load_run(out_dir, SimpleNamespace(device="auto", dtype="auto")) if trains and job["measures"] else None
    for name, arguments in job["measures"].items():
        started = time.monotonic()
        record.setdefault("measures", {})[name] = MEASURES[name](job, loaded, **arguments)
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    machine = environment()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    gpu += f", shared by {job['beside']} runs" if job["beside"] > 1 else ""
    versions = {name: machine["versions"][name] for name in ("torch", "triton")}
    record["machine"] = dict(device=gpu, commit=machine["commit"][:10], **versions)
    write_json(os.path.join(folder, f"{job['id']}.json"), record)


def is_finished(folder, settings):
    """Return True if the newest checkpoint is that of the run's end."""
    newest = checkpoint.newest(folder)
    progress = newest and checkpoint.read_progress(newest)
    limit = settings["max_seconds"]
    return bool(progress) and (progress.step >= settings["max_iters"] or 0 < limit <= progress.seconds)


def losses(folder):
    """Return the curves of a run: train [[tokens, loss]], val [[tokens, loss, seconds]], and sums of its lines.

    stages are [[context, tokens at its first logged step]]. Seconds are those of training steps alone, without
    compilation, evaluations and checkpoints: tokens by the logged speed, where the first line after a start or a
    change of context has the speed of the next one.
    """
    lines, val = read_losses(folder)
    marks, seconds, before = [(0, 0.0)], 0.0, 0
    for i, line in enumerate(lines):
        later = lines[i + 1] if i + 1 < len(lines) else line
        alone = later["tokens"] - line["tokens"] > line["tokens"] - before  # one step, after a start
        alone = alone or not i or line.get("context") != lines[i - 1].get("context")
        speed = (later if alone and later.get("context") == line.get("context") else line)["tok_per_sec"]
        seconds += (line["tokens"] - before) / speed
        before = line["tokens"]
        marks.append((before, seconds))
    times = np.interp([line["tokens"] for line in val], *zip(*marks))
    parts = np.array_split(np.arange(len(lines)), min(POINTS, len(lines)))
    mean = lambda key, part: float(np.mean([lines[i][key] for i in part]))
    speeds, stages = {}, {}
    for line in lines:
        stages.setdefault(line.get("context"), line["tokens"])
    for line in lines[1:] or lines:
        speeds.setdefault(str(line.get("context")), []).append(line["tok_per_sec"])
    return dict(
        train=[[int(mean("tokens", part)), round(mean("train_loss", part), 5)] for part in parts],
        val=[[line["tokens"], round(line["val_loss"], 5), round(float(t), 2)] for line, t in zip(val, times)],
        tokens=lines[-1]["tokens"], seconds=round(seconds, 2), wall_seconds=round(lines[-1]["seconds"], 1),
        tokens_per_second={context: median(of) for context, of in speeds.items()}, stages=list(stages.items()),
    )  # fmt: skip


def parameters(folder):
    """Return how many parameters the model of a run has."""
    config = GPTConfig(**checkpoint.settings(folder)["model"])
    with torch.device("meta"):
        return GPT(config).parameter_count()


# ---- what is measured: each takes the job, the run as load_run returns it, and the arguments of the plan


def positions(job, loaded, length, documents, window=0, start=0, bounds=()):
    """Return the losses by position over held-out texts of `length` tokens, from their beginnings.

    window: read in windows of so many tokens, each half of the one before, so that a token sees between half a window
    and a whole one; 0: read on with the state. The loss, and that of each text, is over the positions from `start` on;
    spans has those of the positions above one of `bounds`, up to the next. Errors are standard errors over the texts.
    """
    dataset, curves, means, spans = Dataset(job["dataset"]), [], [], []
    texts = held_out(dataset, length, documents)
    for inputs, targets in texts:
        found = windowed(loaded, inputs, targets, window)
        at, curve = means_by_position(found)
        curves.append(curve)
        means.append([found[start:].mean()])
        spans.append([found[a:b].mean() for a, b in zip(bounds, bounds[1:])])
    ([loss], [error]), (mean, errors), (of, of_errors) = map(mean_and_standard_error, (means, curves, spans))
    rounded = lambda x: np.round(x, 5).tolist()
    return dict(
        documents=len(texts), length=length, joined=any(bool((x[0, 1:] == dataset.eot).any()) for x, _ in texts),
        loss=float(loss), error=float(error), texts=rounded(np.ravel(means)), positions=[round(x, 1) for x in at],
        mean=rounded(mean), errors=rounded(errors),
        spans=dict(bounds=list(bounds), mean=rounded(of), errors=rounded(of_errors)),
    )  # fmt: skip


def held_out(dataset, length, documents):
    """Return [(inputs, targets)] [1, length] of texts that are spread over the held-out split.

    Texts longer than a row are of one project each where data/source has prepared the dataset and a project is long
    enough; else they are rows of whatever stands behind one another, with ends of text between.
    """
    rows, at, starts = -(-length // dataset.document_length), 0, []
    for count in dataset.meta.get("held_out", {}).values() if rows > 1 else ():
        starts += range(at, at + count - rows + 1, rows)
        at += count
    if starts:
        found = [dataset.read("val", start * dataset.document_length, length) for start in spread(starts, documents)]
        found = [torch.from_numpy(text.astype(np.int64))[None] for text in found]
        return [(torch.cat((torch.full((1, 1), dataset.eot), text[:, :-1]), 1), text) for text in found]
    windows = Windows(dataset, "val", length, pack=rows > 1, name="length")
    return [windows.batch([i * windows.per_document]) for i in spread(range(windows.documents), documents)]


def spread(items, count):
    """Return at most `count` of a sequence's items, at equal distances."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


@torch.inference_mode()
def windowed(loaded, inputs, targets, window):
    """Return the losses [length] float64 of the targets of one text, read as `positions` says."""
    _, model, _, device, autocast = loaded
    length = inputs.shape[1]
    with autocast:
        if not window or window >= length:
            return losses_by_position(model, inputs.to(device), targets.to(device))[0].double().cpu().numpy()
        half = window // 2
        x, y = (t[0].unfold(0, window, half) for t in (inputs, targets))
        found = []
        for a, b in zip(x.split(max(1, AT_ONCE // window)), y.split(max(1, AT_ONCE // window))):
            found.append(losses_by_position(model, a.to(device), b.to(device), window).double().cpu())
    found = torch.cat(found).numpy()
    return np.concatenate([found[0, :half], found[:, half:].reshape(-1)])


@torch.inference_mode()
def recall(job, loaded, documents):
    """Return the share of questions answered, by distance, over the long documents of a dataset of data/recall."""
    _, model, _, device, autocast = loaded
    dataset = Dataset(job["dataset"])
    windows, task = Windows(dataset, "val", dataset.document_length), dataset.meta["task"]
    texts, answers = [], []
    for i in range(dataset.meta["short"], min(windows.documents, dataset.meta["short"] + documents)):
        inputs, targets = windows.batch([i])
        state, given = model.empty_state(1), []
        with autocast:
            for part in inputs.to(device).split(65536 if device.type == "cuda" else 1024, 1):
                x, state = model.hidden(part, state)
                given += [model.logits(rows)[0].argmax(-1).cpu() for rows in x.split(8192, 1)]
        texts.append(targets[0].numpy().astype(np.uint8).tobytes())
        answers.append(torch.cat(given).numpy())
    return score(texts, answers, task, dataset.document_length) | dict(documents=len(texts), task=task)


def score(texts, answers, task, length):
    """Return {distance: [...], accuracy: [...], questions: [...]} over distances between powers of two up to `length`.

    texts: bytes; answers: for each an array of the ids that a model expects there. A value is right if all its letters
    are. A distance is the geometric middle of its interval; intervals without questions are left out.
    """
    right, asked = np.zeros(64), np.zeros(64, int)
    for text, answer in zip(texts, answers):
        for distance, begin, end in questions(text, task):
            interval = distance.bit_length() - 1
            asked[interval] += 1
            right[interval] += list(answer[begin:end]) == list(text[begin:end])
    there = [i for i in range(64) if asked[i] and 1 << i <= length]
    return dict(
        distance=[round(2 ** (i + 0.5)) for i in there], accuracy=[right[i] / asked[i] for i in there],
        questions=[int(asked[i]) for i in there],
    )  # fmt: skip


def speed(job, loaded, contexts, tokens, layers=()):
    """Return {context: tokens a second in training}, of a fresh model and random tokens.

    layers: measure models of these two depths instead and compute the whole one's from them, by a line.
    """
    found = {}
    for context in contexts:
        depths = layers or (job["settings"]["n_layer"],)
        times = [step_seconds({**job["settings"], "n_layer": n}, context, max(tokens, context)) for n in depths]
        slope = (times[-1] - times[0]) / (depths[-1] - depths[0]) if layers else 0.0
        whole = times[0] + slope * (job["settings"]["n_layer"] - depths[0])
        found[str(context)] = max(tokens, context) / whole
    return found


def config_of(settings):
    """Return the GPTConfig of a run's settings, whose vocabulary is that of bytes unless they say otherwise."""
    return GPTConfig(**{"vocab_size": 257, **fields_of(GPTConfig, settings)})


def step_seconds(settings, context, tokens):
    """Return the median time of a training step of so many tokens of a new model, compiled on a GPU as in training."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_of(settings)
    model = GPT(config).to(device)
    optimizer = make_optimizer(model, train.TrainConfig())
    torch.set_float32_matmul_precision("high")
    torch.compiler.reset()
    network = torch.compile(model, dynamic=False) if device.type == "cuda" else model
    ids = torch.randint(config.vocab_size, (tokens // context, context + 1), device=device)
    times, (warm_up, steps) = [], (3, 5) if device.type == "cuda" else (1, 2)
    for _ in range(warm_up + steps):
        begun = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
            _, loss = network(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the GPU
        times.append(time.perf_counter() - begun)
    return median(times[warm_up:])


def state(job, loaded, tokens, itemsize=2):
    """Return {cache, state}: bytes that one text's generation keeps after so many tokens, if it has states at once."""
    model = GPT(config_of(job["settings"]))
    found = [
        block.attn.mix.generation_bytes(layer, tokens, itemsize, torch.bfloat16, "always")
        for block, layer in zip(model.transformer.h, model.empty_state(1).layers)
    ]
    cache, fixed = (sum(part) for part in zip(*found))
    return dict(cache=cache, state=fixed)


MEASURES = dict(positions=positions, targets=positions, far=positions, recall=recall, speed=speed, state=state)


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1]))
