"""What torch asks of the operators beside their numbers: torch.func, forward mode, and only the gradients asked for."""

import pytest
import torch
from helpers import run
from torch.func import grad, jvp, vmap
from torch.nn.functional import logsigmoid

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from test_kernels import DEVICE  # noqa: E402

from sympow.kernels import arguments, operators  # noqa: E402
from sympow.kernels.quadratic import passes as quadratic  # noqa: E402
from sympow.kernels.adaptive.operator import adaptive_attention  # noqa: E402
from sympow.kernels.heinsen.operator import heinsen_attention  # noqa: E402
from sympow.kernels.layout import symmetric_power_dim  # noqa: E402

SIZES = dict(p=2, chunk=128)


def cases():
    """Return {name: (function of tensors that returns a tuple, the tensors)}, with padded rows in all of them."""
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE)
    B, T, H, HKV, D, E = 1, 20, 2, 1, 12, 8
    q, k, v, log_g = make(B, T, H, D), make(B, T, HKV, D), make(B, T, HKV, E), logsigmoid(make(B, T, HKV) + 2)
    Dphi = symmetric_power_dim(D, 2)
    S, z, m, powers = make(B, HKV, Dphi, E), make(B, HKV, Dphi).abs() + 1, make(B, HKV, D), make(B, T).abs() + 1
    state = make(B, HKV, D, E).abs(), make(B, HKV, D).abs() + 1
    one = lambda f: lambda *x: (f(*x),)
    return {
        "quadratic": (one(lambda *x: operators.quadratic_attention(*x, p=4)), (q, k, v, log_g)),
        "sums": (lambda *x: operators.quadratic_sums(*x, p=2, scale=0.3), (q, k, v, log_g)),
        "chunked": (lambda *x: operators.chunked_attention(*x, **SIZES, final=True), (q, k, v, log_g, S, z)),
        "chunked_state": (lambda *x: operators.chunked_state(*x, **SIZES), (k, v, log_g, S, z)),
        "adaptive": (one(adaptive_attention), (q, k, v, powers)),
        "heinsen": (
            lambda q, k, v, S, z: (heinsen_attention(q, k, v, None, m.to(q), S, z, final=True)[i] for i in (0, 2, 3)),
            (*(x[:, :5] for x in (q, k, v)), *state),
        ),
    }  # fmt: skip


CASES = cases()
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name != "quadratic")) for name in CASES]


def of(name, device=None):
    """Return (a loss of the case's tensors, the function, the tensors)."""
    function, tensors = CASES[name]
    loss = lambda *x: sum(y.sin().sum() for y in function(*x))
    return loss, function, [x.to(device or DEVICE) for x in tensors]


def gradients(loss, tensors, needs):
    leaves = [x.clone().requires_grad_(need) for x, need in zip(tensors, needs)]
    loss(*leaves).backward()
    return [x.grad for x in leaves]


