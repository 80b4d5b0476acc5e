"""Power attention: the exponential of softmax attention replaced by an even power.

    w_ij  = exp(sum of log_g over m = j+1..i) * (scale * q_i . k_j)^p                   for j <= i
    y_i   = sum_j w_ij v_j / sum_j w_ij                                                 zeros where the sum is zero

Because (q . k)^p = phi(q) . phi(k) (embedding.py), one function has three forms:

    quadratic   every pair (i, j), like softmax attention                               T^2 D
    chunked     pairs inside a chunk, and a state that carries what came before         T (chunk D + Dphi E)
    recurrent   the state and the token itself: a chunk of one                          T Dphi E

with the state S = sum_j exp(sum of log_g after j) phi(k_j) v_j^T, and z the same with 1 in v's place. From "Symmetric
Power Transformers" (Buckman, Gelada, Zhang, 2024), gates from "Conformal Transformations for Symmetric Power
Transformers" (Kumar, Buckman, Gelada, Zhang, 2025).

This file checks the arguments, asks dispatch.py for a plan and calls what the plan says: forms.py, which is plain
PyTorch on any device, or the Triton kernels. sequences.py has what packed sequences need. naive.py is the specification
of all of it.
"""

import math

import torch

from .embedding import symmetric_power_dim
from .gates import reset_gates
from .operator import backend, forms
from .operator.arguments import (
    as_state,
    cast_from_float16,
    cast_to_autocast_dtype,
    check_cu_seqlens,
    check_form,
    check_gates,
    check_power,
    check_state,
    check_tensors,
    warn_of_heads_first,
)
from .operator.dispatch import Problem, plan
from .operator.forms import PowerState, accumulation_dtype
from .operator.memory import check_chunks_fit, check_state_fits
from .operator.sequences import read_lengths, sequence_lengths, sequence_starts, split_tokens, typical_length


@warn_of_heads_first
def power_attention(
    q, k, v, log_g=None, *, p=2, scale=None, form="auto", chunk_size=None, initial_state=None, return_state=False,
    cu_seqlens=None,
):  # fmt: skip
    """Compute causal power attention.

    q [B, n, H, D], k [B, T, Hkv, D], v [B, T, Hkv, E]: float64, float32, float16 or bfloat16, any strides, on one
    device, which need not be the current GPU; n is T, or less if only the last n tokens have queries; query head h
    reads key/value head h // (H / Hkv). log_g [B, T, Hkv]: natural log of the gate in front of each token, <= 0,
    -inf forgets all before it; float32 (float64 when q is). p: 2, 4, 6 or 8. scale: default 1/sqrt(D), not
    zero; it cancels in y and is no part of the state, so the forms leave it out. form: "quadratic", "chunked",
    "recurrent" or "auto", the cheapest for the shape. chunk_size: tokens a chunk, for the chunked form. initial_state:
    PowerState of the tokens before. Under autocast q, k and v are first cast to its dtype, as for SDPA.

    NaN or infinity in an input gives NaN in the rows of y that see it, perhaps behind a log_g of -inf too, and changes
    no bit of earlier rows. (On the kernels, one in v gives NaN or infinity in its own column alone, and also in the
    rows of its tile, up to 127 before it.) Finite inputs may be of any size in PyTorch, as far as states hold the p-th
    powers of keys; on the kernels q may be, while k and q . k are from 1e-8 to 1e8. float16 tensors are computed as
    float32; y and gradients come back as float16 (heads above 128 then in PyTorch).

    cu_seqlens [N + 1], int32 or int64, on q's device: B is 1, and the tokens belong to N packed sequences, as for
    FlashAttention; sequence i has the tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1, perhaps none, and sees no other.
    A state, initial or returned, then has N sequences, which are computed one by one. The first call with a cu_seqlens
    waits for the GPU, to read it. Without states its values are neither read nor checked under torch.compile and in a
    CUDA graph; with states they break the graph of the first and cannot be captured in the second.

    Returns y [B, n, H, E] in q's dtype, or (y, PowerState) with return_state. Differentiable in every tensor (on
    the GPU kernels once: NotImplementedError for a second derivative), also by torch.func, in PyTorch.
    Raises ValueError for arguments that do not fit, on a CPU also for a log_g above 0, and MemoryError for a state that
    does not fit. Warns once of more heads than tokens, unless there is one token: SDPA's [B, H, T, D] looks like that.
    """
    q, k, v = cast_to_autocast_dtype(q, k, v)
    initial_state = as_state(initial_state, PowerState)
    _check(q, k, v, log_g, p, scale, initial_state)
    check_form(form, chunk_size)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q, k)
    if initial_state is not None:
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        rows = N, k.shape[2], symmetric_power_dim(k.shape[3], p)
        check_state(initial_state, q, ((*rows, v.shape[3]), rows))
    dtype, tensors = q.dtype, (*cast_from_float16(q, k, v), log_g)
    options = dict(p=p, form=form, chunk_size=chunk_size, initial_state=initial_state, return_state=return_state)
    if cu_seqlens is None:
        y, state = _attend_to_batch(tensors, **options)
    else:
        y, state = _attend_to_sequences(tensors, cu_seqlens, **options)
    return (y.to(dtype), state) if return_state else y.to(dtype)


