"""The kernels against float64, output and every gradient, on the GPU at hand.

for line, ok in check(SIZES): ...          # doctor.py, under a minute with an empty cache
failure = checked(form, dtype, D, p, gated)      # train.py, seconds, once for a GPU, torch, Triton and these sizes
"""

import hashlib
import json
import math
import os
from pathlib import Path

import torch
import triton

import kernels
from attention.power import power_attention
from kernels.operators import chunked_attention, quadratic_attention

# form, dtype, head dimension, p, gated: every kernel, branch of the power and head dimension at least once
SIZES = [
    ("quadratic", torch.bfloat16, 64, 4, False), ("quadratic", torch.bfloat16, 64, 4, True),
    ("quadratic", torch.bfloat16, 64, 2, True), ("quadratic", torch.bfloat16, 64, 6, False),
    ("quadratic", torch.bfloat16, 64, 8, True), ("quadratic", torch.bfloat16, 128, 4, True),
    ("quadratic", torch.bfloat16, 32, 4, True), ("quadratic", torch.bfloat16, 16, 2, False),
    ("quadratic", torch.float32, 64, 4, True), ("quadratic", torch.float32, 32, 2, False),
    ("chunked", torch.bfloat16, 64, 2, True), ("chunked", torch.bfloat16, 128, 2, True),
    ("chunked", torch.bfloat16, 32, 2, False), ("chunked", torch.bfloat16, 16, 2, True),
    ("chunked", torch.bfloat16, 32, 4, True), ("chunked", torch.bfloat16, 16, 4, False),
    ("chunked", torch.float32, 32, 2, True), ("chunked", torch.float32, 16, 4, True),
]  # fmt: skip
LENGTH = {"quadratic": 1000, "chunked": 6000}  # a miscompiled loop over a state may go wrong in long calls alone
TOLERANCE = {torch.bfloat16: (4e-3, 8e-3), torch.float32: (1e-5, 1e-4)}  # of y, of gradients


def check(sizes=SIZES):
    """(what was checked and the errors, whether they are within tolerance) for each of the sizes, one by one."""
    for form, dtype, D, p, gated in sizes:
        name = f"{form} {str(dtype).removeprefix('torch.')} D={D} p={p}{' gated' if gated else ''}"
        found = errors(form, dtype, D, p, gated, LENGTH[form])
        ok = all(e <= TOLERANCE[dtype][n != "y"] for n, e in found.items())  # NaN is not
        yield f"{name}: " + ", ".join(f"{n} {e:.1e}" for n, e in found.items()), ok


def errors(form, dtype, D, p, gated, T):
    """{"y": error, "dq": ..., ...}: ||kernel - float64|| / max(||float64||, 1e-3 ||dy||), on random inputs; infinite
    where two runs differ."""
    generator = torch.Generator("cuda").manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device="cuda", generator=generator)
    qkv = make(1, T, 4, D).to(dtype)
    inputs = list(qkv.split((2, 1, 1), dim=2))
    if gated:
        strong = (form, p) != ("chunked", 4)  # where bfloat16 does not follow: docs/kernels.md
        inputs.append(torch.nn.functional.logsigmoid((3 if strong else 1) * make(1, T, 1) + 4))
    dy = make(1, T, 2, D).to(dtype)
    torch.full((2**24,), float("nan"), device="cuda")  # whoever gets this memory next must write all of it
    ours = quadratic_attention if form == "quadratic" else _in_chunks
    results = []
    for attention, to in ((ours, lambda x: x), (ours, lambda x: x), (_reference, torch.Tensor.double)):
        leaves = [to(x).detach().requires_grad_() for x in inputs]
        y = attention(*leaves, p=p)
        results.append([y, *torch.autograd.grad(y, leaves, to(dy))])
    floor = 1e-3 * dy.double().norm()
    names = ["y", "dq", "dk", "dv", "dlog_g"]
    error = lambda a, again, b: (
        ((a.double() - b).norm() / b.norm().maximum(floor)).item() if a.equal(again) else math.inf
    )
    return {n: error(*tensors) for n, *tensors in zip(names, *results)}


def _in_chunks(q, k, v, log_g=None, *, p):
    return chunked_attention(q, k, v, log_g, p=p, chunk=512)[0]


def _reference(q, k, v, log_g=None, *, p):
    return power_attention(q, k, v, log_g, p=p, form="quadratic")  # of float64: plain PyTorch


def checked(form, dtype, D, p, gated):
    """ "" if these kernels are right here, else what is wrong. What was right is remembered in ~/.cache/sympow."""
    sources = b"".join(
        f.read_bytes() for f in sorted(Path(kernels.__file__).parent.glob("*")) if f.suffix in (".py", ".json")
    )
    key = [
        torch.cuda.get_device_name(),
        torch.__version__,
        triton.__version__,
        hashlib.sha256(sources).hexdigest()[:12],
    ]
    key = ", ".join([*key, form, str(dtype), f"D={D}", f"p={p}", f"gated={gated}"])
    memory = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "sympow" / "checked.json"
    try:
        known = list(json.loads(memory.read_text()))
    except (OSError, ValueError, TypeError):
        known = []
    if key in known:
        return ""
    ((line, ok),) = check([(form, dtype, D, p, gated)])
    if not ok:
        return f"wrong results, {line}"
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        written = memory.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps([*known, key], indent=1))
        written.replace(memory)
    except OSError:
        pass  # it will be checked again
    return ""
