"""Compile the kernels for GPUs that need not be there, and say what each takes: registers, spills, shared memory.

    python tests/targets.py                            # every launch of the shipped configs, for every target
    python tests/targets.py --target sm_80 sm_90       # for these targets
    python tests/targets.py --once                     # one launch of each kernel, each for one target
    python tests/targets.py --large --target sm_86     # head dimension 128, its shared memory alone
    python tests/targets.py --markdown                 # as a table

A line is the JSON of a launch: a kernel, the case, its target, registers a thread, bytes a thread that spill into
memory, and bytes of shared memory, or the error. The launches of training and generation with the models of config/ are
caught as the launchers make them for small tensors on the CPU. Triton remembers machine code in its own cache.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.attention.embedding import symmetric_power_dim  # noqa: E402
from sympow.generation.decoder import Decoder  # noqa: E402
from sympow.generation.steps import Sampler  # noqa: E402
from sympow.kernels.decode.sampling import sample_next_token  # noqa: E402
from sympow.kernels import configs, operators  # noqa: E402
from sympow.kernels.convolution import convolve, differentiable_convolve  # noqa: E402
from sympow.kernels.cross_entropy import cross_entropy_  # noqa: E402
from sympow.kernels.decode.prompt import gate  # noqa: E402
from sympow.kernels.decode.rotary import rotate  # noqa: E402
from sympow.kernels.heinsen.operator import heinsen_attention  # noqa: E402
from sympow.kernels.support import DTYPES  # noqa: E402
from sympow.model import GPT, GPTConfig  # noqa: E402

KB = 1024
TARGETS = {  # the compute capability, and bytes of shared memory that a program may have
    "sm_80": ((8, 0), 163 * KB),  # A100
    "sm_86": ((8, 6), 99 * KB),  # RTX 3090, A6000
    "sm_89": ((8, 9), 99 * KB),  # RTX 4090, L40S
    "sm_90": ((9, 0), 227 * KB),  # H100, H200
    "sm_100": ((10, 0), 227 * KB),  # B200
    "sm_120": ((12, 0), 99 * KB),  # RTX 5090
}


# ---- the launches

TOKENS, HEADS = 512, 2
bf16, f32 = torch.bfloat16, torch.float32


def leaves(dtype, D, gated=False, n=TOKENS):
    """Return q of the last n tokens, k and v, and log_g if gated: zeros that need gradients."""
    q, k, v = torch.zeros(1, TOKENS, 3 * HEADS, D, dtype=dtype).split(HEADS, 2)
    gates = [torch.zeros(1, TOKENS, HEADS)] * gated
    return [x.detach().requires_grad_() for x in (q[:, :n], k, v, *gates)]


def both_passes(attention, inputs, **options):
    outputs = attention(*inputs, **options)
    outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x.requires_grad]
    torch.autograd.grad(outputs, inputs, [torch.zeros_like(x) for x in outputs], allow_unused=True)


def quadratic(dtype, D, p, gated, n=TOKENS):
    both_passes(operators.quadratic_attention, leaves(dtype, D, gated, n), p=p)


def chunked(dtype, D, p, gated):
    both_passes(operators.chunked_attention, leaves(dtype, D, gated), p=p, chunk=256)


def sums(dtype, D, p):
    both_passes(operators.quadratic_sums, leaves(dtype, D), p=p, scale=0.1)


def heinsen(dtype, v_dtype, D):
    q, k, v = leaves(dtype, D)
    both_passes(heinsen_attention, [q, k, v.detach().to(v_dtype).requires_grad_()])


def cross_entropy(dtype, V):
    cross_entropy_(torch.zeros(TOKENS, V, dtype=dtype), torch.zeros(TOKENS, dtype=torch.int64), V - 5, True)


def convolution(dtype, D, n):
    """Convolve as in training: whole sequences, packed ones, and with a frozen weight."""
    q, *_ = leaves(dtype, D)
    weight, resets = torch.zeros(n, 3 * HEADS * D)[:, : HEADS * D], torch.zeros(1, TOKENS, dtype=torch.bool)
    for inputs, options in ([q, weight.requires_grad_()], {}), ([q, weight], dict(resets=resets)), ([q], {}):
        both_passes(lambda x, w=weight.detach(), resets=None: differentiable_convolve(x, w, resets), inputs, **options)


@torch.inference_mode()
def prompt(dtype, D, p, gated):
    q, k, v = torch.zeros(1, TOKENS, 6, D, dtype=dtype).split(2, 2)
    rotate(q, *torch.zeros(2, TOKENS, D))
    convolve(q, torch.zeros(4, 2 * D))
    convolve(q, torch.zeros(4, 2 * D), torch.zeros(1, TOKENS, dtype=torch.bool), torch.zeros(1, 3, 2, D, dtype=dtype))
    gate(q, q, torch.zeros(D), 1e-5)
    state = [torch.zeros(1, 2, symmetric_power_dim(D, p), *more) for more in ((D,), ())]
    log_g = torch.zeros(1, TOKENS, 2) if gated else None
    operators.chunked_attention(q, k, v, log_g, *state, p=p, chunk=256, final=True)
    operators.chunked_state(k, v, log_g, *state, p=p, chunk=256)


@torch.inference_mode()
def tokens(attention, p, B, switch_over, **shape):
    """Generate as models do with each kernel of decoder.py: cached, flushed, and with a state."""
    sizes = dict(vocab_size=99, n_layer=attention.count(",") + 1, n_head=12, n_embd=768, bias=False) | shape
    with torch.device("meta"):  # any numbers will do
        model = GPT(GPTConfig(**sizes, attention=attention, p=p))
    model.to_empty(device="cpu")
    sampler = Sampler(torch.device("cpu"), B, sample_next_token, top_k=5, top_p=0.9)
    decoder = Decoder(model, model.empty_state(B, switch_over), sampler, 4, bf16)
    for _ in range(4):
        decoder.step()


# the training step of each attention in config/, and of float32
TRAINING = [
    *((chunked, bf16, *sizes) for sizes in ((64, 2, True), (64, 2, False), (32, 4, False))),
    *((quadratic, bf16, *sizes) for sizes in ((64, 4, True), (64, 4, False), (64, 6, False), (64, 8, True))),
    (quadratic, bf16, 32, 2, True),
    (sums, bf16, 32, 2),
    (sums, bf16, 32, 4),
    (heinsen, bf16, f32, 64),
    (heinsen, bf16, f32, 32),
    (quadratic, bf16, 64, 2, True, 300),  # a prompt in pieces
    (quadratic, f32, 64, 4, True),
    (chunked, f32, 64, 2, True),
    (heinsen, f32, f32, 64),
    (convolution, bf16, 64, 4),
    (convolution, f32, 64, 4),
    (cross_entropy, bf16, 50304),
    (cross_entropy, f32, 50304),
]
GENERATION = [(prompt, bf16, *sizes) for sizes in ((64, 2, True), (64, 2, False), (32, 4, False))]
for batch in (1, 8):
    every = partial(tokens, convolution=4, output_gate=True)
    GENERATION += [
        (every, "conformal_sympow,sympow_gating,softmax,heinsen", 2, batch, 3),
        (tokens, "sympow", 4, batch, "never"),
        (tokens, "even_power", 6, batch, "never"),
        (partial(tokens, head_dim=16, n_head=48), "sympow", 4, batch, 3),
        (partial(tokens, norm="rmsnorm", activation="swiglu", mlp_width=2048), "softmax", 2, batch, "never"),
    ]
# of head dimension 128, which needs the most shared memory
LARGE = [
    *((quadratic, dtype, 128, 8, True, 300) for dtype in DTYPES),
    (heinsen, bf16, bf16, 128),
    (chunked, bf16, 128, 2, True),
    (chunked, f32, 128, 2, True),
]


def describe(function, *sizes):
    """Return the words that stand for a case."""
    name = getattr(function, "func", function).__name__
    return " ".join([name, *(str(x).removeprefix("torch.") for x in sizes)])


def pretend_gpu(arch, device=0):
    """Make this process compile for a GPU of this compute capability (90), which need not be there.

    device: what Triton takes for the number of the GPU; it keeps what it compiled for one number apart from the others.
    Triton's interpreter must be off, and nothing may be launched.
    """
    answers = {"get_current_target": GPUTarget("cuda", arch, 32), "get_current_device": device}

    class Pretended:
        def __getattr__(self, name):
            return lambda *_: answers.get(name, 0)

    driver.set_active(Pretended())


@contextlib.contextmanager
def pretended(target):
    """Let the launchers choose as they do on this GPU, and Triton compile for it."""
    (major, minor), shared = TARGETS[target]
    name = "NVIDIA H200" if target == "sm_90" else target
    saved, device = configs.gpu, configs.describe_gpu(name, (major, minor), shared)
    configs.gpu = lambda _: device
    pretend_gpu(10 * major + minor, device=list(TARGETS).index(target))
    try:
        yield
    finally:
        configs.gpu = saved


def launches(target, cases):
    """Return [(kernel, case, compile)], one for each launch of the cases, (function, *arguments), that Triton would
    compile anew; compile() returns the compiled kernel."""
    caught, run = {}, JITFunction.run

    def catch(self, *args, grid, warmup, **options):
        kernel = f"{self.fn.__module__.removeprefix('sympow.kernels.')}.{self.__name__.removesuffix('_kernel')}"
        key = repr((kernel, [_signature(x) for x in args], sorted(options.items())))
        caught.setdefault(key, (kernel, case, lambda: run(self, *args, grid=(1,), warmup=True, **options)))

    JITFunction.run = catch
    try:
        with pretended(target):
            for function, *arguments in cases:
                case = describe(function, *arguments)
                function(*arguments)
    finally:
        JITFunction.run = run
    return list(caught.values())


def _signature(x):
    """Return what Triton compiles for, of an argument of a launch; it may be finer than Triton's."""
    if isinstance(x, (tuple, list)):
        return [_signature(y) for y in x]
    if isinstance(x, int) and not isinstance(x, bool):
        return "1" if x == 1 else "16" if x % 16 == 0 else "int"
    if hasattr(x, "block_shape"):
        return "descriptor", str(x.base.dtype), x.block_shape
    return str(x.dtype) if hasattr(x, "dtype") else type(x).__name__ if isinstance(x, float) else repr(x)


