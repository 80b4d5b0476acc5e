"""The code that made a run, a state file or an exported model is recorded, and other code is named where it is used."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, call

from sympow import code, compare, evaluate, export, sample
from sympow.runs import starts

LAST = "out/a was last trained with"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Let three short files be the code that is hashed; return their folder."""
    monkeypatch.setattr(code, "PACKAGE", tmp_path / "clone")
    for name in ("model.py", "layers/norm.py", "training/optimizer.py"):
        (code.PACKAGE / name).parent.mkdir(parents=True, exist_ok=True)
        (code.PACKAGE / name).write_text("x = 1")
    return code.PACKAGE


@pytest.mark.parametrize(
    "source,is_equal",
    [
        ('"""A module."""\n\ndef f(x):\n    """A function."""\n    return (x\n      + 1)  # more', True),
        ("def f(x):\n    return x + 2", False), ("def f(x, y=1):\n    return x + 1", False),
    ],
)  # fmt: skip
def test_a_hash_changes_with_what_is_computed_alone(source, is_equal):
    in_every_python = "f1be77de3dff2665"  # of def f(x): return x + 1
    assert (code.hash_syntax(source.encode()) == in_every_python) == is_equal


def test_every_program_names_the_file_that_changed_and_goes_on(go, clone, caplog):
    def warnings(program, *argv):
        caplog.clear()
        assert call(program.main, *argv) == 0 if program else go(*argv) == 0
        return [message.replace(f"{os.getcwd()}/", "") for message in caplog.messages if "other code" in message]

    train = None, "--out_dir=out/a", "--attention=sympow"
    programs = [
        ([LAST], *train),  # it is trained: no step is of this code
        ([LAST], None, "--out_dir=out/c", "--init_from=out/a", "--overwrite=True"),
        ([LAST], evaluate, "out/a", "--documents=1", "--length=64", "--png="),
        ([LAST], export, "out/a", "--to=hf/a"),
        ([LAST, "the text of a.state was read with"], sample, "--load_state=a.state", "--max_new_tokens=1"),
        (["hf/a was trained with"], None, "--out_dir=out/b", "--init_from=hf/a", "--overwrite=True"),
        ([LAST], *train, "--max_iters=7"),
    ]
    assert not warnings(*train)
    assert not warnings(sample, "out/a", "--max_new_tokens=0", "--save_state=a.state")
    (clone / "layers/norm.py").write_text('"""A file."""\n\nx = 1  # as ever')
    assert not warnings(*train)
    (clone / "layers/norm.py").write_text("x = 2")
    (clone / "layers/new.py").write_text("this cannot be imported, and is not")
    (clone / "model.py").unlink()
    changes = "other code (sympow 0.1.0, here 0.1.0): layers/norm.py, model.py"
    for lines, *program in programs:
        assert warnings(*program) == [f"{line} {changes}" for line in lines]
    (clone / "training/optimizer.py").write_text("x = 2")  # which a sample does not depend on
    assert not warnings(sample, "out/a", "--max_new_tokens=1")
    assert warnings(*train, "--max_iters=8")[0].endswith(": training/optimizer.py")


@pytest.mark.parametrize("damaged", ["5", "[null]", '[{"step": 5', ""])
def test_a_damaged_list_of_starts_is_none(damaged, tmp_path):
    (tmp_path / "environment.json").write_text(damaged)
    assert starts.last_code(str(tmp_path / "ckpt/step_00000005")) is None


def test_compare_marks_runs_of_other_code(go, clone, capsys):
    for name, text in (
        ("a", "x = 1"),
        ("a", "x = 2"),
        ("b", "x = 1  # one"),
        ("c", "x = 1"),
        ("c", "x = 2"),
        ("d", "x = 2"),
    ):
        (clone / "model.py").write_text(text)
        assert go(f"--out_dir=out/{name}", f"--max_iters={7 if (name, text) == ('c', 'x = 2') else 6}") == 0
    Path("out/b/environment.json").write_text("[{}]")  # of an older version
    for runs, end in (("ab", "median\n"), ("abd", "code: d (model.py)\n"), ("c", "code: c (model.py)\n")):
        compare.main([f"out/{name}" for name in runs])
        assert capsys.readouterr().out.endswith(end)


LOAD = """
import pathlib, sympow, transformers
file = pathlib.Path(sympow.__path__[0], "layers/activation.py")
for new in ("return F.gelu(  # as before\\n", "return F.relu(x) + F.gelu("):
    file.write_text(file.read_text().replace("return F.gelu(", new))
    transformers.AutoModelForCausalLM.from_pretrained("hf/a", trust_remote_code=True)
"""


@pytest.mark.slow
def test_an_exported_model_names_what_the_installed_package_computes_otherwise(go, tmp_path):
    """Without a word where the package is the same but for comments: it has the names of the files in a clone."""
    assert go("--out_dir=out/a") == 0 and call(export.main, "out/a", "--to=hf/a") == 0
    package = tmp_path / "site/sympow"
    shutil.copytree(f"{ROOT}/sympow", package, ignore=shutil.ignore_patterns("data", "runs"))  # follows links
    env = {**os.environ, "PYTHONPATH": str(package.parent), "HF_MODULES_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LOAD], env=env, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if "code" in line]
    assert lines == ["this model was trained with other code (sympow 0.1.0, here 0.1.0): layers/activation.py"]


COMMIT = """
mkdir repository && cd repository && git init -q && mkdir layers
for name in model.py layers/norm.py; do echo 'x = 1' > $name; done
git add . && git -c user.name=a -c user.email=a@b commit -qm first
"""
CHANGE = "echo 'x = 2' > model.py && rm layers/norm.py && printf 'x = \\351\\f' > layers/mine.py"
REPEAT = "git clone -q repository again && cd again && git apply ../*.diff && diff -r -x .git . ../repository"


def test_a_start_keeps_what_makes_its_code_again(tmp_path, monkeypatch):
    shell = lambda command, folder: subprocess.run(command, shell=True, cwd=folder, check=True)
    shell(COMMIT, tmp_path)
    monkeypatch.setattr(starts, "ROOT", tmp_path / "repository")
    starts.record_start(tmp_path, 0)
    shell(CHANGE, starts.ROOT)
    shell("git config color.ui always; git config diff.noprefix true", starts.ROOT)
    monkeypatch.setenv("GIT_DIFF_OPTS", "-u0")
    starts.record_start(tmp_path, 5)
    shell(REPEAT, tmp_path)
    clean, changed = json.loads((tmp_path / "environment.json").read_text())
    assert len(clean["commit"]) == 40 and clean["code"] == code.record_code() and "diff" not in clean
    assert (tmp_path / changed["diff"]).exists()
