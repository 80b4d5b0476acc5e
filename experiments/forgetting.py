"""Softmax that forgets: "Forgetting Transformer" (Lin et al., 2025), to compare with power attention with such gates.

    pip install flash-linear-attention      # for its kernels, on a GPU
    python -m experiments.train --attention=forgetting --n_layer=6 ...

What it computes      y_i = sum_{j<=i} A_ij v_j,  A_ij proportional to b_ij exp(q_i . k_j / sqrt(D))
The quadratic form    b_ij = product of gamma_m over m = j+1..i,  gamma_m = sigmoid(W_gamma x_m + b) per key/value head
The state             every key, value and gate

By the gates it does without positions.
"""

import torch
from torch.nn import functional as F

from sympow.attention.gates import make_gate
from sympow.attention.variant import KVCacheVariant


class Forgetting(KVCacheVariant):
    gates = ("learned",)

    @classmethod
    def check(cls, config):
        check_experiment(config, needs_fla=torch.cuda.is_available())

    def __init__(self, config):
        super().__init__(config)
        self.gate = make_gate(config)

    def input_weight(self):
        return self.gate.input_weight()

    def forward(self, x, qkv, resets=None, state=None):
        positions = self.positions(x, state)
        q, k, v = self.rotate(qkv, positions)
        log_g = self.gate(x)
        if state is not None:
            state = state.append(k, v, log_g, positions)
            k, v, log_g = state.k, state.v, state.log_g
        on_kernels = q.is_cuda and q.shape[1] == k.shape[1] and q.dtype != torch.float64
        return (fla_attention if on_kernels else forgetting_attention)(q, k, v, log_g), state


def check_experiment(config, needs_fla):
    """Raise ValueError for settings that no attention of the experiments takes, and where it needs fla and has none."""
    if config.n_kv_head != config.n_head or config.reset_token >= 0:
        raise ValueError(f"attention={config.attention} takes no n_kv_head, and no packed documents")
    try:
        if needs_fla:
            import fla.ops  # noqa: F401
    except Exception as error:  # an ImportError, or whatever fla raises
        raise ValueError(f"attention={config.attention} needs `pip install flash-linear-attention`: {error}")


def forgetting_attention(q, k, v, log_g):
    """Compute softmax attention with gates in PyTorch.

    q [B, n, H, D] belong to the last n of the T tokens of k and v [B, T, H, D] and log_g [B, T, H], the natural log of
    the gate in front of each token, in float32 or float64. Returns [B, n, H, D] in q's dtype, computed in log_g's.
    """
    past = k.shape[1] - q.shape[1]
    sums = log_g.cumsum(1).transpose(1, 2)  # [B, H, T]
    bias = sums[:, :, past:, None] - sums[:, :, None]
    hidden = torch.ones(bias.shape[2:], dtype=torch.bool, device=q.device).triu(past + 1)
    bias = bias.masked_fill(hidden, float("-inf"))
    y = F.scaled_dot_product_attention(*(x.transpose(1, 2).to(bias.dtype) for x in (q, k, v)), bias)
    return y.transpose(1, 2).to(q.dtype)


@torch.compiler.disable
def fla_attention(q, k, v, log_g):
    """Compute what `forgetting_attention` does, for n = T, on the Triton kernels of flash-linear-attention."""
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    return parallel_forgetting_attn(q, k, v, log_g)
