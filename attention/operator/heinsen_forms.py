"""Heinsen's log attention in plain PyTorch: in chunks, stable in float32, on any device.

    y, state = attend(q, k, v, chunk_size=256)
    state = state_after(k, v, None, None)       # no queries

The three forms differ in the tokens of a chunk: all of them (quadratic), chunk_size (chunked), or one (recurrent).

exp(q_id + k_jd) may be far outside float32's range, so no such number is ever computed. Each exponent is relative to a
reference, which cancels in y. With M_id, the largest k_jd that row i has seen, and c_i = max_d (q_id + M_id),

    w_ij exp(-c_i) = sum_d exp(q_id + r_d - c_i) exp(k_jd - r_d)        for any r_d with  k_jd <= r_d <= M_id

has no exponent above 0, and its sum over j is at least 1. c_i is taken from q_i once, and again, since the first may be
off by more than float32's exponents (by 128 for a c_i of 2e9). The references r are prefix maxima:

    the state    r is the largest key before the chunk. One product reads it, S being relative to the same r.
    a chunk      is halved again and again. Queries in a second half read the keys of the first half in one product, r
                 being the largest key up to the middle: a chunk of n tokens needs log2(n / LEAF) exponentials a number
    the leaves   of LEAF tokens are computed pair by pair and feature by feature

So a row depends on no later key: one that is larger by e^80, a NaN or an infinity changes no bit of the rows before it.

Inside, tensors are laid out by key/value heads: q [B, Hkv, n, G, D] with the G = H/Hkv query heads of a group side by
side, k [B, Hkv, n, D], v [B, Hkv, n, E+1] with a last column of ones, so that the last column of every sum is the
denominator and the last column of S is z. documents [B, 1, n+1, 1] counts the resets up to each of n tokens, after the
count at the state before them: rows see the tokens, and the state, with their own number.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from .forms import accumulation_dtype, compute_again, normalize, pieces, without_autocast

EMPTY = -1e30  # the reference of a state before any token: finite, because inf - inf is NaN
LEAF = 8  # tokens of a leaf, inside which pairs are computed feature by feature
IS_LOG = {"signed": False, "log": True}  # for each kind of values
CHUNK_SIZE = 256


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
    z = torch.zeros(B, Hkv, D, dtype=dtype, device=device)
    return LogState(z + EMPTY, z.unsqueeze(-1).repeat(1, 1, 1, E), z)


def attend(q, k, v, *, chunk_size=CHUNK_SIZE, resets=None, initial_state=None):
    """Return (y [B, n, H, E], LogState of all T tokens) of causal attention, both in float32 or wider.

    q [B, n, H, D] are the queries of the last n of the T tokens of k [B, T, Hkv, D], v [B, T, Hkv, E]. resets [B, T]
    bool or None.
    """
    with without_autocast(q.device):
        first = k.shape[1] - q.shape[1]
        k, v, documents, poison = _prepare_keys(k, v, resets)
        q, state = q.to(k.dtype).unflatten(2, (k.shape[1], -1)).transpose(1, 2), _begin(initial_state, k, v)
        if first:  # tokens without a query are only part of the state
            state = _update(k[:, :, :first], v[:, :, :first], documents[:, :, : first + 1], *state)
        parts = []
        for start, end in pieces(first, k.shape[2], chunk_size):
            # Only the states between chunks are saved for the backward pass.
            part, *state = compute_again(
                _chunk,
                q[:, :, start - first : end - first],
                k[:, :, start:end],
                v[:, :, start:end],
                documents[:, :, start : end + 1],
                *state,
            )
            parts.append(part)
        return _divide(torch.cat(parts, dim=2), poison[..., first:]), _end(*state, poison)


def state_after(k, v, resets, initial_state):
    """Return the LogState of `initial_state` and the tokens k [B, T, Hkv, D], v [B, T, Hkv, E] that follow it."""
    with without_autocast(k.device):
        k, v, documents, poison = _prepare_keys(k, v, resets)
        return _end(*_update(k, v, documents, *_begin(initial_state, k, v)), poison)


# ---- from the public layout, and back


def _prepare_keys(k, v, resets):
    """Return k [B, Hkv, T, D] and v [B, Hkv, T, E+1] without NaN and infinity, documents [B, 1, T+1, 1], and poison.

    poison [B, Hkv, T] is NaN from a token on that is not finite, or has a key below EMPTY, up to the next reset, and
    zero elsewhere.
    """
    dtype = accumulation_dtype(k)
    resets = k.new_zeros(k.shape[:2], dtype=torch.bool) if resets is None else resets
    k, v = (x.to(dtype).transpose(1, 2) for x in (k, v))
    # Zero times NaN is NaN: in a product it would reach rows that do not see it.
    broken = ((k.detach() * 0).sum(-1) + (v.detach() * 0).sum(-1)) != 0  # [B, Hkv, T]
    broken |= k.detach().amin(-1) < EMPTY
    count = broken.cumsum(-1)
    forgotten = (count - broken.long()).masked_fill(~resets[:, None], 0).cummax(-1).values
    poison = torch.zeros_like(k[..., 0]).masked_fill(count > forgotten, torch.nan)
    documents = F.pad(resets.cumsum(1), (1, 0))[:, None, :, None]
    return k.nan_to_num(0, 0, 0), F.pad(v.nan_to_num(0, 0, 0), (0, 1), value=1.0), documents, poison


def _begin(state, k, v):
    """Return m [B, Hkv, D] and S [B, Hkv, D, E+1] of a LogState, or if it is None of no tokens."""
    state = state or empty_log_state(*k.shape[:2], k.shape[3], v.shape[3] - 1, k.dtype, k.device)
    # a copy, because what was made in inference mode cannot be saved for a backward pass
    return state.m.detach().clone(), torch.cat((state.S, state.z.unsqueeze(-1)), dim=-1)


def _end(m, S, poison):
    """Return the LogState of m and S after the last token."""
    S = S + poison[..., -1, None, None]
    return LogState(m, S[..., :-1], S[..., -1])


def _divide(num, poison):
    """Return y [B, n, H, E] from the sums [B, Hkv, n, G, E+1]."""
    y = normalize(num[..., :-1], num[..., -1]) + poison[..., None, None]  # [B, Hkv, n, G, E]
    return y.transpose(1, 2).flatten(2, 3)


# ---- a chunk


def _chunk(q, k, v, documents, m, S):
    """Return the sums [B, Hkv, n, G, E+1] of a chunk's rows over the chunk and the state before it, m and S after."""
    M = _prefix_maxima(k, documents, m)
    q = q - _reference(q, M)
    q = q - _reference(q, M)  # what rounding left of the first
    num = _read(q, documents[:, :, 1:] != documents[:, :, :1], m, S)
    num = num + _inside(q, k, v, M, documents[:, :, 1:])
    return num, *_update(k, v, documents, m, S)


