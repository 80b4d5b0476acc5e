"""Adaptive power attention: each token chooses its own power, between p_min and p_max.

What it computes      p_i = p_min + (p_max - p_min) f(q_i), one power a token for all heads, where f is a network on the
                      projected queries of all heads, not rotated, d = H D of them:
                      f(q) = sigmoid(W_2 relu(W_1 q + b_1) + b_2), W_1 [d, d], W_2 [1, d]
    continuous        y_i = sum_{j<=i} w_ij v_j / sum_{j<=i} w_ij,  w_ij = |q'_i . k'_j|^p_i
    mixture           y_i = sum_m a_m(p_i) y_i^(m), y^(m) power attention of the even powers m = p_min, p_min + 2, ...,
                      p_max: p_i between neighbours m and m + 2 has a_m = (m + 2 - p_i) / 2, a_{m+2} = (p_i - m) / 2
The quadratic form    continuous: the only one, since a real power has no finite feature map; q', k' as in sympow
The state             continuous: every key and value, like even_power
                      mixture: S and z of all its powers, side by side along their features

From the notebook "Adaptive Symmetric Power Transformers", section 1 and equation 7 of section 3. The network adds
(d + 1)^2 parameters a layer: 591,361 at d = 768, 7.1 M in 12 layers.

The defaults of p_min and p_max are 2 and 4, the notebook's are 2 and 8: the state of p = 8 does not exist at a usable
size (199 TB at head dimension 64, 12 layers and heads), and (q . k)^8 is nearly one-hot in a fresh model, which hardly
learns from it.

The continuous form runs in plain PyTorch on every device, slower than softmax. It has no kernels, because its powers
end at 3.9 to 4.0 and even_power with p = 4 reaches a lower loss (docs/measured/results.md).

Left out on purpose: an embedding of floor(p) features, because floor has no gradient, and because the embeddings of a
query and a key with two powers differ in size and have no product; and (ReLU(s) + epsilon)^p, because it is not even:
p = 2 would not be power attention, and there would be no features to sum into a state. The notebook's code also
broadcasts p over keys by mistake, where its equation has a power for each query, and its attention never finishes its
first batch, as it loops in Python over the multi-indices of an embedding of all d_model entries.
"""

import math
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from sympow import check_choice
from .embedding import symmetric_power_dim
from .even_power import power_flops
from .gates import linear_fp32, reset_gates
from .operator.adaptive_forms import adaptive_attend
from .operator.arguments import cast_to_autocast_dtype, check_gates, check_tensors
from .operator.dispatch import Problem, plan
from .operator.forms import PowerState, accumulation_dtype
from .power import power_attention
from .state import attend_to_state
from .variant import KVCacheVariant

IS_MIXTURE = {"continuous": False, "mixture": True}  # for each value of the setting adaptive


def adaptive_power_attention(q, k, v, powers, *, log_g=None):
    """Compute causal attention with weights |q_i . k_j|^p_i.

    q [B, n, H, D], k [B, T, Hkv, D], v [B, T, Hkv, E]: float64, float32, float16 or bfloat16, any strides; query head h
    reads key/value head h // (H / Hkv), and the queries belong to the last n of the T tokens. float16 is computed as
    float32. powers [B, n]: the power of each query's token, floating point, at least 1 (not read here, for that would
    wait for the GPU; NaN gives NaN in its row). log_g [B, T, Hkv] holds only 0 and -inf, which forgets all before its
    token, or is None. Under autocast q, k and v are first cast to its dtype, as for SDPA.

    Returns y [B, n, H, E] in q's dtype, zeros in rows without any weight. Differentiable in q, k, v and powers;
    |s|^p ln |s| and its derivatives are zero at s = 0. NaN in an input gives NaN in the rows of y that see it and
    changes no bit of earlier rows, with the exception that `power_attention` names.
    Raises ValueError for arguments that do not fit.
    """
    q, k, v = cast_to_autocast_dtype(q, k, v)
    check_tensors(q, k, v, powers=powers, log_g=log_g)
    check_gates(log_g, k)
    if powers.shape != q.shape[:2] or not powers.is_floating_point():
        raise ValueError(
            f"powers must be floating point [B, n] = {[*q.shape[:2]]}, got {powers.dtype} {[*powers.shape]}"
        )
    return adaptive_attend(q, k, v, powers, log_g)


def mixture_weights(powers, p):
    """Return [B, T, len(p)], for each of `powers` [B, T] its weights of the even powers p = (m, m + 2, ...).

    They are zero but for its two neighbours, and sum to 1.
    """
    m = torch.tensor(p, dtype=powers.dtype, device=powers.device)
    return (1 - (powers.unsqueeze(-1) - m).abs() / 2).clamp(min=0)


def mixture_attention(q, k, v, powers, *, p, log_g=None, attend=power_attention, **options):
    """Return y [B, T, H, E], the mixture of power attention of the even powers p = (m, m + 2, ...), each normalised by
    itself, for powers [B, T] from p[0] to p[-1]. attend(q, k, v, log_g, p=m, **options) is `power_attention`, or what
    it does where ranks share a sequence."""
    return _mix([attend(q, k, v, log_g, p=m, **options) for m in p], powers, p)


