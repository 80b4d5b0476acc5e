"""Sampling: which tokens are generated, from which logits, and what the terminal shows."""

import json
import os
import shutil
import socket
import weakref

import pytest
import tiktoken
import torch
from helpers import SMALL, byte_encoding, call, dataset, metrics, raises_one_line  # noqa: F401 (dataset is a fixture)
from safetensors import SafetensorError
from safetensors.torch import save_file
from test_model import tiny

from sympow.generation import steps
from sympow import sample
from sympow import train
from sympow.data.text import prepare
from sympow.generation.generate import generate
from sympow.generation.steps import read_prompt, sample_next_token
from sympow.runs import checkpoint
from sympow.generation import state_file


def small(attention, **settings):
    return tiny(attention, vocab_size=257, **settings)


def sampled(model, prompt, switch_over=None, **kwargs):
    with torch.inference_mode():
        return list(zip(*generate(model, prompt, switch_over=switch_over, **{"max_new_tokens": 500, **kwargs})))


def test_each_sample_draws_its_own_first_token_whatever_the_batch():
    model = small("sympow")
    four = sampled(model, [256], num_samples=4, max_new_tokens=20, temperature=2.0)
    assert len({ids[0] for ids in four}) > 1
    for i in range(4):
        assert sampled(model, [256], num_samples=1, max_new_tokens=20, temperature=2.0, seed=1337 + i)[0] == four[i]


def test_new_numbers_are_drawn_when_all_are_used(monkeypatch):
    monkeypatch.setattr(steps.Sampler, "NUMBERS", 4)
    sampler, seen = steps.Sampler("cpu", 1, temperature=1.0, top_k=0), []
    for _ in range(12):
        sampler.prepare()
        seen.append(sampler.numbers[0, sampler.index].item())
        sampler(torch.zeros(1, 9), torch.empty(1, dtype=torch.int64))
    assert len(set(seen)) == 12


def test_a_table_of_positions_has_room_for_the_saved_text_too():
    model = tiny("softmax", positions="learned", n_positions=16)
    with torch.no_grad():
        prefix = read_prompt(model, list(range(10)), max_new_tokens=1)
        assert read_prompt(model, [1, 2], prefix, max_new_tokens=5)[1].n_tokens == 12
        with pytest.raises(ValueError, match="16 learned positions, this text, with 6 new ones, has 17 tokens"):
            read_prompt(model, [1, 2], prefix, max_new_tokens=6)


