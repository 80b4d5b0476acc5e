"""Functions that the kernels share: the work of each program, powers of two, exact products, reading and writing rows.

Scales. Features, values and states are float16 between the kernels of the chunked form, and float16 ends at 65,504. So
everything is multiplied by powers of two, which cost no precision and are divided out in float32. Every bound that this
needs is in this table, and the kernels use it by name:

    quantity                                           bound              constant
    ---------------------------------------------------------------------------------------------------------------
    the power of two of a row of q or k                2^-30 to 2^30      ROW_EXPONENT: its 4th power is finite
    the power of two of a chunk's values, of a state   2^-100 to 2^100    STATE_EXPONENT
    largest entry of a row of q or k, scaled           2^LIFT, twice it   LIFT[p]
    entries of x: p = 2 of a row, p = 4 products of 2  2^7, 2^4           2^(p / 2 (LIFT[p] + 1))
    largest of a chunk's VALUES, bound of a state      2^14 to 2^15       TO_TOP = 2^TOP
    an entry of a chunk's sum, in units of VALUES      Sizes.bound        SUM_TOP / Sizes.bound: then at most 2^15
    p = 4: what a state holds times its orders         24                 ORDERS = 32 divides it
    p = 4: weight times entry of x, in sum w x x^T     2^15 2^4           SQUARE_DOWN = 16 divides w before
    p = 4: Z as it is read, with its orders (up to 4)  2^12               2^15 4 / ORDERS
    p = 4: largest of 64 entries of a row's Z x        2^14 to 2^15       TO_TOP
    VALUES times entry of x, for the gradient to x     2^22, 2^19         VALUES_DOWN_2, _4 = 256, 32 divide VALUES
    p = 4: rows of the gradient to x                   2^10 to 2^11       TO_GRADIENT_TOP
    l, the sum of a row's weights                      1e-37              LEAST_WEIGHT: 1 / l is finite
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

# How products of float32 are computed. The matrix unit's tf32 has 11 bits, and even three tf32 products in place of one
# have 5 times the error of float32 where strong gates make dP_ij - delta_i small. For bfloat16 and float16 there is no
# such choice.
PRECISION = tl.constexpr("ieee")
# of features, values and states between kernels
HALF = {torch.bfloat16: torch.float16, torch.float32: torch.float32}

ROW_EXPONENT = tl.constexpr(30)
STATE_EXPONENT = tl.constexpr(100)
LIFT = {2: 6, 4: 1}
TOP = 14
TO_TOP = tl.constexpr(2.0**TOP)
SUM_TOP = 2.0**15
ORDERS = tl.constexpr(32)
SQUARE_DOWN = tl.constexpr(16)
VALUES_DOWN_2 = tl.constexpr(256)
VALUES_DOWN_4 = tl.constexpr(32)
TO_GRADIENT_TOP = tl.constexpr(2.0**10)
LEAST_WEIGHT = tl.constexpr(1e-37)
EMPTY = tl.constexpr(-1e30)  # the maximum of nothing, to which exponents are relative; finite: inf - inf is NaN

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# ---- the work of each program


@triton.jit
def block_and_head(blocks, heads, HEADS):
    """Return (block, head) of this program. Programs work on HEADS heads at a time, block by block."""
    index = tl.program_id(0)
    first = index // (blocks * HEADS) * HEADS
    together = tl.minimum(heads - first, HEADS)
    index = index % (blocks * HEADS)
    return index // together, first + index % together


@triton.jit
def chunk_of(program, T, CHUNK):
    """Return (sequence and head, chunk) of a program; programs are in the order of an array [B * heads, chunks]."""
    chunks = tl.cdiv(T, CHUNK)
    return program // chunks, program % chunks


@triton.jit
def rows_of(program, T, CHUNK, H, HKV, BM: tl.constexpr, first=0):
    """Return (sequence and head, sequence, head, first row, chunk, index of the chunk's state) of a program.

    The program has BM rows. Heads of all sequences count from `first`; the index counts the states of the head's
    keys, in an array [B * Hkv, chunks].
    """
    blocks = tl.cdiv(T, BM)
    bh, lo = first + program // blocks, program % blocks * BM
    b, h, chunk = bh // H, bh % H, lo // CHUNK
    return bh, b, h, lo, chunk, (b * HKV + h // (H // HKV)) * tl.cdiv(T, CHUNK) + chunk


@triton.jit
def at_head(X, T, bh, TOKENS: tl.constexpr = 1):
    """Return pointer X advanced to a sequence and head.

    The array has one entry for each TOKENS tokens, and is padded to a multiple of 128 tokens (see `padded`).
    """
    return X + tl.cast(bh, tl.int64) * (tl.cdiv(T, 128) * (128 // TOKENS))


# ---- rows of q, k, v and of results


@triton.jit
def load_rows(X, strides, b, start, h, T, N: tl.constexpr, D: tl.constexpr):
    """Load [N, D]: rows start, start+1, ... of head h of sequence b of X [B, T, H, D], zeros from row T on."""
    row, column = start + tl.arange(0, N), tl.arange(0, D)
    X += tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[2]
    X += tl.cast(start, tl.int64) * strides[1]
    index = tl.arange(0, N)[:, None] * strides[1] + column[None, :] * strides[3]
    return tl.load(X + index, mask=row[:, None] < T, other=0.0)


@triton.jit
def row_pointers(X, b, start, h, T, H, N: tl.constexpr, D: tl.constexpr):
    """Return pointers [N, D] to rows start, start+1, ... of head h of sequence b of X, contiguous [B, T, H, D]."""
    first = (tl.cast(b, tl.int64) * T + start) * H + h
    return X + first * D + tl.arange(0, N)[:, None] * (H * D) + tl.arange(0, D)[None, :]


@triton.jit
def store_rows(OUT, x, b, start, h, T, H):
    """Write x [N, D] float32 as rows start, start+1, ... of head h of sequence b of OUT, contiguous [B, T, H, D]."""
    N: tl.constexpr = x.shape[0]
    mask = (start + tl.arange(0, N))[:, None] < T
    tl.store(row_pointers(OUT, b, start, h, T, H, N, x.shape[1]), x, mask)


@triton.jit
def add_to_rows(OUT, x, b, start, h, T, H):
    """Add x [N, D] float32 to rows start, start+1, ... of head h of sequence b of OUT, contiguous [B, T, H, D]."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    to = row_pointers(OUT, b, start, h, T, H, N, D)
    mask = (start + tl.arange(0, N))[:, None] < T
    x += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, x, mask)


