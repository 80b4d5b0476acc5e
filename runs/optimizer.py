"""Make the optimizer, and choose the learning rate of each step.

optimizer = make_optimizer(model, cfg)
rate = learning_rate(step, cfg, seconds)
"""

import math

import torch

from runs.parts import is_sharded


def make_optimizer(model, cfg):
    """Return a fused AdamW, with weight decay for matrices and embeddings but not for biases and norms."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=True)


def clip_gradients(parameters, max_norm):
    """Scale gradients, sharded or not, down to a norm of max_norm; return the norm that they had, a scalar."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if is_sharded(norm) else norm


def learning_rate(step, cfg, seconds=0.0):
    """Return the learning rate of step 0, 1, 2, ...: linear warm-up, then constant or a cosine down to min_lr.

    The cosine ends after lr_decay_iters steps or, if that is earlier, when max_seconds are over; a run that has both
    is therefore no pure function of its settings. seconds: of training so far, the same on all ranks.
    """
    rate = cfg.learning_rate
    if cfg.decay_lr:
        length = (cfg.lr_decay_iters or cfg.max_iters) - cfg.warmup_iters
        done = (step - cfg.warmup_iters) / max(1, length)
        if cfg.max_seconds > 0:
            done = max(done, seconds / cfg.max_seconds)
        rate = cfg.min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done)))) * (rate - cfg.min_lr)
    if step < cfg.warmup_iters:
        rate = min(rate, cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1))
    return rate
