"""Does the order of experiments.recipe hold for English prose? Its contenders at their best rates, with three seeds.

    python -m experiments.prose --out=prose
    python data/source/prepare.py --root prose --suffix=.txt --tokenizer=bpe:8192 --val_fraction=0.05 --out=data/prose
    pip install flash-linear-attention      # for forgetting, on GPUs
    python -m experiments.english

Models, steps and tokens are those of experiments.recipe. Rates are the best ones of its records, and are not looked for
on this corpus.
"""

from sympow.experiments.larger import NAMES as LARGER_NAMES
from sympow.experiments.larger import NOTE, distance_columns, smaller_models
from sympow.experiments.long_texts import WINDOWED
from sympow.experiments.recipe import CONTENDERS, RATES, best_rates
from sympow.experiments.report import table, tokens_cell
from sympow.experiments.runs import (
    SEEDS,
    main,
    make_run,
)

NAMES = (*LARGER_NAMES, WINDOWED)


def plan(size):
    """Return the runs, the first seed of all before the others. Of size tiny there is one seed."""
    models = smaller_models(size)
    runs = []
    for seed in SEEDS if size.shrink == 1 else SEEDS[:1]:
        for name in NAMES:
            rate = models[name].record["settings"]["learning_rate"] if name in models else RATES[0]
            runs.append(make_run(size, f"{name}, lr {rate:g}", CONTENDERS[name], rate, seed))
    return runs


# ---- the report


def report(entries, size):
    """Return the table of losses and of the distances to softmax on both corpora, without a figure."""
    trained = best_rates(entries.values())
    columns = [("tokens", tokens_cell), *distance_columns(trained, smaller_models(size), "prose", "source code")]
    return [table("English prose", columns, trained.values()), NOTE], []


if __name__ == "__main__":
    main("english", plan, report, seeds=None, corpus="prose")
