"""Train the runs of an experiment that are missing, then write its tables and its figure.

    SIZES["small"].run("softmax", 4096, steps=1000, attention="softmax")       # a Run, for an experiment's plan
    main("parts", plan, report)           # plan(size) returns Runs, report(entries, size) returns tables and panels

Every GPU trains one run at a time with train.py, then measure.py measures its model; without a GPU the CPU does.
Runs are kept in out/experiments/ATTENTION-HASH, with the hash of their settings: experiments share equal runs, and a
run that was stopped resumes. NAME.json has the records of an experiment. A run that is in it is not trained again.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from types import SimpleNamespace

import torch

from sympow.attention import ATTENTIONS
from sympow.attention.variant import RECIPE
from sympow.code import short_hash
from sympow.compare import read_losses
from sympow.data import DataError
from sympow.data.dataset import Dataset
from sympow.data.files import read_json, write_atomically
from sympow.experiments.report import Entry, plot
from sympow.runs import checkpoint
from sympow.runs.folder import fingerprint
from sympow.runs.program import Parser, refuse
from sympow.runs.starts import environment
from sympow.train import reason_to_stop

CONTEXT, WINDOW, LONG = 4096, 2048, 65536  # tokens of training, of a window of softmax, and of long texts
BOUNDS = (256, 4096, 16384, 65536)  # of the positions that are averaged
MEMORY = (4096, 65536, 1 << 20)  # tokens after which the memory of generation is given
SEEDS = (1337, 1338, 1339)


@dataclass(frozen=True)
class Run:
    """One training with one seed. Without max_iters in its settings a new model is only measured."""

    name: str
    dataset: str
    settings: dict  # of train.py
    measures: dict  # {function of measure.py: its arguments}

    @property
    def folder(self):
        """Return the run's out_dir."""
        digest = short_hash(json.dumps([self.dataset, self.settings], sort_keys=True).encode())
        return f"out/experiments/{self.settings['attention'].replace(',', '-')}-{digest[:10]}"

    def commands(self):
        """Return the programs that train and measure it, each with its arguments."""
        settings = self.settings | {"dataset": self.dataset, "out_dir": self.folder, "wandb": "disabled"}
        commands = []
        if "max_iters" in settings:
            known = all(name in ATTENTIONS for name in settings["attention"].split(","))
            program = "train" if known else "experiments.train"
            commands.append([program, *(f"--{key}={value}" for key, value in settings.items())])
        if self.measures:
            commands.append(["experiments.measure", json.dumps(asdict(self))])
        return commands

    def corpus(self):
        """Return what a record says of the dataset. Raises DataError if it is not prepared."""
        dataset = Dataset(self.dataset)
        return dict(name=dataset.name, sha256=fingerprint(dataset), tokens={"train": dataset.tokens("train")})

    def find(self, records):
        """Return the record with these settings on this dataset, or None."""
        for record in records.values():
            equal = RECIPE | record["settings"] == RECIPE | self.settings  # older records have fewer settings
            if equal and record["corpus"]["name"] == os.path.basename(self.dataset):
                return record


