"""Train a GPT with the attention of your choice.

    python data/pystdlib/prepare.py                                    # once, no network needed
    python train.py config/demo.py                                     # one CPU or one GPU
    torchrun --nproc_per_node=8 train.py config/sympow_p4.py           # one node
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/sympow_p4.py

Any setting below, or of GPTConfig in model.py, can follow as --key=value; `--help` lists them. A run lives in out_dir:
config.json, metrics.jsonl, the tokenizer and ckpt/. The same command again goes on from the last checkpoint.
"""

import errno
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from attention.check import kernel_failure
from attention.dispatch import disable_kernels
from data import DataError
from data.dataset import Dataset
from data.loader import Windows, eval_batches, train_batch
from generate import generate
from model import GPT, GPTConfig
from runs import checkpoint
from runs.settings import choose_device, read_settings, refuse
from runs.tracking import Tracker, whole_lines
from runs.watch import Watch


@dataclass
class TrainConfig:
    # the run
    out_dir: str = ""  # default out/CONFIG_NAME
    init_from: str = "auto"  # auto: go on where out_dir left off; scratch; or weights from another run's folder
    overwrite: bool = False  # with init_from=scratch: rename a non-empty out_dir and start anew
    seed: int = 1337  # of the weights, the order of the data and dropout
    # data
    dataset: str = "pystdlib"  # a folder in data/, or any path
    batch_size: int = 8  # sequences a micro-step on each rank
    block_size: int = 1024  # context: tokens of a sequence
    tokens_per_step: int = 524288  # over all ranks and micro-steps; accumulation follows from it
    gradient_accumulation_steps: int = 0  # over all ranks; 0: tokens_per_step decides
    pack: bool = False  # put documents one behind another, forgetting everything at each start
    # optimizer
    max_iters: int = 100000  # optimizer steps
    max_seconds: float = 0.0  # stop after so many seconds of training and evaluation; 0: no limit
    learning_rate: float = 6e-4  # constant, unless decay_lr
    warmup_iters: int = 0  # steps of linear warm-up
    decay_lr: bool = False  # cosine down to min_lr; False: constant
    lr_decay_iters: int = 0  # 0: max_iters
    min_lr: float = 6e-5  # where the cosine ends
    weight_decay: float = 0.0  # of matrices and embeddings
    beta1: float = 0.9  # of Adam
    beta2: float = 0.95  # of Adam
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    max_skipped: int = 10  # steps in a row without a finite gradient, each left out, after which training stops
    # evaluation, logging, checkpoints
    eval_interval: int = 1000  # steps between evaluations, each followed by a checkpoint
    eval_tokens: int = 1048576  # always the first of the held-out split
    eval_only: bool = False  # evaluate and stop
    log_interval: int = 10  # steps between lines of metrics.jsonl
    sample_tokens: int = 100  # drawn at every evaluation into samples.jsonl, from the end of text on; 0: none
    always_save_checkpoint: bool = True  # at every evaluation; False: when the validation loss is the best so far
    baseline: str = ""  # another run's folder: validation losses are logged relative to its own, too
    wandb: str = "auto"  # auto: online if there is a key, else offline; online, offline, disabled
    wandb_log: bool = True  # False is wandb=disabled
    wandb_project: str = "sympow"  # where wandb files the run
    wandb_run_name: str = ""  # default: the name of out_dir
    # machine
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    dtype: str = "auto"  # auto: bfloat16 on GPUs that have it, else float32
    compile: str = "auto"  # auto: torch.compile on a GPU, without if its toolchain is missing; True, False
    backend: str = "auto"  # of torch.distributed: nccl on GPUs, gloo on CPUs
    timeout: float = 600.0  # seconds without progress after which the job ends, and names the rank that held it up
    deterministic: bool = False  # two runs give the same bits, also on a GPU


