"""Decide how power attention is computed: in which form, in chunks of how many tokens, and on the kernels or not.

    plan(T, D, E, p, dtype=q.dtype, device=q.device, gated=True)        # Plan(form, chunk_size, on_kernels, reason)

The answer is a function of sizes, dtype and device alone, so that every rank and every run decides the same, unless the
kernels turn out to be wrong on this machine: before a size's first use they are compared with float64 (check.py).
"""

import warnings
from operator import index
from typing import NamedTuple

import torch

from .backend import (
    cost,
    heinsen_unsupported_reason,
    symmetric_power_dim,
    unsupported_reason,
    unusable_machine,
    width,
)  # fmt: skip
from .check import failure, fused_failure, heinsen_failure

FORMS = ("auto", "quadratic", "chunked", "recurrent")
# In PyTorch both forms cost the same at T = 1.5 Dphi. If only the quadratic form has kernels, they cost the same at
# this many times that length (measured on an H200, p=2, D=64).
KERNEL_GAIN = {torch.bfloat16: 400, torch.float32: 5}


class Plan(NamedTuple):
    form: str  # "quadratic", "chunked" or "recurrent"
    chunk_size: int | None  # tokens a chunk; 1 in the recurrent form, None in the quadratic one
    on_kernels: bool  # on the Triton kernels, else in PyTorch
    reason: str  # why it is not on the kernels; "" if it is


def plan(
    T, D, E, p, *, dtype, device, gated, form="auto", chunk_size=None, initial_state=False, return_state=False,
    queries=None, sums=False,
):  # fmt: skip
    """Return the Plan for T tokens, head dimension D, values of width E and power p.

    dtype and device are those of q, k and v ("cuda" is the current GPU); gated is True if there is a log_g; form and
    chunk_size are what the caller asks for ("auto" and None: the cheapest); initial_state and return_state are True if
    a state is given and asked for; queries: how many there are, by default T; sums: True for `power_attention_sums`.
    """
    D, E = index(D), index(E)  # symbols under torch.compile(dynamic=True), which kernel_reason cannot take
    not_quadratic = kernel_reason("quadratic", device, dtype, D, E, p)
    not_chunked = not_quadratic or kernel_reason("chunked", device, dtype, D, E, p)
    if queries is not None:  # as many tokens as have these pairs for each key
        T = 2 * queries - queries * queries // T
    sizes = T, D, E, p, dtype, gated, form, chunk_size, initial_state or return_state
    chosen = _choose(*sizes, not_quadratic, not_chunked)
    # what is compared with float64; fewer queries than tokens are those after the state of the others
    quadratic = "sums" if sums or initial_state else "quadratic"
    chunked = "states" if initial_state or return_state or queries is not None else "chunked"
    while chosen.on_kernels:
        what = chunked if chosen.form == "chunked" else quadratic
        wrong = failed_check(what, dtype, width(chosen.form, dtype, D, E), p, gated, device)
        if not wrong:
            break
        not_quadratic, not_chunked = wrong if chosen.form == "quadratic" else not_quadratic, wrong
        chosen = _choose(*sizes, not_quadratic, not_chunked)
    return chosen


def plan_adaptive(D, E, *, dtype, device, gated):
    """Return the Plan of the quadratic form with a power for each row; see `plan`."""
    D, E = index(D), index(E)  # as in `plan`
    reason = kernel_reason("adaptive", device, dtype, D, E, 0)
    reason = reason or failed_check("adaptive", dtype, width("adaptive", dtype, D, E), 0, gated, device)
    return Plan("quadratic", None, not reason, reason)


def _choose(T, D, E, p, dtype, gated, form, chunk_size, states, not_quadratic, not_chunked):
    """Return the Plan; not_quadratic, not_chunked: why the kernels of these forms cannot be used, or ""."""
    W = width("chunked", dtype, D, E)
    if form == "auto":
        if not not_chunked:  # both forms are on the kernels
            form = "chunked" if states else cost.best_form(T, W, p, gated)
        else:
            gain = 1 if not_quadratic else KERNEL_GAIN.get(dtype, 1)
            form = "quadratic" if T <= gain * 1.5 * symmetric_power_dim(D, p) else "chunked"
    if form == "quadratic":
        return Plan(form, None, not not_quadratic, not_quadratic)
    if form == "recurrent":
        return Plan(form, 1, False, "the recurrent form is PyTorch's")
    if not_chunked:
        return Plan(form, chunk_size or default_chunk_size(D, p), False, not_chunked)
    return Plan(form, kernel_chunk_size(T, W, p, chunk_size, gated), True, "")


