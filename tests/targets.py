"""Compile the kernels for GPUs that need not be there, and say what each takes: registers, spills, shared memory.

    python tests/targets.py                            # every launch of the shipped configs, for every target
    python tests/targets.py --target sm_80 sm_90       # for these targets
    python tests/targets.py --kernel quadratic.b       # kernels with names that begin so
    python tests/targets.py --once                     # one launch of each kernel, each for one target
    python tests/targets.py --large --target sm_86     # head dimension 128, its shared memory alone
    python tests/targets.py --markdown                 # the table of docs/data/targets.md

A line is a kernel, the largest case, its target, registers a thread, bytes a thread that spill into memory, and bytes
of shared memory. The launches of training and generation with the models of config/ are caught as the launchers
make them for small tensors on the CPU. Results are remembered in ~/.cache/sympow/targets, by the kernels' source,
Triton's version and the launch; Triton remembers machine code in its own cache.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
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


def training(large=False, heads=2, T=512):
    """Yield (case, function) for the training step of each attention in config/, and of float32.

    With `large` they are of head dimension 128 instead, which needs the most shared memory.
    """
    import torch

    from sympow.kernels import operators
    from sympow.kernels.support import DTYPES
    from sympow.kernels.heinsen.operator import heinsen_attention
    from sympow.kernels.cross_entropy import cross_entropy_

    bf16, f32 = torch.bfloat16, torch.float32

    def leaves(dtype, D, gated=False, n=T):
        fused = torch.zeros(1, T, 3 * heads, D, dtype=dtype).split(heads, 2)
        gates = [torch.zeros(1, T, heads)] * gated
        return [x.detach().requires_grad_() for x in (fused[0][:, :n], *fused[1:], *gates)]

    def both_passes(attention, inputs, **options):
        outputs = attention(*inputs, **options)
        outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x.requires_grad]
        torch.autograd.grad(outputs, inputs, [torch.zeros_like(x) for x in outputs], allow_unused=True)

    def quadratic(dtype, D, p, gated, n=T):
        both_passes(operators.quadratic_attention, leaves(dtype, D, gated, n), p=p)

    def chunked(dtype, D, p, gated):
        both_passes(operators.chunked_attention, leaves(dtype, D, gated), p=p, chunk=256)

    def sums(dtype, D, p):
        both_passes(operators.quadratic_sums, leaves(dtype, D), p=p, scale=0.1)

    def heinsen(dtype, v_dtype, D):
        q, k, v = leaves(dtype, D)
        both_passes(heinsen_attention, [q, k, v.detach().to(v_dtype).requires_grad_()])

    def cross_entropy(dtype, V):
        cross_entropy_(torch.zeros(T, V, dtype=dtype), torch.zeros(T, dtype=torch.int64), V - 5, True)

    def case(function, *sizes):
        words = [str(x).removeprefix("torch.") for x in sizes if not isinstance(x, bool)]
        return " ".join([function.__name__, *words]) + " gated" * (True in sizes), lambda: function(*sizes)

    if large:
        for dtype in DTYPES:
            yield case(quadratic, dtype, 128, 8, True, 300)
        yield case(heinsen, bf16, bf16, 128)
        for dtype in (bf16, f32):
            yield case(chunked, dtype, 128, 2, True)
        return
    for D, p, gated in ((64, 2, True), (64, 2, False), (32, 4, False)):
        yield case(chunked, bf16, D, p, gated)
    for D, p, gated in ((64, 4, True), (64, 4, False), (64, 6, False), (64, 8, True), (32, 2, True)):
        yield case(quadratic, bf16, D, p, gated)
    for p in (2, 4):
        yield case(sums, bf16, 32, p)
    yield case(heinsen, bf16, f32, 64)
    yield case(heinsen, bf16, f32, 32)
    yield case(quadratic, bf16, 64, 2, True, 300)  # a prompt in pieces
    yield case(quadratic, f32, 64, 4, True)
    yield case(chunked, f32, 64, 2, True)
    yield case(heinsen, f32, f32, 64)
    for dtype in (bf16, f32):
        yield case(cross_entropy, dtype, 50304)


def generation():
    """Yield (case, function) for prompts and tokens of models with each kernel of decoder.py."""
    import torch

    from sympow.attention.embedding import symmetric_power_dim
    from sympow.generation.decoder import Decoder
    from sympow.generation.generate import Sampler
    from sympow.kernels import operators
    from sympow.kernels.decode.rotary import rotate
    from sympow.model import GPT, GPTConfig

    def prompt(D, p, gated):
        q, k, v = torch.zeros(1, 512, 6, D, dtype=torch.bfloat16).split(2, 2)
        rotate(q, *torch.zeros(2, 512, D))
        state = [torch.zeros(1, 2, symmetric_power_dim(D, p), *more) for more in ((D,), ())]
        log_g = torch.zeros(1, 512, 2) if gated else None
        operators.chunked_attention(q, k, v, log_g, *state, p=p, chunk=256, final=True)
        operators.chunked_state(k, v, log_g, *state, p=p, chunk=256)

    def tokens(attention, p, B, switch_over, **shape):
        sizes = dict(vocab_size=99, n_layer=attention.count(",") + 1, n_head=12, n_embd=768, bias=False) | shape
        model = GPT(GPTConfig(**sizes, attention=attention, p=p))
        sampler = Sampler(torch.device("cpu"), B, True, top_k=5, top_p=0.9)
        decoder = Decoder(model, model.empty_state(B, switch_over), sampler, 4, torch.bfloat16)
        for _ in range(4):  # cached, flushed, and with a state
            decoder.step()

    for D, p, gated in ((64, 2, True), (64, 2, False), (32, 4, False)):
        yield f"prompt bfloat16 {D} {p}{' gated' * gated}", partial(prompt, D, p, gated)
    for B in (1, 8):
        models = [
            ("conformal_sympow,sympow_gating,softmax,heinsen", 2, 3, dict(convolution=4, output_gate=True)),
            ("sympow", 4, "never", {}),
        ]
        models += [("even_power", 6, "never", {}), ("sympow", 4, 3, dict(head_dim=16, n_head=48))]
        for attention, p, switch_over, shape in models:
            sizes = attention, p, B, switch_over
            yield f"tokens {attention} {p} {B}", partial(tokens, *sizes, **shape)


def pretend_gpu(arch, device=0):
    """Make this process compile for a GPU of this compute capability (90), which need not be there.

    device: what Triton takes for the number of the GPU; it keeps what it compiled for one number apart from the others.
    Triton's interpreter must be off, and nothing may be launched.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    answers = {"get_current_target": GPUTarget("cuda", arch, 32), "get_current_device": device}

    class Pretended:
        def __getattr__(self, name):
            return lambda *_: answers.get(name, 0)

    driver.set_active(Pretended())


