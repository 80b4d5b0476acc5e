"""Print how large a model's recurrent state is, as in "Symmetric Power Transformers" (Manifest AI, 2024).

    python -m bench.state_size                                   # GPT-2 124M in bf16
    python -m bench.state_size --n_head=24 --head_dim=32 --p=4   # smaller heads: 995 MB instead of 14 GB

With the feature map phi: R^d -> R^Dphi each layer and key/value head keeps the matrix S [Dphi, E] and the normaliser
z [Dphi], which are Dphi * (E + 1) numbers. E is the width of the values (here d), and

    Dphi = d^p               tensor power     (every product of p features, in every order)
    Dphi = C(d + p - 1, p)   symmetric power  (every product once)
"""

from sympow.attention.embedding import symmetric_power_dim
from sympow.runs.program import Parser, run_program

UNITS = ["B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"]


def power_state_size(n_layer, n_head, head_dim, features):
    """Return how many numbers the state has with `features` products of a key, normaliser included.

    n_head counts key/value heads. features is head_dim^p for the tensor power, symmetric_power_dim(head_dim, p) for the
    symmetric power.
    """
    return n_layer * n_head * features * (head_dim + 1)


def format_bytes(n):
    """Format n bytes as 77 MB or 1.3 PB: in decimal units, with one decimal below ten and none above."""
    unit = 0
    while n >= 999.5 and unit < len(UNITS) - 1:
        n, unit = n / 1000, unit + 1
    return f"{n:.{1 if n < 9.95 and unit else 0}f} {UNITS[unit]}"


def main(argv=None):
    parser = Parser(__doc__, prog="python -m bench.state_size")
    parser.add_numbers(
        n_layer=(12, "layers"),
        n_head=(12, "query heads"),
        n_kv_head=(None, "key/value heads, where they are fewer (default: n_head)"),
        head_dim=(64, "entries of a head"),
        bytes=(2, "per number: 2 for bf16, 4 for fp32, which sample.py uses"),
    )
    powers = 2, 4, 6, 8
    parser.add_argument("--p", type=int, nargs="+", choices=powers, default=powers, help="the powers")
    args = parser.parse_args(argv)
    heads = args.n_kv_head or args.n_head
    if args.n_head % heads:
        parser.error(f"n_head={args.n_head} must be a multiple of n_kv_head={heads}")
    print(f"{args.n_layer} layers x {heads} key/value heads of {args.head_dim}, {args.bytes} bytes per number\n")
    print(f"{'p':>3}{'tensor power':>15}{'symmetric power':>18}")
    for p in args.p:
        features = args.head_dim**p, symmetric_power_dim(args.head_dim, p)
        sizes = [args.bytes * power_state_size(args.n_layer, heads, args.head_dim, n) for n in features]
        print(f"{p:>3}{format_bytes(sizes[0]):>15}{format_bytes(sizes[1]):>18}")


if __name__ == "__main__":
    run_program(main)
