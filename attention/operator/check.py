"""Compare the kernels with the specification, in the output and every gradient, on this machine's GPU.

for line, ok in check(SIZES): ...                              # doctor.py, 3 to 4 minutes, nearly all to compile
wrong = failure("quadratic", torch.bfloat16, 64, 4, True)      # before the first use, once for a GPU, torch and Triton
"""

import json
import math
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from .. import heinsen_naive, naive
from . import backend


class Size(NamedTuple):
    """What is compared: a form of the kernels, and the sizes of its inputs."""

    # "quadratic", "sums" (of it, not divided), "adaptive", "chunked" or
    # "states" (that, in two calls)
    form: str
    dtype: torch.dtype
    D: int  # head dimension
    p: int  # 0: adaptive
    gated: bool
    E: int | None = None  # width of the values, by default D
    n: int | None = None  # number of queries, those of the last tokens; by default there is one for every token


# each kernel, each branch of the power, each width (head dimensions between them and other widths of values are padded)
# and what float16, undivided sums and fewer queries than tokens change at least once; a size takes some 6 s to compile
SIZES = [
    Size("quadratic", torch.bfloat16, 64, 4, False), Size("quadratic", torch.bfloat16, 64, 4, True),
    Size("quadratic", torch.bfloat16, 64, 2, True, n=300), Size("quadratic", torch.bfloat16, 64, 6, False),
    Size("quadratic", torch.bfloat16, 64, 8, True), Size("quadratic", torch.bfloat16, 96, 4, True, E=80),
    Size("quadratic", torch.bfloat16, 32, 4, True), Size("quadratic", torch.bfloat16, 16, 2, False),
    Size("quadratic", torch.bfloat16, 256, 4, True), Size("quadratic", torch.float16, 256, 2, False),
    Size("quadratic", torch.float16, 64, 8, True, n=333), Size("quadratic", torch.float16, 64, 4, False),
    Size("quadratic", torch.float32, 64, 4, True), Size("quadratic", torch.float32, 32, 2, False),
    Size("sums", torch.bfloat16, 64, 4, True), Size("sums", torch.float16, 48, 2, False, E=64, n=450),
    Size("sums", torch.float32, 64, 6, True),
    Size("chunked", torch.bfloat16, 64, 2, True), Size("states", torch.bfloat16, 48, 2, True, E=64),
    Size("chunked", torch.bfloat16, 128, 2, True), Size("states", torch.bfloat16, 32, 2, False),
    Size("chunked", torch.bfloat16, 16, 2, True), Size("states", torch.bfloat16, 24, 4, True, E=20),
    Size("chunked", torch.bfloat16, 16, 4, False), Size("states", torch.float16, 64, 2, True),
    Size("chunked", torch.float32, 32, 2, True), Size("states", torch.float32, 16, 4, True),
    Size("adaptive", torch.bfloat16, 64, 0, True), Size("adaptive", torch.float16, 128, 0, False),
    Size("adaptive", torch.float32, 32, 0, True, n=300),
]  # fmt: skip
# of each form; a miscompiled loop over a state may go wrong only in long calls
LENGTH = {"quadratic": 1000, "sums": 1000, "adaptive": 1000, "chunked": 6000, "states": 6000}
TOLERANCE = {torch.bfloat16: (4e-3, 8e-3), torch.float16: (4e-3, 8e-3), torch.float32: (1e-5, 1e-4)}  # y, gradients


def check(sizes=SIZES):
    """Yield (a line with the size and its errors, True if they are within tolerance) for each of the sizes."""
    for size in map(Size._make, sizes):
        name = f"{size.form} {str(size.dtype).removeprefix('torch.')} D={size.D}"
        name += "".join(f" {part}={x}" for part, x in (("E", size.E), ("p", size.p), ("n", size.n)) if x is not None)
        yield _line(name + " gated" * size.gated, errors(size), size.dtype)


def _line(name, found, dtype):
    """Return (a line with the errors {name: error}, True if they are within tolerance)."""
    ok = all(e <= TOLERANCE[dtype][n != "y"] for n, e in found.items())  # NaN is not
    return f"{name}: " + ", ".join(f"{n} {e:.1e}" for n, e in found.items()), ok


