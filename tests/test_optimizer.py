"""The optimizers and the schedules."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import SMALL, call, dataset, join, metrics, start_ranks  # noqa: F401

from sympow import train
from sympow.attention import ATTENTIONS
from sympow.model import GPT, GPTConfig
from sympow.runs import checkpoint
from sympow.runs.settings import read_settings
from sympow.training import optimizer

SETTINGS = dict(learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95)


@pytest.fixture
def go(dataset, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    return lambda *argv: call(train.main, *SMALL, f"--dataset={dataset}", *argv)


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


@pytest.mark.parametrize("batch", [optimizer.MUON_BATCH, 1])
def test_muon_takes_torchs_steps_with_q_k_and_v_each_by_itself(monkeypatch, batch):
    monkeypatch.setattr(optimizer, "MUON_BATCH", batch)
    model, chosen = make(n_layer=3)
    matrices = [x for weight, rows in optimizer.muon_weights(model).items() for x in weight.detach().split(rows)]
    assert [len(x) for x in matrices[:4]] == [16, 8, 8, 16]  # q, k and v of c_attn, and c_proj
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


def test_a_checkpoint_of_muon_has_all_of_its_state(tmp_path):
    pairs = [make(), make()]
    step(*pairs[0])
    with checkpoint.Writer(tmp_path) as writer:
        writer.save(*pairs[0], checkpoint.Progress(1))
    checkpoint.load(checkpoint.newest(tmp_path, thorough=True), *pairs[1])
    for pair in pairs:
        torch.manual_seed(5)
        step(*pair)
    assert all(map(torch.equal, everything(*pairs[0]), everything(*pairs[1])))
    assert pairs[0][0].state_dict().keys() == make("adamw")[0].state_dict().keys()


@pytest.mark.slow
def test_ranks_take_the_same_steps_with_muon(go, dataset):  # noqa: F811
    """Rounding decides in which direction small singular values go, so that losses agree less closely than AdamW's."""
    extra = ["--optimizer=muon", "--max_iters=3"]
    assert go("--out_dir=out/one", *extra) == 0
    two = start_ranks(2, train.main, *SMALL, f"--dataset={dataset}", "--out_dir=out/two", *extra)
    assert join(*two) == [0, 0]
    assert metrics("out/two") == pytest.approx(metrics("out/one"), rel=5e-3)
    assert metrics("out/two", "grad_norm")[1] == pytest.approx(metrics("out/one", "grad_norm")[1], rel=1e-2)


def rates(steps, seconds=0.0, **settings):
    cfg = train.TrainConfig(**{**dict(learning_rate=1.0, min_lr=0.1, max_iters=10), **settings})
    return [optimizer.learning_rate(i, cfg, seconds) for i in steps]


def test_the_rate_warms_up_and_stays_or_follows_a_cosine():
    settings = dict(warmup_iters=4, max_iters=14)
    assert rates((0, 3, 4, 1000), **settings) == pytest.approx([0.2, 0.8, 1.0, 1.0])
    assert rates((4, 9, 14, 99), schedule="cosine", **settings) == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_the_cosine_ends_with_the_steps_or_with_the_time_whichever_is_first():
    settings = dict(schedule="cosine", warmup_iters=4, max_iters=14, max_seconds=10)
    by_time = [rates([9], seconds, **settings)[0] for seconds in (0, 5, 7.5, 10, 11)]
    assert by_time == pytest.approx([0.55, 0.55, 0.2318, 0.1, 0.1], abs=1e-4)
    assert rates((4, 9, 14), 5, **settings) == pytest.approx([0.55, 0.55, 0.1])
    assert rates((0, 2), 10, **settings) == pytest.approx([0.1, 0.1])  # no time for the warm-up
    assert rates((0, 3), 1, **settings) == pytest.approx([0.2, 0.8])
    for timeless in (settings | {"max_seconds": 0}, settings | {"schedule": "constant"}):
        assert rates(range(20), 9, **timeless) == rates(range(20), **timeless)


def test_wsd_stays_and_goes_down_on_a_line_over_its_share_of_the_run():
    settings = dict(schedule="wsd", decay_share=0.4)
    assert rates(range(7), **settings) == [1.0] * 7
    assert rates((7, 8, 9, 10, 11), **settings) == pytest.approx([0.775, 0.55, 0.325, 0.1, 0.1])
    assert rates((0, 1, 2, 5), warmup_iters=2, **settings) == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert rates((80, 90), lr_decay_iters=100, schedule="wsd") == pytest.approx([1, 0.55])
    assert rates((0, 5), schedule="wsd", decay_share=1.0) == pytest.approx([1, 0.55])
    by_time = [rates([3], seconds, max_seconds=100, **settings)[0] for seconds in (0, 59, 80, 100, 101)]
    assert by_time == pytest.approx([1, 1, 0.55, 0.1, 0.1])


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


def test_a_schedule_stays_and_a_constant_rate_or_a_fixed_end_takes_more_steps(go, capsys):
    constant = ["--out_dir=out/a", "--sample_tokens=0"]
    assert go(*constant, "--max_iters=3") == 0
    assert go(*constant, "--schedule=wsd") == 2
    assert "was trained with max_iters=3 schedule=constant, now max_iters=6 schedule=wsd" in capsys.readouterr().err
    assert go(*constant) == 0 and max(metrics("out/a")) == 6
    falling = ["--out_dir=out/b", "--sample_tokens=0", "--schedule=wsd", "--decay_share=0.5"]
    assert go(*falling, "--max_iters=3") == 0
    assert go(*falling, "--max_iters=4") == 2
    reason = "was trained with max_iters=3, now max_iters=4 (on which the rates of schedule=wsd depend)"
    assert reason in capsys.readouterr().err
    fixed = [*falling, "--out_dir=out/c", "--lr_decay_iters=3"]
    assert go(*fixed, "--max_iters=3") == 0 and go(*fixed, "--max_iters=4") == 0
    assert metrics("out/c", "lr")[3] == metrics("out/b", "lr")[3] and max(metrics("out/c")) == 4
