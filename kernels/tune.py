"""Measure tile sizes on the GPU at hand and write the best into table.json.

    python -m sympow.kernels.tune                                   # or: make tune; a few minutes
    python -m sympow.kernels.tune --dtype bfloat16 --head_dim 64 --p 4 --gated yes --dry_run

It prints a line for each kernel, dtype, head dimension, p and gates: the tile sizes that this GPU had until now and the
chosen ones, with the milliseconds of both. Entries are written under the GPU's exact name. --chunked
measures the kernels of the chunked form alone. A candidate is left out if it does not fit, does not compile, or does
not give the result of the safe sizes (configs.SAFE), twice the same bits, in a short and in a long call. Of candidates
within 1% of the fastest the first listed wins, so that tuning again changes little. In the quadratic form p=2 takes
over what p=4 chose, and p=6 what p=8 chose, unless --all or --p asks for their own. p=0 is a power for each row. dq and
dkdv are timed within the whole backward pass, the other of the two with its safe sizes, since only differences count.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import CHUNKED_SIZES, HEAD_DIMS, POWERS
from .configs import OWN_TABLE, Config, find, gpu, key, safe
from .cost import best_size, chunk_size

KERNELS = ("forward", "dq", "dkdv")  # the quadratic form's
STATE_KERNELS = ("update_state", "query_state", "query_gradient")  # the chunked form's; gates make no difference
WIDTH = 768  # heads times head dimension
SIZES = {torch.bfloat16: (16384, 49152), torch.float32: (4096, 8192)}  # T and tokens of the timed input
TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 1e-4}  # relative difference from the safe sizes' result
CHECKED_T = 1000  # tokens of the short call; the last tile is not full
TAKES_OVER = {
    0: (0,),
    4: (4, 2),
    8: (8, 6),
}  # measured p (0: one for each row) -> the powers whose entries it fills
DEVICE = "cuda"
WORKERS = 16  # the most processes to compile in: each has a CUDA context of some 500 MB

# (kernel, dtype) -> [(largest head dimension, candidates besides the safe one, the plainer first), ...]
CANDIDATES = {
    ("forward", torch.bfloat16): [
        (
            64,
            [
                (64, 32, 4, 3),
                (64, 64, 4, 2),
                (64, 64, 4, 3),
                (128, 64, 4, 2),
                (128, 64, 4, 3),
                (128, 64, 4, 4),
                (128, 64, 8, 2),
                (128, 64, 8, 3),
                (128, 128, 8, 3),
            ],
        ),
        (128, [(64, 32, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3)]),
    ],
    ("dq", torch.bfloat16): [
        (64, [(64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 3, 168), (128, 64, 4, 3), (64, 128, 4, 3)]),
        (128, [(64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (128, 64, 8, 3)]),
    ],
    ("dkdv", torch.bfloat16): [
        (64, [(32, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (32, 64, 4, 3, 168), (64, 128, 8, 3)]),
        (128, [(32, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (64, 128, 8, 2)]),
    ],
    ("update_state", torch.bfloat16): [
        (64, [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 4, 3, 168)]),
        (128, [(64, 32, 8, 3), (64, 64, 8, 2), (64, 64, 4, 2)]),
    ],
    ("query_state", torch.bfloat16): [
        (32, [(128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 4, 4), (128, 256, 4, 3), (128, 128, 4, 4, 168)]),
        (64, [(128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 4, 4), (128, 256, 4, 3)]),
        (128, [(128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2)]),
    ],
    ("query_gradient", torch.bfloat16): [
        (
            32,
            [
                (128, 64, 4, 2),
                (128, 64, 4, 3),
                (128, 64, 4, 5),
                (128, 128, 4, 3),
                (128, 128, 4, 4, 168),
                (128, 256, 4, 3),
            ],
        ),
        (64, [(128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 4, 5), (128, 128, 4, 3), (128, 256, 4, 3)]),
        (128, [(128, 64, 8, 1), (128, 64, 8, 2), (64, 64, 4, 3)]),
    ],
    # float32 does not use the matrix unit; registers are the limit, so there are no large tiles
    ("forward", torch.float32): [(128, [(32, 32, 4, 1), (32, 32, 8, 2), (64, 32, 8, 1)])],
    ("dq", torch.float32): [(128, [(32, 32, 4, 1), (32, 32, 8, 2), (64, 32, 8, 1)])],
    ("dkdv", torch.float32): [(128, [(32, 32, 4, 1), (32, 32, 8, 2), (32, 64, 8, 1)])],
}


class Case(NamedTuple):
    """One entry of the table, to be tuned."""

    kernel: str
    dtype: torch.dtype
    D: int
    p: int
    gated: bool
    chunked: bool = False  # a kernel of the quadratic form, limited to chunks


def this_gpu():
    return gpu(torch.device(DEVICE))


def safe_config(case):
    """Return the Config of a case that fits this GPU without being measured (configs.SAFE)."""
    return safe(case.kernel, case.dtype, case.D, this_gpu())


def candidates(case):
    """Return the safe Config of a case and then the others."""
    others = next(listed for largest, listed in CANDIDATES[case.kernel, case.dtype] if case.D <= largest)
    if case.kernel == "query_gradient" and case.p == 2:
        others = [c for c in others if c[1] == 64]  # BN is not used
    return list(dict.fromkeys([safe_config(case), *(Config(*c) for c in others)]))


def launcher(case, B, T):
    """Return a function of a Config that runs a kernel, or the backward pass it is part of, and returns the results."""
    from .quadratic import passes as quadratic

    kernel, dtype, D, p, gated, chunked = case
    if kernel in STATE_KERNELS:
        return state_launcher(case, B, T)
    H = WIDTH // D
    torch.manual_seed(0)
    q, k, v = torch.randn(B, T, 3 * H, D, device=DEVICE, dtype=dtype).split(H, dim=2)  # as from a fused projection
    dy = torch.randn(B, T, H, D, device=DEVICE, dtype=dtype)
    powers, log_g = None, F.logsigmoid(6.9 + torch.randn(B, T, H, device=DEVICE)) if gated else None
    if p == 0:  # whose gates are resets
        powers = 2 + 2 * torch.rand(B, T, device=DEVICE)
        log_g = torch.where(log_g < log_g.quantile(4 / T), -torch.inf, 0.0) if gated else None
    if p == 0:
        return adaptive_launcher(case, q, k, v, dy, powers, log_g)
    options = dict(p=p, chunk=best_size(D, p, gated) if chunked else None)

    def forward(config):
        y, l = quadratic.forward(q, k, v, log_g, **options, config=config)
        return y, l[..., :T]

    if kernel == "forward":
        return forward
    y, l = quadratic.forward(q, k, v, log_g, **options, config=safe_config(case._replace(kernel="forward")))

    def backward(config):
        other = safe_config(case._replace(kernel="dkdv" if kernel == "dq" else "dq"))
        configs = (config, other) if kernel == "dq" else (other, config)
        grads = quadratic.backward(dy, None, q, k, v, log_g, y, l, **options, configs=configs)
        return [x for x in grads if x is not None]

    return backward


def adaptive_launcher(case, q, k, v, dy, powers, log_g):
    """Return the same as `launcher`, for a kernel of adaptive power attention."""
    from .adaptive import passes as adaptive

    if case.kernel == "forward":
        return lambda config: [adaptive.forward(q, k, v, powers, log_g, config)[0]]
    saved = adaptive.forward(q, k, v, powers, log_g, safe_config(case._replace(kernel="forward")))
    other = safe_config(case._replace(kernel="dkdv" if case.kernel == "dq" else "dq"))
    pair = (lambda config: (config, other)) if case.kernel == "dq" else (lambda config: (other, config))
    return lambda config: adaptive.backward(dy, q, k, v, powers, log_g, *saved, configs=pair(config))


def state_launcher(case, B, T):
    """Return the same as `launcher`, for a kernel of the chunked form."""
    from .chunked import passes as chunked

    kernel, dtype, D, p, *_ = case
    torch.manual_seed(0)
    q, k, v = torch.randn(B, T, 3 * (WIDTH // D), D, device=DEVICE, dtype=dtype).split(WIDTH // D, dim=2)
    s = chunked.Sizes(q, k, p, 256 if T == CHECKED_T else min(chunk_size(T, D, p), T // 8))
    keys = chunked.prepare(s, k, v)
    if kernel == "update_state":
        return lambda config: [chunked.update_state(s, s.HKV, keys, config=config)]
    S = chunked.update_state(s, s.HKV, keys)
    states, *_ = chunked.carry_states(s, (S, keys.z), keys.unit_v, None)
    if kernel == "query_state":
        queries = chunked.prepare(s, q)
        return lambda config: [chunked.query_state(s, queries, states, 0, config=config)[0]]

    def gradient(config):
        out = torch.zeros(k.shape, dtype=dtype, device=DEVICE)
        chunked.query_gradient(s, keys, states, 0, out, k, False, config=config)
        return [out]

    return gradient


def compiles(case, config):
    """Run a candidate once, in a worker, which fills Triton's cache on disk; return why it failed, or ""."""
    try:
        launcher(case, 1, CHECKED_T)(config)
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return one_line(error)


