"""The table of operators in attention/operator/check.py, rows of any width, and what the kernels do not take."""

from itertools import combinations_with_replacement

import pytest
import torch
from numerics import relative_error, uninitialized_memory_is_nan

pytest.importorskip("triton", reason="Triton has no wheel for this system")

import test_heinsen_kernels  # noqa: E402
from test_kernels import DEVICE, DTYPES, GPU, assert_close, gradients  # noqa: E402

from sympow.attention.operator import check, forms  # noqa: E402
from sympow.attention import gates  # noqa: E402
from sympow.attention.operator.check import Size  # noqa: E402
from sympow.kernels.support import HEAD_DIMS, why_not, width  # noqa: E402
from sympow.kernels.heinsen import passes as heinsen  # noqa: E402
from sympow.kernels.widths import narrow_state, to_width, widen_state  # noqa: E402
from sympow.kernels.layout import positions_of_narrower  # noqa: E402

# ---- the table of check.py

FAST, SLOW = [], [pytest.mark.slow]
TABLE = [
    (Size("quadratic", DTYPES[0], 24, 4, True, E=20, n=37), 60, FAST),
    (Size("quadratic", torch.bfloat16, 130, 2, False, E=256), 33, FAST),
    (Size("sums", DTYPES[0], 12, 2, True, E=16, n=30), 40, FAST),
    (Size("sums", DTYPES[0], 16, 6), 70, SLOW),
    (Size("chunked", DTYPES[0], 12, 2, True, E=20), 60, SLOW),
    (Size("states", DTYPES[0], 12, 2, True, E=20), 60, SLOW),
    *((Size("heinsen", DTYPES[0], D), 17, FAST if D == 16 else SLOW) for D in (16, 32, 64, 128)),
    (Size("heinsen", DTYPES[0], 16, v_dtype=torch.float32), 70, FAST),
    *([(Size("states", DTYPES[0], 12, 4, False, E=10), 1500, FAST)] if GPU else []),  # the interpreter takes a minute
]


@pytest.mark.parametrize("size,T", [pytest.param(size, T, marks=marks) for size, T, marks in TABLE])
def test_every_operator_and_width_equals_float64_with_the_same_bits_twice(size, T, monkeypatch):
    """In memory that is full of NaN."""
    if not GPU:
        monkeypatch.setattr(heinsen, "CHUNK", 32)  # a few tokens are several chunks
    forward, backward = (1e-5, 1e-4) if size.dtype == torch.float32 else (4e-3, 5e-2)
    with uninitialized_memory_is_nan():
        errors = check.errors(size, 1500 if GPU else T, DEVICE)
    for name, error in errors.items():
        assert error <= (forward if name == "y" else backward), f"{name}: error {error:.1e}"


@pytest.mark.parametrize("E", [12, pytest.param(5, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.slow)])
def test_log_attention_takes_rows_of_any_width(E):
    """Features behind a row have no weight: their exponents are far below any other."""
    dtype = test_heinsen_kernels.DTYPES[0]
    (q, k, v, documents, m, S, z), grads = test_heinsen_kernels.inputs(20, dtype, D=12, state=True)
    to = lambda x: torch.nn.functional.pad(x, (0, E - 12))  # cuts if that is below zero
    tensors = [q, k, to(v), documents, m, to(S), z]
    test_heinsen_kernels.assert_right(tensors, [to(grads[0]), to(grads[1]), grads[2]])


@pytest.mark.parametrize("D,W,p", [(3, 5, 2), (5, 8, 4), (12, 16, 4), (24, 32, 2), (1, 4, 6)])
def test_states_of_narrower_rows_are_part_of_wider_ones(D, W, p):
    place = {index: i for i, index in enumerate(combinations_with_replacement(range(W), p))}
    assert [*positions_of_narrower(D, W, p)] == [place[i] for i in combinations_with_replacement(range(D), p)]
    k, v = torch.randn(1, 1, 7, D), torch.randn(1, 1, 7, D)

    def state(k, v):
        S, z = forms.update_state(k, torch.cat((v, torch.ones(1, 1, 7, 1)), -1), p).split((v.shape[3], 1), -1)
        return S, z[..., 0]

    narrow, wide = state(k, v), state(*(torch.nn.functional.pad(x, (0, W - D)) for x in (k, v)))
    assert_close(widen_state(*narrow, D, W, p), wide, 1e-6)
    assert_close(narrow_state(*wide, D, D, p), narrow, 1e-6)


def test_rows_of_a_width_that_the_kernels_have_are_not_copied():
    q, v = torch.zeros(1, 3, 2, 32), torch.zeros(1, 3, 2, 20)
    assert to_width("quadratic", q, q, q)[1] is q and to_width("quadratic", q, v)[0] is q
    forms = "quadratic", "chunked", "heinsen"
    assert all(width(form, torch.bfloat16, D, D) == D for form in forms for D in HEAD_DIMS)
    assert [width("quadratic", torch.bfloat16, 48, E) for E in (3, 64, 65, 200, 257)] == [64, 64, 128, 256, 0]
    assert width("quadratic", torch.float32, 129, 3) == width("chunked", torch.bfloat16, 129, 3) == 0


def test_what_the_kernels_do_not_take_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    reason = lambda form, D, E, p, dtype=torch.bfloat16: why_not(form, dtype, D, E, p)
    assert [reason("quadratic", *sizes) for sizes in ((80, 96, 8), (256, 3, 2))] == ["", ""]
    assert reason("chunked", 48, 64, 2) == reason("chunked", 48, 20, 4) == ""
    assert reason("quadratic", 257, 3, 2) == "head dimension 257 (they take up to 256)"
    assert reason("quadratic", 3, 257, 2) == "values 257 wide (they take up to 256)"
    assert reason("quadratic", 130, 3, 2, torch.float32) == "head dimension 130 (they take up to 128 in float32)"
    assert reason("chunked", 130, 3, 2) == "head dimension 130 (they take up to 128 in the chunked form)"
    sizes = "(in the chunked form they take p=2 up to 128, p=4 up to 64)"
    assert reason("chunked", 48, 80, 4) == f"head dimension 48 and values 80 wide with p=4 {sizes}"
    assert reason("decode", 48, 48, 2).startswith("head dimension 48 ") and reason("decode", 64, 32, 2)


@pytest.mark.parametrize("compiled", [False, *([True] if DEVICE == "cuda" else [])])
@pytest.mark.parametrize("n", [1, 13, 16])
def test_gates_product_is_as_exact_as_float32(n, compiled, monkeypatch):
    """x is bfloat16 already, and its gradient is rounded as autocast's is."""
    x = torch.randn(3, 100, 64, device=DEVICE, dtype=torch.bfloat16)
    weight = 3 * torch.randn(n, 64, device=DEVICE)
    dy = torch.randn(3, 100, n, device=DEVICE)
    assert not gates.runs_on_matrix_unit(x, weight)  # without autocast
    monkeypatch.setattr(gates, "runs_on_matrix_unit", lambda x, weight: True)
    product = torch.compile(gates.linear_fp32) if compiled else gates.linear_fp32
    y, dx, dweight = gradients(product, (x, weight), dy)
    assert y.dtype == torch.float32
    expected, *references = gradients(torch.nn.functional.linear, (x, weight), dy, torch.Tensor.double)
    assert relative_error(y, expected, 0) < 1e-6
    assert relative_error(dx, references[0], 0) < 6e-3
    assert relative_error(dweight, references[1], 0) < 2e-6
    torch.library.opcheck(gates.mm_fp32, (x[0, :96], x[1, :96].t()))
