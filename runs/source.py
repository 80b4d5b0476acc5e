"""Weights from elsewhere, for --init_from and --distill_from: of a run, of a folder of export.py, or GPT-2's.

    source = open_source("out/a", dataset)       # or out/a/ckpt/step_00001000, hf/a, gpt2, or a folder of transformers
    config = GPTConfig(**source.model)           # of the model that has these weights, or of one with other settings
    source.check(config)                         # raises ValueError if such a model cannot take the weights
    source.fill(model)
    source.describe(config)                      # a line that names the new weights of such a model and the dropped

A model with another attention takes all weights that it has by the same name: embeddings, q, k, v, output, MLP and
norms. An attention's own weights (gates, the speed of a rotation, the network of adaptive powers) stay as the new model
made them, and so do weights that no layer of the source has, such as a QK-norm that was added to model.py.
GPT-2's table of positions is left out where the model rotates.
"""

import hashlib
import json
import os
import re

import torch
from torch.nn import functional as F

from sympow.code import warn_of_changes
from ..attention import ATTENTIONS
from ..attention.variant import RECIPE, with_defaults
from ..data import describe_error, need
from ..data.files import read_json
from ..data.huggingface import one_line, tokenizers_json
from ..data.tokenizer import load_tokenizer
from ..layers.mixing import projected_heads
from ..model import GPTConfig
from . import checkpoint
from .parts import Tensors, compare_shapes, own_rows, read_shapes, shapes_of
from .processes import warn
from .settings import fields_of, from_launcher
from .starts import last_code

