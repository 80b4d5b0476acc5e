"""Imports are found by syntax and paths alone, as editors do, and run one way, also those inside functions."""

import ast
import graphlib
import operator
import os
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
from helpers import run

ROOT = Path(__file__).resolve().parent.parent
SHORT = {"README.md": 100, "docs/understand/attention.md": 150}  # the most lines that these files may have
# the most nodes of syntax, without docstrings, that a file, the files at top level and each room may have: what they
# have now and, where users add their own, an attention, an activation and a schedule more
SIZES = {
    "model.py": 1920, "train.py": 1935, "sample.py": 1100, "top level": 8815, "kernels": 39130, "attention": 24250,
    "experiments": 6999, "data": 12300, "runs": 12340, "generation": 5160, "bench": 4050, "training": 4050,
    "sympow": 3060, "layers": 2250, "config": 480,
}  # fmt: skip
# (file, whether imports inside functions count): the most files, and nodes in them, that its imports reach
REACHED = {
    ("model.py", False): (40, 24850),
    ("model.py", True): (77, 52200),
    ("train.py", False): (73, 47285),
    ("train.py", True): (115, 81490),
}
UNCOUNTED = ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop, ast.Module
MODEL = {"model", "layers", "attention", "kernels"}
LIBRARIES = {*MODEL, "data", "generation", "runs"}
# the rooms that a room (or top-level file) may import, from the ground floor up; each is above those that it imports.
# data/*/prepare.py are programs of data/
ALLOWED = {
    "ground": set(),
    "config": set(),
    "kernels": set(),
    "data": set(),
    "attention": {"kernels"},
    "layers": {"attention"},
    "model": {"layers", "attention"},
    "sympow": MODEL,
    "generation": {*MODEL, "data"},
    "runs": {*MODEL, "data", "sympow"},
    "training": LIBRARIES,
    "doctor": LIBRARIES,
    "compare": LIBRARIES,
    "export": LIBRARIES,
    "sample": LIBRARIES,
    "train": {*LIBRARIES, "training"},
    "evaluate": {*LIBRARIES, "compare"},
    "bench": {*LIBRARIES, "training", "train"},
    "experiments": {*LIBRARIES, "training", "train", "compare", "bench"},
}
PROGRAMS = {"train", "sample", "evaluate", "compare", "doctor", "export"}
GROUND = {"sympow/__init__.py", "sympow/code.py"}  # every room may import them; they import none


def files():
    """Return {path relative to the root: path} of all files of Python outside of tests, links left out."""
    paths = [*ROOT.glob("*.py")]
    for room in {*ALLOWED} - {"ground"}:
        paths += (ROOT / room).rglob("*.py")
    return {path.relative_to(ROOT).as_posix(): path for path in sorted(paths) if not path.is_symlink()}


FILES = files()


def find(path):
    """Return the name of the file that `import` loads for a path without a suffix, or of a folder without __init__.py;
    None if there is none. A file behind a link has its name beside sympow/."""
    for candidate in (path / "__init__.py", path.with_suffix(".py"), path):
        if candidate.exists():
            return candidate.resolve().relative_to(ROOT).as_posix()


@cache
def parse(name):
    """Return the nodes of a file's syntax tree."""
    return [*ast.walk(ast.parse(FILES[name].read_text()))]


