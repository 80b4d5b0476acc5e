"""The device, gates of every kind, gradients, and measures of errors and of memory that tests of numbers share."""

import math
import os
from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import logsigmoid
from torch.utils._python_dispatch import TorchDispatchMode

GPU = bool(os.environ.get("TEST_GPU"))
DEVICE = "cuda" if GPU else "cpu"
LARGE = pytest.mark.xdist_group("large")  # tests that take 10 GB and more of a GPU: one of the processes runs them all
# log_g of random numbers, for tests of every kind of gate
GATES = {
    "none": lambda x: None,
    "near one": lambda x: x.mul(0) + math.log(1 - 1e-6),
    "learned": lambda x: logsigmoid(3 * x + 1),
    "half": lambda x: x.mul(0) + math.log(0.5),
    "strong": lambda x: x.mul(0) + math.log(1e-3),
    "zeros": lambda x: logsigmoid(x).masked_fill(x > 1, float("-inf")),
    "all zero": lambda x: x.mul(0).masked_fill(torch.ones_like(x, dtype=bool), float("-inf")),
}


def relative_error(out, ref, floor):
    """Return ||out - ref|| / max(||ref||, floor)."""
    return ((out.double() - ref.double()).norm() / max(ref.double().norm().item(), floor)).item()


def leaves_of(tensors, to=lambda x: x):
    """Return the tensors as leaves of a graph of their own, after `to`. None and tensors of integers stay."""
    return [x if x is None or not x.is_floating_point() else to(x).detach().requires_grad_() for x in tensors]


def gradients(function, tensors, weights=None, to=lambda x: x):
    """Return a list of what a function of the tensors, after `to`, returns, and of the gradients to the tensors.

    weights are the gradients to its results, one for each of several tensors; by default they are random.
    None and tensors of integers have no gradient.
    """
    leaves = leaves_of(tensors, to)
    outputs = function(*leaves)
    if isinstance(outputs, torch.Tensor):
        outputs, weights = [outputs], None if weights is None else [weights]
    if weights is None:
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in outputs]
    weights = [weight.to(y) for weight, y in zip(weights, outputs, strict=True)]
    inputs = [x for x in leaves if x is not None and x.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, inputs, weights, materialize_grads=True)]


@contextmanager
def uninitialized_memory_is_nan():
    """Fill allocations with NaN, so that an element that no kernel writes is NaN; on a GPU check.errors does it."""
    torch.use_deterministic_algorithms(not GPU)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Largest(TorchDispatchMode):
    """Records the number of entries of the largest tensor that is made."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        tensors = [x for x in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(x, torch.Tensor)]
        self.entries = max([self.entries, *(x.numel() for x in tensors)])
        return made