# ---- gates


@triton.jit
def log_gates(LOG_G, g_t, index, T):
    """Return (log_g of the tokens `index` in float64, 0 for -inf and from T on; True where it is -inf)."""
    log_g = tl.load(LOG_G + index.to(tl.int64) * g_t, mask=index < T, other=0.0).to(tl.float64)
    reset = log_g == float("-inf")
    return tl.where(reset, 0.0, log_g), reset


@triton.jit
def sum_between(X, begin, end, N: tl.constexpr):
    """Return the sum of X[begin:end] in float64."""
    total = tl.zeros([], tl.float64)
    for start in range(begin, end, N):
        index = start + tl.arange(0, N)
        total += tl.sum(tl.load(X + index, mask=index < end, other=0.0).to(tl.float64), 0)
    return total


# ---- numbers


@triton.jit
def multiple_of(x, N: tl.constexpr):
    """Return x and tell the compiler that it is a multiple of N, which makes loads wide and asynchronous."""
    return x // N * N


@triton.jit
def unit_scale(largest, MAX_EXPONENT: tl.constexpr):
    """Return the power of two that brings `largest` >= 0, float32, into [1, 2), or 1 for zero, and NaN for infinity.

    It is at most 2^MAX_EXPONENT and at least the inverse of that.
    """
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 127 - MAX_EXPONENT)
    exponent = tl.minimum(exponent, 127 + MAX_EXPONENT)
    return tl.where(largest > 0, ((254 - exponent) << 23).to(tl.float32, bitcast=True), 1.0) + largest * 0.0


@triton.jit
def int_power(x, N: tl.constexpr):
    """Return x^N for N = 1 to 4, by multiplications alone."""
    if N == 1:
        return x
    elif N == 2:
        return x * x
    elif N == 3:
        return x * x * x
    else:
        y = x * x
        return y * y


@triton.jit
def log1p(x):
    """Return log(1 + x) for x >= 0, with all its digits where x is small."""
    return tl.where(1 + x == 1, x, tl.log(1 + x) * (x / ((1 + x) - 1)))


