"""The cross entropy of logits that are in memory, which become its gradient where they are, but for a factor a row.

    loss_n = log sum_v exp(x_nv) - x_n,target        x_nv <- exp(x_nv - c_n) - (v = target) sum_n,  rounded once
    sum_n = sum_v exp(x_nv - c_n)                    scale_n = 1 / sum_n:  scale_n x_nv is the gradient

c_n is the largest of the first entries of row n. The sum is known only at the end of the row. One pass suffices because
the caller divides by it, together with the rows of a matrix product. A later entry may be so much larger than c_n that
exponentials could overflow. It becomes the new c_n, and the entries written so far are multiplied to match. That is
rare.

A warp has a row. Cost: 2 bytes an entry read and 2 written in bfloat16, one exponential. The limit is bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import device_guard, empty

BLOCK = 1024  # entries of a row at a time
HEADROOM = tl.constexpr(60.0)  # exp(60) times a vocabulary is far from float32's and bfloat16's largest number


@triton.jit
def cross_entropy_kernel(X, TARGETS, LOSSES, SCALES, V, padded, stride, BV: tl.constexpr, GRADIENT: tl.constexpr):
    """Write the loss of one row of X, and with GRADIENT its scale and, over the row, the gradient without the scale.

    V entries count. The gradient is zero for the entries from V up to `padded`. A target of -1 gives a loss and a scale
    of 0.
    """
    row, first = tl.program_id(0), tl.arange(0, BV)
    X += tl.cast(row, tl.int64) * stride
    target = tl.load(TARGETS + row)
    of_target = tl.load(X + tl.maximum(target, 0)).to(tl.float32)
    c = tl.maximum(tl.max(tl.load(X + first, first < V, float("-inf")).to(tl.float32), 0), -1e38)
    sums = tl.zeros([BV], tl.float32)
    for start in range(0, padded, BV):
        v = start + first
        x = tl.load(X + v, v < V, float("-inf")).to(tl.float32)
        largest = tl.max(x, 0)
        if largest > c + HEADROOM:
            factor = tl.exp(c - largest)
            sums *= factor
            if GRADIENT:
                tl.debug_barrier()
                for begin in range(0, start, BV):
                    e = tl.load(X + begin + first).to(tl.float32)
                    tl.store(X + begin + first, e * factor)
            c = largest
        e = tl.exp(x - c)
        sums += e
        if GRADIENT:
            tl.store(X + v, e, v < padded)
    total, counts = tl.sum(sums, 0), target >= 0
    tl.store(LOSSES + row, tl.where(counts, c + tl.log(total) - of_target, 0.0))
    if GRADIENT:
        tl.store(SCALES + row, tl.where(counts, 1 / total, 0.0))
        tl.debug_barrier()  # the entry has been written above, by another thread
        tl.store(X + target, tl.exp(of_target - c) - total, counts)


@torch.library.custom_op("sympow::cross_entropy_", mutates_args=("logits",))
def cross_entropy_(logits: Tensor, targets: Tensor, vocab_size: int, gradient: bool) -> tuple[Tensor, Tensor]:
    """Return the losses [N] float32 of logits [N, V], and the scales [N] float32 if `gradient`, else [].

    With `gradient` the logits are replaced: scales[n] logits[n] is then the gradient. They are bfloat16 or wider
    (float16 cannot hold the exponentials); entries of a row are contiguous, and those from vocab_size on do not count.
    targets [N] int64; -1 gives zeros.
    """
    N, V = logits.shape
    losses = empty(logits, N)
    scales = losses.new_empty(N if gradient else 0)
    with device_guard(logits.device):
        block = min(BLOCK, triton.next_power_of_2(V))
        cross_entropy_kernel[(N,)](
            logits,
            targets,
            losses,
            scales,
            vocab_size,
            V,
            logits.stride(0),
            BV=block,
            GRADIENT=gradient,
            num_warps=1,
        )
    return losses, scales


@cross_entropy_.register_fake
def _(logits, targets, vocab_size, gradient):
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    return losses, losses.new_empty(len(logits) if gradient else 0)
