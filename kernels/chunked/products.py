"""Products: for p = 4, the rows x of products of two entries that take the place of rows, and the square of x.

    x_t[m] = scaled_t[a] scaled_t[b],  for all a <= b, M of them: (q . k)^4 is the square of such rows' (x . x')
    Z      = 2^15 / bound  sum over the chunk of  unit_v weight_t x_t x_t^T,  for denominators x^T Z x

    products_kernel: one program: 256 rows         update_square_kernel: one program: 64 x 64 entries of Z, on or above
    of a head, N products at a time                the diagonal, and their mirror image

         256 tokens ->                                64 | x w |  K tokens     K | x^T |  64    --> Z [64, 64]
    N  | x[a] * x[b] |   for both orders

    name                         shape                   dtype
    scaled, weight, unit_v       see prepare.py                     read
    xt                           [B * H, 2 M, TP]        float16 *  M products in order of the first entry, then the
                                                                    same in the order of scalars (layout.py)
    U, behind its first FS       [B * Hkv, chunks, F]    float16 *  Z, M^2 entries   (* float32 where q, k and v are)

Cost: products are written once and read twice, 4 M bytes a token; M^2 FLOP a token for Z. The memory's bandwidth
limits the first kernel, operands that are made in registers limit the second.
"""

import triton
import triton.language as tl

from ..common import PRECISION, SQUARE_DOWN, SUM_TOP, chunk_of, empty, wait_for_products
from .sizes import at_index, entries_of_state, padded_tokens, tile_of

PRODUCTS = 16  # products at a time; the same for every GPU, so not in the table of configs.py


@triton.jit(do_not_specialize=["T"])
def products_kernel(SCALED, XT, FACTORS, T, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Write M products of two entries of 256 rows of one sequence and head, N at a time."""
    TP = padded_tokens(T)
    bh, block = tl.program_id(0) // (TP // 256), tl.program_id(0) % (TP // 256)
    t = block * 256 + tl.arange(0, 256)
    SCALED, XT = at_index(SCALED, bh, D * TP), at_index(XT, bh, M * TP)
    for m in range(0, M, N):
        entry = m + tl.arange(0, N)
        first, second = tl.load(FACTORS + entry), tl.load(FACTORS + M + entry)
        x = tl.load(tile_of(SCALED, first, TP, t)) * tl.load(tile_of(SCALED, second, TP, t))
        tl.store(tile_of(XT, entry.to(tl.int64), TP, t), x)


@triton.jit(do_not_specialize=["T", "CHUNK", "H", "HKV", "tiles"])
def update_square_kernel(
    XT,
    WEIGHT,
    UNIT_V,
    U,  # the result goes behind the tiles of each chunk
    down,  # 2^15 / bound
    T,
    CHUNK,
    H,
    HKV,
    tiles,
    M: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
):
    """Write 64 x 64 entries of one chunk's Z, and their mirror image, K tokens at a time."""
    TP = padded_tokens(T)
    blocks: tl.constexpr = (M + 63) // 64
    state = tl.program_id(0) // (blocks * blocks)
    bh, chunk = chunk_of(state, T, CHUNK)
    i, j = tl.program_id(0) // blocks % blocks * 64, tl.program_id(0) % blocks * 64
    if i <= j:
        heads, unit = H // HKV, tl.load(UNIT_V + state) * (1 / SQUARE_DOWN)
        m, n = i + tl.arange(0, 64), j + tl.arange(0, 64)
        acc = tl.zeros([64, 64], tl.float32)
        for head in range(heads):
            row = bh // HKV * H + bh % HKV * heads + head
            x_of_head, weights = at_index(XT, row, 2 * M * TP), at_index(WEIGHT, row, TP)
            for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP), K):
                t = start // K * K + tl.arange(0, K)
                w = tl.load(weights + t)[None, :] * unit
                x = tl.load(tile_of(x_of_head, m, TP, t), mask=m[:, None] < M, other=0.0)
                y = tl.load(tile_of(x_of_head, n, TP, t), mask=n[:, None] < M, other=0.0)
                x = (x * w.to(x.dtype)).to(x.dtype)  # below 2^15
                acc = tl.dot(x, tl.trans(y), acc, input_precision=PRECISION)
                wait_for_products(start)
        U = at_index(U, state, entries_of_state(tiles, 4, M, D)) + tiles * (64 * D)
        out = (acc * down * SQUARE_DOWN).to(U.dtype.element_ty)
        inside = (m[:, None] < M) & (n[None, :] < M)
        tl.store(tile_of(U, m, M, n), out, inside)
        tl.store(U + n[None, :] * M + m[:, None], out, inside)


# ---- launchers


def products(s, scaled):
    """Return xt of the table above, from `scaled` [B * H, D, TP]."""
    M = 2 * s.layout.M  # as entries and, in another order, as scalars
    xt = empty(scaled, len(scaled), M, s.TP, dtype=s.half)
    grid = (len(scaled) * s.TP // 256,)
    products_kernel[grid](scaled, xt, s.layout.factors, s.T, D=s.D, M=M, N=PRODUCTS)
    return xt


def update_square(s, heads, prepared, U, config):
    """Write Z of each chunk into U [B * Hkv, chunks, F], summed over the heads in `prepared` that share keys."""
    tiles, M = s.layout.tiles, s.layout.M
    update_square_kernel[(s.B * s.HKV * s.chunks * triton.cdiv(M, 64) ** 2,)](
        prepared.xt, prepared.weight, prepared.unit_v, U, SUM_TOP / s.bound, s.T, s.chunk, heads, s.HKV, tiles,
        M=M, D=s.D, K=config.BN, num_warps=4, num_stages=config.stages,
    )  # fmt: skip
