"""Measure attention on one GPU, in milliseconds and bytes, beside cuDNN's softmax and FlexAttention.

    python -m bench.attention                            # the table, at 65,536 tokens a call
    python -m bench.attention --T 16384 --only cudnn p4_gated --json out/attention.json
    python -m bench.attention --fit_cost                 # fit the numbers of kernels/cost.py: two minutes

For each T all contenders are warmed up. They then take turns for ROUNDS rounds, so that a clock rate that drifts
changes all of them alike. A turn is CALLS forward calls between two CUDA events, then as many of forward and backward
(or as few as take a second). The figure is the median over rounds. The forward is that in training: it saves what the
backward needs.

The contenders, in bfloat16, causal, 12 heads of 64, from standard normal q, k and v:

    cudnn, flash           softmax, torch's scaled_dot_product_attention, from contiguous [B, H, T, D]
    flex_p4 [_gated]       FlexAttention, compiled, from the same; its score p log|s| + C_i - C_j makes softmax the
                           power. C, the gates' cumulative sum, is an input without a gradient
    p4, p2_gated, ...      ours, from views of one fused projection [B, T, 3 H, D]; gradients to the gates too
    chunked_p2, ...        ours, gated, in the chunked form; _d16 and _d32 have more, smaller heads, as wide in total
    window_2048            softmax in a window of 2,048 tokens, from the same views as ours
    heinsen_log, _signed   log attention of logarithms and of signed values, from the same views
    logcumsumexp           the first of them by equations 2 to 6 of "Softmax Attention with Constant Cost per Token"
                           (Heinsen, 2024), in float32, which keep a state [D, E] of every token

B/row is the peak memory of one forward and backward, beyond inputs, output and gradients, in bytes per token and query
head.
"""

from functools import partial
from statistics import median
from typing import Callable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sympow.attention import heinsen_attention
from sympow.attention.operator.window import attend_in_window
from sympow.attention.power import power_attention
from sympow.bench.timing import (
    extra_bytes,
    finish,
    forward_backward,
    make_parser,
    milliseconds,
    print_row,
    print_titles,
    require_gpu,
)
from sympow.data import describe_error
from sympow.runs.program import run_program

ROUNDS, CALLS = 7, 10
HEADS, HEAD_DIM = 12, 64
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
POWERS = {  # name -> (p, gated, form)
    "flex_p4": (4, False, "flex"),
    "flex_p4_gated": (4, True, "flex"),
    "p4": (4, False, "quadratic"),
    "p2_gated": (2, True, "quadratic"),
    "p4_gated": (4, True, "quadratic"),
    "p2": (2, False, "quadratic"),
    "p6": (6, False, "quadratic"),
    "p8": (8, False, "quadratic"),
    "chunked_p2": (2, True, "chunked"),
    "chunked_p4_d16": (4, True, "chunked"),
    "chunked_p4_d32": (4, True, "chunked"),
}
HEAD_DIMS = {"chunked_p4_d16": 16, "chunked_p4_d32": 32}  # name -> head dimension, if it is another one
WINDOWS = {"window_2048": 2048}  # name -> tokens that a token sees
LOG = ("heinsen_log", "heinsen_signed", "logcumsumexp")
NAMES = [*BACKENDS, *POWERS, *WINDOWS, *LOG]
DEFAULT = ("cudnn", "flash", "flex_p4", "flex_p4_gated", "p4", "p2_gated", "p4_gated", "chunked_p2")
LONGEST_FLEX = 16384  # tokens, unless --only names FlexAttention, which compiles for long
COLUMNS = {  # key of a row -> (title, place, format)
    "T": ("T", ">7", "d"),
    "contender": ("contender", "<14", "s"),
    "forward_ms": ("fwd ms", ">8", ".3f"),
    "forward_backward_ms": ("fwd+bwd", ">9", ".3f"),
    "forward_ratio": ("/ cudnn", ">8", ".3f"),
    "forward_backward_ratio": ("/ cudnn", ">8", ".3f"),
    "bytes_per_row": ("B/row", ">7", ".1f"),
}


# ---- contenders


