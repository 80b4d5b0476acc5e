"""Heinsen's log attention: softmax attention with logarithms of sums of exponentials for scores.

What it computes      y_i = sum_{j<=i} A_ij v_j,  A_i = softmax over j of log sum_d exp(q_id + k_jd), that is
                      A_ij proportional to exp(q_i) . exp(k_j): linear, with exp for a feature map
The quadratic form    w_ij = sum_d exp(q_id + k_jd)
The state             m, the largest k_jd so far, S and z with exp(m_d) S_d = sum_j exp(k_jd) v_j and exp(m_d) z_d =
                      sum_j exp(k_jd), D (E+2) numbers a head:  y_i = exp(q_i + m) S / exp(q_i + m) z

Values are signed numbers, or logarithms of positive ones, and then y is a logarithm too (values = "log", the interface
of the paper's code). Positions come from LogPosition, once before the layers: a rotation of exponential features is
not relative. residual = "glu" has the residual layer of the paper's code: a gated linear unit in place of projection
and MLP.

"Softmax Attention with Constant Cost per Token" (Heinsen, 2024). There is no scale: q and k are exponents as they are.
heinsen_naive.py is the specification, heinsen_forms.py the plain PyTorch; a GPU has kernels.
"""

from dataclasses import dataclass
from operator import index

import torch
from torch import nn
from torch.nn import functional as F

from sympow import check_choice
from .even_power import power_flops
from .operator import backend, heinsen_forms
from .operator.arguments import (
    as_state,
    cast_from_float16,
    cast_to_autocast_dtype,
    check_form,
    check_state,
    check_tensors,
)
from .operator.dispatch import Plan, Size, computed_dtype, is_watched, why_not
from .operator.forms import accumulation_dtype
from .operator.heinsen_forms import CHUNK_SIZE, IS_LOG, LogState, empty_log_state
from .operator.sequences import is_capturing, split_tokens
from .positions import LogPosition
from .state import State
from .variant import Variant

# Weights below e^-87 of a row's largest are zero in float32. With log-values within 30 of zero they could change no
# entry of y by more than e^(60-87) of itself.
LOG_VALUE_BOUND = 30.0
KERNEL_BLOCK = 16  # tokens of a block, inside which the kernels compute pairs feature by feature


def heinsen_attention(
    q, k, v, *, values="signed", form="auto", chunk_size=None, resets=None, initial_state=None, return_state=False,
    refuse=True,
):  # fmt: skip
    """Compute Heinsen's log attention, causally: y_i = sum_j w_ij v_j / sum_j w_ij, w_ij = sum_d exp(q_id + k_jd).

    q [B, n, H, D], k [B, T, Hkv, D], v [B, T, Hkv, E]: float64, float32, float16 or bfloat16, any strides; the queries
    belong to the last n of T tokens; query head h reads key/value head h // (H / Hkv). float16 is computed in float32
    and comes back as float16. values: "signed", or "log": v holds logarithms and y = log(sum_j w_ij exp(v_j) / sum_j
    w_ij). form: "quadratic", "chunked", "recurrent" or "auto" (chunked). chunk_size: tokens a chunk in the chunked
    form. resets [B, T] bool: a token where it is true sees nothing before it. initial_state: LogState of the tokens
    before. Under autocast q, k and v are first cast to its dtype, as for SDPA.

    Sums are in float32 (float64 for float64 q). Exponents are relative to prefix maxima: q and k may be as large as
    1e30, and y is as exact as the sums q + k are. On the kernels a row may be NaN if its largest exponent is above 2e8
    or below -2e8. Later tokens change no bit of a row. A row that sees NaN or infinity is NaN (on the kernels, infinity
    in v stays infinity). A row without any weight is zero; only a state of zeros has such rows.

    Log-values must be from -30 to 30, because float32 loses small values beside larger ones. Others raise ValueError;
    to find them, the host waits for the GPU. They are not looked for with refuse=False, as in training, under
    torch.compile, transforms and modes, and in a CUDA graph: there the rows that see one are NaN.

    Returns y [B, n, H, E] in q's dtype, or (y, LogState after all tokens) with return_state. Differentiable in q, k, v
    and the state's S and z (m is a reference, which cancels). Raises ValueError for arguments that do not fit.
    "Softmax Attention with Constant Cost per Token" (Heinsen, 2024), equations 2 to 6.
    """
    q, k, v = cast_to_autocast_dtype(q, k, v)
    initial_state = as_state(initial_state, LogState)
    check_form(form, chunk_size)
    _check(q, k, v, values, resets, initial_state)
    dtype, (q, k, v) = q.dtype, cast_from_float16(q, k, v)
    if IS_LOG[values]:
        v = _exp_of_log_values(v, accumulation_dtype(q), refuse)
    if form in ("auto", "chunked") and _kernels_take(q, v):
        y, state = _attend_on_kernels(q, (k, v, resets), initial_state, return_state)
    else:
        size = chunk_size or CHUNK_SIZE
        size = {"quadratic": k.shape[1], "recurrent": 1, "chunked": size, "auto": size}[form]
        y, state = heinsen_forms.attend(q, k, v, chunk_size=size, resets=resets, initial_state=initial_state)
    if IS_LOG[values]:
        y = y.masked_fill(y == 0, 1).log()
    y = y.to(dtype)
    return (y, state) if return_state else y


