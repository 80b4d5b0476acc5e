"""Even-power attention: an even power where softmax has the exponential.

What it computes      y_i = sum_{j<=i} A_ij v_j,  A_ij = (q_i . k_j)^p / sum_{l<=i} (q_i . k_l)^p,  p even
The quadratic form    the one used here, as in section 2 of "Symmetric Power Transformers" (Buckman et al., 2024);
                      no logarithm and no epsilon: a row without any weight gives zeros
The state             every key and value, like softmax; sympow computes the same function with a state
"""

from .embedding import symmetric_power_dim
from .gates import reset_gates
from .parallel.context import plan_pieces, power_attention_in_context
from .power import power_attention
from .state import attend_and_append
from .variant import KVCacheVariant


def even_power_attention(q, k, v, *, p, log_g=None):
    """Return y [B, T, H, E] for q [B, T, H, D], k [B, T, Hkv, D], v [B, T, Hkv, E]; see `power_attention`."""
    return power_attention(q, k, v, log_g, p=p, form="quadratic")


class EvenPower(KVCacheVariant):
    """Even-power attention, and the base class of the other power variants.

    They differ in their form, their gates, their positions and the function that `attend` calls.
    """

    decodes_on_kernels = "power"
    splits_context = True
    form, chunk_size = "quadratic", None

    def forward(self, x, qkv, resets=None, state=None):
        positions, how = self.positions(x, state), dict(p=self.p, form=self.form, chunk_size=self.chunk_size)
        log_g = reset_gates(resets, self.log_gates(x), self.split(qkv)[1])
        q, k, v = self.rotate(qkv, positions)
        if state is not None:
            return attend_and_append(q, k, v, log_g, positions, state, p=self.p)
        if self.context is None:
            return self.attend(q, k, v, log_g), None
        return power_attention_in_context(q, k, v, log_g, self.context, **how), None

    def attend(self, q, k, v, log_g):
        """Return y [B, T, H, D] in training, from rotated q and k. Generation computes the same function with a state,
        in `attend_and_append`: a subclass that changes one must change the other in `forward`."""
        return even_power_attention(q, k, v, p=self.p, log_g=log_g)

    def training_plan(self, block_size, dtype, device, ranks=1):
        D, p = self.config.head_dim, self.p
        return plan_pieces(
            block_size, ranks, D, D, p, dtype=dtype, device=device, gated=self.config.gated, form=self.form,
            chunk_size=self.chunk_size,
        )  # fmt: skip

    def attention_flops(self, block_size, dtype, device):
        return power_flops(self.config, self.p, block_size, self.training_plan(block_size, dtype, device))


def power_flops(config, p, block_size, chosen):
    """Return the FLOPs of power attention's own products for one training token, forward and backward, as planned."""
    tokens = block_size if chosen.form == "quadratic" else min(chosen.chunk_size, block_size)
    flops = 6 * tokens * config.n_head * config.head_dim  # all causal pairs
    if chosen.form == "quadratic":
        return flops
    # The state is read for each query head and written for each key/value head.
    heads = config.n_head + config.n_kv_head
    return flops + 6 * heads * symmetric_power_dim(config.head_dim, p) * (config.head_dim + 1)
