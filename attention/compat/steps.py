"""The steps that both libraries have, in plain PyTorch, and states as pairs.

    o, l, rowmax = attention(Q, K, V, log_G, deg)      e^rowmax_i o_i = sum_j w_ij V_j, e^rowmax_i l_i = sum_j w_ij
    S, s = update_state(K, V, deg)                     S = sum phi(K_j) V_j^T and s = sum phi(K_j) of a chunk
    S, s = discumsum(S, log_G), discumsum(s, log_G)    Y_t = X_t + exp(log_G_t) Y_{t-1}, a step of zeros first
    O = query_state(Q, S, s, o, l, rowmax, deg, scale) (scale^deg phi(Q) S + e^rowmax o) / (the same of s, l)

w_ij = exp(log_G_i - log_G_j) (scale Q_i . K_j)^deg, where attention's log_G is cumulated: the sum of all gates so far.

phi is `attention.embedding.symmetric_power_embedding`, and D = C(d + deg - 1, deg) is the number of its features. Sums
and states are float32 (float64 of float64), whatever the inputs are. Everything is differentiable. Scores and features
exist for a few rows or one chunk at a time, and are computed again in the backward pass.
"""

import math

import torch

from ..embedding import symmetric_power_dim
from ..operator import forms
from ..operator.arguments import check_even, check_tensors
from ..operator.forms import PowerState, accumulation_dtype, compute_again, without_autocast
from ..power import power_attention

PAIRS_AT_ONCE = 2**26  # scores that exist at any time
LEAST = 1e-7  # the library's: smaller scores count as this much in rowmax


