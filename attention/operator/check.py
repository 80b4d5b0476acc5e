"""Compare the kernels with the specification, in the output and every gradient, on this machine's GPU.

    for line, ok in check_all(): ...                                                # doctor.py, every size
    problem = compare([Size("quadratic", torch.bfloat16, 64, 4, gated=True)])       # before training or a prompt

A size that passed is noted in ~/.cache/sympow/checked.json, for this kind of GPU, torch, Triton and these kernels. A
size that is noted is only compiled.
"""

import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from .. import heinsen_naive, naive, rotary
from . import backend
from .dispatch import Size, first_line, why_not

BF16, FP32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: (4e-3, 8e-3), FP32: (1e-5, 1e-4)}  # of y, of gradients
CHUNK = 256  # tokens
SHORT = 2048  # tokens of the longest call that is compared before the first use


class Operator(NamedTuple):
    """An operator on the kernels, and its specification in float64."""

    # (size, T, randn) -> ({name: tensor} of inputs with a gradient, the rest of the arguments, the gradient of y)
    create_inputs: Callable
    kernels: Callable  # (inputs and other arguments by name) -> y
    specification: Callable  # the same
    # Numbers of tokens that reach every branch: several tiles and chunks, the last of them partial. They are multiples
    # of 16, for which Triton compiles kernels of their own, as lengths of training are. 6000 is for the doctor alone: a
    # miscompiled loop over states may go wrong only in long calls.
    lengths: tuple


# ---- power attention


def create_power_inputs(size, T, randn):
    """Create q, k, v, views of one tensor as a fused projection gives them, and log_g."""
    D, E, n = size.D, size.E or size.D, size.n or T
    q, k, v = randn(1, T, 4, max(D, E)).to(size.dtype).split((2, 1, 1), dim=2)
    inputs = dict(q=q[:, T - n :, :, :D], k=k[..., :D], v=v[..., :E])
    if size.gated:
        strong = size.form not in ("chunked", "states") or size.p != 4  # bfloat16 is less exact there
        inputs["log_g"] = F.logsigmoid((3 if strong else 1) * randn(1, T, 1) + 4)
    return inputs, dict(p=size.p), randn(1, n, 2, E).to(size.dtype)


def divided_sums(q, k, v, log_g=None, *, p):
    num, den = backend.operators().quadratic_sums(q, k, v, log_g, p=p, scale=q.shape[3] ** -0.5)
    return num / den.transpose(1, 2).unsqueeze(3)


def chunked(q, k, v, log_g=None, *, p, calls=1):
    """Compute in one call without states, as training does, which has kernels of its own, or in two."""
    return in_calls(calls, partial(backend.operators().chunked_attention, p=p, chunk=CHUNK), q, k, v, log_g)


def in_calls(calls, attend, *tensors):
    """Compute with a state between two calls, like a prompt in pieces, or ranks that share a sequence; or in one call.

    attend(*tensors, *state, final=True) -> (y, *state); there is no state in the first call.
    """
    outputs, state, T = [], (), tensors[0].shape[1]
    border = T * 3 // 4 if calls == 2 else T
    for rows in (slice(0, border), slice(border, T))[:calls]:
        pieces = [x if x is None else x[:, rows] for x in tensors]
        y, *state = attend(*pieces, *state, final=rows.stop < T)
        outputs.append(y)
    return torch.cat(outputs, 1)


def power_specification(q, k, v, log_g=None, *, p):
    earlier = k.shape[1] - q.shape[1]  # tokens without a query, which the specification lacks
    return naive.quadratic(F.pad(q, (0, 0, 0, 0, earlier, 0)), k, v, log_g, p=p)[:, earlier:]


# ---- log attention


def create_heinsen_inputs(size, T, randn):
    """Create keys that grow by 60 on the way, so that references change and weights underflow, and documents."""
    D, v_dtype = size.D, size.v_dtype or size.dtype
    q, k, v = randn(1, T, 2, D).to(size.dtype), randn(1, T, 1, D), randn(1, T, 1, D).to(v_dtype)
    k = (k + torch.linspace(0, 60, T, device=k.device)[:, None, None]).to(size.dtype)
    resets = randn(1, T).argsort() < 3
    return dict(q=q, k=k, v=v), dict(resets=resets), randn(1, T, 2, D).to(v_dtype)


def heinsen_in_two_calls(q, k, v, resets):
    def attend(q, k, v, resets, *state, final):
        documents = resets.cumsum(1, dtype=torch.int32)
        return backend.heinsen_operator().heinsen_attention(q, k, v, documents, *state, final=final)

    return in_calls(2, attend, q, k, v, resets)


