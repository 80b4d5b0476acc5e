"""Train the runs of an experiment that are missing, then write its tables and its figure.

    SIZES["small"].run("softmax", 4096, steps=1000, attention="softmax")       # a Run, for an experiment's plan
    main("loss_ratios", plan, report)       # plan(size) returns Runs, report(entries, size) returns tables and panels

Every GPU trains one run at a time with train.py, then measure.py reads with its model; without a GPU the CPU does.
Runs are kept in out/experiments/ATTENTION-HASH, with the hash of their settings: experiments share equal runs, and a
run that was stopped goes on. NAME.json has the records of an experiment. A run that is in it is not trained again.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from queue import SimpleQueue
from statistics import median

import torch

from sympow.data.dataset import Dataset
from sympow.data.files import read_json, write_atomically
from sympow.experiments.report import Entry, plot, step_times
from sympow.runs.folder import environment, fingerprint
from sympow.runs.program import Parser


@dataclass(frozen=True)
class Run:
    """One training with one seed. Without max_iters in its settings a new model is only measured."""

    name: str
    dataset: str
    settings: dict  # of train.py
    measures: dict = field(default_factory=dict)  # {function of measure.py: its arguments}

    def measure(self, **measures):
        """Return the Run with these measures, which are taken after training."""
        return replace(self, measures=measures)

    @property
    def folder(self):
        """Return the run's out_dir."""
        digest = hashlib.sha256(json.dumps([self.dataset, self.settings], sort_keys=True).encode()).hexdigest()
        return f"out/experiments/{self.settings['attention'].replace(',', '-')}-{digest[:10]}"

    def find(self, records):
        """Return the record with these settings on this dataset, or None."""
        for record in records:
            if record["settings"] == self.settings and record["corpus"]["name"] == os.path.basename(self.dataset):
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

    def length(self, tokens):
        """Return a context, or another length, at this size."""
        return tokens // self.shrink

    def model_run(self, name, **settings):
        """Return the Run of a new model that is only measured."""
        return Run(name, self.dataset, self.model | settings)

    def run(self, name, context, steps=0, seconds=0.0, **settings):
        """Return the Run at this context for so many steps (of size small), or for so many seconds."""
        block_size, steps = self.length(context), steps // self.fewer
        interval = -(-steps // 12) or 128 // self.fewer
        defaults = dict(
            block_size=block_size,
            batch_size=self.tokens_per_step // block_size,
            tokens_per_step=self.tokens_per_step,
            max_iters=steps or 10**6,
            max_seconds=seconds,
            eval_interval=interval,
            eval_tokens=self.eval_tokens,
            log_interval=max(1, interval // 5),
            learning_rate=self.learning_rate,
            sample_tokens=0,
        )
        return self.model_run(name, **defaults | settings)


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


def main(name, plan, report, seeds=(1337,), prepare=None):
    """Run the experiment of this name with the options of the command line; return 3 if runs are missing at its end.

    seeds: the default of --seeds. prepare: a function of the Size that prepares data before anything is trained.
    """
    parser = Parser(prog=f"python -m experiments.{name}", description=sys.modules["__main__"].__doc__)
    parser.add_argument("--size", choices=SIZES, default="small", help="small: H200s; tiny: minutes on two CPU cores")
    parser.add_argument("--dataset", help="a prepared dataset (default: source; of size tiny pystdlib)")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop training after them; 0: draw what is there")
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds, help="train each run with each of these seeds")
    parser.add_argument("--to", help="folder of NAME.json, .md, .png (default: docs/data; out/experiments/tiny)")
    args = parser.parse_args()
    size = SIZES[args.size]
    size = replace(size, dataset=args.dataset or size.dataset, folder=args.to or size.folder)
    runs = [replace(run, settings=run.settings | {"seed": seed}) for run in plan(size) for seed in args.seeds]
    path = os.path.join(size.folder, name)
    records = read_json(f"{path}.json")["runs"] if os.path.exists(f"{path}.json") else {}
    missing = [run for run in runs if not run.find(records.values())]
    if missing and args.minutes:
        if prepare:
            prepare(size)
        for run in train(missing, args.minutes):
            records[os.path.basename(run.folder)] = make_record(run)
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(record)}" for key, record in records.items())
            write_atomically(f"{path}.json", f'{{"runs": {{\n{lines}\n}}}}\n'.encode())
    entries, absent = {}, []
    for run in runs:
        if record := run.find(records.values()):
            entries.setdefault(run.name, Entry(run.name, run.settings, [])).records.append(record)
        else:
            absent.append(f"{run.name}, seed {run.settings['seed']}")
    if absent:
        print(f"{len(absent)} runs are missing: the same command goes on")
    if entries:
        title = f"# {name}\n\n    python -m experiments.{name} --size={args.size}"
        write_report(path, title, entries, *report(entries, size), absent)
    return 3 if absent else 0