attend_causally = power_attention.__wrapped__  # for layers: few tokens are no reason to warn


def power_attention_sums(q, k, v, log_g=None, *, p=2, scale=None):
    """Compute the numerators and denominators of power attention without dividing, in the quadratic form.

    num_i = sum_j w_ij v_j [B, n, H, E] and den_i = sum_j w_ij [B, n, H], float32 (float64 for float64 q), so that
    power_attention is num / den, and sums over other tokens can be added first. Here `scale` counts. The arguments
    and errors are as for `power_attention`. The sums must be inside the range of their dtype.
    """
    q, k, v = cast_to_autocast_dtype(q, k, v)
    _check(q, k, v, log_g, p, scale)
    q, k, v = cast_from_float16(q, k, v)
    (*_, D), T, E = q.shape, k.shape[1], v.shape[3]
    scale = D**-0.5 if scale is None else scale
    chosen = plan(Problem(T, D, E, p, q.dtype, q.device, log_g is not None), "quadratic", sums=True)
    if not chosen.on_kernels or q.shape[0] == 0:
        return forms.sums(q, k, v, log_g, p=p, scale=scale)
    num, den = backend.operators().quadratic_sums(q, k, v, _for_kernels(log_g), p=p, scale=scale)
    return num, den.transpose(1, 2)


def _check(q, k, v, log_g, p, scale, initial_state=None):
    """Raise ValueError, with the value and what would be right, for arguments that do not fit each other."""
    check_power(p)
    if scale is not None and not (isinstance(scale, (int, float)) and 0 < abs(scale) < math.inf):
        raise ValueError(f"scale must be finite and not zero, got {scale!r}")
    check_tensors(q, k, v, log_g=log_g, **(initial_state._asdict() if initial_state else {}))
    check_gates(log_g, k)


def _for_kernels(log_g):
    """Return log_g in the dtype that kernels take."""
    return None if log_g is None else log_g.float()


def _attend_to_batch(tensors, *, p, form, chunk_size, initial_state, return_state):
    """Return y and the PowerState after all tokens, or None, for tensors q, k, v and log_g without cu_seqlens."""
    q, k, v, log_g = tensors
    (B, n, _, D), (T, Hkv, E), has_state = q.shape, v.shape[1:], initial_state is not None
    problem, queries = Problem(T, D, E, p, q.dtype, q.device, log_g is not None), None if n == T else n
    chosen = plan(problem, form, chunk_size, initial_state=has_state, return_state=return_state, queries=queries)
    if has_state or return_state or (chosen.form != "quadratic" and not chosen.on_kernels):
        check_state_fits(B * Hkv, D, E, p, accumulation_dtype(q), q.device)
    return _attend(tensors, chosen, p=p, initial_state=initial_state, return_state=return_state)