@dataclass(frozen=True)
class Size:
    """How large the runs of an experiment are. Contexts, and all other lengths, are divided by `shrink`."""

    model: dict
    dataset: str
    shrink: int
    fewer: int  # a run's steps are divided by it
    tokens_per_step: int
    eval_tokens: int
    seconds: float  # of runs at equal time
    documents: int  # that are read by position
    learning_rate: float
    folder: str  # of NAME.json

    def new_model(self, name, measures, **settings):
        """Return the Run of a new model that is only measured."""
        return Run(name, self.dataset, RECIPE | self.model | settings, measures)

    def run(self, name, context, steps=0, measures={}, **settings):
        """Return the Run at this context for so many steps (of size small), or without steps for `seconds`."""
        block_size = context // self.shrink
        steps = steps // self.fewer
        interval = -(-steps // 12) or 128 // self.fewer
        defaults = dict(
            block_size=block_size,
            batch_size=self.tokens_per_step // block_size,
            tokens_per_step=self.tokens_per_step,
            max_iters=steps or 10**6,
            max_seconds=0.0 if steps else self.seconds,
            eval_interval=interval,
            eval_tokens=self.eval_tokens,
            log_interval=max(1, interval // 5),
            learning_rate=self.learning_rate,
            sample_tokens=0,
        )
        return self.new_model(name, measures, **defaults | settings)


def variant(name):
    """Return the settings that a name such as "softmax" or "sympow p=2" stands for."""
    attention, _, p = name.partition(" p=")
    return {"attention": attention, "p": int(p)} if p else {"attention": attention}


SIZES = {
    "small": Size(
        model=dict(n_layer=6, n_head=6, n_embd=384),
        dataset="source",
        shrink=1,
        fewer=1,
        tokens_per_step=131072,
        eval_tokens=1 << 21,
        seconds=300.0,
        documents=16,
        learning_rate=6e-4,
        folder="docs/data",
    ),
    "tiny": Size(
        model=dict(n_layer=4, n_head=2, n_embd=64),
        dataset="pystdlib",
        shrink=16,
        fewer=128,
        tokens_per_step=4096,
        eval_tokens=8192,
        seconds=15.0,
        documents=4,
        learning_rate=3e-3,
        folder="out/experiments/tiny",
    ),
}


def make_run(size, title, settings, rate, seed=SEEDS[0]):
    """Return the Run of a model that is read in windows of its context and, where it can be, at once.

    settings: train.py's, and three more: steps, if they are not 1,000; context, if it is not CONTEXT; and heads, their
    dimension, if it is not 64. Size tiny divides heads, windows, contexts and steps.
    """
    settings = schedule(size, rate) | settings
    if "window" in settings:
        settings["window"] //= size.shrink
    if "heads" in settings:
        width = size.model["n_embd"]
        heads = settings.pop("heads")
        head_dim = max(4, min(heads, heads * width // 384 // 2 * 2))  # a width below 384 has smaller heads
        settings |= dict(n_head=width // head_dim, head_dim=head_dim)
    texts = texts_measure(size)
    measures = {"size": dict(lengths=[n // size.shrink for n in MEMORY]), "positions": texts}
    measures["half_lives"] = dict(length=CONTEXT // size.shrink)
    grows = "softmax" in settings["attention"] and "window" not in settings
    if not grows:
        measures["far"] = texts | dict(window=0)
    context, steps = settings.pop("context", CONTEXT), settings.pop("steps", 1000)
    return size.run(title, context, steps, measures, seed=seed, **settings)


def schedule(size, rate):
    """Return the settings of a rate with warm-up and decay, and of size small eight layers."""
    settings = dict(learning_rate=rate, schedule="wsd", warmup_iters=100 // size.fewer, min_lr=rate / 10)
    return settings | (dict(n_layer=8) if size.shrink == 1 else {})


def texts_measure(size):
    """Return the arguments of `positions` for texts that validation does not read, in windows."""
    texts = dict(length=LONG // size.shrink, documents=size.documents, skip=size.eval_tokens)
    return texts | dict(bounds=[n // size.shrink for n in BOUNDS], window=CONTEXT // size.shrink)


def main(name, plan, report, seeds=(1337,), corpus="source"):
    """Run the experiment of this name with the options of the command line; exit with 3 if runs are missing.

    plan(size) may ask for other runs once there are more records. seeds: the default of --seeds; None if plan chooses.
    corpus: the dataset of size small; None if the runs need none.
    """
    command = f"python -m experiments.{name}"
    parser = Parser(sys.modules["__main__"].__doc__, prog=command)
    parser.add_argument("--size", choices=SIZES, default="small", help="small: for H100, H200; tiny: minutes on a CPU")
    default = {"small": corpus, "tiny": SIZES["tiny"].dataset}
    if corpus:
        help_text = "a prepared dataset (default: {small}; of size tiny {tiny})"
        parser.add_argument("--dataset", help=help_text.format(**default))
    parser.add_argument("--minutes", type=float, default=1e6, help="stop training after so many; 0: only draw")
    if seeds:
        parser.add_argument("--seeds", type=int, nargs="+", default=seeds, help="train each run with each of these")
    args = parser.parse_args()
    size = replace(SIZES[args.size], dataset=getattr(args, "dataset", None) or default[args.size])
    path = os.path.join(size.folder, name)
    records = read_records(f"{path}.json")
    missing = [run for run in plan_seeds(plan, size, args) if not run.find(records)]
    if missing and args.minutes:
        try:
            for run in missing:
                run.corpus()  # refuses one that is not prepared
            train(missing, records, f"{path}.json", args.minutes)
        except DataError as error:
            refuse(error)
    entries = {}
    missing = []
    for run in plan_seeds(plan, size, args):
        if record := run.find(records):
            entries.setdefault(run.name, Entry(run.name, [])).records.append(record)
        else:
            missing.append(f"{run.name}, seed {run.settings['seed']}")
    if entries:
        blocks, panels = report(entries, size)
        devices = {record["machine"]["device"] for entry in entries.values() for record in entry.records}
        title = f"# {name}\n\n    {command} --size={args.size}\n\n{'; '.join(sorted(devices))}"
        write_report(path, name, [title, *blocks], panels, missing)
    if missing:
        print(f"not run: {'; '.join(missing)}")
        sys.exit(3)


def plan_seeds(plan, size, args):
    """Return the runs of a plan, with each of the command line's seeds where it takes them."""
    seeds = [{"seed": seed} for seed in getattr(args, "seeds", ())] or [{}]
    return [replace(run, settings=run.settings | seed) for run in plan(size) for seed in seeds]


def read_records(path):
    """Return the records {key: record} of a NAME.json, {} if it is missing."""
    return read_json(path)["runs"] if os.path.exists(path) else {}


def write_report(path, name, blocks, panels, missing):
    """Write blocks of Markdown and the names of missing runs to PATH.md, and panels to PATH.png.

    name: the last part of the path.
    """
    if missing:
        blocks.append("Not run: " + "; ".join(missing))
    panels = [panel for panel in panels if panel.lines]
    if panels:
        plot(panels, f"{path}.png")
        blocks.append(f"![{name}]({name}.png)")
    write_atomically(f"{path}.md", ("\n\n".join(blocks) + "\n").encode())
    print(f"wrote {path}.md")


def train(runs, records, path, minutes):
    """Train and measure runs, one on each GPU at a time; add their records and write all records to `path`.

    After so many minutes, or a signal, the others save their checkpoints and stop.
    """
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    deadline = time.monotonic() + 60 * minutes
    pending = iter(runs)
    workers = [train_on(gpu, pending, records, path) for gpu in gpus.split(",")]  # without GPUs there is one, ""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        while workers and time.monotonic() < deadline:
            workers = [worker for worker in workers if next(worker, "ended") != "ended"]
            time.sleep(0.1)
    finally:
        for worker in workers:
            worker.close()


def train_on(gpu, runs, records, path):
    """Train and measure runs one after another on a GPU, and add each record; yield while a program runs."""
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    for run in runs:
        os.makedirs(os.path.dirname(run.folder), exist_ok=True)
        for program, *arguments in run.commands():
            print(f"{run.name}: {program} in {run.folder}", flush=True)
            with open(f"{run.folder}.log", "a") as log:
                command = [sys.executable, "-m", program, *arguments]
                process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
            try:
                while process.poll() is None:
                    yield
            finally:  # close() comes while it runs
                process.terminate()
                process.wait()
            if process.returncode:
                print(f"{run.name}: status {process.returncode}, see {run.folder}.log", flush=True)
                break
        else:
            if is_complete(run):
                records[os.path.basename(run.folder)] = make_record(run)
                write_atomically(path, json.dumps({"runs": records}).encode())


def is_complete(run):
    """Return True if the training reached its limit of steps or seconds: train.py's status is 0 after a signal too."""
    if "max_iters" not in run.settings:
        return True
    progress = checkpoint.read_progress(checkpoint.newest(run.folder))
    return bool(reason_to_stop(SimpleNamespace(**run.settings), progress))


def make_record(run):
    """Return the record of a run: its settings, corpus and machine, its losses and measurements."""
    machine = environment()
    machine = dict(device=(*machine["gpus"], "CPU")[0], commit=machine["commit"][:10], **machine["versions"])
    record = dict(name=run.name, settings=run.settings, corpus=run.corpus(), machine=machine)
    measured = losses(run.folder) if "max_iters" in run.settings else {}
    if run.measures:
        measured["measures"] = read_json(f"{run.folder}.json")
    return record | json.loads(json.dumps(measured), parse_float=lambda digits: round(float(digits), 5))


def losses(folder):
    """Return the curves of a run, train and val [[tokens, loss]], and how fast it was.

    Seconds are the time of training steps alone, without compilation, evaluations and checkpoints: tokens divided by
    the median speed at their context. grad_norm has the norms of the gradient at the steps of train. gate and beta are
    the values of the layers at the end.
    """
    train, val = read_losses(folder)
    begins = {}  # {context: tokens at its first logged step}
    speeds = {}
    for line in train:
        begins.setdefault(line["context"], line["tokens"])
        speeds.setdefault(str(line["context"]), []).append(line["tok_per_sec"])
    speeds = {context: median(values[1:] or values) for context, values in speeds.items()}  # the first line compiles
    borders = [0, *list(begins.values())[1:], val[-1]["tokens"]]
    record = dict(
        train=[[line["tokens"], line["train_loss"]] for line in train],
        val=[[line["tokens"], line["val_loss"]] for line in val],
        grad_norm=[line["grad_norm"] for line in train],
        tokens=train[-1]["tokens"],
        seconds=sum((end - begin) / speed for (begin, end), speed in zip(pairwise(borders), speeds.values())),
        tokens_per_second=speeds,
    )
    return record | {name: val[-1][name] for name in ("gate", "beta") if name in val[-1]}
