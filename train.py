"""Train a GPT with the attention of your choice.

    python data/pystdlib/prepare.py                                    # once, no network needed
    python train.py config/demo.py                                     # one CPU or one GPU
    torchrun --nproc_per_node=8 train.py config/sympow_p4.py           # one node
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/sympow_p4.py

Any setting below, or of GPTConfig in model.py, can follow as --key=value; `--help` lists them. A run lives in out_dir:
config.json, metrics.jsonl, the tokenizer and ckpt/. The same command again resumes from the last checkpoint.
"""

import math
import os
import signal
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Callable

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # which python -I leaves out
from sympow.runs import threads, checkpoint, folder, machine  # noqa: F401 (threads before torch)
import torch

from sympow.data.progress import waiting
from sympow.model import GPT, GPTConfig
from sympow.runs.display import Display, peak_memory
from sympow.runs.metrics import Clock, SkippedSteps, Tracker
from sympow.runs.processes import Failed, Ranks, StopSignals, exit_statuses
from sympow.runs.program import refuse
from sympow.runs.settings import BOOLS, TRAIN_RANGES, check_ranges, fields_of, read_settings
from sympow.training.batches import count_epochs, examine, format_losses, mean_losses, micro_batches
from sympow.training.optimizer import RANGES, learning_rate, make_optimizer, take_step
from sympow.training.plan import Plan, describe_run, make_network, make_plan, resume_hint
from sympow.training.stages import enter_stage, refuse_moved_stages, rehearse


@dataclass
class TrainConfig:
    # the run
    out_dir: str = ""  # the run's folder; default out/CONFIG_NAME
    init_from: str = "auto"  # auto: resume in out_dir or begin; resume; scratch; or a folder's weights, gpt2, ...
    overwrite: bool = False  # with init_from=scratch or weights: rename the run in out_dir, and start anew
    seed: int = 1337  # of the weights, the order of the data and dropout
    # data
    dataset: str = "pystdlib"  # a folder in data/, or any path; or several by weight: code:0.7,prose:0.3
    val_datasets: str = ""  # further datasets, with commas between, that are only evaluated: val_loss/NAME
    batch_size: int = 8  # sequences in a micro-step of each rank
    block_size: int = 1024  # context length: tokens in a sequence
    then: str = ""  # later stages, 16384@0.5,65536@0.9: CONTEXT@SHARE of the run, or @STEP; tokens_per_step stays
    tokens_per_step: int = 524288  # over all ranks and micro-steps; the number of micro-steps follows from it
    gradient_accumulation_steps: int = 0  # micro-steps over all ranks; 0: tokens_per_step decides
    pack: bool = False  # join documents, and reset the state where one starts
    context_parallel: int = 1  # ranks that share the tokens of each sequence
    distill_from: str = ""  # a folder of weights, or gpt2, ...: learn from that model's outputs too
    distill_weight: float = 1.0  # times the KL divergence from that model's predictions is added to the loss
    # optimizer
    optimizer: str = "adamw"  # or muon: Muon for the linear weights of attention and MLP, AdamW for all others
    max_iters: int = 100000  # optimizer steps
    max_seconds: float = 0.0  # of training and evaluation, 0: no limit; schedules end with it, at whatever step
    learning_rate: float = 6e-4  # the highest
    warmup_iters: int = 0  # steps of linear warm-up
    schedule: str = "constant"  # or cosine (nanoGPT's decay_lr=True); or wsd: constant, then down over decay_share
    decay_share: float = 0.2  # share of the run, at its end, in which wsd goes down
    lr_decay_iters: int = 0  # cosine and wsd end after so many steps, or earlier at max_seconds; 0: max_iters
    min_lr: float = 6e-5  # learning rate at which cosine and wsd end
    weight_decay: float = 0.0  # on matrices and embeddings
    beta1: float = 0.9  # of AdamW
    beta2: float = 0.95  # of AdamW
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    max_skipped: int = 10  # stop after this many steps in a row without a finite gradient; such steps are skipped
    # evaluation, logging, checkpoints
    eval_interval: int = 1000  # steps between evaluations, each followed by a checkpoint
    eval_tokens: int = 1048576  # an evaluation reads the first so many tokens of the held-out split
    eval_only: bool = False  # evaluate and stop
    log_interval: int = 10  # steps between lines of metrics.jsonl
    sample_tokens: int = 100  # generated at every evaluation, into samples.jsonl; 0: none
    always_save_checkpoint: bool = True  # at every evaluation; False: when the validation loss is the best so far
    wandb: str = "auto"  # auto: online if there is a key, else offline; online, offline, disabled
    wandb_log: bool = True  # False: the same as wandb=disabled
    wandb_project: str = "sympow"  # project in wandb
    wandb_run_name: str = ""  # name in wandb; default: the name of out_dir
    # machine
    device: str = "auto"  # auto: cuda or cpu; cuda:1, ...
    dtype: str = "auto"  # auto: bfloat16 on GPUs that have it, else float32
    compile: str = "auto"  # auto: use torch.compile on a GPU if its toolchain works; True, False
    backend: str = "auto"  # of torch.distributed: nccl on GPUs, gloo on CPUs
    shard: bool = False  # cut weights, gradients and moments over the ranks (FSDP2) instead of a copy on each
    timeout: float = 600.0  # end the job after this many seconds without progress, naming the rank that held it up
    deterministic: bool = False  # make two runs give the same bits on a GPU too

    def __post_init__(self):
        self.init_from = "auto" if self.init_from == "resume" else self.init_from  # nanoGPT's name
        self.compile = str(BOOLS.get(self.compile.lower(), self.compile))
        check_ranges(self, (*TRAIN_RANGES, *RANGES))


