"""Print where the time of a training step goes, by kind of kernel, beside what each kind needs at least.

    python bench/profile_step.py                                                        # 124M, softmax, 64 x 1,024
    python bench/profile_step.py --attention=sympow_gating --block_size=65536 --batch_size=1
    python bench/profile_step.py --attention=softmax --block_size=4096 --batch_size=16 --documents=600   # packed
    python bench/profile_step.py --fused rotary                                         # without the others of FUSED

A step is forward, backward, clipping and AdamW on random tokens, as in train.py without accumulation: on a GPU compiled
and under autocast to bfloat16, on a CPU neither. torch.profiler times every kernel of STEPS steps. The table is that of
the step whose kernels took least, because under the profiler all kernels of some steps are slower: the sums of all
steps are printed beside the time of a step without the profiler.

The first kind in KINDS whose pattern is in the name of a kernel, or of an operator that launched it, has it. (A kernel
that torch.compile made of several operators has their names.) The floor of a kind is what its matrix products need at
FLOPS, or its reading and writing at BANDWIDTH, each array once each way, from the sizes of the model alone. The table
is Markdown, for docs/training-speed.md.
"""

import re
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from torch.profiler import record_function

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.attention import ATTENTIONS, dispatch  # noqa: E402
from sympow.attention.check import FUSED_SIZES  # noqa: E402
from sympow.data.files import write_json  # noqa: E402
from sympow.model import GPT, GPTConfig  # noqa: E402
from sympow.training.optimizer import make_optimizer  # noqa: E402
from sympow.runs.program import Parser, at_least_1, output_file, run_program  # noqa: E402
from sympow.runs.trace import profiler  # noqa: E402
from sympow.train import TrainConfig  # noqa: E402

STEPS = 5
WARM_UP = 5.0  # seconds of steps on a GPU, whose clock settles only some time after the compilation
PROFILED = 4  # more steps, under the profiler, that do not count: while it starts, the GPU waits
FLOPS, BANDWIDTH = 701e12, 4.3e12  # of one H200: a bf16 product of 8192^3, and a copy; a second
FUSED_NAMES = list(dict(FUSED_SIZES))
PRODUCT = r"::(mm|addmm|bmm)\b|gemm|nvjet|cutlass|cublas|xmma"
FORWARD, BACKWARD, UPDATE = "step: forward", "step: backward", "step: update"

# kind: (pattern of names, what owns it). The first that matches counts, so that what is most particular comes first.
KINDS = {
    "optimizer": (UPDATE, "AdamW and clipping"),
    "attention": (
        r"scaled_dot_product|flash|fmha|cudnn_attention|sympow\w*::(quadratic|chunked|adaptive|heinsen|packed|find|log_rec)",
        "attention's own kernels, torch's or kernels/",
    ),
    "gates": (r"mm_fp32|log_?sigmoid", "attention/gates.py"),
    "rotations": (r"sympow\w*::rotat|rotate_\w*kernel|flip", "attention/rotary.py"),
    "loss beyond its products": (r"cross_entropy|logsumexp|gather", "loss.py"),
    "LayerNorm backward": (rf"{BACKWARD}.*(layer_norm|mean_mul)", "norm.py"),
    "LayerNorm forward": (r"layer_norm|mean_mul", "norm.py, with the sum before it"),
    "GELU": (r"gelu|exp2\w*rsqrt", "activation.py"),
    "matrix products, forward": (rf"{FORWARD}.*({PRODUCT})", "cuBLAS; both passes of the head"),
    "matrix products, backward": (PRODUCT, "cuBLAS"),
    "embedding": (r"embedding|index_put|index_select", "model.py"),
    "copies and casts": (r"copy|cat\b|_cat_|memcpy|memset|fill|zero", "autocast"),
    "other": ("", ""),
}


