"""Power attention in float64, written as the definition reads: no blocks, no states, no logarithms, no scaling."""

import torch

from attention.embedding import symmetric_power_embedding


def power_attention_oracle(q, k, v, log_g=None, *, p=2, scale=None, initial_state=None):
    """The arguments of `power_attention`, float64. Gates enter as products of exp(log_g), so -inf is simply 0."""
    (B, T, H, D), Hkv = q.shape, k.shape[2]
    scale = D**-0.5 if scale is None else scale
    k, v = (x.repeat_interleave(H // Hkv, dim=2) for x in (k, v))
    g = (
        torch.ones(B, T, H, dtype=q.dtype, device=q.device)
        if log_g is None
        else log_g.exp().repeat_interleave(H // Hkv, dim=2)
    )
    w = (scale * torch.einsum("bihd,bjhd->bhij", q, k)) ** p
    rows, since_start = [], []  # row i of the products g_{j+1} ... g_i, zero for j > i
    for i in range(T):
        g_i = g[:, i, :, None]
        before = rows[-1] * g_i if i else w.new_zeros(B, H, T)
        rows.append(before + torch.eye(T, dtype=q.dtype, device=q.device)[i])
        since_start.append((since_start[-1] if i else 1) * g_i)
    w = w * torch.stack(rows, dim=2)
    num, den = w @ v.transpose(1, 2), w.sum(-1, keepdim=True)
    if initial_state is not None:
        S, z = (x.repeat_interleave(H // Hkv, dim=1) for x in initial_state)
        phi = scale**p * symmetric_power_embedding(q.transpose(1, 2), p) * torch.stack(since_start, dim=2)
        num, den = num + phi @ S, den + (phi @ z.unsqueeze(-1))
    empty = den == 0
    return torch.where(empty, 0, num / torch.where(empty, 1, den)).transpose(1, 2)


def state_oracle(k, v, log_g=None, *, p=2, initial_state=None):
    """The PowerState after all tokens, as (S, z), by the recurrence."""
    B, T, Hkv, D = k.shape
    S, z = initial_state if initial_state is not None else (0, 0)
    for t in range(T):
        phi = symmetric_power_embedding(k[:, t], p)
        g = torch.ones(B, Hkv, dtype=k.dtype) if log_g is None else log_g[:, t].exp()
        S = g[..., None, None] * S + phi.unsqueeze(-1) * v[:, t].unsqueeze(-2)
        z = g[..., None] * z + phi
    return S, z
