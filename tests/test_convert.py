"""Weights from elsewhere: exported folders and GPT-2 compute what they did, converted models keep what they can."""

import contextlib
import json
import os
import re
import shutil

import pytest
import torch
from helpers import SMALL, call, join, metrics, refusal, start_ranks
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from sympow import evaluate, export, model as model_module, sample, train
from sympow.layers import loss
from sympow.attention import ATTENTIONS
from sympow.attention.variant import RECIPE
from sympow.data.dataset import Dataset
from sympow.data.huggingface import tokenizers_json
from sympow.generation.generate import generate
from sympow.model import GPT, GPTConfig
from sympow.runs import families, source
from sympow.runs.load import load_run

SETTINGS = [x for x in SMALL if not x.startswith("--n_")]  # sizes come with the weights
TINY = dict(vocab_size=257, n_layer=2, n_head=2, n_embd=32, n_positions=64)
GPT2 = {**RECIPE, **families.GPT2.fixed, "activation": "gelu_tanh"}


def transformers_gpt2(**settings):
    """Return transformers' GPT-2 with random weights, none of them negligible."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(torch.initial_seed() + 1)
    config = GPT2Config(**{**TINY, "bos_token_id": 256, "eos_token_id": 256, **settings})
    model = GPT2LMHeadModel(config).eval()
    for x in model.parameters():
        x.data.add_(torch.randn_like(x), alpha=0.15)
    model.transformer.ln_f.weight.data.neg_()  # else the head, which is the embedding, repeats the last token
    return model


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory, layer_norms):
    """Return (a folder that transformers wrote, its model)."""
    folder, model = tmp_path_factory.mktemp("gpt2") / "hf", transformers_gpt2()
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def go(dataset, tmp_path, monkeypatch):
    """Return a function that trains in tmp_path, and returns the exit status."""
    monkeypatch.chdir(tmp_path)
    return lambda *argv: call(train.main, *SETTINGS, f"--dataset={dataset}", *argv)


def model_of(path, data, **changes):
    """Return (the Source of a path, the model that it fills, with some settings changed)."""
    weights = source.open_source(str(path), Dataset(data))
    model = GPT(GPTConfig(**{**weights.model, **changes})).eval()
    weights.check(model.config)
    weights.fill(model)
    return weights, model


def run_model(path):
    return load_run(str(path), "cpu", "float32")[1]


def logits_of(model, ids):
    with torch.no_grad():
        output = model(ids)
    return output.logits if hasattr(output, "logits") else output[0]


# ---- GPT-2


@pytest.mark.parametrize("form", ["one file", "several files", "one beside several", "without a head", "exact GELU"])
def test_gpt2_computes_what_transformers_computes(gpt2, dataset, tmp_path, form):
    folder, theirs = gpt2
    if form == "several files":
        folder = tmp_path / "hf"
        theirs.save_pretrained(folder, max_shard_size="40KB")
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    if form == "one beside several":  # which are of another model
        folder = tmp_path / "hf"
        transformers_gpt2().save_pretrained(folder, max_shard_size="40KB")
        shutil.copy(gpt2[0] / "model.safetensors", folder)
        theirs = type(theirs).from_pretrained(folder)
    if form == "without a head":  # as OpenAI's is on the hub: other names, and masks among the weights
        folder = tmp_path / "hf"
        theirs.transformer.save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        assert "wte.weight" in weights
        save_file(weights | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, folder / "model.safetensors")
    if form == "exact GELU":
        folder, theirs = tmp_path / "hf", transformers_gpt2(activation_function="gelu")
        theirs.save_pretrained(folder)
    _, ours = model_of(folder, dataset)
    assert ours.config.activation == ("gelu" if form == "exact GELU" else "gelu_tanh")
    ids = torch.randint(257, (3, 64))
    expected = logits_of(theirs, ids)
    assert expected.abs().max() > 1 and (logits_of(ours, ids) - expected).abs().max() < 1e-4
    if form == "one file":
        prompt, options = ids[:1, :5], dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=256)
        text = theirs.generate(prompt, **options)[0, 5:].tolist()
        assert [i for (i,) in generate(ours, prompt[0].tolist(), max_new_tokens=20, temperature=0)] == text
        assert len({*text}) > 3


def test_a_run_from_gpt2_goes_on_samples_evaluates_and_exports(gpt2, go, monkeypatch, capsys):
    start = [f"--init_from={gpt2[0]}", "--learning_rate=1e-3"]
    assert go(*start, "--out_dir=out/whole", "--sample_tokens=100") == 0  # more than 64 positions: fewer are sampled
    assert f"weights from {gpt2[0]}\n" in capsys.readouterr().out
    assert go(*start, "--out_dir=out/cut", "--max_iters=3") == 0 and go(*start, "--out_dir=out/cut") == 0
    for key in ("train_loss", "val_loss"):
        assert metrics("out/cut", key) == metrics("out/whole", key)
    capsys.readouterr()
    settings = json.load(open("out/cut/config.json"))["model"]
    assert {name: settings[name] for name in (*TINY, *GPT2)} == {**TINY, **GPT2}

    assert call(sample.main, "--out_dir=out/cut", "--prompt=line", "--max_new_tokens=20", "--temperature=0") == 0
    text = capsys.readouterr().out.rstrip("\n")
    assert text.startswith("line") and len(text) > 10
    assert call(evaluate.main, "--out_dir=out/cut", "--documents=2", "--png=no.png") == 0
    assert "over 2 documents of 64 tokens" in capsys.readouterr().out  # not 4 times the context
    for program, option in ((sample.main, "--max_new_tokens=65"), (evaluate.main, "--length=65")):
        assert call(program, "--out_dir=out/cut", option) == 2
        assert "the model has 64 learned positions" in refusal(capsys)

    monkeypatch.setattr("sys.argv", ["export.py", "out/cut", "--to=hf/cut"])
    export.main()
    assert json.load(open("hf/cut/config.json"))["max_position_embeddings"] == 32
    ids = torch.randint(257, (2, 64))
    _, exported = model_of("hf/cut", json.load(open("out/cut/config.json"))["dataset"])
    assert torch.equal(logits_of(run_model("out/cut"), ids), logits_of(exported, ids))


def rewrite(folder, target, **changes):
    """Copy a folder of transformers, with these changes in its config.json."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "changes, options, message",
    [
        ({}, ["--block_size=128"], "the model has 64 learned positions, a context of this run has 128 tokens"),
        ({}, ["--n_positions=128"], "wpe.weight is [64, 32], not [128, 32]"),
        ({}, ["--n_layer=3"], "do not fit this model: they are of n_layer=2; transformer.h.2."),
        ({}, ["--bias=False"], "they are of bias=True; transformer.h.0.attn.c_attn.bias is [96], not missing"),
        (
            {},
            ["--output_gate=True"],
            "they are of output_gate=False; transformer.h.0.attn.c_attn.weight is [96, 32], not [128, 32]",
        ),
        ({}, ["--output_gate=True", "--n_kv_head=1"], "they are of n_kv_head=2 output_gate=False"),  # as many rows
        ({}, ["--attention=conformal_sympow"], "it takes positions=rotary"),
        ({}, ["--attention=softmax,heinsen", "--positions=rotary"], "cannot become those of attention=heinsen"),
        ({"n_inner": 100}, [], "transformer.h.0.mlp.c_fc.weight is [128, 32], not [100, 32]"),
        ({"n_layer": 3}, [], "transformer.h.2.ln_1.weight is missing"),
        ({"model_type": "mamba"}, [], "has a model of type 'mamba', which is none of sympow, gpt2, llama, qwen2"),
        ({"model_type": "sympow", "model": {"vocab_size": 257, "depth": 2}}, [], "not of a model of this version"),
        ({"eos_token_id": 0}, [], "prepare it with its tokenizer, --tokenizer="),
        ({"vocab_size": 50257, "eos_token_id": 50256}, [], "tokenizer.json or gpt2"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_one_line(gpt2, go, tmp_path, capsys, changes, options, message):
    rewrite(gpt2[0], tmp_path / "hf", **changes)
    assert go("--init_from=hf", "--out_dir=out/a", "--tokens_per_step=512", *options) == 2
    assert message in refusal(capsys) and not os.path.exists("out")


def test_damaged_folders_are_refused_in_one_line(gpt2, go, tmp_path, capsys):
    rewrite(gpt2[0], tmp_path / "hf")
    weights = tmp_path / "hf" / "model.safetensors"
    contents = weights.read_bytes()
    (tmp_path / "hf" / "tokenizer.json").write_text("{")
    tokenizer = "tokenizer.json is damaged or no tokenizer"
    for content, message in (
        (contents, tokenizer),
        (contents[:-1], "hf/model.safetensors is damaged"),
        (None, "model.safetensors is missing"),
    ):
        weights.unlink() if content is None else weights.write_bytes(content)
        for setting in ("init_from", "distill_from"):
            assert go(f"--{setting}=hf", "--out_dir=out/a") == 2
            assert message in refusal(capsys)
        (tmp_path / "hf" / "tokenizer.json").unlink(missing_ok=True)
    assert go("--distill_from=nothing", "--out_dir=out/a") == 2
    assert "distill_from: there is no whole checkpoint in nothing; give a run's folder" in refusal(capsys)


def test_a_tokenizer_beside_the_weights_must_be_the_datasets(gpt2, dataset, tmp_path):
    rewrite(gpt2[0], tmp_path / "hf")
    text = tokenizers_json(Dataset(dataset).tokenizer)[0]
    (tmp_path / "hf" / "tokenizer.json").write_text(text)
    model_of(tmp_path / "hf", dataset)
    saved = json.loads(text)
    vocabulary = saved["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(
        ValueError,
        match=r"not those of the dataset text .*: prepare it with its tokenizer, --tokenizer=.*/hf/tokenizer\.json",
    ):
        model_of(tmp_path / "hf", dataset)


@pytest.mark.parametrize(
    "name, shape",
    [("wpe.weight", [64, 32]), ("h.0.ln_1.bias", [32]), ("h.0.mlp.c_fc.bias", [128]), ("ln_f.bias", [32])],
)
def test_a_folder_without_its_positions_or_biases_is_not_read_with_new_ones(
    gpt2, go, dataset, tmp_path, capsys, name, shape
):
    rewrite(gpt2[0], tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    lost = name.removeprefix("h.0.")  # of all layers
    save_file({key: x for key, x in weights.items() if not key.endswith(lost)}, tmp_path / "hf/model.safetensors")
    (tmp_path / "hf/tokenizer.json").write_text(tokenizers_json(Dataset(dataset).tokenizer)[0])
    for status in (call(sample.main, "hf"), go("--init_from=hf", "--out_dir=out/a")):
        assert status == 2
    assert capsys.readouterr().err.count(f"transformer.{name} is missing, not {shape}") == 2


def test_new_biases_of_a_model_that_had_none_leave_it_as_it_was(go, capsys):
    sizes = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--max_iters=1", "--learning_rate=1e-9"]
    assert go(*sizes, "--out_dir=out/a") == 0
    assert go("--init_from=out/a", "--bias=True", *sizes, "--out_dir=out/b") == 0
    assert "new: ln_wte.bias, h.*.ln_1.bias, h.*.attn.c_attn.bias, h.*.attn.c_proj.bias" in capsys.readouterr().out
    assert metrics("out/b")[1] == pytest.approx(metrics("out/a")[1], abs=1e-5)


# ---- the hub


def test_a_model_comes_from_the_hub_with_all_files_of_one_commit(gpt2, dataset, tmp_path, monkeypatch):
    import huggingface_hub

    snapshot, requests = shutil.copytree(gpt2[0], tmp_path / "0123abcd"), []

    def download(repository, allow_patterns):
        requests.append((repository, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    for name, repository in (("gpt2-medium", "openai-community/gpt2-medium"), ("owner/name", "owner/name")):
        _, ours = model_of(name, dataset)
        assert torch.equal(ours.transformer.wte.weight[:257], gpt2[1].transformer.wte.weight)
        assert requests.pop() == (repository, source.FILES)
    os.mkdir("owner")
    with pytest.raises(ValueError, match="there is no whole checkpoint in owner/name"):  # a path that is misspelt
        model_of("owner/name", dataset)


def test_without_network_a_name_is_refused_in_one_line(go, tmp_path, monkeypatch, capsys):
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.delattr(huggingface_hub, "utils", raising=False)  # as in a process that has imported nothing of it yet
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for setting in ("init_from", "distill_from"):
        assert go(f"--{setting}=gpt2", "--out_dir=out/a") == 2
        assert "gpt2 cannot be downloaded" in refusal(capsys) and not os.path.exists("out")


# ---- exported folders


def test_an_exported_folder_gives_the_run_back(go, dataset, monkeypatch):
    sizes = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--attention=conformal_sympow,softmax", "--gate=fixed"]
    assert go(*sizes, "--max_iters=3", "--dropout=0.1", "--out_dir=out/a") == 0
    old, ids = run_model("out/a"), torch.randint(257, (2, 40))

    for size, files in (("20KB", 7), ("5GB", 1)):
        monkeypatch.setattr(export, "SHARD", size)
        monkeypatch.setattr("sys.argv", ["export.py", "out/a", "--to=hf/a"])
        export.main()
        assert len([name for name in os.listdir("hf/a") if name.endswith(".safetensors")]) == files
        _, new = model_of("hf/a", dataset)
        assert new.config == old.config and new.config.dropout == 0.1
        assert all(torch.equal(x, new.state_dict()[name]) for name, x in old.state_dict().items())
        assert torch.equal(logits_of(old, ids), logits_of(new, ids))


# ---- conversion


def takes_learned_positions(name):
    """Return True if a GPT-2 with this attention may have GPT-2's table of positions."""
    try:
        return bool(GPTConfig(**{**GPT2, "attention": name}))
    except ValueError:
        return False


@pytest.mark.parametrize("name", [name for name, variant in ATTENTIONS.items() if variant.rotates])
def test_a_converted_model_keeps_all_weights_but_the_attentions_own(gpt2, dataset, name):
    ids, (_, original) = torch.randint(257, (2, 20)), model_of(gpt2[0], dataset)
    old, old_logits = original.state_dict(), logits_of(original, ids)
    for positions in ("rotary", "learned") if takes_learned_positions(name) else ("rotary",):
        torch.manual_seed(5)
        weights, model = model_of(gpt2[0], dataset, attention=name, positions=positions)
        torch.manual_seed(5)
        fresh = GPT(model.config).state_dict()
        for key, x in model.state_dict().items():
            assert torch.equal(x, fresh[key] if ".mix." in key else old[key]), key
        line = weights.describe(model.config)
        assert ("dropped: wpe.weight" in line) == (positions == "rotary")
        assert ("positions=learned becomes rotary" in line) == (positions == "rotary")
        own = {re.sub(r".*\.mix\.", "h.*.attn.mix.", key) for key in fresh if ".mix." in key}
        assert all(key in line for key in own) and line.count("h.*") == len(own)
        logits = logits_of(model, ids)
        unchanged = (name, positions) == ("softmax", "learned")
        assert logits.isfinite().all() and torch.equal(logits, old_logits) == unchanged


def test_conversion_is_said_in_one_line_and_goes_on(gpt2, go, capsys):
    options = [f"--init_from={gpt2[0]}", "--attention=sympow_gating", "--positions=rotary", "--out_dir=out/a"]
    assert go(*options, "--max_iters=3") == 0
    line = "attention=softmax becomes sympow_gating; positions=learned becomes rotary; new: h.*.attn.mix.gate.W_gamma, "
    assert line + "h.*.attn.mix.gate.b; dropped: wpe.weight\n" in capsys.readouterr().out
    config = json.load(open("out/a/config.json"))["model"]
    assert config["gate"] == "learned" and config["rope_base"] == 512 and config["activation"] == "gelu_tanh"
    assert go(*options) == 0 and max(metrics("out/a")) == 6
    pattern = ["--attention=sympow_gating,softmax", "--init_from=out/a", "--out_dir=out/b", "--max_iters=1"]
    assert go(*pattern) == 0 and "dropped: h.*.attn.mix.gate.W_gamma" in capsys.readouterr().out
    assert go("--init_from=out/a", "--positions=learned", "--out_dir=out/c") == 2
    assert "they are of positions=rotary; transformer.wpe.weight is missing, not [64, 32]" in capsys.readouterr().err


class Normed(model_module.Attention):
    """Attention with a QK-norm, as somebody adds it to model.py."""

    def __init__(self, config):
        super().__init__(config)
        self.qk_norm = torch.nn.RMSNorm(config.head_dim)

    def project(self, x, norm, shape):
        x, qkv = super().project(x, norm, shape)
        q, k, v = qkv.split(self.heads, dim=2)
        return x, torch.cat((self.qk_norm(q), self.qk_norm(k), v), dim=2)


def test_weights_that_no_layer_of_the_source_has_start_fresh_and_are_named(gpt2, go, monkeypatch, capsys):
    monkeypatch.setattr(model_module, "Attention", Normed)
    start = [f"--init_from={gpt2[0]}", "--out_dir=out/a", "--max_iters=1"]
    assert go(*start, "--learning_rate=1e-9") == 0
    assert f"weights from {gpt2[0]}: new: h.*.attn.qk_norm.weight\n" in capsys.readouterr().out
    weights = load_file("out/a/ckpt/step_00000001/model.safetensors")
    for name, x in gpt2[1].state_dict().items():
        if name.endswith("ln_1.weight"):
            assert torch.allclose(weights[name], x, atol=1e-6), name
    assert torch.allclose(weights["transformer.h.1.attn.qk_norm.weight"], torch.ones(16), atol=1e-6)
    assert go(*start, f"--distill_from={gpt2[0]}", "--out_dir=out/b") == 2  # a teacher has no new weights
    assert "transformer.h.0.attn.qk_norm.weight is missing" in refusal(capsys)


@pytest.mark.parametrize("name", [*filter(takes_learned_positions, ATTENTIONS)])
@torch.no_grad()
def test_learned_positions_count_from_each_reset_in_training_and_generation(name):
    sizes = dict(n_layer=1, n_head=2, n_embd=16, vocab_size=30, n_positions=20)
    config = GPTConfig(**{**GPT2, **sizes, "attention": name, "reset_token": 3})
    model = GPT(config).eval()
    ids = torch.randint(4, 30, (2, 20))
    ids[0, 7] = 3
    expected = model(ids)[0]
    logits, state = model.read(ids[:, :5], model.empty_state(2))
    for t in range(5, 20):
        assert (logits - expected[:, t - 1]).norm() < 1e-4 * logits.norm()
        logits, state = model.step(ids[:, t], state)
    alone = model(ids[:1, 7:])[0]
    assert (alone - expected[:1, 7:]).norm() < 1e-4 * alone.norm()
    with pytest.raises(ValueError, match="20 learned positions, a text has 21 tokens"):
        model.step(ids[:, 0], state)


# ---- distillation


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loss_is_cross_entropy_and_divergence_piece_by_piece(monkeypatch, dtype):
    monkeypatch.setattr(loss, "DISTILL_TOKENS", 8)
    compute, sizes = loss.compute_distilled_losses, []
    monkeypatch.setattr(loss, "compute_distilled_losses", lambda x, *args: sizes.append(len(x)) or compute(x, *args))
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=30, attention="sympow")
    student, teacher = GPT(config).double(), GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=30)).double()
    for x in (*student.parameters(), *teacher.parameters()):
        x.data.add_(torch.randn_like(x), alpha=0.3)
    ids, targets = torch.randint(30, (2, 11)), torch.randint(30, (2, 11))
    targets[0, :4] = -1
    with torch.no_grad():
        hidden, _ = teacher.hidden(ids)
        log_t = teacher.logits(hidden).log_softmax(-1)
    log_s = student(ids)[0].log_softmax(-1)
    mask = targets != -1
    expected = F.nll_loss(log_s[mask], targets[mask]) + 0.7 * (log_t.exp() * (log_t - log_s)).sum(-1)[mask].mean()
    grads = torch.autograd.grad(expected, [*student.parameters()])
    if dtype != torch.float64:
        student, teacher, hidden = student.float(), teacher.float(), hidden.float()
    with torch.autocast("cpu", dtype) if dtype != torch.float64 else contextlib.nullcontext():
        _, total = student(ids, targets, teacher=(hidden, teacher.transformer.wte.weight, 0.7))
    total.backward()
    bound = 1e-10 if dtype == torch.float64 else 0.1
    assert abs(total - expected) < bound * expected and sizes == [8, 8, 6]
    for (name, x), grad in zip(student.named_parameters(), grads):
        assert (x.grad - grad).norm() <= bound * max(grad.norm(), grads[0].norm()), name
    assert all(x.grad is None for x in teacher.parameters())


def test_a_distilled_run_goes_on_with_the_same_bits_and_validates_without_its_teacher(gpt2, go, capsys):
    folder = shutil.copytree(gpt2[0], "teacher")
    start = [f"--init_from={folder}", "--attention=sympow_gating", f"--distill_from={folder}", "--distill_weight=0.5"]
    start += ["--positions=rotary", "--pack=1", "--then=64@0.5", "--batch_size=2", "--dropout=0.1"]
    assert go(*start, "--out_dir=out/whole") == 0
    assert f"teacher: {folder}, attention=softmax\n" in capsys.readouterr().out
    assert go(*start, "--out_dir=out/cut", "--max_iters=6", "--eval_interval=2", "--max_seconds=0") == 0
    shutil.rmtree("out/cut/ckpt/step_00000006")
    assert go(*start, "--out_dir=out/cut") == 0  # from step 4
    for key in ("train_loss", "val_loss"):
        expected, cut = metrics("out/whole", key), metrics("out/cut", key)
        assert 6 in cut and all(cut[step] == expected[step] for step in cut.keys() & expected.keys())
    assert go(*start[:2], *start[4:], "--out_dir=out/plain") == 0
    assert metrics("out/plain")[1] < metrics("out/whole")[1]  # the first step's loss has no divergence
    weights = source.open_source("out/whole", Dataset(json.load(open("out/whole/config.json"))["dataset"]))
    plain = [*start[5:], "--init_from=out/whole", "--eval_only=1", "--out_dir=out/none"]
    capsys.readouterr()
    assert go(*plain) == 0 and weights.model["dropout"] == 0.1
    assert f"val loss {metrics('out/whole', 'val_loss')[6]:.4f}" in capsys.readouterr().out

    os.rename("teacher", "moved")
    assert go(*start, "--out_dir=out/whole", "--eval_only=1") == 0  # which needs no teacher
    more = [*start[:2], "--distill_weight=0.5", *start[4:], "--out_dir=out/whole", "--max_iters=7"]
    assert go(*more, "--then=64@3", "--distill_from=moved") == 0
    assert go(*more, "--then=64@3", "--distill_from=out/plain") == 2
    assert "was trained with distill_from=moved teacher=" in capsys.readouterr().err
    assert go(*more, "--then=64@3", "--distill_from=moved", "--distill_weight=1") == 2
    assert "was trained with distill_weight=0.5, now distill_weight=1.0" in capsys.readouterr().err


def test_a_model_learns_nothing_from_itself(go):
    """A teacher has the positions, convolution and output gate of its run."""
    sizes = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--max_iters=3"]
    assert go(*sizes, "--attention=sympow_gating,softmax", "--out_dir=out/a") == 0
    start = ["--init_from=out/a", "--max_iters=1"]
    assert go(*start, "--out_dir=out/b") == 0 and go(*start, "--distill_from=out/a", "--out_dir=out/c") == 0
    assert metrics("out/c")[1] == pytest.approx(metrics("out/b")[1], rel=1e-6)


def test_teachers_that_do_not_fit_are_refused(gpt2, go, capsys, monkeypatch):
    scratch = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--out_dir=out/a", f"--distill_from={gpt2[0]}"]
    assert go(*scratch, "--block_size=128", "--tokens_per_step=512") == 2
    assert "the model has 64 learned positions" in refusal(capsys)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for options, message in (
        (scratch, "distill_from does not take context_parallel"),
        ([f"--init_from={gpt2[0]}", "--out_dir=out/a"], "positions=learned cannot be spread over context_parallel=2"),
    ):
        assert go(*options, "--context_parallel=2") == 2 and message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--positions=learned"], ["--positions=rotary", "--shard=1"]])
def test_several_ranks_convert_and_distill_as_one_does(gpt2, go, dataset, tmp_path, options):
    options = [f"--init_from={gpt2[0]}", f"--distill_from={gpt2[0]}", "--learning_rate=1e-3", *options]
    options += ["--attention=sympow_gating"]
    assert go(*options, "--out_dir=out/one") == 0
    argv = [*SETTINGS, f"--dataset={dataset}", *options, "--out_dir=out/two"]
    assert join(*start_ranks(2, train.main, *argv, "--max_iters=3", cwd=tmp_path)) == [0, 0]
    assert join(*start_ranks(2, train.main, *argv, cwd=tmp_path)) == [0, 0]
    assert metrics("out/two") == pytest.approx(metrics("out/one"), rel=1e-4)


@pytest.mark.slow
def test_distillation_under_torch_compile(go):
    transformers_gpt2(n_layer=1).save_pretrained("hf")
    options = ["--init_from=hf", "--distill_from=hf", "--positions=learned", "--learning_rate=1e-3"]
    for compiled in (True, False):
        assert go(*options, f"--compile={compiled}", "--max_iters=3", f"--out_dir=out/{compiled}") == 0
    assert metrics("out/True") == pytest.approx(metrics("out/False"), rel=1e-4)
