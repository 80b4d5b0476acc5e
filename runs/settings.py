"""Read settings from files and the command line; refuse a mistake in one line, before anything is allocated.

    python train.py config/sympow_p4.py --batch_size=8 --compile False

Settings are the fields of dataclasses, with default and comment where they are declared; `--help` prints them. Files
are Python with assignments (`p = 4`). Later arguments win, dashes may stand for underscores, an integer may stand for a
float.
"""

import ast
import difflib
import importlib
import inspect
import math
import os
import re
import runpy
import socket
import sys
import types
from dataclasses import fields

BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
NANOGPT = {"decay_lr": ("schedule", {True: "cosine", False: "constant"})}  # its settings that have other names here


def refuse(message, every_rank=False):
    """Print one line to stderr and exit with status 2.

    Among several ranks only the first of each node prints it, or with every_rank each rank that refuses.
    """
    if every_rank or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{process_name()}: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def process_name():
    """Return the name of the program, and among several ranks also the rank and its host: "train.py (rank 3 on n7)"."""
    name, rank = os.path.basename(sys.argv[0]), os.environ.get("RANK")
    several = rank and os.environ.get("WORLD_SIZE", "1") != "1"
    return f"{name} (rank {rank} on {socket.gethostname()})" if several else name


def read_settings(classes, argv, hidden=(), usage=""):
    """Return the values that argv gives for fields of the dataclasses, and the names of the config files in it.

    The values are a dict of the given keys alone: {"batch_size": 8}. Fields in `hidden` cannot be set. `usage` stands
    above the fields in --help. Exits with status 2 on a mistake.
    """
    known = {f.name: f for c in classes for f in fields(c) if f.name not in hidden}
    known |= {word: types.SimpleNamespace(type=bool) for word, (name, _) in NANOGPT.items() if name in known}
    given, names, rest = {}, [], list(argv)
    while rest:
        arg = rest.pop(0)
        if arg in ("-h", "--help"):
            print(usage + "\n" + "".join(describe(c, hidden) for c in classes), end="")
            sys.exit(0)
        if arg.startswith("--"):
            key, equals, text = arg[2:].partition("=")
            key = key.replace("-", "_")
            _known(key, known, arg)
            if not equals:
                bare = known[key].type is bool and (not rest or rest[0].startswith("--"))
                if not bare and (not rest or rest[0].startswith("--")):
                    refuse(f"{arg} needs a value, as in {arg}={known[key].default}")
                text = "True" if bare else rest.pop(0)
            given[key] = convert(key, text, known[key].type)
        elif arg.endswith(".py"):
            for key, value in _read_file(arg, known).items():
                _known(key, known, f"{key} in {arg}")
                given[key] = convert(key, value, known[key].type)
            names.append(os.path.basename(arg)[: -len(".py")])
        else:
            refuse(f"cannot read {arg!r}: settings are config/NAME.py or --key=value")
    _translate(given)
    return given, names


def _translate(given):
    """Replace nanoGPT's words for settings by ours, in place; refuse both if they say different things."""
    for word, (name, meanings) in NANOGPT.items():
        if word in given:
            value = given.pop(word)
            if given.setdefault(name, meanings[value]) != meanings[value]:
                refuse(f"{word}={value} means {name}={meanings[value]}, but {name} is {given[name]}: give one of them")


def fields_of(cls, values):
    """Return those of the values (a dict) that are fields of the dataclass."""
    return {f.name: values[f.name] for f in fields(cls) if f.name in values}


def convert(key, value, kind):
    """Return `value`, a text or a Python value, as `kind` (int, float, bool or str), or refuse it."""
    text = f"a {type(value).__name__} that cannot be printed"
    try:
        text = str(value).strip()  # raises ValueError for an integer of more than 4,300 digits
        if kind is bool:
            return BOOLS[text.lower()]
        if kind is int:
            return _whole(int(text.replace("_", "")) if re.fullmatch(r"[+-]?[\d_]+", text) else float(text))
        if kind is float:
            return _finite(float(text))
        return _text(value)
    except (ValueError, KeyError, OverflowError):
        what = {bool: "True or False", int: "a whole number below 2^63", float: "a finite number", str: "a text"}[kind]
        refuse(f"{key} must be {what}, got {text!r}")


def describe(cls, hidden=()):
    """Return the text of --help for a dataclass: its fields, each with its default and the comment behind it."""
    lines = []
    for line in inspect.getsource(cls).splitlines():
        match = re.match(r"    (\w+): [\w.]+ = (.+?)(?:  # (.*))?$", line)
        if match and match[1] not in hidden:
            lines.append(f"  --{match[1]}={match[2]}".ljust(42) + (match[3] or "") + "\n")
        elif not match and lines and re.match(r"    # (.*)$", line):
            lines.append("\n" + line[6:] + "\n")
    return "".join(lines)


