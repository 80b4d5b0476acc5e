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
allocate beyond inputs, output and gradients (of a GPU); how many times faster than the route both passes are; and how
far y is from the route's, ||y - route|| / ||route||. It is timed as bench/attention.py does.
"""

import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.attention import heinsen_attention  # noqa: E402
from sympow.attention.dispatch import heinsen_kernel_reason  # noqa: E402
from sympow.bench import attention as common  # noqa: E402
from sympow.data.files import write_json  # noqa: E402
from sympow.runs.program import Parser, at_least_1, output_file, run_program  # noqa: E402

HEADER, WIDTHS = ("T", "contender", "fwd ms", "fwd+bwd ms", "GB", "faster", "differs"), (6, 12, 9, 10, 7, 7, 8)
ROUNDS = 5


def route(q, k, log_v):
    """Return log y [B, T, H, E] by the paper's equations: every state H_S [B, T, H, D, E] exists at once."""
    q, k, log_v = (x.float() for x in (q, k, log_v))
    q, k, log_v = q.unsqueeze(-1), k.unsqueeze(-1), log_v.unsqueeze(-2)
    H_S, H_Z = torch.logcumsumexp(k + log_v, dim=1), torch.logcumsumexp(k, dim=1)  # equation 6
    return torch.logsumexp(q + H_S, dim=-2) - torch.logsumexp(q + H_Z, dim=-2)  # equations 5 and 2


CONTENDERS = {
    "logcumsumexp": route,
    "log": lambda q, k, v: heinsen_attention(q, k, v, values="log"),
    "signed": heinsen_attention,
}


def milliseconds(call, device):
    if device == "cuda":
        return common.milliseconds(call, 1)
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def measure(name, inputs, dy):
    """Return the figures of one contender, or {"failed": why}; y is its output in float32 on the CPU."""
    f, device = CONTENDERS[name], dy.device.type
    try:
        dy = dy.float() if name == "logcumsumexp" else dy
        y, _ = common.forward_backward(f, inputs, dy)  # to compile
        y = y.detach().float().cpu()
        extra = common.extra_bytes(f, inputs, dy) if device == "cuda" else None
        forward = median(milliseconds(lambda: f(*inputs), device) for _ in range(ROUNDS))
        both = median(milliseconds(lambda: common.forward_backward(f, inputs, dy), device) for _ in range(ROUNDS))
    except (torch.OutOfMemoryError, RuntimeError) as error:  # a CPU without memory raises the latter
        return dict(failed=common.one_line(error))
    return dict(forward_ms=forward, forward_backward_ms=both, extra_bytes=extra, y=y)


def compare(T, batch, heads, head_dim, device, dtype, names):
    """Yield the figures of each contender at one T."""
    torch.manual_seed(0)
    fused = torch.randn(batch, T, 3 * heads, head_dim, device=device, dtype=dtype)
    inputs = [x.detach().requires_grad_() for x in fused.split(heads, dim=2)]
    dy, reference = torch.randn(batch, T, heads, head_dim, device=device, dtype=dtype), {}
    for name in names:
        found = measure(name, inputs, dy)
        y = found.pop("y", None)
        if name == "logcumsumexp":
            reference = dict(y=y, **found) if y is not None else {}
        elif y is not None and reference:
            found["faster"] = reference["forward_backward_ms"] / found["forward_backward_ms"]
            if name == "log":
                found["differs"] = ((y - reference["y"]).norm() / reference["y"].norm()).item()
        if device == "cuda":
            torch.cuda.empty_cache()
        yield dict(T=T, contender=name, **found)


def line(cells):
    return " ".join(f"{c:<{w}}" if i == 1 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, WIDTHS))).rstrip()


def cells(row):
    if "failed" in row:
        return row["T"], row["contender"], "-", "-", "-"
    extra = "-" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e9:.3f}"
    optional = f"{row['faster']:.1f}" if "faster" in row else "-", f"{row['differs']:.1e}" if "differs" in row else "-"
    return row["T"], row["contender"], f"{row['forward_ms']:.2f}", f"{row['forward_backward_ms']:.2f}", extra, *optional


def bench(args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype or ("bfloat16" if device == "cuda" else "float32"))
    shape = args.batch, args.heads, args.head_dim
    print(f"batch {args.batch}, {args.heads} heads of {args.head_dim}, {dtype}\n\n{line(HEADER)}", flush=True)
    rows = []
    for T in args.T:
        for row in compare(T, *shape, device, dtype, args.only or CONTENDERS):
            rows.append(row)
            print(line(cells(row)), flush=True)
    print()
    for row in (r for r in rows if "failed" in r):
        print(f"T={row['T']} {row['contender']}: {row['failed']}")
    system = dict(device=device, torch=torch.__version__, dtype=str(dtype), batch=args.batch, heads=args.heads)
    system["head_dim"], system["kernels"] = args.head_dim, True
    if reason := heinsen_kernel_reason(device, dtype, dtype, args.head_dim, args.head_dim):
        system["kernels"] = False
        print(f"ours without kernels: {reason}")
    if device == "cuda":
        import triton

        system |= dict(device=torch.cuda.get_device_name(), triton=triton.__version__)
    print(", ".join(f"{name} {system[name]}" for name in ("device", "torch", "triton") if name in system))
    if args.json:
        write_json(args.json, dict(**system, rows=rows))


def main():
    parser = Parser(prog="bench/heinsen.py", description=__doc__.splitlines()[0])
    lengths = [1024, 4096, 16384, 32768, 65536]
    parser.add_argument("--T", type=at_least_1, nargs="+", default=lengths, help="context lengths")
    parser.add_argument("--batch", type=at_least_1, default=1)
    parser.add_argument("--heads", type=at_least_1, default=12)
    parser.add_argument("--head_dim", type=at_least_1, default=64)
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16, of a CPU float32"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(CONTENDERS), metavar="NAME", help=f"of {' '.join(CONTENDERS)}"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows there too")
    bench(parser.parse_args())


if __name__ == "__main__":
    run_program(main)
