"""What torch asks of the operators beside their numbers: torch.func in PyTorch, and only the gradients asked for."""

from dataclasses import dataclass

import pytest
import torch
from helpers import raises_one_line, run
from torch._subclasses import FakeTensorMode
from torch.func import grad, jvp, vmap
from torch.nn.functional import logsigmoid

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from test_kernels import DEVICE  # noqa: E402

from sympow.attention import heinsen  # noqa: E402
from sympow.attention.operator import check, dispatch  # noqa: E402
from sympow.attention.operator.check import Size  # noqa: E402
from sympow.attention.positions import log_recurrence  # noqa: E402
from sympow.attention.heinsen import heinsen_attention  # noqa: E402
from sympow.attention.power import power_attention  # noqa: E402
from sympow.kernels.quadratic import passes as quadratic  # noqa: E402

# padded rows in all of them
SIZES = [
    Size("quadratic", torch.float32, 12, 4, True, E=8),
    Size("sums", torch.float32, 12, 2, True, E=8),
    Size("chunked", torch.float32, 12, 2, True, E=8),
    Size("states", torch.float32, 12, 2, True, E=8),
    Size("heinsen", torch.float32, 12),
]


def case(size, device=DEVICE):
    """Return (a loss of the tensors of a size of check.py's table, the tensors)."""
    inputs, arguments, _ = check.create_inputs(size, 20 if size.p else 5, "cpu")
    arguments = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    loss = lambda *x: check.OPERATORS[size.form].kernels(**dict(zip(inputs, x)), **arguments).sin().sum()
    return loss, [x.to(device) for x in inputs.values()]


def gradients(loss, tensors, needs):
    leaves = [x.clone().requires_grad_(need) for x, need in zip(tensors, needs)]
    loss(*leaves).backward()
    return [x.grad for x in leaves]


@pytest.mark.parametrize("size", SIZES, ids=check.describe)
def test_second_derivatives_are_refused_in_one_line(size):
    """On the meta device: what is refused depends on no number."""
    loss, (first, *rest) = case(size, "meta")
    leaf = first.clone().requires_grad_()
    with raises_one_line(NotImplementedError, f"no second derivative.*{dispatch.__name__}.disable_kernels"):
        torch.autograd.grad(loss(leaf, *rest), leaf, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("size", SIZES, ids=check.describe)
def test_what_needs_no_gradient_passes_by_autograd(size, monkeypatch):
    loss, tensors = case(size)
    expected = loss(*[x.requires_grad_() for x in tensors])
    monkeypatch.setattr(torch.autograd.Function, "apply", None)
    with torch.no_grad():
        assert loss(*tensors).equal(expected)


def attend(q, k, v, log_g):
    """Compute power attention with a state and Heinsen's attention."""
    y, (S, z) = power_attention(q, k, v, log_g, p=2, form="chunked", chunk_size=16, return_state=True)
    return y.sum() + S.sin().sum() + z.sin().sum() + heinsen.heinsen_attention(q, k, v).sin().sum()


def test_transforms_are_computed_in_pytorch_on_every_device(monkeypatch):
    """Where kernels would run otherwise."""
    monkeypatch.setattr(dispatch.backend, "why_not", lambda *sizes: "")
    answers = []
    problem = dispatch.Problem(4096, 64, 64, 2, torch.bfloat16, "cuda", gated=True)

    def ask(x):
        answers.append((dispatch.plan(problem).on_kernels, dispatch.why_not("heinsen", "cuda", torch.bfloat16, 64, 64)))
        return x

    ask(torch.ones(2))
    assert answers.pop() == (True, "")
    vmap(ask)(torch.ones(2)), grad(ask)(torch.ones(())), jvp(ask, (torch.ones(2),), (torch.ones(2),))
    assert len(answers) == 3
    assert all(not on_kernels and "computed in PyTorch" in reason for on_kernels, reason in answers)


def test_forward_mode_and_second_derivatives_in_pytorch_agree_with_reverse_mode():
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
    generator = torch.Generator().manual_seed(0)
    tensors = make(1, 20, 2, 4), make(1, 20, 1, 4), make(1, 20, 1, 4), logsigmoid(make(1, 20, 1) + 2)
    directions = tuple(make(*x.shape) for x in tensors)
    along = lambda f: sum((d * t).sum() for d, t in zip(grad(f, (0, 1, 2, 3))(*tensors), directions))
    assert torch.allclose(jvp(attend, tensors, directions)[1], along(attend))
    of_gradient = lambda *x: grad(attend)(*x).sin().sum()
    assert torch.allclose(jvp(of_gradient, tensors, directions)[1], along(of_gradient))


def test_shapes_without_memory_leave_nothing_behind():
    """What FakeTensorMode computes first, real tensors need later. No other test has heads of 11."""
    x = torch.randn(1, 20, 1, 11)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x).requires_grad_()
        y, state = power_attention(fake, fake, fake, form="chunked", chunk_size=16, return_state=True)
        y.sum().backward()
    assert y.shape == x.shape and fake.grad.shape == x.shape
    y, again = power_attention(x, x, x, form="chunked", chunk_size=16, return_state=True)
    assert y.isfinite().all() and again.S.shape == state.S.shape


