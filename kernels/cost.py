"""Choose the form of power attention and the length of a chunk by a small cost model.

Nanoseconds for each token and query head, forward and backward, at context length T and with C tokens a chunk:

    quadratic   a + b T                   a token reads all tokens before it
    chunked     a + b C + u + w / C       a token reads its chunk and the state (u); a chunk writes and carries one (w)

The choice depends on T, D, p and gates alone, so it is the same on every rank. The numbers are fitted to measurements
on an H200 in bfloat16; other GPUs differ more in speed than in these ratios. Triton is imported only to measure:

    python -m sympow.kernels.cost         # measure and fit on this GPU; print the tables below and how good choices are
"""

import argparse
import importlib.util
import sys
from functools import lru_cache

# head dimension -> (a, b), with gates, p = 2 or 4
QUADRATIC = {16: (0.96, 0.00068), 32: (1.05, 0.00084), 64: (1.12, 0.00113), 128: (2.33, 0.00190)}
UNGATED = 0.83  # the quadratic form's cost without gates, as a fraction of that with gates
# (head dimension, p) -> (u, w), for every one of kernels.CHUNKED_SIZES
CHUNKED = {
    (16, 2): (0.73, 17), (32, 2): (1.64, 134), (64, 2): (5.59, 657), (128, 2): (40.9, 7920),
    (16, 4): (7.61, 1040), (32, 4): (71.7, 30300), (64, 4): (2180, 57000),  # the last is estimated from its size
}  # fmt: skip
SIZES = [2**n for n in range(7, 15)]  # tokens of a chunk that are considered


def quadratic_ns(T, D, gated=True, constant=True):
    """Return the nanoseconds of the quadratic form for a token and head, with or without the constant a."""
    a, b = QUADRATIC[D]
    return (a * constant + b * T) * (1 if gated else UNGATED)


def chunked_ns(T, C, D, p, gated=True):
    """Return the nanoseconds of the chunked form for a token and head, in chunks of C tokens."""
    u, w = CHUNKED[D, p]
    return quadratic_ns(min(C, T), D, gated) + u + w / min(C, T)


def best_size(D, p, gated=True):
    """Return the tokens of a chunk for long contexts: the longest within 3% of the cheapest, as it has fewer states."""
    costs = [chunked_ns(C, C, D, p, gated) for C in SIZES]
    return [C for C, cost in zip(SIZES, costs) if cost <= 1.03 * min(costs)][-1]


