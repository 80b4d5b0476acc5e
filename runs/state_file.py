"""Save the state after a text in a file, so that a book is read once and continued many times.

    save_state("book.state", model, logits, state)
    logits, state = load_state("book.state", model)         # refuses the state of another model

The file is safetensors: `logits` [B, vocab_size] of the next token and `layers.I.NAME` for each tensor of each layer's
state; its metadata has the model's settings and a fingerprint of its weights, and the states' settings.
"""

import hashlib
import json
import os
from contextlib import suppress

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model import ModelState
from runs.checkpoint import flush_to_disk


def save_state(path, model, logits, state):
    """Write a ModelState and the logits [B, vocab_size] of the next token. Raises OSError if they cannot be written."""
    tensors = {"logits": logits}
    for i, layer in enumerate(state.layers):
        tensors |= {f"layers.{i}.{name}": x for name, x in layer.tensors().items()}
    about = {
        "n_tokens": state.n_tokens, "layers": [layer.settings() for layer in state.layers], "config": _settings(model),
    }  # fmt: skip
    metadata = {name: json.dumps(value) for name, value in about.items()} | {"weights": _fingerprint(model)}
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        save_file({name: x.contiguous() for name, x in tensors.items()}, temporary, metadata=metadata)
        flush_to_disk(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:  # such as a full disk
        with suppress(OSError):
            os.remove(temporary)
        raise OSError(str(error)) from error


def load_state(path, model):
    """Return the (logits, ModelState) of `save_state`, on the model's device.

    Raises ValueError, with the reason, for another model's state or a damaged file.
    """
    device = model.transformer.wte.weight.device
    try:
        with safe_open(path, "pt", device=str(device)) as f:
            metadata = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in f.keys()}
    except SafetensorError as error:
        raise ValueError(f"not a whole state file: {error}") from None
    if "weights" not in metadata:
        raise ValueError("it has no state: sample.py --save_state=FILE writes one")
    saved, own = json.loads(metadata["config"]), _settings(model)
    differ = [f"{n}={saved.get(n)!r} there, {x!r} here" for n, x in own.items() if saved.get(n) != x]
    if differ:
        raise ValueError(f"it belongs to another model: {', '.join(differ)}")
    if metadata["weights"] != _fingerprint(model):
        raise ValueError(
            "it belongs to the same kind of model with other weights: use the checkpoint it was saved with"
        )
    if "layers" in metadata:
        settings, n_tokens = json.loads(metadata["layers"]), json.loads(metadata["n_tokens"])
    else:  # a file of the first format
        settings = [{"switch_over": json.loads(metadata["fold"])}] * model.config.n_layer
        tensors = {name.removesuffix(".u") + ".position" * name.endswith(".u"): x for name, x in tensors.items()}
        n_tokens = json.loads(metadata["position"])
    layers = []
    for i, block in enumerate(model.transformer.h):
        kind = type(block.attn.mix.empty_state(1, device))
        prefix = f"layers.{i}."
        of_layer = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        try:
            layers.append(kind(**of_layer, **settings[i]))
        except TypeError as error:
            raise ValueError(f"its states are not those of attention={model.config.attention} now ({error})") from None
    return tensors["logits"], ModelState(layers, n_tokens)


def _settings(model):
    """Return the settings of a model that its states depend on."""
    leave = ("dropout", "form", "chunk_size", "activation_checkpointing")
    return {name: value for name, value in vars(model.config).items() if name not in leave}


def _fingerprint(model):
    """Return a hash of every bit of the model's weights."""
    digest = hashlib.sha256()
    for name, x in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
