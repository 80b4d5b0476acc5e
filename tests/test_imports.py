"""Imports run one way, also those inside functions, so that a reader who follows the arrows never comes back."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# the most lines that these files may have
SHORT = {"model.py": 300, "train.py": 400, "sample.py": 250, "README.md": 130, "docs/kernels.md": 150}
PROGRAMS = {"train", "sample", "evaluate", "compare", "doctor", "export"}
# the packages that a package (or top-level file) may import; data/*/prepare.py are programs of data/
ALLOWED = {
    "kernels": set(),
    "data": set(),
    "attention": {"kernels"},
    "activation": set(),
    "norm": {"attention"},
    "loss": {"attention"},
    "model": {"activation", "attention", "loss", "norm"},
    "decoder": {"model", "attention", "kernels"},
    "generate": {"decoder", "model", "attention", "kernels", "data"},
    "runs": {"generate", "model", "attention", "data"},
    "config": set(),
    "package": {"attention", "kernels"},
    **dict.fromkeys(PROGRAMS, {"runs", "generate", "decoder", "model", "attention", "kernels", "data"}),
}


def files():
    """Return {dotted module name: path} of all files but those of bench/ and tests/, which may import anything."""
    paths = [*ROOT.glob("*.py")]
    for folder in ("attention", "kernels", "runs", "data", "config", "package"):
        paths += (ROOT / folder).rglob("*.py")
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in dotted.items()}


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


def package_of(name):
    return name.partition(".")[0]


def test_what_is_read_first_stays_short():
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in SHORT}
    assert not {path: n for path, n in lines.items() if n > SHORT[path]}
    long = [
        f"{name}: {node.name}"
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 80
    ]
    assert not long


def test_every_file_is_in_a_package_that_has_rules():
    assert {package_of(name) for name in FILES} == set(ALLOWED)
    assert len(FILES) > 60


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_its_own_package_and_those_below(name):
    wrong = [
        f"{name}:{line} imports {target}"
        for target, _, line in targets(name)
        if package_of(target) not in ALLOWED[package_of(name)] | {package_of(name)}
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
        if what and what.startswith("_") and (module in FILES or package_of(module) in ALLOWED)
    ]
    ours = {(what or module).rpartition(".")[2] for module, what, *_ in imports(name) if package_of(module) in ALLOWED}
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ours:
            if node.attr.startswith("_") and not node.attr.startswith("__"):
                wrong.append(f"{name}:{node.lineno} uses {node.value.id}.{node.attr}")
    assert not wrong


def test_attention_reaches_the_kernels_by_one_door_and_both_are_relative_inside():
    for name in FILES:
        for target, level, line in targets(name):
            if package_of(name) == "attention" and package_of(target) == "kernels":
                assert name == "attention.backend", f"{name}:{line} imports {target}"
            if package_of(name) in ("attention", "kernels") and package_of(target) == package_of(name):
                assert level, f"{name}:{line} imports {target} by its full name"


def test_no_library_imports_a_script():
    scripts = {name for name in FILES if package_of(name) == "data" and name.endswith(".prepare")}
    scripts |= PROGRAMS | {"kernels.tune"}
    wrong = [f"{name} imports {target}" for name in FILES for target, *_ in targets(name) if target in scripts]
    assert len(scripts) == 14 and not wrong


def test_attention_and_the_model_can_be_imported_without_triton():
    from helpers import run

    code = "import sys; sys.modules['triton'] = None; import attention, model, generate, kernels.cost, kernels.configs"
    run("-c", code, cwd=ROOT)
