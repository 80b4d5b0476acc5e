"""The tensors of a checkpoint, in one file, or in parts: a file from each rank that held some rows of every tensor.

    rows, first = own_rows(x)                                  # what this rank holds of a tensor, whole or sharded
    save_part(tensors, first_rows, part_name("model", 1, 4))   # model.2-of-4.safetensors
    with Tensors(folder, "model") as saved:                    # model.safetensors, or model.*-of-*.safetensors
        saved.fill("transformer.wte.weight", x)                # the rows that this rank holds

A part has the rows that its rank held and, in the header of the file, the number of each tensor's first row in the
whole tensor. So any number of ranks reads what any other number wrote: each takes its rows from the parts that have
them. Reading executes no code.
"""

import json
import os
import re
from contextlib import ExitStack

import torch
from safetensors import safe_open
from safetensors.torch import save_file

PART = re.compile(r"(\w+)\.([1-9]\d*)-of-([1-9]\d*)\.safetensors")
SHARD = re.compile(r"(\w+)-\d+-of-\d+\.safetensors")  # of transformers: some of the tensors, each of them whole


def part_name(kind, rank, world):
    """Return the name of the file with a rank's part of the tensors of one kind, "model" or "optimizer"."""
    return f"{kind}.{rank + 1}-of-{world}.safetensors"


def is_sharded(x):
    """Return True if the tensor x is a DTensor, of which each rank holds some rows."""
    return hasattr(x, "device_mesh")  # the module with DTensor takes a second to import


def own_rows(x):
    """Return (the rows of a tensor that this rank holds, the number of the first of them).

    A sharded tensor [n, ...] is cut as torch.chunk does it, so the last ranks may hold fewer rows, or none. Any other
    tensor is held whole.
    """
    if not is_sharded(x):
        return x, 0
    size = -(-len(x) // x.device_mesh.size())
    rows, first = x.to_local(), min(len(x), size * x.device_mesh.get_local_rank())
    if len(rows) != min(size, len(x) - first):
        raise RuntimeError(f"this rank holds {len(rows)} rows of {len(x)} from row {first} on: not sharded by rows")
    return rows, first


def shard_like(x, whole):
    """Return the rows of `whole` that this rank holds of x, sharded as x is; `whole` itself if it has another shape.

    whole: a tensor on any device, which the result does not share memory with, or one that is sharded already.
    """
    if is_sharded(whole):
        return whole
    if not is_sharded(x) or whole.shape != x.shape:
        return whole.clone()
    y = torch.empty_like(x)
    rows, first = own_rows(y)
    rows.copy_(whole[first : first + len(rows)])
    return y


def save_part(tensors, first_rows, path):
    """Write tensors {name: rows} to a file, with {name: number of the first row} in its header."""
    save_file(tensors, path, metadata={"first_rows": json.dumps(first_rows)})


def unlike(there, shapes):
    """Return a text that names the first of the tensors {name: shape} that is not as in `shapes`, "" if all are."""
    wrong = [f"{name} is missing" for name in shapes if name not in there]
    wrong += [f"{name} is unknown" for name in there if name not in shapes]
    wrong += [f"{n} is {there[n]} instead of {x}" for n, x in shapes.items() if n in there and there[n] != x]
    return wrong[0] + (f", and {len(wrong) - 1} more" if wrong[1:] else "") if wrong else ""


class Tensors:
    """Reads the saved tensors of one kind, "model" or "optimizer", whole or by rows; also from transformers' files.

    Used as a context manager. Attributes: shapes ({name: shape of the whole tensor}). Raises ValueError if the parts do
    not make whole tensors.
    """

    def __init__(self, folder, kind):
        self.open, self.parts, self.shapes = ExitStack(), {}, {}
        whole = os.path.join(folder, f"{kind}.safetensors")
        found = [PART.fullmatch(name) or SHARD.fullmatch(name) for name in sorted(os.listdir(folder))]
        found = [m for m in found if m and m[1] == kind]
        paths = [whole] if os.path.isfile(whole) else [os.path.join(folder, m[0]) for m in found]
        for path in paths:
            file = self.open.enter_context(safe_open(path, "pt"))
            first_rows = json.loads((file.metadata() or {}).get("first_rows", "{}"))
            for name in file.keys():
                shape = file.get_slice(name).get_shape()
                self.parts.setdefault(name, []).append((first_rows.get(name, 0), shape, file))
        for name, parts in self.parts.items():
            parts.sort(key=lambda part: part[0])
            end = 0
            for first, shape, _ in parts:
                if first != end:
                    self.open.close()
                    raise ValueError(f"{folder}: rows {end} to {first} of {name} are missing")
                end += shape[0] if shape else 1
            shape = parts[0][1]
            self.shapes[name] = [end, *shape[1:]] if shape else []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.open.close()

    def read(self, name, first=0, count=None):
        """Return `count` rows of a tensor from row `first` on, in the CPU's memory; without count, the whole tensor."""
        parts = self.parts[name]
        if not self.shapes[name]:
            return parts[0][2].get_tensor(name)
        last, found = self.shapes[name][0] if count is None else first + count, []
        for start, shape, file in parts:
            low, high = max(first, start), min(last, start + shape[0])
            if low < high:
                found.append(file.get_slice(name)[low - start : high - start])
        return torch.cat(found) if found else torch.empty(0, *self.shapes[name][1:])

    def fill(self, name, x):
        """Copy the saved tensor into x, a tensor of its shape: those rows of it that this rank holds."""
        rows, first = own_rows(x)
        rows.copy_(self.read(name, first, len(rows)) if rows.dim() else self.read(name))
