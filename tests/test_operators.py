"""The table of operators in attention/operator/check.py, rows of any width, and sizes that the kernels do not take."""

import pytest
import torch
from numerics import relative_error, uninitialized_memory_is_nan

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from test_kernels import DEVICE, DTYPES, GPU, assert_close, gradients  # noqa: E402

from sympow.attention.operator import check  # noqa: E402
from sympow.attention import gates  # noqa: E402
from sympow.attention.operator.check import Size  # noqa: E402
from sympow.kernels.support import HEAD_DIMS, why_not, width  # noqa: E402
from sympow.kernels.heinsen import passes as heinsen  # noqa: E402
from sympow.kernels.widths import to_width  # noqa: E402

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
    *((Size("rotary", torch.float32, D), 37, FAST) for D in (6, 16)),
    *((Size("cross_entropy", dtype), 37, FAST) for dtype in (torch.float32, torch.bfloat16)),
    *([(Size("states", DTYPES[0], 12, 4, False, E=10), 1500, FAST)] if GPU else []),  # the interpreter takes a minute
]


@pytest.mark.parametrize("size,T", [pytest.param(size, T, marks=marks) for size, T, marks in TABLE])
def test_every_operator_and_width_equals_float64_with_the_same_bits_twice(size, T, monkeypatch):
    """In memory that is full of NaN."""
    if not GPU:
        monkeypatch.setattr(heinsen, "CHUNK", 32)  # a few tokens are several chunks
    forward, backward = (1e-6, 1e-6) if size.form == "rotary" else check.TOLERANCE[size.dtype]
    if size.dtype == torch.bfloat16 and size.p:  # of a short sequence
        backward = 5e-2
    with uninitialized_memory_is_nan():
        errors = check.errors(size, 1500 if GPU else T, DEVICE)
    for name, error in errors.items():
        assert error <= (forward if name == "y" else backward), f"{name}: error {error:.1e}"


@pytest.mark.parametrize(
    "size",
    [
        Size("quadratic", DTYPES[0], 16, 2, True),
        Size("chunked", DTYPES[0], 16, 2, True),
        Size("heinsen", torch.float32, 16),
    ],
)
def test_a_compiled_function_has_no_graph_break(size):
    """In the graph the operator stands between others."""
    inputs, arguments, dy = check.create_inputs(size, 40 if size.form == "heinsen" else 130, DEVICE)
    attend = lambda q, **rest: check.OPERATORS[size.form].kernels(q=2 * q, **rest) + 1
    functions = torch.compile(attend, fullgraph=True, backend="inductor" if GPU else "aot_eager"), attend
    results, expected = (check.differentiate(function, inputs, arguments, dy).values() for function in functions)
    if size.form == "chunked" or not GPU:
        assert all(map(torch.equal, results, expected))
    assert_close(results, expected, 1e-2 if size.form == "quadratic" else 1e-5)


@pytest.mark.parametrize("name", ["y", "dx"])
def test_a_wrong_output_or_gradient_is_found(name, monkeypatch):
    rotary = check.OPERATORS["rotary"]
    broken = lambda x, cos, sin: rotary.kernels(x, cos, sin) * (1.1 if name == "y" else 1) + (x - x.detach())
    monkeypatch.setitem(check.OPERATORS, "rotary", rotary._replace(kernels=broken))
    errors = check.errors(Size("rotary", torch.float32, 16), 20, DEVICE)
    assert errors.pop("dx") > 1e-2 and (errors["y"] > 1e-2) == (name == "y")


def test_rows_of_a_width_that_the_kernels_have_are_not_copied():
    q, v = torch.zeros(1, 3, 2, 32), torch.zeros(1, 3, 2, 20)
    assert to_width("quadratic", q, q, q)[1] is q and to_width("quadratic", q, v)[0] is q
    forms = "quadratic", "chunked", "heinsen"
    assert all(width(form, torch.bfloat16, D, D) == D for form in forms for D in HEAD_DIMS)
    assert [width("quadratic", torch.bfloat16, 48, E) for E in (3, 64, 65, 200, 257)] == [64, 64, 128, 256, 0]
    assert width("quadratic", torch.float32, 129, 3) == width("chunked", torch.bfloat16, 129, 3) == 0


def test_what_the_kernels_do_not_take_is_said(hopper):
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
    assert [reason("heinsen", 64, 64, 0, dtype) for dtype in (torch.bfloat16, torch.float32)] == [""] * 2
    assert reason("heinsen", 64, 64, 0, torch.float64).startswith("float64 (they take bfloat16, float32")
    assert reason("heinsen", 130, 8, 0) == "head dimension 130 (they take up to 128)"
    assert reason("heinsen", 64, 130, 0) == "values 130 wide (they take up to 128)"


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
