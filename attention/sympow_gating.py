"""Sympow with gating: the state forgets, by a fraction that the token decides.

What it computes      y_i = sum_{j<=i} A_ij v_j,  A_ij proportional to b_ij (q'_i . k'_j)^p
The quadratic form    b_ij = product of gamma_m over m = j+1..i,  gamma_m = sigmoid(W_gamma x_m + b) per key/value head
The state             S_i = gamma_i S_{i-1} + phi(k'_i) v_i^T   and   z_i = gamma_i z_{i-1} + phi(k'_i)

"Conformal Transformations for Symmetric Power Transformers" (Kumar et al., 2025), section 3.1 and proposition 2.
"""

from .gates import make_gate, reset_gates
from .sympow import Sympow


class SympowGating(Sympow):
    gates = ("learned", "fixed")
    decodes_on_kernels = "power"
    splits_context = True

    @classmethod
    def recipe(cls, config):
        recipe = super().recipe(config)
        return recipe | dict(positions="none") if config.gate == "learned" else recipe

    @classmethod
    def check(cls, config):
        if config.gate == "none":
            raise ValueError("attention=sympow_gating with gate=none is attention=sympow: use that")

    def __init__(self, config):
        super().__init__(config)
        self.gate = make_gate(config)

    def input_weight(self):
        return self.gate.input_weight()

    def forward(self, x, qkv, resets=None, state=None):
        positions = self.positions(x, state)
        q, k, v = self.rotate(qkv, positions)  # q'_i = R(i theta) q_i, k'_j = R(j theta) k_j
        log_g = reset_gates(resets, self.gate(x), k)  # log gamma [B, T, Hkv], -inf where a document begins
        return self.attend(q, k, v, log_g, positions, state)

    def statistics(self, x, q):
        return {"gate": self.gate(x).exp().mean().item()}

    def decoder_weights(self):
        return super().decoder_weights() | self.gate.decoder_weights()
