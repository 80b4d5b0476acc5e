"""What commit 4b3af4b wrote goes on: the run, its export and two states of texts in tests/old, made there by

    git worktree add /tmp/4b3af4b 4b3af4b && mkdir /tmp/made && cd /tmp/made
    python -c "for i in range(400): print(f'line {i}: {i * i} squares, not circles')" > source.txt
    python ../4b3af4b/data/text/prepare.py source.txt --out=text --document_length=512 --val_fraction=0.1
    python ../4b3af4b/train.py OPTIONS --dataset=./text --out_dir=run --max_iters=60 --log_interval=20
    python ../4b3af4b/export.py run --to=export
    python ../4b3af4b/sample.py run --prompt="line 7: 49 squares, not" --max_new_tokens=0 --save_state=text.state
    python ../4b3af4b/sample.py run --load_state=text.state --prompt=" circles" --max_new_tokens=0 \
        --save_state=later.state
    python ../4b3af4b/evaluate.py run --length=64 --documents=2 --json  # BY_POSITION
    cp -r run whole
    python ../4b3af4b/train.py OPTIONS --dataset=./text --out_dir=whole --max_iters=64  # LOSSES and VAL_LOSS

with OPTIONS below. environment.json, .lock, samples.jsonl and the export's README.md were left out, and the export's
modeling_sympow.py ends in .txt, so that it is not read as a test's code.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import ROOT, call, metrics, refusal
from safetensors.torch import load_file, save_file

from sympow import evaluate, export, sample, train
from sympow.attention.variant import RECIPE
from sympow.data.dataset import Dataset
from sympow.data.files import sha256_of
from sympow.generation import state_file
from sympow.model import GPT, GPTConfig
from sympow.runs import source
from sympow.runs.load import load_exported, load_run

os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp())  # read when transformers is imported
OPTIONS = (
    "--n_layer=2 --n_head=2 --n_embd=8 --attention=sympow_gating --block_size=32 --batch_size=4 --tokens_per_step=256 "
    "--eval_interval=100 --eval_tokens=512 --log_interval=1 --wandb=disabled --learning_rate=3e-2 --sample_tokens=0"
).split()
CHECKPOINT = "run/ckpt/step_00000060"
LOSSES = {61: 1.1836695671081543, 62: 0.9687609672546387, 63: 1.1130516529083252, 64: 1.0624423027038574}
VAL_LOSS = 1.0745872855186462  # of step 64
BY_POSITION = {"5-8": 1.731603018939495, "17-32": 1.2356126266531646, "33-64": 1.1745480485260487}
PROMPT, LATER = [256, *b"line 7: 49 squares, not"], [*b" circles"]
MEANING = dict(positions="rotary", gate_bias=6.9, convolution=0, output_gate=False)
MISSING = pytest.mark.parametrize("missing", [[], *([name] for name in MEANING), [*MEANING]], ids=",".join)


@pytest.fixture
def old(tmp_path, monkeypatch):
    """Work in a copy of tests/old; return a function that removes settings of the model from all files in it."""
    shutil.copytree(Path(ROOT, "tests", "old"), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    os.rename("export/modeling_sympow.txt", "export/modeling_sympow.py")

    def edit(path, change):
        contents = json.loads(Path(path).read_text())
        change(contents)
        Path(path).write_text(json.dumps(contents))

    def remove(names):
        without = lambda contents: [contents["model"].pop(name) for name in names]
        for path in ("run/config.json", f"{CHECKPOINT}/progress.json", "export/config.json"):
            edit(path, without)
        path = Path(CHECKPOINT, "progress.json")
        entry = {"progress.json": {"bytes": path.stat().st_size, "sha256": sha256_of(path)}}
        edit(f"{CHECKPOINT}/checksums.json", lambda sums: sums.update(entry))
        for path in ("text.state", "later.state"):
            tensors, contents = state_file.read_file(path)
            without(contents)
            description = json.dumps(contents)
            sha256 = state_file.hash_tensors(tensors, description)
            save_file(tensors, path, {"version": state_file.VERSION, "description": description, "sha256": sha256})

    return remove


def go(dataset, *argv):
    return call(train.main, *OPTIONS, f"--dataset={dataset}", "--max_iters=64", *argv)


def recipe_of(settings):
    return {name: settings["model"][name] for name in MEANING}


def test_what_an_old_file_does_not_have_means_what_it_was():
    assert RECIPE == MEANING


@MISSING
def test_an_old_run_goes_on_with_its_own_settings_and_losses(old, dataset, missing):
    old(missing)
    shutil.copytree("run", "given")
    assert go(dataset, "--out_dir=run") == 0
    losses = metrics("run")
    assert {step: losses[step] for step in LOSSES} == pytest.approx(LOSSES, abs=1e-4)
    assert metrics("run", "val_loss")[64] == pytest.approx(VAL_LOSS, abs=1e-4)
    for path in ("run/config.json", "run/ckpt/step_00000064/progress.json"):
        assert recipe_of(json.loads(Path(path).read_text())) == MEANING
    assert go(dataset, "--out_dir=given", *(f"--{name}={value}" for name, value in MEANING.items())) == 0
    for file in ("model", "optimizer"):
        run, given = (load_file(f"{name}/ckpt/step_00000064/{file}.safetensors") for name in ("run", "given"))
        assert run.keys() == given.keys() and all(torch.equal(x, given[name]) for name, x in run.items())


@pytest.mark.parametrize("setting", ["positions=none", "gate_bias=3.0", "convolution=4", "output_gate=True"])
def test_an_old_run_does_not_go_on_with_another_value(old, dataset, setting, capsys):
    name = setting.partition("=")[0]
    for value in (setting, f"{name}=auto"):
        assert go(dataset, "--out_dir=run", f"--{value}") == 2
        assert f"run was trained with {name}={MEANING[name]}, now {setting}" in refusal(capsys)


def read(model):
    """Return the logits [1, vocab_size] after PROMPT."""
    with torch.no_grad():
        output = model(torch.tensor([PROMPT]))
    return (output.logits if hasattr(output, "logits") else output[0])[:, -1]


@MISSING
def test_an_old_export_and_old_states_have_the_logits_that_they_had(old, dataset, missing):
    from transformers import AutoModelForCausalLM

    from sympow.modeling import SympowForCausalLM

    old(missing)
    exported = source.open_source("export", Dataset(dataset))
    filled = GPT(GPTConfig(**exported.model)).eval()
    exported.fill(filled)
    model = load_run("run", "cpu", "float32")[1]
    models = [model, load_exported("export", "cpu")[0], filled, SympowForCausalLM.from_pretrained("export").gpt]
    if not missing:  # the file of that time reads config.json without with_defaults
        models += [AutoModelForCausalLM.from_pretrained("export", trust_remote_code=True).gpt]
    (expected, state), (later, _) = (state_file.load_state(path, model) for path in ("text.state", "later.state"))
    for one in models:
        assert recipe_of({"model": vars(one.config)}) == MEANING
        assert (read(one) - expected).norm() < 1e-5 * expected.norm()
    with torch.no_grad():
        logits, _ = model.read(torch.tensor([LATER]), state)
    assert (logits - later).norm() < 1e-5 * later.norm()


@MISSING
def test_every_program_takes_an_old_run(old, dataset, missing, capsys):
    old(missing)
    assert call(evaluate.main, "run", f"--dataset={dataset}", "--length=64", "--documents=2", "--json") == 0
    losses = json.loads(capsys.readouterr().out.splitlines()[-1])["run"]
    assert {name: losses[name] for name in BY_POSITION} == pytest.approx(BY_POSITION, abs=1e-4)
    options = ["--temperature=0", "--max_new_tokens=9"]
    assert call(sample.main, "run", "--prompt=line 7: 49 squares, not circles", *options) == 0
    text = capsys.readouterr().out
    assert call(sample.main, "run", "--load_state=text.state", "--prompt= circles", *options) == 0
    assert text == "line 7: 49 squares, not" + capsys.readouterr().out
    assert call(export.main, "run", "--to=again") == 0
    old_export, new = (load_exported(folder, "cpu")[0] for folder in ("export", "again"))
    assert recipe_of(json.loads(Path("again/config.json").read_text())) == MEANING
    assert torch.equal(read(old_export), read(new))
    for name, folder in (("a", "run"), ("b", "export")):
        options = [x for x in OPTIONS if not x.startswith(("--n_", "--attention"))]
        assert (
            call(
                train.main,
                *options,
                f"--init_from={folder}",
                f"--dataset={dataset}",
                "--max_iters=1",
                f"--out_dir={name}",
            )
            == 0
        )
        assert recipe_of(json.loads(Path(name, "config.json").read_text())) == MEANING
    assert metrics("a") == metrics("b")
