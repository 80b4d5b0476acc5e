"""evaluate.py --tasks: what lm_eval computes with a model is what one computes by hand, without a network."""

import importlib.metadata
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, call

from sympow import evaluate
from sympow import export
from sympow.data.tokenizer import Tokenizer
from sympow.generation.generate import generate
from sympow.model import GPT, GPTConfig
from sympow.runs import checkpoint
from sympow.runs.load import longest_text

TOKENIZER, CONTEXT = Tokenizer("bytes"), 24
TEXTS = ["def f(x):", "A question that is much longer than the training context is:", "x", "import os, sys"]
CHOICES = [" no", " perhaps it is", "=1"]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def write_run(name, **settings):
    """Write a run's folder with random weights; return the model."""
    torch.manual_seed(1)
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=257, **settings)
    model = GPT(config).eval()
    for x in model.parameters():  # large, so that texts differ by their log-likelihood
        x.data.add_(torch.randn_like(x), alpha=0.15)
    model.transformer.ln_wte.weight.data.neg_()  # else the head, which is the embedding, repeats the last token
    with checkpoint.Writer(name) as writer:
        writer.save(model, torch.optim.AdamW(model.parameters()), checkpoint.Progress(7, model=vars(config)))
    run = dict(
        model=vars(config), dataset="pystdlib", data="12", init_from="auto", block_size=16, then=f"{CONTEXT}@0.5"
    )
    with open(f"{name}/config.json", "w") as f:
        json.dump({"version": checkpoint.VERSION, **run}, f)
    TOKENIZER.save(name)
    return model


def write_task(name, docs, output_type, metrics, **settings):
    """Write NAME.yaml, a task with these documents; return its path."""
    with open(f"{name}.jsonl", "w") as f:
        f.writelines(json.dumps(doc) + "\n" for doc in docs)
    files = {split: os.path.abspath(f"{name}.jsonl") for split in ("test", "train")}
    task = dict(task=name, dataset_path="json", dataset_kwargs=dict(data_files=files), test_split="test")
    task |= dict(output_type=output_type, metric_list=[dict(metric=metric) for metric in metrics], **settings)
    with open(f"{name}.yaml", "w") as f:
        json.dump(task, f)  # JSON is YAML
    return f"{name}.yaml"


def log_likelihood(model, context, continuation, most=None):
    """Return (the log-likelihood of a text after another one, True if greedy sampling would write it), in one call of
    the model on at most so many tokens."""
    context = [*context.encode()] or [TOKENIZER.eot]
    ids = [*context, *continuation.encode()][-most - 1 if most else None :]
    n = len(continuation.encode())
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0][0].log_softmax(-1)[-n:]
    return logits[range(n), ids[-n:]].sum().item(), logits.argmax(-1).tolist() == ids[-n:]


def write_answer(model, context, n):
    """Return n tokens of greedy text after a context as bytes' characters."""
    ids = generate(model, [*context.encode()], max_new_tokens=n, temperature=0)
    return TOKENIZER.decode([i for (i,) in ids])


def results(capsys, *options):
    """Return what evaluate.py reports of each run: {run: {task: {metric: value}}}."""
    assert call(evaluate.main, *options, "--json") == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("attention,most", [("softmax", CONTEXT), ("sympow_gating", None)])