lock = None  # of out_dir
HIDDEN = ("vocab_size", "reset_token")  # the data decide
# settings that may change when a run goes on: they leave the trajectory alone
FREE = {
    "out_dir", "init_from", "overwrite", "max_seconds", "max_skipped", "eval_interval", "eval_tokens", "eval_only",
    "log_interval", "always_save_checkpoint", "sample_tokens", "baseline", "wandb", "wandb_log", "wandb_project",
    "wandb_run_name", "device", "backend", "timeout", "compile", "batch_size", "gradient_accumulation_steps",
    "activation_checkpointing",
}  # fmt: skip
# dense bf16 FLOP/s of one GPU, from the vendors' data sheets; the first name found in the device's counts
PEAK_FLOPS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "A6000": 155e12,
}  # fmt: skip


def main():
    try:
        train()
    except DataError as error:  # a token that no vocabulary has, a shard that went away: perhaps on one rank alone
        refuse(error, every_rank=True)
    except checkpoint.NotWritten as error:
        fail(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EEXIST):
            raise
        fail(f"cannot write: {error}")
    except RuntimeError as error:  # of a collective, when another rank is gone
        if not Watch.current or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        fail(f"a rank could not be reached: {Watch.current.blame()} ({str(error).splitlines()[0][:200]})")
    finally:
        if lock:
            lock.close()


