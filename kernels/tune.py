"""Measure tile sizes on the GPU at hand and write the best into table.json, or as an installed package into a table of
the user's own.

    python -m sympow.kernels.tune               # or: make tune; some minutes
    python -m sympow.kernels.tune --dry_run     # prints, writes nothing

It prints a line for each kernel, head dimension, p and gates: the tile sizes until now and the chosen ones, with the
milliseconds of both passes. The pass's other kernels have their safe sizes (configs.SAFE). A candidate is left out if
it does not run, or does not give the result of the safe sizes, twice the same bits, in a short and a long call. Of
candidates within 1% of the fastest the first listed wins. Inputs are bfloat16: float32 has safe sizes alone.
"""

import argparse
import contextlib
import json
import re
import statistics
import sys
from typing import NamedTuple
from unittest import mock

import torch
from torch.nn.functional import logsigmoid

from . import configs
from .support import CHUNKED_SIZES, HEAD_DIMS, POWERS
from .configs import QUADRATIC, STATES, Config
from .cost import best_size
from .precompile import precompile

HEADS = 768  # times head dimension
SHORT, LONG = (1, 1000), (3, 16384)  # sequences and tokens of a call; the last tile of the short one is not full
TOLERANCE = 8e-3  # relative difference from the result of the safe sizes
ROUNDS = 15  # times that a candidate is timed
# (kernel, largest head dimension) -> BM,BN,warps,stages[,maxnreg] beside the safe sizes, the plainer first
CANDIDATES = {
    ("forward", 64): "64,32,4,3 64,64,4,2 64,64,4,3 128,64,4,2 128,64,4,3 128,64,4,4 128,64,8,2 128,64,8,3 128,128,8,3",
    ("forward", 128): "64,32,4,3 64,64,4,3 128,64,8,2 128,64,8,3 128,128,8,2 128,128,8,3",
    ("dq", 64): "64,32,4,3 64,64,4,2 64,64,4,3 64,64,4,3,168 128,64,4,3 64,128,4,3",
    ("dq", 128): "64,32,4,3 64,64,4,2 64,64,4,3 64,64,8,2 128,64,8,3",
    ("dkdv", 64): "32,64,4,2 64,64,4,2 64,64,4,3 64,64,8,2 32,64,4,3,168 64,128,8,3",
    ("dkdv", 128): "32,64,4,2 64,64,4,2 64,64,4,3 64,64,8,2 64,128,8,2",
    ("update_state", 64): "64,64,4,3 64,64,4,4 64,128,4,2 64,128,4,3 64,128,4,3,168",
    ("update_state", 128): "64,32,8,3 64,64,8,2 64,64,4,2",
    ("query_state", 64): "128,64,4,4 128,128,4,3 128,128,4,4 128,256,4,3 128,128,4,4,168",
    ("query_state", 128): "128,64,8,2 128,64,8,3 128,64,4,2",
    ("query_gradient", 64): "128,64,4,2 128,64,4,3 128,64,4,5 128,128,4,3 128,128,4,4,168 128,256,4,3",
    ("query_gradient", 128): "128,64,8,1 128,64,8,2 64,64,4,3",
}


class Case(NamedTuple):
    """One entry of the table, to be tuned."""

    kernel: str
    dtype: torch.dtype
    D: int
    p: int
    gated: bool
    chunked: bool = False  # a kernel of the quadratic form, limited to chunks


def all_cases():
    """Return every Case: the quadratic form for all powers and head dimensions, then the chunked form."""
    pairs = [(kernel, gated) for kernel in QUADRATIC for gated in (False, True)]
    sizes = [(D, p) for D in HEAD_DIMS for p in POWERS]
    cases = [Case(kernel, torch.bfloat16, D, p, gated) for D, p in sizes for kernel, gated in pairs]
    for D, p in CHUNKED_SIZES:
        cases += [Case(kernel, torch.bfloat16, D, p, False) for kernel in STATES]  # gates make no difference
        cases += [Case(kernel, torch.bfloat16, D, p, gated, True) for kernel, gated in pairs]
    return cases


def candidates(case, device="cuda"):
    """Return the safe Config of a case and then the others."""
    texts = CANDIDATES[case.kernel, 64 if case.D <= 64 else 128].split()
    sizes = [Config(*map(int, numbers.split(","))) for numbers in texts]
    if case.kernel == "query_gradient" and case.p == 2:
        sizes = [config for config in sizes if config.BN == 64]  # it is not used
    first = configs.safe(case.kernel, case.dtype, case.D, configs.gpu(torch.device(device)))
    return list(dict.fromkeys([first, *sizes]))


