"""Run the programs on a small dataset, in this process or in forks of a server: faster than a new interpreter."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMALL = (
    "--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 --tokens_per_step=256 --max_iters=6 "
    "--eval_interval=3 --eval_tokens=512 --log_interval=1 --wandb=disabled --learning_rate=1e-2 --sample_tokens=5"
).split()

# the block of a Llama with all that Qwen has besides; none of it is a default
LLAMA = dict(norm="rmsnorm", norm_eps=1e-2, activation="swiglu", mlp_width=24, qk_norm=True, qkv_bias=True)
LLAMA |= dict(tied_head=False, rope_unit="radian", rope_base=100.0)


def call(main, *argv):
    """Call main() with these arguments in this process; return its exit status."""
    saved, handlers = sys.argv, {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    sys.argv = [main.__module__.rpartition(".")[2] + ".py", *map(str, argv)]
    try:
        main()
        return 0
    except SystemExit as exit:
        return exit.code or 0
    finally:
        sys.argv = saved
        for s, handler in handlers.items():
            signal.signal(s, handler)
        if (pipe := signal.set_wakeup_fd(-1)) >= 0:  # of StopSignals: its thread ends with the pipe
            os.close(pipe)
            for thread in [thread for thread in threading.enumerate() if thread.name == "signals"]:
                thread.join()


def run(*argv, check=True, **kwargs):
    """Run a program of the repository in a new interpreter, in the current folder; takes seconds to import torch."""
    env = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **kwargs.pop("env", {})}
    env = {name: value for name, value in env.items() if value is not None}
    done = subprocess.run(
        [sys.executable, *map(str, argv)], capture_output=True, text=True, env=env, timeout=3600, **kwargs
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def start(function, *argv, env=None, cwd=".", log=None):
    """Start function() with these arguments in a process of its own, forked from a server that has imported torch.

    function is a program's main or another function of a module, without arguments. What it prints goes to the file
    `log`; a variable of env that is None is removed. Returns a multiprocessing.Process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sympow.train", "torch._dynamo"])  # an optimizer imports the second, in 2 s
    server = {"PYTHONPATH": os.pathsep.join((ROOT, os.path.dirname(__file__))), "OMP_NUM_THREADS": "1"}
    saved = {name: os.environ.get(name) for name in server}
    os.environ.update(server)  # has an effect in the first call only, which starts the server
    try:
        log = os.path.abspath(log or os.path.join(cwd, "log"))
        args = (function, list(map(str, argv)), env or {}, os.path.abspath(cwd), log)
        process = context.Process(target=_child, args=args)
        process.start()
    finally:
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return process


def _child(function, argv, env, cwd, log):
    """Call a function as a program would run: with argv, environment, folder, and the file `log` for its output."""
    for name, value in env.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    os.chdir(cwd)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)
    sys.argv = [function.__module__.rpartition(".")[2] + ".py", *argv]
    function()


def free_port():
    """Return the number of a port that nobody uses."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start_ranks(count, function, *argv, cwd=".", cwds=None):
    """Start function() in `count` processes that train together; return them. Rank i prints to the file rank_i in cwd.

    cwds: a folder for each rank, if they do not all run in cwd.
    """
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    ranks = [{**env, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(count)]
    folders, logs = cwds or count * [cwd], [os.path.join(cwd, f"rank_{i}") for i in range(count)]
    return [start(function, *argv, env=env, cwd=folder, log=log) for env, folder, log in zip(ranks, folders, logs)]


def join(*processes, timeout=600):
    """Wait for processes to end and return their exit codes; kill them if they do not, even on a busy machine."""
    for process in processes:
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def byte_encoding():
    """Return an encoding of all bytes, in place of GPT-2's vocabulary, which needs a network."""
    import tiktoken

    ranks = {bytes([i]): i for i in range(256)}
    return tiktoken.Encoding("t", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})


def flip_bits(path):
    """Yield after each of about 50 single flipped bits in a file of text, but for flips that change spaces alone."""
    content = path.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 50)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        if path.read_bytes().split() != content.split():
            yield position


