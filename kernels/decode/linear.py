"""Linear layers for the newest token of a few sequences, with a norm or SwiGLU before and GELU, a sum or a convolution
after, in one kernel.

    out = f(W norm(x) + b),   out += f(..),   out += W (silu(gate) * up) + b,   for W [N, K], and norm(wte[id])
    u = W norm(x) + b,   out = u + sum_{i<n-1} w_i recent_i + w_{n-1} u,   then recent moves on, and its newest is u

One sequence: a program has BN columns of W (rows of the array [N, K]) and all of x, on vector units. More sequences: a
program has BM sequences and BN columns, on the matrix unit. The norm, or SwiGLU, is computed again by every program,
which costs less than a kernel of its own.

Cost: N K weights are read once, however many sequences (up to 64) there are. With one sequence the limit is latency,
with many the bandwidth. Sums are float32; x is rounded to the dtype of W before the product, as autocast does.

From Hopper on a kernel is launched while the one before it still runs (programmatic dependent launch, `PDL`): it loads
its weights, which no kernel changes, and then waits for the other.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..configs import early_launch

MIN_ROWS = 16  # smallest number of rows of the matrix unit; 2 or more sequences are padded to it


class Norm(NamedTuple):
    """A LayerNorm or RMSNorm before a linear layer: tensors, or pointers in a kernel."""

    weight: Any = None  # [K] float32, None without a norm
    bias: Any = None  # [K] float32 or None
    eps: Any = 1e-5
    rms: Any = None  # 1 for an RMSNorm, which subtracts no mean


class Ids(NamedTuple):
    """The newest token of each sequence: tensors, or pointers in a kernel."""

    ids: Any = None  # [B] int64
    reset_token: Any = -1  # the one that forgets what is before it; -1: none


class Convolution(NamedTuple):
    """A convolution over tokens after a linear layer (layers/convolution.py): tensors, or pointers in a kernel."""

    weight: Any = None  # [n, C] float32, None without one
    recent: Any = None  # [B, n - 1, C] float32: the layer's first C outputs for the tokens before
    channels: Any = 0  # C
    newest: Ids = Ids()


class Linear(NamedTuple):
    """A linear layer, the norm before it and the convolution after it: tensors, or pointers in a kernel."""

    weight: Any  # [N, K]
    bias: Any = None  # [N] float32 or None
    norm: Norm = Norm()
    convolution: Convolution = Convolution()


# ---- launching a kernel while the one before runs


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel start. Until it calls `wait_for_previous` it must not depend on this kernel."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernel before this one, and all before that, have ended."""
    if PDL:
        gdc_wait()


# ---- norm, embedding


@triton.jit
def load_norm(norm, k, K):
    """Load a norm's weight and bias (zeros without one) at columns k, zeros beyond K."""
    weight = tl.load(norm.weight + k, mask=k < K, other=0.0)
    return weight, tl.load(norm.bias + k, mask=k < K, other=0.0) if norm.bias is not None else tl.zeros_like(weight)


@triton.jit
def normalize(x, norm, weight, bias, k, K):
    """Return norm(x) of one row x, zeros beyond K, with what `load_norm` returned; k are all its columns."""
    if norm.rms is None:
        x = tl.where(k < K, x - tl.sum(x, 0) / K, 0.0)
    return x / tl.sqrt(tl.sum(x * x, 0) / K + norm.eps) * weight + bias


