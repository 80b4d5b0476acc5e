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
from sympow.runs.program import Parser, run_program  # noqa: E402

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


def power_state_size(n_layer, n_head, head_dim, features):
    """Return how many numbers the state has with `features` products of a key, normaliser included.

    n_head counts key/value heads. features is head_dim^p for the tensor power, symmetric_power_dim(head_dim, p) for the
    symmetric power.
    """
    return n_layer * n_head * features * (head_dim + 1)


def format_bytes(n):
    """Format n bytes as 77 MB or 1.3 PB: in decimal units, with one decimal below ten and none above."""
    value, unit = _scale(n)
    return f"{value:.{1 if value < 10 and unit else 0}f} {UNITS[unit]}"


def _scale(n):
    """Return (value, unit) with n bytes about value * 1000^unit, the value as format_bytes prints it."""
    unit = 0
    while n >= 999.5 and unit < len(UNITS) - 1:
        n, unit = n / 1000, unit + 1
    return round(n, 1 if n < 9.95 else None), unit


def _format_saving(tensor, symmetric):
    """Format 1 - symmetric/tensor in percent, with as many nines as it takes: 49%, 96%, 99.8%, 99.996%.

    As in the article, the sizes are compared as they are printed: for p = 4 and heads of 64 this makes 96%, where the
    exact sizes give 95.4%.
    """
    (tensor, tensor_unit), (symmetric, symmetric_unit) = _scale(tensor), _scale(symmetric)
    percent = 100 * symmetric / tensor * 1000.0 ** (symmetric_unit - tensor_unit)
    return f"{100 - percent:.{max(0, -math.floor(math.log10(percent)))}f}%"


def _format_count(n):
    """Return (text, value) of a count of at least 1,000, truncated to 589K or 1.5M, as in the article's ratios."""
    size, unit = next((size, unit) for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if n >= size)
    decimals = 1 if n < 10 * size else 0
    step = size / 10**decimals
    value = n // step * step
    return f"{value / size:.{decimals}f}{unit}", value


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
        tensor = size * power_state_size(n_layer, n_head, head_dim, head_dim**p)
        symmetric = size * power_state_size(n_layer, n_head, head_dim, symmetric_power_dim(head_dim, p))
        fits = "both" if tensor <= GPU_MEMORY else "symmetric" if symmetric <= GPU_MEMORY else "neither"
        saving = _format_saving(tensor, symmetric)
        print(f"{p:>3}{format_bytes(tensor):>15}{format_bytes(symmetric):>18}  {saving:>8}{fits:>13}")


def main(argv=None):
    parser = Parser(__doc__, prog="python -m bench.state_size")
    parser.add_numbers(
        n_layer=(12, "layers"),
        n_head=(12, "query heads"),
        n_kv_head=(None, "key/value heads, where they are fewer (default: n_head)"),
        head_dim=(64, "entries of a head"),
        bytes=(2, "per number: 2 for bf16, 4 for fp32, which sample.py uses"),
    )
    parser.add_argument("--p", default="2,4,6,8", help="the powers, separated by commas")
    args = parser.parse_args(argv)
    heads = args.n_kv_head or args.n_head
    if args.n_head % heads:
        parser.error(f"n_head={args.n_head} must be a multiple of n_kv_head={heads}")
    powers = args.p.split(",")
    if not all(p.strip().isdecimal() and int(p) and int(p) % 2 == 0 for p in powers):
        parser.error(f"p must be positive even integers such as 2,4, got {args.p}")
    print_linear_table()
    print()
    try:
        print_power_table(args.n_layer, heads, args.head_dim, map(int, powers), args.bytes)
    except OverflowError:
        parser.error("the state has more than 10^308 bytes: give a smaller shape or p")


if __name__ == "__main__":
    run_program(main)
