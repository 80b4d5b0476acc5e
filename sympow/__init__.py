"""Power attention for PyTorch: the operator, its states, and the attentions made of it.

    from sympow import power_attention
    y = power_attention(q, k, v, log_g, p=2)                  # [B, T, H, D]; on a GPU, on Triton kernels

    layer = sympow.Attention(n_embd=768, n_head=12)           # an nn.Module: x [B, T, 768] to y [B, T, 768]

sympow.transformers, which needs transformers, puts it into Llama and other models of that library, with its state as
their cache. In a clone of the repository, sympow/attention is a symbolic link to the folder attention/ beside it, and
sympow/model.py one to model.py; `pip install .` installs the files themselves under the same names.
"""

import difflib
import importlib
from pathlib import Path

__version__ = "0.1.0"

# a clone may have lost its links, or a copy of it may have other files in their place
_linked, _original = (folder / "attention" / "conformal_sympow.py" for folder in Path(__file__).parents[:2])
if not _linked.is_file() or (_original.is_file() and not _linked.samefile(_original)):
    raise ImportError(
        f"{Path(__file__).parent} needs its symbolic links to the folders and programs beside it: clone the repository "
        "with `git clone -c core.symlinks=true` (on Windows in developer mode), and copy it with what keeps them"
    )

# {public name: its module}; imported when they are used, because scripts that prepare data do without torch
_MODULES = {
    "ATTENTIONS": ".attention",
    "Attention": ".module",
    "LogState": ".attention",
    "PowerState": ".attention",
    "Variant": ".attention",
    "heinsen_attention": ".attention",
    "power_attention": ".attention",
    "power_attention_sums": ".attention",
    "symmetric_power_dim": ".attention.embedding",
}
__all__ = list(_MODULES)


def did_you_mean(name, names):
    """Return the end of a message about a name that is not among `names`, ": did you mean NAME?" with the closest of
    them, or "" if none is close."""
    closest = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {closest[0]}?" if closest else ""


def check_choice(setting, value, choices):
    """Raise ValueError unless the value of a setting is one of the choices; name the closest of them if one is."""
    if value not in choices:
        hint = did_you_mean(str(value), choices)
        raise ValueError(f"{setting} must be one of {', '.join(choices)}, got {value!r}{hint}")


def __getattr__(name):
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