# ---- rotary positions


def create_rotary_inputs(size, T, randn):
    """Create heads, a view of a fused projection's, and the rotations of two sequences."""
    x, angle = randn(2, T, 4, size.D).to(size.dtype)[:, :, :3], randn(2, T, size.D // 2)
    cos, sin = angle.cos().repeat_interleave(2, -1), torch.stack((-angle.sin(), angle.sin()), -1).flatten(-2)
    return dict(x=x), dict(cos=cos, sin=sin), randn(*x.shape).to(size.dtype)


# ---- the convolution over tokens


def create_convolution_inputs(size, T, randn):
    """Create heads, a view of a fused projection's, weights, and the tokens before, which have no gradient."""
    x, recent = (randn(2, tokens, 4, size.D).to(size.dtype)[:, :, 1:] for tokens in (T, 3))
    return dict(x=x, weight=randn(4, 3 * size.D)), dict(recent=recent), randn(2, 2 * T, 3, size.D)


def convolve(x, weight, recent):
    """Compute as training does, and as a prompt after earlier tokens, which has no gradient."""
    kernels = backend.convolution()
    y = kernels.differentiable_convolve(x, weight, None)
    return torch.cat((y, kernels.convolve(x, weight, None, recent)), 1)


def convolution_specification(x, weight, recent):
    def convolve(x, w, recent):
        inputs = torch.cat((recent.double(), x), 1).unfold(1, 4, 1)  # four tokens for each one
        return x + torch.einsum("bthdn,nhd->bthd", inputs, w.view(4, *x.shape[2:]))

    return torch.cat((convolve(x, weight, 0 * recent), convolve(x.detach(), weight.detach(), recent)), 1)


# ---- the gate on the output, in prompts


def create_prompt_inputs(size, T, randn):
    """Create heads and their gates, views of a fused projection's, and weights. Nothing has a gradient."""
    y, gate = randn(2, T, 7, size.D).to(size.dtype)[:, :, 1:].split(3, dim=2)
    return {}, dict(y=y, gate=gate, weight=randn(size.D)), randn(2, T, 3, size.D)


def prompt_specification(y, gate, weight):
    return F.rms_norm(y.double(), weight.shape, weight.double(), 1e-5) * F.silu(gate.double())


# ---- cross entropy


def create_cross_entropy_inputs(size, T, randn):
    """Create logits, some of them late in their row and large, and targets, some of them masked."""
    logits = 3 * randn(T, 2560)
    logits[::5, 2000] = 90
    targets = randn(T, 2500).argmax(1)
    targets[::7] = -1
    return dict(logits=logits.to(size.dtype)), dict(targets=targets), torch.ones(T, device=logits.device)


def cross_entropy(logits, targets):
    gradient = logits.detach().clone()
    losses, scales = backend.cross_entropy().cross_entropy_(gradient, targets, 2500, True)
    zero = logits - logits.detach()  # with this gradient
    return losses + (zero * (gradient * scales.unsqueeze(1))).sum(1)


def cross_entropy_specification(logits, targets):
    return F.cross_entropy(logits[:, :2500], targets, reduction="none", ignore_index=-1)


OPERATORS = {
    "quadratic": Operator(
        create_power_inputs, lambda **x: backend.operators().quadratic_attention(**x), power_specification, (496, 1168)
    ),
    "sums": Operator(create_power_inputs, divided_sums, power_specification, (496, 1168)),
    "chunked": Operator(create_power_inputs, chunked, power_specification, (1200, 6000)),
    "states": Operator(create_power_inputs, partial(chunked, calls=2), power_specification, (1408, 6000)),
    "heinsen": Operator(
        create_heinsen_inputs, heinsen_in_two_calls, lambda **x: heinsen_naive.recurrent(**x)[0], (1216,)
    ),
    "rotary": Operator(
        create_rotary_inputs, lambda x, cos, sin: backend.rotary().Rotation.apply(x, cos, sin), rotary.turn, (400,)
    ),
    "convolution": Operator(create_convolution_inputs, convolve, convolution_specification, (400,)),
    "prompt": Operator(
        create_prompt_inputs, lambda **x: backend.prompt().gate(**x, eps=1e-5), prompt_specification, (400,)
    ),
    "cross_entropy": Operator(create_cross_entropy_inputs, cross_entropy, cross_entropy_specification, (400,)),
}

# Each kernel, each branch of the power and each width (head dimensions between them and other widths of values are
# padded), and what undivided sums and fewer queries than tokens change, at least once.
SIZES = [
    Size("quadratic", BF16, 64, 4),
    Size("quadratic", BF16, 64, 4, gated=True),
    Size("quadratic", BF16, 64, 2, gated=True, n=300),
    Size("quadratic", BF16, 64, 6),
    Size("quadratic", BF16, 64, 8, gated=True, n=333),
    Size("quadratic", BF16, 96, 4, gated=True, E=80),
    Size("quadratic", BF16, 32, 4, gated=True),
    Size("quadratic", BF16, 16, 2),
    Size("quadratic", BF16, 256, 2),
    Size("quadratic", BF16, 256, 4, gated=True),
    Size("quadratic", FP32, 64, 4, gated=True),
    Size("quadratic", FP32, 32, 2),
    Size("sums", BF16, 64, 4, gated=True),
    Size("sums", BF16, 48, 2, E=64, n=450),
    Size("sums", FP32, 64, 6, gated=True),
    Size("chunked", BF16, 64, 2, gated=True),
    Size("chunked", BF16, 128, 2, gated=True),
    Size("chunked", BF16, 16, 2, gated=True),
    Size("chunked", BF16, 16, 4),
    Size("chunked", FP32, 32, 2, gated=True),
    Size("states", BF16, 48, 2, gated=True, E=64),
    Size("states", BF16, 32, 2),
    Size("states", BF16, 24, 4, gated=True, E=20),
    Size("states", FP32, 16, 4, gated=True),
    Size("heinsen", BF16, 64),
    Size("heinsen", BF16, 64, v_dtype=FP32),
    Size("heinsen", BF16, 128),
    Size("heinsen", FP32, 32),
    Size("rotary", BF16, 64),
    Size("rotary", FP32, 48),
    *(Size(form, *sizes) for form in ("convolution", "prompt") for sizes in ((BF16, 64), (FP32, 48))),
    *(Size("cross_entropy", dtype) for dtype in (BF16, FP32)),
]


# ---- comparison


def check_all():
    """Yield what `check` does for every kernel and size that this machine's GPU supports, compiled at once before."""
    sizes = [size for size in SIZES if supported(size)]
    backend.precompile(partial(launch, sizes))
    yield from check(sizes)


def supported(size):
    """Return True if the current GPU has kernels of this size."""
    form = "chunked" if size.form == "states" else size.form
    return not backend.why_not(form, size.dtype, size.D or 0, size.E or size.D or 0, size.p)


def check(sizes, longest=6000):
    """Yield (a line with a size and its errors, True if they are within tolerance) for each size and length.

    longest: leave longer calls out.
    """
    for size, T in list_calls(sizes, longest):
        bound, gradient_bound = TOLERANCE[size.dtype]
        measured = errors(size, T)
        ok = all(error <= (bound if name == "y" else gradient_bound) for name, error in measured.items())  # NaN is not
        yield f"{describe(size)} T={T}: " + ", ".join(f"{name} {error:.1e}" for name, error in measured.items()), ok


def list_calls(sizes, longest=SHORT):
    """Return the (size, number of tokens) of all calls that compare these sizes."""
    return [(size, T) for size in sizes for T in OPERATORS[size.form].lengths if T <= longest]


def describe(size):
    """Return the words that stand for a Size in lines and in checked.json."""
    settings = (f"{name}={value}" for name, value in zip(size._fields[2:], size[2:]) if value)
    return " ".join((size.form, str(size.dtype), *settings)).replace("torch.", "")


def errors(size, T, device="cuda"):
    """Return {"y": error, "dq": ..., ...} of a Size and T tokens: ||kernel - float64|| / max(||float64||, 1e-3 ||dy||).

    Inputs are random. An error is infinite where two runs differ.
    """
    operator = OPERATORS[size.form]
    inputs, arguments, dy = create_inputs(size, T, device)
    fill_free_memory(device)  # a kernel that reuses this memory must write all of it
    first, second = (differentiate(operator.kernels, inputs, arguments, dy) for _ in range(2))
    doubles = {name: x.double() for name, x in inputs.items()}
    measured, floor = differentiate(operator.specification, doubles, arguments, dy), 1e-3 * dy.double().norm()
    for name, exact in measured.items():
        error = (first[name].double() - exact).norm() / exact.norm().maximum(floor)
        measured[name] = error.item() if first[name].equal(second[name]) else math.inf
    return measured


def fill_free_memory(device):
    """Fill memory with NaN and free it: the next tensors, small or large, get that memory from torch's allocator.

    The allocator first gives the blocks that it holds back to the GPU, since old numbers in these could be right.
    """
    torch.cuda.empty_cache()
    sizes = [2**28, 2**25] + 64 * [2**20] + 256 * [2**17]  # bytes; blocks of up to 1 MB have a pool of their own
    blocks = [torch.full((size // 4,), math.nan, device=device) for size in sizes]
    del blocks


def create_inputs(size, T, device):
    """Return what the operator's create_inputs does, with random numbers that are always the same."""
    generator = torch.Generator(device).manual_seed(0)
    return OPERATORS[size.form].create_inputs(
        size, T, lambda *shape: torch.randn(*shape, device=device, generator=generator)
    )


def differentiate(function, inputs, arguments, dy):
    """Return y = function(**inputs, **arguments) and its gradients, as {"y": ..., "d" + the name of an input: ...}."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    y = function(**leaves, **arguments)
    product = (y * dy.to(y.dtype)).sum()  # torch.autograd.grad(y, ..., dy) would import sympy, which takes a second
    gradients = torch.autograd.grad(product, [*leaves.values()]) if leaves else ()
    return {"y": y, **{f"d{name}": gradient for name, gradient in zip(leaves, gradients)}}


def launch(sizes, device="cuda"):
    """Launch the kernels of these sizes, forward and backward, for kernels/precompile.py."""
    for size, T in list_calls(sizes):
        differentiate(OPERATORS[size.form].kernels, *create_inputs(size, T, device))


# ---- what passed


def compare(sizes, device="cuda"):
    """Return "" if the kernels of these Sizes agree with float64 on a GPU, else one line that says why not.

    device: a torch.device or its name, "cuda" for the current GPU. They are compiled, all of them at once, which takes
    seconds, and compared unless they passed before (see `remember`).
    """
    launch_once = cache(partial(launch, [*sizes]))
    for size in sizes:
        problem = remember(describe(size), partial(_find_wrong, size), device, launch_once)
        if problem:
            return problem
    return ""


def compare_plans(plans, dtype, device, config):
    """Return "" if the kernels of these Plans agree with float64 on a GPU, else one line that says what is wrong.

    With them go, in `dtype`, the losses, the rotations and, if the GPTConfig has them, convolution and output gate.
    """
    pointwise = [Size("rotary", dtype, config.head_dim), Size("cross_entropy", dtype)]
    parts = dict(convolution=config.convolution, prompt=config.output_gate)
    pointwise += [Size(form, dtype, config.head_dim) for form, part in parts.items() if part]
    sizes = [size for size in pointwise if not why_not(size.form, device, dtype)]
    sizes += [chosen.size for chosen in plans if chosen.size]
    return compare(dict.fromkeys(sizes), device)


def _find_wrong(size):
    return next((f"wrong results, {line}" for line, ok in check([size], SHORT) if not ok), "")


def remember(name, compare, device="cuda", launch=None):
    """Return compare(), "" if all is well or a line that says what is wrong, or "" if it was "" before.

    That is noted for this process, and in ~/.cache/sympow for this kind of GPU, torch, Triton and these kernels.
    launch: called before, launches all kernels that are used, so that they are compiled at once; or None. Both are
    called in a thread of its own, where `device` ("cuda": the caller's current one) is the current GPU, and where the
    caller's autocast, gradient mode and transforms do not count; an exception in it, such as a missing compiler, is
    what is wrong.
    """
    device = torch.device(device).index
    device = torch.cuda.current_device() if device is None else device
    if (device, name) not in _problems:
        with ThreadPoolExecutor(1) as thread:
            _problems[device, name] = thread.submit(_compare_once, device, name, compare, launch).result()
    return _problems[device, name]


_problems = {}  # (device, name): what `compare` returned in this process


def _compare_once(device, name, compare, launch=None):
    torch.cuda.set_device(device)
    try:
        key, memory = _key(device, name), backend.cache_folder() / "checked.json"
        if launch:
            backend.precompile(launch)
        noted = _read(memory)
        if key in noted:
            return ""
        if problem := compare():
            return problem
    except torch.OutOfMemoryError:  # then nothing is known of the kernels
        return ""
    except Exception as error:  # such as a missing compiler or another Triton: PyTorch still works
        return first_line(error)
    try:
        _write(memory, [*noted, key])
    except OSError:
        pass  # it will be checked again
    return ""


def _key(device, name):
    """Return the line under which it is noted that kernels passed: all on which their code depends."""
    import triton

    gpu = backend.table_name(torch.device("cuda", device))
    return ", ".join((gpu, torch.__version__, triton.__version__, backend.source_hash(), name))


def _read(path):
    try:
        return list(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def _write(path, keys):
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(keys, indent=1) + "\n")
    written.replace(path)
