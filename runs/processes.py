"""Run training in several processes: ranks, signals, errors that end all of them, and the rank that holds them up.

ranks = Ranks()                                   # from torchrun's environment; one rank without it
with exit_statuses(ranks):
    ranks.join(device, "auto", timeout=600)
    ...
    ranks.beat()                                  # several times in a micro-step, and before it waits for other ranks
    ranks.leave()

Every rank tells the others how far it is, through torch.distributed's store. A rank that makes no progress for
`timeout` seconds prints which ranks are to blame and ends with status 1, whatever collective it waits in. (torchrun
notices workers that died; it does not notice those that hang.) The first rank that notices finds out for all, since
those that end because of it would soon be silent too.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from tqdm import tqdm

from ..data import DataError
from ..data.terminal import replace_odd_letters
from .checkpoint import NotWritten, newest
from .program import process_name, refuse
from .settings import from_launcher


class Failed(Exception):
    """Raised if training cannot go on. The message is one line; the process ends with status 1."""


class Ranks:
    """This process and its connection to the others that train with it.

    Attributes: rank, world (number of ranks), local (rank on this node), master (True on rank 0), distributed (True
    if torchrun, or another launcher that sets RANK, started the process); watch (a Watch) and store (the key-value
    store of torch.distributed), both None before `join` and in a process that was started alone.
    """

    def __init__(self):
        self.distributed, self.world = bool(os.environ.get("RANK")), from_launcher("WORLD_SIZE", 1)
        if self.distributed != bool(os.environ.get("WORLD_SIZE")):
            missing = "WORLD_SIZE" if self.distributed else "RANK"
            refuse(f"the environment variable {missing} is missing: a launcher sets both RANK and WORLD_SIZE", True)
        self.rank, self.local = from_launcher("RANK"), from_launcher("LOCAL_RANK")
        self.master = self.rank == 0
        self.device = self.watch = self.store = self.cpu_group = None

    def join(self, device, backend, timeout):
        """Connect to the other ranks and start to watch them; do nothing in a process that was started alone.

        backend is nccl, gloo or auto (nccl on GPUs). The job ends after `timeout` seconds without progress, and this
        process if the others have not joined by then.
        """
        self.device = device
        if not self.distributed:
            return
        on_gpu = device.type == "cuda"
        if backend == "nccl" and not on_gpu:
            refuse(f"backend=nccl needs a GPU for each rank, got device={device.type}: leave backend out, or give gloo")
        missing = set()  # the ranks that rank 0 waits for; other ranks do not know

        def end():
            names = ", ".join(f"rank {rank}" for rank in sorted(missing)) or "all others"
            abort(f"ranks that have not come within {timeout:g} s: {names}")

        limit = threading.Timer(timeout, end)
        limit.daemon = True
        limit.start()
        try:
            self.store = store_of_this_start(self.rank, self.world, missing)
        except (ValueError, RuntimeError) as error:  # MASTER_ADDR or MASTER_PORT is missing or wrong, or nobody answers
            raise Failed(f"the ranks cannot find each other: {str(error)[:300]}") from error
        dist.init_process_group(
            ("nccl" if on_gpu else "gloo") if backend == "auto" else backend,
            store=self.store,
            rank=self.rank,
            world_size=self.world,
            device_id=device if on_gpu else None,
        )
        self.watch = Watch(self.store, self.rank, self.world, timeout)
        if self.world > 1:
            self.cpu_group = dist.new_group(backend="gloo")  # exchanges values without waiting for the GPU
        limit.cancel()

    def leave(self):
        """Wait, however long it takes, for the other ranks and disconnect."""
        if self.distributed:
            self.watch.timeout = float("inf")
            dist.barrier()  # if a rank disconnects while another still works, it may abort at exit
            self.watch.close()
            dist.destroy_process_group()

    def log(self, line):
        """Print a line on rank 0 alone."""
        if self.master:
            print_to_terminal(line)

    def beat(self):
        """Tell the watch that this rank makes progress; called at every micro-step and before it waits for others."""
        if self.watch:
            self.watch.beat()

    def barrier(self):
        """Wait until every rank is here; the GPUs need not be."""
        if self.world > 1:
            self.beat()
            dist.barrier(group=self.cpu_group)
            self.beat()

    @contextmanager
    def local_rank_0_first(self):
        """Let local rank 0 of every node run a block first, so that the others find its compiled code in the caches."""
        if self.local:
            self.barrier()
        yield
        if not self.local:
            self.barrier()

    def sum(self, x):
        """Return the tensor x summed over the ranks, in place."""
        if self.distributed:
            dist.all_reduce(x)
        return x

    def agree(self, number, seconds):
        """Return (number of the signal that any rank received or 0, seconds of rank 0), the same on every rank."""
        if self.world == 1:
            return number, seconds
        self.beat()
        both = torch.tensor([number, seconds if self.master else 0.0], dtype=torch.float64)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.cpu_group)
        return int(both[0].item()), both[1].item()

    def first(self, text):
        """Return the first of all ranks' texts that is not empty, the same on every rank; "" if all are empty."""
        texts = [text]
        if self.distributed:
            texts = [""] * self.world
            dist.all_gather_object(texts, text)
        return next(filter(None, texts), "")

    def agree_on_checkpoint(self, own):
        """Return the checkpoint (a path or None) that rank 0 chose; raise Failed if this rank cannot read it."""
        if not self.distributed:
            return own
        chosen = [own]
        dist.broadcast_object_list(chosen, device=self.device)
        (path,) = chosen
        if bool(own) != bool(path) or (path and not os.path.isdir(path)):
            raise Failed(
                f"rank {self.rank} would resume from {own}, rank 0 from {path}: out_dir must be shared by all nodes"
            )
        return path