@contextlib.contextmanager
def pretended(target):
    """Let the launchers choose as they do on this GPU, and Triton compile for it."""
    from sympow.kernels import configs

    (major, minor), shared = TARGETS[target]
    name = "NVIDIA H200" if target == "sm_90" else target
    saved, device = configs.gpu, configs.describe_gpu(name, (major, minor), shared)
    configs.gpu = lambda _: device
    pretend_gpu(10 * major + minor, device=list(TARGETS).index(target))
    try:
        yield
    finally:
        configs.gpu = saved


def launches(target, large=False):
    """Return [(kernel, case, compile)], one for each launch that Triton would compile anew; compile() returns what
    Triton does. large: of head dimension 128 instead of the shipped configs' sizes."""
    import torch
    from triton.runtime.jit import JITFunction

    caught, run, case = {}, JITFunction.run, None

    def catch(self, *args, grid, warmup, **options):
        kernel = f"{self.fn.__module__.removeprefix('sympow.kernels.')}.{self.__name__.removesuffix('_kernel')}"
        key = repr((kernel, [_signature(x) for x in args], sorted(options.items())))
        caught.setdefault(key, (kernel, case, lambda: run(self, *args, grid=(1,), warmup=True, **options)))

    JITFunction.run = catch
    try:
        with pretended(target):
            for case, launch in training(large):
                launch()
            with torch.inference_mode():
                for case, launch in () if large else generation():
                    launch()
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


def resources(compiled, folder):
    """Return {"registers", "spills", "shared"} of a kernel that Triton compiled, in bytes but for the registers."""
    shared = compiled.metadata.shared
    if not compiled.asm.get("cubin", True):  # see `stop_early`
        return dict(shared=shared)
    import triton

    path = Path(folder) / f"{os.getpid()}.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    number = lambda name: int(re.search(rf"{name}:(\d+)", text)[1])
    return dict(registers=number("REG"), spills=number("STACK"), shared=shared)


def stop_early():
    """Let Triton stop when shared memory is known, before the stages that take longest."""
    from triton._C.libtriton import llvm
    from triton.backends.nvidia.compiler import CUDABackend

    llvm.optimize_module = lambda *_, **__: None
    CUDABackend.make_ptx = lambda self, src, metadata, *_: metadata.update(name="kernel") or ""
    CUDABackend.make_cubin = lambda *_: b""


