"""Compare each fused kernel with what PyTorch and torch.compile do without it: which to name in dispatch.FUSED.

    python bench/fused.py                                 # a minute on a GPU
    python bench/fused.py --only cross_entropy --tokens 16384

A row is a piece of a 124M model's training step, forward and backward, on 65,536 tokens under autocast to bfloat16:

    rotary          q, k and v out of the projection c_attn, q and k rotated; the gradient to the projection
    rotary_learned  the same with learned positions, and the gradient to them
    cross_entropy   the head and its loss with their gradients, matrix products and all

Columns are the median milliseconds of ROUNDS in which the contenders take turns: PyTorch, PyTorch compiled, and the
kernel within the compiled piece and alone in eager mode; with liger-kernel installed, its function compiled. The floor
is the traffic at BANDWIDTH, each array once (for cross_entropy beside the products at FLOPS). `a step` is what the
kernel saves in a step of 12 layers beside the best of the others: switch on what is above zero.
"""

import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.attention import dispatch  # noqa: E402
from sympow.attention.rotary import rotate_heads  # noqa: E402
from sympow.bench.profile_step import BANDWIDTH, FLOPS, FUSED_NAMES  # noqa: E402
from sympow.data.files import write_json  # noqa: E402
from sympow.layers.loss import LinearCrossEntropy  # noqa: E402
from sympow.runs.program import Parser, at_least_1, output_file, run_program  # noqa: E402

WARM_UP, ROUNDS, LAYERS = 3, 15, 12
AHEAD = 10_000_000  # cycles, 5 ms, that the GPU waits while the host launches a piece: not the host is to be timed
CONTENDERS = ("pytorch", "compiled", "fused", "fused, eager", "liger")
PIECES = {
    "rotary": LAYERS,
    "rotary_learned": LAYERS,
    "cross_entropy": 1,
}  # how many a step has


def rotary(args, device, learned):
    """Return (function, inputs, gradients of the outputs, milliseconds of the floor)."""
    T, heads, D = args.tokens, args.width // 64, 64
    qkv = torch.randn(1, T, 3 * args.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    u = torch.arange(1, T + 1, dtype=torch.float64, device=device)
    u = u.expand(1, T).contiguous().requires_grad_() if learned else u

    def piece(qkv, u):
        return rotate_heads(qkv.unflatten(-1, (-1, D)), heads, heads, u, 65536.0)

    grads = [torch.randn(1, T, heads, D, device=device, dtype=torch.bfloat16) for _ in range(3)]
    # forward q and k in and out; backward the gradients of all three, and q and k again for the angles
    return piece, (qkv, u), grads, 1000 * (8 + 12 + 4 * learned) * args.width * T / BANDWIDTH


def cross_entropy(args, device):
    x = torch.randn(args.tokens, args.width, device=device, requires_grad=True)
    weight = torch.nn.Parameter(0.02 * torch.randn(args.vocab, args.width, device=device))
    targets = torch.randint(args.vocab - 47, (args.tokens,), device=device)
    piece = lambda x, weight: (LinearCrossEntropy.apply(x, weight, targets, args.vocab - 47),)
    n = args.tokens * args.vocab
    floor = 4 * n / BANDWIDTH + 6 * n * args.width / FLOPS
    return piece, (x, weight), [torch.ones((), device=device)], 1000 * floor


MAKE = {
    "rotary": partial(rotary, learned=False), "rotary_learned": partial(rotary, learned=True),
    "cross_entropy": cross_entropy,
}  # fmt: skip


def liger(name, piece, inputs, args):
    """Return the piece with liger-kernel's function in place of ours, or None if it has none or is not installed.

    Its rotation turns pairs (i, i + D / 2), which is another function at the same cost, but not a fair one to compare.
    """
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError:
        return None
    if name == "cross_entropy":
        targets = torch.randint(args.vocab - 47, (args.tokens,), device=inputs[0].device)
        wide = lambda x, weight: (x.to(torch.bfloat16), weight.to(torch.bfloat16))
        return lambda x, weight: (LigerFusedLinearCrossEntropyFunction.apply(*wide(x, weight), targets)[0],)
    return None


def milliseconds(call, device):
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda._sleep(AHEAD)
    events[0].record()
    call()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1])


def compare(name, args, device):
    """Return {contender: milliseconds, or why there are none} and the floor of one piece."""
    piece, inputs, grads, floor = MAKE[name](args, device)
    leaves, calls, found = [x for x in inputs if x.requires_grad], {}, {}
    torch.compiler.reset()
    for contender in CONTENDERS:
        dispatch.FUSED = (name.removesuffix("_learned"),) if "fused" in contender else ()
        f = liger(name, piece, inputs, args) if contender == "liger" else piece
        if f is None:
            continue
        if contender in ("compiled", "fused", "liger") and not args.no_compile:
            f = torch.compile(f, dynamic=False)

        def call(f=f, switched_on=dispatch.FUSED):
            dispatch.FUSED = switched_on  # which torch.compile looks at
            with torch.autocast(device.type, torch.bfloat16):
                outputs = f(*inputs)
            torch.autograd.grad(outputs, leaves, grads)

        try:
            for _ in range(WARM_UP):
                call()
            calls[contender] = call
        except Exception as error:  # a compiler's, or out of memory: the others go on
            found[contender] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:60]}"
    rounds = [{contender: milliseconds(call, device) for contender, call in calls.items()} for _ in range(ROUNDS)]
    return found | {contender: median(times[contender] for times in rounds) for contender in calls}, floor


def bench(args):
    """Print a row for each piece; return the rows."""
    device, rows, before = torch.device("cuda" if torch.cuda.is_available() else "cpu"), [], dispatch.FUSED
    print(f"| piece | {' | '.join(CONTENDERS)} | floor | saves a step |\n|{' --- |' * (len(CONTENDERS) + 3)}")
    for name in args.only:
        try:
            found, floor = compare(name, args, device)
        finally:
            dispatch.FUSED = before
        times = {contender: x for contender, x in found.items() if isinstance(x, float)}
        others = [times[contender] for contender in ("pytorch", "compiled") if contender in times]
        saved = PIECES[name] * (min(others) - times["fused"]) if others and "fused" in times else None
        cells = [f"{x:.3f}" if isinstance(x, float) else x for x in (found.get(c, "-") for c in CONTENDERS)]
        print(
            f"| {name} | {' | '.join(cells)} | {floor:.3f} | {'-' if saved is None else f'{saved:.2f}'} |", flush=True
        )
        rows.append(dict(piece=name, floor=floor, saves_a_step=saved, **found))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for name in FUSED_NAMES:
        if reason := dispatch.fused_kernel_reason(name, device, torch.bfloat16):
            print(f"{name}: the column `fused` is PyTorch, because {reason}")
    return rows


def main():
    parser = Parser(prog="bench/fused.py", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PIECES, metavar="NAME", default=list(PIECES))
    parser.add_argument("--tokens", type=at_least_1, default=65536)
    parser.add_argument("--width", type=at_least_1, default=768, help="of the residual stream, a multiple of 64")
    parser.add_argument("--vocab", type=at_least_1, default=50304, help="rows of the head, the last 47 without a token")
    parser.add_argument("--no_compile", action="store_true", help="leave torch.compile out of every column")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows there too")
    args = parser.parse_args()
    if args.width % 64 or args.vocab < 64:
        parser.error(f"--width must be a multiple of 64 and --vocab at least 64, got {args.width} and {args.vocab}")
    rows = bench(args)
    print(f"\n{torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}, torch {torch.__version__}")
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    run_program(main)
