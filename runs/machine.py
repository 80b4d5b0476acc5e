"""Prepare the machine for training: check the kernels and the compiler, make it deterministic, know its peak speed."""

import os

import numpy as np
import torch

from sympow.code import MODEL, hash_sources, read_modules, read_sources
from ..attention.operator.dispatch import disable_kernels, first_line, warn_once
from .processes import Failed

# dense bf16 FLOP/s of one GPU, from the vendors' data sheets; the first name that occurs in the device's name counts
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "A6000": 155e12,
}


def flops_utilization(model, tokens_per_second, block_size, dtype):
    """Return the share of its device's peak that training a model takes at this speed, or None if that is not known."""
    device = model.transformer.wte.weight.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)
    return peak and tokens_per_second * model.flops_per_token(block_size, dtype) / peak


def check_kernels(model, contexts, dtype, ranks, context_parallel=1):
    """Compare the kernels that the model trains on, at these contexts, with float64; if they fail on one rank, disable
    them on all. context_parallel: how many ranks share a sequence.

    Local rank 0 compiles them; the other ranks of a node wait and read them from Triton's cache.
    """
    device = model.transformer.wte.weight.device
    with ranks.local_rank_0_first():
        plans = [x.plans(n, dtype, device, context_parallel) for x in model.attentions() for n in contexts]
        reason = compare_plans(sum(plans, []), dtype, model)
    reason = ranks.first(reason)
    if reason:
        disable_kernels(reason)
        ranks.log(
            f"!!! the Triton kernels of power attention fail on this machine: {reason}\n"
            "!!! training goes on in plain PyTorch, several times slower and with more memory: see `make doctor`"
        )


def check_kernels_of_prompts(model):
    """Compare the kernels by which the model reads a text with float64; if they fail, disable them, with a warning."""
    device = model.transformer.wte.weight.device
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else torch.float32
    plans = [attention.prompt_plans(dtype, device) for attention in model.attentions()]
    if reason := compare_plans(sum(plans, []), dtype, model):
        disable_kernels(reason)
        warn_once(f"attention runs without its Triton kernels, which fail on this machine: {reason}")


def compare_plans(plans, dtype, model):
    """Return "" if the kernels of a model's Plans agree with float64, else one line that says what is wrong."""
    device = model.transformer.wte.weight.device
    if device.type != "cuda":
        return ""
    from ..attention.operator import check  # with the specifications of all operators: where there are kernels

    return check.compare_plans(plans, dtype, device, model.config)


def choose_numerics(cfg, device, dtype):
    """Make the device the current one, set the precision of float32 products, and make runs repeatable if cfg asks."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dtype != torch.float32:  # power attention multiplies in float32; tf32 is exact for bf16 factors
        torch.set_float32_matmul_precision("high")
    if not cfg.deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash instead: the backward pass of cuDNN adds in any order
    import torch._inductor.config as inductor

    inductor.deterministic = True


def seed_dropout(*numbers):
    """Seed torch's random numbers by whole numbers of 0 or more."""
    seed = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    torch.manual_seed(seed.item())


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
    cache_graphs()
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64, device=device))
        return True
    except Exception as error:  # training works without torch.compile
        reason = first_line(error)
    if setting == "True":
        raise Failed(f"compile=True, but torch.compile does not work here: {reason} (see `make doctor`)")
    log(f"training without torch.compile: {reason} (see `make doctor`)")
    return False


def cache_graphs():
    """Let torch.compile find its graphs of forward and backward passes on disk at the next start of the same code.

    Autograd functions and torch.autocast keep graphs out of that cache unless a program says that it knows the calls.
    A graph does not say how its operators are differentiated. So the key has the code of the model and the experiments
    in it, and of loaded modules that are not installed, which may have attentions of their own.
    """
    import torch._functorch.config as autograd
    import torch._inductor.config as inductor

    autograd.autograd_cache_allow_custom_autograd_functions = True
    calls = [f"torch.amp.autocast_mode._{name}_autocast" for name in ("enter", "exit")]
    code = read_sources((*MODEL, "experiments/")) | read_modules()
    inductor.unsafe_marked_cacheable_functions = dict.fromkeys(calls, hash_sources(code))