def test_metrics_are_those_computed_by_hand(attention, most, capsys):
    model = write_run("out/a", attention=attention)
    assert longest_text("out/a") == most
    hand = [[log_likelihood(model, text, choice, most) for choice in CHOICES] for text in TEXTS]
    best = [max(range(3), key=lambda i: row[i][0]) for row in hand]
    per_byte = [max(range(3), key=lambda i: row[i][0] / len(CHOICES[i])) for row in hand]
    docs = [dict(text=text, choices=CHOICES, label=label) for text, label in zip(TEXTS, best)]
    common = dict(doc_to_text="{{text}}", doc_to_choice="choices", doc_to_target="label", target_delimiter="")
    tasks = [write_task("choice", docs, "multiple_choice", ["acc", "acc_norm"], **common)]

    likeliest = write_answer(model, TEXTS[0], 1)
    docs = [dict(text=text, next=c) for text, c in zip(TEXTS, [likeliest, CHOICES[1], "a", "b"])]
    common = dict(doc_to_text="{{text}}", doc_to_target="{{next}}", target_delimiter="")
    tasks.append(write_task("next", docs, "loglikelihood", ["perplexity", "acc"], **common))
    scored = [log_likelihood(model, doc["text"], doc["next"], most) for doc in docs]

    docs = [dict(text=text) for text in TEXTS]
    texts = dict(doc_to_text="", doc_to_target="{{text}}")
    tasks.append(write_task("texts", docs, "loglikelihood_rolling", ["bits_per_byte"], **texts))
    total = 0.0
    for text in TEXTS:
        size = most or len(text)
        for i in range(0, len(text), size):  # windows; each has as much of the text before it as fits, at least a token
            window = text[i : i + size]
            total += log_likelihood(model, text[max(0, i + len(window) - size - 1) : i], window)[0]

    stop = write_answer(model, TEXTS[0], 6)[4:6]  # ends one text after 4 tokens
    cut = lambda text: text[-CONTEXT + 8 :] if most else text
    answers = [write_answer(model, cut(text), 8).split(stop)[0] for text in TEXTS]
    docs = [dict(text=text, answer=answer) for text, answer in zip(TEXTS, answers)]
    common = dict(doc_to_text="{{text}}", doc_to_target="{{answer}}")
    limits = dict(generation_kwargs=dict(until=[stop], max_gen_toks=8, do_sample=False))
    tasks.append(write_task("answer", docs, "generate_until", ["exact_match"], **common, **limits))

    for batch_size in (1, 3):
        options = ["--out_dir=out/a", f"--tasks={','.join(tasks)}", f"--batch_size={batch_size}"]
        (found,) = results(capsys, *options).values()
        assert found["choice"]["acc"] == 1.0
        assert found["choice"]["acc_norm"] == sum(a == b for a, b in zip(best, per_byte)) / 4
        assert found["next"]["perplexity"] == pytest.approx(math.exp(-sum(x for x, _ in scored) / 4), rel=1e-4)
        assert found["next"]["acc"] == sum(greedy for _, greedy in scored) / 4 > 0
        bytes_of_all = sum(len(text.encode()) for text in TEXTS)
        assert found["texts"]["bits_per_byte"] == pytest.approx(-total / bytes_of_all / math.log(2), rel=1e-4)
        assert found["answer"]["exact_match"] == 1.0, answers
    with open("out/a/tasks.json") as f:
        written = json.load(f)
    assert written.keys() == found.keys() == {"choice", "next", "texts", "answer"}
    assert {**found["next"], **written["next"]} == written["next"]
    expected = dict(checkpoint="step_00000007", dtype="float32", max_length=most, limit=0.0, samples=4, num_fewshot=0)
    assert expected.items() <= written["next"].items()


def test_runs_stand_beside_each_other_with_limit_examples_and_max_length(capsys):
    first, second = (write_run(f"out/{name}", attention=name) for name in ("softmax", "even_power"))
    docs = [dict(text=text, next=" yes") for text in TEXTS]
    common = dict(doc_to_text="{{text}}", doc_to_target="{{next}}", target_delimiter="", fewshot_split="train")
    common |= dict(fewshot_config=dict(sampler="first_n"), fewshot_delimiter="|")
    os.makedirs("mine")
    path = write_task("mine/next", docs, "loglikelihood", ["perplexity"], **common)
    with open(path) as f:
        named = f.read().replace('"mine/next"', '"next"')
    with open(path, "w") as f:
        f.write(named)
    options = ["--out_dir=out/softmax,out/even_power", "--names=a,b", "--tasks=next", "--include_path=mine"]
    assert call(evaluate.main, *options, "--limit=2", "--num_fewshot=1", "--max_length=12") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["task", "a", "b"] in lines
    (row,) = [line[2:] for line in lines if line[:2] == ["next", "perplexity"]]
    for model, shown in zip((first, second), row):
        prompts = [f"{TEXTS[1 if i == 0 else 0]} yes|{TEXTS[i]}" for i in range(2)]
        by_hand = [log_likelihood(model, prompt, " yes", most=12)[0] for prompt in prompts]
        assert float(shown) == pytest.approx(math.exp(-sum(by_hand) / 2), rel=1e-3)
    with open("out/softmax/tasks.json") as f:
        assert dict(samples=2, num_fewshot=1, limit=2.0, max_length=12).items() <= json.load(f)["next"].items()


