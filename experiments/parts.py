"""Which parts does an even power need? One factor at a time around gated p = 2 with heads of 64, then others like it.

The base has no positions, gates that begin at sigmoid(3), a convolution of 4 tokens and an output gate. Most factors
are settings of the model. A name such as sympow_gating+norm is an attention with others: train.py takes it when
experiments/train.py starts it. Such a model trains and scores whole texts, but cannot generate.

    norm    q and k are normalised, RMSNorm(q)
    half    the first half of each head's pairs is rotated, the second half is not
    kv      a convolution of k and v alone
    rms     the output is normalised, as by --output_gate=True, but not gated
    spread  the gates of a layer's heads begin at sigmoid(1) to sigmoid(6)
    weigh   each token has a learned weight besides, exp(W x_j), as the input gate of xLSTM (Beck et al., 2024)

The second table has the first form of this experiment: there every dimension of q and k was rotated, and gates began at
sigmoid(6.9). Its models cannot be trained by this file any more.
"""

import os
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

from sympow.attention import ATTENTIONS
from sympow.attention.rotary import rotate, rotation_of
from sympow.attention.state import State
from sympow.experiments.report import (
    LOSS_COLUMNS,
    entries_of,
    loss_cell,
    seeds_difference_cell,
    table,
    texts_loss,
    val_loss,
)
from sympow.experiments.runs import (
    WINDOW,
    main,
    make_run,
    read_records,
)
from sympow.layers.convolution import Convolution
from sympow.layers.output_gate import OutputGate