def train():
    given, names = read_settings((TrainConfig, GPTConfig), sys.argv[1:], HIDDEN, usage=__doc__)
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    master = rank == 0
    say = print_to_terminal if master else lambda *_: None

    # ---- everything that can be refused, before anything is allocated
    try:
        cfg = TrainConfig(**{f.name: given[f.name] for f in fields(TrainConfig) if f.name in given})
        dataset = Dataset(cfg.dataset)
        windows = Windows(dataset, "train", cfg.block_size, pack=cfg.pack)
        heldout = Windows(dataset, "val", cfg.block_size, pack=cfg.pack)
        chosen = {"rope_base": float(dataset.document_length), **source_settings(cfg, dataset, given)}
        chosen |= {f.name: given[f.name] for f in fields(GPTConfig) if f.name in given}
        model_cfg = GPTConfig(**chosen, vocab_size=dataset.vocab_size, reset_token=dataset.eot if cfg.pack else -1)
        accumulation = check(cfg, given, world)
    except (DataError, ValueError) as error:
        refuse(error)
    baseline = losses_of(cfg.baseline)
    cfg.out_dir = os.path.normpath(cfg.out_dir or os.path.join("out", "-".join(names) or "train"))
    device, dtype = choose_device(cfg.device, cfg.dtype, local)
    cfg.dtype = str(dtype).removeprefix("torch.")
    settings = {**asdict(cfg), "model": asdict(model_cfg), "data": fingerprint(dataset)}
    resume = choose_start(cfg, settings, master)

    # ---- ranks, device, folder
    watch = None
    if "RANK" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            cfg.backend if cfg.backend != "auto" else "nccl" if device.type == "cuda" else "gloo",
            store=store_of_this_start(), rank=rank, world_size=world,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        watch = Watch(cfg.timeout)
        own, of_master = resume, [resume]
        dist.broadcast_object_list(of_master, device=device)
        (resume,) = of_master
        if (own is None) != (resume is None) or (resume and not os.path.isdir(resume)):
            fail(f"rank {rank} would go on from {own}, rank 0 from {resume}: out_dir must be shared by all nodes")
    if master and not cfg.eval_only:
        start_folder(cfg, settings, dataset)
    torch.manual_seed(cfg.seed)
    if dtype != torch.float32:  # the power forms multiply in float32: tf32 is exact for q.k, whose factors are bf16
        torch.set_float32_matmul_precision("high")
    if cfg.deterministic:
        make_deterministic(say)

    # ---- model and optimizer
    model = GPT(model_cfg).to(device)
    optimizer = make_optimizer(model, cfg, device)
    step, seconds, best, best_step, run_id, skipped = 0, 0.0, math.inf, 0, None, Skipped(cfg.max_skipped)
    if resume:
        progress = checkpoint.load(resume, model, optimizer, device)
        step, seconds, best, best_step, run_id = (
            progress[k] for k in ("step", "seconds", "best", "best_step", "wandb_id")
        )
        skipped.total, skipped.in_a_row = progress.get("skipped", (0, 0))
        say(f"going on from {resume}, step {step}")
    elif cfg.init_from not in ("auto", "scratch"):
        try:
            checkpoint.load(checkpoint.newest(cfg.init_from, True, warn, checkpoint.WEIGHTS), model)
        except RuntimeError as error:  # names or shapes differ
            refuse(f"the weights of {cfg.init_from} do not fit this model: {error}")
        say(f"weights from {cfg.init_from}")
    check_kernels(model, cfg.block_size, dtype, device, say)
    network = torch.compile(model) if compiles(cfg, device, say) else model
    if dist.is_initialized():
        ids = [device] if device.type == "cuda" else None
        network = torch.nn.parallel.DistributedDataParallel(network, device_ids=ids, gradient_as_bucket_view=True)

    tokens_per_step = cfg.batch_size * cfg.block_size * world * accumulation
    say(
        f"{model.parameter_count() / 1e6:.1f}M parameters, {model_cfg.attention}, {device.type} {str(dtype)[6:]}; "
        f"tokens a step: {world} ranks x {cfg.batch_size} sequences x {cfg.block_size} context x "
        f"{accumulation} accumulation = {tokens_per_step:,}"
    )
    autocast = torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext()
    flops_per_second = peak_flops(device)
    tracker = Tracker(cfg, settings, step, run_id) if master else None
    writer = checkpoint.Writer(cfg.out_dir) if master else None

    def batch(step, micro):
        x, y = train_batch(windows, cfg.seed, step, rank, world, micro, accumulation, cfg.batch_size)
        if device.type == "cuda":  # pinned memory lets the copy run beside the computation
            return tuple(t.pin_memory().to(device, non_blocking=True) for t in (x, y))
        return x.to(device), y.to(device)

    def total(x):
        """x summed over the ranks."""
        if dist.is_initialized():
            dist.all_reduce(x)
        return x

    @torch.no_grad()
    def evaluate():
        """Mean loss of the first eval_tokens of the held-out split, shared over the ranks, averaged by token."""
        network.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for x, y in eval_batches(heldout, cfg.eval_tokens, cfg.batch_size, rank, world):
            if watch:
                watch.beat()
            x, y = x.to(device), y.to(device)
            count = (y != -1).sum()
            with autocast:
                _, loss = model_for_eval(x, y)
            sums += torch.stack((loss.double() * count, count.double()))
        network.train()
        loss, count = total(sums).tolist()
        return loss / count

    def statistics():
        """Of the gates and rotations of each layer, over the beginning of the held-out split."""
        with autocast:
            return model.statistics(heldout.batch([0])[0][:, :4096].to(device))

    def a_sample():
        """Text from the end of text on; the same numbers are drawn at every evaluation."""
        model.eval()
        with torch.inference_mode(), autocast:
            tokens = generate(
                model, [dataset.eot], max_new_tokens=cfg.sample_tokens, seed=cfg.seed, cuda_graph=False
            )  # fmt: skip
            ids = [ids for (ids,) in tokens]
        model.train()
        return dataset.tokenizer.decode(ids)

    # DDP has nothing to do in evaluation, and its buffers are constant: use the (compiled) module inside
    model_for_eval = network.module if dist.is_initialized() else network

    def save():
        if master:
            state = {"step": step, "seconds": seconds, "best": best, "best_step": best_step, "wandb_id": tracker.run_id}
            state |= {"skipped": (skipped.total, skipped.in_a_row), "evaluated": not stopped}
            tracker.flush()
            writer.save(model, optimizer, state)

    def judge():
        """The validation loss of this step, logged with what goes with it, and whether it is the best."""
        nonlocal seconds, best, best_step
        begin, val_loss = time.perf_counter(), evaluate()
        if cfg.max_seconds:  # evaluation counts towards the limit
            seconds += time.perf_counter() - begin
        if master:
            tokens = step * tokens_per_step
            tracker.log(
                step, val_loss=val_loss, tokens=tokens, seconds=seconds, **statistics(),
                relative_loss=relative_loss(val_loss, tokens, baseline),
            )  # fmt: skip
            say(f"step {step}: val loss {val_loss:.4f}")
            if cfg.sample_tokens:
                tracker.sample(step, a_sample())
        better = val_loss < best
        if better:
            best, best_step = val_loss, step
        return val_loss, better

    def asked_to_stop():
        """Whether any rank was: all answer the same."""
        if world == 1:
            return stop.asked > 0
        asked = torch.tensor(stop.asked)
        dist.all_reduce(asked, group=flags)
        return asked.item() > 0

    stop = StopSignals()
    flags = dist.new_group(backend="gloo") if world > 1 else None  # on the CPU: no rank waits for its GPU
    bar = tqdm(total=cfg.max_iters, initial=step, unit="step", disable=not (master and sys.stderr.isatty()))
    network.train()
    first, done, clock = step, False, time.perf_counter()
    since = clock, step  # of the last logged step
    held = 0.0  # seconds that checkpoints took of training since then
    if cfg.eval_only:
        say(f"val loss {evaluate():.4f}")
        done = True
    elif step >= cfg.max_iters or 0 < cfg.max_seconds <= seconds:
        limit = "max_iters" if step >= cfg.max_iters else "max_seconds"
        say(f"{cfg.out_dir} is trained: {step} steps in {seconds:.0f} s, {limit} is reached")
        done = True
    if resume and not (cfg.eval_only or progress.get("evaluated", True)):
        if step % cfg.eval_interval == 0 or step >= cfg.max_iters:  # a signal came between the step and this
            judge()
            stopped = False
            save()
            clock = time.perf_counter()
            since = clock, step
    ready = None if done else batch(step, 0)
    while not done:
        # ---- one step
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg)
        torch.manual_seed(hash((cfg.seed, step, rank)) % 2**63)  # dropout is a function of (seed, step, rank)
        loss_sum = torch.zeros((), device=device)
        try:
            for micro in range(accumulation):
                if watch:
                    watch.beat()
                if dist.is_initialized():  # gradients are averaged over the ranks with the last micro-step
                    network.require_backward_grad_sync = micro == accumulation - 1
                x, y = ready
                with autocast:
                    _, loss = network(x, y)
                (loss / accumulation).backward()
                loss_sum += loss.detach()
                ready = batch(step + (micro + 1) // accumulation, (micro + 1) % accumulation)
                stopped = asked_to_stop()
                cut = stopped and micro + 1 < accumulation  # this step is done again by whoever goes on
                if cut:
                    break
            if not cut:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
                # a norm that is not finite, the same on every rank: the optimizer leaves everything as it is
                optimizer.found_inf = (~norm.isfinite()).float()
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        except torch.OutOfMemoryError:
            if step > first:
                raise
            fail(f"out of GPU memory in the first step: {what_fits(cfg, model_cfg, accumulation)}")
        step += not cut
        if master:
            writer.check()
        last = stopped or step >= cfg.max_iters
        due = last or step % cfg.eval_interval == 0
        skipped.count(None if cut else optimizer.found_inf, wait=due)
        if skipped.too_many:
            if master:
                writer.wait()
            if flags:
                dist.barrier(group=flags)  # on every rank the newest is the one that rank 0 wrote last
            good = checkpoint.newest(cfg.out_dir)
            good = f"the last good checkpoint is {good}" if good else "there is no checkpoint"
            fail(
                f"{skipped.in_a_row} steps in a row had no finite gradient, the last one step {step}; {good}: a "
                "smaller learning_rate or grad_clip may help"
            )

        # ---- what is said about it
        if not cut and (step % cfg.log_interval == 0 or step == first + 1 or last):
            now = time.perf_counter()
            late = 0 < cfg.max_seconds <= seconds + now - clock
            loss, lates = total(torch.stack((loss_sum / accumulation / world, loss_sum.new_tensor(late)))).tolist()
            last = last or lates > 0
            now = time.perf_counter()
            speed = tokens_per_step * (step - since[1]) / (now - since[0])
            mfu = (
                speed * model.flops_per_token(cfg.block_size, dtype) / (flops_per_second * world)
                if flops_per_second
                else None
            )
            since = now, step
            if master:
                tracker.log(
                    step, train_loss=loss, tokens=step * tokens_per_step, seconds=seconds + now - clock,
                    lr=learning_rate(step - 1, cfg), grad_norm=norm.item(), tok_per_sec=speed, mfu=mfu,
                    skipped=skipped.total or None, checkpoint_seconds=held or None,
                )  # fmt: skip
                held = 0.0
                line = f"loss {loss:.4f}, {speed:,.0f} tok/s" + (f", mfu {mfu:.1%}" if mfu else "")
                bar.update(step - bar.n)
                bar.set_postfix_str(line)
                if bar.disable:
                    say(f"step {step}: {line}")
        if stopped or last or step % cfg.eval_interval == 0:
            seconds += time.perf_counter() - clock
            val_loss, better = (0.0, False) if stopped else judge()
            # weights that give no finite loss or gradient are none to go on from, and a checkpoint of `first` is there
            good = math.isfinite(val_loss) and not skipped.in_a_row and (step > first or not resume)
            if good and (stopped or better or cfg.always_save_checkpoint):
                begin = time.perf_counter()
                save()
                held += time.perf_counter() - begin
            clock = time.perf_counter()
            since = clock, step
        done = last

    bar.close()
    if master:
        writer.wait()
    if watch:
        watch.rest()
    if device.type == "cuda" and step > first:
        say(f"peak GPU memory {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB")
    if master:
        tracker.finish()
    if dist.is_initialized():
        dist.barrier()  # a rank that takes its connections down while another still works may abort at exit
        dist.destroy_process_group()


# ---- checks


def check(cfg, given, world):
    """Micro-steps on each rank that make tokens_per_step; raises ValueError for settings that do not fit."""
    for name in (
        "batch_size",
        "block_size",
        "tokens_per_step",
        "max_iters",
        "eval_interval",
        "eval_tokens",
        "log_interval",
    ):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(cfg, name)}")
    cfg.compile = {"true": "True", "1": "True", "yes": "True", "false": "False", "0": "False", "no": "False"}.get(
        cfg.compile.lower(), cfg.compile
    )
    for name, fits, want in (
        ("learning_rate", cfg.learning_rate > 0, "positive"),
        ("beta1", 0 <= cfg.beta1 < 1, "in [0, 1)"),
        ("beta2", 0 <= cfg.beta2 < 1, "in [0, 1)"),
        ("weight_decay", cfg.weight_decay >= 0, "0 or more"),
        ("grad_clip", cfg.grad_clip >= 0, "0 (no clipping) or more"),
        ("learning_rate", math.isfinite(cfg.learning_rate), "finite"),
        ("min_lr", cfg.min_lr >= 0, "0 or more"),
        ("warmup_iters", cfg.warmup_iters >= 0, "0 or more"),
        ("lr_decay_iters", cfg.lr_decay_iters >= 0, "0 (max_iters) or more"),
        ("max_skipped", cfg.max_skipped >= 1, "1 or more"),
        ("sample_tokens", cfg.sample_tokens >= 0, "0 (none) or more"),
        ("timeout", cfg.timeout > 0, "positive"),
        ("seed", 0 <= cfg.seed < 2**63, "in [0, 2^63)"),
    ):
        if not fits:
            raise ValueError(f"{name} must be {want}, got {getattr(cfg, name)}")
    choices = {
        "dtype": ("auto", "float32", "bfloat16"), "compile": ("auto", "True", "False"),
        "wandb": ("auto", "online", "offline", "disabled"), "backend": ("auto", "nccl", "gloo"),
    }  # fmt: skip
    for name, allowed in choices.items():
        if getattr(cfg, name) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(cfg, name)!r}")
    micro = world * cfg.batch_size * cfg.block_size  # tokens that all ranks process at once
    shape = f"{world} ranks x batch_size {cfg.batch_size} x block_size {cfg.block_size}"
    if cfg.gradient_accumulation_steps:
        if cfg.gradient_accumulation_steps % world:
            raise ValueError(
                f"gradient_accumulation_steps counts over all ranks and must be a multiple of {world}, "
                f"got {cfg.gradient_accumulation_steps}"
            )
        tokens = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size
        if given.get("tokens_per_step", tokens) != tokens:
            raise ValueError(
                f"gradient_accumulation_steps {cfg.gradient_accumulation_steps} x batch_size {cfg.batch_size} x "
                f"block_size {cfg.block_size} = {tokens}, but tokens_per_step is {cfg.tokens_per_step}: "
                "give one of them"
            )
        cfg.tokens_per_step = tokens
    if cfg.tokens_per_step % micro:
        below = cfg.tokens_per_step // micro * micro
        near = " or ".join(str(n) for n in (below, below + micro) if n)
        raise ValueError(
            f"tokens_per_step must be a multiple of {shape} = {micro}, got {cfg.tokens_per_step}: {near} would do"
        )
    return cfg.tokens_per_step // micro


