"""Training on several nodes: two torchrun agents on this machine, the Slurm script, and what bench/scale.py counts."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, SMALL, call, dataset, join, metrics, start, start_ranks  # noqa: F401

from sympow import train
from sympow.bench import scale
from sympow.data import DataError
from sympow.training import batches
from sympow.runs.processes import store_of_this_start

TESTS, SCRIPT = os.path.dirname(__file__), os.path.join(ROOT, "docs", "train.sbatch")
PAUSE = 0.05  # seconds that reading a batch takes, so that a run lasts long enough to be killed in it


def agent():
    """Run `misbehave` as one of two nodes, as torchrun --nnodes=2 --rdzv_backend=c10d does, with forks as workers.

    NODE is the number of the node, which its ranks take for the name of their host.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    socket.gethostname = lambda: f"node{os.environ['NODE']}"
    config = LaunchConfig(
        min_nodes=2, max_nodes=2, nproc_per_node=int(os.environ["NPROC"]), run_id="two_nodes",
        max_restarts=int(os.environ.get("RESTARTS", 0)), rdzv_backend="c10d", local_addr="localhost",
        rdzv_endpoint=f"localhost:{os.environ['PORT']}", start_method="fork", monitor_interval=0.1,
        # node 0 has the store, as the host in rdzv_endpoint does on two machines; a dead node is noticed sooner
        rdzv_configs={"is_host": os.environ["NODE"] == "0", "keep_alive_interval": 1, "keep_alive_max_attempt": 2},
    )  # fmt: skip
    elastic_launch(config, misbehave)()


def misbehave():
    """Train as train.py, slowly; a rank 3 does what HOW says at step 3 of its first start."""
    real, how, once = batches.train_batch, os.environ.get("HOW"), os.environ.get("ONCE")

    def train_batch(windows, seed, step, *args):
        time.sleep(PAUSE)
        if how and step == 3 and os.environ["RANK"] == "3" and not (once and os.path.exists(once)):
            if once:
                open(once, "w").close()
            DOES[how]()
        return real(windows, seed, step, *args)

    batches.train_batch = train_batch
    train.main()


def fail(error):
    raise error


DOES = {
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(600),
    "cannot read": lambda: fail(DataError("train_00000.bin is missing")),
    "needs too much memory": lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")),
}


def wait_for_step(folder, step):
    """Wait until the run in folder/out/train has taken this step."""
    log, end = folder / "out/train/metrics.jsonl", time.time() + 60
    while not (log.exists() and f'"step": {step},' in log.read_text()):
        assert time.time() < end
        time.sleep(0.05)


