"""Choose the tile sizes that a kernel runs with: from tables in the repository, never by timing at run time.

Timing at the first call would make users wait, and would choose differently from run to run and from rank to rank. The
choice depends on the kernel, its form, dtype, head dimension, p, gates and GPU alone. No entry depends on T, so a new
length compiles nothing. There are two kinds of kernels:

    forward, dq, dkdv (quadratic/),            sizes depend on the GPU: table.json has what `make tune` measured, by the
    update_state, query_state,                 GPU's name. Other GPUs with Hopper's compute capability have the H200's
    query_gradient (chunked/)                  entries. For all others, and for float32, SAFE has sizes for each class
                                               of GPUs, chosen by the registers, spills and shared memory of compiled
                                               code (tests/targets.py prints these). The H200's update_state was chosen
                                               so too at D = 64, and for p = 4 at D = 16: its products have 64 tokens,
                                               since ptxas of Triton 3.7 to 3.9 serializes longer ones (tests/sass.py).
    all others: heinsen/, decode/,             sizes are the same for every GPU: constants in the kernel's own file
    cross_entropy, gates, and
    prepare and discumsum (chunked/)
"""

import functools
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch

TABLE = Path(__file__).resolve().with_name("table.json")


def cache_folder():
    """Return the Path of the folder in the user's cache that keeps measurements of this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "sympow"


# Where `tune` writes. The installed package has its own table in the user's cache folder. Its entries come first.
OWN_TABLE = TABLE if (TABLE.parents[1] / "sympow").is_dir() else cache_folder() / "table.json"
MEASURED = "NVIDIA H200"  # all of Hopper uses the entries of this GPU, if it has as much shared memory
MEASURED_SHARED = 227 * 1024  # bytes


class Gpu(NamedTuple):
    """The properties of a GPU that decide which kernels run and with which tile sizes."""

    name: str  # of the device, as the table has it
    rows: str  # its class, a key of SAFE
    shared: int  # bytes of shared memory that a program may have
    descriptors: bool  # tiles are read through tensor descriptors, by a copy engine (TMA), else by pointers
    early_launch: bool  # a kernel may be launched while the one before it runs


@functools.cache
def gpu(device):
    """Return the Gpu of a torch.device, which need not be the current one; the CPU stands for the interpreter."""
    if device.type != "cuda":
        return Gpu("cpu", "wgmma", 99 * 1024, True, False)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
    return describe_gpu(properties.name, torch.cuda.get_device_capability(device), shared)


def describe_gpu(name, capability, shared):
    """Return the Gpu of this name, compute capability and bytes of shared memory.

    GPUs of 12.x have a copy engine, but with pointers the compiler makes better code for them: dkdv at head dimension
    64 takes 230 registers, and 255 with 88 bytes of spills with descriptors.
    """
    rows = {9: "wgmma", 10: "tcgen05", 11: "tcgen05"}.get(capability[0], "mma")
    return Gpu(name, rows, shared, rows != "mma", capability >= (9, 0))


def reads_by_descriptor(x):
    """Return True if kernels read tiles of the tensor x through descriptors, if its strides allow that."""
    return gpu(x.device).descriptors


def early_launch(x):
    """Return the options of a launch that may begin while the kernel before it runs, if x's GPU supports that."""
    return dict(PDL=True, launch_pdl=True) if gpu(x.device).early_launch else {}


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


