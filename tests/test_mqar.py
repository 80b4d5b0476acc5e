"""Multi-query associative recall: its texts, how answers are scored, and the experiment's plan and report."""

import os
import pathlib

import helpers
import pytest
import torch
from torch.nn import functional as F

from sympow.data.files import read_json, write_json
from sympow.experiments import mqar, mqar_task, runs
from sympow.experiments.measure import model_size
from sympow.experiments.mqar_task import TASKS, Task, make_texts, right_answers
from sympow.model import GPT, GPTConfig
from sympow.runs.settings import fields_of

SEED = int(os.environ.get("TEST_SEED", 0))
SIZES = {(*sizes[:2], task.vocab_size) for task in TASKS.values() for sizes in (*task.training, *task.tests)}


def texts_of(length, pairs, vocab_size, count=50):
    """Return what `make_texts` does."""
    return make_texts(torch.Generator().manual_seed(SEED), count, length, pairs, vocab_size)


@pytest.mark.parametrize("length,pairs,vocab_size", sorted(SIZES))
def test_each_key_is_paired_once_and_asked_once_for_its_value(length, pairs, vocab_size):
    ids, places, answers = texts_of(length, pairs, vocab_size)
    keys, values = ids[:, : 2 * pairs].unflatten(1, (pairs, 2)).unbind(2)
    assert ids.shape == (50, length) and 0 <= ids.min() and ids.max() < vocab_size
    assert keys.min() >= 1 and keys.max() < vocab_size // 2 <= values.min()
    for row in (*keys, *values, *places):
        assert len(row.unique()) == pairs
    assert torch.equal(ids.gather(1, places), keys) and torch.equal(answers, values)
    assert places.min() >= 2 * pairs and places.max() < length and not (places % 2).any()
    assert all(torch.equal(a, b) for a, b in zip(texts_of(length, pairs, vocab_size), (ids, places, answers)))


def test_questions_follow_a_power_law():
    _, places, _ = texts_of(20, 2, 64, 20_000)
    shares = (places[:, 0] / 2 - 2).long().bincount() / 20_000  # the first of two draws without replacement
    law = torch.arange(1, 9) ** -0.99
    assert (shares - law / law.sum()).abs().max() < 0.02
    assert (places[:, 0] != places[:, 1]).all()


class Oracle:
    """Stands for a model that has read the pairs."""

    def __init__(self, task, pairs):
        self.vocab_size, self.pairs = task.vocab_size, pairs

    def hidden(self, ids):
        keys, values = ids[:, : 2 * self.pairs].unflatten(1, (self.pairs, 2)).unbind(2)
        paired = (ids[:, :, None] == keys[:, None]).to(ids.dtype)  # [B, T, pairs]
        return F.one_hot((paired @ values[:, :, None])[..., 0], self.vocab_size), None

    def logits(self, x):
        return x


class Guess(Oracle):
    """Stands for a model that knows which tokens are values."""

    def logits(self, x):
        return torch.rand(x.shape) * (torch.arange(self.vocab_size) >= self.vocab_size // 2)


def test_an_oracle_answers_every_question_and_a_guess_has_its_chance():
    task = TASKS["mqar_tiny"]
    assert right_answers(Oracle(task, 8), task, 64, 8) == 1.0
    torch.manual_seed(SEED)
    chance = 1 / 32
    assert abs(right_answers(Guess(task, 8), task, 64, 8) - chance) < 5 * (chance / 8000) ** 0.5


def test_one_seed_gives_the_same_training_and_another_seed_another(monkeypatch):
    monkeypatch.setattr(mqar_task, "EPOCHS", 2)
    monkeypatch.setattr(mqar_task, "BATCH", 32)
    task = Task(16, ((8, 1, 128), (12, 2, 64)), ((8, 1), (12, 2)), 16)
    model = GPT(GPTConfig(attention="sympow", n_layer=1, n_head=1, n_embd=16, vocab_size=16))
    a, b, c = (mqar_task.recall(model, task, 1e-2, seed) for seed in (1, 1, 2))
    assert a == b != c and a["epochs"] == 2 and list(a["accuracy"]) == ["1 in 8", "2 in 12"]


def test_training_ends_once_the_mean_of_the_tests_is_high_enough(monkeypatch):
    monkeypatch.setattr(mqar_task, "right_answers", lambda *args: 1.0)
    task, model = Task(16, ((8, 1, 256),), ((8, 1),), 16), GPT(GPTConfig(n_layer=1, n_head=1, n_embd=16, vocab_size=16))
    assert mqar_task.recall(model, task, 1e-2, 1) == dict(rate=1e-2, epochs=1, accuracy={"1 in 8": 1.0})


# ---- the plan and the report


def bytes_of(name):
    """Return the bytes that a contender keeps after the longest test."""
    settings = mqar.make_run("mqar", name, 1e-3).settings
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=8192, **fields_of(GPTConfig, settings)))
    return model_size(model, None, [1024])["bytes"][0]


@pytest.mark.parametrize("heads,window", [(16, 80), (32, 464)])
def test_a_window_and_the_state_beside_it_keep_as_many_bytes(heads, window):
    assert 1 <= bytes_of(f"softmax: window of {window}") / bytes_of(f"p=2: heads of {heads}") < 1.1


def test_the_best_rate_of_each_contender_is_reported(tmp_path, monkeypatch, refused):
    """With records in which each model is best at 1e-3."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("docs/data")
    started = []

    def commands(run):
        started.append(run)
        share = {3e-3: 0.5, 1e-3: 0.75, 1e-2: 0.25}[run.settings["learning_rate"]]
        shares = dict.fromkeys(("64 in 256", "128 in 512", "256 in 1,024"), share)
        recalled = dict(rate=run.measures["mqar"]["rate"], epochs=9, accuracy=shares)
        measures = dict(mqar=recalled, size=dict(parameters=7, bytes=[1000]))
        write_json(f"{run.folder}.json", dict(machine=dict(device="a GPU"), measures=measures))
        return []

    monkeypatch.setattr(mqar.RecallRun, "commands", commands)

    def main(*options):
        return helpers.call(lambda: runs.main("mqar", mqar.plan, mqar.report, corpus=""), *options)

    assert main() == 0 and len(started) == 45 == len({run.folder for run in started})
    assert {run.settings["learning_rate"] for run in started[:15]} == {3e-3}
    text = pathlib.Path("docs/data/mqar.md").read_text()
    for name in mqar.CONTENDERS:
        assert f"\n| {name} | 1,000 | 0.001 | 75.0% | 75.0% | 75.0% |\n" in text
    assert main() == 0 and len(started) == 45  # all have records
    assert refused(main, "--dataset=source")


@pytest.mark.slow
def test_a_model_learns_to_recall(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", helpers.ROOT)

    def main():
        runs.main("mqar", lambda size: mqar.plan(size)[1:2], mqar.report, corpus="")

    assert helpers.call(main, "--size=tiny") == 0
    (record,) = read_json("out/experiments/tiny/mqar.json")["runs"].values()
    recalled = record["measures"]["mqar"]
    assert record["corpus"]["name"] == "mqar_tiny" and recalled["accuracy"]["8 in 64"] > 0.9  # a guess: 0.03
