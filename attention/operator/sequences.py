"""Packed sequences: texts of any lengths one behind another in one tensor, as cu_seqlens says.

    cu_seqlens = torch.tensor([0, 5, 5, 12], dtype=torch.int32)     # q [1, 12, H, D]: sequences of 5, 0 and 7 tokens

There are two ways to compute them, and power.py chooses:

    resets       one sequence with zero gates (log_g = -inf) at each first token: no state is read or returned
    one by one   a call for each sequence: with states in or out, and in PyTorch
"""

from itertools import pairwise

import torch
from torch.utils.weak import WeakTensorKeyDictionary

READ_WITHOUT_WAITING = {"cpu"}  # devices
known_lengths = WeakTensorKeyDictionary()  # cu_seqlens: (its version, the lengths)


def sequence_lengths(cu_seqlens, T):
    """Return the lengths of the sequences in T tokens, a tuple of int, or None while they cannot be known.

    That is while torch.compile traces or a CUDA graph is captured: both may run again with other lengths. Otherwise the
    host waits for a tensor on a GPU, once for each tensor and version of it (a CUDA graph, or .data, that writes to it
    makes no new version). A CPU's is read each time, because numpy may have written to it. Raises ValueError unless
    cu_seqlens [N + 1] runs from 0 to T and never decreases.
    """
    if torch.compiler.is_compiling():
        return None
    if cu_seqlens.device.type == "meta":
        return T, *(len(cu_seqlens) - 2) * (0,)
    if is_capturing(cu_seqlens):
        return None
    if cu_seqlens.device.type in READ_WITHOUT_WAITING:
        lengths = read_lengths(cu_seqlens)
    else:
        lengths = once(known_lengths, cu_seqlens, read_lengths)
    if sum(lengths) != T:
        raise ValueError(f"cu_seqlens must end with the number of tokens, {T}, got {sum(lengths)}")
    return lengths


def once(known, x, function):
    """Return function(x) for a tensor, called once for each version of it.

    known: the results, a WeakTensorKeyDictionary of {x: (its version, function(x))}.
    """
    if x.is_inference():  # no versions
        return function(x)
    if x not in known or known[x][0] != x._version:
        known[x] = x._version, function(x)
    return known[x][1]


def is_capturing(x):
    """Return True while a CUDA graph is captured on x's device."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def read_lengths(cu_seqlens):
    """Return the differences of cu_seqlens, read from its device: torch.compile breaks its graph here.

    Raises ValueError unless cu_seqlens begins with 0 and never decreases, and while a CUDA graph is captured.
    """
    if is_capturing(cu_seqlens):
        raise ValueError("cu_seqlens cannot be read while a CUDA graph is captured: PyTorch's forms need its lengths")
    ends = cu_seqlens.tolist()
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens must begin with 0, got {ends[0]}")
    for start, end in pairwise(ends):
        if end < start:
            raise ValueError(f"cu_seqlens must not decrease, got {start} and then {end}")
    return tuple(end - start for start, end in pairwise(ends))


def split_tokens(tensors, lengths):
    """Yield the tensors [B, T, ...] of the first lengths[0] tokens, of the next lengths[1], ...; None stays None."""
    return zip(*([None] * len(lengths) if x is None else x.split(lengths, dim=1) for x in tensors))


def typical_length(lengths, T, N):
    """Return the mean length of N packed sequences, each token counted once. Unknown lengths (None) count as equal."""
    return max(1, T // N if lengths is None else round(sum(n * n for n in lengths) / T))


def sequence_starts(cu_seqlens, T):
    """Return [1, T] bool, True at the first token of each sequence."""
    starts = torch.zeros(T + 1, dtype=torch.bool, device=cu_seqlens.device).index_fill(0, cu_seqlens.long(), True)
    return starts[None, :T]  # an empty sequence at the end would begin at T
