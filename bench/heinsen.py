"""Measure Heinsen's log attention beside the route of its paper, torch.logcumsumexp: milliseconds and memory.

    python bench/heinsen.py                                        # at growing T, until the route does not fit any more
    python bench/heinsen.py --T 1024 --batch 8 --json out/heinsen.json
    python bench/heinsen.py --T 64 256 --heads 2 --head_dim 16     # small enough for a CPU

The contenders, causal, from the same standard normal q, k and v; gradients to all three:

    logcumsumexp    equations 2 to 6 of "Softmax Attention with Constant Cost per Token" (Heinsen, 2024), in float32,
                    which keep a state [D, E] of every token; v are logarithms of values, and so is y
    log             ours, the same function
    signed          ours, of signed values

A line has the median milliseconds of a forward pass, and of forward and backward; the peak of the memory that both
allocate beyond inputs, output and gradients (on a GPU); how many times faster than the route both passes are; and how
far y is from the route's, ||y - route|| / ||route||. Calls are timed as in bench/attention.py.
"""

import sys
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.attention import heinsen_attention  # noqa: E402
from sympow.attention.operator.dispatch import heinsen_kernel_reason  # noqa: E402
from sympow.bench.timing import (
    error_line,
    extra_bytes,
    finish,
    forward_backward,
    make_parser,
    milliseconds,
    print_row,
    print_titles,
)
from sympow.runs.program import run_program  # noqa: E402

ROUNDS = 5
COLUMNS = {  # key of a row -> (title, place, format)
    "T": ("T", ">6", "d"),
    "contender": ("contender", "<12", "s"),
    "forward_ms": ("fwd ms", ">9", ".2f"),
    "forward_backward_ms": ("fwd+bwd ms", ">10", ".2f"),
    "extra_gb": ("GB", ">7", ".3f"),
    "faster": ("faster", ">7", ".1f"),
    "differs": ("differs", ">8", ".1e"),
}


def route(q, k, log_v):
    """Return log y [B, T, H, E] by the paper's equations: every state H_S [B, T, H, D, E] exists at once."""
    q, k, log_v = (x.float() for x in (q, k, log_v))
    q, k, log_v = q.unsqueeze(-1), k.unsqueeze(-1), log_v.unsqueeze(-2)
    H_S, H_Z = torch.logcumsumexp(k + log_v, dim=1), torch.logcumsumexp(k, dim=1)  # equation 6
    return torch.logsumexp(q + H_S, dim=-2) - torch.logsumexp(q + H_Z, dim=-2)  # equations 5 and 2


CONTENDERS = {
    "logcumsumexp": route,
    "log": partial(heinsen_attention, values="log"),
    "signed": heinsen_attention,
}


def measure(name, inputs, dy):
    """Return the figures of one contender, or {"failed": reason}; y is its output in float32 on the CPU."""
    function, device = CONTENDERS[name], dy.device.type
    call = partial(function, *inputs)
    try:
        dy = dy.float() if name == "logcumsumexp" else dy
        y, _ = forward_backward(function, inputs, dy)  # to compile
        y = y.detach().float().cpu()
        extra = extra_bytes(function, inputs, dy) / 1e9 if device == "cuda" else None
        forward = median(milliseconds(call, device) for _ in range(ROUNDS))
        call = partial(forward_backward, function, inputs, dy)
        both = median(milliseconds(call, device) for _ in range(ROUNDS))
    except RuntimeError as error:  # out of memory, for which a CPU has no class of its own
        return dict(failed=error_line(error))
    return dict(forward_ms=forward, forward_backward_ms=both, extra_gb=extra, y=y)


def compare(T, args, device, dtype):
    """Yield a row with the figures of each contender at one T."""
    torch.manual_seed(0)
    fused = torch.randn(args.batch, T, 3 * args.heads, args.head_dim, device=device, dtype=dtype)
    inputs = [x.detach().requires_grad_() for x in fused.split(args.heads, dim=2)]
    dy, reference = torch.randn_like(inputs[0]), {}
    for name in args.only or CONTENDERS:
        result = measure(name, inputs, dy)
        y = result.pop("y", None)
        if y is not None and name == "logcumsumexp":
            reference = dict(y=y, **result)
        elif y is not None and reference:
            result["faster"] = reference["forward_backward_ms"] / result["forward_backward_ms"]
            if name == "log":
                result["differs"] = ((y - reference["y"]).norm() / reference["y"].norm()).item()
        if device == "cuda":
            torch.cuda.empty_cache()
        yield dict(T=T, contender=name, **result)


def main():
    parser = make_parser("heinsen.py", __doc__, CONTENDERS)
    parser.add_numbers(
        T=([1024, 4096, 16384, 32768, 65536], "context lengths"),
        batch=(1, "sequences of a call"),
        heads=(12, "of queries, keys and values"),
        head_dim=(64, "entries of a head"),
    )
    dtypes = ["bfloat16", "float16", "float32"]
    parser.add_argument("--dtype", choices=dtypes, help="default: bfloat16, on a CPU float32")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype or ("bfloat16" if device == "cuda" else "float32"))
    print(f"batch {args.batch}, {args.heads} heads of {args.head_dim}, {dtype}\n")
    print_titles(COLUMNS)
    rows = []
    for T in args.T:
        for row in compare(T, args, device, dtype):
            rows.append(row)
            print_row(COLUMNS, row)
    reason = heinsen_kernel_reason(device, dtype, dtype, args.head_dim, args.head_dim)
    if reason:
        print(f"\nours without kernels: {reason}")
    shape = dict(batch=args.batch, heads=args.heads, head_dim=args.head_dim)
    finish(args, rows, dtype=str(dtype), **shape, kernels=not reason)


if __name__ == "__main__":
    run_program(main)
