"""Measure how training speed grows with the number of GPUs, or work it out on paper for a cluster.

    python bench/scale.py                                       # DDP, FSDP and context parallel, 1 to 8 GPUs
    python bench/scale.py config/gpt2_xl.py --batch_size=4 --only fsdp
    python bench/scale.py --paper                               # 8 nodes of 8 GPUs, from formulas alone
    python bench/scale.py --paper --links=1 config/sympow_p4.py

Arguments that are not this program's own are settings of train.py, which it starts by torchrun on random tokens.

DDP and FSDP (--shard=True): --tokens tokens a GPU and step, at any number of GPUs. Context parallel
(--context_parallel=N): --context tokens a GPU of one sequence, so that N GPUs train at N times that context. The speed
is the median of the tok_per_sec that metrics.jsonl has after --warm_up steps; its share of linear is that of N times
the speed of one GPU in the same row. docs/cluster.md has the formulas of --paper.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sympow.attention.embedding import symmetric_power_dim  # noqa: E402
from sympow.data.files import write_json  # noqa: E402
from sympow.data.shards import Unit, write_dataset  # noqa: E402
from sympow.data.tokenizer import END_OF_TEXT, WORDS, Tokenizer  # noqa: E402
from sympow.model import GPT, GPTConfig  # noqa: E402
from sympow.runs.program import Parser, at_least_1, output_file, positive, run_program  # noqa: E402
from sympow.runs.settings import fields_of, read_settings  # noqa: E402
from sympow.train import TrainConfig  # noqa: E402

VOCABULARY = 50257  # GPT-2's: the embedding is the largest gradient
LOG_INTERVAL = 5  # steps over which train.py takes the mean speed
SETTINGS = (
    "--attention=sympow_gating --p=2 --eval_interval=1000000 --sample_tokens=0 --wandb=disabled "
    f"--always_save_checkpoint=False --log_interval={LOG_INTERVAL}"
).split()


def make_dataset(folder, document_length, vocab_size=VOCABULARY):
    """Write a dataset of random tokens, 4 training documents and 1 held out; return its path."""
    import tiktoken

    pieces = [bytes([i]) for i in range(256)] + [bytes(pair) for pair in product(range(256), repeat=2)]
    ranks = {piece: i for i, piece in enumerate(pieces[: vocab_size - 1])}
    encoding = tiktoken.Encoding(
        "random", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: vocab_size - 1}
    )
    random = np.random.default_rng(0)
    rows = lambda count: lambda: random.integers(0, vocab_size - 1, (count, document_length))
    units = [Unit("train", rows(4)), Unit("val", rows(1))]
    path = os.path.join(folder, "random")
    with redirect_stdout(io.StringIO()):
        write_dataset(path, units, Tokenizer("bpe", encoding), document_length, {}, "random", "bench/scale.py")
    return path


def settings_of(mode, gpus, tokens, args):
    """Return train.py's settings for a mode (ddp, fsdp or context) on `gpus` GPUs with so many tokens each."""
    if mode == "context":
        context = gpus * tokens
        return [f"--context_parallel={gpus}"] * (gpus > 1) + [
            f"--block_size={context}", "--batch_size=1", f"--tokens_per_step={context}",
        ]  # fmt: skip
    sequences = max(1, min(tokens, args.micro_tokens) // args.block_size)
    shape = [f"--block_size={args.block_size}", f"--batch_size={sequences}", f"--tokens_per_step={gpus * tokens}"]
    return shape + ["--shard=True"] * (mode == "fsdp" and gpus > 1)


def measure(mode, gpus, tokens, dataset, args):
    """Train for some steps; return (tokens a second, None) or (None, a line that says why it did not run)."""
    steps = args.warm_up + args.steps
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        argv = [*SETTINGS, *settings_of(mode, gpus, tokens, args), f"--max_iters={steps}", f"--eval_tokens={gpus}"]
        argv += [f"--dataset={dataset}", *args.settings, f"--out_dir={out}"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"] if gpus > 1 else []
        command = [sys.executable, *torchrun, str(ROOT / "train.py"), *argv]
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=args.limit)
        except subprocess.TimeoutExpired:
            return None, f"not done after {args.limit:g} s"
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it printed nothing"]
            return None, next((line for line in lines if line.startswith("train.py")), lines[-1])[:200]
        with open(os.path.join(out, "metrics.jsonl")) as f:
            lines = [line for line in map(json.loads, f) if "tok_per_sec" in line]
    return median(line["tok_per_sec"] for line in lines if line["step"] > args.warm_up), None


def bench(args):
    """Measure every mode on every number of GPUs and print a row for each; return True if none could run."""
    there = torch.cuda.device_count() if args.device == "cuda" else max(args.gpus)
    args.settings = [f"--device={args.device}", *args.settings]
    rows, modes = (
        [],
        [(mode, tokens) for mode in args.only for tokens in (args.context if mode == "context" else args.tokens)],
    )
    longest = max([args.block_size, *(n * tokens for mode, tokens in modes for n in args.gpus if mode == "context")])
    print(f"{'mode':<8} {'tokens a GPU':>12} {'GPUs':>4} {'context':>9} {'tokens/s':>12} {'of linear':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        dataset = args.dataset or make_dataset(folder, longest)
        for (mode, tokens), gpus in product(modes, args.gpus):
            row = dict(
                mode=mode, tokens=tokens, gpus=gpus, context=gpus * tokens if mode == "context" else args.block_size
            )
            if gpus == 1:
                one = None
            speed, row["failed"] = None, f"only {there} GPUs are here"
            if gpus <= there:
                speed, row["failed"] = measure(mode, gpus, tokens, dataset, args)
            if gpus == 1:
                one = speed
            row |= dict(tokens_per_second=speed, share=speed / (gpus * one) if speed and one else None)
            share = f"{row['share']:.3f}" if row["share"] else "-"
            result = f"{speed:>12,.0f} {share:>9}" if speed else f"  {row['failed']}"
            print(f"{mode:<8} {tokens:>12,} {gpus:>4} {row['context']:>9,} {result}", flush=True)
            rows.append(row)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"\n{name}, torch {torch.__version__}, {' '.join(args.settings)}")
    if args.json:
        write_json(args.json, rows)
    return not any(row["tokens_per_second"] for row in rows)


class Cluster(NamedTuple):
    """A cluster on paper. Links count in one direction."""

    nodes: int = 8
    gpus: int = 8  # of a node
    links: int = 8  # from a node into the network
    gigabits: float = 400.0  # a second on each of these links
    nvlink: float = 450e9  # bytes a second of a GPU to the others of its node
    peak: float = 989e12  # dense bf16 FLOP/s of a GPU
    share: float = 0.4  # of the peak that training on one GPU reaches

    @property
    def world(self):
        return self.nodes * self.gpus

    @property
    def node_rate(self):
        """Bytes a second that a node sends into the network."""
        return self.links * self.gigabits * 1e9 / 8

    def ring_seconds(self, sent, ranks):
        """Return the seconds of a ring collective in which each of `ranks` GPUs sends `sent` bytes.

        A ring enters and leaves each node once, and as many rings as a node has links share the bytes.
        """
        return sent / (self.nvlink if ranks <= self.gpus else min(self.nvlink, self.node_rate))

    def all_to_all_seconds(self, sent, ranks):
        """Return the seconds of an all-to-all in which each of `ranks` GPUs sends `sent` bytes, in equal parts."""
        outside = max(0, ranks - self.gpus) / max(1, ranks - 1)  # share of the bytes that leaves the node
        inside = (1 - outside) * sent / self.nvlink
        return max(inside, outside * sent * min(ranks, self.gpus) / self.node_rate)


class Model(NamedTuple):
    """What the formulas need of a model: bytes of float32 weights and of a layer's state, and FLOPs a token."""

    name: str
    weights: int  # bytes of all weights
    embedding: int  # bytes of wte, which is the head too: its gradient is complete last
    layers: int
    state: int  # bytes of a layer's recurrent state of one sequence, 0 if it has none
    flops: callable  # of a training token, given the context


def model_of(name, given):
    """Return the Model of GPTConfig(**given), with GPT-2's vocabulary; its tensors take no memory."""
    config = GPTConfig(**{"vocab_size": VOCABULARY, **given})
    with torch.device("meta"):
        model = GPT(config)
    heads = config.n_kv_head * (config.head_dim + 1)
    chunked = [b.attn.mix for b in model.transformer.h if b.attn.mix.training_plan(1 << 20, torch.bfloat16, "cpu")]
    state = sum(4 * heads * symmetric_power_dim(config.head_dim, mix.p) for mix in chunked)
    weights = 4 * sum(p.numel() for p in model.parameters())
    embedding = 4 * model.transformer.wte.weight.numel()
    return Model(name, weights, embedding, config.n_layer, state // config.n_layer, model.flops_per_token)


def ddp_on_paper(model, cluster, tokens, context, hidden=0.0):
    """Return (seconds of computation, bytes that a GPU sends, seconds on the network, seconds that are not hidden).

    Float32 gradients are all-reduced once a step. torch.compile makes one graph of the model's backward pass, whose
    gradients all come at its end, so that nothing is hidden. hidden: seconds of computation beside which the network
    could work if they came one by one; the last one, the embedding's, would be hidden by nothing even then.
    """
    compute = tokens * model.flops(context) / (cluster.share * cluster.peak)
    factor = 2 * (cluster.world - 1) / cluster.world
    last = cluster.ring_seconds(factor * model.embedding, cluster.world)
    network = cluster.ring_seconds(factor * model.weights, cluster.world)
    return compute, factor * model.weights, network, max(0, network - last - hidden) + last


def fsdp_on_paper(model, cluster, tokens, context, micro_tokens):
    """Return what `ddp_on_paper` does for a model that is cut over all GPUs.

    In each micro-step the blocks' weights are gathered twice and the embedding's once, and all gradients are added and
    scattered, in float32. All of it runs beside the computation but for the first gather and the last scatter, those of
    the embedding.
    """
    compute = tokens * model.flops(context) / (cluster.share * cluster.peak)
    micro_steps = max(1, tokens / micro_tokens)
    factor = (cluster.world - 1) / cluster.world
    sent = factor * (2 * (model.weights - model.embedding) + model.embedding + model.weights)
    ends = cluster.ring_seconds(2 * factor * model.embedding, cluster.world)
    network = cluster.ring_seconds(sent, cluster.world)
    bare = max(0, network - ends - compute / micro_steps) + ends
    return compute, micro_steps * sent, micro_steps * network, micro_steps * bare


def context_on_paper(model, cluster, tokens, ranks):
    """Return what `ddp_on_paper` does for sequences that `ranks` GPUs share, `tokens` on each.

    In each layer the states are scanned once forward and once backward. A scan is two all-to-alls, of which each sends
    one state. None of it counts as hidden. The gradients are then all-reduced as without context parallel.
    """
    compute, sent, network, bare = ddp_on_paper(model, cluster, tokens, ranks * tokens)
    states = 4 * model.layers * model.state * (ranks - 1) / ranks
    exchange = cluster.all_to_all_seconds(states, ranks)
    return compute, sent + states, network + exchange, bare + exchange


def paper(args):
    """Print the table of the model on paper."""
    own = [name for name in Cluster._fields if getattr(args, name, None) is not None]
    cluster = Cluster(**{name: getattr(args, name) for name in own})
    given, names = read_settings((TrainConfig, GPTConfig), args.settings, ("vocab_size", "reset_token"))
    base = {"attention": "sympow_gating", "p": 2}
    if args.settings:
        models = [model_of("-".join(names) or "given", base | fields_of(GPTConfig, given))]
    else:
        models = [model_of("124M", base), model_of("1.5B", base | dict(n_layer=48, n_head=25, n_embd=1600))]
    print(
        f"{cluster.nodes} nodes of {cluster.gpus} GPUs, {cluster.links} links of {cluster.gigabits:g} Gb/s a node, "
        f"{cluster.nvlink / 1e9:g} GB/s within it; {cluster.share:.0%} of {cluster.peak / 1e12:g} TFLOP/s on one GPU\n"
    )
    header = f"{'model':<8} {'mode':<10} {'tokens a GPU':>12} {'context':>11} {'compute ms':>10} {'sent MB':>8}"
    print(f"{header} {'network ms':>10} {'not hidden':>10} {'of linear':>9}")
    for model in models:
        for name, tokens, context, result in rows_on_paper(model, cluster, args):
            compute, sent, network, bare = result
            print(
                f"{model.name:<8} {name:<10} {tokens:>12,} {context:>11,} {1e3 * compute:>10.1f} {sent / 1e6:>8,.0f} "
                f"{1e3 * network:>10.1f} {1e3 * bare:>10.1f} {compute / (compute + bare):>9.3f}"
            )


def rows_on_paper(model, cluster, args):
    """Yield (mode, tokens of a GPU, context, what `ddp_on_paper` returns) for each row of a model."""
    for tokens in args.tokens:
        yield "ddp", tokens, args.block_size, ddp_on_paper(model, cluster, tokens, args.block_size)
    for tokens in args.tokens:
        yield "fsdp", tokens, args.block_size, fsdp_on_paper(model, cluster, tokens, args.block_size, args.micro_tokens)
    if model.state:
        for ranks, tokens in product((cluster.gpus, cluster.world), args.context):
            yield f"context {ranks}", tokens, ranks * tokens, context_on_paper(model, cluster, tokens, ranks)


def main():
    parser = Parser(prog="bench/scale.py", description=__doc__.splitlines()[0])
    modes = ("ddp", "fsdp", "context")
    parser.add_argument("--paper", action="store_true", help="print the table of a cluster on paper, and run nothing")
    parser.add_argument("--only", nargs="+", choices=modes, default=modes)
    parser.add_argument("--gpus", type=at_least_1, nargs="+", default=None, help="numbers of GPUs; on paper: of a node")
    parser.add_argument("--tokens", type=at_least_1, nargs="+", default=[131072, 16384], help="of a GPU and step")
    parser.add_argument("--context", type=at_least_1, nargs="+", default=[262144], help="tokens of a GPU, context mode")
    parser.add_argument("--block_size", type=at_least_1, default=1024, help="the context in the other modes")
    parser.add_argument("--micro_tokens", type=at_least_1, default=65536, help="of a GPU and micro-step, at most")
    parser.add_argument("--warm_up", type=at_least_1, default=10, help="steps that do not count")
    parser.add_argument("--steps", type=at_least_1, default=20, help="steps that do")
    parser.add_argument("--limit", type=positive, default=600.0, help="seconds for one row")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dataset", help="instead of random tokens")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows there too")
    parser.add_argument("--nodes", type=at_least_1, help="on paper: default 8")
    parser.add_argument("--links", type=at_least_1, help="on paper: from a node into the network, default 8")
    parser.add_argument("--gigabits", type=positive, help="on paper: a second on each link, default 400")
    parser.add_argument("--share", type=positive, help="on paper: of the peak that one GPU reaches, default 0.4")
    args, args.settings = parser.parse_known_args()
    if args.paper:
        args.gpus = args.gpus and args.gpus[0]
        return paper(args)
    args.gpus = sorted({1, *(args.gpus or (2, 4, 8))})  # one GPU is what linear is measured by
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU here: --device=cpu, or --paper")
    sys.exit(bench(args))


if __name__ == "__main__":
    run_program(main)
