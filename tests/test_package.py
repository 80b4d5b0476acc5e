"""The package that `pip install .` makes: its layers, its table, and its wheel in an empty environment."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import ROOT

import sympow
from sympow.attention.variant import RECIPE
from sympow.kernels import configs
from sympow.model import GPT, GPTConfig
from sympow.module import SETTINGS

# what is installed: folders, and files of a package that has more of them in a clone
PACKAGED = set("__init__.py attention code.py doctor.py kernels layers model.py modeling.py module.py".split())
PACKAGED |= {"py.typed", "transformers.py"}
PROJECT = tomllib.loads(Path(ROOT, "pyproject.toml").read_text())


def test_requirements_agree():
    requirements = Path(ROOT, "requirements.txt").read_text()
    for requirement in PROJECT["project"]["dependencies"]:
        assert re.search(rf"^{re.escape(requirement)}\s", requirements, re.M)


def test_the_package_imports_what_it_depends_on():
    """Where a module is loaded: functions may import more, and say what is missing."""
    imported, places = set(), [Path(ROOT, "sympow", name) for name in PACKAGED]
    for path in (path for place in places for path in (place, *place.rglob("*.py"))):
        for node in ast.parse(path.read_text()).body if path.suffix == ".py" else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {name.partition(".")[0] for name in names}
    depends = {re.match(r"\w+", requirement)[0] for requirement in PROJECT["project"]["dependencies"]}
    optional = {"triton", "transformers"}  # torch brings the one; sympow.transformers is for who has the other
    assert imported - sys.stdlib_module_names - {"sympow"} - optional == depends


def test_the_help_of_a_layer_lists_its_settings_with_the_models_defaults():
    lines = dict(re.split("  +", line, maxsplit=1) for line in inspect.getdoc(sympow.Attention).splitlines()[5:])
    assert sorted(", ".join(lines).split(", ")) == sorted(["n_embd", "n_head", "attention", *SETTINGS])
    for attention in ("softmax", "sympow_gating"):
        config = GPTConfig(attention=attention)
        assert all(str(getattr(config, name)) in lines[name].partition("auto:")[2] for name in RECIPE)


LAYERS = "softmax", "even_power", "sympow", "sympow_gating", "conformal_sympow", "adaptive_power"


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_models(name):
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


@pytest.mark.parametrize(
    "settings,message",
    [
        (dict(attention="heinsen"), "use heinsen_attention"), (dict(n_head=5), "multiple of n_head, got 32 and 5"),
        (dict(positions="learned"), "must be one of auto, rotary, none, got 'learned'"),
        (dict(headdim=7), "got 'headdim': did you mean head_dim?"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sympow.Attention(**{"n_embd": 32, "n_head": 4, **settings})


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_an_empty_state_of_one_sequence_serves_several(name):
    layer, x = sympow.Attention(32, 4, attention=name), torch.randn(2, 6, 32)
    y, state = layer(x[:, :4], state=layer.empty_state(1))
    assert all(len(tensor) == 2 for tensor in state.tensors().values())
    y = torch.cat((y, layer(x[:, 4:], state=state)[0]), dim=1)
    assert torch.allclose(y, layer(x), atol=1e-5)


@torch.no_grad()
def test_a_layer_without_positions_does_not_know_the_order_of_earlier_tokens():
    layer, x = sympow.Attention(32, 4, attention="sympow", positions="none"), torch.randn(1, 9, 32)
    assert torch.allclose(layer(x)[:, -1], layer(x[:, [*range(7, -1, -1), 8]])[:, -1], atol=1e-5)


def test_a_table_in_the_users_cache_comes_first(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    from sympow.kernels.tune import write_table

    assert configs.OWN_TABLE == configs.TABLE  # in a clone
    monkeypatch.setattr(configs, "OWN_TABLE", tmp_path / "cache" / "table.json")
    configs._table.cache_clear()
    shipped = configs._table()["NVIDIA H200"]
    name = next(iter(shipped))
    write_table(configs.OWN_TABLE, "NVIDIA H200", {name: configs.Config(1, 2, 3, 4)})
    configs._table.cache_clear()
    assert configs._table()["NVIDIA H200"] == {**shipped, name: [1, 2, 3, 4, 0]}
    configs._table.cache_clear()


def pip(python, *arguments):
    """Run pip; skip the test if pip reaches no index of packages."""
    done = subprocess.run([python, "-m", "pip", "-q", *arguments], capture_output=True, text=True)
    if done.returncode and "connection broken" in done.stderr:
        pytest.skip("pip reaches no index of packages")
    assert done.returncode == 0, done.stderr


USER = """
import sys, time, torch
begin = time.process_time()
import sympow
print(f"{time.process_time() - begin:.2f} s to import")
assert not {"sympow.train", "sympow.runs", "sympow.data", "triton"} & {*sys.modules}, "too much is imported"
q, k, v = (torch.randn(1, 300, 2, 16, requires_grad=True) for _ in range(3))
y, state = sympow.power_attention(q, k, v, p=2, return_state=True)
y.sum().backward()
layer = sympow.Attention(n_embd=64, n_head=4)
layer(torch.randn(1, 10, 64)).sum().backward()
from sympow.attention.compat.retention import power_retention
from sympow.attention.variant import RECIPE
from sympow.kernels import configs
assert "NVIDIA H200" in configs._table() and configs.OWN_TABLE.parts[-2:] == ("sympow", "table.json")
from sympow.model import GPT, GPTConfig
GPT(GPTConfig(n_layer=1, n_head=1, n_embd=16, vocab_size=64))(torch.zeros(1, 4, dtype=torch.int64))
"""


@pytest.mark.slow
@pytest.mark.parametrize("newest", [False, True])
def test_a_wheel_works_in_an_empty_environment(tmp_path, request, newest):
    """With the torch that is here, or with the newest torch and its Triton that pip installs beside the wheel, for this
    time (6 GB with CUDA wheels; PIP_CONSTRAINT of .ci/run takes a CPU build)."""
    if newest and shutil.disk_usage(tmp_path).free < 12e9:
        pytest.skip("needs 12 GB of disk")
    source, empty = tmp_path / "source", tmp_path / "empty"
    empty.mkdir()
    ignored = shutil.ignore_patterns(".*", "out", "tests", "docs", "__pycache__", "*.bin")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    (source / "data/text/train_00000.bin").write_bytes(b"prepared data")
    pip(sys.executable, "wheel", "--no-deps", "-w", tmp_path / "wheels", source)
    (wheel,) = (tmp_path / "wheels").glob("sympow-*.whl")
    installed = [name.split("/") for name in zipfile.ZipFile(wheel).namelist()]
    assert {name for folder, name, *_ in installed if folder == "sympow"} == PACKAGED
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    if newest:
        request.addfinalizer(lambda: shutil.rmtree(tmp_path / "env"))
        pip(python, "install", "--no-cache-dir", wheel, "triton")  # which a CPU build of torch does not bring
    else:
        pip(python, "install", "--no-deps", wheel)
        (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
        names = "torch", "sympy"
        others = [path for path in sys.path if any(Path(path, name).is_dir() for name in names)]  # in this order
        (site / "torch.pth").write_text("\n".join(others))  # torch, without a download
    env = {name: str(empty) for name in ("HOME", "TMPDIR")} | {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
    go = lambda *argv: subprocess.run([python, *argv], cwd=empty, capture_output=True, text=True, env=env)
    used = go("-c", USER)
    assert used.returncode == 0, used.stderr
    assert float(used.stdout.split()[0]) < 1.5, used.stdout  # 0.1 to 0.2 on a machine without other work
    doctor = go("-m", "sympow.doctor")
    assert doctor.returncode == 0 and "everything runs in plain PyTorch" in doctor.stdout, doctor
    assert go("-m", "sympow.kernels.tune", "--help").returncode == 0
    if newest:
        compiled = go(f"{ROOT}/tests/sass.py", "(forward|update_state) chunked bfloat16 64 2")
        assert compiled.returncode == 0 and "forward_kernel" in compiled.stdout, compiled
