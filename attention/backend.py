"""The door to the GPU kernels: the one file of attention/ that knows where they are.

They are beside attention/: in a clone both are at top level, in the installed package they are sympow.attention and
sympow.kernels. Nothing here imports Triton before a kernel is wanted, so that attention/ works on machines without it.
"""

from pathlib import Path

if INSTALLED := "." in __package__:
    from .. import kernels
    from ..kernels import cost, heinsen_unsupported_reason, unsupported_reason, unusable_machine, width
    from ..kernels.configs import cache_folder
    from ..kernels.layout import make_sqrt_multiplicity, symmetric_power_dim, tails_of
    from ..kernels.registry import register, registered
    from ..kernels.transforms import transforms_active
else:
    import kernels
    from kernels import cost, heinsen_unsupported_reason, unsupported_reason, unusable_machine, width
    from kernels.configs import cache_folder
    from kernels.layout import make_sqrt_multiplicity, symmetric_power_dim, tails_of
    from kernels.registry import register, registered
    from kernels.transforms import transforms_active

__all__ = [
    "cache_folder", "cost", "heinsen_unsupported_reason", "make_sqrt_multiplicity", "register", "registered",
    "symmetric_power_dim", "tails_of", "transforms_active", "unsupported_reason", "unusable_machine", "width",
]  # fmt: skip

NAMESPACE = kernels.NAMESPACE  # of the torch operators
SOURCES = Path(kernels.__file__).parent  # the folder of the kernels


# torch.compile follows import statements, but not importlib


def operators():
    """Return the module kernels.operators."""
    if INSTALLED:
        from ..kernels import operators
    else:
        from kernels import operators
    return operators


def adaptive():
    """Return the module kernels.adaptive."""
    if INSTALLED:
        from ..kernels import adaptive
    else:
        from kernels import adaptive
    return adaptive


def heinsen_operator():
    """Return the module kernels.heinsen_operator."""
    if INSTALLED:
        from ..kernels import heinsen_operator
    else:
        from kernels import heinsen_operator
    return heinsen_operator


def fused():
    """Return the module kernels.fused."""
    if INSTALLED:
        from ..kernels import fused
    else:
        from kernels import fused
    return fused


def precompile(function, arguments, device):
    """See kernels/precompile.py."""
    if INSTALLED:
        from ..kernels import precompile
    else:
        from kernels import precompile
    return precompile.precompile(function, arguments, device)


def quadratic_attention(q, k, v, log_g, *, p):
    return operators().quadratic_attention(q, k, v, log_g, p=p)


def rotated_attention(qkv, cos, sin, log_g, *, H, p):
    return fused().rotated_attention(qkv, cos, sin, log_g, H=H, p=p)


def adaptive_attention(q, k, v, powers, log_g):
    return adaptive().adaptive_attention(q, k, v, powers, log_g)


def chunked_attention(q, k, v, log_g, S, z, **sizes):
    return operators().chunked_attention(q, k, v, log_g, S, z, **sizes)


def chunked_attention_of_piece(q, k, v, log_g, decay, ranks, **sizes):
    return operators().chunked_attention_of_piece(q, k, v, log_g, decay, ranks, **sizes)


def heinsen_attention(q, k, v, documents, m, S, z, *, final):
    return heinsen_operator().heinsen_attention(q, k, v, documents, m, S, z, final=final)


def quadratic_sums(q, k, v, log_g, *, p, scale):
    return operators().quadratic_sums(q, k, v, log_g, p=p, scale=scale)


def chunked_state(k, v, log_g, S, z, *, p, chunk):
    return operators().chunked_state(k, v, log_g, S, z, p=p, chunk=chunk)


def update_state(k, v, *, p, chunk):
    return operators().update_state(k, v, p=p, chunk=chunk)


def query_state(q, S, z, *, p, chunk):
    return operators().query_state(q, S, z, p=p, chunk=chunk)


def chunked_bytes_needed(q, k, v, p, chunk, backward):
    return operators().chunked.bytes_needed(q, k, v, p, chunk, backward=backward)


def rotate_heads(qkv, H, Hkv, cos, sin, angle):
    return fused().RotateHeads.apply(qkv, H, Hkv, cos, sin, angle)


def cross_entropy_(logits, targets, vocab_size, gradient):
    return fused().cross_entropy_(logits, targets, vocab_size, gradient)
