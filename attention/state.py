"""What a layer keeps while text is generated: recent keys and values, a PowerState once that is cheaper, and u.

    state = LayerState.empty(batch, device)
    y, state = generate_power(q, k, v, log_g, u, state, p=2)      # again and again, any number of tokens at a time

Keys and values are read as they are until they take as much memory as the PowerState would (2,113 tokens for p=2 at
head dimension 64 in bfloat16, 778,457 for p=4). Then all of them are folded into one, and again whenever FOLD_EVERY
new ones have gathered, so that time and memory a token are bounded however long the text.
"""

import math
from dataclasses import dataclass, replace

import torch

from attention.embedding import symmetric_power_dim
from attention.power import PowerState, fold_tokens, free_memory, power_attention, read_and_fold, state_bytes

FOLD_EVERY = 64


@dataclass
class LayerState:
    u: torch.Tensor  # [B] float64, the rotation counter after the newest token
    k: torch.Tensor | None = None  # [B, n, Hkv, D] keys not yet folded, rotated
    v: torch.Tensor | None = None  # [B, n, Hkv, E]
    log_g: torch.Tensor | None = None  # [B, n, Hkv], None without gates and resets
    power: PowerState | None = None  # of the tokens before those; softmax and even_power never have one
    fold: str | int = "auto"  # "auto" as above, "always": from the first token, "never", or how many tokens are kept

    @staticmethod
    def empty(batch, device, fold="auto"):
        return LayerState(u=torch.zeros(batch, dtype=torch.float64, device=device), fold=fold)

    def append(self, k, v, log_g, u):
        """The state with new tokens' keys, values and gates behind those it has; u [B, n] or [n] of the new tokens."""
        u = u[..., -1].expand_as(self.u)
        if self.k is not None:
            k, v = torch.cat((self.k, k), dim=1), torch.cat((self.v, v), dim=1)
            log_g = None if log_g is None else torch.cat((self.log_g, log_g), dim=1)
        return replace(self, k=k, v=v, log_g=log_g, u=u)

    def full(self, p):
        """Whether folding is due."""
        return self.k.shape[1] >= self.limit(p, self.k.shape[-1], self.v.shape[-1], self.k.element_size())

    def limit(self, p, D, E, itemsize):
        """How many tokens are kept before they are folded; inf: never."""
        if self.fold in ("always", "never"):
            return 1 if self.fold == "always" else math.inf
        limit = crossover(p, D, E, itemsize) if self.fold == "auto" else self.fold
        return limit if self.power is None else min(limit, FOLD_EVERY)

    def tensors(self):
        return [x for x in (self.u, self.k, self.v, self.log_g, *(self.power or ())) if x is not None]

    def repeat(self, n):
        """The state of each sequence n times over, for several continuations of one prompt."""
        again = lambda x: None if x is None else x.repeat_interleave(n, dim=0)
        power = self.power and PowerState(*map(again, self.power))
        return replace(self, u=again(self.u), k=again(self.k), v=again(self.v), log_g=again(self.log_g), power=power)


def crossover(p, D, E, itemsize, dtype=torch.float32):
    """Tokens whose keys and values, numbers of itemsize bytes, take as much memory as a PowerState of `dtype`."""
    return math.ceil(state_bytes(1, D, E, p, dtype) / ((D + E) * itemsize))


def check_memory(config, state, tokens, samples, itemsize, dtype, device):
    """Raises MemoryError where what `samples` sequences keep does not fit into the device's memory, once they are
    `tokens` longer than the ModelState `state`: keys and values, numbers of itemsize bytes, then states, S in dtype."""
    c, D, layer = config, config.head_dim, state.layers[0]
    heads, n = c.n_layer * c.n_kv_head, 0 if layer.k is None else layer.k.shape[1]
    limit = layer.limit(c.p, D, D, itemsize)
    token = heads * (2 * D * itemsize + 12)
    kept = token * int(max(n, min(limit, n + tokens)))
    power = lambda dtype: heads * symmetric_power_dim(D, c.p) * (D * dtype.itemsize + 4)
    halved, power = power(torch.bfloat16), power(dtype)
    if limit > n + tokens and not layer.power:
        halved = power = 0
    need, have = samples * (kept + power), free_memory(device)
    if need <= have:
        return
    fits = have // (kept + power)
    ways = [f"num_samples={fits}"] * (fits > 0)
    if device.type == "cuda" and halved < power and samples * (kept + halved) <= have:
        ways.append("state_dtype=bfloat16")
    if power and not layer.power and samples * token * (n + tokens) <= have:
        ways.append(f"fold_at={n + tokens + 1}")
    if not ways:
        ways.append("a model of a smaller head dimension or p" if power >= kept else "fewer tokens")
    of = f"states of {power:,} bytes" if power >= kept else f"keys and values of {kept:,} bytes"
    raise MemoryError(
        f"{samples} samples need {need:,} bytes, mostly {of} each (p={c.p}, head dimension {D}, {c.n_layer} layers of "
        f"{c.n_kv_head} heads), the device has {have:,} free: {' or '.join(ways)} would fit"
    )


def generate_power(q, k, v, log_g, u, state, *, p):
    """Power attention of n new tokens that follow `state`: y [B, n, H, E] and the state after them."""
    before, state = state, state.append(k, v, log_g, u)
    fold = state.full(p)
    if fold and q.shape[1] > 1:  # a piece of a prompt: what was kept goes into the state, then in chunks
        power = before.power
        if before.k is not None:
            power = fold_tokens(before.k, before.v, before.log_g, power, p=p)
        y, power = power_attention(q, k, v, log_g, p=p, form="chunked", initial_state=power, return_state=True)
    elif before.k is None and before.power is None and not fold:  # the first piece
        y, power = power_attention(q, k, v, log_g, p=p, form="quadratic"), None
    else:
        y, power = read_and_fold(q, state.k, state.v, state.log_g, state.power, p=p, fold=fold)
    if fold:
        state = replace(state, k=None, v=None, log_g=None, power=power)
    return y, state


def count_tokens(x, state, beta=None):
    """u of the tokens of x [B, T, C]: 1, 2, 3, ... after the state's, or running sums of beta [B, T]; float64."""
    if beta is None:
        steps = torch.arange(1, x.shape[1] + 1, dtype=torch.float64, device=x.device)  # [T]
    else:
        steps = beta.double().cumsum(dim=1)  # [B, T]
    return steps if state is None else state.u.unsqueeze(1) + steps
