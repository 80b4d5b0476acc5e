"""The forms of Heinsen's log attention in plain PyTorch: in chunks, stable in float32, on any device.

    y, state = attend(q, k, v, form="chunked", chunk_size=128, return_state=True)        # causal
    y, state = attend_to_all(q, k, v)                                                    # every query sees every key

exp(q_id + k_jd) may be far outside float32's range, so no such number is ever computed. Each exponent is relative to a
reference, which cancels in y. With M_id, the largest k_jd that row i has seen, and c_i = max_d (q_id + M_id),

    w_ij exp(-c_i) = sum_d exp(q_id + r_d - c_i) exp(k_jd - r_d)        for any r_d with  k_jd <= r_d <= M_id

has no exponent above 0, and its sum over j is at least 1. The references r are prefix maxima:

    the state    r is the largest key before the chunk. One product reads it, S being relative to the same r.
    a chunk      is halved again and again. Queries in a second half read the keys of the first half in one product, r
                 being the largest key up to the middle: a chunk of n tokens needs log2(n / LEAF) exponentials a number
    the leaves   of LEAF tokens are computed pair by pair and feature by feature

so a row depends on no later key: one that is larger by e^80, a NaN or an infinity changes no bit of the rows before it.

Inside, tensors are laid out by key/value heads: q [B, Hkv, n, G, D] with the G = H/Hkv query heads of a group side by
side, k [B, Hkv, n, D], v [B, Hkv, n, E+1] with a last column of ones, whose sum is the denominator.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from .forms import accumulation_dtype, compute_again, normalize, without_autocast

EMPTY = -1e30  # the reference of a state before any token: finite, because inf - inf is NaN
LEAF = 8  # tokens whose pairs are computed feature by feature
CHUNK_SIZE = 256
SAVED_AT_ONCE = 2**22  # entries of q: up to here chunks save what the backward pass needs, which is some 30 times that


class LogState(NamedTuple):
    """The state of log attention: m [B, Hkv, D], S [B, Hkv, D, E], z [B, Hkv, D], float32 (float64 for float64 q).

    exp(m_d) S_d = sum_j exp(k_jd) v_j and exp(m_d) z_d = sum_j exp(k_jd), over the tokens read so far. m_d, the largest
    k_jd, is only a reference: it cancels in what the state means, and is a constant to autograd.
    """

    m: torch.Tensor
    S: torch.Tensor
    z: torch.Tensor


def empty_log_state(B, Hkv, D, E, dtype=torch.float32, device=None):
    """Return the LogState before any token."""
    new = lambda *shape: torch.zeros(B, Hkv, *shape, dtype=dtype, device=device)
    return LogState(new(D) + EMPTY, new(D, E), new(D))


def attend(q, k, v, *, form, chunk_size=CHUNK_SIZE, resets=None, initial_state=None, return_state=False):
    """Return (y [B, n, H, E], LogState of all T tokens or None) of causal attention, both in float32 or wider.

    q [B, n, H, D] are the queries of the last n of the T tokens of k [B, T, Hkv, D], v [B, T, Hkv, E]. resets [B, T]
    bool or None. form: "chunked" with chunk_size tokens a chunk (1: the recurrent form), or "quadratic".
    """
    with without_autocast(q.device):
        tokens = _Tokens.of(q, k, v, resets)
        state = _with_ones(initial_state or _empty_like(k, v))
        final = None
        if form == "quadratic":
            num = _quadratic(tokens, state, chunk_size)
            final = _state_after(tokens, state) if return_state else None
        else:
            num, final = _chunked(tokens, state, chunk_size)
        y = _divide(num, tokens.poison[..., -q.shape[1] :])
        return y, _without_ones(final, tokens.poison[..., -1]) if return_state else None


def attend_to_all(q, k, v, *, initial_state=None, return_state=False):
    """Return what `attend` does for queries q [B, n, H, D], any number of them, that see every one of the T keys and
    the state."""
    with without_autocast(q.device):
        tokens = _Tokens.of(q, k, v, None)
        m, S = final = _state_after(tokens, _with_ones(initial_state or _empty_like(k, v)))
        c = _reference(tokens.q, m.unsqueeze(2))
        poison = tokens.poison[..., -1:].expand(-1, -1, q.shape[1])
        y = _divide(_read(tokens.q, c, m, S), poison)
        return y, _without_ones(final, tokens.poison[..., -1]) if return_state else None


def state_after(k, v, *, resets=None, initial_state=None):
    """Return the LogState of `initial_state` and the tokens k [B, T, Hkv, D], v [B, T, Hkv, E] that follow it."""
    with without_autocast(k.device):
        tokens = _Tokens.of(k[:, :0], k, v, resets)
        state = _with_ones(initial_state or _empty_like(k, v))
        return _without_ones(_state_after(tokens, state), tokens.poison[..., -1])


# ---- what enters the sums


class _Tokens(NamedTuple):
    """Queries, keys and values by heads, without NaN and infinity in keys and values."""

    q: torch.Tensor  # [B, Hkv, n, G, D]
    k: torch.Tensor  # [B, Hkv, T, D]
    v: torch.Tensor  # [B, Hkv, T, E+1], the last column ones
    document: torch.Tensor | None  # [B, 1, T, 1], how many resets there were up to each token
    poison: torch.Tensor  # [B, Hkv, T], NaN from a token on that is not finite, up to the next reset; else 0

    @staticmethod
    def of(q, k, v, resets):
        Hkv, dtype = k.shape[2], accumulation_dtype(q)
        q = q.to(dtype).unflatten(2, (Hkv, -1)).transpose(1, 2)
        k, v = (x.to(dtype).transpose(1, 2) for x in (k, v))
        # Zero times NaN is NaN: in a product it would reach rows that do not see it.
        bad = ((k.detach() * 0).sum(-1) + (v.detach() * 0).sum(-1)) != 0  # [B, Hkv, T]
        count, document = bad.cumsum(-1), None
        if resets is not None:
            document = resets.cumsum(1)[:, None, :, None]
            before = (count - bad.long()).masked_fill(~resets[:, None], 0).cummax(-1).values
            count = count - before
        poison = torch.zeros_like(k[..., 0]).masked_fill(count > 0, torch.nan)
        k, v = k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0)
        return _Tokens(q, k, F.pad(v, (0, 1), value=1.0), document, poison)

    def keys(self, start, end):
        """Return keys, values and documents of tokens start..end-1."""
        document = None if self.document is None else self.document[:, :, start:end]
        return self.k[:, :, start:end], self.v[:, :, start:end], document

    def document_before(self, start):
        """Return [B, 1, 1, 1], the document that the state before token `start` belongs to, or None."""
        if self.document is None:
            return None
        return torch.zeros_like(self.document[:, :, :1]) if start == 0 else self.document[:, :, start - 1 : start]


def _divide(num, poison):
    """Return y [B, n, H, E] from the sums [B, Hkv, n, G, E+1]."""
    y = normalize(num[..., :-1], num[..., -1]) + poison[..., None, None]  # [B, Hkv, n, G, E]
    return y.transpose(1, 2).flatten(2, 3)


def _empty_like(k, v):
    return empty_log_state(k.shape[0], *k.shape[2:], v.shape[3], accumulation_dtype(k), k.device)


def _with_ones(state):
    """Return m [B, Hkv, D] and S with z as its last column, [B, Hkv, D, E+1]."""
    return state.m.detach(), torch.cat((state.S, state.z.unsqueeze(-1)), dim=-1)


def _without_ones(state, poison):
    m, S = state
    S = S + poison[..., None, None]
    return LogState(m, S[..., :-1], S[..., -1])


# ---- the forms


def _chunked(tokens, state, chunk_size):
    """Compute chunk by chunk: each reads itself and the state before it, then becomes part of the state."""
    T, n = tokens.k.shape[2], tokens.q.shape[2]
    if n < T:  # tokens without a query are only part of the state
        state = _state_after(tokens, state, 0, T - n)
    parts, save = [], not torch.is_grad_enabled() or tokens.q.numel() <= SAVED_AT_ONCE
    for start in range(T - n, T, chunk_size):
        end = min(start + chunk_size, T)
        args = tokens.q[:, :, start - T + n : end - T + n], *tokens.keys(start, end), tokens.document_before(start)
        # Of a long text only the states between chunks are saved for the backward pass.
        part, *state = _chunk(*args, *state) if save else compute_again(_chunk, *args, *state)
        parts.append(part)
    return torch.cat(parts, dim=2), state


def _chunk(q, k, v, document, document_before, m, S):
    """Return the sums [B, Hkv, n, G, E+1] of a chunk's rows over the chunk and the state before it, m and S after."""
    M = _prefix_maxima(k, document, document_before, m)
    c = _reference(q, M)
    num = _read(q, c, m, S, None if document is None else document != document_before) + _inside(
        q, k, v, M, c, document
    )
    return num, *_update(k, v, document, document_before, m, S, M[:, :, -1])


