"""Attention with a power for each query, in plain PyTorch: in blocks, stable in float32, on any device.

    y = adaptive_attend(q, k, v, powers, log_g)

    w_ij = |q_i . k_j|^p_i,     y_i = sum_j w_ij v_j / sum_j w_ij

attention/naive.py (`adaptive`) computes the same without the care that is taken here. A power that is not an integer
needs a logarithm, so a row is a softmax of p_i log2 |q_i . k_j|, and its largest entry is subtracted first: no power is
too large. Each row of q and each key is scaled by the power of two that brings its largest entry into [1, 2). The scale
of q cancels in y. The exponent of a key's scale is added to the logarithm, relative to the largest that the row sees.
So y does not change when a row of q or all of k is scaled by a power of two, and no row depends on later ones.

Where the scores that one product would hold are too many, blocks of rows compute theirs again in the backward pass.
"""

from functools import partial

import torch

from .forms import (
    blocks_of_rows,
    by_head,
    by_token,
    exponent,
    finite_keys_and_values,
    normalize,
    to_unit_range,
    without_autocast,
)

COPIES = 4  # of the scores that the backward pass of one block keeps: power attention keeps one
COMPILED_BLOCKS = 8  # torch.compile unrolls blocks: it would take minutes or hours for more in each layer


def adaptive_attend(q, k, v, powers, log_g):
    """Return y [B, n, H, E] in q's dtype, computed in float32 or, for float64 q, in float64.

    The arguments are as in `adaptive_power_attention`, checked. torch.compile leaves more than COMPILED_BLOCKS blocks
    to eager mode.
    """
    (B, n, H, _), m = q.shape, k.shape[1]
    ranges, run = blocks_of_rows(B * H, n, m, q.device, COPIES)
    unrolled = torch.compiler.is_compiling() and len(ranges) > COMPILED_BLOCKS
    return (_attend_eagerly if unrolled else _attend)(q, k, v, powers, log_g, ranges, run)


def _attend(q, k, v, powers, log_g, ranges, run):
    n, m = q.shape[1], k.shape[1]
    with without_autocast(q.device):
        queries, keys, values, _ = by_head(q, k, v, None)
        queries, (keys, values, bad) = to_unit_range(queries), finite_keys_and_values(keys, values)
        sizes = exponent(keys.detach().abs().amax(-1))  # [B, Hkv, m], the least there is for a key of zeros
        keys, powers = to_unit_range(keys), powers.to(keys.dtype)[:, None, None, :, None]
        documents = None if log_g is None else (log_g == float("-inf")).cumsum(1).transpose(1, 2)  # [B, Hkv, m]
        parts = []
        for start, end in ranges:
            seen = m - n + end
            part = run(
                partial(_block_of_rows, first=m - n + start),
                queries[..., start:end, :],
                keys[:, :, :seen],
                values[:, :, :seen],
                sizes[..., :seen],
                bad[..., :seen],
                None if documents is None else documents[..., :seen],
                powers[..., start:end, :],
            )
            parts.append(part)
        y = torch.cat(parts, dim=3)
    return by_token(y).to(q.dtype)


@torch._disable_dynamo  # torch.compiler.disable would import torch._dynamo here, which takes seconds
def _attend_eagerly(*arguments):
    return _attend(*arguments)


def _block_of_rows(q, k, v, sizes, bad, documents, powers, first):
    """Return y of queries first, first+1, ... over the keys up to each; k and q are scaled, k by 2^-sizes."""
    n, m = q.shape[3], k.shape[2]
    tokens = torch.arange(first, first + n, device=q.device)
    hidden = tokens.unsqueeze(-1) < torch.arange(m, device=q.device)  # [n, m]
    if documents is not None:
        hidden = hidden | (documents[..., first : first + n, None] != documents.unsqueeze(-2))  # [B, Hkv, n, m]
    relative = sizes.unsqueeze(-2).masked_fill(hidden, float("-inf"))
    relative = sizes.unsqueeze(-2) - relative.amax(-1, keepdim=True)  # [B, Hkv, n, m], at most 0 where it is seen
    s = (q @ k.transpose(-1, -2).unsqueeze(2)).abs()  # [B, Hkv, G, n, m]
    no_weight = (s < torch.finfo(s.dtype).tiny) | (hidden if documents is None else hidden.unsqueeze(2))
    x = powers * (s.masked_fill(no_weight, 1).log2() + relative.unsqueeze(2))
    x = x.masked_fill(no_weight, float("-inf"))
    largest = x.detach().amax(-1, keepdim=True)
    w = torch.exp2(x - largest.masked_fill(largest == float("-inf"), 0))
    return normalize(w @ v.unsqueeze(2), w.sum(-1) + bad[:, :, first : first + n].unsqueeze(2))
