"""Softmax attention: the baseline.

What it computes      y_i = sum_{j<=i} A_ij v_j,  A_ij = exp(q_i . k_j / sqrt(D)) / sum_{l<=i} exp(q_i . k_l / sqrt(D))
The quadratic form    the only one: exp has no finite feature map
The state             every key and value (KV cache): memory and time per token grow with the text
"""

import torch
from torch.nn import functional as F

from .circulate import SoftmaxPairs, circulate
from .gates import reset_gates
from .variant import KVCacheVariant


def softmax_attention(q, k, v, log_g=None, *, scale=None):
    """Compute causal softmax attention with torch's scaled_dot_product_attention.

    q [B, n, H, D] belong to the last n of the T tokens of k [B, T, Hkv, D], v [B, T, Hkv, E]. log_g [B, T, Hkv] holds
    only 0 and -inf; -inf hides all tokens before. Returns [B, n, H, E].
    """
    (n, H), (T, Hkv) = q.shape[1:3], k.shape[1:3]
    mask = None
    if log_g is not None or n < T:
        at = torch.arange(T, device=q.device)
        mask = at[-n:, None] >= at  # [n, T]
    if log_g is not None:
        document = (log_g == float("-inf")).cumsum(1).transpose(1, 2)  # [B, Hkv, T]
        document = document.repeat_interleave(H // Hkv, dim=1)
        mask = mask & (document[..., -n:, None] == document[..., None, :])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=H != Hkv
    )
    return y.transpose(1, 2)


class Softmax(KVCacheVariant):
    decodes_on_kernels = "softmax"
    splits_context = True

    def forward(self, x, q, k, v, resets=None, state=None):
        positions = self.positions(x, state)
        q, k = self.rotate(q, k, positions)
        log_g = reset_gates(resets, None, k)
        if self.context is not None and state is None:
            return self.context.run(circulate, SoftmaxPairs(), self.context, q, k, v, log_g), None
        if state is not None:
            state = state.append(k, v, log_g, positions)
            k, v, log_g = state.k, state.v, state.log_g
        return softmax_attention(q, k, v, log_g), state
