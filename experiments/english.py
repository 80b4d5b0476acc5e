"""Does the order of experiments.recipe hold for English prose? Its contenders at their best rates, up to three seeds.

    python -m experiments.prose
    python data/source/prepare.py --root prose --suffix=.txt --tokenizer=bpe:8192 --val_fraction=0.05 --out=data/prose
    pip install flash-linear-attention      # for forgetting, on GPUs
    python -m experiments.english

Models, steps and tokens are as in experiments.recipe. Rates are the best ones of its records, and are not looked for on
this corpus.
"""

from sympow.experiments import larger
from sympow.experiments.recipe import RATES, best_rates, report_others, trained, tuned
from sympow.experiments.report import entries_of
from sympow.experiments.runs import SEEDS, main

NAMES = (*larger.NAMES, "softmax, window 2,048, output gate")


def plan(size):
    """Return the runs, the first seed of all before the others. Of size tiny there is one seed."""
    best = best_rates(trained(entries_of(size.records("recipe").values())))
    rates = {name: best[name].record["settings"]["learning_rate"] if name in best else RATES[0] for name in NAMES}
    seeds = SEEDS[: 3 if size.full else 1]
    return [tuned(size, name, rate, seed) for seed in seeds for name, rate in rates.items()]


if __name__ == "__main__":
    main("english", plan, report_others, corpus="prose")
