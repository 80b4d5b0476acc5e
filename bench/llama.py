"""Measure how fast transformers' Llama generates with power attention, after short and after long contexts.

    python bench/llama.py                            # 124M on a GPU, after 1,000 and 100,000 tokens
    python bench/llama.py --attention sdpa           # softmax, with the cache that transformers makes
    python bench/llama.py --layers 2 --width 64 --heads 4 --context 1000 16000 --switch_over 64         # on a CPU

Weights are random, in bfloat16 on a GPU. The context is read by one call, then greedy tokens follow. A line has the
tokens a second of all sequences together, the median of the milliseconds from one token to the next, the bytes of the
cache, and the seconds of the call that read the context.
"""

import statistics
import sys
import time
import types
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sympow.runs.program import Parser, at_least_1, run_program  # noqa: E402

WARM_UP = 5  # tokens


def package_of_this_clone():
    """Return sympow.transformers, made of this clone's folders, which the installed package has in other places."""
    package = types.ModuleType("sympow")
    package.__path__ = [str(ROOT / "package"), str(ROOT)]
    sys.modules["sympow"] = package
    import sympow.transformers

    return sympow.transformers


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def measure(model, cache, context, batch, tokens):
    """Return the figures of one line: prefill seconds, and milliseconds of each token."""
    device = model.device.type
    ids = torch.randint(model.config.vocab_size, (batch, context), device=device)
    times = [time.perf_counter()]
    for _ in range(1 + WARM_UP + tokens):
        ids = model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        synchronize(device)
        times.append(time.perf_counter())
    steps = [1000 * (b - a) for a, b in zip(times, times[1:])]
    return steps[0] / 1000, steps[1 + WARM_UP :]


def main():
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--attention", choices=("sympow", "sdpa"), default="sympow")
    parser.add_argument("--p", type=int, default=2)
    parser.add_argument("--layers", type=at_least_1, default=12)
    parser.add_argument("--width", type=at_least_1, default=768)
    parser.add_argument("--heads", type=at_least_1, default=12)
    parser.add_argument("--context", type=at_least_1, nargs="+", default=[1000, 100_000])
    parser.add_argument("--batch", type=at_least_1, default=1)
    parser.add_argument("--tokens", type=at_least_1, default=200)
    parser.add_argument("--switch_over", type=at_least_1, default=512, help="tokens after which states replace keys")
    args = parser.parse_args()
    power = package_of_this_clone()
    power.register("sympow", p=args.p)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=50304, hidden_size=args.width, intermediate_size=8 * args.width // 3, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, max_position_embeddings=max(args.context) + args.tokens + 10,
        attn_implementation=args.attention,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    where = torch.cuda.get_device_name() if device == "cuda" else f"a CPU, {torch.get_num_threads()} threads"
    print(f"{args.attention}, {sum(p.numel() for p in model.parameters()):,} parameters, batch {args.batch}, {where}")
    for context in args.context:
        cache = power.PowerCache(args.switch_over) if args.attention == "sympow" else DynamicCache(config=config)
        prefill, steps = measure(model, cache, context, args.batch, args.tokens)
        if args.attention == "sympow":
            size = cache.bytes()
        else:
            size = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
        rate = 1000 * args.batch * len(steps) / sum(steps)
        median = statistics.median(steps)
        print(
            f"after {context:,}: {rate:,.1f} tokens/s, {median:.2f} ms a token, {size:,} bytes, prefill {prefill:.2f} s"
        )


if __name__ == "__main__":
    run_program(main)
