"""Softmax attention: the baseline.

What it computes      y_i = sum_{j<=i} A_ij v_j,  A_ij = exp(q_i . k_j / sqrt(D)) / sum_{l<=i} exp(q_i . k_l / sqrt(D))
The quadratic form    the only one: exp has no finite feature map
The state             every key and value (KV cache): memory and time per token grow with the text
With a window W       j > i - W besides: the state has the last W keys and values, at a constant cost per token
"""

import torch
from torch.nn import functional as F

from .gates import reset_gates
from .operator.packed import attend_within, find_documents, takes_flash
from .operator.window import attend_in_window
from .variant import RECIPE, KVCacheVariant

MASK_ENTRIES = 2**28  # that exist at any time, for each sequence


def softmax_attention(q, k, v, log_g=None):
    """Compute causal softmax attention with torch's scaled_dot_product_attention.

    q [B, n, H, D] belong to the last n of the T tokens of k [B, T, Hkv, D], v [B, T, Hkv, E]. log_g [B, T, Hkv], the
    same for all heads, holds only 0 and -inf; -inf hides all tokens before. Returns [B, n, H, E].

    With log_g it makes a mask of n T entries for each sequence, which `packed_softmax_attention` does without; and for
    n < T where torch's flash attention does not take the tensors. A mask of more than MASK_ENTRIES is made in parts.
    """
    (n, H), (T, Hkv) = q.shape[1:3], k.shape[1:3]
    heads, mask = [x.transpose(1, 2) for x in (q, k, v)], None
    if log_g is not None or n < T:
        if log_g is None and q.shape[3] % 8 == 0 and takes_flash(q, k, v):
            # it takes causal queries for the last tokens', scaled_dot_product_attention for the first tokens'
            return torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, True)[0].transpose(1, 2)
        if n * T > MASK_ENTRIES:
            half = n // 2
            first = (x if x is None else x[:, : half - n] for x in (k, v, log_g))
            parts = softmax_attention(q[:, :half], *first), softmax_attention(q[:, half:], k, v, log_g)
            return torch.cat(parts, dim=1)
        tokens = torch.arange(T, device=q.device)
        mask = tokens[-n:, None] >= tokens  # [n, T]
    if log_g is not None:
        document = (log_g[..., 0] == float("-inf")).cumsum(1).unsqueeze(1)  # [B, 1, T]
        mask = mask & (document[..., -n:, None] == document[..., None, :])
    y = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None, enable_gqa=H != Hkv)
    return y.transpose(1, 2)


def packed_softmax_attention(q, k, v, resets):
    """Compute causal softmax attention within documents, without a mask, for T queries.

    q [B, T, H, D], k [B, T, Hkv, D], v [B, T, Hkv, E]; resets [B, T] bool is true where a document begins. Returns
    [B, T, H, E]. Under torch.compile a mask is made after all where torch's flash attention does not take the tensors.
    """
    if torch.compiler.is_compiling() and not takes_flash(q, k, v):
        return softmax_attention(q, k, v, reset_gates(resets, None, k))
    return attend_within(find_documents(resets), q, k, v)


class Softmax(KVCacheVariant):
    decodes_on_kernels = "softmax"
    splits_context = True
    windows = follows = True

    @classmethod
    def recipe(cls, config):
        return RECIPE | dict(convolution=4)

    def forward(self, x, qkv, resets=None, state=None):
        """Return (y [B, n, H, E], the state after the n tokens, or None without a state)."""
        positions, window = self.positions(x, state), self.config.window
        q, k, v = self.rotate(qkv, positions)
        if state is None and self.context is not None:
            return self.context.softmax_attention(q, k, v, reset_gates(resets, None, k)), None
        if state is None and 0 < window < q.shape[1]:
            return attend_in_window(q, k, v, window, resets), None
        if state is None:
            y = softmax_attention(q, k, v) if resets is None else packed_softmax_attention(q, k, v, resets)
            return y, None
        state = state.append(k, v, reset_gates(resets, None, k), positions)
        if window:
            resets = None if state.log_g is None else state.log_g[..., 0] == float("-inf")
            return attend_in_window(q, state.k, state.v, window, resets), state.last(window)
        return softmax_attention(q, state.k, state.v, state.log_g), state

    @classmethod
    def context_layout(cls, config, block_size, dtype, device):
        if config.window:
            raise ValueError(f"ranks cannot share a sequence in a window, got window={config.window}: use window=0")
        return super().context_layout(config, block_size, dtype, device)

    def attention_flops(self, block_size, dtype, device):
        T, W = block_size, min(self.config.window or block_size, block_size)
        pairs = W - W * W / (2 * T)  # of a token, on average: half of T without a window
        return 12 * pairs * self.config.n_head * self.config.head_dim
