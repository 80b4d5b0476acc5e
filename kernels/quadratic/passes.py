"""The quadratic form of power attention in Triton: forward, and backward in two passes without atomics.

    w_ij = decay_ij s_ij^p,   s_ij = q_i . k_j,   decay_ij = exp(sum of log_g over j+1..i),   j <= i
    l_i  = sum_j w_ij         y_i = sum_j w_ij v_j / l_i

with dP_ij = dy_i . v_j and delta_i = dy_i . y_i, all sums over the causal pairs:

    ds_ij = p s_ij^(p-1) decay_ij (dP_ij - delta_i) / l_i
    dq_i = sum_j ds_ij k_j      dk_j = sum_i ds_ij q_i      dv_j = sum_i w_ij / l_i dy_i

    forward_kernel, dq_kernel: one program BM queries       dkdv_kernel: one program BN keys

      queries           keys ->                               keys              queries ->
        BM | BN | BN | BN | diagonal                            BN | diagonal | BM | BM | BM

Tiles off the diagonal need no mask, and their decay is the product of a factor of the row and one of the column, so exp
costs nothing there. Tiles on the diagonal have a mask and an exp for each element.

    name        shape                          dtype      what
    l           [B, H, n padded to 128]        float32    of scaled q and k, saved for the backward pass
    key_scale   [B * Hkv, T padded to 128]     float32    p = 6, 8: a power of two for each row, see Range
    pair        [B, H, n padded to 128, 2]     float32    dq to dkdv: g and g delta; with gates g times the root of the
                                                          decay from the first of the R rows around it, and delta
    g           [B, H, n padded to 128]        float32    dq to dkdv, with gates; g = (scale of q and k)^(p/2) / sqrt(l)
    row         [B, H, T padded to 128]        float32    sums of ds_ij s_ij / p over j; dkdv subtracts those over i
    gates       six arrays                                see gates.py

The n queries belong to the last n of T tokens; T - n is a multiple of 128, so that tiles of queries begin where
tiles of keys do (`operators.quadratic_attention` pads q).

Cost. With N = T^2 D / 2 multiplications a head and product: forward 2 N, dq 3 N, dk and dv 4 N (s and dP are computed
twice, so that every sum has one owner and two runs give the same bits). Each tensor is read or written once or twice, a
few percent of the time from T = 1024 on. The matrix unit is the limit, then the multiplications between products.
docs/understand/attention.md has times and floors, docs/measured/log.md lists what was tried.

Range. There is no logarithm and no running maximum. Powers of two, which cancel, bring the largest entry of each row of
q into [1, 2). For p = 6 and 8 they also do so for the largest entry of the keys up to the row in its document, so that
no row depends on later keys. For p = 2 and 4 keys are taken as they are: float32 is wide enough for |q . k| from 1e-8
to 1e8 and entries of k from 1e-8 to 1e8 (p = 2: 1e-15 to 1e15), and beyond there are zeros or NaN; the backward pass of
p = 6 and 8 has the range of p = 4. l is the sum of the weights as they are rounded for the second product. The backward
pass spreads 1 / l over two factors of its square root: w_ij / l_i = (s_ij^(p/2) g_i)^2. NaN and infinity in q, k or
log_g give NaN in the rows that see them and leave the bits of earlier rows; in v they also reach the earlier rows of
the same tile.

Gates. log_g is summed in float64 and only differences become float32. log_g = -inf begins a document: its tokens see
nothing before. The gradient is dlog_g_m = sum over i >= m of (row_i - col_i), where row and col are the sums of
ds_ij s_ij / p over j and over i. Both are sums of the same float32 numbers, so that what does not straddle m cancels
to float32's rounding.
"""

import math

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common import device_guard, empty, padded
from ..configs import choose, reads_by_descriptor
from ..transforms import empty_like
from .dkdv_kernel import dkdv_kernel
from .dq_kernel import dq_kernel
from .forward_kernel import forward_kernel
from .gates import dlog_g, tile_gates
from .key_scale_kernel import key_scale_kernel

