"""Count the bytes of states and caches, and refuse, with that number, what would not fit into the device's memory."""

import math
import os

import torch

from . import backend
from .embedding import symmetric_power_dim

SURELY_FREE = 2**30  # bytes: up to here a GPU is not asked how much is free, which takes longer than a launch


def features(D, p):
    """Return Dphi = C(D+p-1, p), the features of a PowerState; those of all powers together if p is a tuple."""
    return sum(symmetric_power_dim(D, m) for m in p) if isinstance(p, tuple) else symmetric_power_dim(D, p)


def state_bytes(rows, D, E, p, dtype=torch.float32):
    """Return the bytes of a PowerState, or of those of a tuple of powers, for `rows` = B * Hkv sequences and heads."""
    return rows * features(D, p) * (E + 1) * dtype.itemsize


def switch_over_tokens(p, D, E, itemsize, dtype=torch.float32):
    """Return how many tokens' keys and values take as much memory as a PowerState of `dtype`.

    itemsize is the number of bytes of an entry of a key or value.
    """
    return math.ceil(state_bytes(1, D, E, p, dtype) / ((D + E) * itemsize))


def check_state_fits(rows, D, E, p, dtype, device):
    """Raise MemoryError, naming the bytes, if a PowerState would not fit into the device's memory."""
    if torch.compiler.is_compiling() or device.type == "meta":
        return
    need, have = state_bytes(rows, D, E, p, dtype), free_memory(device)
    if need > have:
        raise MemoryError(
            f"the state of power p={p} at head dimension {D} takes {need:,} bytes ({rows} heads and sequences of "
            f"{features(D, p):,} x {E + 1}), the device has {have:,}: use a smaller head dimension or p, "
            f"or form='quadratic' without a state"
        )


def check_chunks_fit(q, k, p, chunk):
    """Raise MemoryError if what the chunked kernels allocate would not fit into the device's memory."""
    if torch.compiler.is_compiling():
        return
    need = backend.chunked_bytes_needed(q, k, p, chunk, backward=torch.is_grad_enabled())
    if need < SURELY_FREE:
        return
    if need > (have := free_memory(q.device)):
        T, D = q.shape[1], q.shape[3]
        raise MemoryError(
            f"the chunked form of p={p} at head dimension {D} takes {need:,} bytes for {q.shape[0]} x {T:,} tokens and "
            f"{k.shape[2]} key/value heads in chunks of {chunk:,}, the device has {have:,}: use longer chunks "
            "(chunk_size), a smaller head dimension or p, fewer sequences at once, or form='quadratic'"
        )


def check_generation_fits(config, p, layer, max_new_tokens, num_samples, itemsize, state_dtype, device):
    """Raise MemoryError if the states of `num_samples` sequences would not fit once they are `max_new_tokens` longer.

    config is the model's, p the power or the tuple of powers of its states, layer the LayerState of one of its n_layer
    equal layers, itemsize the bytes of a number in the KV cache, state_dtype that of S. The message names settings that
    would fit.
    """
    c, D = config, config.head_dim
    heads, cached = c.n_layer * c.n_kv_head, layer.cached_tokens
    limit, tokens = layer.switch_over_limit(p, D, D, itemsize), cached + max_new_tokens
    token = heads * (2 * D * itemsize + 12)
    cache = token * int(max(cached, min(limit, tokens)))
    power = lambda dtype: heads * features(D, p) * (D * dtype.itemsize + 4)
    halved, power = power(torch.bfloat16), power(state_dtype)
    if limit > tokens and not layer.power:
        halved = power = 0
    need, have = num_samples * (cache + power), free_memory(device)
    if need <= have:
        return
    fits = have // (cache + power)
    ways = [f"num_samples={fits}"] * (fits > 0)
    if device.type == "cuda" and halved < power and num_samples * (cache + halved) <= have:
        ways.append("state_dtype=bfloat16")
    if power and not layer.power and num_samples * token * tokens <= have:
        ways.append(f"switch_over={tokens + 1}")
    if not ways:
        ways.append("a model of a smaller head dimension or p" if power >= cache else "fewer tokens")
    p = " and ".join(map(str, p)) or "real" if isinstance(p, tuple) else p
    of = f"states of {power:,} bytes" if power >= cache else f"keys and values of {cache:,} bytes"
    raise MemoryError(
        f"{num_samples} samples need {need:,} bytes, mostly {of} each (p={p}, head dimension {D}, {c.n_layer} layers "
        f"of {c.n_kv_head} heads), the device has {have:,} free: {' or '.join(ways)} would fit"
    )


def free_memory(device):
    """Return the bytes that could still be allocated: a GPU's free memory and torch's unused cache, or all RAM."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats_as_nested_dict(device)  # memory_reserved() takes 0.2 ms to flatten it
        now = lambda name: stats[name]["all"]["current"] if stats else 0  # empty before any tensor
        return torch.cuda.mem_get_info(device)[0] + now("reserved_bytes") - now("allocated_bytes")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
