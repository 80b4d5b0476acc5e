"""Train the runs of an experiment that are missing, then write its table and its figure.

    SIZES["small"].run("softmax", 4096, tokens=524_288_000, attention="softmax")        # a Run, in an experiment's plan
    main("loss_ratios", plan, report)           # plan(size) returns Runs, report(entries, size) what report.py writes

A run is a process (worker.py) on a GPU of its own, or on the CPU one after another. Its folder is in out/experiments/,
named after its attention and a hash of its settings and of the corpus, so experiments that want the same run share it,
and a run that was cut goes on. What came out is kept in NAME.json, and a run that is in there is not trained again; nor
is one of which only losses are wanted and another experiment's NAME.json beside it has them.
"""

import glob
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace

from sympow.data import DataError
from sympow.data.dataset import Dataset
from sympow.data.files import read_json, write_atomically, write_json
from sympow.experiments.report import Entry, write_report
from sympow.runs.folder import fingerprint
from sympow.runs.program import Parser, positive
from sympow.runs.settings import refuse

GRACE = 60  # seconds in which a run that is told to stop saves its checkpoint
STOPPED = 3  # status of a worker that was stopped before its end
NO_TIME = 45  # seconds: with less left, no run is started


@dataclass(frozen=True)
class Run:
    """A row of a table, before it is trained."""

    name: str
    settings: dict  # of train.py; empty: nothing is trained, only measured
    measures: dict = field(default_factory=dict)  # {function of worker.py: its arguments}
    dataset: str = ""  # instead of the command's
    needs: str = ""  # a package without which it cannot run

    def measure(self, **measures):
        """Return the Run with more measures, which are taken after training."""
        return replace(self, measures=self.measures | measures)