@cache
def imports(name):
    """Return [(file or folder that is imported or None, name imported from it or "", level, line)] of a file's imports
    of this repository; `from package import file` imports the file."""
    imported = []
    for node in parse(name):
        if isinstance(node, ast.Import):
            entries = [(alias.name, "", 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            entries = [(node.module or "", alias.name, node.level) for alias in node.names]
        else:
            entries = []
        for module, attribute, level in entries:
            top, *_ = module.split(".")
            if level or top == "sympow":
                path = (FILES[name].parents[level - 1] if level else ROOT).joinpath(*module.split("."))
                file = attribute and find(path / attribute)
                imported.append((file or find(path), "" if file else attribute, level, node.lineno))
            elif top in ALLOWED:  # which makes a second copy of the module
                imported.append((None, module, level, node.lineno))
    return imported


def targets(name):
    """Return {(imported file, level, line)} of a file."""
    return {(target, level, line) for target, _, level, line in imports(name) if target in FILES}


def room_of(name):
    """Return the folder of a file of this repository, the name of a file at top level, or "ground"."""
    return "ground" if name in GROUND else name.partition("/")[0].removesuffix(".py")


def module_of(name):
    """Return the name by which a file is imported."""
    path = name.removesuffix(".py").removesuffix("__init__").strip("/")
    return f"sympow/{path}".replace("sympow/sympow", "sympow").replace("/", ".")


def size_of(name):
    """Return the number of nodes of a file's syntax, without docstrings."""
    documented = [
        node
        for node in parse(name)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False)
    ]
    return sum(not isinstance(node, UNCOUNTED) for node in parse(name)) - 2 * len(documented)


def reached_by(start, inside):
    """Return the files that the imports of a file reach, with those that are inside functions or without them."""
    reached, stack = {start}, [start]
    while stack:
        name = stack.pop()
        functions = [node for node in parse(name) if isinstance(node, ast.FunctionDef)]
        for target, _, line in targets(name):
            if inside or not any(node.lineno <= line <= node.end_lineno for node in functions):
                packages = {(parent / "__init__.py").as_posix() for parent in Path(target).parents}
                new = ({target} | packages & {*FILES}) - reached
                reached |= new
                stack += new
    return reached


def test_what_there_is_to_read_stays_short():
    """Move what stands alone elsewhere, delete something, or give your copy other numbers in SIZES and REACHED."""
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in SHORT}
    sizes = {name: size_of(name) for name in SIZES if name in FILES}
    for name in FILES:
        room = name.partition("/")[0] if "/" in name else "top level"
        sizes[room] = sizes.get(room, 0) + size_of(name)
    limits = SHORT | SIZES
    assert not {name: f"{count} of {limits[name]}" for name, count in (lines | sizes).items() if count > limits[name]}
    for (name, inside), limits in REACHED.items():
        files = reached_by(name, inside)
        counts = len(files), sum(map(size_of, files))
        assert all(map(operator.le, counts, limits)), f"the imports of {name} reach {counts} files and nodes"
    long = [
        f"{name}: {node.name}"
        for name in FILES
        for node in parse(name)
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 80
    ]
    assert not long


