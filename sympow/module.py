"""One layer of self-attention, for models other than this repository's."""

from dataclasses import dataclass

from torch import nn

from . import check_choice
from .attention import ATTENTIONS
from .attention.gates import linear_fp32
from .attention.variant import check_layer
from .layers.convolution import Convolution
from .layers.mixing import mix_tokens, projected_heads
from .layers.output_gate import OutputGate


@dataclass
class LayerConfig:
    """Holds the settings of a layer that a Variant reads, with the names and defaults of the model's GPTConfig."""

    n_embd: int
    n_head: int
    n_kv_head: int = 0
    head_dim: int = 0
    attention: str = "sympow_gating"
    convolution: int = 0
    output_gate: bool = False
    window: int = 0
    p: int = 2
    gate: str = "auto"
    gate_bias: float = 6.9
    form: str = "auto"
    chunk_size: int = 0
    adaptive: str = "continuous"
    p_min: float = 2.0
    p_max: float = 4.0
    rope_base: float = 65536.0
    bias: bool = False
    positions = "rotary"  # no field: a layer has no table of positions

    def __post_init__(self):
        if self.attention == "heinsen":
            raise ValueError("attention=heinsen needs a model with a position embedding: use heinsen_attention")
        check_choice("attention", self.attention, ATTENTIONS)
        check_layer(self)
        ATTENTIONS[self.attention].choose_gate(self)

    @property
    def gated(self):
        """Return True if attention gets log_g. Resets between documents may come at any call."""
        return self.gate != "none"


class Attention(nn.Module):
    """Causal self-attention with rotary positions: projections, one of the attentions, and an output projection.

    Attention(n_embd, n_head, attention="sympow_gating", p=2, ...) takes LayerConfig's fields and raises ValueError for
    settings that do not fit.
    """

    def __init__(self, n_embd, n_head, **settings):
        super().__init__()
        self.config = config = LayerConfig(n_embd, n_head, **settings)
        heads, D = projected_heads(config), config.head_dim
        self.c_attn = nn.Linear(n_embd, sum(heads) * D, bias=config.bias)
        self.c_proj = nn.Linear(config.n_head * D, n_embd, bias=config.bias)
        self.conv = Convolution(sum(heads[:3]) * D, config.convolution) if config.convolution else None
        self.output_gate = OutputGate(D) if config.output_gate else None
        self.mix = ATTENTIONS[config.attention](config)

    def forward(self, x, resets=None, state=None):
        """Return y [B, T, n_embd] for x [B, T, n_embd]; with a state, (y, the state after these tokens).

        resets [B, T] bool: tokens that begin a document, which see nothing before themselves. state: from `empty_state`
        or from the call with the tokens before.
        """
        heads = self.c_attn(x).unflatten(-1, (-1, self.config.head_dim))
        weight = self.mix.input_weight()
        x = x if weight is None else linear_fp32(x, weight)
        y, state = mix_tokens(self, x, heads, resets, state)
        y = self.c_proj(y.flatten(2))
        return y if state is None else (y, state)

    def empty_state(self, batch, device=None):
        """Return the state before the first token of `batch` sequences, on the weights' device by default."""
        return self.mix.empty_state(batch, device or self.c_attn.weight.device)
