"""Heinsen's log attention computed as it is defined: the specification that every faster form is compared with.

    y = quadratic(q, k, v)                                              # every pair of tokens
    y, (m, S, z) = recurrent(q, k, v)                                   # token by token, through the state
    log_x = positions(log_coefficients, logits)                         # the position embedding, token by token

They compute what attention/heinsen.py and attention/positions.py describe and take their arguments. There are no
references inside the sums and no blocks, so call them with float64. "Softmax Attention with Constant Cost per Token"
(Heinsen, 2024).
"""

import torch

from .operator.heinsen_forms import EMPTY, IS_LOG, empty_log_state


def quadratic(q, k, v, *, values="signed", resets=None, initial_state=None):
    """Return y [B, n, H, E]: y_i = sum_j w_ij v_j / sum_j w_ij with w_ij = sum_d exp(q_id + k_jd), which takes a tensor
    [B, n, T, H, D]."""
    H, Hkv = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(H // Hkv, dim=2) for x in (k, v))
    v = v.exp() if IS_LOG[values] else v
    seen, state_seen = visible(q, k, resets)
    pairs = torch.where(seen[..., None, None], q[:, :, None] + k[:, None], -torch.inf)  # inf times 0 would be NaN
    w = pairs.exp().sum(-1)  # [B, n, T, H]
    num, den = torch.einsum("bijh,bjhe->bihe", w, v), w.sum(2).unsqueeze(-1)
    if initial_state is not None:
        m, S, z = (x.repeat_interleave(H // Hkv, dim=1) for x in initial_state)
        w = (q + m.detach().unsqueeze(1)).exp() * state_seen[..., None, None]  # [B, n, H, D]
        num = num + torch.einsum("bihd,bhde->bihe", w, S)
        den = den + torch.einsum("bihd,bhd->bih", w, z).unsqueeze(-1)
    return (num / den).log() if IS_LOG[values] else num / den


def recurrent(q, k, v, *, values="signed", resets=None, initial_state=None):
    """Return (y, (m, S, z)): exp(m_t) S_t = exp(m_{t-1}) S_{t-1} + exp(k_t) v_t^T, z likewise with 1 in v's place, and
    y_t = exp(q_t + m_t) S_t / exp(q_t + m_t) z_t."""
    group, outputs, state = q.shape[2] // k.shape[2], [], initial_state
    for t in range(q.shape[1]):
        now = slice(t, t + 1)
        cut = None if resets is None else resets[:, now]
        state = state_after(k[:, now], v[:, now], values=values, resets=cut, initial_state=state)
        m, S, z = (x.repeat_interleave(group, dim=1) for x in state)
        w = (q[:, t] + m).exp().unsqueeze(2)  # [B, H, 1, D]
        y = (w @ S / (w @ z.unsqueeze(-1))).squeeze(2)
        outputs.append(y.log() if IS_LOG[values] else y)
    return torch.stack(outputs, dim=1), state


def state_after(k, v, *, values="signed", resets=None, initial_state=None):
    """Return the state (m, S, z) after all tokens, by the recurrence. m is a constant to autograd."""
    (B, T, Hkv, D), E = k.shape, v.shape[3]
    v = v.exp() if IS_LOG[values] else v
    m, S, z = initial_state or empty_log_state(B, Hkv, D, E, k.dtype, k.device)
    for t in range(T):
        if resets is not None:
            forget = resets[:, t, None, None]  # [B, 1, 1]
            m, z, S = m.masked_fill(forget, EMPTY), z.masked_fill(forget, 0), S.masked_fill(forget.unsqueeze(-1), 0)
        previous, m = m.detach(), torch.maximum(m, k[:, t]).detach()
        decay, added = (previous - m).exp(), (k[:, t] - m).exp()
        S = decay.unsqueeze(-1) * S + added.unsqueeze(-1) * v[:, t].unsqueeze(-2)
        z = decay * z + added
    return m, S, z


def visible(q, k, resets):
    """Return whether query i, of the last n tokens, sees key j [B, n, T] and the state before all keys [B, n]."""
    (B, n), T = q.shape[:2], k.shape[1]
    seen = torch.ones(n, T, dtype=torch.bool, device=q.device).tril(T - n)
    document = torch.zeros(B, T, device=q.device) if resets is None else resets.cumsum(1)
    return seen & (document[:, -n:, None] == document[:, None]), document[:, -n:] == 0


def positions(log_coefficients, logits, resets=None, log_x=None):
    """Return log x_t [B, T, C] by log x_t = logaddexp(log x_{t-1} + log_coefficients_t, logits_t).

    log_x [B, C] or None is log x_0, by default 0; a token where resets [B, T] is true begins again at 0.
    """
    log_x, outputs = torch.zeros_like(logits[:, 0]) if log_x is None else log_x, []
    for t in range(logits.shape[1]):
        if resets is not None:
            log_x = log_x.masked_fill(resets[:, t, None], 0)
        log_x = torch.logaddexp(log_x + log_coefficients[:, t], logits[:, t])
        outputs.append(log_x)
    return torch.stack(outputs, dim=1)
