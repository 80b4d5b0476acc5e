"""evaluate.py --tasks: what lm_eval computes with a model is what one computes by hand, without a network."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, call, run, write_run
from safetensors.torch import load_file, save_file

from sympow import evaluate
from sympow import export
from sympow.data.files import read_json, write_json
from sympow.data.tokenizer import Tokenizer
from sympow.generation.generate import generate
from sympow.runs.load import longest_text

TOKENIZER, CONTEXT = Tokenizer("bytes"), 24
TEXTS = ["def f(x):", "A question that is much longer than the training context is:", "x", "import os, sys"]
CHOICES = [" no", " perhaps it is", "=1"]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """Work in a new folder, without a network."""
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # load_tasks sorts it


def write_task(path, docs, output_type, metric, **settings):
    """Write PATH.yaml, a task with these documents, in which `next` follows `text`; return its path."""
    with open(f"{path}.jsonl", "w") as file:
        file.writelines(json.dumps(doc) + "\n" for doc in docs)
    files = dict.fromkeys(("test", "train"), os.path.abspath(f"{path}.jsonl"))
    task = {"task": os.path.basename(path), "dataset_path": "json", "dataset_kwargs": {"data_files": files}}
    task |= {"test_split": "test", "output_type": output_type, "metric_list": [{"metric": metric}]}
    task |= {"doc_to_text": "{{text}}", "doc_to_target": "{{next}}", "target_delimiter": "", **settings}
    write_json(f"{path}.yaml", task)  # JSON is YAML
    return f"{path}.yaml"


def pair(texts, continuations):
    """Return documents of texts and their continuations."""
    return [{"text": text, "next": continuation} for text, continuation in zip(texts, continuations)]


def log_likelihood(model, context, continuation, limit=None):
    """Return the log-likelihood of a text after another one, in one call of the model on at most `limit` tokens."""
    context = [*context.encode()] or [TOKENIZER.eot]
    ids = [*context, *continuation.encode()][-limit - 1 if limit else None :]
    n = len(continuation.encode())
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0][0].log_softmax(-1)[-n:]
    return logits[range(n), ids[-n:]].sum().item()


def write_answer(model, context, n):
    """Return n tokens of greedy text after a context as bytes' characters."""
    ids = generate(model, [*context.encode()], max_new_tokens=n, temperature=0)
    return TOKENIZER.decode([i for (i,) in ids])


def evaluate_tasks(capsys, *options):
    """Return what evaluate.py reports of each run: [{task: {metric: value}}]."""
    assert call(evaluate.main, *options, "--json") == 0
    return [*json.loads(capsys.readouterr().out.splitlines()[-1]).values()]


@pytest.mark.parametrize("window,limit", [(8, None), (CONTEXT, None), (CONTEXT + 1, CONTEXT)])
def test_softmax_reads_any_length_if_its_window_hides_what_it_has_not_learned(window, limit):
    write_run("out/a", window=window)
    assert longest_text("out/a") == limit