@pytest.mark.parametrize("name", NAMES)
def test_torch_func_gives_the_bits_of_autograd_and_of_samples_one_by_one(name):
    loss, function, tensors = of(name)
    all_of_them = tuple(range(len(tensors)))
    samples = [tensors, [tensors[0].flip(1), *tensors[1:]]]
    expected = [gradients(loss, x, [True] * len(x)) for x in samples]
    dims = (1, *[None] * (len(tensors) - 1))
    mapped = torch.stack([x[0] for x in samples], dim=1), *tensors[1:]
    results = vmap(lambda *x: tuple(function(*x)), dims)(*mapped)
    for i, x in enumerate(samples):
        assert all(torch.equal(y[i], r) for y, r in zip(results, function(*x), strict=True))
    per_sample = vmap(grad(loss, all_of_them), dims)(*mapped)
    assert all(torch.equal(d[i], r) for i in (0, 1) for d, r in zip(per_sample, expected[i], strict=True))
    of_sum = grad(lambda x: vmap(loss, dims)(x, *tensors[1:]).sum())(mapped[0])
    assert all(torch.equal(of_sum.select(1, i), expected[i][0]) for i in (0, 1))


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_and_second_derivatives_are_refused_in_one_line(name):
    """On the meta device: what is refused depends on no number."""
    loss, function, tensors = of(name, "meta")
    first, *rest = tensors
    of_first = lambda x: loss(x, *rest)
    twice = (torch.stack([first] * 2),) * 2
    refused = [
        lambda: jvp(of_first, (first,), (first,)),
        lambda: jvp(grad(of_first), (first,), (first,)),
        lambda: vmap(lambda x: jvp(of_first, (x,), (x,)))(twice[0]),
        lambda: jvp(vmap(of_first), twice[:1], twice[1:]),
        lambda: grad(lambda x: grad(of_first)(x).sum())(first),
    ]
    for leaf in (first, first.clone().requires_grad_()):
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward mode"):
            of_first(torch.autograd.forward_ad.make_dual(leaf, first))
    for call in refused:
        with pytest.raises(NotImplementedError, match="no (forward mode|second derivative)") as refusal:
            call()
        assert "\n" not in str(refusal.value) and "disable_kernels" in str(refusal.value)
    with torch.autograd.forward_ad.dual_level():  # without a tangent there is nothing to refuse
        of_first(first)


@pytest.mark.parametrize("transform", [grad, vmap])
def test_a_first_call_within_a_transform_leaves_nothing_of_it_behind(transform, monkeypatch):
    monkeypatch.setattr(arguments, "_positions", {})
    loss, _, (first, *rest) = of("chunked", "meta")
    of_first = lambda x: loss(x, *rest)
    transform(of_first)(first if transform is grad else torch.stack([first] * 2))
    with pytest.raises(NotImplementedError, match="no forward mode"):
        jvp(of_first, (first,), (first,))
    of_first(first)
    assert not any(map(torch._C._functorch.is_functorch_wrapped_tensor, arguments._positions.values()))


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_alone_has_the_bits_it_has_beside_the_others(name):
    loss, _, tensors = of(name)
    expected = gradients(loss, tensors, [True] * len(tensors))
    for asked in range(len(tensors)):
        found = gradients(loss, tensors, [i == asked for i in range(len(tensors))])
        assert torch.equal(found[asked], expected[asked]), asked
        assert all(x is None for i, x in enumerate(found) if i != asked)


def test_what_nobody_asks_for_is_not_computed(monkeypatch):
    loss, _, (q, k, v, log_g) = of("quadratic")
    launched = []
    for name in ("dq_kernel", "dkdv_kernel"):
        kernel = getattr(quadratic, name)

        class Counted:
            def __getitem__(self, grid, name=name, kernel=kernel):
                def launch(*arguments, **options):
                    launched.append((name, dict(zip(kernel.arg_names, arguments)) | options))
                    kernel[grid](*arguments, **options)

                return launch

        monkeypatch.setattr(quadratic, name, Counted())
    gradients(loss, (q, k, v, log_g), (True, False, False, False))
    assert {name for name, _ in launched} == {"dq_kernel"}
    launched.clear()
    gradients(loss, (q, k, v, log_g), (False, False, True, False))
    *all_dq, (name, dkdv) = launched
    assert name == "dkdv_kernel" and dkdv["rows"][2] is None  # nor the sums for dlog_g
    assert all(dq["outputs"][0] is None and dq["outputs"][3] is None for _, dq in all_dq)


def test_a_call_without_torch_compile_does_not_import_its_compiler():
    code = """
import sys, torch
from sympow.kernels import operators
q, k, v = (torch.randn(1, 130, 2, 16).requires_grad_() for _ in range(3))
y = operators.quadratic_attention(q, k, v, p=2)
y = y + operators.chunked_attention(q, k, v, None, None, None, p=2, chunk=128, final=False)[0]
y.sum().backward()
assert q.grad.any()
print("torch._dynamo" in sys.modules)
"""
    done = run("-c", code, env={"TRITON_INTERPRET": "1"})
    assert done.stdout.strip() == "False"