@triton.jit
def inverse(l):
    """Return 1 / l, or zero if l is zero or so small that 1 / l would overflow; NaN for NaN."""
    return tl.where(l <= LEAST_WEIGHT, 0.0, 1 / l)


@triton.jit
def gate_heads(y, g, weight, D: tl.constexpr, eps):
    """Return weight y / sqrt(mean(y^2) + eps) silu(g) for rows y, g of D float32; wider rows have zeros behind."""
    y *= weight / tl.sqrt(tl.sum(y * y, -1, keep_dims=True) / D + eps)
    return y * (g * tl.sigmoid(g))


@triton.jit
def add(a, b):
    """Return a + b, for tl.associative_scan."""
    return a + b


@triton.jit
def maximum(a, b):
    """Return the larger of a and b, for tl.associative_scan."""
    return tl.maximum(a, b)


@triton.jit
def first_8_bits(x):
    """Return float32 x cut off after 8 bits, exact in bfloat16.

    This is a logical operation; rounding, and reading the result as float32 again, is a slow conversion.
    """
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def three_pieces(x):
    """Return (high, middle, low), float32: they sum to float32 x, and each is exact in bfloat16."""
    high = first_8_bits(x)
    middle = first_8_bits(x - high)
    return high, middle, x - high - middle


@triton.jit
def _half_product(x, y, acc):
    """Return acc + x @ y for bfloat16 operands; one may be float16, and is split into two bfloat16 pieces."""
    if x.dtype == tl.float16:
        high = first_8_bits(x.to(tl.float32))
        acc = tl.dot((x.to(tl.float32) - high).to(tl.bfloat16), y, acc)
        return tl.dot(high.to(tl.bfloat16), y, acc)
    elif y.dtype == tl.float16:
        high = first_8_bits(y.to(tl.float32))
        acc = tl.dot(x, (y.to(tl.float32) - high).to(tl.bfloat16), acc)
        return tl.dot(x, high.to(tl.bfloat16), acc)
    else:
        return tl.dot(x, y, acc)


@triton.jit
def exact_product(x, y, acc):
    """Return acc + x @ y, as exact as float32, for one float32 operand and one that is float32, bfloat16 or float16.

    If the other operand is not float32, the float32 one is split into three pieces, and the smallest is added first.
    """
    if x.dtype == y.dtype:
        return tl.dot(x, y, acc, input_precision=PRECISION)
    elif x.dtype == tl.float32:
        high, middle, low = three_pieces(x)
        acc = _half_product(low.to(tl.bfloat16), y, acc)
        acc = _half_product(middle.to(tl.bfloat16), y, acc)
        return _half_product(high.to(tl.bfloat16), y, acc)
    else:
        high, middle, low = three_pieces(y)
        acc = _half_product(x, low.to(tl.bfloat16), acc)
        acc = _half_product(x, middle.to(tl.bfloat16), acc)
        return _half_product(x, high.to(tl.bfloat16), acc)


# ---- registers and the matrix unit


@triton.jit
def diagonal(d, N: tl.constexpr):
    """Return the matrix with d [N] on its diagonal.

    Multiplying columns by d as a matrix product gives the result in the layout that the next product needs. Other
    multiplications would make Triton convert the layout through shared memory.
    """
    index = tl.arange(0, N)
    return tl.where(index[:, None] == index[None, :], d[None, :], 0.0)


@triton.jit
def wait_for_products(i):
    """Wait on Hopper for the products of iteration i of a loop that take an operand from registers.

    Triton 3.6 to 3.8 let the next iteration write to these registers while the matrix unit may read them (triton issue
    9433, see tests/sass.py).
    """
    if not INTERPRETED and cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0):
        wait: tl.constexpr = "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;"
        tl.inline_asm_elementwise(wait, "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1)


# ---- for launchers


def padded(T, multiple=128):
    """Return the padded length of an array with one entry per token, so that tiles need no mask to read it."""
    return -(-T // multiple) * multiple


def empty(like, *shape, dtype=torch.float32):
    """Return an uninitialised tensor on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def as_rows(x, C):
    """Return x as rows of C numbers that stand side by side, the rows with any stride."""
    rows = x.reshape(-1, C)  # may be a view of every second number
    return rows if rows.stride(1) == 1 else rows.contiguous()


def device_guard(device):
    """Return a context in which Triton launches on `device`; a tensor's device need not be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
