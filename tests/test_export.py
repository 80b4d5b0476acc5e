"""Exported models: loaded by transformers without the repository, they compute and generate what the model does."""

import json
import math
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import run, write_run

import sympow
from sympow import export
from sympow.attention import ATTENTIONS
from sympow.data.huggingface import tokenizers_json
from sympow.data.tokenizer import END_OF_TEXT, Tokenizer
from sympow.data.vocabulary import train_tokenizer
from sympow.generation.generate import generate
from sympow.model import GPTConfig

os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp())  # read when transformers is imported
TEXT = "def f(x):\n    return 'caf\u00e9 \u4e16\u754c' + str(12345)  # it's\t3.14 \r\n"
CONFIGS = {
    **{name: dict(attention=name) for name in ATTENTIONS},
    "p=4, grouped heads, bias": dict(attention="sympow", p=4, n_kv_head=2, head_dim=8, bias=True),
    "fixed gates": dict(attention="conformal_sympow", gate="fixed"),
    "packed": dict(attention="sympow_gating", reset_token=256),
    "pattern": dict(attention="sympow_gating,softmax"),
    "positions in turn": dict(attention="sympow_gating", positions="none,rotary"),
    "glu": dict(attention="heinsen", residual="glu"),
    "mixture": dict(attention="adaptive_power", adaptive="mixture"),
    "GPT-2": dict(positions="learned", n_positions=80, bias=True, embedding_norm=False, activation="gelu_tanh"),
}


def export_run(run, target, monkeypatch, *more):
    monkeypatch.setattr(sys, "argv", ["export.py", str(run), f"--to={target}", *more])
    export.main()


def test_a_folder_has_all_that_a_model_needs(tmp_path, monkeypatch, capsys):
    run = tmp_path / "out/a"
    model = write_run(run, attention="sympow_gating")
    target = tmp_path / "hf" / "a"
    for _ in range(2):  # an export may replace an earlier one
        export_run(run, target, monkeypatch)
    assert "wrote" in capsys.readouterr().out and os.listdir(target.parent) == ["a"]
    assert {*os.listdir(target)} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_sympow.py",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    config = json.loads((target / "config.json").read_text())
    assert GPTConfig(**config["model"]) == model.config and config["eos_token_id"] == 256
    card = (target / "README.md").read_text()
    assert "attention sympow_gating, p=2" in card and "step_00000007" in card and "learning_rate=0.0006" in card
    assert "validation loss so far: 4.0000 nats a token, after step 2." in card
    read_progress = export.checkpoint.read_progress  # and of a run that was stopped before its first evaluation
    monkeypatch.setattr(export.checkpoint, "read_progress", lambda path: replace(read_progress(path), best=math.inf))
    export_run(run, target, monkeypatch)
    assert "validation loss" not in (target / "README.md").read_text()


def test_of_two_exports_into_one_folder_the_last_stays(tmp_path, monkeypatch):
    run, target = tmp_path / "out/a", tmp_path / "hf"
    write_run(run)

    def rename(source, destination, real=os.rename):
        if destination == target:
            monkeypatch.setattr(os, "rename", real)
            export.export(run, target)  # of another process
        real(source, destination)

    monkeypatch.setattr(os, "rename", rename)
    export.export(run, target)
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]


def test_mistakes_are_refused(tmp_path, monkeypatch, capsys):
    run = tmp_path / "out/a"
    write_run(run)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    (tmp_path / "locked" / "earlier").mkdir(parents=True)
    access = os.access  # tests may run as root, who may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: os.path.basename(path) != "locked" and access(path, mode))
    for argv, message in (
        ((run, tmp_path / "mine"), "must be a new folder, or one that export.py wrote"),
        ((run, tmp_path / "mine" / "file"), "must be a new folder"),
        ((tmp_path, tmp_path / "new"), "no checkpoint in"),
        ((run, ""), "--to must be a new folder"),
        ((run, tmp_path / ("x" * 300)), "x cannot be written: [Errno 36] File name too long"),
        ((run, tmp_path / ("x" * 300) / "new"), "new cannot be written: [Errno 36] File name too long"),
        ((run, tmp_path / "mine" / "file" / "new"), "new cannot be written: [Errno 20] Not a directory"),
        ((run, tmp_path / "locked" / "new"), "locked is no folder that can be written"),
        ((run, tmp_path / "locked" / "earlier"), "locked is no folder that can be written"),
    ):
        with pytest.raises(SystemExit) as stopped:
            export_run(*argv, monkeypatch)
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert (tmp_path / "mine" / "file").read_text() == "mine" and not (tmp_path / "new").exists()
    export_run(run, tmp_path / ("x" * 251), monkeypatch)
    export_run(run, tmp_path / ("x" * 251), monkeypatch)
    assert sorted(os.listdir(tmp_path)) == ["locked", "mine", "out", "x" * 251]