@triton.jit
def _mean_and_scale(X, norm, row, K, B, BM: tl.constexpr, BK: tl.constexpr):
    """Return the mean (0 for an RMSNorm) and 1 / standard deviation of each row, [BM], as torch.nn computes them."""
    total = tl.zeros([BM, BK], tl.float32)
    if norm.rms is None:
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            total += tl.load(X + row[:, None] * K + k[None, :], mask=(row[:, None] < B) & (k[None, :] < K), other=0.0)
    mean = tl.sum(total, 1) / K
    total = tl.zeros([BM, BK], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        mask = (row[:, None] < B) & (k[None, :] < K)
        x = tl.load(X + row[:, None] * K + k[None, :], mask=mask, other=0.0) - mean[:, None]
        total += tl.where(mask, x * x, 0.0)
    return mean, 1 / tl.sqrt(tl.sum(total, 1) / K + norm.eps)


@triton.jit
def embed_kernel(IDS, WTE, norm, OUT, K, BK: tl.constexpr, PDL: tl.constexpr = False):
    """Write norm(wte[id]) of one sequence, in float32."""
    let_next_start(PDL)
    b, k = tl.program_id(0), tl.arange(0, BK)
    weight, bias = load_norm(norm, k, K)
    wait_for_previous(PDL)
    x = tl.load(WTE + tl.load(IDS + b) * K + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(OUT + b * K + k, normalize(x, norm, weight, bias, k, K), k < K)


def embed(ids, wte, norm, out):
    """Write norm(wte[ids]) to out [B, n_embd] float32; ids [B] int64, norm: a Norm."""
    K = wte.shape[1]
    embed_kernel[(len(ids),)](ids, wte, norm, out, K, BK=triton.next_power_of_2(K), **early_launch(out))


# ---- linear layers


@triton.jit
def _gelu(x, KIND: tl.constexpr):
    """Return GELU, or with KIND 2 GPT-2's approximation: x (1 + tanh z) / 2 = x sigmoid(2 z)."""
    if KIND == 2:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _sum_recent(convolution, b, n, inside, TOKENS: tl.constexpr):
    """Return (sum_{i<n-1} w_i recent_i, w_{n-1}) of the outputs n of sequences b, pointers to recent_0, what is seen.

    TOKENS is the n of the formula.
    """
    C, weight = convolution.channels, convolution.weight + n
    recent = convolution.recent + b * ((TOKENS - 1) * C) + n
    ids = tl.load(convolution.newest.ids + b + tl.zeros_like(n), mask=inside, other=0)
    seen = inside & (ids != convolution.newest.reset_token)
    total = tl.zeros(inside.shape, tl.float32)
    for i in tl.static_range(TOKENS - 1):
        w = tl.load(weight + i * C, mask=inside, other=0.0)
        total += w * tl.load(recent + i * C, mask=seen, other=0.0)
    return total, tl.load(weight + (TOKENS - 1) * C, mask=inside, other=0.0), recent, seen


@triton.jit
def _append_recent(u, recent, seen, inside, C, TOKENS: tl.constexpr):
    """Move `recent` on by one token, which has the outputs u."""
    for i in tl.static_range(1, TOKENS):
        later = tl.load(recent + i * C, mask=seen, other=0.0) if i < TOKENS - 1 else u
        tl.debug_barrier()  # several threads may have loaded the entry that is overwritten
        tl.store(recent + (i - 1) * C, later, mask=inside)


@triton.jit
def _linear_of_one(
    X, layer, OUT, N, K, BN: tl.constexpr, BK: tl.constexpr, GELU: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `linear_kernel` for one sequence: BN columns of W, all of x at once, without the matrix unit."""
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    inside, columns = k < K, n < N
    rows = layer.weight + tl.cast(n, tl.int64)[:, None] * K
    w = tl.load(rows + k[None, :], mask=columns[:, None] & inside[None, :], other=0.0)
    layer_bias = (
        tl.load(layer.bias + n, mask=columns, other=0.0) if layer.bias is not None else tl.zeros([BN], tl.float32)
    )
    if layer.norm.weight is not None:
        weight, bias = load_norm(layer.norm, k, K)
    wait_for_previous(PDL)
    x = tl.load(X + k, mask=inside, other=0.0)
    if GATED:
        x *= tl.sigmoid(x) * tl.load(X + K + k, mask=inside, other=0.0)
    old = tl.load(OUT + n, mask=columns, other=0.0) if ADD else tl.zeros([BN], tl.float32)
    if TOKENS:
        convolved = n < layer.convolution.channels
        old, last_weight, recent, seen = _sum_recent(layer.convolution, 0, n, convolved, TOKENS)
    if layer.norm.weight is not None:
        x = normalize(x, layer.norm, weight, bias, k, K)
    y = tl.sum(w.to(tl.float32) * x.to(w.dtype).to(tl.float32)[None, :], 1) + layer_bias
    if TOKENS:
        _append_recent(y, recent, seen, convolved, layer.convolution.channels, TOKENS)
        y += last_weight * y
    tl.store(OUT + n, old + (_gelu(y, GELU) if GELU else y), columns)


@triton.jit
def linear_kernel(
    X, layer, OUT, B, N, K, stride, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GELU: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Write f(x) W^T + bias to BM rows and BN columns of OUT [B, N] float32. Its rows are `stride` apart.

    x [B, K] float32 is normalised first if the layer has a norm, and rounded to the dtype of W [N, K]. f is GELU, of
    the kind 1 or 2 that `_gelu` has, or nothing (0). With GATED x is silu(gate) * up, and X [B, 2 K] has gate and up
    side by side. With ADD the result is added to OUT. TOKENS is the n of the layer's convolution, 0 without one.
    """
    let_next_start(PDL)
    if BM == 1:
        _linear_of_one(X, layer, OUT, N, K, BN, BK, GELU, GATED, ADD, TOKENS, PDL)
    else:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        row = tl.program_id(1) * BM + tl.arange(0, BM)
        wait_for_previous(PDL)
        if layer.norm.weight is not None:
            mean, scale = _mean_and_scale(X, layer.norm, row, K, B, BM, BK)
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            columns = layer.weight + tl.cast(n, tl.int64)[:, None] * K + k[None, :]
            w = tl.load(columns, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
            mask = (row[:, None] < B) & (k[None, :] < K)
            x_entries = X + row[:, None] * (2 * K if GATED else K) + k[None, :]
            x = tl.load(x_entries, mask=mask, other=0.0)
            if GATED:
                x *= tl.sigmoid(x) * tl.load(x_entries + K, mask=mask, other=0.0)
            if layer.norm.weight is not None:
                weight, bias = load_norm(layer.norm, k, K)
                x = (x - mean[:, None]) * scale[:, None] * weight[None, :] + bias[None, :]
            acc = tl.dot(x.to(w.dtype), tl.trans(w), acc, input_precision="ieee")
        out, mask = OUT + row[:, None] * stride + n[None, :], (row[:, None] < B) & (n[None, :] < N)
        if layer.bias is not None:
            acc += tl.load(layer.bias + n, mask=n < N, other=0.0)[None, :]
        if TOKENS:
            convolved = mask & (n[None, :] < layer.convolution.channels)
            old, last_weight, recent, seen = _sum_recent(layer.convolution, row[:, None], n[None, :], convolved, TOKENS)
            _append_recent(acc, recent, seen, convolved, layer.convolution.channels, TOKENS)
            acc += last_weight * acc + old
        if GELU:
            acc = _gelu(acc, GELU)
        if ADD:
            acc += tl.load(out, mask=mask, other=0.0)
        tl.store(out, acc, mask)


def tile_sizes(B, N, K):
    """Return (programs over columns, programs over sequences) of a linear layer, and its tile sizes."""
    if B == 1:
        BK = triton.next_power_of_2(K)
        BM, BN = 1, max(1, 4096 // BK)
    else:
        BM, BN, BK = min(64, max(MIN_ROWS, triton.next_power_of_2(B))), 32, 64
    return (triton.cdiv(N, BN), triton.cdiv(B, BM)), dict(BM=BM, BN=BN, BK=BK, num_stages=4)


def convolved_tokens(layer):
    """Return how many tokens a Linear's convolution is over, 0 without one."""
    return 0 if layer.convolution.weight is None else len(layer.convolution.weight)


def linear(layer, out, x, *, gelu=0, gated=False, add=False):
    """Write the result of a Linear layer to out [B, N] float32, or with `add` add it to out.

    x [B, K] float32. gelu: 1 for GELU after the layer, 2 for its approximation by tanh. gated: x is [B, 2 K], gate and
    up, and silu(gate) * up comes before the layer, which has no norm.
    """
    (N, K), B = layer.weight.shape, len(out)
    grid, tiles = tile_sizes(B, N, K)
    tiles |= dict(GELU=gelu, GATED=gated, ADD=add, TOKENS=convolved_tokens(layer))
    linear_kernel[grid](x, layer, out, B, N, K, out.stride(0), **tiles, **early_launch(x))
