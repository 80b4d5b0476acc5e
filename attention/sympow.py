"""Symmetric power attention (sympow): even-power attention as a linear transformer.

What it computes      the same as even_power: (q . k)^p = phi(q) . phi(k), phi the symmetric power embedding
The quadratic form    w_ij = (q'_i . k'_j)^p with q'_i = R(i theta) q_i, k'_j = R(j theta) k_j
The state             S_i = S_{i-1} + phi(k'_i) v_i^T   and   z_i = z_{i-1} + phi(k'_i),  C(D+p-1, p) (E+1) numbers a
                      head, however long the text:  y_i = phi(q'_i) S_i / phi(q'_i) z_i

"Symmetric Power Transformers" (Buckman, Gelada, Zhang, 2024), section 4; rotation: proposition 1 of Kumar et al., 2025.
"""

from .even_power import EvenPower
from .operator.dispatch import Problem, plan
from .variant import LEARNED_GATES, RECIPE


class Sympow(EvenPower):
    decodes_on_kernels = "power"
    splits_context = True
    switch_over = "auto"

    def __init__(self, config):
        super().__init__(config)
        self.form, self.chunk_size = config.form, config.chunk_size or None

    @classmethod
    def recipe(cls, config):
        return LEARNED_GATES if config.gate == "learned" else RECIPE

    @classmethod
    def context_layout(cls, config, block_size, dtype, device):
        problem = Problem(block_size, config.head_dim, config.head_dim, config.p, dtype, device, config.gated)
        form = plan(problem, config.form, config.chunk_size or None).form
        return "balanced" if form == "quadratic" else "contiguous"
