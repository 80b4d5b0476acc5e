"""What test_combinations.py does not cover of the chunked kernels: layouts, many chunks, unusual numbers and gates.

On the CPU in Triton's interpreter, in float32; with TEST_GPU=1 on the GPU, in bfloat16 and float32.
"""

import math

import pytest
import torch
from numerics import GATES, LARGE, relative_error

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from test_kernels import DEVICE, DTYPES, GPU, gradients, inputs  # noqa: E402

from sympow.attention.operator import dispatch, memory  # noqa: E402
from sympow.attention.embedding import symmetric_power_embedding  # noqa: E402
from sympow.attention.power import PowerState, power_attention  # noqa: E402
from sympow.kernels.chunked import passes as chunked, query_gradient_p4  # noqa: E402
from sympow.kernels import cost, operators  # noqa: E402
from sympow.kernels.layout import SPREAD_ROWS, layout  # noqa: E402

LONG = GPU and 3000 or 300  # tokens, in chunks of 128, with a ragged last one
HEADS = 2 if GPU else 1  # query heads that share a key head; in the interpreter only a few tests have such groups


def chunks(p):
    return lambda q, k, v, log_g=None, S=None, z=None: operators.chunked_attention(
        q, k, v, log_g, S, z, p=p, chunk=128
    )[0]


def reference(p):
    """Return the results of plain PyTorch in float64, which test_power.py compares with the specification."""

    def attend(q, k, v, log_g=None, S=None, z=None):
        state = None if S is None else PowerState(S, z)
        return power_attention(q, k, v, log_g, p=p, form="quadratic", initial_state=state)

    return attend


def assert_close(results, expected, dy, tolerance=None):
    """Compare y and gradients; tolerance: a limit for all, or (one for y, one for gradients)."""
    floor = 1e-3 * dy.double().norm().item()
    default = (1e-5, 1e-4) if dy.dtype == torch.float32 else (4e-3, 8e-3)
    limits = tolerance if isinstance(tolerance, tuple) else (tolerance, tolerance) if tolerance else default
    for name, x, r in zip(("y", "dq", "dk", "dv", "dlog_g", "dS", "dz"), results, expected):
        error, limit = relative_error(x, r, floor), limits[name != "y"]
        assert error <= limit, f"{name}: error {error:.1e}"


def assert_right(tensors, dy, p=2, **options):
    expected = gradients(reference(p), tensors, dy, torch.Tensor.double)
    assert_close(gradients(chunks(p), tensors, dy), expected, dy, **options)


# in the interpreter, p = 4 only where its kernels differ
POWERS = (2, 4) if GPU else (2,)


@pytest.fixture
def features_in_float16(monkeypatch):
    """Let the chunked form of float32 inputs keep its features and states in float16, as it does for bfloat16.

    The interpreter has no products of bfloat16; this way it shows what float16 between the kernels rounds off.
    """
    monkeypatch.setitem(chunked.HALF, torch.float32, torch.float16)


