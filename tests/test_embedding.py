"""The feature maps and the counts that go with them."""

import itertools
import math

import pytest
import torch

from sympow.attention.embedding import symmetric_power_dim, symmetric_power_embedding


@pytest.mark.parametrize("d,p", [(1, 2), (2, 2), (8, 2), (5, 3), (4, 4), (3, 6), (2, 8)])
def test_inner_products_of_features_are_powers_of_inner_products(d, p):
    q, k = torch.randn(2, 7, d, dtype=torch.float64)
    products = (symmetric_power_embedding(q, p) * symmetric_power_embedding(k, p)).sum(-1)
    assert torch.allclose(products, (q * k).sum(-1) ** p, rtol=1e-10)


@pytest.mark.parametrize("d,p", [(2, 2), (5, 2), (4, 3), (3, 4), (3, 6)])
def test_entries_are_in_lexicographic_order_of_non_decreasing_multi_indices(d, p):
    x = torch.randn(d, dtype=torch.float64)
    expected = []
    for index in itertools.combinations_with_replacement(range(d), p):
        multiplicity = math.factorial(p) / math.prod(math.factorial(index.count(i)) for i in range(d))
        expected.append(math.sqrt(multiplicity) * math.prod(x[i].item() for i in index))
    phi = symmetric_power_embedding(x, p)
    assert phi.shape == (symmetric_power_dim(d, p),)
    assert torch.allclose(phi, torch.tensor(expected, dtype=torch.float64), rtol=1e-12)


def test_compiled_features_are_the_same():
    x = torch.randn(3, 4, dtype=torch.float64)
    compiled = torch.compile(symmetric_power_embedding, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, 4), symmetric_power_embedding(x, 4))


def test_dimension_is_the_number_of_multisets():
    for d in (1, 2, 16, 64, 128):
        for p in (1, 2, 4, 6, 8):
            assert symmetric_power_dim(d, p) == math.comb(d + p - 1, p)


def test_gradients_are_right():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: symmetric_power_embedding(x, 4), x)