@pytest.mark.parametrize(
    "options,within",
    [
        ({}, [1, 1, 1, 1]),
        (dict(temperature=0.0), [0, 1, 0, 0]),
        (dict(temperature=2.0), [1, 1, 1, 1]),
        (dict(top_k=2), [0, 1, 1, 0]),
        (dict(top_k=200), [1, 1, 1, 1]),
        (dict(top_p=0.8), [0, 1, 1, 0]),
        (dict(top_p=0.01), [0, 1, 0, 0]),
    ],
)
def test_temperature_top_k_and_top_p(options, within):
    logits, within = torch.tensor([1.0, 3.0, 2.0, -1.0]), torch.tensor(within)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
    expected = (logits / (options["temperature"] or 1)).softmax(-1) * within
    u = torch.rand(4000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(sample_next_token(logits.expand(4000, -1), u, **options), minlength=4)
    assert (counts / 4000 - expected / expected.sum()).abs().max() < 0.03 and not counts[within == 0].any()


@pytest.mark.parametrize("options", [dict(top_p=0.0), dict(top_k=-1), dict(temperature=-1.0), dict(temperature=1e-45)])
def test_bounds_of_the_choice_that_leave_no_token_are_refused_before_the_prompt_is_read(options, monkeypatch):
    monkeypatch.setattr("sympow.generation.generate.read_prompt", None)
    ((name, value),) = options.items()
    with raises_one_line(ValueError, f"^{name} must be .*, got {value}$"):
        sampled(small("sympow"), [256], **options)


# ---- the program


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory):  # noqa: F811
    """Return a folder with out/a (conformal_sympow) and then out/b (softmax)."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, attention in (("a", "conformal_sympow"), ("b", "softmax")):
            args = [*SMALL, f"--dataset={dataset}", f"--attention={attention}", f"--out_dir=out/{name}"]
            assert call(train.main, *args, "--max_iters=5", "--eval_interval=5") == 0
        os.utime(checkpoint.newest("out/a"), (1, 1))
    return folder


@pytest.fixture
def go(runs, monkeypatch):
    monkeypatch.chdir(runs)
    return lambda *argv: call(sample.main, *argv)


@pytest.mark.parametrize(
    "argv,run",
    [
        ([], "out/b, softmax: prompt"),  # the newest run
        (["--json", "False", "out/a", "--temperature=0"], "out/a, conformal_sympow: prompt"),
        (["--out_dir=out/a/ckpt/step_00000005"], "out/a, conformal_sympow: prompt"),
    ],
)
def test_a_run_or_a_checkpoint_gives_one_sample(go, capsys, argv, run):
    assert go("--max_new_tokens=20", *argv) == 0
    out, err = capsys.readouterr()
    assert run in err and "tokens/s" in err
    assert 1 < len(out.replace("<|endoftext|>", ".")) <= 21


def test_the_prompt_comes_first_from_text_or_file(go, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text("grüße ")
    outs = []
    for arg in ("--prompt=grüße ", f"--prompt=FILE:{tmp_path}/prompt.txt"):
        assert go("--out_dir=out/a", arg, "--max_new_tokens=30", "--temperature=0") == 0
        outs.append(capsys.readouterr().out)
    assert outs[0].startswith("grüße ") and outs[0] == outs[1]
    assert go("--prompt=FILE:nowhere") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_several_samples_are_separated_and_json_comes_last(go, capsys):
    assert go("--out_dir=out/a", "--num_samples=3", "--max_new_tokens=15", "--prompt=line", "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line == "---------------" for line in lines) == 2
    report = json.loads(lines[-1])
    assert report.keys() == {"prefill_tokens_per_second", "decode_tokens_per_second", "decode_ms_per_token_p50",
                             "decode_ms_per_token_p99", "state_bytes"}  # fmt: skip
    assert all(value > 0 for value in report.values())


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--num_samples=0"], "num_samples must be at least 1 and below 2^31, got 0"),
        (["--switch_over=-1"], "switch_over must be at least 0, got -1"),
        (["--temperature=-1"], "temperature must be 0 (greedy) or at least 1e-6, got -1.0"),
        (["--temperature=inf"], "temperature must be a finite number, got 'inf'"),
        (["--prompt=\udcff"], "the prompt is not UTF-8"),
        (["--save_state=/dev/null"], "save_state=/dev/null cannot be written: it is no file"),
        ([f"--save_state={'a' * 300}"], "cannot be written: [Errno 36] File name too long"),
        ([f"--prompt=FILE:{'a' * 300}"], "File name too long"),
        ([f"--out_dir={'a' * 300}"], "no checkpoint in aaa"),
        (["--top_p=0"], "top_p must be in (0, 1], got 0.0"),
        (["--out_dir=out/b", "--switch_over=1"], "attention=softmax takes no switch_over: it has no KV cache that"),
        (["--out_dir=out/none"], "no checkpoint in out/none: there is one in out/b, out/a"),
        (["--load_state=out"], "cannot resume from out: there is no such file"),
        (["--device=cuda:" + "9" * 30], "device must be auto, cpu, cuda"),
        (["--device=cuda:77"], "device cuda:77 is not there"),
        (["--tempreature=1"], "did you mean temperature?"),
    ],
)
def test_mistakes_are_refused_in_one_line(go, capsys, argv, message):
    assert go(*argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_state_file_that_cannot_be_read_is_refused_before_a_run_is_looked_for(tmp_path, go, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert go("--load_state=a.state") == 2
    assert capsys.readouterr().err.endswith("cannot resume from a.state: there is no such file\n")
    (tmp_path / "a.state").write_bytes(b"{}")
    assert go("--load_state=a.state") == 2
    assert "cannot resume from a.state: not a whole state file: " in capsys.readouterr().err


def test_a_run_that_has_no_checkpoint_yet_says_when_there_is_one(go, capsys):
    os.mkdir("out/live")
    shutil.copy("out/a/config.json", "out/live")
    assert go("--out_dir=out/live") == 2
    assert "no checkpoint in out/live yet: training writes one after each evaluation" in capsys.readouterr().err
    shutil.rmtree("out/live")


def test_training_and_sampling_need_no_network_and_no_dataset_afterwards(tmp_path, monkeypatch, capsys):
    """Sockets are disabled, the BPE tokenizer lies beside the data, and sampling starts after the data are gone."""
    encoding = byte_encoding()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("".join(f"line {i} of the book\n" for i in range(500)))
    prepare.main(["book.txt", "--out=bpe", "--tokenizer=gpt2", "--document_length=256"])
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: pytest.fail("the tokenizer was downloaded again"))
    for name in ("socket", "create_connection"):
        monkeypatch.setattr(socket, name, lambda *args, **kwargs: pytest.fail("something opened a socket"))
    assert call(train.main, *SMALL, "--dataset=./bpe", "--attention=sympow", "--out_dir=out/x") == 0
    assert len(metrics("out/x")) == 6
    shutil.rmtree("bpe")
    capsys.readouterr()
    assert call(sample.main, "--prompt=line 1", "--max_new_tokens=10") == 0
    assert capsys.readouterr().out.startswith("line 1")


# ---- states in files


def save(model, prompt, file, switch_over=None):
    with torch.inference_mode():
        state_file.save_state(file, model, *read_prompt(model, prompt, switch_over=switch_over))


@pytest.mark.parametrize(
    "attention,switch_over", [("conformal_sympow", "always"), ("sympow_gating", None), ("softmax", None)]
)
def test_a_saved_state_goes_on_where_it_was(attention, switch_over, tmp_path):
    model, file = small(attention), str(tmp_path / "read.state")
    samples = sampled(model, [256, 10, 20, 30], switch_over, max_new_tokens=40)
    for saved, prompt in (([256, 10], [20, 30]), ([256, 10, 20, 30], [])):  # without a prompt, from the saved logits
        save(model, saved, file, switch_over)
        for _ in range(2):  # many times
            assert sampled(model, prompt, max_new_tokens=40, prefix=state_file.load_state(file, model)) == samples


def test_another_models_state_is_refused_with_the_reason(tmp_path):
    model, changed, file = small("sympow"), small("sympow"), tmp_path / "read.state"
    save(model, [256, 10], file)
    with torch.no_grad():
        changed.transformer.wte.weight[0, 0] += 1
    for reader, message in (
        (small("sympow_gating"), "attention='sympow' there, 'sympow_gating' here"), (changed, "other weights")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            state_file.load_state(file, reader)
    os.truncate(file, 1000)
    with pytest.raises(ValueError, match="not a whole state file"):
        state_file.load_state(file, model)


def test_a_flipped_bit_anywhere_in_a_state_is_refused(tmp_path):
    model, file = small("sympow_gating", n_layer=1), tmp_path / "read.state"
    save(model, [256, 10], str(file))
    raw = file.read_bytes()
    for i in [*range(0, len(raw), 19), len(raw) - 1]:
        damaged = bytearray(raw)
        damaged[i] ^= 1 << i % 8
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a whole state file|it is damaged"):
            state_file.load_state(str(file), model)


def write_state(file, tensors, text, version="1"):
    """Write a state file of any contents, with the sha256 that it would have."""
    metadata = {"version": version, "description": text, "sha256": state_file.hash_tensors(tensors, text)}
    save_file(tensors, file, metadata=metadata)


@pytest.mark.parametrize(
    "text,version,message",
    [
        ("[]", "1", "its states are not those of"),
        ('{"model": {}}', "1", "another model: vocab_size=50257 there"),
        ("{}", "2", "version 2: sample.py --save_state writes version 1"),
    ],
)
def test_a_state_of_another_version_or_model_is_refused(text, version, message, tmp_path):
    file = str(tmp_path / "read.state")
    write_state(file, {"logits": torch.zeros(1, 257)}, text, version)
    with pytest.raises(ValueError, match=message):
        state_file.load_state(file, small("sympow_gating"))


def test_a_state_of_other_names_than_the_model_has_is_refused(tmp_path):
    """As other code may have written it."""
    model, file = small("sympow_gating", n_layer=1), str(tmp_path / "read.state")
    save(model, [256, 10, 20], file)
    tensors, description = state_file.read_file(file)
    others = {name: x for name, x in tensors.items() if not name.endswith("position")}
    for other_tensors in (others, {**tensors, "layers.0.sums": tensors["layers.0.k"].clone()}):
        write_state(file, other_tensors, json.dumps(description))
        with pytest.raises(ValueError, match="its states are not those of attention=sympow_gating now"):
            state_file.load_state(file, model)


def test_a_loaded_state_is_freed_before_tokens_are_generated(go, monkeypatch, tmp_path, capsys):
    """It may take a good part of a GPU's memory, and generation has a state of its own by then."""
    file, loaded, alive = str(tmp_path / "a.state"), [], []
    assert go("--prompt=line 1", f"--save_state={file}", "--max_new_tokens=0", "--out_dir=out/a") == 0
    report = capsys.readouterr().err
    assert f"wrote {file}\n" in report and " tokens/s, state " in report and ", then " not in report

    def load(read, *args):
        prefix = read(*args)
        loaded.append(weakref.ref(prefix[1]))
        return prefix

    def record(*args, **options):
        alive.append(loaded[0]() is not None)
        return sample_next_token(*args, **options)

    monkeypatch.setattr(sample, "read_state", load)
    monkeypatch.setattr(steps, "sample_next_token", record)
    assert go(f"--load_state={file}", "--prompt= and", "--max_new_tokens=3", "--out_dir=out/a") == 0
    assert alive == [False] * 3 and "conformal_sympow: prompt" in capsys.readouterr().err
    assert go(f"--load_state={file}", "--max_new_tokens=3", "--out_dir=out/a") == 0
    assert "prompt" not in capsys.readouterr().err  # which had nothing to read


