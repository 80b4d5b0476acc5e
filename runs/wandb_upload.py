"""Upload a run to wandb from its folder: metrics.jsonl and samples.jsonl as one run, however often it was stopped.

    python -m runs.wandb_upload out/sympow_p4                    # WANDB_API_KEY or `wandb login` first
    python -m runs.wandb_upload out/* --project=sympow --mode=offline

A job without a network trains with --wandb=disabled or offline; this uploads it afterwards. Uploading again after the
run has gone on adds the new steps to the same wandb run. A run that wandb already knows, online or offline, keeps its
id (so do not `wandb sync` its offline parts as well).
"""

import argparse
import glob
import hashlib
import json
import os
import re

from sympow.runs import checkpoint
from sympow.runs.processes import leave_at_once
from sympow.runs.program import run_program
from sympow.runs.settings import refuse
from sympow.runs.metrics import whole_lines
from sympow.runs.wandb_run import (
    NO_KEY, NoKey, choose_mode, in_short, init, known_steps, past_rows, run_options, saved_id, send_row,
)  # fmt: skip


def upload(wandb, folder, project, mode):
    """Send the rows of a run's folder that wandb does not have yet; return the number of their steps."""
    settings, rows = read_run(folder)
    if project:
        settings["wandb_project"] = project
    options = run_options(folder, settings, run_id(folder, settings), parameter_count(settings))
    run = init(wandb, mode, options)
    known = known_steps(run)
    sent = {row["iter"] for row in rows if send_row(wandb, run, row, known)}
    run.finish()
    return len(sent)


def read_run(folder):
    """Return the contents of a run's config.json and its rows for wandb; refuse a folder that is no run."""
    if not os.path.isfile(os.path.join(folder, "config.json")):
        refuse(f"{folder} is not a run's folder: it has no config.json")
    try:
        settings = checkpoint.settings(folder)
        settings["wandb_project"], settings["wandb_run_name"], settings["seed"]
        lines, samples = (
            [json.loads(line) for line in whole_lines(os.path.join(folder, name))]
            for name in ("metrics.jsonl", "samples.jsonl")
        )
    except (OSError, ValueError, LookupError, RecursionError) as error:
        refuse(f"{folder} cannot be read, its config.json or metrics.jsonl is damaged: {in_short(error)}")
    if not lines:
        refuse(f"{folder} has nothing to upload: no line of a metrics.jsonl")
    return settings, past_rows(lines, [[x["step"], x["text"]] for x in samples if isinstance(x.get("text"), str)])


def parameter_count(settings):
    """Return the number of parameters of the model with these settings, or None if it cannot be made any more."""
    import torch  # here, because it takes seconds

    from sympow.model import GPT, GPTConfig

    try:
        with torch.device("meta"):
            return GPT(GPTConfig(**settings["model"])).parameter_count()
    except (TypeError, ValueError):  # settings of another version
        return None


def run_id(folder, settings):
    """Return the run's id in wandb: from its file wandb_id, its newest checkpoint or wandb's own folder in it.

    A run that wandb does not know gets one that is made from its seed and its folder's path.
    """
    if known := saved_id(folder):
        return known
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "ckpt", "step_*", "progress.json")), reverse=True):
        try:
            with open(path) as f:
                if known := json.load(f).get("wandb_id"):
                    return known
        except (OSError, ValueError, AttributeError, RecursionError):  # damaged
            pass
    # run-DATE_TIME-ID of an online run, offline-run-DATE_TIME-ID
    names = glob.glob(os.path.join(glob.escape(folder), "wandb", "*run-*"))
    starts = [re.search(r"run-(\d+_\d+)-(\w+)$", path) for path in names]
    if known := max((found.groups() for found in starts if found), default=None):
        return known[1]
    return hashlib.sha256(json.dumps([settings["seed"], os.path.abspath(folder)]).encode()).hexdigest()[:8]


def main(argv=None):
    """Upload the runs that the command line names; exit with status 2 before any of them if one cannot be uploaded."""
    parser = argparse.ArgumentParser(prog="wandb_upload", description=__doc__.splitlines()[0])
    parser.error = refuse  # one line, without the usage
    parser.add_argument("runs", nargs="*", help="run folders, such as out/softmax")
    parser.add_argument("--project", help="default: the run's wandb_project")
    parser.add_argument("--mode", choices=("online", "offline"), default="online")
    args = parser.parse_args(argv)
    if not args.runs:
        refuse("name at least one run's folder, such as out/softmax")
    for folder in args.runs:
        read_run(folder)
    try:
        import wandb
    except Exception as error:  # it is missing, or does not fit another package
        refuse(f"wandb cannot be imported ({in_short(error)}): pip install --upgrade wandb")
    try:
        choose_mode(wandb, args.mode)
    except NoKey:
        refuse(f"wandb cannot be used: {NO_KEY}; or --mode=offline")
    except Exception as error:
        refuse(f"wandb cannot be used: {in_short(error)}")
    for folder in args.runs:
        try:
            print(f"{folder}: {upload(wandb, folder, args.project, args.mode)} steps")
        except KeyboardInterrupt:
            leave_at_once(f"{folder} is not wholly uploaded: the same command sends the rest")
        except Exception as error:
            leave_at_once(f"{folder} is not wholly uploaded ({in_short(error)}): the same command sends the rest")


if __name__ == "__main__":
    run_program(main)