def _check(q, k, v, values, resets, initial_state):
    """Raise ValueError, with the value and what would be right, for arguments that do not fit each other."""
    check_choice("values", values, IS_LOG)
    check_tensors(q, k, v, resets=resets, **(initial_state._asdict() if initial_state else {}))
    if resets is not None and (resets.shape != k.shape[:2] or resets.dtype != torch.bool):
        raise ValueError(f"resets must be bool [B, T] = {[*k.shape[:2]]}, got {resets.dtype} {[*resets.shape]}")
    if initial_state is not None:
        rows = k.shape[0], *k.shape[2:]
        check_state(initial_state, q, (rows, (*rows, v.shape[3]), rows))


def _exp_of_log_values(v, dtype, refuse):
    """Return exp(v) in `dtype`, NaN beyond the bound. Raises ValueError with `refuse`, where the values can be seen."""
    if refuse and v.device.type != "meta" and not is_watched() and not is_capturing(v):
        largest = v.detach().abs().nan_to_num(0, posinf=torch.inf).amax().item() if v.numel() else 0
        if LOG_VALUE_BOUND < largest:
            raise ValueError(
                f"values='log' takes log-values from -{LOG_VALUE_BOUND:g} to {LOG_VALUE_BOUND:g}, got one of size "
                f"{largest:g}: use values='signed', or shift and bound them"
            )
    v = v.to(dtype)
    return v.masked_fill(v.detach().abs() > LOG_VALUE_BOUND, torch.nan).exp()


# ---- kernels


def _kernels_take(q, v):
    D, E = index(q.shape[-1]), index(v.shape[-1])  # symbols under torch.compile(dynamic=True), which asks once
    return q.shape[0] > 0 and not why_not("heinsen", q.device, q.dtype, D, E)


def _attend_on_kernels(q, tokens, state, return_state):
    """Return (y, the LogState after all tokens), for tokens k, v and resets."""
    n, T = q.shape[1], tokens[0].shape[1]
    if n < T:  # tokens without a query become part of the state in PyTorch
        earlier, tokens = split_tokens(tokens, (T - n, n))
        state = heinsen_forms.state_after(*earlier, state)
    k, v, resets = tokens
    documents = None if resets is None else resets.cumsum(1, dtype=torch.int32)
    attend = backend.heinsen_operator().heinsen_attention
    y, *state = attend(q, k, v, documents, *(state or (None, None, None)), final=return_state)
    return y, LogState(*state)


# ---- the variant


@dataclass
class HeinsenState(State):
    """The state of one layer, of constant size: D (E + 2) numbers a key/value head."""

    fixed_size = True
    position: torch.Tensor  # [B] float64, the number of tokens
    m: torch.Tensor  # [B, Hkv, D]
    S: torch.Tensor  # [B, Hkv, D, E]
    z: torch.Tensor  # [B, Hkv, D]


class GatedOutput(nn.Module):
    """The residual layer's second half in the paper's code: a gated linear unit from the heads' outputs to n_embd."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_head * config.head_dim, 2 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(F.glu(self.c_fc(x), dim=-1))


OUTPUT_LAYERS = {"gpt2": None, "glu": GatedOutput}  # for each value of the setting residual


class Heinsen(Variant):
    rotates, decodes_on_kernels = False, "heinsen"

    @classmethod
    def check(cls, config):
        if config.positions != "rotary":  # the default, though it rotates nothing
            raise ValueError("attention=heinsen has a position embedding of its own: leave positions=rotary")

    @classmethod
    def position_embedding(cls, config):
        return LogPosition(config.n_embd)

    @classmethod
    def output_layer(cls, config):
        layer = OUTPUT_LAYERS[config.residual]
        return layer and layer(config)

    def __init__(self, config):
        super().__init__(config)
        # With refuse=False a log-value beyond the bound makes the loss NaN, a step that training skips and counts.
        chunk_size = config.chunk_size or None
        self.settings = dict(values=config.values, form=config.form, chunk_size=chunk_size, refuse=False)

    def empty_state(self, batch, device, switch_over=None):
        c = self.config
        position = torch.zeros(batch, dtype=torch.float64, device=device)
        return HeinsenState(position, *empty_log_state(batch, c.n_kv_head, c.head_dim, c.head_dim, device=device))

    def forward(self, x, qkv, resets=None, state=None):
        """Compute y_i = sum_j w_ij v_j / sum_j w_ij with w_ij = sum_d exp(q_id + k_jd), over j <= i."""
        q, k, v = qkv
        if state is None:
            return heinsen_attention(q, k, v, resets=resets, **self.settings), None
        if not isinstance(state, HeinsenState):
            raise ValueError(f"the state of a heinsen layer must be a HeinsenState, got {type(state).__name__}")
        # The first state of a float64 model is float32.
        sums = LogState(*(x.to(accumulation_dtype(q)) for x in (state.m, state.S, state.z)))
        y, sums = heinsen_attention(q, k, v, resets=resets, initial_state=sums, return_state=True, **self.settings)
        return y, HeinsenState(state.position + q.shape[1], *sums)

    def plans(self, block_size, dtype, device, ranks=1):
        form, D, dtype = self.config.form, self.config.head_dim, computed_dtype(dtype)
        if form in ("quadratic", "recurrent"):
            return [Plan(form, 1 if form == "recurrent" else None, False)]
        v_dtype = torch.float32 if IS_LOG[self.config.values] and dtype != torch.float64 else dtype
        if why_not("heinsen", device, dtype, D, D):
            return [Plan("chunked", self.config.chunk_size or CHUNK_SIZE, False)]
        size = Size("heinsen", dtype, backend.width("heinsen", dtype, D, D), v_dtype=v_dtype)
        return [Plan("chunked", KERNEL_BLOCK, True, size)]

    def prompt_plans(self, dtype, device):
        return self.plans(1, dtype, device)

    def attention_flops(self, block_size, dtype, device):
        return power_flops(self.config, self.config.head_dim, block_size, *self.plans(block_size, dtype, device))
