"""The kernels' sources keep what Triton's compiler and its interpreter, which runs the other tests, disagree on.

Triton 3.6 compiles no function that returns None, alone or in a tuple, and no version compiles a tuple with a local
variable that is None; the interpreter and newer versions take the first, the interpreter takes both. An argument of a
kernel may be None, also in a tuple.
"""

import ast
import shutil
from itertools import chain
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from sympow.kernels import support
from sympow.attention.operator import check


def uses_of_none(source):
    """Return "function: line" for each None in a @triton.jit function of `source` that not every Triton takes.

    None may be a default, an index, a side of a comparison, and an option of tl.range. A name that is compared
    with None may not be what a function returns, nor a part of that.
    """
    uses = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or "jit" not in "".join(map(ast.unparse, function.decorator_list)):
            continue
        allowed, maybe_none, returned = [*function.args.defaults], set(), []
        for node in ast.walk(function):
            if isinstance(node, ast.Compare):
                allowed += node.comparators
                if any(isinstance(x, ast.Constant) and x.value is None for x in node.comparators):
                    maybe_none.add(ast.unparse(node.left))
            elif isinstance(node, ast.Subscript):
                allowed += node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.range":
                options = [option.value for option in node.keywords]
                allowed += [x.orelse for x in options if isinstance(x, ast.IfExp)]
            elif isinstance(node, ast.Return) and node.value:
                returned += node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for node in ast.walk(function):
            none = isinstance(node, ast.Constant) and node.value is None
            if none and not any(node is x for x in allowed) or node in returned and ast.unparse(node) in maybe_none:
                uses.append(f"{function.name}: {ast.unparse(node)} in line {node.lineno}")
    return uses


@pytest.mark.parametrize("path", support.source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_triton_compiles_what_the_kernels_do_with_none(path):
    assert uses_of_none(path.read_text()) == []


@pytest.mark.parametrize(
    "body,count",
    [
        ("return x if G is None else x + tl.load(G)", 0),
        ("return x[:, None] + x[None]", 0),
        ("return", 0),
        ("for i in tl.range(0, x, num_stages=1 if C else None):\n        x += i", 0),
        ("for i in f(0, x, num_stages=1 if C else None):\n        x += i", 1),
        ("return x, None", 1),
        ("return (x, None if C else x)", 1),
        ("y = None\n    return f((x, y))", 1),
        ("y = x if C else None", 1),
        ("y = 0 if G is None else 1\n    return y, G", 1),
    ],
)
def test_a_none_that_some_triton_refuses_is_found(body, count):
    source = f"def plain():\n    return None\n\n@triton.jit(x=1)\ndef kernel(x, C, G=None):\n    {body}\n"
    assert len(uses_of_none(source)) == count


def test_an_edit_in_any_room_is_compiled_and_compared_again(tmp_path, monkeypatch):
    """What passed, and what was compiled, is remembered under a hash of all files of the kernels."""
    folder = shutil.copytree(support.SOURCES, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(support, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(check.backend, "table_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    compared = []

    def compare():
        compared.append(None)
        return ""

    rooms = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    for number, path in enumerate([*(min(room.glob("*.py")) for room in rooms), folder / "table.json"]):
        path.write_text(path.read_text() + " ")
        check._compare_once(0, "a size", compare)
        check._compare_once(0, "a size", compare)  # remembered
        assert len(compared) == number + 1


def test_saved_tensors_are_read_once():
    """Activation checkpointing computes them again when they are read, and refuses a second time."""
    read = lambda node: isinstance(node, ast.Attribute) and node.attr == "saved_tensors"
    root, counts = Path(ROOT), {}
    folders = (root / "attention").rglob("*.py"), (root / "layers").rglob("*.py"), support.source_files()
    for path in chain(root.glob("*.py"), *folders):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, (ast.FunctionDef, ast.Lambda)):
                counts[path, function.lineno] = sum(map(read, ast.walk(function)))
    assert sum(counts.values()) >= 13 and max(counts.values()) == 1
