"""Make the optimizer, take its steps, and choose the learning rate of each.

    optimizer = make_optimizer(model, cfg)
    rate = learning_rate(step, cfg, seconds)
    loss.backward()
    norm = take_step(model, optimizer, cfg.grad_clip)

A new optimizer is an entry of OPTIMIZERS, a new schedule one of SCHEDULES. A setting of its own is a field of
TrainConfig in train.py, with its range in RANGES.

A step without a finite gradient changes neither weights nor moments. With AdamW and Muon the CPU does not wait for the
GPU to know: they have the attribute `found_inf`, as torch's fused optimizers do, a float32 scalar on the model's
device, which is set before each step. Where it is not 0, the step changes nothing. An optimizer without torch's
attribute `_step_supports_amp_scaling`, such as NAdam, ignores it. Its step is left out, for which the CPU waits.
"""

import math
from collections import defaultdict

import torch
from torch import nn

from ..data import batches
from ..runs.parts import is_sharded, own_rows

# torch.optim.Muon's defaults
MOMENTUM = 0.95
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.775, 2.0315)
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}  # many CPUs are tens of times as slow in bfloat16
SMALLEST_NORM = 1e-7

MUON_BATCH = 2**26  # entries of weights, from which on Muon works on them: on a GPU 18 bytes for each during a step


def make_optimizer(model, cfg):
    """Return the optimizer that cfg.optimizer names, for a GPT."""
    return OPTIMIZERS[cfg.optimizer](model, cfg)


def make_adamw(model, cfg, excluded=()):
    """Return a fused AdamW for the weights of a model, but for those that are excluded.

    Weight decay is for matrices and embeddings, not for biases and norms.
    """
    parameters = [p for p in model.parameters() if p not in excluded]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=True)


class MuonAndAdamW(torch.optim.Optimizer):
    """Takes steps with Muon for the linear weights of attention and MLP, and with AdamW for all others.

    Muon replaces the momentum of a matrix by the nearest orthogonal one (Jordan et al., 2024). Updates are scaled to
    the size of AdamW's (Liu et al., 2025, "Muon is Scalable for LLM Training"), so that AdamW's learning rate and
    weight decay serve for both. The steps are torch.optim.Muon's with adjust_lr_fn="match_rms_adamw", on a CPU in
    float32. It launches some 28 operators for each matrix: a GPU with a small model waits for the host. Here matrices
    of one shape are worked on together, a hundred launches a step. Of a sharded model each rank has its rows of the
    momentum. It gathers whole matrices for as long as it works on them.
    """

    def __init__(self, model, cfg):
        self.matrix_rows = muon_weights(model)
        self.batches = [*batches(self.matrix_rows, MUON_BATCH, torch.numel)]
        self.adamw = make_adamw(model, cfg, self.matrix_rows)
        group = {"params": [*self.matrix_rows], "lr": cfg.learning_rate, "weight_decay": cfg.weight_decay}
        super().__init__([*self.adamw.param_groups, group], {})
        for weight in self.matrix_rows:  # there before the first step, which may be one that changes nothing
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        self.found_inf, self._step_supports_amp_scaling = None, True

    @torch.no_grad()
    def step(self):
        """Take a step of both, or of none if found_inf is not 0."""
        self.adamw.param_groups, self.adamw.state = self.param_groups[:-1], self.state
        self.adamw.found_inf = self.found_inf
        self.adamw.step()
        for weights in self.batches:
            self._step_together(weights)

    def _step_together(self, weights):
        """Take a step of Muon for some weights; of a sharded one this rank holds some rows."""
        group, skip = self.param_groups[-1], self.found_inf != 0
        self._mix_momentum(weights, skip)
        matrices = defaultdict(list)  # by shape: (gradient, own rows of the matrix, which rows those are)
        for weight in weights:
            gradient = weight.grad
            if is_sharded(weight):
                gradient = gradient.to(NEWTON_SCHULZ_DTYPE[gradient.device.type]).full_tensor()
            own, first = own_rows(weight.detach())
            start = -first  # of a matrix, counted from this rank's first row
            for matrix in gradient.split(self.matrix_rows[weight]):
                begin, end = max(0, start), max(0, start + len(matrix))
                rows = slice(max(0, -start), max(0, len(own) - start))
                matrices[matrix.shape].append((matrix, own[begin:end], rows))
                start += len(matrix)
        for shape, of_shape in matrices.items():
            gradients, own, rows = zip(*of_shape)
            update = torch.where(skip, 0.0, orthogonalize(torch.stack(gradients)).to(own[0].dtype))
            rate = group["lr"] * 0.2 * max(shape) ** 0.5
            torch._foreach_mul_(own, torch.where(skip, 1.0, 1 - group["lr"] * group["weight_decay"]))
            torch._foreach_add_(own, [x[i] for x, i in zip(update, rows)], alpha=-rate)

    def _mix_momentum(self, weights, skip):
        """Update the momentum of some weights, and put Nesterov's momentum in the place of their gradients."""
        gradients = [own_rows(weight.grad)[0] for weight in weights]
        momenta = [own_rows(self.state[weight]["momentum_buffer"])[0] for weight in weights]
        gradient, momentum = (torch.cat([x.flatten() for x in tensors]) for tensors in (gradients, momenta))
        gradient = torch.where(skip, momentum, gradient)  # which leaves the momentum as it is
        momentum.lerp_(gradient, 1 - MOMENTUM)
        gradient.lerp_(momentum, MOMENTUM)
        sizes = [x.numel() for x in momenta]
        for tensors, flat in ((gradients, gradient), (momenta, momentum)):
            torch._foreach_copy_(tensors, [x.view_as(y) for x, y in zip(flat.split(sizes), tensors)])