def source_settings(cfg, dataset, given):
    """With init_from=PATH, the model settings that its weights were trained with: they hold unless given anew."""
    if cfg.init_from in ("auto", "scratch"):
        return {}
    if not checkpoint.newest(cfg.init_from):
        raise ValueError(
            "init_from must be auto (nanoGPT's resume: goes on where out_dir left off), scratch or a folder with a "
            f"checkpoint, got {cfg.init_from!r}"
        )
    model = checkpoint.settings(checkpoint.run_of(cfg.init_from))["model"]
    if model["vocab_size"] != dataset.vocab_size:
        raise ValueError(
            f"{cfg.init_from} has a vocabulary of {model['vocab_size']}, the dataset {dataset.name} one of "
            f"{dataset.vocab_size}: prepare it with the same tokenizer"
        )
    attention = ("gate",) if "attention" in given else ()  # another attention has its own default
    return {k: v for k, v in model.items() if k not in HIDDEN + attention}


def choose_start(cfg, settings, thorough):
    """The checkpoint of out_dir to go on from, or None; refuses what would mix or lose runs. Rank 0's answer, by the
    checksums, holds for all."""
    latest = checkpoint.newest(cfg.out_dir, thorough, warn)
    if not latest and checkpoint.exists(cfg.out_dir) and not (cfg.init_from == "scratch" and cfg.overwrite):
        refuse(f"every checkpoint in {cfg.out_dir} is damaged: --init_from=scratch --overwrite=True starts anew")
    saved = None
    if os.path.exists(os.path.join(cfg.out_dir, "config.json")):
        try:
            saved = checkpoint.settings(cfg.out_dir)
        except ValueError as error:
            refuse(f"{error}: put it right, or move {cfg.out_dir} away")
    # started again by torchrun or Slurm: with the same command, which was right the first time
    again = any(int(os.environ.get(f"{of}_RESTART_COUNT") or 0) for of in ("TORCHELASTIC", "SLURM"))
    cfg.overwrite = cfg.overwrite and not again
    started_so = cfg.init_from == "auto" or (saved and not cfg.overwrite and saved["init_from"] == cfg.init_from)
    if not (again and saved) and (cfg.init_from == "scratch" or not started_so):
        if cfg.eval_only:
            return None  # of new weights or another run's; leaves out_dir alone
        if has_files(cfg.out_dir):
            if not cfg.overwrite:
                refuse(
                    f"{cfg.out_dir} is not empty: --overwrite=True renames it and starts anew, "
                    "or choose another out_dir"
                )
            if os.path.realpath(cfg.init_from).startswith(os.path.realpath(cfg.out_dir)):
                refuse(
                    f"init_from {cfg.init_from} is in out_dir {cfg.out_dir}, which would be renamed: "
                    "choose another out_dir"
                )
        return None
    if saved and latest:
        # where the cosine ends is part of the trajectory, where training ends is not
        end = lambda s: (s["lr_decay_iters"] or s["max_iters"]) if s["decay_lr"] else 0
        free = FREE | ({"max_iters", "lr_decay_iters"} if end(settings) == end(saved) else set())
        flat = lambda s: {**s, **s["model"], "model": 0, "dataset": os.path.basename(os.path.normpath(s["dataset"]))}
        old, new = flat(saved), flat(settings)
        if changed := [key for key in new if key not in free and old.get(key, new[key]) != new[key]]:
            was, now = (" ".join(f"{key}={of[key]}" for key in changed) for of in (old, new))
            refuse(
                f"{cfg.out_dir} was trained with {was}, now {now}: go on with what it was, choose another out_dir, or "
                f"start anew with --init_from=scratch --overwrite=True"
            )
    if cfg.eval_only and not latest:
        refuse(f"no checkpoint in {cfg.out_dir} to evaluate (--init_from=scratch evaluates new weights)")
    return latest