@pytest.mark.parametrize("form", ["quadratic", "chunked", "recurrent"])
def test_pieces_of_log_attention_have_the_tangents_of_the_whole(form):
    torch.manual_seed(0)
    tensors = torch.randn(3, 1, 6, 1, 3, dtype=torch.float64).unbind()
    directions = torch.randn(3, 1, 6, 1, 3, dtype=torch.float64).unbind()

    def whole(q, k, v):
        return heinsen_attention(q, k, v, form=form)

    def pieces(q, k, v):
        first, state = heinsen_attention(q[:, :4], k[:, :4], v[:, :4], form=form, chunk_size=2, return_state=True)
        return torch.cat((first, heinsen_attention(q[:, 4:], k[:, 4:], v[:, 4:], form=form, initial_state=state)), 1)

    tangents = [jvp(attend, tensors, directions)[1] for attend in (whole, pieces)]
    assert torch.allclose(*tangents, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attention", [power_attention, heinsen_attention])
@pytest.mark.parametrize("form", ["quadratic", "chunked", "recurrent"])
def test_tensors_of_inference_mode_are_read_outside_of_it(form, attention):
    with torch.inference_mode():
        q, k, v = torch.randn(3, 1, 20, 1, 4)
        y, state = attention(q, k, v, form=form, return_state=True)
    results = attention(q, k, v, form=form, return_state=True, initial_state=state)
    assert all(x.isfinite().all() for x in (results[0], *results[1]))
    assert torch.equal(attention(q, k, v, form=form), y)
    q = q.clone().requires_grad_()
    attention(q, k.clone(), v.clone(), form=form, initial_state=state).sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("T", [5, 40])
def test_log_positions_have_the_tangents_and_gradients_of_reverse_mode(T):
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
    generator = torch.Generator().manual_seed(T)
    tensors = [logsigmoid(make(2, T, 3)), make(2, T, 3), make(2, 3)]
    directions, weight = [make(*x.shape) for x in tensors], make(2, T, 3)
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected = torch.autograd.grad((log_recurrence(*leaves) * weight).sum(), leaves)
    loss = lambda *x: (log_recurrence(*x) * weight).sum()
    along = sum((d * t).sum() for d, t in zip(expected, directions))
    assert torch.allclose(jvp(loss, tuple(tensors), tuple(directions))[1], along)
    assert all(map(torch.allclose, grad(loss, (0, 1, 2))(*tensors), expected))


def test_log_values_are_not_looked_at_within_vmap():
    q, k, v = torch.randn(3, 4, 20, 1, 4)
    attend = lambda *x: heinsen.heinsen_attention(*x, values="log")
    y = vmap(lambda *x: attend(*(t.unsqueeze(0) for t in x)).squeeze(0))(q, k, v)
    assert torch.allclose(y, attend(q, k, v), atol=1e-5)


@pytest.mark.parametrize(
    "size", [SIZES[0], *(pytest.param(size, marks=pytest.mark.slow) for size in SIZES[1:])], ids=check.describe
)
def test_a_gradient_alone_has_the_bits_it_has_beside_the_others(size):
    loss, tensors = case(size)
    expected = gradients(loss, tensors, [True] * len(tensors))
    for index in range(len(tensors)):
        results = gradients(loss, tensors, [i == index for i in range(len(tensors))])
        assert torch.equal(results.pop(index), expected[index]), index
        assert all(x is None for x in results)


def test_what_nobody_asks_for_is_not_computed(monkeypatch):
    loss, tensors = case(SIZES[0])
    launches = []

    @dataclass
    class Recorded:
        kernel: object

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                launches.append((self.kernel, dict(zip(self.kernel.arg_names, arguments)) | options))
                self.kernel[grid](*arguments, **options)

            return launch

    dq_kernel, dkdv_kernel = quadratic.dq_kernel, quadratic.dkdv_kernel
    monkeypatch.setattr(quadratic, "dq_kernel", Recorded(dq_kernel))
    monkeypatch.setattr(quadratic, "dkdv_kernel", Recorded(dkdv_kernel))
    gradients(loss, tensors, (True, False, False, False))
    assert {kernel for kernel, _ in launches} == {dq_kernel}
    launches.clear()
    gradients(loss, tensors, (False, False, True, False))
    *all_dq, (kernel, dkdv) = launches
    assert kernel is dkdv_kernel and dkdv["rows"][2] is None  # nor the sums for dlog_g
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
