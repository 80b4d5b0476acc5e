"""The chunked form of power attention in Triton: cost linear in the context, for p = 2 and 4.

    y_t = (num_t + sum over the chunk of w_ts v_s) / (den_t + sum over the chunk of w_ts)
    num_t = decay phi(q_t) S,   den_t = decay phi(q_t) . z,   S = sum of decay phi(k_s) v_s^T over all earlier chunks

    tokens     |   chunk 0   |   chunk 1   |   chunk 2   |    inside a chunk: quadratic/passes.py
    read       ^ S_0         ^ S_1         ^ S_2         |    by every query of the chunk: query_state.py
    carry      S_0 --------> S_1 --------> S_2 --------> S_3  from the initial to the final state: discumsum.py
    add               U_0 ---^      U_1 ---^      U_2 ---^    what a chunk's keys and values give: update_state.py

z is not stored: den_t is xt_t^T Z xt_t, with Z = sum of decay k_s k_s^T (p = 4: of products of two entries). prepare.py
brings rows to one magnitude first, gates.py makes the decays. The backward pass is the same steps: dS by `update_state`
of q and dy and a `discumsum` from the end, dq and dk by `query_gradient`, dv by `query_state` of keys on dS, dlog_g by
gates.py.

    name          shape                   dtype      saved for the backward pass
    l             [B, H, T padded]        float32    yes
    S             [B * Hkv, chunks, F]    float16    yes, the states before each chunk, in units of unit_s (float32 *)
        unit_s        [B * Hkv, chunks]       float32    yes
    Z             [B * Hkv, chunks, D^2]  float32    yes, p = 2
    mirror        [B * Hkv, D]            float32    yes, see mirror.py
    KEYS          see prepare.py                     yes, what was made of keys and values
    num, den      see query_state.py                 no                              * where q, k and v are

Cost in FLOP, a token and head, with C tokens a chunk and F entries of S: inside chunks 2 C D forward and 7 C D
backward; with states 2 F for each `update_state` and `query_state`, two forward and two backward, and 2 D^3 (p = 4: 2.4
to 3.7 times 2 F) for each of the two gradients. The matrix unit is the limit of these, memory of the other kernels.
kernels/cost.py chooses the form and the length of a chunk.
"""

import torch

from ..support import width
from ..common import HALF, device_guard
from ..layout import TILE, entries, layout
from ..quadratic import passes as quadratic
from . import query_gradient_p2, query_gradient_p4
from .discumsum import carry_states
from .gates import chunk_dlog_g, chunk_gates
from .mirror import key_mirror, reflects
from .prepare import Prepared, prepare
from .products import products
from .query_state import query_state
from .sizes import Sizes, States, state_size
from .update_state import update_state

# the results of `prepare` for keys and values that the backward pass needs
KEYS = ("scaled", "scaled_v", "unit_x", "factor", "unit_v")


