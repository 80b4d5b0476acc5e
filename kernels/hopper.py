"""Choose the Gluon kernel of hopper_kernels.py and launch it, or give way to the Triton kernel.

It is chosen by sizes and the tensor's GPU alone. If Gluon is missing, or the kernel does not compile with this version
of Triton, the process warns once and uses the Triton kernel from then on. Results have the same bits.
"""

import warnings

import torch

from . import configs

TOKENS, STAGES = 64, 6  # of a step, two of which divide a chunk; steps in shared memory
enabled = True  # set to False to use the Triton kernel, also after Gluon's failed


def available(q, p):
    """Return True if there is a Gluon kernel for q [B, T, H, D], the power p and q's GPU."""
    gpu = configs.gpu(q.device)
    hopper = gpu.rows == "wgmma" and gpu.name != "cpu" and gpu.shared >= configs.MEASURED_SHARED
    return enabled and hopper and p == 2 and q.shape[-1] == 64 and q.dtype == torch.bfloat16


def update_state(s, rows, prepared, U, down):
    """Write U as `update_state.update_state_kernel` does, and return True; or warn and return False if the kernel
    fails, as will `available`."""
    global enabled
    tiles = s.layout.tiles
    try:
        from .hopper_kernels import update_state_kernel

        update_state_kernel[(s.B * s.HKV * s.chunks * tiles // 4,)](
            prepared["xt"], prepared["values"], U, s.layout.parts, s.layout.groups, down,
            s.T, s.TP, s.chunk, rows, s.HKV, tiles, s.F, K=TOKENS, STAGES=STAGES, num_warps=4,
        )  # fmt: skip
    except Exception as error:  # of many kinds: Gluon's interface and compiler change from version to version
        enabled = False
        why = (str(error).strip().splitlines() or [""])[0]
        warnings.warn(f"Gluon's kernel is off, Triton's is used: {type(error).__name__}: {why}"[:300], stacklevel=2)
        return False
    return True
