"""A trained softmax model is converted: attention with two branches, the layerwise start, and the experiment."""

# ruff: noqa: F811 (fixtures of other files)

import os
import pathlib
from dataclasses import replace

import helpers
import pytest
import torch
from helpers import SMALL
from numerics import relative_error
from test_experiments import experiment  # noqa: F401 (a fixture)
from test_llama import llama  # noqa: F401 (a fixture)
from torch.nn import functional as F

from sympow import train
from sympow.attention import ATTENTIONS
from sympow.data.files import read_json
from sympow.experiments import conversion, runs
from sympow.experiments.measure import model_size
from sympow.experiments.mqar_task import answers
from sympow.experiments.runs import SIZES
from sympow.experiments.train import Config, align
from sympow.experiments.window_power import WindowPower
from sympow.model import GPT, GPTConfig

HEADS = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, vocab_size=50)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "window_power", WindowPower)


def layer_of(attention, weights=(), **settings):
    """Return the attention of a model's first layer in float64, with random weights or those that are given."""
    layer = GPT(GPTConfig(attention=attention, **HEADS, **settings)).double().transformer.h[0].attn.mix
    for name, x in layer.named_parameters():
        x.data.copy_(weights[name] if weights else x + torch.randn_like(x))
    return layer


def attend(layer, x, qkv):
    """Return what a layer computes for its input x, which has no norm here, and its heads."""
    return layer(x if layer.input_weight() is None else F.linear(x, layer.input_weight()), qkv)[0]


# ---- the attention


@pytest.mark.parametrize("positions", ["rotary", "none"])
def test_window_power_is_the_sum_of_its_branches_by_a_share_of_each_token_and_head(positions):
    layer = layer_of("window_power", window=8, positions=positions)
    x, qkv = torch.randn(2, 30, 32).double(), torch.randn(2, 30, 8, 8).double()
    window = attend(layer_of("softmax", window=8, positions="rotary"), x, qkv)
    power = attend(layer_of("sympow_gating", dict(layer.named_parameters()), positions=positions), x, qkv)
    share = (x @ layer.W_share.t()).sigmoid()[..., None]
    assert relative_error(attend(layer, x, qkv), (1 - share) * window + share * power, 1e-6) < 1e-12
    for bias, branch in {-99: window, 99: power}.items():
        layer.bias = bias
        assert relative_error(attend(layer, x, qkv), branch, 1e-6) < 1e-12


def test_window_power_trains_all_weights_and_reports_nothing_that_it_has_not():
    model = GPT(GPTConfig(attention="window_power", window=8, **HEADS))
    ids = torch.randint(50, (2, 30))
    model(ids[:, :-1], ids[:, 1:])[1].backward()
    assert all(x.grad.any() for x in model.parameters()) and model.statistics(ids) == {}


def test_window_power_keeps_the_bytes_of_both_branches_after_any_text():
    def sizes(**settings):
        return model_size(GPT(GPTConfig(**HEADS, convolution=0, **settings)), None, [100, 10**6])["bytes"]

    state = 2 * 2 * 36 * (8 + 1) * 4  # layers, heads, features, values and their sum, float32
    both, window = sizes(attention="window_power", window=8), sizes(attention="softmax", window=8)
    assert both == [n + state for n in window] and window[0] == window[1]


def test_window_power_refuses_a_state_instead_of_leaving_it_out():
    model = GPT(GPTConfig(attention="window_power", window=8, **HEADS))
    with pytest.raises(ValueError, match="reads whole texts, without a state"):
        model.read(torch.zeros(1, 3, dtype=torch.int64), model.empty_state(1))


# ---- the layerwise start


def layer_errors(run):
    """Return the squared error of each layer's attention to the teacher's outputs for the same inputs."""
    ids, errors = torch.arange(64).view(2, 32), []
    x = run.plan.teacher.model.transformer.wte(ids).flatten(0, 1)
    for theirs, ours in zip(run.plan.teacher.model.transformer.h, run.model.transformer.h):
        y, target = (block.attn(x, block.ln_1, ids.shape, None, None)[0] for block in (ours, theirs))
        errors.append(F.mse_loss(y, target).item())
        x = sum(theirs(x, None, ids.shape)[:2])
    return errors