def test_mistakes_are_refused(monkeypatch, capsys):
    write_run("out/a")
    docs = [dict(text="x", next="a long continuation of a short text")]
    common = dict(doc_to_text="{{text}}", doc_to_target="{{next}}")
    next_ = write_task("next", docs, "loglikelihood", ["acc"], **common)
    limits = dict(generation_kwargs=dict(max_gen_toks=24))
    answer = write_task("answer", docs, "generate_until", ["exact_match"], **common, **limits)
    missing = write_task("missing", docs, "loglikelihood", ["acc"], **common)
    os.remove("missing.jsonl")
    for options, message in (
        (["--tasks=next.yaml", "--length=5"], "--length belongs to the loss by position, not to --tasks"),
        (["--limit=5"], "--limit needs --tasks"),
        (["--tasks=next.yaml", "--limit=1.5"], "limit must be 0, a share below 1 or a whole number, got 1.5"),
        (["--tasks=next.yaml", "--num_fewshot=-2"], "num_fewshot must be at least 0, or -1, got -2"),
        (["--tasks=next.yaml", "--batch_size=0"], "batch_size must be at least 1, got 0"),
        (["--tasks=no.yaml"], "the tasks cannot be loaded (KeyError: \"Spec 'no.yaml' is not"),
        (["--tasks=,"], "--tasks names no task"),
        ([f"--tasks={missing}"], "the tasks cannot be loaded (FileNotFoundError"),
        ([f"--tasks={next_}", "--max_length=9"], "a text or an answer of a task does not fit into max_length=9"),
        ([f"--tasks={answer}"], "a text or an answer of a task does not fit into max_length=24"),
        (["--tasks=next.yaml", "--out_dir=out/none"], "no checkpoint in out/none"),
    ):
        assert call(evaluate.main, "--out_dir=out/a", *options) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("evaluate.py: ") and message in error, error
    os.mkdir("hf")
    Path("hf/modeling_sympow.py").touch()
    assert call(evaluate.main, "--out_dir=hf") == 2 and "hf is an exported model" in capsys.readouterr().err
    assert not os.path.exists("out/a/tasks.json")
    monkeypatch.delitem(sys.modules, "sympow.runs.tasks")
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    assert call(evaluate.main, "--out_dir=out/a", "--tasks=next.yaml") == 2
    error = capsys.readouterr().err
    assert "--tasks needs lm-evaluation-harness" in error and 'pip install "lm_eval[hf]"' in error


def test_a_folder_of_transformers_is_scored_as_it_is(capsys):
    from transformers import GPT2Config, GPT2LMHeadModel

    write_run("out/a")
    export.export("out/a", "gpt2")  # for its tokenizer
    os.remove("gpt2/modeling_sympow.py")
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=257, n_positions=32)).eval()
    model.save_pretrained("gpt2")
    task = write_task(
        "texts",
        [dict(text="x = 1")],
        "loglikelihood_rolling",
        ["bits_per_byte"],
        doc_to_text="",
        doc_to_target="{{text}}",
    )
    (metrics,) = results(capsys, "--out_dir=gpt2", f"--tasks={task}").values()
    ids = torch.tensor([[TOKENIZER.eot, *b"x = 1"]])
    loss = model(ids, labels=ids).loss.item()
    assert metrics["texts"]["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-4)
    with open("gpt2/tasks.json") as f:
        assert json.load(f)["texts"]["max_length"] == 32


def install_other_kernels(folder, version):
    """Write a package `kernels` with the metadata of Hugging Face's into a folder; return the folder."""
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    (folder / f"kernels-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n"
    (folder / f"kernels-{version}.dist-info" / "METADATA").write_text(metadata)
    return folder


def start_python(*argv, path=()):
    """Run Python with the clone's root first on its path, as `python evaluate.py` does, and these folders behind."""
    path = os.pathsep.join([ROOT, *map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    env |= {name: os.path.abspath("cache") for name in ("XDG_CACHE_HOME", "HF_HOME")}
    done = subprocess.run([sys.executable, *map(str, argv)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_in_the_clone_the_package_kernels_is_ours_and_not_hugging_faces(tmp_path):
    other = install_other_kernels(tmp_path / "site", "0.18.5")
    found = importlib.metadata.Distribution.discover(name="kernels", path=[ROOT, str(other)])
    assert [distribution.version for distribution in found] == ["0", "0.18.5"]  # the first one counts


@pytest.mark.slow
def test_tasks_of_a_run_and_of_its_export_from_the_clone_with_and_without_that_package(tmp_path):
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    other = install_other_kernels(tmp_path / "site", KERNELS_MIN_VERSION)
    write_run("out/a", attention="sympow_gating,softmax")
    docs = [dict(text=text, next=" yes") for text in TEXTS]
    common = dict(doc_to_text="{{text}}", doc_to_target="{{next}}", target_delimiter="")
    task = write_task("next", docs, "loglikelihood", ["perplexity"], **common)
    # some tasks of lm_eval, such as humaneval, import the package `evaluate`, which has the name of a program here
    Path("uses.py").write_text("from evaluate import load\n\n\ndef text(document):\n    return document['text']\n")
    Path(task).write_text(Path(task).read_text().replace('"{{text}}"', "!function uses.text"))
    assert call(export.main, "out/a", "--to=hf/a") == 0
    assert longest_text("hf/a") == longest_text("out/a") == CONTEXT
    for path in ([], [other]):
        options = ["--out_dir=out/a,hf/a", f"--tasks={task}", "--json"]
        out = start_python(os.path.join(ROOT, "evaluate.py"), *options, path=path)
        found = json.loads(out.splitlines()[-1])
        assert found["out/a"]["next"] == found["hf/a"]["next"] and found["hf/a"]["next"]["perplexity"] > 1
    assert os.path.exists("hf/a/tasks.json")
