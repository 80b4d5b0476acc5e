"""Llama, Qwen2 and Qwen3: imported, they compute what transformers' own models do, and they train and travel on."""

import json
import re
import shutil

import pytest
import torch
import transformers
from helpers import SMALL, call, metrics, refusal
from safetensors.torch import load_file, save_file
from test_convert import logits_of, model_of, rewrite, run_model
from test_tokenizer import ENGLISH, byte_level, sentence_piece
from torch.nn import functional as F

from sympow import evaluate, export, sample, train
from sympow.data.dataset import Dataset
from sympow.data.huggingface import tokenizers_json
from sympow.data.text import prepare
from sympow.data.vocabulary import named_tokenizer
from sympow.generation.generate import generate
from sympow.runs.load import load_run

SETTINGS = [x for x in SMALL if not x.startswith("--n_")]  # sizes come with the weights
TINY = dict(vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
TINY |= dict(num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-3, bos_token_id=256, eos_token_id=256)
MODELS = {  # transformers' name, and the settings that differ from TINY
    "Llama, tied": ("Llama", dict(tie_word_embeddings=True, rope_theta=123.0)),
    "Llama, biases, every head": ("Llama", dict(attention_bias=True, mlp_bias=True, num_key_value_heads=4)),
    "Llama, wide heads": ("Llama", dict(head_dim=16, num_key_value_heads=1)),
    "Qwen2": ("Qwen2", dict(rope_theta=1e6)),
    "Qwen2, tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "Qwen3": ("Qwen3", dict(head_dim=16, rope_theta=1e6)),
    "Qwen3, tied": ("Qwen3", dict(head_dim=8, tie_word_embeddings=True)),
    "more rows than tokens": ("Qwen3", dict(head_dim=8, vocab_size=400)),
}


def random_model(kind, **settings):
    """Return a model of transformers with random weights, none of them negligible."""
    torch.manual_seed(torch.initial_seed() + 1)
    theta = settings.pop("rope_theta", 10000.0)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    config = getattr(transformers, f"{kind}Config")(**TINY | rope | settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for x in model.parameters():
        x.data.add_(torch.randn_like(x), alpha=0.1)
    model.model.norm.weight.data.neg_()  # else a tied head repeats the last token
    return model


def compute_in_float64(model):
    """Let a model of transformers compute in float64 where it rounds to float32: in its norms and rotations."""
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: F.rms_norm(x, x.shape[-1:], m.weight, m.variance_epsilon)
    config = model.config
    D = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    speeds = config.rope_parameters["rope_theta"] ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)

    def rotate(x, position_ids, *args):
        angles = (position_ids[..., None] * speeds).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    model.model.rotary_emb.forward = rotate
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory, dataset):
    """Return (a folder with a model and a tokenizer as transformers writes them, the model)."""
    folder, model = tmp_path_factory.mktemp("llama") / "hf", random_model("Llama", tie_word_embeddings=True)
    model.save_pretrained(folder)
    add_tokenizer(folder, dataset)
    return folder, model


def add_tokenizer(folder, dataset):
    text, end = tokenizers_json(Dataset(dataset).tokenizer)
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_an_imported_model_computes_what_transformers_computes(name, dataset, tmp_path):
    kind, settings = MODELS[name]
    theirs = random_model(kind, **settings)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    if "vocab_size" in settings:
        add_tokenizer(tmp_path / "hf", dataset)
    source, ours = model_of(tmp_path / "hf", dataset, vocab_size=257)
    read = {stored for parts in source.stored_names.values() for stored in parts}
    assert read == {name for name in theirs.state_dict() if ours.lm_head or name != "lm_head.weight"}
    ids = torch.randint(257, (3, 64))
    expected = logits_of(theirs, ids)[..., :257]
    assert expected.abs().max() > 1 and (logits_of(ours, ids) - expected).abs().max() < 1e-5
    text = theirs.generate(ids[:1, :5], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=256)
    if "vocab_size" not in settings:
        tokens = [i for (i,) in generate(ours, ids[0, :5].tolist(), max_new_tokens=20, temperature=0)]
        assert tokens == text[0, 5:].tolist() and len({*tokens}) > 3
    expected = logits_of(compute_in_float64(theirs), ids)[..., :257]
    assert (logits_of(ours.double(), ids) - expected).abs().max() < 1e-10


