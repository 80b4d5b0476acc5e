"""A sharded model (--shard=True) takes the same steps as copies, and any number of ranks reads its checkpoints."""

import json
import math
import os
import shutil
import signal
import sys
import types
from functools import partial

import pytest
import torch
from helpers import (
    LLAMA,
    SMALL,
    assert_kills_change_nothing,
    assert_near_run,
    call,
    join,
    metrics,
    start_ranks,
    train_traced,
)

from sympow import train
from sympow.model import GPT, GPTConfig
from sympow.runs import checkpoint, parts
from sympow.training import optimizer as training_optimizer
from sympow.training.optimizer import make_optimizer
from sympow.training.parallel import Layout
from sympow.runs.processes import Ranks, exit_statuses

OPTIONS = [*SMALL, "--attention=sympow_gating", "--warmup_iters=2"]


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory):
    """Return a folder with two runs of 6 steps, with checkpoints at 3 and 6: `one` of one rank, `sharded` of two."""
    folder = tmp_path_factory.mktemp("shard")
    options = [*OPTIONS, f"--dataset={dataset}"]
    assert call(train.main, *options, f"--out_dir={folder}/one", "--shard=True") == 0  # nothing to share
    assert join(*start_ranks(2, train.main, *options, "--out_dir=sharded", "--shard=True", cwd=folder)) == [0, 0]
    return folder


def go_on(runs, dataset, name, *argv):
    """Go on with the run in runs/name on one rank; return the exit status."""
    return call(train.main, *OPTIONS, f"--dataset={dataset}", f"--out_dir={runs}/{name}", *argv)


def tensors(folder):
    """Return {name: tensor} of the weights and moments of a checkpoint, sharded or not."""
    with open(os.path.join(os.path.dirname(os.path.dirname(folder)), "config.json")) as f:
        model = GPT(GPTConfig(**json.load(f)["model"]))
    optimizer = make_optimizer(model, train.TrainConfig())
    checkpoint.load(folder, model, optimizer)
    moments = optimizer.state_dict()["state"].items()
    return {**model.state_dict(), **{f"{i}.{k}": x for i, state in moments for k, x in state.items()}}


def assert_close(tensors, expected, bound):
    assert tensors.keys() == expected.keys()
    for name, x in expected.items():
        assert (tensors[name] - x).norm() <= bound * x.norm(), name


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], x) for name, x in expected.items())


def test_a_sharded_run_has_the_losses_of_one_rank_and_samples_and_statistics_too(runs):
    for key in ("train_loss", "val_loss", "grad_norm"):
        assert len(metrics(runs / "one", key)) >= 2
        assert_near_run(runs / "sharded", runs / "one", [key], rel=1e-6)
    for step, gates in metrics(runs / "one", "gate").items():
        assert metrics(runs / "sharded", "gate")[step] == pytest.approx(gates, rel=1e-6)
    assert open(runs / "sharded/samples.jsonl").read() == open(runs / "one/samples.jsonl").read()
    # Adam divides by the size of the gradient, so where that is near 0 rounding shows
    assert_close(tensors(runs / "sharded/ckpt/step_00000006"), tensors(runs / "one/ckpt/step_00000006"), 1e-3)


def test_each_rank_writes_what_it_holds(runs):
    folder = runs / "sharded/ckpt/step_00000006"
    names = [f"{kind}.{i}-of-2.safetensors" for kind in ("model", "optimizer") for i in (1, 2)]
    assert sorted(os.listdir(folder)) == sorted([*names, "checksums.json", "progress.json"])
    size = sum(path.stat().st_size for path in (runs / "one/ckpt/step_00000006").iterdir())
    assert max(os.path.getsize(folder / name) for name in names) < 0.4 * size
    assert open(runs / "rank_1").read() == ""


def test_one_rank_goes_on_from_a_sharded_checkpoint_and_a_damaged_part_is_named(runs, dataset, capsys):
    shutil.copytree(runs / "sharded", runs / "damaged")
    path = runs / "damaged/ckpt/step_00000006/model.2-of-2.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    assert go_on(runs, dataset, "damaged") == 0
    said = capsys.readouterr()
    assert "step_00000006 is left out: model.2-of-2.safetensors is not what was written" in said.err
    assert f"resuming from {runs}/damaged/ckpt/step_00000003, step 3" in said.out
    assert_near_run(runs / "damaged", runs / "one", rel=1e-6)
    folder = runs / "damaged/ckpt/step_00000003"
    os.remove(folder / "optimizer.2-of-2.safetensors")
    assert checkpoint.damage(folder) == "optimizer.2-of-2.safetensors is missing"
    assert not checkpoint.damage(folder, files=checkpoint.WEIGHTS)


def test_weights_are_taken_from_a_sharded_checkpoint(runs, dataset, capsys):
    source = runs / "sharded/ckpt/step_00000006"
    assert go_on(runs, dataset, "weights", f"--init_from={source}", "--eval_only=1") == 0
    val_loss = metrics(runs / "sharded", "val_loss")[6]
    assert f"val loss {val_loss:.4f}" in capsys.readouterr().out


