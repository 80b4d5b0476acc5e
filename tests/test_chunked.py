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
from sympow.kernels.chunked import discumsum, passes as chunked, query_gradient_p4  # noqa: E402
from sympow.kernels import cost, operators  # noqa: E402
from sympow.kernels.layout import SPREAD_ROWS, entries, features, layout  # noqa: E402

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


@pytest.mark.parametrize("where,value", [("q", math.inf), ("k", math.nan), ("v", math.inf), ("log_g", math.nan)])
def test_nan_comes_out_as_nan_and_changes_no_row_before_it(where, value):
    tensors, _ = inputs(LONG, "near one", DTYPES[0], H=2, Hkv=2)
    y, at = chunks(2)(*tensors), 140  # in the second chunk
    tensors[("q", "k", "v", "log_g").index(where)][:, at, 0, ...] = value
    wrong = chunks(2)(*tensors)
    before = 128 if where == "v" else at  # a value reaches the rows of its tile
    rows = slice(at, at + 1) if where == "q" else slice(at, None)
    assert torch.equal(wrong[:, :before], y[:, :before]) and torch.equal(wrong[:, :, 1], y[:, :, 1])
    assert not wrong[:, rows, 0].isfinite().any()


def state_of_one_key(D, p):
    """Return the layout, q and k [D], and the state of this single key with the value 1, float64."""
    torch.manual_seed(0)
    x = layout(D, p, torch.device("cpu"))
    q, k = torch.randn(2, D, dtype=torch.float64)
    return x, q, k, (symmetric_power_embedding(k, p) / x.root)[x.canonical]


def with_scalars(row, x):
    """Return the entries of x for a row, and for p = 4 the scalars behind them."""
    return row if x.factors is None else row[x.factors[0]] * row[x.factors[1]]


@pytest.mark.parametrize("D,p", [(16, 2), (32, 2), (64, 2), (128, 2), (16, 4), (32, 4)])
def test_the_layout_holds_every_feature(D, p):
    x, q, k, state = state_of_one_key(D, p)
    q_entries, k_entries = with_scalars(q, x)[: x.M], with_scalars(k, x)[: x.M]
    assert len(state) == features(D, p) == 64 * x.tiles and len(q_entries) == entries(D, p) == x.M
    total = 0
    for part in x.parts.tolist():
        for i in range(part[12]):
            for slot in range(4):
                first = 64 * (part[13] + i) + 16 * slot
                product = q_entries[part[slot] : part[slot] + 16] * with_scalars(q, x)[part[4 + slot] + i]
                total += (product * x.orders[first : first + 16]) @ state[first : first + 16]
    score, size = (q @ k) ** p, (q.norm() * k.norm()) ** p
    assert abs(total - score) < 1e-6 * size
    phi = symmetric_power_embedding(k, p)
    square = (phi / x.root)[x.square].view(x.M, x.M)
    pairs = [(state[x.rows] * x.root, phi), (square, k_entries[:, None] * k_entries)]
    pairs += [(square.flatten()[x.places] * x.root, phi)]
    if p == 2:
        pairs += [(state[x.where.long()], square)]
    else:
        weights = x.orders[64 * x.tiles :].view(x.M, x.M)
        assert abs(q_entries @ (weights * square) @ q_entries - score) < 1e-6 * size
    for result, expected in pairs:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("D", [16, 32])
