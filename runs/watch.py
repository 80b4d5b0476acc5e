"""Find the rank that holds the others up.

    watch = Watch(timeout=600)         # after init_process_group
    watch.beat()                       # several times in a micro-step, and before the rank waits for others
    print(watch.blame())               # "rank 3 on node7 no longer answers", after a collective has failed

Every rank tells the others how far it is, through torch.distributed's store. A rank that makes no progress for
`timeout` seconds prints which ranks are to blame and ends with status 1, whatever collective it waits in. (torchrun
notices workers that died; it does not notice those that hang.) The first rank that notices finds out for all, since
those that end because of it would soon be silent too.
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

from sympow.runs.settings import process_name


class Watch:
    """Watches the progress of all ranks in a thread, as the top of this file describes."""

    def __init__(self, timeout):
        self.timeout, self.rank, self.world = timeout, dist.get_rank(), dist.get_world_size()
        self.store = dist.PrefixStore("watch", _get_default_store())
        self.store.set_timeout(timedelta(seconds=10))
        self.beats, self.last_beat, self.reports = 0, time.monotonic(), 0
        self.interval = max(0.2, min(10.0, timeout / 10))  # seconds between reports
        self._report()
        threading.Thread(target=self._watch, daemon=True).start()

    def beat(self):
        """Note that this rank has made progress."""
        self.beats, self.last_beat = self.beats + 1, time.monotonic()

    def rest(self):
        """Allow this rank to take as long as it likes from now on."""
        self.timeout = float("inf")

    def blame(self):
        """Return a text that names the ranks that hold the others up, on every rank the same. Takes some intervals."""
        try:
            if self.store.add("blaming", 1) > 1:
                until = time.monotonic() + 4 * self.interval  # the rank that was first may end before it knows
                while time.monotonic() < until:
                    if self.store.check(["blame"]):
                        return self.store.get("blame").decode()
                    self._report()  # or it would take this rank for silent
                    time.sleep(self.interval / 4)
            found = self._find()
            self.store.set("blame", found)
            return found
        except Exception:  # the store lives on rank 0's host
            return f"rank 0 on {os.environ.get('MASTER_ADDR', 'its host')} is gone"

    def _find(self):
        before = self._reports()
        time.sleep(2.5 * self.interval)
        after = self._reports()
        silent = [r for r in after if r != self.rank and after[r]["reports"] == before[r]["reports"]]
        if silent:
            return _in_words(after, silent) + " no longer answers" + ("" if len(silent) == 1 else " (each of them)")
        beats = {report["beats"] for report in after.values()}
        if len(beats) == 1:
            return "every rank answers, and all have come equally far"
        return _in_words(after, [r for r in after if after[r]["beats"] == min(beats)]) + " is behind the others"

    def _watch(self):
        while True:
            time.sleep(self.interval)
            try:
                self._report()
            except Exception:
                pass  # rank 0 is gone, or the run is over
            if time.monotonic() - self.last_beat > self.timeout:
                late = f"nothing has happened for {time.monotonic() - self.last_beat:.0f} s"
                print(f"{process_name()}: {late}: {self.blame()}", file=sys.stderr, flush=True)
                os._exit(1)

    def _report(self):
        self.reports += 1
        report = {"host": socket.gethostname(), "beats": self.beats, "reports": self.reports}
        self.store.set(str(self.rank), json.dumps(report))

    def _reports(self):
        return {rank: json.loads(self.store.get(str(rank))) for rank in range(self.world)}


def _in_words(reports, ranks):
    return ", ".join(f"rank {rank} on {reports[rank]['host']}" for rank in ranks)
