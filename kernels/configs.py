"""Choose the tile sizes that a kernel runs with: from a table in the repository, never by timing at run time.

Timing at the first call would make users wait, and would choose differently from run to run and from rank to rank. The
choice depends on the kernel, dtype, head dimension, p, gates and GPU alone. table.json has what `make tune` measured;
for all others SAFE has sizes that fit into 99 KB of shared memory, which every GPU since Ampere has. No entry depends
on T, so a new length compiles nothing.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import torch

TABLE = Path(__file__).with_name("table.json")
# GPUs that have not been measured -> the measured one that has the same chip with other memory
SAME_CHIP = dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "NVIDIA GH200 480GB"), "NVIDIA H200")


class Config(NamedTuple):
    """The sizes of one kernel's tiles, and how it is compiled."""

    BM: int  # queries of a tile, at most 128 (chunks are multiples of that); dkdv: at most dq's; update_state: 64
    # keys of a tile, for dkdv a multiple of BM; update_state: tokens; query_state: features, 64, 128 or 256;
    # query_gradient: for p = 4 scalars times D, not used for p = 2
    BN: int
    warps: int
    stages: int  # tiles in flight
    maxnreg: int = 0  # most registers a thread may have; 0: the compiler decides

    def launch(self):
        """Return the options of a Triton launch."""
        return dict(num_warps=self.warps, num_stages=self.stages, **({"maxnreg": self.maxnreg} if self.maxnreg else {}))


# (kernel, dtype) -> [(largest head dimension, Config), ...]
SAFE = {
    ("forward", torch.bfloat16): [(64, Config(64, 64, 4, 2)), (128, Config(64, 32, 4, 2))],
    ("dq", torch.bfloat16): [(64, Config(64, 64, 4, 2)), (128, Config(64, 32, 4, 2))],
    ("dkdv", torch.bfloat16): [(64, Config(64, 64, 4, 2)), (128, Config(32, 64, 4, 2))],
    ("update_state", torch.bfloat16): [(64, Config(64, 64, 4, 2)), (128, Config(64, 32, 8, 2))],
    ("query_state", torch.bfloat16): [(64, Config(64, 64, 4, 2)), (128, Config(64, 64, 8, 2))],
    ("query_gradient", torch.bfloat16): [(64, Config(64, 64, 4, 2)), (128, Config(64, 64, 8, 1))],
    ("forward", torch.float32): [
        (128, Config(32, 32, 8, 1))
    ],  # float32 does not use the matrix unit; registers are the limit
    ("dq", torch.float32): [(128, Config(32, 32, 8, 1))],
    ("dkdv", torch.float32): [(128, Config(32, 32, 8, 1))],
    ("update_state", torch.float32): [(128, Config(64, 32, 8, 1))],
    ("query_state", torch.float32): [(128, Config(64, 64, 8, 1))],
    ("query_gradient", torch.float32): [(128, Config(64, 64, 8, 1))],
}
# head dimension 256: the quadratic form alone, not in float32, which would not fit 99 KB
SAFE["forward", torch.bfloat16].append((256, Config(64, 32, 8, 2)))
SAFE["dq", torch.bfloat16].append((256, Config(32, 32, 8, 2)))
SAFE["dkdv", torch.bfloat16].append((256, Config(32, 32, 8, 2)))


def choose(kernel, q, p, gated=False, chunked=False):
    """Return the Config for `kernel`, one of SAFE's names, for q [B, T, H, D] on its device.

    gated: True if there are gates; the chunked form's kernels have one Config for both. chunked: True if a kernel of
    the quadratic form is limited to chunks, for which it may have an entry of its own. float16 has no entries: tiles
    of it are those of bfloat16.
    """
    device = torch.cuda.get_device_name(q.device) if q.is_cuda else "cpu"
    device = device if device in _table() else SAME_CHIP.get(device, device)
    dtype = torch.bfloat16 if q.dtype == torch.float16 else q.dtype
    entries, sizes = _table().get(device, {}), (kernel, dtype, q.shape[-1], p, gated)
    found = chunked and entries.get(key(*sizes, chunked)) or entries.get(key(*sizes))
    return Config(*found) if found else safe(kernel, dtype, q.shape[-1])


def safe(kernel, dtype, D):
    """Return the Config for a GPU that is not in the table."""
    return next(config for largest, config in SAFE[kernel, dtype] if D <= largest)


def key(kernel, dtype, D, p, gated=False, chunked=False):
    """Return the name of an entry in the table."""
    return f"{kernel} {str(dtype).removeprefix('torch.')} D={D} p={p}{' gated' * gated}{' chunked' * chunked}"


@functools.cache
def _table():
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}
