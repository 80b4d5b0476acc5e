"""Draw the time of a token over the context: training and generation, with softmax and with power attention.

    python -m bench.train --only softmax softmax_window sympow_gating --json docs/data/training_cost.json
    python -m bench.sample --only softmax softmax_window sympow_gating --batch 1 \\
        --context 1024 16384 131072 1048576 --json docs/data/generation_cost.json
    python -m bench.plot docs/data/training_cost.json docs/data/generation_cost.json --png docs/data/cost.png
"""

from functools import partial

from sympow.data.files import read_json
from sympow.experiments.report import Panel, plot
from sympow.runs.program import Parser, output_file, run_program

LABELS = {
    "softmax": "softmax",
    "softmax_window": "softmax in a window of 2,048",
    "sympow_gating": "power attention, p=2, gated",
}


def training_curves(rows):
    """Return {label: (contexts, microseconds a token)} of the rows of bench/train.py."""
    return sorted_curves(
        [(row["attention"], row["context"], 1e6 / row["tokens_per_second"]) for row in rows if "step_ms" in row]
    )


def generation_curves(rows):
    """Return {label: (contexts, milliseconds a token)} of the rows of bench/sample.py with one text."""
    return sorted_curves(
        [(row["name"], row["context"], row["p50"]) for row in rows if "p50" in row and row["batch"] == 1]
    )


def sorted_curves(points):
    """Return {label: (contexts, times)} of [(name, context, time)], in the order of the contexts."""
    lines = {label: sorted(point[1:] for point in points if point[0] == name) for name, label in LABELS.items()}
    return {label: tuple(zip(*line)) for label, line in lines.items() if line}


def main():
    parser = Parser(__doc__, prog="python -m bench.plot")
    parser.add_argument("training", help="what bench/train.py --json wrote")
    parser.add_argument("generation", help="what bench/sample.py --json wrote")
    parser.add_argument("--png", type=output_file, default="docs/data/cost.png")
    args = parser.parse_args()
    training, generation = (read_json(path)["rows"] for path in (args.training, args.generation))
    panel = partial(Panel, "context, tokens", log_x=True, log_y=True)
    panels = [
        panel(
            "microseconds a token",
            training_curves(training),
            "In training softmax's time grows with the context (124M parameters).",
        ),
        panel(
            "milliseconds a token",
            generation_curves(generation),
            "In generation it grows with the text before (one text).",
        ),
    ]
    plot(panels, args.png)
    print(f"wrote {args.png}")


if __name__ == "__main__":
    run_program(main)