_AT_LEAST_1 = "batch_size block_size tokens_per_step max_iters eval_interval eval_tokens log_interval max_skipped"
TRAIN_RANGES = (  # of train.py's settings, for check_ranges
    (_AT_LEAST_1 + " context_parallel", "at least 1", lambda x: x >= 1),
    ("learning_rate", "positive and finite", lambda x: 0 < x < math.inf),
    ("beta1 beta2", "in [0, 1)", lambda x: 0 <= x < 1),
    ("distill_weight", "positive and finite", lambda x: 0 < x < math.inf),
    ("weight_decay min_lr", "finite and 0 or more", lambda x: 0 <= x < math.inf),
    ("warmup_iters", "0 or more", lambda x: x >= 0),
    ("max_seconds", "0 (no limit) or more", lambda x: x >= 0),
    ("gradient_accumulation_steps", "0 (tokens_per_step decides) or more", lambda x: x >= 0),
    ("grad_clip", "0 (no clipping) or more", lambda x: x >= 0),
    ("lr_decay_iters", "0 (max_iters) or more", lambda x: x >= 0),
    ("sample_tokens", "0 (none) or more", lambda x: x >= 0),
    ("timeout", "positive", lambda x: x > 0),
    # torch.compile works in the first step of a start from nothing, and may in the second
    ("profile", "0 (none) or a step from 3 on", lambda x: x == 0 or x >= 3),
    ("seed", "in [0, 2^63)", lambda x: 0 <= x < 2**63),
    ("decay_share", "above 0 and at most 1", lambda x: 0 < x <= 1),
    ("dtype", ["auto", "float32", "bfloat16"]),
    ("compile", ["auto", "True", "False"]),
    ("wandb", ["auto", "online", "offline", "disabled"]),
    ("backend", ["auto", "nccl", "gloo"]),
)


def check_ranges(cfg, ranges):
    """Raise ValueError for the first setting that is out of its range.

    ranges: rows (names with blanks between, range in words, function of a value that is True in the range); or
    (names, the values that are allowed).
    """
    for names, wanted, *test in ranges:
        for name in names.split():
            value = getattr(cfg, name)
            if test and not test[0](value):
                raise ValueError(f"{name} must be {wanted}, got {value}")
            if not test and value not in wanted:
                raise ValueError(f"{name} must be one of {', '.join(wanted)}, got {value!r}")


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
    """Return a number of at least 0 that torchrun, or another launcher, puts into the environment under this name."""
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        refuse(f"{name}={text!r} in the environment must be a whole number, as torchrun sets it: unset {name}", True)
    return int(text)


def accumulation_steps(cfg, given, world):
    """Return the micro-steps on each of `world` ranks that make a step of tokens_per_step tokens.

    If gradient_accumulation_steps is set, cfg.tokens_per_step is set to match it. given: the settings that were
    given by name. Raises ValueError for settings that do not fit each other.
    """
    micro_steps = cfg.gradient_accumulation_steps
    if micro_steps:
        if micro_steps % world:
            raise ValueError(
                "gradient_accumulation_steps counts over all ranks and must be a multiple of "
                f"{world}, got {micro_steps}"
            )
        tokens = micro_steps * cfg.batch_size * cfg.block_size
        if given.get("tokens_per_step", tokens) != tokens:
            raise ValueError(
                f"gradient_accumulation_steps {micro_steps} x batch_size {cfg.batch_size} x block_size "
                f"{cfg.block_size} = {tokens}, but tokens_per_step is {cfg.tokens_per_step}: give one of them"
            )
        cfg.tokens_per_step = tokens
    tokens = world * cfg.batch_size * cfg.block_size  # of one micro-step on all ranks
    if cfg.tokens_per_step % tokens:
        shape = f"{world} ranks x batch_size {cfg.batch_size} x block_size {cfg.block_size}"
        near = nearest_multiples(cfg.tokens_per_step, tokens)
        raise ValueError(
            f"tokens_per_step must be a multiple of {shape} = {tokens}, got {cfg.tokens_per_step}: {near} would do"
        )
    return cfg.tokens_per_step // tokens


def nearest_multiples(n, unit, of=1):
    """Return the multiples of `unit` beside n, in units of `of`, as words for a refusal: "96 or 128"; none is 0."""
    below = n // unit * unit
    return " or ".join(str(x // of) for x in (below, below + unit) if x)


def divide_sequences(sequences, most):
    """Return (batch_size, accumulation), whose product is the sequences of a step on a rank, with the largest
    batch_size that divides them and is not above `most`; 1 if that is less."""
    batch_size = max(n for n in range(1, max(1, min(most, sequences)) + 1) if sequences % n == 0)
    return batch_size, sequences // batch_size


def _whole(x):
    if x != int(x) or abs(x) >= 2**63:  # more than that no tensor and no array can hold
        raise ValueError
    return int(x)


def _finite(x):
    if not math.isfinite(x):
        raise ValueError
    return x


def _text(value):
    if not isinstance(value, (str, int, float)) or "\0" in str(value):  # a path with a NUL is an error everywhere
        raise ValueError
    return str(value)


def _known(key, known, where):
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        refuse(f"unknown key {where}" + (f": did you mean {near[0]}?" if near else ": see --help for the keys"))


def _read_file(path, known):
    """Return what a config file assigns, without names that are no settings and are imported, begin with an underscore
    or stand for a module, a function or a class."""
    if not os.path.isfile(path):
        refuse(f"no config file {path}")
    try:
        values = runpy.run_path(path)
        with open(path, "rb") as f:
            imported = _imported_names(f.read())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a config file raises, SystemExit too
        refuse(f"{path} does not run: {type(error).__name__}: {error}")
    helper = lambda name, x: name[0] == "_" or name in imported or isinstance(x, types.ModuleType) or callable(x)
    return {name: x for name, x in values.items() if name in known or not helper(name, x)}


def _imported_names(source):
    """Return the names that the import statements of a Python source bind, as a set."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            star = alias.name == "*"
            names |= {*dir(importlib.import_module(node.module))} if star else {alias.asname or alias.name}
    return names
