"""Which rank holds the others up: every rank tells the others how far it is, and looks when it does not get on itself.

    watch = Watch(timeout=600)         # after init_process_group; None in watch's place does nothing
    watch.beat()                       # at every micro-step
    print(watch.blame())               # "rank 3 on node7 no longer answers", after a collective has failed

A rank that has not got on for `timeout` seconds says which ranks are to blame and leaves with status 1, whatever
collective it waits in. (torchrun notices workers that died; it does not notice those that hang.)
"""

import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store


class Watch:
    current = None  # this process's

    def __init__(self, timeout):
        Watch.current = self
        self.timeout, self.rank, self.world = timeout, dist.get_rank(), dist.get_world_size()
        self.store = dist.PrefixStore("watch", _get_default_store())
        self.store.set_timeout(timedelta(seconds=10))
        self.beats, self.at, self.told = 0, time.monotonic(), 0
        self.every = max(0.2, min(10.0, timeout / 10))
        self._tell()
        threading.Thread(target=self._look, daemon=True).start()

    def beat(self):
        self.beats, self.at = self.beats + 1, time.monotonic()

    def rest(self):
        """Nobody is waited for any more."""
        self.timeout = float("inf")

    def blame(self):
        """Who holds the others up, in words; takes some seconds."""
        try:
            before = self._told()
            time.sleep(2.5 * self.every)
            after = self._told()
        except Exception:  # the store lives on rank 0's host
            return f"rank 0 on {os.environ.get('MASTER_ADDR', 'its host')} is gone"
        silent = [r for r in after if r != self.rank and after[r]["told"] == before[r]["told"]]
        if silent:
            return _list(after, silent) + " no longer answers" + ("" if len(silent) == 1 else " (each of them)")
        behind = min(told["beats"] for told in after.values())
        return _list(after, [r for r in after if after[r]["beats"] == behind]) + f" is at micro-step {behind}"

    def _look(self):
        while True:
            time.sleep(self.every)
            try:
                self._tell()
            except Exception:
                pass  # rank 0 is gone, or the run is over
            if time.monotonic() - self.at > self.timeout:
                late = f"nothing has happened for {time.monotonic() - self.at:.0f} s"
                print(f"train.py (rank {self.rank}): {late}: {self.blame()}", file=sys.stderr, flush=True)
                os._exit(1)

    def _tell(self):
        self.told += 1
        told = {"host": socket.gethostname(), "beats": self.beats, "told": self.told}
        self.store.set(str(self.rank), json.dumps(told))

    def _told(self):
        return {rank: json.loads(self.store.get(str(rank))) for rank in range(self.world)}


def _list(told, ranks):
    return ", ".join(f"rank {rank} on {told[rank]['host']}" for rank in ranks)
