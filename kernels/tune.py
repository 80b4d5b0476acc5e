"""Measure tile sizes on the GPU at hand and write the best into the user's own table.

    python -m sympow.kernels.tune                                        # or: make tune; some minutes
    python -m sympow.kernels.tune --head_dim 64 --p 4 --dry_run

It prints a line for each kernel, head dimension, p and gates: the tile sizes that this GPU had until now and the chosen
ones, with the milliseconds of a forward and a backward pass. Entries are written under the GPU's exact name. All other
kernels of the pass have their safe sizes (configs.SAFE). A candidate is left out if it does not fit, does not compile,
or does not give the result of the safe sizes, twice the same bits, in a short and in a long call. The others are timed
in turns; of candidates within 1% of the fastest the first listed wins, so that tuning again changes little. Inputs are
bfloat16: float32 has safe sizes alone.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch.nn.functional import logsigmoid

from . import CHUNKED_SIZES, HEAD_DIMS, POWERS, configs
from .configs import Config
from .cost import best_size

QUADRATIC = ("forward", "dq", "dkdv")
STATES = ("update_state", "query_state", "query_gradient")  # gates make no difference
HEADS = 768  # times head dimension
SHORT, LONG = (1, 1000), (3, 16384)  # sequences and tokens of a call; the last tile of the short one is not full
TOLERANCE = 8e-3  # relative difference from the result of the safe sizes
ROUNDS = 15  # times that a candidate is timed
WORKERS = 16  # the most processes to compile in: each has a CUDA context of some 500 MB

# kernel -> largest head dimension -> BM,BN,warps,stages[,maxnreg] beside the safe sizes, the plainer first
CANDIDATES = {
    "forward": {
        64: "64,32,4,3 64,64,4,2 64,64,4,3 128,64,4,2 128,64,4,3 128,64,4,4 128,64,8,2 128,64,8,3 128,128,8,3",
        128: "64,32,4,3 64,64,4,3 128,64,8,2 128,64,8,3 128,128,8,2 128,128,8,3",
    },
    "dq": {
        64: "64,32,4,3 64,64,4,2 64,64,4,3 64,64,4,3,168 128,64,4,3 64,128,4,3",
        128: "64,32,4,3 64,64,4,2 64,64,4,3 64,64,8,2 128,64,8,3",
    },
    "dkdv": {
        64: "32,64,4,2 64,64,4,2 64,64,4,3 64,64,8,2 32,64,4,3,168 64,128,8,3",
        128: "32,64,4,2 64,64,4,2 64,64,4,3 64,64,8,2 64,128,8,2",
    },
    "update_state": {
        64: "64,64,4,3 64,64,4,4 64,128,4,2 64,128,4,3 64,128,4,3,168",
        128: "64,32,8,3 64,64,8,2 64,64,4,2",
    },
    "query_state": {
        32: "128,64,4,4 128,128,4,3 128,128,4,4 128,256,4,3 128,128,4,4,168",
        64: "128,64,4,4 128,128,4,3 128,128,4,4 128,256,4,3",
        128: "128,64,8,2 128,64,8,3 128,64,4,2",
    },
    "query_gradient": {
        32: "128,64,4,2 128,64,4,3 128,64,4,5 128,128,4,3 128,128,4,4,168 128,256,4,3",
        64: "128,64,4,2 128,64,4,3 128,64,4,5 128,128,4,3 128,256,4,3",
        128: "128,64,8,1 128,64,8,2 64,64,4,3",
    },
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
        cases += [Case(kernel, torch.bfloat16, D, p, False) for kernel in STATES]
        cases += [Case(kernel, torch.bfloat16, D, p, gated, True) for kernel, gated in pairs]
    return cases


def candidates(case, device="cuda"):
    """Return the safe Config of a case and then the others."""
    text = next(text for D, text in CANDIDATES[case.kernel].items() if case.D <= D)
    sizes = [Config(*map(int, numbers.split(","))) for numbers in text.split()]
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

    H, p, gated = HEADS // case.D, case.p, case.gated
    torch.manual_seed(0)
    q, k, v = torch.randn(B, T, 3 * H, case.D, device=device, dtype=case.dtype).split(H, dim=2)  # as from a projection
    dy, log_g = torch.randn(B, T, H, case.D, device=device, dtype=case.dtype), None
    if gated:
        log_g = logsigmoid(6.9 + torch.randn(B, T, H, device=device))
    chunk = min(best_size(case.D, p, gated), max(1, T // 512) * 128) if p in (2, 4) else None
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if gated:
        leaves.append(log_g.requires_grad_())

    def passes():
        if case.chunked or case.kernel in STATES:
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


def compile_candidate(case, config):
    """Run a candidate once, in a worker, which fills Triton's cache on disk."""
    with contextlib.suppress(Exception), trial(case, config):
        make_passes(case, *SHORT)()