def store_of_this_start(rank, world, missing):
    """Return the key-value store through which the ranks of this start of torchrun find each other.

    torchrun keeps its store when it starts the workers again, and a rank that reads an address which a rank of the
    start before left there waits for ever (pytorch issue 135712). Its restart count does not tell the starts apart:
    every node has its own. So rank 0 draws a prefix for the keys of this start, and hands it to each rank under a key
    that this rank has just drawn. On rank 0 the set `missing` has the ranks that have not come yet.
    """
    store, _, _ = next(dist.rendezvous("env://"))
    own = uuid.uuid4().hex
    if rank:
        store.set(f"drawn_by/{rank}", own)
        prefix = store.get(f"prefix_for/{own}").decode()
        store.set(f"{prefix}/came/{rank}", "")
        return dist.PrefixStore(prefix, store)
    missing |= set(range(1, world))
    while missing:  # a rank of the start before is answered too, until the rank of this start has come
        for peer in [r for r in missing if store.check([f"drawn_by/{r}"])]:
            store.set(f"prefix_for/{store.get(f'drawn_by/{peer}').decode()}", own)
        time.sleep(0.02)
        missing -= {r for r in missing if store.check([f"{own}/came/{r}"])}
    return dist.PrefixStore(own, store)


class Watch:
    """Watches the progress of all ranks in a thread, as the top of this file describes.

    Attribute: timeout, seconds that this rank may spend without progress.
    """

    def __init__(self, store, rank, world, timeout):
        self.timeout, self.rank, self.world = timeout, rank, world
        self.store = dist.PrefixStore("watch", store)
        self.store.set_timeout(timedelta(seconds=10))
        self.beats, self.last_beat, self.reports = 0, time.monotonic(), 0
        self.interval = max(0.2, min(10.0, timeout / 10))  # seconds between reports
        self._report()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def close(self):
        """End the thread, because Python aborts if it exits while a thread is in the store's C++."""
        self.closed.set()
        self.thread.join()

    def beat(self):
        """Note that this rank has made progress."""
        self.beats, self.last_beat = self.beats + 1, time.monotonic()

    def blame(self):
        """Return a text that names the ranks that hold the others up, on every rank the same. Takes 3 intervals.

        They are those that no longer answer or, if all do, those that have made the least progress.
        """
        try:
            old = self._read_reports()
            for _ in range(6):
                time.sleep(self.interval / 2)
                self._report()  # or another rank would take this one for silent
            new = self._read_reports()
            silent = [rank for rank in new if new[rank]["reports"] == old[rank]["reports"]]
            least = min(report["beats"] for report in new.values())
            slow = silent or [rank for rank in new if new[rank]["beats"] == least]
            names = ", ".join(f"rank {rank} on {new[rank]['host']}" for rank in slow)
            text = f"{names} no longer answers" if silent else f"{names} is behind the others"
            return self.store.compare_set("blame", "", text).decode()  # the text of the first rank that has one
        except Exception:  # the store lives on rank 0's host
            return f"rank 0 on {os.environ.get('MASTER_ADDR', 'its host')} is gone"

    def _watch(self):
        while not self.closed.wait(self.interval):
            with suppress(Exception):  # rank 0 is gone
                self._report()
            late = time.monotonic() - self.last_beat
            if late > self.timeout:
                abort(f"nothing has happened for {late:.0f} s: {self.blame()}")

    def _report(self):
        self.reports += 1
        report = {"host": socket.gethostname(), "beats": self.beats, "reports": self.reports}
        self.store.set(str(self.rank), json.dumps(report))

    def _read_reports(self):
        return {rank: json.loads(self.store.get(str(rank))) for rank in range(self.world)}