@dataclass(frozen=True)
class Size:
    """How large the runs of an experiment are. Contexts, and all other lengths, are divided by `shrink`."""

    name: str
    model: dict
    dataset: str  # unless the command names one
    shrink: int
    fewer: int  # a run's tokens are divided by it
    tokens_per_step: int
    micro_tokens: int  # of a micro-step
    eval_tokens: int
    seconds: float  # of runs at equal time
    documents: int  # that are read by position
    learning_rate: float = 6e-4
    tokens: int = 0  # of every run, if not 0
    folder: str = ""  # of NAME.json
    trains: bool = True  # False: only draws what is there

    def length(self, tokens):
        """Return a context, or another length, at this size."""
        return tokens // self.shrink

    def run(self, name, context, tokens=0, seconds=0.0, **settings):
        """Return the Run at this context (of size small) for so many tokens, or for so many seconds."""
        block = self.length(context)
        steps = max(1, (self.tokens or tokens // self.fewer) // self.tokens_per_step) if tokens else 10**6
        every = -(-steps // 12) if tokens else max(1, 2**24 // self.tokens_per_step // self.fewer)
        settings = self.model | dict(
            block_size=block, batch_size=max(1, self.micro_tokens // block), tokens_per_step=self.tokens_per_step,
            max_iters=steps, max_seconds=seconds, eval_interval=every, eval_tokens=self.eval_tokens,
            log_interval=max(1, every // 5), learning_rate=self.learning_rate, sample_tokens=0,
        ) | settings  # fmt: skip
        return Run(name, settings)


SMALL = Size(
    "small", dict(n_layer=6, n_head=6, n_embd=384), "source", shrink=1, fewer=1, tokens_per_step=131072,
    micro_tokens=131072, eval_tokens=1 << 21, seconds=300.0, documents=16,
)  # fmt: skip
TINY = Size(
    "tiny", dict(n_layer=4, n_head=2, n_embd=64), "pystdlib", shrink=16, fewer=4096, tokens_per_step=4096,
    micro_tokens=4096, eval_tokens=8192, seconds=15.0, documents=4, learning_rate=3e-3,
)  # fmt: skip
TEST = replace(
    TINY, name="test", model=dict(n_layer=4, n_head=1, n_embd=16), shrink=64, fewer=1 << 15, tokens_per_step=1024,
    micro_tokens=1024, eval_tokens=2048, seconds=1.0, documents=2,
)  # fmt: skip
SIZES = {size.name: size for size in (SMALL, TINY, TEST)}


def main(name, plan, report, **defaults):
    """Run the experiment of this name with the options of the command line, whose defaults it may set; return 3 if runs
    are still missing."""
    args = parse(name, defaults)
    size = SIZES[args.size]
    given = dict(dataset=args.dataset or size.dataset, tokens=args.tokens or 0, seconds=args.seconds or size.seconds)
    size = replace(size, **given, folder=args.to, trains=args.minutes > 0)
    os.makedirs(args.to, exist_ok=True)
    path = os.path.join(args.to, f"{name}.json")
    try:
        store = read_json(path) if os.path.exists(path) else {"runs": {}}
        jobs = make_jobs(plan(size), args, size, store["runs"])
        if take_losses(jobs, store["runs"], args.to):
            save_store(path, store["runs"])
    except (DataError, ValueError) as error:
        refuse(error)
    train_missing(jobs, store["runs"], args, save=lambda: save_store(path, store["runs"]))
    entries = [Entry(run.name, run.settings, [job["id"] for job in of], store["runs"]) for run, of in jobs]
    entries = [replace(entry, missing=state_of(of, run)) for entry, (run, of) in zip(entries, jobs)]
    given = [x for x in sys.argv[1:] if not x.startswith(("--minutes=", "--gpus=", "--only="))]  # not of the result
    command = shlex.join(["python", "-m", f"experiments.{name}", *given])
    write_report(name, args.to, entries, report(entries, size), command)
    missing = sum(job["id"] not in store["runs"] for _, of in jobs for job in of)
    print(f"wrote {args.to}/{name}.md" + (f"; {missing} runs are missing: the same command goes on" if missing else ""))
    return 3 if missing else 0


def parse(name, defaults):
    """Return the options of the command line; defaults: those of this experiment."""
    parser = Parser(prog=f"python -m experiments.{name}", description=sys.modules["__main__"].__doc__)
    parser.add_argument("--size", choices=SIZES, default="small", help="small: H200s; tiny: minutes on two CPU cores")
    parser.add_argument("--gpus", help="numbers, one for each run at a time (0,0: two on one), or cpu; default: all")
    parser.add_argument("--dataset", help="a prepared dataset (default: source, of other sizes pystdlib)")
    parser.add_argument("--minutes", type=float, default=1e6, help="the command ends after them; 0: draw what is there")
    parser.add_argument("--seeds", default="1337", help="each run with each of these seeds")
    parser.add_argument("--learning_rates", default="", help="each run with each of these, instead of the size's")
    parser.add_argument("--tokens", type=int, help="of each run that is not at equal time")
    parser.add_argument("--seconds", type=positive, help="of each run at equal time")
    parser.add_argument("--only", default="", help="train the runs alone whose names have one of these texts in them")
    parser.add_argument("--to", help="folder of NAME.json, .md, .png (default: docs/data; else out/experiments/SIZE)")
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    args.to = args.to or ("docs/data" if args.size == "small" else f"out/experiments/{args.size}")
    try:
        args.seeds = [int(x) for x in args.seeds.split(",")]
        args.rates = [float(x) for x in args.learning_rates.split(",") if x]
    except ValueError as error:
        parser.error(f"--seeds and --learning_rates must be numbers with commas between: {error}")
    return args


def make_jobs(runs, args, size, known):
    """Return [(Run, its jobs, one for each seed)], the Runs once for each learning rate. A job is what worker.py reads.

    known: {id: record} of NAME.json. Refuses it if it has records of other corpora than those of the runs.
    """
    rates, jobs = args.rates or [None], []
    names = {run.dataset or size.dataset for run in runs}
    corpora = {name: corpus_of(name, known if not args.minutes else {}) for name in names}
    sums = {corpus["sha256"] for corpus in corpora.values()}
    if others := {of["corpus"]["sha256"] for of in known.values()} - sums:
        raise ValueError(
            f"{args.to} has runs on the corpus {min(others)}, this is {', '.join(sorted(sums))}: runs on different "
            "corpora are not put into one table; give another --to"
        )
    for run in runs:
        for rate in rates if run.settings and run.settings.get("learning_rate") else [None]:
            named = replace(run, name=f"{run.name}, lr {rate:g}" if len(rates) > 1 else run.name)
            if rate:
                named = replace(named, settings=run.settings | {"learning_rate": rate})
            seeds = args.seeds if run.settings.get("learning_rate") else args.seeds[:1]
            dataset = run.dataset or size.dataset
            jobs.append((named, [make_job(named, dataset, corpora[dataset], seed) for seed in seeds]))
    return jobs


def take_losses(jobs, known, folder):
    """Add to `known` the runs of which only losses are wanted, where another NAME.json of the folder has them; return
    how many."""
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), "*.json")))
    trained = {of.split("-")[0]: record for path in paths for of, record in read_json(path).get("runs", {}).items()}
    wanted = {job["id"]: job["id"].split("-")[0] for _, of in jobs for job in of if not job["measures"]}
    taken = {of: trained[key] for of, key in wanted.items() if of not in known and key in trained}
    known |= {of: {name: x for name, x in record.items() if name != "measures"} for of, record in taken.items()}
    return len(taken)


def corpus_of(name, known):
    """Return {name, sha256, files, tokens} of a dataset; of one that is not there, what a known record says of it."""
    try:
        dataset = Dataset(name)
    except DataError:
        if found := [of["corpus"] for of in known.values() if of["corpus"]["name"] == os.path.basename(name)]:
            return found[0]
        raise
    tokens = {split: dataset.tokens(split) for split in ("train", "val")}
    return dict(name=dataset.name, sha256=fingerprint(dataset), files=dataset.meta.get("files"), tokens=tokens)


def make_job(run, dataset, corpus, seed):
    """Return the dict of one run with one seed."""
    settings = run.settings | {"seed": seed}
    key = hashlib.sha256(json.dumps([settings, corpus["sha256"]], sort_keys=True).encode()).hexdigest()[:10]
    attention = settings["attention"].replace(",", "-")[:40]
    folder = os.path.join("out", "experiments", f"{attention}-{key}")  # without the name, which experiments differ in
    measures = hashlib.sha256(json.dumps(run.measures, sort_keys=True).encode()).hexdigest()[:6]
    return dict(
        id=f"{key}-{measures}", name=run.name, settings=settings, measures=run.measures, dataset=dataset, corpus=corpus,
        folder=folder, needs=run.needs,
    )  # fmt: skip


def train_missing(jobs, known, args, save):
    """Start the workers of the jobs that are not in `known`, one on each device at a time; add what they found to it.

    A device that --gpus names several times has as many at a time, once those are done that are timed. From --minutes
    on, or after SIGTERM, the workers are told to stop, and save their checkpoints.
    """
    until = time.monotonic() + 60 * args.minutes
    chosen = [job for run, of in jobs for job in of if any(part in run.name for part in args.only.split(","))]
    if not chosen:
        refuse(f"--only={args.only} is in no run's name: they are {'; '.join(run.name for run, _ in jobs)}")
    chosen = {job["id"]: job for job in chosen if job["id"] not in known and not absent(job["needs"])}
    queue = list(chosen.values()) if args.minutes else []
    slots, running = devices(args.gpus) if queue else [], {}
    timed = [job for job in queue if is_timed(job)]
    others = [job for job in queue if not is_timed(job)]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not without the workers
    try:
        for queue, free in ((timed, list(dict.fromkeys(slots))), (others, slots)):
            for job, status, seconds in run_jobs(queue, free, running, until, min(NO_TIME, 30 * args.minutes)):
                finish(job, status, seconds, known)
                save()
    finally:
        stop(running)
        signal.signal(signal.SIGTERM, before)


def run_jobs(queue, free, running, until, least):
    """Yield (job, status, seconds) of each job of the queue as its worker ends; `running` has those that have not.

    free: devices, each as often as it may have workers; until: when they are told to stop; none is started with less
    than `least` seconds left.
    """
    beside = Counter(free)  # runs that share a GPU
    while queue or running:
        while queue and free and until - time.monotonic() > least:
            job, device = queue.pop(0), free.pop(0)
            job["beside"] = beside[device]
            running[start(job, device)] = job, device, time.monotonic()
        if not running:
            break
        for process in [process for process in running if process.poll() is not None]:
            job, device, begun = running.pop(process)
            free.append(device)
            yield job, process.returncode, time.monotonic() - begun
        if time.monotonic() > until:
            queue.clear()
            stop(running)
        time.sleep(0.05)


def is_timed(job):
    """Return True if what a job finds depends on how fast it runs: it has a GPU alone, before the others begin."""
    return "speed" in job["measures"] or job["settings"].get("max_seconds", 0) > 0


def save_store(path, known):
    """Write NAME.json, with a line for each run."""
    lines = ",\n".join(f"{json.dumps(i)}: {json.dumps(known[i])}" for i in known)
    write_atomically(path, f'{{"runs": {{\n{lines}\n}}}}\n'.encode())


def start(job, device):
    """Start the worker of a job on a device ("cpu" or the number of a GPU); return the process."""
    os.makedirs(job["folder"], exist_ok=True)
    write_json(os.path.join(job["folder"], "job.json"), job)
    with suppress(FileNotFoundError):
        os.remove(os.path.join(job["folder"], "failed"))
    visible = [x for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]  # numbers count among these
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "" if device == "cpu" else visible[int(device)] if visible else device}
    print(f"{job['name']}: training in {job['folder']}, on {device}", flush=True)
    with open(os.path.join(job["folder"], "log"), "a") as log:
        command = [sys.executable, "-m", "experiments.worker", job["folder"]]
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def finish(job, status, seconds, known):
    """Add what the worker of a job has found to `known`, print how it ended, and note the reason if it failed."""
    path = os.path.join(job["folder"], f"{job['id']}.json")
    if os.path.exists(path):
        known[job["id"]] = read_json(path)
        how = "is done"
    elif status in (STOPPED, -signal.SIGTERM, -signal.SIGKILL):
        how = "was stopped and can go on"
    else:
        lines = open(os.path.join(job["folder"], "log"), errors="replace").read().split("\n")
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "")[:300].removeprefix("worker.py: ")
        write_atomically(os.path.join(job["folder"], "failed"), reason.encode())
        how = f"failed, status {status}: {reason} (see {job['folder']}/log)"
    print(f"{job['name']} {how}, {seconds:.0f} s", flush=True)


