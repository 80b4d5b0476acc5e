"""Gates: what tiles and chunks need of log_g, and the gradient to log_g."""

import torch
import triton
import triton.language as tl

from .common import add, at_head, empty, padded


@triton.jit
def _max(a, b):
    return tl.maximum(a, b)


@triton.jit
def log_gates(LOG_G, g_t, at, T):
    """(log_g of the tokens `at` in float64, 0 for -inf and from T on, and where it is -inf)"""
    log_g = tl.load(LOG_G + at.to(tl.int64) * g_t, mask=at < T, other=0.0).to(tl.float64)
    reset = log_g == float("-inf")
    return tl.where(reset, 0.0, log_g), reset


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "HKV"])
def gates_kernel(
    LOG_G, C, FIRST, E, C_START, C_END, OPENED, g_b, g_t, g_h, T, HKV,
    R: tl.constexpr, POWER: tl.constexpr, BEFORE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N tokens of one sequence and head: log_g summed in float64, and what the tiles need of the sums.

    C        the sum since the first token of the 128 around it
    FIRST    the first token of the document, counted from there; -1 if before (BEFORE: or there is a state before all)
    E        decay^POWER from the token to the last of the R around it, 0 if that is another document's
    C_START, C_END, OPENED    for each 32 tokens: the sum up to the first and up to the last of them, and where the
             last's document begins; here since the first of the N tokens, the next kernel adds what was before
    """
    pieces = tl.cdiv(T, N)
    bh = tl.program_id(0) // pieces
    at = tl.program_id(0) % pieces * N + tl.arange(0, N)
    LOG_G += tl.cast(bh // HKV, tl.int64) * g_b + tl.cast(bh % HKV, tl.int64) * g_h
    C, FIRST, E = at_head(C, T, bh), at_head(FIRST, T, bh), at_head(E, T, bh)
    C_START, C_END, OPENED = at_head(C_START, T, bh, 32), at_head(C_END, T, bh, 32), at_head(OPENED, T, bh, 32)
    written = at < tl.cdiv(T, 128) * 128

    log_g, reset = log_gates(LOG_G, g_t, at, T)
    c = tl.associative_scan(log_g, 0, add)
    first = tl.associative_scan(tl.where(reset if BEFORE else reset | (at == 0), at, -1), 0, _max)
    tl.store(C + at, (c - _ends(c, 128)[0]).to(tl.float32), written)
    tl.store(FIRST + at, tl.maximum(first - at // 128 * 128, -1).to(tl.int8), written)
    to_end = tl.exp(POWER * (_ends(c, R)[1] - c).to(tl.float32))
    tl.store(E + at, tl.where(_ends(first, R)[1] <= at, to_end, 0.0), written)
    tl.store(C_START + at // 32, c, written & (at % 32 == 0))
    tl.store(C_END + at // 32, c, written & (at % 32 == 31))
    tl.store(OPENED + at // 32, tl.maximum(first, 0), written & (at % 32 == 31))


@triton.jit(do_not_specialize=["T"])
def gates_before_kernel(C_START, C_END, OPENED, T, N: tl.constexpr):
    """One sequence and head: adds to the N tokens of each program of gates_kernel what was before them."""
    bh = tl.program_id(0)
    C_START, C_END, OPENED = at_head(C_START, T, bh, 32), at_head(C_END, T, bh, 32), at_head(OPENED, T, bh, 32)
    blocks = tl.cdiv(T, 128) * 4
    before = tl.zeros([], tl.float64)
    opened = tl.zeros([], tl.int32)
    for start in range(0, blocks, 1024):
        at = start + tl.arange(0, 1024)
        c_start = tl.load(C_START + at, mask=at < blocks, other=0.0)
        c_end = tl.load(C_END + at, mask=at < blocks, other=0.0)
        total = tl.where(at % (N // 32) == N // 32 - 1, c_end, 0.0)
        c = before + tl.associative_scan(total, 0, add) - total
        tl.store(C_START + at, c + c_start, at < blocks)
        tl.store(C_END + at, c + c_end, at < blocks)
        first = tl.load(OPENED + at, mask=at < blocks, other=0)
        first = tl.maximum(tl.associative_scan(first, 0, _max), opened)
        tl.store(OPENED + at, first, at < blocks)
        before += tl.sum(total, 0)
        opened = tl.max(first, 0)


@triton.jit
def _ends(x, R: tl.constexpr):
    """For each entry of x, which never turns back, the first and the last of the R entries around it."""
    N: tl.constexpr = x.shape[0]
    x = tl.reshape(x, [N // R, R])
    at = tl.arange(0, R)[None, :]
    first = tl.sum(tl.where(at == 0, x, 0), 1)[:, None]
    last = tl.sum(tl.where(at == R - 1, x, 0), 1)[:, None]
    first, last = tl.broadcast_to(first, [N // R, R]), tl.broadcast_to(last, [N // R, R])
    return tl.reshape(first, [N]).to(x.dtype), tl.reshape(last, [N]).to(x.dtype)


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "H", "HKV"])
def dlog_g_kernel(
    ROW, LOG_G, DLOG_G, g_b, g_t, g_h, T, H, HKV, N: tl.constexpr
):  # fmt: skip
    """One sequence and head: d log_g_m = sum of (row_i - col_i) over i >= m, summed in float64; 0 at log_g = -inf."""
    bh = tl.program_id(0)
    b, hkv = tl.cast(bh // HKV, tl.int64), bh % HKV
    ROW = at_head(ROW, T, b * H + hkv * (H // HKV))
    LOG_G += b * g_b + tl.cast(hkv, tl.int64) * g_h
    DLOG_G += b * T * HKV + hkv
    after = tl.zeros([], tl.float64)
    for back in range(0, T, N):
        at = (T - 1) // N * N - back + tl.arange(0, N)
        x = tl.load(ROW + at, mask=at < T, other=0.0).to(tl.float64)
        log_g = tl.load(LOG_G + at.to(tl.int64) * g_t, mask=at < T, other=0.0)
        d = tl.where(log_g == float("-inf"), 0.0, after + tl.associative_scan(x, 0, add, reverse=True))
        tl.store(DLOG_G + at.to(tl.int64) * HKV, d.to(tl.float32), at < T)
        after += tl.sum(x, 0)


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "TP", "CHUNK", "HKV"])
def chunk_gates_kernel(LOG_G, INTO, OUT, WHOLE, g_b, g_t, g_h, T, TP, CHUNK, HKV, N: tl.constexpr):
    """One chunk of one sequence and head: the decay from before the chunk into each token, from each token to the last
    and through the whole chunk, zero across log_g = -inf."""
    chunks = tl.cdiv(T, CHUNK)
    bh, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    LOG_G += tl.cast(bh // HKV, tl.int64) * g_b + tl.cast(bh % HKV, tl.int64) * g_h
    INTO += tl.cast(bh, tl.int64) * TP
    OUT += tl.cast(bh, tl.int64) * TP
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, TP)
    total, resets = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for start in range(begin, end, N):
        at = start + tl.arange(0, N)
        log_g, reset = log_gates(LOG_G, g_t, at, T)
        reset = reset.to(tl.int32)
        into = tl.exp((total + tl.associative_scan(log_g, 0, add)).to(tl.float32))
        tl.store(INTO + at, tl.where(resets + tl.associative_scan(reset, 0, add) == 0, into, 0.0), at < end)
        total += tl.sum(log_g, 0)
        resets += tl.sum(reset, 0)
    before, seen = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for start in range(begin, end, N):
        at = start + tl.arange(0, N)
        log_g, reset = log_gates(LOG_G, g_t, at, T)
        reset = reset.to(tl.int32)
        out = tl.exp((total - before - tl.associative_scan(log_g, 0, add)).to(tl.float32))
        tl.store(OUT + at, tl.where(seen + tl.associative_scan(reset, 0, add) == resets, out, 0.0), at < end)
        before += tl.sum(log_g, 0)
        seen += tl.sum(reset, 0)
    tl.store(WHOLE + tl.program_id(0), tl.where(resets == 0, tl.exp(total.to(tl.float32)), 0.0))


@triton.jit
def _total(X, begin, end, N: tl.constexpr):
    """The sum of X[begin:end] in float64."""
    total = tl.zeros([], tl.float64)
    for start in range(begin, end, N):
        at = start + tl.arange(0, N)
        total += tl.sum(tl.load(X + at, mask=at < end, other=0.0).to(tl.float64), 0)
    return total


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "TP", "CHUNK", "H", "HKV", "blocks", "blocks_z"])
def chunk_dlog_g_kernel(
    INSIDE, READ, GIVEN, CARRIED, CARRIED_Z, LOG_G, DLOG_G, g_b, g_t, g_h, T, TP, CHUNK, H, HKV, blocks, blocks_z,
    N: tl.constexpr,
):  # fmt: skip
    """One chunk of one sequence and head: d log_g_m is the sum over i >= m of what query i read, from the chunk and
    from the state, less what its key gave inside the chunk; plus the sum over j < m of what key j gave to the state;
    plus what the chunk's whole gate carried from state to state. Nothing crosses a chunk."""
    chunks = tl.cdiv(T, CHUNK)
    bh, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    b, hkv = tl.cast(bh // HKV, tl.int64), bh % HKV
    group = H // HKV
    first = b * H + hkv * group
    INSIDE += first * (tl.cdiv(T, 128) * 128)
    GIVEN += tl.cast(bh, tl.int64) * TP
    LOG_G += b * g_b + tl.cast(hkv, tl.int64) * g_h
    DLOG_G += b * T * HKV + hkv
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
    everything = _total(CARRIED + tl.cast(tl.program_id(0), tl.int64) * blocks, 0, blocks, N)
    if CARRIED_Z is not None:
        everything += _total(CARRIED_Z + tl.cast(tl.program_id(0), tl.int64) * blocks_z, 0, blocks_z, N)
    everything += _total(GIVEN, begin, end, N)
    for back in range(begin, end, N):
        at = begin + (end - 1 - begin) // N * N - (back - begin) + tl.arange(0, N)
        x = tl.load(INSIDE + at, mask=at < end, other=0.0).to(tl.float64)
        x -= tl.load(GIVEN + at, mask=at < end, other=0.0)
        for i in range(group):
            x += tl.load(READ + (first + i) * TP + at, mask=at < end, other=0.0)
        log_g = tl.load(LOG_G + at.to(tl.int64) * g_t, mask=at < end, other=0.0)
        d = everything + tl.associative_scan(x, 0, add, reverse=True)
        tl.store(DLOG_G + at.to(tl.int64) * HKV, tl.where(log_g == float("-inf"), 0.0, d).to(tl.float32), at < end)
        everything += tl.sum(x, 0)


def tile_gates(log_g, R, power, before=False):
    """What gates_kernel says: 9.6 bytes a token and key/value head."""
    if log_g is None:
        return [None] * 6
    B, T, HKV = log_g.shape
    tokens, blocks = (B * HKV, padded(T)), (B * HKV, padded(T) // 32)
    gates = [empty(log_g, *tokens), empty(log_g, *tokens, dtype=torch.int8), empty(log_g, *tokens)]
    gates += [empty(log_g, *blocks, dtype=dtype) for dtype in (torch.float64, torch.float64, torch.int32)]
    N = 1024
    gates_kernel[(triton.cdiv(T, N) * B * HKV,)](
        log_g, *gates, *log_g.stride(), T, HKV, R=R, POWER=power, BEFORE=before, N=N
    )
    gates_before_kernel[(B * HKV,)](*gates[3:], T, N=N)
    return gates


def chunk_gates(log_g, s):
    """INTO, OUT [B * Hkv, TP] and WHOLE [B * Hkv, chunks]; None without gates."""
    if log_g is None:
        return None, None, None
    into, out = (empty(log_g, s.B * s.HKV, s.TP) for _ in range(2))
    whole = empty(log_g, s.B * s.HKV, s.chunks)
    chunk_gates_kernel[(s.B * s.HKV * s.chunks,)](
        log_g, into, out, whole, *log_g.stride(), s.T, s.TP, s.chunk, s.HKV, N=min(1024, s.chunk & -s.chunk)
    )
    return into, out, whole