def _memory():
    """Return the file that remembers what these sources compile to, for this version of Triton."""
    from sympow.kernels import support

    digest = hashlib.sha256(support.source_hash().encode() + Path(__file__).read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "sympow" / "targets" / f"{digest}-{importlib.metadata.version('triton')}.json"


def _compile(job):
    """Compile one launch, in a worker; return what it takes, or {"error": why it failed}."""
    target, number = job
    *_, compile = LAUNCHES[target][number]
    try:
        with pretended(target), TemporaryDirectory() as folder:
            return resources(compile(), folder)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return dict(error=f"{type(error).__name__}: {lines[0]} .. {lines[-1]}"[:300])


LAUNCHES = {}  # target -> launches(target), which workers have from the process that they are forked from


def measure(targets, kernels=(), once=False, large=False):
    """Return [{"target", "kernel", "case", "registers", "spills", "shared" or "error"}] of all launches, compiled in as
    many processes as there are processors.

    kernels: beginnings of names, by default all; once: one launch of each kernel, each for one of the targets in turn;
    large: head dimension 128, which no shipped config has, and only its shared memory.
    """
    sys.path.insert(0, str(ROOT))
    memory = _memory()
    known = json.loads(memory.read_text()) if memory.exists() else {}
    request = json.dumps([sorted(targets), sorted(kernels), once, large])
    if request not in known:
        known[request] = _measure(targets, kernels, once, large)
        memory.parent.mkdir(parents=True, exist_ok=True)
        for old in memory.parent.glob("*.json"):
            if old != memory:
                old.unlink(missing_ok=True)
        memory.write_text(json.dumps(known))
    return known[request]


def _measure(targets, kernels, once, large):
    for target in targets:
        LAUNCHES[target] = launches(target, large)
    jobs = [(target, number) for target in targets for number in range(len(LAUNCHES[target]))]
    name = lambda job: LAUNCHES[job[0]][job[1]][0]
    if kernels:
        jobs = [job for job in jobs if name(job).startswith(tuple(kernels))]
    if once:
        first = {(job[0], name(job)): job for job in reversed(jobs)}
        names = list(dict.fromkeys(map(name, jobs)))
        having = {kernel: [target for target in targets if (target, kernel) in first] for kernel in names}
        jobs = [first[having[kernel][i % len(having[kernel])], kernel] for i, kernel in enumerate(names)]
    with TemporaryDirectory() as folder:
        if large:
            stop_early()
            os.environ["TRITON_CACHE_DIR"] = folder  # what it makes must not be found by others
        with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
            results = pool.map(_compile, jobs, chunksize=1)
    rows = []
    for (target, number), result in zip(jobs, results):
        kernel, case, _ = LAUNCHES[target][number]
        rows.append(dict(target=target, kernel=kernel, case=case, **result))
    return rows


def largest(rows):
    """Return of the rows those with the most spills, then shared memory, for each target and kernel."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["kernel"], row["target"]].append(row)
    worst = lambda row: ("error" in row, row.get("spills", 0), row.get("shared", 0))
    return [max(group, key=worst) for _, group in sorted(groups.items())]


def markdown(rows):
    """Return a table with a line for each kernel and a column for each target: registers, spills, KB of shared memory.

    A cell is the launch of this kernel with the most spills.
    """
    cells = {(row["kernel"], row["target"]): row for row in largest(rows)}
    kernels, targets = sorted({kernel for kernel, _ in cells}), list(dict.fromkeys(row["target"] for row in rows))

    def cell(row):
        if row is None or "error" in row:
            return "" if row is None else "does not compile"
        numbers = [row[number] for number in ("registers", "spills") if number in row]
        return " / ".join(map(str, [*numbers, f"{row['shared'] / KB:.0f} KB"]))

    lines = [["kernel", *targets], ["---", *["---:"] * len(targets)]]
    lines += [[f"`{kernel}`", *(cell(cells.get((kernel, target))) for target in targets)] for kernel in kernels]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--kernel", nargs="+", default=[])
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--all", action="store_true", help="print every launch, not the largest of each kernel")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/data/targets.md")
    parser.add_argument("--json", action="store_true", help="print each launch as JSON")
    args = parser.parse_args()
    rows = measure(args.target, args.kernel, args.once, args.large)
    if args.markdown:
        print(markdown(rows))
        return
    for row in rows if args.all or args.once or args.large else largest(rows):
        if args.json:
            print(json.dumps(row))
            continue
        name = f"{row['kernel']:<42} {row['case']:<34} {row['target']:<7}"
        numbers = [f"{row[number]:7}" for number in ("registers", "spills", "shared") if number in row]
        print(name, row.get("error") or "".join(numbers))


if __name__ == "__main__":
    main()
