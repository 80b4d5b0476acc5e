"""Heinsen's kernels: documents, states, large numbers and NaN; test_operators.py has sizes and lengths.

On the CPU in Triton's interpreter; with TEST_GPU=1 on the GPU.
"""

import math

import pytest
import torch
from numerics import DEVICE, GPU, gradients, leaves_of

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from test_heinsen import RANGES, assert_equal_to_specification, inputs, kernels  # noqa: E402, F401 (a fixture)
from test_kernels import assert_close, extra_memory  # noqa: E402

from sympow.attention import heinsen_attention  # noqa: E402
from sympow.kernels.heinsen import operator, passes as heinsen  # noqa: E402

SIZES = dict(B=1, H=2, Hkv=1, D=16, E=16)
FP32 = dict(dtype=torch.float32, tolerance=1e-5)
BF16 = dict(dtype=torch.bfloat16, tolerance=4e-3, gradients=8e-3)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch, kernels):  # noqa: F811
    """Let a few tokens be several chunks, each of them several blocks."""
    monkeypatch.setattr(heinsen, "CHUNK", 32)


def starts_of(documents):
    """Return resets [B, T] of the numbers of documents; a state is of number 0."""
    documents = torch.tensor(documents, device=DEVICE)
    return documents.diff(dim=1, prepend=torch.zeros_like(documents[:, :1])) > 0


DOCUMENTS = {
    "inside blocks": [[0] * 5 + [1] * 15 + [4] * 1 + [5] * 19],
    "at blocks and chunks": [[0] * 16 + [1] * 16 + [2] * 8],
    "the state's alone": [[0] * 40],
    "none of the state's": [[3] * 33 + [7] * 7],
    "of each sequence": [[0] * 40, [0] * 5 + [1] * 35],
}


@pytest.mark.parametrize("state,limits", [(True, FP32), (False, BF16)])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_documents_see_only_themselves(documents, state, limits):
    resets = starts_of(DOCUMENTS[documents])
    leaves, _, m = inputs(40, **SIZES | dict(B=len(resets)), dtype=limits["dtype"], state=state)
    assert_equal_to_specification((leaves, resets, m), **limits)


@pytest.mark.parametrize("E", [12, pytest.param(5, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.slow)])
def test_log_attention_takes_rows_of_any_width(E):
    """Features behind a row have no weight: their exponents are far below any other."""
    made = inputs(20, **SIZES | dict(D=12, E=E), dtype=torch.bfloat16, state=True)
    assert_equal_to_specification(made, **BF16)


@pytest.mark.parametrize("limits", [FP32 | dict(tolerance=5e-5)] + [BF16] * GPU)
@pytest.mark.parametrize("size", ["large", "growing", "falling"])
def test_large_inputs_and_keys_that_grow_in_a_chunk(size, limits):
    """q and k reach 80; keys grow by 80 in 32 tokens. At a logarithm of 160 a weight in float32 has 1e-5 left."""
    leaves, *rest = inputs(32, **SIZES, dtype=limits["dtype"], state=True, change=RANGES[size])
    if size == "large":
        leaves[0] = RANGES[size](leaves[0].detach()).to(limits["dtype"]).double().requires_grad_()
    assert_equal_to_specification((leaves, *rest), **limits)


def results(tensors, dy=None, **settings):
    """Return {name: tensor} of y, the state after and the gradients to q, k and v, in float32."""

    def attend(*tensors):
        y, state = heinsen_attention(*tensors, return_state=True, **settings)
        return y, state.S, state.z

    tensors = [x.detach().float() for x in tensors]
    weights = None if dy is None else [dy, *(torch.zeros_like(x) for x in attend(*tensors)[1:])]
    return dict(zip(("y", "S", "z", "dq", "dk", "dv"), gradients(attend, tensors, weights)))


