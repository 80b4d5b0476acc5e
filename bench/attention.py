"""Measure attention on one GPU, in milliseconds, share of peak and bytes, beside softmax and FlexAttention.

    python bench/attention.py                            # the table, at 65,536 tokens a call
    python bench/attention.py --T 16384 --only cudnn p4_gated --json out/attention.json
    python bench/attention.py --cold_start --only p4_gated chunked_p2    # a process's first call, and the next length

How it is timed. For each T, all contenders are warmed up, then take turns for ROUNDS rounds, so that a clock rate that
drifts changes all of them alike. A turn is CALLS forward calls between two CUDA events, then as many of forward and
backward (or as few as take a second); the figure is the median over rounds. Before each turn the GPU waits, without
working, so that launching the calls is hidden, as it is in a model. The forward is that of training: it saves what the
backward needs.

Who takes part, in bfloat16, causal, from standard normal q, k, v:

    cudnn, flash           softmax, torch's scaled_dot_product_attention, from contiguous [B, H, T, D]
    flex_p4 [_gated]       FlexAttention, compiled, from the same; its score p log|s| + C_i - C_j makes softmax the
                           power. C, the gates' cumulative sum, is given; its gradient is not computed
    p4, p2_gated, ...      ours, from views of one fused projection [B, T, 3 H, D]; gradients to the gates too
    chunked_p2, ...        ours, gated, in the chunked form; _d16 and _d32 have more, smaller heads, as wide in total

FLOP/s count what each algorithm multiplies: T^2 D a head and product (causal: half of the square, two FLOPs each), 2
products forward; 5 backward, 7 for ours, whose two passes compute s and dP twice. Memory is the peak of one forward and
backward, beyond inputs, output and gradients, in bytes per token and query head.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.data.files import write_json  # noqa: E402
from sympow.runs.program import Parser, at_least_1, output_file, run_program  # noqa: E402

ROUNDS, CALLS = 7, 10
AHEAD = 40_000_000  # cycles before a turn, 20 ms: as long as a slow host takes to launch its calls
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
POWERS = {  # name -> (p, gated)
    "flex_p4": (4, False), "flex_p4_gated": (4, True), "p4": (4, False), "p2_gated": (2, True), "p4_gated": (4, True),
    "p2": (2, False), "p6": (6, False), "p8": (8, False),
}  # fmt: skip
CHUNKED = {"chunked_p2": (2, 64), "chunked_p4_d16": (4, 16), "chunked_p4_d32": (4, 32)}  # name -> (p, head dimension)
ONLY_WITH_ALL = ("p2", "p6", "p8")
COLD_T, NEW_T = 4096, 1001  # an odd length, so that code specialised for the earlier lengths would be compiled again


# ---- contenders


def make_inputs(B, T, H, D, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    fused = torch.randn(B, T, 3 * H, D, device=device, dtype=dtype)
    log_g = F.logsigmoid(6.9 + torch.randn(B, T, H, device=device)).requires_grad_()  # gates near 0.999
    qkv = [x.detach().requires_grad_() for x in fused.split(H, dim=2)]
    return qkv, log_g, torch.randn(B, T, H, D, device=device, dtype=dtype)


def heads_first(x):
    """Return x [B, T, H, D] as a contiguous [B, H, T, D] leaf."""
    return x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad)


def softmax(backend, q, k, v):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def power_score(p, C=None):
    """Return the score_mod by which softmax(score) is decay s^p over its sum; C [B, H, T]: sums of log_g, or None."""

    def score_mod(s, b, h, i, j):
        score = p * torch.log(s.abs() + 1e-20)  # no log of 0, here and in the gradient
        return score if C is None else score + C[b, h, i] - C[b, h, j]

    return score_mod


def causal(b, h, i, j):
    return i >= j


def build(name, shared, dy):
    """Return (function, its inputs, dy, matrix products in its backward); shared: q, k, v and log_g of all its kind."""
    *qkv, log_g = shared
    if name in BACKENDS:
        return lambda *qkv: softmax(BACKENDS[name], *qkv), qkv, dy, 5
    if name in CHUNKED:
        from sympow.attention.power import power_attention

        return lambda *x: power_attention(*x, p=CHUNKED[name][0], form="chunked"), shared, dy, None
    p, gated = POWERS[name]
    if name.startswith("flex"):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        T = dy.shape[2]
        mask = create_block_mask(causal, None, None, T, T, device=dy.device)
        score_mod = power_score(p, log_g.detach().cumsum(2) if gated else None)
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda *qkv: compiled(*qkv, score_mod=score_mod, block_mask=mask, scale=1.0), qkv, dy, 5

    from sympow.kernels import unsupported_reason
    from sympow.kernels.operators import quadratic_attention

    D = dy.shape[-1]
    if reason := unsupported_reason("quadratic", dy.dtype, D, D, p):
        raise ValueError(reason)
    return lambda *x: quadratic_attention(*x, p=p), [*qkv, log_g] if gated else qkv, dy, 7


# ---- measuring


def forward_backward(f, inputs, dy):
    y = f(*inputs)
    return y, torch.autograd.grad(y, inputs, dy)


def extra_bytes(f, inputs, dy):
    """Return the peak bytes of one forward and backward, without inputs, dy, output and gradients."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]  # before the allocator rounds sizes up
    torch.cuda.reset_peak_memory_stats()
    y, grads = forward_backward(f, inputs, dy)
    torch.cuda.synchronize()
    results = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (y, *grads)
    }  # counts a storage once
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - sum(results.values())


