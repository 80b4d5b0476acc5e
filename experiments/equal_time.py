"""When is it worth it? Equal GPU time on documents of 65,536 tokens: softmax and others, at 4,096 and in stages.

Every run has the same seconds; the axis is the time of training steps alone, without compilation and evaluation. The
model that is trained at 4,096 only is read in windows of 4,096 that overlap by half.
"""

from functools import partial

from sympow.compare import format_count
from sympow.experiments.report import (
    Panel,
    difference_cell,
    position_curve,
    span_columns,
    table,
    texts_cell,
    tokens_cell,
)
from sympow.experiments.runs import main, variant

SHORT, LONG, SHARE = 4096, 65536, 0.7  # the long stage begins after this share of the time
BOUNDS = (256, 4096, 16384, 65536)  # of the positions that are averaged
TITLE = "Compilation and evaluation are not counted, so runs end at different times."
VARIANTS = {
    "softmax": variant("softmax"),
    "softmax in stages": variant("softmax"),
    "sympow_gating in stages": variant("sympow_gating p=2"),
    "conformal_sympow in stages": variant("conformal_sympow p=2"),
    "hybrid 3:1 in stages": dict(attention="sympow_gating,sympow_gating,sympow_gating,softmax", p=2),
    "gated_deltanet in stages": variant("gated_deltanet"),
}


def plan(size):
    """Return the runs. Their depth is a multiple of the hybrid's pattern of four layers."""
    shape = dict(n_layer=8, n_head=5, n_embd=320, eval_tokens=1 << 20) if size.shrink == 1 else {}
    positions = dict(length=LONG // size.shrink, documents=size.documents, bounds=[n // size.shrink for n in BOUNDS])
    windows = positions | dict(window=SHORT // size.shrink)
    runs = []
    for name, settings in VARIANTS.items():
        then = {} if name == "softmax" else {"then": f"{LONG // size.shrink}@{SHARE}"}
        measures = {"positions": positions if then else windows}
        runs.append(size.run(name, SHORT, measures=measures, **settings, **shape, **then))
    return runs


# ---- losses over seconds


def time_curve(record):
    """Return (seconds of training, validation losses) of a record."""
    return tuple(zip(*((seconds, loss) for tokens, loss, seconds in record["val"] if tokens)))


# ---- the report


def long_tokens_cell(entry):
    """Return the tokens of the last stage, or None without stages."""
    record = entry.record
    return format_count(record["tokens"] - record["stages"][-1][1]) if len(record["stages"]) > 1 else None


def report(entries, size):
    """Return the table at equal time, and the losses over seconds and by position."""
    columns = [
        ("tokens", tokens_cell),
        ("of them in the long stage", long_tokens_cell),
        ("seconds of training", lambda entry: f"{entry.record['seconds']:.1f}"),
        ("loss of the texts", texts_cell),
        ("to softmax's", partial(difference_cell, base=entries.get("softmax"), measure="positions")),
        *span_columns("positions", [n // size.shrink for n in BOUNDS]),
    ]
    curves = {name: time_curve(entry.record) for name, entry in entries.items()}
    positions = {name: position_curve(entry) for name, entry in entries.items()}
    title, context = "The dashed line is the short context.", SHORT // size.shrink
    panels = [
        Panel("seconds of training", "validation loss, nats a token", curves, TITLE, cut=True),
        Panel("position, tokens", "loss, nats a token", positions, title, log_x=True, context=context, cut=True),
    ]
    notes = [
        "The curves are of long texts for runs in stages, and of short windows for softmax.",
        "The texts are read after the whole run. The difference to softmax's loss is taken text by text.",
    ]
    return [table("Equal time; loss by position ± standard error", columns, entries.values()), *notes], panels


if __name__ == "__main__":
    main("equal_time", plan, report)