def attention(Q, K, V, log_G, deg, causal=True, head_first=False, scale=1.0, norm=False, use_log2=False):
    """Compute power attention from cumulated gates; return Y in V's dtype with `norm`, else (o, l, rowmax).

    Q [b, n, hq, d], K [b, t, h, d], V [b, t, h, e], log_G [b, t, h] or None; with head_first the second and the third
    dimension are exchanged, in the results too. The queries belong to the last n tokens; without `causal` each sees
    all keys. rowmax [b, n, hq] is the largest log w_ij of a row (the logarithm of base 2 with use_log2), a constant to
    autograd; o is in V's dtype, l float32. Raises ValueError for arguments that do not fit.
    """
    if head_first:
        tensors = (x if x is None else x.transpose(1, 2) for x in (Q, K, V, log_G))
        results = attention(*tensors, deg, causal, False, scale, norm, use_log2)
        return results.transpose(1, 2) if norm else tuple(x.transpose(1, 2) for x in results)
    check_even(deg, "deg")
    check_tensors(Q, K, V, causal=causal or log_G is not None, log_G=log_G)
    if log_G is not None and log_G.shape != K.shape[:3]:
        raise ValueError(f"log_G must be [b, t, h] = {[*K.shape[:3]]}, got {[*log_G.shape]}")
    if norm and causal:
        log_g = None if log_G is None else log_G.diff(dim=1, prepend=log_G[:, :1])
        return power_attention(Q, K, V, log_g, p=deg, form="quadratic")
    size = max(1, PAIRS_AT_ONCE // max(1, Q[:, 0, :, 0].numel() * K.shape[1]))
    blocks, token = [], K.shape[1] - Q.shape[1]
    with without_autocast(Q.device):
        for q in Q.split(size, dim=1):
            blocks.append(compute_again(_attend, q, K, V, log_G, token, deg, causal, scale))
            token += size
    o, l, rowmax = (torch.cat(x, dim=2).transpose(1, 2) for x in zip(*blocks))
    if norm:
        return forms.normalize(o, l).to(V.dtype)
    return o.to(V.dtype), l, rowmax / math.log(2) if use_log2 else rowmax


def _attend(Q, K, V, log_G, token, deg, causal, scale):
    """Return o [b, hq, n, e], l and rowmax [b, hq, n] for the queries of n tokens from `token` on."""
    n, T = Q.shape[1], K.shape[1]
    q, k, v, _ = forms.by_head(Q, K, V, None)
    scores, decay = q @ k.transpose(-1, -2).unsqueeze(2) * scale, q.new_zeros(n, T)
    if log_G is not None:
        G = log_G.to(q.dtype).transpose(1, 2).unsqueeze(2)  # [b, h, 1, t]
        decay = G[..., token : token + n].unsqueeze(-1) - G.unsqueeze(-2)
    if causal:
        keys = torch.arange(T, device=q.device)
        hidden = keys > keys[token : token + n].unsqueeze(-1)
        scores, decay = scores.masked_fill(hidden, 0), decay.masked_fill(hidden, -math.inf)
    logs = deg * scores.detach().abs().clamp_min(LEAST).log() + decay.detach()
    rowmax = logs.amax(-1, keepdim=True)
    w = forms.integer_power(scores * ((decay - rowmax) / deg).exp(), deg)  # at most 1, and so is each factor of it
    return tuple(x.flatten(1, 2) for x in (w @ v.unsqueeze(2), w.sum(-1), rowmax.squeeze(-1)))


def update_state(K, V, deg):
    """Return each chunk's S [b, n, h, D, e] and s [b, n, h, D] for K [b, n, c, h, d], V [b, n, c, h, e].

    Without the dimension n, the results have none either. Raises ValueError for arguments that do not fit.
    """
    if K.ndim == 4:
        return tuple(x.squeeze(1) for x in update_state(K.unsqueeze(1), V.unsqueeze(1), deg))
    check_even(deg, "deg")
    if K.ndim != 5 or V.shape[:4] != K.shape[:4]:
        raise ValueError(f"K, V must be [b, n, c, h, d], got {[*K.shape]}, {[*V.shape]}")
    with without_autocast(K.device):
        k, v = (x.transpose(2, 3).to(accumulation_dtype(K)) for x in (K, V))  # [b, n, h, c, ...]
        v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
        chunks = [compute_again(forms.update_state, *chunk, deg) for chunk in zip(k.unbind(1), v.unbind(1))]
    Ss = torch.stack(chunks, 1)
    return Ss[..., :-1], Ss[..., -1]


def query_state(Q, S, s, Y_attn, l_attn, rowmax, deg, scale, zero_initial_state=True):
    """Return [b, n, c, hq, e] in Q's dtype: what queries read from states and, unless None, from attention's sums.

    Q [b, n, c, hq, d], S [b, n, h, D, e], s [b, n, h, D]; Y_attn, l_attn, rowmax: o, l and rowmax of `attention` (norm
    and use_log2 False), [b, n, c, hq, ...] or None. Without the dimension n, the result has none either.
    zero_initial_state, a hint of the library's for scaling, has no effect. Raises ValueError for arguments that do not
    fit.
    """
    if Q.ndim == 4:
        tensors = (x if x is None else x.unsqueeze(1) for x in (Q, S, s, Y_attn, l_attn, rowmax))
        return query_state(*tensors, deg, scale).squeeze(1)
    _check_query(Q, S, s, Y_attn, l_attn, rowmax)
    state = paired_state(S, s, Q, deg)
    with without_autocast(Q.device):
        q = Q.to(accumulation_dtype(Q)).transpose(2, 3).unflatten(2, (S.shape[2], -1))  # [b, n, h, hq / h, c, d]
        chunks = zip(q.unbind(1), state.S.unbind(1), state.z.unbind(1))
        parts = [compute_again(forms.query_state, x, PowerState(S, z), deg) for x, S, z in chunks]
        num, den = (torch.stack(x, 1).flatten(2, 3).transpose(2, 3) * scale**deg for x in zip(*parts))
    if Y_attn is not None:
        m = rowmax.clamp_min(0)  # neither of the two factors is above 1
        num = num * (-m).exp().unsqueeze(-1) + Y_attn * (rowmax - m).exp().unsqueeze(-1)
        den = den * (-m).exp() + l_attn * (rowmax - m).exp()
    return forms.normalize(num, den).to(Q.dtype)


def discumsum(X, log_G):
    """Return Y [b, n + 1, h, ...] in X's dtype: Y_0 = 0, Y_{t+1} = X_t + exp(log_G_t) Y_t.

    X [b, n, h, ...] of any feature shape and length; log_G [b, n, h], -inf for a gate of zero, or None for none. Raises
    ValueError for arguments that do not fit.
    """
    if X.ndim < 3 or X.shape[1] < 1 or (log_G is not None and log_G.shape != X.shape[:3]):
        shape = None if log_G is None else [*log_G.shape]
        raise ValueError(f"X must be [b, n, h, ...] with n at least 1 and log_G [b, n, h], got {[*X.shape]}, {shape}")
    Y = [torch.zeros_like(X[:, 0], dtype=accumulation_dtype(X))]
    for t, x in enumerate(X.unbind(1)):
        previous = Y[-1]
        if log_G is not None:
            previous = previous * log_G[:, t].exp()[(..., *[None] * (X.ndim - 3))]
        Y.append(x + previous)
    return torch.stack(Y, 1).to(X.dtype)


def paired_state(initial_state, sum_of_keys, Q, deg):
    """Return the PowerState of an initial state given as S and sum_of_keys, or as the pair of both, or None of none.

    Raises ValueError for a state without its denominators, and for one of another number of features.
    """
    if isinstance(initial_state, (tuple, list)) and len(initial_state) == 2 and sum_of_keys is None:
        initial_state, sum_of_keys = initial_state
    if initial_state is None and sum_of_keys is None:
        return None
    if initial_state is None or sum_of_keys is None:
        raise ValueError(
            "initial_state must be S and its sum_of_keys, as they are returned together: y's denominators are not in S"
        )
    check_even(deg, "deg")
    D = symmetric_power_dim(Q.shape[-1], deg)
    if initial_state.ndim < 2 or initial_state.shape[-2] != D:
        features = initial_state.shape[-2] if initial_state.ndim > 1 else 0
        raise ValueError(
            f"initial_state must have {D} features for head dimension {Q.shape[-1]} and deg={deg}, got {features}: the "
            "library's states, which are padded, cannot be read"
        )
    return PowerState(*(x.to(accumulation_dtype(Q)) for x in (initial_state, sum_of_keys)))


def _check_query(Q, S, s, Y_attn, l_attn, rowmax):
    """Raise ValueError for arguments of `query_state` that do not fit, but for the number of features."""
    shapes = ", ".join(f"{[*x.shape]}" for x in (Q, S, s))
    if not (Q.ndim == S.ndim == 5 and S.shape[:4] == s.shape and S.shape[:2] == Q.shape[:2]) or Q.shape[3] % S.shape[2]:
        raise ValueError(f"Q [b,n,c,hq,d], S [b,n,h,D,e], s [b,n,h,D], hq a multiple of h, do not fit: {shapes}")
    rows = [*Q.shape[:4]]
    expected = [[*rows, S.shape[4]], rows, rows]
    actual = [x if x is None else [*x.shape] for x in (Y_attn, l_attn, rowmax)]
    if actual not in ([None] * 3, expected):
        raise ValueError(f"Y_attn, l_attn, rowmax must be None or {expected[0]}, {rows} twice, got {actual}")
