"""The three forms of power attention in plain PyTorch: in blocks, stable in float32, on any device.

    y, state = attend(q, k, v, log_g, p=2, chunk_size=128, return_state=True)
    y, state = read_cache(q, k, v, log_g, state, p=2, flush_cache=False)        # generation
    state = flush(k, v, log_g, state, p=2)                                      # tokens into a PowerState

attention/naive.py computes the same without the care that is taken here: bfloat16 and float16 inputs are computed in
float32. There are no logarithms. log_g = -inf forgets everything before the token; it enters no sum, since a sum with
-inf in it is NaN, but is counted beside it.

Powers of two, which cancel in y, keep (q . k)^p inside float32's range: each row of q is scaled by its own largest
entry and by the largest entry of the keys up to it in its document. So y does not change when a row of q or all of k is
scaled by a power of two, and no row depends on later ones: a larger key (p = 2 with gates: up to 1e27 times; above, the
weights of earlier rows go to zero), a NaN or an infinity changes the rows from its own on, and no bit of earlier rows.
NaN in gives NaN out. (A PowerState, which holds p-th powers of keys as they are, is inside float32's range
for keys from 1e-4 to 1e4 with p = 8, from 1e-9 to 1e9 with p = 4.)

Inside, tensors are laid out by heads: q [B, Hkv, G, T, D] with the G = H/Hkv query heads of a group side by side,
k [B, Hkv, T, D], v [B, Hkv, T, E]; numerators [B, Hkv, G, T, E] and denominators [B, Hkv, G, T] are divided at the end.
"""

from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ..embedding import symmetric_power_dim, symmetric_power_embedding
from .memory import check_state_fits

FEATURES_AT_ONCE = 2**27  # entries of phi that exist at any time, half a GB in float32
SCORES_AT_ONCE = {"cpu": 2**27, "cuda": 2**30}  # entries of q k^T that exist at any time
LARGEST_HIDDEN = 2.0**50  # a scaled key that a row does not see: squares of products with it are in float32's range


class ScaledState(NamedTuple):
    """A state in a range that suits float32: S and z of keys that are multiplied by `unit` [B, Hkv, 1, 1]."""

    S: torch.Tensor
    z: torch.Tensor
    unit: torch.Tensor  # powers of two


class PowerState(NamedTuple):
    """The state of power attention: S [B, Hkv, Dphi, E] and z [B, Hkv, Dphi], float32 (float64 for float64 q).

    Dphi = C(D+p-1, p), in the order of `symmetric_power_embedding`, without `scale`.
    """

    S: torch.Tensor
    z: torch.Tensor


def attend(q, k, v, log_g, *, p, chunk_size=None, initial_state=None, return_state=False):
    """Return (y [B, n, H, E] in q's dtype, the PowerState after all tokens or None); see `power_attention`.

    q [B, n, H, D] belong to the last n tokens. chunk_size: tokens of a chunk (1 in the recurrent form), or None for the
    quadratic form.
    """
    with without_autocast(q.device):
        queries, keys, values, gates = by_head(q, k, v, log_g)
        queries = to_unit_range(queries)
        state = initial_state and _scale_state(initial_state, _unit_of_state(initial_state, p), p)
        scale = _scale_of_rows(keys, gates, state and state.unit, p)
        if chunk_size is None:
            num, den = _quadratic(queries, keys, values, gates, scale[..., -q.shape[1] :], state, p)
            final = flush(k, v, log_g, initial_state, p=p) if return_state else None
        else:
            num, den, state = _chunked(queries, keys, values, gates, scale, state, p, chunk_size)
            final = PowerState(*_scale_state(state, 1 / state.unit, p)[:2]) if return_state else None
        return by_token(normalize(num, den)).to(q.dtype), final