NAME, RATE = "parts", 2.4e-3
CONVOLUTION = 4  # tokens
AROUND = dict(convolution=CONVOLUTION, output_gate=True)
BASE = dict(attention="sympow_gating", p=2, positions="none", gate_bias=3.0, **AROUND)
MUON = dict(optimizer="muon", weight_decay=0.1)
HYBRID = BASE | dict(attention="sympow_gating,sympow_gating,sympow_gating,softmax", window=WINDOW)
RUNS = {  # name -> settings of runs.make_run, the most important first
    "p=2": BASE,
    **{f"p=2, gate_bias {bias:g}": BASE | dict(gate_bias=bias) for bias in (2.0, 4.0, 5.0)},
    "p=2, gates spread": BASE | dict(attention="sympow_gating+spread"),
    "p=2, no output gate": BASE | dict(output_gate=False),
    "p=2, output normalised alone": BASE | dict(attention="sympow_gating+rms", output_gate=False),
    **{f"p=2, convolution {n}": BASE | dict(convolution=n) for n in (2, 8)},
    "p=2, convolution of k and v": BASE | dict(attention="sympow_gating+kv", convolution=0),
    "p=2, no convolution": BASE | dict(convolution=0),
    "p=2, half rotated": BASE | dict(attention="sympow_gating+half", positions="rotary"),
    "p=2, rotary": BASE | dict(positions="rotary"),
    **{
        f"p=2, q and k normalised, lr {rate:g}": BASE | dict(attention="sympow_gating+norm", learning_rate=rate)
        for rate in (RATE, 3.6e-3, 4.8e-3)
    },
    "p=2, weight decay 0.1": BASE | dict(weight_decay=0.1),
    "p=2, gate_bias 0": BASE | dict(gate_bias=0.0, log_interval=1),  # which logs the gradient's norm at every step
    "p=2, tokens weighted": BASE | dict(attention="sympow_gating+weigh"),
    "softmax, rotary, convolution": dict(attention="softmax", convolution=CONVOLUTION),
    "softmax, rotary, convolution, output gate": dict(attention="softmax", **AROUND),
    "p=4": BASE | dict(p=4),
    "p=2, heads of 128": BASE | dict(heads=128),
    "forgetting": BASE | dict(attention="forgetting"),
    "conformal p=2, rotary": BASE | dict(attention="conformal_sympow", positions="rotary", learning_rate=RATE / 2),
    "hybrid": HYBRID,
    "hybrid, softmax rotary": HYBRID | dict(positions="none,none,none,rotary"),
    "p=2, Muon": BASE | MUON,
    "p=4, Muon": BASE | dict(p=4) | MUON,
    "p=2, 1.13 times the tokens": BASE | dict(steps=1130),  # what a part that costs 13% of the speed must gain
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
        if "rms" in self.parts:
            self.output_gate = OutputGate(config.head_dim)
        if "spread" in self.parts:
            self.gate.b.data = torch.linspace(1, 6, config.n_kv_head)
        if "kv" in self.parts:
            self.conv = Convolution(2 * config.n_kv_head * config.head_dim, CONVOLUTION)
        if "weigh" in self.parts:
            self.W_weigh = nn.Parameter(torch.zeros(config.n_kv_head, config.n_embd))

    def input_weight(self):
        weight = super().input_weight()
        return torch.cat((weight, self.W_weigh)) if "weigh" in self.parts else weight

    def forward(self, x, qkv, resets=None, state=None):
        if state is not None and state.read:
            raise ValueError(f"attention={self.config.attention} reads a text at once, and does not go on from a state")
        if "kv" in self.parts:
            q, kv = qkv.tensor_split((self.config.n_head,), dim=2)
            qkv = torch.cat((q, self.conv(kv, resets)), dim=2)
        if "weigh" in self.parts:
            x, logs = x.tensor_split((-self.config.n_kv_head,), dim=2)
            q, k, v = self.split(qkv)
            k = k * (logs / self.p).exp().unsqueeze(-1).to(k.dtype)  # (q.k)^p has p of them
            qkv = torch.cat((q, k, v), dim=2)
        if "norm" in self.parts:
            qk, v = qkv.tensor_split((-self.config.n_kv_head,), dim=2)
            qkv = torch.cat((F.rms_norm(qk, qk.shape[3:]), v), dim=2)
        y, _ = super().forward(x, qkv, resets)
        if "rms" in self.parts:
            y = self.output_gate.normalize(y).to(y.dtype)
        return y, state and WholeText(read=True)

    def empty_state(self, batch, device, switch_over=None):
        return WholeText()

    def rotate(self, qkv, positions):
        """Rotate q and k by the positions [B, T] or [T], with half in the first half of their entries alone."""
        if "half" not in self.parts:
            return super().rotate(qkv, positions)
        q, k, v = self.split(qkv)
        half = q.shape[3] // 4 * 2  # whole pairs
        factors = rotation_of(q[..., :half], positions, self.rope_base)
        q, k = (torch.cat((rotate(x[..., :half], *factors), x[..., half:]), dim=3) for x in (q, k))
        return q, k, v

    def statistics(self, x, q):
        return {}


def attention_with_parts(name):
    """Return the class of an attention with parts, such as sympow_gating+rms."""
    base, *parts = name.split("+")
    return type(name, (Parts, ATTENTIONS[base]), {"parts": tuple(parts)})


def plan(size):
    """Return the runs."""
    rates = {name: settings.get("learning_rate", RATE) for name, settings in RUNS.items()}
    runs = [make_run(size, name, RUNS[name], rate) for name, rate in rates.items()]
    return [replace(run, measures={}) for run in runs]  # the validation loss chooses


# ---- the report


def speed_cell(entry):
    """Return the tokens a second in training, of the first seed."""
    return round(max(entry.record["tokens_per_second"].values()))


def norms_cell(entry):
    """Return the median and the largest norm of the gradient at logged steps after the warm-up, a tenth of all."""
    norms = entry.record["grad_norm"]
    norms = norms[1 + len(norms) // 10 :]
    return f"{median(norms):.2f} / {max(norms):.2f}"


def rotated_entries(size):
    """Return the Entries of the records in which all of q and k was rotated, the lowest loss first."""
    records = read_records(os.path.join(size.folder, f"{NAME}.json")).values()
    entries = entries_of(record for record in records if "positions" not in record["settings"])
    return sorted(entries.values(), key=lambda entry: entry.mean(val_loss))


def report(entries, size):
    """Return the table of the parts and, where there are such records, the one of rotated models."""
    base = entries.get("p=2")
    rate = ("learning rate", lambda entry: f"{entry.record['settings']['learning_rate']:g}")
    columns = [rate, *LOSS_COLUMNS, ("to p=2", partial(seeds_difference_cell, base=base))]
    columns += [("tokens/s", speed_cell), ("gradient's norm, median / largest", norms_cell)]
    blocks = [table("One factor at a time", columns, entries.values())]
    if rotated := rotated_entries(size):
        texts = ("other texts, in windows", partial(loss_cell, measure=texts_loss))
        blocks.append(table("What positions cost an even power", [rate, *LOSS_COLUMNS, texts], rotated))
    return blocks, []


if __name__ == "__main__":
    main(NAME, plan, report, seeds=None, corpus="source_bpe")