def test_every_room_has_rules_and_a_link_by_which_it_is_imported():
    rooms = {path.name for path in ROOT.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    rooms -= {"tests", "sympow", "config"}
    links = {path.name: os.readlink(path) for path in (ROOT / "sympow").iterdir() if path.is_symlink()}
    assert links == {name: f"../{name}" for name in rooms}
    assert {room_of(name) for name in FILES} == {*ALLOWED} and len(FILES) > 60


def test_every_import_is_found_by_its_path():
    """And what is imported from a file in that file: a function, a class, a variable or an import."""
    errors = []
    for name in FILES:
        for target, attribute, _, line in imports(name):
            nodes = parse(target) if attribute and target in FILES else []
            names = {getattr(node, "asname", None) or getattr(node, "name", getattr(node, "id", "")) for node in nodes}
            if target is None or (attribute and not {attribute, "__getattr__"} & names):
                errors.append(f"{name}:{line} imports {attribute} from {target}")
    assert not errors


def test_a_room_is_above_those_that_it_imports():
    floors = [*ALLOWED]
    assert all(floors.index(below) < floors.index(room) for room in floors for below in ALLOWED[room])


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_its_own_room_and_those_below(name):
    allowed = ALLOWED[room_of(name)] | {room_of(name), "ground"}
    assert not [
        f"{name}:{line} imports {target}"
        for target, *_, line in imports(name)
        if target and room_of(target) not in allowed
    ]


def test_no_file_imports_itself_in_a_circle():
    names = [name for name in FILES if room_of(name) != "experiments"]  # in which functions find attentions by name
    edges = {name: {target for target, *_ in targets(name)} - {name} for name in names}
    graphlib.TopologicalSorter(edges).prepare()  # or CycleError names them


@pytest.mark.parametrize("name", FILES)
def test_nothing_private_is_imported(name):
    errors = [
        f"{name}:{line} imports {attribute} from {target}"
        for target, attribute, _, line in imports(name)
        if attribute.startswith("_") and attribute != "__version__"
    ]
    modules = {Path(target).stem for target, attribute, *_ in imports(name) if target and not attribute}
    for node in parse(name):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            if node.attr.startswith("_") and not node.attr.startswith("__"):
                errors.append(f"{name}:{node.lineno} uses {node.value.id}.{node.attr}")
    assert not errors


def scripts():
    """Return the files that are run by their paths, and so import by full names."""
    return {f"{name}.py" for name in PROGRAMS} | {name for name in FILES if re.match("data/.+/prepare.py", name)}


def test_attention_reaches_the_kernels_by_one_door():
    for name in FILES:
        for target, _, line in targets(name):
            if room_of(name) == "attention" and room_of(target) == "kernels":
                assert name == "attention/operator/backend.py", f"{name}:{line} imports {target}"


def test_the_model_reaches_neither_the_ring_nor_what_its_kernels_are_compared_with():
    reached = ["model.py"]
    for name in reached:
        reached += sorted({target for target, *_ in targets(name)} - {*reached})
    assert not {"check", "naive", "heinsen_naive", "context", "circulate"} & {Path(name).stem for name in reached}


def test_rooms_import_each_other_by_relative_paths():
    """Then a path leads from file to file without a link. What is run by its path, or copied, has full names."""
    by_full_names = {*scripts(), "sympow/modeling.py"}
    names = [name for name in FILES if name not in by_full_names and room_of(name) not in ("bench", "experiments")]
    errors = [
        f"{name}:{line} imports {target} by its full name"
        for name in names
        for target, level, line in targets(name)
        if not level and not target.startswith("sympow/")
    ]
    assert not errors


def test_no_library_imports_a_script():
    programs = scripts() | {"kernels/tune.py"}
    libraries = [name for name in FILES if name not in programs and room_of(name) not in ("bench", "experiments")]
    errors = [f"{name} imports {target}" for name in libraries for target, *_ in targets(name) if target in programs]
    assert len(programs) >= 12 and not errors


BARE = """
import os, sys
sys.modules["triton"] = None
import sympow.data.loader, sympow.generation.generate, sympow.kernels.cost
print(*{"datasets", "tiktoken", "zarr"}.intersection(sys.modules), os.environ.get("OMP_WAIT_POLICY"))
"""


def test_the_package_can_be_imported_without_triton_and_optional_packages_and_leaves_waiting_threads_alone():
    assert run("-c", BARE, cwd=ROOT, env={"OMP_WAIT_POLICY": None}).stdout == "None\n"


def test_one_file_finds_the_closest_name():
    assert [name for name in FILES if "difflib" in {getattr(node, "name", "") for node in parse(name)}] == [
        "sympow/__init__.py"
    ]


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
assert os.path.realpath("sympow") not in map(os.path.realpath, sys.path), "transformers would be sympow/transformers.py"
print(len(files), *[names for names in files.values() if len(names) > 1])
"""


@pytest.mark.slow  # it imports all there is
def test_no_source_file_has_two_names():
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    names = [module_of(name) for name in FILES if room_of(name) != "config"]
    env = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    count, *repeated = run("-c", EVERYTHING.format(names=names), cwd=ROOT, env=env).stdout.split()
    assert int(count) >= len(names) and not repeated


@pytest.mark.parametrize("room", ("attention", "data"))
def test_a_room_refuses_another_name_in_one_line(room):
    done = run("-c", f"import {room}", cwd=ROOT, check=False)
    assert done.stderr.splitlines()[-1] == f"ImportError: {room}/ is imported as sympow.{room}"


@pytest.mark.parametrize("copied", [False, True])
def test_a_clone_without_its_links_is_refused_in_one_line(copied, tmp_path):
    """Some programs write small files in their place, as git on Windows; others copy what they lead to."""
    shutil.copytree(ROOT / "sympow", tmp_path / "sympow", symlinks=True)
    link = tmp_path / "sympow/attention"
    link.unlink()
    link.write_text("../attention")
    if copied:
        link.unlink()
        for folder in (link, tmp_path / "attention"):
            shutil.copytree(ROOT / "attention", folder)
    done = run("-c", "import sympow", cwd=tmp_path, env={"PYTHONPATH": None}, check=False)
    assert "sympow needs its symbolic links" in done.stderr.splitlines()[-1]