def _quadratic(tokens, state, rows):
    """Sum over all pairs, `rows` queries at a time."""
    T, n = tokens.k.shape[2], tokens.q.shape[2]
    parts, save = [], not torch.is_grad_enabled() or tokens.q.numel() * T // rows <= SAVED_AT_ONCE
    with torch.no_grad():
        M = _prefix_maxima(*tokens.keys(0, T)[::2], tokens.document_before(0), state[0])
    for start in range(T - n, T, rows):
        end = min(start + rows, T)
        args = tokens.q[:, :, start - T + n : end - T + n], *tokens.keys(0, end), M[:, :, :end]
        run = partial(_rows, start) if save else partial(compute_again, _rows, start)
        parts.append(run(*args, *state))
    return torch.cat(parts, dim=2)


def _rows(start, q, k, v, document, M, m, S):
    """Return the sums of rows start, start+1, ... over the keys up to each and the state before all of them."""
    c = _reference(q, M[:, :, start:])
    since = None if document is None else document[:, :, start:]
    num = _inside(q, k[:, :, start:], v[:, :, start:], M[:, :, start:], c, since)
    num = num + _read(q, c, m, S, None if since is None else since != 0)
    if start:
        hidden = (None, None)
        if document is not None:
            last = document[:, :, start - 1 : start]
            hidden = since != last, document[:, :, :start] != last
        num = num + _pairs(q, k[:, :, :start], v[:, :, :start], M[:, :, start - 1 : start], c, *hidden)
    return num


