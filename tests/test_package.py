"""The package that `pip install .` makes: what is in it, beside a clone in one process, and in an empty environment."""

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from attention import power_attention
from model import GPT, GPTConfig

PROJECT = tomllib.loads(Path(ROOT, "pyproject.toml").read_text())
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]


@pytest.fixture(scope="module")
def sympow(tmp_path_factory):
    """The package as it is installed, imported beside the clone."""
    site = tmp_path_factory.mktemp("site")
    for name, folder in FOLDERS.items():
        shutil.copytree(f"{ROOT}/{folder}", site / name.replace(".", "/"), dirs_exist_ok=True)
    version = PROJECT["project"]["version"]
    metadata = site / f"sympow-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.4\nName: sympow\nVersion: {version}\n")
    sys.path.insert(0, str(site))
    try:
        yield importlib.import_module("sympow")
    finally:
        sys.path.remove(str(site))


def test_every_module_is_packaged_and_requirements_agree():
    packages = PROJECT["tool"]["setuptools"]["packages"]
    for name, folder in FOLDERS.items():
        inner = [p.parent for p in Path(ROOT, folder).rglob("*.py") if p.parent != Path(ROOT, folder)]
        assert {name, *(f"{name}.{p.name}" for p in inner)} <= {*packages}
    (torch_wanted,) = PROJECT["project"]["dependencies"]
    assert re.search(rf"^{re.escape(torch_wanted)}\s", Path(ROOT, "requirements.txt").read_text(), re.M)


