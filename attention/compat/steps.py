"""What both libraries have: attention, update_state, query_state, discumsum, and states as pairs.

    o, l, rowmax = attention(Q, K, V, log_G, deg, norm=False)   exp(rowmax_i) o_i = sum_j w_ij V_j, and of l sum_j w_ij
    S, s = update_state(K, V, deg)                              S = sum phi(K_j) V_j^T and s = sum phi(K_j) of a chunk
    S, s = discumsum(S, log_G), discumsum(s, log_G)             Y_t = X_t + exp(log_G_t) Y_{t-1}, a step of zeros first
    O = query_state(Q, S, s, o, l, rowmax, deg, scale)          (scale^deg phi(Q) S + e^rowmax o) / (the same of s, l)

w_ij = exp(log_G_i - log_G_j) (scale Q_i . K_j)^deg, where attention's log_G is cumulated: the sum of all gates so far.

phi is `attention.embedding.symmetric_power_embedding`, whose C(d + deg - 1, deg) features are D here. Sums and states
are float32 (float64 of float64), whatever the inputs are. Everything is differentiable.
"""

import math

import torch

from ..embedding import symmetric_power_dim
from ..operator import backend, forms
from ..operator.arguments import check_tensors
from ..operator.dispatch import failed_check, kernel_reason
from ..operator.forms import PowerState, ScaledState, accumulation_dtype, without_autocast
from ..power import power_attention, power_attention_sums

PAIRS_AT_ONCE = 2**26  # scores that exist at any time, where they are computed here
LEAST = 1e-7  # the library's: smaller scores count as this much in rowmax


