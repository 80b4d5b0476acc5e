"""Measure the two forms of power attention on one GPU, and fit the numbers of the cost model, kernels/cost.py.

python -m bench.cost            # two minutes; print the model's tables, and how good its choices are
"""

from functools import partial

import numpy as np

from sympow.bench.attention import make_inputs
from sympow.bench.timing import forward_backward, require_gpu
from sympow.kernels import cost
from sympow.runs.program import Parser, run_program

TOKENS = 65536  # of a call, or one sequence that is longer


def measure(D, p, lengths, sizes):
    """Return ({T: ns} of the quadratic kernels, {(T, C): ns} of the chunked ones) for a token and head, with gates.

    lengths: the T, sizes: the pairs (T, C) to measure. A call has TOKENS tokens, in sequences of T.
    """
    from triton.testing import do_bench

    from sympow.kernels.operators import chunked_attention, quadratic_attention

    def ns(T, attention, **options):
        B = max(1, TOKENS // T)
        qkv, log_g, dy = make_inputs(B, T, D)
        passes = partial(forward_backward, partial(attention, p=p, **options), [*qkv, log_g], dy)
        return do_bench(passes, warmup=5, rep=25, return_mode="median") * 1e6 / log_g.numel()

    def chunked(*inputs, **options):
        return chunked_attention(*inputs, **options)[0]

    quadratic = {T: ns(T, quadratic_attention) for T in lengths}
    return quadratic, {(T, C): ns(T, chunked, chunk=C) for T, C in sizes}


def fit(x, y):
    """Return (a, b), at least 0, with which a + b x fits y with the least squared relative error."""
    b, a = np.polyfit(x, y, deg=1, w=1 / np.array(y))
    return max(0.0, a), max(0.0, b)


def fit_size(D, p):
    """Measure and fit the numbers of one size, and print them beside the measurements."""
    T, lengths = (32768, (512, 1024, 2048, 4096, 8192, 16384)) if p == 2 else (65536, ())
    chunks = [C for C in (cost.best_size(D, p) * f // 4 for f in (1, 2, 4, 8, 16)) if C in cost.SIZES]
    quadratic, chunked = measure(D, p, lengths, [(T, C) for C in chunks])
    if quadratic:
        cost.QUADRATIC[D] = a, b = fit(list(quadratic), list(quadratic.values()))
        print(f"QUADRATIC {D}: ({a:.2f}, {b:.5f})", flush=True)
    states = [max(0.05, t - cost.quadratic_ns(C, D)) for (_, C), t in chunked.items()]
    cost.CHUNKED[D, p] = a, b = fit([1 / C for C in chunks], states)
    print(f"CHUNKED {D}, {p}: ({a:.2f}, {b:.0f})", flush=True)
    print("ns a token and head, measured / by the model", flush=True)
    print("  quadratic", *(f"  {T}: {t:.2f} / {cost.quadratic_ns(T, D):.2f}" for T, t in quadratic.items()))
    sizes = (f"  {C}: {t:.2f} / {cost.chunked_ns(T, C, D, p):.2f}" for (T, C), t in chunked.items())
    print(f"  chunked at {T}", *sizes, f"  chosen: {cost.chunk_size(T, D, p)}", flush=True)
    # how good the choice is near the length at which it changes
    lengths = [T for T in (2**n for n in range(9, 19)) if 1 / 4 <= T / cost.crossing(D, p) <= 4]
    quadratic, chunked = measure(D, p, lengths, [(T, cost.chunk_size(T, D, p)) for T in lengths])
    for (T, C), t in chunked.items():
        times = {"quadratic": quadratic[T], "chunked": t}
        ratio = times[cost.best_form(T, D, p)] / min(times.values())
        print(f"  T={T}: quadratic {quadratic[T]:.2f}, chunks of {C} {t:.2f}: chosen / best {ratio:.2f}", flush=True)


def main():
    """Measure, fit and print the numbers of each size with gates, and how good the resulting choices are."""
    parser = Parser(__doc__, prog="python -m bench.cost")
    parser.parse_args()
    require_gpu(parser)
    for D, p in cost.CHUNKED:
        if (D, p) != (64, 4):  # there the chunked form is nowhere cheaper
            fit_size(D, p)


if __name__ == "__main__":
    run_program(main)