def errors(size, T=None, device="cuda"):
    """Return {"y": error, "dq": ..., ...} of a Size: ||kernel - float64|| / max(||float64||, 1e-3 ||dy||) on random
    inputs; infinite where two runs differ. T: tokens, by default LENGTH has them."""
    form, dtype, D, p, gated, E, n = size
    T, E = T or LENGTH[form], E or D
    n = n or T
    generator = torch.Generator(device).manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device=device, generator=generator)
    qkv = make(1, T, 4, max(D, E)).to(dtype)
    q, k, v = qkv.split((2, 1, 1), dim=2)
    inputs = [q[:, T - n :, :, :D], k[..., :D], v[..., :E]]
    names = ["y", "dq", "dk", "dv", "dlog_g"]
    kernels = {"chunked": _chunked, "states": _in_two_calls, "sums": _divided_sums}.get(form, _quadratic)
    oracle = naive.quadratic
    if form == "adaptive":
        inputs.append(3 + make(1, n).clamp(-2, 2))
        names[4] = "dp"
        document = torch.arange(T, device=device) % (T // 3 + 5) == 0
        resets = torch.where(document, -math.inf, 0.0)[None, :, None] if gated else None  # they have no gradient
        kernels = lambda *x, p: backend.adaptive().adaptive_attention(*x, resets)
        oracle = lambda *x, p: naive.adaptive(*x, resets if resets is None else resets.double())
    elif gated:
        strong = form not in ("chunked", "states") or p != 4  # bfloat16 is less exact there: docs/kernels.md
        log_g = torch.nn.functional.logsigmoid((3 if strong else 1) * make(1, T, 1) + 4)
        inputs.append(log_g)
    if n < T and form != "adaptive":  # the specification wants a query for every token
        oracle = lambda q, *x, p: naive.quadratic(torch.nn.functional.pad(q, (0, 0, 0, 0, T - n, 0)), *x, p=p)[:, -n:]
    dy = make(1, n, 2, E).to(dtype)
    torch.full((2**24,), float("nan"), device=device)  # a kernel that reuses this memory must write all of it
    return _compare(names, partial(kernels, p=p), partial(oracle, p=p), inputs, dy)


def _compare(names, kernels, oracle, inputs, dy):
    """Return {name: error} of y and the gradients to `inputs`; `errors` says which error. The kernels run twice."""
    results = []
    for attention, to in ((kernels, lambda x: x), (kernels, lambda x: x), (oracle, torch.Tensor.double)):
        leaves = [to(x).detach().requires_grad_() for x in inputs]
        y = attention(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    floor = 1e-3 * dy.double().norm()
    error = lambda a, again, b: (
        ((a.double() - b).norm() / b.norm().maximum(floor)).item() if a.equal(again) else math.inf
    )
    return {n: error(*tensors) for n, *tensors in zip(names, *results)}


def launch(size):
    """Launch all kernels of `errors` on tensors of the CPU, and compute nothing else.

    For a process of its own, in which launches only compile: see kernels/precompile.py.
    """

    def once(names, kernels, oracle, inputs, dy):
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = kernels(*leaves)
        torch.autograd.grad(y, leaves, dy.to(y.dtype))

    globals().update(_compare=once)
    errors(size, device="cpu")


def _quadratic(q, k, v, log_g=None, *, p):
    return backend.operators().quadratic_attention(q, k, v, log_g, p=p)


def _divided_sums(q, k, v, log_g=None, *, p):
    num, den = backend.operators().quadratic_sums(q, k, v, log_g, p=p, scale=q.shape[3] ** -0.5)
    return num / den.transpose(1, 2).unsqueeze(3)


def _chunked(q, k, v, log_g=None, *, p):
    """Compute in one call without a state before or after it, as training does: its kernels are others."""
    return backend.operators().chunked_attention(q, k, v, log_g, None, None, p=p, chunk=512, final=False)[0]


def _in_two_calls(q, k, v, log_g=None, *, p):
    """Compute with a state between two calls, as a prompt in pieces does and ranks that share a sequence do."""
    y, S, z, at = [], None, None, q.shape[1] * 3 // 4
    for rows in (slice(0, at), slice(at, None)):
        cut = [None if x is None else x[:, rows] for x in (q, k, v, log_g)]
        part, S, z = backend.operators().chunked_attention(*cut, S, z, p=p, chunk=512, final=rows.start == 0)
        y.append(part)
    return torch.cat(y, 1)


# dtype, dtype of the values (float32 if they were logarithms), head dimension
HEINSEN_SIZES = [
    (torch.bfloat16, torch.bfloat16, 64), (torch.bfloat16, torch.float32, 64), (torch.float32, torch.float32, 32),
]  # fmt: skip


def check_heinsen(sizes=HEINSEN_SIZES):
    """Yield what `check` does for the kernels of log attention."""
    name = lambda dtype: str(dtype).removeprefix("torch.")
    for dtype, v_dtype, D in sizes:
        yield _line(f"heinsen {name(dtype)}, values {name(v_dtype)} D={D}", heinsen_errors(dtype, v_dtype, D), dtype)


def heinsen_errors(dtype, v_dtype, D, T=1500, device="cuda"):
    """Return what `errors` does for log attention, in two calls with a state between them, and resets.

    Keys grow by 60 on the way, so that references change and weights underflow.
    """
    generator = torch.Generator(device).manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device=device, generator=generator)
    q, k, v = make(1, T, 2, D).to(dtype), make(1, T, 1, D), make(1, T, 1, D).to(v_dtype)
    k = (k + torch.linspace(0, 60, T, device=device)[:, None, None]).to(dtype)
    resets = torch.rand(1, T, device=device, generator=generator) < 3 / T
    dy = make(1, T, 2, D).to(v_dtype)
    torch.full((2**24,), float("nan"), device=device)  # a kernel that reuses this memory must write all of it
    kernels = partial(_heinsen, resets=resets)
    oracle = lambda *x: heinsen_naive.recurrent(*x, resets=resets)[0]
    return _compare(("y", "dq", "dk", "dv"), kernels, oracle, (q, k, v), dy)


def _heinsen(q, k, v, resets):
    y, state, at = [], (None, None, None), q.shape[1] * 3 // 4
    for rows in (slice(0, at), slice(at, None)):
        documents = resets[:, rows].cumsum(1, dtype=torch.int32)
        cut = (x[:, rows] for x in (q, k, v))
        part, *state = backend.heinsen_operator().heinsen_attention(*cut, documents, *state, final=rows.start == 0)
        y.append(part)
    return torch.cat(y, 1)


# the fused kernels of dispatch.FUSED, and the dtypes of their inputs
FUSED_SIZES = [(name, dtype) for name in ("rotary", "cross_entropy") for dtype in (torch.bfloat16, torch.float32)]


def check_fused(sizes=FUSED_SIZES):
    """Yield what `check` does for the fused kernels."""
    for name, dtype in sizes:
        yield _line(f"{name} {str(dtype).removeprefix('torch.')}", fused_errors(name, dtype), dtype)


def check_all():
    """Yield what `check` does for every kernel and size that this machine's GPU supports."""
    form = lambda size: {"states": "chunked"}.get(size.form, size.form)
    reason = lambda size: backend.unsupported_reason(form(size), size.dtype, size.D, size.E or size.D, size.p)
    yield from check([size for size in SIZES if not reason(size)])
    log = backend.heinsen_unsupported_reason
    yield from check_heinsen([size for size in HEINSEN_SIZES if not log(size[0], size[2], size[2])])
    yield from () if backend.unusable_machine() else check_fused()


def fused_errors(name, dtype, T=1500, device="cuda"):
    """Return what `errors` does for a fused kernel and T tokens."""
    generator = torch.Generator(device).manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device=device, generator=generator)
    dy = make(2, T, 5, 64).to(dtype)
    if name == "rotary":  # with angles of each sequence, as a learned speed makes them
        names, fused = ("y", "dqkv", "dangle"), _rotate
        exact = lambda qkv, angle: torch.cat(_rotate_exactly(qkv, angle, 3, 1), 2)
        inputs = dy.roll(1, 1), make(2, T, 32)
    else:
        targets = torch.randint(2500, (T,), device=device, generator=generator)
        targets[::7] = -1
        names, fused, exact = ("y", "dlogits"), partial(_Losses.apply, targets), partial(_losses_exactly, targets)
        inputs, dy = (3 * make(T, 2560).to(dtype),), torch.ones(T, device=device)
        inputs[0][::5, 2000] = 90  # late and large
    torch.full((2**24,), float("nan"), device=device)  # a kernel that reuses this memory must write all of it
    return _compare(names, fused, exact, inputs, dy)