def test_the_operator_is_the_clones_and_both_are_loaded_at_once(sympow):
    assert sympow.__version__ == PROJECT["project"]["version"]
    installed = sympow.power_attention
    assert installed is not power_attention and installed.__module__ == "sympow.attention.power"
    q, k, v = (torch.randn(2, 20, 2, 4, requires_grad=True) for _ in range(3))
    log_g = -torch.rand(2, 20, 2)
    results = []
    for attend in (power_attention, installed):
        y = attend(q, k, v, log_g, p=4, form="chunked", chunk_size=8)
        results.append([y, *torch.autograd.grad(y.square().sum(), (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_torch_compile_finds_the_kernels_of_both(sympow):
    """At the door of attention/ to the kernels, which imports them late; operators of both are registered apart."""
    pytest.importorskip("triton")
    q, k, v = torch.randn(3, 1, 20, 2, 16).unbind()
    for name in ("attention.backend", "sympow.attention.backend"):
        backend = importlib.import_module(name)
        expected = backend.quadratic_attention(q, k, v, None, p=2)
        torch._dynamo.reset()
        found = torch.compile(backend.quadratic_attention, backend="aot_eager", fullgraph=True)(q, k, v, None, p=2)
        assert torch.equal(found, expected)
    assert torch.ops.sympow.quadratic.default is not torch.ops.sympow_clone.quadratic.default


def test_settings_of_a_layer_are_the_models(sympow):
    model = {f.name: f.default for f in fields(GPTConfig)} | {"attention": "sympow_gating"}
    layer = {f.name: f.default for f in fields(sympow.module.LayerConfig) if f.name not in ("n_embd", "n_head")}
    assert layer == {name: model[name] for name in layer}


@pytest.mark.parametrize("name", "softmax even_power sympow sympow_gating conformal_sympow adaptive_power".split())
def test_a_layer_is_the_models(sympow, name):
    model = GPT(GPTConfig(n_layer=1, n_head=4, n_kv_head=2, n_embd=32, vocab_size=64, attention=name, bias=True))
    ours = model.transformer.h[0].attn
    layer = sympow.Attention(32, 4, n_kv_head=2, attention=name, bias=True)
    for parameter_name, parameter in ours.named_parameters():
        if "W_" in parameter_name:  # zero in a fresh layer
            torch.nn.init.normal_(parameter, std=0.3)
    layer.load_state_dict(ours.state_dict())
    x, resets = torch.randn(2, 12, 32), torch.rand(2, 12) < 0.2
    with torch.no_grad():
        whole = layer(x, resets)
        rows, _ = ours(x.flatten(0, 1), torch.nn.Identity(), (2, 12), resets, None)
        assert torch.equal(whole, rows.view(2, 12, 32))
        state, pieces = layer.empty_state(2), []
        for part, at in zip(x.split(5, 1), resets.split(5, 1)):
            y, state = layer(part, at, state)
            pieces.append(y)
    assert (torch.cat(pieces, 1) - whole).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize(
    "settings,message",
    [
        (dict(attention="heinsen"), "use heinsen_attention"), (dict(attention="unknown"), "must be one of softmax"),
        (dict(n_head=5), "multiple of n_head, got 32 and 5"), (dict(p=3), "even integer, got 3"),
        (dict(n_kv_head=3), "multiple of n_kv_head, got 4 and 3"), (dict(gate="none"), "is attention=sympow"),
        (dict(attention="sympow", gate="fixed"), "must be one of none, got 'fixed'"), (dict(form="fast"), "got 'fast'"),
        (dict(head_dim=7), "even (rotary positions turn pairs), got 7"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(sympow, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sympow.Attention(**{"n_embd": 32, "n_head": 4, **settings})


def test_the_installed_packages_own_table_comes_first(sympow, monkeypatch, tmp_path):
    configs, clones = (importlib.import_module(name) for name in ("sympow.kernels.configs", "kernels.configs"))
    assert clones.OWN_TABLE == clones.TABLE and configs.OWN_TABLE.parts[-2:] == ("sympow", "table.json")
    pytest.importorskip("triton")
    monkeypatch.setattr(configs, "OWN_TABLE", tmp_path / "cache" / "table.json")
    configs._table.cache_clear()
    shipped = configs._table()["NVIDIA H200"]
    name = next(iter(shipped))
    write_table = importlib.import_module("sympow.kernels.tune").write_table
    write_table(configs.OWN_TABLE, "NVIDIA H200", {name: configs.Config(1, 2, 3, 4)})
    configs._table.cache_clear()
    assert configs._table()["NVIDIA H200"] == {**shipped, name: [1, 2, 3, 4, 0]}
    configs._table.cache_clear()


USER = """
import sys, time, torch
begin = time.perf_counter()
import sympow
print(f"{time.perf_counter() - begin:.2f} s to import")
assert not {"train", "model", "runs", "data", "kernels", "attention", "triton"} & {*sys.modules}, "too much is imported"
q, k, v = (torch.randn(1, 300, 2, 16, requires_grad=True) for _ in range(3))
y, state = sympow.power_attention(q, k, v, p=2, return_state=True)
y.sum().backward()
layer = sympow.Attention(n_embd=64, n_head=4)
layer(torch.randn(1, 10, 64)).sum().backward()
from sympow.attention.compat.retention import power_retention
from sympow.kernels import configs
assert "NVIDIA H200" in configs._table()
"""


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_environment(tmp_path):
    source, empty = tmp_path / "source", tmp_path / "empty"
    empty.mkdir()
    for folder in ("attention", "kernels", "package"):
        shutil.copytree(f"{ROOT}/{folder}", source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(f"{ROOT}/{name}", source)
    pip = lambda python, *args: subprocess.run([python, "-m", "pip", "-q", *args], check=True)
    pip(sys.executable, "wheel", "--no-deps", "-w", tmp_path / "wheels", source)
    (wheel,) = (tmp_path / "wheels").glob("sympow-*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    pip(python, "install", "--no-deps", wheel)
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    others = {str(Path(importlib.import_module(name).__file__).parents[1]) for name in ("torch", "sympy")}
    (site / "torch.pth").write_text("\n".join(others))  # torch, without a download
    go = lambda *argv: subprocess.run([python, *argv], cwd=empty, capture_output=True, text=True)
    used = go("-c", USER)
    assert used.returncode == 0, used.stderr
    assert float(used.stdout.split()[0]) < 1.5, used.stdout  # 0.1 to 0.2 on a machine without other work
    doctor = go("-m", "sympow.doctor")
    assert doctor.returncode == 0 and "everything runs in plain PyTorch" in doctor.stdout, doctor
    assert go("-m", "sympow.tune", "--help").returncode == 0
