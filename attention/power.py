"""Power attention: the exponential of softmax attention replaced by an even power.

    w_ij  = exp(sum of log_g over m = j+1..i) * (scale * q_i . k_j)^p                   for j <= i
    y_i   = sum_j w_ij v_j / sum_j w_ij                                                 zeros where the sum is zero

Because (q . k)^p = phi(q) . phi(k) (embedding.py), one function has three forms:

    quadratic   every pair (i, j), like softmax attention                               T^2 D
    chunked     pairs inside a chunk, and a state that carries what came before         T (chunk D + Dphi E)
    recurrent   the state and the token itself: a chunk of one                          T Dphi E

with the state S = sum_j exp(sum of log_g after j) phi(k_j) v_j^T, and z the same with 1 in v's place. From "Symmetric
Power Transformers" (Buckman, Gelada, Zhang, 2024), gates from "Conformal Transformations for Symmetric Power
Transformers" (Kumar, Buckman, Gelada, Zhang, 2025). This file is the plain PyTorch of it, on any device; the quadratic
form without a state before it, and for p = 2 and 4 the chunked form, run on the Triton kernels of kernels/ where q is
on a GPU and they take its sizes.

Numerics: bfloat16 and float16 inputs are computed in float32, without logarithms. y does not change when a row of q
or all of k is scaled by a power of two, which keeps (q . k)^p inside float32's range. log_g = -inf forgets everything
before the token: it enters no sum (a sum with -inf in it is NaN), resets are counted beside it.
"""

import math
import os
import warnings
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from attention.embedding import symmetric_power_dim, symmetric_power_embedding
from kernels import CHUNKED_SIZES, cost, unsupported_reason

FORMS = ("auto", "quadratic", "chunked", "recurrent")
FEATURES_AT_ONCE = 2**27  # entries of phi that exist at any time, half a GB in float32
# the quadratic form on kernels/ meets the chunked one in PyTorch at so many times 1.5 Dphi tokens (H200, p=2, D=64)
KERNEL_GAIN = {torch.bfloat16: 400, torch.float32: 5}
SURELY_FREE = 2**30  # bytes of a GPU: to ask how much is free takes longer than a launch
SCORES_AT_ONCE = {"cpu": 2**27, "cuda": 2**30}  # entries of q k^T


class PowerState(NamedTuple):
    """What is kept of the tokens so far: S [B, Hkv, Dphi, E] and z [B, Hkv, Dphi], float32 (float64 for float64 q).

    Dphi = C(D+p-1, p), in the order of `symmetric_power_embedding`, without `scale`.
    """

    S: torch.Tensor
    z: torch.Tensor


class Gates(NamedTuple):
    """log_g prepared for differences, each [B, Hkv, n+1]: at entry j, what has gathered before token j.

    total is the sum of the finite log_g, in float64, of which only differences become float32 (a float32 sum is off
    by 6e-4 after 64k tokens); resets counts the log_g = -inf. Entry 0 is what stood before the first token.
    """

    total: torch.Tensor
    resets: torch.Tensor

    def span(self, start, end):
        """The entries that tokens start..end-1 need."""
        return Gates(self.total[..., start : end + 1], self.resets[..., start : end + 1])


