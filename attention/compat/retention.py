"""The interface of the library retention 1.0: change its import to this module.

    from sympow.attention.compat.retention import create_inputs, power_retention, power_retention_inference

    Y = power_retention(**create_inputs(gating=True, chunk_size=128))
    Y, S, sum_of_keys = power_retention(Q, K, V, log_G, deg=2, return_final_state=True)
    Y, S, sum_of_keys = power_retention_inference(q, K, V, log_G, S, sum_of_keys, deg=2)      # K, V: the cache, or None

docs/use/library.md says what differs. Its steps (attention, update_state, query_state, discumsum) are here too.
"""

from functools import partial

import torch
from torch.nn.functional import logsigmoid

from ..operator import forms
from ..power import power_attention
from .steps import attention, discumsum, paired_state, query_state, update_state

__all__ = [
    "power_retention", "power_retention_inference", "attention", "update_state", "query_state", "discumsum",
    "create_inputs", "create_inference_inputs",
]  # fmt: skip


def power_retention(
    Q, K, V, log_G=None, initial_state=None, sum_of_keys=None, return_final_state=False, deg=2, scale=None,
    chunk_size=None, switch_over_seq_len=None, original_t=None,
):  # fmt: skip
    """Compute causal power attention; return Y [b, t, hq, d] in Q's dtype, or (Y, S, sum_of_keys).

    Q [b, t, hq, d], K, V [b, t, h, d] of one dtype, log_G [b, t, h]: natural logarithm of the gates, or None. With
    return_final_state S [b, h, D, d] and sum_of_keys [b, h, D], float32, are the state after the last token, or None
    twice if t is below a switch_over_seq_len that is given and there is no initial state: then the caller keeps K, V.
    initial_state, sum_of_keys: S and sum_of_keys of the tokens before (initial_state may be the pair of both).
    chunk_size: tokens a chunk if the chunked form is the cheaper one, any number; t need not be a multiple. scale
    (default 1/sqrt(d)) cancels, original_t has no effect. Raises ValueError and MemoryError as
    `attention.power_attention` does.
    """
    state = paired_state(initial_state, sum_of_keys, Q, deg)
    has_state = return_final_state and not (state is None and switch_over_seq_len and Q.shape[1] < switch_over_seq_len)
    out = power_attention(
        Q, K, V, log_G, p=deg, scale=scale or None, chunk_size=chunk_size, initial_state=state,
        return_state=has_state,
    )  # fmt: skip
    if not return_final_state:
        return out
    return (out[0], *out[1]) if has_state else (out, None, None)


def power_retention_inference(
    Q, K, V, log_G=None, initial_state=None, sum_of_keys=None, deg=2, scale=None, switch_over_seq_len=512
):
    """Attend from the newest tokens to a KV cache and the state before it; return (Y, S, sum_of_keys).

    Q [b, tq, hq, d] belong to the last tq of the tk cached tokens K, V [b, tk, h, d], log_G [b, tk, h] or None; K and V
    may both be None, then Q reads the state alone, in which log_G cancels. initial_state, sum_of_keys: of the tokens
    before the cache, or None. From switch_over_seq_len cached tokens on the state returned has them in it, and the
    caller empties the cache; below, or if it is None, initial_state and sum_of_keys come back as they are. Y [b, tq,
    hq, d] is in Q's dtype.
    Raises ValueError for arguments that do not fit.
    """
    state = paired_state(initial_state, sum_of_keys, Q, deg)
    if (K is None) != (V is None) or (K is None and state is None):
        raise ValueError("K and V must both be given, or both be None and initial_state be given")
    if K is None:
        return query_state(Q, *state, None, None, None, deg, 1.0), *state
    form = "quadratic" if Q.shape[1] < K.shape[1] else "auto"
    Y = power_attention(Q, K, V, log_G, p=deg, scale=scale or None, form=form, initial_state=state)
    if switch_over_seq_len is None or K.shape[1] < switch_over_seq_len:
        return Y, *(state or (None, None))
    return Y, *forms.flush(K, V, log_G, state, p=deg)


def create_inputs(
    b=2, t=1024, h=8, d=32, qhead_ratio=1, dtype=torch.bfloat16, device="cuda", gating=False, chunk_size=None, deg=2,
    requires_grad=False, seed=41, scale=1.0, switch_over_seq_len=None, initial_state=False, return_final_state=False,
    fused_normalizer=True,
):  # fmt: skip
    """Return random arguments for `power_retention`, a dictionary; device "cuda" is the CPU without a GPU.

    fused_normalizer, which chooses one of the library's layouts of states, has no effect: here there is one.
    """
    shape, gate_mean, state_deg = (b, t, t, h, d), 0.0 if gating else None, deg if initial_state else None
    inputs = _random_tensors(shape, qhead_ratio, dtype, device, gate_mean, state_deg, requires_grad, seed)
    return inputs | dict(
        return_final_state=return_final_state,
        deg=deg,
        scale=scale,
        chunk_size=chunk_size,
        switch_over_seq_len=switch_over_seq_len,
    )


def create_inference_inputs(
    b=2, tq=1, tk=1024, h=8, d=32, qhead_ratio=1, dtype=torch.bfloat16, device="cuda", gating=False, chunk_size=None,
    deg=2, requires_grad=False, seed=41, scale=1.0, initial_state=False, switch_over_seq_len=512, fused_normalizer=True,
):  # fmt: skip
    """Return random arguments for `power_retention_inference`, a dictionary; see `create_inputs`.

    chunk_size, which the library does not pass on either, has no effect. Raises ValueError if there is neither a cache
    (tk > 0) nor a state.
    """
    if not tk and not initial_state:
        raise ValueError("tk must be positive, or initial_state True")
    shape, gate_mean, state_deg = (b, tq, tk, h, d), 6.906768 if gating else None, deg if initial_state else None
    inputs = _random_tensors(shape, qhead_ratio, dtype, device, gate_mean, state_deg, requires_grad, seed)
    return inputs | dict(deg=deg, scale=scale, switch_over_seq_len=switch_over_seq_len)


def _random_tensors(shape, qhead_ratio, dtype, device, gate_mean, state_deg, requires_grad, seed):
    """Return the tensors of an entry point by name; torch's own generator is left as it is.

    shape: (b, tq, tk, h, d). There are no keys if tk is 0. Gates are sigmoids of normal numbers with the mean
    gate_mean; without it there are none. The state of power state_deg holds 8 random tokens; without a power there is
    none. With requires_grad the tensors require gradients.
    """
    (b, tq, tk, h, d), device = shape, torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        device = torch.device("cpu")
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, device=device, generator=generator)

    def rows(t, heads):  # the queries, keys or values of t tokens
        return normal(b, t, heads, d, dtype=dtype) / d**0.5

    tensors = dict.fromkeys(("Q", "K", "V", "log_G", "initial_state", "sum_of_keys"))
    tensors["Q"] = rows(tq, h * qhead_ratio)
    if tk:
        tensors.update(K=rows(tk, h), V=rows(tk, h))
    if tk and gate_mean is not None:
        tensors["log_G"] = logsigmoid(gate_mean + normal(b, tk, h, dtype=torch.float32))
    if state_deg:
        S, s = forms.flush(rows(8, h), rows(8, h), None, None, p=state_deg)
        tensors.update(initial_state=S, sum_of_keys=s)
    return {name: x if x is None else x.detach().requires_grad_(requires_grad) for name, x in tensors.items()}
