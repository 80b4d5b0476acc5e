"""The optimizers and the schedules."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import metrics
from numerics import relative_error

from sympow import train
from sympow.attention import ATTENTIONS
from sympow.model import GPT, GPTConfig
from sympow.runs.settings import read_settings
from sympow.training import optimizer

SETTINGS = dict(learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95)


def make(name="muon", **settings):
    """Return a model and its optimizer of this name."""
    model = GPT(GPTConfig(**{**dict(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_kv_head=1), **settings}))
    return model, optimizer.make_optimizer(model, SimpleNamespace(optimizer=name, **SETTINGS))


def backward(model, factor=1.0):
    """Compute the gradient of the loss of random tokens, multiplied by `factor`."""
    ids = torch.randint(64, (2, 17))
    (model(ids[:, :-1], ids[:, 1:])[1] * factor).backward()


def step(model, chosen, factor=1.0):
    backward(model, factor)
    return optimizer.take_step(model, chosen, 1.0)


def everything(model, chosen):
    """Return copies of all weights, moments and counts of steps."""
    state = chosen.state_dict()["state"]
    moments = [x for i in sorted(state) for _, x in sorted(state[i].items())]
    return [x.detach().clone() for x in (*model.parameters(), *moments)]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_muon_has_the_linear_weights_of_attention_and_mlp_and_adamw_all_others(attention):
    model, chosen = make(attention=attention, bias=True)
    *adamw, muon = [{name for name, p in model.named_parameters() if any(p is x for x in group["params"])}
                    for group in chosen.param_groups]  # fmt: skip
    layers = "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"
    assert muon == {f"transformer.h.{i}.{layer}.weight" for i in (0, 1) for layer in layers}
    assert set.union(*adamw) == dict(model.named_parameters()).keys() - muon


@pytest.mark.parametrize("name", optimizer.OPTIMIZERS)
def test_biases_and_gains_do_not_decay(name):
    model, chosen = make(name, bias=True)
    decays = {p: group["weight_decay"] for group in chosen.param_groups for p in group["params"]}
    assert all(decays[p] == (0.1 if p.dim() > 1 else 0.0) for p in model.parameters())
    assert set(decays.values()) == {0.1, 0.0}


@pytest.mark.parametrize("batch", [optimizer.MUON_BATCH, 1])
def test_muon_takes_torchs_steps_with_q_k_and_v_each_by_itself(monkeypatch, batch):
    monkeypatch.setattr(optimizer, "MUON_BATCH", batch)
    monkeypatch.setitem(optimizer.NEWTON_SCHULZ_DTYPE, "cpu", torch.bfloat16)  # as torch's
    model, chosen = make(n_layer=3, activation="swiglu", mlp_width=24)
    matrices = [x for weight, rows in optimizer.muon_weights(model).items() for x in weight.detach().split(rows)]
    assert [len(x) for x in matrices[:6]] == [16, 8, 8, 16, 24, 24]  # q, k, v of c_attn; c_proj; gate and up of c_fc
    copies = [x.clone() for x in matrices]
    theirs = torch.optim.Muon(copies, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        backward(model)
        gradients = [x for weight, rows in optimizer.muon_weights(model).items() for x in weight.grad.split(rows)]
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient.clone()
        theirs.step()
        optimizer.take_step(model, chosen, 0)
        assert all(map(torch.equal, matrices, copies))
        assert all(p.grad is None for p in model.parameters())


def test_muon_computes_in_float32_on_a_cpu(monkeypatch):
    """Many CPUs have no instructions for bfloat16: they trained a small model at a quarter of the speed."""
    x = torch.randn(3, 24, 16)
    found = optimizer.orthogonalize(x)
    monkeypatch.setitem(optimizer.NEWTON_SCHULZ_DTYPE, "cpu", torch.float64)
    assert relative_error(found, optimizer.orthogonalize(x), 1.0) < 1e-5


@pytest.mark.parametrize("name", [*optimizer.OPTIMIZERS, "nadam"])
def test_a_step_without_a_finite_gradient_changes_no_bit(name, monkeypatch):
    """NAdam stands for an optimizer of one's own that knows nothing of found_inf."""
    monkeypatch.setitem(optimizer.OPTIMIZERS, "nadam", lambda model, cfg: torch.optim.NAdam(model.parameters()))
    model, chosen = make(name, attention="conformal_sympow")
    weights = [p.detach().clone() for p in model.parameters()]
    for factor in (math.nan, math.inf):  # at first there are no moments
        assert not step(model, chosen, factor).isfinite()
    assert all(map(torch.equal, weights, model.parameters()))
    undisturbed, its_optimizer = make(name, attention="conformal_sympow")
    undisturbed.load_state_dict(model.state_dict())
    for factor in (1, math.nan, 1, -math.inf, math.nan):
        torch.manual_seed(factor == 1)
        previous = everything(model, chosen)
        assert step(model, chosen, factor).isfinite() == (factor == 1)
        changed = [not torch.equal(*pair) for pair in zip(previous, everything(model, chosen))]
        assert all(changed[: len(weights)]) if factor == 1 else not any(changed)
        if factor == 1:
            torch.manual_seed(1)
            step(undisturbed, its_optimizer)
    assert all(map(torch.equal, everything(model, chosen), everything(undisturbed, its_optimizer)))