def power_attention(
    q, k, v, log_g=None, *, p=2, scale=None, form="auto", chunk_size=None, initial_state=None, return_state=False
):
    """Causal power attention.

    q [B, T, H, D], k [B, T, Hkv, D], v [B, T, Hkv, E]: float64, float32, float16 or bfloat16, any strides; query head
    h reads key/value head h // (H / Hkv). log_g [B, T, Hkv]: natural log of the gate in front of each token, <= 0,
    -inf forgets all before it; float32 (float64 when q is). p: positive even integer. scale: default 1/sqrt(D), not
    zero; it cancels in y and is no part of the state, so the forms here leave it out. form: "quadratic", "chunked",
    "recurrent" or "auto", the cheapest for the shape. chunk_size: tokens a chunk, for the chunked form. initial_state:
    PowerState of the tokens before. Under autocast q, k and v are first cast to its dtype, as for SDPA.

    Returns y [B, T, H, E] in q's dtype, or (y, PowerState) with return_state. Differentiable in every tensor (on the
    GPU kernels once).
    Raises ValueError for arguments that do not fit, MemoryError for a state that does not.
    """
    q, k, v = _as_autocast_says(q, k, v)
    _check(q, k, v, log_g, p, scale, form, chunk_size, initial_state)
    (B, T, H, D), (Hkv, E) = q.shape, v.shape[2:]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with_state = return_state or initial_state is not None
    both_forms = (D, p) in CHUNKED_SIZES  # the quadratic kernels take no state before the first token
    on_kernels = form != "recurrent" and (initial_state is None or both_forms)
    on_kernels = on_kernels and kernels_take(q.device.type, q.dtype, D, E, p)
    chunks_on_kernels = on_kernels and both_forms
    if form == "auto":
        best = best_form(T, D, p, q.dtype if on_kernels else None, log_g is not None)
        form = "chunked" if with_state and chunks_on_kernels else best
    chunks_on_kernels = chunks_on_kernels and form == "chunked"
    if with_state or form != "quadratic" and not chunks_on_kernels:
        check_state_fits(B * Hkv, D, E, p, dtype, q.device)

    if chunks_on_kernels:
        from kernels.operators import chunked_attention

        chunk = kernel_chunk_size(T, D, p, chunk_size, log_g is not None)
        check_chunks_fit(q, k, p, chunk)
        log_g = None if log_g is None else log_g.float()
        y, S, z = chunked_attention(
            q, k, v, log_g, *(initial_state or (None, None)), p=p, chunk=chunk, final=return_state
        )
        return (y, PowerState(S, z)) if return_state else y

    if form == "quadratic" and on_kernels and initial_state is None:
        from kernels.operators import quadratic_attention

        y = quadratic_attention(q, k, v, None if log_g is None else log_g.float(), p=p)
        if not return_state:
            return y
        with torch.autocast(q.device.type, enabled=False):
            gates = None if log_g is None else _prepare(log_g)
            return y, _fold(None, _by_head(k, dtype), _by_head(v, dtype), gates, p)

    with torch.autocast(q.device.type, enabled=False):
        queries = _unit_range(_by_head(q, dtype).unflatten(1, (Hkv, H // Hkv)), dim=(-1,))
        keys, values = _by_head(k, dtype), _by_head(v, dtype)
        gates = None if log_g is None else _prepare(log_g)
        factor = _unit_factor(
            keys, (-2, -1), initial_state and initial_state.z.abs().amax(-1)[..., None, None] ** (1 / p)
        )
        keys, state = keys * factor, _scale_state(initial_state, factor, p // 2)
        if form == "quadratic":
            num, den = _quadratic(queries, keys, values, gates, state, p)
            if return_state:
                state = _fold(state, keys, values, gates, p)
        else:  # the recurrent form is a chunk of one token
            size = 1 if form == "recurrent" else chunk_size or default_chunk_size(D, p)
            num, den, state = _chunked(queries, keys, values, gates, state, p, size)
        if return_state:
            state = _scale_state(state, factor, -(p // 2))
        y = normalize(num, den).flatten(1, 2).transpose(1, 2).to(q.dtype)  # [B, T, H, E]
    return (y, state) if return_state else y


def read_and_fold(q, k, v, log_g, state, *, p, fold):
    """One piece of generation: queries of the newest tokens against everything so far.

    q [B, n, H, D] belong to the last n of the m tokens of k [B, m, Hkv, D], v [B, m, Hkv, E], log_g [B, m, Hkv] or
    None; state, a PowerState or None, holds the tokens before those m. Returns y [B, n, H, E] and, with `fold`, the
    PowerState of all tokens, else `state` as it was.
    """
    Hkv, dtype = k.shape[2], torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        queries = _unit_range(_by_head(q, dtype).unflatten(1, (Hkv, -1)), dim=(-1,))
        keys, values = _by_head(k, dtype), _by_head(v, dtype)
        gates = None if log_g is None else _prepare(log_g)
        scaled = keys if state is not None else _unit_range(keys, dim=(-2, -1))
        y = normalize(*_quadratic(queries, scaled, values, gates, state, p))
        if fold:
            check_state_fits(k.shape[0] * Hkv, k.shape[-1], v.shape[-1], p, dtype, k.device)
            state = _fold(state, keys, values, gates, p)
        return y.flatten(1, 2).transpose(1, 2).to(q.dtype), state


def fold_tokens(k, v, log_g, state, *, p):
    """The PowerState of `state`, or None, and tokens k [B, m, Hkv, D], v [B, m, Hkv, E], log_g [B, m, Hkv] or None."""
    dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
    with torch.autocast(k.device.type, enabled=False):
        check_state_fits(k.shape[0] * k.shape[2], k.shape[-1], v.shape[-1], p, dtype, k.device)
        gates = None if log_g is None else _prepare(log_g)
        return _fold(state, _by_head(k, dtype), _by_head(v, dtype), gates, p)


def best_form(T, D, p, kernel_dtype=None, gated=True):
    """The cheaper of "quadratic" and "chunked". kernel_dtype: of the tensors where the forms run on the kernels.

    Measured: in plain PyTorch they cross near T = 1.5 Dphi. The kernels have a cost model (kernels/cost.py) where they
    take both; where they take the quadratic form alone, the other is PyTorch's.
    """
    if kernel_dtype and (D, p) in CHUNKED_SIZES:
        return cost.best_form(T, D, p, gated)
    return "quadratic" if T <= KERNEL_GAIN.get(kernel_dtype, 1) * 1.5 * symmetric_power_dim(D, p) else "chunked"


@torch.compiler.assume_constant_result  # torch.compile asks once, and does not look inside
def kernels_take(device_type, dtype, D, E, p):
    """Whether kernels/ computes the quadratic form of these sizes; on a GPU that has to do without, a warning, once."""
    if device_type != "cuda" or dtype == torch.float64:
        return False
    reason = disabled or unsupported_reason("quadratic", dtype, D, E, p)
    if reason and reason not in _told:
        _told.add(reason)
        warnings.warn(f"power attention runs in plain PyTorch, not on its Triton kernels: {reason}", stacklevel=3)
    return not reason


_told = set()
disabled = ""  # why this process must not use the kernels; `disable_kernels` sets it


def disable_kernels(reason):
    """Have power attention run in plain PyTorch from here on in this process; "" undoes that."""
    global disabled
    disabled = reason


def default_chunk_size(D, p):
    """A power of two near Dphi / 2, at which reading a chunk and reading the state cost about the same."""
    return min(1024, max(16, 2 ** (symmetric_power_dim(D, p) // 2).bit_length() // 2))


def kernel_chunk_size(T, D, p, chunk_size=None, gated=True):
    """The kernels' chunk, a multiple of 128: `chunk_size` rounded up, or by the cost model."""
    if chunk_size is None:
        return cost.chunk_size(T, D, p, gated)
    return min(-(-chunk_size // 128), -(-T // 128)) * 128


def state_bytes(rows, D, E, p, dtype=torch.float32):
    """Bytes of a PowerState for `rows` = B * Hkv sequences and heads."""
    return rows * symmetric_power_dim(D, p) * (E + 1) * dtype.itemsize


def check_state_fits(rows, D, E, p, dtype, device):
    """Raises MemoryError, naming the bytes, where a PowerState would not fit into the device's memory."""
    if torch.compiler.is_compiling():
        return
    need, have = state_bytes(rows, D, E, p, dtype), free_memory(device)
    if need > have:
        raise MemoryError(
            f"the state of power p={p} at head dimension {D} takes {need:,} bytes ({rows} heads and sequences of "
            f"{symmetric_power_dim(D, p):,} x {E + 1}), the device has {have:,}: use a smaller head dimension or p, "
            f"or form='quadratic' without a state"
        )


def check_chunks_fit(q, k, p, chunk):
    """Raises MemoryError where what the chunked kernels allocate would not fit into the device's memory."""
    if torch.compiler.is_compiling():
        return
    from kernels.chunked import bytes_needed

    need = bytes_needed(q, k, p, chunk, backward=torch.is_grad_enabled())
    if need < SURELY_FREE:
        return
    if need > (have := free_memory(q.device)):
        T, D = q.shape[1], q.shape[3]
        raise MemoryError(
            f"the chunked form of p={p} at head dimension {D} takes {need:,} bytes for {q.shape[0]} x {T:,} tokens and "
            f"{k.shape[2]} key/value heads in chunks of {chunk:,}, the device has {have:,}: use longer chunks "
            "(chunk_size), a smaller head dimension or p, fewer sequences at once, or form='quadratic'"
        )


# ------------------------------------------------------------------------------------------------------------------
# The forms. Inside: q [B, Hkv, G, T, D] with the G = H/Hkv query heads of a group side by side, k [B, Hkv, T, D],
# v [B, Hkv, T, E]; numerators [B, Hkv, G, T, E] and denominators [B, Hkv, G, T], not yet divided.


def _quadratic(q, k, v, gates, state, p):
    """All pairs. q may hold only the last of the tokens in k. Rows go in blocks, each against the keys it may see."""
    B, Hkv, G, n, _ = q.shape
    m = k.shape[2]
    at_once = SCORES_AT_ONCE.get(q.device.type, 2**27)
    rows = max(64, n // 4)  # four blocks leave out 3/8 of the pairs, which are not causal
    # where all scores are too many, so are they to keep: a block's are computed again in the backward pass
    keep = B * Hkv * G * n * m <= at_once or not torch.is_grad_enabled()
    if B * Hkv * G * rows * m > at_once // 4:
        rows = max(16, at_once // 4 // (B * Hkv * G * m))
    parts = []
    for start in range(0, n, rows):
        end = min(start + rows, n)
        seen = m - n + end
        block = partial(_rows, p=p, first=m - n + start)
        args = q[..., start:end, :], k[:, :, :seen], v[:, :, :seen], gates and gates.span(0, seen), state
        parts.append(block(*args) if keep else checkpoint(block, *args, use_reentrant=False))
    return _join(parts)


def _rows(q, k, v, gates, state, p, first):
    """Numerators and denominators of queries first, first+1, ... over all keys up to each, and the state before."""
    n, m = q.shape[3], k.shape[2]
    w = integer_power(q @ k.transpose(-1, -2).unsqueeze(2), p)  # [B, Hkv, G, n, m]
    at = torch.arange(first, first + n, device=q.device)
    causal = at.unsqueeze(-1) >= torch.arange(m, device=q.device)
    if gates is None:
        w = w.where(causal, 0)
    else:
        w = w * _decay(gates.span(first + 1, first + n), gates.span(1, m), q.dtype, causal).unsqueeze(2)
    num, den = w @ v.unsqueeze(2), w.sum(-1)
    if state is not None:
        num_before, den_before = query_state(q, state, p)
        if gates is not None:  # of the state before, what the gates up to each query leave
            left = _decay(gates.span(first + 1, first + n), gates.span(0, 0), q.dtype).unsqueeze(2)  # [B, Hkv, 1, n, 1]
            num_before, den_before = num_before * left, den_before * left.squeeze(-1)
        num, den = num + num_before, den + den_before
    return num, den


def _chunked(q, k, v, gates, state, p, chunk_size):
    """Chunk by chunk: each reads itself and the state before it, then is folded into the state."""
    parts = []

    def chunk(q, k, v, gates, state):
        return *_rows(q, k, v, gates, state, p, 0), _fold(state, k, v, gates, p)

    T = k.shape[2]
    for start in range(0, T, chunk_size):
        end = min(start + chunk_size, T)
        args = q[..., start:end, :], k[:, :, start:end], v[:, :, start:end], gates and gates.span(start, end), state
        # only the states between chunks are kept for the backward pass, not the features
        run = partial(checkpoint, chunk, use_reentrant=False) if torch.is_grad_enabled() else chunk
        *part, state = run(*args)
        parts.append(part)
    return *_join(parts), state


def query_state(q, state, p):
    """phi(q) . S and phi(q) . z for q [B, Hkv, G, n, D]: [B, Hkv, G, n, E] and [B, Hkv, G, n]."""
    parts = []
    for x in q.split(_tokens_at_once(q, p), dim=3):
        phi = symmetric_power_embedding(x, p)
        parts.append((phi @ state.S.unsqueeze(2), (phi @ state.z[:, :, None, :, None]).squeeze(-1)))
    return _join(parts)


def update_state(k, v, p):
    """phi(k)^T v [B, Hkv, Dphi, E], for k [B, Hkv, n, D], v [B, Hkv, n, E]."""
    S, size = 0, _tokens_at_once(k, p)
    for x, value in zip(k.split(size, dim=2), v.split(size, dim=2)):
        S = S + symmetric_power_embedding(x, p).transpose(-1, -2) @ value
    return S


def discumsum(u, g, first=None, *, reverse=False):
    """The discounted cumulative sum over chunks: what each chunk gave -> the state before each chunk, and the last.

    u [.., n, F], g [.., n] the whole gate of each chunk, first [.., F] or None: s_0 = first, s_{i+1} = g_i s_i + u_i.
    Returns s_0 .. s_{n-1} [.., n, F] and s_n; with reverse from the end, the state after each chunk.
    """
    state, states = torch.zeros_like(u[..., 0, :]) if first is None else first, []
    n = u.shape[-2]
    for i in reversed(range(n)) if reverse else range(n):
        states.append(state)
        state = g[..., i, None] * state + u[..., i, :]
    return torch.stack(states[::-1] if reverse else states, dim=-2), state


def _fold(state, k, v, gates, p):
    """The state after these tokens: what was, decayed by all their gates, plus each token decayed by those after it."""
    v = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)  # z is S with a one for a value
    if gates is not None:
        n = v.shape[2]
        v = v * _decay(gates.span(n, n), gates.span(1, n), v.dtype).transpose(-1, -2)
    Sz = update_state(k, v, p)
    S, z = Sz[..., :-1], Sz[..., -1]
    if state is not None:
        left = 1 if gates is None else _decay(gates.span(n, n), gates.span(0, 0), v.dtype)  # [B, Hkv, 1, 1]
        S, z = S + left * state.S, (z.unsqueeze(-1) + left * state.z.unsqueeze(-1)).squeeze(-1)
    return PowerState(S, z)


def normalize(num, den):
    """num / den, zeros where den is zero (no weight at all), and no NaN in the gradient there either."""
    empty = ~(den > 0)
    return (num / den.masked_fill(empty, 1).unsqueeze(-1)).masked_fill(empty.unsqueeze(-1), 0)


def integer_power(x, p):
    """x^p by repeated squaring: exact to a few ulp, no logarithm."""
    result = None
    while p:
        if p & 1:
            result = x if result is None else result * x
        p >>= 1
        x = x * x if p else x
    return result


# ------------------------------------------------------------------------------------------------------------------
# Gates


def _prepare(log_g):
    """log_g [B, T, Hkv] -> Gates of [B, Hkv, T+1]."""
    log_g = torch.nn.functional.pad(log_g.transpose(1, 2), (1, 0))
    reset = log_g == float("-inf")
    return Gates(log_g.masked_fill(reset, 0).double().cumsum(-1), reset.cumsum(-1))


def _decay(to, since, dtype, mask=None):
    """exp of the log_g between, [B, Hkv, n, m] for n entries `to` and m entries `since`; zero across a reset."""
    same = to.resets.unsqueeze(-1) == since.resets.unsqueeze(-2)
    between = (to.total.unsqueeze(-1) - since.total.unsqueeze(-2)).to(dtype)
    return between.masked_fill(~(same if mask is None else same & mask), float("-inf")).exp()


# ------------------------------------------------------------------------------------------------------------------
# Details


def _as_autocast_says(*tensors):
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _by_head(x, dtype):
    return x.transpose(1, 2).to(dtype)  # [B, T, H, D] -> [B, H, T, D]


def _unit_range(x, dim):
    """x scaled by a power of two so that its largest entry over `dim` is in [1, 2)."""
    return x * _unit_factor(x, dim)


@torch.no_grad()
def _unit_factor(x, dim, at_least=None):
    """The power of two that brings the largest entry of x over `dim`, or `at_least`, into [1, 2)."""
    largest = x.abs().amax(dim, keepdim=True)
    if at_least is not None:
        largest = largest.maximum(at_least.to(x.dtype))
    return torch.exp2(-largest.clamp(torch.finfo(x.dtype).tiny, 2.0**126).log2().floor())


def _scale_state(state, factor, half):
    """The state of keys that are scaled by factor [B, Hkv, 1, 1]: times factor^p, in two halves for the range."""
    if state is None:
        return None
    by = factor**half
    return PowerState(state.S * by * by, state.z * by.squeeze(-1) * by.squeeze(-1))


def _join(parts):
    """[(numerators, denominators), ...] of consecutive rows -> numerators, denominators."""
    return tuple(torch.cat(x, dim=3) for x in zip(*parts))


def _tokens_at_once(x, p):
    rows = x.shape[:-2].numel()
    return max(1, FEATURES_AT_ONCE // (rows * symmetric_power_dim(x.shape[-1], p)))


def free_memory(device):
    """Bytes that could still be allocated: free memory of a GPU (torch's own cache counted as free), or all RAM."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats_as_nested_dict(device)  # memory_reserved() takes 0.2 ms to flatten it
        now = lambda name: stats[name]["all"]["current"] if stats else 0  # nothing before the first tensor
        return torch.cuda.mem_get_info(device)[0] + now("reserved_bytes") - now("allocated_bytes")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check(q, k, v, log_g, p, scale, form, chunk_size, initial_state):
    if not isinstance(p, int) or p < 2 or p % 2:
        raise ValueError(f"p must be a positive even integer, got {p!r}")
    if scale is not None and not 0 < abs(scale) < math.inf:
        raise ValueError(f"scale must be finite and not zero, got {scale!r}")
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size must be a positive integer, got {chunk_size!r}")
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k, v must be [B, T, H, D], got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}")
    (B, T, H, D), Hkv = q.shape, k.shape[2]
    if k.shape != (B, T, Hkv, D) or v.shape[:3] != (B, T, Hkv) or T < 1:
        raise ValueError(
            f"q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,E] do not fit: {[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
        )
    if H % Hkv:
        raise ValueError(f"the query heads must be a multiple of the key/value heads, got {H} and {Hkv}")
    if not (q.dtype == k.dtype == v.dtype) or not q.is_floating_point():
        raise ValueError(f"q, k, v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if log_g is not None and log_g.shape != (B, T, Hkv):
        raise ValueError(f"log_g must be [B, T, Hkv] = {[B, T, Hkv]}, got {[*log_g.shape]}")
    if initial_state is not None:
        want = (B, Hkv, symmetric_power_dim(D, p))
        S, z = initial_state
        if S.shape != (*want, v.shape[-1]) or z.shape != want:
            raise ValueError(
                f"initial_state must be S {[*want, v.shape[-1]]}, z {[*want]}, got {[*S.shape]}, {[*z.shape]}"
            )
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        if not S.dtype == z.dtype == dtype:
            raise ValueError(f"initial_state must be {dtype} for q of {q.dtype}, got {S.dtype}, {z.dtype}")