class Contender(NamedTuple):
    """A function to time, its inputs and the gradient of its output."""

    function: Callable
    inputs: list
    dy: torch.Tensor

    def forward(self):
        return self.function(*self.inputs)

    def forward_backward(self):
        return forward_backward(self.function, self.inputs, self.dy)


def is_torch(name):
    """Return True for torch's own attentions, which take inputs with heads first."""
    return name in BACKENDS or name.startswith("flex")


def make_inputs(B, T, D=HEAD_DIM):
    """Return [q, k, v], views of one projection, log_g [B, T, H] and dy [B, T, H, D], on the GPU; H D is the width."""
    H = HEADS * HEAD_DIM // D
    torch.manual_seed(0)
    fused = torch.randn(B, T, 3 * H, D, device="cuda", dtype=torch.bfloat16)
    log_g = F.logsigmoid(6.9 + torch.randn(B, T, H, device="cuda")).requires_grad_()  # gates near 0.999
    qkv = [x.detach().requires_grad_() for x in fused.split(H, dim=2)]
    return qkv, log_g, torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16)


def heads_first(x):
    """Return x [B, T, H, ...] as a contiguous [B, H, T, ...] leaf."""
    return x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad)


def softmax(q, k, v, backend):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def logcumsumexp(q, k, log_v):
    """Return log y [B, T, H, E] by the paper's equations: every state H_S [B, T, H, D, E] exists at once."""
    q, k, log_v = (x.float() for x in (q, k, log_v))
    q, k, log_v = q.unsqueeze(-1), k.unsqueeze(-1), log_v.unsqueeze(-2)
    H_S, H_Z = torch.logcumsumexp(k + log_v, dim=1), torch.logcumsumexp(k, dim=1)  # equation 6
    return torch.logsumexp(q + H_S, dim=-2) - torch.logsumexp(q + H_Z, dim=-2)  # equations 5 and 2


def power_score(p, C):
    """Return the score_mod by which softmax(score) is decay s^p over its sum; C [B, H, T]: sums of log_g, or None."""

    def score_mod(s, b, h, i, j):
        score = p * torch.log(s.abs() + 1e-20)  # no log of 0, here and in the gradient
        return score if C is None else score + C[b, h, i] - C[b, h, j]

    return score_mod


def causal(b, h, i, j):
    return i >= j


def make_flex(p, C, T):
    """Return FlexAttention, compiled for T tokens, as power attention of power p; C as in `power_score`."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(causal, None, None, T, T, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, score_mod=power_score(p, C), block_mask=mask, scale=1.0)


def build(name, qkv, log_g, dy):
    """Return the Contender of this name; inputs have heads first for torch's own, and tokens first for ours."""
    if name in BACKENDS:
        return Contender(partial(softmax, backend=BACKENDS[name]), qkv, dy)
    if name == "logcumsumexp":
        return Contender(logcumsumexp, qkv, dy.float())
    if name in LOG:
        return Contender(partial(heinsen_attention, values=name.removeprefix("heinsen_")), qkv, dy)
    if name in WINDOWS:
        return Contender(partial(attend_in_window, window=WINDOWS[name]), qkv, dy)
    p, gated, form = POWERS[name]
    if form == "flex":
        C = log_g.detach().cumsum(2) if gated else None
        return Contender(make_flex(p, C, dy.shape[2]), qkv, dy)
    function = partial(power_attention, p=p, form=form)
    return Contender(function, [*qkv, log_g] if gated else qkv, dy)


# ---- the table