def check_powers(c):
    """Raise ValueError unless AdaptivePower takes adaptive, p_min and p_max of the GPTConfig c."""
    check_choice("adaptive", c.adaptive, IS_MIXTURE)
    if not c.p_min < c.p_max < math.inf:
        raise ValueError(f"p_min must be below p_max, both finite, got {c.p_min} and {c.p_max}")
    if c.p_min < 1:
        raise ValueError(f"p_min must be at least 1, got {c.p_min}: below, |q.k|^p has no derivative where q.k is 0")
    limit = 8 if IS_MIXTURE[c.adaptive] else 1000
    if c.p_max > limit:
        raise ValueError(f"p_max must be at most {limit} for adaptive={c.adaptive}, got {c.p_max}")
    if IS_MIXTURE[c.adaptive] and (c.p_min % 2 or c.p_max % 2):
        raise ValueError(
            "p_min and p_max of adaptive=mixture, which mixes even powers, must be even integers, got "
            f"{c.p_min} and {c.p_max}"
        )


class PowerNetwork(nn.Module):
    """The network p_min + (p_max - p_min) f."""

    def __init__(self, width, p_min, p_max):
        super().__init__()
        self.p_min, self.p_max = p_min, p_max
        self.hidden, self.out = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, q):
        """Return the powers [B, T] of queries q [B, T, H, D], float32 (float64 for float64 weights); only the first
        layer runs under autocast."""
        x = linear_fp32(F.relu(self.hidden(q.flatten(2))), self.out.weight, self.out.bias).squeeze(-1)
        return self.p_min + (self.p_max - self.p_min) * x.to(accumulation_dtype(x)).sigmoid()


class AdaptivePower(KVCacheVariant):
    splits_context = True

    def __init__(self, config):
        super().__init__(config)
        c, self.is_mixture = config, IS_MIXTURE[config.adaptive]
        if self.is_mixture:
            self.p = tuple(range(int(c.p_min), int(c.p_max) + 1, 2))
        self.switch_over = "auto" if self.is_mixture else "never"
        self.form, self.chunk_size = c.form, c.chunk_size or None
        self.power = PowerNetwork(c.n_head * c.head_dim, c.p_min, c.p_max)

    def forward(self, x, qkv, resets=None, state=None):
        """Return (y [B, n, H, D], the state after the n tokens, or None without a state)."""
        powers, positions = self.power(qkv[0]), self.positions(x, state)
        q, k, v = self.rotate(qkv, positions)
        log_g = reset_gates(resets, None, k)
        if self.is_mixture and state is not None:
            return self.mix_and_append(q, k, v, powers, log_g, positions, state)
        if self.is_mixture:
            options = dict(p=self.p, log_g=log_g, form=self.form, chunk_size=self.chunk_size)
            if self.context is not None:
                options.update(attend=self.context.power_attention)
            return mixture_attention(q, k, v, powers, **options), None
        if state is not None:
            if state.power:
                raise ValueError(f"the state of adaptive=continuous has no S and z, got S {[*state.S.shape]}")
            state = state.append(k, v, log_g, positions)
            k, v, log_g = state.k, state.v, state.log_g
        return adaptive_power_attention(q, k, v, powers, log_g=log_g), state

    def mix_and_append(self, q, k, v, powers, log_g, positions, state):
        """Return (y [B, n, H, D], the state after the n new tokens): `attend_and_append` of each power, mixed.

        The state's S and z hold all powers, concatenated along Dphi; the KV cache serves them all.
        """
        previous, state = state, state.append(k, v, log_g, positions)
        must_flush, states = state.must_flush(self.p), [None] * len(self.p)
        if previous.power:
            sizes = [symmetric_power_dim(k.shape[-1], m) for m in self.p]
            if previous.S.shape[2] != sum(sizes):
                raise ValueError(f"S of powers {self.p} has {sum(sizes)} features, got {previous.S.shape[2]}")
            states = map(PowerState, previous.S.split(sizes, dim=2), previous.z.split(sizes, dim=2))
        results = [
            attend_to_state(q, (k, v, log_g), (previous, state), power, must_flush, p=m)
            for m, power in zip(self.p, states)
        ]
        ys, states = zip(*results)
        if must_flush:
            S, z = (torch.cat(x, dim=2) for x in zip(*states))
            state = replace(state, k=None, v=None, log_g=None, S=S, z=z)
        return _mix(ys, powers, self.p), state

    @classmethod
    def context_layout(cls, config, block_size, dtype, device):
        if not IS_MIXTURE[config.adaptive]:
            raise ValueError("adaptive=continuous computes each row from all keys at once: use adaptive=mixture")
        return "balanced"

    def statistics(self, x, q):
        powers = self.power(q)
        return {"power": powers.mean().item(), "power_std": powers.std(correction=0).item()}

    def plans(self, block_size, dtype, device, ranks=1):
        if not self.is_mixture:
            return []  # a power for each token is computed in PyTorch
        D, gated = self.config.head_dim, self.config.gated
        problems = [Problem(block_size, D, D, m, dtype, device, gated) for m in self.p]
        return [plan(problem, self.form, self.chunk_size, pieces=ranks) for problem in problems]

    def prompt_plans(self, dtype, device):
        return self.plans(1, dtype, device) + self.plans(1, dtype, device, ranks=2)

    def attention_flops(self, block_size, dtype, device):
        if not self.is_mixture:
            return super().attention_flops(block_size, dtype, device)
        c, plans = self.config, self.plans(block_size, dtype, device)
        features = [symmetric_power_dim(c.head_dim, m) for m in self.p]
        return sum(power_flops(c, size, block_size, chosen) for size, chosen in zip(features, plans))


def _mix(ys, powers, p):
    a = mixture_weights(powers, p)[..., None, None].unbind(2)  # [B, T, 1, 1] each
    return sum(a_m * y for a_m, y in zip(a, ys)).to(ys[0].dtype)
