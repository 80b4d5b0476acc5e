"""Print how large a model's recurrent state is: the tables of "Symmetric Power Transformers" (Manifest AI, 2024).

    python -m bench.state_size                                   # GPT-2 124M in bf16
    python -m bench.state_size --n_head=24 --head_dim=32 --p=4   # smaller heads: 995 MB instead of 14 GB

A linear transformer with the feature map phi: R^d -> R^Dphi has, per layer and key/value head, a state of the matrix
S [Dphi, E] and the normaliser z [Dphi]: Dphi * (E + 1) numbers, where E is the width of the values (here d) and

    Dphi = d^p               tensor power     (every product of p features, in every order)
    Dphi = C(d + p - 1, p)   symmetric power  (every product once)
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.attention.embedding import symmetric_power_dim  # noqa: E402
from sympow.runs.program import Parser, at_least_1, run_program  # noqa: E402

# name, n_layer, n_head, number of weights as the article quotes it; heads are 64 wide
GPT2 = [
    ("Small", 12, 12, 124e6),
    ("Medium", 24, 16, 335e6),
    ("Large", 36, 20, 774e6),
    ("XL", 48, 25, 1.6e9),
]
UNITS = ["B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"]
GPU_MEMORY = 80e9  # bytes, the article's limit for a useful state: one A100 or H100


def linear_state_size(n_layer, n_head, head_dim):
    """Return how many numbers the state of a vanilla linear transformer has (phi = identity, no normaliser)."""
    return n_layer * n_head * head_dim * head_dim


def tensor_power_state_bytes(n_layer, n_head, head_dim, p, bytes_per_number=2):
    """Return the bytes of the state with the tensor power embedding, normaliser included. n_head: key/value heads."""
    return n_layer * n_head * head_dim**p * (head_dim + 1) * bytes_per_number


def symmetric_power_state_bytes(n_layer, n_head, head_dim, p, bytes_per_number=2):
    """Return the bytes of the state with the symmetric power embedding, like those of tensor_power_state_bytes."""
    return n_layer * n_head * symmetric_power_dim(head_dim, p) * (head_dim + 1) * bytes_per_number


def format_bytes(n):
    """Format n bytes as 77 MB or 1.3 PB: in decimal units, with one decimal below ten and none above."""
    value, thousands = _rounded(n)
    return f"{value:.{1 if value < 10 and thousands else 0}f} {UNITS[thousands]}"


def _rounded(n):
    """Return (value, k) with n about value * 1000^k, the value as format_bytes prints it."""
    k = 0
    while n >= 999.5 and k < len(UNITS) - 1:
        n, k = n / 1000, k + 1
    return round(n, 1 if n < 9.95 else None), k


def _format_saving(tensor, symmetric):
    """Format 1 - symmetric/tensor in percent, with as many nines as it takes: 49%, 96%, 99.8%, 99.996%.

    As in the article, the sizes are compared as they are printed: for p = 4 and heads of 64 this makes 96%, where the
    exact sizes give 95.4%.
    """
    tensor, symmetric = (value * 1000.0**k for value, k in (_rounded(tensor), _rounded(symmetric)))
    left = 100 * symmetric / tensor
    return f"{100 - left:.{max(0, -math.floor(math.log10(left)))}f}%"


def _format_count(n):
    """Return (text, value) of a count that is truncated to 589K or 1.5M, as the article does for its ratios."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n >= size:
            step = size / 10 if n < 10 * size else size
            value = n // step * step
            return (f"{value / size:.1f}{unit}" if n < 10 * size else f"{value / size:.0f}{unit}"), value
    return str(n), n


def print_linear_table():
    """Print the states of vanilla linear transformers of GPT-2's sizes beside their weights."""
    print("Vanilla linear transformer: state = n_layer * n_head * head_dim * head_dim, heads of 64\n")
    print(f"{'':8}{'weights':>9}{'state size':>13}{'state/weights':>15}{'exact state':>14}")
    for name, n_layer, n_head, weights in GPT2:
        exact = linear_state_size(n_layer, n_head, 64)
        text, state = _format_count(exact)
        ratio = math.floor(state * 1e4 / weights + 0.5) / 1e4  # half up: 589K / 124M is 0.00475
        print(f"{name:8}{_format_count(weights)[0]:>9}{text:>13}{ratio:>15.4f}{exact:>14,}")


def print_power_table(n_layer, n_head, head_dim, powers, size):
    """Print the states with tensor power and symmetric power for one model shape."""
    print(f"Power attention: {n_layer} layers x {n_head} key/value heads of {head_dim}, {size} bytes per number")
    print("state = n_layer * n_head * Dphi * (head_dim + 1) * bytes\n")
    print(f"{'p':>3}{'tensor power':>15}{'symmetric power':>18}  {'savings':>8}{'fits 80 GB':>13}")
    for p in powers:
        tensor = tensor_power_state_bytes(n_layer, n_head, head_dim, p, size)
        symmetric = symmetric_power_state_bytes(n_layer, n_head, head_dim, p, size)
        fits = "both" if tensor <= GPU_MEMORY else "symmetric" if symmetric <= GPU_MEMORY else "neither"
        saving = _format_saving(tensor, symmetric)
        print(f"{p:>3}{format_bytes(tensor):>15}{format_bytes(symmetric):>18}  {saving:>8}{fits:>13}")


def main(argv=None):
    parser = Parser(prog="python -m bench.state_size", description=__doc__.splitlines()[0])
    parser.add_argument("--n_layer", type=at_least_1, default=12)
    parser.add_argument("--n_head", type=at_least_1, default=12)
    parser.add_argument("--n_kv_head", type=at_least_1, help="key/value heads, where they are fewer (default: n_head)")
    parser.add_argument("--head_dim", type=at_least_1, default=64)
    parser.add_argument(
        "--bytes", type=at_least_1, default=2, help="per number: 2 for bf16, 4 for fp32, which sample.py uses"
    )
    parser.add_argument("--p", default="2,4,6,8", help="the powers, separated by commas")
    args = parser.parse_args(argv)
    heads = args.n_kv_head or args.n_head
    if args.n_head % heads:
        parser.error(f"n_head={args.n_head} must be a multiple of n_kv_head={heads}")
    powers = args.p.split(",")
    if not all(p.strip().isdecimal() and int(p) > 0 and int(p) % 2 == 0 for p in powers):
        parser.error(f"p must be positive even integers such as 2,4, got {args.p}")
    print_linear_table()
    print()
    try:
        print_power_table(args.n_layer, heads, args.head_dim, [int(p) for p in powers], args.bytes)
    except OverflowError:
        parser.error("the state has more than 10^308 bytes: give a smaller shape or p")


if __name__ == "__main__":
    run_program(main)
