"""Gated DeltaNet (Yang, Kautz, Hatamizadeh, 2024) from flash-linear-attention, to compare with the attentions here.

    pip install flash-linear-attention      # and tilelang, on Hopper GPUs with Triton 3.4 to 3.7.0
    python -m experiments.train --attention=gated_deltanet --n_layer=6 ...

Its projections are as in all attentions here. It adds what fla.layers.GatedDeltaNet has: short convolutions of
q, k and v, decay and step size by token, and a normalised, gated output; that is n_embd^2 weights a layer more. The
state is a D x E matrix a head; E is D, or 2 D in gated_deltanet_wide. Without a GPU fla's recurrence in plain PyTorch
takes the place of its kernels.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from sympow.attention import Variant
from sympow.attention.state import State
from sympow.experiments.forgetting import check_experiment
from sympow.layers.output_gate import OutputGate

WIDTH = 4  # tokens of a short convolution


@dataclass
class DeltaState(State):
    S: torch.Tensor  # [B, H, D, E] float32
    inputs: torch.Tensor  # [B, 3, H (2 D + E)] the last of the convolutions


class GatedDeltaNet(Variant):
    rotates = False
    expand = 1  # E / D

    @classmethod
    def check(cls, config):
        check_experiment(config, needs_fla=True)

    def __init__(self, config):
        super().__init__(config)
        H, D, C = config.n_head // self.expand, config.head_dim, config.n_embd
        self.widths = H * D, H * D, H * D * self.expand  # of q, k and v
        self.conv = nn.Parameter(torch.empty(sum(self.widths), WIDTH).uniform_(-0.5, 0.5))  # as nn.Conv1d
        self.W_decay, self.W_beta = (nn.Linear(C, H, bias=False) for _ in range(2))
        self.W_out = nn.Linear(C, H * D, bias=False) if self.expand == 1 else None
        self.log_rate = nn.Parameter(torch.empty(H).uniform_(1e-3, 16).log())
        step = torch.empty(H).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.step_bias = nn.Parameter(step.expm1().log())  # softplus of it is step
        self.output_gate = OutputGate(D * self.expand)

    def empty_state(self, batch, device, switch_over=None):
        D = self.config.head_dim
        inputs = torch.zeros(batch, WIDTH - 1, sum(self.widths), device=device)
        return DeltaState(torch.zeros(batch, len(self.log_rate), D, D * self.expand, device=device), inputs)

    def forward(self, x, qkv, resets=None, state=None):
        previous = state or self.empty_state(len(x), x.device)
        T = x.shape[1]
        qkv, gate = torch.cat(qkv, dim=2).flatten(2).tensor_split((sum(self.widths),), dim=2)
        inputs = torch.cat((previous.inputs.to(qkv.dtype), qkv), 1)  # [B, 3 + T, H (2 D + E)]
        mixed = sum(inputs[:, i : i + T] * self.conv[:, i].to(qkv.dtype) for i in range(WIDTH))
        q, k, v = (t.unflatten(-1, (len(self.log_rate), -1)) for t in F.silu(mixed).split(self.widths, dim=2))
        q, k = (F.normalize(t.float(), dim=-1, eps=1e-6).to(v.dtype) for t in (q, k))
        g = -self.log_rate.float().exp() * F.softplus(self.W_decay(x).float() + self.step_bias.float())
        beta = torch.sigmoid(self.W_beta(x).float()).to(v.dtype)
        states = dict(initial_state=state and state.S, output_final_state=state is not None)
        y, S = operator(q.device)(q, k, v, g=g, beta=beta, **states)
        gate = self.W_out(x) if self.W_out else gate
        y = self.output_gate(y, gate.view(y.shape)).reshape(*x.shape[:2], -1, self.config.head_dim)
        return y.to(x.dtype), state and DeltaState(S, inputs[:, T:].float())


class WideDeltaNet(GatedDeltaNet):
    """Gated DeltaNet with values twice as wide as keys: two heads of the model are one of its heads.

    What c_attn computes for q, k and v is then q, k, v and the output's gate, of widths 1, 1, 2 and 2.
    """

    expand = 2


def operator(device):
    """Return fla's function for tensors on this device: its Triton kernels, or on a CPU the recurrence."""
    from fla.ops import gated_delta_rule
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    return gated_delta_rule.chunk_gated_delta_rule if device.type == "cuda" else naive_recurrent_gated_delta_rule