@dataclass
class Run:
    """A run while it trains. Only this file changes it."""

    plan: Plan
    model: GPT
    network: Callable  # the model, averaging its gradients over the ranks
    optimizer: torch.optim.Optimizer
    progress: checkpoint.Progress  # its seconds are rank 0's as of the last micro-step, the same on all ranks
    writer: checkpoint.Writer
    tracker: Tracker | None  # on rank 0 alone
    clock: Clock
    skipped: SkippedSteps
    stop_signals: StopSignals
    signal: int = 0  # the number of a signal that any rank received
    unsaved: bool = False  # True if no checkpoint has this step, or not its evaluation
    checkpoint_seconds: float = 0.0  # spent on waiting for checkpoints since the last logged step


def main():
    """Train the run that the command line describes."""
    ranks = Ranks()
    with exit_statuses(ranks), ExitStack() as stack:
        with waiting("setting up", ranks.master):
            run = set_up(sys.argv[1:], ranks, stack)
        if not run.plan.cfg.eval_only:
            train(run)
        elif evaluate(run) is None:
            raise Failed(f"the evaluation is not finished: {reason_to_stop(run)}")
        run.writer.wait()
        ranks.leave()
        if run.tracker:
            run.tracker.finish()


def set_up(argv, ranks, stack):
    """Return the Run: refuse mistakes before anything is allocated or written, join the other ranks, make the model.

    The lock on out_dir and the Writer are entered into the ExitStack.
    """
    from_data = ("vocab_size", "reset_token")  # settings of the model that cannot be given
    values, names = read_settings((TrainConfig, GPTConfig), argv, from_data, usage=__doc__)
    try:
        cfg = TrainConfig(**fields_of(TrainConfig, values))
        cfg.out_dir = os.path.normpath(cfg.out_dir or os.path.join("out", "-".join(names) or "train"))
        records = ranks.master and not cfg.eval_only
        lock = records and checkpoint.exists(cfg.out_dir) and stack.enter_context(folder.lock_out_dir(cfg.out_dir))
        plan = make_plan(cfg, values, ranks)
    except (OSError, ValueError) as error:
        refuse(error)
    machine.choose_numerics(cfg, plan.device, plan.dtype)
    ranks.join(plan.device, cfg.backend, cfg.timeout)
    plan.layout.connect(plan.device)
    resume = ranks.agree_on_checkpoint(plan.resume)
    if resume:  # now, since rank 0 alone knows which checkpoints are whole
        folder.refuse_other_settings(cfg, resume, plan.saved_settings, plan.settings)
        refuse_moved_stages(cfg, checkpoint.read_progress(resume))
    if records:
        stack.enter_context(folder.start_folder(cfg, plan.settings, plan.dataset, resume, lock))
    writer = stack.enter_context(checkpoint.Writer(cfg.out_dir, ranks))

    torch.manual_seed(cfg.seed)
    model = plan.layout.make_model(GPT, plan.model_cfg, plan.device)
    optimizer, progress = make_optimizer(model, cfg), checkpoint.Progress()
    if resume:
        progress = checkpoint.load(resume, model, optimizer)
        ranks.log(f"resuming from {resume}, step {progress.step}")
    elif plan.source:
        plan.source.fill(model)
        ranks.log(plan.source.describe(plan.model_cfg))
    progress.model = asdict(plan.model_cfg)
    context = plan.held_out.block_size
    if progress.context != context:  # losses so far were at another one
        progress.context = context
        progress.best = math.inf
    network = make_network(plan, model)
    if records:
        checkpoint.remove_leftovers(cfg.out_dir, resume, progress.best_step)
    tracker = Tracker(cfg, plan.settings, progress, model) if records else None
    ranks.log(describe_run(plan, model))
    clock = Clock(progress.seconds, progress.step)
    skipped = SkippedSteps(*progress.skipped)
    signals = StopSignals(cfg.out_dir, resume_hint(cfg))
    return Run(plan, model, network, optimizer, progress, writer, tracker, clock, skipped, signals)


