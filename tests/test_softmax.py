"""Packed softmax: each document for itself, without a mask of T x T, in eager mode and under torch.compile."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from numerics import Largest, gradients, relative_error

from sympow.attention import softmax
from sympow.attention.gates import reset_gates
from sympow.attention.operator import packed
from sympow.attention.softmax import packed_softmax_attention, softmax_attention

B, T, H, HKV, D = 2, 24, 4, 2, 8
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
RESETS = {
    "none": [],
    "all": [(b, t) for b in range(B) for t in range(T)],
    "at token 0": [(0, 0), (1, 0), (0, 9)],
    "one token long": [(0, 5), (0, 6), (0, 7), (1, T - 1)],
    "in one sequence": [(1, 10), (1, 13)],
}


def resets_at(places, shape=(B, T)):
    resets = torch.zeros(shape, dtype=torch.bool)
    for b, t in places:
        resets[b, t] = True
    return resets


def inputs(dtype, tokens=T):
    q, k, v = torch.randn(B, tokens, H + 2 * HKV, D).to(dtype).split((H, HKV, HKV), 2)  # strided views, as in the model
    return [x.detach().requires_grad_() for x in (q, k, v)]


def naive(q, k, v, resets=None, window=None):
    """Compute softmax of the queries of the last n of T tokens with a mask of n x T, in float64."""
    (B, n, H, D), (T, Hkv) = q.shape, k.shape[1:3]
    i, j = torch.arange(T, device=q.device)[-n:, None], torch.arange(T, device=q.device)
    visible = ((j <= i) & (j > i - (window or T))).expand(B, n, T)
    if resets is not None:
        document = resets.cumsum(1)
        visible = visible & (document[:, -n:, None] == document[:, None])
    k, v = (x.repeat_interleave(H // Hkv, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5
    return torch.einsum("bhij,bjhe->bihe", scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1), v)


def assert_naive(attend, qkv, resets=None, window=None, tolerance=None, floor=0.1):
    """Compare attend(q, k, v) and its gradients with `naive` in float64."""
    dy = torch.randn(*qkv[0].shape[:3], qkv[2].shape[3], dtype=torch.float64, device=qkv[0].device)
    results = gradients(attend, qkv, dy)
    expected = gradients(partial(naive, resets=resets, window=window), qkv, dy, torch.Tensor.double)
    for name, x, reference in zip(("y", "dq", "dk", "dv"), results, expected, strict=True):
        assert x.dtype == qkv[0].dtype and x.shape == reference.shape
        error = relative_error(x, reference, floor * dy.norm().item())
        assert error < (tolerance or TOLERANCE[x.dtype]), (name, error)


def assert_packed(attention, dtype, places):
    """Compare attention(q, k, v, resets) with `naive`."""
    resets = resets_at(RESETS[places])
    assert_naive(lambda *qkv: attention(*qkv, resets), inputs(dtype), resets)


@pytest.mark.parametrize("places", RESETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_packed_softmax_and_its_gradients_are_those_with_a_mask(dtype, places):
    assert_packed(packed_softmax_attention, dtype, places)


def test_a_compiled_function_computes_the_same_with_a_mask():
    compiled = torch.compile(packed_softmax_attention, backend="eager", fullgraph=True)
    assert_packed(compiled, torch.float64, "one token long")


@pytest.fixture
def searches(monkeypatch):
    """Return a Mock that counts how often the documents of a batch are looked for."""
    mock = Mock(wraps=packed._find)
    monkeypatch.setattr(packed, "_find", mock)
    return mock


def test_documents_of_a_batch_are_looked_for_once(searches):
    resets = resets_at(RESETS["at token 0"])
    first = packed.find_documents(resets)
    assert packed.find_documents(resets) is first and searches.call_count == 1
    assert first.sizes.tolist() == [3, T] and first.ends[:5].tolist() == [0, 9, T, 2 * T, 2 * T]
    resets[1, 3] = True
    assert packed.find_documents(resets).sizes.tolist() == [4, T - 3]

    def step(x, resets):
        for _ in range(3):  # layers
            x = x * packed.find_documents(resets).ends[1]
        return x.sum()

    searches.reset_mock()
    compiled = torch.compile(step, backend="aot_eager_decomp_partition", fullgraph=True)
    compiled(torch.ones(3, requires_grad=True), resets).backward()
    assert searches.call_count == 1


@pytest.mark.parametrize("entries", [2**28, 40])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("places", RESETS)
def test_the_last_tokens_see_the_cache_as_with_one_mask(dtype, places, entries, monkeypatch):
    monkeypatch.setattr(softmax, "MASK_ENTRIES", entries)
    resets = resets_at(RESETS[places])
    q, k, v = inputs(dtype)
    for log_g in (reset_gates(resets, None, k), None):
        for n in (1, 7, T):
            documents = None if log_g is None else resets
            assert_naive(partial(softmax_attention, log_g=log_g), (q[:, -n:], k, v), documents)


def test_64_queries_of_a_long_text_make_no_mask_for_all_of_them(monkeypatch):
    monkeypatch.setattr(softmax, "MASK_ENTRIES", 2**17)
    tokens = 16384
    q, k, v = torch.randn(1, 64, 2, D), torch.randn(1, tokens, 1, D), torch.randn(1, tokens, 1, D)
    with torch.inference_mode(), Largest() as largest:
        y = softmax_attention(q, k, v)
    assert largest.entries <= tokens * 2 * D < tokens * 64
    expected = naive(*(x.double() for x in (q, k, v)))
    assert relative_error(y, expected, floor=1e-3) < 1e-5


def test_nothing_is_of_size_T_x_T():
    tokens = 2048
    qkv = inputs(torch.float32, tokens)
    resets = resets_at([(0, 700)], (B, tokens))
    with Largest() as largest:
        packed_softmax_attention(*qkv, resets).sum().backward()
    assert largest.entries <= B * tokens * (H + 2 * HKV) * D < tokens**2
