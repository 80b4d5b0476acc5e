"""What commit 4b3af4b wrote goes on: the run, its export and two states of texts in tests/old, made there by

    git worktree add /tmp/4b3af4b 4b3af4b && mkdir /tmp/made && cd /tmp/made
    python -c "for i in range(400): print(f'line {i}: {i * i} squares, not circles')" > source.txt
    python ../4b3af4b/data/text/prepare.py source.txt --out=text --document_length=512 --val_fraction=0.1
    python ../4b3af4b/train.py OF_MODEL OPTIONS --dataset=./text --out_dir=run --max_iters=60 --log_interval=20
    python ../4b3af4b/export.py run --to=export
    python ../4b3af4b/sample.py run --prompt="line 7: 49 squares, not" --max_new_tokens=0 --save_state=text.state
    python ../4b3af4b/sample.py run --load_state=text.state --prompt=" circles" --max_new_tokens=0 \
        --save_state=later.state
    python ../4b3af4b/evaluate.py run --length=64 --documents=2 --json  # BY_POSITION
    cp -r run whole
    python ../4b3af4b/train.py OF_MODEL OPTIONS --dataset=./text --out_dir=whole --max_iters=64  # LOSSES and VAL_LOSS

with OF_MODEL and OPTIONS below. environment.json, .lock, samples.jsonl and the export's README.md were left out. The
export's modeling_sympow.py ends in .txt, so that it is not read as a test's code.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import ROOT, assert_same_run, call, metrics, refusal
from safetensors.torch import save_file

from sympow import evaluate, export, sample, train
from sympow.data.dataset import Dataset
from sympow.data.files import read_json, sha256_of, write_json
from sympow.generation import state_file
from sympow.model import GPT, GPTConfig
from sympow.runs.load import load_folder, load_run
from sympow.runs.source import open_source

os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp())  # read when transformers is imported
OF_MODEL = "--n_layer=2 --n_head=2 --n_embd=8 --attention=sympow_gating".split()
OPTIONS = (
    "--block_size=32 --batch_size=4 --tokens_per_step=256 --eval_interval=100 --eval_tokens=512 --log_interval=1 "
    "--wandb=disabled --learning_rate=3e-2 --sample_tokens=0"
).split()
CHECKPOINT, STATES = "run/ckpt/step_00000060", ("text.state", "later.state")
LOSSES = {61: 1.1836695671081543, 62: 0.9687609672546387, 63: 1.1130516529083252, 64: 1.0624423027038574}
VAL_LOSS = 1.0745872855186462  # of step 64
BY_POSITION = [6.3883, 0.3054, 2.6401, 1.7316, 1.5329, 1.2356, 1.1745]  # from 1-1 to 33-64
PROMPT, LATER = [256, *b"line 7: 49 squares, not"], [*b" circles"]
# the last one stands for all settings that are never "auto"
MEANING = dict(positions="rotary", gate_bias=6.9, convolution=0, output_gate=False, embedding_norm=True)
ONE_BY_ONE = [pytest.param([name], marks=pytest.mark.slow) for name in MEANING]
MISSING = pytest.mark.parametrize("missing", [[], *ONE_BY_ONE, [*MEANING]], ids=",".join)


def remove_settings(path, names):
    """Remove settings of the model from a JSON file."""
    contents = read_json(path)
    write_json(path, contents | {"model": without(contents["model"], names)})


def without(settings, names):
    return {name: value for name, value in settings.items() if name not in names}


def assert_meaning(settings):
    assert {name: settings[name] for name in MEANING} == MEANING


@pytest.fixture
def old(missing, tmp_path, monkeypatch):
    """Work in a copy of tests/old, the settings `missing` removed from all of its files."""
    shutil.copytree(Path(ROOT, "tests", "old"), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    os.rename("export/modeling_sympow.txt", "export/modeling_sympow.py")
    progress, sums = (f"{CHECKPOINT}/{name}.json" for name in ("progress", "checksums"))
    for path in ("run/config.json", "export/config.json", progress):
        remove_settings(path, missing)
    entry = {"bytes": os.path.getsize(progress), "sha256": sha256_of(progress)}
    write_json(sums, read_json(sums) | {"progress.json": entry})
    for path in STATES:
        tensors, contents = state_file.read_file(path)
        description = json.dumps(contents | {"model": without(contents["model"], missing)})
        sha256 = state_file.hash_tensors(tensors, description)
        save_file(tensors, path, {"version": state_file.VERSION, "description": description, "sha256": sha256})


def go(dataset, *argv):
    return call(train.main, *OPTIONS, f"--dataset={dataset}", *argv)


@MISSING
def test_an_old_run_goes_on_with_its_own_settings_and_losses(old, dataset):
    shutil.copytree("run", "given")
    assert go(dataset, *OF_MODEL, "--max_iters=64", "--out_dir=run") == 0
    losses, val_losses = metrics("run"), metrics("run", "val_loss")
    assert {step: losses[step] for step in LOSSES} == pytest.approx(LOSSES, abs=1e-4)
    assert val_losses[64] == pytest.approx(VAL_LOSS, abs=1e-4)
    assert_meaning(read_json("run/config.json")["model"])
    given = [f"--{name}={value}" for name, value in MEANING.items()]
    assert go(dataset, *OF_MODEL, *given, "--max_iters=64", "--out_dir=given") == 0
    assert_same_run("given", "run")


@pytest.mark.parametrize("missing", [[*MEANING]])
@pytest.mark.parametrize(
    "argument,value",
    {
        "positions=none": "none",
        "positions=auto": "none",
        "gate_bias=auto": 3.0,
        "convolution=auto": 4,
        "output_gate": True,
        "embedding_norm=0": False,
    }.items(),
)
def test_an_old_run_does_not_go_on_with_another_value(old, dataset, argument, value, capsys):
    name = argument.partition("=")[0]
    assert go(dataset, *OF_MODEL, "--out_dir=run", f"--{argument}") == 2
    assert f"run was trained with {name}={MEANING[name]}, now {name}={value}: resume with what it was" in refusal(
        capsys
    )


@pytest.mark.parametrize("missing", [[]])
def test_a_setting_that_a_run_is_older_than_had_its_default(old, dataset, capsys):
    """Settings of training, as of models: somebody adds a schedule's, and resumes runs that began before."""
    write_json("run/config.json", without(read_json("run/config.json"), ["beta1", "decay_share"]))
    assert go(dataset, *OF_MODEL, "--out_dir=run", "--beta1=0.8") == 2
    assert "run was trained with beta1=0.9, now beta1=0.8" in refusal(capsys)
    assert go(dataset, *OF_MODEL, "--max_iters=64", "--out_dir=run") == 0


