"""Read settings from files and the command line; refuse a mistake in one line, before anything is allocated.

    python train.py config/sympow_p4.py --batch_size=8 --compile False

Settings are the fields of dataclasses, with default and comment where they are declared; `--help` prints them. Files
are Python with assignments (`p = 4`). Later arguments win, dashes may stand for underscores, an integer may stand for a
float.
"""

import argparse
import glob
import inspect
import math
import os
import re
import runpy
from dataclasses import fields
from fractions import Fraction
from functools import cache, partial
from types import ModuleType
from typing import get_args

from sympow import check_choice, did_you_mean
from .program import Parser, refuse

BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
NANOGPT_KEYS = {"eval_iters": "eval_tokens", "lr": "learning_rate"}  # to which another key may be closer
KINDS = {bool: "True or False", int: "a whole number below 2^63", float: "a finite number"}
KINDS |= {kind | str: f"{words}, or auto" for kind, words in KINDS.items()}
# a field of a dataclass with the comment behind it, or a comment that is the title of the fields below
FIELD = re.compile(r"^    (?:(\w+): .*?(?:  # (.*))?|# (.*))$", re.MULTILINE)


@cache
def read_fields(cls):
    """Return [(name, comment, title), ...] of the lines of a dataclass's source, titles alone with empty names.

    It is read once: Python 3.11 cannot parse in two threads at once (python/cpython#106905), and runs have threads.
    """
    return FIELD.findall(inspect.getsource(cls))


