"""Rotations: the paper's matrices, and their precision far into a text; with TEST_GPU=1 the kernel on the GPU."""

import math
from functools import partial

import pytest
import torch
from numerics import DEVICE, gradients

from sympow.attention import rotary as rotary_module
from sympow.attention.rotary import rotary, rotation_rates


def matrix(angles):
    """Return the block diagonal R(theta) of the conformal paper, section 2.2."""
    blocks = [
        torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]], dtype=torch.float64) for a in angles
    ]
    return torch.block_diag(*blocks)


def turn(x, u, base=100.0):
    return rotary(x.view(1, 1, 1, -1), torch.tensor([[u]], dtype=torch.float64), base).view(-1)


def test_rates_are_those_of_the_paper():
    d, N = 8, 65536
    theta = [2 * math.pi / N ** (2 * (i - 1) / d) for i in range(1, d // 2 + 1)]
    assert torch.allclose(2 * math.pi * rotation_rates(d, N), torch.tensor(theta, dtype=torch.float64), rtol=1e-12)


def test_adjacent_pairs_are_turned_by_u_theta():
    x = torch.randn(8, dtype=torch.float64)
    angles = 3.7 * 2 * math.pi * rotation_rates(8, 100.0)
    assert torch.allclose(turn(x, 3.7), matrix(angles.tolist()) @ x, rtol=1e-12)


def test_float32_is_exact_after_a_million_tokens():
    u = torch.arange(1_000_000 - 64, 1_000_000, dtype=torch.float64).unsqueeze(0) + 0.377
    x = torch.ones(1, 64, 1, 64)
    error = (rotary(x, u, 65536.0).double() - rotary(x.double(), u, 65536.0)).abs().max()
    assert error < 1e-6


def test_gradients_reach_x_and_u():
    x = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    u = torch.rand(1, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, u: rotary(x, u, 10.0), (x, u))


@pytest.mark.parametrize("D", [6, 16])
def test_the_kernel_computes_the_same_and_its_gradient(D, monkeypatch):
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    x = torch.randn(2, 13, 5, D, device=DEVICE).transpose(1, 2)
    for u in (torch.arange(5.0, device=DEVICE).double(), torch.rand(2, 5, device=DEVICE).double()):
        results = []
        for reason in ("off", ""):
            monkeypatch.setattr(rotary_module, "why_not", lambda *_: reason)
            results.append(gradients(lambda x: rotary(x, u, 99.0), [x]))
        assert all(map(partial(torch.allclose, atol=1e-6), *results))


def test_the_kernel_has_the_second_derivative_of_pytorch(monkeypatch):
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    x, u, results = torch.randn(1, 5, 2, 6, device=DEVICE), torch.arange(5.0, device=DEVICE).double(), []
    for reason in ("off", ""):
        monkeypatch.setattr(rotary_module, "why_not", lambda *_: reason)
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(rotary(leaf, u, 99.0).pow(3).sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), leaf)[0])
    assert torch.allclose(*results, rtol=1e-4)
