"""What closes the gap from p = 2 to softmax? Parts of other models, added to gated and conformal sympow and to softmax.

The first two parts are options of the model. A name such as sympow_gating+norm is an attention with the others:
train.py takes it when experiments/train.py starts it. Such a model trains and scores whole texts, but cannot generate.

    conv    --convolution=4: q, k and v get a convolution of their last 4 tokens added (depthwise)
    out     --output_gate=True: the output is normalised and gated, RMSNorm(y) silu(W x)
    norm    q and k are normalised before the rotation, RMSNorm(q)
    spread  biases of the gates from 2 to 11 over the heads: half-lives of 5 to 41,000 tokens, instead of 688 for all
    slow    conformal: only the slower half of the pairs turns at the learned speed
    heads   conformal: the learned speed has a bias for each head

Conformal sympow at a constant speed of 1 is sympow_gating. Softmax and conformal sympow without parts are in
which_attention's tables: the same models, corpus and tokens.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from sympow.attention import ATTENTIONS
from sympow.attention.rotary import rotate, rotation_of
from sympow.attention.state import State
from sympow.experiments.report import LOSS_COLUMNS, loss_cell, table
from sympow.experiments.runs import main
from sympow.experiments.which_attention import CONTEXT, SEEDS, VARIANTS, WINDOW, schedule, texts_loss, texts_measure

RATE, CONFORMAL_RATE = 2.4e-3, 1.2e-3  # the best ones in which_attention's tables
HYBRID = VARIANTS["hybrid in a window"]["attention"]
OPTIONS = {"p=4": {"p": 4}, "bias": {"bias": True}, "window": {"window": WINDOW}}
RUNS = {  # name -> number of seeds, the most important first
    **{f"sympow_gating{parts}": 2 for parts in ("", "+conv", "+conv+out", "+conv+out+norm")},
    **{f"softmax{parts}": 2 for parts in ("+conv", "+conv, window", "+conv+out", "+conv+out+norm")},
    "hybrid+conv, window": 2,
    "gated_deltanet": 2,
    "gated_deltanet+plain": 2,
    "sympow_gating+conv+out, p=4": 2,
    **{f"sympow_gating{parts}": 2 for parts in ("+out", "+norm", ", bias", "+spread")},
    **{f"conformal_sympow{parts}": 3 for parts in ("+slow", "+heads")},
}


@dataclass
class WholeText(State):
    """Stands for a state that is not kept, so that a text must be read at once."""

    read: bool = False  # True after a text


class Parts:
    """Stands before an attention's class and adds the parts that its name has."""

    parts = ()

    def __init__(self, config):
        super().__init__(config)
        if "spread" in self.parts:
            self.gate.b.data = torch.linspace(2, 11, config.n_kv_head)
        if "heads" in self.parts:
            self.beta_bias = nn.Parameter(torch.zeros(config.n_head))

    def forward(self, x, qkv, resets=None, state=None):
        if state is not None and state.read:
            raise ValueError(f"attention={self.config.attention} reads a text at once, and does not go on from a state")
        if "norm" in self.parts:
            qk, v = qkv.tensor_split((-self.config.n_kv_head,), dim=2)
            qkv = torch.cat((F.rms_norm(qk, qk.shape[3:]), v), dim=2)
        y, _ = super().forward(x, qkv, resets)
        return y, state and WholeText(read=True)

    def empty_state(self, batch, device, switch_over=None):
        return WholeText()

    def beta(self, x):
        """Return the speed of rotation, [B, T] or, with heads, [B, T, H]."""
        return 1 + torch.tanh(x[..., :1] + self.beta_bias) if "heads" in self.parts else super().beta(x)

    def rotate(self, qkv, positions):
        """Rotate by the positions [B, T], or with heads [B, T, H]."""
        q, k, v = self.split(qkv)
        if "heads" in self.parts:
            factors = rotation_of(q, positions.transpose(1, 2), self.rope_base)  # [B, H, T, D]
            factors = [[factor[:, h] for factor in factors] for h in range(q.shape[2])]
            q, k = (torch.cat([rotate(x[:, :, h, None], *factors[h]) for h in range(x.shape[2])], 2) for x in (q, k))
            return q, k, v
        if "slow" not in self.parts:
            return super().rotate(qkv, positions)
        plain = torch.arange(1, q.shape[1] + 1, dtype=torch.float64, device=q.device).expand_as(positions)
        half = q.shape[3] // 2  # the first pairs turn fastest
        speeds = zip(*(rotation_of(q, u, self.rope_base) for u in (plain, positions)))
        factors = [torch.cat((fast[..., :half], slow[..., half:]), -1) for fast, slow in speeds]
        q, k = (rotate(x, *factors) for x in (q, k))
        return q, k, v

    def statistics(self, x, q):
        return {}


def attention_with_parts(name):
    """Return the class of an attention with parts, such as sympow_gating+out."""
    base, *parts = name.split("+")
    return type(name, (Parts, ATTENTIONS[base]), {"parts": tuple(parts)})


def plan(size):
    """Return the runs, the first seed of all before the second; of size tiny the first alone."""
    runs = []
    for i, seed in enumerate(SEEDS if size.shrink == 1 else SEEDS[:1]):
        for name in [name for name, seeds in RUNS.items() if seeds > i]:
            attention, _, option = name.partition(", ")
            rate = CONFORMAL_RATE if attention.startswith("conformal") else RATE
            settings = dict(p=2, bias=False, seed=seed, **schedule(size, rate)) | OPTIONS.get(option, {})
            if "window" in settings:
                settings["window"] //= size.shrink
            if "+conv" in attention:
                settings["convolution"] = 4
            if "+out" in attention:
                settings["output_gate"] = True
            settings["attention"] = attention.replace("+conv", "").replace("+out", "").replace("hybrid", HYBRID)
            runs.append(size.run(name, CONTEXT, 1000, {"positions": texts_measure(size)}, **settings))
    return runs


def report(entries, size):
    """Return the table."""
    columns = [
        ("learning rate", lambda entry: f"{entry.record['settings']['learning_rate']:g}"),
        *LOSS_COLUMNS,
        ("other texts, in windows", partial(loss_cell, measure=texts_loss)),
    ]
    return [table("Parts", columns, entries.values())], []


if __name__ == "__main__":
    main("parts", plan, report, seeds=None, corpus="source_bpe")
