"""The interface of the library power_attention: change its import to this module.

    from sympow.attention.compat.power_attention import power_full

    Y, state = power_full(Q, K, V, log_G, deg=2, return_final_state=True)       # state: the pair (S, sum_of_keys)
    Y, state = power_full(Q, K, V, log_G, state, deg=2, return_final_state=True)

docs/use/library.md says what differs.
"""

from .retention import power_retention


def power_full(
    Q, K, V, log_G=None, initial_state=None, return_final_state=False, deg=2, scale=None, chunk_size=None,
    switch_over_seq_len=None,
):  # fmt: skip
    """Compute causal power attention; return Y [b, t, hq, d] in Q's dtype, or (Y, state) with return_final_state.

    Q [b, t, hq, d], K, V [b, t, h, d] of one dtype, log_G [b, t, h]: natural logarithm of the gates, or None. A state
    is the pair (S [b, h, D, d], sum_of_keys [b, h, D]), float32, after the last token; initial_state: such a pair, of
    the tokens before. chunk_size: tokens a chunk if the chunked form is the cheaper one, any number; t need not be a
    multiple. scale (default 1/sqrt(d)) and switch_over_seq_len, from which length on chunks are used, do not change Y.
    Raises ValueError and MemoryError as `attention.power_attention` does.
    """
    options = dict(deg=deg, scale=scale, chunk_size=chunk_size, return_final_state=return_final_state)
    out = power_retention(Q, K, V, log_G, initial_state, **options)
    return (out[0], out[1:]) if return_final_state else out
