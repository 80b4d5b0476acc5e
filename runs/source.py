"""Weights from elsewhere, for --init_from and --distill_from: of a run, of a folder of export.py or transformers, or of
the hub.

    source = open_source("out/a", dataset)       # or out/a/ckpt/step_00001000, hf/a, gpt2, HuggingFaceTB/SmolLM2-135M
    config = GPTConfig(**source.model)           # of the model that has these weights, or of one with other settings
    source.check(config)                         # raises ValueError if such a model cannot take the weights
    source.fill(model)
    source.describe(config)                      # a line that names the new weights of such a model and the dropped

A model with another attention takes all weights that it has by the same name: embeddings, q, k, v, output, MLP and
norms. An attention's own weights (gates, the speed of a rotation, the network of adaptive powers) stay as the new model
made them, and so do weights that no layer of the source has, such as a norm that was added to model.py. GPT-2's table
of positions is left out where the model rotates.
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
from ..data import DataError, describe_error, need
from ..data.files import read_json
from ..data.huggingface import HuggingFaceEncoding, one_line, read_huggingface, tokenizers_json
from ..data.tokenizer import load_tokenizer
from ..layers.mixing import projected_heads
from ..model import GPTConfig
from . import checkpoint
from .families import FAMILIES, join, settings_of, stored_names
from .parts import Tensors, compare_shapes, own_rows, read_shapes, shapes_of
from .processes import warn
from .settings import fields_of, from_launcher
from .starts import last_code

HUB = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FILES = "config.json", "model*.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
VOCABULARY = {"transformer.wte.weight", "lm_head.weight"}  # have a row for each token, and padding
# settings that came later: a fingerprint leaves them out, so that it stays what it was
LATER = "norm norm_eps qkv_bias qk_norm tied_head mlp_width rope_unit".split()
OPTIONAL = re.compile(r"transformer\.(h\.\d+\.attn\.(mix|conv)|wpe)\..+")  # weights of some attentions
LAYER = re.compile(r"\bh\.\d+")
# settings that decide shapes, and others that a line on the weights names if they change
OF_SHAPES = (
    "n_layer n_embd n_head n_kv_head head_dim output_gate mlp_width bias qkv_bias qk_norm tied_head positions".split()
)
NAMED = "attention positions rope_base window norm norm_eps activation rope_unit".split()
# modules with weights in every source, and with biases if its settings say so; others that no layer has are new
REQUIRED = r"(lm_head|transformer\.(wte|wpe|ln_f|h\.\*\.(ln_[12]|attn\.(c_(attn|proj)|[qk]_norm)|mlp\.c_(fc|proj))))"


class Source:
    """The weights of a model, in a folder.

    Attributes: path (as it was given, or of the checkpoint), model (its settings, a dict of fields of GPTConfig),
    config (the GPTConfig of these settings).
    """

    def __init__(self, path, model, folder, kind="sympow"):
        """Read the names and shapes in the folder's files.

        kind: a name in FAMILIES, of a model of transformers; else the files have our names, perhaps after "gpt.".
        Raises ValueError if a file cannot be read.
        """
        self.path, self.model, self.folder, self.kind = path, model, folder, kind
        stored, self.shapes = read_shapes(folder, "model"), {}  # by our names
        self.stored_names, self.config = stored_names(kind, stored, model), GPTConfig(**model)
        self._check_tied(stored)
        with one_line(folder, "has tensors that do not belong together"), torch.device("meta"):
            for name in self.stored_names:
                shape = [*self._join(name, lambda part: torch.empty(stored[part])).shape]
                if name in VOCABULARY and shape[0] == self.config.vocab_size:  # ours are padded, theirs need not be
                    shape[0] = -(-shape[0] // 64) * 64
                self.shapes[name] = shape

    def _check_tied(self, stored):
        """Raise DataError if a file with these names has a head of its own where config.json says that it has none.

        Older versions of transformers leave such a head out, newer ones take it.
        """
        head, embedding = "lm_head.weight", self.stored_names.get("transformer.wte.weight")
        if head not in stored or head in self.stored_names or not embedding:
            return
        with Tensors(self.folder, "model") as saved:
            if not torch.equal(*(saved.read(name).float() for name in (head, embedding[0]))):
                raise DataError(
                    f"{head} in {self.path} is not the embedding, though its config.json has tie_word_embeddings=True: "
                    "it must be False, or the tensor must go"
                )

    def _join(self, name, read):
        """Return a tensor as this repository has it from its parts; read: a function of a name in a file."""
        parts = self.stored_names[name]
        return join(self.kind, parts, [*map(read, parts)], self.config.head_dim)

    def check(self, config, fresh=True):
        """Raise ValueError if a model of this GPTConfig cannot take these weights. fresh: it may have weights that no
        layer here has."""
        own = self.config
        if config.vocab_size > own.vocab_size:
            raise ValueError(
                f"the tokenizer of {self.path} has more tokens than its model; if an end of text is among them by "
                "another name than usual, let its tokenizer_config.json name it as eos_token"
            )
        for i in range(min(own.n_layer, config.n_layer)):
            old, new = own.layer(i).attention, config.layer(i).attention
            if ATTENTIONS[old].rotates != ATTENTIONS[new].rotates:
                rotating = old if ATTENTIONS[old].rotates else new
                raise ValueError(
                    f"the weights in {self.path}, of attention={old}, cannot become those of attention={new}: of the "
                    f"two only {rotating} rotates queries and keys by their positions"
                )
        shapes, expected = dict(self.shapes), shapes_of(config)
        stored = {LAYER.sub("h.*", name) for name in shapes if not OPTIONAL.fullmatch(name)}
        required = re.compile(REQUIRED + (r"\.(weight|bias)" if own.bias or own.qkv_bias else r"\.weight"))
        for name in shapes.keys() & expected.keys() & VOCABULARY:  # some models have more rows than there are tokens
            rows, *width = shapes[name]
            shapes[name] = [min(rows, expected[name][0]), *width]
        for name in shapes.keys() ^ expected.keys():
            general = LAYER.sub("h.*", name)
            if fresh and general not in stored and not (name in expected and required.fullmatch(general)):
                shapes.pop(name, None)
                expected.pop(name, None)
        # with an output gate and fewer key/value heads c_attn can have as many rows as before, for other products
        rows, expected_rows = ([heads * c.head_dim for heads in projected_heads(c)] for c in (own, config))
        if (difference := compare_shapes(shapes, expected)) or rows != expected_rows:
            settings = " ".join(
                f"{name}={getattr(own, name)}" for name in OF_SHAPES if getattr(own, name) != getattr(config, name)
            )
            reasons = "; ".join(filter(None, [settings and f"they are of {settings}", difference]))
            raise ValueError(f"the weights in {self.path} do not fit this model: {reasons}")

    def describe(self, config):
        """Return a line that says which weights are new in a model of this GPTConfig, and which are dropped."""
        changes = []
        own = self.config
        for name in NAMED:
            if name == "rope_base" and own.positions == "learned":
                continue  # nothing has been rotated
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
                tensor = self._join(name, saved.read)
                if name in VOCABULARY:
                    tensor = F.pad(tensor, (0, 0, 0, len(x) - len(tensor)))  # below 0: rows of no token
                rows, first = own_rows(x)
                rows.copy_(tensor[first : first + len(rows)] if rows.dim() else tensor)

    def fingerprint(self):
        """Return a hash of the settings and of all vectors among the weights, the norms and biases.

        No two trainings share them, and they are read in no time.
        """
        settings = {name: x for name, x in self.model.items() if name not in LATER}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        with Tensors(self.folder, "model") as saved:
            for name in sorted(self.stored_names):
                digest.update(f"{name} {self.shapes[name]}".encode())
                if len(self.shapes[name]) == 1:
                    digest.update(self._join(name, saved.read).float().numpy().data)
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
    name on the hub, as OWNER/NAME or in HUB, which is downloaded unless it is in the cache.

    Raises ValueError if there are no whole weights there, or if its tokens are not the dataset's. setting: the name of
    the setting that gives the path, for messages.
    """
    folder = download(path) if is_on_hub(path) else path
    config_file = os.path.join(folder, "config.json")
    config = read_json(config_file) if os.path.isfile(config_file) else {}
    if "model_type" not in config:
        return open_run(path, dataset, setting)
    source = read_folder(folder, config, path)
    check_tokens(source, config, dataset)
    return source


