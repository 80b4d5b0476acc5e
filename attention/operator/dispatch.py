"""Decide how power attention is computed: in which form, in chunks of how many tokens, and on the kernels or not.

    plan(Problem(T, D, E, p, q.dtype, q.device, gated=True))        # Plan(form, chunk_size, on_kernels, ...)

The answer is a function of sizes, dtype and device alone, so that every rank and every run decides the same, unless the
kernels are disabled. Where training begins or a run is loaded, check.py compares the kernels of plans with float64.
"""

import warnings
from operator import index
from typing import NamedTuple

import torch

from . import backend
from .backend import cost, symmetric_power_dim, transforms_active, width

FORMS = ("auto", "quadratic", "chunked", "recurrent")
# In PyTorch both forms cost the same at T = 1.5 Dphi. If only the quadratic form has kernels, they cost the same at
# this many times that length (measured on an H200, p=2, D=64).
KERNEL_GAIN = {torch.bfloat16: 400, torch.float32: 5}


class Size(NamedTuple):
    """The kernels of one operator, and the sizes of their inputs."""

    form: str  # a name in OPERATORS of check.py
    dtype: torch.dtype
    D: int | None = None  # head dimension
    p: int | None = None
    gated: bool = False
    E: int | None = None  # width of the values, by default D
    n: int | None = None  # number of queries, which belong to the last tokens; by default every token has one
    v_dtype: torch.dtype | None = None  # "heinsen": dtype of the values, float32 if they were logarithms


class Problem(NamedTuple):
    """What a form depends on besides the values of tensors."""

    T: int  # tokens
    D: int  # width of queries and keys
    E: int  # width of values
    p: int
    dtype: torch.dtype  # of q, k and v
    device: torch.device | str  # "cuda" is the current GPU
    gated: bool  # True if there is a log_g


class Plan(NamedTuple):
    form: str  # "quadratic", "chunked" or "recurrent"
    chunk_size: int | None  # tokens a chunk; 1 in the recurrent form, None in the quadratic one
    on_kernels: bool  # on the Triton kernels, else in PyTorch
    size: Size | None = None  # the kernels, as check.py compares them


def computed_dtype(dtype):
    """Return the dtype in which tensors of this dtype are computed: float32 for float16, which no kernel takes."""
    return torch.float32 if dtype == torch.float16 else dtype