def trial(case, config, device="cuda"):
    """Return a context in which one kernel has these sizes, and the others their safe sizes."""
    entries = {configs.gpu(torch.device(device)).name: {configs.key(*case): config}}
    return mock.patch.object(configs, "_table", return_value=entries)


def make_passes(case, B, T, device="cuda"):
    """Return a function that computes the form of a case, forward and backward, and returns y and the gradients."""
    from .operators import chunked_attention, quadratic_attention

    H, p, log_g = HEADS // case.D, case.p, None
    torch.manual_seed(0)
    q, k, v = torch.randn(B, T, 3 * H, case.D, device=device, dtype=case.dtype).split(H, dim=2)  # as from a projection
    dy = torch.randn(B, T, H, case.D, device=device, dtype=case.dtype)
    if case.gated:
        log_g = logsigmoid(6.9 + torch.randn(B, T, H, device=device))
    leaves = [x.detach().requires_grad_() for x in (q, k, v, log_g) if x is not None]

    def passes():
        if case.chunked or case.kernel in STATES:
            chunk = min(best_size(case.D, p, case.gated), max(1, T // 512) * 128)
            y = chunked_attention(*leaves, p=p, chunk=chunk)[0]
        else:
            y = quadratic_attention(*leaves, p=p)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    return passes


def difference(outputs, expected):
    """Return the largest relative difference of an output from the expected one; inf if one is not finite."""
    pairs = [(a.double(), b.double()) for a, b in zip(outputs, expected, strict=True)]
    if not all(a.isfinite().all() for a, _ in pairs):
        return float("inf")
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def measure(case):
    """Return {config: milliseconds} of the candidates of a case; print why one is left out."""
    first, *rest = candidates(case)

    def launch():
        for config in (first, *rest):
            with trial(case, config):
                make_passes(case, *SHORT)()

    with contextlib.suppress(Exception):  # a candidate that does not compile says so below
        precompile(launch)
    calls = [make_passes(case, *size) for size in (SHORT, LONG)]
    with trial(case, first):
        expected = [call() for call in calls]
    times = {first: []}
    for config in rest:
        try:
            with trial(case, config):
                results, repeated = ([call() for call in calls] for _ in range(2))
            error = max(map(difference, results, expected))
            if error > TOLERANCE:
                raise ValueError(f"differs from the safe sizes' result by {error:.1e}")
            if any(not torch.equal(a, b) for pair in zip(results, repeated) for a, b in zip(*pair)):
                raise ValueError("two runs differ")
            times[config] = []
        except Exception as error:  # it may also not compile, or not fit
            print(f"    without {[*config]}: {str(error)[:120].splitlines()[0]}", flush=True)
    for _ in range(ROUNDS):
        for config in times:
            with trial(case, config):
                times[config].append(milliseconds(calls[1]))
    return {config: statistics.median(ms) for config, ms in times.items()}


def milliseconds(function):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def write_table(path, device, entries):
    """Write the entries of one device into the table; its other entries stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads(path.read_text()) if path.exists() else {}
    table[device] = table.get(device, {}) | {name: list(sizes) for name, sizes in entries.items()}
    text = json.dumps(table, indent=1, sort_keys=True)
    text = re.sub(r"\[[^]]*\]", lambda match: json.dumps(json.loads(match[0])), text)  # sizes on one line
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--dry_run", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernels.tune: no CUDA GPU here to measure on; the table is as it was", file=sys.stderr)
        return 2
    gpu, entries = configs.gpu(torch.device("cuda")), {}
    for case in all_cases():
        ms, previous = measure(case), configs.find(*case, gpu)
        best = next(config for config, t in ms.items() if t <= 1.01 * min(ms.values()))
        sizes = [f"{[*config]} ({ms.get(config, float('nan')):.3f} ms)" for config in (previous, best)]
        print(f"{configs.key(*case):<40}", " -> ".join(sizes), flush=True)
        entries[configs.key(*case)] = best
    if not args.dry_run:
        write_table(configs.OWN_TABLE, gpu.name, entries)
        print(f"{len(entries)} entries written to {configs.OWN_TABLE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
