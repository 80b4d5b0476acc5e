"""Muon, the schedules, float16's loss scale, and computing without float64, as on mps."""

import contextlib
import json
import math
import os
import shutil
import sys
import types

import pytest
import torch
from helpers import SMALL, call, dataset, join, metrics, start_ranks  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sympow import train
from sympow.attention import ATTENTIONS, double
from sympow.generation.generate import Sampler
from sympow.model import GPT, GPTConfig
from sympow.runs import checkpoint
from sympow.training import muon, optimizer
from sympow.runs.settings import choose_device, read_settings

SETTINGS = dict(optimizer="muon", learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95)


@pytest.fixture
def go(dataset, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    return lambda *argv: call(train.main, *SMALL, f"--dataset={dataset}", *argv)


def tiny(**settings):
    return GPT(GPTConfig(**{**dict(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_kv_head=1), **settings}))


def made(name="muon", dtype=torch.float32, **settings):
    """Return a model, its optimizer of this name and a LossScaler."""
    model = tiny(**settings)
    cfg = types.SimpleNamespace(**{**SETTINGS, "optimizer": name})
    return model, optimizer.make_optimizer(model, cfg), optimizer.LossScaler(dtype, "cpu")


def step(model, chosen, scaler, factor=1.0):
    """Take a step on random tokens, with the loss multiplied by `factor`."""
    ids = torch.randint(64, (2, 17))
    scaler.scale_up(model(ids[:, :-1], ids[:, 1:])[1] * factor).backward()
    return optimizer.take_step(model, chosen, scaler, 1.0)


def everything(model, chosen):
    """Return copies of all weights, moments and counts of steps."""
    state = chosen.state_dict()["state"]
    moments = [x for i in sorted(state) for _, x in sorted(state[i].items())]
    return [x.detach().clone() for x in (*model.parameters(), *moments)]


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
    model, chosen, scaler = made()
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
        optimizer.take_step(model, chosen, scaler, 0)
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
    model, chosen, scaler = made(name, attention="conformal_sympow")
    weights = [p.detach().clone() for p in model.parameters()]
    for factor in (math.nan, math.inf):  # before there are moments
        assert not step(model, chosen, scaler, factor).isfinite()
    assert all(map(torch.equal, weights, model.parameters()))
    again, other, _ = made(name, attention="conformal_sympow")
    again.load_state_dict(model.state_dict())
    for factor in (1, math.nan, 1, -math.inf, math.nan):
        torch.manual_seed(factor == 1)
        before = everything(model, chosen)
        assert step(model, chosen, scaler, factor).isfinite() == (factor == 1)
        same = [torch.equal(*pair) for pair in zip(before, everything(model, chosen))]
        assert not any(same) if factor == 1 and len(same) == len(before) > len(weights) else all(same) or factor == 1
        if factor == 1:
            torch.manual_seed(1)
            step(again, other, scaler)
    assert all(map(torch.equal, everything(model, chosen), everything(again, other)))


def test_a_checkpoint_of_muon_has_all_of_its_state(tmp_path):
    model, chosen, scaler = made()
    step(model, chosen, scaler)
    with checkpoint.Writer(tmp_path) as writer:
        writer.save(model, chosen, checkpoint.Progress(1))
    other, loaded, _ = made()
    checkpoint.load(checkpoint.newest(tmp_path, thorough=True), other, loaded)
    for pair in ((model, chosen), (other, loaded)):
        torch.manual_seed(5)
        step(*pair, scaler)
    assert all(map(torch.equal, everything(model, chosen), everything(other, loaded)))
    assert set(model.state_dict()) == set(tiny().state_dict())


@pytest.mark.parametrize("extra", [
    ["--optimizer=muon", "--schedule=wsd", "--decay_share=0.5", "--weight_decay=0.1", "--dropout=0.1"],
    ["--optimizer=muon", "--dtype=float16", "--schedule=cosine"],
    ["--dtype=float16"],
])  # fmt: skip
def test_a_run_that_was_cut_goes_on_with_the_same_bits(go, monkeypatch, extra):
    monkeypatch.setattr(optimizer, "GROWTH_INTERVAL", 2)
    extra = ["--attention=sympow_gating", "--max_iters=4", "--eval_interval=2", "--warmup_iters=1", *extra]
    assert go(*extra, "--out_dir=out/whole") == 0
    shutil.copytree("out/whole", "out/cut")
    shutil.rmtree("out/cut/ckpt/step_00000004")
    assert go(*extra, "--out_dir=out/cut") == 0
    for key in ("train_loss", "val_loss", "grad_norm", "lr"):
        assert metrics("out/cut", key) == metrics("out/whole", key)
    files = [f"out/{name}/ckpt/step_00000004/model.safetensors" for name in ("whole", "cut")]
    assert open(files[0], "rb").read() == open(files[1], "rb").read()
    scales = [json.load(open(f"out/cut/ckpt/step_0000000{i}/progress.json"))["scaler"] for i in (2, 4)]
    assert scales == ([[2.0**17, 0], [2.0**18, 0]] if "--dtype=float16" in extra else [[], []])
    assert metrics("out/cut", "val_loss")[4] < metrics("out/cut")[1]


@pytest.mark.slow
def test_ranks_take_the_same_steps_with_muon_and_float16(go, dataset):  # noqa: F811
    """Rounding decides in which direction small singular values go, so that losses agree less closely than AdamW's."""
    extra = ["--optimizer=muon", "--dtype=float16", "--max_iters=3"]
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
    assert "was trained with max_iters=3, now max_iters=4" in capsys.readouterr().err
    fixed = [*falling, "--out_dir=out/c", "--lr_decay_iters=3"]
    assert go(*fixed, "--max_iters=3") == 0 and go(*fixed, "--max_iters=4") == 0
    assert metrics("out/c", "lr")[3] == metrics("out/b", "lr")[3] and max(metrics("out/c")) == 4


@pytest.mark.parametrize(
    "option,message",
    [
        ("--optimizer=sgd", "optimizer must be one of adamw, muon, got 'sgd'"),
        ("--schedule=linear", "schedule must be one of constant, cosine, wsd, got 'linear'"),
        ("--decay_share=0", "decay_share must be above 0 and at most 1, got 0.0"),
        ("--device=mps", "device mps is not there: torch sees no GPU of Apple's on this machine"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_made(go, monkeypatch, capsys, option, message):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert go(option, "--out_dir=out/a") == 2 and not os.path.exists("out")
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# ---- float16


def test_the_loss_scale_is_that_of_torchs_grad_scaler(monkeypatch):
    monkeypatch.setattr(optimizer, "GROWTH_INTERVAL", 3)
    ours = optimizer.LossScaler(torch.float16, "cpu")
    torchs = torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight])
    for bad in (torch.rand(60) < 0.3).tolist():
        for scaled, scaler in ((torchs.scale, torchs), (ours.scale_up, ours)):
            weight.grad = None
            scaled((weight * (math.inf if bad else 3.0)).sum()).backward()
            if scaler is torchs:
                torchs.unscale_(sgd), torchs.step(sgd), torchs.update()
                grad = weight.grad.clone()
        high = ours.scale > 1
        ours.scale_down([weight])
        assert torch.equal(weight.grad, grad)
        ours.update(~weight.grad.isfinite().all())
        saved = torchs.state_dict()
        assert ours.state() == (saved["scale"], saved["_growth_tracker"])
        assert ours.searching == (bad and high)
        ours = optimizer.LossScaler(torch.float16, "cpu", *ours.state())
        ours.searching = None


def test_other_dtypes_have_no_scale():
    for dtype in (torch.float32, torch.bfloat16):
        scaler, loss = optimizer.LossScaler(dtype, "cpu"), torch.ones(())
        scaler.update(torch.tensor(True))
        assert scaler.scale_up(loss) is loss and scaler.state() == () and scaler.searching is None


class LargeScale(optimizer.LossScaler):
    def __init__(self, dtype, device, scale=2.0**32, good_steps=0):
        super().__init__(dtype, device, scale, good_steps)


def test_the_search_for_a_scale_skips_steps_and_is_no_divergence(go, monkeypatch):
    monkeypatch.setattr(train, "LossScaler", LargeScale)
    whole = ["--dtype=float16", "--attention=sympow_gating", "--max_skipped=1", "--sample_tokens=0", "--max_iters=16"]
    assert go(*whole, "--out_dir=out/a", "--eval_interval=2") == 0
    total = max(metrics("out/a", "skipped").values())
    assert 2 < total < 15
    progress = [json.load(open(f"out/a/ckpt/{name}/progress.json")) for name in sorted(os.listdir("out/a/ckpt"))]
    assert progress[-1]["skipped"] == [total, 0] and progress[-1]["scaler"][0] == 2.0 ** (32 - total)
    assert go(*whole, "--out_dir=out/b", "--max_iters=2") == 0  # both steps were skipped: the weights are saved
    assert json.load(open("out/b/ckpt/step_00000002/progress.json"))["skipped"] == [2, 0]
    assert go(*whole, "--out_dir=out/b", "--eval_interval=2") == 0
    assert metrics("out/b") == metrics("out/a") and metrics("out/b")[16] < metrics("out/b")[1]


def test_a_divergence_is_noticed_at_a_scale_of_one(go, monkeypatch, capsys):
    real = GPT.loss
    monkeypatch.setattr(GPT, "loss", lambda self, *x: real(self, *x) * (math.nan if self.training else 1))
    monkeypatch.setattr(os, "_exit", sys.exit)
    options = ["--dtype=float16", "--max_skipped=3", "--max_iters=100", "--sample_tokens=0", "--eval_interval=100"]
    assert go(*options, "--out_dir=out/a") == 1
    assert "3 steps in a row had no finite gradient, the last one step 20;" in capsys.readouterr().err.replace(
        "\n", " "
    )


# ---- without float64


class WithoutFloat64(TorchDispatchMode):
    """Lets the device meta stand for mps: float64 tensors there raise TypeError, and copies to the CPU are zeros."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and kwargs.get("device", "meta") != "meta":
            if kwargs.get("device").type == "cpu":
                assert kwargs.get("dtype", args[0].dtype) == args[0].dtype, "would be converted on the device"
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
        out = func(*args, **kwargs)
        for x in tree_leaves((args, out)):
            if isinstance(x, torch.Tensor) and x.is_meta and x.dtype == torch.float64:
                raise TypeError(f"{func} of float64 on the device")
        return out


@pytest.fixture
def meta(monkeypatch):
    """Make meta a device without float64 and without autocast."""
    monkeypatch.setattr(double, "WITHOUT_FLOAT64", ("meta",))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind=None: False)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_model_trains_and_generates_without_float64_on_its_device(meta, monkeypatch, attention):
    packed = {} if "softmax" in attention else dict(reset_token=3)  # softmax counts documents, of which meta has none
    forms = [dict(form="chunked", chunk_size=8, **packed)]
    forms += [dict(form="quadratic")] if attention == "sympow_gating" else []
    forms += [dict(adaptive="mixture")] if attention == "adaptive_power" else []
    for form in forms:
        with WithoutFloat64():
            with torch.device("meta"):
                model = tiny(attention=attention, n_layer=1, **form)
            ids = torch.zeros(1, 16, dtype=torch.int64, device="meta")
            model(ids, ids)[1].backward()
            assert all(p.grad.is_meta for p in model.parameters())
            with torch.no_grad():
                _, state = model.read(ids, model.empty_state(1, "always" if "reset_token" in form else None))
                model.step(ids[:, 0], state)
    if attention == "softmax":
        monkeypatch.setattr(double, "WITHOUT_FLOAT64", ())
        with pytest.raises(TypeError, match="float64 on the device"), WithoutFloat64():
            model(ids)


def test_tokens_are_sampled_without_float64_on_the_device(meta):
    with WithoutFloat64():
        sampler, ids = Sampler("meta", 2), torch.zeros(2, dtype=torch.int64)
        sampler.prepare()
        sampler(torch.zeros(2, 300, device="meta"), ids)
    assert sampler.numbers.device.type == "cpu"


def test_differences_of_sums_are_exact_without_float64(monkeypatch):
    sums = torch.nn.functional.logsigmoid(torch.randn(2, 3000, dtype=torch.float64)).cumsum(-1).requires_grad_()
    a, b = sums[:, ::7], sums[:, 3::5]
    exact = a.unsqueeze(-1) - b.unsqueeze(-2)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, *args, real=torch.Tensor.to: x if args == ("x",) else real(x, *args)
    )
    monkeypatch.setattr(torch, "device", lambda name, real=torch.device: types.SimpleNamespace(type=name))
    found = double.differences(a, b, "x", torch.float32)
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= 2e-7 * exact.abs() + 1e-9).all()
    (grad,) = torch.autograd.grad((found * 1.0).sum(), sums)
    (expected,) = torch.autograd.grad(exact.sum(), sums)
    assert torch.allclose(grad, expected)


def test_mps_is_never_chosen_unasked_and_is_one_process(monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", "auto")[0].type == "cpu"
    assert choose_device("mps", "auto") == (torch.device("mps"), torch.float32)
    assert choose_device("mps", "float16") == (torch.device("mps"), torch.float16)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        choose_device("mps", "auto")
    assert "device mps is used by one process, without torchrun" in capsys.readouterr().err
