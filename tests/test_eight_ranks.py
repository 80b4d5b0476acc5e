"""README's command on eight ranks: losses as on one rank, and the same bits after a kill or a signal and a resume."""

import os
import signal
import time

import pytest
from helpers import ROOT, SMALL, assert_near_run, assert_same_run, join, metrics, start_ranks

from sympow import train

pytestmark = pytest.mark.slow

COMMAND = [os.path.join(ROOT, "config", "sympow_p4.py"), *SMALL, "--block_size=64", "--batch_size=1"]
COMMAND += ["--out_dir=out/train", "--tokens_per_step=512", "--max_iters=12", "--eval_interval=4", "--timeout=15"]
WAYS = {
    "data parallel": [],
    "sharded": ["--shard=True"],
    "context parallel": ["--context_parallel=8", "--batch_size=8"],
}


def step_slowly():
    """Train as train.py, with a pause before each step, so that a run lasts long enough to be stopped in it."""
    from sympow.training import batches

    train_batch = batches.train_batch

    def after_a_pause(*args):
        time.sleep(0.5)
        return train_batch(*args)

    batches.train_batch = after_a_pause
    train.main()


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    """Return a function that returns the folder of a run of this way that nothing interrupted, on `count` ranks."""
    folders = {}

    def run(way, count=8):
        if (way, count) not in folders:
            folder = folders[way, count] = tmp_path_factory.mktemp("finished")
            ranks = start_ranks(count, train.main, *COMMAND, *WAYS[way], f"--dataset={dataset}", cwd=folder)
            assert join(*ranks) == count * [0], (folder / "rank_0").read_text()
        return folders[way, count] / "out/train"

    return run


def test_eight_ranks_train_as_one_does(finished):
    assert_near_run(finished("data parallel"), finished("data parallel", 1), rel=1e-4)


@pytest.mark.parametrize(
    "way,number",
    [
        ("data parallel", signal.SIGKILL),
        ("data parallel", signal.SIGTERM),
        ("sharded", signal.SIGKILL),
        ("context parallel", signal.SIGTERM),
    ],
)
def test_a_run_of_eight_ranks_resumes_with_the_same_bits(dataset, finished, tmp_path, way, number):
    options = [*COMMAND, *WAYS[way], f"--dataset={dataset}"]
    ranks = start_ranks(8, step_slowly, *options, cwd=tmp_path)
    log, end = tmp_path / "out/train/metrics.jsonl", time.time() + 600
    while not (log.exists() and '"step": 6,' in log.read_text()):
        assert time.time() < end and all(rank.is_alive() for rank in ranks), (tmp_path / "rank_0").read_text()
        time.sleep(0.05)
    os.kill(ranks[5].pid, number)
    statuses, printed = join(*ranks), (tmp_path / "rank_0").read_text()
    if number == signal.SIGKILL:
        assert statuses == [1, 1, 1, 1, 1, -number, 1, 1] and "rank 5 on" in printed, printed
    else:
        assert statuses == 8 * [0], printed
    assert max(metrics(tmp_path / "out/train")) < 12
    ranks = start_ranks(8, train.main, *options, cwd=tmp_path)
    assert join(*ranks) == 8 * [0], (tmp_path / "rank_0").read_text()
    assert_same_run(tmp_path / "out/train", finished(way))