def is_on_hub(path):
    """Return True for a name in HUB or OWNER/NAME, but not for a folder, nor for a path that begins with one."""
    owner = os.path.dirname(path)
    local = os.path.isdir(path) or os.path.isdir(owner) or owner == "out"
    return not local and (path in HUB or HUB_NAME.fullmatch(path) is not None)


def read_folder(folder, config, path):
    """Return the Source of a folder that export.py or transformers wrote. config: the contents of its config.json.

    path: its name for messages. Warns if other code trained an exported model. Raises ValueError for a model that this
    repository cannot have.
    """
    kind = config["model_type"]
    if kind not in ("sympow", *FAMILIES):
        raise ValueError(f"{path} has a model of type {kind!r}, which is none of sympow, {', '.join(FAMILIES)}")
    with one_line(f"config.json in {path}", "is not of a model of this version"):
        if kind == "sympow":
            warn_of_changes(f"{path} was trained with", config.get("code"))
            settings = with_defaults(GPTConfig, config["model"])
        else:
            settings = settings_of(config, path)
        GPTConfig(**settings)
    return Source(path, settings, folder, kind)


def open_run(path, dataset, setting):
    """Return the Source at `path`, a run's folder or a checkpoint; see `open_source`."""
    folder = checkpoint.newest(path, True, warn, ("model",))
    run = checkpoint.run_of(path)
    if not folder:
        resume = "auto, scratch, " if setting == "init_from" else ""
        raise ValueError(
            f"{setting}: there is no whole checkpoint in {path}; give {resume}a run's folder, one that export.py "
            f"wrote, one that transformers wrote, OWNER/NAME on the hub, or one of {', '.join(HUB)}"
        )
    dataset.check_tokens(load_tokenizer(run), path)
    warn_of_changes(f"{run} was last trained with", last_code(folder))
    return Source(folder, checkpoint.settings(run, folder)["model"], folder)