@torch.no_grad()
def _prefix_maxima(k, documents, m):
    """Return M [B, Hkv, n, D], the largest key of each feature up to each token in its document; m is before all."""
    M, step = torch.cat((m.unsqueeze(2), k), dim=2), 1
    while step < M.shape[2]:
        earlier = M[:, :, :-step].where(documents[:, :, step:] == documents[:, :, :-step], EMPTY)
        M = torch.cat((M[:, :, :step], torch.maximum(M[:, :, step:], earlier)), dim=2)
        step *= 2
    return M[:, :, 1:]


@torch.no_grad()
def _reference(q, M):
    """Return c [B, Hkv, n, G, 1], the largest exponent of each row of q [B, Hkv, n, G, D], M [B, Hkv, n, D]."""
    return (q + M.unsqueeze(3)).amax(-1, keepdim=True)


def _read(q, hidden, m, S):
    """Return the sums [B, Hkv, n, G, E+1] of queries over a state; hidden [B, 1, n, 1]: rows that do not see it."""
    hidden = hidden.unsqueeze(3)
    w = _exp(q + m[:, :, None, None], hidden)
    return (w.flatten(2, 3) @ S).unflatten(2, q.shape[2:4]).masked_fill(hidden, 0)  # S may be NaN


def _update(k, v, documents, m, S):
    """Return m and S after the tokens k, v [B, Hkv, n, ...]."""
    hidden = documents != documents[:, :, -1:]  # from what comes after
    m = m.unsqueeze(2)
    with torch.no_grad():  # detached for forward mode too: the next chunk takes m as a constant
        m_after = torch.cat((m, k.detach()), dim=2).masked_fill(hidden, EMPTY).amax(2, keepdim=True)
    decay = _exp(m - m_after, hidden[:, :, :1]).transpose(-1, -2)  # [B, Hkv, D, 1]
    w = _exp(k - m_after, hidden[:, :, 1:])
    S = decay * S.masked_fill(hidden[:, :, :1], 0) + w.transpose(-1, -2) @ v  # S may be NaN
    return m_after.squeeze(2), S


