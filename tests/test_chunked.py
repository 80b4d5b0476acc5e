"""The chunked kernels against float64: outputs, every gradient, states in and out.

On the CPU in Triton's interpreter, in float32; with TEST_GPU=1 on the GPU, in bfloat16 and float32.
"""

import pytest
import torch
from oracle import GATES, relative_error

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from test_kernels import DEVICE, DTYPES, GPU, gradients, inputs  # noqa: E402

from attention import power  # noqa: E402
from attention.embedding import symmetric_power_dim, symmetric_power_embedding  # noqa: E402
from attention.power import PowerState, power_attention  # noqa: E402
from kernels import chunked, ops  # noqa: E402
from kernels.layout import features, layout  # noqa: E402

LONG = GPU and 3000 or 300  # tokens, in chunks of 128, with a ragged last one


def chunks(q, k, v, log_g=None, S=None, z=None):
    return ops.chunked_attention(q, k, v, log_g, S, z, p=2, chunk=128)[0]


def reference(q, k, v, log_g=None, S=None, z=None):
    """Plain PyTorch, which test_power.py holds to the oracle; float64."""
    return power_attention(q, k, v, log_g, p=2, form="quadratic", initial_state=None if S is None else PowerState(S, z))


def assert_close(results, expected, dy, tolerance=None):
    floor = 1e-3 * dy.double().norm().item()
    for name, x, r in zip(("y", "dq", "dk", "dv", "dlog_g", "dS", "dz"), results, expected):
        limit = tolerance or (
            (1e-5 if name == "y" else 1e-4) if dy.dtype == torch.float32 else 4e-3 if name == "y" else 8e-3
        )
        error = relative_error(x, r, floor)
        assert error <= limit, f"{name}: error {error:.1e}"


def assert_right(tensors, dy, **options):
    expected = gradients(reference, tensors, dy, torch.Tensor.double)
    assert_close(gradients(chunks, tensors, dy), expected, dy, **options)


@pytest.mark.parametrize("D,p", [(16, 2), (32, 2), (64, 2), (128, 2), (16, 4)])
def test_the_layout_holds_every_feature(D, p):
    x = layout(D, p, torch.device("cpu"))
    q, k = torch.randn(2, D, dtype=torch.float64)
    vector = lambda row: row if p == 2 else row[x.factors[0]] * row[x.factors[1]]
    phi = symmetric_power_embedding(k, p)
    state = (phi / x.root)[x.canonical]  # of a single key with the value 1
    assert len(state) == features(D, p) == 64 * x.tiles
    total = 0
    for part in x.parts.tolist():
        for i in range(part[12]):
            for slot in range(4):
                first = 64 * (part[13] + i) + 16 * slot
                product = vector(q)[part[slot] : part[slot] + 16] * vector(q)[part[4 + slot] + i]
                total += part[8 + slot] * (product @ state[first : first + 16])
    assert total.item() == pytest.approx(((q @ k) ** p).item(), rel=1e-4)
    torch.testing.assert_close(state[x.rows] * x.root, phi, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[x.where.long()], vector(k)[:, None] * vector(k), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates", GATES)
def test_every_gate(gates, dtype):
    assert_right(*inputs(LONG, gates, dtype, D=32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 127, 128, 129])
def test_every_length(T, dtype):
    short = 5e-2 if dtype == torch.bfloat16 else None
    assert_right(*inputs(T, "learned", dtype), tolerance=short)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [16, 32, 64])