def check_tokens(source, config, dataset):
    """Raise ValueError if a dataset has other tokens than the Source of a folder of transformers.

    They are compared by its tokenizer.json or, without one, by their number and the end of text. config: the contents
    of its config.json.
    """
    size = source.model["vocab_size"]
    end = config.get("eos_token_id", 50256)
    tokenizer = os.path.join(source.folder, "tokenizer.json")
    if dataset.tokenizer.kind != "ids" and os.path.isfile(tokenizer):
        saved = HuggingFaceEncoding(*tokenizers_json(dataset.tokenizer))
        equal = saved.vocabulary == read_huggingface(tokenizer).vocabulary
    else:
        equal = size == dataset.vocab_size and end in (None, dataset.eot)
    if not equal:
        raise ValueError(
            f"the tokens of {source.path} ({size:,} ids, end of text {end}) are not those of the dataset "
            f"{dataset.name} ({dataset.tokenizer.kind}, {dataset.vocab_size:,} ids, end of text {dataset.eot}): "
            f"prepare it with its tokenizer, --tokenizer={tokenizer} or gpt2"
        )


def download(name):
    """Return the folder of huggingface_hub's cache with config.json and the weights of a model, all of one commit.

    Every rank calls it before the ranks know each other. If ranks share a cache, one of them downloads: a file lock of
    huggingface_hub lets the others wait, and then they find the file. Raises ValueError if the download fails.
    """
    hub, utils = need("huggingface_hub"), need("huggingface_hub.utils")  # which the first alone does not import
    utils.logging.set_verbosity_error()  # a refusal is one line
    if from_launcher("LOCAL_RANK"):
        utils.disable_progress_bars()
    try:
        return hub.snapshot_download(HUB.get(name, name), allow_patterns=FILES)
    except Exception as error:  # whatever the network layer raises
        raise ValueError(
            f"{name} cannot be downloaded from the hub, and is no folder here ({describe_error(error)}): go online "
            "once, which fills the cache (HF_HOME), or copy config.json and model.safetensors into a folder and give "
            "its path"
        ) from error