def fault(passes, expected):
    """Return how the results of `passes` differ from the expected ones or from run to run, or ""."""
    first, second = passes(), passes()
    error = difference(first, expected)
    if error > TOLERANCE:
        return f"differs from the safe sizes' result by {error:.1e}"
    return "" if all(map(torch.equal, first, second)) else "two runs differ"


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]


def measure(case):
    """Return {config: milliseconds} of the candidates of a case that are right, and {config: reason} of the others."""
    first, *rest = candidates(case)
    short, long = make_passes(case, *SHORT), make_passes(case, *LONG)
    with trial(case, first):
        expected = short(), long()
    times, failed = {first: []}, {}
    for config in rest:
        try:
            with trial(case, config):
                reason = fault(short, expected[0]) or fault(long, expected[1])
        except Exception as error:
            reason = first_line(error)
        if reason:
            failed[config] = reason
        else:
            times[config] = []
    for _ in range(ROUNDS):
        for config in times:
            with trial(case, config):
                times[config].append(milliseconds(long))
    return {config: statistics.median(ms) for config, ms in times.items()}, failed


def milliseconds(function):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def best(ms):
    """Return the first config within 1% of the fastest."""
    return next(config for config, t in ms.items() if t <= 1.01 * min(ms.values()))


def write_table(path, device, entries):
    """Write the entries of one device into the table; leave its other entries and the other devices' as they are."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads(path.read_text()) if path.exists() else {}
    table[device] = table.get(device, {}) | entries
    text = json.dumps(table, indent=1, sort_keys=True)
    text = re.sub(r"\[[^]]*\]", lambda match: json.dumps(json.loads(match[0])), text)  # sizes on one line
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text + "\n")
    os.replace(temporary, path)


def tune(cases, dry_run):
    """Measure the cases, print the choices and, without dry_run, write them into the table."""
    gpu = configs.gpu(torch.device("cuda"))
    jobs = [(case, config) for case in cases for config in candidates(case)]
    workers = max(1, min(WORKERS, (os.cpu_count() or 1) - 2, len(jobs)))
    print(f"{gpu.name}: compiling {len(jobs)} candidates in {workers} processes", flush=True)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_candidate, *zip(*jobs)))
    entries = {}
    for case in cases:
        name = configs.key(*case)
        try:
            ms, failed = measure(case)
        except Exception as error:  # the safe sizes themselves fail
            print(f"{name:<40} left as it was: {first_line(error)}", flush=True)
            continue
        previous, entries[name] = configs.find(*case, gpu), best(ms)
        sizes = [f"{[*config]} ({ms.get(config, float('nan')):.3f} ms)" for config in (previous, entries[name])]
        print(f"{name:<40}", " -> ".join(sizes), flush=True)
        for config, reason in failed.items():
            print(f"    without {[*config]}: {reason}", flush=True)
    if not dry_run:
        write_table(configs.OWN_TABLE, gpu.name, entries)
        print(f"{len(entries)} entries written to {configs.OWN_TABLE}")


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--head_dim", nargs="+", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--p", nargs="+", type=int, choices=POWERS, default=POWERS)
    parser.add_argument("--dry_run", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernels.tune: no CUDA GPU here to measure on; the table is as it was", file=sys.stderr)
        return 2
    cases = [case for case in all_cases() if case.D in args.head_dim and case.p in args.p]
    tune(cases, args.dry_run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
