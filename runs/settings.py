"""Settings from files and the command line: one line of text a mistake, before anything is allocated.

    python train.py config/sympow_p4.py --batch_size=8 --compile False

Settings are the fields of dataclasses, with default and comment where they are declared; `--help` prints them. Files
are Python with assignments (`p = 4`); later arguments win; dashes do for underscores; an integer does for a float.
"""

import difflib
import inspect
import os
import re
import runpy
import sys
import types
from dataclasses import fields


def refuse(message, every_rank=False):
    """Ends the program with exit status 2 and one line on stderr: of one rank a node, or of every rank that refuses."""
    rank = int(os.environ.get("RANK", 0))
    if every_rank or os.environ.get("LOCAL_RANK", "0") == "0":
        who = os.path.basename(sys.argv[0]) + (f" (rank {rank})" if rank else "")
        print(f"{who}: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def choose_device(device, dtype, local=0):
    """(torch.device, torch.dtype of matrix products) for device auto, cpu, cuda or cuda:N and dtype auto, float32 or
    bfloat16; `local` is the GPU that "cuda" means."""
    import torch

    name = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        refuse(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    chosen = torch.device(f"cuda:{local}" if name == "cuda" else name)
    if chosen.type == "cuda" and chosen.index >= torch.cuda.device_count():
        refuse(f"device {chosen} is not there, torch sees {torch.cuda.device_count()} GPUs: see `make doctor`", True)
    has_bf16 = chosen.type == "cuda" and torch.cuda.get_device_capability(chosen) >= (8, 0)
    return chosen, getattr(torch, dtype if dtype != "auto" else "bfloat16" if has_bf16 else "float32")


def read_settings(classes, argv, hidden=(), usage=""):
    """The values given in argv for fields of the dataclasses: ({key: value}, names of the config files).

    Only keys that were given are in the dict. `hidden` fields can't be set. Exits with status 2 on a mistake.
    """
    known = {f.name: f for c in classes for f in fields(c) if f.name not in hidden}
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
            for key, value in _read_file(arg).items():
                _known(key, known, f"{key} in {arg}")
                given[key] = convert(key, value, known[key].type)
            names.append(os.path.basename(arg)[: -len(".py")])
        else:
            refuse(f"cannot read {arg!r}: settings are config/NAME.py or --key=value")
    return given, names


def convert(key, value, kind):
    """`value`, a text or a Python value, as `kind` (int, float, bool or str)."""
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    text = str(value).strip()
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if kind is int:
            return int(text.replace("_", "")) if re.fullmatch(r"[+-]?[\d_]+", text) else _whole(float(text))
        return kind(text)
    except (ValueError, KeyError, OverflowError):
        what = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}[kind]
        refuse(f"{key} must be {what}, got {text!r}")


def describe(cls, hidden=()):
    """The fields of a dataclass with default and the comment behind each, for --help."""
    lines = []
    for line in inspect.getsource(cls).splitlines():
        match = re.match(r"    (\w+): [\w.]+ = (.+?)(?:  # (.*))?$", line)
        if match and match[1] not in hidden:
            lines.append(f"  --{match[1]}={match[2]}".ljust(42) + (match[3] or "") + "\n")
        elif not match and lines and re.match(r"    # (.*)$", line):
            lines.append("\n" + line[6:] + "\n")
    return "".join(lines)


def _whole(x):
    if x != int(x):
        raise ValueError
    return int(x)


def _known(key, known, where):
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        refuse(f"unknown key {where}" + (f": did you mean {near[0]}?" if near else ": see --help for the keys"))


def _read_file(path):
    if not os.path.isfile(path):
        refuse(f"no config file {path}")
    try:
        values = runpy.run_path(path)
    except Exception as error:
        refuse(f"{path} does not run: {type(error).__name__}: {error}")
    skip = (types.ModuleType, types.FunctionType)
    return {k: v for k, v in values.items() if not k.startswith("_") and not isinstance(v, skip)}
