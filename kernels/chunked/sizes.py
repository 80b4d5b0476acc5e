"""The sizes that the launchers of one chunked call share, the states between its kernels, and pointers into arrays."""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..common import HALF, LIFT, TOP, padded
from ..layout import TILE, entries, features, layout


class Sizes:
    """The sizes and constants that the launchers of one call share.

    B, T, H, HKV, D, p, chunk: as in the call; chunks: the number of chunks; TP: T padded to 256, as `prepare`
    writes rows; layout: the Layout for (D, p); FS, F: the entries of S and of a state; half: the dtype between
    kernels; bound: no entry of a chunk's sum is larger, in units of values; q: for `choose`, its dtype and device.

    q [B, T, H, D], k [B, T, Hkv, D]; p = 2: D = 16, 32, 64, 128, p = 4: D = 16, 32, 64; chunk: tokens, a multiple of
    128. Raises ValueError for a sequence with too many tokens.
    """

    def __init__(self, q, k, p, chunk):
        (B, T, H, D), HKV = q.shape, k.shape[2]
        self.B, self.T, self.H, self.HKV, self.D, self.p, self.q = B, T, H, HKV, D, p, q
        self.chunk, self.chunks = chunk, triton.cdiv(T, chunk)
        self.TP = padded(T, 256)
        row = entries(D, p) * p // 2
        if row * self.TP >= 2**31:  # offsets into XT have 32 bits
            tokens = (2**31 - 1) // row // 256 * 256
            raise ValueError(
                f"a sequence of p={p} and head dimension {D} may have at most {tokens:,} tokens at once, got {T:,}: "
                "cut it into pieces, each with the state of those before"
            )
        self.layout = layout(D, p, q.device)
        self.FS, self.F = self.layout.tiles * TILE * D, state_size(D, p)
        self.half = HALF[q.dtype]
        self.bound = 2.0 ** math.ceil(math.log2(chunk * H // HKV * 2 ** (TOP + 1 + p * (LIFT[p] + 1))))


class States(NamedTuple):
    """The states before each chunk; for gradients, the gradients to the states after each chunk."""

    S: Tensor  # [B * Hkv, chunks, F], for p = 4 with Z behind S
    unit: Tensor  # [B * Hkv, chunks] float32: S is in units of it
    Z: Tensor  # p = 2, else None: [B * Hkv, chunks, D * D] float32, in units of one


def state_size(D, p):
    """Return F, the number of entries of a state: of S, and for p = 4 also of Z = sum x x^T behind it."""
    return features(D, p) * D + (0 if p == 2 else entries(D, p) ** 2)


# ---- in kernels


@triton.jit
def at_index(X, i, size):
    """Return pointer X advanced to item i of an array with `size` entries an item, in 64 bits."""
    return X + tl.cast(i, tl.int64) * size


@triton.jit
def tile_of(X, rows, stride, columns):
    """Return pointers [N, M] to some rows [N] and columns [M] of a matrix X with rows `stride` entries apart."""
    return X + rows[:, None] * stride + columns[None, :]


@triton.jit
def square_of(X, i, D: tl.constexpr):
    """Return pointers [D, D] to matrix i of an array of D x D matrices."""
    return tile_of(at_index(X, i, D * D), tl.arange(0, D), D, tl.arange(0, D))


@triton.jit
def padded_tokens(T):
    """Return TP, T padded to a multiple of 256: the compiler sees that, and makes loads wide and asynchronous."""
    return tl.cdiv(T, 256) * 256


@triton.jit
def entries_of_state(tiles, P: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """Return F, the entries of a state with this many tiles."""
    return tiles * (64 * D) + (M * M if P > 2 else 0)
