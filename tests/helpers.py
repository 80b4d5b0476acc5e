"""Runs the programs in this process, on a small dataset: faster than a new interpreter for each test."""

import json
import os
import signal
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMALL = (
    "--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 --tokens_per_step=256 --max_iters=6 "
    "--eval_interval=3 --eval_tokens=512 --log_interval=1 --wandb=disabled --learning_rate=1e-2"
).split()


def call(main, *argv):
    """main() with these arguments: its exit status."""
    saved, handlers = sys.argv, {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    sys.argv = [main.__module__ + ".py", *map(str, argv)]
    try:
        main()
        return 0
    except SystemExit as exit:
        return exit.code or 0
    finally:
        sys.argv = saved
        for s, handler in handlers.items():
            signal.signal(s, handler)


def run(*argv, check=True, **kwargs):
    """A program of the repository in a process of its own, from the current folder."""
    env = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **kwargs.pop("env", {})}
    env = {name: value for name, value in env.items() if value is not None}
    done = subprocess.run(
        [sys.executable, *map(str, argv)], capture_output=True, text=True, env=env, timeout=600, **kwargs
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def byte_encoding():
    """What stands for GPT-2's vocabulary where there is no network: all bytes."""
    import tiktoken

    ranks = {bytes([i]): i for i in range(256)}
    return tiktoken.Encoding("t", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})


KILLED = """
import os, signal, sys
sys.path.insert(0, os.environ["TESTS"])
import helpers, tiktoken
from data import shards
{setup}
tiktoken.get_encoding = lambda name: helpers.byte_encoding()
write = shards.write_atomically

def killed(path, data):
    if path.endswith("train_00001.bin"):
        with open(f"{{path}}.{{os.getpid()}}.tmp", "wb") as f:
            f.write(bytes(data)[:100])
            f.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    write(path, data)

shards.write_atomically = killed
prepare.main(sys.argv[1:])
"""


def kill_in_second_shard(out, setup, *options):
    """A prepare script's process ends by kill -9 while it writes; returns what os.stat says of the first shard."""
    env = {"TESTS": os.path.dirname(__file__)}
    done = run("-c", KILLED.format(setup=setup), f"--out={out}", *options, env=env, check=False)
    assert done.returncode == -signal.SIGKILL, done
    assert sorted(p.suffix for p in out.iterdir() if "train" in p.name) == [".bin", ".tmp"]
    return os.stat(out / "train_00000.bin")


def metrics(folder, key="train_loss"):
    """{step: value} of the lines that have this key."""
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        return {line["step"]: line[key] for line in map(json.loads, f) if key in line}


def make_dataset(folder, text=None):
    """A byte-level dataset in folder/text; rows of 512 tokens."""
    from data.text import prepare

    folder.mkdir(exist_ok=True)
    source = folder / "source.txt"
    source.write_text(text or "".join(f"line {i}: {i * i} squares, not circles\n" for i in range(400)))
    prepare.main([str(source), f"--out={folder / 'text'}", "--document_length=512", "--val_fraction=0.1"])
    return str(folder / "text")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))
