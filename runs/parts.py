"""The tensors of a checkpoint, in one file, or in parts: a file from each rank that held some rows of every tensor.

    rows, first = own_rows(x)                                  # the rows that this rank holds of a tensor
    save_part(tensors, first_rows, part_name("model", 1, 4))   # model.2-of-4.safetensors
    with Tensors(folder, "model") as saved:                    # model.safetensors, or model.*-of-*.safetensors
        saved.fill("transformer.wte.weight", x)                # the rows that this rank holds

A part has the rows that its rank held and, in the header of the file, the number of each tensor's first row in the
whole tensor. So any number of ranks reads what any other number wrote: each takes its rows from the parts that have
them. Reading executes no code.
"""

import json
import os
from contextlib import ExitStack
from glob import glob

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..data import DataError
from ..model import GPT

OR_REMOVED = "; if a run in training has removed it for a newer checkpoint, give the command again"


def part_name(kind, rank, world):
    """Return the name of the file with a rank's part of the tensors of one kind, "model" or "optimizer"."""
    return f"{kind}.{rank + 1}-of-{world}.safetensors"


def is_sharded(x):
    """Return True if the tensor x is a DTensor: every rank holds some of its rows."""
    return hasattr(x, "device_mesh")  # the module with DTensor takes a second to import


def own_rows(x):
    """Return (the rows of a tensor that this rank holds, the number of the first of them).

    A sharded tensor [n, ...] is cut as torch.chunk does it, so the last ranks may hold fewer rows, or none. Any other
    tensor is held whole.
    """
    if not is_sharded(x):
        return x, 0
    size = -(-len(x) // x.device_mesh.size())
    return x.to_local(), min(len(x), size * x.device_mesh.get_local_rank())


def save_part(tensors, first_rows, path):
    """Write tensors {name: rows} to a file, with {name: number of the first row} in its header."""
    save_file(tensors, path, metadata={"first_rows": json.dumps(first_rows, sort_keys=True)})


def compare_shapes(shapes, expected):
    """Return a text that names a difference between two dicts {name: shape}, "" if they are equal."""
    for name in {**expected, **shapes}:
        shape, expected_shape = shapes.get(name, "missing"), expected.get(name, "missing")
        if shape != expected_shape:
            return f"{name} is {shape}, not {expected_shape}"
    return ""


def shapes_of(config):
    """Return {name: shape} of the weights of a model of this GPTConfig."""
    with torch.device("meta"):
        return {name: [*x.shape] for name, x in GPT(config).state_dict().items()}


def read_shapes(folder, kind):
    """Return {name: shape} of the saved tensors of one kind, without reading them. Raises DataError as Tensors does."""
    with Tensors(folder, kind) as saved:
        return saved.shapes


class Tensors:
    """Reads the saved tensors of one kind, "model" or "optimizer", whole or by rows; also from transformers' files.

    Used as a context manager. Attributes: shapes ({name: shape of the whole tensor}). Raises DataError if there is
    no file, or a damaged one.
    """

    def __init__(self, folder, kind):
        self.files, self.parts, self.shapes = ExitStack(), {}, {}
        one_file = f"{kind}.safetensors"  # transformers takes it too where a folder has both
        # else the ranks' parts, or transformers' files with some of the tensors, each of them whole
        file_names = glob(one_file, root_dir=folder) or glob(f"{kind}[.-][0-9]*-of-*[0-9].safetensors", root_dir=folder)
        if not file_names:
            raise DataError(f"{os.path.join(folder, one_file)} is missing{OR_REMOVED}")
        for file_name in file_names:
            path = os.path.join(folder, file_name)
            try:
                file = self.files.enter_context(safe_open(path, "pt"))
                first_rows = json.loads((file.metadata() or {}).get("first_rows", "{}"))
                for name in file.keys():
                    shape = file.get_slice(name).get_shape()
                    self.parts.setdefault(name, []).append((first_rows.get(name, 0), shape, file))
            except (SafetensorError, ValueError) as error:
                raise DataError(f"{path} is damaged: {error}") from None
        for name, parts in self.parts.items():
            parts.sort(key=lambda part: part[0])
            _, shape, _ = parts[0]
            self.shapes[name] = [sum(rows[0] for _, rows, _ in parts), *shape[1:]] if shape else []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.files.close()

    def read(self, name, first=0, count=None):
        """Return `count` rows of a tensor from row `first` on, in the CPU's memory; without count, the whole tensor."""
        if not self.shapes[name]:
            _, _, file = self.parts[name][0]
            return file.get_tensor(name)
        rows, last = [], self.shapes[name][0] if count is None else first + count
        for start, shape, file in self.parts[name]:
            low, high = max(first, start), min(last, start + shape[0])
            if low < high:
                rows.append(file.get_slice(name)[low - start : high - start])
        return torch.cat(rows) if rows else torch.empty(0, *self.shapes[name][1:])

    def fill(self, name, x):
        """Copy the saved tensor into x, a tensor of its shape: those rows of it that this rank holds."""
        rows, first = own_rows(x)
        rows.copy_(self.read(name, first, len(rows)) if rows.dim() else self.read(name))
