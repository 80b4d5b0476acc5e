"""The tokens that the kernels of Heinsen's log attention read: rows of q, k, v and dy, and documents.

A program reads blocks of SUB or BLOCK rows [N, D]. Inside a block it reads one row [1, D] after the other. Documents
[B, T] int32 are numbers that do not decrease: a token sees earlier tokens with its own number. Without documents they
are None, every token has the number 0, and the compiler leaves out what they cost.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import EMPTY, INTERPRETED, load_rows

SUB = tl.constexpr(16)  # tokens of a block inside a chunk: the smallest number of rows of the matrix unit
UNROLL = tl.constexpr(2)  # pairs of a row inside a block that are computed at a time


class Rows(NamedTuple):
    """A tensor [B, T, heads, D] as an argument of a kernel."""

    data: Any
    strides: Any


def rows(x):
    """Return the Rows of a tensor [B, T, heads, D], any strides."""
    return Rows(x, x.stride())


@triton.jit
def entries_of_rows(X, bh, start, T, N: tl.constexpr):
    """Return pointers [N] to tokens start, start+1, ... of one sequence and head of X [B * H, T]."""
    return X + tl.cast(bh, tl.int64) * T + start + tl.arange(0, N)


@triton.jit
def load_block(X, b, start, h, T, D: tl.constexpr):
    """Load SUB rows of X, Rows, as float32 [SUB, D], zeros from token T on."""
    return load_rows(X.data, X.strides, b, start, h, T, SUB, D).to(tl.float32)


@triton.jit
def load_exponents(X, L, b, h, start, T, H, N: tl.constexpr, D: tl.constexpr):
    """Load rows of X, Rows, as float32 [N, D], k, or e = q - L if L is not None, EMPTY from token T on."""
    x = load_rows(X.data, X.strides, b, start, h, T, N, D).to(tl.float32)
    if L is not None:
        mask = start + tl.arange(0, N) < T
        x -= tl.load(entries_of_rows(L, b * H + h, start, T, N), mask=mask, other=-EMPTY)[:, None]
    return x


@triton.jit
def row_of(X, b, start, h, D: tl.constexpr):
    """Return pointers [1, D] to row `start` of head h of sequence b of X, Rows."""
    row = X.data + tl.cast(b, tl.int64) * X.strides[0] + tl.cast(start, tl.int64) * X.strides[1]
    return row + tl.cast(h, tl.int64) * X.strides[2] + tl.arange(0, D)[None, :] * X.strides[3]


@triton.jit
def document_of(DOCUMENTS, b, token, T):
    """Return the number of the document of a token, 0 before the first token and without documents."""
    if DOCUMENTS is None:
        return 0
    else:
        return tl.load(DOCUMENTS + tl.cast(b, tl.int64) * T + token, mask=token >= 0, other=0)


@triton.jit
def documents_of_rows(DOCUMENTS, b, start, T, N: tl.constexpr):
    """Return the numbers of the documents of tokens start, start+1, ..., [N] int32, and -1 from token T on."""
    token = start + tl.arange(0, N)
    if DOCUMENTS is None:
        return tl.where(token < T, 0, -1)
    else:
        return tl.load(DOCUMENTS + tl.cast(b, tl.int64) * T + token, mask=token < T, other=-1)


@triton.jit
def product(x, y, PRECISION: tl.constexpr, acc=None):
    """Return x @ y, added to acc if there is one, in float32."""
    precision: tl.constexpr = "ieee" if INTERPRETED else PRECISION
    return tl.dot(x.to(tl.float32), y.to(tl.float32), acc, input_precision=precision)
