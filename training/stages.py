"""Train in stages of growing context: short windows first, long ones for the last part of a run.

    python train.py config/sympow_gating_p2.py --then=16384@0.5,65536@0.9

A run starts at block_size; each part of `then` is a later stage: its context, and after which share of the run or after
how many steps it begins. A share is one of max_iters or, if that comes first, of max_seconds. Every stage takes the
same number of tokens a step, in fewer sequences, and each step reads the batch that a run at its context alone would
read in that step. Validation is at the final context from the first evaluation on.

    stages, held_out = make_stages(cfg, given, dataset, layout)
    index = stage_of(trainer, step)       # agreed by all ranks
    enter_stage(trainer)                  # before every step
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

import torch

from sympow.data.loader import Windows
from sympow.data.mixture import HeldOut, MixedWindows, open_windows
from sympow.runs.machine import memory_advice
from sympow.runs.settings import accumulation_steps, divide_sequences, nearest_multiples, refuse

MOST = 6  # stages after the first: torch.compile compiles a network for at most 8 shapes and modes
REHEARSED = ("cuda",)  # kinds of devices on which too little memory is an error that can be caught


@dataclass(frozen=True)
class Stage:
    """A part of a run: its context, the sequences and micro-steps of a step on each rank, and where it starts.

    Attributes: block_size, batch_size, accumulation, start (the number of steps before it, or a Fraction: share of the
    run), windows (those of the training split), name (for the display; "" if the run has one stage).
    """

    block_size: int
    batch_size: int
    accumulation: int
    start: int | Fraction
    windows: Windows | MixedWindows
    name: str


def parse_stages(then):
    """Return [(context, start)] of the stages in `then`; start is a number of steps, or a Fraction: a share.

    Raises ValueError if it cannot be read, or if contexts or starts do not grow.
    """
    found = []
    for part in then.split(",") if then else ():
        match = re.fullmatch(r" *(\d{1,18})@(?:(0?\.\d{1,18})|(\d{1,18})) *", part)
        start = match and (Fraction(match[2]) if match[2] else int(match[3]))
        if not start:
            raise ValueError(
                "then must be CONTEXT@START, or several with commas between, where START is a share of the run between "
                f"0 and 1 or a number of steps, as in 16384@0.5,65536@0.9, got {then!r}"
            )
        found.append((int(match[1]), start))
    if len(found) > MOST:
        raise ValueError(f"then must have at most {MOST} stages, got {len(found)}")
    for (context, start), (longer, later) in zip(found, found[1:]):
        if longer <= context or (type(start) is type(later) and later <= start):
            raise ValueError(f"then must have growing contexts that start one after the other, got {then!r}")
    return found


def final_context(settings):
    """Return the context of the last stage of a run with these settings, the contents of its config.json."""
    return max([settings["block_size"], *(context for context, _ in parse_stages(settings.get("then", "")))])


def steps_before(start, max_iters):
    """Return the number of steps after which a stage begins, if no time decides."""
    return start if isinstance(start, int) else math.floor(start * max_iters + Fraction(1, 2))


def make_stages(cfg, given, dataset, layout):
    """Return the stages of a run on the ranks of a Layout, at least one, and the HeldOut at the final context.

    given: the settings that were given by name. Raises ValueError or DataError for sizes that do not fit.
    """
    later = parse_stages(cfg.then)
    if later and later[0][0] <= cfg.block_size:
        raise ValueError(f"then must have longer contexts than block_size={cfg.block_size}, got {cfg.then!r}")
    if later and later[-1][0] > dataset.document_length and not cfg.pack:
        raise ValueError(
            f"then={cfg.then} has contexts longer than the documents of {dataset.name} ({dataset.document_length} "
            f"tokens): give {dataset.document_length} or less, or --pack=1 to run over document borders"
        )
    steps = [steps_before(start, cfg.max_iters) for _, start in later]
    if steps != sorted(steps):
        raise ValueError(f"then={cfg.then} with max_iters={cfg.max_iters} has stages that begin after {steps} steps")
    planned, stages = [(cfg.block_size, 0), *later], []
    windows = [open_windows(dataset, "train", n, cfg.pack, "then" if start else "block_size") for n, start in planned]
    held_out = HeldOut(dataset, cfg.val_datasets, planned[-1][0], cfg.pack, "then" if later else "block_size")
    world = layout.data_world
    accumulation = accumulation_steps(cfg, given, world)
    for i, (n, start) in enumerate(planned):
        sizes = _later_sizes(cfg, n, world) if start else (cfg.batch_size, accumulation)
        name = f"stage {i + 1} of {len(planned)} (context {n:,})" if later else ""
        stages.append(Stage(n, *sizes, start, windows[i], name))
    return stages, held_out


def _later_sizes(cfg, block_size, world):
    """Return (batch_size, accumulation) of a later stage: as many sequences in a micro-step as have no more tokens than
    one of the first stage, but at least one."""
    sequences, rest = divmod(cfg.tokens_per_step, world * block_size)
    if rest:
        first = cfg.batch_size * cfg.block_size  # tokens of a micro-step
        unit = math.lcm(world * first, *(world * context for context, _ in parse_stages(cfg.then)))
        key, of = ("gradient_accumulation_steps", first) if cfg.gradient_accumulation_steps else ("tokens_per_step", 1)
        near = nearest_multiples(cfg.tokens_per_step, unit, of)
        raise ValueError(
            f"then={cfg.then}: tokens_per_step must be a multiple of {world} ranks x context {block_size} = "
            f"{world * block_size}, got {cfg.tokens_per_step}: {key}={near} would do"
        )
    return divide_sequences(sequences, cfg.batch_size * cfg.block_size // block_size)


def resume_stage(trainer):
    """Let the trainer go on in the stage of its checkpoint, or begin in the first.

    Where the final context is another than it was, validation losses so far count no more as the best.
    """
    progress, final = trainer.progress, trainer.stages[-1].block_size
    trainer.stage = trainer.stages[0 if trainer.cfg.eval_only else len(progress.stages)]
    if final != (progress.context or trainer.cfg.block_size):
        progress.best = math.inf
    progress.context = final


def stage_of(trainer, step):
    """Return the index of the stage of the step that comes next.

    It depends on the step and, for shares under a max_seconds, on the time of rank 0 that all ranks share, so that all
    answer the same. A run never goes back: the stages that it has entered are in its checkpoints.
    """
    cfg = trainer.cfg
    share = trainer.seconds / cfg.max_seconds if cfg.max_seconds else 0.0
    begun = len(trainer.progress.stages)
    for i, stage in enumerate(trainer.stages):
        by_time = isinstance(stage.start, Fraction) and share >= stage.start
        if by_time or step >= steps_before(stage.start, cfg.max_iters):
            begun = max(begun, i)
    return begun


def enter_stage(trainer):
    """Let the trainer take its next step in the stage of the batch that was read for it; return True if it is a new
    one, of which the speed is measured anew."""
    progress, stages = trainer.progress, trainer.stages
    entered = stages[len(progress.stages) + 1 : trainer.next_stage + 1]
    if not entered:
        return False
    progress.stages = [*progress.stages, *([stage.block_size, progress.step] for stage in entered)]
    trainer.stage = stages[trainer.next_stage]
    trainer.clock.start_lap(progress.step)
    trainer.ranks.log(f"after step {progress.step}: {trainer.stage.name} begins")
    return True


def describe_stages(stages, cfg, layout):
    """Return a text with the sizes of a step in each stage, and when a later one begins."""
    texts = []
    for stage in stages:
        start = f"after {steps_before(stage.start, cfg.max_iters):,} steps"
        if isinstance(stage.start, Fraction) and cfg.max_seconds:
            start += f" or {float(stage.start * Fraction(cfg.max_seconds)):g} s"
        texts.append(
            (f"{start}: " if stage.start else "") + f"{layout.readers} x {stage.batch_size} sequences x "
            f"{stage.block_size} context x {stage.accumulation} accumulation"
        )
    return f"{'; '.join(texts)} = {cfg.tokens_per_step:,}"


def refuse_moved_stages(cfg, saved, progress):
    """Refuse to go on with a `then` or a max_iters by which the steps that were taken had been of other stages.

    saved: the settings that the run was trained with. Stages that have not begun may change, come and go.
    """
    if cfg.eval_only or (cfg.then, cfg.max_iters) == (saved.get("then", ""), saved["max_iters"]):
        return
    planned, wrong = parse_stages(cfg.then), ""
    for (context, began), (new, start) in zip(progress.stages, [*planned, *[(0, 0)] * len(progress.stages)]):
        step = steps_before(start, cfg.max_iters)
        by_time = isinstance(start, Fraction) and cfg.max_seconds and began < step
        if new != context or not (step == began or by_time):
            wrong = wrong or f"it entered context {context} after {began} steps"
    for context, start in planned[len(progress.stages) :]:
        if steps_before(start, cfg.max_iters) < progress.step:
            wrong = wrong or f"after {progress.step} steps it has not entered context {context}"
    if wrong:
        begun = ",".join(f"{context}@{began}" for context, began in progress.stages)
        refuse(
            f"{cfg.out_dir} cannot go on with then={cfg.then or repr('')} and max_iters={cfg.max_iters}: {wrong}; "
            f"--then={begun or repr('')} is what it did, and later stages may follow with commas"
        )


def rehearse_final_stage(trainer):
    """Take one forward and backward pass at the final context before training, so that too little memory for it is
    reported now and not at the switch. It changes neither gradients nor random numbers.

    The moments of AdamW, which are made in the first step, are stood in for by memory of their size.
    """
    stage, device, model = trainer.stages[-1], trainer.device, trainer.model
    if device.type not in REHEARSED or stage is trainer.stage:
        return
    advice = memory_advice(trainer.cfg, trainer.model_cfg, stage, goes_on=trainer.progress.step > 0)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), advice:
        parameters = [x for group in trainer.optimizer.param_groups for x in group["params"]]
        made = trainer.optimizer.state_dict()["state"]  # of a run that goes on, and Muon's momenta
        moments = [torch.empty_like(x) for i, x in enumerate(parameters) if i not in made for _ in range(2)]
        model.train()
        tokens = stage.block_size // trainer.layout.context_size
        ids = torch.zeros(stage.batch_size, tokens, dtype=torch.int64, device=device)
        with trainer.autocast:
            _, loss = trainer.eval_network(
                ids, ids.clone(), **trainer.teacher(ids)
            )  # compiled anew if inputs and targets were one tensor
        loss.backward()
        del moments
    model.zero_grad(set_to_none=True)
