"""Imports run one way, also those inside functions, so that a reader who follows the arrows never comes back."""

import ast
from pathlib import Path

import pytest
from helpers import run

ROOT = Path(__file__).resolve().parent.parent
# the most lines that these files may have
SHORT = {"model.py": 310, "train.py": 340, "sample.py": 250, "README.md": 100, "docs/understand/attention.md": 150}
PROGRAMS = {"train", "sample", "evaluate", "compare", "doctor", "export"}
MODEL = {"model", "layers", "attention", "kernels"}
# the rooms that a room (or top-level file) may import; data/*/prepare.py are programs of data/
ALLOWED = {
    "kernels": set(),
    "data": set(),
    "attention": {"kernels"},
    "layers": {"attention"},
    "model": {"layers", "attention"},
    "generation": {*MODEL, "data", "runs"},
    "training": {*MODEL, "data", "runs", "generation"},
    "runs": {*MODEL, "data", "training", "generation", "sympow"},
    "config": set(),
    "sympow": MODEL,
    **dict.fromkeys(PROGRAMS, {*MODEL, "generation", "runs", "training", "data", "compare", "export"}),
}

EVERYWHERE = {"sympow", "sympow.code"}  # they import nothing of this repository


def files():
    """Return {module name: path} of the files that have rules; bench/, experiments/ and tests/ may import anything."""
    paths = [*ROOT.glob("*.py")]
    for room in ALLOWED:
        paths += (ROOT / room).rglob("*.py")
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    dotted = {name.removesuffix(".__init__"): path for name, path in dotted.items()}
    return {name if name.startswith("sympow") else f"sympow.{name}": path for name, path in dotted.items()}


FILES = files()


def imports(name):
    """Return [(imported module, imported name or None, level of a relative import, line)] of a file's imports."""
    found, path = [], FILES[name]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, None, 0, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(module, alias.name, node.level, node.lineno) for alias in node.names]
    return found


def targets(name):
    """Return {(imported file of this repository, level, line)}; `from package import file` imports the file."""
    found = set()
    for module, what, level, line in imports(name):
        target = f"{module}.{what}" if f"{module}.{what}" in FILES else module
        if target in FILES:
            found.add((target, level, line))
    return found


def room_of(name):
    """Return the folder of a module of this repository, or the name of a file at top level."""
    return FILES[name].relative_to(ROOT).parts[0].removesuffix(".py")


def test_what_is_read_first_stays_short():
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in SHORT}
    for path, count in lines.items():
        limit = f"{path} has {count} lines, and this repository keeps it to {SHORT[path]}"
        assert count <= SHORT[path], (
            f"{limit}: move what stands alone elsewhere, or give your copy another number in SHORT"
        )
    long = [
        f"{name}: {node.name}"
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 80
    ]
    assert not long


def test_every_file_is_in_a_room_that_has_rules():
    assert {room_of(name) for name in FILES} == set(ALLOWED)
    assert len(FILES) > 60


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_its_own_room_and_those_below(name):
    wrong = [
        f"{name}:{line} imports {target}"
        for target, _, line in targets(name)
        if target not in EVERYWHERE and room_of(target) not in ALLOWED[room_of(name)] | {room_of(name)}
    ]
    assert not wrong


def test_no_file_imports_itself_in_a_circle():
    edges = {name: {target for target, *_ in targets(name)} - {name} for name in FILES}
    done, way = set(), []

    def visit(name):
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name in done:
            return
        way.append(name)
        for target in sorted(edges[name]):
            visit(target)
        way.pop()
        done.add(name)

    for name in FILES:
        visit(name)
    assert len(done) == len(FILES)


@pytest.mark.parametrize("name", FILES)
def test_nothing_private_is_imported(name):
    wrong = [
        f"{name}:{line} imports {what} from {module}"
        for module, what, _, line in imports(name)
        if what and what.startswith("_") and what != "__version__" and module in FILES
    ]
    ours = {(what or module).rpartition(".")[2] for module, what, *_ in imports(name) if module.startswith("sympow")}
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ours:
            if node.attr.startswith("_") and not node.attr.startswith("__"):
                wrong.append(f"{name}:{node.lineno} uses {node.value.id}.{node.attr}")
    assert not wrong


def test_attention_reaches_the_kernels_by_one_door_and_both_are_relative_inside():
    for name in FILES:
        for target, level, line in targets(name):
            if room_of(name) == "attention" and room_of(target) == "kernels":
                assert name == "sympow.attention.operator.backend", f"{name}:{line} imports {target}"
            if room_of(name) in ("attention", "kernels") and room_of(target) == room_of(name):
                assert level, f"{name}:{line} imports {target} by its full name"


def test_no_library_imports_a_script():
    scripts = {name for name in FILES if room_of(name) == "data" and name.endswith(".prepare")}
    scripts |= {f"sympow.{name}" for name in (*PROGRAMS, "kernels.tune")}
    libraries = [name for name in FILES if name not in scripts]
    wrong = [f"{name} imports {target}" for name in libraries for target, *_ in targets(name) if target in scripts]
    assert len(scripts) == 13 and not wrong


def test_attention_and_the_model_can_be_imported_without_triton():
    code = "import sys; sys.modules['triton'] = None; import sympow.generation.generate, sympow.kernels.cost"
    run("-c", code, cwd=ROOT)


def test_one_file_finds_the_closest_name():
    assert [name for name in FILES if ("difflib", None) in {i[:2] for i in imports(name)}] == ["sympow"]


EVERYTHING = """
import collections, importlib, os, sys
import sympow
for name in {names}:
    importlib.import_module(name)
files = collections.defaultdict(list)
for name, module in sys.modules.items():
    path = getattr(module, "__file__", None) or ""
    if path.startswith(os.getcwd() + os.sep) and "site-packages" not in path:
        files[os.path.realpath(path)].append(name)
print(len(files), *[names for names in files.values() if len(names) > 1])
"""


def test_no_source_file_has_two_names():
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    paths = [path for room in ("bench", "experiments") for path in (ROOT / room).glob("*.py")]
    names = [*FILES, *(f"sympow.{path.parent.name}.{path.stem}" for path in paths)]
    env = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    count, *repeated = run("-c", EVERYTHING.format(names=names), cwd=ROOT, env=env).stdout.split()
    assert int(count) >= len(names) and not repeated


@pytest.mark.parametrize("room", ("attention", "kernels", "data"))
def test_a_room_refuses_another_name_in_one_line(room):
    done = run("-c", f"import {room}", cwd=ROOT, check=False)
    assert done.stderr.splitlines()[-1] == f"ImportError: {room}/ is imported as sympow.{room}"
