"""Compare two versions of this repository, which must compute the same bits.

    python tests/compare_versions.py OLD_TREE NEW_TREE                  # every case: four minutes on two idle cores
    python tests/compare_versions.py OLD_TREE NEW_TREE --only softmax   # one case; --only may be repeated

The two trees run beside each other with this interpreter, on the CPU. A case is one tiny training, or several, and a
sample from the last one. Modules may have other names in the two trees, so this script uses command lines and files
alone. It compares shards, losses, the weights of the last checkpoint, the state after a prompt, and greedy text. Each
case prints a line, and a program that fails also prints its messages on stderr. The exit status is 1 if anything
differs or fails.
"""

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import deserialize

MODEL = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=64 --batch_size=4 --tokens_per_step=256 --learning_rate=1e-2"
RUN = "--max_iters=5 --log_interval=1 --eval_interval=3 --eval_tokens=512 --sample_tokens=0 --wandb=disabled"
CASES = {  # the settings of each training; they replace those above
    "softmax": ["--attention=softmax"],
    "gpt2": [
        "--positions=learned --bias=1 --activation=gelu_tanh --embedding_norm=0 --schedule=cosine --weight_decay=0.1"
    ],
    "even_power": ["--attention=even_power --p=4 --n_kv_head=1"],
    "sympow": ["--attention=sympow --p=2 --form=chunked --chunk_size=16"],
    "sympow_gating_p2": ["--attention=sympow_gating --p=2"],
    "sympow_gating_p4": ["--attention=sympow_gating --p=4 --form=chunked --chunk_size=16"],
    "conformal_sympow": ["--attention=conformal_sympow --p=2"],
    "heinsen": ["--attention=heinsen"],
    "heinsen_glu": ["--attention=heinsen --values=signed --residual=glu"],
    "adaptive_power": ["--attention=adaptive_power"],
    "adaptive_power_mixture": ["--attention=adaptive_power --adaptive=mixture"],
    "hybrid": ["--attention=sympow_gating,softmax"],
    "pack": ["--attention=conformal_sympow --gate=none --pack=1"],
    "dropout": ["--attention=sympow_gating --gate=fixed --dropout=0.2"],
    "stages": ["--attention=sympow_gating --then=128@0.5"],
    "accumulation": ["--attention=sympow --batch_size=1 --gradient_accumulation_steps=4 --val_datasets=../functions"],
    "mixture": ["--attention=sympow --dataset=../lines:0.7,../functions:0.3"],
    "muon": ["--attention=sympow_gating --optimizer=muon --schedule=wsd --decay_share=0.5 --warmup_iters=2"],
    "activation_checkpointing": ["--attention=conformal_sympow --activation_checkpointing=1 --dropout=0.1"],
    "bfloat16": ["--attention=sympow_gating --dtype=bfloat16"],
    "resume": ["--attention=sympow_gating --max_iters=3", "--attention=sympow_gating --max_iters=6"],
    "init_from": ["--out_dir=source", "--init_from=source --attention=conformal_sympow"],
    "distill": ["--out_dir=teacher", "--distill_from=teacher --attention=sympow"],
    "two_ranks": ["--attention=sympow_gating --batch_size=2"],
    "shard": [
        "--attention=sympow_gating --batch_size=2 --shard=1 --max_iters=3",
        "--attention=sympow_gating --batch_size=2 --shard=1 --max_iters=5",
    ],
    "context_parallel": ["--attention=sympow_gating --context_parallel=2"],
}
LAUNCHED = ("two_ranks", "shard", "context_parallel")  # the cases that torchrun starts, on two ranks
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
SAMPLE = "--prompt=FILE:../../texts/lines/7.txt --save_state=state --max_new_tokens=40 --temperature=0"
COMMON = ("--device=cpu", "--out_dir=run")
TEXTS = {"lines": "line {0}{1}: {0} circles\n", "functions": "def f{0}(x):\n    return x % {1}\n"}


def main():
    """Compare the trees of the command line and exit with status 1 unless every case is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, metavar="TREE", type=Path)
    parser.add_argument("--only", action="append", choices=CASES)
    args = parser.parse_args()
    trees = [tree.resolve() for tree in args.trees]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        write_texts(folder / "texts")
        folders = [folder / "old", folder / "new"]
        equal = [compare(prepare, trees, folders, "data")]
        equal += [compare(train, trees, folders, name) for name in args.only or CASES]
    sys.exit(not all(equal))


def write_texts(folder):
    """Write the sources of two datasets, 40 files each."""
    for name, line in TEXTS.items():
        (folder / name).mkdir(parents=True)
        for i in range(40):
            text = "".join(line.format(i, n) for n in range(1, 11))
            (folder / name / f"{i}.txt").write_text(text)


def compare(collect, trees, folders, name):
    """Collect a case's results from both trees, print its line, and return True if they are equal."""
    start = time.perf_counter()
    try:
        with ThreadPoolExecutor(2) as pool:
            old, new = pool.map(collect, trees, folders, (name, name))
        labels = [label for label in old | new if old.get(label) != new.get(label)]
        verdict = f"equal in {len(old)} values"
        if labels:
            verdict = f"DIFFERS in {labels[0]}: {old.get(labels[0])} became {new.get(labels[0])}"
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        verdict = f"FAILED: {shlex.join(error.cmd)}"
    print(f"{name:25} {verdict}, {time.perf_counter() - start:.0f} s", flush=True)
    return verdict.startswith("equal")


def prepare(tree, folder, name):
    """Prepare both datasets in a new folder with the scripts of a tree; return {name: sha256} of their shards."""
    folder.mkdir()
    texts = folder.parent / "texts"
    options = ("--document_length=512", "--val_fraction=0.1")
    run(folder, tree / "data/text/prepare.py", texts / "lines", "--out=lines", *options)
    source = (f"--root={texts}/functions", "--suffix=.txt")
    run(folder, tree / "data/pystdlib/prepare.py", *source, "--out=functions", *options)
    return {str(path.relative_to(folder)): sha256(path.read_bytes()) for path in sorted(folder.glob("*/*.bin"))}


def train(tree, folder, name):
    """Train and sample as a case says; return {label: value} of losses, tensors and the text."""
    folder = folder / name
    folder.mkdir()
    launcher = TORCHRUN if name in LAUNCHED else ()
    for settings in CASES[name]:
        run(folder, *launcher, tree / "train.py", *COMMON, "--dataset=../lines", *f"{MODEL} {RUN} {settings}".split())
    text = run(folder, tree / "sample.py", *COMMON, *SAMPLE.split())
    lines = map(json.loads, open(folder / "run/metrics.jsonl"))
    results = {f"{key} of step {line['step']}": line[key] for line in lines for key in line if "_loss" in key}
    checkpoint = max(folder.glob("run/ckpt/step_*"))
    for path in (*checkpoint.glob("model*.safetensors"), folder / "state"):
        for tensor_name, tensor in deserialize(path.read_bytes()):
            results[f"{path.name} {tensor_name}"] = f"{tensor['dtype']} {tensor['shape']} {sha256(tensor['data'])}"
    return results | {"text": text}


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def run(folder, *command):
    """Run Python in a folder on one thread and return its output. Raises CalledProcessError if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True, text=True).stdout


if __name__ == "__main__":
    main()