def train(run):
    """Evaluate, save and take steps in turns, until a limit or a signal ends the run."""
    plan, progress, cfg, ranks = run.plan, run.progress, run.plan.cfg, run.plan.ranks
    run.network.train()
    if len(progress.stages) + 1 < len(plan.stages):
        rehearse(plan, run.model, run.optimizer)
    batches, first_step, first_of_stage = micro_batches(plan, progress), progress.step, True
    loss = grad_norm = batch = None
    run.clock.start_lap(progress.step)
    with closing(Display(cfg, progress.step, plan.device, shown=ranks.master)) as display:
        while True:
            end = reason_to_stop(run)
            due = bool(end) or progress.step % cfg.eval_interval == 0
            count_skipped(run, grad_norm, due, end)
            if loss is not None:  # else no step has been taken, or a signal came within it
                display.step()
                if first_of_stage or end or progress.step % cfg.log_interval == 0:
                    log_step(run, display, loss, grad_norm)
                first_of_stage = False
            if due:
                end = evaluate_and_save(run)
                run.clock.start_lap(progress.step)
            if end:
                break
            batch = batch or next(batches)
            number, *_ = batch
            if number > len(progress.stages):  # a new stage: its speed is measured anew
                progress.stages, first_of_stage = enter_stage(plan.stages, number, progress), True
                run.clock.start_lap(progress.step)
                ranks.log(f"after step {progress.step}: context {plan.stages[number].block_size:,}")
            loss, grad_norm, batch = train_step(run, batch, batches)
            run.writer.check()
    if progress.step == first_step and not run.signal:
        ranks.log(f"{cfg.out_dir} is trained: {progress.step} steps in {progress.seconds:.0f} s, {end}")
        return
    ranks.log(f"stopped at step {progress.step}: {end}")
    if run.signal and progress.step and not run.unsaved:
        run.writer.wait()
        ranks.log(f"saved step {progress.step}; {resume_hint(cfg)}")


def reason_to_stop(run):
    """Return a text that names the limit, or the signal, that ends training; "" without any."""
    cfg, progress = run.plan.cfg, run.progress
    if run.signal:
        return f"{signal.Signals(run.signal).name} was received"
    if progress.step >= cfg.max_iters:
        return f"max_iters={cfg.max_iters} is reached"
    if 0 < cfg.max_seconds <= progress.seconds:
        return f"max_seconds={cfg.max_seconds:g} is reached"
    return ""


def train_step(run, batch, batches):
    """Take one optimizer step; return the mean of its micro-steps' losses, the norm of the gradient and the next batch.

    Returns three times None if a signal came within the step, which is then left out.
    """
    cfg, ranks, progress = run.plan.cfg, run.plan.ranks, run.progress
    accumulation = run.plan.stages[len(progress.stages)].accumulation
    rate = learning_rate(progress.step, cfg, progress.seconds)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    machine.seed_dropout(cfg.seed, progress.step, ranks.rank)
    loss_sum = torch.zeros((), device=run.plan.device)
    for micro in range(accumulation):
        ranks.beat()
        run.plan.layout.average_next(run.network, last=micro == accumulation - 1)
        _, inputs, targets = batch
        with run.plan.autocast:
            _, loss = run.network(inputs, targets, **run.plan.teacher(inputs))
        ranks.beat()
        (loss / accumulation).backward()
        loss_sum += loss.detach()
        batch = next(batches)  # read while the GPU computes
        agree(run)
        if run.signal and micro + 1 < accumulation:
            return None, None, None
    norm = take_step(run.model, run.optimizer, cfg.grad_clip)
    progress.step += 1
    progress.evaluated, run.unsaved = False, True
    return loss_sum / accumulation, norm, batch


