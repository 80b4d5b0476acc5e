"""Each kernel compiles for each GPU, fits its shared memory and keeps its registers; which GPU gets which tiles."""

import json
import os
import runpy
import shutil
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers import ROOT, run
from numerics import relative_error

pytest.importorskip("triton.backends.nvidia", reason="Triton has no wheel for this system")

from targets import TARGETS  # noqa: E402
from test_kernels import GPU, inputs  # noqa: E402
from test_package import pip  # noqa: E402

from sympow.generation import decoder as decoding  # noqa: E402
from sympow.generation.steps import Sampler  # noqa: E402
from sympow.kernels.chunked import passes as chunked, prepare, update_state  # noqa: E402
from sympow.kernels import configs  # noqa: E402
from sympow.kernels.quadratic import passes as quadratic  # noqa: E402
from sympow.kernels.configs import Config, choose, describe_gpu, safe  # noqa: E402
from sympow.model import GPT, GPTConfig  # noqa: E402

SPILLS = 256  # bytes a thread that may spill
MORE_SPILLS = {  # (kernel, target) -> why up to 512 bytes
    ("chunked.update_state.update_state", "sm_90"): "in float32, whose products do without the matrix unit",
}


# ---- machine code


def compile_kernels(*options, **env):
    """Return the rows that tests/targets.py prints."""
    done = run(f"{ROOT}/tests/targets.py", *options, env={"TRITON_INTERPRET": None, **env})
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.usefixtures("layer_norms")
@pytest.mark.parametrize("targets", ["once", *(pytest.param(target, marks=pytest.mark.slow) for target in TARGETS)])
def test_kernels_compile_fit_and_do_not_spill(targets):
    """Each kernel for one target; where slow tests run, for every target, and every launch of the shipped configs for
    sm_90 (ALL_TARGETS=1: for every target, a quarter of an hour on two cores)."""
    every_launch = targets == "sm_90" or os.environ.get("ALL_TARGETS")
    rows = compile_kernels(*["--once"] * (not every_launch), "--target", *(TARGETS if targets == "once" else [targets]))
    for row in rows:
        kernel, target = row["kernel"], row["target"]
        assert "error" not in row, row
        assert row["shared"] <= TARGETS[target][1], row
        assert row["spills"] <= (512 if (kernel, target) in MORE_SPILLS else SPILLS), row
    assert len({row["kernel"] for row in rows}) > 30
    assert {row["target"] for row in rows} == ({*TARGETS} if targets == "once" else {targets})


