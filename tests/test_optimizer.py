"""The optimizers and the schedules."""

import json
import math
import os
import shutil
import types

import pytest
import torch
from helpers import SMALL, call, dataset, join, metrics, start_ranks  # noqa: F401

from sympow import train
from sympow.attention import ATTENTIONS
from sympow.model import GPT, GPTConfig
from sympow.runs import checkpoint
from sympow.training import muon, optimizer
from sympow.runs.settings import read_settings

SETTINGS = dict(optimizer="muon", learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95)


@pytest.fixture
def go(dataset, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    return lambda *argv: call(train.main, *SMALL, f"--dataset={dataset}", *argv)


def tiny(**settings):
    return GPT(GPTConfig(**{**dict(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_kv_head=1), **settings}))


def made(name="muon", **settings):
    """Return a model and its optimizer of this name."""
    model = tiny(**settings)
    cfg = types.SimpleNamespace(**{**SETTINGS, "optimizer": name})
    return model, optimizer.make_optimizer(model, cfg)


def step(model, chosen, factor=1.0):
    """Take a step on random tokens, with the loss multiplied by `factor`."""
    ids = torch.randint(64, (2, 17))
    (model(ids[:, :-1], ids[:, 1:])[1] * factor).backward()
    return optimizer.take_step(model, chosen, 1.0)


def everything(model, chosen):
    """Return copies of all weights, moments and counts of steps."""
    state = chosen.state_dict()["state"]
    return [x.detach().clone() for x in (*model.parameters(), *(x for of in state.values() for x in of.values()))]


# ---- Muon


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_muon_has_the_linear_weights_of_attention_and_mlp_and_adamw_all_others(attention):
    model = tiny(attention=attention, bias=True)
    names = {id(p): name for name, p in model.named_parameters()}
    of_muon = {names[id(p)] for p, _ in optimizer.muon_weights(model)}
    layers = "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"
    assert of_muon == {f"transformer.h.{i}.{layer}.weight" for i in (0, 1) for layer in layers}
    chosen = optimizer.MuonAndAdamW(model, types.SimpleNamespace(**SETTINGS))
    assert {names[id(p)] for p in chosen.others} == {*names.values()} - of_muon
    assert sum(p.numel() for p in (*chosen.others, *chosen.matrices)) == model.parameter_count()
    assert sum(len(group["params"]) for group in chosen.param_groups) == len(names) + 4  # c_attn is three, twice


def test_q_k_and_v_are_made_orthogonal_each_by_itself():
    model, chosen = made()
    weight = model.transformer.h[0].attn.c_attn.weight
    apart = [x.clone() for x in weight.detach().split((16, 8, 8))]
    whole = weight.detach().clone()
    options = dict(lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    alone, together = torch.optim.Muon(apart, **options), torch.optim.Muon([whole], **options)
    for _ in range(3):
        ids = torch.randint(64, (2, 17))
        model(ids[:, :-1], ids[:, 1:])[1].backward()
        whole.grad = weight.grad.clone()
        for x, grad in zip(apart, whole.grad.split((16, 8, 8))):
            x.grad = grad
        alone.step(), together.step()
        optimizer.take_step(model, chosen, 0)
        assert torch.equal(weight, torch.cat(apart)) and not torch.allclose(weight, whole)
        assert all(p.grad is None for p in (*model.parameters(), *chosen.matrices))


@pytest.mark.parametrize("weight_decay", [0, 0.1])
def test_matrices_of_one_shape_take_the_steps_of_torch_s_muon_together(monkeypatch, weight_decay):
    shapes = [(24, 24), (24, 96), (96, 24), (24, 24), (96, 24), (24, 24), (24, 24)]
    ours, theirs = ([torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
                    for _ in range(2))  # fmt: skip
    options = dict(lr=1e-2, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    monkeypatch.setattr(muon, "BATCH", 3 * 24 * 24)  # three of the small ones at a time, one of the large
    batched, one_by_one = muon.BatchedMuon(ours, **options), torch.optim.Muon(theirs, **options)
    for p in ours:
        batched.state[p]["momentum_buffer"] = torch.zeros_like(p)
    batched.found_inf = torch.zeros(())
    for _ in range(3):
        for p, q in zip(ours, theirs):
            p.grad = q.grad = torch.randn(p.shape)
        batched.step(), one_by_one.step()
        for p, q in zip(ours, theirs):
            assert torch.equal(p, q)
            assert torch.equal(batched.state[p]["momentum_buffer"], one_by_one.state[q]["momentum_buffer"])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_without_a_finite_gradient_changes_no_bit(name):
    model, chosen = made(name, attention="conformal_sympow")
    weights = [p.detach().clone() for p in model.parameters()]
    for factor in (math.nan, math.inf):  # before there are moments
        assert not step(model, chosen, factor).isfinite()
    assert all(map(torch.equal, weights, model.parameters()))
    again, other = made(name, attention="conformal_sympow")
    again.load_state_dict(model.state_dict())
    for factor in (1, math.nan, 1, -math.inf, math.nan):
        torch.manual_seed(factor == 1)
        before = everything(model, chosen)
        assert step(model, chosen, factor).isfinite() == (factor == 1)
        same = [torch.equal(*pair) for pair in zip(before, everything(model, chosen))]
        assert not any(same) if factor == 1 and len(same) == len(before) > len(weights) else all(same) or factor == 1
        if factor == 1:
            torch.manual_seed(1)
            step(again, other)
    assert all(map(torch.equal, everything(model, chosen), everything(again, other)))


def test_a_checkpoint_of_muon_has_all_of_its_state(tmp_path):
    model, chosen = made()
    step(model, chosen)
    with checkpoint.Writer(tmp_path) as writer:
        writer.save(model, chosen, checkpoint.Progress(1))
    other, loaded = made()
    checkpoint.load(checkpoint.newest(tmp_path, thorough=True), other, loaded)
    for pair in ((model, chosen), (other, loaded)):
        torch.manual_seed(5)
        step(*pair)
    assert all(map(torch.equal, everything(model, chosen), everything(other, loaded)))
    assert set(model.state_dict()) == set(tiny().state_dict())


@pytest.mark.parametrize("extra", [
    ["--optimizer=muon", "--schedule=wsd", "--decay_share=0.5", "--weight_decay=0.1", "--dropout=0.1"],
    ["--optimizer=muon", "--dtype=bfloat16", "--schedule=cosine"],
])  # fmt: skip
def test_a_run_that_was_cut_goes_on_with_the_same_bits(go, extra):
    extra = ["--attention=sympow_gating", "--max_iters=4", "--eval_interval=2", "--warmup_iters=1", *extra]
    assert go(*extra, "--out_dir=out/whole") == 0
    shutil.copytree("out/whole", "out/cut")
    shutil.rmtree("out/cut/ckpt/step_00000004")
    assert go(*extra, "--out_dir=out/cut") == 0
    for key in ("train_loss", "val_loss", "grad_norm", "lr"):
        assert metrics("out/cut", key) == metrics("out/whole", key)
    files = [f"out/{name}/ckpt/step_00000004/model.safetensors" for name in ("whole", "cut")]
    assert open(files[0], "rb").read() == open(files[1], "rb").read()
    assert metrics("out/cut", "val_loss")[4] < metrics("out/cut")[1]


@pytest.mark.slow
def test_ranks_take_the_same_steps_with_muon(go, dataset):  # noqa: F811
    """Rounding decides in which direction small singular values go, so that losses agree less closely than AdamW's."""
    extra = ["--optimizer=muon", "--max_iters=3"]
    assert go("--out_dir=out/one", *extra) == 0
    two = start_ranks(2, train.main, *SMALL, f"--dataset={dataset}", "--out_dir=out/two", *extra)
    assert join(*two) == [0, 0]
    assert metrics("out/two") == pytest.approx(metrics("out/one"), rel=5e-3)
    assert metrics("out/two", "grad_norm")[1] == pytest.approx(metrics("out/one", "grad_norm")[1], rel=1e-2)


# ---- schedules


def rates(steps, **settings):
    cfg = train.TrainConfig(**{**dict(learning_rate=1.0, min_lr=0.1, max_iters=10), **settings})
    return [optimizer.learning_rate(i, cfg) for i in steps]


def test_wsd_stays_and_goes_down_on_a_line_over_its_share_of_the_run():
    wsd = dict(schedule="wsd", decay_share=0.4)
    assert rates(range(12), **wsd)[:7] == [1.0] * 7
    assert rates((7, 8, 9, 10, 11), **wsd) == pytest.approx([0.775, 0.55, 0.325, 0.1, 0.1])
    assert rates((0, 1, 2, 5), warmup_iters=2, **wsd) == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert rates((80, 90), lr_decay_iters=100, schedule="wsd") == pytest.approx([1, 0.55])
    assert rates((0, 5), schedule="wsd", decay_share=1.0) == pytest.approx([1, 0.55])
    cfg = train.TrainConfig(learning_rate=1.0, min_lr=0.1, max_iters=10, max_seconds=100, **wsd)
    assert [optimizer.learning_rate(3, cfg, t) for t in (0, 59, 80, 100, 101)] == pytest.approx([1, 1, 0.55, 0.1, 0.1])


def test_decay_lr_is_understood_and_refused_beside_another_schedule(tmp_path, capsys):
    file = tmp_path / "nano.py"
    file.write_text("decay_lr = False\n")
    read = lambda *argv: read_settings((train.TrainConfig,), argv)[0]
    for argv, schedule in (
        (["--decay_lr=True"], "cosine"), (["--decay_lr"], "cosine"), (["--decay-lr", "0"], "constant"),
        ([str(file)], "constant"), ([str(file), "--decay_lr=True", "--schedule=cosine"], "cosine"),
    ):  # fmt: skip
        assert read(*argv) == {"schedule": schedule}
    for argv in (["--decay_lr=True", "--schedule=wsd"], [str(file), "--schedule=cosine"]):
        with pytest.raises(SystemExit) as stopped:
            read(*argv)
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.count("\n") == 1
        assert f"{argv[-1][2:].replace('=', ' is ')}: give one of them" in error
    assert train.TrainConfig().schedule == "constant" and train.TrainConfig().optimizer == "adamw"


def test_a_schedule_may_change_while_no_step_has_had_another_rate(go, capsys):
    stable = ["--sample_tokens=0", "--max_iters=6", "--schedule=wsd", "--decay_share=0.5"]
    assert go("--out_dir=out/whole", *stable) == 0
    assert go("--out_dir=out/a", "--sample_tokens=0", "--max_iters=3") == 0  # constant
    shutil.copytree("out/a", "out/b")
    assert go("--out_dir=out/b", "--sample_tokens=0", "--schedule=cosine") == 2
    assert "with max_iters=3 schedule=constant, now max_iters=6 schedule=cosine" in capsys.readouterr().err
    assert go("--out_dir=out/a", *stable) == 0
    assert metrics("out/a") == metrics("out/whole") and metrics("out/a", "lr") == metrics("out/whole", "lr")
    assert go("--out_dir=out/a", *stable, "--max_iters=9") == 2  # it has gone down
    assert "max_iters=6, now" in capsys.readouterr().err
    config = json.load(open("out/b/config.json"))
    json.dump({**config, "warmup_iters": "edited"}, open("out/b/config.json", "w"))
    assert go("--out_dir=out/b", *stable) == 2 and capsys.readouterr().err.count("\n") == 1
    json.dump({**config, "schedule": "wsd", "max_seconds": 900.0}, open("out/b/config.json", "w"))  # rates by time
    assert go("--out_dir=out/b", *stable, "--max_seconds=900", "--decay_share=0.2", "--max_iters=8") == 2
    assert go("--out_dir=out/b", *stable, "--max_seconds=900", "--decay_share=0.2", "--lr_decay_iters=3") == 0


@pytest.mark.parametrize(
    "option,message",
    [
        ("--optimizer=sgd", "optimizer must be one of adamw, muon, got 'sgd'"),
        ("--dtype=float16", "dtype must be one of auto, float32, bfloat16, got 'float16'"),
        ("--schedule=linear", "schedule must be one of constant, cosine, wsd, got 'linear'"),
        ("--decay_share=0", "decay_share must be above 0 and at most 1, got 0.0"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_made(go, capsys, option, message):
    assert go(option, "--out_dir=out/a") == 2 and not os.path.exists("out")
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
