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
import sys

from runs.tracking import saved_id, wandb_row, whole_lines


def upload(folder, project, mode):
    """Send the steps of a run's folder that wandb does not have yet; return their number."""
    import wandb

    with open(os.path.join(folder, "config.json")) as f:
        settings = json.load(f)
    rows = {}  # step -> row; of a step that was taken twice, the later line counts
    for name, row_of in (("metrics.jsonl", wandb_row), ("samples.jsonl", lambda line: {"sample": line["text"]})):
        for line in map(json.loads, whole_lines(os.path.join(folder, name))):
            rows.setdefault(line["step"], {}).update(row_of(line))
    name = settings["wandb_run_name"] or os.path.basename(os.path.normpath(folder))
    run = wandb.init(
        project=project or settings["wandb_project"], name=name, id=run_id(folder, settings), resume="allow", mode=mode,
        config=settings, dir=folder, settings=wandb.Settings(console="off", silent=True),
    )  # fmt: skip
    run.define_metric("iter")
    run.define_metric("*", step_metric="iter")
    known = run.summary.get("iter", -1)
    sent = 0
    for step in sorted(rows):
        if step > known:
            run.log({"iter": step, **rows[step]})
            sent += 1
    run.finish()
    return sent


def run_id(folder, settings):
    """Return the run's id in wandb: from its file wandb_id, its newest checkpoint or wandb's own folder in it.

    A run that wandb does not know gets one that is made from its seed and its folder's path.
    """
    if known := saved_id(folder):
        return known
    for path in sorted(glob.glob(os.path.join(folder, "ckpt", "step_*", "progress.json")), reverse=True):
        try:
            with open(path) as f:
                if known := json.load(f).get("wandb_id"):
                    return known
        except (OSError, ValueError):  # damaged
            pass
    # run-DATE_TIME-ID of an online run, offline-run-DATE_TIME-ID
    starts = [re.search(r"run-(\d+_\d+)-(\w+)$", path) for path in glob.glob(os.path.join(folder, "wandb", "*run-*"))]
    if known := max((found.groups() for found in starts if found), default=None):
        return known[1]
    return hashlib.sha256(json.dumps([settings["seed"], os.path.abspath(folder)]).encode()).hexdigest()[:8]


def main(argv=None):
    parser = argparse.ArgumentParser(prog="wandb_upload", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="run folders, such as out/softmax")
    parser.add_argument("--project", help="default: the run's wandb_project")
    parser.add_argument("--mode", choices=("online", "offline"), default="online")
    args = parser.parse_args(argv)
    for folder in args.runs:
        if not os.path.exists(os.path.join(folder, "config.json")):
            print(f"wandb_upload: {folder} is not a run's folder: it has no config.json", file=sys.stderr)
            sys.exit(2)
        print(f"{folder}: {upload(folder, args.project, args.mode)} steps")


if __name__ == "__main__":
    main()
