"""Time each fused operator of a training step beside PyTorch without it: which to name in dispatch.FUSED.

    python bench/fused.py                                 # a minute on a GPU

A row is a part of a 124M model's training step, forward and backward, on 65,536 tokens under autocast to bfloat16:

    rotary          q, k and v out of the projection c_attn, q and k rotated; the gradient to the projection
    cross_entropy   the head and its loss with their gradients, matrix products and all

Columns are the median milliseconds of ROUNDS in which the contenders take turns: PyTorch, PyTorch compiled, and the
operator's kernel, compiled too.
"""

import sys
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sympow.attention.operator import dispatch  # noqa: E402
from sympow.attention.rotary import rotate_heads  # noqa: E402
from sympow.bench.timing import finish, make_parser, milliseconds, print_row, print_titles  # noqa: E402
from sympow.layers.loss import LinearCrossEntropy  # noqa: E402
from sympow.runs.program import run_program  # noqa: E402

WARM_UP, ROUNDS = 3, 15
TOKENS = 65536
WIDTH, HEAD_DIM = 768, 64  # of the residual stream and of a head
VOCABULARY, UNUSED = 50304, 47  # rows of the head, the last of them without a token
CONTENDERS = ("pytorch", "compiled", "fused")
COLUMNS = {"operator": ("operator", "<14", "s")}  # key of a row -> (title, place, format)
COLUMNS |= {contender: (contender, ">10", ".3f") for contender in CONTENDERS}


def rotary(device):
    """Return the function, its inputs and the gradients of its outputs."""
    heads = WIDTH // HEAD_DIM
    qkv = torch.randn(1, TOKENS, 3 * WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(1, TOKENS + 1, dtype=torch.float64, device=device).expand(1, TOKENS)

    def rotate(qkv):
        return rotate_heads(qkv.unflatten(-1, (-1, HEAD_DIM)), heads, heads, positions, 65536.0)

    gradients = [torch.randn(1, TOKENS, heads, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(3)]
    return rotate, [qkv], gradients


def cross_entropy(device):
    """Return the function, its inputs and the gradients of its outputs."""
    x = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
    weight = torch.nn.Parameter(0.02 * torch.randn(VOCABULARY, WIDTH, device=device))
    targets = torch.randint(VOCABULARY - UNUSED, (TOKENS,), device=device)

    def loss(x, weight):
        return (LinearCrossEntropy.apply(x, weight, targets, VOCABULARY - UNUSED),)

    return loss, [x, weight], [torch.ones((), device=device)]


OPERATORS = {"rotary": rotary, "cross_entropy": cross_entropy}


def forward_backward(function, inputs, gradients, fused):
    """Call a function under autocast with these fused operators switched on, and compute the inputs' gradients."""
    dispatch.FUSED = fused  # which torch.compile looks at
    with torch.autocast(inputs[0].device.type, torch.bfloat16):
        outputs = function(*inputs)
    torch.autograd.grad(outputs, inputs, gradients)


def compare(name, device):
    """Return {contender: milliseconds} of one operator."""
    function, inputs, gradients = OPERATORS[name](device)
    torch.compiler.reset()
    calls = {}
    for contender in CONTENDERS:
        contending = function if contender == "pytorch" else torch.compile(function, dynamic=False)
        fused = (name,) if contender == "fused" else ()
        calls[contender] = partial(forward_backward, contending, inputs, gradients, fused)
        for _ in range(WARM_UP):
            calls[contender]()
    rounds = [{contender: milliseconds(call, device) for contender, call in calls.items()} for _ in range(ROUNDS)]
    return {contender: median(times[contender] for times in rounds) for contender in CONTENDERS}


def main():
    args = make_parser("fused.py", __doc__).parse_args()
    device, rows = "cuda" if torch.cuda.is_available() else "cpu", []
    print_titles(COLUMNS)
    for name in OPERATORS:
        rows.append(dict(operator=name) | compare(name, device))
        print_row(COLUMNS, rows[-1])
        if reason := dispatch.fused_kernel_reason(name, torch.device(device), torch.bfloat16):
            print(f"{name}: the column `fused` is PyTorch, because {reason}")
    finish(args, rows)


if __name__ == "__main__":
    run_program(main)