def warn(line):
    """Of one rank a node, to stderr."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print_to_terminal(f"{os.path.basename(sys.argv[0])}: {line}", file=sys.stderr)


def what_fits(cfg, model_cfg, accumulation):
    """Ways out of an out-of-memory error that leave tokens_per_step as it is."""
    ways = []
    if cfg.batch_size > 1:
        smaller = max(d for d in range(1, cfg.batch_size) if cfg.batch_size % d == 0)
        again = accumulation * cfg.batch_size // smaller
        ways.append(
            f"--batch_size={smaller} (accumulation becomes {again}, tokens_per_step stays {cfg.tokens_per_step})"
        )
    if not model_cfg.activation_checkpointing:
        ways.append("--activation_checkpointing=True")
    return "try " + " or ".join(ways or ["a smaller block_size or model"])


def fail(message):
    print_to_terminal(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
    if checkpoint.Writer.current:
        with suppress(Exception):  # said already
            checkpoint.Writer.current.wait()
    os._exit(1)  # other ranks may be waiting in a collective that will never end: leave at once


# ---- parts of the set-up


def store_of_this_start():
    """torchrun keeps its store when it starts the workers again, and ranks that read an address of the last time there
    wait for ever (pytorch issue 135712). On one node the count of restarts, the same for all, keeps them apart."""
    store, _, _ = next(dist.rendezvous("env://"))
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"start_{restarts}", store) if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else store


def start_folder(cfg, settings, dataset):
    """out_dir with config.json and the tokenizer, so that the run can be read without the data."""
    take(cfg.out_dir)
    if cfg.overwrite and cfg.init_from != "auto" and has_files(cfg.out_dir):
        n = 1
        while os.path.exists(f"{cfg.out_dir}.old-{n}"):
            n += 1
        os.rename(cfg.out_dir, f"{cfg.out_dir}.old-{n}")
        warn(f"what was in {cfg.out_dir} is {cfg.out_dir}.old-{n} now")
        take(cfg.out_dir)
    dataset.tokenizer.save(cfg.out_dir)
    checkpoint.write_json(os.path.join(cfg.out_dir, "config.json"), settings)
    path = os.path.join(cfg.out_dir, "environment.json")
    try:
        with open(path) as f:
            starts = json.load(f)
    except (OSError, ValueError):
        starts = []
    checkpoint.write_json(path, [*starts, environment()])


def fingerprint(dataset):
    """Of its shards and their order, wherever they are."""
    splits = [{k: v for k, v in split.items() if k != "zarr"} for split in dataset.meta["splits"].values()]
    return hashlib.sha256(json.dumps([splits, dataset.eot]).encode()).hexdigest()[:16]


def has_files(folder):
    return os.path.isdir(folder) and os.listdir(folder) not in ([], [".lock"])


def take(out_dir):
    """Locks out_dir for as long as this process lives, however it ends; refuses if another one has it."""
    global lock
    os.makedirs(out_dir, exist_ok=True)
    lock = open(os.path.join(out_dir, ".lock"), "a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        who = lock.read().strip() or "another process"
        refuse(f"{who} is training in {out_dir}: stop it, or choose another out_dir")
    except OSError:  # a file system without locks
        return
    lock.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)


def losses_of(run):
    """[(tokens, validation loss)] of a run to compare with; none without one."""
    if not run:
        return []
    path = os.path.join(run, "metrics.jsonl")
    if not os.path.isfile(path):
        refuse(f"baseline must be a run's folder, got {run}: there is no {path}")
    found = map(json.loads, whole_lines(path))
    return sorted((line["tokens"], line["val_loss"]) for line in found if "val_loss" in line)


def relative_loss(loss, tokens, baseline):
    """How far a validation loss is above the baseline's after as many tokens, as a share of it; None where that has
    none."""
    if not baseline or not baseline[0][0] <= tokens <= baseline[-1][0]:
        return None
    return loss / float(np.interp(tokens, *zip(*baseline))) - 1


def environment():
    """What a run started with: the command, the commit of this repository, versions, machine, time."""
    here = os.path.dirname(os.path.abspath(__file__))
    git = lambda *args: subprocess.run(["git", "-C", here, *args], capture_output=True, text=True).stdout.strip()
    try:
        commit, changed = git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except OSError:  # no git
        commit, changed = "", False
    versions = {name: version_of(name) for name in ("torch", "triton", "numpy", "safetensors", "wandb")}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return dict(
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"), command=sys.argv, commit=commit, changed=changed,
        python=sys.version.split()[0], versions=versions, cuda=torch.version.cuda, gpus=gpus,
        host=socket.gethostname(), world=int(os.environ.get("WORLD_SIZE", 1)),
    )  # fmt: skip


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def make_optimizer(model, cfg, device):
    """AdamW, fused; matrices and embeddings decay, biases, norms and gate biases do not."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=True)


