"""Train the runs of an experiment that are missing, then write its tables.

    make_run(SIZES["small"], "softmax, lr 0.001", dict(attention="softmax"), rate=1e-3)     # a Run, for a plan
    main("parts", plan, report)         # plan(size) returns Runs, report(entries, size) returns tables

Every GPU trains one run at a time with train.py, then measure.py measures its model; without a GPU the CPU does.
Runs are kept in out/experiments/, named by the hash of their settings: experiments share equal runs, and a
run that was stopped resumes. NAME.json has the records of an experiment. A run that is in it is not trained again.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch

from sympow.attention.variant import RECIPE
from sympow.code import short_hash
from sympow.compare import read_losses
from sympow.data import DataError
from sympow.data.dataset import Dataset
from sympow.data.files import read_json, write_atomically
from sympow.experiments.report import entries_of
from sympow.runs import checkpoint
from sympow.runs.folder import fingerprint
from sympow.runs.program import Parser, refuse

CONTEXT, WINDOW, LONG = 4096, 2048, 65536  # tokens of training, of a window of softmax, and of long texts
SEEDS = (1337, 1338, 1339, 1340, 1341)


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
        return "out/experiments/" + short_hash(json.dumps([self.dataset, self.settings], sort_keys=True).encode())

    def commands(self):
        """Return the programs that train and measure it, each with its arguments."""
        settings = self.settings | {"dataset": self.dataset, "out_dir": self.folder, "wandb": "disabled"}
        train = ["experiments.train", *(f"--{key}={value}" for key, value in settings.items())]
        measure = ["experiments.measure", json.dumps(asdict(self))]
        return [train, measure] if "max_iters" in settings else [measure]

    def corpus(self):
        """Return what a record says of the dataset. Raises DataError if it is not prepared."""
        dataset = Dataset(self.dataset)
        return dict(name=dataset.name, sha256=fingerprint(dataset), tokens={"train": dataset.tokens("train")})

    def find(self, records):
        """Return the record with these settings on this dataset, or None."""
        for record in records.values():
            same_corpus = record["corpus"]["name"] == os.path.basename(self.dataset)
            if same_corpus and record["settings"] == self.settings:
                return record


@dataclass(frozen=True)
class Size:
    """How large the runs of an experiment are. Contexts, and all other lengths, are divided by `shrink`."""

    model: dict
    dataset: str  # "": the experiment's
    shrink: int
    fewer: int  # a run's steps are divided by it
    tokens_per_step: int
    eval_tokens: int
    documents: int  # that are read by position
    folder: str  # of NAME.json

    @property
    def full(self):
        """Return True if this is the size of the documented tables."""
        return self.shrink == 1

    def shrunk(self, lengths):
        """Return lengths in tokens, divided by `shrink`."""
        return [n // self.shrink for n in lengths]

    def records(self, name):
        """Return the records {key: record} of an experiment, {} if it has none."""
        path = os.path.join(self.folder, f"{name}.json")
        return read_json(path)["runs"] if os.path.exists(path) else {}


SIZES = {
    "small": Size(
        model=dict(n_layer=8, n_head=6, n_embd=384),
        dataset="",
        shrink=1,
        fewer=1,
        tokens_per_step=131072,
        eval_tokens=1 << 21,
        documents=16,
        folder="docs/data",
    ),
    "tiny": Size(
        model=dict(n_layer=4, n_head=2, n_embd=64),
        dataset="pystdlib",
        shrink=64,
        fewer=128,
        tokens_per_step=2048,
        eval_tokens=2048,
        documents=4,
        folder="out/experiments/tiny",
    ),
}


def make_run(size, name, settings, rate, seed=SEEDS[0], measures=None):
    """Return the Run of a model that is trained with a warm-up and a decay in the last fifth.

    settings: train.py's, and two more: steps, if they are not 1,000 divided by `fewer`; and heads, their dimension. The
    Size divides lengths and heads. measures: the Run's, None for none.
    """
    settings = dict(settings)
    context = CONTEXT // size.shrink
    steps = settings.pop("steps", 1000 // size.fewer)
    interval = -(-steps // 12)
    if "window" in settings:
        settings["window"] //= size.shrink
    if heads := settings.pop("heads", 0):
        head_dim = heads if size.full else heads // 8
        settings |= dict(n_head=size.model["n_embd"] // head_dim, head_dim=head_dim)
    schedule = dict(
        block_size=context,
        batch_size=size.tokens_per_step // context,
        tokens_per_step=size.tokens_per_step,
        max_iters=steps,
        max_seconds=0.0,
        eval_interval=interval,
        eval_tokens=size.eval_tokens,
        log_interval=max(1, interval // 5),
        sample_tokens=0,
        learning_rate=rate,
        schedule="wsd",
        warmup_iters=100 // size.fewer,
        min_lr=rate / 10,
        seed=seed,
    )
    return Run(name, size.dataset, RECIPE | size.model | schedule | settings, measures or {})


def main(name, plan, report, corpus="source_bpe"):
    """Run the experiment of this name with the options of the command line; exit with 3 if runs are missing.

    plan(size) may ask for other runs once there are more records. report(entries, size) returns blocks of Markdown.
    corpus: the dataset of size small; "" if the runs need none.
    """
    command = f"python -m experiments.{name}"
    parser = Parser(sys.modules["__main__"].__doc__, prog=command)
    parser.add_argument("--size", choices=SIZES, default="small", help="small: for H100, H200; tiny: minutes on a CPU")
    if corpus:
        parser.add_argument("--dataset", help=f"a prepared dataset (default: {corpus}; of size tiny pystdlib)")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop training after so many; 0: only draw")
    args = parser.parse_args()
    size = SIZES[args.size]
    size = replace(size, dataset=getattr(args, "dataset", None) or size.dataset or corpus)
    path, records, planned = os.path.join(size.folder, name), size.records(name), plan(size)
    if args.minutes:
        try:
            train([run for run in planned if not run.find(records)], records, f"{path}.json", args.minutes)
        except DataError as error:
            refuse(error)
        planned = plan(size)
    missing = "; ".join(f"{run.name}, seed {run.settings['seed']}" for run in planned if not run.find(records))
    if records:
        order = [run.name for run in planned]  # then come records of runs that are not planned any more
        rows = sorted(records.values(), key=lambda record: (*order, record["name"]).index(record["name"]))
        devices = "; ".join(sorted({record["machine"]["device"] for record in rows}))
        blocks = [f"# {name}\n\n    {command} --size={args.size}\n\n{devices}", *report(entries_of(rows), size)]
        if missing:
            blocks.append(f"Not run: {missing}")
        write_atomically(f"{path}.md", ("\n\n".join(blocks) + "\n").encode())
        print(f"wrote {path}.md")
    if missing:
        print(f"not run: {missing}")
        sys.exit(3)


def train(runs, records, path, minutes):
    """Train and measure runs, one on each GPU at a time; add their records and write all records to `path`.

    After so many minutes, or a signal, the others save their checkpoints and stop. Raises DataError if the dataset is
    not prepared.
    """
    for run in runs:
        run.corpus()
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
    """Return True if all steps are taken: train.py's status is 0 after a signal too."""
    steps = run.settings.get("max_iters")
    return not steps or checkpoint.read_progress(checkpoint.newest(run.folder)).step == steps


def make_record(run):
    """Return the record of a run: its settings, corpus and machine, its losses and measurements."""
    record = dict(name=run.name, settings=run.settings, corpus=run.corpus(), **read_json(f"{run.folder}.json"))
    if "max_iters" in run.settings:
        record |= losses(run.folder)
    return record


def losses(folder):
    """Return a run's validation losses, val [[tokens, loss]], its tokens, and the median speed at each context."""
    train, val = read_losses(folder)
    speeds = {}
    for line in train:
        speeds.setdefault(str(line["context"]), []).append(line["tok_per_sec"])
    return dict(
        val=[[line["tokens"], line["val_loss"]] for line in val],
        tokens=train[-1]["tokens"],
        tokens_per_second={context: median(values[1:] or values) for context, values in speeds.items()},  # one compiles
    )
