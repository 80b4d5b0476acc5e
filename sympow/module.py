"""One layer of self-attention, for models other than this repository's."""

from . import check_choice, model
from .attention import ATTENTIONS
from .layers.mixing import mix_tokens
from .layers.norm import norm_linear

SETTINGS = (  # of GPTConfig that a layer takes
    "n_kv_head head_dim positions convolution output_gate window p gate gate_bias form chunk_size adaptive p_min p_max"
    " rope_base rope_unit bias qkv_bias qk_norm norm_eps"
).split()


class Attention(model.Attention):
    """Causal self-attention: projections, one of the attentions, and an output projection.

    Raises ValueError for settings that do not fit. They have the defaults of GPTConfig in model.py; with auto each
    attention has what it learns best with, for sympow_gating with learned gates the values given below:

    n_embd         width of x and y
    n_head         query heads
    attention      softmax, even_power, sympow, sympow_gating, conformal_sympow or adaptive_power
    n_kv_head      key/value heads, shared by groups of query heads; 0: n_head
    head_dim       width of a head; 0: n_embd / n_head
    positions      rotary: q and k are rotated; none: they are not; auto: none, for others rotary
    p              the power, even: 2
    gate           learned or fixed for sympow_gating; learned, fixed or none for conformal_sympow; auto: learned
    gate_bias      a fresh learned gate is sigmoid(gate_bias); auto: 3.0, for others 6.9
    window         of softmax: how many tokens each token sees, itself among them; 0: all before it
    convolution    tokens of a convolution over q, k and v before attention, 0: none; auto: 4, for others 0
    output_gate    True: normalise attention's output, and multiply it by a learned gate; auto: True, for others False
    form           quadratic, chunked, recurrent or auto: how the sympow variants are computed in training
    chunk_size     tokens a chunk in the chunked form; 0: chosen from p and head_dim
    adaptive       of adaptive_power: continuous (|q.k|^p(x)) or mixture (of even powers, linear in the length)
    p_min, p_max   of adaptive_power: the least and the largest p(x), 2.0 and 4.0
    rope_base      N: a token turns pair i = 0, 1, ... of a head by N^(-2i/D) units, 65536.0
    rope_unit      turn: 2 pi, with the longest document for N; or radian: the customary one
    bias           True: biases in the linear layers
    qkv_bias       True: biases in the linear layer of q, k and v alone
    qk_norm        True: an RMSNorm of each head of q and of k, with norm_eps, before they are rotated
    norm_eps       of qk_norm: 1e-5
    """

    def __init__(self, n_embd, n_head, *, attention="sympow_gating", **settings):
        if attention == "heinsen":
            raise ValueError("attention=heinsen needs a model with a position embedding: use heinsen_attention")
        check_choice("attention", attention, ATTENTIONS)
        for name in settings:
            check_choice("a setting", name, SETTINGS)
        check_choice("positions", settings.get("positions", "auto"), ("auto", "rotary", "none"))
        super().__init__(model.GPTConfig(n_embd=n_embd, n_head=n_head, attention=attention, **settings))

    def forward(self, x, resets=None, state=None):
        """Return y [B, T, n_embd] for x [B, T, n_embd]; with a state, (y, the state after these tokens).

        resets [B, T], [1, T] or [T] bool: tokens that begin a document, which see nothing before themselves. state:
        from `empty_state` or from the call with the tokens before.
        """
        if resets is not None:
            resets = resets.expand(x.shape[:2])
        x, heads = norm_linear(lambda x: x, self.c_attn, x, self.mix.input_weight())
        y, state = mix_tokens(self, x, heads.unflatten(-1, (-1, self.head_dim)), resets, state)
        y = self.c_proj(y.flatten(2))
        return y if state is None else (y, state)

    def empty_state(self, batch, device=None):
        """Return the state before the first token of `batch` sequences, on the weights' device by default."""
        return self.mix.empty_state(batch, device or self.c_attn.weight.device)
