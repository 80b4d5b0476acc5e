"""Adaptive power attention in Triton: forward, and backward in two passes without atomics.

    w_ij = |s_ij|^p_i,   s_ij = q_i . k_j,   p_i >= 1 any float, one for all heads of a token,   j <= i
    y_i  = sum_j w_ij v_j / sum_j w_ij

With dP_ij = dy_i . v_j and delta_i = dy_i . y_i, all sums over the causal pairs of one document:

    forward    w_ij = exp2(p_i x_ij + p_i log2 f_i)          x_ij = log2 |s_ij|, f_i: a power of two, see Range
    backward   t_ij = exp2((p_i - 1) x_ij + c_i) sign s_ij   c_i = p_i log2 f_i - log2 sum_j w_ij
               dv_j = sum_i t_ij s_ij dy_i                   t_ij s_ij is w_ij divided by the sum of its row
               ds_ij = p_i t_ij (dP_ij - delta_i)            dq_i = sum_j ds_ij k_j      dk_j = sum_i ds_ij q_i
               dp_i = ln 2 sum_j t_ij s_ij (dP_ij - delta_i) (x_ij - x)

Any x gives the same dp_i but for rounding, and the rounding is least near the mean of the row's x_ij. At s = 0 the
exponent is -inf, and the weight and its derivatives are 0.

    forward_kernel, dq_kernel: one program BM queries       dkdv_kernel: one program BN keys

      queries           keys ->                               keys              queries ->
        BM | BN | BN | BN | diagonal                            BN | diagonal | BM | BM | BM

    name        shape                          dtype      what
    c           [B, H, n padded to 128]        float32    c_i, saved for the backward pass; -inf in rows without weight
    delta       [B, H, n padded to 128]        float32    p_i delta_i, from dq_kernel to dkdv_kernel
    dp          [B, H, n padded to 128]        float32    the gradient to p_i of each head
    powers      [B, n padded to 128]           float32    p_i
    key_scale   [B * Hkv, T padded to 128]     float32    a power of two for each row, see Range
    first       [B, Hkv, T padded to 128]      int32      the first token of each token's document
    end         [B, Hkv, T padded to 128]      int32      the token after the last of each token's document

The n queries belong to the last n of T tokens; T - n is a multiple of 128, so that tiles of queries begin where
tiles of keys do.

Cost. With N = T^2 D / 2 multiplications a head and product: forward 2 N, dq 3 N, dk and dv 4 N. Every sum has one
owner, so that two runs give the same bits. Each pair takes one logarithm and one exponential in each of the three
kernels, both of base 2. A multiprocessor does 16 of these a cycle, and they are the limit.

Range. No running maximum is needed. f_i brings the largest entry of the row of q to 1 to 2, and likewise the largest of
the keys up to the row in its document. f_i cancels in y, and no row depends on later keys. Weights are summed as they
are rounded for the second product.

Documents. log_g may hold 0 and -inf alone, and -inf begins a document. Tiles of keys before a row's document, and tiles
of queries after a key's document, are skipped.
"""

import torch
import triton

from ..common import device_guard, empty, padded
from ..configs import choose
from ..quadratic.key_scale_kernel import key_scale_kernel
from ..quadratic.passes import fetched_tiles, heads_together, query_offset
from .backward_kernels import dkdv_kernel, dq_kernel
from .forward_kernel import forward_kernel


def forward(q, k, v, powers, log_g=None, config=None):
    """Return y [B, n, H, D] in q's dtype and c of the table above, for `backward`.

    q [B, n, H, D], k, v [B, T, Hkv, D], bfloat16 or float32, any strides; powers [B, n] float32; log_g [B, T, Hkv]
    float32 of 0 and -inf, or None. The queries belong to the last n tokens; T - n is a multiple of 128. D is one of
    `kernels.QUADRATIC_WIDTHS`.
    """
    (B, n, H, D), (T, HKV) = q.shape, k.shape[1:3]
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    c = empty(q, B, H, padded(n)).fill_(-torch.inf)
    config = config or choose("forward", q, 0, log_g is not None)
    with device_guard(q.device):
        tiles, strides = fetched_tiles((q, config.BM), (k, config.BN), (v, config.BN))
        forward_kernel[(triton.cdiv(n, config.BM) * B * H,)](
            *tiles, y, c, _key_scales(k, log_g), _pad(powers), _documents(log_g)[0], tuple(strides),
            T, query_offset(n, T), H, HKV, B * H, heads_together(T, B * H),
            D=D, BM=config.BM, BN=config.BN, **config.launch(),
        )  # fmt: skip
    return y, c


