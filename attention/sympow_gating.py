"""Sympow with gating: the state forgets, by a fraction that the token decides.

What it computes      y_i = sum_{j<=i} A_ij v_j,  A_ij proportional to b_ij (q'_i . k'_j)^p
The quadratic form    b_ij = product of gamma_m over m = j+1..i,  gamma_m = sigmoid(W_gamma x_m + b) per key/value head
The state             S_i = gamma_i S_{i-1} + phi(k'_i) v_i^T   and   z_i = gamma_i z_{i-1} + phi(k'_i)

"Conformal Transformations for Symmetric Power Transformers" (Kumar et al., 2025), section 3.1 and proposition 2.
"""

from .gates import make_gate
from .sympow import Sympow, sympow_attention


def sympow_gating_attention(q, k, v, log_g, *, p, form="auto", chunk_size=None):
    """Compute sympow_attention with log_g [B, T, Hkv] <= 0, the natural log of the gates; see `power_attention`."""
    return sympow_attention(q, k, v, p=p, log_g=log_g, form=form, chunk_size=chunk_size)


class SympowGating(Sympow):
    gates = ("learned", "fixed")
    decodes_on_kernels = "power"
    splits_context = True

    @classmethod
    def check(cls, config):
        if config.gate == "none":
            raise ValueError("attention=sympow_gating with gate=none is attention=sympow: use that")

    def __init__(self, config):
        super().__init__(config)
        self.gate = make_gate(config)

    def input_weight(self):
        return self.gate.input_weight()

    def log_gates(self, x):
        return self.gate(x)

    def attend(self, q, k, v, log_g):
        return sympow_gating_attention(q, k, v, log_g, p=self.p, form=self.form, chunk_size=self.chunk_size)

    def statistics(self, x, q):
        return {"gate": self.log_gates(x).exp().mean().item()}

    def decoder_weights(self):
        return super().decoder_weights() | self.gate.decoder_weights()