def verify(dataset):
    """Assert that the shards of a Dataset are what was written."""
    from sympow.data.files import sha256_of
    from sympow.data.meta import shards_of

    for file, shard in shards_of(dataset.meta).items():
        assert sha256_of(os.path.join(dataset.path, file)) == shard["sha256"], file


def metrics(folder, key="train_loss"):
    """Return {step: value} of the lines of metrics.jsonl that have this key."""
    return {line["step"]: line[key] for line in lines(folder) if key in line}


def lines(folder):
    """Return the lines of a run's metrics.jsonl as dicts."""
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f]


def weights(folder):
    """Return {(file, name): numbers} of the tensors in a run's last checkpoint: the model and the optimizer."""
    from safetensors.torch import load_file

    *_, last = sorted(pathlib.Path(folder, "ckpt").iterdir())
    return {(path.name, name): x.tolist() for path in last.glob("*.safetensors") for name, x in load_file(path).items()}


def assert_same_run(folder, expected):
    """Assert that both runs have every step once, with the same numbers to the last bit, and the same last weights."""
    for key in ("train_loss", "val_loss", "grad_norm", "context"):
        assert metrics(folder, key) == metrics(expected, key), key
    assert [line["step"] for line in lines(folder)] == [line["step"] for line in lines(expected)]
    assert weights(folder) == weights(expected)


def assert_near_run(folder, expected, keys=("train_loss", "val_loss"), **bounds):
    """Assert that two runs have these numbers of the same steps in one order, equal but for pytest.approx's bounds."""
    for key in keys:
        numbers, reference = metrics(folder, key), metrics(expected, key)
        assert reference and list(numbers) == list(reference)
        assert numbers == pytest.approx(reference, **bounds), key


def train_traced():
    """Train as train.py, with a torch.compile that traces what it is given, but does not run the C++ compiler."""
    import functools

    import torch

    from sympow import train

    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    train.main()


def assert_kills_change_nothing(go, folder, kills, statuses, earliest=0.0):
    """Assert that runs in a folder that are killed so often, at random moments, have the bits of one that is not.

    go: starts the run of a name in this folder, and returns its processes, which are killed in any order; statuses:
    what they may end with; earliest: the share of a run's time before which none is killed.
    """
    from sympow.runs import checkpoint

    seed = int.from_bytes(os.urandom(4), "big")
    moments, runs = random.Random(seed), 0
    assert not any(join(*go("whole")))
    begin = time.time()
    assert not any(join(*go("second")))
    seconds = time.time() - begin
    while kills > 0:
        processes = go(f"killed_{runs}")
        time.sleep(moments.uniform(earliest, 1) * seconds)
        kills -= any(process.exitcode is None for process in processes)
        runs += all(process.exitcode == 0 for process in processes)  # it was done before: the next one starts anew
        for process in moments.sample(processes, len(processes)):
            process.kill()
        assert statuses.issuperset(join(*processes)), seed
    assert not any(join(*go(f"killed_{runs}"))), seed
    names = sorted(os.listdir(folder / "whole/ckpt"))
    for run in folder.iterdir():
        assert_same_run(run, folder / "whole")
        assert sorted(os.listdir(run / "ckpt")) == names, (seed, run)
        assert not any(checkpoint.damage(run / "ckpt" / name) for name in names), (seed, run)


def refusal(capsys):
    """Return the line on stderr, after asserting that it is one line."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


@contextlib.contextmanager
def raises_one_line(error, match):
    """Assert that an error is raised with a message of one line that matches."""
    with pytest.raises(error, match=match) as raised:
        yield
    assert "\n" not in str(raised.value)


@pytest.fixture
def hopper(monkeypatch):
    """Let torch say that a GPU is one of Hopper's."""
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.fixture
def on_gpu(request, monkeypatch):
    """Let the choice of form believe that tensors are on a GPU, which the kernels in the interpreter stand for."""
    from sympow.attention.operator import dispatch

    monkeypatch.setattr(dispatch, "_warned", set())
    if not os.environ.get("TEST_GPU"):
        why_not = dispatch.why_not
        monkeypatch.setattr(dispatch, "why_not", lambda form, device, *sizes: why_not(form, "cuda", *sizes))
        request.getfixturevalue("hopper")


