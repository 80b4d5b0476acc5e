"""Measure how far generation drifts from the exact recurrence: a small model's logits against float64.

    python bench/drift.py                                # a million tokens, gated and conformal sympow
    python bench/drift.py --tokens 100000 --attention conformal_sympow

The same random text goes through the decoder (bfloat16 weights, states in --state_dtype, one token at a time) and
through the model in float64; each computes its own gates and beta. A line has the relative difference of the logits at
a position. The first one is the effect of bfloat16 weights alone, before errors of the state can add up.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.generation.decoder import Decoder  # noqa: E402
from sympow.model import GPT, GPTConfig  # noqa: E402
from sympow.runs.program import Parser, at_least_1, run_program  # noqa: E402

VARIANTS = ("sympow", "sympow_gating", "conformal_sympow")


class Forced:
    """Stands for a sampler; its next token is always that of a given text."""

    def __init__(self, text):
        self.text, self.at = text, torch.zeros(1, dtype=torch.int64, device=text.device)

    def prepare(self):
        pass

    def __call__(self, logits, ids):
        self.at += 1
        ids.copy_(self.text.index_select(0, self.at))


def drift(attention, tokens, positions, state_dtype=torch.float32, seed=0):
    """Yield (position, relative difference of the logits) at the positions, in order, all below tokens - 1."""
    torch.manual_seed(seed)
    config = dict(vocab_size=512, n_layer=2, n_head=4, n_embd=256, attention=attention, p=2)
    model = GPT(GPTConfig(**config)).cuda().eval()
    for name, p in model.named_parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5 * (0.3 if "W_" in name else 1))
    model.load_state_dict({name: x.bfloat16().float() for name, x in model.state_dict().items()})
    exact = GPT(GPTConfig(**config)).cuda().double().eval()
    exact.load_state_dict(model.state_dict())
    text = torch.randint(512, (tokens,), device="cuda")
    with torch.inference_mode():
        expected, state, start = {}, exact.empty_state(1, "always"), 0
        for part in text.split(4096):
            x, state = exact.hidden(part[None], state)
            for at in positions:
                if start <= at < start + len(part):
                    expected[at] = exact.logits(x[0, at - start])
            start += len(part)
        decoder = Decoder(model, model.empty_state(1, 1024), Forced(text), tokens, torch.bfloat16, 1, state_dtype)
        decoder.ids.copy_(text[:1])
        for at in range(max(positions) + 1):
            decoder.step()
            if at in expected:
                yield at, ((decoder.logits[0].double() - expected[at]).norm() / expected[at].norm()).item()


def main():
    parser = Parser(prog="bench/drift.py", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=at_least_1, default=1_000_000)
    parser.add_argument("--attention", nargs="+", choices=VARIANTS, default=VARIANTS[1:])
    parser.add_argument("--state_dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    if args.tokens < 3:
        parser.error(f"argument --tokens: must be at least 3, got {args.tokens}")
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here to measure on")
    positions = sorted({min(10**i * j, args.tokens - 2) for i in range(7) for j in (1, 2, 5)})
    for attention in args.attention:
        for at, error in drift(attention, args.tokens, positions, getattr(torch, args.state_dtype)):
            print(f"{attention:<18} {at:>9,} {error:.2e}", flush=True)
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")


if __name__ == "__main__":
    run_program(main)
