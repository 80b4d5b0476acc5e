"""The steps of the chunked form, each as a separate torch operator.

    S, z = update_state(k, v, log_g, p=2, chunk=1024)           # the sums over every chunk
    S, z, S_last, z_last = discumsum(S, z, log_G)               # the states before every chunk, and after the last
    num, den = query_state(q, S, z, log_g, p=2, chunk=1024)     # what every query reads from the state before its chunk

log_G is the sum of log_g over each chunk. With the sums over the pairs inside each chunk (`operators.quadratic_sums`),
added before dividing, they are power attention. `operators.chunked_attention` does all of it in one operator and stores
states in half precision between the kernels; here states are float32, with features in the order of
`attention.embedding.symmetric_power_embedding`, so that every step can be tested, timed and used alone.

operators.py is the door to these functions, and describes the order in which an operator is written.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from .arguments import (
    check,
    check_chunks,
    check_device,
    check_pair,
    check_rows,
    narrow_state,
    to_width,
    widen_state,
)
from .chunked.discumsum import discumsum as carry_states
from .chunked.passes import Sizes, from_canonical, to_canonical
from .chunked.prepare import prepare
from .chunked.query_gradient import query_gradient
from .chunked.query_state import query_state as read_states
from .chunked.update_state import update_state as sum_chunks
from .common import SQUARE_TOP, SUM_TOP, TOP, device_guard
from .gates import chunk_gates
from .layout import TILE, symmetric_power_dim
from .transforms import asked, empty_like, keep, transformable, transformable_once

# ---- update state


def update_state(k, v, log_g=None, *, p, chunk):
    """Return for each of the n = ceil(T / chunk) chunks the sums over its tokens of phi(k_t) v_t^T and of phi(k_t).

    They are S [B, n, Hkv, Dphi, E] and z [B, n, Hkv, Dphi], both float32; each token is decayed by the gates after it
    inside the chunk.
    k [B, T, Hkv, D], v [B, T, Hkv, E] bfloat16, float16 or float32, log_g [B, T, Hkv] float32 (natural logarithm, -inf:
    a reset) or None, any strides. D, E, p and chunk are as in `operators.chunked_attention`. Differentiable in k, v and
    log_g. Raises ValueError for arguments that do not fit.
    """
    check_rows(k=k, v=v)
    D, E = k.shape[3], v.shape[3]
    check("v", v, (*k.shape[:3], E), k.dtype)
    check_chunks(k.dtype, D, E, p, chunk)
    check("log_g", log_g, k.shape[:3])
    check_device(k, v=v, log_g=log_g)
    return narrow_state(*_update_state(*to_width("chunked", k, v), log_g, p, chunk), D, E, p)


@torch.library.custom_op("sympow::update_state", mutates_args=())
def _update_state_operator(k: Tensor, v: Tensor, log_g: Tensor | None, p: int, chunk: int) -> tuple[Tensor, Tensor]:
    s = Sizes(k, k, p, chunk)
    with device_guard(k.device):
        decay = chunk_gates(log_g, s)[1]
        return _canonical_sums(s, s.HKV, prepare(s, k, v, decay=decay))


@_update_state_operator.register_fake
def _(k, v, log_g, p, chunk):
    B, T, HKV, D = k.shape
    return _empty_states(k, B, -(-T // chunk), HKV, symmetric_power_dim(D, p), D)


@torch.library.custom_op("sympow::update_state_backward", mutates_args=())
def _update_state_backward_operator(
    dS: Tensor, dz: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, p: int, chunk: int, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    s = Sizes(k, k, p, chunk)
    needs_k, needs_v, needs_g = needs
    dk, dv, dlog_g = empty_like(k).zero_(), empty_like(v).zero_(), None
    with device_guard(k.device):
        decay = chunk_gates(log_g, s)[1]
        keys = prepare(s, k, v, decay=decay)
        states, unit, Z = _kernel_states(s, dS, dz)
        if needs_k or needs_g:
            given = query_gradient(s, keys, states, unit, -1, dk, k, Z, decay, needs_g)
            dlog_g = _gate_gradient(s, given, log_g, after=True) if needs_g else None
        if needs_v:
            read_states(s, keys, states, unit, -1, out=dv)
        return asked((dk, dv, dlog_g), needs)


@_update_state_backward_operator.register_fake
def _(dS, dz, k, v, log_g, p, chunk, needs):
    return asked((empty_like(k), empty_like(v), _empty_gates(dS, log_g)), needs)


def _save_inputs(ctx, inputs, output):
    *tensors, ctx.p, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_update_state(ctx, dS, dz):
    needs = [*ctx.needs_input_grad[:3]]
    return *keep(_update_state_backward(dS, dz, *ctx.saved_tensors, ctx.p, ctx.chunk, needs), needs), None, None


_update_state_backward = transformable_once(_update_state_backward_operator)
_update_state = transformable(_update_state_operator, _save_inputs, _differentiate_update_state)

# ---- discumsum


def discumsum(S, z, log_G=None, S0=None, z0=None):
    """Return the discounted cumulative sum over chunks, s_{i+1} = exp(log_G_i) s_i + u_i.

    S [B, n, Hkv, Dphi, D], z [B, n, Hkv, Dphi]: u, the sums over each chunk. log_G [B, n, Hkv]: natural logarithm of
    each chunk's whole gate, -inf for zero, or None for no decay. S0 [B, Hkv, Dphi, D], z0 [B, Hkv, Dphi]: s_0, the
    state before the first chunk, or None for zero. All float32, any strides. Returns (S, z, S_last, z_last): the states
    before each chunk, shaped like u, and the one after the last. Differentiable in every tensor. Raises ValueError for
    arguments that do not fit.
    """
    if S.ndim != 5 or S.shape[1] < 1:
        raise ValueError(f"S must be [B, n, Hkv, Dphi, D] with at least one chunk, got {[*S.shape]}")
    check_pair("S0", S0, "z0", z0)
    without_n = S.shape[:1] + S.shape[2:]
    check("S", S, S.shape)
    check("z", z, S.shape[:4])
    check("log_G", log_G, S.shape[:3])
    check("S0", S0, without_n)
    check("z0", z0, without_n[:3])
    check_device(S, z=z, log_G=log_G, S0=S0, z0=z0)
    return _discumsum(S, z, log_G, S0, z0)


@torch.library.custom_op("sympow::discumsum", mutates_args=())
def _discumsum_operator(
    S: Tensor, z: Tensor, log_G: Tensor | None, S0: Tensor | None, z0: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    S, S_last, _ = _scan(S, log_G, S0)
    z, z_last, _ = _scan(z, log_G, z0)
    return S, z, S_last, z_last


@_discumsum_operator.register_fake
def _(S, z, log_G, S0, z0):
    B, n, HKV, Dphi, D = S.shape
    return *_empty_states(S, *S.shape), S.new_empty(B, HKV, Dphi, D), S.new_empty(B, HKV, Dphi)


@torch.library.custom_op("sympow::discumsum_backward", mutates_args=())
def _discumsum_backward_operator(
    dS: Tensor, dz: Tensor, dS_last: Tensor, dz_last: Tensor, S: Tensor | None, z: Tensor | None, log_G: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dS, dS0, carried = _scan(dS, log_G, dS_last, S, reverse=True)
    dz, dz0, carried_z = _scan(dz, log_G, dz_last, z, reverse=True)
    dlog_G = _empty_gates(dS, log_G) if S is None else (carried + carried_z).float().contiguous()
    return dS, dz, dlog_G, dS0, dz0


@_discumsum_backward_operator.register_fake
def _(dS, dz, dS_last, dz_last, S, z, log_G):
    dlog_G = _empty_gates(dS, None if S is None else log_G)
    return *_empty_states(dS, *dS.shape), dlog_G, empty_like(dS_last), empty_like(dz_last)


def _save_discumsum(ctx, inputs, output):
    log_G = inputs[2]
    S, z = (None, None) if log_G is None else output[:2]
    ctx.save_for_backward(S, z, log_G)


def _differentiate_discumsum(ctx, *grads):
    S, z, log_G = ctx.saved_tensors
    S, z = (S, z) if ctx.needs_input_grad[2] else (None, None)
    return keep(_discumsum_backward(*grads, S, z, log_G), ctx.needs_input_grad)


_discumsum_backward = transformable_once(_discumsum_backward_operator)
_discumsum = transformable(_discumsum_operator, _save_discumsum, _differentiate_discumsum)


def _scan(u, log_G, first, other=None, reverse=False):
    """Return (states shaped like u [B, n, Hkv, ...], the last state [B, Hkv, ...], carried), as new tensors.

    carried [B, n, Hkv] float64 is the sum of states times `other` times the gate, for the gates' gradient, or None
    without `other`.
    """
    B, n, HKV = u.shape[:3]
    size = u[0, 0, 0].numel()
    flat = lambda x, *shape: x.reshape(B * HKV, *shape).contiguous()  # a reshaped view may have strides of 0
    padded = lambda x: pad(x, (0, -size % 64)) if size % 64 else x
    rows = lambda x: padded(flat(x.transpose(1, 2), n, size))
    whole = None if log_G is None else flat(log_G.exp().transpose(1, 2), n)
    initial = None if first is None else padded(flat(first, size))
    other = None if other is None else rows(other)
    x = rows(u)  # becomes the states
    x = x.clone() if x.data_ptr() == u.data_ptr() else x
    with device_guard(u.device):
        _, last, carried = carry_states(None, x, None, whole, initial, other, None, reverse, final=True)
    if carried is not None:
        carried = carried.double().sum(2).view(B, HKV, n).transpose(1, 2)
    x, last = x[..., :size].contiguous(), last[:, :size].contiguous()
    return x.view(B, HKV, n, *u.shape[3:]).transpose(1, 2), last.view(B, HKV, *u.shape[3:]), carried


# ---- query state


def query_state(q, S, z, log_g=None, *, p, chunk):
    """Return num [B, T, H, E] = phi(q_t) S and den [B, T, H] = phi(q_t) . z, both float32, not divided and not scaled.

    S and z are the state before the chunk of t, decayed by the gates from the chunk's first token to t, t included.
    q [B, T, H, D] bfloat16, float16 or float32, S [B, n, Hkv, Dphi, E], z [B, n, Hkv, Dphi] float32 with
    n = ceil(T / chunk), log_g [B, T, Hkv] float32 or None, any strides; query head h reads the states of head
    h // (H / Hkv). D, E, p and chunk are as in `operators.chunked_attention`. Differentiable in every tensor. Unless q
    is float32, the kernels read states in float16; a power of two for each chunk and head brings them into its range.
    Raises ValueError for arguments that do not fit.
    """
    check_rows(q=q)
    B, T, H, D = q.shape
    if S.ndim != 5 or S.shape[2] < 1 or H % S.shape[2]:
        raise ValueError(f"S must be [B, n, Hkv, Dphi, E] with Hkv a divisor of q's {H} heads, got {[*S.shape]}")
    E = S.shape[4]
    check_chunks(q.dtype, D, E, p, chunk)
    want = B, -(-T // chunk), S.shape[2], symmetric_power_dim(D, p)
    check("S", S, (*want, E))
    check("z", z, want)
    check("log_g", log_g, (B, T, S.shape[2]))
    check_device(q, S=S, z=z, log_g=log_g)
    q = to_width("chunked", q, S)[0]
    num, den = _query_state(q, *widen_state(S, z, D, q.shape[3], p), log_g, p, chunk)
    return num[..., :E], den


@torch.library.custom_op("sympow::query_state", mutates_args=())
def _query_state_operator(
    q: Tensor, S: Tensor, z: Tensor, log_g: Tensor | None, p: int, chunk: int
) -> tuple[Tensor, Tensor]:
    s = Sizes(q, S, p, chunk)  # heads are in S where they are in k
    with device_guard(q.device):
        decay = chunk_gates(log_g, s)[0]
        states, unit, Z = _kernel_states(s, S, z)
        queries = prepare(s, q, decay=decay, Z=Z)
        num, den = read_states(s, queries, states, unit, -1)
        scale = _two_to(p * _exponent(q.float().abs().amax(3)).clamp(-30, 30))  # rows were brought to [1, 2)
        return num.mul_(scale.unsqueeze(3)), (scale * den[..., : s.T].transpose(1, 2)).contiguous()


@_query_state_operator.register_fake
def _(q, S, z, log_g, p, chunk):
    return S.new_empty(q.shape), S.new_empty(q.shape[:3])


@torch.library.custom_op("sympow::query_state_backward", mutates_args=())
def _query_state_backward_operator(
    dnum: Tensor, dden: Tensor, q: Tensor, S: Tensor, z: Tensor, log_g: Tensor | None, p: int, chunk: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    s = Sizes(q, S, p, chunk)
    needs_q, needs_S, needs_z, needs_g = needs
    dq, dS, dz, dlog_g = empty_like(q).zero_(), None, None, None
    with device_guard(q.device):
        decay = chunk_gates(log_g, s)[0]
        queries = prepare(s, q, dnum, decay=decay, one=dden.transpose(1, 2).contiguous())
        if needs_S or needs_z:
            dS, dz = _canonical_sums(s, s.H, queries)
        if needs_q or needs_g:
            states, unit, Z = _kernel_states(s, S, z)
            read = query_gradient(s, queries, states, unit, -1, dq, q, Z, queries["weight"], needs_g)
            dlog_g = _gate_gradient(s, read, log_g, after=False) if needs_g else None
        return asked((dq, dS, dz, dlog_g), needs)


@_query_state_backward_operator.register_fake
def _(dnum, dden, q, S, z, log_g, p, chunk, needs):
    return asked((empty_like(q), *_empty_states(S, *S.shape), _empty_gates(S, log_g)), needs)


def _differentiate_query_state(ctx, dnum, dden):
    needs = [*ctx.needs_input_grad[:4]]
    return *keep(_query_state_backward(dnum, dden, *ctx.saved_tensors, ctx.p, ctx.chunk, needs), needs), None, None


_query_state_backward = transformable_once(_query_state_backward_operator)
_query_state = transformable(_query_state_operator, _save_inputs, _differentiate_query_state)

# ---- between the operators' states and the kernels'


def _canonical_sums(s, rows, prepared):
    """Return the sums over each chunk, S [B, n, Hkv, Dphi, D] and z, of `rows` heads that `prepare` has prepared."""
    S = sum_chunks(s, rows, prepared).float().mul_((s.most / SUM_TOP / prepared["unit_v"]).unsqueeze(2))
    Z = prepared["z"].flatten(0, 1) if s.p == 2 else None
    S, z = to_canonical(S.flatten(0, 1), Z, s.B * s.HKV, s.D, s.p)  # chunks take the place of heads
    return tuple(x.unflatten(0, (s.B, s.HKV)).transpose(1, 2) for x in (S, z))


def _kernel_states(s, S, z):
    """Return S [B, n, Hkv, Dphi, D] and z as the kernels read them: (states [B * Hkv, n, F], their units, Z)."""
    S, Z = from_canonical(*(x.transpose(1, 2).flatten(0, 1) for x in (S, z)), s.p)
    if s.p == 4:
        of_S, of_Z = s.layout.orders.split((s.layout.tiles * TILE, s.layout.M**2))
        S *= torch.cat((of_S.repeat_interleave(s.D), of_Z))
    top = TOP if s.p == 2 else SQUARE_TOP
    unit = _two_to(top - _exponent(S.abs().amax(1)).clamp(-100, 100))
    S = (S * unit.unsqueeze(1)).to(s.half)
    return S.view(-1, s.chunks, s.F), unit, Z


def _exponent(x):
    """Return n with 2^n <= x < 2^(n+1), -1 for zero."""
    return x.frexp().exponent - 1


def _two_to(n):
    """Return 2^n for int32 n, exactly."""
    return ((n + 127) << 23).view(torch.float32)


def _gate_gradient(s, x, log_g, after):
    """Return d log_g [B, T, Hkv] from x [B * heads, T padded], x . dx / p of keys (`after`) or of queries.

    A gate decays what the tokens before it in its chunk give, and what its own token and those after it read.
    """
    x = x[:, : s.T].view(s.B, s.HKV, -1, s.T).sum(2, dtype=torch.float64)
    x = pad(x, (0, -s.T % s.chunk)).unflatten(2, (s.chunks, s.chunk))
    before = x.cumsum(3) - x
    d = before if after else x.sum(3, keepdim=True) - before
    d = d.flatten(2)[..., : s.T].transpose(1, 2).masked_fill(log_g == float("-inf"), 0)
    return d.float().contiguous()


def _empty_states(like, B, n, HKV, Dphi, D):
    """Return empty S [B, n, Hkv, Dphi, D] and z, with the strides that the operators' results have."""
    new = lambda *shape: like.new_empty(B, HKV, n, *shape, dtype=torch.float32).transpose(1, 2)
    return new(Dphi, D), new(Dphi)


