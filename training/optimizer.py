"""Make the optimizer, take its steps, and choose the learning rate of each.

    optimizer = make_optimizer(model, cfg)
    loss.backward()
    norm = take_step(model, optimizer, cfg.grad_clip)
    rate = learning_rate(step, cfg, seconds)

A step whose gradient is not finite changes neither weights nor moments, and the CPU does not wait for the GPU to know.
"""

import math

import torch
from torch import nn

from sympow.training.muon import BatchedMuon
from sympow.runs.parts import is_sharded



def make_optimizer(model, cfg):
    """Return the optimizer that cfg.optimizer names, adamw or muon, for a GPT.

    Weight decay is for matrices and embeddings, not for biases and norms. The caller sets `found_inf`, a float32 scalar
    on the model's device, before each step: where it is not 0, the step changes nothing.
    """
    if cfg.optimizer == "muon":
        return MuonAndAdamW(model, cfg)
    return _make_adamw(model.parameters(), cfg)


def _make_adamw(parameters, cfg):
    """Return a fused AdamW, which takes found_inf itself."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=True)


def clip_gradients(parameters, max_norm):
    """Scale gradients, sharded or not, down to a norm of max_norm; return the norm that they had, a scalar."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if is_sharded(norm) else norm


class MuonAndAdamW:
    """Takes steps with Muon (muon.py) for the linear weights of attention and MLP, and with AdamW for all others.

    Others are the embedding, which is the head too, norms, biases, and what an attention variant has of its own, such
    as W_gamma and W_beta. Muon replaces the momentum of a matrix by the nearest orthogonal one (Jordan et al., 2024).
    The weight of c_attn is three matrices below each other, so Muon is given views of its rows for q, k and v. Updates
    are scaled to the size of AdamW's (adjust_lr_fn="match_rms_adamw": Liu et al., 2025, "Muon is Scalable for LLM
    Training"), so that AdamW's learning rate and weight decay serve for both.

    It has the attributes and methods of a torch optimizer that training and checkpoints use. In state_dict Muon's
    matrices are numbered on from AdamW's parameters.
    """

    def __init__(self, model, cfg):
        self.split = [(weight, rows, weight.detach().split(rows)) for weight, rows in muon_weights(model)]
        self.matrices = [matrix for _, _, matrices in self.split for matrix in matrices]
        of_muon = {id(weight) for weight, _, _ in self.split}
        self.others = [p for p in model.parameters() if id(p) not in of_muon]
        self.adamw = _make_adamw(self.others, cfg)
        self.muon = BatchedMuon(
            self.matrices, lr=cfg.learning_rate, weight_decay=cfg.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        for matrix in self.matrices:  # there before the first step, which may be one that changes nothing
            self.muon.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        self.found_inf = None

    @property
    def param_groups(self):
        return self.adamw.param_groups + self.muon.param_groups

    @torch.no_grad()
    def step(self):
        """Take a step of both, or of none if found_inf is not 0."""
        for weight, rows, matrices in self.split:
            for matrix, grad in zip(matrices, weight.grad.split(rows)):
                matrix.grad = grad
        self.adamw.found_inf = self.muon.found_inf = self.found_inf
        self.adamw.step()
        self.muon.step()

    def zero_grad(self, set_to_none=True):
        """Drop all gradients, Muon's views of them too."""
        self.adamw.zero_grad()
        for weight, _, matrices in self.split:
            for x in (weight, *matrices):
                x.grad = None

    def state_dict(self):
        adamw, muon = self.adamw.state_dict(), self.muon.state_dict()
        momenta = {len(self.others) + i: state for i, state in muon["state"].items()}
        return {"state": adamw["state"] | momenta, "param_groups": adamw["param_groups"] + muon["param_groups"]}

    def load_state_dict(self, saved):
        n, groups = len(self.others), len(self.adamw.param_groups)
        adamw = {i: state for i, state in saved["state"].items() if i < n}
        muon = {i - n: state for i, state in saved["state"].items() if i >= n}
        self.adamw.load_state_dict({"state": adamw, "param_groups": saved["param_groups"][:groups]})
        self.muon.load_state_dict({"state": muon, "param_groups": saved["param_groups"][groups:]})


def muon_weights(model):
    """Return [(weight [rows, columns], the rows of each matrix in it), ...]: the linear weights of attention and MLP.

    c_attn has one matrix each for q, k and v, every other layer one.
    """
    found = []
    for block in model.transformer.h:
        attn = block.attn
        found.append((attn.c_attn.weight, [heads * attn.head_dim for heads in attn.heads]))
        others = set(block.modules()) - {attn.c_attn, *attn.mix.modules()}
        layers = [layer for layer in block.modules() if layer in others and isinstance(layer, nn.Linear)]
        found += [(layer.weight, [layer.out_features]) for layer in layers]
    return found


def take_step(model, optimizer, grad_clip):
    """Take an optimizer step, unless the gradient is not finite, and drop the gradients; return their norm, a scalar.

    If it is above grad_clip (0: no limit) they are scaled down to it.
    """
    norm = clip_gradients(model.parameters(), grad_clip or math.inf)
    skipped = ~norm.isfinite()  # on all ranks alike
    optimizer.found_inf = skipped.float()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def learning_rate(step, cfg, seconds=0.0):
    """Return the learning rate of step 0, 1, 2, ...: linear warm-up, then cfg.schedule.

    constant stays; cosine goes down to min_lr from the warm-up on; wsd (warm-up, stable, decay) stays, and goes down to
    min_lr on a line over the last decay_share of the run. Both end after lr_decay_iters steps (0: max_iters) or, if
    that is earlier, when max_seconds are over; a run that has max_seconds is therefore no pure function of its
    settings. seconds: of training so far, the same on all ranks.
    """
    rate = cfg.learning_rate
    if cfg.schedule != "constant":
        begin = cfg.warmup_iters if cfg.schedule == "cosine" else 0
        done = (step - begin) / max(1, (cfg.lr_decay_iters or cfg.max_iters) - begin)
        if cfg.max_seconds > 0:
            done = max(done, seconds / cfg.max_seconds)
        done = min(1.0, max(0.0, done))
        if cfg.schedule == "cosine":
            rate = cfg.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (rate - cfg.min_lr)
        elif done > 1 - cfg.decay_share:
            rate = cfg.min_lr + (1 - done) / cfg.decay_share * (rate - cfg.min_lr)
    if step < cfg.warmup_iters:
        rate = min(rate, cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1))
    return rate
