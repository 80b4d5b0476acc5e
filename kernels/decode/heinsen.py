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

Buffers, beside decode.py's:

    m, z                            [B, Hkv, D]         float32   see attention/heinsen.py
    S                               [B, Hkv, D, D]      float32
    log_x                           [B, n_embd]         float32   the position embedding's state
    hidden                          [B, 2 n_embd]       float32   the output of its linear layer
"""

import triton
import triton.language as tl

from ..common import EMPTY, log1p
from ..configs import early_launch
from .linear import let_next_start, wait_for_previous


@triton.jit
def heinsen_kernel(
    QKV, IDS, M, S, Z, OUT, reset_token, log_value_bound, H, HKV, D: tl.constexpr, PDL: tl.constexpr = False
):
    """Add the newest token to the state of one sequence and KV head, and attend to it from the head's query heads."""
    let_next_start(PDL)
    program, d = tl.program_id(0), tl.arange(0, D)
    b, h = program // HKV, program % HKV
    at = tl.cast(program, tl.int64) * D + d
    m, z = tl.load(M + at), tl.load(Z + at)
    s = tl.load(S + at[:, None] * D + d[None, :])
    wait_for_previous(PDL)
    reset = tl.load(IDS + b) == reset_token
    row, group = QKV + b * ((H + 2 * HKV) * D), H // HKV
    k, v = tl.load(row + (H + h) * D + d), tl.load(row + (H + HKV + h) * D + d)
    if log_value_bound is not None:
        v = tl.where(tl.abs(v) <= log_value_bound, tl.exp(v), float("nan"))
    m, z, s = tl.where(reset, EMPTY, m), tl.where(reset, 0.0, z), tl.where(reset, 0.0, s)
    new_m = tl.maximum(m, k)
    decay, new = tl.exp(m - new_m), tl.exp(k - new_m)
    s = s * decay[:, None] + new[:, None] * v[None, :]
    z = z * decay + new
    tl.debug_barrier()  # several threads have loaded the same entry of m and z
    tl.store(M + at, new_m)
    tl.store(Z + at, z)
    tl.store(S + at[:, None] * D + d[None, :], s)
    for i in range(group):
        q = tl.load(row + (h * group + i) * D + d) + new_m
        w = tl.exp(q - tl.max(q, 0))
        y = tl.sum(w[:, None] * s, 0) / tl.sum(w * z, 0)
        if log_value_bound is not None:
            y = tl.log(y)
        tl.store(OUT + (b * H + h * group + i) * D + d, y)


def attend_heinsen(qkv, ids, state, out, *, reset_token, log_value_bound=None):
    """Add the newest token to `state`, in place, and write its attention to out [B, H D].

    qkv [B, (H + 2 Hkv) D] float32, not rotated; ids [B] int64: the tokens; state: (m, S, z) as in this file's table.
    reset_token forgets what is before it (-1: none). With a log_value_bound v and the output are logarithms, NaN if one
    in v is larger than that.
    """
    (B, HKV, D), H = state[0].shape, qkv.shape[1] // state[0].shape[2] - 2 * state[0].shape[1]
    heinsen_kernel[(B * HKV,)](
        qkv, ids, *state, out, reset_token, log_value_bound, H, HKV, D=D, num_warps=8 if D >= 64 else 4,
        **early_launch(qkv),
    )  # fmt: skip


@triton.jit
def log_position_kernel(HIDDEN, LOG_X, X, IDS, reset_token, K, BK: tl.constexpr, PDL: tl.constexpr = False):
    """Advance BK columns of one sequence's log x, and add them to X."""
    let_next_start(PDL)
    blocks = tl.cdiv(K, BK)
    b, k = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BK + tl.arange(0, BK)
    inside, at = k < K, b * K + k
    before = tl.load(LOG_X + at, mask=inside, other=0.0)
    wait_for_previous(PDL)
    before = tl.where(tl.load(IDS + b) == reset_token, 0.0, before)
    hidden = HIDDEN + 2 * b * K + k
    coefficient, logit = tl.load(hidden, mask=inside, other=0.0), tl.load(hidden + K, mask=inside, other=0.0)
    x = tl.load(X + at, mask=inside, other=0.0)
    before += tl.minimum(coefficient, 0.0) - log1p(tl.exp(-tl.abs(coefficient)))  # logsigmoid
    log_x = tl.maximum(before, logit) + log1p(tl.exp(-tl.abs(before - logit)))
    tl.store(LOG_X + at, log_x, inside)
    tl.store(X + at, x + log_x, inside)


def add_log_position(hidden, log_x, x, ids, *, reset_token):
    """Advance log_x [B, n_embd] float32 by one token, in place, and add it to x [B, n_embd] float32.

    hidden [B, 2 n_embd] float32: the output of the position embedding's linear layer for x; ids [B] int64: the tokens;
    reset_token begins again (-1: none).
    """
    (B, K), BK = x.shape, 256
    log_position_kernel[(B * triton.cdiv(K, BK),)](hidden, log_x, x, ids, reset_token, K, BK=BK, **early_launch(x))
