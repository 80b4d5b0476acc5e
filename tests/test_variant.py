"""The contract of attention/variant.py: whatever is registered trains, evaluates, is saved, sampled and compared."""

import json
import os
import re
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import ROOT, assert_same_run, call, metrics, run

from sympow import compare
from sympow import evaluate
from sympow.generation import decoder as decoder_module
from sympow.generation import generate as generate_module
from sympow import sample
from sympow.attention import ATTENTIONS, Sympow
from sympow.generation.generate import decodes_on_kernels, generate
from sympow.generation.steps import read_prompt
from sympow.model import GPT, GPTConfig
from sympow.generation import state_file

GPU = bool(os.environ.get("TEST_GPU"))
DEVICE = "cuda" if GPU else "cpu"


def readme_attention():
    """Return the example of README's "Add your own attention"."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        (code,) = re.findall(r"```python\n(from .*?)```", f.read(), flags=re.S)
    module = ModuleType("sympow.attention.of_readme")
    module.__package__, sys.modules[module.__name__] = "sympow.attention", module
    exec(code, vars(module))
    return module.Linear


class Scaled(readme_attention()):
    """README's attention, times a parameter of its own, which it reports."""

    def __init__(self, config):
        super().__init__(config)
        self.size = torch.nn.Parameter(torch.ones(config.head_dim))

    def forward(self, x, qkv, resets=None, state=None):
        y, state = super().forward(x, qkv, resets, state)
        return y * self.size.to(y.dtype), state

    def statistics(self, x, q):
        return {"size": self.size.mean().item()}


@pytest.fixture(autouse=True)
def register_attentions(monkeypatch):
    """Register README's attention, unless attention/ has it, and another one of one's own."""
    monkeypatch.setitem(ATTENTIONS, "linear", ATTENTIONS.get("linear") or readme_attention())
    monkeypatch.setitem(ATTENTIONS, "scaled", Scaled)


SHAPE = dict(vocab_size=257, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, head_dim=16, gate_bias=2.0, rope_base=99.0)


def tiny(attention, **kwargs):
    torch.manual_seed(0)
    settings = FORMS.get(attention, dict(attention=attention))
    model = GPT(GPTConfig(**SHAPE | settings | kwargs)).eval().to(DEVICE)
    for name, p in model.named_parameters():
        if not name.endswith("size"):
            torch.nn.init.normal_(p, std=0.3)
    return model


FORMS = {  # other forms of attentions
    "mixture": dict(attention="adaptive_power", adaptive="mixture"),
    "positions in turn": dict(attention="sympow_gating", positions="none,rotary"),
    "signed values": dict(attention="heinsen", values="signed", residual="gpt2"),
    "softmax, convolved": dict(attention="softmax", convolution=3, output_gate=True, bias=True),
    "log values": dict(attention="heinsen", values="log", residual="glu"),
    "beside an MLP": dict(attention="heinsen,sympow", residual="glu"),
}
REGISTERED = [*dict.fromkeys([*ATTENTIONS, *FORMS, "scaled", "linear"])]


PROMPT = [256, 10, 7, 20, 30]


TWO = [f"sympow,{second}" for second in ("softmax", "even_power", "sympow_gating", "conformal_sympow")]


@pytest.mark.parametrize(
    "attention,switch_over", [*((x, None) for x in REGISTERED + TWO), *((pattern, 3) for pattern in [*TWO, "mixture"])]
)
@torch.inference_mode()
def test_generating_equals_stepping_through_the_model_and_its_forward_pass(attention, switch_over):
    model, stepped = tiny(attention, reset_token=7), []
    logits, state = model.read(torch.tensor([PROMPT], device=DEVICE), model.empty_state(1, switch_over))
    for _ in range(40):
        ids = logits.argmax(-1)
        stepped.append(ids.item())
        logits, state = model.step(ids, state)
    (generated,) = zip(*generate(model, PROMPT, max_new_tokens=40, temperature=0.0, switch_over=switch_over))
    assert list(generated) == stepped
    logits, _ = model(torch.tensor([PROMPT + stepped], device=DEVICE))  # and the parallel forward pass
    assert logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist() == stepped