def milliseconds(call, calls=CALLS):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def one_line(error):
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def measure(names, B, T, H, D):
    """Return {name: {"forward_ms", "forward_backward_ms", "bytes_per_row", "products"} or {"failed": why}}."""
    (q, k, v), log_g, dy = make_inputs(B, T, H, D)
    by_token = [q, k, v, log_g]
    by_head = [*map(heads_first, (q, k, v)), log_g.detach().transpose(1, 2).contiguous()]
    dy_by_head = heads_first(dy)
    torch.compiler.reset()  # so that nothing compiled for an earlier T, or for any T, is used
    results, built, times = {}, {}, {}
    for name in names:
        shared = (by_head, dy_by_head) if name in BACKENDS or name.startswith("flex") else (by_token, dy)
        if name in CHUNKED and D != CHUNKED[name][1]:
            qkv, gates, dy_chunked = make_inputs(B, T, H * D // CHUNKED[name][1], CHUNKED[name][1])
            shared = [*qkv, gates], dy_chunked
        try:
            *call, products = build(name, *shared)
            for _ in range(3):
                forward_backward(*call)
            results[name] = dict(bytes_per_row=extra_bytes(*call) / (B * T * H), products=products)
            calls = max(1, min(CALLS, int(1000 / milliseconds(lambda: forward_backward(*call), 1))))
            built[name], times[name] = (*call, calls), ([], [])
        except Exception as error:  # out of memory, no such backend here, a compiler's error: the others go on
            results[name] = dict(failed=one_line(error))
        torch.cuda.empty_cache()
    for _ in range(ROUNDS):
        for name, (f, inputs, dy_, calls) in list(built.items()):
            try:
                times[name][0].append(milliseconds(lambda: f(*inputs), calls))
                times[name][1].append(milliseconds(lambda: forward_backward(f, inputs, dy_), calls))
            except Exception as error:
                results[name] = dict(failed=one_line(error))
                del built[name]
    for name in built:
        forward, both = map(median, times[name])
        results[name] |= dict(forward_ms=forward, forward_backward_ms=both)
    return results


def flops(B, T, H, D, products):
    return B * H * products * T * T * D  # each product: T^2 / 2 pairs, D multiplications and D additions each


def matrix_product(n=8192):
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.matmul(a, b, out=out), 2 * n**3


# ---- the table

HEADER = ("T", "contender", "fwd ms", "fwd+bwd", "/ cudnn", "/ cudnn", "TFLOP/s", "share", "TFLOP/s", "share", "B/row")
WIDTHS = (7, 14, 8, 9, 8, 8, 8, 6, 8, 6, 7)


def line(cells):
    return " ".join(f"{c:<{w}}" if i == 1 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, WIDTHS))).rstrip()


def row(T, name, result, cudnn, shape, ceiling):
    """Return (figures for the JSON file, cells of the table) of one contender at one T."""
    figures, ms, ratios, rates = dict(T=T, contender=name, **result), [], [], []
    if "failed" in result:
        return figures, [T, name] + ["-"] * (len(WIDTHS) - 2)
    backward = figures.pop("products")  # None for the chunked form, which does not compute all T^2 pairs
    for what, products in (("forward", 2), ("forward_backward", backward and 2 + backward)):
        t = result[f"{what}_ms"]
        ratio = t / cudnn[f"{what}_ms"] if f"{what}_ms" in cudnn else None
        figures[f"{what}_ratio"] = ratio
        ms.append(f"{t:.3f}")
        ratios.append("-" if ratio is None else f"{ratio:.3f}")
        if backward is None:
            rates += ["-", "-"]
            continue
        tflops = flops(*shape, products) / t * 1e-9
        figures |= {f"{what}_tflops": tflops, f"{what}_share": tflops / ceiling}
        rates += [f"{tflops:.0f}", f"{tflops / ceiling:.0%}"]
    return figures, [T, name, *ms, *ratios, *rates, f"{result['bytes_per_row']:.1f}"]


