"""What the operators ask of their arguments; each error is one line with the value and what would be right."""

import warnings
from functools import wraps

import torch

from sympow import check_choice
from .dispatch import FORMS, computed_dtype, is_watched
from .forms import accumulation_dtype


def cast_to_autocast_dtype(*tensors):
    """Return q, k, v in autocast's dtype if it is on, but float64 as it is. Raises ValueError for what is no tensor."""
    if not all(isinstance(x, torch.Tensor) for x in tensors):
        raise ValueError(f"q, k, v must be tensors, got {', '.join(type(x).__name__ for x in tensors)}")
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def cast_from_float16(*tensors):
    """Return float16 tensors as float32, and others as they are; see `computed_dtype`."""
    return tuple(x.to(computed_dtype(x.dtype)) for x in tensors)


def check_power(p, name="p"):
    """Raise ValueError unless p, which the caller calls `name`, is 2, 4, 6 or 8: above, scores of 1/1000 of the largest
    are below float32's range."""
    if not isinstance(p, int) or p not in (2, 4, 6, 8):
        raise ValueError(f"{name} must be a positive even integer, got {p!r}: at most 8, the most that float32 holds")


def check_tensors(q, k, v, **more):
    """Raise ValueError unless q [B, n, H, D], k [B, T, Hkv, D], v [B, T, Hkv, E] fit each other.

    They must share one floating dtype and one device, and `more`, tensors or None by name, must be there too. n may not
    be above T.
    """
    shapes = f"{[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k, v must be [B, T, H, D], got {shapes}")
    (B, n, H, D), (T, Hkv) = q.shape, k.shape[1:3]
    if k.shape != (B, T, Hkv, D) or v.shape[:3] != (B, T, Hkv):
        raise ValueError(f"q [B,n,H,D], k [B,T,Hkv,D], v [B,T,Hkv,E] do not fit: {shapes}")
    if min(n, T, H, Hkv, D, v.shape[3]) < 1:
        raise ValueError(f"n, T, H, D of q [B,n,H,D], k [B,T,Hkv,D], v [B,T,Hkv,E] must be positive: {shapes}")
    if n > T:
        raise ValueError(f"queries are those of the last n of T tokens, got n={n} above T={T}")
    if H % Hkv:
        raise ValueError(f"the query heads must be a multiple of the key/value heads, got {H} and {Hkv}")
    if not (q.dtype == k.dtype == v.dtype) or not q.is_floating_point():
        raise ValueError(f"q, k, v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    for name, x in {"k": k, "v": v, **more}.items():
        if not isinstance(x, torch.Tensor | None):
            raise ValueError(f"{name} must be a tensor or None, got {type(x).__name__}")
        if x is not None and x.device != q.device:
            raise ValueError(f"all tensors must be on one device, got q on {q.device}, {name} on {x.device}")


def check_gates(log_g, k):
    """Raise ValueError unless log_g is None or floating [B, T, Hkv] for k [B, T, Hkv, D], and on a CPU nowhere above 0.

    A GPU would have to be waited for. Transforms, tracing and modes do not know the values.
    """
    if log_g is None:
        return
    if log_g.shape != k.shape[:3] or not log_g.is_floating_point():
        raise ValueError(
            f"log_g must be [B, T, Hkv] = {[*k.shape[:3]]}, floating point, got {[*log_g.shape]} of {log_g.dtype}"
        )
    if log_g.device.type == "cpu" and not is_watched() and (positive := (log_g > 0) & log_g.isfinite()).any():
        raise ValueError(f"log_g must be <= 0, the logarithm of a gate, got {log_g[positive][0]:g}")


def warn_of_heads_first(attention):
    """Let a function of q, k, v warn of more heads than tokens, which tensors as SDPA takes them have."""

    @wraps(attention)
    def attention_and_warning(q, k, *args, **options):
        result = attention(q, k, *args, **options)
        if not torch.compiler.is_compiling() and 1 < k.shape[1] < q.shape[2]:
            warnings.warn("more heads than tokens: [B, H, T, D], as SDPA takes it, needs transpose(1, 2)", stacklevel=2)
        return result

    return attention_and_warning


def check_cu_seqlens(cu_seqlens, q, k):
    """Raise ValueError unless cu_seqlens [N + 1], integers, fits N packed sequences q, k [1, T, H, D].

    `sequences.sequence_lengths` looks at its values.
    """
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens must be a tensor of torch.int32 or torch.int64, got {got}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be [N + 1] for N sequences, N at least 1, got {[*cu_seqlens.shape]}")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on q's device, {q.device}, got {cu_seqlens.device}")
    if q.shape[0] != 1 or q.shape[1] != k.shape[1]:
        raise ValueError(
            f"with cu_seqlens q and k must be [1, T, H, D] of the same T tokens, got {[*q.shape]}, {[*k.shape]}"
        )


def check_form(form, chunk_size):
    """Raise ValueError unless form is one of dispatch.FORMS and chunk_size a positive integer or None."""
    check_choice("form", form, FORMS)
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
        raise ValueError(f"chunk_size must be a positive integer, got {chunk_size!r}")


def as_state(state, kind):
    """Return `state`, a tuple of tensors, as the NamedTuple `kind`, and None as it is; else raise ValueError."""
    if state is None:
        return None
    names = kind._fields
    tensors = isinstance(state, (tuple, list)) and all(isinstance(x, torch.Tensor) for x in state)
    if not tensors or len(state) != len(names):
        raise ValueError(
            f"initial_state must be a {kind.__name__} or another tuple ({', '.join(names)}) of tensors, "
            f"got {type(state).__name__}"
        )
    return kind(*state)


def check_state(state, q, shapes):
    """Raise ValueError unless the NamedTuple `state` has these shapes and the dtype of sums for inputs like q."""
    if any(x.shape != shape for x, shape in zip(state, shapes)):
        expected, actual = (
            ", ".join(f"{name} {[*shape]}" for name, shape in zip(state._fields, shapes))
            for shapes in (shapes, [x.shape for x in state])
        )
        raise ValueError(f"initial_state must be {expected}, got {actual}")
    dtype = accumulation_dtype(q)
    if any(x.dtype != dtype for x in state):
        raise ValueError(f"initial_state must be {dtype} for q of {q.dtype}, got {[x.dtype for x in state]}")