QUADRATIC = ("forward", "dq", "dkdv")  # the quadratic form's kernels
STATES = {  # of bfloat16, for every class of GPUs
    "update_state": [(64, Config(64, 64, 4, 2)), (128, Config(64, 32, 8, 2))],
    "query_state": [(64, Config(64, 64, 4, 2)), (128, Config(64, 64, 8, 2))],
    "query_gradient": [(64, Config(64, 64, 4, 2)), (128, Config(64, 64, 8, 1))],
}
FLOAT32 = {  # products do without the matrix unit; registers are the limit
    "forward": [(128, Config(32, 32, 8, 1))],
    "dq": [(128, Config(32, 32, 8, 1))],
    "dkdv": [(128, Config(32, 32, 8, 1))],
    "update_state": [(128, Config(64, 32, 8, 1))],
    "query_state": [(128, Config(32, 64, 8, 1))],
    "query_gradient": [(128, Config(64, 64, 16, 1))],
}
# The class of a GPU, or float32 -> kernel -> [(largest head dimension, Config), ...]. Head dimension 256 has the
# quadratic form alone, and not in float32. Nothing here is measured.
SAFE = {
    "wgmma": {  # Hopper
        "forward": [(64, Config(64, 64, 4, 2)), (128, Config(64, 32, 4, 2)), (256, Config(64, 32, 8, 2))],
        "dq": [(64, Config(64, 64, 4, 2)), (128, Config(64, 32, 4, 2)), (256, Config(32, 32, 8, 2))],
        "dkdv": [(64, Config(64, 64, 4, 2)), (128, Config(32, 64, 4, 2)), (256, Config(32, 32, 8, 2))],
        **STATES,
    },
    "mma": {  # Ampere, Ada and the smaller Blackwell
        # Tiles of 128 queries read keys half as often as 64 do. In 48 KB a thread takes at most 254 registers and
        # spills at most 16 bytes (Triton 3.6, 3.8, 3.9). At D = 128 they take all 255, and spill on an RTX 5090.
        "forward": [(64, Config(128, 64, 8, 3)), (128, Config(64, 32, 4, 3)), (256, Config(64, 32, 8, 2))],
        "dq": [(128, Config(64, 32, 4, 3)), (256, Config(32, 32, 8, 2))],
        "dkdv": [(64, Config(32, 64, 4, 2)), (128, Config(32, 32, 4, 2)), (256, Config(32, 32, 8, 2))],
        **STATES,
    },
    "tcgen05": {  # Blackwell of data centers
        "forward": [(64, Config(128, 64, 4, 2)), (128, Config(128, 64, 8, 2)), (256, Config(64, 32, 8, 2))],
        "dq": [(128, Config(64, 64, 4, 2)), (256, Config(32, 32, 8, 2))],
        "dkdv": [(128, Config(64, 64, 8, 2)), (256, Config(32, 32, 8, 2))],
        **STATES,
    },
    "float32": FLOAT32,
    # with 32 tokens update_state spills 312 to 744 bytes a thread there, on Hopper 288
    "float32, not Hopper": FLOAT32 | {"update_state": [(128, Config(64, 16, 8, 1))]},
}


def choose(kernel, q, p, gated=False, chunked=False):
    """Return the Config for `kernel`, one of SAFE's names, for q [B, T, H, D] on its device.

    gated: True if there are gates; the chunked form's kernels have one Config for both. chunked: True if a kernel of
    the quadratic form is limited to chunks, for which it may have an entry of its own.
    """
    return find(kernel, q.dtype, q.shape[-1], p, gated, chunked, gpu(q.device))


def find(kernel, dtype, D, p, gated, chunked, device):
    """Return the Config for `choose`'s sizes on a Gpu: from its entries in the table, from Hopper's, or from SAFE."""
    sizes = entry(_table().get(name_in_table(device), {}), kernel, dtype, D, p, gated, chunked)
    return Config(*sizes) if sizes else safe(kernel, dtype, D, device)


def entry(entries, kernel, dtype, D, p, gated, chunked):
    """Return the sizes that the entries of one GPU have for `choose`'s sizes, or None.

    In the quadratic form's kernels an entry without chunks holds in chunks too, one without gates with gates too, and
    one for a power for larger powers, unless there is an entry for these.
    """
    powers = range(p, 0, -2) if kernel in QUADRATIC else (p,)
    for settings in ((gated, chunked), (gated, False), (False, False)):
        for power in powers:
            if sizes := entries.get(key(kernel, dtype, D, power, *settings)):
                return sizes
    return None


def name_in_table(device):
    """Return the name of a Gpu in the table: its own, or MEASURED for a Hopper GPU without entries."""
    hopper = device.rows == "wgmma" and device.shared >= MEASURED_SHARED
    return MEASURED if hopper and device.name not in _table() else device.name


def table_name(device):
    """Return the name of the kind of GPU that a torch.device is: GPUs of one name run the same kernels."""
    return name_in_table(gpu(device))


def safe(kernel, dtype, D, device):
    """Return the Config for sizes that are not in the table, on a Gpu."""
    name = device.rows
    if dtype == torch.float32:
        name = "float32" if device.rows == "wgmma" else "float32, not Hopper"
    return next(config for largest, config in SAFE[name][kernel] if D <= largest)


def key(kernel, dtype, D, p, gated=False, chunked=False):
    """Return the name of an entry in the table."""
    return f"{kernel} {str(dtype).removeprefix('torch.')} D={D} p={p}{' gated' * gated}{' chunked' * chunked}"


@functools.cache
def _table():
    tables = [json.loads(path.read_text()) if path.exists() else {} for path in (TABLE, OWN_TABLE)]
    return {name: {**tables[0].get(name, {}), **tables[1].get(name, {})} for name in {**tables[0], **tables[1]}}
