"""Softmax in a window: attention against a mask in float64, and models that have it."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from numerics import Largest, gradients
from test_softmax import D, H, HKV, TOLERANCE, assert_naive, naive

from sympow.attention.operator.window import attend_in_window
from sympow.attention.softmax import packed_softmax_attention
from sympow.model import GPT, GPTConfig

E = 6


def inputs(n, T, dtype, resets):
    q, k, v = torch.randn(2, n, H, D), torch.randn(2, T, HKV, D), torch.randn(2, T, HKV, E)
    resets = torch.rand(2, T) < 0.2 if resets else None
    return [x.to(dtype) for x in (q, k, v)], resets


def assert_right(qkv, resets, window, attend=attend_in_window, **options):
    """Compare attend(q, k, v, window, resets) with attention under a mask."""
    assert_naive(lambda *qkv: attend(*qkv, window, resets), qkv, resets, window, **options)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("n,T", [(1, 1), (1, 33), (5, 24), (24, 24), (33, 33), (24, 33)])
def test_outputs_and_gradients_are_those_with_a_mask(n, T, resets):
    for window in (1, 2, 3, 8, 16, 24, 100):
        assert_right(*inputs(n, T, torch.float64, resets), window)


@pytest.mark.parametrize("window", [255, 256, 257, 599, 1200])
def test_windows_longer_than_a_block_of_queries(window):
    assert_right(*inputs(1300, 1350, torch.float64, True), window)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_dtype(dtype):
    assert_right(*inputs(30, 30, dtype, True), 7)


def test_a_compiled_function_computes_the_same_without_a_graph_break():
    compiled = torch.compile(attend_in_window, backend="aot_eager", fullgraph=True)
    assert_right(*inputs(30, 30, torch.float64, True), 7, compiled)


def test_nothing_is_of_size_T_x_T():
    T, window = 4096, 64
    qkv, resets = inputs(T, T, torch.float32, True)
    with Largest() as largest:
        attend_in_window(*(x.requires_grad_() for x in qkv), window, resets).sum().backward()
    assert largest.entries <= 2 * T * H * 2 * window * 2 < T * T


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("n,width,window", [(24, 8, 7), (9, 8, 7), (24, 8, None), (24, 6, None)])
def test_flash_attention_gets_the_window_and_the_documents_of_all_sequences_in_one_call(
    n, width, window, resets, monkeypatch
):
    """With stand-ins for torch's operators, which need a GPU, take rows of a multiple of 8 and count from 0.

    Where the sequences have no documents, torch knows the gradient, so this one is asked for none.
    """
    calls = []

    def attend(q, k, v, ends, scale, window_size_left=None, window_size_right=0):
        assert q.shape[-1] % 8 == 0 and q.stride(-1) == 1 and window_size_right == 0
        if ends is None:
            q = q * scale * q.shape[-1] ** 0.5
            return naive(q, k, v, None, window_size_left + 1)
        starts = torch.zeros(1, len(q), dtype=torch.bool)
        starts[0, ends[:-1].long()] = True
        q = q * scale * q.shape[2] ** 0.5
        return naive(q[None], k[None], v[None], starts, window_size_left and window_size_left + 1)[0]

    def note(ends, ends_k, longest, longest_k):
        assert ends is ends_k and longest == longest_k == int(ends.diff().max()) and ends.dtype == torch.int32
        calls.append(longest)

    def forward(q, k, v, ends, ends_k, longest, longest_k, dropout, causal, debug, **options):
        if ends is None:
            assert (longest, longest_k) == (q.shape[1], k.shape[1])
            calls.append(longest)
        else:
            note(ends, ends_k, longest, longest_k)
        return attend(q, k, v, ends, **options), q.new_zeros(H, len(q), dtype=torch.float32), 0, 0, 0

    def backward(dy, q, k, v, y, lse, ends, ends_k, longest, longest_k, dropout, causal, rng, unused, **options):
        note(ends, ends_k, longest, longest_k)
        with ThreadPoolExecutor(1) as thread:  # autograd does not work inside an operator
            function = partial(attend, ends=ends, **options)
            return thread.submit(gradients, function, (q, k, v), dy).result()[1:]

    for module in ("packed", "window"):
        monkeypatch.setattr(f"sympow.attention.operator.{module}.takes_flash", lambda *_: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward, raising=False)
    (q, k, _), starts = inputs(n, 24, torch.float64, resets or window is None)
    qkv = q[..., :width], k[..., :width], torch.randn(2, 24, HKV, width, dtype=torch.float64)
    if window is None:
        assert_naive(lambda *qkv: packed_softmax_attention(*qkv, starts), qkv, starts)
    else:
        assert_right(qkv, starts, window)
    assert len(calls) == (1 if starts is None else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("n,width", [(1500, 64), (700, 64), (1500, 20)])
@pytest.mark.parametrize("window", [2, 100, 256, 1000, 5000])
def test_on_a_gpu_outputs_and_gradients_are_those_with_a_mask(window, n, width, resets):
    qkv = torch.randn(2, 1500, H + 2 * HKV, width, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.split((H, HKV, HKV), 2)
    qkv = q[:, -n:], k, v
    starts = (torch.rand(2, 1500, device="cuda") < 0.003) if resets else None
    assert_right(qkv, starts, window, tolerance=8e-3, floor=0.0)


# ---- models


def model(**settings):
    torch.manual_seed(0)
    sizes = dict(vocab_size=31, n_layer=2, n_head=H, n_kv_head=HKV, n_embd=32, window=7, gate_bias=2.0)
    net = GPT(GPTConfig(**{**sizes, **settings})).double().eval()
    for p in net.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    return net


@pytest.mark.parametrize("attention", ["softmax", "sympow_gating,softmax"])
@pytest.mark.parametrize("reset_token", [-1, 3])
@torch.inference_mode()
def test_pieces_with_a_state_equal_the_whole_and_the_state_stays_small(attention, reset_token):
    net = model(attention=attention, reset_token=reset_token, convolution=0)  # which sees farther than the window
    ids = torch.randint(31, (3, 60))
    logits, state, read, sizes = net(ids)[0], net.empty_state(3), 0, []
    for n in (1, 5, 1, 1, 14, 1, 1, 16, 20):
        last, state = net.read(ids[:, read : read + n], state)
        read += n
        assert torch.allclose(last, logits[:, read - 1], rtol=1e-8)
        sizes.append(state.layers[-1].bytes())
    assert state.layers[-1].cached_tokens == 7 and len({*sizes[3:]}) == 1
    ids[:, : 60 - 2 * 7 + 1] = 8  # beyond two layers' windows, the last token does not see them
    assert attention != "softmax" or torch.allclose(net(ids)[0][:, -1], logits[:, -1], rtol=1e-8)


@torch.inference_mode()
def test_a_window_as_long_as_the_text_is_no_window():
    """And takes the same kernel: cuDNN's where there is one."""
    ids = torch.randint(31, (2, 20))
    expected = model(window=0)(ids)[0]
    for window in (20, 21, 100):
        assert torch.equal(model(window=window)(ids)[0], expected)
    assert not torch.allclose(model(window=19)(ids)[0], expected)