@pytest.mark.parametrize("attention", [*REGISTERED, TWO[0]])
@torch.inference_mode()
def test_a_state_is_repeated_sized_and_saved(attention, tmp_path):
    model, file = tiny(attention), str(tmp_path / "a.state")
    logits, state = read_prompt(model, [256, 10, 20, 30])
    assert state.bytes() == sum(x.nbytes for s in state.parts().values() for x in s.tensors().values()) > 0
    state_file.save_state(file, model, logits, state)
    _, loaded = state_file.load_state(file, model)
    twice = state.repeat(2)
    for layer, loaded_layer, two in zip(*(s.parts().values() for s in (state, loaded, twice))):
        assert loaded_layer.settings() == layer.settings() and type(loaded_layer) is type(layer)
        for name, x in layer.tensors().items():
            assert torch.equal(loaded_layer.tensors()[name], x) and torch.equal(two.tensors()[name], torch.cat((x, x)))
    ids = torch.tensor([40], device=DEVICE)
    one, both = model.step(ids, loaded)[0], model.step(ids.expand(2), twice)[0]
    assert torch.allclose(one, both[:1], atol=1e-4) and torch.allclose(one, both[1:], atol=1e-4)


@pytest.mark.parametrize("collect", [["--collect-only", "-qq"], pytest.param([], marks=pytest.mark.slow)])
def test_every_test_takes_a_new_attention_by_its_name(collect, tmp_path):
    """README's way to test an attention of one's own: `pytest -v -k NAME FILES`, which says what it selects."""
    (tmp_path / "plugin.py").write_text(
        "def pytest_collection(session):\n    import sys, test_variant\n\n"
        "    test_variant.ATTENTIONS['brand_new'] = test_variant.readme_attention()\n"
        "    del sys.modules['test_variant']  # which has read the names\n"
    )
    command = r"pytest (-v -k )linear tests/test_{(.*?)}\.py\n"
    ((options, names),) = re.findall(command, Path(ROOT, "README.md").read_text())
    files = [f"tests/test_{name}.py" for name in names.split(",")]
    path = os.pathsep.join((ROOT, os.path.join(ROOT, "tests"), str(tmp_path)))
    options = ["-p", "plugin", "-p", "no:cacheprovider", *options.split(), "brand_new", "-m", "slow or not slow"]
    done = run("-m", "pytest", *options, *collect, *files, env={"PYTHONPATH": path}, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert collect or re.search(r"collected \d+ items / \d+ deselected / \d\d selected", done.stdout)
    ending = "" if collect else " PASSED"
    assert all(re.search(rf"^{file}::\w+\[.*brand_new.*\]{ending}", done.stdout, re.M) for file in files)


def add_line(path, start, line):
    """Add a line to a file, before the first one that begins so."""
    head, text = path.read_text().split(f"\n{start}", 1)
    path.write_text(f"{head}\n{line}\n{start}{text}")


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="programs that are run for their files, not for the device")
def test_readmes_recipe_trains_and_samples_in_a_copy(dataset, tmp_path):
    copy, readme = tmp_path / "copy", Path(ROOT, "README.md").read_text()
    ignored = shutil.ignore_patterns(".*", "out", "hf", "wandb", "tests", "docs", "*.bin")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    recipe = readme[readme.index("## Add your own attention") : readme.index("\nRead [model.py]")]
    (code,) = re.findall(r"```python\n(.*?)```", recipe, flags=re.S)
    entry = re.search(r"`(\"linear\": \w+)`", recipe)[1]
    (copy / "attention/linear.py").write_text(code)
    add_line(copy / "attention/__init__.py", "from .operator", re.search(r"`(from .linear import \w+)`", recipe)[1])
    add_line(copy / "attention/__init__.py", '    "heinsen": ', f"    {entry},")
    (copy / "config/linear.py").write_text(re.search(r"`(attention = .*?)`", recipe)[1])
    trains, samples = (
        shlex.split(command) for command in re.findall(r"^    python (.*?)(?:  .*)?$", recipe, flags=re.M)
    )
    options = [f"--dataset={dataset}", "--max_iters=2", "--sample_tokens=0"]
    assert "0.8M parameters, linear" in run(*trains, *options, cwd=copy, env={"PYTHONPATH": None}).stdout
    assert ", linear: prompt " in run(*samples, cwd=copy, env={"PYTHONPATH": None}).stderr


