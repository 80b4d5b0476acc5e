"""Even-power attention: an even power where softmax has the exponential.

What it computes      y_i = sum_{j<=i} A_ij v_j,  A_ij = (q_i . k_j)^p / sum_{l<=i} (q_i . k_l)^p,  p even
The quadratic form    the one used here, as in section 2 of "Symmetric Power Transformers" (Buckman et al., 2024);
                      no logarithm and no epsilon: a row without any weight gives zeros
What it keeps         every key and value, like softmax; sympow computes the same function with a state
"""

from torch import nn

from attention.gates import forget_at
from attention.power import power_attention
from attention.rotary import rotary
from attention.state import count_tokens, generate_power


def even_power_attention(q, k, v, *, p, log_g=None):
    """q [B, T, H, D], k [B, T, Hkv, D], v [B, T, Hkv, E] -> [B, T, H, E]; see `power_attention`."""
    return power_attention(q, k, v, log_g, p=p, form="quadratic")


class EvenPower(nn.Module):
    """The power variants differ in three things: the form, the gates and the clock that the rotation goes by."""

    form, chunk_size, fold = "quadratic", None, "never"

    def __init__(self, config):
        super().__init__()
        self.p, self.rope_base = config.p, config.rope_base

    def gates(self, x):
        """log_g [B, T, Hkv] of the tokens x [B, T, C], or None: nothing is forgotten."""
        return None

    def clock(self, x, state):
        """u of each token, [T] or [B, T] float64: here its position."""
        return count_tokens(x, state)

    def forward(self, x, q, k, v, resets=None, state=None):
        u = self.clock(x, state)
        q, k = rotary(q, u, self.rope_base), rotary(k, u, self.rope_base)
        log_g = forget_at(resets, self.gates(x), k)
        if state is not None:
            return generate_power(q, k, v, log_g, u, state, p=self.p)
        return power_attention(q, k, v, log_g, p=self.p, form=self.form, chunk_size=self.chunk_size), None
