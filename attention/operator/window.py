"""Softmax attention in a sliding window: token i sees itself and the window - 1 tokens before it.

    y = attend_in_window(q, k, v, 2048)             # the pairs cost T * window, and no mask of T x T is made

On a GPU in bfloat16 and float16 torch's flash attention leaves out the tiles that lie outside of the window. Elsewhere
queries are taken in blocks, shorter than long windows; each sees its own keys and a window before them, under one mask.
With a window of 4:

    block of queries           q0 q1 q2 q3
    span of keys    k0 k1 k2 k3 k4 k5 k6 k7         query r, with the key r + window, sees the keys r + 1 to r + window

"Generating Long Sequences with Sparse Transformers" (Child et al., 2019); "Mistral 7B" (Jiang et al., 2023).
"""

import torch
from torch.nn import functional as F

from .packed import attend_within, find_documents, flash_options, flash_rows, takes_flash

BLOCK = 256  # queries; more of them compute more pairs that no query sees, fewer of them copy keys more often


def attend_in_window(q, k, v, window, resets=None):
    """Return y [B, n, H, E] in q's dtype: causal softmax attention of each token to the last `window` tokens.

    q [B, n, H, D] belong to the last n of the T tokens of k [B, T, Hkv, D], v [B, T, Hkv, E]; window is at least 1 and
    counts the token itself; resets [B, T] bool, or None: a token where it is true sees nothing before it.
    """
    n, T = q.shape[1], k.shape[1]
    seen = min(T, n + window - 1)  # the last keys; no query sees earlier ones
    window = min(window, seen)  # flash counts in 32 bits
    k, v = k[:, T - seen :], v[:, T - seen :]
    if resets is not None and seen < T:  # a whole tensor is shared by all layers: find_documents knows it already
        resets = resets[:, T - seen :]
    if n == 1 or not takes_flash(q, k, v):
        return _in_blocks(q, k, v, window, resets)
    if resets is None:
        return _in_flash(q, k, v, window)
    q = F.pad(q, (0, 0, 0, 0, seen - n, 0))  # a query for each key, as packed attention has them
    return attend_within(find_documents(resets), q, k, v, window)[:, seen - n :]


def _in_flash(q, k, v, window):
    """Return what `attend_in_window` does without resets, by flash attention. Its gradient is torch's own."""
    (n, _, D), T = q.shape[1:], k.shape[1]
    q, k, v = (flash_rows(x) for x in (q, k, v))
    flash = torch.ops.aten._flash_attention_forward
    return flash(q, k, v, None, None, n, T, 0.0, True, False, **flash_options(D**-0.5, window))[0][..., :D]


def _in_blocks(q, k, v, window, resets):
    """Return what `attend_in_window` does, in torch's scaled_dot_product_attention."""
    (B, n, H), (T, Hkv) = q.shape[:3], k.shape[1:3]
    M = min(window, n, max(BLOCK, window // 4))  # queries of a block
    blocks = -(-n // M)
    added = blocks * M - n  # rows behind the last token, which are cut off again
    front = n + window - T  # rows in the place of keys that are missing before the first query
    k, v = (_spans(F.pad(x, (0, 0, 0, 0, front, added)), window, M) for x in (k, v))
    q = F.pad(q, (0, 0, 0, 0, 0, added)).unflatten(1, (blocks, M))
    document = q.new_zeros(B, T, dtype=torch.int64) if resets is None else resets.cumsum(1)
    document = _spans(F.pad(document, (front, added), value=-1), window, M)  # [B, blocks, window + M]
    row, column = torch.arange(M, device=q.device)[:, None], torch.arange(window + M, device=q.device)
    mask = (column > row) & (column <= row + window)
    mask = mask & (document[:, :, window:, None] == document[:, :, None])  # [B, blocks, M, window + M]
    q, k, v = (x.flatten(0, 1).transpose(1, 2) for x in (q, k, v))
    mask = mask.flatten(0, 1).unsqueeze(1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=H != Hkv)
    return y.transpose(1, 2).unflatten(0, (B, blocks)).flatten(1, 2)[:, :n]


def _spans(x, window, M):
    """Return views [B, blocks, window + M, ...] of x [B, window + blocks * M, ...]: the tokens that each block sees."""
    return x.unfold(1, window + M, M).movedim(-1, 2)