# ---- references


@torch.no_grad()
def _prefix_maxima(k, document, document_before, m):
    """Return M [B, Hkv, n, D], the largest key of each feature up to each token in its document, m [B, Hkv, D]
    counting as that of the tokens before."""
    m = m.unsqueeze(2)
    if document is None:
        return torch.maximum(k.cummax(dim=2).values, m)
    M, step = k, 1
    while step < k.shape[2]:
        earlier = M[:, :, :-step].where(document[:, :, step:] == document[:, :, :-step], EMPTY)
        M = torch.cat((M[:, :, :step], torch.maximum(M[:, :, step:], earlier)), dim=2)
        step *= 2
    return torch.maximum(M, m.where(document == document_before, EMPTY))


@torch.no_grad()
def _reference(q, M):
    """Return c [B, Hkv, n, G, 1], the largest exponent of each row of q [B, Hkv, n, G, D], M [B, Hkv, n, D]."""
    return (q + M.unsqueeze(3)).amax(-1, keepdim=True)


# ---- the steps


def _read(q, c, m, S, hidden=None):
    """Return the sums [B, Hkv, n, G, E+1] of queries over a state; hidden [B, 1, n, 1]: rows that do not see it."""
    w = _exp(q - c + m[:, :, None, None], None)
    num = (w.flatten(2, 3) @ S).unflatten(2, q.shape[2:4])
    return num if hidden is None else num.masked_fill(hidden.unsqueeze(3), 0)


