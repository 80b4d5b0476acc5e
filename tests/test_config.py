"""Settings are read from files and the command line; mistakes are refused in one line with exit status 2."""

import math
from dataclasses import dataclass, fields

import pytest

from sympow import train
from sympow.model import GPTConfig
from sympow.runs.settings import read_settings


@dataclass
class Example:
    # numbers
    batch_size: int = 8  # sequences
    learning_rate: float = 6e-4
    # texts
    compile: str = "auto"  # how
    pack: bool = False
    secret: int = 0


def read(*argv, hidden=("secret",)):
    return read_settings((Example,), argv, hidden, usage="usage")


def test_values_come_from_files_and_the_command_line_and_the_later_wins(tmp_path):
    (tmp_path / "a.py").write_text("import math\nn = 4\nbatch_size = 2 * 8\n_private = 1\n".replace("n = 4\n", ""))
    (tmp_path / "b.py").write_text("batch_size = 3\npack = True\n")
    a, b = str(tmp_path / "a.py"), str(tmp_path / "b.py")
    assert read(a) == ({"batch_size": 16}, ["a"])
    assert read(a, b) == ({"batch_size": 3, "pack": True}, ["a", "b"])
    assert read(a, "--batch_size=5", b)[0]["batch_size"] == 3
    assert read(a, b, "--batch-size", "5")[0]["batch_size"] == 5


def test_texts_become_the_fields_types():
    given, _ = read("--learning_rate=1", "--batch_size=1e3", "--pack=1", "--compile=False")
    assert given == {"learning_rate": 1.0, "batch_size": 1000, "pack": True, "compile": "False"}
    assert type(given["learning_rate"]) is float and type(given["batch_size"]) is int
    assert read("--pack")[0] == {"pack": True}
    assert read("--batch_size=-5")[0] == {"batch_size": -5}


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
        (["--batch_size"], "--batch_size needs a value, as in --batch_size=8"),
        (["config/nothing.py"], "no config file config/nothing.py"),
        (["batch_size=3"], "cannot read 'batch_size=3'"),
    ],
)
def test_mistakes_are_refused_in_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as exit:
        read(*argv)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and message in error and error.count("\n") == 1


def test_a_config_file_that_fails_or_sets_an_unknown_key_is_refused(tmp_path, capsys):
    for text, message in (("batch_size = 1 / 0", "ZeroDivisionError"), ("batchsize = 1", "did you mean batch_size?")):
        (tmp_path / "c.py").write_text(text)
        with pytest.raises(SystemExit) as exit:
            read(str(tmp_path / "c.py"))
        error = capsys.readouterr().err
        assert exit.value.code == 2 and message in error and error.count("\n") == 1


def test_what_a_config_file_imports_or_defines_is_no_setting(tmp_path, capsys):
    lines = (
        "from math import *", "from math import pi as half_a_turn", "import os.path", "from time import time as now",
        "from fractions import Fraction", "class Helper: pass", "twice = len", "learning_rate = pi / half_a_turn",
    )  # fmt: skip
    (tmp_path / "c.py").write_text("\n".join(lines))
    assert read(str(tmp_path / "c.py")) == ({"learning_rate": 1.0}, ["c"])
    for text, message in (
        ("from math import pi\nbatchsize = 1", "unknown key batchsize in"),
        ("compile = print", "compile must be a text, got '<built-in"),
        ("compile = 'a\\0b'", "compile must be a text"),
        ("learning_rate = float('inf')", "learning_rate must be a finite number, got 'inf'"),
        ("batch_size = True", "batch_size must be a whole number below 2^63, got 'True'"),
        ("batch_size = 10**5000", "batch_size must be a whole number below 2^63, got 'a int that cannot be printed'"),
        ("import sys\nsys.exit()", "does not run: SystemExit"),
        ("raise GeneratorExit", "does not run: GeneratorExit"),
    ):
        (tmp_path / "c.py").write_text(text)
        with pytest.raises(SystemExit) as exit:
            read(str(tmp_path / "c.py"))
        error = capsys.readouterr().err
        assert exit.value.code == 2 and message in error and error.count("\n") == 1, (text, error)


@pytest.mark.parametrize("cls", [train.TrainConfig, GPTConfig])
def test_no_number_of_a_run_may_be_infinite_or_nan(cls, capsys):
    for field in fields(cls):
        for value in ("nan", "inf", "-inf") if field.type in (int, float) else ():
            with pytest.raises(SystemExit) as exit:
                read_settings((cls,), [f"--{field.name}={value}"])
            error = capsys.readouterr().err
            assert exit.value.code == 2 and f"{field.name} must be a" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "setting",
    [
        {"rope_base": math.nan}, {"rope_base": math.inf}, {"gate_bias": math.nan}, {"gate_bias": -math.inf},
        {"dropout": math.nan}, {"head_dim": -2}, {"n_kv_head": -1},
    ],
)  # fmt: skip
def test_a_model_refuses_what_it_cannot_be(setting):
    with pytest.raises(ValueError, match=next(iter(setting)) + " must be"):
        GPTConfig(**setting)


@pytest.mark.parametrize(
    "setting",
    [{"max_seconds": -5.0}, {"gradient_accumulation_steps": -8}, {"weight_decay": math.inf}, {"min_lr": math.nan}],
)
def test_training_refuses_what_it_cannot_do(setting):
    with pytest.raises(ValueError, match=next(iter(setting)) + " must be"):
        train.TrainConfig(**setting)


def test_help_lists_every_key_with_default_and_comment(capsys):
    with pytest.raises(SystemExit) as exit:
        read("--help")
    out = capsys.readouterr().out
    assert exit.value.code == 0
    assert "--batch_size=8" in out and "sequences" in out and "--learning_rate=6e-4" in out and "secret" not in out


def test_every_training_key_is_explained():
    import inspect
    import re

    for cls in (train.TrainConfig, GPTConfig):
        for line in inspect.getsource(cls).splitlines():
            if re.match(r"    \w+: [\w.]+ = ", line):
                assert "  # " in line, line
