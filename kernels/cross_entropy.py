"""The cross entropy of logits that are in memory, which become its gradient where they are.

    loss_n = log sum_v exp(x_nv) - x_n,target        x_nv <- exp(x_nv - log sum) - (v = target), rounded once

A program has a row: it reads the row for the running maximum and sum, and once more for the gradient, which it writes
over the logits. The programs that run at a time have few enough rows that the second reading finds them in the L2
cache. Cost: 2 bytes an entry read and 2 written in bfloat16, and two exponentials. The limit is bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import NAMESPACE
from .common import device_guard

BLOCK = 8192  # entries of a row at a time
WARPS = 32  # 132 processors then have 264 rows of GPT-2's vocabulary in flight, 27 MB in bfloat16


@triton.jit
def cross_entropy_kernel(X, TARGETS, LOSSES, V, padded, stride, BV: tl.constexpr, GRADIENT: tl.constexpr):
    """Write the loss of one row of X, of which V entries count, and with GRADIENT its gradient over the row, zeros for
    the other entries up to `padded`. A target of -1 gives zeros."""
    row = tl.program_id(0)
    X += tl.cast(row, tl.int64) * stride
    target = tl.load(TARGETS + row)
    # read before the sums below, in which all threads wait for each other: later it may have been overwritten
    of_target = tl.load(X + tl.maximum(target, 0)).to(tl.float32)
    largest, total = float("-inf"), 0.0
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        x = tl.load(X + v, v < V, float("-inf")).to(tl.float32)
        more = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - more) + tl.sum(tl.exp(x - more), 0)
        largest = more
    log_sum = largest + tl.log(total)
    counts = target >= 0
    tl.store(LOSSES + row, tl.where(counts, log_sum - of_target, 0.0))
    if GRADIENT:
        for start in range(0, padded, BV):
            v = start + tl.arange(0, BV)
            x = tl.load(X + v, v < V, float("-inf")).to(tl.float32)
            d = tl.exp(x - log_sum) - tl.where(v == target, 1.0, 0.0)
            tl.store(X + v, tl.where(counts, d, 0.0).to(X.dtype.element_ty), v < padded)


@torch.library.custom_op(f"{NAMESPACE}::cross_entropy_", mutates_args=("logits",))
def cross_entropy_(logits: Tensor, targets: Tensor, vocab_size: int, gradient: bool) -> Tensor:
    """Return the losses [N] float32 of logits [N, V], and if `gradient` replace the logits by their gradient.

    Entries of a row are contiguous, and those from vocab_size on do not count. targets [N] int64; -1 gives zeros.
    """
    N, V = logits.shape
    losses = torch.empty(N, dtype=torch.float32, device=logits.device)
    BV = min(BLOCK, triton.next_power_of_2(V))
    with device_guard(logits.device):
        cross_entropy_kernel[(N,)](
            logits, targets, losses, vocab_size, V, logits.stride(0), BV=BV, GRADIENT=gradient,
            num_warps=max(1, BV * WARPS // BLOCK),
        )  # fmt: skip
    return losses


@cross_entropy_.register_fake
def _(logits, targets, vocab_size, gradient):
    return logits.new_empty(len(logits), dtype=torch.float32)