def _rotate(qkv, angle):
    return torch.cat(backend.fused().RotateHeads.apply(qkv, 3, 1, angle.detach().cos(), angle.detach().sin(), angle), 2)


def _rotate_exactly(qkv, angle, H, Hkv):
    factors = torch.polar(torch.ones_like(angle), angle).unsqueeze(-2)
    qk = torch.view_as_complex(qkv[:, :, : H + Hkv].unflatten(-1, (-1, 2)))
    q, k = torch.view_as_real(qk * factors).flatten(-2).split((H, Hkv), dim=2)
    return q, k, qkv[:, :, H + Hkv :]


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, targets, logits):
        ctx.gradient = logits.clone()
        losses, ctx.scales = backend.fused().cross_entropy_(ctx.gradient, targets, 2500, True)
        return losses

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.gradient * (ctx.scales * grad).unsqueeze(1)


def _losses_exactly(targets, logits):
    return torch.nn.functional.cross_entropy(logits[:, :2500], targets, reduction="none", ignore_index=-1)


def failure(form, dtype, D, p, gated, device="cuda"):
    """Return "" if the kernels of this size agree with float64 on a GPU, else one line that says why not.

    device: a torch.device or its name, "cuda" for the current GPU. Asked before kernels are used for the first time, it
    takes seconds unless they passed before (see `remember`).
    """
    size = Size(form, dtype, D, p, gated)

    def compare():
        if form in ("chunked", "states"):  # which have more kernels than the other forms
            backend.precompile(launch, (size,), torch.device(device))
        return check([size])

    return _failure(size, f"{form}, {dtype}, D={D}, p={p}, gated={gated}", compare, device)


