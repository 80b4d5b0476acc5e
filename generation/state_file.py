"""Save the state after a text in a file, so that a book is read once and continued many times.

    save_state("book.state", model, logits, state)
    logits, state = load_state("book.state", model)         # refuses the state of another model

The file is safetensors. Its tensors are `logits` [B, vocab_size] of the next token, `layers.I.NAME` for each tensor of
each layer's state, and `embedding.NAME` for each tensor of the position embedding's state. Its metadata has a version,
a description (the settings of the model and the states, a hash of the model's weights, a record of the code, and the
run's folder), and a sha256 of all that. The file is written whole or not at all.
"""

import hashlib
import json
import os
from contextlib import contextmanager, suppress

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sympow.code import record_code, warn_of_changes
from ..attention.state import ModelState
from ..attention.variant import with_defaults
from ..data.files import whole_file
from ..model import GPTConfig

VERSION = "1"
IRRELEVANT = ("dropout", "form", "chunk_size", "activation_checkpointing")  # settings that states do not depend on


def save_state(path, model, logits, state, run=""):
    """Write a ModelState and the logits [B, vocab_size] of the next token. run: the model's folder, for `find_run`.

    Raises OSError if they cannot be written.
    """
    parts = state.parts()
    tensors = {"logits": logits} | {f"{part}.{name}": x for part in parts for name, x in parts[part].tensors().items()}
    tensors = {name: x.cpu().contiguous() for name, x in tensors.items()}
    settings = {part: part_state.settings() for part, part_state in parts.items()}
    folder = run and os.path.abspath(run)
    model = {"code": record_code(), **describe_model(model)}
    description = json.dumps({"run": folder, "n_tokens": state.n_tokens, "settings": settings, **model})
    metadata = {"version": VERSION, "description": description, "sha256": hash_tensors(tensors, description)}
    try:
        with whole_file(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"cannot write {path}: {error}") from error


def find_run(path):
    """Return the folder of the run that read the text of a state file; "" if the file does not say.

    Raises ValueError if it is no whole file of tensors.
    """
    with _open(path) as file, suppress(KeyError, TypeError, ValueError):  # load_state says what is damaged
        return str(json.loads(file.metadata()["description"])["run"])
    return ""


def load_state(path, model):
    """Return the (logits, ModelState) of `save_state`, on the model's device.

    Warns if other code read the text. Raises ValueError, with the reason, for another model's state or a damaged file.
    """
    tensors, saved = read_file(path)
    device, own, parts = model.transformer.wte.weight.device, describe_model(model), {}
    try:
        config = with_defaults(GPTConfig, saved["model"])
        differences = [
            f"{n}={config.get(n)!r} there, {x!r} here" for n, x in own["model"].items() if config.get(n) != x
        ]
        if differences:
            raise ValueError(f"it belongs to another model: {', '.join(differences)}")
        if saved["weights"] != own["weights"]:
            raise ValueError(
                "it belongs to the same kind of model with other weights: use the checkpoint it was saved with"
            )
        warn_of_changes(f"the text of {path} was read with", saved.get("code"))
        for part, empty in model.empty_state(1).parts().items():
            prefix = f"{part}."
            fields = {name.removeprefix(prefix): x.to(device) for name, x in tensors.items() if name.startswith(prefix)}
            parts[part] = type(empty)(**fields, **saved["settings"][part])
        embedding = parts.pop("embedding", None)
        return tensors["logits"].to(device), ModelState(list(parts.values()), saved["n_tokens"], embedding)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its states are not those of attention={model.config.attention} now ({error})") from None


@contextmanager
def _open(path):
    """Open a file of tensors for a with statement. Raises ValueError if there is none, or a damaged one."""
    if not os.path.isfile(path):
        raise ValueError("there is no such file")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"not a whole state file: {error}") from None


def read_file(path):
    """Return ({name: tensor on the CPU}, description) of a state file.

    Raises ValueError if it is damaged, of another version, or no state file.
    """
    with _open(path) as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    version, description = metadata.get("version"), metadata.get("description", "")
    if version != VERSION:
        raise ValueError(
            f"it is damaged, or a file of version {version}: sample.py --save_state writes version {VERSION}"
        )
    if metadata.get("sha256") != hash_tensors(tensors, description):
        raise ValueError("it is damaged: it is not what was written (sha256 differs)")
    return tensors, json.loads(description)


def describe_model(model):
    """Return the settings of a model that its states depend on, and a hash of its weights."""
    settings = {name: value for name, value in vars(model.config).items() if name not in IRRELEVANT}
    return {"model": settings, "weights": hash_tensors(model.state_dict())}


def hash_tensors(tensors, text=""):
    """Return the sha256 of a text and of the names, dtypes, shapes and bits of tensors."""
    digest = hashlib.sha256(text.encode())
    for name, x in sorted(tensors.items()):
        x = x.detach().cpu().contiguous()
        digest.update(f"{name} {x.dtype} {list(x.shape)} ".encode())
        digest.update(x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data)
    return digest.hexdigest()