# ---- what they take


def inspect_code(tool, *options, cubin, folder):
    """Return what one of CUDA's tools, which Triton brings, prints of a kernel's machine code."""
    import triton

    path = Path(folder) / f"{os.getpid()}.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    return subprocess.run([tool, *options, path], capture_output=True, text=True, check=True).stdout


def resources(compiled, folder):
    """Return {"registers", "spills", "shared"} of a kernel that Triton compiled, in bytes but for the registers."""
    shared = compiled.metadata.shared
    if not compiled.asm.get("cubin", True):  # see `stop_early`
        return dict(shared=shared)
    text = inspect_code("cuobjdump", "-res-usage", cubin=compiled.asm["cubin"], folder=folder)
    number = lambda name: int(re.search(rf"{name}:(\d+)", text)[1])
    return dict(registers=number("REG"), spills=number("STACK"), shared=shared)


def stop_early():
    """Let Triton stop when shared memory is known, before the stages that take longest."""
    from triton._C.libtriton import llvm
    from triton.backends.nvidia.compiler import CUDABackend

    llvm.optimize_module = lambda *_, **__: None
    CUDABackend.make_ptx = lambda self, src, metadata, *_: metadata.update(name="kernel") or ""
    CUDABackend.make_cubin = lambda *_: b""


