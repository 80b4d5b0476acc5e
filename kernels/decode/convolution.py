"""The convolution of the newest token's q, k and v over the last n tokens (layers/convolution.py), in place.

    y = x + sum_{i<n-1} w_i recent_i + w_{n-1} x,    then recent moves on by one token, and its newest is x

    programs  for each sequence: parts of the (H + 2 Hkv) D numbers
    reads     2 n numbers for each of them, and writes n

The limit is latency: the newest token's weights are loaded before the wait for the kernel before.
"""

import triton
import triton.language as tl

from ..configs import early_launch
from .linear import let_next_start, wait_for_previous

BLOCK = 256  # numbers of a program


@triton.jit
def convolution_kernel(
    X, WEIGHT, RECENT, IDS, C, reset_token, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):
    """Convolve BLOCK numbers of one sequence; TOKENS is n."""
    let_next_start(PDL)
    b, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    weight = tl.load(WEIGHT + (TOKENS - 1) * C + c, mask=inside, other=0.0)
    wait_for_previous(PDL)
    seen = tl.load(IDS + b) != reset_token  # the tokens before
    x = tl.load(X + b * C + c, mask=inside, other=0.0)
    y = x + weight * x
    recent = RECENT + b * (TOKENS - 1) * C + c
    for i in tl.static_range(TOKENS - 1):
        earlier = tl.where(seen, tl.load(recent + i * C, mask=inside, other=0.0), 0.0)
        y += tl.load(WEIGHT + i * C + c, mask=inside, other=0.0) * earlier
        if i > 0:
            tl.store(recent + (i - 1) * C, earlier, mask=inside)
    tl.store(recent + (TOKENS - 2) * C, x, mask=inside)
    tl.store(X + b * C + c, y, mask=inside)


def convolve(x, weight, recent, ids, *, reset_token):
    """Overwrite x [B, C], q, k and v of the newest tokens ids [B], with their convolution.

    weight [n, C] and recent [B, n - 1, C], which moves on, are float32. reset_token forgets what is before it (-1:
    none).
    """
    (B, C), TOKENS = x.shape, len(weight)
    sizes = dict(TOKENS=TOKENS, BLOCK=BLOCK)
    convolution_kernel[(B, triton.cdiv(C, BLOCK))](x, weight, recent, ids, C, reset_token, **sizes, **early_launch(x))
