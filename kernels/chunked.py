"""The chunked form of power attention in Triton: cost linear in the context."""

import math

import torch
import triton

from . import quadratic
from .common import HALF, LIFT, TOP, device_guard
from .discumsum import discumsum
from .gates import chunk_dlog_g, chunk_gates
from .layout import TILE, entries, features, layout
from .prepare import prepare, products
from .query_gradient import SPREAD, query_gradient, spread_bytes
from .query_state import query_state
from .update_state import update_state

KEPT = ("rows", "values", "unit_x", "factor", "unit_v")  # of keys and values, for the backward pass


def state_size(D, p):
    """Entries of a state: S, and for p = 4 Z = sum x x^T behind it."""
    return features(D, p) * D + (0 if p == 2 else entries(D, p) ** 2)


def bytes_needed(q, k, p, chunk, backward=True):
    """Bytes that `forward`, and with it `backward`, allocate beyond y and the gradients: states, what is made of keys
    and values and kept, what is made of queries and dy, and for p = 4 what `query_gradient` makes of both."""
    (B, T, H, D), HKV, size = q.shape, k.shape[2], HALF[q.dtype].itemsize
    states = B * HKV * -(-T // chunk) * (state_size(D, p) * size + 4 * D * D * (p == 2))
    row, products = 2 * D * size + 8, 2 * entries(D, p) * size if p == 4 else 0
    rows = B * T * (HKV * row + H * (row + products))
    if p == 4 and backward:
        each = spread_bytes(D, -(-T // chunk), H // HKV * T, size)
        rows += each * max(1, min(B * HKV, SPREAD // each))
    return states * (2 if backward else 1) + rows + 4 * B * H * T * D * (not backward)


class Sizes:
    """What the launchers of one call share."""

    def __init__(self, q, k, p, chunk):
        (B, T, H, D), HKV = q.shape, k.shape[2]
        self.B, self.T, self.H, self.HKV, self.D, self.p, self.q = B, T, H, HKV, D, p, q
        self.chunk, self.chunks = chunk, triton.cdiv(T, chunk)
        self.TP = triton.cdiv(T, 256) * 256
        of_row = entries(D, p) * p // 2
        if of_row * self.TP >= 2**31:  # places in XT are 32 bits
            most = (2**31 - 1) // of_row // 256 * 256
            raise ValueError(
                f"a sequence of p={p} and head dimension {D} may have at most {most:,} tokens at once, got {T:,}: cut "
                "it into pieces, each with the state of those before"
            )
        self.layout = layout(D, p, q.device)
        self.FS = self.layout.tiles * TILE * D
        self.F = state_size(D, p)
        self.half = HALF[q.dtype]
        most = chunk * H // HKV * 2 ** (TOP + 1 + p * (LIFT[p] + 1))
        self.most = 2.0 ** math.ceil(math.log2(most))  # an entry of a chunk's sum, in VALUES' units


def forward(q, k, v, log_g=None, initial=None, *, p, chunk, final=False):
    """q [B, T, H, D], k, v [B, T, Hkv, D], log_g [B, T, Hkv] float32 or None; initial: (S, Z) float32 [B * Hkv, F] and
    [B * Hkv, D * D] in this file's layout, or None. chunk: tokens, a multiple of 128.

    Returns y, what `backward` needs (l, S, its units, Z, and what `prepare` made of keys and values, see KEPT), and the
    last state (S, Z) if `final`.
    """
    s = Sizes(q, k, p, chunk)
    with device_guard(q.device):
        into, out, whole = chunk_gates(log_g, s)
        keys = prepare(s, k, v, decay=out)
        S = update_state(s, s.HKV, keys)
        S0, Z0 = initial or (None, None)
        unit_s, S_last, _ = discumsum(s, S, keys["unit_v"], whole, S0, final=final)
        Z = Z_last = None
        if p == 2:
            Z = keys["z"]
            _, Z_last, _ = discumsum(None, Z, None, whole, Z0, final=final)
        kept = [keys[name] for name in KEPT]
        del keys
        queries = prepare(s, q, decay=into, Z=Z)
        skip = 0 if initial is None else -1
        num, den = query_state(s, queries, S, unit_s, skip)
        del queries
        y, l = quadratic.forward(q, k, v, log_g, p=p, chunk=chunk, num=num, den=den)
    return y, (l, S, unit_s, Z, *kept), (S_last, Z_last)


def backward(dy, q, k, v, log_g, y, saved, final=None, initial=False, *, p, chunk):
    """dq, dk, dv, dlog_g (None without gates) and d initial state (S, Z), or (None, None); final: (dS, dZ) or None."""
    l, S, unit_s, Z, *kept = saved
    s = Sizes(q, k, p, chunk)
    with device_guard(q.device):
        dq, dk, dv, inside = quadratic.backward(dy, None, q, k, v, log_g, y, l, p=p, chunk=chunk, before=initial)
        into, out, whole = chunk_gates(log_g, s)
        queries = prepare(s, q, dy, y, l, decay=into)
        dS = update_state(s, s.H, queries)
        dS_last, dZ_last = final or (None, None)
        unit_d, dS0, carried = discumsum(
            s, dS, queries["unit_v"], whole, dS_last, *((None, None) if log_g is None else (S, unit_s)), True, initial
        )
        dZ = dZ0 = carried_z = None
        if p == 2:
            dZ = queries["z"]
            _, dZ0, carried_z = discumsum(
                None, dZ, None, whole, dZ_last, None if log_g is None else Z, None, True, initial
            )
        gated = log_g is not None
        skip = -1 if initial else 0
        read = query_gradient(s, queries, S, unit_s, skip, dq, q, Z, queries["weight"], gated)
        del queries
        keys = dict(zip(KEPT, kept, strict=True))
        keys |= {"xt": products(s, keys["rows"]), "weight": keys["factor"]}
        skip = s.chunks - 1 if final is None else -1
        given = query_gradient(s, keys, dS, unit_d, skip, dk, k, dZ, out, gated)
        query_state(s, keys, dS, unit_d, skip, out=dv)
        dlog_g = chunk_dlog_g(log_g, s, inside, read, given, carried, carried_z) if gated else None
    return dq, dk, dv, dlog_g, (dS0, dZ0)


def from_canonical(S, z, p):
    """(S [B, Hkv, Dphi, D], z [B, Hkv, Dphi]) in the order of `symmetric_power_embedding` -> the kernels' layout,
    float32: for p = 2 [B * Hkv, F] and Z [B * Hkv, D * D], for p = 4 [B * Hkv, F], Z in it, and None. Of a gradient
    too: the two maps are each other's adjoint."""
    x = layout(S.shape[3], p, S.device)
    S = (S / x.root[:, None]).flatten(0, 1)[:, x.canonical].flatten(1)
    Z = (z / x.root).flatten(0, 1)[:, x.square]
    return (S.contiguous(), Z.contiguous()) if p == 2 else (torch.cat((S, Z), 1), None)


def to_canonical(S, Z, B, D, p):
    """The inverse of `from_canonical`, for B sequences."""
    HKV = S.shape[0] // B
    x = layout(D, p, S.device)
    if p == 4:
        S, Z = S.split((x.tiles * TILE * D, x.M**2), 1)
    S = S.reshape(B, HKV, -1, D)[:, :, x.rows] * x.root[:, None]
    return S, Z.reshape(B, HKV, -1)[:, :, x.places] * x.root