def test_a_config_of_transformers_4_and_half_precision_are_read(dataset, tmp_path):
    random_model("Llama", rope_theta=123.0).bfloat16().save_pretrained(tmp_path / "new")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "new", dtype="float32")
    old = dict(rope_parameters=None, rope_theta=123, rope_scaling=None, head_dim=None, sliding_window=4)
    old["quantization_config"] = {"quant_method": "gguf"}  # where the weights were before
    rewrite(tmp_path / "new", tmp_path / "hf", **old)
    ids = torch.randint(257, (3, 64))
    ours = model_of(tmp_path / "hf", dataset)[1]
    assert (logits_of(ours, ids) - logits_of(theirs, ids)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}}, "has rope_type=llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "has rope_type=linear"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "has rope_type=linear"),  # which transformers prefers
        ({"partial_rotary_factor": 0.5}, "has partial_rotary_factor=0.5"),
        ({"use_sliding_window": True}, "is no llama as this model can be it: its config.json has use_sliding_window"),
        ({"hidden_act": "gelu"}, "has hidden_act=gelu"),
        ({"attention_bias": True}, "has attention_bias=True"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
        ({"model_type": ["llama"]}, "has a model of type ['llama']"),
        ({"head_dim": 16}, "attn.c_attn.weight is [64, 32], not [128, 32]"),
        ({"intermediate_size": 64}, "mlp.c_fc.weight is [96, 32], not [128, 32]"),
        ({"model_type": "qwen3"}, "q_norm.weight is missing"),
        ({"num_hidden_layers": 1}, "transformer.h.1.ln_1.weight is [32], not missing"),
        ({"vocab_size": 300}, "transformer.wte.weight is [257, 32], not [320, 32]"),
        ({"vocab_size": 400}, "transformer.wte.weight is [257, 32], not [320, 32]"),
        ({"vocab_size": 256}, "the tokenizer of hf has more tokens than its model"),
        ({"quantization_config": {"quant_method": "bitnet"}}, "has quant_method=bitnet"),
    ],
)
def test_what_this_model_cannot_be_is_refused_by_name(llama, dataset, tmp_path, monkeypatch, capsys, changes, message):
    rewrite(llama[0], tmp_path / "hf", **changes)
    monkeypatch.chdir(tmp_path)
    assert call(train.main, *SETTINGS, f"--dataset={dataset}", "--init_from=hf", "--out_dir=out/a") == 2
    assert message in refusal(capsys) and not (tmp_path / "out").exists()


