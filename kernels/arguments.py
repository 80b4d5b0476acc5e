"""Check the arguments of this package's public functions, and bring rows to a width that the kernels have.

The kernels take rows of 16, 32, 64 or 128 entries, the quadratic form 256 too, but not in float32. Narrower rows of q,
k and v get zeros behind them: q . k stays the same, and y is cut. Each error is one line with the value and what would
be right; none waits for the GPU.
"""

from operator import index

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import CHUNKED_SIZES, DTYPES, POWERS, widest, width
from .layout import positions_of_narrower, symmetric_power_dim

# ---- checks


def described(x):
    """Return "float32 [2, 3]" for a tensor, and any other value as Python shows it."""
    return f"{_name(x.dtype)} {[*x.shape]}" if isinstance(x, Tensor) else repr(x)


def check(name, x, shape, dtype=torch.float32):
    """Raise ValueError unless x is None or a tensor of this shape and dtype."""
    if x is not None and (not isinstance(x, Tensor) or x.shape != torch.Size(shape) or x.dtype != dtype):
        raise ValueError(f"{name} must be {_name(dtype)} {[*shape]}, got {described(x)}")


def check_rows(may_be_empty=False, **rows):
    """Raise ValueError unless every x is [B, T, heads, D], not empty, in a dtype that the kernels take.

    may_be_empty: True if B or T may be 0.
    """
    for name, x in rows.items():
        fits = isinstance(x, Tensor) and x.ndim == 4 and x.dtype in DTYPES
        if not fits or min(x.shape[2 * may_be_empty :]) < 1:
            dtypes = " or ".join(map(_name, DTYPES))
            raise ValueError(f"{name} must be [B, T, heads, D] with no size 0, in {dtypes}, got {described(x)}")


def check_device(q, **tensors):
    """Raise ValueError unless all tensors (or None) are on q's device."""
    if devices := [f"{name} on {x.device}" for name, x in tensors.items() if x is not None and x.device != q.device]:
        raise ValueError(f"all tensors must be on one device, got the first on {q.device}, {', '.join(devices)}")


def check_qkv(form, q, k, v, *, n_is_T=False, v_dtypes=(), may_be_empty=False):
    """Raise ValueError unless the kernels of `form` take q [B, n, H, D], k [B, T, Hkv, D] and v [B, T, Hkv, E].

    With n_is_T every token must have a query; v_dtypes: the dtypes that v may have beside q's; may_be_empty: as
    for `check_rows`.
    """
    check_rows(may_be_empty, q=q, k=k, v=v)
    (B, n, H, D), (T, HKV) = q.shape, k.shape[1:3]
    if k.shape != (B, T, HKV, D) or v.shape[:3] != (B, T, HKV) or n > T or (n_is_T and n != T):
        got = ", ".join(f"{[*x.shape]}" for x in (q, k, v))
        limit = "n = T" if n_is_T else "n at most T"
        raise ValueError(f"q, k, v must be [B, n, H, D], [B, T, Hkv, D], [B, T, Hkv, E] with {limit}, got {got}")
    if H % HKV:
        raise ValueError(f"the query heads must be a multiple of the key/value heads, got {H} and {HKV}")
    if k.dtype != q.dtype or v.dtype not in (q.dtype, *v_dtypes):
        raise ValueError(f"q, k, v must share one dtype, got {', '.join(_name(x.dtype) for x in (q, k, v))}")
    check_width(form, q.dtype, D, v.shape[3])


def check_width(form, dtype, D, E):
    """Raise ValueError unless the kernels of `form` have a width for rows of D entries and values of E."""
    if not width(form, dtype, D, E):
        limit = f"at most {widest(form, dtype)} in the {form} kernels for {_name(dtype)}"
        raise ValueError(f"the head dimension D and the width E of v must be {limit}, got {D} and {E}")


def check_power(p):
    """Raise ValueError unless the quadratic kernels take p."""
    if p not in POWERS:
        raise ValueError(f"p must be one of {', '.join(map(str, POWERS))}, got {p!r}")


def check_chunks(dtype, D, E, p, chunk):
    """Raise ValueError unless the chunked kernels take rows of D entries, values of E, power p and this chunk."""
    check_width("chunked", dtype, D, E)
    if (width("chunked", dtype, D, E), p) not in CHUNKED_SIZES:
        sizes = ", ".join(f"p={p} up to {max(D for D, m in CHUNKED_SIZES if m == p)}" for p in (2, 4))
        raise ValueError(f"the chunked kernels take {sizes} entries a row, got p={p!r} with D={D}, E={E}")
    if not isinstance(chunk, int) or chunk < 1 or chunk % 128:
        raise ValueError(f"chunk must be a multiple of 128, got {chunk!r}")


def check_state(S, z, B, HKV, D, E, p):
    """Raise ValueError unless S [B, Hkv, Dphi, E] and z [B, Hkv, Dphi] are float32, or both None."""
    check_pair("S", S, "z", z)
    Dphi = symmetric_power_dim(D, p)
    check("S", S, (B, HKV, Dphi, E))
    check("z", z, (B, HKV, Dphi))


def check_pair(S_name, S, z_name, z):
    """Raise ValueError if only one of the two parts of a state is given."""
    if (S is None) != (z is None):
        got = f"{z_name} {'None' if z is None else described(z)} and {S_name} {'None' if S is None else described(S)}"
        raise ValueError(f"{S_name} and {z_name} must both be given or both be None, got {got}")


def _name(dtype):
    return str(dtype).removeprefix("torch.")


# ---- widths


def to_width(form, *tensors, fill=0.0):
    """Return the tensors [..., D] with `fill` behind their rows up to the kernels' width for the widest of them.

    A tensor of that width is returned as it is.
    """
    W = width(form, tensors[0].dtype, *(index(x.shape[-1]) for x in tensors))
    return tuple(x if x.shape[-1] == W else pad(x, (0, W - x.shape[-1]), value=fill) for x in tensors)


def widen_state(S, z, D, W, p):
    """Return S [..., Dphi(D), E] and z [..., Dphi(D)] as the state of rows of W entries, S [..., Dphi(W), W]."""
    S = S if S.shape[-1] == W else pad(S, (0, W - S.shape[-1]))
    if D == W:
        return S, z
    D, W = index(D), index(W)
    places, Dphi = positions_on_device(D, W, p, S.device), symmetric_power_dim(W, p)
    S = S.new_zeros(*S.shape[:-2], Dphi, W).index_copy(S.ndim - 2, places, S)
    return S, z.new_zeros(*z.shape[:-1], Dphi).index_copy(z.ndim - 1, places, z)


def narrow_state(S, z, D, E, p):
    """Return S [..., Dphi(W), W] and z [..., Dphi(W)] as the state of rows of D entries and values of E."""
    W, S = S.shape[-1], S[..., :E]
    if D == W:
        return S, z
    D, W = index(D), index(W)
    places = positions_on_device(D, W, p, S.device)
    return S.index_select(S.ndim - 2, places), z.index_select(z.ndim - 1, places)


def positions_on_device(D, W, p, device):
    """Return `layout.positions_of_narrower` as a tensor on a device; torch.compile takes it as a constant."""
    key = D, W, p, device
    if key not in _positions:
        _positions[key] = torch.as_tensor(positions_of_narrower(D, W, p), device=device)
    return _positions[key]


positions_on_device._dynamo_marked_constant = True
_positions = {}