@pytest.fixture
def refused(capsys):
    """Return a function that calls main(*argv), asserts status 2 and one line on stderr, and returns that line."""

    def run(main, *argv):
        capsys.readouterr()
        assert main(*argv) == 2
        return refusal(capsys)

    return run


def make_dataset(folder, text=None):
    """Make a byte-level dataset with rows of 512 tokens in folder/text; return its path."""
    from sympow.data.text import prepare

    folder.mkdir(exist_ok=True)
    source = folder / "source.txt"
    source.write_text(text or "".join(f"line {i}: {i * i} squares, not circles\n" for i in range(400)))
    prepare.main([str(source), f"--out={folder / 'text'}", "--document_length=512", "--val_fraction=0.1"])
    return str(folder / "text")


def write_run(folder, tokenizer=None, **settings):
    """Write a run's folder with random weights, as after stages up to a context of 24 tokens; return the model.

    tokenizer: of the data, bytes if it is None; settings: of the model, beside its sizes.
    """
    import torch

    from sympow.data.files import write_json
    from sympow.data.tokenizer import Tokenizer
    from sympow.model import GPT, GPTConfig
    from sympow.runs import checkpoint

    tokenizer = tokenizer or Tokenizer("bytes")
    torch.manual_seed(2)
    config = GPTConfig(n_layer=2, n_head=4, n_embd=32, vocab_size=tokenizer.vocab_size, **settings)
    model = GPT(config).eval()
    for x in model.parameters():  # large, so that texts differ
        x.data.add_(torch.randn_like(x), alpha=0.15)
    norm = model.transformer.ln_wte if config.embedding_norm else model.transformer.ln_f
    norm.weight.data.neg_()  # else the head, which is the embedding, repeats the last token
    os.makedirs(folder)
    progress = checkpoint.Progress(7, best=4.0, best_step=2, model=vars(config))
    with checkpoint.Writer(str(folder)) as writer:
        writer.save(model, torch.optim.AdamW(model.parameters()), progress)
    run = dict(dataset="pystdlib", data="0123", init_from="auto", block_size=16, then="24@0.5", learning_rate=6e-4)
    write_json(f"{folder}/config.json", run | {"version": checkpoint.VERSION, "model": vars(config)})
    rows = [{"step": step, "val_loss": 6.0 - step, "tokens": 100 * step} for step in (0, 1, 1, 2)]
    pathlib.Path(folder, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer.save(str(folder))
    return model


@pytest.fixture(scope="session")
def layer_norms():
    """Skip a test of what has GPT-2's norms, such as the decoder, if somebody has put others into model.py."""
    from sympow.model import GPT, GPTConfig

    if type(GPT(GPTConfig(n_layer=1, n_head=1, n_embd=2)).transformer.ln_f).__name__ != "LayerNorm":
        pytest.skip("the norms of model.py are no LayerNorms")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def go(dataset, tmp_path, monkeypatch):
    """Return a function that trains in tmp_path with SMALL's settings and others, and returns the exit status."""
    from sympow import train

    monkeypatch.chdir(tmp_path)
    return lambda *argv: call(train.main, *SMALL, f"--dataset={dataset}", *argv)


def assert_same_batch_for_any_ranks(windows, seed, step, expected):
    """Assert that a step's 16 rows are `expected`, (inputs, targets), however ranks and micro-steps share them."""
    import torch

    from sympow.data.loader import train_batch

    for world, batch_size, accumulation in ((1, 16, 1), (1, 2, 8), (2, 4, 2), (4, 4, 1), (4, 1, 4), (1, 1, 16)):
        parts = [
            train_batch(windows, seed, step, micro * world + rank, accumulation * world, batch_size)
            for micro in range(accumulation)
            for rank in range(world)
        ]
        for got, want in zip(zip(*parts), expected):
            assert torch.equal(torch.cat(got), want), (world, batch_size, accumulation)