def test_rows_are_read_from_the_parts_that_have_them(tmp_path):
    tensors = {"w": torch.randn(10, 3), "b": torch.randn(2).bfloat16()}
    for rank in range(4):  # the last ones have fewer rows, or none
        first_rows = {"w": 3 * rank, "b": rank}
        rows = {"w": tensors["w"][3 * rank : 3 * rank + 3].clone(), "b": tensors["b"][rank : rank + 1].clone()}
        rows = {name: x for name, x in rows.items() if x.numel()}
        parts.save_part(rows, {name: first_rows[name] for name in rows}, tmp_path / parts.part_name("model", rank, 4))
    with parts.Tensors(tmp_path, "model") as saved:
        assert_equal({name: saved.read(name) for name in saved.shapes}, tensors)
        for first, count in ((0, 1), (2, 5), (9, 1), (4, 0)):
            assert torch.equal(saved.read("w", first, count), tensors["w"][first : first + count])


def test_a_part_has_the_same_bytes_in_any_order_of_its_tensors(tmp_path):
    """A resumed run holds the moments in another order than one that was not interrupted."""
    tensors = {name: torch.arange(4.0) for name in ("0.step", "0.exp_avg", "1.exp_avg")}
    for number, names in enumerate((tensors, [*tensors][::-1])):
        parts.save_part({name: tensors[name] for name in names}, dict.fromkeys(names, 0), tmp_path / str(number))
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()


def test_what_a_sharded_model_does_not_take_is_refused(refused):
    layout = Layout(types.SimpleNamespace(rank=0, world=2, master=True, distributed=True), shard=True)
    check = partial(layout.check, types.SimpleNamespace(backend="gloo"), torch.device("cuda"))
    assert "shard=True needs backend=nccl on GPUs, got backend=gloo" in refused(call, check)


# functions for several ranks, each in a process


def compare_with_ddp():
    """Train a sharded model beside copies that DDP averages, and write and read checkpoints of both."""
    training_optimizer.NEWTON_SCHULZ_DTYPE["cpu"] = torch.float64  # float32 would show differences of the last bit
    training_optimizer.MUON_BATCH = 20_000  # of 68,256 entries
    ranks, cfg = Ranks(), train.TrainConfig(learning_rate=1e-2, weight_decay=0.1, optimizer=sys.argv[1])
    device = torch.device("cpu")
    with exit_statuses(ranks):
        ranks.join(device, "gloo", 60)
        sizes = dict(n_layer=2, n_head=3, n_embd=48, vocab_size=200, bias=True, activation_checkpointing=True)
        config = GPTConfig(attention="conformal_sympow,sympow_gating", **sizes, **LLAMA if sys.argv[2:] else {})
        layouts, models, optimizers, networks, previous_weights = [], [], [], [], None
        for shard in (False, True):
            layouts.append(layout := Layout(ranks, shard=shard))
            layout.connect(device)
            torch.manual_seed(1)
            models.append(model := layout.make_model(float64_model, config, device))
            optimizers.append(make_optimizer(model, cfg))
            networks.append(layout.wrap(model, False))
        assert all(parts.is_sharded(p) for p in models[1].parameters())
        fresh = {name: x.full_tensor() for name, x in models[1].state_dict().items()}
        assert_equal(fresh, models[0].state_dict())  # the same first weights to the last bit
        for step in range(3):
            norms = [take_step(*trained, ranks.rank, step) for trained in zip(layouts, networks, models, optimizers)]
            assert step == 1 or torch.allclose(*norms, rtol=1e-9), (step, norms)
            weights = {name: x.full_tensor() for name, x in models[1].state_dict().items()}
            assert_close(weights, models[0].state_dict(), 1e-9)
            if step == 1:  # its gradient was not finite
                assert not norms[1].isfinite()
                assert_equal(weights, previous_weights)
            previous_weights = {name: x.clone() for name, x in weights.items()}
        plain = layouts[1].gather(models[1])
        assert (plain is not None) == ranks.master
        if ranks.master:
            assert_equal(plain.state_dict(), weights)
        check_checkpoints(ranks, config, cfg, models[1], optimizers[1], layouts[1], weights)
        ranks.leave()


def float64_model(config):
    return GPT(config).double()


