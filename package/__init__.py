"""Power attention for PyTorch: the operator, its states, and the attentions made of it.

    from sympow import power_attention
    y = power_attention(q, k, v, log_g, p=2)                  # [B, T, H, D]; on a GPU, on Triton kernels

    layer = sympow.Attention(n_embd=768, n_head=12)           # an nn.Module: x [B, T, 768] to y [B, T, 768]

sympow.transformers, which needs transformers, puts it into Llama and other models of that library, with its state as
their cache. attention/ of the repository is sympow.attention here, kernels/ is sympow.kernels: their documentation
holds.
`python -m sympow.doctor` compares the kernels with float64 on this machine; `python -m sympow.tune` times tile sizes.
"""

from importlib.metadata import version

from .attention import (
    ATTENTIONS,
    LogState,
    PowerState,
    Variant,
    heinsen_attention,
    power_attention,
    power_attention_sums,
)
from .attention.embedding import symmetric_power_dim
from .module import Attention

__version__ = version("sympow")
__all__ = [
    "ATTENTIONS", "Attention", "LogState", "PowerState", "Variant", "heinsen_attention", "power_attention",
    "power_attention_sums", "symmetric_power_dim",
]  # fmt: skip
