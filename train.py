"""Train a GPT with the attention of your choice.

    python data/pystdlib/prepare.py                                    # once, no network needed
    python train.py config/demo.py                                     # one CPU or one GPU
    torchrun --nproc_per_node=8 train.py config/sympow_p4.py           # one node
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/sympow_p4.py

Any setting below, or of GPTConfig in model.py, can follow as --key=value; `--help` lists them. A run lives in out_dir:
config.json, metrics.jsonl, the tokenizer and ckpt/. The same command again goes on from the last checkpoint.
"""

import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch

from sympow.data import DataError
from sympow.data.mixture import open_dataset
from sympow.model import GPT, GPTConfig
from sympow.runs import checkpoint, display, folder, machine, trace
from sympow.training.batches import epochs, format_losses, mean_losses, micro_batches, sample_text
from sympow.training.context import check_context, split_context, whole_sequences
from sympow.training.distill import Teacher
from sympow.runs.display import Display, describe_attention
from sympow.training.optimizer import LossScaler, learning_rate, make_optimizer, take_step
from sympow.training.parallel import Layout
from sympow.runs.processes import Failed, Ranks, StopSignals, exit_statuses
from sympow.runs.settings import BOOLS, TRAIN_RANGES, check_ranges, choose_device, fields_of, read_settings, refuse
from sympow.runs.source import choose_model
from sympow.training.stages import (
    describe_stages, enter_stage, make_stages, refuse_moved_stages, rehearse_final_stage, resume_stage,
)  # fmt: skip
from sympow.runs.metrics import Clock, SkippedSteps, Tracker, baseline_losses, relative_loss


@dataclass
class TrainConfig:
    # the run
    out_dir: str = ""  # the run's folder; default out/CONFIG_NAME
    init_from: str = "auto"  # auto: go on where out_dir left off; scratch; or a folder, or gpt2, ...: use its weights
    overwrite: bool = False  # unless init_from=auto: rename the run that is in out_dir, and start anew
    seed: int = 1337  # of the weights, the order of the data and dropout
    # data
    dataset: str = "pystdlib"  # a folder in data/, or any path; or several by weight: code:0.7,prose:0.3
    val_datasets: str = ""  # further datasets, with commas between, that are only evaluated: val_loss/NAME
    batch_size: int = 8  # sequences in a micro-step of each rank
    block_size: int = 1024  # context length: tokens in a sequence
    then: str = ""  # later stages, CONTEXT@SHARE of the run (or @STEPS): 16384@0.5,65536@0.9; as many tokens a step
    tokens_per_step: int = 524288  # over all ranks and micro-steps; the number of micro-steps follows from it
    gradient_accumulation_steps: int = 0  # micro-steps over all ranks; 0: tokens_per_step decides
    pack: bool = False  # join documents, and reset the state where one starts
    context_parallel: int = 1  # ranks that share the tokens of each sequence
    distill_from: str = ""  # a folder of weights, or gpt2, ...: learn from that model's outputs too
    distill_weight: float = 1.0  # of the KL divergence from its next-token distribution, added to the training loss
    # optimizer
    optimizer: str = "adamw"  # or muon: Muon for the linear weights of attention and MLP, AdamW for all others
    max_iters: int = 100000  # optimizer steps
    max_seconds: float = 0.0  # of training and evaluation, 0: no limit; the speed then decides when a schedule ends
    learning_rate: float = 6e-4  # the highest
    warmup_iters: int = 0  # steps of linear warm-up
    schedule: str = "constant"  # or cosine (nanoGPT's decay_lr=True); or wsd: constant, then down over decay_share
    decay_share: float = 0.2  # share of the run, at its end, in which wsd goes down
    lr_decay_iters: int = 0  # steps after which cosine and wsd end, if max_seconds are not over before; 0: max_iters
    min_lr: float = 6e-5  # learning rate at which cosine and wsd end
    weight_decay: float = 0.0  # on matrices and embeddings
    beta1: float = 0.9  # of AdamW
    beta2: float = 0.95  # of AdamW
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    max_skipped: int = 10  # stop after this many steps in a row without a finite gradient; such steps are skipped
    # evaluation, logging, checkpoints
    eval_interval: int = 1000  # steps between evaluations, each followed by a checkpoint
    eval_tokens: int = 1048576  # tokens of an evaluation, always the first of the held-out split
    eval_only: bool = False  # evaluate and stop
    log_interval: int = 10  # steps between lines of metrics.jsonl
    profile: int = 0  # write a trace of this step for Perfetto into out_dir, and log what costs most; 0: none
    sample_tokens: int = 100  # generated at every evaluation, into samples.jsonl; 0: none
    always_save_checkpoint: bool = True  # at every evaluation; False: when the validation loss is the best so far
    baseline: str = ""  # another run's folder: also log validation losses relative to its losses
    wandb: str = "auto"  # auto: online if there is a key, else offline; online, offline, disabled
    wandb_log: bool = True  # False: the same as wandb=disabled
    wandb_project: str = "sympow"  # project in wandb
    wandb_run_name: str = ""  # name in wandb; default: the name of out_dir
    wandb_group: str = ""  # group of runs in wandb
    wandb_tags: str = ""  # in wandb, with commas between
    # machine
    device: str = "auto"  # auto: cuda or cpu; cuda:1, ...; mps (Apple's GPUs: untested, in plain PyTorch)
    dtype: str = "auto"  # auto: bfloat16 on GPUs that have it, else float32; float16: with a loss scale
    compile: str = "auto"  # auto: use torch.compile on a GPU if its toolchain works; True, False
    backend: str = "auto"  # of torch.distributed: nccl on GPUs, gloo on CPUs
    shard: bool = False  # cut weights, gradients and moments over the ranks (FSDP2) instead of a copy on each
    timeout: float = 600.0  # end the job after this many seconds without progress, naming the rank that held it up
    deterministic: bool = False  # make two runs give the same bits on a GPU too

    def __post_init__(self):
        self.compile = str(BOOLS.get(self.compile.lower(), self.compile))
        check_ranges(self, TRAIN_RANGES)


