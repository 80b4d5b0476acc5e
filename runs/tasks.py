"""Score a model on tasks of lm-evaluation-harness, with lm_eval's own class for models of transformers.

    tasks = load_tasks(["lambada_openai", "my_task.yaml"], cfg.include_path, cfg.num_fewshot)
    model = load_model("out/NAME", cfg)
    report = run_tasks(tasks, model, cfg.limit)      # {"lambada_openai": {"acc": 0.31, ...}, ...}

Importing this file imports lm_eval and what it needs for transformers: pip install "lm_eval[hf]".
"""

import logging
import os
import sys
import traceback

import tokenizers
import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerFast

from sympow.modeling import SympowConfig, SympowForCausalLM
from ..data import DataError, describe_error
from ..data.huggingface import one_line, tokenizers_json
from .load import load_run, longest_text, transformers_type
from .settings import choose_device

BOOTSTRAP_SAMPLES = 1000  # behind the standard error of a perplexity; lm_eval's own 100,000 take minutes
UNLIMITED = 2**40  # tokens
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def load_tasks(names, include_path, num_fewshot):
    """Return lm_eval's tasks of these names, groups or paths of YAML files, with their data, which may be downloaded.

    include_path: a folder with more tasks, or "". num_fewshot: examples before each question; -1: the task's own
    number. Raises DataError for a task that does not exist or has no data.
    """
    if not names:
        raise DataError("--tasks names no task")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of each default of a metric
    # The code of a task that imports `evaluate` means Hugging Face's package, not evaluate.py of this repository.
    sys.path.sort(key=lambda path: os.path.realpath(path) == ROOT)  # moves this repository's folder to the end
    manager = TaskManager(include_path=include_path, include_defaults=False)
    if any(name not in manager.all_tasks and not name.endswith(".yaml") for name in names):
        manager = TaskManager(include_path=include_path)  # reads the index of lm_eval's own tasks: ten seconds
    try:
        tasks = manager.load(names)
    except Exception as error:  # from the code of a task, `datasets` or the network
        raise DataError(f"the tasks cannot be loaded ({describe_error(error)})") from error
    for task in tasks["tasks"].values():
        default = task.get_config("num_fewshot")
        if default is None or (num_fewshot >= 0 and default > 0):
            task.set_config(key="num_fewshot", value=max(0, num_fewshot))
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return tasks


def load_model(folder, cfg):
    """Return lm_eval's model for a run, an exported run, or a folder of transformers with a model that it knows.

    cfg: the settings device, dtype, batch_size and max_length of evaluate.py. Without a max_length, a run without
    softmax layers reads texts of any length. Raises DataError for a folder that cannot be loaded; code in it is not
    run.
    """
    device, dtype = choose_device(cfg.device, cfg.dtype)
    model, tokenizer, limit = folder, None, None
    with one_line(folder, "cannot be loaded (no code in it is run)"):
        if transformers_type(folder) in ("", "sympow"):
            model, tokenizer = load_own(folder, cfg)
            limit = longest_text(folder) or UNLIMITED
        return HFLM(
            model,
            tokenizer=tokenizer,
            trust_remote_code=False,
            device=str(device),
            dtype="float32",
            mixed_precision_dtype=None if dtype == torch.float32 else dtype,
            softmax_dtype=torch.float32,
            batch_size=cfg.batch_size,
            max_length=cfg.max_length or limit,
        )


def load_own(folder, cfg):
    """Return the model and the tokenizer of a run, or of an exported run, as transformers has them."""
    _, model, tokenizer, *_ = load_run(folder, cfg.device, cfg.dtype)
    with torch.device("meta"):
        wrapper = SympowForCausalLM(SympowConfig(vars(model.config), eos_token_id=tokenizer.eot))
    wrapper.gpt = model
    text, end = tokenizers_json(tokenizer)
    return wrapper, PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(text), eos_token=end)


def run_tasks(tasks, model, limit):
    """Return {task or group: {metric: value}} for the results of load_tasks and load_model, with standard errors.

    A metric of another filter than "none" is called "metric,filter". Each task also has "samples", "num_fewshot" and
    "version". limit: only so many documents of each task, or this share of them if it is below 1; 0: all. Seeds torch's
    random numbers. Raises DataError for texts that lm_eval cannot score with this model.
    """
    os.environ["DISABLE_MULTIPROC"] = "1"  # lm_eval would fork this process, which has threads, for standard errors
    torch.manual_seed(DEFAULT_OTHER_SEED)
    try:
        results = evaluate(model, tasks, limit=limit or None, bootstrap_iters=BOOTSTRAP_SAMPLES, log_samples=False)
    except AssertionError as error:
        traceback.clear_frames(error.__traceback__)  # closes lm_eval's progress bar
        words = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # most have no message
        raise DataError(f"lm_eval cannot score with max_length={model.max_length} ({words})") from error
    report = {}
    for name, metrics in results["results"].items():
        report[name] = {
            **{
                metric.removesuffix(",none"): x
                for metric, x in metrics.items()
                if "," in metric and isinstance(x, float)
            },
            "samples": results["n-samples"].get(name, {}).get("effective"),
            "num_fewshot": results["n-shot"].get(name),
            "version": results["versions"].get(name),
        }
    return report
