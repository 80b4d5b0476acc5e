"""Save the state after a text in a file, so that a book is read once and continued many times.

    save_state("book.state", model, logits, state)
    logits, state = load_state("book.state", model)         # refuses the state of another model

The file is safetensors: `logits` [B, vocab_size] of the next token, `layers.I.NAME` for each tensor of each layer's
state and `embedding.NAME` for those of the position embedding's, if there is one; its metadata has the model's settings
and a fingerprint of its weights, the states' settings, and a sha256 of all that. It is written whole or not at all.
"""

import hashlib
import json
import os

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sympow.data.files import whole_file
from sympow.attention.state import ModelState
from sympow.model import GPTConfig
from sympow.runs.processes import warn

NAMES = {"n_tokens", "layers", "config", "weights"}  # what the metadata has beside sha256
FIRST_NAMES = {"position", "fold", "config", "weights"}  # the same in a file of the first format


def save_state(path, model, logits, state):
    """Write a ModelState and the logits [B, vocab_size] of the next token. Raises OSError if they cannot be written."""
    tensors = {"logits": logits}
    for part, of_part in state.parts().items():
        tensors |= {f"{part}.{name}": x for name, x in of_part.tensors().items()}
    tensors = {name: x.cpu().contiguous() for name, x in tensors.items()}
    about = {
        "n_tokens": state.n_tokens, "layers": [layer.settings() for layer in state.layers], "config": _settings(model),
    }  # fmt: skip
    metadata = {name: json.dumps(value) for name, value in about.items()} | {"weights": _fingerprint(model)}
    metadata["sha256"] = _checksum(tensors, metadata)
    try:
        with whole_file(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)
    except SafetensorError as error:  # such as a full disk
        raise OSError(str(error)) from error


def load_state(path, model):
    """Return the (logits, ModelState) of `save_state`, on the model's device.

    Raises ValueError, with the reason, for another model's state or a damaged file. A file of an earlier version, which
    has no checksum, is loaded with a warning.
    """
    device = model.transformer.wte.weight.device
    tensors, about = _read(path)
    own = _settings(model)
    saved = {**vars(GPTConfig()), **about["config"]}  # a file of an earlier version lacks newer settings
    differ = [f"{n}={saved[n]!r} there, {x!r} here" for n, x in own.items() if saved[n] != x]
    if differ:
        raise ValueError(f"it belongs to another model: {', '.join(differ)}")
    if about["weights"] != _fingerprint(model):
        raise ValueError(
            "it belongs to the same kind of model with other weights: use the checkpoint it was saved with"
        )
    parts = {}
    for i, (part, empty) in enumerate(model.empty_state(1).parts().items()):
        prefix = f"{part}."
        of_part = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        of_part = {name: x.to(device) for name, x in of_part.items()}
        try:
            parts[part] = type(empty)(**of_part, **(about["layers"][i] if part != "embedding" else {}))
        except (IndexError, TypeError) as error:
            raise ValueError(f"its states are not those of attention={model.config.attention} now ({error})") from None
    embedding = parts.pop("embedding", None)
    return tensors["logits"].to(device), ModelState(list(parts.values()), about["n_tokens"], embedding)


def _read(path):
    """Return ({name: tensor on the CPU}, {name: value of the metadata}) of a state file.

    Raises ValueError if it is damaged, or has no state.
    """
    if not os.path.isfile(path):
        raise ValueError("it is not a file" if os.path.exists(path) else "there is no such file")
    try:
        with safe_open(path, "pt") as f:
            metadata = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in f.keys()}
    except SafetensorError as error:
        raise ValueError(f"not a whole state file: {error}") from None
    if "weights" not in metadata and "sha256" not in metadata:
        raise ValueError("it has no state: sample.py --save_state=FILE writes one")
    checksum = metadata.pop("sha256", None)
    if checksum is not None and checksum != _checksum(tensors, metadata):
        raise ValueError("it is damaged: it is not what was written (sha256 differs)")
    try:
        about = {name: x if name == "weights" else json.loads(x) for name, x in metadata.items()}
        if about.keys() == FIRST_NAMES:
            about["n_tokens"], switch_over = about.pop("position"), about.pop("fold")
            about["layers"] = [{"switch_over": switch_over}] * about["config"]["n_layer"]
            tensors = {name.removesuffix(".u") + ".position" * name.endswith(".u"): x for name, x in tensors.items()}
        if about.keys() != NAMES or "logits" not in tensors or not isinstance(about["config"], dict):
            raise ValueError(f"it has {', '.join(about)} beside {len(tensors)} tensors")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is damaged: its settings are not what was written ({error})") from None
    if checksum is None:
        warn(f"{path} was written before states had a checksum, so whether it is damaged is not known")
    return tensors, about


def _checksum(tensors, metadata):
    """Return the sha256 of names, types, shapes and bits of the tensors, and of the metadata."""
    about = {name: [str(x.dtype), list(x.shape)] for name, x in tensors.items()}
    digest = hashlib.sha256(json.dumps([about, metadata], sort_keys=True).encode())
    _update(digest, tensors)
    return digest.hexdigest()


def _settings(model):
    """Return the settings of a model that its states depend on."""
    leave = ("dropout", "form", "chunk_size", "activation_checkpointing")
    return {name: value for name, value in vars(model.config).items() if name not in leave}


def _fingerprint(model):
    """Return a hash of every bit of the model's weights."""
    digest = hashlib.sha256()
    _update(digest, model.state_dict())
    return digest.hexdigest()


def _update(digest, tensors):
    """Hash the names and bits of tensors in the order of their names."""
    for name, x in sorted(tensors.items()):
        x = x.detach().cpu().contiguous()
        digest.update(name.encode())
        digest.update(x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data)