def test_only_what_export_wrote_is_replaced(tmp_path, monkeypatch, capsys):
    run, target = tmp_path / "out/a", tmp_path / "hf"
    write_run(run)
    export_run(run, target, monkeypatch)
    (target / "tasks.json").write_text("{}")  # evaluate.py's, of the weights that go
    export_run(run, target, monkeypatch)
    assert not (target / "tasks.json").exists()
    for name in (".git", "notes.txt"):
        (target / name).mkdir()
        with pytest.raises(SystemExit) as stopped:
            export_run(run, target, monkeypatch)
        assert stopped.value.code == 2 and "with nothing else in it, got" in capsys.readouterr().err
        (target / name).rmdir()  # it is still there


def test_a_missing_package_is_one_message(tmp_path):
    modeling = export.MODELING
    code = "import runpy, sys; sys.modules['sympow'] = None; runpy.run_path(sys.argv[1])"  # as if it was not installed
    done = run("-c", code, modeling, cwd=tmp_path, env={"PYTHONPATH": None}, check=False)
    message = "ImportError: this model needs the package sympow 0.1.0: run `pip install .` in a clone"
    assert done.stderr.splitlines()[-1].startswith(message)
    assert sympow.__version__ in message


def test_tokenizers_encode_as_ours(tmp_path):
    from tokenizers import Tokenizer as Theirs

    trained = train_tokenizer([Path(export.__file__).read_text(), TEXT], 400)
    huggingface = tokenizers_json(trained)[0]
    (tmp_path / "tokenizer.json").write_text(huggingface)
    from sympow.data.vocabulary import named_tokenizer

    for tokenizer in (Tokenizer("bytes"), trained, named_tokenizer(str(tmp_path))):
        text, end = tokenizers_json(tokenizer)
        theirs = Theirs.from_str(text)
        for sample in (TEXT, " ", "", "a  b\n\n c's 2024\u00a0!", "".join(map(chr, range(1, 600)))):
            ids = theirs.encode(sample).ids
            assert ids == tokenizer.encode(sample) and theirs.decode(ids) == sample
        assert theirs.token_to_id(end) == tokenizer.eot and end == END_OF_TEXT


def greedy(model, text, n=12):
    return [i for (i,) in generate(model, [*text.encode()], max_new_tokens=n, temperature=0)]


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("sympow_gating", "pattern", "positions in turn") else pytest.param(n, marks=pytest.mark.slow)
        for n in CONFIGS
    ],
)
def test_transformers_computes_trains_and_generates_as_the_model(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tmp_path / "out/a"
    ours = write_run(run, **CONFIGS[name])
    export_run(run, tmp_path / "hf", monkeypatch)
    load = lambda of, path: of.from_pretrained(path, trust_remote_code=True)
    model, tokenizer = load(AutoModelForCausalLM, tmp_path / "hf").eval(), load(AutoTokenizer, tmp_path / "hf")
    assert type(model).__module__.startswith("transformers_modules.")

    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        whole = ours(ids)[0]
        assert torch.equal(model(ids, use_cache=False).logits, whole)
    read, n_tokens = model.gpt.hidden, []
    monkeypatch.setattr(model.gpt, "hidden", lambda x, *args: n_tokens.append(x.shape[1]) or read(x, *args))

    texts, prompt = ["def f(x):", "import os", "x"], lambda text: tokenizer(text, return_tensors="pt")
    expected = [greedy(ours, text) for text in texts]
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    alone = [model.generate(**prompt(text), **options)[0, len(text) :].tolist() for text in texts]
    assert set(n_tokens) == {1, *map(len, texts)}  # from the cache, no token is read again
    assert alone == expected and len({*expected[0]}) > 3

    assert model.generate(**prompt("x"), num_beams=3, max_new_tokens=4, do_sample=False).shape[1] <= 5
    letter = next(filter(range(128).__contains__, expected[0]))
    stopped = model.generate(**prompt(texts[0]), **options, stop_strings=[chr(letter)], tokenizer=tokenizer)
    assert stopped.shape[1] == len(texts[0]) + expected[0].index(letter) + 1

    labels = ids.clone()
    labels[:, :3] = -100
    targets = labels.masked_fill(labels == -100, -1).roll(-1, 1)  # of the last token too there is none
    loss_of_ours = ours(ids, targets)[1]
    loss_of_ours.backward()
    model.train()
    grads = {n: x.grad for n, x in ours.named_parameters() if x.grad is not None}
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        assert model.gpt.config.activation_checkpointing == checkpointing
        model.zero_grad()
        loss = model(ids, labels=labels).loss
        loss.backward()
        assert torch.equal(loss, loss_of_ours)
        found = {n.removeprefix("gpt."): x.grad for n, x in model.named_parameters() if x.grad is not None}
        assert grads.keys() == found.keys() and all(torch.equal(grads[n], found[n]) for n in grads)

    model.save_pretrained(tmp_path / "again")  # as transformers' Trainer does
    again = load(AutoModelForCausalLM, tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(again(ids, use_cache=False).logits, whole)


def test_settings_that_do_not_fit_are_refused():
    from sympow.modeling import SympowConfig

    with pytest.raises(ValueError, match="p must be"):
        SympowConfig(dict(attention="sympow", p=3))
    with pytest.raises(ImportError, match="another version of the package sympow: .*'phi_scale'"):
        SympowConfig(dict(phi_scale=2.0))