def one_line(error):
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:120]


def difference(outputs, expected):
    """Return the largest relative difference of an output from the expected one; inf if one is not finite."""
    pairs = [(a.double(), b.double()) for a, b in zip(outputs, expected, strict=True)]
    errors = [((a - b).norm() / b.norm()).item() if a.isfinite().all() else float("inf") for a, b in pairs]
    return max(errors) if all(e == e for e in errors) else float("inf")


def measure(case, failed):
    """Return {config: milliseconds} of the candidates that work; add those that do not to failed, {config: reason}."""
    from triton.testing import do_bench

    plain = safe_config(case)
    T, tokens = SIZES[case.dtype]
    short, timed = launcher(case, 1, CHECKED_T), launcher(case, tokens // T, T)
    expected = [(run, run(plain)) for run in (short, timed)]
    ms = {}
    for config in candidates(case):
        if config in failed:
            continue
        try:
            for run, outputs in expected:
                first, again = run(config), run(config)
                error = difference(first, outputs)
                if error > TOLERANCE[case.dtype]:
                    failed[config] = f"differs from the safe sizes' result by {error:.1e}"
                elif not all(map(torch.equal, first, again)):
                    failed[config] = "two runs differ"
            if config not in failed:
                ms[config] = do_bench(lambda: timed(config), warmup=10, rep=60, return_mode="median")
        except Exception as error:
            failed[config] = one_line(error)
    return ms


def best(ms):
    """Return the first config within 1% of the fastest."""
    return next(config for config, t in ms.items() if t <= 1.01 * min(ms.values()))


def show(config):
    return ",".join(map(str, config if config.maxnreg else config[:4]))


def described(config, ms):
    """Return the sizes of a Config and its milliseconds, if it was measured."""
    return f"{show(config)} ({f'{ms[config]:.3f} ms' if config in ms else 'not measured'})"


def write_table(path, device, entries):
    """Write the entries of one device into the table; leave its other entries and the other devices' as they are."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads(path.read_text()) if path.exists() else {}
    table[device] = {**table.get(device, {}), **{name: list(config) for name, config in entries.items()}}
    devices = []
    for name in sorted(table):
        lines = [f"  {json.dumps(entry)}: {json.dumps(table[name][entry])}" for entry in sorted(table[name])]
        devices.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("{\n" + ",\n".join(devices) + "\n}\n")
    os.replace(temporary, path)


def tune(cases, take_over, dry_run):
    """Measure the cases, print the choices and, without dry_run, write them into the table; return an exit code.

    take_over: write a choice for the powers in TAKES_OVER too.
    """
    device = torch.cuda.get_device_name()
    jobs = [(case, config) for case in cases for config in candidates(case)]
    workers = max(1, min(WORKERS, (os.cpu_count() or 1) - 2, len(jobs)))
    print(f"{device}: compiling {len(jobs)} candidates in {workers} processes", flush=True)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        reasons = list(pool.map(compiles, *zip(*jobs)))
    entries = {}
    for case in cases:
        failed = {config: why for (c, config), why in zip(jobs, reasons) if c == case and why}
        name = key(*case)
        try:
            ms = measure(case, failed)
        except Exception as error:  # the safe sizes themselves fail
            print(f"{name:<32} left as it was: {one_line(error)}", flush=True)
            continue
        if ms:
            chosen, before = best(ms), find(*case, this_gpu())
            print(f"{name:<32} {described(before, ms)} -> {described(chosen, ms)}", flush=True)
            others = TAKES_OVER.get(case.p, (case.p,)) if take_over and case.kernel in KERNELS else (case.p,)
            for p in (case.p,) if case.chunked else others:
                entries[key(*case._replace(p=p))] = chosen
        for config, why in failed.items():
            print(f"    without {show(config)}: {why}", flush=True)
    if dry_run:
        print("dry run: the table is as it was")
    elif entries:
        write_table(OWN_TABLE, device, entries)
        print(f"{len(entries)} entries written to {OWN_TABLE}")
    return 0 if entries else 1


def cases_of(dtypes, dims, powers, gates, chunked=False, states_of=POWERS):
    """Return the Cases of the quadratic form for all combinations, unless `chunked`, and of the chunked form for the
    powers `states_of`."""
    cases = [
        Case(kernel, dtype, D, p, gated)
        for dtype in dtypes for D in dims for p in powers for gated in gates for kernel in KERNELS if not chunked
    ]  # fmt: skip
    return cases + [
        Case(kernel, torch.bfloat16, D, p, gated, kernel in KERNELS)
        for D, p in CHUNKED_SIZES if torch.bfloat16 in dtypes and D in dims and p in states_of
        for kernel in (*STATE_KERNELS, *KERNELS) for gated in (gates if kernel in KERNELS else (False,))
    ]  # fmt: skip


def main():
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in SIZES}
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=list(dtypes))
    parser.add_argument("--head_dim", nargs="+", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    default = "0, which is a power for each row; 4, also for 2; 8, also for 6"
    parser.add_argument("--p", nargs="+", type=int, choices=(0, *POWERS), help=f"measure these (default: {default})")
    parser.add_argument("--gated", choices=("yes", "no"), help="only with, or only without gates")
    parser.add_argument("--chunked", action="store_true", help="only the kernels of the chunked form")
    parser.add_argument("--all", action="store_true", help="measure p=2 and p=6 too")
    parser.add_argument("--dry_run", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernels.tune: no CUDA GPU here to measure on; the table is as it was", file=sys.stderr)
        return 2
    powers = args.p or ((0, *POWERS) if args.all else TAKES_OVER)
    gates = {"yes": (True,), "no": (False,), None: (False, True)}[args.gated]
    given = [dtypes[name] for name in args.dtype]
    cases = cases_of(given, args.head_dim, powers, gates, args.chunked, args.p or POWERS)
    return tune(cases, not args.p and not args.all, args.dry_run)


if __name__ == "__main__":
    sys.exit(main())