def _inside(q, k, v, M, document):
    """Return the sums [B, Hkv, n, G, E+1] of n queries over the keys of the same n tokens, up to each."""
    n, size = q.shape[2], 1
    while size < n:  # of the size, not of n, torch.compile makes a constant
        size *= 2
    if n < size:  # rows behind the others, which are left out at the end
        rows = torch.arange(size, device=q.device).clamp(max=n - 1)
        q, k, M, document = (x.index_select(2, rows) for x in (q, k, M, document))
    v = F.pad(v, (0, 0, 0, size - n))
    half = min(LEAF, size)
    num = _leaf(*(x.unflatten(2, (-1, half)) for x in (q, k, v, document))).flatten(2, 3)
    while half < size:
        first_k, first_v, first_M = (_halves(x, half)[0] for x in (k, v, M))
        first_document, second_document = _halves(document, half)
        r, middle = first_M[..., -1:, :], first_document[..., -1:, :]
        first, second = _halves(num, half)
        pairs = _pairs(_halves(q, half)[1], first_k, first_v, r, second_document != middle, first_document != middle)
        num = torch.stack((first, second + pairs), dim=3).flatten(2, 4)
        half *= 2
    return num[:, :, :n]


def _halves(x, half):
    """Return x [B, Hkv, P * 2 * half, ...] as its first and its second halves, [B, Hkv, P, half, ...] each."""
    return x.unflatten(2, (-1, 2, half)).unbind(3)


def _pairs(q, k, v, r, q_hidden, k_hidden):
    """Return the sums [..., n, G, E+1] of queries [..., n, G, D] over keys [..., m, D] that are all before them.

    r [..., 1, D] is the reference between them. q_hidden [..., n, 1] and k_hidden [..., m, 1] are rows of another
    document.
    """
    to = _exp(q + r.unsqueeze(-2), q_hidden.unsqueeze(-2))
    since = _exp(k - r, k_hidden)
    w = to.flatten(-3, -2) @ since.transpose(-1, -2)  # [..., n * G, m]
    return (w @ v).unflatten(-2, q.shape[-3:-1])


def _leaf(q, k, v, document):
    """Return the sums [B, Hkv, P, l, G, E+1] inside each of P leaves of l tokens, feature by feature."""
    position = torch.arange(q.shape[3], device=q.device)
    hidden = (position[:, None] < position) | (document != document.transpose(-1, -2))  # [B, 1, P, l, l]
    pairs = q.unsqueeze(-2) + k[:, :, :, None, None]  # [B, Hkv, P, l, G, l, D]
    w = _exp(pairs, hidden[..., :, None, :, None]).sum(-1)
    return (w.flatten(3, 4) @ v).unflatten(3, q.shape[3:5])


def _exp(x, hidden):
    """Return exp(x), 0 where hidden (broadcastable to x). x is a temporary and is overwritten."""
    return x.masked_fill_(hidden, -torch.inf).exp_()
