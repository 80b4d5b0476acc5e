"""The newest token in a layer of Heinsen's log attention, and in its position embedding: both update a state in place.

    m' = max(m, k);  S' = exp(m - m') S + exp(k - m') v^T;  z' = exp(m - m') z + exp(k - m')             attend_heinsen
    y = sum over d of exp(q_d + m'_d - c) S'_d / sum over d of exp(q_d + m'_d - c) z'_d,  c = max over d of q_d + m'_d
    log x' = logaddexp(log x + logsigmoid(first half of W x + b), second half),  x += log x'            add_log_position

Log values come in as v = exp(log v) and go out as log y. A reset token begins with an empty state, and with log x = 0.

    programs  attend_heinsen: one for each sequence and KV head, which serves all its query heads
              add_log_position: BK columns of each sequence, after the linear layer
    reads     and writes 4 D (D + 2) bytes of state for each sequence and KV head: 17 KB at D = 64

The state is loaded before the wait for the kernel before. It was written one token earlier, and between two tokens the
decoder launches an ordinary kernel (it counts tokens), which starts when all before it has ended. With one sequence the
limit is latency.

Buffers, beside the ones in power.py:

    m, z                            [B, Hkv, D]         float32   see attention/heinsen.py
    S                               [B, Hkv, D, D]      float32
    log_x                           [B, n_embd]         float32   the position embedding's state
    hidden                          [B, 2 n_embd]       float32   the output of its linear layer
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import EMPTY, log1p
from ..configs import early_launch
from .cache import gate_output
from .linear import let_next_start, wait_for_previous


class State(NamedTuple):
    """A layer's state: tensors, or pointers in a kernel; shapes are in this file's table."""

    m: Any
    S: Any
    z: Any


@triton.jit
def heinsen_kernel(qkv, newest, state, OUT, log_value_bound, H, HKV, D: tl.constexpr, PDL: tl.constexpr = False):
    """Add the newest token to the state of one sequence and KV head, and attend to it from the head's query heads."""
    let_next_start(PDL)
    program, d = tl.program_id(0), tl.arange(0, D)
    b, h = program // HKV, program % HKV
    row = tl.cast(program, tl.int64) * D + d
    S = state.S + row[:, None] * D + d[None, :]
    m, z, s = tl.load(state.m + row), tl.load(state.z + row), tl.load(S)
    wait_for_previous(PDL)
    reset = tl.load(newest.ids + b) == newest.reset_token
    heads, group = qkv.heads + b * qkv.stride, H // HKV
    k, v = tl.load(heads + (H + h) * D + d), tl.load(heads + (H + HKV + h) * D + d)
    if log_value_bound is not None:
        v = tl.where(tl.abs(v) <= log_value_bound, tl.exp(v), float("nan"))
    m, z, s = tl.where(reset, EMPTY, m), tl.where(reset, 0.0, z), tl.where(reset, 0.0, s)
    new_m = tl.maximum(m, k)
    decay, new = tl.exp(m - new_m), tl.exp(k - new_m)
    s = s * decay[:, None] + new[:, None] * v[None, :]
    z = z * decay + new
    tl.debug_barrier()  # several threads have loaded the same entry of m and z
    tl.store(state.m + row, new_m)
    tl.store(state.z + row, z)
    tl.store(S, s)
    for i in range(group):
        q = tl.load(heads + (h * group + i) * D + d) + new_m
        w = tl.exp(q - tl.max(q, 0))
        y = tl.sum(w[:, None] * s, 0) / tl.sum(w * z, 0)
        if log_value_bound is not None:
            y = tl.log(y)
        y = gate_output(y, heads + (H + 2 * HKV + h * group + i) * D + d, qkv.gate_weight, D)
        tl.store(OUT + (b * H + h * group + i) * D + d, y)


def attend_heinsen(qkv, newest, state, out, *, log_value_bound=None):
    """Add the newest token to `state`, in place, and write its attention to out [B, H D].

    qkv: Heads, which need no rotation; newest: the Ids; state: a State. With a log_value_bound v and the output are
    logarithms, NaN if one in v is larger than that.
    """
    B, HKV, D = state.m.shape
    H = out.shape[1] // D
    options = dict(D=D, num_warps=8 if D >= 64 else 4) | early_launch(out)
    heinsen_kernel[(B * HKV,)](qkv, newest, state, out, log_value_bound, H, HKV, **options)


@triton.jit
def log_position_kernel(HIDDEN, LOG_X, X, newest, K, BK: tl.constexpr, PDL: tl.constexpr = False):
    """Advance BK columns of one sequence's log x, and add them to X."""
    let_next_start(PDL)
    blocks = tl.cdiv(K, BK)
    b, k = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BK + tl.arange(0, BK)
    inside, entry = k < K, b * K + k
    log_x = tl.load(LOG_X + entry, mask=inside, other=0.0)
    wait_for_previous(PDL)
    log_x = tl.where(tl.load(newest.ids + b) == newest.reset_token, 0.0, log_x)
    hidden = HIDDEN + 2 * b * K + k
    coefficient, logit = tl.load(hidden, mask=inside, other=0.0), tl.load(hidden + K, mask=inside, other=0.0)
    x = tl.load(X + entry, mask=inside, other=0.0)
    log_x += tl.minimum(coefficient, 0.0) - log1p(tl.exp(-tl.abs(coefficient)))  # logsigmoid
    log_x = tl.maximum(log_x, logit) + log1p(tl.exp(-tl.abs(log_x - logit)))
    tl.store(LOG_X + entry, log_x, inside)
    tl.store(X + entry, x + log_x, inside)


def add_log_position(hidden, log_x, x, newest):
    """Advance log_x [B, n_embd] float32 by one token, in place, and add it to x [B, n_embd] float32.

    hidden [B, 2 n_embd] float32: the output of the position embedding's linear layer for x; newest: the Ids. Its
    reset_token begins again.
    """
    (B, K), BK = x.shape, 256
    log_position_kernel[(B * triton.cdiv(K, BK),)](hidden, log_x, x, newest, K, BK=BK, **early_launch(x))