def default_chunk_size(D, p):
    """Return the chunk size for PyTorch: a power of two near Dphi / 2.

    At that size attention inside a chunk costs about as much as reading the state.
    """
    return min(1024, max(16, 2 ** (symmetric_power_dim(D, p) // 2).bit_length() // 2))


def kernel_chunk_size(T, W, p, chunk_size=None, gated=True):
    """Return the chunk size of kernels of width W, a multiple of 128: `chunk_size` rounded up, or by default the cost
    model's."""
    if chunk_size is None:
        return cost.chunk_size(T, W, p, gated)
    return min(-(-chunk_size // 128), -(-T // 128)) * 128


def kernel_reason(form, device, dtype, D, E, p):
    """Return why the kernels of this form cannot be used on a device, or "". Warn once for each reason if it is a GPU.

    form: as for `kernels.unsupported_reason`; device: a torch.device or its name, "cuda" for the current GPU.
    """
    device = torch.device(device)
    if reason := _reason_of_tensors(device, dtype):
        return reason
    reason = _disabled or unsupported_reason(form, dtype, D, E, p, device)
    if reason and form in ("quadratic", "adaptive"):
        warn_once(f"power attention runs in plain PyTorch, not on its Triton kernels: {reason}")
    return reason


def _reason_of_tensors(device, dtype):
    """Return why no kernel takes tensors of this device and dtype, or ""."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    name = {torch.float64: "float64", torch.float16: "float16"}.get(dtype)
    return f"{name} is computed in PyTorch" if name else ""


def failed_check(form, dtype, W, p, gated, device="cuda"):
    """Return what is wrong with the kernels of this width on this GPU, or "". Warn of it once. form: see
    `check.Size`."""
    wrong = failure(form, dtype, W, p, gated, device)
    if wrong:
        warn_once(f"power attention runs without its {form} kernels, which fail on this machine: {wrong}")
    return wrong


def heinsen_kernel_reason(device, dtype, v_dtype, D, E):
    """Return why the kernels of log attention cannot be used for q and k of `dtype` and values of v_dtype, or "". Warn
    once for each reason if the device, as for `kernel_reason`, is a GPU."""
    device = torch.device(device)
    if reason := _reason_of_tensors(device, dtype):
        return reason
    D, E = index(D), index(E)
    reason = _disabled or heinsen_unsupported_reason(dtype, D, E, device)
    reason = reason or heinsen_failure(dtype, v_dtype, width("heinsen", dtype, D, E), device)
    if reason:
        warn_once(f"heinsen attention runs in plain PyTorch, not on its Triton kernels: {reason}")
    return reason


# The kernels for steps of training outside of attention. On a GPU they were measured to be faster than what
# torch.compile makes of PyTorch: docs/training-speed.md.
FUSED = ("rotary", "cross_entropy")


def uses_fused(name, x):
    """Return True if the fused kernel `name` computes the tensor x."""
    return name in FUSED and not fused_kernel_reason(name, x.device, x.dtype)


def fused_kernel_reason(name, device, dtype):
    """Return why the fused kernel `name` cannot be used for tensors of this device and dtype, or "". Warn once for each
    reason if the device, as for `kernel_reason`, is a GPU."""
    device = torch.device(device)
    if reason := _reason_of_tensors(device, dtype):
        return reason
    reason = _disabled or unusable_machine(device)
    reason = reason or fused_failure(name, dtype, device)
    if reason:
        warn_once(f"{name} runs in plain PyTorch, not on its Triton kernel: {reason}")
    return reason


# torch.compile asks once and does not look inside. torch.compiler.assume_constant_result sets this mark too, but it
# imports torch._dynamo, which takes 2 s that a program without torch.compile need not wait.
for asked in (kernel_reason, failed_check, heinsen_kernel_reason, fused_kernel_reason):
    asked._dynamo_marked_constant = True


def disable_kernels(reason):
    """Use PyTorch in place of the kernels from now on in this process, for `reason`; "" uses the kernels again."""
    global _disabled
    _disabled = reason


def warn_once(message):
    """Warn of the same message once in this process, in one line: without a line of source."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn_explicit(message, UserWarning, "attention", 1)


_disabled = ""
_warned = set()