L2_TOKENS = 65536  # so many tokens' keys and values stay in the L2 cache while programs work on several heads


def forward(
    q, k, v, log_g=None, *, p, scale=1.0, normalize=True, chunk=None, overlap=None, num=None, den=None,
    config=None,
):  # fmt: skip
    """Return y [B, n, H, D] in q's dtype and l [B, H, n padded to a multiple of 128], float32, for `backward`.

    q [B, n, H, D], k, v [B, T, Hkv, D], bfloat16 or float32, any strides; log_g [B, T, Hkv] float32 or None; D and p:
    one of HEAD_DIMS and POWERS of support.py. The queries belong to the last n tokens; T - n is a multiple
    of 128. chunk: tokens see nothing before their chunk, a multiple of 128; overlap: exceptions, see `chunk_gates`.
    num [B, n, H, D], den [B, H, n padded], float32: added to the sums before dividing. `scale` cancels.

    With normalize False: num_i = sum_j w_ij v_j, float32, and l_i = sum_j w_ij, both with
    w_ij = decay_ij (scale q_i . k_j)^p, to which other parts of the sums may be added.
    """
    (B, n, H, D), (T, HKV) = q.shape, k.shape[1:3]
    y, l = empty_like(q, None if normalize else torch.float32), _zeros(q, B, H, padded(n))
    c = config or choose("forward", q, p, log_g is not None, chunk is not None)
    with device_guard(q.device):
        key_scale, gates = _key_scales(k, log_g, p, normalize), tile_gates(log_g, c.BN, 0.5)
        tiles, strides = fetched_tiles((q, c.BM), (k, c.BN), (v, c.BN))
        forward_kernel[(triton.cdiv(n, c.BM) * B * H,)](
            *tiles, strides, y, l, None if num is None else (num, den),
            None if normalize else _powers_of_two(scale, p), key_scale, gates, overlap,
            T, query_offset(n, T), chunk or T, H, HKV, heads_together(chunk or T, B * H),
            P=p, TILE=(c.BM, c.BN, D), **c.launch(),
        )  # fmt: skip
    return y, l


def backward(
    dy, dl, q, k, v, log_g, y, l, *, p, scale=1.0, normalize=True, chunk=None, overlap=None, has_initial_state=False,
    needs=(True, True, True), configs=(None, None),
):  # fmt: skip
    """Return dq, dk, dv in the inputs' dtypes and dlog_g [B, T, Hkv] float32, or None without gates.

    With normalize, y and l are from `forward` and dl is not read; else y and l are not read, and dl has l's shape.
    With `chunk`, row of the table above is returned in place of dlog_g, for `chunk_dlog_g`. needs: (dq, dk and dv,
    dlog_g), True for each that is needed; the others are None.
    Raises ValueError for configurations that do not fit each other.
    """
    (B, n, H, D), (T, HKV) = q.shape, k.shape[1:3]
    needs_q, needs_kv, needs_last = needs
    rows = needs_last and log_g is not None
    needs_kv = needs_kv or rows  # dkdv_kernel completes row
    dq, dk, dv = (empty_like(x) if needed else None for x, needed in ((q, needs_q), (k, needs_kv), (v, needs_kv)))
    pair, g, row = empty(q, B, H, padded(n), 2), None, None
    if log_g is not None:
        g = empty(q, B, H, padded(n))
        if rows:  # zeros if the first tokens have no queries
            row = (empty if n == T else _zeros)(q, B, H, padded(T))
    c_dq = configs[0] or choose("dq", q, p, log_g is not None, chunk is not None)
    c_dkdv = configs[1] or choose("dkdv", q, p, log_g is not None, chunk is not None)
    if c_dq.BM < c_dkdv.BM or c_dkdv.BN % c_dkdv.BM:
        raise ValueError(f"dkdv's BM must divide its BN and be at most dq's BM, got {c_dq} for dq, {c_dkdv} for dkdv")
    with device_guard(q.device):
        key_scale, gates = _key_scales(k, log_g, p, normalize), tile_gates(log_g, c_dq.BN, 1.0, has_initial_state)
        (k_tiles, v_tiles), (k_strides, v_strides) = fetched_tiles((k, c_dq.BN), (v, c_dq.BN))
        dq_kernel[(triton.cdiv(n, c_dq.BM) * B * H,)](
            q, k_tiles, v_tiles, dy, (q.stride(), k_strides, v_strides, dy.stride()), (y, l) if normalize else None,
            None if normalize else (*_powers_of_two(scale, p), dl), key_scale, gates, overlap, (dq, pair, g, row),
            T, query_offset(n, T), chunk or T, H, HKV, heads_together(chunk or T, B * H),
            P=p, HAS_INITIAL_STATE=has_initial_state, TILE=(c_dq.BM, c_dq.BN, D, c_dkdv.BM), **c_dq.launch(),
        )  # fmt: skip
        if needs_kv:
            (q, dy), (q_strides, dy_strides) = fetched_tiles((q, c_dkdv.BM), (dy, c_dkdv.BM))
            alone = normalize and not (has_initial_state and log_g is None)  # FIRST says it where there are gates
            dkdv_kernel[(triton.cdiv(T, c_dkdv.BN) * B * HKV,)](
                q, k, v, dy, (q_strides, k.stride(), v.stride(), dy_strides), gates, overlap, (pair, g, row), dk, dv,
                T, query_offset(n, T), chunk or T, H, HKV, heads_together(chunk or T, B * HKV),
                P=p, ALONE=alone, TILE=(c_dkdv.BM, c_dkdv.BN, D), **c_dkdv.launch(),
            )  # fmt: skip
        if not rows:
            return dq, dk, dv, None
        return dq, dk, dv, row if chunk else dlog_g(row, log_g, H)