@pytest.mark.skipif(GPU, reason="programs that are run for their files, not for the device")
def test_a_variant_of_ones_own_trains_evaluates_samples_and_compares(go, capsys, refused):
    go = partial(go, "--attention=scaled")
    assert go("--out_dir=out/whole", "--max_iters=12") == 0
    assert metrics("out/whole")[12] < 0.9 * metrics("out/whole")[1]
    assert len(metrics("out/whole", "size")[3]) == 2  # what it reports of each layer
    assert go("--out_dir=out/cut", "--max_iters=6") == 0 and go("--out_dir=out/cut", "--max_iters=12") == 0
    assert_same_run("out/cut", "out/whole")
    assert go("--out_dir=out/packed", "--pack=1", "--block_size=1024", "--tokens_per_step=4096", "--max_iters=1") == 0
    assert call(evaluate.main, "--out_dir=out/whole", "--length=64", "--documents=2", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])
    assert call(compare.main, "out/whole", "out/cut") == 0
    assert call(sample.main, "--out_dir=out/whole", "--num_samples=2", "--max_new_tokens=10", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["state_bytes"] == 2 * 2 * (2 * 16 * 17) * 4
    message = refused(call, sample.main, "--out_dir=out/whole", "--switch_over=5")
    assert "attention=scaled takes no switch_over: it has no KV cache that becomes a state" in message


@pytest.mark.parametrize("parts", [{}, dict(qk_norm=True), dict(qk_norm=True, convolution=2, output_gate=True)])
def test_a_variant_gets_heads_of_q_k_and_v_in_autocasts_dtype(parts, monkeypatch):
    model, heads = tiny("scaled", **parts), []
    forward = Scaled.forward
    record = lambda self, x, qkv, *args: heads.extend(qkv) or forward(self, x, qkv, *args)
    monkeypatch.setattr(Scaled, "forward", record)
    with torch.autocast(DEVICE, torch.bfloat16):
        model(torch.zeros(1, 6, dtype=torch.int64, device=DEVICE))
    assert [x.shape for x in heads] == [(1, 6, H, 16) for H in (4, 2, 2)] * 2
    assert {x.dtype for x in heads} == {torch.bfloat16}


def limit(model, **settings):
    """Return the number of tokens from which on the state has a fixed size, with these settings of sample.py."""
    switch_over = sample.choose_switch_over(model, sample.SampleConfig(**settings))
    return sample.fixed_size_limit(model.empty_state(1, switch_over))


@pytest.mark.parametrize("own", [3, "always", "auto"])
def test_sampling_leaves_an_attention_the_number_of_cached_tokens_that_it_has_chosen(own, monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "early", type("Early", (Sympow,), {"switch_over": own}))
    model = tiny("early")
    assert limit(model) == {"always": 1, "auto": 73}.get(own, own)
    assert limit(model, switch_over=7) == 7 and limit(model, switch_over=1) == 1


@pytest.mark.parametrize(
    "pattern,expected",
    [("sympow", 73), ("sympow,softmax", None), ("sympow,scaled", 73), ("scaled", 1)],
)
def test_a_state_has_a_fixed_size_only_if_that_of_every_layer_has(pattern, expected, monkeypatch):
    assert limit(tiny(pattern)) == expected
    state = tiny("scaled").empty_state(1).layers[0]
    monkeypatch.setattr(type(state), "fixed_size", False)
    assert limit(tiny("scaled")) is None


def seen_on_gpu(config, *mixes, dtype=torch.bfloat16):
    """Return what decodes_on_kernels reads of a model on a GPU, with weights of this dtype and these attentions."""
    blocks = [SimpleNamespace(attn=SimpleNamespace(mix=mix, replaces_mlp=False)) for mix in mixes]
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    return SimpleNamespace(config=config, transformer=SimpleNamespace(h=blocks, wte=SimpleNamespace(weight=weight)))


def mix_of(attention, **kwargs):
    return ATTENTIONS[attention](GPTConfig(attention=attention, **SHAPE | kwargs))


@pytest.mark.parametrize(
    "attention,kwargs,expected",
    [
        ("sympow_gating", {}, True),
        ("even_power", {"p": 4}, True),
        ("softmax", {"rope_base": 9.0}, True),
        ("scaled", {}, False),
        ("changed", {}, False),  # that the kernels do it is not inherited
    ],
)
def test_layers_decode_on_the_kernels_if_each_does_and_has_an_mlp(attention, kwargs, expected, monkeypatch):
    monkeypatch.setattr(generate_module, "why_not", lambda *sizes: "")
    monkeypatch.setattr(decoder_module, "compare", lambda *arguments: "")  # a GPU would compare a model with a Decoder
    monkeypatch.setitem(ATTENTIONS, "changed", type("Changed", (Sympow,), {"log_gates": lambda self, x: None}))
    first, second = mix_of("sympow"), mix_of(attention, **kwargs)
    for mixes in ([first, second], [second, first], [second, second], [second]):
        model = seen_on_gpu(first.config, *mixes)
        assert decodes_on_kernels(model) is expected
        model.transformer.h[-1].attn.replaces_mlp = True
        assert not decodes_on_kernels(model)
