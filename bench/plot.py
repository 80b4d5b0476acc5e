"""Draw what a token costs over the context: training and generation, with softmax and with power attention.

    python bench/train.py --context 1024 4096 16384 65536 --json docs/data/training_cost.json
    python bench/sample.py --only softmax sympow_gating --batch 1 --context 1000 10000 100000 1000000 \\
        --json docs/data/generation_cost.json
    python bench/plot.py docs/data/training_cost.json docs/data/generation_cost.json --png docs/data/cost.png
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.data.files import read_json  # noqa: E402
from sympow.runs.plots import COLOURS, STYLE  # noqa: E402
from sympow.runs.program import Parser, run_program  # noqa: E402

LABELS = {"softmax": "softmax", "sympow_gating": "power attention, p=2, gated"}


def training_curves(rows):
    """Return {attention: (contexts, milliseconds a token)} of the rows of bench/train.py."""
    points = [(row["attention"], row["context"], 1000 / row["tokens_per_second"]) for row in rows if "step_ms" in row]
    return curves(points)


def generation_curves(rows):
    """Return {attention: (contexts, milliseconds a token)} of the rows of bench/sample.py with one text."""
    return curves([(row["name"], row["context"], row["p50"]) for row in rows if "p50" in row and row["batch"] == 1])


def curves(points):
    """Return {name: (contexts, milliseconds)} of [(name, context, milliseconds)], in the order of the contexts."""
    lines = {name: sorted(point[1:] for point in points if point[0] == name) for name in LABELS}
    return {name: tuple(zip(*line)) for name, line in lines.items() if line}


def plot(panels, png):
    """Draw {title: curves} side by side on logarithmic axes."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    with matplotlib.rc_context(STYLE):
        figure = Figure((4.6 * len(panels), 3.4), layout="constrained")
        for axis, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items()):
            for colour, (name, label) in zip(COLOURS, LABELS.items()):
                if name in lines:
                    axis.plot(*lines[name], color=colour, label=label, marker="o", markersize=4)
            axis.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="milliseconds a token", title=title)
            axis.set_xticks([x for x, _ in zip(*next(iter(lines.values())))], minor=False)
            axis.xaxis.set_major_formatter("{x:,.0f}")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.minorticks_off()
        handles, labels = axis.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        figure.savefig(png, dpi=150)


def main():
    parser = Parser(__doc__, prog="plot.py")
    parser.add_argument("training", help="what bench/train.py --json wrote")
    parser.add_argument("generation", help="what bench/sample.py --json wrote")
    parser.add_argument("--png", default="docs/data/cost.png")
    args = parser.parse_args()
    panels = {
        "Training a model of 124M parameters": training_curves(read_json(args.training)["rows"]),
        "Generating with it": generation_curves(read_json(args.generation)["rows"]),
    }
    plot(panels, args.png)
    print(f"wrote {args.png}")


if __name__ == "__main__":
    run_program(main)
