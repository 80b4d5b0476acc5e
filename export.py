"""Export a trained model to a folder that transformers loads.

    python export.py out/NAME --to=hf/NAME
    AutoModelForCausalLM.from_pretrained("hf/NAME", trust_remote_code=True)          # trains, evaluates and generates

The folder has config.json, the weights (model.safetensors, in several files above 5 GB), the tokenizer,
modeling_sympow.py, which holds all that the model needs, and README.md, a model card. Loading it takes torch and
transformers (tested with 5.23), no clone and no installed package; on a GPU it runs on the kernels. The cache of
`generate` is the model's state, which for the sympow attentions does not grow.
"""

import json
import os
import re
import secrets
import shutil
from pathlib import Path
from types import SimpleNamespace

from data.huggingface import tokenizers_json
from runs import checkpoint
from runs.load import load_run, longest_text
from runs.program import Parser, run_program
from runs.settings import refuse
from runs.tracking import whole_lines

ROOT = Path(__file__).resolve().parent
SHARD = "5GB"  # the largest file of weights


def main():
    parser = Parser(prog="export.py", description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run's folder, or one of its checkpoints")
    parser.add_argument("--to", required=True, help="the folder to write, new or of an earlier export")
    args = parser.parse_args()
    target = Path(args.to)
    if (
        target.exists()
        and not (target / "modeling_sympow.py").is_file()
        and (target.is_file() or any(target.iterdir()))
    ):
        refuse(f"--to must be a new folder, or one that export.py wrote, got {target}")
    run, model, tokenizer, *_ = load_run(args.run, SimpleNamespace(device="cpu", dtype="float32"))
    from huggingface_hub import save_torch_state_dict

    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    try:
        weights = {f"gpt.{name}": x for name, x in model.state_dict().items()}
        save_torch_state_dict(weights, temporary, max_shard_size=SHARD)
        for path in temporary.iterdir():
            path.chmod(0o644)
        for name, text in texts(run, checkpoint.newest(args.run), model.config, tokenizer).items():
            (temporary / name).write_text(text)
        if target.exists():
            shutil.rmtree(target)
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"wrote {target}: {sum(f.stat().st_size for f in target.iterdir()) / 1e6:.1f} MB")


