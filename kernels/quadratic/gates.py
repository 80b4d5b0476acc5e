"""Decays between tiles of the quadratic form, computed from log_g, and the gradient to log_g.

    c_i = log_g_1 + .. + log_g_i in float64, where -inf (a reset: the first token of a document) counts as 0
    decay_ij = exp(c_i - c_j), and 0 across a reset: only differences of sums become float32, and only small ones
        dlog_g_m = sum over i >= m of (row_i - col_i), 0 at a reset; row_i, col_j sum ds_ij s_ij / p over j, over i

A decay between tiles is a product of three factors: of the row, of the key inside its tile (KEY_DECAY), and of the sums
between (C_START, C_END).

    tokens ->  | 0 .. 31 | 32 .. 63 | 64 .. 95 | 96 .. 127 | ..      one program: 1024 tokens of one head
    C          the sum within these 128 ------------------->|
    C_START    ^           ^          ^          ^            the sum up to the first of 32
    C_END             ^          ^          ^           ^     the sum up to the last of 32

    name         shape                                  dtype      what
    C            [B * Hkv, T padded to 128]             float32    the sum since the first token of the 128 around it
    FIRST        the same                               int8       the document's first token, counted from the first
                                                                   of the 128; -1: before it, or in an initial state
    KEY_DECAY    the same                               float32    decay^POWER from the token to the last of the R
                                                                   around it, 0 if that is another document's; in the
                                                                   order 0, 1, 8, 9, 16, .. of the R, then 2, 3, 10,
                                                                   ..: a thread loads what it needs at once
    C_START      [B * Hkv, T padded to 128 / 32]        float64    c of the first of 32 tokens
    C_END        the same                               float64    c of the last
    OPENED       the same                               int32      the first token of the document of the last

Cost: 9.6 bytes a token and head of keys are written. Latency is the limit (0.013 ms for 65,536 tokens).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common import add, at_head, empty, log_gates, maximum, padded, sum_between

TOKENS = 1024  # of a program


class Gates(NamedTuple):
    """The arrays of the table above."""

    C: torch.Tensor
    FIRST: torch.Tensor
    KEY_DECAY: torch.Tensor
    C_START: torch.Tensor
    C_END: torch.Tensor
    OPENED: torch.Tensor


@triton.jit
def _ends(x, R: tl.constexpr):
    """Return, for each entry of x [N], which is monotonic, the first and the last of the R entries around it."""
    N: tl.constexpr = x.shape[0]
    x = tl.reshape(x, [N // R, R])
    index = tl.arange(0, R)[None, :]
    first = tl.sum(tl.where(index == 0, x, 0), 1)[:, None]
    last = tl.sum(tl.where(index == R - 1, x, 0), 1)[:, None]
    first, last = tl.broadcast_to(first, [N // R, R]), tl.broadcast_to(last, [N // R, R])
    return tl.reshape(first, [N]).to(x.dtype), tl.reshape(last, [N]).to(x.dtype)


@triton.jit
def gates_of_head(gates, T, bh):
    """Return the six arrays that `tile_gates` made, at a sequence and head of keys."""
    return Gates(
        at_head(gates.C, T, bh),
        at_head(gates.FIRST, T, bh),
        at_head(gates.KEY_DECAY, T, bh),
        at_head(gates.C_START, T, bh, 32),
        at_head(gates.C_END, T, bh, 32),
        at_head(gates.OPENED, T, bh, 32),
    )


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "HKV"])
def gates_kernel(
    LOG_G,
    gates,  # what is written
    g_b, g_t, g_h,  # strides of LOG_G [B, T, Hkv]
    T, HKV,
    R: tl.constexpr, POWER: tl.constexpr, HAS_INITIAL_STATE: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Write the six arrays for N tokens of one sequence and head.

    C_START, C_END and OPENED count from the first of the N tokens; `gates_before_kernel` adds the earlier tokens.
    """
    pieces = tl.cdiv(T, N)
    bh = tl.program_id(0) // pieces
    token = tl.program_id(0) % pieces * N + tl.arange(0, N)
    LOG_G += tl.cast(bh // HKV, tl.int64) * g_b + tl.cast(bh % HKV, tl.int64) * g_h
    gates = gates_of_head(gates, T, bh)
    written = token < tl.cdiv(T, 128) * 128

    log_g, reset = log_gates(LOG_G, g_t, token, T)
    c = tl.associative_scan(log_g, 0, add)
    first = tl.associative_scan(tl.where(reset if HAS_INITIAL_STATE else reset | (token == 0), token, -1), 0, maximum)
    tl.store(gates.C + token, (c - _ends(c, 128)[0]).to(tl.float32), written)
    tl.store(gates.FIRST + token, tl.maximum(first - token // 128 * 128, -1).to(tl.int8), written)
    to_end = tl.exp(POWER * (_ends(c, R)[1] - c).to(tl.float32))
    of_lanes = token // R * R + token % 8 // 2 * (R // 4) + token % R // 8 * 2 + token % 2
    tl.store(gates.KEY_DECAY + of_lanes, tl.where(_ends(first, R)[1] <= token, to_end, 0.0), written)
    tl.store(gates.C_START + token // 32, c, written & (token % 32 == 0))
    tl.store(gates.C_END + token // 32, c, written & (token % 32 == 31))
    tl.store(gates.OPENED + token // 32, tl.maximum(first, 0), written & (token % 32 == 31))


@triton.jit(do_not_specialize=["T"])
def gates_before_kernel(C_START, C_END, OPENED, T, N: tl.constexpr):
    """Extend C_START, C_END and OPENED of one sequence and head, which count every N tokens anew, to all tokens."""
    bh = tl.program_id(0)
    C_START, C_END, OPENED = at_head(C_START, T, bh, 32), at_head(C_END, T, bh, 32), at_head(OPENED, T, bh, 32)
    blocks = tl.cdiv(T, 128) * 4
    previous = tl.zeros([], tl.float64)
    opened = tl.zeros([], tl.int32)
    for start in range(0, blocks, 1024):
        block = start + tl.arange(0, 1024)
        c_start = tl.load(C_START + block, mask=block < blocks, other=0.0)
        c_end = tl.load(C_END + block, mask=block < blocks, other=0.0)
        total = tl.where(block % (N // 32) == N // 32 - 1, c_end, 0.0)
        c = previous + tl.associative_scan(total, 0, add) - total
        tl.store(C_START + block, c + c_start, block < blocks)
        tl.store(C_END + block, c + c_end, block < blocks)
        first = tl.load(OPENED + block, mask=block < blocks, other=0)
        first = tl.maximum(tl.associative_scan(first, 0, maximum), opened)
        tl.store(OPENED + block, first, block < blocks)
        previous += tl.sum(total, 0)
        opened = tl.max(first, 0)


@triton.jit(do_not_specialize=["T", "H", "HKV"])
def row_totals_kernel(ROW, TOTALS, T, H, HKV, N: tl.constexpr):
    """Write the sum over N tokens of ROW, of one sequence and head of keys, in float64."""
    pieces = tl.cdiv(T, N)
    bh, start = tl.program_id(0) // pieces, tl.program_id(0) % pieces * N
    ROW = at_head(ROW, T, tl.cast(bh // HKV, tl.int64) * H + bh % HKV * (H // HKV))
    tl.store(TOTALS + tl.program_id(0), sum_between(ROW, start, tl.minimum(start + N, T), N))


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "H", "HKV"])
def dlog_g_kernel(
    ROW, LOG_G,  # row_i - col_i, in the first head of each group; LOG_G is read for its resets only
    TOTALS,  # by `row_totals_kernel`, or None if there are at most N tokens
    DLOG_G,  # what is written
    g_b, g_t, g_h,  # strides of LOG_G [B, T, Hkv]
    T, H, HKV,
    N: tl.constexpr,
):  # fmt: skip
    """Write dlog_g of N tokens of one sequence and head, sums in float64."""
    pieces = tl.cdiv(T, N)
    bh, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    b, hkv = tl.cast(bh // HKV, tl.int64), bh % HKV
    after = tl.zeros([], tl.float64)
    if TOTALS is not None:
        after = sum_between(TOTALS + tl.cast(bh, tl.int64) * pieces, piece + 1, pieces, 128)
    token = piece * N + tl.arange(0, N)
    x = tl.load(at_head(ROW, T, b * H + hkv * (H // HKV)) + token, mask=token < T, other=0.0).to(tl.float64)
    LOG_G += b * g_b + tl.cast(hkv, tl.int64) * g_h
    log_g = tl.load(LOG_G + token.to(tl.int64) * g_t, mask=token < T, other=0.0)
    d = tl.where(log_g == float("-inf"), 0.0, after + tl.associative_scan(x, 0, add, reverse=True))
    tl.store(DLOG_G + b * T * HKV + hkv + token.to(tl.int64) * HKV, d.to(tl.float32), token < T)


def tile_gates(log_g, R, power, has_initial_state=False):
    """Launch gates_kernel; return the Gates of log_g, or None for None.

    log_g [B, T, Hkv] float32, any strides, or None; R: keys a tile.
    Allocates 9.6 bytes per token and head of keys.
    """
    if log_g is None:
        return None
    B, T, HKV = log_g.shape
    tokens, blocks = (B * HKV, padded(T)), (B * HKV, padded(T) // 32)
    gates = [empty(log_g, *tokens), empty(log_g, *tokens, dtype=torch.int8), empty(log_g, *tokens)]
    gates += [empty(log_g, *blocks, dtype=dtype) for dtype in (torch.float64, torch.float64, torch.int32)]
    gates = Gates(*gates)
    gates_kernel[(triton.cdiv(T, TOKENS) * B * HKV,)](
        log_g, gates, *log_g.stride(), T, HKV, R=R, POWER=power, HAS_INITIAL_STATE=has_initial_state, N=TOKENS
    )
    if T > TOKENS:
        gates_before_kernel[(B * HKV,)](*gates[3:], T, N=TOKENS)
    return gates


def dlog_g(row, log_g, H):
    """Return dlog_g [B, T, Hkv] float32 of the quadratic form; row [B, H, T padded to 128]: by dkdv_kernel."""
    (B, T, HKV), result, totals = log_g.shape, empty(log_g, *log_g.shape), None
    programs = triton.cdiv(T, TOKENS) * B * HKV
    if T > TOKENS:
        totals = empty(log_g, programs, dtype=torch.float64)
        row_totals_kernel[(programs,)](row, totals, T, H, HKV, N=TOKENS)
    dlog_g_kernel[(programs,)](row, log_g, totals, result, *log_g.stride(), T, H, HKV, N=TOKENS)
    return result
