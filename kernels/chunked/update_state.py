"""Update state: the sum over each chunk's tokens of phi(x_t) scaled_v_t^T, which is added to the state.

    U[f, e] = 2^15 / bound  sum over t of  x_t[slice(f)] x_t[scalar(f)] scaled_v_t[e]
    p = 4, behind it:  Z, the square of x (products.py)

in units of unit_v. No entry is above `bound`, so that all fit float16. For p = 2 x is a row, for p = 4 the products of
two entries. A tile has 64 features: 4 slots, each a slice of 16 entries of x times one scalar (layout.py).

    one program: 4 tiles of a chunk's state

                        K tokens ->                      D
      slot 0  16 entries | x s0 |                K  | values |        64 x D sums in registers, four:
      slot 1  16 entries | x s1 |      times        |        |   -->  x stays, s is of tile 0, 1, 2, 3
      slot 2  16 entries | x s2 |                   |        |
      slot 3  16 entries | x s3 |  made in registers

    name         shape                        dtype      units
    xt, scaled_v see prepare.py                          read
    U            [B * Hkv, chunks, F]         float16    unit_v 2^15 / bound; F = 64 tiles D, for p = 4 and M^2 more
                                                         (float32 where q, k and v are)

Cost: 2 * 64 tiles D FLOP a token and head. U is written once (328 KB a chunk for D = 64, p = 2); each program reads 64
to 80 rows of xt and all values of its chunk, from the L2 cache. The matrix unit waits for operands from registers:
latency is the limit, at two programs an SM (70% of the matrix unit's rate for p = 2).
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common import PRECISION, SUM_TOP, chunk_of, empty, wait_for_products
from ..configs import choose, reads_by_descriptor
from .products import update_square
from .sizes import at_index, entries_of_state, padded_tokens, tile_of


@triton.jit
def _column_features(x, s, K: tl.constexpr):
    """Return [64, K]: each 16 rows of x [64, K] times a scalar of the token, s [4, K]."""
    return (x.reshape([4, 16, K]) * s[:, None, :]).reshape([64, K])


@triton.jit
def _add_tile(acc, x, v, x_of_head, scalars, TP, t, K: tl.constexpr):
    """Return acc [64, D] plus the features x [64, K] times these scalars, times v [K, D]."""
    s = tl.load(tile_of(x_of_head, scalars, TP, t))
    return tl.dot(_column_features(x, s, K), v, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "CHUNK", "H", "HKV", "tiles"])
def update_state_kernel(
    XT,
    VALUES,  # with DESCRIPTOR a tensor descriptor of tiles [K, D]
    U,  # the result
    PARTS,  # the layout's table of each part's slices and first scalars
    GROUPS,  # the layout's table: the part of every four tiles, and the first tile's place in it
    down,  # 2^15 / bound
    T,
    CHUNK,
    H,
    HKV,
    tiles,
    P: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """Write four tiles of one chunk's U, summed over the query heads of a group (one head of keys if H = HKV)."""
    TP = padded_tokens(T)
    groups = tiles // 4
    state = tl.program_id(0) // groups
    bh, chunk = chunk_of(state, T, CHUNK)
    heads = H // HKV
    number = tl.program_id(0) % groups
    part = PARTS + tl.load(GROUPS + number * 2) * 16
    i = tl.load(GROUPS + number * 2 + 1)
    entry = tl.arange(0, 64)
    slices = tl.load(part + entry // 16) + entry % 16
    scalars = tl.load(part + 4 + tl.arange(0, 4)) + i
    scalars1, scalars2, scalars3 = scalars + 1, scalars + 2, scalars + 3

    acc0 = tl.zeros([64, D], tl.float32)
    acc1 = tl.zeros([64, D], tl.float32)
    acc2 = tl.zeros([64, D], tl.float32)
    acc3 = tl.zeros([64, D], tl.float32)
    if not DESCRIPTOR:
        values_of_head = tile_of(VALUES, tl.arange(0, K), D, tl.arange(0, D))
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP)
    for head in range(heads):
        row = bh // HKV * H + bh % HKV * heads + head
        x_of_head = at_index(XT, row, P // 2 * M * TP)
        for start in range(begin, end, K):
            t = start // K * K + tl.arange(0, K)
            if DESCRIPTOR:
                v = VALUES.load([row * TP + start, 0])
            else:
                v = tl.load(values_of_head + (tl.cast(row, tl.int64) * TP + start) * D)
            x = tl.load(tile_of(x_of_head, slices, TP, t))
            acc0 = _add_tile(acc0, x, v, x_of_head, scalars, TP, t, K)
            acc1 = _add_tile(acc1, x, v, x_of_head, scalars1, TP, t, K)
            acc2 = _add_tile(acc2, x, v, x_of_head, scalars2, TP, t, K)
            acc3 = _add_tile(acc3, x, v, x_of_head, scalars3, TP, t, K)
            wait_for_products(start)
    U = at_index(U, state, entries_of_state(tiles, P, M, D)) + number * (256 * D)
    to = tile_of(U, tl.arange(0, 64), D, tl.arange(0, D))
    tl.store(to, acc0 * down)
    tl.store(to + 64 * D, acc1 * down)
    tl.store(to + 128 * D, acc2 * down)
    tl.store(to + 192 * D, acc3 * down)


# ---- launcher


def update_state(s, heads, prepared, config=None):
    """Return U [B * Hkv, chunks, F], from which `discumsum` makes states.

    heads: the number of heads in `prepared`, H or Hkv. D is 16 to 128 for p = 2 and 16 to 64 for p = 4.
    """
    U = empty(prepared.xt, s.B * s.HKV, s.chunks, s.F, dtype=s.half)
    config = config or choose("update_state", s.q, s.p)
    values, descriptor = prepared.scaled_v, reads_by_descriptor(s.q)
    if descriptor:
        values = TensorDescriptor.from_tensor(values, [config.BN, s.D])
    tiles, tables = s.layout.tiles, (s.layout.parts, s.layout.groups)
    update_state_kernel[(s.B * s.HKV * s.chunks * tiles // 4,)](
        prepared.xt, values, U, *tables, SUM_TOP / s.bound, s.T, s.chunk, heads, s.HKV, tiles,
        P=s.p, M=s.layout.M, D=s.D, K=config.BN, DESCRIPTOR=descriptor, **config.launch(),
    )  # fmt: skip
    if s.p == 4:
        update_square(s, heads, prepared, U, config)
    return U
