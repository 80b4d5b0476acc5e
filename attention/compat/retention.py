"""The interface of the library retention 1.0: change its import to this module.

    from sympow.attention.compat.retention import power_retention, power_retention_inference

    Y, S, sum_of_keys = power_retention(Q, K, V, log_G, deg=2, return_final_state=True)
    Y, S, sum_of_keys = power_retention_inference(q, K, V, log_G, S, sum_of_keys, deg=2)      # K, V: the cache, or None

docs/use/library.md says what differs.
"""

from ..embedding import symmetric_power_dim
from ..operator import forms
from ..operator.arguments import check_power
from ..operator.forms import PowerState, accumulation_dtype
from ..power import power_attention


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
    state = _paired_state(initial_state, sum_of_keys, Q, deg)
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
    state = _paired_state(initial_state, sum_of_keys, Q, deg)
    if (K is None) != (V is None) or (K is None and state is None):
        raise ValueError("K and V must both be given, or both be None and initial_state be given")
    if K is None:
        return _read_state(Q, state, deg), *state
    form = "quadratic" if Q.shape[1] < K.shape[1] else "auto"
    Y = power_attention(Q, K, V, log_G, p=deg, scale=scale or None, form=form, initial_state=state)
    if switch_over_seq_len is None or K.shape[1] < switch_over_seq_len:
        return Y, *(state or (None, None))
    return Y, *forms.flush(K, V, log_G, state, p=deg)


def _read_state(Q, state, deg):
    """Return Y [b, tq, hq, d] of queries that read a PowerState alone."""
    (b, _, hq, d), S, s = Q.shape, state.S, state.z
    features = symmetric_power_dim(d, deg)
    if S.ndim != 4 or S.shape[0] != b or S.shape[2] != features or S.shape[:3] != s.shape or hq % S.shape[1]:
        shapes = ", ".join(f"{[*x.shape]}" for x in (Q, S, s))
        raise ValueError(f"Q [b, tq, hq, d], S [b, h, D, d], s [b, h, D], hq a multiple of h, do not fit: {shapes}")
    with forms.without_autocast(Q.device):
        q = Q.to(accumulation_dtype(Q)).transpose(1, 2).unflatten(1, (S.shape[1], -1))  # [b, h, hq / h, tq, d]
        sums = forms.query_state(forms.to_unit_range(q), state, deg)  # powers of small queries would be zeros
        return forms.by_token(forms.normalize(*sums)).to(Q.dtype)


def _paired_state(initial_state, sum_of_keys, Q, deg):
    """Return the PowerState of an initial state given as S and sum_of_keys, or as the pair of both, or None of none.

    Raises ValueError for a state without its denominators.
    """
    if isinstance(initial_state, (tuple, list)) and len(initial_state) == 2 and sum_of_keys is None:
        initial_state, sum_of_keys = initial_state
    if initial_state is None and sum_of_keys is None:
        return None
    if initial_state is None or sum_of_keys is None:
        raise ValueError(
            "initial_state must be S and its sum_of_keys, as they are returned together: y's denominators are not in S"
        )
    check_power(deg, "deg")
    return PowerState(*(x.to(accumulation_dtype(Q)) for x in (initial_state, sum_of_keys)))