def read(model):
    """Return the logits [1, vocab_size] after PROMPT."""
    with torch.no_grad():
        return model(torch.tensor([PROMPT]))[0][:, -1]


def assert_close(logits, expected):
    assert (logits - expected).norm() < 1e-5 * expected.norm()


@MISSING
def test_an_old_export_and_old_states_have_the_logits_that_they_had(old, dataset, missing):
    from transformers import AutoModelForCausalLM

    from sympow.modeling import SympowForCausalLM

    exported, model = open_source("export", Dataset(dataset)), load_run("run", "cpu", "float32")[1]
    filled = GPT(GPTConfig(**exported.model)).eval()
    exported.fill(filled)
    models = [model, load_folder("export")[1].eval(), filled, SympowForCausalLM.from_pretrained("export").gpt]
    if not missing:  # the code of that time knows of no older files
        models.append(AutoModelForCausalLM.from_pretrained("export", trust_remote_code=True).gpt)
    (expected, state), (later, _) = (state_file.load_state(path, model) for path in STATES)
    for one in models:
        assert_meaning(vars(one.config))
        assert_close(read(one), expected)
    with torch.no_grad():
        assert_close(model.read(torch.tensor([LATER]), state)[0], later)
    with pytest.raises(ValueError, match="another model: positions='rotary' there, 'none' here, .*gate_bias=6.9 there"):
        state_file.load_state("text.state", GPT(GPTConfig(**without(exported.model, MEANING))))


@MISSING
def test_every_program_takes_an_old_run(old, dataset, capsys):
    assert call(evaluate.main, "run", f"--dataset={dataset}", "--length=64", "--documents=2", "--json") == 0
    losses = json.loads(capsys.readouterr().out.splitlines()[-1])["run"]
    assert [*losses.values()] == pytest.approx(BY_POSITION, abs=2e-4)
    assert call(sample.main, "run", "--load_state=text.state", "--prompt= circles", "--max_new_tokens=9") == 0
    assert call(export.main, "run", "--to=again") == 0
    assert torch.equal(*(read(load_folder(folder)[1]) for folder in ("export", "again")))
    for folder in ("run", "export"):
        assert go(dataset, f"--init_from={folder}", "--max_iters=1", f"--out_dir=from_{folder}") == 0
    for path in ("again", "from_run", "from_export"):
        assert_meaning(read_json(f"{path}/config.json")["model"])
    assert metrics("from_run") == metrics("from_export")