EVERY_GATE = [(LONG, g, p, dict(H=HEADS, D=32 if GPU and p == 2 else 16)) for g in GATES for p in POWERS]
P_4 = (140, "all zero" if GPU else "zeros", 4, dict(H=HEADS))
# gates are summed up in pieces of 1,024 tokens: the number of resets before each has to carry over
RESETS_IN_A_LATER_PIECE = (1100, "zeros", 2, dict(H=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T,gates,p,sizes", [*EVERY_GATE, P_4, RESETS_IN_A_LATER_PIECE])
def test_outputs_and_gradients(T, gates, p, sizes, dtype):
    limits = {1100: 8e-3, 140: 5e-2}
    tolerance = limits.get(T) if dtype == torch.bfloat16 else None
    assert_right(*inputs(T, gates, dtype, **sizes), p, tolerance=tolerance)


@pytest.mark.parametrize(
    "D,p", [(16, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((64, 2), (128, 2), (16, 4), (32, 4)))]
)
def test_features_in_float16(D, p, features_in_float16):
    """With gates near one, so that most of what a row sees comes through the features and the states."""
    dtype = torch.bfloat16 if GPU else torch.float32
    tensors, dy = inputs(140 if p == 4 else 290, "near one", dtype, H=HEADS, D=D)
    assert_right(tensors, dy, p, tolerance=5e-2 if p == 4 else (4e-3, 8e-3))


@pytest.mark.parametrize("p", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_loss_of_the_last_tokens_has_exact_gradients(p, features_in_float16):
    """States are rounded relative to a bound of their entries, to which chunks with a gradient of zero add nothing."""
    tensors, dy = inputs(LONG, "none", torch.bfloat16 if GPU else torch.float32)
    dy[:, :-5] = 0
    assert_right(tensors, dy, p, tolerance=8e-3 if GPU else 3e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [16, 32])
def test_p_4_where_all_keys_and_queries_agree(D, T=600):
    """Z x is as large as it can be, and has to stay within float16; in the operator too."""
    (q, k, v, _), dy = inputs(T, "none", torch.bfloat16, H=1, D=D)
    tensors = [q + 10, k + 10, v, None]
    assert all(x.isfinite().all() for x in gradients(chunks(4), tensors, dy))
    k = tensors[1].detach().requires_grad_()
    S, z = operators.chunked_state(k, v, p=4, chunk=128)
    phi = symmetric_power_embedding(k.detach().float(), 4).sum(1)
    (dk,) = torch.autograd.grad(z, k, phi)
    assert dk.isfinite().all() and dk.any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_p_4_takes_some_heads_after_the_others(dtype, monkeypatch):
    """Its gradient to q, as memory allows: the same bits, whatever there is."""
    tensors, dy = inputs(140, "none", dtype, B=3)
    together = gradients(chunks(4), tensors, dy)
    size = query_gradient_p4.spread_bytes(16, 2, 2 * 256, chunked.HALF.get(dtype, dtype).itemsize)
    monkeypatch.setattr(query_gradient_p4, "SPREAD", 2 * size)  # two sequences, then one
    assert all(map(torch.equal, gradients(chunks(4), tensors, dy), together))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", POWERS)
def test_keys_with_a_common_mean(p, dtype, mean=10.0):
    D = 16 if not GPU else 64 if p == 2 else 32
    tensors, dy = inputs(LONG, "none", dtype, H=HEADS, D=D, mean=mean)
    assert_right(tensors, dy, p)
    _, (l, *_), _ = chunked.forward(*tensors, p=p, chunk=128)
    assert (l[..., :LONG] > 0).all()


def with_features_in_float16(tensors, dy, p):
    """Return the results of the kernels and the expected ones, of bfloat16 inputs; in the interpreter as float32."""
    dtype = torch.bfloat16 if GPU else torch.float32
    tensors = [*(x.to(dtype) for x in tensors[:3]), tensors[3]]
    results = gradients(chunks(p), tensors, dy.to(dtype))
    return results, gradients(reference(p), tensors, dy, torch.Tensor.double)


@pytest.mark.parametrize("p", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_mean_that_the_queries_do_not_see_costs_no_precision(p, features_in_float16):
    """As it came, the mean is in every product of two entries: y would be off by 1.4e-2, of p = 4 by more than 1."""
    (q, k, v, log_g), dy = inputs(3000 if GPU else 270, "near one", torch.bfloat16, H=2, mean=40.0)
    results, expected = with_features_in_float16([q, k, v, log_g], dy, p)
    for name, x, r in zip(("y", "dq", "dk", "dv", "dlog_g"), results, expected):
        limit = (1.5e-2 if name == "dlog_g" and p == 4 else 8e-3) if GPU else 2e-2 if name == "dlog_g" else 2e-3
        assert relative_error(x, r, 1e-3 * dy.norm().item()) < limit, name


def test_rows_of_keys_without_a_mean_are_not_reflected(features_in_float16, monkeypatch):
    """They keep their bits beside a key head with a mean above the deviations, which is reflected."""
    (q, k, v, log_g), _ = inputs(200, "near one", torch.float32, H=2, Hkv=2)
    k[:, :, 1] -= 2
    y = chunks(2)(q, k, v, log_g)
    monkeypatch.setattr(chunked, "reflects", lambda *_: False)
    as_it_came = chunks(2)(q, k, v, log_g)
    assert torch.equal(as_it_came[:, :, 0], y[:, :, 0]) and not torch.equal(as_it_came[:, :, 1], y[:, :, 1])


def gates_that_forget(T):
    """Return log_g [1, T, 2]: one half at each token; near one, but for tokens 90 to 139 and a reset at 250."""
    log_g = torch.full((1, T, 2), math.log(0.5), device=DEVICE)
    log_g[:, :, 1] = -1e-3
    log_g[:, 90:140, 1] = -1
    log_g[:, 250, 1] = -math.inf
    return log_g


@pytest.mark.parametrize("p", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_where_gates_forget_the_first_rows_of_a_chunk_are_exact(p, features_in_float16):
    """Rows that see few keys, all of them before their chunk, would have the rounding errors of features."""
    T = 3000 if GPU else 270
    (q, k, v, _), dy = inputs(T, "none", torch.bfloat16, H=4 if p == 2 else 2, Hkv=2)
    results, expected = with_features_in_float16([q, k, v, gates_that_forget(T)], dy, p)
    assert_close(results, expected, dy, (5e-3, 2e-2) if GPU else (5e-6, 5e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_inputs_of_any_size(size, dtype):
    (q, k, v, log_g), dy = inputs(LONG, "learned", dtype, H=HEADS)
    assert_right([q, k * size, v * size, log_g], dy)


def test_the_operators_keep_torchs_rules():
    tensors, _ = inputs(100, "learned", DTYPES[0])
    leaves = [x.detach().requires_grad_() for x in tensors]
    state = [torch.rand(1, 1, 136, 16, device=DEVICE), torch.rand(1, 1, 136, device=DEVICE)]
    state = [x.requires_grad_() for x in state]
    promises = ("test_schema", "test_autograd_registration", "test_faketensor")  # the others: test_operators.py
    arguments = (*leaves, *state, None, 2, 128, True, None)
    torch.library.opcheck(torch.ops.sympow.chunked.default, arguments, test_utils=promises)


def test_power_attention_runs_the_chunked_kernels(monkeypatch):
    monkeypatch.setattr(dispatch, "why_not", lambda *sizes: "")
    called = []
    real = operators.chunked_attention
    monkeypatch.setattr(operators, "chunked_attention", lambda *a, **o: called.append(o) or real(*a, **o))
    (q, k, v, log_g), _ = inputs(140, "learned", DTYPES[0])
    _, state = power_attention(q, k, v, log_g, p=2, form="chunked", chunk_size=100, return_state=True)
    assert called == [dict(p=2, chunk=128, final=True)]
    power_attention(q, k, v, log_g, p=2, initial_state=state)
    assert called[1]["chunk"] == 256
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**4)
    monkeypatch.setattr(memory, "SURELY_FREE", 10**4)
    with pytest.raises(MemoryError, match="p=2 at head dimension 16 takes [0-9,]+ bytes for 1 x 140 tokens"):
        power_attention(q, k, v, log_g, p=2, form="chunked")


@pytest.mark.gpu
@LARGE
@pytest.mark.parametrize(
    "T,D,p,gates",
    [
        *((T, D, 2, g) for T, D in ((4000, 32), (4000, 64), (4000, 128), (20000, 64)) for g in GATES),
        *((T, D, 4, g) for T, D in ((4000, 32), (2000, 64)) for g in GATES),
    ],
)
def test_long_sequences(T, D, p, gates):
    tensors, dy = inputs(T, gates, torch.bfloat16, H=2, Hkv=1, D=D)
    attend = lambda *x: power_attention(*x, p=p, form="chunked", chunk_size=1024)
    assert_close(gradients(attend, tensors, dy), gradients(reference(p), tensors, dy, torch.Tensor.double), dy)


def test_the_cost_model_says_quadratic_first_and_then_chunked():
    for D, p in cost.CHUNKED:
        for gated in (True, False):
            C, T = cost.best_size(D, p, gated), cost.crossing(D, p, gated)
            assert C in cost.SIZES and C < T
            assert cost.best_form(T - 1, D, p, gated) == "quadratic" and cost.best_form(T + 1, D, p, gated) == "chunked"
            costs = cost.quadratic_ns(T, D, gated), cost.chunked_ns(T, C, D, p, gated)
            assert costs[0] == pytest.approx(costs[1])
            assert cost.chunk_size(200, D, p, gated) == 256 - 128 * (C == 128)


def test_a_sequence_too_long_for_32_bits_is_refused():
    q = torch.empty(1, 2**20, 1, 64, device="meta")
    with pytest.raises(ValueError, match="at most 516,096 tokens at once, got 1,048,576: cut it"):
        chunked.Sizes(q, q, 4, 16384)


def test_what_is_allocated_is_what_was_computed_beforehand():
    """Check it on the GPU; elsewhere check the sizes of states and of the buffers."""
    for D, p in ((16, 2), (32, 2), (16, 4), (32, 4), (64, 4)):
        x = layout(D, p, torch.device("cpu"))
        assert p == 2 or len(x.where) == SPREAD_ROWS[D]
        assert chunked.state_size(D, p) == 64 * x.tiles * D + (x.M**2 if p == 4 else 0)
        shape = torch.empty(1, 4096, 4, D, dtype=torch.bfloat16, device="meta")
        assert chunked.bytes_needed(*[shape] * 3, p, 1024) > 4 * 4 * 2 * chunked.state_size(D, p)
    if not GPU:
        return
    for D, p, T in ((64, 2, 16384), (32, 4, 16384)):
        (q, k, v, log_g), dy = inputs(T, "learned", torch.bfloat16, H=4, Hkv=4, D=D)
        tensors = [x.requires_grad_() for x in (q, k, v, log_g)]
        for _ in range(2):
            y = operators.chunked_attention(*tensors, p=p, chunk=1024)[0]
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
            torch.autograd.grad(y, tensors, dy)
            used = torch.cuda.max_memory_allocated() - allocated
        saved = chunked.state_size(D, p) * 2 * 4 * T // 1024
        assert used + saved <= 1.35 * chunked.bytes_needed(q, k, v, p, 1024)