def _update(k, v, document, document_before, m, S, m_after):
    """Return m_after and S relative to it, after the tokens k, v [B, Hkv, n, ...]."""
    hidden, keep = None, _exp(m - m_after, None).unsqueeze(-1)  # [B, Hkv, D, 1]
    if document is not None:
        hidden = document != document[:, :, -1:]
        reset = document[:, :, -1:] != document_before
        keep = _exp(m - m_after, reset.squeeze(2)).unsqueeze(-1)
        S = S.masked_fill(reset, 0)  # it may be NaN
    w = _exp(k - m_after.unsqueeze(2), hidden)
    return m_after, keep * S + w.transpose(-1, -2) @ v


def _state_after(tokens, state, start=0, end=None):
    """Return m and S after tokens start..end-1."""
    k, v, document = tokens.keys(start, tokens.k.shape[2] if end is None else end)
    m, S = state
    before = tokens.document_before(start)
    with torch.no_grad():
        seen, earlier = k, m
        if document is not None:
            seen = k.where(document == document[:, :, -1:], EMPTY)
            earlier = m.where((document[:, :, -1:] == before).squeeze(2), EMPTY)
        m_after = torch.maximum(seen.amax(2), earlier)
    return _update(k, v, document, before, m, S, m_after)


def _inside(q, k, v, M, c, document):
    """Return the sums [B, Hkv, n, G, E+1] of n queries over the keys of the same n tokens, up to each."""
    n = q.shape[2]
    size = 2 ** math.ceil(math.log2(n))
    q, k, M, c, document = (_extend(x, size) for x in (q, k, M, c, document))
    v = F.pad(v, (0, 0, 0, size - n))
    half = min(LEAF, size)
    cut = lambda x, *shape: None if x is None else x.unflatten(2, (-1, *shape))
    num = _leaf(*(cut(x, half) for x in (q, k, v, c, document))).flatten(2, 3)
    while half < size:
        first = lambda x: None if x is None else cut(x, 2, half)[:, :, :, 0]
        second = lambda x: None if x is None else cut(x, 2, half)[:, :, :, 1]
        hidden, r = (None, None), first(M)[:, :, :, -1:]
        if document is not None:
            middle = first(document)[:, :, :, -1:]
            hidden = second(document) != middle, first(document) != middle
        more = _pairs(second(q), first(k), first(v), r, second(c), *hidden)
        num = torch.stack((first(num), second(num) + more), dim=3).flatten(2, 4)
        half *= 2
    return num[:, :, :n]


def _extend(x, size):
    """Return x with its last row, as a constant, repeated up to `size` rows."""
    if x is None or x.shape[2] == size:
        return x
    last = x[:, :, -1:].detach()
    return torch.cat((x, last.expand(*x.shape[:2], size - x.shape[2], *x.shape[3:])), dim=2)


def _pairs(q, k, v, r, c, q_hidden, k_hidden):
    """Return the sums [..., n, G, E+1] of queries [..., n, G, D] over keys [..., m, D] that are all before them, from
    the reference r [..., 1, D] between them. Hidden [..., n, 1], [..., m, 1] or None: rows of another document."""
    to = _exp(q - c + r.unsqueeze(-2), None if q_hidden is None else q_hidden.unsqueeze(-2))
    since = _exp(k - r, k_hidden)
    w = to.flatten(-3, -2) @ since.transpose(-1, -2)  # [..., n * G, m]
    return (w @ v).unflatten(-2, q.shape[-3:-1])


def _leaf(q, k, v, c, document):
    """Return the sums [B, Hkv, P, l, G, E+1] inside each of P leaves of l tokens, feature by feature."""
    size = q.shape[3]
    at = torch.arange(size, device=q.device)
    hidden = at[:, None] < at  # [l, l]
    if document is not None:
        hidden = hidden | (document != document.transpose(-1, -2))  # [B, 1, P, l, l]
    pairs = (q - c).unsqueeze(-2) + k[:, :, :, None, None]  # [B, Hkv, P, l, G, l, D]
    w = _exp(pairs, hidden[..., :, None, :, None]).sum(-1)
    return (w.flatten(3, 4) @ v).unflatten(3, q.shape[3:5])


def _exp(x, hidden):
    """Return exp(x), 0 where hidden (broadcastable to x). x is a temporary and is overwritten."""
    return (x if hidden is None else x.masked_fill_(hidden, -torch.inf)).exp_()