def write_report(path, title, entries, blocks, panels, absent):
    """Write the title, the machines and the blocks to PATH.md, and the panels to PATH.png.

    absent: the names of runs that have no record.
    """
    records = [record for entry in entries.values() for record in entry.records]
    machines = {", ".join(f"{key} {value}" for key, value in record["machine"].items()) for record in records}
    blocks = [title, "; ".join(sorted(machines)), *blocks]
    if absent:
        blocks.append("Not run: " + "; ".join(absent))
    if panels := [panel for panel in panels if panel.lines]:
        plot(panels, f"{path}.png")
        name = os.path.basename(path)
        blocks.append(f"![{name}]({name}.png)")
    write_atomically(f"{path}.md", ("\n\n".join(blocks) + "\n").encode())
    print(f"wrote {path}.md")


def train(runs, minutes):
    """Train and measure runs, one on each GPU at a time, and yield those that are finished.

    After so many minutes the others save their checkpoints and stop.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    stop, gpus = threading.Event(), SimpleQueue()
    for name in names.split(","):  # "" without GPUs
        gpus.put(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ThreadPoolExecutor(gpus.qsize()) as pool:
        futures = {pool.submit(train_run, run, gpus, stop): run for run in runs}
        try:
            for future in as_completed(futures, timeout=60 * minutes):
                if future.result():
                    yield futures[future]
        except TimeoutError:
            print(f"{minutes:g} minutes are over", flush=True)
        finally:  # after SIGTERM and Ctrl-C, too
            stop.set()


def train_run(run, gpus, stop):
    """Train and measure a run on a free GPU; return True if both succeed before the Event `stop` is set."""
    settings = run.settings | {"dataset": run.dataset, "out_dir": run.folder, "wandb": "disabled"}
    program = "experiments.gated_deltanet" if settings["attention"] == "gated_deltanet" else "train"
    commands, gpu, status = [], gpus.get(), 0
    if "max_iters" in settings:
        commands.append([program, *(f"--{key}={value}" for key, value in settings.items())])
    if run.measures:
        commands.append(["experiments.measure", json.dumps(asdict(run))])
    for command in commands:
        if not (status or stop.is_set()):
            print(f"{run.name}: {command[0]} in {run.folder}", flush=True)
            status = execute(command, gpu, f"{run.folder}.log", stop)
            if status:
                print(f"{run.name} ended with status {status}: see {run.folder}.log", flush=True)
    gpus.put(gpu)
    return not (status or stop.is_set())


def execute(command, gpu, log, stop):
    """Run `python -m COMMAND` on a GPU, terminate it when the Event `stop` is set, and return its status."""
    os.makedirs(os.path.dirname(log), exist_ok=True)
    with open(log, "a") as file:
        variables = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        process = subprocess.Popen([sys.executable, "-m", *command], env=variables, stdout=file, stderr=file)
    while process.poll() is None:
        if stop.wait(0.1):
            process.terminate()
            process.wait()
    return process.returncode


def make_record(run):
    """Return the record of a run: its settings, corpus and machine, its losses and measurements."""
    dataset, machine = Dataset(run.dataset), environment()
    tokens = {"train": dataset.tokens("train")}
    corpus = dict(name=dataset.name, sha256=fingerprint(dataset), files=dataset.meta.get("files"), tokens=tokens)
    versions = {name: machine["versions"][name] for name in ("torch", "triton")}
    machine = dict(device=(*machine["gpus"], "CPU")[0], commit=machine["commit"][:10], **versions)
    record = dict(name=run.name, settings=run.settings, corpus=corpus, machine=machine)
    if "max_iters" in run.settings:
        record |= losses(run.folder)
    if run.measures:
        record["measures"] = read_json(f"{run.folder}.json")
    return record


def losses(folder):
    """Return the curves of a run: train [[tokens, loss]] and val [[tokens, loss, seconds]].

    stages are [[context, tokens at its first logged step]]. Seconds are the time of training steps alone, without
    compilation, evaluations and checkpoints: tokens divided by the median speed at their context. gate and beta are the
    values of the layers at the end.
    """
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    train, val = ([line for line in lines if name in line] for name in ("train_loss", "val_loss"))
    stages, speeds = {}, {}
    for line in train:
        stages.setdefault(line["context"], line["tokens"])
        speeds.setdefault(str(line["context"]), []).append(line["tok_per_sec"])
    speeds = {context: median(values[1:] or values) for context, values in speeds.items()}  # the first line compiles
    stages = list(stages.items())
    seconds = step_times(stages, speeds, [line["tokens"] for line in val])
    return dict(
        train=[[line["tokens"], line["train_loss"]] for line in train],
        val=[[line["tokens"], line["val_loss"], time] for line, time in zip(val, seconds)],
        tokens=train[-1]["tokens"],
        seconds=seconds[-1],
        tokens_per_second=speeds,
        stages=stages,
        **{name: val[-1][name] for name in ("gate", "beta") if name in val[-1]},
    )
