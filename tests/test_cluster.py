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

import pytest
import torch.distributed as dist
from helpers import ROOT, SMALL, assert_same_run, call, free_port, join, metrics, start, start_ranks

from sympow import train
from sympow.bench import scale
from sympow.data import DataError
from sympow.training import batches
from sympow.runs.processes import store_of_this_start

TESTS, SCRIPT = os.path.dirname(__file__), os.path.join(ROOT, "docs", "use", "train.sbatch")
PAUSE = 0.05  # seconds that reading a batch takes, so that a run lasts long enough to be killed in it


def agent():
    """Run `misbehave` as one of two nodes, as torchrun --nnodes=2 --rdzv_backend=c10d does, with forks as workers.

    NODE is the number of the node, which its ranks take for the name of their host.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def hostname():
        return f"node{os.environ['NODE']}"

    socket.gethostname = hostname
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=int(os.environ["NPROC"]),
        run_id="two_nodes",
        max_restarts=int(os.environ.get("RESTARTS", 0)),
        rdzv_backend="c10d",
        local_addr="localhost",
        rdzv_endpoint=f"localhost:{os.environ['PORT']}",
        start_method="fork",
        monitor_interval=0.1,
        # node 0 has the store, as the host in rdzv_endpoint does on two machines; a dead node is noticed sooner
        rdzv_configs={"is_host": os.environ["NODE"] == "0", "keep_alive_interval": 1, "keep_alive_max_attempt": 2},
    )
    elastic_launch(config, misbehave)()


def misbehave():
    """Train as train.py, slowly; a rank 3 has the FAILURE at step 3 of its first start."""
    real, failure, once = batches.train_batch, os.environ.get("FAILURE"), os.environ.get("ONCE")

    def train_batch(windows, seed, step, *args):
        time.sleep(PAUSE)
        if failure and step == 3 and os.environ["RANK"] == "3" and not (once and os.path.exists(once)):
            if once:
                open(once, "w").close()
            FAILURES[failure]()
        return real(windows, seed, step, *args)

    batches.train_batch = train_batch
    train.main()


def fail(error):
    raise error


FAILURES = {
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(600),
    "cannot read": lambda: fail(DataError("train_00000.bin is missing")),
}


def wait_for_step(folder, step):
    """Wait until the run in folder/out/train has taken this step."""
    log, end = folder / "out/train/metrics.jsonl", time.time() + 600
    while not (log.exists() and f'"step": {step},' in log.read_text()):
        assert time.time() < end
        time.sleep(0.05)


class Nodes:
    """Hold two agents in `folder`. Their workers train with `options`; node i prints to the file node_i."""

    def __init__(self, folder, *options, **env):
        self.folder, self.options = folder, options
        self.env = {"NPROC": "1", "PORT": str(free_port()), **env}
        self.agents = [None, None]

    def start(self, node, *options):
        """Start an agent; the agent of node 0 has the rendezvous."""
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

    def join(self, timeout=600):
        """Return the exit statuses; kill what has not ended."""
        end = time.time() + timeout
        while any(process.exitcode is None for process in self.agents) and time.time() < end:
            time.sleep(0.1)
        codes = [process.exitcode for process in self.agents]
        for node in range(2):
            self.kill(node)
        return codes

    def printed(self):
        """Return the text that both nodes have printed."""
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


RUN = [*SMALL, "--tokens_per_step=512", "--max_iters=20", "--eval_interval=8", "--dropout=0.1", "--timeout=8"]


@pytest.fixture(scope="module")
def reference(dataset, tmp_path_factory):
    """Return the folder of a run on two ranks that nothing interrupted."""
    folder = tmp_path_factory.mktemp("reference")
    assert join(*start_ranks(2, train.main, *RUN, f"--dataset={dataset}", cwd=folder)) == [0, 0]
    return folder / "out/train"


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_was_killed_and_started_again_goes_on_with_the_same_bits(dataset, nodes, reference, tmp_path, node):
    # without this variable a new agent never learns the address of a store that the agent of the first node has kept
    two = nodes(*RUN, f"--dataset={dataset}", RESTARTS="3", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    wait_for_step(tmp_path, 12)
    two.kill(node)
    if node == 0:  # the rendezvous was on that node, and the other agent can do nothing without it
        os.kill(two.agents[1].pid, signal.SIGTERM)
        two.agents[1].join(300)
        two.start(0), two.start(1)
    else:
        two.start(1)
    assert two.join() == [0, 0], two.printed()
    assert "resuming from out/train/ckpt/step_00000008, step 8" in two.printed()
    assert_same_run(tmp_path / "out/train", reference)


@pytest.mark.slow
def test_workers_of_one_node_that_were_killed_start_again_without_a_setting_for_it(dataset, nodes, tmp_path):
    two = nodes(*RUN, f"--dataset={dataset}", RESTARTS="3", NPROC="2", FAILURE="dies", ONCE=str(tmp_path / "once"))
    assert two.join() == [0, 0], two.printed()
    assert list(metrics(tmp_path / "out/train")) == list(range(1, 21))
    assert "rank 3 on node1" in two.printed()


def test_ranks_of_a_start_find_each_other_whatever_earlier_starts_left(monkeypatch):
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def connect(url):
        yield dist.TCPStore("localhost", server.port, wait_for_workers=False), 0, 3

    monkeypatch.setattr(dist, "rendezvous", connect)
    for start_number in range(3):
        # an earlier start, to which only some ranks came, left its draws
        server.set("drawn_by/1", f"of start {start_number}"), server.set("drawn_by/2", "of a rank that was killed")
        stores = {}

        def come(rank, stores=stores):
            stores[rank] = store_of_this_start(rank, 3, set())

        ranks = [threading.Thread(target=come, args=[rank], daemon=True) for rank in (0, 2, 1)]
        for thread in ranks:
            thread.start()
            time.sleep(0.1)
        for thread in ranks:
            thread.join(200)
        stores[1].set("address", f"{start_number}")
        assert [stores[rank].get("address") for rank in range(3)] == 3 * [f"{start_number}".encode()]


@pytest.mark.slow
@pytest.mark.parametrize("failure", [*FAILURES, "refuses"])
def test_a_rank_of_the_second_node_that_fails_ends_the_job_with_its_name(dataset, nodes, failure):
    options = [*RUN, f"--dataset={dataset}"]
    if failure == "refuses":
        two = nodes(*options, NPROC="2", second=["--dataset=nowhere"])
    else:
        two = nodes(*options, NPROC="2", FAILURE=failure)
    assert two.join() == [1, 1], two.printed()
    said = dict(re.findall(r"^test_cluster.py \((rank .*?)\): (.*)", two.printed(), re.MULTILINE))  # by each rank
    if failure == "refuses":
        assert said["rank 2 on node1"].startswith("no dataset 'nowhere'")
        assert "have not come within 8 s" in said.get("rank 0 on node0", said.get("rank 1 on node0"))
        return
    error = said.pop("rank 3 on node1", "")
    assert failure != "cannot read" or "train_00000.bin is missing" in error
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
    text = f"import sys\nsys.path[:0] = {[ROOT, TESTS]}\nimport test_cluster\ntest_cluster.misbehave()\n"
    (tmp_path / "train.py").write_text(text)
    port = free_port()
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
def test_a_preempted_slurm_job_goes_back_into_the_queue_and_goes_on_with_the_same_bits(
    dataset, reference, slurm, tmp_path
):
    argv = [*RUN, f"--dataset={dataset}"]
    job = slurm(*argv)
    wait_for_step(tmp_path, 3)
    job.send_signal(signal.SIGTERM)
    log = tmp_path / "log"
    assert job.wait(60) == 0, log.read_text()
    assert re.search(r"stopped at step \d+: SIGTERM was received", log.read_text())
    assert len((tmp_path / "requeued").read_text().split()) == 1
    job = slurm(*argv)
    assert job.wait(60) == 0, log.read_text()
    assert "resuming from out/train/ckpt/step_" in log.read_text()
    assert len((tmp_path / "requeued").read_text().split()) == 1  # it is done, and does not go back
    assert_same_run(tmp_path / "out/train", reference)


@pytest.mark.slow
def test_a_slurm_job_that_fails_ends_on_all_nodes_and_does_not_go_back_into_the_queue(dataset, slurm, tmp_path):
    job = slurm(*RUN, "--dataset=nowhere")
    assert job.wait(60), (tmp_path / "log").read_text()
    assert "no dataset 'nowhere'" in (tmp_path / "log").read_text() and not (tmp_path / "requeued").exists()


def test_the_slurm_script_asks_for_a_signal_and_for_the_queue_and_is_valid_bash():
    assert subprocess.run(["bash", "-n", SCRIPT], capture_output=True).returncode == 0
    options = [line.split()[1] for line in open(SCRIPT) if line.startswith("#SBATCH")]
    assert {"--requeue", "--open-mode=append", "--signal=B:TERM@300", "--ntasks-per-node=1"} <= set(options)


@pytest.mark.slow
def test_the_table_has_speeds_and_shares(tmp_path, capsys):
    tiny = "--device=cpu --tokens=64 --block_size=32 --warm_up=5 --steps=5 --n_layer=1 --n_head=1 --n_embd=8".split()
    status = call(scale.main, *tiny, "--gpus", "2", "--only", "ddp", f"--json={tmp_path / 'rows.json'}")
    assert status == 0, capsys.readouterr().out
    one, two = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert one["share"] == 1 and 0.1 < two["share"] < 10 and (one["gpus"], two["gpus"]) == (1, 2)
