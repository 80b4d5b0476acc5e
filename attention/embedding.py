"""The feature map with a power as its inner product: phi(q) . phi(k) = (q . k)^p.

The tensor x^p has all d^p products x_a1 x_a2 ... x_ap, each in every order. `symmetric_power_embedding` has each once:
C(d+p-1, p) entries, one for each non-decreasing multi-index a1 <= a2 <= ... <= ap, times the square root of how often
the tensor holds it, p! / (c_1! ... c_d!) with c_i the number of times i occurs in the multi-index.
From "Symmetric Power Transformers" (Buckman, Gelada, Zhang, 2024), sections 3 and 4.
"""

from functools import cache

import torch

from .operator.backend import make_sqrt_multiplicity, symmetric_power_dim, tails_of
from .operator.dispatch import is_watched


def symmetric_power_embedding(x, p):
    """Return each distinct product of p entries of x [..., d] once: [..., C(d+p-1, p)] in x's dtype.

    They are in lexicographic order of the non-decreasing multi-indices.

    Products of degree r+1 that start with x_i are x_i times the products of degree r with a first index of at least i.
    In lexicographic order these are a tail of the list, so there is no gather and no scattered sum in the gradient.
    """
    d = x.shape[-1]
    phi = x
    for r in range(1, p):
        tails = tails_of(d, r)
        phi = torch.cat([x[..., i : i + 1] * phi[..., tails[i] :] for i in range(d)], dim=-1)
    arguments = d, p, x.dtype, x.device
    if is_watched():  # see below
        return phi * _sqrt_multiplicity(*arguments)
    return phi * _made(*arguments).clone()  # a tensor made in inference mode could not be saved for a backward pass


@cache
def _made(d, p, dtype, device):
    return make_sqrt_multiplicity(d, p).to(device, dtype)


# An operator, so that torch.compile, torch.func and modes do not look inside (what FakeTensorMode makes must not be
# kept); without a tensor, so that vmap needs no rule for it. The first call of an operator imports torch._dynamo, which
# takes seconds, so other calls do without it.
@torch.library.custom_op("sympow::sqrt_multiplicity", mutates_args=())
def _sqrt_multiplicity(d: int, p: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _made(d, p, dtype, device).clone()


@_sqrt_multiplicity.register_fake
def _(d, p, dtype, device):
    return torch.empty(symmetric_power_dim(d, p), dtype=dtype, device=device)
