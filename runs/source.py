"""Weights from elsewhere, for --init_from and --distill_from: of a run, of a folder of export.py, or GPT-2's.

    source = open_source("out/a", dataset)       # or out/a/ckpt/step_00001000, hf/a, gpt2, or a folder of transformers
    config = GPTConfig(**source.model)           # of the model that has these weights, or of one with other settings
    source.check(config)                         # raises ValueError if such a model cannot take the weights
    source.fill(model)
    source.describe(config)                      # a line that says what of such a model is new, and what is dropped

A model with another attention takes all weights that it has by the same name: embeddings, q, k, v, output, MLP and
norms. What an attention has of its own (gates, the speed of a rotation, the network of adaptive powers) stays as the
new model made it, and GPT-2's table of positions is left out where the model rotates.
"""

import hashlib
import json
import os
import re

import torch
from safetensors import SafetensorError
from torch.nn import functional as F

from sympow.attention import ATTENTIONS
from sympow.data import need
from sympow.data.files import read_json
from sympow.data.huggingface import one_line, tokenizers_json
from sympow.data.tokenizer import load_tokenizer
from sympow.model import GPT, GPTConfig
from sympow.runs import checkpoint
from sympow.runs.parts import Tensors, own_rows, unlike
from sympow.runs.processes import warn
from sympow.runs.settings import fields_of, from_launcher

HUB = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
GPT2 = dict(attention="softmax", bias=True, positions="learned", embedding_norm=False, activation="gelu_tanh")
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}  # transformers' names
# what transformers' GPT2Config may say of a model that is GPT-2, and what it means if it says nothing
FIXED = {
    "layer_norm_epsilon": (1e-5, 1e-5), "scale_attn_weights": (True, True), "add_cross_attention": (False, False),
    "scale_attn_by_inverse_layer_idx": (False, False), "tie_word_embeddings": (True, True),
}  # fmt: skip
NOT_WEIGHTS = re.compile(r"(h\.\d+\.attn\.(masked_)?bias|lm_head\.weight)")  # masks, and the embedding once more
TRANSPOSED = re.compile(r"transformer\.h\.\d+\.(attn|mlp)\.c_\w+\.weight")  # transformers' Conv1D
OF_AN_ATTENTION = re.compile(r"transformer\.(h\.\d+\.attn\.mix|wpe)\..+")  # all other weights must be there


