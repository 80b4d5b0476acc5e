"""Random inputs of both libraries' entry points, and the shapes, dtypes and devices of inputs and outputs."""

import inspect

import torch
from torch.nn.functional import logsigmoid

from ..operator import forms


def random_inputs(b, tq, tk, h, d, qhead_ratio, dtype, device, seed, requires_grad, gate_mean, deg, with_state):
    """Return (Q [b, tq, h * qhead_ratio, d], K, V [b, tk, h, d], log_G [b, tk, h], S [b, h, D, d], s [b, h, D]).

    gate_mean: what is added to the random numbers that gates are the sigmoid of, or None for no gates. K, V and log_G
    are None if tk is 0, S and s without `with_state`; they are a state that random keys and values leave. device "cuda"
    is the CPU on a machine without a GPU. The generator of torch is left as it is.
    """
    device = place(device)
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def make(*shape, dtype=dtype):
        if generator is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    Q = make(b, tq, h * qhead_ratio, d) / d**0.5
    K, V = (make(b, tk, h, d) / d**0.5 if tk else None for _ in range(2))
    log_G = None if gate_mean is None or not tk else logsigmoid(gate_mean + make(b, tk, h, dtype=torch.float32))
    S = s = None
    if with_state:
        S, s = forms.flush(make(b, 8, h, d) / d**0.5, make(b, 8, h, d) / d**0.5, None, None, p=deg)
    if requires_grad:
        Q, K, V, log_G, S, s = (x if x is None else x.detach().requires_grad_() for x in (Q, K, V, log_G, S, s))
    return Q, K, V, log_G, S, s


def place(device):
    """Return a torch.device, the CPU in place of "cuda" on a machine without a GPU."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device


def properties(create, function=None, names=()):
    """Return a function with the arguments of `create` that returns {name: (shape, dtype, device)} of its tensors.

    With `function`, they are those of the results that it has for these inputs, under `names`; None stays None.
    Nothing is allocated or computed.
    """

    def describe(*args, **kwargs):
        bound = inspect.signature(create).bind(*args, **kwargs)
        bound.apply_defaults()
        device, bound.arguments["device"] = place(bound.arguments["device"]), "meta"
        found = create(**bound.arguments)
        if function is None:
            found = {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}
        else:
            results = function(**found)
            found = dict(zip(names, results if isinstance(results, tuple) else (results,)))
        return {name: None if x is None else (tuple(x.shape), x.dtype, str(device)) for name, x in found.items()}

    describe.__signature__ = inspect.signature(create)
    which = "inputs" if function is None else "outputs"
    describe.__doc__ = (
        f"Return {{name: (shape, dtype, device)}} of the {which}, for the arguments of {create.__name__}."
    )
    return describe