def _attend(tensors, chosen, *, p, initial_state=None, return_state=False):
    """Return y and the PowerState after all tokens, or None, computed as the Plan `chosen` says.

    tensors are q, k, v and log_g.
    """
    q, k, v, log_g = tensors
    (B, n), T = q.shape[:2], k.shape[1]
    if not chosen.on_kernels or B == 0:  # a kernel cannot be launched on nothing
        sizes = dict(p=p, chunk_size=chosen.chunk_size)
        return forms.attend(q, k, v, log_g, **sizes, initial_state=initial_state, return_state=return_state)
    operators, gates = backend.operators(), _for_kernels(log_g)
    if chosen.form == "chunked":
        check_chunks_fit(q if n == T else k, k, v, p, chosen.chunk_size)
        sizes, state, tokens = dict(p=p, chunk=chosen.chunk_size), initial_state or (None, None), (k, v, gates)
        if n < T:  # the state of the tokens without a query comes first
            earlier, tokens = split_tokens(tokens, (T - n, n))
            state = operators.chunked_state(*earlier, *state, **sizes)
        y, S, z = operators.chunked_attention(q, *tokens, *state, **sizes, final=return_state)
        return y, PowerState(S, z)
    if initial_state is None:
        y = operators.quadratic_attention(q, k, v, gates, p=p)
    else:
        y = forms.attend_after_state(operators.quadratic_sums, q, k, v, gates, initial_state, p=p)
    return y, forms.flush(k, v, log_g, initial_state, p=p) if return_state else None


# ---- packed sequences


def _attend_to_sequences(tensors, cu_seqlens, *, p, form, chunk_size, initial_state, return_state):
    """Return y and the PowerState of each sequence, or None, as `power_attention` does with cu_seqlens.

    tensors are q, k, v and log_g. sequences.py describes the two ways.
    """
    q, k, v, log_g = tensors
    (T, Hkv, E), D, N = v.shape[1:], q.shape[3], cu_seqlens.shape[0] - 1
    lengths = sequence_lengths(cu_seqlens, T)
    if initial_state is not None or return_state:
        check_state_fits(N * Hkv, D, E, p, accumulation_dtype(q), q.device)
    else:
        problem = Problem(typical_length(lengths, T, N), D, E, p, q.dtype, q.device, gated=True)  # resets are gates
        chosen = plan(problem, form, chunk_size)
        chosen = plan(problem._replace(T=T), chosen.form, chunk_size)
        if chosen.on_kernels or lengths is None:
            return _attend((q, k, v, reset_gates(sequence_starts(cu_seqlens, T), log_g, k)), chosen, p=p)
    options = dict(form=form, chunk_size=chunk_size, initial_state=initial_state, return_state=return_state)
    return _attend_one_by_one(tensors, lengths or read_lengths(cu_seqlens), p=p, **options)


def _attend_one_by_one(tensors, lengths, *, p, initial_state, return_state, **options):
    """Return what `_attend_to_sequences` does for sequences of these lengths, by computing each of them alone."""
    outputs, final_states, states = [], [], [None] * len(lengths)
    if initial_state is not None:
        states = map(PowerState, *(x.split(1) for x in initial_state))
    for sequence, state in zip(split_tokens(tensors, lengths), states):
        if sequence[0].shape[1]:
            y, state = _attend_to_batch(sequence, p=p, initial_state=state, return_state=return_state, **options)
            outputs.append(y)
        elif return_state and state is None:
            state = forms.empty_state(*sequence[1:3], p)
        final_states.append(state)
    state = PowerState(*map(torch.cat, zip(*final_states))) if return_state else None
    return torch.cat(outputs, dim=1), state