def _empty_gates(like, log_g):
    """Return an empty gradient of log_g, without entries if there are no gates: operators must return tensors."""
    return like.new_empty(0 if log_g is None else log_g.shape, dtype=torch.float32)


def create_inputs(
    B=1, T=1024, H=4, Hkv=2, D=32, *, p=2, chunk=256, gated=True, dtype=torch.bfloat16, device="cuda", seed=0
):
    """Return random arguments for each step, {"update_state": {...}, "discumsum": {...}, "query_state": {...}}.

    Use them as update_state(**inputs["update_state"]). All tensors require gradients; q, k and v are of `dtype`, the
    rest float32. Without `gated`, log_g and log_G are None.
    """
    generator = torch.Generator(device).manual_seed(seed)
    n, Dphi = -(-T // chunk), symmetric_power_dim(D, p)

    def make(*shape, dtype=torch.float32, of=lambda x: x):
        return of(torch.randn(shape, generator=generator, device=device)).to(dtype).requires_grad_()

    def gates(*shape, mean):
        return make(*shape, of=lambda x: logsigmoid(x + mean)) if gated else None

    states = lambda: dict(S=make(B, n, Hkv, Dphi, D), z=make(B, n, Hkv, Dphi))
    sizes = dict(p=p, chunk=chunk)
    k, v, q = (make(B, T, heads, D, dtype=dtype) for heads in (Hkv, Hkv, H))
    initial = dict(S0=make(B, Hkv, Dphi, D), z0=make(B, Hkv, Dphi))
    return {
        "update_state": dict(k=k, v=v, log_g=gates(B, T, Hkv, mean=6.9), **sizes),
        "discumsum": dict(**states(), log_G=gates(B, n, Hkv, mean=1.0), **initial),
        "query_state": dict(q=q, **states(), log_g=gates(B, T, Hkv, mean=6.9), **sizes),
    }