def bytes_needed(q, k, v, p, chunk, backward=True):
    """Return the bytes that `forward`, and with it `backward`, allocate beyond y and the gradients.

    These are the states, the saved arrays made from keys and values, the arrays made from queries and dy, and for p = 4
    the buffers of `query_gradient`. Only the shapes and dtype of q [B, T, H, D], k [B, T, Hkv, D] and v [B, T, Hkv, E]
    are used.
    """
    (B, T, H, D), HKV, size = q.shape, k.shape[2], HALF[q.dtype].itemsize
    D = width("chunked", q.dtype, D, v.shape[3])
    states = B * HKV * -(-T // chunk) * (state_size(D, p) * size + 4 * D * D * (p == 2))
    row, products = 2 * D * size + 8, 2 * entries(D, p) * size if p == 4 else 0
    rows = B * T * (HKV * row + H * (row + products))
    if p == 4 and backward:
        spread = query_gradient_p4.spread_bytes(D, -(-T // chunk), H // HKV * T, size)
        rows += spread * max(1, min(B * HKV, query_gradient_p4.SPREAD // spread))
    return states * (2 if backward else 1) + rows + 4 * B * H * T * D * (not backward)


def forward(q, k, v, log_g=None, initial=None, *, p, chunk, final=False, exchange=None):
    """Return y [B, T, H, D], what `backward` needs, and the last state (S, Z) if `final`.

    The second is the tuple (l, S, unit_s, Z, mirror, *KEYS); mirror is None unless `reflects`.

    q [B, T, H, D], k, v [B, T, Hkv, D], bfloat16 or float32, any strides; log_g [B, T, Hkv] float32 or None; initial:
    (S, Z) float32 [B * Hkv, F] and [B * Hkv, D * D] in the kernels' layout (see `from_canonical`), or None; chunk:
    tokens, a multiple of 128; D and p as in `Sizes`, which raises ValueError for too many tokens.

    exchange, in place of `initial`: a function of the state (S, Z) that these tokens give from zero. It begins to
    compute the initial state, and returns a function that returns it. Only the state is computed twice.
    """
    s = Sizes(q, k, p, chunk)
    with device_guard(q.device):
        decay_from_start, decay_to_end, chunk_decay, overlap = chunk_gates(log_g, s)
        mirror = key_mirror(s, k) if reflects(q.dtype, bool(initial or exchange) or final) else None
        keys = prepare(s, k, v, decay=decay_to_end, mirror=mirror)
        sums = update_state(s, s.HKV, keys), keys.z
        if exchange:
            initial = exchange(*_last_state(s, sums, keys.unit_v, chunk_decay))()
        states, last, _ = carry_states(s, sums, keys.unit_v, chunk_decay, initial, final=final)
        saved_keys = [getattr(keys, name) for name in KEYS]
        del keys
        queries = prepare(s, q, decay=decay_from_start, Z=states.Z, mirror=mirror)
        num, den = query_state(s, queries, states, skip=0 if initial is None else -1)
        del queries
        y, l = quadratic.forward(q, k, v, log_g, p=p, chunk=chunk, overlap=overlap, num=num, den=den)
    return y, (l, *states, mirror, *saved_keys), last


def _last_state(s, sums, unit, chunk_decay, reverse=False):
    """Return the state (S, Z) that sums over chunks give from zero; the sums stay as they are."""
    copies = [x if x is None else x.clone() for x in sums]
    return carry_states(s, copies, unit, chunk_decay, reverse=reverse, final=True)[1]


def backward(
    dy, q, k, v, log_g, y, saved, final=None, has_initial_state=False, *, p, chunk, needs=(True,) * 5,
    exchange=None,
):  # fmt: skip
    """Return dq, dk, dv, dlog_g (None without gates) and the gradient to the initial state (S, Z), or (None, None).

    saved: the tuple that `forward` returned; final: the gradient (dS, dZ) to the last state, or None; needs: True for
    each of the five gradients that is needed, the others are None or not complete.

    exchange, in place of `final`: a function of the gradient that these tokens alone give to the initial state. It
    begins to compute the gradient to the last state, and returns a function that returns it.
    """
    # operators save a tensor without entries in place of None
    l, S, unit_s, Z, mirror = (None if x is None or not x.numel() else x for x in saved[:5])
    states = States(S, unit_s, Z)
    s = Sizes(q, k, p, chunk)
    needs_q, needs_k, needs_v, needs_g, needs_state = needs
    gated, needs_state = log_g is not None and needs_g, needs_state and has_initial_state
    needs_keys = needs_k or needs_v or gated
    dlog_g, dstate = None, (None, None)
    with device_guard(q.device):
        decay_from_start, decay_to_end, chunk_decay, overlap = chunk_gates(log_g, s)
        quadratic_needs = (needs_q or gated, needs_keys, gated)
        dq, dk, dv, row = quadratic.backward(
            dy, None, q, k, v, log_g, y, l, p=p, chunk=chunk, overlap=overlap,
            has_initial_state=has_initial_state, needs=quadratic_needs,
        )  # fmt: skip
        queries = prepare(s, q, dy, y, l, decay=decay_from_start, mirror=mirror)
        unit_v = queries.unit_v
        if needs_keys or needs_state:  # a gradient to the states before each chunk
            sums = update_state(s, s.H, queries), queries.z
            finish = exchange(*_last_state(s, sums, unit_v, chunk_decay, reverse=True)) if exchange else lambda: final
        if needs_q or gated:
            query_terms = query_gradient(s, queries, states, -1 if has_initial_state else 0, dq, q, gated)
        del queries
        if needs_keys or needs_state:
            dlast = finish()
            dstates, dstate, dlog_decay = carry_states(
                s, sums, unit_v, chunk_decay, dlast, states if gated else None, True, needs_state
            )
        if needs_keys:
            keys, skip = _prepared_keys(s, saved, mirror, decay_to_end), s.chunks - 1 if dlast is None else -1
            if needs_k or gated:
                key_terms = query_gradient(s, keys, dstates, skip, dk, k, gated)
            if needs_v:
                query_state(s, keys, dstates, skip, out=dv)
        if gated:
            dlog_g = chunk_dlog_g(log_g, s, row, overlap, query_terms, key_terms, *dlog_decay)
    return dq, dk, dv, dlog_g, dstate


def _prepared_keys(s, saved, mirror, decay):
    """Return `Prepared` of keys from what `forward` saved."""
    keys = Prepared(**dict(zip(KEYS, saved[5:], strict=True)), mirror=mirror)
    if s.p == 2:
        return keys._replace(xt=keys.scaled, weight=decay)
    return keys._replace(xt=products(s, keys.scaled), weight=keys.factor)


def query_gradient(s, *arguments, **options):
    """Call `query_gradient` of the file for this power."""
    return (query_gradient_p2 if s.p == 2 else query_gradient_p4).query_gradient(s, *arguments, **options)


def from_canonical(S, z, p):
    """Return (S, Z) in the kernels' layout, float32.

    They are [B * Hkv, F] and [B * Hkv, D * D] for p = 2, [B * Hkv, F] with Z behind S and None for p = 4.

    S [B, Hkv, Dphi, D], z [B, Hkv, Dphi], in the order of `symmetric_power_embedding`. This works for gradients too:
    the map and `to_canonical` are each other's adjoint.
    """
    x = layout(S.shape[3], p, S.device)
    S = (S / x.root[:, None]).flatten(0, 1)[:, x.canonical].flatten(1)
    Z = (z / x.root).flatten(0, 1)[:, x.square]
    return (S.contiguous(), Z.contiguous()) if p == 2 else (torch.cat((S, Z), 1), None)


def to_canonical(S, Z, B, D, p):
    """Return (S [B, Hkv, Dphi, D], z [B, Hkv, Dphi]), the inverse of `from_canonical`, for B sequences."""
    HKV = S.shape[0] // B
    x = layout(D, p, S.device)
    if p == 4:
        S, Z = S.split((x.tiles * TILE * D, x.M**2), 1)
    S = S.reshape(B, HKV, -1, D)[:, :, x.rows] * x.root[:, None]
    return S, Z.reshape(B, HKV, -1)[:, :, x.places] * x.root
