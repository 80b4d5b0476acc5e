"""Does the distance to softmax shrink or grow with the model? GPT-2 124M's shape beside the 17M of experiments.recipe.

12 layers of a width of 768 read the same corpus in as many steps of as many tokens as experiments.recipe, with the same
parts and one seed. With a vocabulary of 8,192 they have 98M parameters, so the table calls them 124M by their shape.
Both of RATES are tried, because larger models want lower ones. The distance at 17M comes from recipe's records.

    pip install flash-linear-attention      # for forgetting, on GPUs
"""

from dataclasses import replace
from functools import partial

from sympow.experiments.long_texts import SOFTMAX
from sympow.experiments.recipe import (
    CONTENDERS,
    best_rates,
    contender_of,
    measured,
    parameters_cell,
    trained_with,
)
from sympow.experiments.report import (
    loss_cell,
    merge_rates,
    rates_table,
    seeds_difference_cell,
    table,
    text_by_text_cell,
    texts_loss,
)
from sympow.experiments.runs import (
    main,
    make_run,
)

RATES = (4.8e-3, 2.4e-3)
NAMES = (SOFTMAX, "forgetting", "p=2, heads of 64", "p=2, heads of 128", "p=4, heads of 64")
TIMES = 2  # the layers, heads and width of the Size
BATCH = 8  # sequences in a micro-step, for GPUs of 80 GB
NOTE = "Differences are to softmax with its best parts, ± half of a 95% confidence interval over seeds or texts."


def plan(size):
    """Return the runs, the first rate of all before the second. Their texts are read in windows alone."""
    model = {name: TIMES * n for name, n in size.model.items()}
    runs = []
    for rate in RATES:
        for name in NAMES:
            settings = dict(n_layer=model["n_layer"], batch_size=BATCH) | CONTENDERS[name]
            run = make_run(replace(size, model=model), f"{name}, lr {rate:g}", settings, rate)
            runs.append(replace(run, measures={measure: run.measures[measure] for measure in ("size", "positions")}))
    return runs


# ---- the report


def smaller_models(size, corpus=None):
    """Return {contender: the Entry of its best rate} of recipe's records with Muon, on this corpus if one is given."""
    entries = [entry for entry in trained_with("muon", size) if corpus in (None, entry.record["corpus"])]
    return best_rates(entries)


def other_cell(entry, models, cell, **arguments):
    """Return a cell of the Entry of the same contender among models {contender: Entry}; None if there is none."""
    model = models.get(contender_of(entry))
    return cell(model, **arguments) if model else None


def distance_columns(trained, models, label, other_label):
    """Return the columns of losses and of the distances to softmax of the Entries trained {contender: Entry}.

    models {contender: Entry} are others: their distances have columns too. label, other_label: what both are called.
    """
    softmax = trained.get(SOFTMAX)
    columns = [
        ("validation loss", loss_cell),
        (f"to softmax, {label}", partial(seeds_difference_cell, base=softmax)),
        (
            f"to softmax, {other_label}",
            partial(other_cell, models=models, cell=seeds_difference_cell, base=models.get(SOFTMAX)),
        ),
        ("other texts", partial(loss_cell, measure=texts_loss)),
        (f"text by text, {label}", partial(text_by_text_cell, base=softmax)),
    ]
    models = {name: model for name, entry in models.items() if (model := measured(entry))}
    other = partial(other_cell, models=models, cell=text_by_text_cell, base=models.get(SOFTMAX))
    return [*columns, (f"text by text, {other_label}", other)]


def report(entries, size):
    """Return the table of both rates, and the one of the distances to softmax of both sizes, without a figure."""
    larger = best_rates(entries.values())
    models = smaller_models(size, next(iter(entries.values())).record["corpus"])
    columns = [("parameters", parameters_cell), *distance_columns(larger, models, "124M", "17M")]
    blocks = [rates_table(merge_rates(entries.values())), table("The distance to softmax", columns, larger.values())]
    return [*blocks, NOTE], []


if __name__ == "__main__":
    main("larger", plan, report, seeds=None, corpus="source_bpe")