class Nodes:
    """Two agents in `folder`, whose workers train with `options`. Node i prints to the file node_i."""

    def __init__(self, folder, *options, **env):
        self.folder, self.options = folder, options
        with socket.socket() as s:
            s.bind(("localhost", 0))
            self.env = {"NPROC": "1", "PORT": str(s.getsockname()[1]), **env}
        self.agents = [None, None]

    def start(self, node, *options):
        """Start an agent; that of node 0 has the rendezvous."""
        env = {**self.env, "NODE": str(node)}
        self.agents[node] = start(
            agent, *self.options, *options, env=env, cwd=self.folder, log=self.folder / f"node_{node}"
        )

    def kill(self, node):
        """Kill an agent and its workers (kill -9), as when a node loses its power."""
        pid = self.agents[node].pid
        workers = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
        for number in [pid, *map(int, workers)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.agents[node].join()

    def join(self, timeout=60):
        """Return the exit statuses; kill what has not ended."""
        end = time.time() + timeout
        while any(process.exitcode is None for process in self.agents) and time.time() < end:
            time.sleep(0.1)
        codes = [process.exitcode for process in self.agents]
        for node in range(2):
            self.kill(node)
        return codes

    def printed(self):
        """Return what both nodes have printed."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("node_*")))


@pytest.fixture
def nodes(tmp_path):
    started = []

    def make(*options, second=(), **env):
        started.append(Nodes(tmp_path, *options, **env))
        started[-1].start(0)
        started[-1].start(1, *second)
        return started[-1]

    yield make
    for two in started:
        for node in range(2):
            two.kill(node)


RUN = [*SMALL, "--tokens_per_step=512", "--max_iters=30", "--eval_interval=8", "--dropout=0.1", "--timeout=12"]


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):  # noqa: F811
    """Return the folder of a run on two ranks that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert join(*start_ranks(2, train.main, *RUN, f"--dataset={dataset}", cwd=folder)) == [0, 0]
    return folder / "out/train"


def assert_same_run(folder, other):
    """Assert that both runs have every step once, with the same numbers to the last bit."""
    for key in ("train_loss", "val_loss", "grad_norm"):
        assert list(metrics(folder, key).items()) == list(metrics(other, key).items()), key


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_was_killed_and_started_again_goes_on_with_the_same_bits(dataset, nodes, whole, tmp_path, node):  # noqa: F811
    # without this variable a new agent never learns the address of a store that the agent of the first node has kept
    two = nodes(*RUN, f"--dataset={dataset}", RESTARTS="3", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    wait_for_step(tmp_path, 12)
    two.kill(node)
    if node == 0:  # the rendezvous was on that node, and the other agent can do nothing without it
        os.kill(two.agents[1].pid, signal.SIGTERM)
        two.agents[1].join(30)
        two.start(0), two.start(1)
    else:
        two.start(1)
    assert two.join() == [0, 0], two.printed()
    assert "going on from out/train/ckpt/step_00000008, step 8" in two.printed()
    assert_same_run(tmp_path / "out/train", whole)


@pytest.mark.slow
def test_workers_of_one_node_that_were_killed_start_again_without_a_setting_for_it(dataset, nodes, tmp_path):  # noqa: F811
    two = nodes(*RUN, f"--dataset={dataset}", RESTARTS="3", NPROC="2", HOW="dies", ONCE=str(tmp_path / "once"))
    assert two.join() == [0, 0], two.printed()
    assert list(metrics(tmp_path / "out/train")) == list(range(1, 31))
    assert "rank 3 on node1" in two.printed()


def test_ranks_of_a_start_find_each_other_whatever_earlier_starts_left(monkeypatch):
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    connect = lambda url: iter([(dist.TCPStore("localhost", server.port, wait_for_workers=False), 0, 3)])
    monkeypatch.setattr(dist, "rendezvous", connect)
    for start_number in range(3):
        # an earlier start of which only some ranks came, and which left what it drew
        server.set("drawn_by/1", f"of start {start_number}"), server.set("drawn_by/2", "of a rank that was killed")
        stores, missing = {}, set()
        come = lambda rank: stores.update({rank: store_of_this_start(rank, 3, missing if rank == 0 else set())})
        ranks = [threading.Thread(target=come, args=[rank], daemon=True) for rank in (0, 2, 1)]
        for thread in ranks:
            thread.start()
            time.sleep(0.1)
        for thread in ranks:
            thread.join(20)
        stores[1].set("address", f"{start_number}")
        assert [stores[rank].get("address") for rank in range(3)] == 3 * [f"{start_number}".encode()]


def test_rank_0_knows_which_ranks_have_not_come(monkeypatch):
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(server, 0, 4)]))
    monkeypatch.setattr(time, "sleep", lambda seconds: fail(TimeoutError))
    missing = set()
    with pytest.raises(TimeoutError):
        store_of_this_start(0, 4, missing)
    assert missing == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("how", [*DOES, "refuses"])
def test_a_rank_of_the_second_node_that_fails_ends_the_job_with_its_name(dataset, nodes, how):  # noqa: F811
    options = [*RUN, f"--dataset={dataset}"]
    if how == "refuses":
        two = nodes(*options, NPROC="2", second=["--dataset=nowhere"])
    else:
        two = nodes(*options, NPROC="2", HOW=how)
    assert two.join(60) == [1, 1], two.printed()
    said = {}  # by each rank
    for line in two.printed().splitlines():
        if line.startswith("test_cluster.py (rank "):
            who, _, text = line.removeprefix("test_cluster.py (").partition("): ")
            said[who] = text
    if how == "refuses":
        assert said["rank 2 on node1"].startswith("no dataset 'nowhere'")
        assert "have not come within 12 s" in said.get("rank 0 on node0", said.get("rank 1 on node0"))
        return
    own = said.pop("rank 3 on node1", "")
    assert {"cannot read": "train_00000.bin is missing", "needs too much memory": "out of memory: CUDA"}.get(
        how, ""
    ) in own
    assert {who.split(" on ")[1] for who in said} == {"node0", "node1"}
    for text in said.values():
        assert "rank 3 on node1 " in text and len(re.findall(r"rank \d", text)) == 1, said


