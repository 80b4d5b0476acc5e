"""Settings are read from files and the command line; mistakes are refused in one line with exit status 2."""

import inspect
import math
import re
from dataclasses import dataclass, fields
from functools import partial

import pytest
from helpers import call, raises_one_line

from sympow import evaluate, export, sample, train
from sympow.model import GPTConfig
from sympow.runs.program import Parser
from sympow.runs.settings import FIELD, TRAIN_RANGES, read_settings
from sympow.training.optimizer import RANGES


@dataclass
class Example:
    # numbers
    batch_size: int = 8  # sequences
    learning_rate: float = 6e-4
    # texts
    compile: str = "auto"  # how
    pack: bool = False
    convolution: int | str = "auto"
    output_gate: bool | str = "auto"
    secret: int = 0


def read(*argv, hidden=("secret",)):
    return read_settings((Example,), argv, hidden, usage="usage")


def test_values_come_from_files_and_the_command_line_and_the_later_wins(tmp_path):
    (tmp_path / "a.py").write_text("import math\nbatch_size = 2 * 8\n_private = 1\n")
    (tmp_path / "b.py").write_text("batch_size = 3\npack = True\n")
    a, b = str(tmp_path / "a.py"), str(tmp_path / "b.py")
    assert read(a) == ({"batch_size": 16}, ["a"])
    assert read(a, b) == ({"batch_size": 3, "pack": True}, ["a", "b"])
    assert read(a, "--batch_size=5", b)[0]["batch_size"] == 3
    assert read(a, b, "--batch-size", "5")[0]["batch_size"] == 5
    assert read(a, "--pack", b)[0] == {"batch_size": 3, "pack": True}
    assert read("--compile", "FILE:train.py", a) == ({"compile": "FILE:train.py", "batch_size": 16}, ["a"])


def test_texts_become_the_fields_types():
    settings, _ = read("--learning_rate=1", "--batch_size=1e3", "--pack=1", "--compile=False")
    assert settings == {"learning_rate": 1.0, "batch_size": 1000, "pack": True, "compile": "False"}
    assert type(settings["learning_rate"]) is float and type(settings["batch_size"]) is int
    assert read("--pack", "--compile", "a b")[0] == {"pack": True, "compile": "a b"}
    assert read("--output_gate", "--pack")[0] == {"output_gate": True, "pack": True}
    assert read("--convolution", "auto", "--output_gate", "auto")[0] == {"convolution": "auto", "output_gate": "auto"}
    assert read("--batch_size=-5", "--compile=")[0] == {"batch_size": -5, "compile": ""}


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--batchsize=3"], "unknown key --batchsize=3: did you mean batch_size?"),
        (["--secret=1"], "unknown key --secret=1"),
        (["--batch_size=2.5"], "batch_size must be a whole number below 2^63, got '2.5'"),
        (["--learning_rate=fast"], "learning_rate must be a finite number, got 'fast'"),
        (["--learning_rate=nan"], "learning_rate must be a finite number, got 'nan'"),
        (["--learning_rate=-1e400"], "learning_rate must be a finite number, got '-1e400'"),
        (["--batch_size=1e400"], "batch_size must be a whole number below 2^63, got '1e400'"),
        (["--batch_size=1e30"], "batch_size must be a whole number below 2^63, got '1e30'"),
        (["--batch_size=9223372036854775808"], "batch_size must be a whole number below 2^63"),
        (["--pack=maybe"], "pack must be True or False, got 'maybe'"),
        (["--pack", "auto"], "pack must be True or False, got 'auto'"),
        (["--output_gate=maybe"], "output_gate must be True or False, or auto, got 'maybe'"),
        (["--convolution=2.5"], "convolution must be a whole number below 2^63, or auto, got '2.5'"),
        (["--batch_size"], "argument --batch_size: expected one argument"),
        (["config/nothing.py"], "no config file config/nothing.py"),
        (["config/demoo.py"], "no config file config/demoo.py: did you mean config/demo.py?"),
        (["batch_size=3"], "cannot read 'batch_size=3'"),
    ],
)
def test_mistakes_are_refused_in_one_line(argv, message, refused):
    assert message in refused(call, partial(read, *argv))


def test_a_folder_is_given_as_a_word_or_as_out_dir_not_both(refused):
    read = partial(read_settings, (sample.SampleConfig,), folders=True)
    assert read(["out/a", "--seed=2"])[0] == {"out_dir": "out/a", "seed": 2}
    for argv in (["out/a", "--out_dir=out/b"], ["--out-dir", "out/b", "out/a"]):
        assert "give out/a or --out_dir, not both" in refused(call, partial(read, argv))


