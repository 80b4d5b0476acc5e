"""The door to the GPU kernels: the one file of attention/ that knows where they are.

Nothing here imports Triton before a kernel is wanted, so that attention/ works on machines without it.
"""

from pathlib import Path

import kernels
from kernels import cost, heinsen_unsupported_reason, unsupported_reason, unusable_machine, width
from kernels.layout import make_sqrt_multiplicity, symmetric_power_dim, tails_of

__all__ = [
    "cost", "heinsen_unsupported_reason", "make_sqrt_multiplicity", "symmetric_power_dim", "tails_of",
    "unsupported_reason", "unusable_machine", "width",
]  # fmt: skip

SOURCES = Path(kernels.__file__).parent  # the folder of the kernels


def quadratic_attention(q, k, v, log_g, *, p):
    from kernels import operators

    return operators.quadratic_attention(q, k, v, log_g, p=p)


def adaptive_attention(q, k, v, powers, log_g):
    from kernels import adaptive

    return adaptive.adaptive_attention(q, k, v, powers, log_g)


def chunked_attention(q, k, v, log_g, S, z, **sizes):
    from kernels import operators

    return operators.chunked_attention(q, k, v, log_g, S, z, **sizes)


def heinsen_attention(q, k, v, documents, m, S, z, *, final):
    from kernels import heinsen_operator

    return heinsen_operator.heinsen_attention(q, k, v, documents, m, S, z, final=final)


def quadratic_sums(q, k, v, log_g, *, p, scale):
    from kernels import operators

    return operators.quadratic_sums(q, k, v, log_g, p=p, scale=scale)


def chunked_state(k, v, log_g, S, z, *, p, chunk):
    from kernels import operators

    return operators.chunked_state(k, v, log_g, S, z, p=p, chunk=chunk)


def update_state(k, v, *, p, chunk):
    from kernels import operators

    return operators.update_state(k, v, p=p, chunk=chunk)


def query_state(q, S, z, *, p, chunk):
    from kernels import operators

    return operators.query_state(q, S, z, p=p, chunk=chunk)


def chunked_bytes_needed(q, k, v, p, chunk, backward):
    from kernels.chunked import bytes_needed

    return bytes_needed(q, k, v, p, chunk, backward=backward)


def rotate(q, k, cos, sin, angle):
    from kernels import rotary

    return rotary.rotate(q, k, cos, sin, angle)


def cross_entropy_(logits, targets, vocab_size, gradient):
    from kernels import cross_entropy

    return cross_entropy.cross_entropy_(logits, targets, vocab_size, gradient)


def layer_norm_backward(dy, x, weight, mean, rstd, bias):
    from kernels import layer_norm

    return layer_norm.layer_norm_backward(dy, x, weight, mean, rstd, bias)