class Source:
    """The weights of a model, in a folder.

    Attributes: path (as it was given, or of the checkpoint), model (its settings, a dict of fields of GPTConfig).
    """

    def __init__(self, path, model, folder, gpt2=False, prefix=""):
        """folder: where the files are. gpt2: they have transformers' GPT-2; prefix: of the names there. Raises
        ValueError if a file cannot be read."""
        self.path, self.model, self.folder = path, model, folder
        self.names, self.shapes, self.transposed = {}, {}, set()  # by our names: the names and shapes in the files
        with self._open() as saved:
            for there, shape in saved.shapes.items():
                name = there.removeprefix(prefix)
                if gpt2:
                    name = "transformer." + name.removeprefix("transformer.")
                if gpt2 and NOT_WEIGHTS.fullmatch(name.removeprefix("transformer.")):
                    continue
                if gpt2 and TRANSPOSED.fullmatch(name):
                    self.transposed.add(name)
                    shape = shape[::-1]
                if name == "transformer.wte.weight":
                    shape = [-(-shape[0] // 64) * 64, *shape[1:]]  # our embedding is padded, theirs need not be
                self.names[name], self.shapes[name] = there, shape

    def _open(self):
        """Return the Tensors of the folder. Raises ValueError if a file cannot be read."""
        try:
            return Tensors(self.folder, "model")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"the weights in {self.path} cannot be read: {str(error).splitlines()[0]}") from None

    def check(self, config):
        """Raise ValueError if a model of this GPTConfig cannot take these weights."""
        own = GPTConfig(**self.model)
        for i in range(min(own.n_layer, config.n_layer)):
            names = own.layer(i).attention, config.layer(i).attention
            if len({ATTENTIONS[name].rotates for name in names}) > 1:
                other = next(name for name in names if not ATTENTIONS[name].rotates)
                raise ValueError(
                    f"the weights in {self.path}, of attention={names[0]}, cannot become those of "
                    f"attention={names[1]}: queries and keys mean something else in {other}"
                )
        if config.positions == "learned" != own.positions:
            raise ValueError(f"{self.path} has no table of positions: use positions={own.positions}")
        both = self.shapes, shapes_of(config)
        fixed = [{n: shape for n, shape in of.items() if not OF_AN_ATTENTION.fullmatch(n)} for of in both]
        shared = [{n: shape for n, shape in of.items() if n in both[0] and n in both[1]} for of in both]
        if wrong := unlike(*fixed) or unlike(*shared):
            raise ValueError(f"the weights in {self.path} do not fit this model: {wrong}")

    def describe(self, config):
        """Return a line that says where the weights are from, what a model of this GPTConfig has beyond them, and what
        of them it has no use for."""
        wanted = shapes_of(config)
        new, dropped = [n for n in wanted if n not in self.names], [n for n in self.names if n not in wanted]
        texts = [f"{what}: {shorten(names)}" for what, names in (("new", new), ("dropped", dropped)) if names]
        own = self.model
        if own.get("positions", "rotary") != config.positions:
            texts.insert(0, f"positions={own.get('positions', 'rotary')} becomes {config.positions}")
        if own["attention"] != config.attention:
            texts.insert(0, f"attention={own['attention']} becomes {config.attention}")
        return f"weights from {self.path}" + (": " if texts else "") + "; ".join(texts)

    def fill(self, model):
        """Copy the weights into a GPT, sharded or not, whose GPTConfig `check` has seen; what is new in it stays."""
        with self._open() as saved, torch.no_grad():
            for name, x in model.state_dict().items():
                if name not in self.names:
                    continue
                there = self.names[name]
                if [*x.shape] == saved.shapes[there] and name not in self.transposed:
                    saved.fill(there, x)
                    continue
                whole = saved.read(there)
                whole = whole.t() if name in self.transposed else whole
                rows, first = own_rows(x)
                rows.copy_(F.pad(whole, (0, 0, 0, len(x) - len(whole)))[first : first + len(rows)])

    def fingerprint(self):
        """Return a hash of the settings and of all vectors among the weights (norms and biases), which no two trainings
        share and which are read in no time."""
        digest = hashlib.sha256(json.dumps(self.model, sort_keys=True).encode())
        with self._open() as saved:
            for name, there in sorted(self.names.items()):
                digest.update(f"{name} {self.shapes[name]}".encode())
                if len(self.shapes[name]) == 1:
                    digest.update(saved.read(there).float().numpy().data)
        return digest.hexdigest()[:16]


def shapes_of(config):
    """Return {name: shape} of the weights of a model of this GPTConfig."""
    with torch.device("meta"):
        return {name: [*x.shape] for name, x in GPT(config).state_dict().items()}


def shorten(names):
    """Return the names of weights in a text, once for all layers: "h.*.attn.mix.gate.b"."""
    return ", ".join(dict.fromkeys(re.sub(r"^transformer\.(h\.)?(\d+\.)?", _of_all, name) for name in names))


def _of_all(match):
    return "h.*." if match[1] else ""


def choose_model(cfg, given, dataset, saved):
    """Return (the Source that cfg.init_from names or None, the GPTConfig of the run's model).

    Settings of the model are those that were given, or else those of the source. given: the settings that were given by
    name. saved: the settings with which the run began, if it goes on; it needs its source no more. Raises ValueError
    for settings or weights that do not fit.
    """
    source, settings = None, {}
    if cfg.init_from not in ("auto", "scratch"):
        source = None if saved else open_source(cfg.init_from, dataset)
        settings = dict(saved["model"] if saved else source.model)
    if "attention" in given:  # the gate of another attention does not apply to this one
        settings.pop("gate", None)
    chosen = {"rope_base": float(max(2, dataset.document_length)), **settings, **fields_of(GPTConfig, given)}
    chosen |= {"vocab_size": dataset.vocab_size, "reset_token": dataset.eot if cfg.pack else -1}
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
    config = transformers_config(folder)
    if config is None:
        return open_run(path, dataset, setting)
    if config["model_type"] == "gpt2":
        source = Source(path, gpt2_settings(config, path), folder, gpt2=True)
    elif config["model_type"] == "sympow":
        source = Source(path, exported_settings(config, path), folder, prefix="gpt.")
    else:
        raise ValueError(f"{setting}: {path} has a model of type {config['model_type']!r}, neither sympow nor gpt2")
    check_tokens(folder, config, dataset, path)
    return source


def open_run(path, dataset, setting):
    """Return the Source at `path`, a run's folder or a checkpoint; see `open_source`."""
    folder, run = checkpoint.newest(path, True, warn, checkpoint.WEIGHTS), checkpoint.run_of(path)
    if not folder and (checkpoint.exists(path) or run != path):
        raise ValueError(f"{setting}: there is no whole checkpoint in {path}")
    if not folder:
        resume = "auto (nanoGPT's resume: goes on where out_dir left off), scratch or " * (setting == "init_from")
        raise ValueError(
            f"{setting} must be {resume}a folder with a checkpoint, got {path!r}; a folder that export.py wrote, one "
            f"with a GPT-2 that transformers wrote, and {', '.join(HUB)} will do too"
        )
    dataset.check_tokens(load_tokenizer(run), path)
    return Source(folder, checkpoint.settings(run, folder)["model"], folder)


def transformers_config(folder):
    """Return the config.json of a folder that transformers can load, or None if it is another folder or is damaged."""
    try:
        config = read_json(os.path.join(folder, "config.json"))
        return config if "model_type" in config else None
    except (OSError, *checkpoint.NOT_JSON):
        return None


def exported_settings(config, path):
    """Return the model's settings in the config.json of a folder that export.py wrote. Raises ValueError if this
    version does not know them."""
    try:
        checkpoint.check_model_settings(config["model"])
        return config["model"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"config.json in {path} is not of a model of this version: {error}") from None


def gpt2_settings(config, path):
    """Return the settings of the model that is the GPT-2 of transformers' config.json. Raises ValueError for one that
    differs from OpenAI's in more than its sizes."""
    sizes = {"vocab_size": 50257, "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
    sizes = {name: config.get(name, size) for name, size in sizes.items()}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"config.json in {path} has {name}={size!r}, which is no size")
    wrong = {name: config[name] for name, (value, unsaid) in FIXED.items() if config.get(name, unsaid) != value}
    if config.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        wrong["n_inner"] = config["n_inner"]
    if (activation := config.get("activation_function", "gelu_new")) not in ACTIVATIONS:
        wrong["activation_function"] = activation
    if wrong:
        found = ", ".join(f"{name}={value}" for name, value in wrong.items())
        raise ValueError(f"{path} is not GPT-2 as this model can be it: its config.json has {found}")
    return {**sizes, **GPT2, "activation": ACTIVATIONS[activation]}


def check_tokens(folder, config, dataset, path):
    """Raise ValueError if the ids of a dataset are not those of the model in transformers' folder, by its
    tokenizer.json or, without one, by their number and the end of text."""
    size, end = config.get("vocab_size", 50257), config.get("eos_token_id", 50256)
    same = size == dataset.vocab_size and end in (None, dataset.eot)
    tokenizer = os.path.join(folder, "tokenizer.json")
    if same and os.path.isfile(tokenizer):
        load = need("tokenizers").Tokenizer
        ours = load.from_str(tokenizers_json(dataset.tokenizer)[0])
        with one_line(tokenizer):
            same = load.from_file(tokenizer).get_vocab(with_added_tokens=True) == ours.get_vocab(with_added_tokens=True)
    if not same:
        raise ValueError(
            f"the tokens of {path} ({size:,} ids, end of text {end}) are not those of the dataset {dataset.name} "
            f"({dataset.tokenizer.kind}, {dataset.vocab_size:,} ids, end of text {dataset.eot}): prepare it with the "
            "same tokenizer" + ", --tokenizer=gpt2" * (config["model_type"] == "gpt2")
        )


def download(name):
    """Return the folder of huggingface_hub's cache with config.json and the weights of GPT-2.

    Every rank calls it before the ranks know each other. Of those that share a cache, one downloads: a file lock of
    huggingface_hub lets the others wait, who then find the file. Raises ValueError if that is not possible.
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
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        raise ValueError(
            f"{name} cannot be downloaded from {HUB[name]} ({why}): go online once, which fills the cache "
            f"(HF_HOME), or copy config.json and model.safetensors from there into a folder and give its path"
        ) from error
