"""Score a model on tasks of lm-evaluation-harness: accuracy, perplexity, answers that it writes.

    tasks = load_tasks(["lambada_openai", "my_task.yaml"])
    report = run_tasks(tasks, HarnessModel(model, tokenizer))            # {"lambada_openai": {"acc": 0.31, ...}, ...}

Importing this file imports the package lm_eval, which is optional.
"""

import difflib
import importlib.machinery
import importlib.util
import itertools
import logging
import os
import random
import sys

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from sympow.data import DataError
from sympow.data.progress import bar
from sympow.generation.generate import Sampler
from sympow.runs.processes import warn
from sympow.runs.scores import score_pieces

BOOTSTRAP = 1000  # samples behind the standard error of a perplexity; lm_eval's own 100,000 take minutes
MAX_NEW_TOKENS = 256  # where a task does not say how long an answer may be; lm_eval's own number
PIECE = {"cuda": 32768, "cpu": 1024}  # tokens of prompts, padding too, that are read in one call


class HarnessModel(TemplateLM):
    """Answers what lm_eval asks of a model, with a GPT and its tokenizer.

    As lm_eval's own class for GPT-2 does, it puts no end of text before a prompt, only before a text that has none.
    """

    def __init__(self, model, tokenizer, batch_size=8, max_length=None):
        """Take a GPT and a data.tokenizer.Tokenizer.

        max_length: the most tokens that the model is to read of a text; None: any number. Of a longer prompt the
        beginning is cut off. A longer text without a prompt is scored in windows, each with one token before it.
        """
        super().__init__()
        self.model, self.tokenizer, self.batch_size, self.max_length = model, tokenizer, batch_size, max_length
        self._device = model.transformer.wte.weight.device

    @property
    def eot_token_id(self):
        return self.tokenizer.eot

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.tokenizer.encode(string)

    def loglikelihood(self, requests, disable_tqdm=True):
        """Return (log-likelihood in nats, True if greedy sampling would write it) of each continuation of a context."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests, disable_tqdm=True):
        """Return the log-likelihood of each text in nats, from its first token on."""
        windows, of = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            length = self.max_length or max(1, len(ids))
            for window in get_rolling_token_windows(ids, self.prefix_token_id, length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                of.append(i)
        sums = [0.0] * len(requests)
        for i, (log_likelihood, _) in zip(of, self._loglikelihood_tokens(windows)):
            sums[i] += log_likelihood
        return sums

    def _loglikelihood_tokens(self, requests, disable_tqdm=True):
        texts = []  # (ids that are read, how many of the last ones are scored)
        for _, context, continuation in requests:
            if self.max_length and len(continuation) > self.max_length:
                raise DataError(
                    f"a task scores a text of {len(continuation):,} tokens at once, more than max_length "
                    f"{self.max_length:,}: a larger --max_length would do"
                )
            ids = [*(context or [self.prefix_token_id]), *continuation]
            texts.append((ids[-self.max_length - 1 :] if self.max_length else ids, len(continuation)))
        found = [None] * len(texts)
        for rows in self._batches([len(ids) for ids, _ in texts], "scored"):
            ids = torch.full((len(rows), max(len(texts[i][0]) for i in rows)), self.eot_token_id)
            targets = torch.full_like(ids, -1)
            for row, i in enumerate(rows):
                text, scored = texts[i]
                ids[row, : len(text)] = torch.tensor(text)  # padding behind a causal model's text changes nothing
                targets[row, len(text) - scored : len(text)] = ids[row, len(text) - scored : len(text)]
            pieces = score_pieces(self.model, ids[:, :-1].to(self._device), targets[:, 1:].to(self._device))
            losses, greedy = (torch.cat(x, 1) for x in zip(*pieces))
            for i, loss, all_greedy in zip(rows, losses.double().sum(1).tolist(), greedy.all(1).tolist()):
                found[i] = -loss, all_greedy
        return found

    def generate_until(self, requests, disable_tqdm=True):
        """Return the text that the model writes after each context, up to the first of the request's stop words."""
        found, number = [""] * len(requests), range(len(requests))
        of = lambda i: repr(sorted(requests[i].args[1].items()))
        for _, same in itertools.groupby(sorted(number, key=of), key=of):
            same = list(same)
            options = normalize_gen_kwargs(requests[same[0]].args[1], MAX_NEW_TOKENS)
            most = self.max_length and self.max_length - options["max_gen_toks"]
            if most is not None and most < 1:
                raise DataError(
                    f"a task asks for answers of {options['max_gen_toks']:,} tokens, but max_length is "
                    f"{self.max_length:,}: a larger --max_length would do"
                )
            prompts = [self.tok_encode(requests[i].args[0]) or [self.prefix_token_id] for i in same]
            prompts = [ids[-most:] if most else ids for ids in prompts]
            for rows in self._batches([len(ids) for ids in prompts], "answered"):
                for row, text in zip(rows, self._write([prompts[row] for row in rows], options)):
                    found[same[row]] = text
        return found

    def _write(self, prompts, options):
        """Return the text after each of these prompts (lists of ids), read as one batch that is padded on the left."""
        stops, device, T = [x for x in options["until"] if x], self._device, max(map(len, prompts))
        ids = torch.full((len(prompts), T), self.eot_token_id)
        starts = torch.zeros(ids.shape, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, T - len(prompt) :] = torch.tensor(prompt)
            starts[row, T - len(prompt)] = len(prompt) < T
        ids, starts = ids.to(device), starts.to(device) if starts.any() else None
        state, piece = self.model.empty_state(len(prompts)), max(1, PIECE.get(device.type, 1024) // len(prompts))
        for i in range(0, T, piece):
            at = slice(i, i + piece)
            x, state = self.model.hidden(ids[:, at], state, None if starts is None else starts[:, at])
        temperature = options.get("temperature", float(options["do_sample"]))
        sampling = dict(temperature=temperature, top_k=options.get("top_k", 0), top_p=options.get("top_p", 1.0))
        sampler = Sampler(device, len(prompts), **sampling)
        new, texts, done = ids[:, 0].clone(), [""] * len(prompts), [False] * len(prompts)
        decoders = [self.tokenizer.stream() for _ in prompts]
        none = None if starts is None else torch.zeros_like(starts[:, :1])  # no text begins behind the prompts
        for count in range(options["max_gen_toks"]):
            if count:
                x, state = self.model.hidden(new.unsqueeze(1), state, none)
            sampler.prepare()
            sampler(self.model.logits(x[:, -1]), new)
            for row, token in enumerate(new.tolist()):
                if not done[row] and token != self.eot_token_id:
                    texts[row] += decoders[row].feed(token)
                done[row] = done[row] or token == self.eot_token_id or any(stop in texts[row] for stop in stops)
            if all(done):
                break
        texts = [text + decoder.flush() for text, decoder in zip(texts, decoders)]
        return [postprocess_generated_text(text, stops, None) for text in texts]

    def _batches(self, lengths, what):
        """Yield lists of the indices of lengths, batch_size at a time, the longest first: memory runs out at once."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        with bar(total=len(order), desc=what, unit="text", leave=False) as shown:
            for i in range(0, len(order), self.batch_size):
                yield order[i : i + self.batch_size]
                shown.update(len(order[i : i + self.batch_size]))


def load_tasks(names, include_path="", num_fewshot=-1):
    """Return lm_eval's tasks of these names, groups, or paths of YAML files, with their data, which may be downloaded.

    include_path: a folder with more tasks. num_fewshot: examples before each question; -1: the task's own number.
    Raises DataError of one line for a task that is not there or whose data cannot be had.
    """
    if not names:
        raise DataError("--tasks names no task")
    _offer_package_evaluate()
    random.seed(DEFAULT_RANDOM_SEED), np.random.seed(DEFAULT_OTHER_SEED), torch.manual_seed(DEFAULT_OTHER_SEED)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it says of each metric that its defaults are used
    named = [name for name in names if not name.endswith((".yaml", ".yml"))]
    for path in [*(set(names) - set(named)), *([include_path] if include_path else [])]:
        if not os.path.exists(path):
            raise DataError(f"there is no {path}")
    manager = TaskManager(include_path=include_path or None, include_defaults=False)
    if not {*named} <= {*manager.all_tasks}:  # the index of lm_eval's own tasks takes ten seconds
        manager = TaskManager(include_path=include_path or None)
    loaded = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        if name in named and name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=1)
            raise DataError(f"lm_eval has no task {name}" + (f": did you mean {near[0]}?" if near else ""))
        try:
            for kind, found in manager.load([name]).items():
                loaded[kind] |= found
        except Exception as error:  # whatever a task's own code, `datasets` and the network raise
            why = " ".join(str(error.args[0] if error.args else type(error).__name__).split())[:300]
            raise DataError(f"the task {name} cannot be loaded ({type(error).__name__}: {why})") from error
    for name, task in loaded["tasks"].items():
        fixed = task.get_config("num_fewshot")
        if num_fewshot >= 0 and fixed == 0 != num_fewshot:
            warn(f"the task {name} is defined with num_fewshot=0, which stays")
        elif num_fewshot >= 0 or fixed is None:
            task.set_config(key="num_fewshot", value=max(0, num_fewshot))
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return loaded


def _offer_package_evaluate():
    """Let the code of a task that says `import evaluate` get Hugging Face's package, not evaluate.py of the clone."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    elsewhere = [path for path in sys.path if os.path.realpath(path) != os.path.realpath(root)]
    spec = importlib.machinery.PathFinder.find_spec("evaluate", elsewhere)
    if spec and spec.loader and "evaluate" not in sys.modules:
        spec.loader = importlib.util.LazyLoader(spec.loader)  # it takes seconds, and few tasks use it
        sys.modules["evaluate"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["evaluate"])


def run_tasks(tasks, model, limit=0.0):
    """Return {task or group: {metric: value}} for load_tasks' result and a HarnessModel, with standard errors.

    A metric of another filter than "none" is called "metric,filter". Each also has "samples", "num_fewshot" and
    "version". limit: only so many documents of each task, or this share of them if it is below 1; 0: all.
    """
    os.environ["DISABLE_MULTIPROC"] = "1"  # lm_eval would fork this process, which has threads, for standard errors
    result = evaluate(model, tasks, limit=limit or None, bootstrap_iters=BOOTSTRAP, log_samples=False)
    report = {}
    for name, values in result["results"].items():
        numbers = {key: value for key, value in values.items() if isinstance(value, (int, float)) and "," in key}
        report[name] = {key.removesuffix(",none"): float(value) for key, value in numbers.items()}
        samples = result["n-samples"].get(name, {}).get("effective")
        report[name] |= dict(samples=samples, num_fewshot=result["n-shot"].get(name))
        report[name]["version"] = result["versions"].get(name)
    return report
