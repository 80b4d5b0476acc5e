"""The two libraries' interfaces against the specification."""

import pytest
import torch
from helpers import raises_one_line
from numerics import DEVICE, relative_error
from torch.nn.functional import logsigmoid

from sympow.attention import naive
from sympow.attention.compat import power_attention as library
from sympow.attention.compat import retention
from sympow.attention.power import power_attention


def make(*shape, seed=0, function=lambda x: x):
    x = function(torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))))
    return x.to(DEVICE).requires_grad_()


def gates(*shape):
    return make(*shape, function=lambda x: logsigmoid(x + 1))


def make_inputs(T, gated):
    """Return ([Q, K, V, log_G or None], the tensors among them) of two sequences of T tokens, for p = 2."""
    leaves = [make(2, T, 4, 3), make(2, T, 2, 3), make(2, T, 2, 3, seed=1)] + [gates(2, T, 2)] * gated
    return [*leaves, None][:4], leaves


def cut(tensors, rows):
    """Return these tokens of each tensor that is not None."""
    return [None if x is None else x[:, rows] for x in tensors]


def assert_equal(results, expected, leaves, tolerance=1e-9):
    """Compare results, and the gradients of a function of all of them to the leaves."""
    results, expected = list(results), list(expected)
    weights = list(map(torch.randn_like, expected))
    grads = [torch.autograd.grad(xs, leaves, weights, retain_graph=True) for xs in (results, expected)]
    for a, b in zip([*results, *grads[0]], [*expected, *grads[1]], strict=True):
        assert a.shape == b.shape and relative_error(a, b, 1e-9) < tolerance


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
    y, *state_after = retention.power_retention_inference(Q[:, :1], None, None, log_G, S, s)  # log_G cancels
    alone = naive.quadratic(Q[:, :1], 0 * K[:, :1], V[:, :1], p=2, initial_state=(S, s))  # a key of zero has no weight
    assert torch.allclose(y, alone) and state_after[0] is S and state_after[1] is s


@pytest.mark.parametrize("size", [2.0**-30, 2.0**30])
def test_a_state_alone_is_read_by_queries_of_any_size(size):
    q, k, v = torch.randn(3, 1, 5, 2, 3, device=DEVICE)
    _, state = power_attention(q, k, v, p=8, return_state=True)
    y, scaled = (retention.power_retention_inference(x, None, None, None, *state, deg=8)[0] for x in (q, size * q))
    assert torch.equal(y, scaled) and y.any()


@pytest.mark.parametrize(
    "d,deg,features,words",
    [
        (64, 2, 2560, r"must be S \[1, 1, 2080, 64\], z .*, got S \[1, 1, 2560, 64\]"),
        (3, 3, 10, "deg must be a positive even integer, got 3"),
        (3, 2, None, "initial_state must be S and its sum_of_keys, .* denominators are not in S"),
    ],
)
def test_states_that_are_not_whole_are_refused_in_one_line(d, deg, features, words):
    Q, D = torch.zeros(1, 2, 1, d), features or 6
    S, s = torch.zeros(1, 1, D, d), torch.zeros(1, 1, D)
    pair = S if features is None else (S, s)
    for entry in (library.power_full, retention.power_retention, retention.power_retention_inference):
        with raises_one_line(ValueError, words):
            entry(Q, Q, Q, initial_state=pair, deg=deg)


@pytest.mark.parametrize(
    "call,words",
    [
        (lambda x: retention.power_retention_inference(x, x, None), "K and V must both be given, or both be None"),
        (lambda x: retention.power_retention_inference(x, None, None), "K and V must both be given, or both be None"),
        (
            lambda x: retention.power_retention_inference(
                x, None, None, None, torch.ones(1, 3, 10, 4), torch.ones(1, 3, 10)
            ),
            r"hq a multiple of h, do not fit: \[1, 4, 2, 4\], \[1, 3, 10, 4\], \[1, 3, 10\]",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, words):
    with raises_one_line(ValueError, words):
        call(torch.zeros(1, 4, 2, 4))