def test_every_head_dimension_and_groups_of_heads(D, dtype):
    assert_right(
        *inputs(
            GPU and 1500 or 200,
            "zeros" if D == 32 else "none",
            dtype,
            B=2 if D < 64 else 1,
            H=4 if D < 64 else 1,
            Hkv=2 if D < 64 else 1,
            D=D,
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [3.0, 10.0])
def test_keys_with_a_common_mean(mean, dtype):
    tensors, dy = inputs(LONG, "none", dtype, D=64 if GPU else 16, mean=mean)
    assert_right(tensors, dy)
    _, (l, *_), _ = chunked.forward(*tensors, p=2, chunk=128)
    assert (l[..., :LONG] > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_inputs_of_any_size(size, dtype):
    (q, k, v, log_g), dy = inputs(LONG, "learned", dtype)
    assert_right([q, k * size, v * size, log_g], dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates", ["none", "learned", "zeros"])
def test_pieces_with_states_equal_the_whole(gates, dtype):
    """y, the last state and all gradients, through the states between pieces, with a loss on the last state too."""
    T, D = 300, 16
    (q, k, v, log_g), dy = inputs(T, gates, dtype, H=2, Hkv=1, D=D)
    Dphi = symmetric_power_dim(D, 2)
    k0, v0 = torch.randn(1, 1, 50, D, device=DEVICE), torch.randn(1, 1, 50, D, device=DEVICE)
    phi = symmetric_power_embedding(k0, 2)
    S0, z0 = phi.transpose(2, 3) @ v0, phi.sum(2)
    dS, dz = torch.randn(1, 1, Dphi, D, device=DEVICE), torch.randn(1, 1, Dphi, device=DEVICE)

    def in_pieces(cuts):
        def attend(q, k, v, *rest):
            log_g, S, z = rest if len(rest) == 3 else (None, *rest)
            ys = []
            for a, b in zip([0, *cuts], [*cuts, T]):
                gate = None if log_g is None else log_g[:, a:b]
                y, S, z = ops.chunked_attention(q[:, a:b], k[:, a:b], v[:, a:b], gate, S, z, p=2, chunk=128, final=True)
                ys.append(y)
            return torch.cat(ys, 1), S, z

        return attend

    def whole(q, k, v, *rest):
        log_g, S, z = rest if len(rest) == 3 else (None, *rest)
        y, state = power_attention(
            q, k, v, log_g, p=2, form="quadratic", initial_state=PowerState(S, z), return_state=True
        )
        return y, *state

    tensors = [x for x in (q, k, v, log_g, S0, z0) if x is not None]

    def results(attention, to):
        leaves = [to(x).detach().requires_grad_() for x in tensors]
        outputs = attention(*leaves)
        loss = sum((to(a) * b).sum() for a, b in zip((dy, dS / 100, dz / 100), outputs))
        return [*outputs, *torch.autograd.grad(loss, leaves)]

    expected = results(whole, torch.Tensor.double)
    for cuts in ([], [1, 129, 200]):
        for i, (x, r) in enumerate(zip(results(in_pieces(cuts), lambda x: x), expected, strict=True)):
            limit = 1e-4 if dtype == torch.float32 else 2e-2
            assert relative_error(x, r, 1e-3 * dy.norm().item()) < limit, f"output {i}, cuts {cuts}"


def test_discumsum_is_its_naive_twin():
    s = chunked.Sizes(*(torch.empty(1, 500, 2, 16, device=DEVICE) for _ in range(2)), 2, 128)
    u, g, first = (
        torch.randn(2, 4, 320, device=DEVICE),
        torch.rand(2, 4, device=DEVICE),
        torch.randn(2, 320, device=DEVICE),
    )
    for reverse in (False, True):
        expected, last = power.discumsum(u, g, first, reverse=reverse)
        x = u.clone()
        _, found, _ = chunked.discumsum(s, x, None, g, first, reverse=reverse, final=True)
        torch.testing.assert_close(x, expected)
        torch.testing.assert_close(found, last)


def test_the_operators_keep_torchs_rules():
    tensors, _ = inputs(140, "learned", DTYPES[0])
    leaves = [x.detach().requires_grad_() for x in tensors]
    state = [torch.rand(1, 1, 136, 16, device=DEVICE), torch.rand(1, 1, 136, device=DEVICE)]
    state = [x.requires_grad_() for x in state]
    torch.library.opcheck(torch.ops.sympow.chunked.default, (*leaves, *state, 2, 128, True))


def test_a_compiled_function_has_no_graph_break():
    tensors, dy = inputs(140, "learned", DTYPES[0])
    compiled = torch.compile(chunks, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    for x, r in zip(gradients(compiled, tensors, dy), gradients(chunks, tensors, dy)):
        assert torch.equal(x, r)


def test_power_attention_runs_the_chunked_kernels(monkeypatch):
    called = []
    monkeypatch.setattr(power, "kernels_take", lambda *a: a[1] != torch.float64)
    real = ops.chunked_attention
    monkeypatch.setattr(ops, "chunked_attention", lambda *a, **o: called.append(o) or real(*a, **o))
    (q, k, v, log_g), _ = inputs(300, "learned", DTYPES[0])
    y, state = power_attention(q, k, v, log_g, p=2, form="chunked", chunk_size=100, return_state=True)
    assert called == [dict(p=2, chunk=128, final=True)]
    power_attention(q, k, v, log_g, p=2, initial_state=state)
    assert called[1]["chunk"] == 256
    expected, of = power_attention(
        q.double(), k.double(), v.double(), log_g.double(), form="quadratic", return_state=True
    )
    limit = 1e-5 if DTYPES[0] == torch.float32 else 4e-3
    for x, r in ((y, expected), (state.S, of.S), (state.z, of.z)):
        assert relative_error(x, r, 1e-6) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("gates", ["none", "near one", "learned", "strong", "zeros"])
@pytest.mark.parametrize("T,D", [(4000, 32), (4000, 64), (4000, 128), (20000, 64)])
def test_long_sequences(T, D, gates):
    tensors, dy = inputs(T, gates, torch.bfloat16, H=2, Hkv=1, D=D)
    attend = lambda *x: power_attention(*x, p=2, form="chunked")
    assert_close(gradients(attend, tensors, dy), gradients(reference, tensors, dy, torch.Tensor.double), dy)


@pytest.mark.gpu
def test_two_runs_give_the_same_bits_and_nothing_is_left_unwritten():
    tensors, dy = inputs(3000, "learned", torch.bfloat16, D=64)
    first = gradients(chunks, tensors, dy)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        again = gradients(chunks, tensors, dy)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