LAUNCHES = []  # (target, *launch) of all, which workers have from the process that they are forked from


def _compile(number):
    """Compile one launch, in a worker; return {"target", "kernel", "case"} and what it takes, or why it failed."""
    target, kernel, case, compile = LAUNCHES[number]
    row = dict(target=target, kernel=kernel, case=case)
    try:
        with pretended(target), TemporaryDirectory() as folder:
            return row | resources(compile(), folder)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return row | dict(error=f"{type(error).__name__}: {lines[0]} .. {lines[-1]}"[:300])


def measure(targets, once=False, large=False):
    """Return [{"target", "kernel", "case", "registers", "spills", "shared" or "error"}] of all launches, compiled in as
    many processes as there are processors.

    once: one launch of each kernel, each for one of the targets in turn; large: head dimension 128, which no shipped
    config has, and only its shared memory.
    """
    for target in targets:
        LAUNCHES.extend((target, *launch) for launch in launches(target, LARGE if large else TRAINING + GENERATION))
    if once:
        kernels = {}
        for launch in LAUNCHES:
            target, kernel, *_ = launch
            kernels.setdefault(kernel, {}).setdefault(target, launch)
        LAUNCHES[:] = [[*group.values()][i % len(group)] for i, group in enumerate(kernels.values())]
    with TemporaryDirectory() as folder:
        if large:
            stop_early()
            os.environ["TRITON_CACHE_DIR"] = folder  # what it makes must not be found by others
        with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
            return pool.map(_compile, range(len(LAUNCHES)), chunksize=1)


def markdown(rows):
    """Return a table with a line for each kernel and a column for each target: registers, spills, KB of shared memory.

    A cell is the launch of this kernel with the most spills, then shared memory. Kernels that nowhere spill or need
    more than 16 KB are left out.
    """
    cells = {}
    for row in sorted(rows, key=lambda row: ("error" in row, row.get("spills", 0), row.get("shared", 0))):
        number = lambda name: str(row.get(name, "?"))
        text = f"{number('registers')} / {number('spills')} / {row.get('shared', 0) / KB:.0f} KB"
        cells[row["kernel"], row["target"]] = "does not compile" if "error" in row else text
    large = {row["kernel"] for row in rows if "error" in row or row["spills"] or row["shared"] / KB > 16.5}
    kernels, targets = sorted(large), list(dict.fromkeys(row["target"] for row in rows))
    lines = [["kernel", *targets], ["---", *["---:"] * len(targets)]]
    lines += [[f"`{kernel}`", *(cells.get((kernel, target), "") for target in targets)] for kernel in kernels]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="print a table")
    args = parser.parse_args()
    rows = measure(args.target, args.once, args.large)
    print(markdown(rows) if args.markdown else "\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    main()
