"""Run training in several processes: ranks, signals, and errors that end all of them.

ranks = Ranks()                                   # from torchrun's environment; one rank without it
with exit_statuses(ranks):
    ranks.join(device, "auto", timeout=600)
    ...
    ranks.leave()
"""

import errno
import os
import signal
import sys
import threading
import time
import uuid
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from tqdm import tqdm

from sympow.data import DataError
from sympow.data.command import open_streams
from sympow.runs.checkpoint import NotWritten
from sympow.runs.settings import from_launcher, process_name, refuse
from sympow.runs.watch import Watch

FILE_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE,
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
)  # fmt: skip


class Failed(Exception):
    """Raised if training cannot go on. The message is one line; the process ends with status 1."""


class Ranks:
    """This process and its connection to the others that train with it.

    Attributes: rank, world (number of ranks), local (rank on this node), master (True on rank 0), distributed (True
    if torchrun, or another launcher that sets RANK, started the process); watch (a Watch) and store (the key-value
    store of torch.distributed), both None before `join` and in a process that was started alone.
    """

    def __init__(self):
        self.rank, self.world, self.local = map(from_launcher, ("RANK", "WORLD_SIZE", "LOCAL_RANK"), (0, 1, 0))
        self.master, self.distributed = self.rank == 0, bool(os.environ.get("RANK"))
        if self.rank >= self.world or (self.world > 1 and not self.distributed):
            refuse(
                f"RANK={os.environ.get('RANK', '')} and WORLD_SIZE={self.world} in the environment do not fit: start "
                "several processes with torchrun, or unset both",
                True,
            )
        self.device = self.watch = self.store = self.cpu_group = None

    def join(self, device, backend, timeout):
        """Connect to the other ranks and start to watch them; do nothing in a process that was started alone.

        backend is nccl, gloo or auto (nccl on GPUs). The job ends after `timeout` seconds without progress, and this
        process if the others have not joined by then.
        """
        self.device = device
        if not self.distributed:
            return
        if backend == "nccl" and device.type != "cuda":
            refuse(f"backend=nccl needs a GPU for each rank, got device={device.type}: leave backend out, or give gloo")
        missing = set()  # the ranks that rank 0 waits for; other ranks do not know

        def end():
            who = ", ".join(f"rank {r}" for r in sorted(missing)) or "the other ranks"
            leave_at_once(f"{who} {'has' if len(missing) == 1 else 'have'} not come within {timeout:g} s")

        limit = threading.Timer(timeout, end)
        limit.daemon = True
        limit.start()
        on_gpu = device.type == "cuda"
        try:
            self.store = store_of_this_start(self.rank, self.world, missing)
        except (ValueError, RuntimeError) as error:  # MASTER_ADDR or MASTER_PORT is missing or wrong, or nobody answers
            raise Failed(f"the ranks cannot find each other: {str(error).splitlines()[0][:300]}") from error
        dist.init_process_group(
            backend if backend != "auto" else "nccl" if on_gpu else "gloo", store=self.store,
            rank=self.rank, world_size=self.world, device_id=device if on_gpu else None,
        )  # fmt: skip
        self.watch = Watch(timeout)
        if self.world > 1:
            self.cpu_group = dist.new_group(backend="gloo")  # exchanges values without waiting for the GPU
        limit.cancel()

    def leave(self):
        """Wait, however long it takes, for the other ranks and disconnect."""
        if self.distributed:
            self.watch.rest()
            dist.barrier()  # if a rank disconnects while another still works, it may abort at exit
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
        """Let local rank 0 of every node run a block first, so that the others find in the caches what it compiled."""
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

    def share(self, number, seconds):
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
        shared = [own]
        dist.broadcast_object_list(shared, device=self.device)
        (chosen,) = shared
        if (own is None) != (chosen is None) or (chosen and not os.path.isdir(chosen)):
            raise Failed(
                f"rank {self.rank} would go on from {own}, rank 0 from {chosen}: out_dir must be shared by all nodes"
            )
        return chosen


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
    while missing:  # what a rank of the start before drew is answered too, until this start's rank has come
        for other in [r for r in missing if store.check([f"drawn_by/{r}"])]:
            store.set(f"prefix_for/{store.get(f'drawn_by/{other}').decode()}", own)
        time.sleep(0.02)
        missing -= {r for r in missing if store.check([f"{own}/came/{r}"])}
    return dist.PrefixStore(own, store)


class StopSignals:
    """Records SIGINT, SIGTERM and SIGUSR1, so that training can end with a checkpoint after the micro-step.

    A second SIGINT ends the process at once. A second SIGTERM or SIGUSR1 changes nothing, because a scheduler and
    torchrun may both send one. Attribute: number, that of the last signal received, or 0.
    """

    def __init__(self):
        self.number = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, number, frame):
        self.number = number
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def exit_statuses(ranks):
    """End the program with one line on stderr where an error has a known cause; other errors keep their traceback.

    Closed streams (`>&-`) do not stop it. The status is 2 for settings and data that cannot be used, 1 for what happens
    later and 130 for Ctrl-C before training begins.
    """
    open_streams()
    try:
        yield
    except DataError as error:  # a token outside the vocabulary or a cut shard, which other ranks may not meet
        refuse(error) if ranks.world == 1 else leave_at_once(error, status=2)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not interrupt the line
        leave_at_once("interrupted", status=130)
    except (Failed, NotWritten) as error:
        leave_at_once(error)
    except OSError as error:
        if error.errno not in FILE_ERRORS:
            raise
        leave_at_once(f"cannot read or write: {error}")
    except (torch.OutOfMemoryError, MemoryError) as error:
        reason = (str(error).splitlines() or [""])[0][:300]
        leave_at_once(
            f"out of memory: {reason}; a smaller --batch_size (tokens_per_step stays), --activation_checkpointing=True "
            "and, on several GPUs, --shard=True need less"
        )
    except RuntimeError as error:  # raised by a collective when another rank is gone
        if not ranks.watch or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        leave_at_once(f"a rank could not be reached: {ranks.watch.blame()} ({str(error).splitlines()[0][:200]})")


def leave_at_once(message, status=1):
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