class StopSignals:
    """Records SIGINT, SIGTERM and SIGUSR1, so that training can end with a checkpoint after the micro-step.

    A line answers the first signal at once, and a SIGINT after it ends the process at once, with status 130. A second
    SIGTERM or SIGUSR1 changes nothing, because a scheduler and torchrun may both send one. Attribute: number (the last
    signal received, or 0).

    Python's handlers wait for the C++ that the main thread is in, such as a backward pass. So a thread answers, which
    reads the numbers of signals from a pipe that Python writes at once.
    """

    def __init__(self, out_dir, advice):
        """Receive signals from now on. advice: how the run in out_dir resumes after its end."""
        self.number = 0
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        signal.set_wakeup_fd(sender)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._receive)
        threading.Thread(target=_answer_signals, args=(receiver, out_dir, advice), daemon=True, name="signals").start()

    def _receive(self, number, frame):
        self.number = number


def _answer_signals(receiver, out_dir, advice):
    """Print a line for the first signal number in the pipe `receiver`, and end the process at a later SIGINT."""
    with open(receiver, "rb", buffering=0) as pipe:
        if pipe.read(1):
            warn("stopping after this micro-step and saving the steps taken; Ctrl-C now ends training at once")
        while number := pipe.read(1):
            if ord(number) == signal.SIGINT:
                warn(f"ended at once; last checkpoint: {newest(out_dir) or 'none'}; {advice}")
                os._exit(130)


@contextmanager
def exit_statuses(ranks):
    """End the program with one line on stderr where an error has a known cause; other errors keep their traceback.

    The status is 2 for settings and data that cannot be used, 1 for what happens later and 130 for Ctrl-C before
    training begins, or a second one.
    """
    replace_odd_letters()
    try:
        yield
    except DataError as error:  # a token outside the vocabulary or a cut shard, which other ranks may not meet
        refuse(error) if ranks.world == 1 else abort(error, status=2)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not interrupt the line
        abort("interrupted", status=130)
    except (Failed, NotWritten) as error:
        abort(error)
    except OSError as error:
        abort(f"cannot read or write: {error}")
    except (MemoryError, RuntimeError) as error:
        text = str(error).rpartition("DefaultCPUAllocator: ")[2]
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or text != str(error):
            abort(
                f"out of memory: {text.partition(chr(10))[0][:300]}; a smaller --batch_size (tokens_per_step stays), "
                "--activation_checkpointing=True and, on several GPUs, --shard=True need less"
            )
        # raised by a collective when another rank is gone
        if not ranks.watch or not (isinstance(error, dist.DistError) or "gloo" in text):
            raise
        abort(f"a rank could not be reached: {ranks.watch.blame()} ({text[:200]})")


def abort(message, status=1):
    """Print a line to stderr and end the process.

    Other ranks may be waiting in a collective that will never end, so nothing that might wait for them is run.
    """
    print_to_terminal(f"{process_name()}: {' '.join(str(message).split())}", file=sys.stderr)
    os._exit(status)


def warn(line):
    """Print a warning to stderr, on the first rank of each node only."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print_to_terminal(f"{os.path.basename(sys.argv[0])}: {line}", file=sys.stderr)


def print_to_terminal(*args, **kwargs):
    """Print a line above the progress bar. A closed pipe or a full disk behind it is no reason to stop training."""
    with suppress(OSError):
        tqdm.write(*args, **kwargs)
        sys.stdout.flush()