def measure(names, B, T):
    """Return {name: a dict of milliseconds and bytes, or {"failed": reason}}."""
    by_token = make_inputs(B, T)
    qkv, log_g, dy = by_token
    by_head = [heads_first(x) for x in qkv], heads_first(log_g), heads_first(dy)
    torch.compiler.reset()  # so that nothing compiled for an earlier T, or for any T, is used
    results, contenders, times = {}, {}, {}
    for name in names:
        inputs = by_head if is_torch(name) else by_token
        if name in HEAD_DIMS:
            inputs = make_inputs(B, T, HEAD_DIMS[name])
        try:
            contender = build(name, *inputs)
            for _ in range(3):
                contender.forward_backward()
            extra = extra_bytes(contender.function, contender.inputs, contender.dy)
            calls = max(1, min(CALLS, int(1000 / milliseconds(contender.forward_backward))))
            contenders[name], times[name] = (contender, calls), ([], [])
            results[name] = dict(bytes_per_row=extra / (B * T * HEADS))
        except Exception as error:  # out of memory, no such backend here, a compiler's error: the others go on
            results[name] = dict(failed=describe_error(error))
        torch.cuda.empty_cache()
    for _ in range(ROUNDS):
        for name, (contender, calls) in contenders.items():
            times[name][0].append(milliseconds(contender.forward, calls=calls))
            times[name][1].append(milliseconds(contender.forward_backward, calls=calls))
    for name in contenders:
        forward, both = map(median, times[name])
        results[name] |= dict(forward_ms=forward, forward_backward_ms=both)
    return results


def ratios(result, cudnn):
    """Return the ratios of a result's times to cuDNN's, as far as both are measured."""
    kinds = [kind for kind in ("forward", "forward_backward") if f"{kind}_ms" in result.keys() & cudnn.keys()]
    return {f"{kind}_ratio": result[f"{kind}_ms"] / cudnn[f"{kind}_ms"] for kind in kinds}


def bench(args):
    """Print the table, a row for each T and contender."""
    print(f"{args.tokens} tokens a call, {HEADS} heads of {HEAD_DIM}, bfloat16\n")
    print_titles(COLUMNS)
    rows = []
    for T in args.T:
        names = args.only or [name for name in DEFAULT if T <= LONGEST_FLEX or not name.startswith("flex")]
        B = max(1, args.tokens // T)
        results = measure(names, B, T)
        for name, result in results.items():
            rows.append(dict(T=T, contender=name) | result | ratios(result, results.get("cudnn", {})))
            print_row(COLUMNS, rows[-1])
        torch.cuda.empty_cache()
    finish(args, rows, tokens=args.tokens, heads=HEADS, head_dim=HEAD_DIM)


# ---- the cost model


def fit_cost(D, p):
    """Measure both forms of power attention at one size, with gates, and print the numbers of kernels/cost.py."""
    from sympow.kernels import cost

    T, lengths = (32768, [512, 1024, 2048, 4096, 8192, 16384]) if p == 2 else (65536, [])
    sizes = [C for C in (cost.best_size(D, p) * f // 4 for f in (1, 2, 4, 8, 16)) if C in cost.SIZES]

    def nanoseconds(T, **options):
        qkv, log_g, dy = make_inputs(max(1, 65536 // T), T, D)
        contender = Contender(partial(power_attention, p=p, **options), [*qkv, log_g], dy)
        times = [milliseconds(contender.forward_backward, calls=CALLS) for _ in range(ROUNDS)]
        return median(times) * 1e6 / log_g.numel()

    def fit(name, x, y):
        b, a = np.polyfit(x, y, deg=1, w=1 / np.array(y)).clip(0)  # a + b x, with the least squared relative error
        print(f"{name}: ({a:.2f}, {b:.3g})", flush=True)
        return a, b

    if lengths:
        times = [nanoseconds(T, form="quadratic") for T in lengths]
        cost.QUADRATIC[D] = fit(f"QUADRATIC {D}", lengths, times)
    times = [nanoseconds(T, form="chunked", chunk_size=C) - cost.quadratic_ns(C, D) for C in sizes]
    fit(f"CHUNKED {D}, {p}", [1 / C for C in sizes], [max(0.05, t) for t in times])


def main():
    parser = make_parser("attention", __doc__, NAMES)
    parser.add_numbers(
        T=([1024, 4096, 16384, 65536], "context lengths"),
        tokens=(65536, "in a call: the batch is tokens / T"),
    )
    parser.add_argument("--fit_cost", action="store_true", help="fit the cost model of the choice of form instead")
    args = parser.parse_args()
    require_gpu(parser)
    if args.fit_cost:
        from sympow.kernels.cost import CHUNKED as SIZES

        for D, p in SIZES:
            if (D, p) != (64, 4):  # there the chunked form is nowhere cheaper
                fit_cost(D, p)
    else:
        bench(args)


if __name__ == "__main__":
    run_program(main)