def test_a_tensor_that_is_not_known_is_named(llama, dataset, tmp_path):
    shutil.copytree(llama[0], tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # computed, in files of early versions
    save_file(weights, tmp_path / "hf/model.safetensors")
    model_of(tmp_path / "hf", dataset)
    for name, x in {"mlp.experts.weight": torch.ones(4), "attn.k_scale": torch.ones(())}.items():
        save_file(weights | {f"model.layers.0.{name}": x}, tmp_path / "hf/model.safetensors")
        with pytest.raises(ValueError, match=rf"transformer.h.0.{name} is {re.escape(str([*x.shape]))}, not missing"):
            model_of(tmp_path / "hf", dataset)


@pytest.mark.parametrize(
    "shapes, message",
    [
        ({"lm_head": (257, 32)}, "lm_head.weight in .* is not the embedding"),
        ({"model.embed_tokens": (257, 64)}, r"transformer.wte.weight is \[\d+, 64\], not \[320, 32\]"),
    ],
)
def test_weights_that_would_be_read_as_others_are_refused(llama, dataset, tmp_path, shapes, message):
    shutil.copytree(llama[0], tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    for name, shape in shapes.items():
        weights[f"model.layers.0.{name}.weight" if "_proj" in name else f"{name}.weight"] = torch.ones(shape)
    save_file(weights, tmp_path / "hf/model.safetensors")
    with pytest.raises(ValueError, match=message):
        model_of(tmp_path / "hf", dataset)


def test_a_folder_is_sampled_evaluated_trained_distilled_and_exported(llama, dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder, theirs = llama
    assert call(sample.main, folder, "--prompt=line", "--max_new_tokens=20", "--save_state=a.state") == 0
    assert call(sample.main, "--load_state=a.state", "--prompt=line", "--max_new_tokens=20") == 0
    assert call(evaluate.main, folder, f"--dataset={dataset}", "--documents=2") == 0
    assert "mean loss in nats" in capsys.readouterr().out
    assert call(evaluate.main, folder) == 2 and "names no dataset: give --dataset" in refusal(capsys)
    monkeypatch.setattr("sys.argv", ["export.py", str(folder), "--to=hf"])
    with pytest.raises(SystemExit):
        export.main()
    assert f"`python train.py --init_from={folder} ...` makes a run of it" in refusal(capsys)

    assert call(train.main, *SETTINGS, f"--dataset={dataset}", f"--init_from={folder}", "--out_dir=out/a") == 0
    convert = ["--attention=sympow_gating,softmax", f"--distill_from={folder}", "--out_dir=out/b", "--optimizer=muon"]
    assert call(train.main, *SETTINGS, f"--dataset={dataset}", f"--init_from={folder}", *convert) == 0
    for run in ("out/a", "out/b"):
        assert metrics(run, "val_loss")[6] < metrics(run, "val_loss")[3]
        monkeypatch.setattr("sys.argv", ["export.py", run, f"--to=hf/{run}"])
        export.main()
        exported = transformers.AutoModelForCausalLM.from_pretrained(f"hf/{run}", trust_remote_code=True)
        ids = torch.randint(257, (2, 32))
        expected = logits_of(run_model(run), ids)
        assert (logits_of(exported, ids) - expected).abs().max() < 1e-5
        assert torch.equal(logits_of(model_of(f"hf/{run}", dataset)[1], ids), expected)
        assert torch.equal(logits_of(load_run(f"hf/{run}", "cpu")[1], ids), expected)


def test_a_sample_begins_with_the_space_that_its_first_token_has(tmp_path, monkeypatch, capsys):
    """Llama 2's tokenizer leaves the space out at the start of a text, where a sample does not stand."""
    monkeypatch.chdir(tmp_path)
    random_model("Llama", vocab_size=400).save_pretrained("hf")
    sentence_piece(ENGLISH).save("hf/tokenizer.json")
    tokenizer = named_tokenizer("hf")
    ids = tokenizer.encode("theory")
    assert tokenizer.decode(ids) == "theory" and tokenizer.decode([*ids, *ids]) == "theory theory"
    monkeypatch.setattr(sample, "generate", lambda *_, num_samples, **options: [num_samples * [i] for i in ids])
    for options, text in (
        (["--prompt=the"], "the theory"),
        (["--prompt=the", "--num_samples=2"], "the theory\n---------------\nthe theory"),
        ([], "theory"),
        (["--save_state=a"], "theory"),
        (["--load_state=a"], " theory"),
        (["--load_state=a", "--prompt=the"], "the theory"),
    ):
        assert call(sample.main, "hf", *options) == 0 and capsys.readouterr().out == f"{text}\n", options


def test_a_sample_begins_with_the_token_that_the_tokenizer_of_transformers_puts_first(llama, tmp_path, monkeypatch):
    folder, prompts, read = shutil.copytree(llama[0], tmp_path / "hf"), [], sample.read_prompt

    def read_prompt(model, prompt, *rest, **sizes):
        prompts.append(prompt)
        return read(model, prompt, *rest, **sizes)

    monkeypatch.setattr(sample, "read_prompt", read_prompt)
    assert call(sample.main, folder, "--prompt=a", "--max_new_tokens=1") == 0
    file = folder / "tokenizer.json"
    single = [{"SpecialToken": {"id": "b", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"b": {"id": "b", "ids": [98], "tokens": ["b"]}}
    template = dict(type="TemplateProcessing", single=single, pair=single, special_tokens=tokens)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": template}))
    assert call(sample.main, folder, "--prompt=a", "--max_new_tokens=1") == 0
    assert prompts == [[256, 97], [98, 97]]


def test_a_folder_may_have_a_comma_in_its_name_and_says_what_writes_its_tokenizer(llama, dataset, tmp_path, capsys):
    folder = shutil.copytree(llama[0], tmp_path / "a,b")
    assert call(evaluate.main, folder, f"--dataset={dataset}", "--documents=1", "--length=20") == 0
    capsys.readouterr()
    (folder / "tokenizer.json").unlink()
    assert call(sample.main, folder) == 2
    assert f"{folder}/tokenizer.json is missing: AutoTokenizer.from_pretrained(PATH)" in refusal(capsys)


def test_settings_that_change_what_the_weights_compute_are_named(llama, dataset):
    changes = dict(rope_base=500.0, norm_eps=1e-5, window=8)
    weights, model = model_of(llama[0], dataset, **changes)
    line = "rope_base=10000.0 becomes 500.0; window=0 becomes 8; norm_eps=0.001 becomes 1e-05"
    assert weights.describe(model.config) == f"weights from {llama[0]}: {line}"


def test_a_head_of_its_own_cannot_be_dropped(dataset, tmp_path):
    random_model("Llama").save_pretrained(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"of tied_head=False; lm_head.weight is \[320, 32\], not missing"):
        model_of(tmp_path / "hf", dataset, tied_head=True)


@pytest.mark.parametrize("free_rows", [0, 9])
def test_an_end_of_text_that_the_tokenizer_lacks_is_added_if_the_model_has_a_row_for_it(
    tmp_path, monkeypatch, capsys, free_rows
):
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_level(ENGLISH)
    random_model("Llama", vocab_size=tokenizer.get_vocab_size() + free_rows).save_pretrained("hf")
    tokenizer.save("hf/tokenizer.json")
    (tmp_path / "text.txt").write_text(ENGLISH[0] * 20)
    prepare.main(["text.txt", "--out=data", "--tokenizer=hf", "--document_length=64", "--val_fraction=0.2"])
    train_it = (train.main, *SETTINGS, "--dataset=data", "--init_from=hf", "--out_dir=out/a")
    programs = [(sample.main, "hf", "--max_new_tokens=3"), (evaluate.main, "hf", "--dataset=data"), train_it]
    for program in programs:
        capsys.readouterr()
        if free_rows:
            assert call(*program) == 0
        else:
            assert call(*program) == 2 and "the tokenizer of hf has more tokens than its model" in refusal(capsys)