def take_step(layout, network, model, optimizer, rank, step):
    """Take a step of two micro-steps; return the norm of its gradient, before it was clipped."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    for micro in range(2):
        layout.average_next(network, last=micro == 1)
        ids = torch.randint(200, (2, 25), generator=generator)
        _, loss = network(ids[:, :-1], ids[:, 1:])
        (loss * (math.nan if step == 1 and rank == 1 else 0.5)).backward()
    return training_optimizer.take_step(model, optimizer, 0.5)


def check_checkpoints(ranks, config, cfg, model, optimizer, layout, weights):
    """Write a sharded checkpoint and one of a whole model, and read both into a whole and a sharded model."""
    os.makedirs("parts", exist_ok=True)
    os.makedirs("plain", exist_ok=True)
    with checkpoint.Writer("parts", ranks) as writer:
        writer.save(model, optimizer, checkpoint.Progress(1))
    ranks.barrier()
    if ranks.master:
        plain = float64_model(config)
        plain_optimizer = make_optimizer(plain, cfg)
        checkpoint.load(checkpoint.newest("parts", thorough=True), plain, plain_optimizer)
        assert_equal(plain.state_dict(), weights)
        with checkpoint.Writer("plain") as writer:
            writer.save(plain, plain_optimizer, checkpoint.Progress(1))
    ranks.barrier()
    for path in ("parts", "plain"):
        torch.manual_seed(2)
        copy = layout.make_model(float64_model, config, layout.device)
        copy_optimizer = make_optimizer(copy, cfg)
        assert checkpoint.load(checkpoint.newest(path), copy, copy_optimizer).step == 1
        assert_equal(local_rows(copy.state_dict()), local_rows(model.state_dict()))
        states = optimizer.state_dict()["state"]
        for i, state in copy_optimizer.state_dict()["state"].items():
            assert_equal(local_rows(state), local_rows(states[i]))


def local_rows(tensors):
    """Return {name: the rows of a tensor that this rank holds}."""
    return {name: parts.own_rows(x)[0] for name, x in tensors.items()}


@pytest.mark.parametrize("arguments", [["adamw"], ["muon"], ["muon", "Llama"]], ids=", ".join)
def test_two_ranks_with_a_sharded_model_take_the_steps_of_two_with_copies(tmp_path, arguments):
    ranks = start_ranks(2, compare_with_ddp, *arguments, cwd=tmp_path)
    assert join(*ranks) == [0, 0], (tmp_path / "rank_0").read_text()


def train_with_a_full_disk_on_rank_1():
    """Train as train.py, but from the second checkpoint on rank 1 cannot write its part."""
    write, written = parts.save_part, []

    def full(tensors, first_rows, path):
        written.append(path)
        if os.environ["RANK"] == "1" and len(written) > 2:
            raise OSError(28, "No space left on device")
        write(tensors, first_rows, path)

    checkpoint.save_part = full
    train.main()


@pytest.mark.slow
def test_a_part_that_could_not_be_written_ends_all_ranks_and_leaves_the_checkpoint_before(dataset, tmp_path):
    argv = [*OPTIONS, f"--dataset={dataset}", "--out_dir=out", "--shard=True", "--max_iters=5000", "--timeout=30"]
    assert join(*start_ranks(2, train_with_a_full_disk_on_rank_1, *argv, cwd=tmp_path)) == [1, 1]
    said = [(tmp_path / f"rank_{i}").read_text() for i in (0, 1)]
    assert "the checkpoint of step 6 could not be written ([Errno 28] No space left on device); " in said[1]
    assert "out/ckpt/step_00000003 is whole: the same command resumes from there" in said[1]
    assert "of step 6 could not be written (rank 1: [Errno 28]" in said[0] or "reached: rank 1 on" in said[0]
    assert os.listdir(tmp_path / "out/ckpt") == ["step_00000003"]
    assert not checkpoint.damage(tmp_path / "out/ckpt/step_00000003")


@pytest.mark.slow
def test_kills_of_a_sharded_run_at_random_moments_change_nothing(dataset, tmp_path):
    argv = [*OPTIONS, f"--dataset={dataset}", "--shard=True", "--timeout=30"]
    argv += ["--max_iters=10", "--eval_interval=2", "--dropout=0.1"]
    assert_kills_change_nothing(
        lambda name: start_ranks(2, train.main, *argv, f"--out_dir=out/{name}", cwd=tmp_path),
        tmp_path / "out",
        kills=4,
        statuses={0, 1, -signal.SIGKILL},
        earliest=0.2,
    )
    assert sorted(os.listdir(tmp_path / "out/whole/ckpt")) == ["step_00000008", "step_00000010"]


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_ranks_sharded_or_not(runs, dataset):
    shutil.copytree(runs / "sharded", runs / "many")
    options = [*OPTIONS, f"--dataset={dataset}", "--out_dir=many", "--batch_size=2"]
    for step, ranks, shard in ((7, 4, True), (8, 1, False), (9, 2, False)):
        argv = [*options, f"--shard={shard}", f"--max_iters={step}"]
        assert join(*start_ranks(ranks, train.main, *argv, cwd=runs)) == ranks * [0]
    options[-2] = f"--out_dir={runs}/one"
    assert call(train.main, *options, "--max_iters=9") == 0
    assert list(metrics(runs / "one")) == list(range(1, 10))
    assert_near_run(runs / "many", runs / "one", ["train_loss"], rel=1e-6)


@pytest.mark.slow
def test_compiled_blocks_in_bfloat16_have_the_losses_of_one_rank(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [*OPTIONS, f"--dataset={dataset}", "--dtype=bfloat16", "--sample_tokens=0", "--activation_checkpointing=1"]
    argv += ["--n_layer=1", "--max_iters=3"]
    sharded = [*argv, "--shard=True", "--compile=True", "--out_dir=sharded"]
    assert join(*start_ranks(2, train_traced, *sharded)) == [0, 0]
    assert call(train.main, *argv, "--out_dir=one") == 0
    assert_near_run("sharded", "one", rel=1e-3)