def floors(model, config, batch, T):
    """Return {kind: milliseconds} that a step of batch x T tokens needs at least.

    The residual stream is float32 and what linear layers read is bfloat16, as under autocast.
    """
    N, L, C, V = batch * T, config.n_layer, config.n_embd, model.transformer.wte.num_embeddings
    kv = config.n_kv_head * config.head_dim
    qk = config.n_head * config.head_dim + kv
    weights, head = sum(p.numel() for p in model.parameters() if p.dim() == 2), V * C
    parameters = model.parameter_count()
    mixes = [block.attn.mix for block in model.transformer.h]
    attention = sum(mix.attention_flops(T, torch.bfloat16, model.transformer.wte.weight.device.type) for mix in mixes)
    gated, rotating = sum(mix.config.gate == "learned" for mix in mixes), sum(mix.rotates for mix in mixes)
    flops = {
        # loss.py computes the head's gradients in the forward pass
        "matrix products, forward": 2 * weights * N + 4 * head * N,
        "matrix products, backward": 4 * (weights - head) * N,
        "attention": attention * N,
    }
    traffic = {
        "optimizer": 40 * parameters,  # weights and two moments in and out, gradients; their norm, and clipping them
        "gates": 6 * C * N * gated,  # x twice, its gradient
        # q and k in and out; backward q, k and v, whose gradients are joined
        "rotations": (4 * qk + 4 * (qk + kv)) * N * rotating,
        "loss beyond its products": 4 * V * N,  # logits in, their gradient out
        # x and the block's output in, their sum and the normalised one out
        "LayerNorm forward": (12 * 2 * L + 8) * C * N,
        # the output, its gradient and the stream's in; the gradients of the stream and of the block's output out
        "LayerNorm backward": (14 * 2 * L + 14) * C * N,
        "GELU": 10 * 4 * C * N * L,  # in and out; in, gradient in and out
        "embedding": 16 * C * N,
        # weights to bfloat16; where nothing rotates, gradients of q, k and v into one tensor
        "copies and casts": 6 * parameters + 4 * (qk + kv) * N * (L - rotating),
    }
    milliseconds = {kind: 1000 * n / FLOPS for kind, n in flops.items()}
    return milliseconds | {kind: 1000 * n / BANDWIDTH for kind, n in traffic.items()}


def kind_of(names):
    """Return the kind of a kernel; names: its own and those of the operators around it, in one text."""
    return next(kind for kind, (pattern, _) in KINDS.items() if re.search(pattern, names, re.IGNORECASE))


def kernels(events, gpu):
    """Yield (names, milliseconds, start) of each kernel that these events of torch.profiler launched; on a CPU, of each
    operator without those that it calls."""
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        times = [(k.name, k.duration) for k in event.kernels] if gpu else [("", event.self_cpu_time_total)]
        around, parent = [], event
        while times and parent is not None:
            around.append(parent.name)
            parent = parent.cpu_parent
        for name, microseconds in times:
            yield " ".join([*reversed(around), name]), microseconds / 1000, event.time_range.start


def summarize(events, gpu):
    """Return ({kind: (milliseconds, {name of a kernel or operator: milliseconds})} of the step that takes least, the
    milliseconds of each step)."""
    on_cpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CPU]  # the GPU has phases too, later ones
    phases = sorted((e.time_range.start, e.name) for e in on_cpu if e.name in (FORWARD, BACKWARD, UPDATE))
    begins = [start for start, name in phases if name == FORWARD][-STEPS:]
    events = [e for e in events if e.time_range.start >= begins[0]]
    steps = [defaultdict(lambda: defaultdict(float)) for _ in begins]
    for names, milliseconds, start in kernels(events, gpu):
        # autograd works in a thread of its own, whose events do not lie within those of the step
        phase = next((name for begin, name in reversed(phases) if begin <= start), "")
        parts = steps[bisect_right(begins, start) - 1][kind_of(f"{phase} {names}")]
        parts[names.split(" ")[-1] or names.split(" ")[-2]] += milliseconds
    totals = [sum(sum(parts.values()) for parts in step.values()) for step in steps]
    on_gpu = (e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("step: "))
    unknown = sum(e.time_range.elapsed_us() for e in on_gpu) / 1000 / STEPS - sum(totals) / STEPS
    least = steps[totals.index(min(totals))]
    if unknown > 0.01:
        least["other"]["launched by no operator"] = unknown
    return {kind: (sum(least[kind].values()), dict(least[kind])) for kind in KINDS if kind in least}, totals