HUB = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
GPT2 = dict(attention="softmax", bias=True, positions="learned", embedding_norm=False)
SIZES = {"vocab_size": 50257, "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}  # transformers' names
# the values in transformers' GPT2Config, all of them its defaults, that a model must have to be GPT-2
FIXED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "add_cross_attention": False,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
NOT_WEIGHTS = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias|lm_head\.weight")  # masks, and the embedding again
TRANSPOSED = re.compile(r"transformer\.h\.\d+\.(attn|mlp)\.c_\w+\.weight")  # transformers' Conv1D
OPTIONAL = re.compile(r"transformer\.(h\.\d+\.attn\.(mix|conv)|wpe)\..+")  # weights of some attentions
LAYER = re.compile(r"\bh\.\d+")
OF_SHAPES = "n_layer", "n_embd", "n_head", "n_kv_head", "head_dim", "output_gate"  # settings that decide shapes
# weights that every source has; others that no layer has are new
REQUIRED = re.compile(r"transformer\.(wte|ln_f|h\.\*\.(ln_[12]|attn\.c_(attn|proj)|mlp\.c_(fc|proj)))\.weight")


class Source:
    """The weights of a model, in a folder.

    Attributes: path (as it was given, or of the checkpoint), model (its settings, a dict of fields of GPTConfig).
    """

    def __init__(self, path, model, folder, gpt2=False):
        """Read the names and shapes in the folder's files.

        gpt2: they have transformers' GPT-2; else they have our names, perhaps after "gpt.". Raises ValueError if a file
        cannot be read.
        """
        self.path, self.model, self.folder = path, model, folder
        self.stored_names, self.shapes, self.transposed = {}, {}, set()  # by our names
        for stored_name, shape in read_shapes(folder, "model").items():
            name = stored_name.removeprefix("gpt.")
            if gpt2 and not name.startswith(("transformer.", "lm_head.")):
                name = f"transformer.{name}"
            if gpt2 and NOT_WEIGHTS.fullmatch(name):
                continue
            if gpt2 and TRANSPOSED.fullmatch(name):
                self.transposed.add(name)
                shape = shape[::-1]
            if name == "transformer.wte.weight":
                shape = [-(-shape[0] // 64) * 64, *shape[1:]]  # our embedding is padded, theirs need not be
            self.stored_names[name], self.shapes[name] = stored_name, shape

    def check(self, config, fresh=True):
        """Raise ValueError if a model of this GPTConfig cannot take these weights. fresh: it may have weights that no
        layer here has."""
        own = GPTConfig(**self.model)
        for i in range(min(own.n_layer, config.n_layer)):
            old, new = own.layer(i).attention, config.layer(i).attention
            if ATTENTIONS[old].rotates != ATTENTIONS[new].rotates:
                rotating = old if ATTENTIONS[old].rotates else new
                raise ValueError(
                    f"the weights in {self.path}, of attention={old}, cannot become those of attention={new}: of the "
                    f"two only {rotating} rotates queries and keys by their positions"
                )
        if config.positions == "learned" and own.positions != "learned":
            raise ValueError(f"{self.path} has no table of positions: use positions={own.positions}")
        shapes, expected = dict(self.shapes), shapes_of(config)
        stored = {LAYER.sub("h.*", name) for name in shapes}
        for name in shapes.keys() ^ expected.keys():
            general = LAYER.sub("h.*", name)
            if OPTIONAL.fullmatch(name) or (fresh and general not in stored and not REQUIRED.fullmatch(general)):
                shapes.pop(name, None)
                expected.pop(name, None)
        # with an output gate and fewer key/value heads c_attn can have as many rows as before, for other products
        rows, expected_rows = ([heads * c.head_dim for heads in projected_heads(c)] for c in (own, config))
        if (difference := compare_shapes(shapes, expected)) or rows != expected_rows:
            sizes = [name for name in OF_SHAPES if getattr(own, name) != getattr(config, name)]
            settings = " ".join(f"{name}={getattr(own, name)}" for name in sizes)
            reasons = "; ".join(filter(None, [settings and f"they are of {settings}", difference]))
            raise ValueError(f"the weights in {self.path} do not fit this model: {reasons}")

    def describe(self, config):
        """Return a line that says which weights are new in a model of this GPTConfig, and which are dropped."""
        changes, own = [], GPTConfig(**self.model)
        for name in ("attention", "positions", "window"):
            if getattr(own, name) != getattr(config, name):
                changes.append(f"{name}={getattr(own, name)} becomes {getattr(config, name)}")
        shapes = shapes_of(config)
        if new := shorten(name for name in shapes if name not in self.shapes):
            changes.append(f"new: {new}")
        if dropped := shorten(name for name in self.shapes if name not in shapes):
            changes.append(f"dropped: {dropped}")
        return f"weights from {self.path}" + (": " if changes else "") + "; ".join(changes)

    def fill(self, model):
        """Copy the weights into a GPT, sharded or not, that fits them; weights that are new in it stay."""
        with Tensors(self.folder, "model") as saved, torch.no_grad():
            for name, x in model.state_dict().items():
                if name not in self.stored_names:
                    if name.endswith(".attn.conv.weight"):
                        x.zero_()  # so that the model begins as its source
                    continue
                stored_name = self.stored_names[name]
                if [*x.shape] == saved.shapes[stored_name] and name not in self.transposed:
                    saved.fill(stored_name, x)
                    continue
                tensor = saved.read(stored_name)
                tensor = tensor.t() if name in self.transposed else tensor
                rows, first = own_rows(x)
                rows.copy_(F.pad(tensor, (0, 0, 0, len(x) - len(tensor)))[first : first + len(rows)])

    def fingerprint(self):
        """Return a hash of the settings and of all vectors among the weights, the norms and biases.

        No two trainings share them, and they are read in no time.
        """
        digest = hashlib.sha256(json.dumps(self.model, sort_keys=True).encode())
        with Tensors(self.folder, "model") as saved:
            for name, stored_name in sorted(self.stored_names.items()):
                digest.update(f"{name} {self.shapes[name]}".encode())
                if len(self.shapes[name]) == 1:
                    digest.update(saved.read(stored_name).float().numpy().data)
        return digest.hexdigest()[:16]


def shorten(names):
    """Return the names of weights in a text, once for all layers: "h.*.attn.mix.gate.b"."""
    return ", ".join(dict.fromkeys(LAYER.sub("h.*", name.removeprefix("transformer.")) for name in names))


def choose_model(cfg, arguments, dataset, saved):
    """Return (the Source that cfg.init_from names or None, the GPTConfig of the run's model).

    arguments: the settings that were given by name, which replace the source's. saved: the settings with which the run
    began, if it resumes; it needs its source no more. Raises ValueError for settings or weights that do not fit.
    """
    source, settings = None, {name: saved["model"][name] for name in RECIPE} if saved else {}
    if cfg.init_from not in ("auto", "scratch"):
        source = None if saved else open_source(cfg.init_from, dataset)
        settings = dict(saved["model"] if saved else source.model)
    if "attention" in arguments:  # the gate of another attention does not apply to this one, nor perhaps its window
        settings.pop("gate", None)
        names = [name.strip() for name in arguments["attention"].split(",")]
        if not any(name in ATTENTIONS and ATTENTIONS[name].windows for name in names):
            settings.pop("window", None)
    chosen = {
        "rope_base": float(max(2, dataset.document_length)),
        **settings,
        **fields_of(GPTConfig, arguments),
        "vocab_size": dataset.vocab_size,
        "reset_token": dataset.eot if cfg.pack else -1,
    }
    config = GPTConfig(**chosen)
    if source:
        source.check(config)
    return source, config


def open_source(path, dataset, setting="init_from"):
    """Return the Source at `path`: a run's folder or a checkpoint, a folder that export.py or transformers wrote, or a
    name in HUB, which is downloaded unless it is in the cache.

    Raises ValueError if there are no whole weights there, or if its tokens are not the dataset's. setting: the name of
    the setting that gives the path, for messages.
    """
    folder = download(path) if path in HUB and not os.path.isdir(path) else path
    config_file = os.path.join(folder, "config.json")
    config = read_json(config_file) if os.path.isfile(config_file) else {}
    if "model_type" not in config:
        return open_run(path, dataset, setting)
    kind = config["model_type"]
    if kind not in ("gpt2", "sympow"):
        raise ValueError(f"{setting}: {path} has a model of type {kind!r}, neither sympow nor gpt2")
    settings = gpt2_settings(config, path) if kind == "gpt2" else exported_settings(config, path)
    source = Source(path, settings, folder, gpt2=kind == "gpt2")
    check_tokens(folder, config, dataset, path)
    return source


def open_run(path, dataset, setting):
    """Return the Source at `path`, a run's folder or a checkpoint; see `open_source`."""
    folder, run = checkpoint.newest(path, True, warn, ("model",)), checkpoint.run_of(path)
    if not folder:
        resume = "auto, scratch, " if setting == "init_from" else ""
        raise ValueError(
            f"{setting}: there is no whole checkpoint in {path}; give {resume}a run's folder, one that export.py "
            f"wrote, one with a GPT-2 that transformers wrote, or one of {', '.join(HUB)}"
        )
    dataset.check_tokens(load_tokenizer(run), path)
    warn_of_changes(f"{run} was last trained with", last_code(folder))
    return Source(folder, checkpoint.settings(run, folder)["model"], folder)


def exported_settings(config, path):
    """Return the model's settings in the config.json of a folder that export.py wrote.

    Warns if other code trained the model. Raises ValueError if this version does not know the settings.
    """
    warn_of_changes(f"{path} was trained with", config.get("code"))
    try:
        model = with_defaults(GPTConfig, config["model"])
        GPTConfig(**model)
        return model
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"config.json in {path} is not of a model of this version: {error}") from None


def gpt2_settings(config, path):
    """Return the settings with which this repository's model is the GPT-2 of transformers' config.json.

    Raises ValueError for a GPT-2 that differs from OpenAI's in more than its sizes.
    """
    sizes = {name: config.get(name, size) for name, size in SIZES.items()}
    differences = {name: config[name] for name, value in FIXED.items() if config.get(name, value) != value}
    if config.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        differences["n_inner"] = config["n_inner"]
    activation = config.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        differences["activation_function"] = activation
    if differences:
        names = ", ".join(f"{name}={value}" for name, value in differences.items())
        raise ValueError(f"{path} is not GPT-2 as this model can be it: its config.json has {names}")
    return {**RECIPE, **sizes, **GPT2, "activation": ACTIVATIONS[activation]}


def check_tokens(folder, config, dataset, path):
    """Raise ValueError if a dataset has other tokens than the model in transformers' folder.

    They are compared by its tokenizer.json or, without one, by their number and the end of text.
    """
    size, end = config.get("vocab_size", 50257), config.get("eos_token_id", 50256)
    equal = size == dataset.vocab_size and end in (None, dataset.eot)
    tokenizer = os.path.join(folder, "tokenizer.json")
    if equal and dataset.tokenizer.kind != "ids" and os.path.isfile(tokenizer):
        Tokenizer = need("tokenizers").Tokenizer
        with one_line(tokenizer):
            vocabulary = Tokenizer.from_file(tokenizer).get_vocab(with_added_tokens=True)
        text, _ = tokenizers_json(dataset.tokenizer)
        equal = vocabulary == Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    if not equal:
        raise ValueError(
            f"the tokens of {path} ({size:,} ids, end of text {end}) are not those of the dataset {dataset.name} "
            f"({dataset.tokenizer.kind}, {dataset.vocab_size:,} ids, end of text {dataset.eot}): prepare it with its "
            f"tokenizer, --tokenizer={tokenizer} or gpt2"
        )


def download(name):
    """Return the folder of huggingface_hub's cache with config.json and the weights of GPT-2.

    Every rank calls it before the ranks know each other. If ranks share a cache, one of them downloads: a file lock of
    huggingface_hub lets the others wait, and then they find the file. Raises ValueError if the download fails.
    """
    hub, utils = need("huggingface_hub"), need("huggingface_hub.utils")  # which the first alone does not import
    utils.logging.set_verbosity_error()  # a refusal is one line
    if from_launcher("LOCAL_RANK"):
        utils.disable_progress_bars()
    try:
        folder = os.path.dirname(hub.hf_hub_download(HUB[name], "config.json"))
        hub.hf_hub_download(HUB[name], "model.safetensors", revision=os.path.basename(folder))  # of the same commit
        return folder
    except Exception as error:  # whatever the network layer raises
        raise ValueError(
            f"{name} cannot be downloaded from {HUB[name]} ({describe_error(error)}): go online "
            "once, which fills the cache (HF_HOME), or copy config.json and model.safetensors into a folder and give "
            "its path"
        ) from error