def main():
    """Train with the settings of the command line."""
    ranks = Ranks()
    with exit_statuses(ranks):
        trainer = Trainer(sys.argv[1:], ranks)
        with trainer.start(), checkpoint.Writer(trainer.cfg.out_dir, ranks) as writer:
            trainer.build(writer)
            trainer.evaluate_only() if trainer.cfg.eval_only else trainer.train()
            writer.wait()
            ranks.leave()
            if trainer.tracker:
                trainer.tracker.finish()


class Trainer:
    """One run: settings and data, then model and optimizer, then the loop that trains."""

    def __init__(self, argv, ranks):
        """Read the settings and open the data; refuse mistakes before anything is allocated or written."""
        from_data = ("vocab_size", "reset_token")  # model settings that are not given
        given, names = read_settings((TrainConfig, GPTConfig), argv, from_data, usage=__doc__)
        self.ranks = ranks
        try:
            self.cfg = cfg = TrainConfig(**fields_of(TrainConfig, given))
            cfg.out_dir = os.path.normpath(cfg.out_dir or os.path.join("out", "-".join(names) or "train"))
            trace.check(cfg)
            self.dataset = dataset = open_dataset(cfg.dataset)
            self.layout = Layout(ranks, cfg.context_parallel, cfg.shard)
            self.stages, self.held_out = make_stages(cfg, given, dataset, self.layout)
            self.resume, self.saved_settings = folder.choose_checkpoint(cfg, thorough=ranks.master)
            self.source, self.model_cfg = choose_model(cfg, given, dataset, self.saved_settings)
            contexts = [stage.block_size for stage in self.stages]
            check_context(cfg, self.model_cfg, contexts)
            self.teacher = Teacher(cfg, dataset, contexts)
        except (DataError, ValueError) as error:
            refuse(error)
        self.baseline = baseline_losses(cfg.baseline, self.held_out.block_size)
        self.device, self.dtype = choose_device(cfg.device, cfg.dtype, ranks.local)
        self.layout.check(cfg, self.device)
        cfg.dtype = str(self.dtype).removeprefix("torch.")
        self.settings = {**asdict(cfg), "model": asdict(self.model_cfg), "data": folder.fingerprint(dataset)}
        self.settings["teacher"] = self.teacher.fingerprint
        self.settings |= {"ranks": ranks.world, "device_type": self.device.type}

    def start(self):
        """Connect with the other ranks and, on rank 0, open out_dir; return the lock on it, a context manager."""
        cfg, ranks = self.cfg, self.ranks
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        ranks.join(self.device, cfg.backend, cfg.timeout)
        self.layout.connect(self.device)
        self.resume = ranks.agree_on_checkpoint(self.resume)
        if self.resume:  # now, since rank 0 alone knows which checkpoints are whole
            folder.refuse_other_settings(cfg.out_dir, self.saved_settings, self.settings)
            refuse_moved_stages(cfg, self.saved_settings, checkpoint.read_progress(self.resume))
        self.records = ranks.master and not cfg.eval_only
        return folder.start_folder(cfg, self.settings, self.dataset) if self.records else nullcontext()

    def build(self, writer):
        """Make model and optimizer, new or from a checkpoint, and the other objects that training needs."""
        cfg, ranks, device, self.writer = self.cfg, self.ranks, self.device, writer
        torch.manual_seed(cfg.seed)
        if cfg.deterministic:
            machine.make_deterministic(ranks.log)
        if self.dtype != torch.float32:  # power attention multiplies in float32; tf32 is exact for bf16 factors
            torch.set_float32_matmul_precision("high")
        self.autocast = torch.autocast(device.type, self.dtype) if self.dtype != torch.float32 else nullcontext()
        self.model = self.layout.make_model(GPT, self.model_cfg, device)
        self.optimizer = make_optimizer(self.model, cfg)
        self.progress = p = checkpoint.Progress()
        if self.resume:
            self.progress = p = checkpoint.load(self.resume, self.model, self.optimizer)
            ranks.log(f"going on from {self.resume}, step {p.step}")
        elif self.source:
            self.source.fill(self.model)
            ranks.log(self.source.describe(self.model_cfg))
        p.model = asdict(self.model_cfg)
        resume_stage(self)
        self.skipped, self.scaler = SkippedSteps(*p.skipped), LossScaler(self.dtype, device, *p.scaler)
        contexts = [stage.block_size for stage in self.stages]
        machine.check_kernels(self.model, contexts, self.dtype, ranks, cfg.context_parallel)
        compiled = machine.can_compile(cfg.compile, device, ranks.log)
        self.slices = split_context(self.model, self.layout, self.stages[-1].block_size, self.dtype, compiled)
        # a whole model's graph breaks where keys circulate between ranks, and then has no blocks to compute again
        by_block = self.slices.balanced and self.model_cfg.activation_checkpointing
        self.network, self.eval_network = self.layout.wrap(self.model, compiled, by_block)
        self.teacher.load(self, compiled)
        if self.records:
            checkpoint.remove_leftovers(cfg.out_dir, self.resume, p.best_step)
        self.tracker = Tracker(cfg, self.settings, p, self.model) if self.records else None
        ranks.log(
            f"{self.model.parameter_count() / 1e6:.1f}M parameters, {describe_attention(self.model_cfg)}, "
            f"{device.type} {cfg.dtype}; tokens a step: {describe_stages(self.stages, cfg, self.layout)}"
        )
        self.clock, self.seconds, self.checkpoint_seconds = Clock(p.seconds, p.step), p.seconds, 0.0
        self.stop_signals, self.signal = StopSignals(), 0
        # of the newest checkpoint; True if the loss of this step's evaluation was not finite
        self.saved, self.diverged = (p.step, p.evaluated), False

    def train(self):
        """Take steps, and evaluate and save every eval_interval of them, until a limit or a signal ends the run."""
        cfg, ranks, progress = self.cfg, self.ranks, self.progress
        if not (end := self.reason_to_stop()):
            rehearse_final_stage(self)
        if not progress.evaluated and (end or progress.step % cfg.eval_interval == 0):  # a signal prevented it
            self.evaluate_and_save()
            end = self.reason_to_stop()
        if end and not self.signal:
            ranks.log(f"{cfg.out_dir} is trained: {progress.step} steps in {progress.seconds:.0f} s, {end}")
            return
        self.batches = micro_batches(self)
        self.batch = next(self.batches)
        self.display, first = Display(cfg, progress.step, self.device, shown=ranks.master), True
        self.network.train()
        self.clock.start_lap(progress.step)
        while not end:
            first = enter_stage(self) or first
            with machine.memory_advice(cfg, self.model_cfg, self.stage, progress.step > 0) if first else nullcontext():
                with trace.profile_step(self):
                    loss, grad_norm = self.train_step()
            self.writer.check()
            end = self.reason_to_stop()
            due = bool(end) or progress.step % cfg.eval_interval == 0
            self.count_skipped(grad_norm, wait=due)
            if loss is not None and (first or end or progress.step % cfg.log_interval == 0):
                self.log_step(loss, grad_norm)
            if due:
                self.evaluate_and_save()
                end = self.reason_to_stop()  # a signal may have cut the evaluation short
                self.clock.start_lap(progress.step)
            first = False
        self.display.close()
        ranks.log(f"stopped after {progress.step} steps: {end}")

    def train_step(self):
        """Take one optimizer step; return the sum of its micro-steps' losses and the norm of the gradient, two scalars.

        Returns (None, None) if a signal came within the step, which is then left out.
        """
        cfg, ranks, step = self.cfg, self.ranks, self.progress.step
        rate = learning_rate(step, cfg, self.seconds)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(hash((cfg.seed, step, ranks.rank)) % 2**63)  # dropout is a function of (seed, step, rank)
        loss_sum = torch.zeros((), device=self.device)
        for micro in range(self.stage.accumulation):
            ranks.beat()
            self.layout.average_next(self.network, last=micro == self.stage.accumulation - 1)
            with self.autocast:
                _, loss = self.network(*self.batch, **self.teacher(self.batch[0]))
            ranks.beat()
            self.scaler.scale_up(loss / self.stage.accumulation).backward()
            loss_sum += loss.detach()
            self.batch = next(self.batches)  # read while the GPU computes
            self.share()
            if self.signal and micro + 1 < self.stage.accumulation:
                return None, None
        norm = take_step(self.model, self.optimizer, self.scaler, cfg.grad_clip)
        self.progress.step += 1
        self.progress.evaluated, self.diverged = False, False
        self.display.step()
        return loss_sum, norm

    def share(self):
        """Take the signal that any rank received, and the time of rank 0: all ranks decide by the same."""
        self.signal, self.seconds = self.ranks.share(self.stop_signals.number, self.clock.seconds())

    def reason_to_stop(self):
        """Return a text that names the limit reached or the signal received; "" if training goes on."""
        cfg = self.cfg
        if self.signal:
            return f"{signal.Signals(self.signal).name} was received"
        if self.progress.step >= cfg.max_iters:
            return f"max_iters={cfg.max_iters} is reached"
        if 0 < cfg.max_seconds <= self.seconds:
            return f"max_seconds={cfg.max_seconds:g} is reached"
        return ""

    def count_skipped(self, grad_norm, wait):
        """Count the step if it was skipped; raise Failed after max_skipped such steps in a row."""
        self.skipped.count(grad_norm, wait, self.scaler.searching)
        if self.skipped.in_a_row < self.cfg.max_skipped:
            return
        self.writer.wait()
        self.ranks.barrier()  # from here on every rank sees the checkpoint that rank 0 wrote last
        good = checkpoint.newest(self.cfg.out_dir)
        good = f"the last good checkpoint is {good}" if good else "there is no checkpoint"
        raise Failed(
            f"{self.skipped.in_a_row} steps in a row had no finite gradient, the last one step {self.progress.step}; "
            f"{good}: a smaller learning_rate or grad_clip may help"
        )

    def log_step(self, loss_sum, grad_norm):
        """Record the loss, averaged over the ranks, and the speed since the last line."""
        cfg, ranks, step = self.cfg, self.ranks, self.progress.step
        loss = ranks.sum(loss_sum / self.stage.accumulation / ranks.world).item()
        pace, mfu = self.clock.steps_per_second(step), None  # steps a second
        speed = cfg.tokens_per_step * pace
        if peak := machine.peak_flops(self.device):
            mfu = speed * self.model.flops_per_token(self.stage.block_size, self.dtype) / (peak * ranks.world)
        if not ranks.master:
            return
        shown = dict(lr=self.optimizer.param_groups[0]["lr"], tok_per_sec=speed, mfu=mfu)
        self.tracker.log(
            step, train_loss=loss, tokens=step * cfg.tokens_per_step, seconds=self.clock.seconds(),
            grad_norm=grad_norm.item(), **shown, skipped=self.skipped.total or None,
            checkpoint_seconds=self.checkpoint_seconds or None, context=self.stage.block_size,
            memory=display.peak_memory(self.device) / 1e9,
        )  # fmt: skip
        self.checkpoint_seconds = 0.0
        self.display.log(step, self.clock.seconds(), pace, loss, stage=self.stage.name, **shown)

    def evaluate_only(self):
        """Print the validation losses; raise Failed if a signal came before they were known."""
        if (losses := mean_losses(self)) is None:
            raise Failed(f"the evaluation is not finished: {self.reason_to_stop()}")
        self.ranks.log(f"{format_losses(losses)} at context {self.held_out.block_size:,}")

    def evaluate_and_log(self):
        """Evaluate and log the result, or leave that to the next start if a signal comes."""
        cfg, progress, step = self.cfg, self.progress, self.progress.step
        if (losses := mean_losses(self)) is None:
            return
        val_loss = losses["val_loss"]
        model = self.layout.gather(self.model)
        if self.ranks.master:
            with torch.compiler.set_stance("force_eager"):  # blocks may be compiled, and would be for every length
                with self.autocast, whole_sequences(model):
                    ids = self.held_out.parts[0].windows.batch([0])[0][:, :4096].to(self.device)
                    statistics = model.statistics(ids)
                tokens = step * cfg.tokens_per_step
                self.tracker.log(
                    step, **losses, tokens=tokens, seconds=self.clock.seconds(), **epochs(self), **statistics,
                    relative_loss=relative_loss(val_loss, tokens, self.baseline), context=self.held_out.block_size,
                )  # fmt: skip
                self.ranks.log(f"step {step}: {format_losses(losses)}")
                if cfg.sample_tokens:
                    self.tracker.sample(step, sample_text(self, model))
        progress.evaluated, self.diverged = True, not math.isfinite(val_loss)
        if val_loss < progress.best:
            progress.best, progress.best_step = val_loss, step

    def evaluate_and_save(self):
        """Evaluate this step, unless that is done or a signal ends the run, and save what no checkpoint has yet.

        No step is saved without a finite gradient and loss, nor, if the settings say so, one that is not the best.
        """
        cfg, progress = self.cfg, self.progress
        if not (self.signal or progress.evaluated):
            self.writer.wait()  # a kill finds at most one evaluation without a checkpoint
            self.evaluate_and_log()
            self.share()
        wanted = self.signal or progress.best_step == progress.step or cfg.always_save_checkpoint
        healthy = not (self.diverged or self.skipped.in_a_row)
        if wanted and healthy and (progress.step, progress.evaluated) != self.saved:
            self.save()

    def save(self):
        """Write a checkpoint of this step: on rank 0, or on every rank what it holds of a sharded model."""
        progress, begin = self.progress, time.perf_counter()
        self.saved = progress.step, progress.evaluated
        if self.ranks.master:
            progress.seconds, progress.wandb_id = self.clock.seconds(), self.tracker.run_id
            progress.skipped, progress.scaler = (self.skipped.total, self.skipped.in_a_row), self.scaler.state()
            self.tracker.flush_to_disk()
        self.writer.save(self.model, self.optimizer, progress)
        self.checkpoint_seconds += time.perf_counter() - begin


if __name__ == "__main__":
    main()