@pytest.mark.parametrize("tensor,value", [("q", math.nan), ("k", math.nan), ("v", math.nan), ("k", 80.0)])
def test_rows_do_not_depend_on_later_keys_and_nan_stays_in_the_rows_that_see_it(tensor, value):
    tensors = [x.detach().float() for x in inputs(36, **SIZES)[0]]
    y = heinsen_attention(*tensors)
    tensors["qkv".index(tensor)][:, 20, 0] = value
    changed = heinsen_attention(*tensors)
    rows, heads = (slice(20, 21), slice(0, 1)) if tensor == "q" else (slice(20, None), slice(None))
    seen = changed[:, rows, heads]
    assert seen.isnan().all() if math.isnan(value) else seen.isfinite().all()
    seen.copy_(y[:, rows, heads])
    assert torch.equal(changed, y)


def assert_equal_rows(rows, names, computed, expected):
    for name in names:
        assert torch.equal(computed[name][:, rows], expected[name][:, rows]), name


def test_nan_does_not_cross_documents():
    tensors, _, _ = inputs(33, **SIZES)
    resets = starts_of([[0] * 20 + [1] * 13])
    expected = results(tensors, resets=resets)
    with torch.no_grad():
        for x in tensors:
            x[:, 18] = math.nan
    computed = results(tensors, resets=resets)
    assert_equal_rows(slice(20, None), ("y", "dq", "dk", "dv"), computed, expected)
    assert_equal_rows(slice(None), ("S", "z"), computed, expected)
    assert computed["y"][:, 18:20].isnan().all() and computed["y"][:, :18].isfinite().all()


def test_a_gradient_of_nan_reaches_no_later_key_and_no_other_query():
    tensors, _, _ = inputs(18, **SIZES)
    dy = torch.randn(1, 18, 2, 16, device=DEVICE)
    expected = results(tensors, dy)
    dy[:, 5] = math.nan
    computed = results(tensors, dy)
    assert_equal_rows(slice(6, None), ("dq", "dk", "dv"), computed, expected)
    assert_equal_rows(slice(None, 5), ("dq",), computed, expected)
    assert computed["dk"][:, :6].isnan().all() and computed["dv"][:, :6].isnan().all()


def test_views_and_gradients_that_are_expanded_or_transposed():
    fused, dy = torch.randn(1, 10, 6, 16, device=DEVICE), torch.randn(1, 10, 2, 16, device=DEVICE)
    for gradient in (dy[:, :1, :1, :1].expand(dy.shape), dy.transpose(1, 2).contiguous().transpose(1, 2)):
        assert not gradient.is_contiguous()
        views = fused.split(2, 2)
        computed, expected = results(views, gradient), results([x.contiguous() for x in views], gradient.contiguous())
        # other strides are other code on a GPU, with sums in another order
        assert_close(computed.values(), expected.values(), 1e-5)


def test_the_operator_keeps_torchs_rules():
    (q, k, v, S, z), _, m = inputs(3, **SIZES | dict(H=1), dtype=torch.bfloat16, state=True)
    tensors = [x.bfloat16() for x in (q, k, v)] + [torch.tensor([[0, 0, 1]], dtype=torch.int32, device=DEVICE)]
    tensors = leaves_of([*tensors, *(x.float() for x in (m, S, z))])
    promises = ("test_schema", "test_autograd_registration", "test_faketensor")  # the others: test_operators.py
    torch.library.opcheck(torch.ops.sympow.heinsen.default, (*tensors, True), test_utils=promises)


@pytest.mark.gpu
def test_extra_memory(monkeypatch):
    """At 12 heads of 64 the states need 16 KB each in CHUNK tokens, one set at a time; L and delta 8 bytes a row."""
    monkeypatch.undo()
    T, H, D = 65536, 12, 64
    tensors = torch.randn(1, T, 3 * H, D, device=DEVICE).bfloat16().split(H, 2)
    dy = torch.randn(1, T, H, D, device=DEVICE).bfloat16()
    extra = extra_memory(lambda *x: operator.heinsen_attention(*x)[0], leaves_of(tensors), dy)
    assert extra <= 1.1 * H * T * (4 * D * (D + 2) / heinsen.CHUNK + 8), f"{extra / 1e6:.0f} MB"