def texts(run, folder, config, tokenizer):
    """Return {name: contents} of the files beside the weights, for a run, its checkpoint, its model and tokenizer."""
    settings = checkpoint.settings(run, folder)
    model = {**settings["model"], "dropout": config.dropout}
    end = tokenizer.eot
    of_config = {
        "architectures": ["SympowForCausalLM"],
        "model_type": "sympow",
        "auto_map": {
            "AutoConfig": "modeling_sympow.SympowConfig",
            "AutoModelForCausalLM": "modeling_sympow.SympowForCausalLM",
        },
        "bos_token_id": end,
        "eos_token_id": end,
        "vocab_size": config.vocab_size,
        "torch_dtype": "float32",
        "model": model,
    }
    if limit := longest_text(run):
        of_config["max_position_embeddings"] = limit
    text, special = tokenizers_json(tokenizer)
    of_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special, "eos_token": special}
    of_tokenizer |= {"clean_up_tokenization_spaces": False, "padding_side": "left", "pad_token": special}
    show = lambda value: json.dumps(value, indent=2) + "\n"
    return {
        "config.json": show(of_config),
        "generation_config.json": show({"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}),
        "tokenizer.json": text,
        "tokenizer_config.json": show(of_tokenizer),
        "modeling_sympow.py": modeling_file(),
        "README.md": model_card(run, folder, settings, tokenizer),
    }


# ---- the model's code


UNPACK = '''
def _unpack():
    """Write SOURCES into a folder of the user's cache, unless they are there, and return the package made of them."""
    import hashlib, importlib.util, os, secrets, sys, tempfile  # noqa: E401

    name = "sympow_" + hashlib.sha256(repr(sorted(SOURCES.items())).encode()).hexdigest()[:12]
    if name in sys.modules:
        return name
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(cache, "sympow", "exported", name)
    if not os.path.isdir(folder):
        try:
            os.makedirs(os.path.dirname(folder), exist_ok=True)
        except OSError:  # no home that can be written
            folder = os.path.join(tempfile.mkdtemp(), name)
        temporary = f"{folder}.{secrets.token_hex(4)}"
        for path, text in SOURCES.items():
            os.makedirs(os.path.dirname(os.path.join(temporary, path)), exist_ok=True)
            with open(os.path.join(temporary, path), "w") as f:
                f.write(text)
        try:
            os.rename(temporary, folder)
        except OSError:  # another process was faster
            pass
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"))
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return name


_model = import_module(f"{_unpack()}.model")
GPT, GPTConfig = _model.GPT, _model.GPTConfig
'''


def modeling_file():
    """Return the contents of modeling_sympow.py: runs/transformers_model.py, with the sources that it needs in it."""
    text, sources = (ROOT / "runs" / "transformers_model.py").read_text(), {"__init__.py": ""}
    top = [Path(f"{name}.py") for name in ("model", "activation", "loss", "norm")]
    for path in [*top, *sources_of("attention"), *sources_of("kernels")]:
        source = (ROOT / path).read_text()
        if path.parent == Path("."):  # what is at top level here is in a package there
            source = re.sub(r"^from (activation|attention|loss|norm)\b", r"from .\1", source, flags=re.M)
        sources[str(path)] = source
    marker = "from model import GPT, GPTConfig  # export.py puts the sources here\n"
    head, found, tail = text.partition(marker)
    assert found, "runs/transformers_model.py imports the model in another way"
    lines = [f"    {path!r}: (\n{quoted(source)}    ),\n" for path, source in sources.items()]
    packed = "SOURCES = {\n" + "".join(lines) + "}\n"
    head = head.replace("import torch\n", "from importlib import import_module\n\nimport torch\n", 1)
    return head + "\n# The files of the model's repository, by their paths.\n" + packed + UNPACK + tail


def sources_of(folder):
    """Return the paths of a package's files, from the repository's root on."""
    files = sorted((ROOT / folder).rglob("*"))
    return [f.relative_to(ROOT) for f in files if f.suffix in (".py", ".json")]


def quoted(source):
    """Return a text as Python string literals, a line each."""
    return "".join(f"        {line!r}\n" for line in source.splitlines(keepends=True)) or '        ""\n'


# ---- the model card


def model_card(run, folder, settings, tokenizer):
    """Return README.md: what the model is, on what data and how it was trained, and its losses."""
    model, lines = settings["model"], map(json.loads, whole_lines(os.path.join(run, "metrics.jsonl")))
    losses = [*{line["step"]: line for line in lines if "val_loss" in line}.values()]
    shown = sorted({*range(0, len(losses), max(1, len(losses) // 10)), *range(len(losses))[-1:]})
    row = lambda x: f"| {x['step']:,} | {x.get('tokens', 0):,} | {x['val_loss']:.4f} |"
    table = [row(losses[i]) for i in shown]
    trained = "optimizer learning_rate schedule weight_decay beta1 beta2 grad_clip warmup_iters block_size then"
    trained += " tokens_per_step dtype seed pack ranks"
    how = ", ".join(f"{name}={settings[name]}" for name in trained.split() if settings.get(name, "") != "")
    escaped = "\nIts training text was escaped with `json.dumps(text)[1:-1]`: escape prompts, unescape outputs.\n"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [power-attention, {model["attention"].split(",")[0]}]
---
# {Path(run).resolve().name}

A GPT-2-like language model with attention {model["attention"]}, p={model["p"]}: {model["n_layer"]} layers of
{model["n_head"]} heads, width {model["n_embd"]}, vocabulary {model["vocab_size"]:,} ({tokenizer.kind}).

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(PATH, trust_remote_code=True)
ids = tokenizer("def ", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=100)[0]))
```
{escaped if tokenizer.json_escaped else ""}
## Training

Data: {settings["dataset"]} (fingerprint {settings.get("data", "unknown")}), {Path(folder).name}. {how}.

| step | tokens | validation loss, nats a token |
| ---: | ---: | ---: |
{chr(10).join(table)}
"""


if __name__ == "__main__":
    run_program(main)