def test_a_config_file_may_import_and_define_and_its_mistakes_are_refused(tmp_path, refused):
    path = tmp_path / "c.py"
    lines = "import math", "def half(x):", "    y = x / 2", "    return y", "learning_rate = half(math.tau) / math.tau"
    path.write_text("\n".join(lines))
    assert read(str(path)) == ({"learning_rate": 0.5}, ["c"])
    for text, message in (
        ("batch_size = 1 / 0", "does not run: ZeroDivisionError"),
        ("batch_size =", "does not run: SyntaxError"),
        ("import sys; sys.exit(7)", "does not run: SystemExit: 7"),
        ("batchsize = 1", "c.py: did you mean batch_size?"),
        ("learning_rate = float('inf')", "learning_rate must be a finite number, got 'inf'"),
        ("out_dir = None", "out_dir in"),
        ("wandb_run_name = None", "must have a value, got None: leave it out for the default"),
        ("batch_size = True", "batch_size must be a whole number below 2^63, got 'True'"),
    ):
        path.write_text(text)
        assert message in refused(call, partial(read_settings, (train.TrainConfig,), [str(path)]))


@pytest.mark.parametrize("cls", [train.TrainConfig, sample.SampleConfig, evaluate.EvaluateConfig, export.ExportConfig])
def test_a_path_of_any_setting_may_begin_at_home(cls, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "home.py"
    for field in fields(cls):
        config.write_text(f"{field.name} = '~/x:0.5,~/y'")
        for argv in ([str(config)], [f"--{field.name}=~/x:0.5,~/y"]) if field.type is str else ():
            expected = "~/x:0.5,~/y" if field.name == "prompt" else f"{tmp_path}/x:0.5,{tmp_path}/y"
            assert read_settings((cls,), argv)[0] == {field.name: expected}


def test_a_word_of_the_command_line_may_begin_at_home_as_well(tmp_path, monkeypatch):
    """A shell leaves ~ as it is where it is quoted."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.py").write_text("p = 4")
    assert read_settings((GPTConfig,), ["~/c.py"]) == ({"p": 4}, ["c"])
    words = ["~/x", "--out", "~/x", "a~/x", "--prompt", "~/x"]
    assert Parser("").parse_known_args(words)[1] == [f"{tmp_path}/x", "--out", f"{tmp_path}/x", *words[3:]]


def config_of(arguments):
    """Return the GPTConfig of a text such as "attention=sympow p=4"."""
    return GPTConfig(**read_settings((GPTConfig,), [f"--{argument}" for argument in arguments.split()])[0])


@pytest.mark.parametrize(
    "arguments,message",
    [
        ("n_embd=100", "n_embd must be a multiple of n_head, got 100 and 12; or set head_dim"),
        ("p=3", "p must be a positive even integer, got 3"),
        ("head_dim=15", "head_dim must be even"),
        ("n_kv_head=5", "n_head must be a multiple of n_kv_head, got 12 and 5"),
        ("form=fast", "form must be one of"),
        ("convolution=1", "convolution must be .*at least 2 tokens.*, got 1"),
        ("convolution=-4", "convolution must be .*at least 2 tokens.*, got -4"),
        ("convolution=65", "convolution must be .*at most 64 tokens.*, got 65"),
        ("attention=nonesuch", "attention must be one of softmax, even_power"),
        ("attention=sympow gate=learned", "attention=sympow has no gates, got gate=learned"),
        ("attention=sympow_gating gate=none", "is attention=sympow"),
        ("attention=heinsen gate=learned", "attention=heinsen has no gates, got gate=learned"),
        ("attention=heinsen values=sign", "values must be one of signed, log, got 'sign'"),
        ("attention=heinsen residual=mlp", "residual must be one of gpt2, glu, got 'mlp'"),
        ("attention=adaptive_power p_min=4 p_max=4", "p_min must be below p_max, both finite, got 4.0 and 4.0"),
        ("attention=adaptive_power p_min=0.5", "p_min must be at least 1, got 0.5"),
        ("attention=adaptive_power p_max=1e300", "p_max must be at most 1000 for adaptive=continuous"),
        ("attention=adaptive_power adaptive=mixture p_max=3", "must be even integers, got 2.0 and 3.0"),
        ("attention=adaptive_power adaptive=mixture p_max=1e7", "p_max must be at most 8 .*, got 10000000.0"),
        ("attention=adaptive_power adaptive=floor", "adaptive must be one of continuous, mixture, got 'floor'"),
        ("window=-1", "window must be a whole number of at least 2 tokens, or 0 for all, got -1"),
        ("attention=sympow window=8", "attention=sympow has no window, got window=8: only softmax has one"),
        ("attention=sympow,even_power window=8", "no layer of .* takes window=8: only softmax does"),
        ("attention=sympow,softmax,softmax n_layer=2", "attention has a pattern of 3 layers, the model has n_layer=2"),
        ("attention=sympow,", "got ''"),
        ("attention=sympow,soft", "got 'soft'"),
        ("attention=sympow,softmax gate=learned", "no layer of attention=sympow,softmax takes gate=learned"),
        ("attention=sympow positions=none,rotary gate=learned", "no layer of attention=sympow takes gate=learned"),
        ("attention=sympow_gating,softmax gate=none", "is attention=sympow"),
        ("positions=none,learned", "positions=learned is a table for all layers, got positions=none,learned"),
        ("positions=none,rotary,none n_layer=2", "positions has a pattern of 3 layers, the model has n_layer=2"),
        ("positions=none,half", "positions must be one of auto, rotary, none, learned, got 'half'"),
    ],
)
def test_settings_of_a_model_that_do_not_fit_are_refused_in_one_line(arguments, message):
    with raises_one_line(ValueError, message):
        config_of(arguments)


@pytest.mark.parametrize("attention", ["softmax", "sympow_gating,softmax"])
@pytest.mark.parametrize(
    "setting,message",
    [
        ("adaptive=mixtur", "adaptive must be one of continuous, mixture, got 'mixtur': did you mean mixture?"),
        ("values=sign", "values must be one of signed, log, got 'sign'"),
        ("residual=mlp", "residual must be one of gpt2, glu, got 'mlp'"),
        ("p_min=-1e9", "p_min must be at least 1, got -1000000000.0"),
        ("p_max=1", "p_min must be below p_max, both finite, got 2.0 and 1.0"),
    ],
)
def test_settings_of_another_attention_are_checked_too(attention, setting, message):
    with raises_one_line(ValueError, re.escape(message)):
        config_of(f"attention={attention} {setting}")


def test_settings_of_another_attention_that_could_be_right_are_taken():
    config_of("attention=softmax adaptive=mixture p_min=4 p_max=8 values=signed residual=glu p=6 n_positions=7")


@pytest.mark.parametrize(
    "cls,name,value",
    [
        (GPTConfig, "rope_base", math.nan),
        (GPTConfig, "rope_base", math.inf),
        (GPTConfig, "gate_bias", math.nan),
        (GPTConfig, "gate_bias", -math.inf),
        (GPTConfig, "dropout", math.nan),
        (GPTConfig, "head_dim", -2),
        (GPTConfig, "n_kv_head", -1),
        (GPTConfig, "convolution", 2.0),
        (GPTConfig, "output_gate", 2),
        (GPTConfig, "window", 2.5),
        (GPTConfig, "p_min", math.nan),
        (GPTConfig, "p_min", -math.inf),
        (train.TrainConfig, "max_seconds", -5.0),
        (train.TrainConfig, "gradient_accumulation_steps", -8),
        (train.TrainConfig, "weight_decay", math.inf),
        (train.TrainConfig, "min_lr", math.nan),
    ],
)
def test_settings_out_of_their_range_are_refused(cls, name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        cls(**{name: value})


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_every_key_with_default_and_comment(capsys, option):
    with pytest.raises(SystemExit) as stopped:
        read(option)
    out = capsys.readouterr().out
    assert stopped.value.code == 0 and out.startswith("usage\n")
    for line in ("numbers:", "--batch_size 8 +sequences", "--learning_rate 0.0006", "texts:", r"--pack \[False\]"):
        assert re.search(line, out), line
    assert "secret" not in out


def test_every_number_of_training_has_a_range():
    names = {name for row in (*TRAIN_RANGES, *RANGES) for name in row[0].split()}
    assert {field.name for field in fields(train.TrainConfig) if field.type in (int, float)} <= names


def test_every_training_key_is_explained():
    for cls in (train.TrainConfig, GPTConfig):
        explained = {name for name, comment, _ in FIELD.findall(inspect.getsource(cls)) if comment}
        assert explained == {field.name for field in fields(cls)}
