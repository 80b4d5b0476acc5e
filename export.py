"""Export a trained model to a folder that transformers loads.

    python export.py --to=hf/NAME                                                    # the newest run
    python export.py out/NAME --to=hf/NAME
    AutoModelForCausalLM.from_pretrained("hf/NAME", trust_remote_code=True)          # trains, evaluates and generates

The folder has config.json, the weights (model.safetensors, in several files above 5 GB), the tokenizer,
modeling_sympow.py and README.md, a model card. Loading it takes transformers (tested with 5.24) and this package:
`pip install .` in a clone. On a GPU it runs on the kernels. The cache of `generate` is the model's state, which does
not grow for the sympow attentions.
"""

import errno
import math
import os
import re
import secrets
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # which python -I leaves out

from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError

from sympow import __version__
from sympow.code import record_code
from sympow.data.files import write_json
from sympow.data.huggingface import tokenizers_json
from sympow.runs import checkpoint
from sympow.runs.load import load_run, longest_text, newest_run, no_checkpoint, transformers_type
from sympow.runs.program import check_output, refuse, run_program
from sympow.runs.settings import read_settings
from sympow.runs.starts import last_code

MODELING = Path(__file__).resolve().parent / "sympow" / "modeling.py"
# names of files that export.py writes, or evaluate.py beside them
OURS = re.compile(
    r"((generation_|tokenizer_)?config|tokenizer|tasks|model.*)\.(json|safetensors)|modeling_sympow\.py|README\.md"
)
SHARD = "5GB"  # the largest file of weights
TRAINING = (  # settings that the model card names
    "optimizer learning_rate schedule weight_decay beta1 beta2 grad_clip warmup_iters block_size then tokens_per_step"
    " dtype seed pack ranks"
).split()


@dataclass
class ExportConfig:
    out_dir: str = ""  # a run's folder, or one of its checkpoints, also without --out_dir=; default: the newest in out/
    to: str = ""  # the folder to write, new or of an earlier export, with nothing else in it


def main():
    settings, _ = read_settings((ExportConfig,), sys.argv[1:], usage=__doc__, folders=True)
    cfg = ExportConfig(**settings)
    target = Path(cfg.to)
    run = cfg.out_dir or newest_run()
    if transformers_type(run):
        refuse(no_checkpoint(run))
    try:
        names = os.listdir(target) if target.is_dir() else []
        is_ours = "modeling_sympow.py" in names and all(map(OURS.fullmatch, names))
        if not cfg.to or target.is_file() or (names and not is_ours):  # for the files in it are removed
            refuse(f"--to must be a new folder, or one that export.py wrote, with nothing else in it, got {cfg.to!r}")
        check_output(f"{target}.tmp")  # nothing is written there, but beside the target
    except OSError as error:
        refuse(f"--to={target} cannot be written: {error}")
    export(run, target)
    print(f"wrote {target} from {run}")


def export(run, target):
    """Write the newest checkpoint of a run to the folder `target`, for transformers.

    run: a run's folder, or one of its checkpoints. The folder is written under a temporary name and takes the place of
    an earlier export, even if another process puts its own there meanwhile.
    """
    folder, model, tokenizer, *_ = load_run(run, "cpu", "float32")
    target = Path(target).resolve()
    temporary = target.with_name(f".{secrets.token_hex(4)}.tmp")  # short, so that it fits wherever the target's does
    temporary.mkdir(parents=True)
    try:
        weights = {f"gpt.{name}": x for name, x in model.state_dict().items()}
        save_torch_state_dict(weights, temporary, max_shard_size=SHARD)
        for path in temporary.iterdir():
            path.chmod(0o644)
        shutil.copy(MODELING, temporary / "modeling_sympow.py")
        write_texts(temporary, checkpoint.run_of(run), folder, model.config, tokenizer)
        put_in_place(temporary, target)
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(folder, target):
    """Rename a folder to the path `target`; remove the folder that is there, or that another process puts there."""
    replaced = folder.with_suffix(".old")
    while True:
        with suppress(FileNotFoundError):
            os.rename(target, replaced)
            shutil.rmtree(replaced)
        try:
            return os.rename(folder, target)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise


def write_texts(target, run, folder, config, tokenizer):
    """Write the configurations, the tokenizer and the model card of a run and its checkpoint `folder` into `target`."""
    settings = checkpoint.settings(run)
    text, end_of_text = tokenizers_json(tokenizer)
    ids = {"bos_token_id": tokenizer.eot, "eos_token_id": tokenizer.eot}
    model_settings = {
        **ids,
        "architectures": ["SympowForCausalLM"],
        "model_type": "sympow",
        "auto_map": {
            "AutoConfig": "modeling_sympow.SympowConfig",
            "AutoModelForCausalLM": "modeling_sympow.SympowForCausalLM",
        },
        "vocab_size": config.vocab_size,
        "torch_dtype": "float32",
        "model": {**settings["model"], "dropout": config.dropout},
        "code": last_code(folder) or record_code(),
    }
    if limit := longest_text(run):
        model_settings["max_position_embeddings"] = limit
    tokenizer_settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "pad_token": end_of_text,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    write_json(target / "config.json", model_settings)
    write_json(target / "generation_config.json", {**ids, "pad_token_id": tokenizer.eot})
    write_json(target / "tokenizer_config.json", tokenizer_settings)
    (target / "tokenizer.json").write_text(text)
    (target / "README.md").write_text(model_card(run, folder, settings, tokenizer))


def model_card(run, folder, settings, tokenizer):
    """Return the text of README.md: the model, its data, its training and its validation loss."""
    model = settings["model"]
    progress = checkpoint.read_progress(folder)
    training = ", ".join(f"{name}={settings[name]}" for name in TRAINING if settings.get(name, "") != "")
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"tags: [power-attention, {model['attention'].split(',')[0]}]",
        "---",
        f"# {Path(run).resolve().name}",
        "",
        f"A GPT-2-like language model with attention {model['attention']}, p={model['p']}: {model['n_layer']} layers",
        f"of {model['n_head']} heads, width {model['n_embd']}, vocabulary {model['vocab_size']:,} ({tokenizer.kind}).",
        f"It needs the package sympow {__version__}: `pip install .` in a clone of its repository.",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "model = AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=True)",
        "tokenizer = AutoTokenizer.from_pretrained(PATH, trust_remote_code=True)",
        'ids = tokenizer("def ", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**ids, max_new_tokens=100)[0]))",
        "```",
        "",
        "## Training",
        "",
        f"Data: {settings['dataset']} (fingerprint {settings['data']}), {Path(folder).name}. {training}.",
    ]
    if math.isfinite(progress.best):  # else there was no evaluation yet
        best = f"{progress.best:.4f} nats a token, after step {progress.best_step:,}"
        lines.append(f"Lowest validation loss so far: {best}.")
    if tokenizer.json_escaped:
        lines += ["", "The training text was escaped with `json.dumps(text)[1:-1]`: escape prompts, unescape outputs."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_program(main)