def muon_weights(model):
    """Return {weight [rows, columns]: the rows of each matrix in it}, the linear weights of attention and MLP.

    The weight of c_attn has several matrices below each other, of q, k, v and the output's gate, and SwiGLU's c_fc two.
    Every other weight is one matrix. Weights of attentions, such as W_gamma and W_beta, are not among them.
    """
    rows = {}
    for block in model.transformer.h:
        attn = block.attn
        rows[attn.c_attn.weight] = [heads * attn.head_dim for heads in attn.heads]
        own_modules = {attn.c_attn, *attn.mix.modules()}
        for layer in block.modules():
            if isinstance(layer, nn.Linear) and layer not in own_modules:
                n = getattr(layer, "matrices", 1)
                rows[layer.weight] = n * [layer.out_features // n]
    return rows


def orthogonalize(x):
    """Return for each matrix of x [n, rows, columns] one near the nearest orthogonal one, in NEWTON_SCHULZ_DTYPE.

    This is the Newton-Schulz iteration of Jordan et al. (2024).
    """
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.mT).mT
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = x.to(NEWTON_SCHULZ_DTYPE[x.device.type])
    x = nn.functional.normalize(x, dim=(1, 2), eps=SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x


OPTIMIZERS = {"adamw": make_adamw, "muon": MuonAndAdamW}


def take_step(model, optimizer, grad_clip):
    """Take an optimizer step, unless the gradient is not finite, and drop the gradients; return their norm, a scalar.

    A gradient with a norm above grad_clip (0: no limit) is scaled down to it. Gradients may be sharded.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    norm = norm.full_tensor() if is_sharded(norm) else norm
    optimizer.found_inf = (~norm.isfinite()).float()  # the same on all ranks
    if hasattr(optimizer, "_step_supports_amp_scaling") or not optimizer.found_inf:
        optimizer.step()
    optimizer.zero_grad()
    return norm


def constant(step, cfg, seconds):
    """Return the highest learning rate."""
    return cfg.learning_rate


def cosine(step, cfg, seconds):
    """Return a rate that goes down to min_lr from the warm-up on."""
    done = _share_done(step, cfg, seconds, cfg.warmup_iters)
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (cfg.learning_rate - cfg.min_lr)


def wsd(step, cfg, seconds):
    """Return a rate that stays, and goes down to min_lr on a line over the last decay_share of the run."""
    done = _share_done(step, cfg, seconds)
    if done <= 1 - cfg.decay_share:
        return cfg.learning_rate
    return cfg.min_lr + (1 - done) / cfg.decay_share * (cfg.learning_rate - cfg.min_lr)


def _share_done(step, cfg, seconds, begin=0):
    """Return the share of the schedule that is over, from the step `begin` on: of its steps or of max_seconds,
    whichever is larger."""
    done = (step - begin) / max(1, (cfg.lr_decay_iters or cfg.max_iters) - begin)
    if cfg.max_seconds > 0:
        done = max(done, seconds / cfg.max_seconds)
    return min(1.0, max(0.0, done))


SCHEDULES = {"constant": constant, "cosine": cosine, "wsd": wsd}
RANGES = (  # of settings that belong to one schedule or optimizer, for check_ranges
    ("optimizer", OPTIMIZERS),
    ("schedule", SCHEDULES),
    ("decay_share", "above 0 and at most 1", lambda x: 0 < x <= 1),
)


def learning_rate(step, cfg, seconds=0.0):
    """Return the learning rate of step 0, 1, 2, ...: linear warm-up, then cfg.schedule.

    A schedule ends after lr_decay_iters steps (0: max_iters) or, if that is earlier, when max_seconds are over. So with
    max_seconds the rates depend on the speed of the machine. seconds: of training so far, the same on all ranks.
    """
    rate = SCHEDULES[cfg.schedule](step, cfg, seconds)
    if step < cfg.warmup_iters:
        rate = min(rate, cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1))
    return rate
