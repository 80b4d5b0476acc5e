"""Attention on a GPU: Triton kernels, and the operators through which torch calls them.

operators      the door: power attention's quadratic and chunked form as torch operators
widths         rows of any width for kernels of a few
transforms     autograd and torch.compile of the operators
quadratic/     passes, the launchers of the quadratic form, and its kernels: forward_kernel, dq_kernel, dkdv_kernel,
               key_scale_kernel, gates, tiles
chunked/       passes, the chunked form forward and backward, and its kernels: prepare, products, mirror, gates,
               update_state, discumsum, query_state, query_gradient_p2, query_gradient_p4
heinsen/       passes, Heinsen's log attention, and operator, its torch operator
decode/        one token of generation: power, softmax, heinsen, linear, sampling; rotary and prompt, for prompts
convolution    the convolution over tokens
common         what the kernels share: units, exact products, program maps
cross_entropy  losses and their gradients in one pass over the logits
layout         which features a state has, and in what order the kernels store them
precompile     compiles many kernels at once, in threads, before they are used
registry       objects that operators know by a number: the ranks that share a sequence
cost           which form is cheaper, and how long a chunk should be
configs        tile sizes, read from table.json
support        this file: which sizes, dtypes and GPUs the kernels take
tune           measures tile sizes and rewrites table.json

Importing this file, `layout`, `registry`, `cost` or `configs` does not import Triton. Nothing in kernels/ imports
attention/ or the model: attention/ calls `why_not`, and imports the kernels only to use them.

kernels/ has no __init__.py, so that in a clone `import kernels` is Hugging Face's package of that name, which
transformers looks for.
"""

import hashlib
import importlib.util
from pathlib import Path

import torch

HEAD_DIMS, POWERS, DTYPES = (16, 32, 64, 128), (2, 4, 6, 8), (torch.bfloat16, torch.float32)
CHUNKED_SIZES = ((16, 2), (32, 2), (64, 2), (128, 2), (16, 4), (32, 4), (64, 4))  # (width, p) of the chunked form
QUADRATIC_WIDTHS = (*HEAD_DIMS, 256)
POINTWISE = ("rotary", "convolution", "prompt", "cross_entropy")
SOURCES = Path(__file__).parent


def source_files(suffixes=(".py",)):
    """Return the paths of all files of the kernels, in every room, with one of these suffixes."""
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in suffixes)


def source_hash():
    """Return a hash of everything that decides what the kernels compile to: code and tables, in every room."""
    files = source_files((".py", ".json"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def widest(form, dtype):
    """Return the largest head dimension that the kernels of `form` take in a dtype; form: see `why_not`."""
    if form in ("quadratic", "sums") and dtype != torch.float32:  # tiles of float32 would not fit shared memory
        return QUADRATIC_WIDTHS[-1]
    return HEAD_DIMS[-1]


def width(form, dtype, *sizes):
    """Return the width that kernels of `form` have for rows of these sizes: the smallest that is no less, or 0."""
    return next((W for W in QUADRATIC_WIDTHS if max(sizes) <= W <= widest(form, dtype)), 0)


def why_not(form, dtype, D=0, E=0, p=0, device=None):
    """Return why the kernels of `form` cannot run on a GPU, or "" if they can.

    form: "quadratic" ("sums" takes its sizes), "chunked", "heinsen" or "decode", for inputs q, k [..., D] and v
    [..., E] of `dtype` and p, one of POWERS ("heinsen": not read); or a name in POINTWISE, for any sizes.
    device: the GPU, by default the current one.
    """
    if dtype not in DTYPES:
        name, *names = (str(x).removeprefix("torch.") for x in (dtype, *DTYPES))
        return f"{name} (they take {', '.join(names)})"
    if form == "decode":
        if D not in HEAD_DIMS:
            return f"head dimension {D} (in generation they take {', '.join(map(str, HEAD_DIMS))})"
        if E != D:
            return f"values {E} wide where keys are {D} (in generation they take equal widths)"
    W = width(form, dtype, D, E)
    if form not in POINTWISE and not W:
        size = f"head dimension {D}" if D >= E else f"values {E} wide"
        case = " in the chunked form" if form == "chunked" else " in float32" if dtype == torch.float32 else ""
        return f"{size} (they take up to {widest(form, dtype)}{case})"
    if form == "chunked" and (W, p) not in CHUNKED_SIZES:
        sizes = ", ".join(f"p={m} up to {max(W for W, power in CHUNKED_SIZES if power == m)}" for m in (2, 4))
        return f"head dimension {D} and values {E} wide with p={p} (in the chunked form they take {sizes})"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} (they take compute capability 8.0 and later)"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""