COSINE = dict(schedule="cosine", warmup_iters=4, max_iters=14)
TIMED = dict(**COSINE, max_seconds=10)
WSD = dict(schedule="wsd", decay_share=0.4)
RATES = [  # settings, seconds, {step: rate}
    (dict(warmup_iters=4, max_iters=14), 0, {0: 0.2, 3: 0.8, 4: 1.0, 1000: 1.0}),
    (COSINE, 0, {4: 1.0, 9: 0.55, 14: 0.1, 99: 0.1}),
    *((TIMED, seconds, {9: rate}) for seconds, rate in ((0, 0.55), (5, 0.55), (7.5, 0.2318), (10, 0.1), (11, 0.1))),
    (TIMED, 5, {4: 0.55, 9: 0.55, 14: 0.1}),  # the cosine ends with the steps or with the time, whichever is first
    (TIMED, 10, {0: 0.1, 2: 0.1}),  # no time for the warm-up
    (TIMED, 1, {0: 0.2, 3: 0.8}),
    (COSINE, 9, {9: 0.55, 14: 0.1}),
    (dict(max_seconds=1), 9, {9: 1.0, 14: 1.0}),
    (WSD, 0, {0: 1.0, 6: 1.0, 7: 0.775, 8: 0.55, 9: 0.325, 10: 0.1, 11: 0.1}),
    (dict(**WSD, warmup_iters=2), 0, {0: 1 / 3, 1: 2 / 3, 2: 1, 5: 1}),
    (dict(schedule="wsd", lr_decay_iters=100), 0, {80: 1, 90: 0.55}),
    (dict(schedule="wsd", decay_share=1.0), 0, {0: 1, 5: 0.55}),
    *(
        (dict(**WSD, max_seconds=100), seconds, {3: rate})
        for seconds, rate in ((0, 1), (59, 1), (80, 0.55), (101, 0.1))
    ),
]


@pytest.mark.parametrize("settings,seconds,expected", RATES)
def test_the_rate_warms_up_and_follows_its_schedule_by_steps_or_time(settings, seconds, expected):
    cfg = train.TrainConfig(**{**dict(learning_rate=1.0, min_lr=0.1, max_iters=10), **settings})
    rates = {step: optimizer.learning_rate(step, cfg, seconds) for step in expected}
    assert rates == pytest.approx(expected, abs=1e-4)


def test_decay_lr_is_understood(tmp_path):
    file = tmp_path / "nano.py"
    file.write_text("decay_lr = False\n")
    for argv, schedule in (
        (["--decay_lr=True"], "cosine"),
        (["--decay_lr"], "cosine"),
        (["--decay-lr", "0"], "constant"),
        ([str(file)], "constant"),
        ([str(file), "--schedule=wsd"], "wsd"),
    ):
        settings, _ = read_settings((train.TrainConfig,), argv)
        assert settings == {"schedule": schedule}
    assert train.TrainConfig().schedule == "constant" and train.TrainConfig().optimizer == "adamw"


def test_a_schedule_stays_and_a_constant_rate_or_a_fixed_end_takes_more_steps(go, refused):
    constant = ["--out_dir=out/a", "--sample_tokens=0"]
    assert go(*constant, "--max_iters=3") == 0
    reason = "was trained with max_iters=3 schedule=constant, now max_iters=6 schedule=wsd"
    assert reason in refused(go, *constant, "--schedule=wsd")
    assert go(*constant) == 0 and max(metrics("out/a")) == 6
    falling = ["--out_dir=out/b", "--sample_tokens=0", "--schedule=wsd", "--decay_share=0.5"]
    assert go(*falling, "--max_iters=3") == 0
    reason = "was trained with max_iters=3, now max_iters=4 (on which the rates of schedule=wsd depend)"
    assert reason in refused(go, *falling, "--max_iters=4")
    fixed = [*falling, "--out_dir=out/c", "--lr_decay_iters=3"]
    assert go(*fixed, "--max_iters=3") == 0 and go(*fixed, "--max_iters=4") == 0
    assert metrics("out/c", "lr")[3] == metrics("out/b", "lr")[3] and max(metrics("out/c")) == 4
