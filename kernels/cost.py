"""Choose the form of power attention and the length of a chunk by a small cost model.

Nanoseconds for each token and query head, forward and backward, at context length T and with C tokens a chunk:

    quadratic   a + b T                   a token reads all tokens before it
    chunked     a + b C + u + w / C       a token reads its chunk and the state (u); a chunk writes and carries one (w)

The choice depends on T, D, p and gates alone, so it is the same on every rank. The numbers are fitted to measurements
on an H200 in bfloat16; other GPUs differ more in speed than in these ratios. `bench.attention --fit_cost` fits them.
"""

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


def crossing(D, p, gated=True):
    """Return the T at which both forms cost the same."""
    C = best_size(D, p, gated)
    return C + (chunked_ns(C, C, D, p, gated) - quadratic_ns(C, D, gated)) / quadratic_ns(1, D, gated, constant=False)


def best_form(T, D, p, gated=True):
    """Return "quadratic" or "chunked", the cheaper one for T tokens; (D, p) is one of kernels.CHUNKED_SIZES."""
    return "quadratic" if T <= crossing(D, p, gated) else "chunked"