def chunk_size(T, D, p, gated=True):
    """Return the tokens of a chunk for T tokens: a multiple of 128, at most T rounded up to one."""
    return min(best_size(D, p, gated), -(-T // 128) * 128)


@lru_cache(maxsize=64)
def packed_chunk_size(lengths, D, p, gated=True):
    """Return the tokens of a chunk for packed sequences of these lengths, a tuple.

    Each sequence begins with a chunk. The result is the longest that costs at most 3% more than the cheapest, padding
    counted, and at most `best_size`.
    """
    sizes = [C for C in SIZES if C <= best_size(D, p, gated)]
    costs = [sum(max(1, -(-n // C)) for n in lengths) * C * chunked_ns(C, C, D, p, gated) for C in sizes]
    return [C for C, cost in zip(sizes, costs) if cost <= 1.03 * min(costs)][-1]


def crossing(D, p, gated=True):
    """Return the T at which both forms cost the same."""
    C = best_size(D, p, gated)
    return C + (chunked_ns(C, C, D, p, gated) - quadratic_ns(C, D, gated)) / quadratic_ns(1, D, gated, constant=False)


def best_form(T, D, p, gated=True):
    """Return "quadratic" or "chunked", the cheaper one for T tokens; (D, p) is one of kernels.CHUNKED_SIZES."""
    return "quadratic" if T <= crossing(D, p, gated) else "chunked"


# ---- measuring


def measure(D, p, gated, lengths, sizes, tokens=65536):
    """Return ({T: ns} of the quadratic kernels, {(T, C): ns} of the chunked ones) for a token and head.

    lengths: the T, sizes: the pairs (T, C) to measure; tokens: the number of a call's tokens, in sequences of T.
    """
    import torch
    from triton.testing import do_bench

    from .operators import chunked_attention, quadratic_attention

    def ns(T, attention, **options):
        torch.manual_seed(0)
        B, H = max(1, tokens // T), 768 // D
        q, k, v = torch.randn(B, T, 3 * H, D, device="cuda", dtype=torch.bfloat16).split(H, dim=2)
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        if gated:
            log_g = torch.nn.functional.logsigmoid(6.9 + torch.randn(B, T, H, device="cuda"))
            inputs.append(log_g.requires_grad_())

        def passes():
            return torch.autograd.grad(attention(*inputs, p=p, **options), inputs, torch.ones_like(q))

        return do_bench(passes, warmup=5, rep=25, return_mode="median") * 1e6 / (B * T * H)

    def chunked(*inputs, **options):
        return chunked_attention(*inputs, **options)[0]

    quadratic = {T: ns(T, quadratic_attention) for T in lengths}
    return quadratic, {(T, C): ns(T, chunked, chunk=C) for T, C in sizes}


def fit(columns, y):
    """Return the coefficients, at least 0, of `columns` that fit y with the least squared relative error."""
    import numpy as np

    y, A = np.array(y), np.array(columns).T
    return [max(0.0, c) for c in np.linalg.lstsq(A / y[:, None], np.ones(len(y)), rcond=None)[0]]


def main():
    """Measure, fit and print the numbers of each size with gates, and how good the resulting choices are."""
    parser = argparse.ArgumentParser(prog="python -m sympow.kernels.cost", description=__doc__.splitlines()[0])
    parser.error = lambda message: refuse(f"it takes no arguments ({message})")
    parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        refuse("no CUDA GPU here to measure on")
    if importlib.util.find_spec("triton") is None:
        refuse("Triton is not installed: see `make doctor`")
    for D, p in CHUNKED:
        if (D, p) != (64, 4):  # there the chunked form is nowhere cheaper
            fit_size(D, p)


def fit_size(D, p):
    """Measure and fit the numbers of one size, and print them beside the measurements."""
    T, lengths = (32768, (512, 1024, 2048, 4096, 8192, 16384)) if p == 2 else (65536, ())
    chunks = [C for C in (best_size(D, p) * f // 4 for f in (1, 2, 4, 8, 16)) if C in SIZES]
    quadratic, chunked = measure(D, p, True, lengths, [(T, C) for C in chunks])
    if quadratic:
        QUADRATIC[D] = tuple(fit([[1] * len(quadratic), list(quadratic)], list(quadratic.values())))
        print(f"QUADRATIC {D}: ({QUADRATIC[D][0]:.2f}, {QUADRATIC[D][1]:.5f})", flush=True)
    states = [max(0.05, t - quadratic_ns(C, D)) for (_, C), t in chunked.items()]
    CHUNKED[D, p] = tuple(fit([[1] * len(states), [1 / C for C in chunks]], states))
    print(f"CHUNKED {D}, {p}: ({CHUNKED[D, p][0]:.2f}, {CHUNKED[D, p][1]:.0f})", flush=True)
    print("ns a token and head, measured / by the model", flush=True)
    print("  quadratic", *(f"  {T}: {t:.2f} / {quadratic_ns(T, D):.2f}" for T, t in quadratic.items()))
    sizes = (f"  {C}: {t:.2f} / {chunked_ns(T, C, D, p):.2f}" for (T, C), t in chunked.items())
    print(f"  chunked at {T}", *sizes, f"  chosen: {chunk_size(T, D, p)}", flush=True)
    # how good the choice is near the length at which it changes
    lengths = [T for T in (2**n for n in range(9, 19)) if 1 / 4 <= T / crossing(D, p) <= 4]
    quadratic, chunked = measure(D, p, True, lengths, [(T, chunk_size(T, D, p)) for T in lengths])
    for (T, C), t in chunked.items():
        times = {"quadratic": quadratic[T], "chunked": t}
        ratio = times[best_form(T, D, p)] / min(times.values())
        print(f"  T={T}: quadratic {quadratic[T]:.2f}, chunks of {C} {t:.2f}: chosen / best {ratio:.2f}", flush=True)


def refuse(message):
    """Print one line to stderr and exit with status 2."""
    print(f"kernels.cost: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