def measure(args, config):
    """Train a few steps, then a few more under the profiler; return (the model, its events, the milliseconds of each
    of the first)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.type == "cuda"
    torch.manual_seed(0)
    model = GPT(config).to(device)
    optimizer = make_optimizer(model, TrainConfig())
    network = torch.compile(model) if gpu and not args.no_compile else model
    ids = torch.randint(1, config.vocab_size, (args.batch_size, args.block_size + 1), device=device)
    if args.documents:
        ids[:, :: args.documents] = config.reset_token
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step():
        with record_function(FORWARD), torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            _, loss = network(x, y)
        with record_function(BACKWARD):
            loss.backward()
        with record_function(UPDATE):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    step()
    end, times = time.monotonic() + WARM_UP * gpu, []
    while len(times) < STEPS or time.monotonic() < end:
        begin = time.perf_counter()
        step()
        if gpu:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    with profiler(device) as found:
        for _ in range(PROFILED * gpu):
            step()
        if gpu:
            torch.cuda.synchronize()  # so that none of their kernels runs while the others count
        for _ in range(STEPS):
            step()
    return model, found.events(), times[-STEPS:]


def print_table(found, needed, top):
    """Print the kinds as a Markdown table, and under it the `top` longest kernels of each."""
    print("| kind | ms a step | floor, ms | times the floor | what owns it |\n| --- | ---: | ---: | ---: | --- |")
    for kind, (_, owner) in KINDS.items():
        milliseconds, floor = found.get(kind, (0.0, {}))[0], needed.get(kind)
        if not milliseconds and not floor:
            continue
        times = f"{milliseconds / floor:.1f}" if floor else ""
        print(f"| {kind} | {milliseconds:.2f} | {'' if floor is None else f'{floor:.2f}'} | {times} | {owner} |")
    total, floor = sum(ms for ms, _ in found.values()), sum(needed.values())
    print(f"| all | {total:.2f} | {floor:.2f} | {total / floor:.1f} | |")
    for kind, (_, parts) in found.items():
        for name, milliseconds in sorted(parts.items(), key=lambda part: -part[1])[:top]:
            print(f"{kind:<26} {milliseconds:8.2f} ms  {name[:100]}")


def main():
    parser = Parser(prog="bench/profile_step.py", description=__doc__.splitlines()[0])
    parser.add_argument("--attention", default="softmax", help=f"as in train.py, of {' '.join(ATTENTIONS)}")
    parser.add_argument("--block_size", type=at_least_1, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch_size", type=at_least_1, default=64, help="sequences")
    for name, value in dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50257, p=2).items():
        parser.add_argument(f"--{name}", type=at_least_1, default=value)
    parser.add_argument("--documents", type=at_least_1, help="pack documents of this many tokens")
    parser.add_argument("--fused", nargs="+", choices=FUSED_NAMES, default=dispatch.FUSED, help="kernels switched on")
    parser.add_argument("--no_compile", action="store_true")
    parser.add_argument("--top", type=int, default=0, help="also print this many kernels of each kind")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    names = ("attention", "n_layer", "n_head", "n_embd", "vocab_size", "p")
    try:
        config = GPTConfig(**{name: getattr(args, name) for name in names}, reset_token=0 if args.documents else -1)
    except ValueError as error:
        parser.error(str(error))
    dispatch.FUSED = tuple(args.fused)
    gpu = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")  # as train.py
    model, events, alone = measure(args, config)
    (found, totals), needed = summarize(events, gpu), floors(model, config, args.batch_size, args.block_size)
    device = torch.cuda.get_device_name() if gpu else "CPU"
    size = f"{args.batch_size} x {args.block_size} tokens, {model.parameter_count() / 1e6:.1f}M parameters"
    fused = f"fused kernels: {', '.join(dispatch.FUSED) or 'none'}"
    print(f"{args.attention}, {size}, {device}, torch {torch.__version__}, {fused}\n")
    print_table(found, needed, args.top)
    profiled = ", ".join(f"{total:.1f}" for total in totals)
    print(f"\na step without the profiler: {median(alone):.1f} ms; kernels of each profiled step: {profiled} ms")
    if args.json:
        rows = {
            kind: dict(milliseconds=ms, kernels=parts, floor=needed.get(kind)) for kind, (ms, parts) in found.items()
        }
        times = dict(alone=alone, profiled=totals)
        write_json(args.json, dict(device=device, torch=torch.__version__, settings=vars(args), kinds=rows, **times))


if __name__ == "__main__":
    run_program(main)