def _zeros(like, *shape):
    return empty(like, *shape).zero_()


def query_offset(n, T):
    """Return OFFSET for n queries of T tokens; None, for as many as there are, is a constant to the compiler."""
    return None if n == T else T - n


def _key_scales(k, log_g, p, normalize):
    """Return KEY_SCALE of the table above, or None if keys are taken as they are."""
    if p <= 4 or not normalize:
        return None
    B, T, HKV, D = k.shape
    scales = empty(k, B * HKV, padded(T))
    strides = (0, 0, 0) if log_g is None else log_g.stride()
    key_scale_kernel[(B * HKV,)](k, log_g, scales, k.stride(), *strides, T, HKV, D=D, N=128)
    return scales


def fetched_tiles(*tensors_and_rows):
    """Return (tensors, strides) for a kernel that fetches tiles of so many rows.

    The tensors are descriptors, and strides is None, if there is a copy engine that can fetch them: every row must
    begin at a multiple of 16 bytes.
    """
    tensors = [x for x, _ in tensors_and_rows]
    if not all(reads_by_descriptor(x) and aligned(x) for x in tensors):
        return tensors, tuple(x.stride() for x in tensors)
    tiles = [TensorDescriptor(x, x.shape, x.stride(), [1, n, 1, x.shape[3]]) for x, n in tensors_and_rows]
    return tiles, (None,) * len(tensors)


def aligned(x):
    """Return True if every row of x [B, T, H, D] is contiguous and begins at a multiple of 16 bytes."""
    strides = all(n and n * x.element_size() % 16 == 0 for n in x.stride()[:3])
    return x.stride(3) == 1 and strides and x.data_ptr() != 0 and x.data_ptr() % 16 == 0


def _powers_of_two(scale, p):
    """Return (a power of two near scale, by which bfloat16 is multiplied exactly; the rest of scale^p)."""
    power = 2.0 ** round(math.log2(abs(scale)))
    return power, (scale / power) ** p


def heads_together(T, heads):
    """Return how many heads programs work on side by side.

    One head after the other, keys stay in the L2 cache; side by side, the longest blocks come first and the last
    programs to run are short.
    """
    return max(1, min(heads, L2_TOKENS // T))