def agree(run):
    """Take the signal that any rank received and the time of rank 0: all ranks decide alike. Return the signal."""
    run.signal, run.progress.seconds = run.plan.ranks.agree(run.stop_signals.number, run.clock.seconds())
    return run.signal


def count_skipped(run, grad_norm, wait, end):
    """Count the step if it was skipped; raise Failed after max_skipped in a row, or at the end if all were."""
    run.skipped.count(grad_norm, wait)
    steps = run.skipped.in_a_row
    if steps < run.plan.cfg.max_skipped and not (end and 0 < steps == run.progress.step):
        return
    run.writer.wait()
    run.plan.ranks.barrier()  # from here on every rank sees the checkpoint that rank 0 wrote last
    newest = checkpoint.newest(run.plan.cfg.out_dir)
    good = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint"
    raise Failed(f"{steps} steps in a row had no finite gradient; {good}: try a smaller learning_rate")


def log_step(run, display, loss, grad_norm):
    """Record the loss, averaged over the ranks, and the speed since the last line."""
    cfg, world, step = run.plan.cfg, run.plan.ranks.world, run.progress.step
    loss = run.plan.ranks.sum(loss / world).item()
    steps_per_second = run.clock.steps_per_second(step)
    if not run.tracker:
        return
    speed = cfg.tokens_per_step * steps_per_second
    context = run.plan.stages[len(run.progress.stages)].block_size
    mfu = machine.flops_utilization(run.model, speed / world, context, run.plan.dtype)
    numbers = dict(train_loss=loss, tokens=step * cfg.tokens_per_step, seconds=run.clock.seconds())
    numbers |= dict(grad_norm=grad_norm.item(), lr=run.optimizer.param_groups[0]["lr"], tok_per_sec=speed, mfu=mfu)
    numbers |= dict(skipped=run.skipped.total or None, checkpoint_seconds=run.checkpoint_seconds or None)
    run.tracker.log(step, **numbers, context=context, memory=peak_memory(run.plan.device) / 1e9)
    run.checkpoint_seconds = 0.0
    display.log(step, numbers, steps_per_second, context)


def evaluate(run):
    """Evaluate and log the result; return the validation loss, or None if a signal came meanwhile."""
    plan, progress, step, context = run.plan, run.progress, run.progress.step, run.plan.held_out.block_size
    if (losses := mean_losses(plan, run.model, partial(agree, run))) is None:
        return None
    plan.ranks.log(f"step {step}: {format_losses(losses)} at context {context:,}")
    model = None if plan.cfg.eval_only else plan.layout.gather(run.model)
    val_loss = losses["val_loss"]
    tokens = step * plan.cfg.tokens_per_step
    if run.tracker:
        numbers = losses | dict(tokens=tokens, seconds=run.clock.seconds(), memory=peak_memory(plan.device) / 1e9)
        statistics, text = examine(plan, model)
        run.tracker.log(step, **numbers, **count_epochs(plan, progress), **statistics, context=context)
        if plan.cfg.sample_tokens:
            run.tracker.sample(step, text)
    progress.evaluated = run.unsaved = True
    if val_loss < progress.best:
        progress.best = val_loss
        progress.best_step = step
    return val_loss


def evaluate_and_save(run):
    """Evaluate this step, unless that is done or a signal ends the run, and save it if no checkpoint has it.

    A step is saved with a finite gradient and loss only, and with always_save_checkpoint=False only if it is the best.
    Returns what `reason_to_stop` says then, since a signal may have come.
    """
    progress = run.progress
    val_loss = None
    if not (run.signal or progress.evaluated):
        run.writer.wait()  # a kill finds at most one evaluation without a checkpoint
        val_loss = evaluate(run)
        agree(run)
    end = reason_to_stop(run)
    finite = math.isfinite(val_loss or 0.0)  # None: it was not evaluated
    if end and not finite:
        raise Failed(f"the validation loss of step {progress.step}, the last, is {val_loss}: it is not saved")
    chosen = run.signal or progress.best_step == progress.step or run.plan.cfg.always_save_checkpoint
    if chosen and finite and run.unsaved and not run.skipped.in_a_row:
        begin = run.clock.seconds()
        progress.skipped = run.skipped.total, run.skipped.in_a_row
        run.unsaved = False
        if run.tracker:
            run.tracker.flush_to_disk()
        run.writer.save(run.model, run.optimizer, progress)  # rank 0, or every rank what it holds of a sharded model
        run.checkpoint_seconds += run.clock.seconds() - begin
    return end


if __name__ == "__main__":
    main()