def learning_rate(step, cfg):
    """Of step 0, 1, 2, ...: linear warm-up, then constant, or a cosine down to min_lr."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    if not cfg.decay_lr:
        return cfg.learning_rate
    length = (cfg.lr_decay_iters or cfg.max_iters) - cfg.warmup_iters
    done = min(1.0, (step - cfg.warmup_iters) / max(1, length))
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (cfg.learning_rate - cfg.min_lr)


def check_kernels(model, block_size, dtype, device, say):
    """Compare the attention kernels that this model trains on with float64; where they are wrong or do not compile, go
    on in plain PyTorch, on all ranks."""
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    failures = [kernel_failure(model, block_size, dtype)]
    if dist.is_initialized():
        failures *= dist.get_world_size()
        dist.all_gather_object(failures, failures[0])
    if failure := next(filter(None, failures), ""):
        disable_kernels(failure)
        say(f"!!! the Triton kernels of power attention fail on this machine: {failure}")
        say("!!! training goes on in plain PyTorch, several times slower and with more memory: see `make doctor`")


def compiles(cfg, device, say):
    """Whether to use torch.compile: tried on a small function first, so that a missing compiler is one line."""
    if cfg.compile == "False" or (cfg.compile == "auto" and device.type != "cuda"):
        return False
    torch._dynamo.config.optimize_ddp = False  # compiled inside DDP: the graph must not be split for its buckets
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64, device=device))
        return True
    except Exception as error:
        reason = first_line(error)
        if cfg.compile == "True":
            fail(f"compile=True, but torch.compile does not work here: {reason} (see `make doctor`)")
        say(f"training without torch.compile: {reason} (see `make doctor`)")
        return False


def first_line(error):
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def make_deterministic(say):
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash instead: cuDNN's backward adds in any order
    import torch._inductor.config as inductor

    inductor.deterministic = True
    say("deterministic: torch's deterministic algorithms, flash attention instead of cuDNN; some operations are slower")


def peak_flops(device):
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)


class Skipped:
    """Steps whose gradient was not finite, which the optimizer left out: in all, and in a row up to now."""

    def __init__(self, most):
        self.most, self.total, self.in_a_row, self.last = most, 0, 0, None

    def count(self, found, wait=False):
        """found: a tensor that is 1 if the newest step was one. It is looked at a step later, when the GPU has long
        known, or with `wait` at once."""
        for known in (self.last, found if wait else None):
            if known is not None:
                bad = known.item() > 0
                self.total, self.in_a_row = self.total + bad, (self.in_a_row + 1) * bad
        self.last = None if wait else found

    @property
    def too_many(self):
        return 0 < self.most <= self.in_a_row


class StopSignals:
    """SIGINT, SIGTERM and SIGUSR1 end training after the micro-step, with a checkpoint; a second SIGINT ends it now.
    A scheduler and torchrun may both send SIGTERM, so a second one of those changes nothing."""

    def __init__(self):
        self.asked = 0.0
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(s, self.ask)

    def ask(self, number, frame):
        self.asked = 1.0
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)


def print_to_terminal(*args, **kwargs):
    with suppress(OSError):  # a pipe that was closed, a full disk behind it: no reason to stop
        tqdm.write(*args, **kwargs)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