def sums(q, k, v, log_g, *, p, scale):
    """Return (sum_j w_ij v_j [B, n, H, E], sum_j w_ij [B, n, H]) in the accumulation dtype, in the quadratic form; see
    `power_attention_sums`."""
    with without_autocast(q.device):
        queries, keys, values, gates = by_head(q, k, v, log_g)
        rows = _scale_of_rows(keys, gates, None, p)[..., -q.shape[1] :]
        num, den = _quadratic(to_unit_range(queries), keys, values, gates, rows, None, p)
        root = (scale / (_unit_of_rows(queries).squeeze(-1) * rows.unsqueeze(2))) ** (p // 2)  # the square may overflow
        num, den = num * root.unsqueeze(-1) * root.unsqueeze(-1), den * root * root
        return by_token(num), by_token(den)


def attend_after_state(sums, q, k, v, log_g, state, *, p):
    """Return y [B, n, H, E] in q's dtype, with the PowerState `state` before the first token; see `power_attention`.

    sums(q, k, v, log_g, p=p, scale=1.0) returns the sums over pairs of tokens, num [B, n, H, E] and den [B, H, n], as
    `kernels.operators.quadratic_sums` does. This function reads the state for the queries, in as many pieces as memory
    asks for.
    """
    n, m, left = q.shape[1], k.shape[1], None
    with without_autocast(q.device):
        queries, keys, _, gates = by_head(q, k, v, log_g)
        state = _scale_state(state, _unit_of_state(state, p), p)
        scale = _scale_of_rows(keys, gates, state.unit, p)[..., -n:, None]  # [B, Hkv, n, 1]
        queries = to_unit_range(queries) * scale.unsqueeze(2)
        num, den = sums(by_token(queries).to(q.dtype), k, v, log_g, p=p, scale=1.0)
        num, den = (x.unflatten(1, queries.shape[1:3]) for x in (num.transpose(1, 2), den))
        queries = queries / state.unit.unsqueeze(2)
        if gates is not None:
            left = _decay(gates.span(m - n + 1, m), gates.span(0, 0), queries.dtype).unsqueeze(2)  # [B, Hkv, 1, n, 1]
            queries = queries.where(left > 0, 0)
        earlier = _query_state_in_pieces(queries, state, p)
        return by_token(normalize(*_add_decayed((num, den), earlier, left))).to(q.dtype)


def read_cache(q, k, v, log_g, state, *, p, flush_cache):
    """Attend from the newest tokens to the KV cache and the state before it: one piece of generation.

    q [B, n, H, D] belong to the last n of the m cached tokens k [B, m, Hkv, D], v [B, m, Hkv, E], log_g [B, m, Hkv] or
    None; state, a PowerState or None, holds the tokens before those m. Returns (y [B, n, H, E], the PowerState of all
    tokens with `flush_cache`, else `state` as it was).
    """
    with without_autocast(q.device):
        queries, keys, values, gates = by_head(q, k, v, log_g)
        unscaled = state and ScaledState(*state, torch.ones_like(state.z[..., :1, None]))
        scale = _scale_of_rows(keys, gates, state and _unit_of_state(state, p), p)[..., -q.shape[1] :]
        y = normalize(*_quadratic(to_unit_range(queries), keys, values, gates, scale, unscaled, p))
        if flush_cache:
            state = flush(k, v, log_g, state, p=p)
        return by_token(y).to(q.dtype), state


def flush(k, v, log_g, state, *, p):
    """Return the PowerState of `state` (or None) and the tokens k [B, m, Hkv, D], v [B, m, Hkv, E], log_g [B, m, Hkv]
    or None that follow it."""
    with without_autocast(k.device):
        check_state_fits(k.shape[0] * k.shape[2], k.shape[-1], v.shape[-1], p, accumulation_dtype(k), k.device)
        _, keys, values, gates = by_head(k, k, v, log_g)
        unit = torch.ones_like(keys[..., :1, :1])
        return PowerState(*_state_after(state and ScaledState(*state, unit), keys, values, gates, unit, p)[:2])


def empty_state(k, v, p):
    """Return the PowerState of no tokens, zeros, for tokens like k [B, m, Hkv, D], v [B, m, Hkv, E]."""
    (B, _, Hkv, D), dtype = k.shape, accumulation_dtype(k)
    z = k.new_zeros(B, Hkv, symmetric_power_dim(D, p), dtype=dtype)
    return PowerState(z.unsqueeze(-1).repeat(1, 1, 1, v.shape[3]), z)


def without_autocast(device):
    """Return a context in which autocast is off; the meta device has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def accumulation_dtype(x):
    """Return the dtype of sums and states for inputs like x: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---- the layout by heads


def by_head(q, k, v, log_g):
    """Return q, k and v by heads, in the dtype of sums, and the GateSums of log_g or None."""
    q, k, v = (x.transpose(1, 2).to(accumulation_dtype(q)) for x in (q, k, v))
    return q.unflatten(1, (k.shape[1], -1)), k, v, None if log_g is None else _sum_gates(log_g)


def by_token(x):
    """Return x [B, Hkv, G, n, ...] as [B, n, H, ...]."""
    return x.flatten(1, 2).transpose(1, 2)


# ---- the forms


def _quadratic(q, k, v, gates, scale, state, p):
    """Sum over all causal pairs, in blocks of rows. q and scale may hold only the last of the tokens in k."""
    B, Hkv, G, n, _ = q.shape
    m = k.shape[2]
    parts, keys = [], finite_keys_and_values(k, v)
    ranges, run = blocks_of_rows(B * Hkv * G, n, m, q.device)
    for start, end in ranges:
        seen = m - n + end
        part = run(
            partial(_block_of_rows, p=p, first=m - n + start),
            q[..., start:end, :],
            tuple(x[:, :, :seen] for x in keys),
            gates and gates.span(0, seen),
            scale[..., start:end],
            state,
        )
        parts.append(part)
    return _concatenate_rows(parts)


def blocks_of_rows(heads, n, m, device, copies=1):
    """Return [(start, end), ...] of blocks of n rows with m scores each, and run(block, *args), which calls block.

    If all heads and rows have more than SCORES_AT_ONCE scores, there are too many to save: in the backward pass each
    block computes its scores again, and a block is so short that a quarter of that number is enough for it. copies: of
    the scores that the backward pass of one block keeps.
    """
    at_once = SCORES_AT_ONCE.get(device.type, 2**27) // copies
    rows = max(64, n // 4)  # with four blocks, 3/8 of the pairs are never computed because they are not causal
    save_scores = heads * n * m <= at_once or not torch.is_grad_enabled()
    if heads * rows * m > at_once // 4:
        rows = max(16, at_once // 4 // (heads * m))
    run = (lambda block, *args: block(*args)) if save_scores else compute_again
    return pieces(0, n, rows), run


def pieces(first, last, size):
    """Return [(start, end), ...] of the pieces of `size` tokens from token `first` to before token `last`.

    Of their number, not of `first` and `last`, torch.compile makes a constant.
    """
    starts = [first + i * size for i in range(-(-(last - first) // size))]
    return [(start, min(start + size, last)) for start in starts]


def compute_again(function, *args):
    """Return function(*args) and save only args: the backward pass computes it again.

    Under torch.func's transforms, which do not allow that, all is saved. Without a gradient nothing is: tensors made in
    inference mode could not be.
    """
    differentiable = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tree_leaves(args))
    if not differentiable or torch._C._are_functorch_transforms_active():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)  # nothing here is random


def finite_keys_and_values(k, v):
    """Return k and v with zeros for what is not finite, and [B, Hkv, m]: 0, or NaN from such a token on.

    Zero times NaN is NaN: in a product NaN would reach the rows before it. The third is added to denominators instead.
    """
    bad = ((k.detach() * 0).sum(-1) + (v.detach() * 0).sum(-1)).cumsum(-1)
    return k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0), bad


def _block_of_rows(q, keys, gates, scale, state, p, first):
    """Return numerators and denominators of queries first, first+1, ... over the keys up to each and the state
    before. keys: (k, v, bad) of `finite_keys_and_values`."""
    k, v, bad = keys
    n, m = q.shape[3], k.shape[2]
    tokens = torch.arange(first, first + n, device=q.device)
    hidden, left = tokens.unsqueeze(-1) < torch.arange(m, device=q.device), None
    if gates is not None:
        to = gates.span(first + 1, first + n)
        hidden = hidden | _across_reset(to, gates.span(1, m))  # [B, Hkv, n, m]
        left = _decay(to, gates.span(0, 0), q.dtype).unsqueeze(2)  # of the state, by the gates up to each query
    scale = scale[:, :, None, :, None]  # [B, Hkv, 1, n, 1]
    w = (q * scale) @ k.transpose(-1, -2).unsqueeze(2)  # [B, Hkv, G, n, m]
    if gates is None or p > 2:  # the power of a larger, hidden key may overflow; squares do not, see _scale_of_rows
        w = w.masked_fill_(hidden if gates is None else hidden.unsqueeze(2), 0)
    w = integer_power(w, p)
    if gates is not None:
        w = w * _decay(to, gates.span(1, m), q.dtype, hidden).unsqueeze(2)
    sums = w @ v.unsqueeze(2), w.sum(-1) + bad[:, :, -n:].unsqueeze(2)
    if state is None:
        return sums
    scale = scale / state.unit.unsqueeze(2)
    earlier = query_state(q * (scale if left is None else scale.where(left > 0, 0)), state, p)
    return _add_decayed(sums, earlier, left)


def _add_decayed(sums, earlier, left):
    """Return numerators and denominators: `sums` plus the earlier ones times `left`, or as they are for None."""
    (num, den), (earlier_num, earlier_den) = sums, earlier
    if left is not None:
        earlier_num, earlier_den = earlier_num * left, earlier_den * left.squeeze(-1)
    return num + earlier_num, den + earlier_den


def _chunked(q, k, v, gates, scale, state, p, chunk_size):
    """Compute chunk by chunk: each chunk reads itself and the state before it, then becomes part of the state.

    q may hold only the last of the tokens in k: the chunks of earlier tokens are not read.
    """
    parts = []

    def chunk(q, k, v, gates, scale, state):
        unit = scale[:, :, -1:, None]
        rows = () if q is None else _block_of_rows(q, finite_keys_and_values(k, v), gates, scale, state, p, 0)
        return *rows, _state_after(state, k, v, gates, unit, p)

    T, first = k.shape[2], k.shape[2] - q.shape[3]  # tokens, the first with a query
    for start, end in [*pieces(0, first, chunk_size), *pieces(first, T, chunk_size)]:
        # Only the states between chunks are saved for the backward pass, not the features.
        *part, state = compute_again(
            chunk,
            None if start < first else q[..., start - first : end - first, :],
            k[:, :, start:end],
            v[:, :, start:end],
            gates and gates.span(start, end),
            scale[..., start:end],
            state,
        )
        if part:
            parts.append(part)
    return *_concatenate_rows(parts), state


# ---- the steps of the chunked form


def query_state(q, state, p):
    """Return phi(q) . S [B, Hkv, G, n, E] and phi(q) . z [B, Hkv, G, n] for q [B, Hkv, G, n, D]."""
    parts = []
    for x in q.split(_tokens_at_once(q, p), dim=3):
        phi = symmetric_power_embedding(x, p)
        parts.append((phi @ state.S.unsqueeze(2), (phi @ state.z[:, :, None, :, None]).squeeze(-1)))
    return _concatenate_rows(parts)


def _query_state_in_pieces(q, state, p):
    """Return what `query_state` does; the features of more than one piece of q are computed again to differentiate."""
    pieces = q.split(_tokens_at_once(q, p), dim=3)
    run = partial(compute_again, query_state) if len(pieces) > 1 else query_state
    return _concatenate_rows([run(piece, state, p) for piece in pieces])


def update_state(k, v, p):
    """Return phi(k)^T v [B, Hkv, Dphi, E] for k [B, Hkv, n, D], v [B, Hkv, n, E]."""
    S, size = 0, _tokens_at_once(k, p)
    for x, value in zip(k.split(size, dim=2), v.split(size, dim=2)):
        S = S + symmetric_power_embedding(x, p).transpose(-1, -2) @ value
    return S


def _state_after(state, k, v, gates, unit, p):
    """Return `state`, decayed by all gates of these tokens, plus each token, decayed by the gates after it.

    state is a ScaledState or None; the result is a ScaledState of this unit.
    """
    v = torch.cat((v, 1 + (v.detach() * 0).sum(-1, keepdim=True)), dim=-1)  # z is S with a one, or NaN, for a value
    k, n, left = k * unit, k.shape[2], None
    if gates is not None:
        decay = _decay(gates.span(n, n), gates.span(1, n), v.dtype).transpose(-1, -2)
        left = _decay(gates.span(n, n), gates.span(0, 0), v.dtype)  # [B, Hkv, 1, 1]
        k, v = k.where(decay > 0, 0), v * decay
    Sz = update_state(k, v, p)
    S, z = Sz[..., :-1], Sz[..., -1]
    if state is not None:
        ratio = unit / state.unit
        left = ratio**p if left is None else ratio.where(left > 0, 0) ** p * left
        S, z = S + left * state.S, z + left.squeeze(-1) * state.z
    return ScaledState(S, z, unit)


# ---- gates


class GateSums(NamedTuple):
    """Cumulative sums of log_g; their differences are the logarithms of decays.

    Entry j of each tensor [B, Hkv, n+1] is the sum before token j.

    total is the sum of the finite log_g in float64; only differences become float32 (a float32 sum is off by 6e-4 after
    64k tokens); resets counts the log_g = -inf. Entry 0 is the sum before the first token.
    """

    total: torch.Tensor
    resets: torch.Tensor

    def span(self, start, end):
        """Return the entries that tokens start..end-1 need."""
        return GateSums(self.total[..., start : end + 1], self.resets[..., start : end + 1])


def _sum_gates(log_g):
    """Return the GateSums [B, Hkv, T+1] of log_g [B, T, Hkv]."""
    log_g = torch.nn.functional.pad(log_g.transpose(1, 2), (1, 0))
    reset = log_g == float("-inf")
    return GateSums(log_g.masked_fill(reset, 0).double().cumsum(-1), reset.cumsum(-1))


def _across_reset(to, since):
    """Return [B, Hkv, n, m], True where there is a reset in between, for n entries `to` and m `since`."""
    return to.resets.unsqueeze(-1) != since.resets.unsqueeze(-2)


def _decay(to, since, dtype, hidden=None):
    """Return exp of the sum of log_g in between, [B, Hkv, n, m] for n entries `to` and m `since`; 0 where `hidden`, by
    default across a reset."""
    between = (to.total.unsqueeze(-1) - since.total.unsqueeze(-2)).to(dtype)
    return between.masked_fill_(_across_reset(to, since) if hidden is None else hidden, float("-inf")).exp()


# ---- details


def normalize(num, den):
    """Return num / den, zeros where den is zero (no weight at all), with no NaN in the gradient there either."""
    empty = den <= 0  # by rounding it may be below zero, if a state was read; NaN is not
    return (num / den.masked_fill(empty, 1).unsqueeze(-1)).masked_fill(empty.unsqueeze(-1), 0)


def integer_power(x, p):
    """Return x^p by repeated squaring: exact to a few ulp, without a logarithm."""
    result = None
    while p:
        if p & 1:
            result = x if result is None else result * x
        p >>= 1
        x = x * x if p else x
    return result


def to_unit_range(x):
    """Scale each row of x [..., D] by the power of two that brings its largest entry into [1, 2)."""
    return x * _unit_of_rows(x)


def _unit_of_rows(x):
    return torch.exp2(-exponent(x.detach().abs().amax(-1, keepdim=True)))


def exponent(x):
    """Return floor(log2(x)) for x >= 0, within float32's range; zero for NaN."""
    return x.clamp(torch.finfo(x.dtype).tiny, 2.0**126).log2().floor().nan_to_num()


@torch.no_grad()
def _scale_of_rows(k, gates, unit, p):
    """Return [B, Hkv, T], for each row the power of two that brings the largest key up to it into [1, 2).

    k [B, Hkv, T, D]. Keys before the row's document do not count. unit [B, Hkv, 1, 1] or None: the unit of the state
    before the first token. For p = 2 with gates, which multiply hidden scores by zero, the scale brings the largest key
    of all to at most LARGEST_HIDDEN, because zero times infinity is NaN.
    """
    exponents = exponent(k.abs().amax(-1))
    if unit is not None:
        exponents = torch.cat((-unit.squeeze(-1).log2(), exponents), dim=-1)
    resets = 0 if gates is None else gates.resets[..., -exponents.shape[-1] :]
    document = 4096.0 * resets  # further apart than any two exponents
    largest = (exponents.double() + document).cummax(-1).values - document
    scale = torch.exp2(-largest[..., -k.shape[2] :])
    if gates is not None and p == 2:
        limit = LARGEST_HIDDEN * torch.exp2(-exponent(k.nan_to_num(0, 0, 0).abs().amax((-2, -1)).double()))
        scale = torch.minimum(scale, limit.unsqueeze(-1))
    return scale.to(k.dtype)


@torch.no_grad()
def _unit_of_state(state, p):
    """Return [B, Hkv, 1, 1], the power of two that brings the keys of a state into [1, 2), as far as z tells.

    It is at most 2^(64 / p), so that the power of a query in this unit is finite, and not NaN times a state of zeros.
    """
    largest = state.z.abs().amax(-1)[..., None, None].clamp(min=2.0**-64)
    return torch.exp2(-(exponent(largest) / p).floor())


def _scale_state(state, factor, p):
    """Return the ScaledState for the keys of `state` multiplied by factor [B, Hkv, 1, 1], which is its unit too.

    S and z are multiplied by factor^(p/2) twice, since factor^p may be out of float32's range.
    """
    root = factor ** (p // 2)
    return ScaledState(state[0] * root * root, state[1] * root.squeeze(-1) * root.squeeze(-1), factor)


def _concatenate_rows(parts):
    """Return the numerators and denominators of [(numerators, denominators), ...] of consecutive rows."""
    return tuple(torch.cat(x, dim=3) for x in zip(*parts))


def _tokens_at_once(x, p):
    rows = x.shape[:-2].numel()
    return max(1, FEATURES_AT_ONCE // (max(1, rows) * symmetric_power_dim(x.shape[-1], p)))
