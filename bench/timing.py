"""Time calls on a GPU and print a table of the results: what the programs of bench/ share."""

import gc

import torch

from sympow.data.files import write_json
from sympow.runs.program import Parser, output_file

AHEAD = 40_000_000  # cycles that the GPU waits before timed calls, 20 ms: as long as a slow host takes to launch them


def milliseconds(call, calls=1):
    """Return the milliseconds of one call on a GPU, the mean of `calls` calls in a row.

    The GPU first waits, without working, so that launching the calls is hidden, as it is in a model.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def forward_backward(function, inputs, dy):
    """Return y = function(*inputs), and the gradients of all inputs given the gradient dy of y."""
    y = function(*inputs)
    return y, torch.autograd.grad(y, inputs, dy)


def extra_bytes(function, inputs, dy):
    """Return the peak bytes of one forward and backward on a GPU, without inputs, dy, output and gradients."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    results = forward_backward(function, inputs, dy)
    sizes = {name: torch.cuda.memory_stats()[f"requested_bytes.all.{name}"] for name in ("peak", "current")}
    del results  # which count among the current bytes
    return sizes["peak"] - sizes["current"]  # not yet rounded up by the allocator


def machine():
    """Return the name of the GPU, or CPU, and versions, as one line."""
    if not torch.cuda.is_available():
        return f"CPU, torch {torch.__version__}"
    import triton

    versions = f"torch {torch.__version__}, triton {triton.__version__}, cuDNN {torch.backends.cudnn.version()}"
    return f"{torch.cuda.get_device_name()}, {versions}"


def make_parser(name, description, contenders, default=None):
    """Return a Parser for the program bench.NAME, with the options --json and --only; description: its docstring.

    contenders: the names that --only takes; default: those that are measured without it.
    """
    parser = Parser(description, prog=f"python -m bench.{name}")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows there too")
    names = f"measure these: {' '.join(contenders)}"
    parser.add_argument("--only", nargs="+", choices=contenders, metavar="NAME", default=default, help=names)
    return parser


def require_gpu(parser):
    """Refuse a machine without a GPU in one line."""
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here, and this measures one")


def print_titles(columns):
    """Print the head of a table; columns: {key of a row: (title, place, format)}, both as format() takes them."""
    print(*(format(title, place) for title, place, _ in columns.values()), flush=True)


def print_row(columns, row):
    """Print a row, a dict, under `print_titles`: "-" where it lacks a value, and at the end why it failed, if so."""
    cells = []
    for key, (_, place, value_format) in columns.items():
        value = row.get(key)
        cells.append(format("-" if value is None else format(value, value_format), place))
    print(" ".join([*cells, row.get("failed", "")]).rstrip(), flush=True)


def finish(args, rows, **settings):
    """Print the machine under a table, and write it with settings and rows to the file of --json, if given."""
    print(f"\n{machine()}")
    if args.json:
        write_json(args.json, dict(machine=machine(), **settings, rows=rows))
