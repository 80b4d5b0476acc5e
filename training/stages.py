"""Train in stages of growing context: short windows first, long ones for the last part of a run.

    python train.py config/sympow_gating_p2.py --then=16384@0.5,65536@0.9

A run starts at block_size; each part of `then` is a later stage: its context, and after which share of the run or after
how many steps it begins. A share is one of max_iters or, if that comes first, of max_seconds. Every stage takes the
same number of tokens a step, in fewer sequences, and each step reads the batch that a run at its context alone would
read in that step. Validation is at the final context from the first evaluation on.

    stages, held_out = make_stages(cfg, values, dataset, layout)
    number = stage_of(stages, cfg, step, progress)     # the same on all ranks
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from ..attention.operator.memory import free_memory
from ..data.loader import Windows
from ..data.mixture import HeldOut, MixedWindows, open_windows
from ..layers.activation import mlp_widths
from ..runs.program import refuse
from ..runs.settings import accumulation_steps, parse_stages

REHEARSED = ("cuda",)  # kinds of devices on which too little memory is an error that can be caught
# numbers of 4 bytes that the backward pass keeps at least for each token, layer and entry of n_embd
KEPT = {False: 12, True: 1}  # with activation_checkpointing or without


@dataclass(frozen=True)
class Stage:
    """A part of a run: its context, the sequences and micro-steps of a step on each rank, and where it starts.

    Attributes: block_size, batch_size, accumulation, start (the number of steps before it, or a Fraction: share of the
    run), windows (the training split's).
    """

    block_size: int
    batch_size: int
    accumulation: int
    start: int | Fraction
    windows: Windows | MixedWindows


def steps_before(start, max_iters):
    """Return the number of steps after which a stage begins, if no time decides."""
    return start if isinstance(start, int) else math.floor(start * max_iters + Fraction(1, 2))


def make_stages(cfg, values, dataset, layout):
    """Return the stages of a run on the ranks of a Layout, at least one, and the HeldOut at the final context.

    values: the settings that were given by name. Raises ValueError or DataError for sizes that do not fit.
    """
    later = parse_stages(cfg.then)
    contexts = [cfg.block_size, *(context for context, _ in later)]
    steps = [steps_before(start, cfg.max_iters) for _, start in later]
    late = any(start >= cfg.max_iters for _, start in later)  # a step, as shares are below 1: it would never begin
    if contexts != sorted(set(contexts)) or steps != sorted(steps) or late:
        raise ValueError(
            f"then must have contexts that grow from block_size={cfg.block_size} on and start one after the other, "
            f"before max_iters={cfg.max_iters}, got {cfg.then!r}, contexts that start after {steps} steps"
        )
    held_out = HeldOut(dataset, cfg.val_datasets, contexts[-1], cfg.pack, "then" if later else "block_size")
    accumulation = accumulation_steps(cfg, values, layout.data_world)
    windows = open_windows(dataset, "train", cfg.block_size, cfg.pack)
    stages = [Stage(cfg.block_size, cfg.batch_size, accumulation, 0, windows)]
    for context, start in later:
        windows = open_windows(dataset, "train", context, cfg.pack, "then")
        stages.append(Stage(context, *_later_sizes(cfg, context, layout.data_world), start, windows))
    return stages, held_out


def _later_sizes(cfg, context, world):
    """Return (batch_size, accumulation) of a later stage; their product is the number of sequences in a step on a rank.

    A micro-step has no more tokens than one of the first stage, but at least one sequence.
    """
    sequences, rest = divmod(cfg.tokens_per_step, world * context)
    if rest:
        raise ValueError(
            f"then={cfg.then}: tokens_per_step must be a multiple of {world} ranks x context {context} = "
            f"{world * context}, got {cfg.tokens_per_step}"
        )
    limit = max(1, min(sequences, cfg.batch_size * cfg.block_size // context))
    batch_size = max(n for n in range(1, limit + 1) if sequences % n == 0)
    return batch_size, sequences // batch_size


def stage_of(stages, cfg, step, progress):
    """Return the number of the stage in which a run takes a step, the same on all ranks.

    It depends on the step and, for shares under a max_seconds, on progress.seconds. A run never goes back: the stages
    that it has entered are in progress.stages.
    """
    share = progress.seconds / cfg.max_seconds if cfg.max_seconds else 0.0
    number = len(progress.stages)
    for i, stage in enumerate(stages):
        by_time = isinstance(stage.start, Fraction) and share >= stage.start
        if by_time or step >= steps_before(stage.start, cfg.max_iters):
            number = max(number, i)
    return number


def enter_stage(stages, number, progress):
    """Return the new progress.stages of a run that takes its next step in the stage with this number."""
    entered = stages[len(progress.stages) + 1 : number + 1]
    return [*progress.stages, *([stage.block_size, progress.step] for stage in entered)]


def describe_stages(stages, cfg, layout):
    """Return a text with the sizes of a step in each stage, and when a later one begins."""
    groups = "" if layout.context_size == 1 else f"{layout.context_size} x "
    texts = []
    for stage in stages:
        start = f"after {steps_before(stage.start, cfg.max_iters):,} steps: " if stage.start else ""
        sizes = f"{stage.batch_size} sequences x {stage.block_size} context x {stage.accumulation} accumulation"
        texts.append(f"{start}{groups}{layout.data_world} ranks x {sizes}")
    return f"{'; '.join(texts)} = {cfg.tokens_per_step:,}"


def refuse_moved_stages(cfg, progress):
    """Refuse to resume with a `then` or a max_iters that moves steps already taken into other stages.

    Stages that have not begun may change, come and go. With max_seconds the time may have begun a stage before its
    step, so that contexts alone are compared.
    """
    planned = [[context, steps_before(start, cfg.max_iters)] for context, start in parse_stages(cfg.then)]
    count = len(progress.stages)
    length = 1 if cfg.max_seconds else 2
    moved = [stage[:length] for stage in planned[:count]] != [stage[:length] for stage in progress.stages]
    if (moved or any(step < progress.step for _, step in planned[count:])) and not cfg.eval_only:
        then = ",".join(f"{context}@{step}" for context, step in progress.stages)
        refuse(
            f"{cfg.out_dir} cannot resume at step {progress.step} with then={cfg.then!r} and max_iters="
            f"{cfg.max_iters}: --then={then!r} is what it did, and later stages may follow with commas"
        )


def check_memory(cfg, config, stages, device, world):
    """Raise ValueError if a CPU surely has too little memory for a micro-step of a model with this GPTConfig.

    Counts what the step keeps, and 16 bytes for each entry of the embedding and of most linear weights: the weight, its
    gradient and two moments. world: the number of ranks, which may share these.
    """
    tokens = max(stage.batch_size * stage.block_size for stage in stages) // cfg.context_parallel
    mlp = sum(mlp_widths(config)) * (config.residual == "gpt2")
    width = 2 * config.n_head * config.head_dim + mlp  # c_attn, c_proj, MLP
    weights = 16 * config.n_embd * (config.vocab_size + config.n_layer * width) // (world if cfg.shard else 1)
    need = weights + 4 * tokens * KEPT[config.activation_checkpointing] * config.n_layer * config.n_embd
    if device.type == "cpu" and not cfg.eval_only and need > (have := free_memory(device)):
        raise ValueError(
            f"batch_size={cfg.batch_size} takes at least {need / 1e9:,.1f} GB of memory ({weights / 1e9:,.1f} for "
            f"weights, gradients and moments), this machine has {have / 1e9:,.1f} GB: a smaller batch_size "
            "(tokens_per_step stays), block_size or model needs less"
        )


def rehearse(plan, model, optimizer):
    """Take a forward and a backward pass at the final context and drop them, to report too little memory at the start.

    Where the first step will make AdamW's moments, memory of their size stands in for them. Raises
    torch.OutOfMemoryError.
    """
    stage = plan.stages[-1]
    if plan.device.type not in REHEARSED:
        return
    try:
        parameters = [x for x in model.parameters() if x not in optimizer.state]
        moments = [torch.empty_like(x) for x in parameters for _ in range(2)]
        tokens = stage.block_size // plan.layout.context_size
        ids = torch.zeros(stage.batch_size, tokens, dtype=torch.int64, device=plan.device)
        with plan.autocast:  # if inputs and targets were one tensor, the loss would be compiled anew
            _, loss = model(ids, ids.clone(), **plan.teacher(ids))
        loss.backward()
        del moments
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"at context {stage.block_size:,}: {error}") from error
    model.zero_grad()
