"""Prepare the machine for training: check the kernels and the compiler, make it deterministic, know its peak speed."""

import os
from contextlib import contextmanager

import torch

from sympow.attention.check import first_line, kernel_failure
from sympow.attention.dispatch import disable_kernels
from sympow.training.parallel import not_sharded_reason
from sympow.runs.processes import Failed
from sympow.runs.settings import divide_sequences, from_launcher

# dense bf16 FLOP/s of one GPU, from the vendors' data sheets; the first name that occurs in the device's name counts
PEAK_FLOPS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "A6000": 155e12,
}  # fmt: skip


def peak_flops(device):
    """Return the peak dense bf16 FLOP/s of a device, or None if it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)


def check_kernels(model, contexts, dtype, ranks, context_parallel=1):
    """Compare the kernels that the model trains on, at these contexts, with float64; if they fail on one rank, disable
    them on all. context_parallel: how many ranks share a sequence.

    Local rank 0 compiles them; the other ranks of a node wait and read them from Triton's cache.
    """
    with ranks.local_rank_0_first():
        failure = next(filter(None, (kernel_failure(model, n, dtype, context_parallel) for n in contexts)), "")
    failure = ranks.first(failure)
    disable_kernels(failure)  # if there is one
    if failure:
        ranks.log(f"!!! the Triton kernels of power attention fail on this machine: {failure}")
        ranks.log("!!! training goes on in plain PyTorch, several times slower and with more memory: see `make doctor`")


def make_deterministic(log):
    """Make torch choose algorithms that give the same bits in every run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash instead: the backward pass of cuDNN adds in any order
    import torch._inductor.config as inductor

    inductor.deterministic = True
    log("deterministic: torch's deterministic algorithms, flash attention instead of cuDNN; some operations are slower")


def can_compile(setting, device, log):
    """Return True if the model is to be compiled, by the setting compile: auto, True or False.

    torch.compile is tried on a small function, so that a missing toolchain is one line: auto then trains without, and
    True raises Failed.
    """
    if setting == "False" or (setting == "auto" and device.type != "cuda"):
        return False
    torch._dynamo.config.optimize_ddp = False  # compiled inside DDP: the graph must not be split for its buckets
    # each stage's context, in training and evaluation, for each kind of layer: blocks compiled alone share their code
    torch._dynamo.config.recompile_limit = 64
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64, device=device))
        return True
    except Exception as error:  # training works without torch.compile
        reason = first_line(error)
    if setting == "True":
        raise Failed(f"compile=True, but torch.compile does not work here: {reason} (see `make doctor`)")
    log(f"training without torch.compile: {reason} (see `make doctor`)")
    return False


@contextmanager
def memory_advice(cfg, model_cfg, stage, goes_on):
    """Turn an out-of-memory error into Failed with advice how to need less memory at the same tokens_per_step.

    stage: the one whose first step this is. goes_on: True for a run with a checkpoint, whose batch_size may not change
    if it has dropout.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        pass
    else:
        return
    ways = []
    sequences = stage.batch_size * stage.accumulation
    sizes = {
        d: divide_sequences(sequences, d * cfg.block_size // stage.block_size)
        for d in range(1, cfg.batch_size)
        if cfg.batch_size % d == 0
    }
    fewer = [d for d, (batch_size, _) in sizes.items() if batch_size < stage.batch_size]
    if fewer and not (goes_on and model_cfg.dropout):
        smaller = fewer[-1]
        again = sizes[smaller][1]
        steps = cfg.gradient_accumulation_steps * cfg.batch_size // smaller
        also = f" --gradient_accumulation_steps={steps}" if steps else ""
        ways.append(
            f"--batch_size={smaller}{also} (accumulation becomes {again}, tokens_per_step stays {cfg.tokens_per_step})"
        )
    if not model_cfg.activation_checkpointing:
        ways.append("--activation_checkpointing=True")
    shardable = not cfg.shard and not not_sharded_reason(cfg, on_gpu=True)
    if shardable and from_launcher("WORLD_SIZE", 1) > 1 and not (goes_on and model_cfg.dropout):
        ways.append("--shard=True")
    ways = " or ".join(ways or ["a smaller context or model"])
    where = "the first step" + (f" of {stage.name}" if stage.name else "")
    raise Failed(f"out of GPU memory in {where}: try {ways}")
