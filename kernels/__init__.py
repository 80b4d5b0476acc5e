"""How attention is computed on a GPU: Triton kernels, and the operators that torch knows them by.

quadratic   the kernels of the quadratic form, and the functions that launch them
layout      the chunked form's features: what their order is, and which products of entries they are
chunked     the kernels of the chunked form, and what launches them
ops         both forms as torch operators: autograd, torch.compile, meta tensors
operators   the chunked form's three steps as operators of their own
cost        which form is cheaper, and how long a chunk should be
configs     tile sizes, from table.json
check       the kernels against float64, on the GPU at hand
tune        rewrites table.json

Nothing here imports the model; attention/power.py asks `why_not`, and imports the rest when there is work for it.
"""

import importlib.util

import torch

HEAD_DIMS, POWERS, DTYPES = (16, 32, 64, 128), (2, 4, 6, 8), (torch.bfloat16, torch.float32)

broken = ""  # why the kernels must not be used in this process; set where a check of them fails


def why_not(dtype, D, E, p):
    """Why the current GPU's kernels cannot be used for q, k [.., D], v [.., E] of this dtype and power p, or ""."""
    if broken:
        return broken
    if dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')} (they take bfloat16 and float32)"
    if D not in HEAD_DIMS:
        return f"head dimension {D} (they take {', '.join(map(str, HEAD_DIMS))})"
    if E != D:
        return f"values {E} wide where keys are {D} (they take equal widths)"
    if p not in POWERS:
        return f"p={p} (they take {', '.join(map(str, POWERS))})"
    if torch.version.hip:
        return "ROCm (they are written for NVIDIA GPUs)"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} (they take compute capability 8.0 and later)"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""