def test_the_attention_of_each_layer_learns_from_the_teachers_before_training(dataset, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    errors, unchanged = [], []

    def prepare(run):
        weights = {name: x.clone() for name, x in run.model.named_parameters() if ".attn." not in name}
        errors.append(layer_errors(run))
        align(run)
        errors.append(layer_errors(run))
        unchanged.extend(
            torch.equal(x, run.model.get_parameter(name)) for name, x in weights.items() if "ln_1" not in name
        )

    def go(steps, *options):
        settings = [x for x in SMALL if not x.startswith("--n_")]
        paths = f"--dataset={dataset}", f"--init_from={llama[0]}", f"--distill_from={llama[0]}", "--out_dir=out/a"
        main = lambda: train.main(prepare, Config)  # noqa: E731
        return helpers.call(main, *settings, *paths, "--attention=sympow_gating", f"--max_iters={steps}", *options)

    assert go(2, "--align_iters=40") == 0
    first, last = errors
    assert all(y < 0.8 * x for x, y in zip(first, last)) and len(unchanged) > 5 and all(unchanged)
    assert read_json("out/a/config.json")["align_iters"] == 40
    assert go(3, "--align_iters=40") == 0
    assert errors[2] == errors[3]  # it resumes, and has learned from the teacher before
    assert go(4, "--align_iters=50") == 2


# ---- the experiment


def test_a_model_that_was_not_trained_for_them_chooses_among_the_values_of_a_text():
    """The stand-in prefers tokens that are no values, then the right value."""

    class Oracle:
        config = GPTConfig(**HEADS)

        def hidden(self, ids):
            keys, values = ids[:, :8].unflatten(1, (4, 2)).unbind(2)
            paired = (ids[:, :, None] == keys[:, None]).to(ids.dtype)
            return F.one_hot((paired @ values[:, :, None])[..., 0], 50) + 2 * (torch.arange(50) < 25), None

        def logits(self, x):
            return x

    logits, places, values = answers(Oracle(), 20, 64, 4, 50)
    right = logits.take_along_dim(values[:, None], 2).argmax(2) == torch.arange(4)
    assert right.all() and not (logits.argmax(2) == values).any() and places.shape == (20, 4)


def likeness_of(kl):
    """Return what is measured of a model with this divergence."""
    spans = dict(spans=6 * [kl])
    return dict(kl=spans | dict(texts=[kl]), recall=dict(spans=6 * [0.5]), size=dict(parameters=1, bytes=6 * [10**6]))


def test_the_best_arm_is_changed_and_the_best_of_all_is_trained_longer(experiment, tmp_path, monkeypatch):
    """With records in which the hybrid has the least validation loss, and more so without the layerwise start."""
    main, started, _ = experiment
    best = "3 p=2 to 1 window 512"
    losses = dict(zip(conversion.ARMS, (0.5, 3.0, 4.0, 2.0, 1.0))) | {f"{best}, no layerwise start": 0.75}
    branches = {"": likeness_of(0.25), ", window alone": likeness_of(0.75)}
    monkeypatch.setattr(runs, "read_json", lambda path: read_json(path) if "tiny" in path else dict(likeness=branches))

    def read_losses(folder):
        line = dict(tokens=10, val_loss=losses.get(started[-1], 9.0), train_loss=4.0, tok_per_sec=7.0, context=32)
        return [line], [line]

    monkeypatch.setattr(runs, "read_losses", read_losses)
    options = dict(name="conversion", experiment=(conversion.plan, conversion.report))
    assert main(**options) == 3 and started == [*conversion.ARMS]
    changes = ["no layerwise start", "no positions"]
    assert main(**options) == 3 and started[5:] == [f"{best}, {change}" for change in changes]
    assert main(**options) == 0 and started[7:] == [f"{best}, no layerwise start, gates of 0.95, 50 M tokens"]
    text = pathlib.Path("out/experiments/tiny/conversion.md").read_text()
    answers = f"{6 * ' 0.5000 |'} 1.0 / 1.0 / 1.0 / 1.0 / 1.0 / 1.0 |\n"
    assert f"| {best}, window alone | 1.0000 |{6 * ' 0.7500 |'}{answers}" in text
    assert f"| window 64 | 4.0000 |{6 * ' 0.2500 |'}{answers}" in text


def test_arms_read_as_many_tokens_and_differ_in_attention_alone():
    planned = conversion.plan(replace(SIZES["small"], dataset="here", folder="nowhere"))
    _, *arms = [run.settings for run in planned]
    assert {x["max_iters"] * x["tokens_per_step"] for x in arms} == {20_971_520}
    common = {name for name in arms[0] if all(name in x for x in arms) and len({x[name] for x in arms}) > 1}
    assert common <= {"attention", "window"}
    assert [run.measures["likeness"]["branches"] for run in planned].count({"": 0}) == 4


@pytest.mark.slow
def test_a_teacher_of_transformers_is_converted_and_measured(dataset, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", helpers.ROOT)
    os.makedirs("out")
    os.symlink(llama[0], "out/teacher")
    size = replace(SIZES["tiny"], eval_tokens=512)
    monkeypatch.setitem(SIZES, "tiny", size)

    def main():
        runs.main("conversion", lambda size: conversion.plan(size)[:2], conversion.report)

    assert helpers.call(main, "--size=tiny", f"--dataset={dataset}") == 0
    teacher, arm = read_json("out/experiments/tiny/conversion.json")["runs"].values()
    assert max(teacher["measures"]["likeness"][""]["kl"]["spans"]) < 1e-6
    kl = {name: branch["kl"]["spans"][0] for name, branch in arm["measures"]["likeness"].items()}
    assert len(kl) == 3 and 0 < kl[""] and len({*kl.values()}) == 3
