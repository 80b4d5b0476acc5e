"""The two libraries' interfaces, against their formulas in loops of float64, and against the specification."""

from functools import partial

import pytest
import torch
from numerics import DEVICE, GPU, relative_error
from torch.nn.functional import logsigmoid

from sympow.attention import naive
from sympow.attention.compat import power_attention as library
from sympow.attention.compat import retention, steps
from sympow.attention.embedding import symmetric_power_embedding


def make(*shape, seed=0, of=lambda x: x):
    x = of(torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))))
    return x.to(DEVICE).requires_grad_()


def gates(*shape):
    return make(*shape, of=lambda x: logsigmoid(x + 1))


def make_inputs(T, gated):
    """Return ([Q, K, V, log_G or None], the tensors among them) of two sequences of T tokens, for p = 2."""
    leaves = [make(2, T, 4, 3), make(2, T, 2, 3), make(2, T, 2, 3, seed=1)] + [gates(2, T, 2)] * gated
    return [*leaves, None][:4], leaves


def cut(tensors, rows):
    """Return these tokens of each tensor that is not None."""
    return [None if x is None else x[:, rows] for x in tensors]


def read_state(Q, S, s, deg):
    """Return the normalized attention of Q [b, n, hq, d] to a state alone."""
    phi = symmetric_power_embedding(Q, deg).unflatten(2, (S.shape[1], -1))
    num, den = torch.einsum("bnhrf,bhfe->bnhre", phi, S), torch.einsum("bnhrf,bhf->bnhr", phi, s)
    return (num / den.unsqueeze(-1)).flatten(2, 3)


def assert_equal(found, expected, leaves, tolerance=1e-9):
    """Compare results, and the gradients of a function of all of them to the leaves."""
    found, expected = list(found), list(expected)
    weights = [make(*x.shape, seed=7) for x in expected]
    grads = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(xs, weights)), leaves, retain_graph=True)
        for xs in (found, expected)
    ]
    for a, b in zip([*found, *grads[0]], [*expected, *grads[1]], strict=True):
        assert a.shape == b.shape and relative_error(a, b, 1e-9) < tolerance


