"""Count the bytes of states and caches, and refuse, with that number, what would not fit into the device's memory."""

import os

import torch

from ..embedding import symmetric_power_dim
from . import backend

SURELY_FREE = 2**30  # bytes: up to here a device is not asked how much is free, which takes longer than a launch


def features(D, p):
    """Return Dphi = C(D+p-1, p), the features of a PowerState, or their sum for a tuple of powers."""
    return sum(symmetric_power_dim(D, m) for m in p) if isinstance(p, tuple) else symmetric_power_dim(D, p)


def state_bytes(rows, D, E, p, dtype=torch.float32):
    """Return the bytes of the PowerState of p, or of a tuple of powers, for `rows` = B * Hkv sequences and heads.

    dtype: of S; z is in float32, or in this dtype if that is wider.
    """
    return rows * features(D, p) * (E * dtype.itemsize + max(4, dtype.itemsize))


def check_state_fits(rows, D, E, p, dtype, device):
    """Raise MemoryError, naming the bytes, if a PowerState would not fit into the device's memory."""
    if torch.compiler.is_compiling() or device.type == "meta":
        return
    need = state_bytes(rows, D, E, p, dtype)
    if need > SURELY_FREE and need > (have := free_memory(device)):
        raise MemoryError(
            f"the state of power p={p} at head dimension {D} takes {need:,} bytes ({rows} heads and sequences of "
            f"{features(D, p):,} x {E + 1}), the device has {have:,}: use a smaller head dimension or p, "
            f"or form='quadratic' without a state"
        )


def check_chunks_fit(q, k, v, p, chunk):
    """Raise MemoryError if what the chunked kernels allocate would not fit into the device's memory."""
    if torch.compiler.is_compiling():
        return
    need = backend.operators().chunked.bytes_needed(q, k, v, p, chunk, backward=torch.is_grad_enabled())
    if need > SURELY_FREE and need > (have := free_memory(q.device)):
        T, D = q.shape[1], q.shape[3]
        raise MemoryError(
            f"the chunked form of p={p} at head dimension {D} takes {need:,} bytes for {q.shape[0]} x {T:,} tokens and "
            f"{k.shape[2]} key/value heads in chunks of {chunk:,}, the device has {have:,}: use longer chunks "
            "(chunk_size), a smaller head dimension or p, fewer sequences at once, or form='quadratic'"
        )


def generation_bytes(attentions, state, max_new_tokens, itemsize, state_dtype, switch_over=None):
    """Return [bytes of the KV caches, bytes of the states] of one sequence in all layers.

    attentions: the Variants of the layers; state: the ModelState. Variant.generation_bytes has the other arguments.
    """
    layers = [
        attention.generation_bytes(layer, max_new_tokens, itemsize, state_dtype, switch_over)
        for attention, layer in zip(attentions, state.layers)
    ]
    c = attentions[0].config
    convolution = 4 * max(0, c.convolution - 1) * (c.n_head + 2 * c.n_kv_head) * c.head_dim
    cache, states = (sum(x) for x in zip(*layers))
    return [cache, states + len(attentions) * convolution]


def check_generation_fits(attentions, state, max_new_tokens, num_samples, itemsize, state_dtype, device):
    """Raise MemoryError if the states of `num_samples` sequences would not fit once they are `max_new_tokens` longer.

    attentions: the Variants of the model's layers; state: its ModelState; itemsize: the bytes of a number in a KV
    cache; state_dtype: the dtype of S.
    """
    cache, states = generation_bytes(attentions, state, max_new_tokens, itemsize, state_dtype)
    need, have = num_samples * (cache + states), free_memory(device)
    if need <= have:
        return
    largest = f"states of {states:,} bytes" if states >= cache else f"keys and values of {cache:,} bytes"
    c, powers = attentions[0].config, " and ".join(dict.fromkeys(str(x.p) for x in attentions))
    raise MemoryError(
        f"{num_samples} samples need {need:,} bytes, mostly {largest} each (p={powers}, head dimension {c.head_dim}, "
        f"{len(attentions)} layers of {c.n_kv_head} heads), the device has {have:,} free, enough for "
        f"{have // (cache + states)}: use fewer samples or tokens, or for states a larger switch_over or "
        "state_dtype=bfloat16"
    )


def free_memory(device):
    """Return the bytes that could still be allocated: a GPU's free memory and torch's unused cache, or all RAM."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats_as_nested_dict(device)  # memory_reserved() takes 0.2 ms to flatten it
        reserved, allocated = (
            stats[name]["all"]["current"] if stats else 0  # empty before any tensor
            for name in ("reserved_bytes", "allocated_bytes")
        )
        return torch.cuda.mem_get_info(device)[0] + reserved - allocated
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