def stop(running):
    """Tell processes to save and end, and wait for them; end those that take longer than GRACE."""
    for process in running:
        process.terminate()
    until = time.monotonic() + GRACE
    for process in running:
        try:
            process.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def devices(text):
    """Return the devices of --gpus, by default all GPUs, or the CPU."""
    import torch

    count = torch.cuda.device_count()
    found = text.split(",") if text else [str(i) for i in range(count)] or ["cpu"]
    if wrong := [x for x in found if x != "cpu" and not (x.isdecimal() and int(x) < count)]:
        refuse(f"--gpus must be numbers below {count}, the GPUs that torch sees, or cpu, got {wrong[0]}")
    return found


def absent(package):
    """Return True if a package that a run needs cannot be found."""
    from importlib.util import find_spec

    return bool(package) and find_spec(package) is None


def state_of(jobs, run):
    """Return what a table says of a Run that is not done: not run, how far it is, why it failed, or what it needs."""
    if absent(run.needs):
        return f"not run: needs {run.needs}"
    for job in jobs:
        if os.path.exists(path := os.path.join(job["folder"], "failed")):
            return "failed: " + open(path).read().replace("|", "/").partition(";")[0]
        path = os.path.join(job["folder"], "run", "metrics.jsonl")
        if os.path.exists(path) and (lines := open(path).read().splitlines()):
            return f"not finished, trained on {json.loads(lines[-1]).get('tokens', 0):,} tokens"
    return "not run"