def read_settings(classes, argv, hidden=(), usage="", folders=False):
    """Return the settings that argv gives, {name: value}, and the names of the config files in it.

    classes: the dataclasses that have the settings as fields. hidden: names of fields that cannot be set. usage: the
    text above the settings in --help. folders: words that are neither become out_dir, with commas between. Exits with
    status 2 on a mistake.
    """
    parser = Parser(
        usage,
        usage=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.description = usage
    known = {field.name: field for cls in classes for field in fields(cls) if field.name not in hidden}
    for cls in classes:
        group = parser.add_argument_group(cls.__name__)
        for name, comment, title in read_fields(cls):
            if title:
                group = parser.add_argument_group(title)
            elif name in known:
                _add_setting(group, known[name], comment)
    if "schedule" in known:
        parser.add_argument(
            "--decay_lr",  # nanoGPT's
            dest="schedule",
            type=_schedule_of_decay_lr,
            nargs="?",
            const="True",
            help=argparse.SUPPRESS,
        )
    types = {name: field.type for name, field in known.items()} | {"decay_lr": bool}
    arguments, names, words = _expand_files(argv, types)
    if folders and words:
        if any(argument.startswith("--out_dir") for argument in arguments):
            refuse(f"give {','.join(words)} or --out_dir, not both")
        arguments.append(f"--out_dir={','.join(words)}")
    elif words:
        refuse(f"cannot read {words[0]!r}: settings are config/NAME.py or --key=value")
    settings, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse_key(unknown[0][2:].partition("=")[0], known, unknown[0])
    return vars(settings), names


def _refuse_key(key, known, source):
    """Refuse a key that is no setting; source: the key as it stands on the command line, or in a file."""
    hint = did_you_mean(NANOGPT_KEYS.get(key, key), known)
    refuse(f"unknown key {source}" + (hint or ": see --help for the keys"))


def _add_setting(group, field, comment):
    """Add a field of a dataclass to the options of a parser; a bool may stand without a value."""
    bare = {"nargs": "?", "const": True} if field.type in (bool, bool | str) else {}
    convert_text = partial(convert, field.name, field.type)
    comment = comment.replace("%", "%%")
    group.add_argument(f"--{field.name}", type=convert_text, metavar=str(field.default), help=comment, **bare)


def _schedule_of_decay_lr(text):
    return "cosine" if convert("decay_lr", bool, text) else "constant"


def convert(name, kind, text):
    """Return a text as a value of `kind` (int, float, bool or str), or refuse it as the value of this setting.

    A kind such as int | str is a number or "auto".
    """
    if kind is str or (kind not in (int, float, bool) and text == "auto"):
        return text
    allowed = KINDS[kind]
    kind = get_args(kind)[0] if get_args(kind) else kind
    try:
        if kind is bool:
            return BOOLS[text.lower()]
        number = int(text) if kind is int and text.lstrip("+-").isdecimal() else float(text)
        if not math.isfinite(number) or (kind is int and (number != int(number) or abs(number) >= 2**63)):
            raise ValueError
        return kind(number)
    except (ValueError, KeyError, OverflowError):
        refuse(f"{name} must be {allowed}, got {text!r}")


def _expand_files(argv, types):
    """Return argv with config files replaced by their settings and dashes in keys by underscores, the files' names, and
    the words that are neither, which are left out.

    types: {key: type of the setting}. A word behind `--key` is its value, not a file, unless the setting is a bool,
    which takes a word of BOOLS alone. Refuses a key in a file that is no setting, or that is None.
    """
    arguments, names, words, kind = [], [], [], None  # kind: the type of a setting that may take the next word
    for argument in argv:
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            key = key.replace("-", "_")
            arguments.append("--" + key + equals + value)
            kind = None if equals else types.get(key, str)
            continue
        if argument == "-h" or (kind and (kind not in (bool, bool | str) or argument.lower() in {*BOOLS, "auto"})):
            arguments.append(argument)
        elif argument.endswith(".py"):
            for key, value in _read_file(os.path.expanduser(argument)).items():
                if key not in types:
                    _refuse_key(key, types, f"{key} in {argument}")
                if value is None:  # as a text it would be the name of a folder
                    refuse(f"{key} in {argument} must have a value, got None: leave it out for the default")
                arguments.append(f"--{key}={value}")
            names.append(os.path.basename(argument)[: -len(".py")])
        else:
            words.append(argument)
        kind = None
    return arguments, names, words


def _read_file(path):
    """Return the values of all names of a config file, but for modules, functions and names with an underscore."""
    if not os.path.isfile(path):
        refuse(f"no config file {path}{did_you_mean(path, glob.glob('config/*.py'))}")
    try:
        values = runpy.run_path(path)
    except (Exception, SystemExit) as error:
        refuse(f"config file {path} does not run: {type(error).__name__}: {error}")
    return {
        name: value
        for name, value in values.items()
        if not (name.startswith("_") or callable(value) or isinstance(value, ModuleType))
    }


def fields_of(cls, values):
    """Return the values, {name: value}, that belong to fields of the dataclass."""
    return {field.name: values[field.name] for field in fields(cls) if field.name in values}


DTYPE_RANGE = ("dtype", ["auto", "float32", "bfloat16"])  # of all programs, for check_ranges
TRAIN_RANGES = [  # of train.py's settings, for check_ranges
    (
        "batch_size block_size tokens_per_step max_iters eval_interval eval_tokens log_interval max_skipped "
        "context_parallel",
        "at least 1",
        lambda x: x >= 1,
    ),
    ("learning_rate distill_weight timeout", "positive and finite", lambda x: 0 < x < math.inf),
    ("beta1 beta2", "in [0, 1)", lambda x: 0 <= x < 1),
    (
        "weight_decay min_lr warmup_iters max_seconds gradient_accumulation_steps grad_clip lr_decay_iters "
        "sample_tokens",
        "finite and 0 or more",
        lambda x: 0 <= x < math.inf,
    ),
    ("seed", "in [0, 2^63)", lambda x: 0 <= x < 2**63),
    DTYPE_RANGE,
    ("compile", ["auto", "True", "False"]),
    ("wandb", ["auto", "online", "offline", "disabled"]),
    ("backend", ["auto", "nccl", "gloo"]),
]


def check_ranges(cfg, ranges):
    """Raise ValueError for the first setting that is out of its range.

    ranges: rows (names with blanks between, range in words, function of a value that is True in the range); or
    (names, the values that are allowed).
    """
    for names, allowed, *test in ranges:
        for name in names.split():
            value = getattr(cfg, name)
            if test and not test[0](value):
                raise ValueError(f"{name} must be {allowed}, got {value}")
            if not test:
                check_choice(name, value, allowed)


def choose_device(device, dtype, local=0):
    """Return the torch.device and the torch.dtype of matrix products for two settings.

    device: auto, cpu, cuda or cuda:N; "cuda" is GPU number `local`.
    dtype: float32, bfloat16, or auto: bfloat16 on GPUs that have it.
    """
    import torch

    name = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        refuse(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    chosen = torch.device(f"cuda:{local}" if name == "cuda" else name)
    if chosen.type == "cuda" and chosen.index >= torch.cuda.device_count():
        refuse(f"device {chosen} is not there, torch sees {torch.cuda.device_count()} GPUs: see `make doctor`", True)
    has_bf16 = chosen.type == "cuda" and torch.cuda.get_device_capability(chosen) >= (8, 0)
    return chosen, getattr(torch, dtype if dtype != "auto" else "bfloat16" if has_bf16 else "float32")


def from_launcher(name, default=0):
    """Return the whole number that torchrun, or another launcher, puts into the environment under this name."""
    return int(os.environ.get(name) or default)


def accumulation_steps(cfg, settings, world):
    """Return the micro-steps on each of `world` ranks that make a step of tokens_per_step tokens.

    If gradient_accumulation_steps is set, cfg.tokens_per_step is set to match it. settings: those that were given by
    name. Raises ValueError for settings that do not fit each other.
    """
    micro_step = cfg.batch_size * cfg.block_size  # tokens on one rank
    if cfg.gradient_accumulation_steps:
        tokens = cfg.gradient_accumulation_steps * micro_step
        if settings.get("tokens_per_step", tokens) != tokens:
            raise ValueError(
                f"gradient_accumulation_steps {cfg.gradient_accumulation_steps} x batch_size {cfg.batch_size} x "
                f"block_size {cfg.block_size} = {tokens}, but tokens_per_step is {cfg.tokens_per_step}: give one of "
                "them"
            )
        cfg.tokens_per_step = tokens
    if cfg.tokens_per_step % (world * micro_step):
        raise ValueError(
            f"tokens_per_step must be a multiple of {world} ranks x batch_size {cfg.batch_size} x block_size "
            f"{cfg.block_size} = {world * micro_step}, got {cfg.tokens_per_step}"
        )
    return cfg.tokens_per_step // (world * micro_step)


def parse_stages(then):
    """Return [(context, start)] of the stages in `then`; start is a number of steps, or a Fraction: a share.

    Raises ValueError if it cannot be read.
    """
    stages = []
    for part in then.split(",") if then else ():
        match = re.fullmatch(r" *(\d{1,18})@(?:(0?\.\d{1,18})|(\d{1,18})) *", part)
        start = match and (Fraction(match[2]) if match[2] else int(match[3]))
        if not start:
            raise ValueError(
                "then must be CONTEXT@START, or several with commas between, where START is a share of the run between "
                f"0 and 1 or a number of steps, as in 16384@0.5,65536@0.9, got {then!r}"
            )
        stages.append((int(match[1]), start))
    return stages


def final_context(settings):
    """Return the context of the last stage of a run with these settings, the contents of its config.json."""
    return max([settings["block_size"], *(context for context, _ in parse_stages(settings["then"]))])
