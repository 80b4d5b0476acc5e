"""Conformal sympow: the state forgets and turns, both as the token decides.

What it computes      y_i = sum_{j<=i} A_ij v_j,  A_ij proportional to b_ij (q_i . R(c_ij theta)^T k_j)^p
The quadratic form    b_ij = product of gamma_m, c_ij = sum of beta_m, both over m = j+1..i, with one
                      beta_m = 1 + tanh(W_beta x_m) in (0, 2) a layer; with the positions u_i = beta_1 + ... + beta_i
                      it is sympow_gating on R(u_i theta) q_i and R(u_j theta) k_j
The state             sympow_gating's S and z, and u. Equivalently the state itself is scaled and rotated at every
                      token, S_i = S_{i-1} (gamma_i R-bar) + phi(k_i) v_i^T: a conformal map (proposition 3)

"Conformal Transformations for Symmetric Power Transformers" (Kumar et al., 2025), sections 3.2 and 3.3. gate = "none"
leaves the learned rotation alone, "fixed" has one constant gate a head.
"""

import torch
from torch import nn

from .gates import make_gate, reset_gates
from .sympow import Sympow


class ConformalSympow(Sympow):
    gates = ("learned", "fixed", "none")
    decodes_on_kernels = "power"
    splits_context = True

    @classmethod
    def check(cls, config):
        super().check(config)
        if config.positions != "rotary":
            raise ValueError("attention=conformal_sympow learns how fast it rotates: it takes positions=rotary")

    def __init__(self, config):
        super().__init__(config)
        self.gate = None if config.gate == "none" else make_gate(config)
        # beta starts at 1: a fresh model turns as sympow does
        self.W_beta = nn.Parameter(torch.zeros(1, config.n_embd))

    def input_weight(self):
        weight = self.gate and self.gate.input_weight()
        return self.W_beta if weight is None else torch.cat((self.W_beta, weight))

    def beta(self, x):
        """Return the speed of rotation at each token, [B, T] in (0, 2), float32: bfloat16 drifts 1.3 turns by 64k."""
        return 1 + torch.tanh(x[..., 0])

    def log_gates(self, x):
        """Return log gamma [B, T, Hkv] <= 0, or None without gates."""
        return self.gate and self.gate(x[..., 1:])

    def forward(self, x, qkv, resets=None, state=None):
        positions = self.positions(x, state, self.beta(x))  # u_i = beta_1 + ... + beta_i
        q, k, v = self.rotate(qkv, positions)  # R(u_i theta) q_i, R(u_j theta) k_j
        return self.attend(q, k, v, reset_gates(resets, self.log_gates(x), k), positions, state)

    def statistics(self, x, q):
        gate = {} if self.gate is None else {"gate": self.log_gates(x).exp().mean().item()}
        return gate | {"beta": self.beta(x).mean().item()}

    def decoder_weights(self):
        gate = {} if self.gate is None else self.gate.decoder_weights()
        return super().decoder_weights() | gate | {"beta": self.W_beta}