def naive_attention(Q, K, V, log_G, deg, causal, scale):
    """Return the sums over j of w_ij V_j and of w_ij, and the largest log w_ij, row by row."""
    n, T = Q.shape[1], K.shape[1]
    K, V = (x.repeat_interleave(Q.shape[2] // K.shape[2], 2) for x in (K, V))
    rows = []
    for i in range(n):
        at = T - n + i
        keys = slice(at + 1 if causal else T)
        w = (scale * (Q[:, i, None] * K[:, keys]).sum(-1)) ** deg  # [b, keys, hq]
        if log_G is not None:
            w = w * (log_G[:, at, None] - log_G[:, keys]).exp().repeat_interleave(w.shape[2] // log_G.shape[2], 2)
        rows.append(((w.unsqueeze(-1) * V[:, keys]).sum(1), w.sum(1), w.amax(1).log()))
    num, den, largest = (torch.stack(x, 1) for x in zip(*rows))
    return num, den, largest.detach()


@pytest.mark.parametrize("causal,gated,n,deg", [(1, 1, 7, 2), (1, 0, 3, 4), (1, 1, 2, 4), (0, 0, 7, 2), (0, 1, 3, 2)])
@pytest.mark.parametrize("head_first,use_log2", [(False, False), (True, True)])
def test_attention_is_its_formula(causal, gated, n, deg, head_first, use_log2, monkeypatch):
    monkeypatch.setattr(steps, "PAIRS_AT_ONCE", 100)  # several blocks of rows
    Q, K, V = make(2, n, 4, 5), make(2, 7, 2, 5), make(2, 7, 2, 6)
    log_G = gates(2, 7, 2).cumsum(1) if gated else None
    leaves = [Q, K, V] + [log_G] * gated
    num, den, largest = naive_attention(Q, K, V, log_G, deg, causal, 0.7)
    swap = (lambda x: x if x is None else x.transpose(1, 2)) if head_first else lambda x: x
    call = lambda norm: steps.attention(
        *map(swap, (Q, K, V, log_G)), deg, bool(causal), head_first, 0.7, norm, use_log2=use_log2
    )
    o, l, rowmax = map(swap, call(False))
    assert torch.allclose(rowmax * (0.6931471805599453 if use_log2 else 1), largest) and not rowmax.requires_grad
    factor = largest.exp()
    assert_equal([o * factor.unsqueeze(-1), l * factor], [num, den], leaves)
    assert_equal([swap(call(True))], [num / den.unsqueeze(-1)], leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_attention_of_any_size_and_dtype(size, dtype):
    Q, K, V = (size * make(1, 40, 2, 16, seed=i).detach() for i in range(3))
    half = [x.to(dtype) for x in (Q, K, V)]
    o, l, rowmax = steps.attention(*half, None, 4, scale=0.25)
    w = (0.25 * torch.einsum("bihd,bjhd->bhij", *(x.double() for x in half[:2]))).tril() ** 4
    most = w.amax(-1, keepdim=True).clamp_min(1e-28)
    ref = torch.einsum("bhij,bjhd->bihd", w / most, half[2].double())
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    assert relative_error(o, ref, 1e-9) < tolerance and (o.dtype, l.dtype, rowmax.dtype) == (
        dtype,
        *2 * [torch.float32],
    )
    assert relative_error(l.transpose(1, 2), (w / most).sum(-1), 1e-9) < tolerance


@pytest.mark.parametrize("deg,d", [(2, 3), (4, 2)])
def test_the_steps_are_their_formulas(deg, d):
    """A chunked attention made of the steps, as the library makes it, and each of its states."""
    b, n, c, h, r = 2, 3, 4, 2, 2
    Q, K, V, log_g = make(b, n, c, h * r, d), make(b, n, c, h, d), make(b, n, c, h, d, seed=1), gates(b, n, c, h)
    leaves, inside = [Q, K, V, log_g], log_g.cumsum(2)
    to_end = K * ((inside[:, :, -1:] - inside) / deg).exp().unsqueeze(-1)
    S, s = steps.update_state(to_end, V, deg)
    phi = symmetric_power_embedding(to_end, deg)
    assert_equal([S, s], [torch.einsum("bnchf,bnche->bnhfe", phi, V), phi.sum(2)], leaves[1:])
    alone = steps.update_state(to_end[:, 1], V[:, 1], deg)  # without the dimension n
    assert torch.allclose(alone[0], S[:, 1]) and torch.allclose(alone[1], s[:, 1])
    before, before_s = steps.discumsum(S, inside[:, :, -1]), steps.discumsum(s, inside[:, :, -1])
    assert before.shape[1] == n + 1
    flat = [x.flatten(0, 1) for x in (Q, K, V, inside)]
    o, l, rowmax = (x.unflatten(0, (b, n)) for x in steps.attention(*flat, deg, scale=0.6))
    q = Q * (inside / deg).exp().repeat_interleave(r, 3).unsqueeze(-1)
    y = steps.query_state(q, before[:, :-1], before_s[:, :-1], o, l, rowmax, deg, 0.6, zero_initial_state=True)
    assert_equal([y.flatten(1, 2)], [naive.quadratic(*(x.flatten(1, 2) for x in (Q, K, V, log_g)), p=deg)], leaves)
    alone = steps.query_state(q[:, 1], before[:, 1], before_s[:, 1], None, None, None, deg, 0.6)
    assert torch.allclose(alone, read_state(q[:, 1], before[:, 1], before_s[:, 1], deg))


@pytest.mark.parametrize("features", [(), (3,), (2, 5), (1, 2, 3)])
def test_discumsum_is_its_documented_equation(features):
    X, log_G = make(2, 5, 3, *features), gates(2, 5, 3)
    Y = [torch.zeros_like(X[:, 0])]
    for t in range(5):
        g = log_G[:, t].exp().view(2, 3, *[1] * len(features))
        Y.append(X[:, t] + g * Y[-1])
    assert_equal([steps.discumsum(X, log_G)], [torch.stack(Y, 1)], [X, log_G])
    assert torch.allclose(steps.discumsum(X, None)[:, 1:], X.cumsum(1))
    assert steps.discumsum(X.half(), log_G.float()).dtype == torch.float16


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 5, 8])
def test_both_entry_points_are_power_attention_with_states_that_go_round(gated, chunk_size):
    """Of any length, with gates; the state is that after the last token, and gradients go through it."""
    (Q, K, V, log_G), leaves = make_inputs(13, gated)
    expected = [naive.quadratic(Q, K, V, log_G, p=2), *naive.state_after(K, V, log_G, p=2)]
    begin, end = (cut((Q, K, V, log_G), rows) for rows in (slice(6), slice(6, None)))
    options = dict(deg=2, scale=0.3, chunk_size=chunk_size, return_final_state=True)
    first, state = library.power_full(*begin, **options)
    second, state = library.power_full(*end, state, **options)
    in_library = [torch.cat((first, second), 1), *state]
    first, *state = retention.power_retention(*begin, **options)
    second, *state = retention.power_retention(*end, *state, **options)
    for results in (in_library, [torch.cat((first, second), 1), *state]):
        assert_equal(results, expected, leaves)
    for entry in (library.power_full, retention.power_retention):
        assert torch.allclose(entry(Q, K, V, log_G, deg=2), expected[0])


def test_switch_over_leaves_short_sequences_without_a_state():
    Q, K, V = make(1, 6, 2, 3), make(1, 6, 2, 3), make(1, 6, 2, 3)
    call = lambda **options: retention.power_retention(Q, K, V, return_final_state=True, **options)
    assert call(switch_over_seq_len=7)[1:] == (None, None) and call(switch_over_seq_len=6)[1] is not None
    state = call()[1:]
    assert call(initial_state=state, switch_over_seq_len=7)[1] is not None


@pytest.mark.parametrize("gated", [False, True])
def test_inference_reads_cache_and_state(gated):
    """Token by token with a cache that becomes the state at 4 tokens, then several queries, then the state alone."""
    (Q, K, V, log_G), leaves = make_inputs(11, gated)
    S = s = None
    expected, begin, rows = naive.quadratic(Q, K, V, log_G, p=2), 0, []
    for t in range(10):
        cache = cut((K, V, log_G), slice(begin, t + 1))
        y, S_after, s_after = retention.power_retention_inference(Q[:, t : t + 1], *cache, S, s, switch_over_seq_len=4)
        if t + 1 - begin < 4:
            assert S_after is S and s_after is s
        else:
            begin = t + 1
        S, s = S_after, s_after
        rows.append(y)
    assert begin == 8
    cache = cut((K, V, log_G), slice(8, None))
    y, S_after, s_after = retention.power_retention_inference(
        Q[:, 9:], *cache, S, s, scale=0.2, switch_over_seq_len=None
    )
    assert S_after is S and s_after is s and torch.allclose(y, expected[:, 9:])
    _, *state = retention.power_retention_inference(Q[:, 9:], *cache, S, s, switch_over_seq_len=3)
    results = [torch.cat((*rows, y[:, 1:]), 1), *state]
    assert_equal(results, [expected, *naive.state_after(K, V, log_G, p=2)], leaves)
    y, *same = retention.power_retention_inference(Q[:, :1], None, None, log_G, S, s)  # log_G cancels
    assert torch.allclose(y, read_state(Q[:, :1], S, s, 2)) and same[0] is S and same[1] is s


INFERENCE = retention.create_inference_inputs, retention.power_retention_inference
FULL = library.create_inputs, library.power_full
RETENTION = retention.create_inputs, retention.power_retention


@pytest.mark.parametrize(
    "names,options",
    [
        (FULL, dict(t=40)),
        (FULL, dict(t=40, gating=True, qhead_ratio=2, requires_grad=True, chunk_size=16, deg=4)),
        (RETENTION, dict(t=40, qhead_ratio=2)),
        (RETENTION, dict(t=40, gating=True, initial_state=True, requires_grad=True, return_final_state=True)),
        (RETENTION, dict(t=40, return_final_state=True, switch_over_seq_len=41)),
        (INFERENCE, dict(tk=40, gating=True)),
        (INFERENCE, dict(tk=40, tq=3, gating=True, initial_state=True, requires_grad=True, switch_over_seq_len=40)),
        (INFERENCE, dict(tk=0, initial_state=True, qhead_ratio=3)),
    ],
)
def test_inputs_feed_their_own_entry_point(names, options):
    create, entry = names
    options = dict(b=1, h=2, d=16 if GPU else 8) | options
    made, again = create(**options), create(**options)
    tensors = {name: x for name, x in made.items() if isinstance(x, torch.Tensor)}
    assert all(torch.equal(x, again[name]) and x.device.type == DEVICE for name, x in tensors.items())
    assert made["Q"].dtype == (torch.float16 if create is library.create_inputs else torch.bfloat16)
    out = entry(**made)
    out = out if isinstance(out, tuple) else (out,)
    assert out[0].dtype == made["Q"].dtype and out[0].isfinite().all()
    if options.get("requires_grad"):
        loss = sum(x.float().sum() for x in out)
        assert all(x.isfinite().all() and x.any() for x in torch.autograd.grad(loss, [*tensors.values()]))


def test_the_library_s_defaults():
    made = library.create_inputs(t=2, h=1)
    assert (made["deg"], made["scale"], made["Q"].shape[-1], made["log_G"]) == (2, 1.0, 32, None)
    assert retention.create_inputs(t=2, h=1)["switch_over_seq_len"] is None
    assert retention.create_inference_inputs(tk=2, h=1)["switch_over_seq_len"] == 512
    x = torch.randn(2, 2, 1, 32, generator=torch.Generator(DEVICE).manual_seed(42), dtype=torch.float16, device=DEVICE)
    assert torch.equal(made["Q"], x / 32**0.5)  # the library's numbers on the same device


def assert_refused(call, words):
    """Assert that a call is refused in one line with these words."""
    with pytest.raises(ValueError, match=words) as refusal:
        call()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "d,deg,features,words",
    [
        (64, 2, 2560, "must have 2080 features for head dimension 64 and deg=2, got 2560: .* padded"),
        (3, 3, 10, "deg must be a positive even integer, got 3"),
        (3, 2, None, "initial_state must be S and its sum_of_keys, .* denominators are not in S"),
    ],
)
def test_states_that_are_not_whole_are_refused_in_one_line(d, deg, features, words):
    Q, D = torch.zeros(1, 2, 1, d), features or 6
    S, s = torch.zeros(1, 1, D, d), torch.zeros(1, 1, D)
    pair = S if features is None else (S, s)
    for entry in (library.power_full, retention.power_retention, retention.power_retention_inference):
        call = partial(entry, Q, Q, Q, initial_state=pair, deg=deg)
        assert_refused(call, words)


@pytest.mark.parametrize(
    "call,words",
    [
        (lambda x: steps.attention(x, x, x, None, 3), "deg must be a positive even integer, got 3"),
        (
            lambda x: steps.attention(x, *2 * [x[:, :, :1].expand(1, 4, 3, 4)], None, 2),
            "multiple of the key/value heads, got 2 and 3",
        ),
        (
            lambda x: steps.attention(x, x, x, x[..., 0, :1], 2),
            r"log_G must be \[b, t, h\] = \[1, 4, 2\], got \[1, 4, 1\]",
        ),
        (lambda x: steps.attention(x, x[:, :2], x[:, :2], None, 2), "the last n of T tokens, got n=4 above T=2"),
        (lambda x: steps.attention(x, x, x[:, :2], None, 2, causal=False), r"do not fit: .*\[1, 2, 2, 4\]"),
        (
            lambda x: steps.attention(x, x[:, :2], x[:, :2], x[..., :2, :, 0], 2, causal=False),
            "the last n of T tokens, got n=4 above T=2",
        ),
        (
            lambda x: steps.query_state(x, x.new_zeros(1, 3, 10, 4), x.new_zeros(1, 3, 10), None, None, None, 2, 1.0),
            r"hq a multiple of h, do not fit: \[1, 1, 4, 2, 4\], \[1, 1, 3, 10, 4\], \[1, 1, 3, 10\]",
        ),
        (
            lambda x: steps.query_state(x, x.new_zeros(1, 2, 10, 4), x.new_zeros(1, 2, 10), x, None, None, 2, 1.0),
            r"must be None or \[1, 1, 4, 2, 4\], \[1, 1, 4, 2\] twice, got \[\[1, 1, 4, 2, 4\], None, None\]",
        ),
        (lambda x: steps.update_state(x[None], x[None][..., :2, :, :], 2), r"K, V must be \[b, n, c, h, d\], got"),
        (lambda x: steps.discumsum(x, x[..., :1, 0]), r"log_G \[b, n, h\], got \[1, 4, 2, 4\], \[1, 4, 1\]"),
        (lambda x: retention.power_retention_inference(x, x, None), "K and V must both be given, or both be None"),
        (lambda x: retention.power_retention_inference(x, None, None), "K and V must both be given, or both be None"),
        (lambda x: retention.create_inference_inputs(tk=0), "tk must be positive, or initial_state True"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, words):
    assert_refused(lambda: call(torch.zeros(1, 4, 2, 4)), words)
