"""The first kernel of a layer with a KV cache: q, k and v of the newest token, its position, rotation and gates.

    q, k, v, output gate = W norm(x) + b                           then the convolution of q, k and v
    u' = u + 1, or u + 1 + tanh(W_beta norm(x))                    position
    c = cos(2 pi rates u'), s = sin(2 pi rates u')                       rotation
    log_g = logsigmoid(W_gamma norm(x) + b), or -slope, or 0       gate_sums, resets

    programs  columns of W, as in linear.py; and one for each sequence and KV head, for its gate. The first head's also
              moves the position on.
    reads     W [N, n_embd], and n_embd numbers for each gate. N is (H + 2 Hkv) D, and H D more with an output gate

The limit is latency: weights are loaded before the wait for the kernel before. Positions and the gates'
sums are float64; cos and sin are computed from the fraction of a turn, in float32.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common import log1p
from ..configs import early_launch
from .linear import (
    convolved_tokens,
    let_next_start,
    linear_kernel,
    load_norm,
    normalize,
    tile_sizes,
    wait_for_previous,
)


class Gates(NamedTuple):
    """The gates of a layer, learned, fixed or none: tensors, or pointers in a kernel."""

    weight: Any = None  # [Hkv, n_embd] float32 of learned gates
    bias: Any = None  # [Hkv] float32 of learned gates
    slopes: Any = None  # [Hkv] float32: -log_g of fixed gates


class Position(NamedTuple):
    """The position of the newest token: tensors, or pointers in a kernel. `position` and `rotation` are written."""

    position: Any  # [B] float64; of learned positions the sum of 1 + tanh
    rates: Any  # [D / 2] float64: turns per unit of position
    rotation: Any  # [B, 2, D] float32: the factors of cache.load_rotated
    beta: Any = None  # [1, n_embd] float32 of learned positions


@triton.jit
def _rotation(position, RATES, D: tl.constexpr):
    """Return the two factors [D] float32 that `load_rotated` multiplies with: cos and, with signs, sin."""
    d = tl.arange(0, D)
    turns = position * tl.load(RATES + d // 2)
    angle = (turns - tl.floor(turns)).to(tl.float32) * 6.283185307179586
    return tl.cos(angle), tl.sin(angle) * tl.where(d % 2 == 0, -1.0, 1.0)


@triton.jit
def qkv_kernel(
    X, layer, OUT, newest, gates, place, cache, B, N, K, HKV, C, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, TOKENS: tl.constexpr, WHOLE_ROW: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute the linear layer in the first programs, and position and gates in B Hkv more.

    Each of these writes the gate sum and the resets of one KV head of one sequence to entry `count` of the cache.
    WHOLE_ROW is a power of two, at least K. ROUND is the dtype to which a linear layer's input is rounded.
    """
    program = tl.program_id(0) - tl.cdiv(N, BN)
    if program < 0:
        linear_kernel(X, layer, OUT, B, N, K, N, BM, BN, BK, 0, False, False, TOKENS, PDL)
    elif tl.program_id(1) == 0:
        let_next_start(PDL)
        b, h, k, d = program // HKV, program % HKV, tl.arange(0, WHOLE_ROW), tl.arange(0, D)
        inside = k < K
        position, count = tl.load(place.position + b) + 1, tl.load(cache.count)
        index = (tl.cast(b, tl.int64) * C + count) * HKV + h
        gate_sum = tl.load(cache.gate_sums + index - HKV, mask=count > 0, other=0.0)
        resets = tl.load(cache.resets + index - HKV, mask=count > 0, other=0)
        reset = tl.load(newest.ids + b) == newest.reset_token
        log_g = -tl.load(gates.slopes + h) if gates.slopes is not None else 0.0
        if gates.weight is not None or place.beta is not None:
            norm_weight, norm_bias = load_norm(layer.norm, k, K)
        if gates.weight is not None:
            w_gate, b_gate = tl.load(gates.weight + h * K + k, mask=inside, other=0.0), tl.load(gates.bias + h)
        if place.beta is not None:
            w_beta = tl.load(place.beta + k, mask=inside, other=0.0)
        else:
            cos, sin = _rotation(position, place.rates, D)
        wait_for_previous(PDL)
        if gates.weight is not None or place.beta is not None:
            x = tl.load(X + b * K + k, mask=inside, other=0.0)
            x = normalize(x, layer.norm, norm_weight, norm_bias, k, K).to(ROUND).to(tl.float32)
        if place.beta is not None:
            position += 1 - 2 / (1 + tl.exp(2 * tl.sum(w_beta * x, 0)))  # tanh
            cos, sin = _rotation(position, place.rates, D)
        if gates.weight is not None:
            gate = tl.sum(w_gate * x, 0) + b_gate
            e = tl.exp(-tl.abs(gate))
            log_g = tl.minimum(gate, 0.0) - log1p(e)
        if h == 0:
            tl.store(place.position + b, position)
            tl.store(place.rotation + 2 * b * D + d, cos)
            tl.store(place.rotation + (2 * b + 1) * D + d, sin)
        tl.store(cache.gate_sums + index, gate_sum + tl.where(reset, 0.0, log_g).to(tl.float64))
        tl.store(cache.resets + index, resets + reset.to(tl.int32))


def qkv(layer, out, x, *, newest, gates, position, cache, rounding):
    """Write q, k, v and the output gate of the newest token to out [B, N], its position, rotation, gate sum and resets.

    layer: a Linear with a norm; x [B, n_embd] float32; newest: the Ids; gates: Gates; position: a Position; cache: a
    Cache. Entry `count` of its gate_sums and resets is written. rounding: the dtype of linear layers' inputs.
    """
    (N, K), B, (C, HKV) = layer.weight.shape, len(out), cache.gate_sums.shape[1:]
    (columns, rows), tiles = tile_sizes(B, N, K)
    sizes = dict(D=position.rotation.shape[2], TOKENS=convolved_tokens(layer), WHOLE_ROW=triton.next_power_of_2(K))
    sizes["ROUND"] = tl.bfloat16 if rounding == torch.bfloat16 else tl.float32
    qkv_kernel[(columns + B * HKV, rows)](
        x, layer, out, newest, gates, position, cache, B, N, K, HKV, C, **tiles, **sizes, **early_launch(x)
    )