@pytest.mark.slow
def test_kernels_compile_with_the_triton_of_the_oldest_torch(tmp_path, request):
    """Torch 2.11 brings Triton 3.6, which does not compile all that later ones do."""
    request.addfinalizer(lambda: shutil.rmtree(tmp_path))  # 600 MB
    pip(sys.executable, "install", "--no-deps", "--target", tmp_path, "triton==3.6.0")
    rows = compile_kernels("--target", "sm_90", PYTHONPATH=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert len(rows) > 200 and not [row for row in rows if "error" in row]


@pytest.mark.slow
def test_the_largest_head_dimension_fits_99_KB_of_shared_memory():
    rows = compile_kernels("--large", "--target", "sm_86")
    assert len(rows) > 25 and all(row.get("shared", 2**20) <= TARGETS["sm_86"][1] for row in rows), rows


def test_the_matrix_has_every_shipped_config():
    """The launches of tests/targets.py are listed there by hand: a config with another attention has to be added."""
    results = set()
    for path in Path(ROOT, "config").glob("*.py"):
        config = runpy.run_path(str(path))
        if config.get("attention", "linear") != "linear":  # README's example, which a reader may have made
            p, D = config.get("p", 2), config.get("head_dim") or config.get("n_embd", 768) // config.get("n_head", 12)
            results.add((config["attention"], p, D))
    assert results == {
        *product(("sympow", "sympow_gating", "conformal_sympow"), (2, 4), (64,)), ("sympow_gating", 2, 32),
        *product(("heinsen", "adaptive_power"), (2,), (32, 64)), *product(["even_power"], (2, 4, 6), (64,)),
        ("sympow_gating,sympow_gating,sympow_gating,softmax", 2, 64), ("softmax", 2, 64),
    }  # fmt: skip


# ---- which tiles


def pretend(monkeypatch, name, capability, shared=227 * 1024):
    device = describe_gpu(name, capability, shared)
    monkeypatch.setattr(configs, "gpu", lambda _: device)
    return device


def test_every_hopper_gpu_has_the_h200s_entries(monkeypatch):
    q, table = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16), configs._table()
    measured = Config(*table["NVIDIA H200"]["forward bfloat16 D=64 p=2 gated"])
    for name in ("NVIDIA H200", "NVIDIA H100 PCIe", "NVIDIA H20", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        device = pretend(monkeypatch, name, (9, 0))
        assert choose("forward", q, 4, True) == measured != safe("forward", q.dtype, 64, device)
    own = {"NVIDIA H20": {"forward bfloat16 D=64 p=4 gated": [64, 64, 4, 3, 0]}}
    monkeypatch.setattr(configs, "_table", lambda: table | own)
    pretend(monkeypatch, "NVIDIA H20", (9, 0))
    assert choose("forward", q, 4, True) == Config(64, 64, 4, 3)
    for name, capability, shared in (
        ("H100", (9, 0), 99 * 1024),
        ("B200", (10, 0), 227 * 1024),
        ("A100", (8, 0), 163 * 1024),
    ):
        device = pretend(monkeypatch, name, capability, shared)
        assert choose("forward", q, 4, True) == safe("forward", q.dtype, 64, device)


def test_gpus_fall_into_classes():
    facts = lambda capability: describe_gpu("", capability, 0)[1:2] + describe_gpu("", capability, 0)[3:]
    assert facts((8, 0)) == facts((8, 9)) == ("mma", False, False)
    assert facts((9, 0)) == ("wgmma", True, True)
    assert facts((10, 0)) == facts((10, 3)) == ("tcgen05", True, True)
    assert facts((12, 0)) == ("mma", False, True)
    for rows in ("mma", "wgmma", "tcgen05", "float32"):
        assert {*configs.SAFE[rows]} == {*configs.SAFE["wgmma"]}, rows


@pytest.mark.skipif(GPU, reason="pretends another GPU")
def test_pointers_give_the_same_bits_as_descriptors(monkeypatch):
    tensors, dy = inputs(40, "none", torch.float32, H=1, Hkv=1)
    for p, chunk in ((4, None), (2, 128)):

        def both_passes(q, k, v, _):
            if chunk is None:
                y, l = quadratic.forward(q, k, v, p=p)
                return y, *quadratic.backward(dy, None, q, k, v, None, y, l, p=p)[:3]
            sizes = chunked.Sizes(q, k, p, chunk)
            return (update_state.update_state(sizes, 1, prepare.prepare(sizes, k, v)),)

        expected = both_passes(*tensors)
        with monkeypatch.context() as patch:
            device = configs.gpu(torch.device("cpu"))._replace(descriptors=False)
            patch.setattr(configs, "gpu", lambda _: device)
            for module in (quadratic, update_state):
                patch.setattr(module, "TensorDescriptor", None)
            assert all(torch.equal(a, b) for a, b in zip(both_passes(*tensors), expected, strict=True))


@pytest.mark.skipif(GPU, reason="pretends another GPU")
def test_update_state_is_the_same_with_the_float32_tiles_of_other_gpus(monkeypatch):
    (_, k, v, _), _ = inputs(300, "none", torch.float32, H=1, Hkv=1)
    sizes = chunked.Sizes(k, k, 2, 256)
    results, cpu = [], configs.gpu(torch.device("cpu"))
    for rows in ("wgmma", "mma"):
        monkeypatch.setattr(configs, "gpu", lambda _: cpu._replace(rows=rows))
        assert choose("update_state", k, 2).BN == (32 if rows == "wgmma" else 16)
        results.append(update_state.update_state(sizes, 1, prepare.prepare(sizes, k, v)))
    assert relative_error(results[1], results[0], 1e-6) < 1e-6


# ---- the tensors' GPU, not the current one


@pytest.mark.usefixtures("layer_norms")
def test_the_decoder_works_on_its_models_gpu(monkeypatch):
    """Launches, graph and copies happen under a guard of the model's device, but not what runs between two tokens."""
    import contextlib

    inside = []

    @contextlib.contextmanager
    def guard(device):
        inside.append(device)
        yield
        inside.pop()

    monkeypatch.setattr(decoding, "device_guard", guard)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=40, attention="sympow", p=2))
    decoder = decoding.Decoder(model, model.empty_state(1, 2), Sampler(torch.device("cpu"), temperature=0), 6)
    launched = []
    flush = decoder.layers[0].flush
    monkeypatch.setattr(decoder, "_token", lambda *_: launched.append(("_token", *inside)))
    monkeypatch.setattr(decoder.layers[0], "flush", lambda: launched.append(("flush", *inside)) or flush())
    decoder.layers[0].limit = 2
    for _ in decoder.tokens(4):
        assert not inside
    device = torch.device("cpu")
    assert launched[:3] == [("_token", device), ("_token", device), ("flush", device)]
