"""Hash the files that decide what is computed, and name those that differ from a record of their hashes.

    record = record_code()               # {"version": "0.1.0", "files": {"model.py": "0f3a9c...", ...}, "bytes": ...}
    warn_of_changes("out/a was trained with", record)      # ... other code (sympow 0.1.0, here 0.1.0): model.py

A file's hash is one of its syntax tree, in which comments, docstrings and formatting change nothing. Names are relative
to the package: in a clone it has links to all folders, where it is installed the files of MODEL.
"""

import ast
import functools
import hashlib
import logging
import re
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import sympow

PACKAGE = Path(sympow.__file__).parent
# files, and folders of files, that decide what a model computes
MODEL = ("model.py", "layers/", "attention/", "kernels/", "kernels/table.json")
# those that decide how it is trained; in the last two are attentions that only experiments have
TRAINING = (
    *MODEL,
    *"train.py training/ data/dataset.py data/loader.py data/mixture.py runs/machine.py "
    "experiments/forgetting.py experiments/gated_deltanet.py".split(),
)

# packages that `read_modules` leaves out; torch writes modules of its own into temporary files
KNOWN = {"sympow", "torch", *sys.stdlib_module_names}


def record_code(places=TRAINING):
    """Return a record of the code in these places: the package's version, the hashes of the files, and one of their
    bytes, by which code that is the same is known without reading its syntax."""
    files = {}
    sources = read_sources(places)
    for name, source in sources.items():
        with suppress(SyntaxError, ValueError):  # of a file that nothing can import
            files[name] = hash_syntax(source)
    return {"version": sympow.__version__, "files": files, "bytes": hash_sources(sources)}


def read_sources(places):
    """Return {name: bytes} of the files in these places."""
    paths = [path for place in places for path in (PACKAGE / place, *(PACKAGE / place).rglob("*.py")) if path.is_file()]
    return {path.relative_to(PACKAGE).as_posix(): path.read_bytes() for path in sorted(paths)}


def read_modules():
    """Return {name: bytes} of the loaded modules that are neither this package's, nor Python's, nor installed."""
    sources = {}
    for name, module in sorted(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or ".")
        installed = {"site-packages", "dist-packages"}.intersection(path.parts)
        if path.suffix == ".py" and path.is_file() and not installed and name.partition(".")[0] not in KNOWN:
            sources[name] = path.read_bytes()
    return sources


def hash_sources(sources):
    """Return a hash of {name: bytes}."""
    return short_hash(repr(sources).encode())


@functools.cache
def hash_syntax(source):
    """Return a hash of the syntax tree of a file's bytes, the same in every version of Python."""
    tree = ast.dump(WithoutDocstrings().visit(ast.parse(source)))
    return short_hash(re.sub(r"\b\w+=\[\](, )?", "", tree).replace(", )", ")").encode())  # not all have empty lists


class WithoutDocstrings(ast.NodeTransformer):
    """Removes constants that are statements, as docstrings are."""

    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) else node


def short_hash(content):
    """Return a hash of bytes, of 16 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()[:16]


def changed_files(record, new_record, places=TRAINING):
    """Return as a text the names of a record's files in these places that have another hash, or none, in a new record.

    A file that only the new record has decides nothing unless one of these imports it.
    """
    old = record["files"]
    new = new_record["files"]
    names = [name for name in sorted(old) if name.startswith(places) and old[name] != new.get(name)]
    return textwrap.shorten(", ".join(names), 500)


def warn_of_changes(action, record, places=MODEL):
    """Print a warning if the code in these places is not the recorded one, with which something was done.

    action: the beginning of the line, "out/a was trained with". If record is None or damaged, nothing is known.
    """
    with suppress(AttributeError, KeyError, TypeError):
        if record.get("bytes") == hash_sources(read_sources(TRAINING)):
            return
        if names := changed_files(record, record_code(places), places):
            line = "%s other code (sympow %s, here %s): %s"
            logging.getLogger(__name__).warning(line, action, record["version"], sympow.__version__, names)
