"""A window of softmax and power attention beside it in each layer, for models that were trained with softmax.

    python -m experiments.train --attention=window_power --window=64 --init_from=PATH ...

What it computes      y_i = (1 - s_i) w_i + s_i p_i,  s_i = sigmoid(W_share x_i) for each query head
The quadratic form    w is softmax in a window, always rotated; p is sympow_gating, rotated with positions=rotary
The state             the window's keys and values, and p's state; their bytes are known, but texts are read whole

Softmax over all tokens is such a sum, in which s_i is the weight of the tokens before the window. LoLCATs (Zhang et
al., 2024) has a window and linear attention under one denominator.
"""

from dataclasses import replace

import torch
from torch import nn

from sympow.attention import Softmax, SympowGating, Variant


class WindowPower(SympowGating):
    gates = ("learned",)
    windows = True
    bias = 0  # added to W_share x_i: -99 leaves the window alone, 99 power attention
    statistics = Variant.statistics

    def __init__(self, config):
        super().__init__(config)
        self.softmax = Softmax(replace(config, positions="rotary"))
        self.W_share = nn.Parameter(torch.zeros(config.n_head, config.n_embd))

    def input_weight(self):
        return torch.cat((super().input_weight(), self.W_share))

    def forward(self, x, qkv, resets=None, state=None):
        if state:
            raise ValueError("attention=window_power reads whole texts, without a state")
        gate, share = x.tensor_split((self.config.n_kv_head,), 2)
        window, _ = self.softmax(gate, qkv, resets)
        power, _ = super().forward(gate, qkv, resets)
        return window + torch.sigmoid(share + self.bias).unsqueeze(3) * (power - window), None

    def cache_policy(self, *arguments):
        return super().cache_policy(*arguments)._replace(has_state=True)
