"""Power attention computed as it is defined: the specification that every faster form is compared with.

    y = quadratic(q, k, v, log_g, p=2)                                  # every pair of tokens
    y, (S, z) = recurrent(q, k, v, log_g, p=2)                          # token by token, through the state

Both compute the function that attention/power.py describes and take its arguments: q [B, T, H, D], k [B, T, Hkv,
D], v [B, T, Hkv, E], log_g [B, T, Hkv] or None, initial_state (S [B, Hkv, Dphi, E], z [B, Hkv, Dphi]) or None. There
are no blocks, no logarithms and no scaling here, so call them with float64. A gate is exp(log_g), and log_g = -inf is
simply a gate of zero. "Symmetric Power Transformers" (Buckman, Gelada, Zhang, 2024); gates: Kumar et al., 2025.
"""

import torch

from .embedding import symmetric_power_embedding as phi


def quadratic(q, k, v, log_g=None, *, p=2, scale=None, initial_state=None):
    """Return y [B, T, H, E]: y_i = sum_j w_ij v_j / sum_j w_ij, with w_ij = g_{j+1} ... g_i (scale q_i . k_j)^p."""
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    decay, decay_from_start = gate_products(gates(log_g, k[:, :, ::group]).repeat_interleave(group, dim=2))
    causal = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    scores = torch.where(causal, scale * torch.einsum("bihd,bjhd->bhij", q, k), 0)  # zero times NaN would be NaN
    w = decay * scores**p
    num, den = w @ v.transpose(1, 2), w.sum(-1, keepdim=True)
    if initial_state is not None:
        S, z = (x.repeat_interleave(group, dim=1) for x in initial_state)
        phi_q = scale**p * phi(q.transpose(1, 2), p) * decay_from_start.unsqueeze(-1)
        num, den = num + phi_q @ S, den + phi_q @ z.unsqueeze(-1)
    return divide(num, den).transpose(1, 2)


def adaptive(q, k, v, powers, log_g=None):
    """Return y [B, n, H, E]: y_i = sum_j w_ij v_j / sum_j w_ij, with w_ij = |q_i . k_j|^p_i and p_i = powers[b, i].

    powers [B, n] are above zero. q [B, n, H, D] belong to the last n of the T tokens of k and v. log_g [B, T, Hkv]
    holds only 0 and -inf, or is None. Where q_i . k_j is zero, the weight and its derivatives by q, k and p are zero.
    """
    n, group = q.shape[1], q.shape[2] // k.shape[2]
    seen = gate_products(gates(log_g, k).repeat_interleave(group, dim=2))[0][:, :, -n:] > 0  # [B, H, n, T]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    w = torch.where(seen, torch.einsum("bihd,bjhd->bhij", q, k), 0).abs() ** powers[:, None, :, None]
    return divide(w @ v.transpose(1, 2), w.sum(-1, keepdim=True)).transpose(1, 2)


def recurrent(q, k, v, log_g=None, *, p=2, initial_state=None):
    """Return (y, (S, z)): S_t = g_t S_{t-1} + phi(k_t) v_t^T, z_t = g_t z_{t-1} + phi(k_t), and y_t = phi(q_t) S_t /
    phi(q_t) z_t. The scale of the scores cancels."""
    group, outputs, state = q.shape[2] // k.shape[2], [], initial_state
    for t in range(q.shape[1]):
        now = slice(t, t + 1)
        state = state_after(k[:, now], v[:, now], None if log_g is None else log_g[:, now], p=p, initial_state=state)
        S, z = (x.repeat_interleave(group, dim=1) for x in state)
        phi_q = phi(q[:, t], p).unsqueeze(2)  # [B, H, 1, Dphi]
        outputs.append(divide(phi_q @ S, phi_q @ z.unsqueeze(-1)).squeeze(2))
    return torch.stack(outputs, dim=1), state


def state_after(k, v, log_g=None, *, p=2, initial_state=None):
    """Return the state (S, z) after all tokens, by the recurrence."""
    S, z = initial_state if initial_state is not None else (0, 0)
    g = gates(log_g, k)
    for t in range(k.shape[1]):
        phi_k = phi(k[:, t], p)  # [B, Hkv, Dphi]
        S = g[:, t, :, None, None] * S + phi_k.unsqueeze(-1) * v[:, t].unsqueeze(-2)
        z = g[:, t, :, None] * z + phi_k
    return S, z


def gates(log_g, k):
    """Return exp(log_g) [B, T, Hkv], or ones where log_g is None."""
    return torch.ones(k.shape[:3], dtype=k.dtype, device=k.device) if log_g is None else log_g.exp()


def gate_products(g):
    """Return, for g [B, T, H], the products g_{j+1} ... g_i [B, H, T, T], zero for j > i, and g_1 ... g_i [B, H, T]."""
    g = g.transpose(1, 2)  # [B, H, T]
    later = torch.ones(g.shape[2], g.shape[2], dtype=torch.bool, device=g.device).tril(-1)  # i > j
    return torch.where(later, g.unsqueeze(-1), 1).cumprod(2).tril(), g.cumprod(2)


def divide(num, den):
    """Return num / den, zeros where den is zero."""
    empty = den == 0
    return torch.where(empty, 0, num / torch.where(empty, 1, den))
