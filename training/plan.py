"""Settle data, model and ranks of a run, and refuse mistakes, before anything is allocated or written.

plan = make_plan(cfg, values, ranks)     # data, stages, model and teacher of these settings, and who computes them
"""

from dataclasses import asdict, dataclass

import torch

from ..data.dataset import Dataset
from ..data.mixture import HeldOut, Mixture, open_dataset
from ..model import GPTConfig
from ..runs import folder
from ..runs.machine import can_compile, check_kernels
from ..runs.processes import Ranks
from ..runs.settings import choose_device
from ..runs.source import Source, choose_model
from .distill import Teacher
from .parallel import Layout, check_context, split_context
from .stages import Stage, check_memory, describe_stages, make_stages

SLOW_STEP = 1e13  # floating-point operations: some minutes on a few CPU cores


@dataclass
class Plan:
    """The data, model, teacher and ranks of a run. None of it changes while the run trains."""

    cfg: object  # the settings, a TrainConfig of train.py
    ranks: Ranks
    layout: Layout  # of the ranks
    dataset: Dataset | Mixture
    stages: list[Stage]
    held_out: HeldOut
    model_cfg: GPTConfig
    source: Source | None  # of the first weights
    teacher: Teacher
    device: torch.device
    dtype: torch.dtype  # of matrix products
    resume: str | None  # the checkpoint from which the run resumes, as this rank sees it
    saved_settings: dict | None  # with which it was trained
    settings: dict  # the contents of config.json

    @property
    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def make_plan(cfg, values, ranks):
    """Return the Plan of a TrainConfig. values: the settings that were given by name.

    Sets cfg.dtype, and cfg.tokens_per_step, to what they come to. Raises ValueError or DataError for settings, data and
    weights that do not fit; exits with status 2 for a folder that cannot be used.
    """
    if cfg.schedule != "constant" and cfg.min_lr > cfg.learning_rate:
        raise ValueError(
            f"min_lr must be at most learning_rate={cfg.learning_rate:g}, since schedule={cfg.schedule} goes down to "
            f"it, got {cfg.min_lr:g}"
        )
    dataset = open_dataset(cfg.dataset)
    layout = Layout(ranks, cfg.context_parallel, cfg.shard)
    stages, held_out = make_stages(cfg, values, dataset, layout)
    contexts = [stage.block_size for stage in stages]
    resume, saved_settings = folder.choose_checkpoint(cfg, thorough=ranks.master)
    if values.get("init_from") == "resume" and not resume:
        raise ValueError(
            f"init_from=resume: there is no checkpoint in out_dir {cfg.out_dir}; leave init_from out, or give scratch, "
            "to start a run"
        )
    source, model_cfg = choose_model(cfg, values, dataset, saved_settings)
    check_context(cfg, model_cfg, contexts)
    teacher = Teacher(cfg, dataset, contexts)
    device, dtype = choose_device(cfg.device, cfg.dtype, ranks.local)
    layout.check(cfg, device)
    check_memory(cfg, model_cfg, stages, device, ranks.world)
    cfg.dtype = str(dtype).removeprefix("torch.")
    settings = {
        **asdict(cfg),
        "model": asdict(model_cfg),
        "data": folder.fingerprint(dataset),
        "teacher": teacher.fingerprint,
        "ranks": ranks.world,
        "device_type": device.type,
    }
    return Plan(
        cfg=cfg,
        ranks=ranks,
        layout=layout,
        dataset=dataset,
        stages=stages,
        held_out=held_out,
        model_cfg=model_cfg,
        source=source,
        teacher=teacher,
        device=device,
        dtype=dtype,
        resume=resume,
        saved_settings=saved_settings,
        settings=settings,
    )


def make_network(plan, model):
    """Return the network to train, which averages gradients, of a model on its ranks.

    Checks the kernels, spreads sequences over ranks and compiles, as the settings say.
    """
    cfg, layout, contexts = plan.cfg, plan.layout, [stage.block_size for stage in plan.stages]
    check_kernels(model, contexts, plan.dtype, plan.ranks, cfg.context_parallel)
    compiled = can_compile(cfg.compile, plan.device, plan.ranks.log)
    layout.balanced = split_context(model, layout, contexts[-1], plan.dtype, compiled)
    plan.teacher.load(plan.device, plan.dtype, plan.ranks, compiled)
    return layout.wrap(model, compiled)


def resume_hint(cfg):
    """Return a text that says how a run resumes after a signal; see runs/folder.py's choose_checkpoint."""
    change = " with --init_from=auto" if cfg.init_from == "scratch" else ""
    change += " without --overwrite" if cfg.overwrite else ""
    return f"the same command{change} resumes the run"


def describe_run(plan, model):
    """Return a line with out_dir, the model's size and attention, the source of positions and the sizes of a step.

    A second one warns of steps that would take a CPU minutes.
    """
    attention = plan.model_cfg.attention
    if plan.model_cfg.positions != "rotary":
        attention += f" (positions={plan.model_cfg.positions})"
    size = f"{model.parameter_count() / 1e6:.1f}M parameters"
    sizes = describe_stages(plan.stages, plan.cfg, plan.layout)
    line = f"{plan.cfg.out_dir}: {size}, {attention}, {plan.device.type} {plan.cfg.dtype}; tokens a step: {sizes}"
    if plan.device.type == "cpu":
        flops = plan.cfg.tokens_per_step * model.flops_per_token(plan.stages[0].block_size, plan.dtype)
        if flops > SLOW_STEP:
            line += f"\na step has {flops:.0e} floating-point operations, too many for a CPU: config/demo.py is small"
    return line
