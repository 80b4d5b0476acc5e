"""Even-power attention: an even power where softmax has the exponential.

What it computes      y_i = sum_{j<=i} A_ij v_j,  A_ij = (q_i . k_j)^p / sum_{l<=i} (q_i . k_l)^p,  p even
The quadratic form    the one used here, as in section 2 of "Symmetric Power Transformers" (Buckman et al., 2024);
                      no logarithm and no epsilon: a row without any weight gives zeros
The state             every key and value, like softmax; sympow computes the same function with a state
"""

from .embedding import symmetric_power_dim
from .gates import reset_gates
from .operator.dispatch import Problem, plan
from .power import attend_causally
from .state import attend_and_append
from .variant import KVCacheVariant


class EvenPower(KVCacheVariant):
    decodes_on_kernels = "power"
    splits_context = True
    form, chunk_size = "quadratic", None  # of training

    def forward(self, x, qkv, resets=None, state=None):
        positions = self.positions(x, state)
        q, k, v = self.rotate(qkv, positions)
        return self.attend(q, k, v, reset_gates(resets, None, k), positions, state)

    def attend(self, q, k, v, log_g, positions, state):
        """Return (y [B, n, H, D], the state after the n tokens, or None without a state) of power attention.

        q and k are rotated by the positions; log_g [B, n, Hkv] is -inf where a document begins, or None.
        """
        if state is not None:  # of the tokens before: a KV cache, and in variants with a recurrent form then S and z
            return attend_and_append(q, k, v, log_g, positions, state, p=self.p)
        options = dict(p=self.p, form=self.form, chunk_size=self.chunk_size)
        if self.context is not None:  # ranks share the tokens of a sequence
            return self.context.power_attention(q, k, v, log_g, **options), None
        return attend_causally(q, k, v, log_g, **options), None

    def plans(self, block_size, dtype, device, ranks=1):
        D = self.config.head_dim
        problem = Problem(block_size, D, D, self.p, dtype, device, self.config.gated)
        return [plan(problem, self.form, self.chunk_size, pieces=ranks)]

    def prompt_plans(self, dtype, device):
        D = self.config.head_dim
        problem = Problem(1, D, D, self.p, dtype, device, self.config.gated)
        return [plan(problem, "quadratic"), plan(problem, "chunked", return_state=True)]

    def attention_flops(self, block_size, dtype, device):
        features = symmetric_power_dim(self.config.head_dim, self.p)
        return power_flops(self.config, features, block_size, *self.plans(block_size, dtype, device))


def power_flops(config, features, block_size, chosen):
    """Return the FLOPs of linear attention's own products for one training token, forward and backward, as planned.

    features: of a query or key, rows of the state.
    """
    tokens = block_size if chosen.form == "quadratic" else min(chosen.chunk_size, block_size)
    flops = 6 * tokens * config.n_head * config.head_dim  # all causal pairs
    if chosen.form == "quadratic":
        return flops
    # The state is read for each query head and written for each key/value head.
    return flops + 6 * (config.n_head + config.n_kv_head) * features * (config.head_dim + 1)
