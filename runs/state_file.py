"""What generation keeps of a text, in a file: read a book once, go on from it many times.

save_state("book.state", model, logits, state)
logits, state = load_state("book.state", model)         # refuses another model's
"""

import hashlib
import json
import os
from contextlib import suppress

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from attention.power import PowerState
from attention.state import LayerState
from model import ModelState
from runs.checkpoint import flush_to_disk


def save_state(path, model, logits, state):
    """Writes what generation keeps (a ModelState) and the logits [B, vocab_size] of the next token, with the model they
    belong to: `load_state` takes no other."""
    tensors = {"logits": logits}
    for i, layer in enumerate(state.layers):
        S, z = layer.power or (None, None)
        parts = dict(u=layer.u, k=layer.k, v=layer.v, log_g=layer.log_g, S=S, z=z)
        tensors |= {f"layers.{i}.{name}": x for name, x in parts.items() if x is not None}
    kept = {"position": state.position, "fold": state.layers[0].fold, "config": _config(model)}
    kept = {name: json.dumps(value) for name, value in kept.items()} | {"weights": _weights(model)}
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        save_file({name: x.contiguous() for name, x in tensors.items()}, temporary, metadata=kept)
        flush_to_disk(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:  # a full disk, for one
        with suppress(OSError):
            os.remove(temporary)
        raise OSError(str(error)) from error


def load_state(path, model):
    """(logits, state) of `save_state`, on the model's device. ValueError, with the reason, if it is another model's."""
    device = model.transformer.wte.weight.device
    try:
        with safe_open(path, "pt", device=str(device)) as f:
            kept = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in f.keys()}
    except SafetensorError as error:
        raise ValueError(f"not a whole state file: {error}") from None
    if "weights" not in kept:
        raise ValueError("it has no state: sample.py --save_state=FILE writes one")
    theirs, ours = json.loads(kept["config"]), _config(model)
    differ = [
        f"{name}={theirs.get(name)!r} there, {mine!r} here" for name, mine in ours.items() if theirs.get(name) != mine
    ]
    if differ:
        raise ValueError(f"it belongs to another model: {', '.join(differ)}")
    if kept["weights"] != _weights(model):
        raise ValueError(
            "it belongs to the same kind of model with other weights: use the checkpoint it was saved with"
        )
    layers = []
    for i in range(model.config.n_layer):
        u, k, v, log_g, S, z = (tensors.get(f"layers.{i}.{name}") for name in ("u", "k", "v", "log_g", "S", "z"))
        power = None if S is None else PowerState(S, z)
        layers.append(LayerState(u, k, v, log_g, power, json.loads(kept["fold"])))
    return tensors["logits"], ModelState(layers, json.loads(kept["position"]))


def _config(model):
    """What of a model's settings its states depend on."""
    leave = ("dropout", "form", "chunk_size", "activation_checkpointing")
    return {name: value for name, value in vars(model.config).items() if name not in leave}


def _weights(model):
    """A fingerprint of every bit of them."""
    digest = hashlib.sha256()
    for name, x in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