def heinsen_failure(dtype, v_dtype, D, device="cuda"):
    """Return what `failure` does for the kernels of log attention."""
    size = dtype, v_dtype, D
    return _failure(size, f"heinsen, {dtype}, values {v_dtype}, D={D}", lambda: check_heinsen([size]), device)


def fused_failure(name, dtype, device="cuda"):
    """Return what `failure` does for the fused kernel `name`."""
    size = name, dtype
    return _failure(size, f"fused {name}, {dtype}", lambda: check_fused([size]), device)


def _failure(size, name, compare, device):
    """Return what `failure` does for a size that is remembered as `name`; compare() is `check` or alike of it alone."""
    if size in _passed or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return ""

    def find():
        ((line, ok),) = compare()
        return "" if ok else f"wrong results, {line}"

    wrong = remember(name, find, device)
    if not wrong and torch.cuda.device_count() == 1:  # otherwise the next call may be for another GPU
        _passed.add(size)
    return wrong


def kernel_failure(model, block_size, dtype, ranks=1):
    """Return "" if the kernels that this GPT would train on agree with float64 on the current GPU, or if it uses none;
    otherwise one line that says what is wrong. ranks: how many share a sequence."""
    with warnings.catch_warnings(action="ignore"):  # the caller tells
        for block in model.transformer.h:  # a plan with kernels has them checked
            block.attn.mix.training_plan(block_size, dtype, model.transformer.wte.weight.device, ranks)
    others = ("generation", "rotated")  # without the second, there are two operators
    return next((wrong for (_, name), wrong in _found.items() if wrong and not name.startswith(others)), "")


def remember(name, find, device="cuda"):
    """Return find(), "" if all is well or a line that says what is wrong, or "" if it was "" before.

    That is noted for this process, and in ~/.cache/sympow for this GPU, torch, Triton and these kernels. find is called
    in a thread of its own, where `device` ("cuda": the caller's current one) is the current GPU, and where the caller's
    autocast, gradient mode and transforms do not count; an exception in it, such as a missing compiler, is what is
    wrong.
    """
    device = torch.device(device).index
    device = torch.cuda.current_device() if device is None else device
    if (device, name) not in _found:
        with ThreadPoolExecutor(1) as thread:
            _found[device, name] = thread.submit(_find, device, name, find).result()
    return _found[device, name]


_found = {}  # (device, name): what `find` returned in this process
_passed = set()  # sizes that passed on the only GPU: `failure` is asked at every call


def _find(device, name, find):
    torch.cuda.set_device(device)
    try:
        import triton

        versions = torch.cuda.get_device_name(device), torch.__version__, triton.__version__
        key = ", ".join([*versions, backend.source_hash(), name])
        memory = backend.cache_folder() / "checked.json"
        known = _known(memory)
        if key in known:
            return ""
        if wrong := find():
            return wrong
    except torch.OutOfMemoryError:  # then nothing is known of the kernels
        return ""
    except Exception as error:  # such as a missing compiler or another Triton: PyTorch still works
        return first_line(error)
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        written = memory.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps([*known, key], indent=1))
        written.replace(memory)
    except OSError:
        pass  # it will be checked again
    return ""


def _known(memory):
    try:
        return list(json.loads(memory.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def first_line(error):
    """Return the first line of an exception's message, or its type if it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