def attention(Q, K, V, log_G, deg, causal=True, head_first=False, scale=1.0, norm=False, use_log2=False):
    """Compute power attention from cumulated gates; return Y in V's dtype with `norm`, else (o, l, rowmax).

    Q [b, n, hq, d], K [b, t, h, d], V [b, t, h, e], log_G [b, t, h] or None; with head_first the second and the third
    dimension are exchanged, in the results too. The queries are those of the last n tokens; without `causal` each sees
    all keys. rowmax [b, n, hq] is the largest log w_ij of a row (the logarithm of base 2 with use_log2), a constant to
    autograd; o is in V's dtype, l float32. Raises ValueError for arguments that do not fit.
    """
    if head_first:
        tensors = (x if x is None else x.transpose(1, 2) for x in (Q, K, V, log_G))
        out = attention(*tensors, deg, causal, False, scale, norm, use_log2)
        return out.transpose(1, 2) if norm else tuple(x.transpose(1, 2) for x in out)
    _check_degree(deg)
    check_tensors(Q, K, V, causal=causal or log_G is not None, log_G=log_G)
    if log_G is not None and log_G.shape != K.shape[:3]:
        raise ValueError(f"log_G must be [b, t, h] = {[*K.shape[:3]]}, got {[*log_G.shape]}")
    if not causal:
        at_once = max(1, PAIRS_AT_ONCE // max(1, Q[:, 0, :, 0].numel() * K.shape[1]))
        last = log_G if log_G is None else log_G[:, -Q.shape[1] :].split(at_once, 1)
        parts = [
            _all_keys(q, K, V, log_G, last and last[i], deg, scale, norm) for i, q in enumerate(Q.split(at_once, 1))
        ]
        out = tuple(torch.cat(x, 1) for x in zip(*parts))
    else:
        out = _causal(Q, K, V, log_G, deg, scale, norm)
    if norm:
        return out[0]
    o, l, rowmax = out
    return o.to(V.dtype), l, rowmax / math.log(2) if use_log2 else rowmax


def _causal(Q, K, V, log_G, deg, scale, norm, kernels=True):
    """Return (Y,) or (o, l, rowmax) of the queries of the last tokens, on the kernels where they take the sizes."""
    log_g = log_G if log_G is None else log_G.diff(dim=1, prepend=log_G[:, :1])
    if norm:
        options = dict(p=deg, form="quadratic")
        return (power_attention(Q, K, V, log_g, **options),) if kernels else forms.attend(Q, K, V, log_g, **options)[:1]
    rowmax, q = _row_maximum(Q, K, log_G, deg, scale), Q.detach().abs().amax(-1)
    # w exp(-rowmax) is at most 1. A power of two near its root goes into Q, as far as float16 holds that.
    top = q.to(rowmax.dtype).clamp_min(1e-30).log2().ceil()
    n = (rowmax / (deg * math.log(2))).round().clamp(top - 14, top + 8)
    Q = (Q.to(n.dtype) * torch.exp2(-n).unsqueeze(-1)).to(Q.dtype)
    num, den = (power_attention_sums if kernels else forms.sums)(Q, K, V, log_g, p=deg, scale=scale)
    rest = torch.exp(n * (deg * math.log(2)) - rowmax)
    return num * rest.unsqueeze(-1), den * rest, rowmax


def _all_keys(Q, K, V, log_G, log_G_of_q, deg, scale, norm):
    """Return what `_causal` does for queries that see all keys: as if they were heads of the last token.

    The kernels work on several rows of a head at a time, so this is in PyTorch.
    """
    (b, n, hq, _), h = Q.shape, K.shape[2]
    heads = Q.unflatten(2, (h, -1)).permute(0, 2, 3, 1, 4).reshape(b, 1, hq * n, -1)
    found = _causal(heads, K, V, log_G, deg, scale, norm, kernels=False)
    found = [x[:, 0].unflatten(1, (hq, n)).transpose(1, 2) for x in found]
    if norm or log_G is None:
        return found
    o, l, rowmax = found  # decays to the last token become decays to the query: of o and l only their gradient changes
    change = (log_G_of_q - log_G[:, -1:]).repeat_interleave(hq // h, 2)
    one = (change - change.detach()).exp()
    return o * one.unsqueeze(-1), l * one, rowmax + change.detach()


@torch.no_grad()
def _row_maximum(Q, K, log_G, deg, scale):
    """Return [b, n, hq], the largest log w_ij of each row."""
    (n, T, h), dtype = (Q.shape[1], *K.shape[1:3]), accumulation_dtype(Q)
    q, k = Q.to(dtype).transpose(1, 2).unflatten(1, (h, -1)), K.to(dtype).permute(0, 2, 3, 1).unsqueeze(2)
    G = None if log_G is None else log_G.to(dtype).transpose(1, 2).unsqueeze(2)  # [b, h, 1, t]
    at, parts = torch.arange(T, device=K.device), []
    rows = max(1, PAIRS_AT_ONCE // max(1, q[..., 0, 0].numel() * T))
    with without_autocast(Q.device):
        for start in range(0, n, rows):
            token = at[T - n + start :][:rows, None]
            x = deg * (q[..., start : start + rows, :] @ k * scale).abs().clamp_min(LEAST).log()
            if G is not None:
                x += G[..., token[:, 0]].unsqueeze(-1) - G.unsqueeze(-2)
            parts.append(x.masked_fill_(at > token, -math.inf).amax(-1))
    return torch.cat(parts, -1).flatten(1, 2).transpose(1, 2)


def update_state(K, V, deg):
    """Return each chunk's S [b, n, h, D, e] and s [b, n, h, D] for K [b, n, c, h, d], V [b, n, c, h, e].

    Without the dimension n, the results have none either. Raises ValueError for arguments that do not fit.
    """
    if K.ndim == 4:
        return tuple(x.squeeze(1) for x in update_state(K.unsqueeze(1), V.unsqueeze(1), deg))
    _check_degree(deg)
    if K.ndim != 5 or V.shape[:4] != K.shape[:4]:
        raise ValueError(f"K, V must be [b, n, c, h, d], got {[*K.shape]}, {[*V.shape]}")
    if _on_kernels(K, deg, V.shape[4]):
        return backend.operators().update_state(K.flatten(1, 2), V.flatten(1, 2), p=deg, chunk=K.shape[2])
    with without_autocast(K.device):
        k, v = (x.transpose(2, 3).flatten(0, 1).to(accumulation_dtype(K)) for x in (K, V))
        Sz = forms.update_state(k, torch.cat((v, torch.ones_like(v[..., :1])), -1), deg).unflatten(0, K.shape[:2])
    return Sz[..., :-1], Sz[..., -1]


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
    _check_query(Q, S, s, Y_attn, l_attn, rowmax, deg)
    (b, n, c), h, dtype = Q.shape[:3], S.shape[2], accumulation_dtype(Q)
    state = paired_state(S.flatten(0, 1), s.flatten(0, 1), Q, deg)
    if _on_kernels(Q, deg, S.shape[4]):
        S, s = (x.unflatten(0, (b, n)) for x in state)
        sums = backend.operators().query_state(Q.flatten(1, 2), S, s, p=deg, chunk=c)
        num, den = (x.unflatten(1, (n, c)) for x in sums)
    else:
        with without_autocast(Q.device):
            q = Q.flatten(0, 1).transpose(1, 2).unflatten(1, (h, -1)).to(dtype)
            read = forms.query_state(q, ScaledState(*state, None), deg)
            num, den = (x.flatten(1, 2).transpose(1, 2).unflatten(0, (b, n)) for x in read)
    num, den = num * scale**deg, den * scale**deg
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
        of = None if log_G is None else [*log_G.shape]
        raise ValueError(f"X must be [b, n, h, ...] with n at least 1 and log_G [b, n, h], got {[*X.shape]}, {of}")
    x = X.reshape(*X.shape[:3], -1).transpose(1, 2).to(accumulation_dtype(X))
    g = torch.ones_like(x[..., 0]) if log_G is None else log_G.transpose(1, 2).to(x.dtype).exp()
    states, last = forms.discumsum(x, g)
    Y = torch.cat((states, last.unsqueeze(2)), 2).transpose(1, 2)
    return Y.reshape(*Y.shape[:3], *X.shape[3:]).to(X.dtype)


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
    _check_degree(deg)
    D = symmetric_power_dim(Q.shape[-1], deg)
    if initial_state.ndim < 2 or initial_state.shape[-2] != D:
        found = initial_state.shape[-2] if initial_state.ndim > 1 else 0
        raise ValueError(
            f"initial_state must have {D} features for head dimension {Q.shape[-1]} and deg={deg}, got {found}: the "
            "library's states, which are padded, cannot be read"
        )
    return PowerState(*(x.to(accumulation_dtype(Q)) for x in (initial_state, sum_of_keys)))


def _on_kernels(x, deg, e):
    """Return True if the kernels of the chunked form take rows x [b, n, c, heads, d] with values of width e."""
    c, d = x.shape[2], x.shape[4]
    if c % 128 or not c or kernel_reason("chunked", x.device, x.dtype, d, e, deg):
        return False
    return not failed_check("chunked", x.dtype, d, deg, False, x.device)


def _check_degree(deg):
    if not isinstance(deg, int) or deg < 2 or deg % 2:
        raise ValueError(f"deg must be a positive even integer, got {deg!r}")


def _check_query(Q, S, s, Y_attn, l_attn, rowmax, deg):
    """Raise ValueError for arguments of `query_state` that do not fit, but for the number of features."""
    _check_degree(deg)
    shapes = ", ".join(f"{[*x.shape]}" for x in (Q, S, s))
    if not (Q.ndim == S.ndim == 5 and S.shape[:4] == s.shape and S.shape[:2] == Q.shape[:2]) or Q.shape[3] % S.shape[2]:
        raise ValueError(f"Q [b,n,c,hq,d], S [b,n,h,D,e], s [b,n,h,D], hq a multiple of h, do not fit: {shapes}")
    sums, rows = (Y_attn, l_attn, rowmax), (*Q.shape[:4],)
    got = [None if x is None else [*x.shape] for x in sums]
    if got not in ([None] * 3, [[*rows, S.shape[4]], [*rows], [*rows]]):
        raise ValueError(f"Y_attn, l_attn, rowmax must be None or {[*rows, S.shape[4]]}, {[*rows]} twice, got {got}")