def test_a_state_that_could_not_be_written_leaves_nothing(go, tmp_path, monkeypatch):
    def write_half(tensors, path, metadata):
        with open(path, "w") as f:
            f.write("half")
        raise SafetensorError("I/O error: File too large (os error 27)")

    monkeypatch.setattr(state_file, "save_file", write_half)
    (tmp_path / "a.state").write_text("the state before")
    with pytest.raises(OSError, match=f"^cannot write {tmp_path}/a.state: I/O error: File too large"):
        go(f"--save_state={tmp_path}/a.state", "--max_new_tokens=0", "--out_dir=out/a")
    assert os.listdir(tmp_path) == ["a.state"] and (tmp_path / "a.state").read_text() == "the state before"


def test_a_document_is_read_once_and_asked_twice(go, capsys, tmp_path):
    book, file = "line 1\nline 2", str(tmp_path / "a.state")

    def output(*argv):
        assert go("--temperature=0", "--out_dir=out/a", *argv) == 0
        return capsys.readouterr().out

    assert output(f"--prompt={book}", f"--save_state={file}", "--max_new_tokens=1").startswith(book)
    out = output(f"--prompt={book}", f"--save_state={file}", "--max_new_tokens=0", "--json")
    assert book not in out and json.loads(out)["state_bytes"] > 0  # a text that is read for its state is not printed
    text = output(f"--prompt={book}\nli", "--max_new_tokens=30")
    for _ in range(2):
        assert book + output(f"--load_state={file}", "--prompt=\nli", "--max_new_tokens=30") == text
    assert go(f"--load_state={file}", "--max_new_tokens=1") == 0  # with the state's own run, not the newest
    assert "[" + os.path.abspath("out/a") + ", conformal_sympow" in capsys.readouterr().err
    assert go(f"--load_state={file}", "--out_dir=out/b") == 2
    assert "it belongs to another model: attention='conformal_sympow' there" in capsys.readouterr().err


def test_weights_that_give_no_finite_logits_are_named(go, monkeypatch):
    logits = torch.full((1, 257), torch.nan)
    monkeypatch.setattr(sample, "read_prompt", lambda *args, **options: (logits, None))
    assert "no finite logits" in go("--out_dir=out/a", "--max_new_tokens=5")