def plan(problem, form="auto", chunk_size=None, *, initial_state=False, return_state=False, queries=None, sums=False,
         pieces=1):  # fmt: skip
    """Return the Plan of power attention for a Problem.

    form and chunk_size are the caller's requests ("auto" and None: the cheapest). initial_state and return_state are
    True if a state is given and if one is returned. queries: how many there are, by default T. sums: True for
    `power_attention_sums`. pieces: how many pieces a sequence has that are computed by themselves in the chunked form,
    with states between them; the Plan is then for each of them.
    """
    # symbols under torch.compile(dynamic=True), which why_not refuses
    D, E, p = index(problem.D), index(problem.E), index(problem.p)
    dtype, device = computed_dtype(problem.dtype), problem.device
    problem = problem._replace(D=D, E=E, p=p, dtype=dtype)
    if queries is not None:  # as many tokens as have these pairs for each key
        problem = problem._replace(T=2 * queries - queries * queries // problem.T)
    reason = why_not("quadratic", device, dtype, D, E, p)
    reasons = {"quadratic": reason, "chunked": reason or why_not("chunked", device, dtype, D, E, p)}
    states = initial_state or return_state
    chosen = _choose(problem, form, chunk_size, states, reasons)
    if pieces > 1 and chosen.form != "quadratic":
        piece = problem._replace(T=problem.T // pieces)
        chosen = _choose(piece, "chunked", chunk_size, True, reasons)
    if not chosen.on_kernels:
        return chosen
    # fewer queries than tokens are those after the state of the others
    kernels = {
        "quadratic": "sums" if sums or initial_state else "quadratic",
        "chunked": "states" if states or pieces > 1 or queries is not None else "chunked",
    }
    W = width(chosen.form, dtype, D, E)
    return chosen._replace(size=Size(kernels[chosen.form], dtype, W, p, problem.gated))


def _choose(problem, form, chunk_size, states, reasons):
    """Return the Plan; reasons: for each form why its kernels cannot be used, or ""."""
    T, D, E, p, dtype, _, gated = problem
    W = width("chunked", dtype, D, E)
    if form == "auto":
        if not reasons["chunked"]:  # both forms are on the kernels
            form = "chunked" if states else cost.best_form(T, W, p, gated)
        else:
            gain = 1 if reasons["quadratic"] else KERNEL_GAIN[dtype]
            form = "quadratic" if T <= gain * 1.5 * symmetric_power_dim(D, p) else "chunked"
    if form == "quadratic":
        return Plan(form, None, not reasons[form])
    if form == "recurrent":
        return Plan(form, 1, False)
    if reasons[form]:
        return Plan(form, chunk_size or default_chunk_size(D, p), False)
    return Plan(form, kernel_chunk_size(T, W, p, chunk_size, gated), True)


def default_chunk_size(D, p):
    """Return the chunk size for PyTorch: a power of two near Dphi / 2.

    At that size attention inside a chunk costs about as much as reading the state.
    """
    return min(1024, max(16, 2 ** (symmetric_power_dim(D, p) // 2).bit_length() // 2))


def kernel_chunk_size(T, W, p, chunk_size, gated):
    """Return the chunk size of kernels of width W, a multiple of 128: `chunk_size` rounded up, or for None the cost
    model's."""
    if chunk_size is None:
        return cost.chunk_size(T, W, p, gated)
    return min(-(-chunk_size // 128), -(-T // 128)) * 128


def why_not(form, device, dtype, D=0, E=0, p=0):
    """Return why the kernels of `form` cannot be used on a device, or "". Warn once for each reason if it is a GPU.

    form, D, E, p: as for `kernels.why_not`; device: a torch.device or its name, "cuda" for the current GPU.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if dtype in (torch.float64, torch.float16):
        return f"{str(dtype).removeprefix('torch.')} is computed in PyTorch"
    if transforms_active():
        return "torch.func's transforms and forward mode are computed in PyTorch"
    reason = _disabled or backend.why_not(form, dtype, D, E, p, device)
    if reason and form in WARNED_OF:
        warn_once(f"{WARNED_OF[form]} runs in plain PyTorch, not on its Triton kernels: {reason}")
    return reason


# torch.compile asks once and does not look inside. torch.compiler.assume_constant_result sets this mark too, but it
# imports torch._dynamo, which takes 2 s that a program without torch.compile need not wait.
why_not._dynamo_marked_constant = True


def is_watched():
    """Return True where torch.compile, a transform of torch.func, forward mode or a mode, such as FakeTensorMode, sees
    what is computed: there numbers may be unknown."""
    return torch.compiler.is_compiling() or transforms_active() or torch._C._len_torch_dispatch_stack() > 0


def is_recorded():
    """Return True where gradients are recorded, or `is_watched` does: kernels must then be called as operators."""
    return torch.is_grad_enabled() or is_watched()


def prompt_kernels(x):
    """Return the module kernels.decode.prompt if it takes x, else None, as where gradients are recorded.

    torch.compile makes one pass of its function too, and modes want to see operators.
    """
    return None if is_recorded() or why_not("prompt", x.device, x.dtype) else backend.prompt()


def convolution_kernels(x):
    """Return the module kernels.convolution if it takes x, else None."""
    return None if why_not("convolution", x.device, x.dtype) else backend.convolution()


def disable_kernels(reason):
    """Use PyTorch in place of the kernels from now on in this process, for `reason`; "" uses the kernels again."""
    global _disabled
    _disabled = reason


def first_line(error):
    """Return the first line of an exception's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def warn_once(message):
    """Warn of the same message once in this process, in one line: without a line of source."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn_explicit(message, UserWarning, "attention", 1)


_disabled = ""
_warned = set()
WARNED_OF = {  # form: what has these kernels
    "quadratic": "power attention",
    "heinsen": "heinsen attention",
    "rotary": "rotary",
    "cross_entropy": "cross entropy",
}