def backward(dy, q, k, v, powers, log_g, y, c, configs=(None, None)):
    """Return dq, dk and dv in the inputs' dtypes and dp [B, n] float32; y and c are what `forward` returned.

    Raises ValueError for configurations of dq and dkdv that do not fit each other.
    """
    (B, n, H, D), (T, HKV) = q.shape, k.shape[1:3]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta, dp = (empty(q, B, H, padded(n)) for _ in range(2))
    c_dq, c_dkdv = (config or choose(name, q, 0, log_g is not None) for name, config in zip(("dq", "dkdv"), configs))
    if c_dq.BM < c_dkdv.BM or c_dkdv.BN % c_dkdv.BM:
        raise ValueError(f"dkdv's BM must divide its BN and be at most dq's BM, got {c_dq} for dq, {c_dkdv} for dkdv")
    with device_guard(q.device):
        powers, documents = _pad(powers), _documents(log_g)
        (k_tiles, v_tiles), (k_strides, v_strides) = fetched_tiles((k, c_dq.BN), (v, c_dq.BN))
        dq_kernel[(triton.cdiv(n, c_dq.BM) * B * H,)](
            q, k_tiles, v_tiles, dy, (y, c), powers, documents[0], dq, delta, dp,
            (q.stride(), k_strides, v_strides, dy.stride()),
            T, query_offset(n, T), H, HKV, B * H, heads_together(T, B * H), D=D, BM=c_dq.BM, BN=c_dq.BN,
            **c_dq.launch(),
        )  # fmt: skip
        (q_tiles, dy_tiles), (q_strides, dy_strides) = fetched_tiles((q, c_dkdv.BM), (dy, c_dkdv.BM))
        dkdv_kernel[(triton.cdiv(T, c_dkdv.BN) * B * HKV,)](
            q_tiles, k, v, dy_tiles, c, delta, powers, documents, dk, dv,
            (q_strides, k.stride(), v.stride(), dy_strides),
            T, query_offset(n, T), H, HKV, B * HKV, heads_together(T, B * HKV),
            D=D, BM=c_dkdv.BM, BN=c_dkdv.BN, **c_dkdv.launch(),
        )  # fmt: skip
    return dq, dk, dv, dp[..., :n].sum(1)


def _pad(powers):
    """Return powers [B, n] padded to a multiple of 128, so that tiles need no mask to read them."""
    n = powers.shape[1]
    return torch.nn.functional.pad(powers, (0, padded(n) - n), value=2.0)


def _documents(log_g):
    """Return `first` and `end` of the table above, or (None, None) for None."""
    if log_g is None:
        return None, None
    T = log_g.shape[1]
    resets = torch.nn.functional.pad(log_g.transpose(1, 2) == -torch.inf, (0, padded(T) - T))
    tokens = torch.arange(padded(T), dtype=torch.int32, device=log_g.device)
    first = torch.where(resets, tokens, 0).cummax(2).values
    following = torch.where(resets, tokens, T).roll(-1, 2)
    following[..., -1] = T
    return first, following.flip(2).cummin(2).values.flip(2).contiguous()


def _key_scales(k, log_g):
    """Return `key_scale` of the table above."""
    B, T, HKV, D = k.shape
    scales = empty(k, B * HKV, padded(T))
    strides = (0, 0, 0) if log_g is None else log_g.stride()
    key_scale_kernel[(B * HKV,)](k, log_g, scales, k.stride(), *strides, T, HKV, D=D, N=128)
    return scales
