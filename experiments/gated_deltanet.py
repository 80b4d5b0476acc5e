"""Gated DeltaNet (Yang, Kautz, Hatamizadeh, 2024) from flash-linear-attention, to compare with the attentions here.

    pip install flash-linear-attention      # and tilelang, on Hopper GPUs with Triton 3.4 to 3.7.0
    python -m experiments.train --attention=gated_deltanet --n_layer=6 ...

Its projections are those of all attentions here. It adds what fla.layers.GatedDeltaNet has: short convolutions of
q, k and v, decay and step size by token, and a normalised, gated output; that is n_embd^2 weights a layer more. The
state is a D x D matrix a head. Without a GPU fla's recurrence in plain PyTorch takes the place of its kernels.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from sympow.attention import Variant
from sympow.attention.state import State
from sympow.layers.output_gate import OutputGate

WIDTH = 4  # tokens of a short convolution


@dataclass
class DeltaState(State):
    S: torch.Tensor  # [B, H, D, D] float32
    inputs: torch.Tensor  # [B, 3, 3 H D] the last of the convolutions


class GatedDeltaNet(Variant):
    rotates = False
    width = WIDTH

    @classmethod
    def check(cls, config):
        if config.n_kv_head != config.n_head:
            raise ValueError(f"gated_deltanet has no shared key heads, got n_kv_head={config.n_kv_head}")
        if config.reset_token >= 0:
            raise ValueError("gated_deltanet does not reset between packed documents: train it without pack")

    def __init__(self, config):
        super().__init__(config)
        H, width = config.n_head, config.n_head * config.head_dim
        self.conv = nn.Parameter(torch.empty(3 * width, self.width).uniform_(-0.5, 0.5))  # as nn.Conv1d
        self.W_decay, self.W_beta = (nn.Linear(config.n_embd, H, bias=False) for _ in range(2))
        self.W_out = nn.Linear(config.n_embd, width, bias=False)
        self.log_rate = nn.Parameter(torch.empty(H).uniform_(1e-3, 16).log())
        step = torch.exp(torch.rand(H) * math.log(100) + math.log(1e-3))  # from 0.001 to 0.1
        self.step_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus of it is step
        self.output_gate = OutputGate(config.head_dim)

    def empty_state(self, batch, device, switch_over=None):
        H, D = self.config.n_head, self.config.head_dim
        inputs = torch.zeros(batch, self.width - 1, 3 * H * D, device=device)
        return DeltaState(torch.zeros(batch, H, D, D, device=device), inputs)

    def forward(self, x, qkv, resets=None, state=None):
        previous = self.empty_state(len(x), x.device) if state is None else state
        inputs = torch.cat((previous.inputs.to(qkv.dtype), qkv.flatten(2)), 1)  # [B, T + 3, 3 H D]
        mixed = F.silu(convolve(inputs, self.conv))
        q, k, v = (t.unflatten(-1, (-1, self.config.head_dim)) for t in mixed.chunk(3, -1))
        q, k = (F.normalize(t.float(), dim=-1, eps=1e-6).to(v.dtype) for t in (q, k))
        g = -self.log_rate.float().exp() * F.softplus(self.W_decay(x).float() + self.step_bias.float())
        y, S = operator(q.device)(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=torch.sigmoid(self.W_beta(x).float()).to(v.dtype),
            initial_state=None if state is None else previous.S,
            output_final_state=state is not None,
        )
        y = self.output_gate(y, self.W_out(x).view(y.shape))
        return y.to(x.dtype), state and DeltaState(S, inputs[:, qkv.shape[1] :].float())


def convolve(x, weight):
    """Return the sum over i of x_{t+i} weight[:, i], [B, T, C], for x [B, T + width - 1, C] and weight [C, width]."""
    width = weight.shape[1]
    T = x.shape[1] + 1 - width
    return sum(x[:, i : i + T] * weight[:, i].to(x.dtype) for i in range(width))


def operator(device):
    """Return fla's function for tensors on this device: its Triton kernels, or on a CPU the recurrence."""
    from fla.ops import gated_delta_rule
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    return gated_delta_rule.chunk_gated_delta_rule if device.type == "cuda" else naive_recurrent_gated_delta_rule


class PlainDeltaNet(GatedDeltaNet):
    """Gated DeltaNet without its convolution: each channel has a factor in its place."""

    width = 1