# Stand for Slurm's programs. srun starts the command once for each node, all on this machine, passes SIGTERM on, and
# returns the last status that is not 0; with --kill-on-bad-exit=1 a task that fails ends the others.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 == --kill-on-bad-exit=1 ]] && kill_others=1; shift; done
trap 'kill -TERM "${tasks[@]}"' TERM
for ((i = 0; i < SLURM_NNODES; i++)); do SLURM_PROCID=$i SLURM_NODEID=$i "$@" & tasks+=($!); done
worst=0 left=$SLURM_NNODES
while ((left)); do
    wait -n; status=$?
    running=($(jobs -rp))
    ((${#running[@]} == left)) && continue  # a signal came
    left=${#running[@]}
    ((status)) && worst=$status && [[ $kill_others && ! $stopping ]] && stopping=1 && kill -TERM "${running[@]}"
done 2> /dev/null
exit $worst
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) printf 'localhost\\n%.0s' $(seq $SLURM_NNODES);;
    requeue) echo $2 >> requeued;;
    *) exit 1;;
esac
"""


@pytest.fixture
def slurm(tmp_path):
    """Return a function that starts the Slurm script as sbatch does on two nodes of one GPU; it returns a Popen."""
    bin, path = tmp_path / "bin", tmp_path / "spool"
    bin.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    shutil.copy(SCRIPT, path)  # sbatch copies the script, too
    (tmp_path / "train.py").write_text(
        f"import sys\nsys.path[:0] = {[ROOT, TESTS]}\nimport test_cluster\ntest_cluster.misbehave()\n"
    )
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    job = str(port - 20000) if 20000 <= port < 30000 else str(random.randrange(10000))
    folders = os.pathsep.join([str(bin), os.path.dirname(sys.executable), os.environ["PATH"]])
    env = {**os.environ, "PATH": folders, "SLURM_JOB_ID": job, "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    env |= {"SLURM_GPUS_ON_NODE": "1", "SLURM_TMPDIR": str(tmp_path / "disk"), "OMP_NUM_THREADS": "1"}
    started = []

    def submit(*argv):
        log = open(tmp_path / "log", "a")
        started.append(
            subprocess.Popen(
                ["bash", path, *argv], cwd=tmp_path, env=env, stdout=log, stderr=log, start_new_session=True
            )
        )
        return started[-1]

    yield submit
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_preempted_slurm_job_goes_back_into_the_queue_and_goes_on_with_the_same_bits(dataset, whole, slurm, tmp_path):  # noqa: F811
    argv = [*RUN, f"--dataset={dataset}"]
    job = slurm(*argv)
    wait_for_step(tmp_path, 3)
    job.send_signal(signal.SIGTERM)
    log = lambda: (tmp_path / "log").read_text()
    assert job.wait(60) == 0, log()
    assert "steps: SIGTERM was received" in log(), log()
    assert len((tmp_path / "requeued").read_text().split()) == 1
    job = slurm(*argv)
    assert job.wait(60) == 0, log()
    assert "going on from out/train/ckpt/step_" in log()
    assert len((tmp_path / "requeued").read_text().split()) == 1  # it is done, and does not go back
    assert_same_run(tmp_path / "out/train", whole)


@pytest.mark.slow
def test_a_slurm_job_that_fails_ends_on_all_nodes_and_does_not_go_back_into_the_queue(dataset, slurm, tmp_path):  # noqa: F811
    job = slurm(*RUN, "--dataset=nowhere")
    assert job.wait(60), (tmp_path / "log").read_text()
    assert "no dataset 'nowhere'" in (tmp_path / "log").read_text() and not (tmp_path / "requeued").exists()


def test_the_slurm_script_asks_for_a_signal_and_for_the_queue_and_is_valid_bash():
    assert subprocess.run(["bash", "-n", SCRIPT], capture_output=True).returncode == 0
    options = [line.split()[1] for line in open(SCRIPT) if line.startswith("#SBATCH")]
    assert {"--requeue", "--open-mode=append", "--signal=B:TERM@300", "--ntasks-per-node=1"} <= set(options)


def test_settings_of_a_row_keep_the_tokens_of_each_gpu():
    args = types.SimpleNamespace(block_size=1024, micro_tokens=65536)
    assert scale.settings_of("ddp", 4, 131072, args)[1:] == ["--batch_size=64", f"--tokens_per_step={4 * 131072}"]
    assert scale.settings_of("fsdp", 2, 16384, args)[1:] == [
        "--batch_size=16",
        "--tokens_per_step=32768",
        "--shard=True",
    ]
    assert scale.settings_of("context", 4, 262144, args)[:2] == ["--context_parallel=4", "--block_size=1048576"]


@pytest.mark.slow
def test_the_table_has_speeds_shares_and_why_a_row_could_not_run(tmp_path, capsys):
    tiny = "--device=cpu --tokens=64 --block_size=32 --warm_up=5 --steps=5 --n_layer=1 --n_head=1 --n_embd=8".split()
    status = call(scale.main, *tiny, "--gpus", "2", "--only", "ddp", f"--json={tmp_path / 'rows.json'}")
    assert status == 0, capsys.readouterr().out
    one, two = json.loads((tmp_path / "rows.json").read_text())
    assert one["share"] == 1 and 0.1 < two["share"] < 10 and (one["gpus"], two["gpus"]) == (1, 2)
    assert call(scale.main, *tiny, "--gpus", "1", "--only", "ddp", "--p=nothing") == 1
    assert "train.py: p must be a whole number below 2^63, got 'nothing'" in capsys.readouterr().out