def bench(args):
    import triton

    matmul, matmul_flops = matrix_product()
    for _ in range(3):
        milliseconds(matmul)
    ceiling = matmul_flops / median(milliseconds(matmul) for _ in range(ROUNDS)) * 1e-9
    print(f"{args.tokens} tokens a call, {args.heads} heads of {args.head_dim}, bfloat16\n\n{line(HEADER)}", flush=True)
    rows = []
    for T in args.T:
        names = args.only or [*BACKENDS, *(n for n in POWERS if args.all or n not in ONLY_WITH_ALL), "chunked_p2"]
        names = [n for n in names if not n.startswith("flex") or (not args.no_flex and (args.all or T <= 16384))]
        shape = (max(1, args.tokens // T), T, args.heads, args.head_dim)
        results = measure(names, *shape)
        for name in names:
            figures, cells = row(T, name, results[name], results.get("cudnn", {}), shape, ceiling)
            rows.append(figures)
            print(line(cells), flush=True)
        torch.cuda.empty_cache()
    print()
    for failed in (r for r in rows if "failed" in r):
        print(f"T={failed['T']} {failed['contender']}: {failed['failed']}")
    system = dict(
        gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__,
        cudnn=torch.backends.cudnn.version(), ceiling_tflops=ceiling, tokens=args.tokens, heads=args.heads,
        head_dim=args.head_dim,
    )  # fmt: skip
    print(f"{system['gpu']}, torch {system['torch']}, triton {system['triton']}, cuDNN {system['cudnn']}")
    print(f"ceiling: {ceiling:.0f} TFLOP/s, a bfloat16 matrix product of 8192 x 8192 x 8192")
    if args.json:
        write_json(args.json, dict(**system, rows=rows))


# ---- the first call


def first_calls(name, lengths):
    """Print [seconds of the first forward and backward, new entries in Triton's cache] for each T of a new process."""
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    D = CHUNKED[name][1] if name in CHUNKED else 64
    for T in lengths:
        qkv, log_g, dy = make_inputs(16, T, 768 // D, D)
        *call, _ = build(name, [*qkv, log_g], dy)
        torch.cuda.synchronize()
        before = len(list(cache.glob("*")))
        start = time.perf_counter()
        forward_backward(*call)
        torch.cuda.synchronize()
        print(json.dumps([time.perf_counter() - start, len(list(cache.glob("*"))) - before]), flush=True)


def cold_start(name):
    def run(*lengths):
        command = [sys.executable, __file__, "--only", name, "--first_calls", *map(str, lengths)]
        done = subprocess.run(command, env={**os.environ, "TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.returncode)  # its own error is on stderr
        return [json.loads(text) for text in done.stdout.splitlines() if text.startswith("[")]

    with tempfile.TemporaryDirectory() as cache:
        [(cold, compiled)] = run(COLD_T)
        (warm, _), (new, recompiled) = run(COLD_T, NEW_T)
    print(f"first forward and backward of a process, {name}, 16 sequences, imports not counted:")
    print(f"  empty Triton cache, T={COLD_T}    {cold:8.3f} s   {compiled} new entries in the cache")
    print(f"  filled cache,       T={COLD_T}    {warm:8.3f} s")
    print(f"  then                T={NEW_T}    {new:8.3f} s   {recompiled} new entries in the cache", flush=True)


def main():
    parser = Parser(prog="bench/attention.py", description=__doc__.splitlines()[0])
    parser.add_argument("--T", type=at_least_1, nargs="+", default=[1024, 4096, 16384, 65536], help="context lengths")
    parser.add_argument("--heads", type=at_least_1, default=12)
    parser.add_argument("--head_dim", type=at_least_1, default=64)
    parser.add_argument("--tokens", type=at_least_1, default=65536, help="in a call: the batch is tokens / T")
    parser.add_argument("--all", action="store_true", help="also p = 2, 6, 8, and FlexAttention at any T")
    names = [*BACKENDS, *POWERS, *CHUNKED]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"these contenders: {' '.join(names)}")
    parser.add_argument("--no_flex", action="store_true", help="leave FlexAttention out (it compiles for long)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows there too")
    parser.add_argument("--cold_start", action="store_true", help="time their first calls instead (p4_gated)")
    parser.add_argument("--first_calls", type=at_least_1, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cold_start and (of_torch := [n for n in args.only or () if n in BACKENDS or n.startswith("flex")]):
        parser.error(f"--cold_start times our kernels, not {' '.join(of_torch)}")
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here, and there is nothing else to measure")
    if args.first_calls:
        first_calls(args.only[0], args.first_calls)
    elif args.cold_start:
        for name in args.only or ["p4_gated"]:
            cold_start(name)
    else:
        bench(args)


if __name__ == "__main__":
    run_program(main)