def test_the_products_lists_give_the_gradient(D):
    """Check the sums of query_gradient for p = 4: each entry's and each scalar's sum over its list."""
    x, q, k, state = state_of_one_key(D, 4)
    places, state = with_scalars(q, x), state * x.orders[: 64 * x.tiles]
    gradient, steps = torch.zeros(2 * x.M, dtype=torch.float64), len(x.lists) // 2
    for step, (start, first, last, row) in enumerate(x.lists.tolist()):
        side, factors = (0, x.M) if step < steps else (x.M, 0)
        sums = places[factors + first : factors + last] @ state[x.where[row : row + last - first].long()]
        inside = [0 <= start + m < x.M for m in range(32)]
        gradient[[side + start + m for m in range(32) if inside[m]]] += sums[inside]
        assert not sums[[not x for x in inside]].any()
    dq = torch.zeros_like(q)
    for a, b in (x.factors.long(), x.factors.long().flip(0)):
        dq.index_add_(0, a, gradient * q[b])
    torch.testing.assert_close(dq, 4 * (q @ k) ** 3 * k, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("D,p", [(16, 2), (128, 2), pytest.param(16, 4, marks=pytest.mark.slow)])
def test_features_in_float16(D, p, features_in_float16):
    """With gates near one, so that most of what a row sees comes through the features and the states."""
    dtype = torch.bfloat16 if GPU else torch.float32
    tensors, dy = inputs(140 if p == 4 else 290, "near one", dtype, H=HEADS, D=D)
    assert_right(tensors, dy, p, tolerance=5e-2 if p == 4 else (4e-3, 8e-3))


@pytest.fixture
def on_kernels(monkeypatch):
    """Let power_attention take the kernels for all but float64."""
    monkeypatch.setattr(dispatch, "why_not", lambda form, device, dtype, *_: "no" * (dtype == torch.float64))


@pytest.mark.parametrize("p", [2, 4])
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
    (q, k, *_), dy = inputs(140, "none", dtype, B=3, H=2, Hkv=1)
    s = chunked.Sizes(q, k, 4, 128)
    S, unit = torch.randn(3, s.chunks, s.F, device=DEVICE), torch.ones(3, s.chunks, device=DEVICE)  # any will do
    y, l = torch.randn(q.shape, device=DEVICE).to(dtype), torch.ones(3, 2, 256, device=DEVICE)
    queries, states = chunked.prepare(s, q, dy, y, l), chunked.States(S.to(s.half), unit, None)
    together, one_by_one = torch.zeros(2, *q.shape, dtype=dtype, device=DEVICE)
    chunked.query_gradient(s, queries, states, 0, together, q, False)
    two_heads = 2 * query_gradient_p4.spread_bytes(16, s.chunks, 2 * s.TP, states.S.element_size())
    monkeypatch.setattr(query_gradient_p4, "SPREAD", two_heads)  # two sequences, then one
    chunked.query_gradient(s, queries, states, 0, one_by_one, q, False)
    assert together[:, 128:].any(dim=3).all() and torch.equal(together, one_by_one)


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
    """Same bits as before; a mean above the deviations, a key head's own, becomes the first coordinate."""
    (q, k, v, log_g), _ = inputs(200, "near one", torch.float32, H=2, Hkv=2)
    y, saved, _ = chunked.forward(q, k, v, log_g, p=2, chunk=128)
    k = k.clone()
    k[:, :, 1] -= 2
    of_mean, (*_, mirror, _, _, _, _, _), _ = chunked.forward(q, k, v, log_g, p=2, chunk=128)
    assert mirror.shape == (2, 16) and not mirror[0].any()
    mean = k[0, :128, 1].mean(0)
    reflected = mean - 2 * (mirror[1] @ mean) * mirror[1]
    assert reflected[1:].abs().max() < 1e-5 and abs(reflected[0].abs() - mean.norm()) < 1e-5
    meta = [x.to("meta") for x in (q, k, v, log_g)]
    *_, shapes = torch.ops.sympow.chunked(*meta, None, None, None, 2, 128, False, None)
    assert [x.shape for x in shapes] == [x.shape for x in saved]
    monkeypatch.setattr(chunked, "reflects", lambda *_: False)
    as_it_came = chunked.forward(q, k, v, log_g, p=2, chunk=128)[0]
    assert torch.equal(y[:, :, 0], of_mean[:, :, 0]) and torch.equal(as_it_came[:, :, 0], y[:, :, 0])
    assert not torch.equal(as_it_came[:, :, 1], of_mean[:, :, 1])


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


def test_a_chunk_whose_gates_forget_reads_no_state_in_its_first_128_rows():
    k = torch.zeros(1, 600, 2, 16, device=DEVICE)
    decay_from_start, _, _, overlap = chunked.chunk_gates(gates_that_forget(600), chunked.Sizes(k, k, 2, 256))
    assert overlap.tolist() == [[0, 128, 128], [0, 128, 0]]  # through 128 tokens 0.5^128; a reset; exp(-0.128)
    assert not decay_from_start[0, 256:384].any() and decay_from_start[:, 384].all() and decay_from_start[1, 512:].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_inputs_of_any_size(size, dtype):
    (q, k, v, log_g), dy = inputs(LONG, "learned", dtype, H=HEADS)
    assert_right([q, k * size, v * size, log_g], dy)


def test_discumsum_is_its_naive_twin():
    random = lambda f, *shape: f(*shape, device=DEVICE)
    u, g, first = random(torch.randn, 2, 4, 320), random(torch.rand, 2, 4), random(torch.randn, 2, 320)
    for reverse in (False, True):
        expected, last = torch.empty_like(u), first
        for i in reversed(range(4)) if reverse else range(4):
            expected[:, i] = last
            last = g[:, i, None] * last + u[:, i]
        x = u.clone()
        result, _ = discumsum.discumsum(x, g, first, reverse=reverse, final=True)
        torch.testing.assert_close(x, expected)
        torch.testing.assert_close(result, last)


def test_the_operators_keep_torchs_rules():
    tensors, _ = inputs(100, "learned", DTYPES[0])
    leaves = [x.detach().requires_grad_() for x in tensors]
    state = [torch.rand(1, 1, 136, 16, device=DEVICE), torch.rand(1, 1, 136, device=DEVICE)]
    state = [x.requires_grad_() for x in state]
    torch.library.opcheck(torch.ops.sympow.chunked.default, (*leaves, *state, None, 2, 128, True, None))


def test_a_compiled_function_has_no_graph_break():
    tensors, dy = inputs(130, "learned", DTYPES[0])
    compiled = torch.compile(chunks(2), fullgraph=True, backend="inductor" if GPU else "aot_eager")
    for x, r in zip(gradients(compiled, tensors, dy), gradients(chunks(2), tensors, dy)):
        assert torch.equal(x, r)


def test_power_attention_runs_the_chunked_kernels(on_kernels, monkeypatch):
    called = []
    real = operators.chunked_attention
    monkeypatch.setattr(operators, "chunked_attention", lambda *a, **o: called.append(o) or real(*a, **o))
    (q, k, v, log_g), _ = inputs(300, "learned", DTYPES[0])
    y, state = power_attention(q, k, v, log_g, p=2, form="chunked", chunk_size=100, return_state=True)
    assert called == [dict(p=2, chunk=128, final=True)]
    power_attention(q, k, v, log_g, p=2, initial_state=state)
    assert called[1]["chunk"] == 256
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**5)
    monkeypatch.setattr(memory, "SURELY_FREE", 10**5)
    with pytest.raises(MemoryError, match="p=2 at head dimension 16 takes [0-9,]+ bytes for 1 x 300 tokens"):
        power_attention(q, k, v, log_g, p=2, form="chunked")
    monkeypatch.undo()
    doubles = [x.double() for x in (q, k, v, log_g)]
    expected, last = power_attention(*doubles, form="quadratic", return_state=True)
    limit = 1e-5 if DTYPES[0] == torch.float32 else 4e-3
    for x, r in zip((y, *state), (expected, *last)):
        assert relative_error(x, r, 1e-6) < limit


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
            there = cost.quadratic_ns(T, D, gated), cost.chunked_ns(T, C, D, p, gated)
            assert there[0] == pytest.approx(there[1])
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
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(y, tensors, dy)
            used = torch.cuda.max_memory_allocated() - before
        saved = chunked.state_size(D, p) * 2 * 4 * T // 1024
        assert used + saved <= 1.35 * chunked.bytes_needed(q, k, v, p, 1024)
