"""Choose the Gluon kernels of hopper_kernels.py and launch them, or give way to the Triton kernels.

They are chosen by sizes and the tensor's GPU alone. If Gluon is missing, or one of the kernels does not compile with
this version of Triton, the process warns once and uses the Triton kernels from then on. Results have the same bits, but
for the gates' gradient, where a sum in another order differs by 1e-7.
"""

import warnings

import torch

from .. import configs
from ..common import VALUES_DOWN_2

TOKENS, STAGES = 64, 6  # of update_state: tokens of a step, two of which divide a chunk; steps in shared memory
enabled = True  # set to False to use the Triton kernels, also after a kernel failed


def available(q, p):
    """Return True if there are Gluon kernels for q [B, T, H, D], the power p and q's GPU."""
    gpu = configs.gpu(q.device)
    hopper = gpu.rows == "wgmma" and gpu.name != "cpu" and gpu.shared >= configs.MEASURED_SHARED
    return enabled and hopper and p == 2 and q.shape[-1] == 64 and q.dtype == torch.bfloat16


def update_state(s, rows, prepared, U, down):
    """Write U as `update_state.update_state_kernel` does, and return True; or return False if the kernel fails."""
    tiles = s.layout.tiles
    programs = s.B * s.HKV * s.chunks * tiles // 4
    return _launch(
        "update_state_kernel", programs,
        prepared["xt"], prepared["values"], U, s.layout.parts, s.layout.groups, down,
        s.T, s.TP, s.chunk, rows, s.HKV, tiles, s.F, K=TOKENS, STAGES=STAGES,
    )  # fmt: skip


def query_gradient(s, prepared, S, unit_s, skip, out, x, Z, weight, mirror, read):
    """Do what `query_gradient.query_gradient_kernel` does, and return True; or return False if the kernel fails."""
    rows = x.shape[2]
    programs = -(-s.T // 128) * s.B * rows
    return _launch(
        "query_gradient_kernel", programs,
        prepared["xt"], prepared["values"], S, unit_s, prepared["unit_v"], prepared["unit_x"], s.layout.where,
        out, x, Z, weight, mirror, read, x.stride(),
        s.T, s.TP, s.chunk, rows, s.HKV, s.layout.tiles, skip, DOWN=VALUES_DOWN_2.value,
    )  # fmt: skip


def _launch(name, programs, *arguments, **constants):
    """Launch a kernel and return True, or warn and return False, as will `available`."""
    global enabled
    try:
        from . import hopper_kernels

        getattr(hopper_kernels, name)[(programs,)](*arguments, **constants, num_warps=4)
    except Exception as error:  # of many kinds: Gluon's interface and compiler change from version to version
        enabled = False
        why = (str(error).strip().splitlines() or [""])[0]
        warnings.warn(f"Gluon kernels are off, Triton's are used: {type(error).__name__}: {why}"[:300], stacklevel=2)
        return False
    return True