@pytest.mark.parametrize("attention,limit", [("softmax", CONTEXT), ("sympow_gating", None)])
def test_metrics_are_those_computed_by_hand(attention, limit, capsys):
    model = write_run("out/a", attention=attention)
    assert longest_text("out/a") == limit
    likelihoods = [[log_likelihood(model, text, choice, limit) for choice in CHOICES] for text in TEXTS]
    best = [row.index(max(row)) for row in likelihoods]
    docs = [{"text": text, "label": label} for text, label in zip(TEXTS, best)]
    tasks = [write_task("choice", docs, "multiple_choice", "acc", doc_to_choice=CHOICES, doc_to_target="label")]

    docs = pair(TEXTS, [*CHOICES, "a"])
    tasks.append(write_task("next", docs, "loglikelihood", "perplexity"))
    mean = sum(log_likelihood(model, doc["text"], doc["next"], limit) for doc in docs) / 4

    docs, total = pair([""] * 4, TEXTS), 0.0
    tasks.append(write_task("texts", docs, "loglikelihood_rolling", "bits_per_byte"))
    for text in TEXTS:
        size = limit or len(text)
        for i in range(0, len(text), size):  # windows; each has as much of the text before it as fits, at least a token
            window = text[i : i + size]
            total += log_likelihood(model, text[max(0, i + len(window) - size - 1) : i], window)

    stop = write_answer(model, TEXTS[0], 6)[4:6]  # ends one text after 4 tokens
    prompts = [text[-CONTEXT + 8 :] if limit else text for text in TEXTS]
    docs = pair(TEXTS, [write_answer(model, prompt, 8).split(stop)[0] for prompt in prompts])
    limits = {"until": [stop], "max_gen_toks": 8, "do_sample": False}
    tasks.append(write_task("answer", docs, "generate_until", "exact_match", generation_kwargs=limits))

    for batch_size in (1, 3):
        options = ["--out_dir=out/a", f"--tasks={','.join(tasks)}", f"--batch_size={batch_size}"]
        (report,) = evaluate_tasks(capsys, *options)
        assert report["choice"]["acc"] == report["answer"]["exact_match"] == 1.0
        assert report["next"]["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-4)
        bits = -total / len("".join(TEXTS)) / math.log(2)
        assert report["texts"]["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    metrics = read_json("out/a/tasks.json")
    assert metrics.keys() == report.keys() and metrics["next"].items() >= report["next"].items()
    settings = {"checkpoint": "step_00000007", "max_length": limit, "limit": 0.0, "samples": 4, "num_fewshot": 0}
    assert metrics["next"].items() >= settings.items()


def test_runs_stand_beside_each_other_with_limit_examples_and_max_length(capsys):
    models = [write_run(f"out/{name}", attention=name) for name in ("softmax", "even_power")]
    os.makedirs("mine")
    examples = {"fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}, "fewshot_delimiter": "|"}
    write_task("mine/next", pair(TEXTS, 4 * [" yes"]), "loglikelihood", "perplexity", **examples)
    options = ["--out_dir=out/softmax,out/even_power", "--names=a,b", "--tasks=next", "--include_path=mine"]
    assert call(evaluate.main, *options, "--limit=2", "--num_fewshot=1", "--max_length=12") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["task", "a", "b"] in lines
    (row,) = [line[2:] for line in lines if line[:2] == ["next", "perplexity"]]
    prompts = [f"{TEXTS[1]} yes|{TEXTS[0]}", f"{TEXTS[0]} yes|{TEXTS[1]}"]
    for model, perplexity in zip(models, row):
        total = sum(log_likelihood(model, prompt, " yes", limit=12) for prompt in prompts)
        assert float(perplexity) == pytest.approx(math.exp(-total / 2), rel=1e-3)
    settings = {"samples": 2, "num_fewshot": 1, "limit": 2.0, "max_length": 12}
    assert read_json("out/softmax/tasks.json")["next"].items() >= settings.items()


def test_mistakes_are_refused(monkeypatch, capsys):
    write_run("out/a")
    docs = pair("x", ["a long continuation of a short text"])
    for name in ("next", "missing"):
        write_task(name, docs, "loglikelihood", "acc")
    os.remove("missing.jsonl")
    write_task("answer", docs, "generate_until", "exact_match", generation_kwargs={"max_gen_toks": 24})
    for options, message in (
        (["--tasks=next.yaml", "--length=5"], "--length belongs to the loss by position, not to --tasks"),
        (["--tasks=next.yaml", "--limit=1.5"], "limit must be 0, a share below 1 or a whole number, got 1.5"),
        (["--tasks=no.yaml"], "the tasks cannot be loaded (KeyError: \"Spec 'no.yaml' is not"),
        (["--tasks=missing.yaml"], "the tasks cannot be loaded (FileNotFoundError"),
        (
            ["--tasks=next.yaml", "--max_length=9"],
            "max_length=9 (assert len(continuation_enc) <= self.max_length)",
        ),
        (["--tasks=answer.yaml"], "max_length=24 (Invalid configuration: requested max tokens to generate (24)"),
    ):
        assert call(evaluate.main, "--out_dir=out/a", *options) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("evaluate.py: ") and message in error, error
    write_json("hf/config.json", {"model_type": "sympow"})
    assert call(evaluate.main, "--out_dir=hf") == 2 and "hf names no dataset: give --dataset" in capsys.readouterr().err
    assert not os.path.exists("out/a/tasks.json")
    monkeypatch.delitem(sys.modules, "sympow.runs.tasks")
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    assert call(evaluate.main, "--out_dir=out/a", "--tasks=next.yaml") == 2
    assert 'pip install "lm_eval[hf]"' in capsys.readouterr().err


def test_scores_are_not_lost_where_they_cannot_be_written(monkeypatch, capsys):
    from sympow.runs import tasks

    for name in ("out/a", "out/b"):
        write_run(name)
    task = write_task("next", pair(TEXTS, 4 * [" yes"]), "loglikelihood", "perplexity")
    score, options = tasks.run_tasks, ("--out_dir=out/a,out/b", f"--tasks={task}")
    monkeypatch.setattr(tasks, "run_tasks", lambda *args: pytest.fail("the work was done before"))
    os.mkdir("out/b/tasks.json")
    assert call(evaluate.main, *options) == 2
    assert "evaluate.py: out/b/tasks.json cannot be written: it is no file" in capsys.readouterr().err
    os.rmdir("out/b/tasks.json")
    Path("out/a/tasks.json").write_text("{")
    assert call(evaluate.main, *options) == 2 and "out/a/tasks.json is damaged" in capsys.readouterr().err
    os.remove("out/a/tasks.json")

    def work(*args):  # after which the folder cannot be written
        os.mkdir("out/b/tasks.json")
        return score(*args)

    monkeypatch.setattr(tasks, "run_tasks", work)
    with pytest.raises(OSError):
        call(evaluate.main, *options)
    assert "next perplexity" in capsys.readouterr().out


def test_a_folder_of_transformers_is_scored_as_it_is(capsys):
    from transformers import GPT2Config, GPT2LMHeadModel

    write_run("out/a")
    export.export("out/a", "gpt2")  # for its tokenizer
    os.remove("gpt2/modeling_sympow.py")
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=257, n_positions=32)).eval()
    model.save_pretrained("gpt2")
    task = write_task("texts", pair([""], ["x = 1"]), "loglikelihood_rolling", "bits_per_byte")
    (report,) = evaluate_tasks(capsys, "--out_dir=gpt2", f"--tasks={task}")
    ids = torch.tensor([[TOKENIZER.eot, *b"x = 1"]])
    loss = model(ids, labels=ids).loss.item()
    assert report["texts"]["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-4)
    assert read_json("gpt2/tasks.json")["texts"]["max_length"] == 32


@pytest.mark.parametrize("kind", ["sympow", "mine"])
def test_no_code_of_a_folder_is_run(kind, capsys):
    """The same folder gives the same metrics, or one line, whatever code it asks for."""
    write_run("out/a", attention="sympow_gating,softmax")
    export.export("out/a", "hf")
    task = write_task("next", pair(TEXTS, 4 * [" yes"]), "loglikelihood", "perplexity")
    (expected,) = evaluate_tasks(capsys, "--out_dir=out/a", f"--tasks={task}")
    names = "Config", "Model", "ModelForCausalLM", "Tokenizer"
    code = "".join(f"class {name}:\n    pass\n" for name in names)
    Path("hf/modeling_sympow.py").write_text(f"open({str(Path('ran').absolute())!r}, 'w')\n{code}")
    classes = {f"Auto{name}": f"modeling_sympow.{name}" for name in names}
    classes["AutoTokenizer"] = ["modeling_sympow.Tokenizer", None]
    for file, changes in (("config.json", {"model_type": kind}), ("tokenizer_config.json", {})):
        write_json(f"hf/{file}", read_json(f"hf/{file}") | {"auto_map": classes} | changes)
    options = "--out_dir=hf", f"--tasks={task}", "--json"
    status, output = call(evaluate.main, *options), capsys.readouterr()
    assert not os.path.exists("ran")
    if kind == "sympow":
        assert status == 0 and json.loads(output.out.splitlines()[-1])["hf"] == expected
    else:
        assert status == 2 and "evaluate.py: hf cannot be loaded (no code in it is run) (" in output.err


@pytest.mark.parametrize(
    "file,harm,message",
    [
        ("model.safetensors", lambda path: path.write_bytes(b""), "model.safetensors is damaged"),
        (
            "model.safetensors",
            lambda path: save_file(dict([*load_file(path).items()][1:]), path),
            "the weights in hf do not fit this model",
        ),
        ("config.json", lambda path: write_json(path, {"model_type": "sympow"}), "config.json in hf is not of a model"),
        ("config.json", lambda path: write_json(path, read_json(path) | {"max_position_embeddings": "x"}), "'x'"),
        ("tokenizer.json", lambda path: path.write_text("{}"), "hf/tokenizer.json is damaged or no tokenizer"),
    ],
)
def test_a_damaged_export_is_one_line(file, harm, message, capsys):
    write_run("out/a")
    export.export("out/a", "hf")
    harm(Path("hf", file))
    task = write_task("next", pair(TEXTS, 4 * [" yes"]), "loglikelihood", "perplexity")
    assert call(evaluate.main, "--out_dir=hf", f"--tasks={task}") == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


# ---- beside Hugging Face's package `kernels`


OTHER_KERNELS = """
from unittest.mock import MagicMock


def __getattr__(name):
    return MagicMock(side_effect=lambda *args, **options: lambda layer: layer)  # its decorators change nothing here
"""


@pytest.mark.slow
def test_tasks_of_a_run_and_of_its_export_from_the_clone_beside_that_package(tmp_path):
    """transformers imports that package. The other tests show that tasks run without it."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    write_run("out/a", attention="sympow_gating,softmax")
    # some tasks of lm_eval, such as humaneval, import the package `evaluate`, which has the name of a program here
    Path("uses.py").write_text("from evaluate import load\n\n\ndef text(document):\n    return document['text']\n")
    task = Path(write_task("next", pair(TEXTS, 4 * [" yes"]), "loglikelihood", "perplexity"))
    task.write_text(task.read_text().replace('"{{text}}"', "!function uses.text"))
    export.export("out/a", "hf/a")
    assert longest_text("hf/a") == longest_text("out/a") == CONTEXT
    package, metadata = tmp_path / "site/kernels", tmp_path / f"site/kernels-{KERNELS_MIN_VERSION}.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text(OTHER_KERNELS)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    env = {
        "PYTHONPATH": os.pathsep.join([ROOT, str(tmp_path / "site")]),
        **dict.fromkeys(("XDG_CACHE_HOME", "HF_HOME"), str(tmp_path / "cache")),
    }
    out = run(f"{ROOT}/evaluate.py", "--out_dir=out/a,hf/a", f"--tasks={task}", "--json", env=env).stdout
    report = json.loads(out.splitlines()[-1])
    assert report["out/a"]["next"] == report["hf/a"]["next"] and report["hf/a"]["next"]["perplexity"] > 1
    assert os.path.exists("hf/a/tasks.json")
